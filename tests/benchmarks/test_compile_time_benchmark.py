"""The benchmark of compile time runs and reports what it measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_short_programs(monkeypatch: pytest.MonkeyPatch,
                        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import compile_time

    try:
        assert compile_time.main(["--shorter", "50", "--only", "sinkhorn"]) == 0
    finally:
        sys.modules.pop("compile_time", None)
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["program", "operators"]
    assert len(rows) == 3
    assert all("s " in row for row in rows)
