"""Converters of reductions, places of extrema and running sums, against ONNX's evaluator."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from one_node import check, run
from several_nodes import Case, check_all

pytestmark = pytest.mark.onnx
REDUCTIONS = ("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean",
              "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare")
FORMS: list[dict[str, Any]] = [{"axes": [1]}, {"axes": [0, -1], "keepdims": 0}, {},
                               {"keepdims": 0}, {"axes": [2, 0]}]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_axes_as_attributes(rng: np.random.Generator, dtype: str) -> None:
    x = rng.uniform(0.5, 1.5, (3, 4, 2)).astype(dtype)
    cases: list[Case] = [(op, [0], form) for op in REDUCTIONS for form in FORMS]
    # The evaluator adds half floats up in half precision.
    check_all(cases, [x], opset=11, rtol=1e-5 if dtype != "float16" else 2e-2)


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("noop", [0, 1])
def test_axes_as_inputs(rng: np.random.Generator, empty: bool, noop: int) -> None:
    x = rng.uniform(0.5, 1.5, (3, 4, 2)).astype(np.float32)
    axes = np.array([] if empty else [0, -1], np.int64)
    cases: list[Case] = [(op, [0, 1], {"keepdims": keep, "noop_with_empty_axes": noop})
                         for op in REDUCTIONS for keep in (0, 1)]
    check_all(cases, [x, axes], opset=18)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint64"])
def test_integers(rng: np.random.Generator, dtype: str) -> None:
    x = rng.integers(1, 9, (3, 5)).astype(dtype)
    cases: list[Case] = [(op, [0], {"axes": [1]}) for op in (
        "ReduceSum", "ReduceProd", "ReduceMax", "ReduceMin", "ReduceL1")]
    check_all(cases, [x], opset=11)
    squares = (x * x).sum(1, keepdims=True, dtype=dtype)
    check("ReduceSumSquare", [x], opset=11, axes=[1], expected=[squares])


def test_a_mean_of_integers_is_cut_off() -> None:
    x = np.array([[1, 2, 2], [-1, -2, -2]], np.int32)
    check("ReduceMean", [x], opset=13, axes=[1], expected=[np.array([[1], [-1]], np.int32)])


@pytest.mark.parametrize(("operator", "expected"), [
    ("ReduceMax", -math.inf), ("ReduceMin", math.inf), ("ReduceSum", 0.0), ("ReduceProd", 1.0),
    ("ReduceLogSumExp", -math.inf), ("ReduceL2", 0.0)])
def test_nothing_to_reduce(operator: str, expected: float) -> None:
    (y,) = run(operator, [np.zeros((2, 0, 3), np.float32), np.array([1])], keepdims=0)
    assert y.shape == (2, 3) and (y == expected).all()


def test_bool_extrema() -> None:
    x = np.array([[True, False], [False, False]])
    axes = np.array([1])
    check("ReduceMax", [x, axes], opset=20, keepdims=0, expected=[np.array([True, False])])
    check("ReduceMin", [x, axes], opset=20, keepdims=0, expected=[np.array([False, False])])


@pytest.mark.parametrize("opset", [7, 11, 13])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_places(rng: np.random.Generator, opset: int, dtype: str) -> None:
    x = rng.integers(0, 4, (3, 5, 6)).astype(dtype)  # many equals
    forms: list[dict[str, Any]] = [{}, {"axis": 1}, {"axis": -1, "keepdims": 0}]
    if opset > 11:
        forms += [{**form, "select_last_index": 1} for form in forms]
    check_all([(op, [0], form) for op in ("ArgMax", "ArgMin") for form in forms], [x],
              opset=opset)


@pytest.mark.parametrize("operator", ["CumSum", "CumProd"])
@pytest.mark.parametrize("dtype", ["float32", "int32", "int64"])
def test_running(rng: np.random.Generator, operator: str, dtype: str) -> None:
    x = rng.integers(1, 4, (3, 5)).astype(dtype)
    function = np.cumsum if operator == "CumSum" else np.cumprod
    for axis, exclusive, reverse in [(0, 0, 0), (-1, 1, 0), (1, 0, 1), (1, 1, 1)]:
        values = np.flip(x, axis) if reverse else x
        expected = function(values, axis=axis, dtype=dtype)
        if exclusive:
            expected = np.roll(expected, 1, axis)
            expected[:, 0] = 0 if operator == "CumSum" else 1
        expected = np.flip(expected, axis) if reverse else expected
        check(operator, [x, np.array(axis)], opset=26, expected=[expected], exclusive=exclusive,
              reverse=reverse)
