"""Converters of pooling against ONNX's evaluator and torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from one_node import check, check_symbolic, run

pytestmark = pytest.mark.onnx

WINDOWS: list[dict[str, Any]] = [
    {"kernel_shape": [3, 2]},
    {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]},
    {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1},
    {"kernel_shape": [2, 2], "strides": [3, 3], "ceil_mode": 1, "pads": [0, 1, 1, 0]},
    {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"},
    {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_LOWER"},
    {"kernel_shape": [2, 2], "auto_pad": "VALID"},
]


def images(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def by_hand(operator: str, x: np.ndarray, kernel_shape: list[int], strides: list[int] | None = None,
            pads: list[int] | None = None, dilations: list[int] | None = None, ceil_mode: int = 0,
            auto_pad: str = "NOTSET", count_include_pad: int = 0) -> np.ndarray:
    """Window by window, as ONNX's text defines it; its evaluator gets some of these wrong."""
    sizes, rank = x.shape[2:], len(kernel_shape)
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    spans = [(k - 1) * d + 1 for k, d in zip(kernel_shape, dilations)]
    counts, low, high = [], list((pads or [0] * 2 * rank)[:rank]), (pads or [0] * 2 * rank)[rank:]
    for d in range(rank):
        if auto_pad.startswith("SAME"):
            counts.append(-(-sizes[d] // strides[d]))
            total = max((counts[d] - 1) * strides[d] + spans[d] - sizes[d], 0)
            low[d] = total // 2 if auto_pad == "SAME_UPPER" else total - total // 2
            continue
        room = (sizes[d] + low[d] + high[d] - spans[d]) / strides[d] + 1
        counts.append(int(np.ceil(room) if ceil_mode else np.floor(room)))
        if (counts[d] - 1) * strides[d] >= sizes[d] + low[d]:
            counts[d] -= 1
    result = np.empty((*x.shape[:2], *counts), x.dtype)
    for place in np.ndindex(*counts):
        taps = [[p * s - lo + k * d for k in range(n)] for p, s, lo, n, d in zip(
            place, strides, low, kernel_shape, dilations)]
        inside = [[t for t in tap if 0 <= t < n] for tap, n in zip(taps, sizes)]
        window = x[(slice(None), slice(None), *np.ix_(*inside))].reshape(*x.shape[:2], -1)
        padded = [[t for t in tap if -lo <= t < n + hi] for tap, n, lo, hi in zip(
            taps, sizes, low, high)]
        divisor = np.prod([len(p) for p in padded]) if count_include_pad else window.shape[-1]
        result[(slice(None), slice(None), *place)] = (
            window.max(-1) if operator == "MaxPool" else
            window.sum(-1) / divisor if operator == "AveragePool" else
            np.sqrt((window ** 2).sum(-1)))
    return result


@pytest.mark.parametrize("attributes", WINDOWS, ids=str)
@pytest.mark.parametrize("operator", ["MaxPool", "AveragePool", "LpPool"])
def test_windows(rng: np.random.Generator, operator: str, attributes: dict[str, Any]) -> None:
    x = images(rng, 2, 3, 8, 7)
    check(operator, [x], expected=[by_hand(operator, x, **attributes)], **attributes)


@pytest.mark.parametrize("attributes", [
    {"count_include_pad": 1, "pads": [1, 1, 1, 1], "kernel_shape": [3, 3], "strides": [2, 2]},
    {"count_include_pad": 1, "pads": [0, 0, 1, 1], "kernel_shape": [3, 3], "strides": [3, 3],
     "ceil_mode": 1},
], ids=str)
def test_padding_that_counts(rng: np.random.Generator, attributes: dict[str, Any]) -> None:
    x = images(rng, 1, 2, 7, 6)
    check("AveragePool", [x], expected=[by_hand("AveragePool", x, **attributes)], **attributes)


@pytest.mark.torch
@pytest.mark.parametrize("size", [7, 8, 9, 10])
@pytest.mark.parametrize("pad", [0, 1])
def test_ceil_mode_is_torchs(rng: np.random.Generator, size: int, pad: int) -> None:
    import torch

    x = images(rng, 1, 2, size)
    for stride in (2, 3):
        wanted = torch.nn.functional.max_pool1d(torch.from_numpy(x), 3, stride, pad,
                                                ceil_mode=True)
        (got,) = run("MaxPool", [x], kernel_shape=[3], strides=[stride], pads=[pad, pad],
                     ceil_mode=1)
        np.testing.assert_array_equal(got, wanted.numpy())
        mean = torch.nn.functional.avg_pool1d(torch.from_numpy(x), 3, stride, pad,
                                              ceil_mode=True, count_include_pad=True)
        (got,) = run("AveragePool", [x], kernel_shape=[3], strides=[stride], pads=[pad, pad],
                     ceil_mode=1, count_include_pad=1)
        np.testing.assert_allclose(got, mean.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("opset", [8, 10, 12, 22])
def test_indices(rng: np.random.Generator, opset: int) -> None:
    x = images(rng, 2, 2, 6, 5)
    values, where = run("MaxPool", [x], opset=opset, outputs=2, kernel_shape=[2, 3],
                        strides=[2, 1], pads=[0, 1, 0, 1])
    np.testing.assert_array_equal(x.reshape(-1)[where], values)
    _, columns = run("MaxPool", [x], opset=opset, outputs=2, kernel_shape=[2, 3],
                     strides=[2, 1], pads=[0, 1, 0, 1], storage_order=1)
    flipped = np.ascontiguousarray(x.swapaxes(2, 3)).reshape(-1)
    np.testing.assert_array_equal(flipped[columns], values)


def test_unpool_undoes_pool(rng: np.random.Generator) -> None:
    x = np.abs(images(rng, 1, 2, 4, 6)) + 1
    values, where = run("MaxPool", [x], outputs=2, kernel_shape=[2, 2], strides=[2, 2])
    (back,) = run("MaxUnpool", [values, where], kernel_shape=[2, 2], strides=[2, 2])
    np.testing.assert_array_equal(back, np.where(np.isin(x, values), x, 0))


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_integers(rng: np.random.Generator, dtype: str) -> None:
    x = rng.integers(0, 100, (1, 2, 5, 5)).astype(dtype)
    window = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    check("MaxPool", [x], opset=12, expected=[by_hand("MaxPool", x, **window)], **window)


@pytest.mark.parametrize("operator", ["GlobalAveragePool", "GlobalMaxPool"])
def test_whole_images(rng: np.random.Generator, operator: str) -> None:
    check(operator, [images(rng, 2, 3, 5, 4)])


def test_global_norm(rng: np.random.Generator) -> None:
    x = images(rng, 2, 3, 5)
    (y,) = run("GlobalLpPool", [x], p=3)
    expected = (np.abs(x) ** 3).sum(2, keepdims=True) ** (1 / 3)
    np.testing.assert_allclose(y, expected, rtol=1e-5)


def test_dilated_3d(rng: np.random.Generator) -> None:
    x = images(rng, 1, 2, 6, 7, 8)
    for operator in ("MaxPool", "AveragePool"):
        window = {"kernel_shape": [2, 2, 3], "dilations": [2, 2, 1], "strides": [1, 2, 2]}
        check(operator, [x], expected=[by_hand(operator, x, **window)], **window)


@pytest.mark.parametrize("operator", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize("ceil", [0, 1])
def test_symbolic_sizes(rng: np.random.Generator, operator: str, ceil: int) -> None:
    check_symbolic(operator, [images(rng, 2, 3, 8)], {0: (0, 2)}, kernel_shape=[3], strides=[2],
                   pads=[1, 0], ceil_mode=ceil)
