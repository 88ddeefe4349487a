"""The plug-in: grids, arguments, hooks, autotuning, benchmarks, cache, errors, GPU hosts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terrazzo

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


class Array:
    """Anything that says where its data lies and of what type it is."""

    def __init__(self, data: np.ndarray):
        self.data, self.dtype = data, data.dtype

    def data_ptr(self) -> int:
        return int(self.data.ctypes.data)


def test_anything_with_an_address() -> None:
    x, out = np.arange(50, dtype=np.float32), np.zeros(50, np.float32)
    add[(1,)](Array(x), Array(x), Array(out), 50, BLOCK=64)
    assert (out == 2 * x).all()


WITHOUT_TORCH = '''
import sys
class WithoutTorch:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, WithoutTorch())
import triton, triton.language as tl
'''
SCALING = WITHOUT_TORCH + '''
import numpy as np
from triton.tools.tensor_descriptor import TensorDescriptor
from terrazzo.triton_cpu.activate import activate

class Array:
    def __init__(self, data):
        self.data, self.dtype = data, data.dtype
    def data_ptr(self):
        return self.data.ctypes.data

@triton.jit
def scale(x_ptr, desc, n, factor, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    desc.store([0], x * factor + tl.sum(x))

activate()
x, out = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
scale[(1,)](Array(x), TensorDescriptor(Array(out), [64], [1], [64]), 64, 0.5, BLOCK=64)
assert (out == 0.5 * x + x.sum()).all()
assert "torch" not in sys.modules
print("fine")
'''


def run_script(text: str, folder: Path) -> str:
    """What a script prints, in a process of its own with a Triton cache in a folder."""
    script = folder / "script.py"
    script.write_text(text)
    source = str(Path(terrazzo.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": source, "TRITON_CACHE_DIR": str(folder / "cache"),
           "TRITON_DEFAULT_BACKEND": "cpu"}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True,
                          timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_torch(tmp_path: Path) -> None:
    assert run_script(SCALING, tmp_path) == "fine\n"


COUNTING = WITHOUT_TORCH + '''
import ctypes
from triton.backends import Backend, backends
from terrazzo.triton_cpu.compiler import CPUBackend
from terrazzo.triton_cpu.driver import CPUDriver

class Array:
    dtype = "float32"
    def __init__(self, n):
        self.data = (ctypes.c_float * n)(*range(n))
    def data_ptr(self):
        return ctypes.addressof(self.data)

ran = []
class Counting(CPUBackend):
    def add_stages(self, stages, *rest):
        super().add_stages(stages, *rest)
        for name, stage in list(stages.items()):
            stages[name] = lambda *args, name=name, stage=stage: ran.append(name) or stage(*args)

@triton.jit
def double(x_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.load(x_ptr + i) * 2)

backends["cpu"] = Backend(Counting, CPUDriver)
x = Array(16)
double[(1,)](x, BLOCK=16)
assert list(x.data) == [2 * i for i in range(16)]
print(*ran)
'''


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    assert run_script(COUNTING, tmp_path) == "ttir loop llir o\n"
    assert run_script(COUNTING, tmp_path) == "\n"


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


def test_a_small_kernel_compiles_quickly() -> None:
    x = torch.ones(16)
    taken: dict[int, float] = {}
    for block in (32, 128, 256, 512, 1024, 16384):
        start = time.thread_time()
        add[(1,)](x, x, x, 16, BLOCK=block)
        taken[block] = time.thread_time() - start
    assert min(taken.values()) < 0.12
    assert taken[16384] < 2 * max(taken[1024], 0.04)


def test_levels_can_be_read() -> None:
    x = torch.ones(16)
    kernel = add[(1,)](x, x, x, 16, BLOCK=16)
    assert "kernel add(" in kernel.asm["loop"]
    assert "vector for" in kernel.asm["loop"]
    assert "define" in kernel.asm["llir"] and "tt.func" in kernel.asm["ttir"]


@triton.jit
def with_assembly(x_ptr):
    x = tl.load(x_ptr)
    y = tl.inline_asm_elementwise("shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [x],
                                  dtype=tl.int32, is_pure=True, pack=1)
    tl.store(x_ptr, y)


def test_what_cannot_run_names_the_operation_and_the_line() -> None:
    with pytest.raises(UnsupportedOperator, match=r"(?s)shfl.sync.*test_launch.py:"):
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


class GPUDriver:
    """What Triton sees of a GPU that is there and in use."""

    @classmethod
    def is_active(cls) -> bool:
        return True


@pytest.mark.parametrize("chosen", [None, "nvidia", "cpu"])
def test_triton_chooses_the_gpu_unless_told_otherwise(
        monkeypatch: pytest.MonkeyPatch, chosen: str | None) -> None:
    from terrazzo.triton_cpu.compiler import CPUBackend
    from terrazzo.triton_cpu.driver import CPUDriver

    if chosen == "cpu" and triton.__version__.startswith("3.6"):
        pytest.skip("Triton reads TRITON_DEFAULT_BACKEND since 3.7")
    there: Any = {"nvidia": triton.backends.Backend(CPUBackend, GPUDriver),
                  "cpu": triton.backends.Backend(CPUBackend, CPUDriver)}
    module: Any = sys.modules["triton.runtime.driver"]
    monkeypatch.setattr(module, "backends", there)
    fake = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: True))
    monkeypatch.setitem(sys.modules, "torch", fake)
    if chosen is None:
        monkeypatch.delenv("TRITON_DEFAULT_BACKEND", raising=False)
    else:
        monkeypatch.setenv("TRITON_DEFAULT_BACKEND", chosen)
    expected = CPUDriver if chosen == "cpu" else GPUDriver
    assert type(module._create_driver()) is expected


@triton.jit
def _divide(out, a, b, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out, a // b)
    tl.store(out + 1, a % b)
    tl.store(out + 2 + i, (i + a) // b)


def test_numbers_may_be_negative():
    """Division is C's: towards zero."""
    out = torch.zeros(10, dtype=torch.int32)
    _divide[(1,)](out, -9, 5, BLOCK=8)
    assert out.tolist() == [-1, -4, *(int((i - 9) / 5) for i in range(8))]


def test_the_backend_can_be_imported_first():
    program = "import terrazzo.triton_cpu.compiler as c; assert c.CPUBackend"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
