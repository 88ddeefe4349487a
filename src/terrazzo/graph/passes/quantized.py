"""Quantised graphs: float operators between dequantising and quantising become integer kernels.

A model quantised ahead of time says with each operator what its operands are (dequantised bytes)
and what becomes of its result (quantised to bytes), and leaves the operator itself in floats. The
rewrites here keep what such a graph computes to within one quantum of each quantised value:

- products and convolutions of dequantised bytes are sums of 32 bits times the product of scales;
- what only chooses or moves elements does so with bytes;
- quantising what was just dequantised gives the bytes that it was;
- division by a constant scale is moved into the constants of the arithmetic before it.

Operands are looked at through permutes and reshapes, which convolutions are surrounded by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from terrazzo.base.shapes import normalize_axis
from terrazzo.dtypes import float32, int8, uint8
from terrazzo.graph.applying import constant
from terrazzo.graph.ir import Graph, Node, Value, operator_named
from terrazzo.graph.patterns import constant_array, same_type
from terrazzo.graph.rebuild import rebuild
from terrazzo.graph.rewrite import LEVELS, Applied, describe, use_counts
from terrazzo.graph.scopes import trace_scope
from terrazzo.ops.quant import convolve_bytes

LEVEL = "extended"
_BYTES = (uint8, int8)
_SUMS_OF_BYTES = ("integer_matmul", "integer_convolve")
Uses = Mapping[Value, int]


def _op(name: str, *args: Value | None, **attrs: Any) -> Value:
    return operator_named(name)(*args, **attrs)


# ---------------------------------------------------------------- what a value is
@dataclass(frozen=True, eq=False)
class Quantised:
    """A float value as bytes with a constant scale and zero point, along an axis or for all."""

    values: Value
    scale: np.ndarray
    zero: np.ndarray | None
    axis: int | None  # None: one scale for all

    @property
    def zero_value(self) -> Value | None:
        return None if self.zero is None else constant(self.zero, self.values.dtype)


def dequantised(value: Value | None) -> Quantised | None:
    """What a value was before it was dequantised, moved as it was moved since; None if it was not.

    Only parameters that are constants count, and no blocks.
    """
    node = None if value is None else value.node
    source = node.inputs[0] if node is not None and node.inputs else None
    if node is None or source is None:
        return None
    if node.op.name == "permute_dims":
        inner = dequantised(source)
        if inner is None:
            return None
        axes = tuple(a % source.ndim for a in node.attrs["axes"])
        return replace(inner, values=_op("permute_dims", inner.values, axes=axes),
                       axis=None if inner.axis is None else axes.index(inner.axis))
    if node.op.name == "reshape":
        inner = dequantised(source)
        if inner is None or inner.axis is not None:
            return None
        return replace(inner, values=_op("reshape", inner.values, shape=node.types[0].shape))
    if node.op.name != "dequantize_linear" or source.dtype not in _BYTES:
        return None
    _, scale, zero = (*node.inputs, None)[:3]
    factors, offsets = constant_array(scale), constant_array(zero)
    if factors is None or (zero is not None and offsets is None) or (
            node.types[0].dtype is not float32 or node.attrs["block_size"]):
        return None
    axis = None
    if factors.size != 1 or (offsets is not None and offsets.size != 1):
        axis = normalize_axis(node.attrs["axis"], source.ndim)
    shape = () if axis is None else (-1,)
    return Quantised(source, factors.reshape(shape),
                     None if offsets is None else offsets.reshape(shape), axis)


def _factor(scale: np.ndarray) -> Value:
    return constant(scale.astype(np.float32).reshape(() if scale.size == 1 else scale.shape),
                    float32)


# ---------------------------------------------------------------- products
def _convolve(node: Node, uses: Uses) -> Value | None:
    x, w = map(dequantised, node.inputs)
    if x is None or w is None or x.axis is not None or node.types[0].dtype is not float32 or (
            w.axis not in (None, w.values.ndim - 1)):
        return None
    total = convolve_bytes(x.values, w.values, x.zero_value, w.zero_value, **node.attrs)
    return _op("multiply", _op("astype", total, dtype=float32), _factor(x.scale * w.scale))


def _matmul(node: Node, uses: Uses) -> Value | None:
    x, y = map(dequantised, node.inputs)
    if x is None or y is None or node.types[0].dtype is not float32:
        return None
    x, y = (_turned(q) if node.attrs[flag] else q
            for q, flag in ((x, "transpose_x"), (y, "transpose_y")))
    if x.axis is not None or y.axis not in (None, y.values.ndim - 1):
        return None
    total = _op("matmul_integer", x.values, y.values, x.zero_value, y.zero_value)
    return _op("multiply", _op("astype", total, dtype=float32), _factor(x.scale * y.scale))


def _turned(q: Quantised) -> Quantised:
    """The transposes of matrices."""
    rank = q.values.ndim
    axes = (*range(rank - 2), rank - 1, rank - 2)
    return replace(q, values=_op("permute_dims", q.values, axes=axes),
                   axis=None if q.axis is None else axes.index(q.axis))


# ---------------------------------------------------------------- choosing and moving
def _largest_byte(node: Node, uses: Uses) -> Value | None:
    """The largest of dequantised numbers is the largest byte, dequantised: scales are positive."""
    x = dequantised(node.inputs[0])
    if x is None or x.axis is not None or x.scale.item() <= 0:
        return None
    largest = _op(node.op.name, x.values, **node.attrs)
    return _op("dequantize_linear", largest, _factor(x.scale), x.zero_value)


def _joined(node: Node, uses: Uses) -> Value | None:
    """A join of what has one scale and zero point."""
    parts = [dequantised(v) for v in node.inputs]
    first = parts[0]
    if first is None or first.axis is not None:
        return None
    values = []
    for part in parts:
        if part is None or part.axis is not None or part.values.dtype is not first.values.dtype or (
                part.scale.item() != first.scale.item() or _zero(part) != _zero(first)):
            return None
        values.append(part.values)
    joined = operator_named("concat")(*values, **node.attrs)
    return _op("dequantize_linear", joined, _factor(first.scale), first.zero_value)


def _zero(q: Quantised) -> int:
    return 0 if q.zero is None else int(q.zero.item())


# ---------------------------------------------------------------- there and back
def _parameters(node: Node) -> tuple[Value | None, Value | None]:
    _, scale, zero = (*node.inputs, None)[:3]
    return scale, zero


def _quantised_again(node: Node, uses: Uses) -> Value | None:
    """Bytes come back as they were: an integer times a scale, divided by it, rounds to itself."""
    inner = dequantised(node.inputs[0])
    scale, zero = map(constant_array, _parameters(node))
    if inner is None or inner.axis is not None or scale is None or scale.size != 1 or (
            _parameters(node)[1] is not None and (zero is None or zero.size != 1)):
        return None
    same = scale.item() == inner.scale.item() and _zero(inner) == (0 if zero is None else zero)
    return inner.values if same and inner.values.dtype is node.types[0].dtype else None


def _unsigned(node: Node, uses: Uses) -> Value | None:
    """Signed bytes between quantising and dequantising might as well be unsigned ones.

    Instructions multiply unsigned bytes (activations) by signed ones (weights).
    """
    inner = None if node.inputs[0] is None else node.inputs[0].node
    if inner is None or inner.op.name != "quantize_linear" or inner.types[0].dtype is not int8:
        return None
    zeros = [_parameters(n)[1] for n in (inner, node)]
    arrays = [np.zeros((), np.int8) if z is None else constant_array(z) for z in zeros]
    if any(a is None for a in arrays):
        return None
    first, second = (constant(a.astype(np.int16) + 128, uint8) for a in arrays if a is not None)
    x, scale = inner.inputs[0], _parameters(inner)[0]
    quantised = _op("quantize_linear", x, scale, first, **{**inner.attrs, "dtype": None})
    return _op("dequantize_linear", quantised, _parameters(node)[0], second, **node.attrs)


# ---------------------------------------------------------------- scales into constants
def _divided_before(node: Node, uses: Uses) -> Value | None:
    """Division by a constant scale moves into the constants that the dividend is made with."""
    x = node.inputs[0]
    scale, zero = _parameters(node)
    divisor = constant_array(scale)
    if x is None or divisor is None or divisor.size != 1 or x.dtype is not float32:
        return None
    number = float(divisor.reshape(()))
    fresh = None if not number > 0 else _scaled(x, 1.0 / number, uses)
    return None if fresh is None else _op("quantize_linear", fresh, None, zero, **node.attrs)


def _scaled(value: Value, factor: float, uses: Uses, depth: int = 12) -> Value | None:
    """A value times a positive number, at no further cost; None where there is no such form."""
    known = constant_array(value)
    if known is not None:
        return constant((known.astype(np.float64) * factor).astype(np.float32), float32)
    node = value.node
    if node is None or depth == 0 or value.dtype is not float32:
        return None
    name, inputs = node.op.name, [v for v in node.inputs if v is not None]
    if name == "dequantize_linear":
        scale = constant_array(inputs[1])
        if scale is None or scale.dtype != np.float32:
            return None
        fresh = constant((scale.astype(np.float64) * factor).astype(np.float32), float32)
        return _op("dequantize_linear", inputs[0], fresh, *inputs[2:], **node.attrs)
    if uses.get(value) != 1:
        return None  # it would be computed twice
    if name == "multiply":
        for x, other in (inputs, inputs[::-1]):
            if constant_array(other) is not None:
                moved = _scaled(other, factor, uses)
                assert moved is not None
                return _op("multiply", x, moved)
        return None
    if name in ("add", "subtract", "maximum", "minimum"):
        parts = [_scaled(v, factor, uses, depth - 1) for v in inputs]
        return None if any(p is None for p in parts) else _op(name, *parts)
    if name in ("permute_dims", "reshape"):
        part = _scaled(inputs[0], factor, uses, depth - 1)
        return None if part is None else _op(name, part, **node.attrs)
    return None


def _offset_after(node: Node, uses: Uses) -> Value | None:
    """(sum - correction) * scale as sum * scale - correction * scale, which is one constant.

    The sum alone may have more digits than a float32: what is lost is a 2**-24th of it, far below
    the quantum of a result that is made of it.
    """
    for total, other in (node.inputs, node.inputs[::-1]):
        scale = constant_array(other)
        if scale is None or total is None or total.node is None or uses.get(total) != 1:
            continue
        difference = total.node.inputs[0] if total.node.op.name == "astype" else None
        inner = None if difference is None else difference.node
        if difference is None or inner is None or inner.op.name not in ("add", "subtract") or (
                difference.dtype.name != "int32" or uses.get(difference) != 1):
            continue
        sums, correction = inner.inputs
        offset = constant_array(correction)
        if offset is None or sums is None or _maker(sums) not in _SUMS_OF_BYTES:
            continue
        moved = offset.astype(np.float64) * scale * (1 if inner.op.name == "add" else -1)
        return _op("add", _op("multiply", _op("astype", sums, dtype=float32), other),
                   constant(moved.astype(np.float32), float32))
    return None


def _maker(value: Value) -> str:
    """The operator that made a value, before reshapes."""
    while value.node is not None and value.node.op.name == "reshape":
        assert value.node.inputs[0] is not None
        value = value.node.inputs[0]
    return "" if value.node is None else value.node.op.name


def _constants_added(node: Node, uses: Uses) -> Value | None:
    """Two constants that are added one after the other, added beforehand."""
    for inner_value, outer in (node.inputs, node.inputs[::-1]):
        inner = None if inner_value is None else inner_value.node
        if inner_value is None or inner is None or inner.op.name != "add" or uses.get(
                inner_value) != 1 or (
                node.types[0].dtype is not float32):
            continue
        second = constant_array(outer)
        for x, other in (inner.inputs, inner.inputs[::-1]):
            first = constant_array(other)
            if first is not None and second is not None and x is not None and _is_requantising(x):
                return _op("add", x, constant(first + second, float32))
    return None


def _is_requantising(value: Value) -> bool:
    node = value.node
    return node is not None and node.op.name == "multiply" and any(
        v is not None and v.node is not None and v.node.op.name == "astype" and
        v.node.inputs[0] is not None and _maker(v.node.inputs[0]) in _SUMS_OF_BYTES
        for v in node.inputs)


class Rewrite(NamedTuple):
    """A named rewrite of the nodes of some operators."""

    name: str
    operators: tuple[str, ...]
    build: Callable[[Node, Uses], Value | None]


REWRITES = (
    Rewrite("quantise what was dequantised", ("quantize_linear",), _quantised_again),
    Rewrite("convolve bytes", ("convolve",), _convolve),
    Rewrite("multiply matrices of bytes", ("batch_matmul",), _matmul),
    Rewrite("largest byte", ("window_max", "max"), _largest_byte),
    Rewrite("join bytes", ("concat",), _joined),
    Rewrite("quantise to unsigned bytes", ("dequantize_linear",), _unsigned),
    Rewrite("correct sums after scaling", ("multiply",), _offset_after),
    Rewrite("add constants once", ("add",), _constants_added),
    Rewrite("scale before quantising", ("quantize_linear",), _divided_before),
)


def quantized(graph: Graph, log: list[Applied] | None = None, level: str = "all",
              most: int | None = None) -> Graph:
    """Apply the rewrites of this file until none applies, or so many were."""
    if LEVELS.index(level) < LEVELS.index(LEVEL) or not any(
            node.op.family == "quant" for node in graph.nodes):
        return graph
    applied: list[Applied] = []
    while True:
        before = len(applied)
        graph = _one_round(graph, applied, most)
        if len(applied) == before:
            if log is not None:
                log.extend(applied)
            return graph


def _one_round(graph: Graph, applied: list[Applied], most: int | None) -> Graph:
    """Visit every node once, producers first; counts of uses follow what is rebuilt."""
    uses = use_counts(graph)

    def visit(node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value] | None:
        fresh = node
        if any(a is not b for a, b in zip(inputs, node.inputs, strict=True)):
            fresh = Node(node.op, inputs, node.attrs, node.types, node.where)
            uses.update((b, uses.get(a, 0)) for a, b in zip(node.outputs, fresh.outputs))
        for rewrite in REWRITES:
            if node.op.name not in rewrite.operators or (
                    most is not None and len(applied) >= most):
                continue
            with trace_scope():
                answer = rewrite.build(fresh, uses)
            if answer is not None and same_type(answer.type, node.types[0]):
                applied.append(Applied(rewrite.name, describe(node), node.where))
                answer = _settled(answer, uses, node.where)
                uses[answer] = uses.get(node.outputs[0], 1)
                return (answer,)
        return fresh.outputs

    return rebuild(graph, visit)


def _settled(answer: Value, uses: dict[Value, int], where: str) -> Value:
    """What a rewrite made, as from the line of the node it replaces, with its uses counted."""
    table: dict[Value, Value] = {}
    stack = [answer]
    while stack:
        node = stack[-1].node
        if node is None or stack[-1] in uses or stack[-1] in table:
            stack.pop()
            continue
        waiting = [v for v in node.inputs if v is not None and v.node is not None
                   and v not in uses and v not in table]
        if waiting:
            stack.extend(waiting)
            continue
        inputs = tuple(None if v is None else table.get(v, v) for v in node.inputs)
        fresh = Node(node.op, inputs, node.attrs, node.types, where)
        table.update(zip(node.outputs, fresh.outputs, strict=True))
    made = set(table.values())
    for value in made:
        for v in value.node.inputs if value.node is not None and value.index == 0 else ():
            if v is not None and v in made:
                uses[v] = uses.get(v, 0) + 1
    return table.get(answer, answer)
