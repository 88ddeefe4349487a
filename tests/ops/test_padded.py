"""Results whose number depends on values: against numpy and onnx.reference, cut to their counts."""

from __future__ import annotations

import numpy as np
import pytest
from checking import check, close, draw, op

from terrazzo.dtypes import float32
from terrazzo.errors import ShapeError
from terrazzo.graph.ir import TensorType, Value


def test_nonzero(rng: np.random.Generator) -> None:
    for x in (rng.integers(0, 2, (3, 4)).astype(np.float32), np.zeros((2, 3), np.int32),
              np.ones(5, bool)):
        places, count = check(op("nonzero_padded"), x)
        assert places.shape == (x.ndim, x.size)
        close(places[:, :int(count)], np.array(np.nonzero(x)))


@pytest.mark.parametrize("axis", [0, 1, None])
def test_compress(axis: int | None, rng: np.random.Generator) -> None:
    x = draw(rng, (3, 4))
    for condition in ([False, True, True], [True], [False, False]):
        chosen, count = check(op("compress_padded"), x, np.array(condition), axis=axis)
        close(np.take(chosen, range(int(count)), axis=axis or 0),
              np.compress(condition, x, axis=axis))


def unique_by_numpy(x: np.ndarray, in_order: bool, axis: int | None = None) -> list[np.ndarray]:
    values, first, inverse, counts = np.unique(x, True, True, True, axis=axis)
    inverse = inverse.reshape(-1)
    if not in_order:
        order = np.argsort(first)
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        values, first, counts = np.take(values, order, axis=axis or 0), first[order], counts[order]
        inverse = place[inverse] if len(inverse) else inverse
    return [values, first, inverse, counts]


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("x", [
    np.array([[3, 1, 2], [1, 1, 5]]), np.array([2.5, -1.0, 2.5, 0.5], np.float32), np.array([7]),
    np.array([np.nan, 1, np.nan, -0.0, 0.0, np.inf], np.float32), np.zeros(0, np.float32),
    np.zeros(70, np.int8),
], ids=["ints", "floats", "one", "specials", "none", "equal"])
def test_unique(x: np.ndarray, in_order: bool) -> None:
    values, first, inverse, counts, count = check(op("unique_padded"), x, sorted=in_order)
    n = int(count)
    for got, want in zip([values[:n], first[:n], inverse, counts[:n]],
                         unique_by_numpy(x, in_order), strict=True):
        close(got, want)


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_unique_slices(axis: int, in_order: bool, rng: np.random.Generator) -> None:
    x = rng.integers(0, 2, (3, 6, 2)).astype(np.float32)
    for compiled in (False, True):
        result = (op("unique_slices_padded")(x, axis=axis, sorted=in_order) if compiled else
                  check(op("unique_slices_padded"), x, axis=axis, sorted=in_order))
        values, first, inverse, counts, count = result
        n = int(count)
        for got, want in zip([np.take(values, range(n), axis=axis), first[:n], inverse, counts[:n]],
                             unique_by_numpy(x, in_order, axis), strict=True):
            close(got, want)


def test_errors() -> None:
    scores = Value(TensorType((1, 2, 5), float32))
    with pytest.raises(ShapeError, match="needs a matrix"):
        op("rank_rows")(scores)
