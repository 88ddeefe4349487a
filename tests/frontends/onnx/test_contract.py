"""Converters of products, Einstein sums and losses against ONNX's evaluator and torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from one_node import check, run

pytestmark = pytest.mark.onnx


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("left", "right"), [
    ((3, 4), (4, 5)), ((4,), (4, 5)), ((3, 4), (4,)), ((4,), (4,)), ((2, 1, 3, 4), (5, 4, 2)),
    ((0, 4), (4, 5)), ((3, 0), (0, 5)),
], ids=str)
def test_matmul(rng: np.random.Generator, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    check("MatMul", [floats(rng, *left), floats(rng, *right)], atol=1e-5)


@pytest.mark.parametrize("dtype", ["int32", "uint64", "float16", "float64"])
def test_matmul_keeps_the_type(rng: np.random.Generator, dtype: str) -> None:
    x, y = rng.integers(0, 5, (3, 4)).astype(dtype), rng.integers(0, 5, (4, 2)).astype(dtype)
    check("MatMul", [x, y])


@pytest.mark.parametrize("opset", [7, 11, 13])
@pytest.mark.parametrize("attributes", [
    {}, {"transA": 1}, {"transB": 1, "alpha": 0.5}, {"transA": 1, "transB": 1, "beta": 0.25}],
    ids=str)
def test_gemm(rng: np.random.Generator, opset: int, attributes: dict[str, Any]) -> None:
    a = floats(rng, *((4, 3) if attributes.get("transA") else (3, 4)))
    b = floats(rng, *((5, 4) if attributes.get("transB") else (4, 5)))
    check("Gemm", [a, b, floats(rng, 5)], opset=opset, atol=1e-5, **attributes)
    if opset >= 11:
        check("Gemm", [a, b], opset=opset, atol=1e-5, **attributes)


@pytest.mark.parametrize("shape", [(), (1,), (3, 1), (1, 5), (3, 5)], ids=str)
def test_gemm_stretches_what_is_added(rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    check("Gemm", [floats(rng, 3, 4), floats(rng, 4, 5), np.asarray(floats(rng, *shape))],
          opset=13, atol=1e-5)


def test_gemm_of_integers() -> None:
    a, b = np.arange(6, dtype=np.int32).reshape(2, 3), np.arange(6, dtype=np.int32).reshape(3, 2)
    check("Gemm", [a, b, np.array([1, 2], np.int32)], opset=13,
          expected=[a @ b + np.array([1, 2], np.int32)])


@pytest.mark.parametrize(("equation", "shapes"), [
    ("ij,jk->ik", [(3, 4), (4, 5)]), ("bij, bjk -> bik", [(2, 3, 4), (2, 4, 5)]),
    ("ii->i", [(3, 3)]), ("ij->ji", [(3, 4)]), ("...ii->...", [(2, 3, 3)]), ("i,i", [(4,), (4,)]),
    ("bhid,bhjd->bhij", [(2, 2, 3, 4), (2, 2, 5, 4)]), ("ij->", [(3, 4)]),
])
def test_einsum(rng: np.random.Generator, equation: str, shapes: list[tuple[int, ...]]) -> None:
    check("Einsum", [floats(rng, *s) for s in shapes], equation=equation, atol=1e-5)


def test_det(rng: np.random.Generator) -> None:
    x = floats(rng, 2, 3, 4, 4)
    check("Det", [x], expected=[np.linalg.det(x).astype(np.float32)], rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- losses
@pytest.mark.torch
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignored", [None, 1, -5])
def test_losses(rng: np.random.Generator, reduction: str, weighted: bool,
                ignored: int | None) -> None:
    import torch

    x, target = floats(rng, 4, 3, 5), rng.integers(0, 3, (4, 5))
    if ignored is not None:
        target[0, :2] = ignored
    weight = rng.random(3).astype(np.float32) if weighted else None
    scores, classes = torch.from_numpy(x), torch.from_numpy(target)
    options: dict[str, Any] = {"reduction": reduction}
    given = {} if ignored is None else {"ignore_index": ignored}
    w = None if weight is None else torch.from_numpy(weight)
    logs = torch.log_softmax(scores, 1)
    loss = torch.nn.functional.nll_loss(logs, classes, w, **options, **given).numpy()
    inputs = [x, target, weight] if weighted else [x, target]
    check("SoftmaxCrossEntropyLoss", inputs, opset=13, outputs=2,
          expected=[np.asarray(loss), logs.numpy()], **options, **given)
    log_inputs = [logs.numpy(), *inputs[1:]]
    check("NegativeLogLikelihoodLoss", log_inputs, opset=13, expected=[np.asarray(loss)],
          **options, **given)


def test_everything_ignored(rng: np.random.Generator) -> None:
    (loss,) = run("SoftmaxCrossEntropyLoss", [floats(rng, 2, 3), np.array([1, 1])], opset=13,
                  ignore_index=1, reduction="sum")
    assert loss == 0
