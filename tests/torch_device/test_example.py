"""The example of a first day with the chip runs as it is read."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.torch, pytest.mark.triton]


def test_the_first_day(whole: None) -> None:
    pytest.importorskip("triton")
    if not {"gcu", "cpu"} <= entry_points(group="triton.backends").names:
        pytest.skip("terrazzo is not installed, so Triton does not find its backends")
    environment = {**os.environ, "TZ_TORCH_DEVICE": "gcu", "TRITON_DEFAULT_BACKEND": "gcu"}
    ran = subprocess.run([sys.executable, str(ROOT / "examples/gcu/first_day.py")],
                         env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    for said in ("freeing twice", "57 programs", "matmul_kernel", "from the CPU's by"):
        assert said in ran.stdout
