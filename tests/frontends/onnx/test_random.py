"""Converters of random operators: what their numbers look like, and what seeds and names do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from one_node import check, run
from onnx import TensorProto

pytestmark = pytest.mark.onnx
MANY = (50, 200)


def test_normal() -> None:
    (x,) = run("RandomNormal", [], shape=MANY, mean=2.0, scale=3.0, seed=1.0)
    assert x.shape == MANY and x.dtype == np.float32
    assert abs(x.mean() - 2) < 0.15 and abs(x.std() - 3) < 0.15
    (like,) = run("RandomNormalLike", [np.zeros(MANY, np.float64)], seed=1.0)
    assert like.dtype == np.float64 and abs(like.mean()) < 0.05


def test_uniform() -> None:
    (x,) = run("RandomUniform", [], shape=MANY, low=-1.0, high=3.0, dtype=TensorProto.DOUBLE)
    assert x.dtype == np.float64 and x.min() >= -1 and x.max() < 3 and abs(x.mean() - 1) < 0.1
    (like,) = run("RandomUniformLike", [np.zeros(MANY, np.int32)], dtype=TensorProto.FLOAT16)
    assert like.dtype == np.float16 and like.shape == MANY


@pytest.mark.parametrize("attributes", [{"seed": 3.0}, {}], ids=str)
def test_runs_repeat(attributes: dict[str, Any]) -> None:
    first, second = (run("RandomNormal", [], shape=[20], **attributes)[0] for _ in range(2))
    assert (first == second).all()


def test_seeds_differ() -> None:
    one, two = (run("RandomNormal", [], shape=[20], seed=seed)[0] for seed in (1.0, 2.0))
    assert (one != two).any()


def test_bernoulli() -> None:
    p = np.broadcast_to(np.array([0.0, 0.3, 1.0]), (4000, 3)).astype(np.float32)
    (x,) = run("Bernoulli", [np.ascontiguousarray(p)], seed=0.0, dtype=TensorProto.INT32)
    assert x.dtype == np.int32 and set(np.unique(x)) == {0, 1}
    assert (x[:, 0] == 0).all() and (x[:, 2] == 1).all() and abs(x[:, 1].mean() - 0.3) < 0.05


def test_multinomial() -> None:
    logits = np.log(np.array([[0.1, 0.6, 0.3], [0.5, 0.25, 0.25]], np.float32))
    (x,) = run("Multinomial", [logits], sample_size=4000, seed=0.0)
    assert x.shape == (2, 4000) and x.dtype == np.int32
    for row, p in zip(x, np.exp(logits), strict=True):
        np.testing.assert_allclose(np.bincount(row, minlength=3) / 4000, p, atol=0.05)


# ---------------------------------------------------------------- dropout
@pytest.mark.parametrize(("opset", "kind"), [(7, "float32"), (10, "bool"), (11, "bool")])
def test_old_dropout_hands_on(rng: np.random.Generator, opset: int, kind: str) -> None:
    x = rng.standard_normal((3, 4)).astype(np.float32)
    check("Dropout", [x], opset=opset, ratio=0.7, outputs=2, expected=[x, np.ones((3, 4), kind)])


@pytest.mark.parametrize("training", [None, False])
def test_dropout_at_inference(rng: np.random.Generator, training: bool | None) -> None:
    x = rng.standard_normal((3, 4)).astype(np.float32)
    inputs = [x, np.array(0.4, np.float32)] + ([] if training is None else [np.array(training)])
    check("Dropout", inputs, opset=13, outputs=2, expected=[x, np.ones((3, 4), bool)])


def test_dropout_of_nothing_while_training(rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, 4)).astype(np.float32)
    check("Dropout", [x, np.array(0.0, np.float32), np.array(True)], opset=13, outputs=2,
          expected=[x, np.ones((3, 4), bool)])


def test_seeded_dropout_is_that_of_the_evaluator(rng: np.random.Generator) -> None:
    x = rng.standard_normal((30, 4)).astype(np.float32)
    check("Dropout", [x, np.array(0.75, np.float32), np.array(True)], opset=13, outputs=2, seed=5)


def test_dropout_without_a_seed(rng: np.random.Generator) -> None:
    x = rng.standard_normal(MANY).astype(np.float32)
    y, keep = run("Dropout", [x, np.array(0.25, np.float32), np.array(True)], opset=13, outputs=2)
    assert abs(keep.mean() - 0.75) < 0.03
    np.testing.assert_allclose(y, np.where(keep, x / 0.75, 0), rtol=1e-6)
