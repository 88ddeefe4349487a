"""Pooling against onnx's reference and torch: any rank, stride, padding, dilation and count."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
from checking import HALVES, check, check_gradient, close, draw, evaluate, from_torch, op, to_torch
from onnx_nodes import onnx_node

import terrazzo as tz
from terrazzo.errors import ArgumentError, DTypeError, RankError, ShapeError
from terrazzo.ops.pool import ceil_overhang, same_padding

# (spatial shape, window, strides, padding, dilation)
WINDOWS: list[tuple[Any, ...]] = [
    ((7,), (3,), (1,), ((0, 0),), (1,)),
    ((8,), (3,), (2,), ((1, 1),), (1,)),
    ((9,), (2,), (3,), ((1, 0),), (2,)),
    ((5, 6), (2, 2), (2, 2), ((0, 0), (0, 0)), (1, 1)),
    ((7, 8), (3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1)),
    ((6, 5), (3, 2), (1, 2), ((2, 1), (0, 1)), (1, 1)),
    ((9, 8), (3, 3), (2, 1), ((2, 2), (1, 2)), (2, 2)),
    ((9, 9), (7, 7), (2, 2), ((3, 3), (3, 3)), (1, 1)),
    ((4, 5, 3), (2, 3, 2), (2, 1, 1), ((0, 1), (1, 1), (1, 0)), (1, 1, 1)),
]


def onnx_attributes(window: Any, strides: Any, padding: Any, dilation: Any) -> dict[str, Any]:
    pads = [*(a for a, _ in padding), *(b for _, b in padding)]
    return {"kernel_shape": window, "strides": strides, "pads": pads, "dilations": dilation}


def attributes(window: Any, strides: Any, padding: Any, dilation: Any) -> dict[str, Any]:
    return {"window": window, "strides": strides, "padding": padding, "dilation": dilation}


@pytest.mark.onnx
@pytest.mark.parametrize("case", WINDOWS)
def test_max_pool(case: Any, rng: np.random.Generator) -> None:
    shape, *rest = case
    x = draw(rng, (2, 3, *shape))
    expected = onnx_node("MaxPool", [x], **onnx_attributes(*rest))[0]
    check(op("max_pool"), x, expected=expected, **attributes(*rest))
    check(op("max_pool"), x, expected=expected, symbolic=True, **attributes(*rest))


@pytest.mark.torch
@pytest.mark.parametrize("case", [c for c in WINDOWS if all(
    a == b <= n // 2 for (a, b), n in zip(c[3], c[1]))])
@pytest.mark.parametrize("ties", [False, True])
def test_max_pool_indices(case: Any, ties: bool, rng: np.random.Generator) -> None:
    import torch

    shape, *rest = case
    x = draw(rng, (2, 3, *shape))
    if ties:
        x = np.round(x)
    y, places = evaluate(op("max_pool_indices"), x, **attributes(*rest))
    name = f"max_pool{len(shape)}d"
    largest, found = getattr(torch.nn.functional, name)(
        to_torch(x), rest[0], rest[1], [a for a, _ in rest[2]], rest[3], return_indices=True)
    close(y, from_torch(largest))
    planes = np.arange(6).reshape(2, 3, *(1 for _ in shape)) * math.prod(shape)
    np.testing.assert_array_equal(places, from_torch(found) + planes)


@pytest.mark.onnx
@pytest.mark.parametrize("storage_order", [0, 1])
def test_indices_as_onnx_counts_them(storage_order: int, rng: np.random.Generator) -> None:
    x = rng.permutation(60).reshape(1, 1, 6, 10).astype(np.float32)
    case = ((2, 2), (2, 2), ((0, 0), (0, 0)), (1, 1))
    expected = onnx_node("MaxPool", [x], outputs=2, storage_order=storage_order,
                         **onnx_attributes(*case))
    check(op("max_pool_indices"), x, expected=expected, storage_order=storage_order,
          **attributes(*case))


def test_nan_wins_and_padding_never_does() -> None:
    x = np.full((1, 1, 4, 4), -np.inf, np.float32)
    x[0, 0, 0, 0] = np.nan
    y, places = evaluate(op("max_pool_indices"), x, window=3, strides=1, padding=1)
    assert np.isnan(y[0, 0, :2, :2]).all() and np.all(y[0, 0, 2:] == -np.inf)
    assert places[0, 0, 0, 0] == 0 and places[0, 0, 3, 3] == 10
    low = np.full((1, 1, 3), -128, np.int8)
    np.testing.assert_array_equal(evaluate(op("max_pool"), low, window=3, strides=1, padding=1),
                                  low)


def test_integers_and_truth(rng: np.random.Generator) -> None:
    for dtype in ("int8", "uint8", "int32", "bool"):
        x = draw(rng, (1, 2, 6, 6), dtype)
        wide = x.astype(np.float32)
        expected = evaluate(op("max_pool"), wide, window=2).astype(x.dtype)
        check(op("max_pool"), x, window=2, expected=expected)


def test_windows_of_nothing_but_padding() -> None:
    x = np.ones((1, 1, 2), np.float32)
    y = evaluate(op("max_pool"), x, window=2, strides=1, padding=((3, 0),))
    np.testing.assert_array_equal(y[0, 0], [-np.inf, -np.inf, 1, 1])
    check(op("window_sum"), np.ones((1, 2, 1), np.float32), window=(2,), strides=(1,),
          padding=((3, 0),), dilation=(1,), expected=np.array([0, 0, 1, 2.]).reshape(1, 4, 1))


@pytest.mark.onnx
@pytest.mark.parametrize("case", WINDOWS)
@pytest.mark.parametrize("count_include_pad", [0, 1])
def test_average_pool(case: Any, count_include_pad: int, rng: np.random.Generator) -> None:
    shape, *rest = case
    x = draw(rng, (2, 3, *shape))
    expected = onnx_node("AveragePool", [x], count_include_pad=count_include_pad,
                         **onnx_attributes(*rest))[0]
    for symbolic in (False, True):
        check(op("average_pool"), x, expected=expected, symbolic=symbolic, rtol=1e-5,
              count_include_pad=bool(count_include_pad), **attributes(*rest))


@pytest.mark.torch
@pytest.mark.parametrize(("size", "window", "stride", "padding"), [
    (n, k, s, p) for n, k, s, p in product((7, 8, 11), (2, 3), (2, 3), (0, 1)) if p <= k // 2])
@pytest.mark.parametrize("count_include_pad", [False, True])
def test_ceil_mode(size: int, window: int, stride: int, padding: int, count_include_pad: bool,
                   rng: np.random.Generator) -> None:
    import torch.nn.functional as F

    x = draw(rng, (2, 3, size))
    over = ceil_overhang(size, window, stride, (padding, padding), 1)
    expected = F.avg_pool1d(to_torch(x), window, stride, padding, True, count_include_pad)
    got = evaluate(op("average_pool"), x, window=window, strides=stride, padding=padding,
                   overhang=over, count_include_pad=count_include_pad)
    close(got, from_torch(expected))
    largest = F.max_pool1d(to_torch(x), window, stride, padding, 1, True)
    got = evaluate(op("max_pool"), x, window=window, strides=stride,
                   padding=((padding, padding + over),))
    close(got, from_torch(largest))


@pytest.mark.onnx
def test_same_padding(rng: np.random.Generator) -> None:
    for size, window, stride in product((7, 8), (2, 3, 4), (1, 2, 3)):
        x = draw(rng, (1, 2, size, 5))
        pads = (same_padding(size, window, stride, 1, True), same_padding(5, 2, 1, 1, True))
        expected = onnx_node("MaxPool", [x], kernel_shape=(window, 2), strides=(stride, 1),
                             auto_pad="SAME_UPPER")[0]
        close(evaluate(op("max_pool"), x, window=(window, 2), strides=(stride, 1), padding=pads),
              expected)
        assert same_padding(size, window, stride, 1, False) == pads[0][::-1]


@pytest.mark.onnx
@pytest.mark.parametrize("case", [c for c in WINDOWS if len(c[0]) == 2 and c[4] == (1, 1)])
@pytest.mark.parametrize("p", [1, 2, 3])
def test_lp_pool(case: Any, p: int, rng: np.random.Generator) -> None:
    shape, *rest = case
    x = draw(rng, (2, 3, *shape))
    expected = onnx_node("LpPool", [x], p=p, **onnx_attributes(*rest))[0]
    check(op("lp_pool"), x, expected=expected, p=p, rtol=1e-5, **attributes(*rest))


@pytest.mark.onnx
@pytest.mark.parametrize("shape", [(2, 3, 7), (2, 3, 4, 5), (1, 2, 3, 4, 5)])
def test_global_pools(shape: Any, rng: np.random.Generator) -> None:
    x = draw(rng, shape)
    axes = tuple(range(2, len(shape)))
    check(op("global_average_pool"), x, expected=onnx_node("GlobalAveragePool", [x])[0],
          symbolic=True)
    check(op("global_max_pool"), x, expected=np.max(x, axis=axes, keepdims=True), symbolic=True)
    expected = np.sum(np.abs(x) ** 3, axis=axes, keepdims=True) ** (1 / 3)
    check(op("global_lp_pool"), x, p=3, expected=expected, rtol=1e-5)


@pytest.mark.onnx
def test_max_unpool(rng: np.random.Generator) -> None:
    x = draw(rng, (1, 1, 4, 4))
    y, places = evaluate(op("max_pool_indices"), x, window=2)
    back = evaluate(op("max_unpool"), y, places, output_shape=x.shape)
    expected = onnx_node("MaxUnpool", [y, places], kernel_shape=(2, 2), strides=(2, 2))[0]
    close(back, expected)
    wide = evaluate(op("max_unpool"), y, places, output_shape=(1, 1, 5, 5),
                    indices_shape=(1, 1, 4, 4))
    close(wide[:, :, :4, :4], expected)
    assert not wide[:, :, 4:].any() and not wide[:, :, :, 4:].any()


# ---------------------------------------------------------------- gradients and code
@pytest.mark.parametrize("case", WINDOWS[:7])
def test_gradients(case: Any, rng: np.random.Generator) -> None:
    shape, *rest = case
    x = rng.permutation(2 * math.prod(shape)).reshape(1, 2, *shape).astype(np.float64)
    check_gradient(op("max_pool"), x, **attributes(*rest))
    check_gradient(op("average_pool"), x / 10, **attributes(*rest))


@pytest.mark.torch
def test_the_first_of_equal_elements_gets_the_gradient() -> None:
    import torch

    x = np.zeros((1, 1, 4, 4), np.float32)
    given = torch.from_numpy(x).requires_grad_()
    torch.nn.functional.max_pool2d(given, 3, 1, 1).sum().backward()
    assert given.grad is not None
    got = tz.grad(lambda v: tz.sum(tz.max_pool(v, window=3, strides=1, padding=1)))(x)
    close(np.asarray(got), given.grad.numpy())


@pytest.mark.parametrize("dtype", ["float32", *HALVES])
def test_compiled(dtype: str, rng: np.random.Generator) -> None:
    for shape, *rest in WINDOWS[3:8]:
        x = draw(rng, (2, 17, *shape), dtype)
        for name in ("max_pool", "average_pool"):
            close(np.asarray(op(name)(x, **attributes(*rest))),
                  evaluate(op(name), x, **attributes(*rest)))


def test_verified(rng: np.random.Generator) -> None:
    x = draw(rng, (1, 2, 4, 5))
    plan = {"dtypes": ["float32"], "kinds": ["random", "special"]}
    assert op("max_pool").verify(x, window=3, strides=2, padding=1, **plan)
    assert op("average_pool").verify(x, window=3, strides=2, padding=1, **plan)


# ---------------------------------------------------------------- errors
def test_errors() -> None:
    x = np.zeros((1, 2, 4, 4), np.float32)
    with pytest.raises(RankError, match="spatial"):
        evaluate(op("max_pool"), np.zeros((2, 3), np.float32), window=2)
    with pytest.raises(ArgumentError, match="2 spatial axes"):
        evaluate(op("max_pool"), x, window=(2, 2, 2))
    with pytest.raises(ShapeError, match="does not fit"):
        evaluate(op("average_pool"), x, window=5)
    with pytest.raises(ArgumentError, match="at least 1"):
        evaluate(op("max_pool"), x, window=2, strides=0)
    with pytest.raises(ArgumentError, match="negative"):
        evaluate(op("max_pool"), x, window=2, padding=-1)
    with pytest.raises(DTypeError, match="complex"):
        evaluate(op("max_pool"), x.astype(np.complex64), window=2)
