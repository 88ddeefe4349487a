"""Shapes: numpy's broadcasting and axis rules, also where dimensions are symbolic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terrazzo.base.shapes import (
    broadcast_shapes,
    contiguous_strides,
    dim,
    dims,
    dims_text,
    normalize_axes,
    normalize_axis,
    num_elements,
)
from terrazzo.errors import AxisError, BroadcastError, ShapeError
from terrazzo.index import bounds, evaluate

n, m = dims("n m")
shapes = st.lists(st.integers(0, 3), max_size=4).map(tuple)


@given(st.lists(shapes, max_size=4))
def test_broadcasting_is_numpys(operands: list[tuple[int, ...]]) -> None:
    try:
        expected = np.broadcast_shapes(*operands)
    except ValueError:
        with pytest.raises(BroadcastError, match="do not broadcast"):
            broadcast_shapes(*operands)
    else:
        assert broadcast_shapes(*operands) == expected


def test_symbolic_dimensions_broadcast_with_themselves_and_one() -> None:
    assert broadcast_shapes((n, 1), (m,)) == (n, m)
    assert broadcast_shapes((n, m), (1, 1), ()) == (n, m)
    assert broadcast_shapes((n * m,), (m * n,)) == (n * m,)
    assert broadcast_shapes((n * 2,), (n + n,)) == (n * 2,)


@pytest.mark.parametrize("other", [m, 4, n + 1])
def test_dimensions_that_may_differ_do_not_broadcast(other: object) -> None:
    with pytest.raises(BroadcastError, match=r"axis -1 is n in one .* and .* in another"):
        broadcast_shapes((n,), (other,))  # type: ignore[arg-type]


def test_the_error_says_what_to_do() -> None:
    with pytest.raises(ShapeError, match=r"\[2, 3\] and \[4\] do not broadcast") as known:
        broadcast_shapes((2, 3), (4,))
    assert "equal or 1" in str(known.value)
    with pytest.raises(ShapeError) as symbolic:
        broadcast_shapes((n,), (m,))
    assert "same dimension" in str(symbolic.value)


def test_axes_count_from_either_end() -> None:
    assert [normalize_axis(axis, 3) for axis in (-3, -1, 0, 2)] == [0, 2, 0, 2]
    assert normalize_axes(None, 3) == (0, 1, 2)
    assert normalize_axes(-1, 3) == (2,)
    assert normalize_axes((-1, 0), 3) == (0, 2)
    assert normalize_axes((), 3) == ()
    assert normalize_axes(np.array([-1]), 2) == (1,)


def test_axes_that_do_not_exist() -> None:
    with pytest.raises(AxisError, match=r"(?s)rank 2.*use -2 to 1"):
        normalize_axis(2, 2)
    with pytest.raises(AxisError, match="a scalar has no axes"):
        normalize_axis(0, 0)
    with pytest.raises(AxisError, match="twice"):
        normalize_axes((0, -2), 2)


def test_counting_elements() -> None:
    assert num_elements(()) == 1
    assert num_elements((2, 0, 3)) == 0
    assert num_elements((n, 4, m)) == n * m * 4


@given(shapes)
def test_strides_are_numpys(shape: tuple[int, ...]) -> None:
    if 0 not in shape:
        strides = np.empty(shape, np.int8).strides
        assert contiguous_strides(shape) == strides


def test_symbolic_strides() -> None:
    strides = contiguous_strides((4, n, m))
    assert strides == (n * m, m, 1)
    assert [evaluate(stride, {"n": 5, "m": 7}) for stride in strides] == [35, 7, 1]


def test_dimensions() -> None:
    assert dims("n, m") == (n, m)
    assert dim("n") is n
    assert bounds(n) == (0, None)
    assert dims_text((n, 4, m * 2)) == "[n, 4, m*2]"
    assert dims_text(()) == "[]"
