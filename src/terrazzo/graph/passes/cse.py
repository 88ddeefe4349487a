"""Nodes that compute the same thing become one (value numbering)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from terrazzo.base.shapes import normalize_axes
from terrazzo.graph.ir import Graph, Node, Value
from terrazzo.graph.rewrite import Applied, describe, sweep

# Swapping operands of these gives the same bits; maximum is not among them: its zeros have signs.
_SYMMETRIC = frozenset({"add", "multiply", "equal", "not_equal", "bitwise_and", "bitwise_or",
                        "bitwise_xor"})
_COMPARED_BYTES = 1 << 16  # larger arrays are the same only if they are the same object


def common_subexpressions(graph: Graph, log: list[Applied] | None = None) -> Graph:
    """Compute each thing once: equal operators on equal inputs with equal attributes."""
    numbers: dict[Hashable, Node] = {}

    def visit(node: Node) -> tuple[Value, ...] | None:
        if node.op.effects:
            return None
        first = numbers.setdefault(_key(node), node)
        if first is node:
            return None
        if log is not None and node.op.name != "constant":
            log.append(Applied("common subexpressions", describe(node), node.where))
        return first.outputs

    return sweep(graph, visit)


def _key(node: Node) -> Hashable:
    inputs: list[int] = [-1 if v is None else id(v) for v in node.inputs]
    if node.op.name in _SYMMETRIC:
        inputs.sort()
    attrs = tuple((name, frozen(_plain(node, name))) for name in sorted(node.attrs))
    return id(node.op), tuple(inputs), attrs, node.types


def _plain(node: Node, name: str) -> Any:
    """An attribute in the one form among those that mean the same: axes of a reduction."""
    value, source = node.attrs[name], node.inputs[0] if node.inputs else None
    if name != "axis" or node.op.kind != "reduce" or source is None:
        return value
    return tuple(sorted(normalize_axes(value, source.ndim)))


def frozen(value: Any) -> Hashable:
    """An attribute as something that is equal and hashable exactly when the attribute is equal."""
    if isinstance(value, np.ndarray):
        bits = value.tobytes() if value.nbytes <= _COMPARED_BYTES else id(value)
        return "array", value.dtype.str, value.shape, bits
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(frozen, value))
    if isinstance(value, dict):
        return "dict", tuple((k, frozen(value[k])) for k in sorted(value))
    if isinstance(value, slice):
        return "slice", frozen(value.start), frozen(value.stop), frozen(value.step)
    if isinstance(value, float):
        return float, value.hex()  # tells 0.0 from -0.0, and finds nan equal to itself
    try:
        hash(value)
    except TypeError:
        return "object", id(value)
    return type(value), value
