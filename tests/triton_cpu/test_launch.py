"""The plug-in: grids, arguments, hooks, autotuning, benchmarks, cache, errors, GPU hosts."""

from __future__ import annotations

import time
import types

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from terrazzo.errors import UnsupportedOperator  # noqa: E402

pytestmark = [pytest.mark.triton, pytest.mark.torch]


@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    y = tl.load(y_ptr + i, mask=i < n)
    tl.store(out_ptr + i, x + y, mask=i < n)


@pytest.mark.parametrize("n", [0, 1, 15, 16, 1024, 10007])
def test_vector_add(n: int) -> None:
    x, y = torch.randn(n), torch.randn(n)
    out = torch.full((n + 8,), 7.0)
    add[(triton.cdiv(n, 128),)](x, y, out, n, BLOCK=128)
    assert torch.equal(out, torch.cat([x + y, torch.full((8,), 7.0)]))


@triton.jit
def coordinates(out_ptr):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    nx, ny, nz = tl.num_programs(0), tl.num_programs(1), tl.num_programs(2)
    tl.store(out_ptr + (z * ny + y) * nx + x, x + 100 * y + 10000 * z + 1000000 * nz)


def test_grids_of_three_dimensions() -> None:
    out = torch.empty(4, 3, 5, dtype=torch.int32)
    coordinates[(5, 3, 4)](out)
    z, y, x = torch.meshgrid(torch.arange(4), torch.arange(3), torch.arange(5), indexing="ij")
    assert torch.equal(out, (x + 100 * y + 10000 * z + 4000000).int())


@triton.jit
def scalars(out_ptr, a, b, c, flag, nothing, one, K: tl.constexpr):
    value = a + b + one + K
    if flag:
        value += 1000
    if nothing is not None:
        value += 1e6
    tl.store(out_ptr, value)
    tl.store(out_ptr + 1, c)


@pytest.mark.parametrize("flag", [True, False])
def test_arguments_that_are_numbers(flag: bool) -> None:
    out = torch.empty(2, dtype=torch.float64)
    scalars[(1,)](out, 0.5, -3, 2**40, flag, None, 1, K=7)
    assert out.tolist() == [0.5 - 3 + 1 + 7 + 1000 * flag, 2.0**40]


def test_options_of_gpus_are_accepted() -> None:
    x = torch.ones(64)
    add[(1,)](x, x, x, 64, BLOCK=64, num_warps=8, num_stages=5)
    assert torch.equal(x, torch.full((64,), 2.0))


def test_without_torch() -> None:
    import numpy as np

    class Array:
        """Anything that says where its data lies."""

        def __init__(self, data: np.ndarray):
            self.data, self.dtype = data, torch.float32

        def data_ptr(self) -> int:
            return int(self.data.ctypes.data)

    x, out = np.arange(50, dtype=np.float32), np.zeros(50, np.float32)
    add[(1,)](Array(x), Array(x), Array(out), 50, BLOCK=64)
    assert (out == 2 * x).all()


def test_hooks() -> None:
    seen: list[str] = []
    enter, leave = (lambda *_: seen.append("enter")), (lambda *_: seen.append("leave"))
    chains = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    x = torch.ones(16)
    chains[0].add(enter)
    chains[1].add(leave)
    try:
        add[(1,)](x, x, x, 16, BLOCK=16)
    finally:
        chains[0].remove(enter)
        chains[1].remove(leave)
    assert seen == ["enter", "leave"]


def test_autotune_and_do_bench() -> None:
    tuned = triton.autotune(
        configs=[triton.Config({"BLOCK": b}, num_warps=4) for b in (64, 256)], key=["n"])(add)
    x = torch.randn(1000)
    out = torch.empty(1000)
    tuned[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](x, x, out, 1000)
    assert torch.equal(out, x + x)
    assert tuned.best_config.kwargs["BLOCK"] in (64, 256)
    assert triton.testing.do_bench(lambda: add[(4,)](x, x, out, 1000, BLOCK=256), rep=5) > 0


def test_a_launch_is_cheap() -> None:
    x = torch.ones(16)
    run = add[(1,)]
    run(x, x, x, 16, BLOCK=16)
    best = 1e9
    for _ in range(2000):
        start = time.perf_counter()
        run(x, x, x, 16, BLOCK=16)
        best = min(best, time.perf_counter() - start)
    assert best < 40e-6  # four times the budget, for busy machines


def test_levels_can_be_read() -> None:
    x = torch.ones(16)
    kernel = add[(1,)](x, x, x, 16, BLOCK=16)
    assert "kernel add(" in kernel.asm["loop"]
    assert "vector for" in kernel.asm["loop"]
    assert "define" in kernel.asm["llir"] and "tt.func" in kernel.asm["ttir"]


@triton.jit
def with_assembly(x_ptr):
    x = tl.load(x_ptr)
    y = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True,
                                  pack=1)
    tl.store(x_ptr, y)


def test_what_cannot_run_names_the_operation_and_the_line() -> None:
    with pytest.raises(UnsupportedOperator, match=r"(?s)elementwise_inline_asm.*test_launch.py:"):
        with_assembly[(1,)](torch.zeros(1, dtype=torch.int32))


def test_a_machine_with_a_gpu_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from terrazzo.triton_cpu import driver

    monkeypatch.delenv("TRITON_DEFAULT_BACKEND", raising=False)
    for there in (True, False):
        fake = types.SimpleNamespace(
            cuda=types.SimpleNamespace(is_available=lambda there=there: there))
        monkeypatch.setitem(driver.sys.modules, "torch", fake)
        assert driver.CPUDriver.is_active() is not there
    monkeypatch.setenv("TRITON_DEFAULT_BACKEND", "cpu")
    assert driver.CPUDriver.is_active()
    monkeypatch.setenv("TRITON_DEFAULT_BACKEND", "nvidia")
    assert not driver.CPUDriver.is_active()
