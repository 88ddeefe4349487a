"""The benchmark of models: engines in processes of their own, ratios, and tables in the README."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.onnx
ROOT = Path(__file__).parents[2]


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.delitem(sys.modules, "models", raising=False)  # other tests have one of that name
    import models

    yield models
    sys.modules.pop("models")


def found(models: Any, ours: float, *peers: float) -> dict[str, Any]:
    times = dict(zip(models.ENGINES, (ours, *peers)))
    return {e: models.Measured(times=[ms / 1e3], load_s=0.1, first_s=0.02, peak_mb=100, error=1e-6)
            for e, ms in times.items()}


def test_ratios_are_to_the_faster_peer(models: Any) -> None:
    assert models.ratio(found(models, 8, 10, 20)) == pytest.approx(0.8)
    assert math.isnan(models.ratio(found(models, 8)))
    text = models.tables({2: {"a": found(models, 8, 10, 20), "b": found(models, 5, 20, 10)}})
    assert "| a | 8.0 | 10.0 | 20.0 | 0.80 |" in text
    assert f"**{math.sqrt(0.8 * 0.5):.2f}**" in text


def test_speed_ups_are_over_the_fewest_threads(models: Any) -> None:
    text = models.tables({1: {"a": found(models, 8, 10, 20)}, 4: {"a": found(models, 2, 5, 8)}})
    assert "Speed-up over 1 thread:" in text and "| a | 4.0 | 2.0 | 2.5 |" in text
    assert "Speed-up" not in models.tables({2: {"a": found(models, 8, 10, 20)}})


def test_tables_go_between_the_marks(models: Any, tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- models -->\nold\n<!-- /models -->\nafter\n")
    models.write_between_marks(page, "new")
    assert page.read_text() == "before\n<!-- models -->\nnew\n<!-- /models -->\nafter\n"
    page.write_text("no marks")
    with pytest.raises(SystemExit, match="has no"):
        models.write_between_marks(page, "new")


def test_the_readme_has_the_marks(models: Any) -> None:
    text = (ROOT / "README.md").read_text()
    assert all(text.count(mark) == 1 for mark in models.MARKS)


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs /proc")
def test_one_engine_is_measured(models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                ) -> None:
    from onnx_models import resnet

    from terrazzo.frontends.onnx.session import Session

    monkeypatch.setattr(models, "MOST_WAITING", 0.0)
    path = tmp_path / "tiny.onnx"
    path.write_bytes(resnet(depths=(1,), width=4, image=16, classes=5).SerializeToString())
    x = np.random.default_rng(0).standard_normal((1, 3, 16, 16), np.float32)
    np.savez(path.with_suffix(".npz"), in_image=x, out_0=Session(path).run({"image": x})[0])
    result = models.measure(path, ["terrazzo"], threads=1, rounds=1, seconds=0.01)["terrazzo"]
    assert result.times and result.error == 0.0
    assert result.cold_s > 0 and result.load_s > 0 and result.peak_mb > 10
