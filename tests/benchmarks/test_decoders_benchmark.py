"""Decoders exported by torch run for a hundred tokens on one compilation."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import decoders


def test_the_table() -> None:
    text = decoders.table([decoders.Row("llama", "dynamo", 1, 2.0, 4.0, 0.0)])
    assert text.splitlines()[-1] == "| llama | dynamo | 1 | 2.00 | 4.00 | 0.50 |"


@pytest.mark.slow
@pytest.mark.parametrize("exporter", decoders.EXPORTERS)
@pytest.mark.parametrize("model", decoders.MODELS)
def test_exported_decoders_compile_at_most_twice(
        model: str, exporter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("transformers", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    for name, value in {"VOCABULARY": 128, "WIDTH": 64, "LAYERS": 2, "HEADS": 4}.items():
        monkeypatch.setattr(decoders, name, value)
    path = tmp_path / "model.onnx"
    decoders.export(model, decoders.EXPORTERS[exporter], path)
    row = decoders.measure(path, model, exporter, 100, 1)
    assert row.compilations <= 2 and row.error < 1e-4
