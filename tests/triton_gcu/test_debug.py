"""Prints, assertions, the sanitizer, bad pointers, and programs that wait for each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from device_arrays import DeviceArray, normal, zeros  # noqa: E402

from terrazzo.errors import KernelAssertion, KernelFault, KernelStuck  # noqa: E402
from terrazzo.knobs import knobs  # noqa: E402
from terrazzo.triton_gcu.driver import stream_cycles  # noqa: E402

pytestmark = pytest.mark.triton
HERE = Path(__file__)


@triton.jit
def _printing(x, N: tl.constexpr):
    tl.device_print("x", tl.load(x + tl.program_id(0) * N + tl.arange(0, N)))


def test_prints_come_after_the_launch(capfd: pytest.CaptureFixture[str]) -> None:
    _printing[(57,)](DeviceArray(np.arange(114, dtype=np.int32)), N=2)
    lines = capfd.readouterr().out.splitlines()
    assert lines == [f"pid ({n // 2}, 0, 0) idx ({n % 2}) x: {n}" for n in range(114)]


@triton.jit
def _asserting(x, out, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    values = tl.load(x + i)
    tl.device_assert(values < 100, "too large")
    tl.store(out + i, values)


def test_assertions_name_program_and_line() -> None:
    values = np.arange(57 * 4, dtype=np.int32) % 100
    values[50 * 4 + 3] = 100
    out = zeros(57 * 4, dtype=np.int32)
    with pytest.raises(KernelAssertion,
                       match=r"test_debug.py:\d+.*program \(50, 0, 0\).*too large"):
        _asserting[(57,)](DeviceArray(values), out, N=4, debug=True)
    assert np.array_equal(out.numpy()[:200], values[:200])
    _asserting[(57,)](DeviceArray(values % 100), out, N=4, debug=True)
    assert np.array_equal(out.numpy(), values % 100)


@triton.jit
def _gather(x, at, out, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + i, tl.load(x + tl.load(at + i)))


class Sized(DeviceArray):
    """One that tells how large it is, as tensors of torch do."""

    def untyped_storage(self) -> Sized:
        return self

    def nbytes(self) -> int:
        return self.values.nbytes


def test_the_sanitizer_finds_what_lies_outside() -> None:
    x, out = Sized(np.arange(64, dtype=np.float32)), Sized(np.zeros(64, np.float32))
    at = np.arange(64)
    at[37] = 64
    with knobs.override(sanitize=True):
        with pytest.raises(KernelFault, match=(
                r"test_debug.py:\d+: out-of-bounds load in `_gather`, program \(4, 0, 0\), lane 5: "
                r"reads `x`\[64\]")):
            _gather[(8,)](x, Sized(at), out, N=8)
        _gather[(8,)](x, Sized(np.arange(64)), out, N=8)  # nothing has stayed behind
    assert np.array_equal(out.numpy(), x.values)


BAD_POINTER = """
import sys
sys.path.insert(0, sys.argv[1])
from terrazzo.triton_gcu.activate import activate
activate()
import numpy as np
from test_debug import Sized, _gather
from terrazzo.triton_gcu.driver import DeviceInterface
at = np.arange(64); at[37] = 1 << 40; at = Sized(at)
x, out = Sized(np.arange(64, dtype=np.float32)), Sized(np.zeros(64, np.float32))
for _ in range(2):
    try:
        _gather[(8,)](x, at, out, N=8)
        DeviceInterface.synchronize()
    except RuntimeError as error:
        print(type(error).__name__, str(error).replace("\\n", " "))
"""


@pytest.mark.parametrize("blocking", ["0", "1"])
def test_bad_pointers_are_errors(blocking: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BAD_POINTER, str(HERE.parent)], capture_output=True, text=True,
        timeout=300, env={**os.environ, "TZ_LAUNCH_BLOCKING": blocking,
                          "TRITON_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    if blocking == "1":  # with its line
        assert first.startswith("KernelFault")
        assert "test_debug.py:" in first and "program (4, 0, 0), lane 5" in first
    else:
        assert "_gather" in first and "memory that is not there" in first
        assert second.startswith("KernelFault") and "TZ_SANITIZE=1" in second


# ---------------------------------------------------------------- programs that wait
@triton.jit
def _with_lock(lock, data, N: tl.constexpr):
    i = tl.arange(0, N)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(data + i, tl.load(data + i) + 1)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


@pytest.mark.parametrize("programs", [2, 48, 57, 200])
def test_a_lock_that_programs_wait_for(programs: int) -> None:
    lock, data, cycles = zeros(1, dtype=np.int32), zeros(64), set()
    for turn in range(1, 4):
        begin = stream_cycles()
        _with_lock[(programs,)](lock, data, N=64)
        cycles.add(stream_cycles() - begin)
        assert (data.numpy() == turn * programs).all()
    assert len(cycles) == 1  # however long the host let them wait


@triton.jit
def _together(arrived, out):
    tl.atomic_add(arrived, 1)
    while tl.atomic_add(arrived, 0) < tl.num_programs(0):
        pass
    tl.store(out + tl.program_id(0), 1)


def test_programs_that_wait_for_all_others() -> None:
    out = zeros(48, dtype=np.int32)
    _together[(48,)](zeros(1, dtype=np.int32), out)
    assert out.numpy().all()


@triton.jit
def _waiting_for_nobody(flag, out):
    while tl.atomic_add(flag, 0) == 0:
        pass
    tl.store(out, 1)


def test_waiting_ends() -> None:
    with knobs.override(wait_limit=0.5), pytest.raises(KernelStuck, match=r"test_debug.py:\d+"):
        _waiting_for_nobody[(2,)](zeros(1, dtype=np.int32), zeros(1, dtype=np.int32))
    out = normal(4)
    _printing[(1,)](out, N=4)  # the stream goes on
