"""How the backend is chosen, and what processes and backends share."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

triton = pytest.importorskip("triton")

from device_arrays import normal, zeros  # noqa: E402
from kernels import add  # noqa: E402

from terrazzo.triton_gcu.driver import GCUDriver  # noqa: E402

pytestmark = pytest.mark.triton
HERE = Path(__file__).parent
NAMES = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())[
    "project"]["entry-points"]["triton.backends"]

PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import triton
from device_arrays import normal, zeros
from kernels import add
x, out = normal(1000), zeros(1000)
kernel = add[(57,)](x, x, out, 1000, BLOCK=32)
assert (out.numpy() == 2 * x.values).all()
target = triton.runtime.driver.active.get_current_target()
print(target.backend, target.warp_size, kernel.hash)
"""


def run(folder: Path, chosen: str, **more: str) -> str:
    """What a program prints whose installation has the names of our backends."""
    installed = folder / "backends-1.dist-info"
    installed.mkdir(exist_ok=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: backends\nVersion: 1\n")
    (installed / "entry_points.txt").write_text("[triton.backends]\n" + "".join(
        f"{name} = {module}\n" for name, module in NAMES.items()))
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(HERE)], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": path, "TRITON_DEFAULT_BACKEND": chosen,
             "TRITON_CACHE_DIR": str(folder / "cache"), **more})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(triton.__version__.startswith("3.6"), reason="Triton reads it since 3.7")
def test_a_variable_chooses_it_and_processes_share_the_cache(tmp_path: Path) -> None:
    first = run(tmp_path, "gcu")
    images = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.gcuimg")}
    assert first.startswith("gcu 1 ")
    assert len(images) == 1
    assert run(tmp_path, "gcu") == first
    assert {path: path.stat().st_mtime_ns
            for path in (tmp_path / "cache").rglob("*.gcuimg")} == images


def test_it_is_active_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GCUDriver, "wanted", False)  # as these tests want it
    for chosen, active in ((None, False), ("cpu", False), ("gcu", True)):
        if chosen is None:
            monkeypatch.delenv("TRITON_DEFAULT_BACKEND", raising=False)
        else:
            monkeypatch.setenv("TRITON_DEFAULT_BACKEND", chosen)
        assert GCUDriver.is_active() is active


def test_both_backends_in_one_process() -> None:
    from terrazzo.triton_cpu.activate import activate as activate_cpu
    from terrazzo.triton_gcu.activate import activate as activate_gcu

    class OnTheHost:
        def __init__(self, values: np.ndarray):
            self.values, self.dtype = values, values.dtype

        def data_ptr(self) -> int:
            return int(self.values.ctypes.data)

    x, out = normal(100), zeros(100)
    host: list[Any] = [OnTheHost(np.array(a.values)) for a in (x, out)]
    try:
        for _ in range(2):
            activate_cpu()
            kernel = add[(2,)](host[0], host[0], host[1], 100, BLOCK=64)
            assert kernel.metadata.target.backend == "cpu"
            activate_gcu()
            kernel = add[(2,)](x, x, out, 100, BLOCK=64)
            assert kernel.metadata.target.backend == "gcu"
    finally:
        activate_gcu()
    assert np.array_equal(host[1].values, 2 * x.values)
    assert np.array_equal(out.numpy(), 2 * x.values)
