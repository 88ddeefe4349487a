"""Converters whose addresses are data, against ONNX's evaluator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from one_node import check, one_node, run
from symbolic import check_symbolic, imported

from terrazzo.base.shapes import dims

pytestmark = pytest.mark.onnx


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def counted(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)


# ---------------------------------------------------------------- gathering
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_gather(axis: int, kind: Any) -> None:
    check("Gather", [counted(3, 4, 5), np.array([[0, -1], [2, 1]], kind)], axis=axis)


def test_gather_of_a_scalar_index() -> None:
    check("Gather", [counted(3, 4, dtype=np.int64), np.asarray(np.int64(-2))], axis=1)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather_elements_of_a_part(axis: int) -> None:
    """Indices may be fewer than the tensor has along the other axes."""
    x, indices = counted(3, 4), np.array([[0, -1, 2], [1, 0, -2]])
    part = x[:, :3] if axis == 0 else x[:2]
    check("GatherElements", [x, indices], axis=axis,
          expected=[np.take_along_axis(part, indices, axis)])


@pytest.mark.parametrize("batch_dims, indices", [
    (0, [[0, 1], [2, -1]]), (0, [[1]]), (1, [[[1], [0]], [[2], [-1]], [[0], [0]]]),
    (2, [[[1], [0]], [[1], [0]], [[0], [0]]]),
])
def test_gather_nd(batch_dims: int, indices: Any) -> None:
    check("GatherND", [counted(3, 2, 4) if batch_dims == 2 else counted(3, 4, 2),
                       np.array(indices, np.int64)], opset=13, batch_dims=batch_dims)


# ---------------------------------------------------------------- scattering
@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.float16])
def test_scatters(reduction: str, dtype: Any, rng: np.random.Generator) -> None:
    x = rng.integers(-4, 5, (4, 5)).astype(dtype)
    spots = np.array([[0, -1], [3, 1]]) if reduction == "none" else np.array([[0, 0], [-1, 3]])
    check("ScatterElements", [x, spots, counted(2, 2, dtype=dtype) + 2], opset=18, axis=1,
          reduction=reduction)
    rows = np.array([[1], [-1]]) if reduction == "none" else np.array([[1], [1]])
    check("ScatterND", [x, rows, counted(2, 5, dtype=dtype) - 3], opset=18, reduction=reduction)


def test_scatter_before_it_was_renamed() -> None:
    check("Scatter", [counted(3, 3), np.array([[1, 0, 2]]), -np.ones((1, 3), np.float32)],
          opset=9, axis=0, expected=[np.array([[0, -1, 2], [-1, 4, 5], [6, 7, -1]], np.float32)])


def test_scatter_by_coordinates() -> None:
    check("ScatterND", [counted(2, 3, 4), np.array([[[0, 1], [1, -1]]]),
                        -counted(1, 2, 4)], opset=18)


@pytest.mark.parametrize("mode", ["linear", "circular"])
@pytest.mark.parametrize("axis", [-2, 1])
def test_tensor_scatter(mode: str, axis: int) -> None:
    cache, update = counted(2, 5, 6, 3), -counted(2, 5, 2, 3)
    if axis == 1:
        cache, update = counted(2, 6, 4), -counted(2, 2, 4)
    starts = ints(4, 1) if mode == "linear" else ints(5, 1)
    check("TensorScatter", [cache, update, starts], opset=24, mode=mode, axis=axis)
    check("TensorScatter", [cache, update], opset=24, mode=mode, axis=axis)


# ---------------------------------------------------------------- one-hot, orders, triangles
@pytest.mark.parametrize("opset", [9, 11])
def test_one_hot(opset: int) -> None:
    indices, values = np.array([[0, 3], [7, 1]], np.int64), np.array([2, 5], np.int32)
    check("OneHot", [indices, np.asarray(np.int64(4)), values], opset=opset, axis=1)
    negative = np.array([-1, -4, -5, 2], np.float32)
    hot = np.arange(4) == (negative + np.where(
        (negative < 0) & (opset >= 11), 4, 0))[:, None]
    check("OneHot", [negative, np.array([4.0], np.float32), values], opset=opset,
          expected=[np.where(hot, np.int32(5), np.int32(2))])


@pytest.mark.parametrize("opset", [7, 10, 11])
@pytest.mark.parametrize("axis", [0, -1])
def test_top_k(opset: int, axis: int, rng: np.random.Generator) -> None:
    x = rng.integers(0, 5, (4, 6)).astype(np.float32)  # with many ties
    if opset < 10:
        check("TopK", [x], opset=opset, outputs=2, k=3, axis=axis)
    else:
        check("TopK", [x, ints(3)], opset=opset, outputs=2, axis=axis)


def test_top_k_of_the_smallest() -> None:
    x = np.array([[3, 1, 1, 2], [9, -2, 0, -2]], np.int64)
    check("TopK", [x, ints(3)], opset=11, outputs=2, largest=0, expected=[
        np.array([[1, 1, 2], [-2, -2, 0]]), np.array([[1, 2, 3], [1, 3, 2]])])


@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.bool_])
@pytest.mark.parametrize("k", [None, -2, 0, 1, 9])
def test_trilu(dtype: Any, k: int | None) -> None:
    x = (counted(2, 3, 4) + 1).astype(dtype)
    for upper in (0, 1):
        check("Trilu", [x, None if k is None else np.asarray(np.int64(k))], opset=14, upper=upper,
              expected=[(np.triu if upper else np.tril)(x, k or 0)])


@pytest.mark.parametrize("time", [0, 1])
def test_reverse_sequence(time: int) -> None:
    x = counted(4, 4, 2)
    check("ReverseSequence", [x, ints(1, 4, 0, 3)], opset=10, time_axis=time, batch_axis=1 - time)


# ---------------------------------------------------------------- as many as there are
def test_compress_by_a_known_condition() -> None:
    x = counted(3, 4)
    for axis, condition in ((1, [0, 1, 1]), (None, [1, 0, 0, 1, 1]), (-2, [1, 0])):
        model = one_node("Compress", [x, np.array(condition, bool)], opset=11,
                         **({} if axis is None else {"axis": axis}))
        result = imported(model, {"x0": x.shape}, {"x1": np.array(condition, bool)})
        expected = np.compress(condition, x, axis=axis)
        assert result.graph.outputs[0].shape == expected.shape


def test_non_zero_of_a_constant_and_of_ones() -> None:
    (found,) = imported(one_node("NonZero", [counted(2, 3)]), {}, {
        "x0": counted(2, 3) % 2}).constants.values()
    np.testing.assert_array_equal(found, np.nonzero(counted(2, 3) % 2))


def test_places_that_hang_on_contents_are_left_to_the_host() -> None:
    for operator, inputs in (("NonZero", [counted(3)]), ("Unique", [counted(3)]),
                             ("Compress", [counted(3), np.array([True, False, True])])):
        with pytest.raises(AssertionError, match=r"not known|no code"):
            run(operator, inputs)


# ---------------------------------------------------------------- symbolic sizes
def test_gathers_of_symbolic_sizes() -> None:
    model = one_node("Gather", [counted(5, 4), np.zeros((2, 3), np.int64)])
    check_symbolic(model, {"x0": ("v", 4), "x1": ("b", "n")}, {},
                   [{"v": 5, "b": 2, "n": 3}, {"v": 2, "b": 1, "n": 7}])
    b, n = dims("b n")
    model = one_node("OneHot", [np.zeros((2, 3), np.int64), ints(4), np.ones(2, np.float32)])
    result = imported(model, {"x0": (b, n), "x2": (2,)}, {"x1": ints(4)})
    assert result.graph.outputs[0].shape == (b, n, 4)
