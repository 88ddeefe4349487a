"""The operator benchmark runs, checks what it times, and reports it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch
FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(FOLDER))
    pytest.importorskip("torch")
    import ops

    yield ops
    for name in ("ops", "common"):
        sys.modules.pop(name, None)


def test_two_small_rows(ops: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ops.json"
    code = ops.main(["--filter", "1 KB", "--rows", "2", "--quick", "--no-compile",  # type: ignore
                     "--json", str(file)])
    assert code == 0
    assert "geometric mean against eager" in capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 2
    for row in rows:
        assert set(row["min_us"]) == {"ours", "eager"}
        assert 0 < row["min_us"]["ours"] <= row["median_us"]["ours"]
        ratio = row["ratios_of_minimums"]["eager"]
        assert ratio == pytest.approx(row["min_us"]["eager"] / row["min_us"]["ours"])


def test_rows_cover_what_they_should(ops: object) -> None:
    rows = ops.ROWS  # type: ignore[attr-defined]
    assert len(rows) >= 44
    assert len({row.name for row in rows}) == len(rows)
    assert {row.threads for row in rows} == {1, 2}
    assert {row.group for row in rows} == {"pointwise", "activation", "rows", "reduction",
                                           "movement", "product", "attention"}


def test_a_wrong_result_is_not_timed(ops: object) -> None:
    import torch
    from common import Row, WrongResult, measure

    row = Row("wrong", "pointwise", lambda: (torch.ones(8),), lambda x: x + 1, lambda x: x * 3)
    with pytest.raises(WrongResult, match="wrong: ours is off by"):
        measure(row, compiled=False, rounds=1)
