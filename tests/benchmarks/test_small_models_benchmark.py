"""The benchmark of small models runs, compares what it times, and prints both tables."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.onnx
FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def small_models(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("onnxruntime")
    monkeypatch.syspath_prepend(str(FOLDER))
    import small_models

    yield small_models
    sys.modules.pop("small_models", None)


def test_calls_are_compared_and_timed(small_models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_models, "CALLS", 2)
    for model in (small_models.one_node(), small_models.perceptron("batch"),
                  small_models.unrolled(26)):
        best = small_models.call_times(model, 1)
        assert set(best) == {"ours", "onnxruntime"} and all(0 < t < 1e6 for t in best.values())


def test_loads_have_processes_of_their_own(small_models: Any, tmp_path: Path) -> None:
    times = small_models.loads(small_models.chain(7), tmp_path, 1)
    assert list(times) == ["cold", "cached", "onnxruntime"]
    assert times["cached"].cpu < times["cold"].cpu
    assert list((tmp_path / "cache").glob("??/*.tzx")), "compiled into a cache of its own"


def test_models_are_as_long_as_they_say(small_models: Any) -> None:
    import onnx

    for model, count in ((small_models.perceptron(), 10), (small_models.chain(50), 50),
                         (small_models.unrolled(52), 52)):
        assert len(onnx.ModelProto.FromString(model).graph.node) == count
