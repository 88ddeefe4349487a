"""The benchmark of symbolic sizes runs, on one compilation a row, and reports ratios."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import terrazzo as tz

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_one_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "symbolic", raising=False)
    import symbolic

    monkeypatch.setattr(symbolic, "ROUNDS", 1)
    monkeypatch.setattr(symbolic, "REPEATS", 1)
    with tz.knobs.override(threads=1):
        assert symbolic.main(["--only", "softmax|2x2", "--forms", "image", "--threads", "1"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("1 thread")
    assert [row.split()[0] for row in rows[:3]] == ["max_pool", "avg_pool", "softmax"]
    assert all(float(row.split()[-1]) > 0 for row in rows[:3])
