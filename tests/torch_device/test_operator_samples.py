"""PyTorch's own samples of its operators on the device, a few of each, with their gradients."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch")
pytest.importorskip("expecttest")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "device_operators.py"


def test_samples_are_right_and_mostly_ours(device: ModuleType, tmp_path: Path) -> None:
    told = tmp_path / "found.json"
    subprocess.run([sys.executable, SCRIPT, "--samples", "2", "--json", told], check=True)
    found = [f for f in json.loads(told.read_text()).values() if f["samples"]]
    assert len(found) > 600
    assert sum(not f["fallbacks"] for f in found) >= 0.6 * len(found)


def test_gradients_are_right(device: ModuleType) -> None:
    subprocess.run([sys.executable, SCRIPT, "--samples", "1", "--gradients"], check=True)
