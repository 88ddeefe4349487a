"""Kernels of Triton, counted: the same as counting by doing, cheap, and the same results."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from terrazzo.chips.cpu import pool
from terrazzo.chips.cpu.description import host
from terrazzo.chips.cpu.llvm.kernel import compile_function
from terrazzo.chips.gcu import description
from terrazzo.chips.gcu.counting import counted
from terrazzo.index import Var
from terrazzo.loop.ir import Function

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = triton.language

sys.path.insert(0, str(Path(__file__).parent))
from brute_force import Machine, row  # noqa: E402

GCU = description.read(description.BUILT_IN)


@triton.jit
def softmax(x, y, n, B: tl.constexpr):  # type: ignore[no-untyped-def]
    at, o = tl.program_id(0) * n, tl.arange(0, B)
    v = tl.load(x + at + o, mask=o < n, other=-float("inf"))
    e = tl.exp(v - tl.max(v, 0))
    tl.store(y + at + o, e / tl.sum(e, 0), mask=o < n)


@triton.jit
def matmul(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr,  # type: ignore[no-untyped-def]
           BK: tl.constexpr):
    across = tl.cdiv(N, BN)
    om = tl.program_id(0) // across * BM + tl.arange(0, BM)
    on = tl.program_id(0) % across * BN + tl.arange(0, BN)
    ok = tl.arange(0, BK)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BK)):
        left = tl.load(a + om[:, None] * K + (k * BK + ok)[None, :],
                       mask=(om[:, None] < M) & (k * BK + ok < K)[None, :], other=0.0)
        right = tl.load(b + (k * BK + ok)[:, None] * N + on[None, :],
                        mask=(k * BK + ok < K)[:, None] & (on[None, :] < N), other=0.0)
        total = tl.dot(left, right, total)
    tl.store(c + om[:, None] * N + on[None, :], total,
             mask=(om[:, None] < M) & (on[None, :] < N))


@triton.jit
def rows_of(x, rows, y, n, B: tl.constexpr):  # type: ignore[no-untyped-def]
    o = tl.arange(0, B)
    at = tl.load(rows + tl.program_id(0))
    tl.store(y + tl.program_id(0) * n + o, tl.load(x + at * n + o, mask=o < n), mask=o < n)


@triton.jit
def add(x, y, z, n, B: tl.constexpr):  # type: ignore[no-untyped-def]
    o = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(z + o, tl.load(x + o, mask=o < n) + tl.load(y + o, mask=o < n), mask=o < n)


@triton.jit
def until(x, y, n, B: tl.constexpr):  # type: ignore[no-untyped-def]
    o = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + o)
    turns = 0
    while tl.max(v, 0) > 0.1:
        v = v * 0.5
        turns += 1
    tl.store(y + o, v + turns)


@dataclass
class Case:
    """A kernel as Loop IR, with what it is called with."""

    function: Function
    arrays: list[np.ndarray]
    dims: dict[Var, int]
    programs: int

    def run(self, function: Function, *more: np.ndarray) -> list[np.ndarray]:
        kernel = compile_function(function, host(), dict(pool.symbols()))
        given = [a.copy() for a in self.arrays]
        kernel([a.ctypes.data for a in (*given, *more)], list(self.dims.values()))
        return given


@pytest.fixture(scope="module", autouse=True)
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from triton.runtime import driver

    from terrazzo.triton_cpu.activate import activate

    activate()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.cache, "dir", str(tmp_path_factory.mktemp("triton")))
        yield
    driver.reset_active()


def case(chip: str, kernel: Any, programs: int, *args: Any, **constants: Any) -> Case:
    from terrazzo.triton_cpu import cpu_stages
    from terrazzo.triton_gcu import gcu_stages

    found: list[Any] = []
    make = cpu_stages.make_loops

    def keep(module: Any, metadata: dict[str, Any]) -> Any:
        found.append(make(module, metadata) if chip == "cpu"
                     else gcu_stages.make_loops(module, metadata, GCU))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_stages, "make_loops", keep)
        patch.setattr(triton.knobs.compilation, "always_compile", True)
        kernel.device_caches.clear()
        kernel[(programs,)](*args, **constants)
    function = found[-1].lowered.function
    given = dict(zip(kernel.arg_names, args))
    dims = {d: (programs if d.name == "programs_x" else 1) if d.name.startswith("programs_")
            else int(given[d.name]) for d in function.dims}
    arrays = [given[p.name].numpy().reshape(-1).copy() for p in function.params]
    return Case(function, arrays, dims, programs)


def cases(chip: str) -> dict[str, Any]:
    torch.manual_seed(0)
    f = torch.rand
    given: dict[str, Any] = {
        "softmax": lambda: (softmax, 7, f(7, 300), torch.empty(7, 300), 300, {"B": 512}),
        "matmul": lambda: (matmul, 4, f(32, 48), f(48, 64), torch.empty(32, 64), 32, 64, 48,
                           {"BM": 16, "BN": 32, "BK": 16}),
        "ragged matmul": lambda: (matmul, 6, f(30, 41), f(41, 70), torch.empty(30, 70), 30, 70,
                                  41, {"BM": 16, "BN": 32, "BK": 16}),
        "rows": lambda: (rows_of, 5, f(20, 30), torch.tensor([3, 9, 1, 1, 7]),
                         torch.empty(5, 30), 30, {"B": 32}),
        "add": lambda: (add, 4, f(1000), f(1000), torch.empty(1000), 1000, {"B": 256}),
        "until": lambda: (until, 3, f(192) * torch.arange(192), torch.empty(192), 192, {"B": 64}),
    }
    return {name: lambda make=make: case(chip, *(a := make())[:-1], **a[-1])
            for name, make in given.items()}


@pytest.mark.parametrize("chip", ["gcu", "cpu"])  # which loops are cut for
@pytest.mark.parametrize("name", ["softmax", "matmul", "ragged matmul", "rows", "add", "until"])
def test_counts_are_those_of_counting_by_doing(name: str, chip: str) -> None:
    made = cases(chip)[name]()
    table = np.zeros((made.programs, 8), np.int64)
    after = made.run(counted(made.function, GCU), table)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(after, made.run(made.function)))
    machine = Machine(made.function, GCU, [a.copy() for a in made.arrays], made.dims)
    assert len(machine.tasks) == made.programs
    for task, counters in zip(machine.tasks, table):
        assert row(counters) == task.row()
