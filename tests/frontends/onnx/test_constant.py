"""Converters that make tensors from nothing, against ONNX's evaluator."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from one_node import check, run
from onnx import helper, numpy_helper
from symbolic import check_symbolic, imported

from terrazzo.base.shapes import dim
from terrazzo.index import maximum

pytestmark = pytest.mark.onnx


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.parametrize("attributes, expected", [
    ({"value_float": 1.5}, np.float32(1.5)),
    ({"value_floats": [1.0, -2.5]}, np.array([1, -2.5], np.float32)),
    ({"value_int": -3}, np.int64(-3)),
    ({"value_ints": [2**40, 1]}, np.array([2**40, 1])),
    ({"value": numpy_helper.from_array(np.ones((2, 0), np.uint8))}, np.ones((2, 0), np.uint8)),
    ({"value": numpy_helper.from_array(np.array(True))}, np.array(True)),
], ids=lambda a: next(iter(a)) if isinstance(a, dict) else "")
def test_constant(attributes: dict[str, Any], expected: np.ndarray) -> None:
    check("Constant", [], opset=13, expected=[np.asarray(expected)], **attributes)


def test_sparse_constant() -> None:
    sparse = helper.make_sparse_tensor(
        numpy_helper.from_array(np.array([3, 4], np.float32)),
        numpy_helper.from_array(np.array([1, 5])), [2, 3])
    check("Constant", [], opset=13, sparse_value=sparse,
          expected=[np.array([[0, 3, 0], [0, 0, 4]], np.float32)])


@pytest.mark.parametrize("attributes", [
    {"value_string": "a"}, {"value_strings": ["a", "b"]},
    {"value": helper.make_tensor("t", 8, [1], [b"a"])}], ids=lambda a: next(iter(a)))
def test_strings_are_refused(attributes: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="strings"):
        run("Constant", [], opset=13, **attributes)


@pytest.mark.parametrize("value", [
    None, np.array([2.5], np.float32), np.array([-3], np.int8), np.array([True]),
    np.array([1.5], np.float16), np.array([1.5], ml_dtypes.bfloat16)], ids=str)
def test_constant_of_shape(value: np.ndarray | None) -> None:
    attributes = {} if value is None else {"value": numpy_helper.from_array(value)}
    kind = np.dtype(np.float32) if value is None else value.dtype
    for shape in ((2, 3), (0, 4), ()):
        expected = np.zeros(shape, kind) if value is None else np.full(shape, value[0], kind)
        check("ConstantOfShape", [ints(*shape)], opset=20, expected=[expected], **attributes)


@pytest.mark.parametrize("start, limit, delta", [
    (0, 5, 1), (3, 10, 4), (5, -4, -3), (2, 2, 1), (4, 1, 1)])
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32, np.float64])
def test_range(start: int, limit: int, delta: int, dtype: Any) -> None:
    check("Range", [np.asarray(dtype(v)) for v in (start, limit, delta)], opset=11)


def test_range_of_fractions_ends_where_it_should() -> None:
    for limit, delta in ((1.0, 0.1), (0.95, 0.1), (-1.0, -0.3)):
        check("Range", [np.asarray(np.float32(v)) for v in (0.0, limit, delta)], opset=11)


@pytest.mark.parametrize("k", [-1, 0, 2])
def test_eye_like(k: int) -> None:
    check("EyeLike", [np.zeros((3, 4), np.int32)], opset=9, k=k)
    check("EyeLike", [np.zeros((3, 4), np.int32)], opset=9, k=k, dtype=11)


def test_shapes_and_ranges_of_sizes() -> None:
    """ones(n), range(n) and range(2, n*2, 3) for any n, in one graph."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("ConstantOfShape", ["shape"], ["zeros"]),
        helper.make_node("Squeeze", ["shape"], ["n"]),
        helper.make_node("Constant", [], ["zero"], value_int=0),
        helper.make_node("Constant", [], ["two"], value_int=2),
        helper.make_node("Constant", [], ["three"], value_int=3),
        helper.make_node("Constant", [], ["one"], value_int=1),
        helper.make_node("Range", ["zero", "n", "one"], ["counted"]),
        helper.make_node("Mul", ["n", "two"], ["twice"]),
        helper.make_node("Range", ["two", "twice", "three"], ["steps"]),
        helper.make_node("Cast", ["n"], ["n_float"], to=1),
        helper.make_node("Constant", [], ["zero_float"], value_float=0.0),
        helper.make_node("Constant", [], ["one_float"], value_float=1.0),
        helper.make_node("Range", ["zero_float", "n_float", "one_float"], ["floats"]),
    ]
    outputs = ["zeros", "counted", "steps", "floats"]
    graph = helper.make_graph(
        nodes, "sizes", [helper.make_tensor_value_info("x", 1, ["n"])],
        [helper.make_tensor_value_info(o, 0, None) for o in outputs])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    n = dim("n")
    result = imported(model, {"x": (n,)}, {})
    assert [v.shape for v in result.graph.outputs] == [
        (n,), (n,), (maximum((n * 2) // 3, 0),), (n,)]
    check_symbolic(model, {"x": ("n",)}, {}, [{"n": 5}, {"n": 1}, {"n": 8}])


def test_a_range_without_steps_is_refused() -> None:
    with pytest.raises(AssertionError, match="delta of 0"):
        run("Range", [ints(0).reshape(()), ints(3).reshape(()), ints(0).reshape(())], opset=11)


def test_a_shape_below_nothing_is_refused() -> None:
    with pytest.raises(AssertionError, match="asked for the shape"):
        run("ConstantOfShape", [ints(2, -3)], opset=9)


def test_range_of_microsoft_steps_by_one_unless_told() -> None:
    (y,) = run("Range", [np.array(1), np.array(4)], domain="com.microsoft")
    np.testing.assert_array_equal(y, [1, 2, 3])
    (y,) = run("Range", [np.array(5), np.array(0), np.array(-2)], domain="com.microsoft")
    np.testing.assert_array_equal(y, [5, 3, 1])
