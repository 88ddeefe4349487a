"""The models of examples/onnx_models.py: valid, settled, and the same as in onnx's reference."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from terrazzo.frontends.onnx.session import Session

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from onnx_models import bert, resnet

pytestmark = pytest.mark.onnx


def check(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    onnx.checker.check_model(proto, full_check=True)
    session = Session(proto, reference=False)
    assert session.whole is not None
    (wanted,) = ReferenceEvaluator(proto).run(None, feeds)
    (got,) = session.run(feeds)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
    return got


def test_resnet(rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 3, 33, 33), np.float32)
    assert check(resnet(depths=(1, 2), width=4, image=33, classes=7, batch="batch"),
                 {"image": x}).shape == (2, 7)


def test_bert(rng: np.random.Generator) -> None:
    proto = bert(layers=2, hidden=32, heads=4, vocabulary=60, positions=20, batch="batch",
                 sequence="sequence")
    mask = np.array([[1] * 11, [1] * 6 + [0] * 5])
    check(proto, {"input_ids": rng.integers(0, 60, (2, 11)), "attention_mask": mask})


def test_masked_tokens_change_nothing(rng: np.random.Generator) -> None:
    session = Session(bert(layers=2, hidden=32, heads=4, vocabulary=60, positions=20, sequence=8))
    ids, mask = rng.integers(0, 60, (1, 8)), np.array([[1] * 5 + [0] * 3])
    before = session.run({"input_ids": ids, "attention_mask": mask})[0]
    ids[0, 5:] = 7
    after = session.run({"input_ids": ids, "attention_mask": mask})[0]
    np.testing.assert_allclose(after[:, :5], before[:, :5], rtol=1e-5, atol=1e-5)


def test_activations_neither_fade_nor_grow(rng: np.random.Generator) -> None:
    """As many blocks as ResNet-50 has, narrow ones."""
    session = Session(resnet(width=8, image=64, classes=50))
    spread = session.run({"image": rng.standard_normal((1, 3, 64, 64), np.float32)})[0].std()
    assert 0.3 < spread < 10
