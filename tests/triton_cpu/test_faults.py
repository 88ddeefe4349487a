"""Bad pointers: Python survives them, the pool's threads too, and other faults end as ever."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import terrazzo.errors

pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64",
                                reason="faults are caught on Linux on x86 alone")

SOURCE = os.pathsep.join((str(Path(terrazzo.errors.__file__).parents[1]),
                          os.environ.get("PYTHONPATH", "")))
KERNELS = '''
import ctypes, faulthandler, os, sys, threading
import torch, triton, triton.language as tl
from terrazzo.errors import KernelFault
from terrazzo.knobs import knobs
from terrazzo.triton_cpu.activate import activate

activate()

@triton.jit
def gather(x, at, out, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + i, tl.load(x + tl.load(at + i)))

@triton.jit
def far_away(x, distance, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x + distance + i, i)

def fails(launch):
    try:
        launch()
    except KernelFault as error:
        return str(error)
    raise SystemExit("no fault")

x, at, out = torch.arange(64.0), torch.zeros(64 * 64, dtype=torch.int64), torch.zeros(64 * 64)
bad = at.clone()
bad[64 * 40 + 3] = 1 << 45
'''


def run(program: str, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "program.py"
    path.write_text(KERNELS + program)
    return subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": SOURCE, "TRITON_CACHE_DIR": str(tmp_path / "cache"),
             "TRITON_DEFAULT_BACKEND": "cpu", **environment})


@pytest.mark.parametrize("threads", ["1", "3"])
def test_python_survives(tmp_path: Path, threads: str) -> None:
    done = run("""
for _ in range(30):  # the threads of the pool are as good as before
    text = fails(lambda: gather[(64,)](x, bad, out, 64))
    gather[(64,)](x, at, out, 64)
    assert torch.equal(out, x[at])
print(text)
""", tmp_path, TZ_THREADS=threads)
    assert done.returncode == 0, done.stderr
    line = KERNELS.splitlines().index("    tl.store(out + i, tl.load(x + tl.load(at + i)))") + 1
    assert f"program.py:{line}: out-of-bounds load in `gather`, program (40, 0, 0), lane 3" in (
        done.stdout)


def test_without_the_sanitizer_programs_are_named(tmp_path: Path) -> None:
    done = run("""
from terrazzo.triton_cpu.launch import launcher as launch
launch.SHORT = 0.0
print(fails(lambda: gather[(64,)](x, bad, out, 64)))
print(fails(lambda: far_away[(1,)](out, 1 << 40, 64)))
""", tmp_path, TZ_THREADS="2")
    assert done.returncode == 0, done.stderr
    first, _, second, *_ = done.stdout.splitlines()
    # An address of more than 47 bits: the processor does not say which.
    assert "`gather` touched an address where there is no memory (SIGSEGV)" in first
    programs = re.search(r"one of programs \((\d+), 0, 0\) to \((\d+), 0, 0\)", first)
    assert programs is not None and int(programs[1]) <= 40 <= int(programs[2]) < 63
    assert re.search(r"`far_away` touched the address 0x[0-9a-f]{6,}, where", second)
    assert "in program (0, 0, 0)" in second


def test_faults_of_threads_at_once(tmp_path: Path) -> None:
    done = run("""
from terrazzo.triton_cpu.launch import launcher as launch
launch.SHORT = 0.0
found = []
gather[(64,)](x, at, out, 64); far_away[(1,)](out, 0, 64)

def one(n):
    for _ in range(20):
        if n % 2:
            found.append("gather" in fails(lambda: gather[(64,)](x, bad, out, 64)))
        else:
            found.append("far_away" in fails(lambda: far_away[(1,)](out, 1 << 44, 64)))

threads = [threading.Thread(target=one, args=(n,)) for n in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
assert len(found) == 80 and all(found)
""", tmp_path, TZ_THREADS="2")
    assert done.returncode == 0, done.stderr


def test_faults_of_others_are_not_ours(tmp_path: Path) -> None:
    """They reach faulthandler, or end the process."""
    program = """
if len(sys.argv) < 2:
    faulthandler.enable()
fails(lambda: gather[(64,)](x, bad, out, 64))
print("caught", flush=True)
ctypes.string_at(1)
"""
    done = run(program, tmp_path)
    assert done.returncode == -11 and done.stdout == "caught\n"
    assert "Fatal Python error: Segmentation fault" in done.stderr
    done = run(program.replace("if len(sys.argv) < 2:\n    faulthandler.enable()\n", ""), tmp_path)
    assert done.returncode == -11 and done.stdout == "caught\n" and not done.stderr


def test_they_can_be_left_alone(tmp_path: Path) -> None:
    done = run("gather[(64,)](x, bad, out, 64)", tmp_path, TZ_CATCH_FAULTS="0")
    assert done.returncode == -11
