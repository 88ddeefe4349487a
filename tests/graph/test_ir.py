"""Graphs as data: text form, order of nodes, rebuilding, the registry, calling operators."""

from __future__ import annotations

import numpy as np
import pytest

from terrazzo.base.shapes import dim
from terrazzo.dtypes import bool_, float32, int64
from terrazzo.errors import ArgumentError, UnknownOperator
from terrazzo.graph.applying import constant
from terrazzo.graph.ir import OPERATORS, Graph, Node, TensorType, Value, operator_named
from terrazzo.graph.rebuild import rebuild, replace_inputs
from terrazzo.graph.trace import trace
from terrazzo.ops.elementwise import add, exp, multiply, tanh, where

F4 = TensorType((4,), float32)


def test_text_form() -> None:
    n = dim("n")

    def layer(x: Value, w: Value) -> Value:
        hidden = tanh(x * w + 1.5)
        return where(hidden > 0, hidden, OPERATORS["sum"](hidden, axis=-1, keepdims=True))

    graph, _ = trace(layer, [TensorType((n, 4), float32), F4], names=("x", "w"))
    assert str(graph) == """\
graph layer(x: f32[n, 4], w: f32[4]):
    %2: f32[n, 4] = multiply(x, w)
    %4: f32[n, 4] = add(%2, 1.5)
    %5: f32[n, 4] = tanh(%4)
    %7: bool[n, 4] = greater(%5, 0.0)
    %8: f32[n, 1] = sum(%5, axis=-1, keepdims=True)
    %9: f32[n, 4] = where(%7, %5, %8)
    return %9"""


def test_text_of_larger_constants_and_several_results() -> None:
    table = np.arange(4, dtype=np.float32)
    graph, _ = trace(lambda x: (x + table, x), [F4], name="two")
    assert str(graph) == """\
graph two(x0: f32[4]):
    %1: f32[4] = constant(value=<f32[4]>)
    %2: f32[4] = add(x0, %1)
    return %2, x0"""


def test_nodes_come_after_what_they_need_and_once() -> None:
    graph, _ = trace(lambda x: (exp(x) + exp(x)) * 2.0, [F4])
    places = {node: i for i, node in enumerate(graph.nodes)}
    assert len(places) == len(graph.nodes) == 5
    for node in graph.nodes:
        for value in node.inputs:
            assert value is not None
            assert value.node is None or places[value.node] < places[node]


def test_deep_graphs_need_no_recursion() -> None:
    def deep(x: Value) -> Value:
        for _ in range(3000):
            x = x + x
        return x

    graph, _ = trace(deep, [F4])
    assert len(graph.nodes) == 3000


def test_rebuild_replaces_and_keeps() -> None:
    graph, _ = trace(lambda x: exp(x) * tanh(x), [F4])

    def visit(node: Node, inputs: tuple[Value | None, ...]) -> tuple[Value, ...] | None:
        return (tanh(inputs[0]),) if node.op is exp else None

    changed = rebuild(graph, visit)
    assert [n.op.name for n in changed.nodes] == ["tanh", "tanh", "multiply"]
    assert [n.op.name for n in graph.nodes] == ["exp", "tanh", "multiply"]
    assert rebuild(graph, lambda node, inputs: None).outputs == graph.outputs


def test_replace_inputs_inlines() -> None:
    graph, _ = trace(lambda x: exp(x), [F4])
    outer = Value(F4, name="y")
    (result,) = replace_inputs(graph, [tanh(outer)])
    assert [n.op.name for n in Graph("g", (outer,), (result,)).nodes] == ["tanh", "exp"]


def test_constants_take_type_and_shape() -> None:
    assert constant(1.5).type == TensorType((), float32)
    assert constant(2).type == TensorType((), int64)
    assert constant(True).type == TensorType((), bool_)
    assert constant(np.zeros((2, 3), np.float16)).type.shape == (2, 3)
    assert constant(3, float32).node.attrs["value"].dtype == np.float32


def test_numbers_are_weak() -> None:
    x = Value(TensorType((2,), OPERATORS["astype"](Value(F4), dtype="float16").dtype))
    assert (x * 2.5).dtype is x.dtype
    assert (Value(TensorType((), int64)) + 1).dtype is int64


def test_unknown_operator_suggests() -> None:
    with pytest.raises(UnknownOperator, match="did you mean multiply"):
        operator_named("multipli")


@pytest.mark.parametrize(("call", "text"), [
    (lambda x: add(x), "misses its argument 'y'"),
    (lambda x: add(x, x, x), "1 arguments too many"),
    (lambda x: exp(x, base=2), "has no argument 'base'"),
    (lambda x: OPERATORS["astype"](x), "misses its argument 'dtype'"),
])
def test_wrong_calls_say_what_is_wrong(call: object, text: str) -> None:
    with pytest.raises(ArgumentError, match=text) as info:
        call(Value(F4))  # type: ignore[operator]
    assert "test_ir.py" in str(info.value)


def test_attributes_may_be_positional() -> None:
    assert OPERATORS["astype"](Value(F4), "int64").dtype is int64


def test_numpy_arrays_on_the_left_leave_the_operation_to_the_trace() -> None:
    result = np.ones(4, np.float32) * Value(F4)
    assert isinstance(result, Value) and result.node is not None and result.node.op is multiply


def test_a_users_operator_does_not_replace_one_of_ours():
    import terrazzo as tz

    ours = OPERATORS["gelu"]

    @tz.op
    def gelu(x):
        return x

    assert OPERATORS["gelu"] is ours
    assert gelu is not ours
