"""How much arithmetic a program does, for the roofline and the profiler."""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.expr.plan import Stage
from terrazzo.expr.regions import axis_range
from terrazzo.index import Index, Var
from terrazzo.loop.bounds import Interval, interval_of
from terrazzo.scalar import OPS, Call, Reduce, Scalar, children
from terrazzo.shapes import num_elements


def count_operations(stages: Sequence[Stage]) -> Index:
    """Arithmetic operations of a program, as the roofline counts them."""
    total: Index = 0
    for stage in stages:
        ranges = {a.var: Interval(a.lo, a.hi - 1) for a in stage.axes}
        per_element, weights = _operations(stage.body, ranges), num_elements(stage.tensor.shape)
        total = total + per_element * weights
    return total


def _operations(expr: Scalar, ranges: dict[Var, Interval]) -> Index:
    total: Index = 0
    seen: set[int] = set()
    stack = [expr]
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Reduce):
            inner = dict(ranges)
            count: Index = 1
            for axis in node.axes:
                inner[axis.var] = axis_range(axis, inner)
                extent = interval_of(axis.extent, inner).hi
                count = count * (axis.extent if extent is None else extent)
            total = total + count * (_operations(node.value, inner) + 1)
        else:
            if isinstance(node, Call) and node.op != "cast":
                total = total + OPS[node.op].cost
            stack.extend(children(node))
    return total
