"""Every operator with sizes that vary, shrink and grow, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SWEEP = Path(__file__).parent / "varying_sizes.py"
PARTS = 4


def swept(*arguments: str) -> None:
    made = subprocess.run([sys.executable, str(SWEEP), *arguments], capture_output=True, text=True,
                          env={**os.environ, "TZ_THREADS": "1"}, check=False)
    lines = made.stdout.splitlines()
    wrong = [line for line in lines if line.startswith("WRONG")]
    assert made.returncode == 0, (
        f"ended with {made.returncode} after {lines[-1:]}\n" + "\n".join(wrong) + made.stderr)
    assert not wrong and "cases swept" in lines[-1]


@pytest.mark.parametrize("part", range(PARTS))
def test_every_operator(part: int) -> None:
    swept(str(part), str(PARTS), "auto", "first")


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "rows"), [
    ("auto", "all"), ("auto", "gradients"), ("always", "all"), ("always", "all gradients")])
@pytest.mark.parametrize("part", range(PARTS))
def test_every_operator_in_every_way(part: int, mode: str, rows: str) -> None:
    swept(str(part), str(PARTS), mode, rows)
