"""Determinants against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
from checking import check, close, draw, op

import terrazzo as tz
from terrazzo.dtypes import float32, int32
from terrazzo.errors import DTypeError, ShapeError
from terrazzo.graph.ir import TensorType, Value


@pytest.mark.parametrize("shape", [(1, 1), (3, 3), (2, 4, 4), (5, 1, 1), (2, 0, 0), (0, 3, 3),
                                   (2, 3, 7, 7), (40, 40)])
def test_det(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    x = draw(rng, shape, low=-1, high=1)
    expected = np.linalg.det(x.astype(np.float64))
    got = tz.det(x)
    assert got.shape == expected.shape
    # Each product of pivots is off by a few units in the last place of its largest terms.
    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=1e-5)


def test_loops(rng: np.random.Generator) -> None:
    check(op("det"), draw(rng, (2, 4, 4), "float64"))
    check(op("det"), draw(rng, (3, 3)), rtol=1e-5)
    check(op("det"), draw(rng, (3, 4, 4), "float64"), symbolic=True)


def test_singular_and_special() -> None:
    close(tz.det(np.zeros((4, 4), np.float32)), np.float32(0))
    close(tz.det(np.array([[0, 1], [1, 0]], np.float32)), np.float32(-1))
    close(tz.det(np.array([[0, 0, 1], [0, 2, 3], [0, 5, 7]], np.float32)), np.float32(0))
    assert np.isnan(tz.det(np.array([[np.nan, 1], [1, 0]], np.float32)))


def test_errors() -> None:
    with pytest.raises(ShapeError, match="square"):
        tz.det(Value(TensorType((2, 3), float32)))
    with pytest.raises(DTypeError, match="floats"):
        tz.det(Value(TensorType((3, 3), int32)))
