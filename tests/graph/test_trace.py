"""Tracing: Python functions become graphs, and what cannot be traced says why and where."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from terrazzo.base.nests import pack
from terrazzo.base.shapes import dim
from terrazzo.dtypes import float32
from terrazzo.errors import ArgumentError, TracedControlFlow
from terrazzo.graph.ir import TensorType, Value
from terrazzo.graph.trace import trace
from terrazzo.ops.elementwise import exp

F4 = TensorType((4,), float32)


def test_results_keep_their_structure() -> None:
    Pair = namedtuple("Pair", "first second")
    graph, structure = trace(lambda x: {"a": x, "b": [exp(x), Pair(x, x * 2)]}, [F4])
    assert len(graph.outputs) == 4
    packed = pack(structure, ["w", "x", "y", "z"])
    assert packed == {"a": "w", "b": ["x", Pair("y", "z")]}
    assert type(packed["b"][1]) is Pair


def test_single_results_are_plain() -> None:
    _, structure = trace(lambda x: exp(x), [F4])
    assert pack(structure, ["y"]) == "y"


def test_optional_inputs_are_left_out() -> None:
    graph, _ = trace(lambda x, bias: exp(x) if bias is None else x + bias, [F4, None])
    assert len(graph.inputs) == 1


def test_attributes_pass_through() -> None:
    graph, _ = trace(lambda x, *, factor: x * factor, [F4], factor=3.0)
    assert "multiply(x0, 3.0)" in str(graph)


def test_nodes_remember_the_line_that_made_them() -> None:
    graph, _ = trace(lambda x: exp(x), [F4])
    assert "test_trace.py" in graph.nodes[0].where


def test_returning_nothing_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="forgetful returned None"):
        trace(lambda x: None, [F4], name="forgetful")


def branch(x: Value) -> Any:
    return x if x > 0 else -x


def count(x: Value) -> Any:
    return sum(x for _ in range(int(x)))


def index(x: Value) -> Any:
    return [1, 2, 3][x]  # type: ignore[call-overload]


@pytest.mark.parametrize(("function", "text"), [
    (branch, "if, while"),
    (lambda x: x and x, "if, while"),
    (count, "int()"),
    (lambda x: float(x), "float()"),
    (index, "Python index"),
    (lambda x: np.asarray(x), "a numpy function"),
])
def test_values_are_not_known_while_tracing(function: Callable[..., Any], text: str) -> None:
    with pytest.raises(TracedControlFlow) as info:
        trace(function, [TensorType((), float32)])
    message = str(info.value)
    assert text in message and "traced tensor of type" in message
    assert "test_trace.py" in message, "the user's line"
    assert "tz.where" in message, "what to do instead"


def test_functions_of_numpy_are_operators() -> None:
    assert "= exp(x0)" in str(trace(lambda x: np.exp(x), [F4])[0])


def test_length_of_a_symbolic_axis() -> None:
    with pytest.raises(TracedControlFlow, match="len"):
        trace(lambda x: len(x), [TensorType((dim("n"),), float32)])
    assert len(Value(F4)) == 4
