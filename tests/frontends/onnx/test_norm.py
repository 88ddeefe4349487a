"""Converters of normalisations against ONNX's evaluator and numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from one_node import check, imported, one_node, run
from several_nodes import check_symbolic

from terrazzo.base.shapes import dims

pytestmark = pytest.mark.onnx


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def channel(x: np.ndarray, rank: int) -> np.ndarray:
    return x.reshape(-1, *(1,) * (rank - 2))


# ---------------------------------------------------------------- over channels
@pytest.mark.parametrize("opset", [7, 9, 14, 15])
@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4), (2, 3, 4, 5)], ids=str)
def test_batch_normalization(rng: np.random.Generator, opset: int, shape: tuple[int, ...]) -> None:
    x, scale, bias, mean = floats(rng, *shape), *(floats(rng, 3) for _ in range(3))
    var = rng.random(3).astype(np.float32) + 0.1
    unit = (x - channel(mean, x.ndim)) / np.sqrt(channel(var, x.ndim) + 1e-3)
    expected = unit * channel(scale, x.ndim) + channel(bias, x.ndim)
    check("BatchNormalization", [x, scale, bias, mean, var], opset=opset, epsilon=1e-3,
          expected=[expected], rtol=1e-4, atol=1e-5)


def test_batch_normalization_while_training(rng: np.random.Generator) -> None:
    x, scale, bias, mean = floats(rng, 4, 3, 5), *(floats(rng, 3) for _ in range(3))
    var = rng.random(3).astype(np.float32)
    check("BatchNormalization", [x, scale, bias, mean, var], opset=15, training_mode=1,
          momentum=0.7, outputs=3, rtol=1e-4, atol=1e-5)


def test_statistics_of_old_versions_are_refused(rng: np.random.Generator) -> None:
    inputs = [floats(rng, 4, 3, 5), *(np.ones(3, np.float32) for _ in range(4))]
    model = one_node("BatchNormalization", inputs, opset=9, outputs=3)
    put_off = imported(model, {f"x{i}": x for i, x in enumerate(inputs)}).put_off
    assert "statistics" in str(put_off[0])


def test_instance_normalization(rng: np.random.Generator) -> None:
    inputs = [floats(rng, 2, 3, 4, 5), floats(rng, 3), floats(rng, 3)]
    check("InstanceNormalization", inputs, epsilon=1e-3, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("opset", [18, 21])
def test_group_normalization(rng: np.random.Generator, opset: int) -> None:
    x = floats(rng, 2, 6, 4, 3)
    count = 3 if opset < 21 else 6
    scale, bias = floats(rng, count), floats(rng, count)
    wide = x.astype(np.float64).reshape(2, 3, 2, 12)
    unit = (wide - wide.mean((2, 3), keepdims=True)) / np.sqrt(
        wide.var((2, 3), keepdims=True) + 1e-5)
    each = 6 // count
    expected = unit.reshape(x.shape) * np.repeat(scale, each)[:, None, None] + np.repeat(
        bias, each)[:, None, None]
    check("GroupNormalization", [x, scale, bias], opset=opset, num_groups=3,
          expected=[expected.astype(np.float32)], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_local_response_normalization(rng: np.random.Generator, size: int) -> None:
    x = floats(rng, 2, 6, 3, 4)
    squares = np.zeros_like(x)
    for c in range(6):
        low, high = max(0, c - (size - 1) // 2), min(5, c + size // 2)
        squares[:, c] = (x[:, low:high + 1] ** 2).sum(1)
    expected = x / (1.5 + 0.02 / size * squares) ** 0.6
    check("LRN", [x], size=size, alpha=0.02, beta=0.6, bias=1.5, expected=[expected])


def test_mean_variance_normalization(rng: np.random.Generator) -> None:
    x = floats(rng, 3, 2, 4, 5)
    check("MeanVarianceNormalization", [x], opset=13, rtol=1e-4, atol=1e-5)
    check("MeanVarianceNormalization", [x], opset=13, axes=[1, -1], rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- over trailing axes
@pytest.mark.parametrize("axis", [-1, 1, 0])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_layer_normalization(rng: np.random.Generator, axis: int, dtype: str) -> None:
    x = floats(rng, 3, 4, 5).astype(dtype)
    over = x.shape[axis:]
    scale, bias = floats(rng, *over).astype(dtype), floats(rng, *over).astype(dtype)
    wide = x.astype(np.float64)
    axes = tuple(range(axis % 3, 3))
    mean = wide.mean(axes, keepdims=True)
    inverse = 1 / np.sqrt(wide.var(axes, keepdims=True) + 1e-2)
    expected = [((wide - mean) * inverse * scale + bias).astype(dtype),
                mean.astype(np.float32), inverse.astype(np.float32)]
    check("LayerNormalization", [x, scale, bias], opset=17, axis=axis, epsilon=1e-2, outputs=3,
          expected=expected, rtol=2e-3 if dtype == "float16" else 1e-5, atol=1e-3)


def test_scales_of_layer_normalization_broadcast(rng: np.random.Generator) -> None:
    x, scale, bias = floats(rng, 3, 4, 5), floats(rng, 4, 1), floats(rng, 1)
    unit = (x - x.mean((1, 2), keepdims=True)) / np.sqrt(x.var((1, 2), keepdims=True) + 1e-5)
    check("LayerNormalization", [x, scale, bias], opset=17, axis=1,
          expected=[unit * scale + bias], rtol=1e-4, atol=1e-5)
    check("LayerNormalization", [x, floats(rng, 5)], opset=17, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axis", [-1, 1])
def test_rms_normalization(rng: np.random.Generator, axis: int) -> None:
    x = floats(rng, 3, 4, 5)
    root = np.sqrt((x.astype(float) ** 2).mean(tuple(range(axis % 3, 3)), keepdims=True) + 1e-5)
    for shape in (x.shape[axis:], (1,)):
        scale = floats(rng, *shape)
        check("RMSNormalization", [x, scale], opset=23, axis=axis,
              expected=[(x / root * scale).astype(np.float32)])


@pytest.mark.parametrize("attributes", [{}, {"p": 1}, {"axis": 0, "p": 2}], ids=str)
def test_lp_normalization(rng: np.random.Generator, attributes: dict[str, Any]) -> None:
    x = floats(rng, 3, 4)
    axis, order = attributes.get("axis", -1), attributes.get("p", 2)
    expected = x / np.linalg.norm(x, order, axis, keepdims=True)
    check("LpNormalization", [x], expected=[expected], **attributes)
    (zeros,) = run("LpNormalization", [np.zeros((2, 3), np.float32)], **attributes)
    assert (zeros == 0).all()


def test_symbolic_sizes(rng: np.random.Generator) -> None:
    b, s, t = dims("b s t")
    x, image, per_channel = floats(rng, 2, 5, 16), floats(rng, 2, 4, 3, 5), floats(rng, 4)
    check_symbolic("LayerNormalization", [x, floats(rng, 16), floats(rng, 16)],
                   [(b, s, 16), None, None], outputs=3)
    check_symbolic("GroupNormalization", [image, per_channel, per_channel],
                   [(b, 4, s, t), None, None], num_groups=2)
    check_symbolic("LRN", [image], [(b, 4, s, t)], size=3)
