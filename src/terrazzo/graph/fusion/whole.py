"""Kernels that are one operator: those with loops of their own, attention, and the host's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from terrazzo.base.scalar import Load, Scalar
from terrazzo.base.shapes import contiguous_strides
from terrazzo.errors import UnsupportedOperator
from terrazzo.expr.ir import Program, Tensor
from terrazzo.graph.applying import constant
from terrazzo.graph.fusion.groups import Group
from terrazzo.graph.fusion.reading import strided_view
from terrazzo.graph.fusion.stages import Placed, Uses
from terrazzo.graph.ir import Node, Value


def whole_kernel(node: Node, uses: Uses, placed: Placed, inlined: Mapping[Tensor, Scalar | None]
                 ) -> Group:
    """The kernel of a node, which reads views of what lies in memory by their strides."""
    if node.op.loops is None and node.op.kind != "attention" and node.op.reference is None:
        raise UnsupportedOperator(f"operator {node.op.name!r} has no code for any chip",
                                  where=node.where)
    values, inputs = [], []
    for value in (v for v in node.inputs if v is not None):
        if node.op.starts_from_first and value is node.inputs[0]:
            value = _as_number(value, placed)
        tensor = placed.tensors[value]
        body = inlined.get(tensor)
        view = None if body is None else strided_view(tensor, body)
        if view is None:
            inputs.append(Tensor(tensor.name, value.shape, value.dtype))
        else:
            assert isinstance(body, Load)
            inputs.append(view)
            value = placed.values[body.source]
        values.append(value)
    results, outputs = _results_of(node, uses, placed)
    kind = "attention" if node.op.kind == "attention" else (
        "opaque" if node.op.loops is not None else "host")
    program = Program(placed.names.fresh(f"k_{node.op.name}"), tuple(inputs), tuple(outputs),
                      tuple(outputs), kind, {"node": node})
    return Group(program, tuple(values), results, (node,))


def _as_number(value: Value, placed: Placed) -> Value:
    """The number that a value is full of, in memory; the value itself where it is not."""
    node = value.node
    if node is None or node.op.name != "full":
        return value
    number = constant(node.attrs["value"], value.dtype)
    assert number.node is not None
    placed.constants[number] = number.node.attrs["value"]
    placed.place(number, "number")
    return number


def stored_by(turn: Node, uses: Uses) -> Node | None:
    """The attention that exchanges axes as a permutation wants it, as it stores."""
    source = turn.inputs[0] if turn.op.name == "permute_dims" else None
    if source is None or source.node is None or source.node.op.kind != "attention" or (
            source in uses.outputs):
        return None
    alone = len(uses.consumers[source]) == 1
    keeps_last = turn.attrs["axes"][-1] % source.ndim == source.ndim - 1
    return source.node if alone and keeps_last and source.ndim > 1 else None


def _results_of(node: Node, uses: Uses, placed: Placed
                ) -> tuple[tuple[Value, ...], list[Tensor]]:
    """The values a whole kernel writes, and how."""
    found = [_result(value, node, uses, placed) for value in node.outputs]
    return tuple(value for value, _ in found), [tensor for _, tensor in found]


def _result(value: Value, node: Node, uses: Uses, placed: Placed) -> tuple[Value, Tensor]:
    turn = next((user for user in uses.consumers.get(value, ())
                 if stored_by(user, uses) is node), None)
    if turn is None:
        return value, placed.place(value, node.op.name)
    turned = turn.outputs[0]
    lies = placed.place(turned, node.op.name)
    dense = contiguous_strides(turned.shape)
    axes = [a % value.ndim for a in turn.attrs["axes"]]
    strides = tuple(dense[axes.index(d)] for d in range(value.ndim))
    placed.tensors[value] = lies
    return turned, replace(lies, shape=value.shape, strides=strides)
