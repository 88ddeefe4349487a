"""What a program computes apart from the names in it: equal programs need one kernel only."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from terrazzo.base.scalar import Call, Const, FromIndex, Load, Reduce, Scalar, walk
from terrazzo.expr.ir import Program, Tensor
from terrazzo.index import Index, Var, free_vars, substitute


def structure(program: Program) -> Hashable:
    """A key that two programs share only if they differ in names alone.

    It stands for kind, tensors and outputs; `attrs` are left to the caller, who knows what they
    hold. Names of tensors and of variables that are summed over do not count.
    """
    numbers = {tensor: i for i, tensor in enumerate(
        dict.fromkeys((*program.inputs, *program.stages)))}
    return (program.kind, tuple(_tensor(t, numbers) for t in numbers),
            tuple(numbers[t] for t in program.outputs))


def _tensor(tensor: Tensor, numbers: Mapping[Tensor, int]) -> Hashable:
    body = None if tensor.body is None else _body(tensor.body, numbers)
    return tensor.shape, tensor.dtype, tensor.strides, tensor.axes, tensor.origin, body


def _body(root: Scalar, numbers: Mapping[Tensor, int]) -> Hashable:
    """The nodes in order, each naming its arguments by their place in that order."""
    table: dict[Var, Index] = {}
    for node in walk(root):
        for axis in node.axes if isinstance(node, Reduce) else ():
            table.setdefault(axis.var, Var(f"sum.{len(table)}", axis.var.lo, axis.var.hi))

    def index(value: Index) -> Index:
        return substitute(value, table) if free_vars(value) & table.keys() else value

    places: dict[int, int] = {}
    nodes: list[Hashable] = []
    for node in walk(root):
        places[id(node)] = len(nodes)
        nodes.append((node.dtype, _own(node, places, numbers, index)))
    return tuple(nodes)


def _own(node: Scalar, places: Mapping[int, int], numbers: Mapping[Tensor, int],
         index: Any) -> Hashable:
    """What a node says besides its type."""
    if isinstance(node, Call):
        return node.op, *(places[id(a)] for a in node.args)
    if isinstance(node, Load):
        return "load", numbers[node.source], tuple(
            ("computed", places[id(i)]) if isinstance(i, Scalar) else index(i)
            for i in node.indices)
    if isinstance(node, Reduce):
        roles = node.contraction and node.contraction.mapped(index)
        return "reduce", node.op, roles, places[id(node.value)], tuple(
            (index(a.var), index(a.lo), index(a.hi)) for a in node.axes)
    if isinstance(node, FromIndex):
        return "index", index(node.index)
    assert isinstance(node, Const)
    return "literal", type(node.value), repr(node.value)
