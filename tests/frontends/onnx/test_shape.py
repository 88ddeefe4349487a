"""Converters that move elements, against ONNX's evaluator and numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from one_node import check, one_node, run
from symbolic import check_symbolic, shapes_of

from terrazzo.base.shapes import dims
from terrazzo.errors import TerrazzoError
from terrazzo.index.guards import Guard

pytestmark = pytest.mark.onnx

LAST = np.iinfo(np.int64).max


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def counted(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)


# ---------------------------------------------------------------- other shapes
@pytest.mark.parametrize("target", [(6, 4), (-1,), (0, -1), (2, 0, 2, -1), (1, 2, 3, 4, 1)])
def test_reshape(target: tuple[int, ...]) -> None:
    check("Reshape", [counted(2, 3, 4), ints(*target)], opset=13)


def test_reshape_keeps_zeros_when_told() -> None:
    x = np.zeros((0, 3), np.float32)
    check("Reshape", [x, ints(3, 4, 0)], opset=14, allowzero=1)
    check("Reshape", [x, ints(3, -1)], opset=14)


def test_reshape_resolves_sizes_by_division() -> None:
    b, n = dims("b n")
    (result,) = shapes_of(one_node("Reshape", [counted(2, 6, 8), ints(0, 0, 2, -1)]),
                          {"x0": (b, n, 8)}, {"x1": ints(0, 0, 2, -1)})
    assert result == (b, n, 2, 4)
    (result,) = shapes_of(one_node("Reshape", [counted(2, 6, 8), ints(-1, 8)]),
                          {"x0": (b, n, 8)}, {"x1": ints(-1, 8)})
    assert result == (b * n, 8)


@pytest.mark.parametrize("axis", [0, 1, 3, -1])
def test_flatten(axis: int) -> None:
    check("Flatten", [counted(2, 3, 4)], axis=axis)


@pytest.mark.parametrize("opset", [7, 11, 13, 21])
def test_squeeze_and_unsqueeze(opset: int) -> None:
    x = counted(1, 3, 1, 2)
    if opset < 13:
        check("Squeeze", [x], opset=opset, axes=[0, 2])
        check("Unsqueeze", [x], opset=opset, axes=[1, 4])
    else:
        check("Squeeze", [x, ints(0, -2)], opset=opset)
        check("Unsqueeze", [x, ints(-1, 1)], opset=opset)
    check("Squeeze", [x], opset=opset)


def test_squeeze_of_unknown_sizes_is_refused() -> None:
    (n,) = dims("n")
    with pytest.raises(AssertionError, match="which sizes are 1"):
        shapes_of(one_node("Squeeze", [counted(1, 3)]), {"x0": (1, n)}, {})


def test_squeeze_of_axes_that_are_none() -> None:
    (y,) = run("Squeeze", [counted(1, 3, 1), ints()])
    np.testing.assert_array_equal(y, [0, 1, 2])


@pytest.mark.parametrize("dtype", ["float16", "int8", "bool", "uint64"])
def test_transpose_keeps_the_type(dtype: str) -> None:
    check("Transpose", [counted(2, 3, 4, dtype=dtype)], perm=[1, 2, 0])
    check("Transpose", [counted(2, 3, 4, dtype=dtype)])


@pytest.mark.parametrize("target", [(3, 1), (2, 1, 6), (1, 1), (3, 6), (0, 3, 1)])
def test_expand_goes_both_ways(target: tuple[int, ...]) -> None:
    check("Expand", [counted(3, 1), ints(*target)], opset=13)


def test_tile() -> None:
    check("Tile", [counted(2, 3), ints(2, 1)], opset=13)
    check("Tile", [counted(2, 3), ints(0, 2)], opset=13)


# ---------------------------------------------------------------- joining and splitting
def test_concat() -> None:
    parts = [counted(2, 3), counted(2, 0), counted(2, 1)]
    check("Concat", parts, axis=-1)
    check("Concat", [p.astype(np.int8) for p in parts], axis=1)


@pytest.mark.parametrize("opset", [7, 11, 13, 18])
def test_split(opset: int) -> None:
    x = counted(2, 6)
    given: dict[str, Any] = {"opset": opset, "axis": -1}
    if opset < 13:
        check("Split", [x], outputs=3, split=[1, 0, 5], **given)
    else:
        check("Split", [x, ints(1, 0, 5)], outputs=3, **given)
    check("Split", [x], outputs=2, **given, **({"num_outputs": 2} if opset == 18 else {}))


def test_split_into_uneven_parts() -> None:
    check("Split", [counted(7)], outputs=4, opset=18, num_outputs=4)
    parts = run("Split", [counted(5)], outputs=4, opset=18, num_outputs=4)
    assert [len(p) for p in parts] == [2, 2, 1, 0]


def test_split_refuses_parts_that_do_not_add_up() -> None:
    with pytest.raises(AssertionError, match="into 2 parts of sizes"):
        run("Split", [counted(5), ints(2, 2)], outputs=2, opset=13)


# ---------------------------------------------------------------- slices
@pytest.mark.parametrize("start, end, step", [
    (1, 3, 1), (0, LAST, 2), (-2, LAST, 1), (-100, -1, 1), (3, 1, 1), (7, 9, 1),
    (LAST, -LAST - 1, -1), (-1, -100, -2), (3, 0, -1), (0, 3, -1), (2, 2, 1),
])
def test_slice_clamps_as_numpy_does(start: int, end: int, step: int) -> None:
    x = counted(2, 5)
    (y,) = run("Slice", [x, ints(start), ints(end), ints(1), ints(step)], opset=13)
    np.testing.assert_array_equal(y, x[:, slice(start, end, step)])


@pytest.mark.parametrize("start, end, step, expected", [
    (-5, -10, -1, [0]), (-LAST, -LAST, -1, [0]), (-4, -10, -2, [0]), (-3, -10, -1, [0]),
    (-5, 0, -1, []), (-2, -10, -1, [1, 0]),
])
def test_going_back_a_start_before_the_first_element_is_the_first(
        start: int, end: int, step: int, expected: list[int]) -> None:
    (y,) = run("Slice", [counted(3), ints(start), ints(end), ints(0), ints(step)], opset=13)
    np.testing.assert_array_equal(y, expected)
    (y,) = run("Slice", [counted(0), ints(start), ints(end), ints(0), ints(step)], opset=13)
    assert y.shape == (0,)


@pytest.mark.parametrize("opset", [7, 10, 11, 13])
def test_slice_of_several_axes(opset: int) -> None:
    x = counted(4, 5, 6)
    if opset < 10:
        check("Slice", [x], opset=opset, starts=[1, -3], ends=[3, LAST], axes=[0, 2])
        check("Slice", [x], opset=opset, starts=[1], ends=[-1])
    else:
        check("Slice", [x, ints(1, -3), ints(3, LAST), ints(0, -1)], opset=opset)
        check("Slice", [x, ints(1), ints(-1)], opset=opset)


def test_slices_of_symbolic_sizes() -> None:
    """What can be proved needs no assumption, and what is assumed is said."""
    b, n = dims("b n")
    model = one_node("Slice", [counted(2, 6), ints(0), ints(1), ints(1)], opset=13)
    for start, end, shape, assumed in [
            (0, 1, (b, 1), [Guard("<=", 1, n)]),
            (0, LAST, (b, n), []),
            (-3, LAST, (b, 3), [Guard("<=", 3, n)]),
    ]:
        known = {"x1": ints(start), "x2": ints(end), "x3": ints(1)}
        (result,), guards = shapes_of(model, {"x0": (b, n)}, known, guards=True)
        assert result == shape and list(guards) == assumed


def test_a_long_slice_of_a_symbolic_size_takes_what_is_there() -> None:
    model = one_node("Slice", [counted(2, 6), ints(0), ints(100), ints(1)], opset=13)
    known = {"x1": ints(0), "x2": ints(100), "x3": ints(1)}
    check_symbolic(model, {"x0": ("b", "n")}, known, [{"b": 2, "n": 7}, {"b": 1, "n": 120}])


# ---------------------------------------------------------------- borders
@pytest.mark.parametrize("mode", ["constant", "reflect", "edge", "wrap"])
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_pad(mode: str, dtype: Any) -> None:
    check("Pad", [counted(3, 4, dtype=dtype), ints(1, 2, 0, 3)], opset=19, mode=mode)


@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
def test_pad_wider_than_the_axis(mode: str) -> None:
    check("Pad", [counted(3, 2), ints(7, 0, 4, 5)], opset=19, mode=mode)


@pytest.mark.parametrize("opset", [7, 11, 13, 18])
def test_pad_by_a_value(opset: int) -> None:
    x, value = counted(2, 3), np.float32(1.5)
    if opset < 11:
        check("Pad", [x], opset=opset, pads=[0, 1, 2, 0], value=1.5)
    else:
        check("Pad", [x, ints(0, 1, 2, 0), np.asarray(value)], opset=opset)


def test_pad_crops_where_negative() -> None:
    x = counted(4, 5)
    (y,) = run("Pad", [x, ints(-1, 2, 0, -3)], opset=13)
    np.testing.assert_array_equal(y, np.pad(x[1:, :2], ((0, 0), (2, 0))))
    (y,) = run("Pad", [x, ints(0, -2, 0, 1)], opset=13, mode="edge")
    np.testing.assert_array_equal(y, np.pad(x[:, 2:], ((0, 0), (0, 1)), mode="edge"))


def test_pad_of_named_axes() -> None:
    check("Pad", [counted(2, 3, 4), ints(1, 0, 2, 3), np.asarray(np.float32(7)), ints(-1, 0)],
          opset=18)


@pytest.mark.parametrize("sizes", [(4, 4), (9, 2), (5, 7)])
def test_center_crop_pad(sizes: tuple[int, ...]) -> None:
    check("CenterCropPad", [counted(5, 7), ints(*sizes)], opset=18)
    check("CenterCropPad", [counted(5, 2, 7), ints(*sizes)], opset=18, axes=[0, -1])


# ---------------------------------------------------------------- blocks of pixels
@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_depth_to_space(mode: str) -> None:
    check("DepthToSpace", [counted(2, 8, 3, 2)], opset=13, blocksize=2, mode=mode)


def test_space_to_depth() -> None:
    check("SpaceToDepth", [counted(2, 3, 4, 6)], opset=13, blocksize=2)


def test_identity() -> None:
    for dtype in ("float64", "int16", "bool"):
        check("Identity", [counted(2, 3, dtype=dtype)])


def test_reshape_to_an_impossible_shape_says_so() -> None:
    with pytest.raises((AssertionError, TerrazzoError), match="number of elements"):
        run("Reshape", [counted(2, 3), ints(4, 2)])
