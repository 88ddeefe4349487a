"""The example of one operator in all of torch, as it stands."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "squared_relu_everywhere.py"


@pytest.mark.skipif(not shutil.which("c++"), reason="Inductor needs a C++ compiler")
def test_one_definition_serves_all_of_torch() -> None:
    ran = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True,
                         timeout=600)
    assert ran.returncode == 0, ran.stderr
    said = [line.split()[0] for line in ran.stdout.splitlines()]
    for what in ("torch eager  ", "torch.compile   inductor", "torch.compile   terrazzo",
                 "torch.export  ", "ONNX   "):
        assert what in ran.stdout, said
