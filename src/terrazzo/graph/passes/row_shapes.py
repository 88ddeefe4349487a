"""Rules that keep what is computed of rows in the shape of those rows.

A norm of groups reduces rows of x seen as (images, groups, channels, pixels), brings the result
back to (images, all channels, pixels) and goes on there with scales, offsets and activations. All
that could be one kernel that reads a row once, if what follows kept the shape of the rows; so the
reshape moves behind it, where it costs nothing.
"""

from __future__ import annotations

from typing import Any

from terrazzo.base.shapes import Shape
from terrazzo.graph.ir import Node, Value, operator_named
from terrazzo.graph.patterns import P, same_shape, wildcards
from terrazzo.graph.rewrite import Rule, RuleTable

x, y = wildcards("x y")
DEPTH = 8  # operators between a reduction and a reshape of what its rows became
_UNARY = ("sigmoid", "tanh", "exp", "relu", "negative", "erf", "astype", "square")
_BINARY = ("add", "subtract", "multiply", "divide")


def _op(name: str, *args: Value, **attrs: Any) -> Value:
    return operator_named(name)(*args, **attrs)


def _split_axes(rows: Shape, flat: Shape) -> list[int] | None:
    """How many axes of `rows` make each axis of `flat`; None where they do not."""
    counts, at = [], 0
    for n in flat:
        if not isinstance(n, int) or n < 1:
            return None
        first, product = at, 1
        while at < len(rows) and (product < n or at == first):
            size = rows[at]
            if not isinstance(size, int):
                return None
            product, at = product * size, at + 1
        if product != n:
            return None
        counts.append(at - first)
    while at < len(rows) and counts and rows[at] == 1:
        counts[-1], at = counts[-1] + 1, at + 1
    return counts if at == len(rows) else None


def _of_rows(value: Value, flat: Shape) -> bool:
    """Whether each row of a value hangs on a reduction of a row, which `flat` tells no more."""
    todo = [(value, 0)]
    while todo:
        v, depth = todo.pop()
        if v.node is None or v.node.op.kind != "pointwise" or depth > DEPTH:
            continue
        for source in v.node.inputs:
            if source is None:
                continue
            if same_shape(source.shape, value.shape):
                todo.append((source, depth + 1))
                continue
            end = len(source.shape)
            while end and source.shape[end - 1] == 1:
                end -= 1
            prefix = value.shape[:end]
            if len(source.shape) == len(value.shape) and end and (
                    source.shape[:end] == prefix != flat[:end]) and _reduces(source):
                return True
    return False


def _reduces(value: Value) -> bool:
    todo = [(value, 0)]
    while todo:
        v, depth = todo.pop()
        if v.node is not None and v.node.op.kind == "reduce":
            return True
        if v.node is not None and v.node.op.kind == "pointwise" and depth < DEPTH:
            todo += [(s, depth + 1) for s in v.node.inputs if s is not None]
    return False


def _in_rows(value: Value, flat: Shape, rows: Shape, counts: list[int]) -> Value | None:
    """An operand of something of shape `flat` for one of shape `rows`; None where it moves."""
    if value.node is not None and value.node.op.name == "reshape" and (
            value.node.inputs[0] is not None
            and same_shape(value.node.inputs[0].shape, rows)):
        return value.node.inputs[0]
    own = (1,) * (len(flat) - value.ndim) + tuple(value.shape)
    if any(n != 1 and n != whole for n, whole in zip(own, flat, strict=True)):
        return None
    if same_shape(own, flat) and value.node is not None:
        return None  # what computes it would be torn away
    shape: list[Any] = []
    at = 0
    for n, count in zip(own, counts, strict=True):
        shape += rows[at:at + count] if n != 1 else [1] * count
        at += count
    return _op("reshape", value, shape=tuple(shape))


def _one_later(x: Value, moved: Value, node: Node) -> Value | None:
    if _split_axes(x.shape, moved.shape) is None or not _of_rows(x, moved.shape):
        return None
    return _op("reshape", _op(node.op.name, x, **node.attrs), shape=node.types[0].shape)


def _both_later(x: Value, y: Value, moved: Value, node: Node) -> Value | None:
    flat = node.types[0].shape
    counts = _split_axes(x.shape, flat) if same_shape(moved.shape, flat) else None
    if counts is None or not _of_rows(x, flat):
        return None
    other = _in_rows(y, flat, x.shape, counts)
    if other is None:
        return None
    first = node.inputs[0] is moved
    operands = (x, other) if first else (other, x)
    return _op("reshape", _op(node.op.name, *operands, **node.attrs), shape=flat)


_WHY = "so that a kernel that reduces rows may go on with them"
ROW_SHAPES = RuleTable((
    Rule("reshape after a function of rows", P.one_of(*_UNARY)(P.reshape(x).named("moved")),
         _one_later, "extended", _WHY),
    Rule("reshape after an operator on rows, left",
         P.one_of(*_BINARY)(P.reshape(x).named("moved"), y), _both_later, "extended", _WHY),
    Rule("reshape after an operator on rows, right",
         P.one_of(*_BINARY)(y, P.reshape(x).named("moved")), _both_later, "extended", _WHY),
))
