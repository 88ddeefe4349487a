"""How much arithmetic a program does, for the roofline and the profiler."""

from __future__ import annotations

from terrazzo.base.scalar import OPS, Call, Load, Reduce, Scalar, children, walk
from terrazzo.base.shapes import num_elements
from terrazzo.expr.ir import Program
from terrazzo.expr.regions import axis_range
from terrazzo.index import Index, Var
from terrazzo.loop.bounds import Interval, interval_of


def work(program: Program) -> tuple[Index, Index]:
    """Arithmetic operations, and the bytes that must be read and written at least once."""
    touched = dict.fromkeys((*program.inputs, *program.outputs))
    size: Index = 0
    for tensor in touched:
        size = size + num_elements(tensor.shape) * tensor.dtype.itemsize
    if program.kind == "attention" and len(program.outputs) == 3:  # gradients: five products
        g, query, key = program.inputs[:3]
        five = 3 * num_elements(query.shape) + 2 * num_elements(g.shape)
        return 2 * five * key.shape[-2], size
    if program.kind == "attention":
        query, key = program.inputs[:2]
        both = num_elements(query.shape) + num_elements(program.outputs[0].shape)
        return 2 * both * key.shape[-2], size
    total: Index = 0
    for stage in program.stages:
        if stage.body is not None:
            ranges = {a.var: Interval(a.lo, a.hi - 1) for a in stage.axes}
            total = total + _operations(stage.body, ranges) * num_elements(stage.shape)
    return total, size


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
            if isinstance(node, Call) and node.op != "cast" and not _is_guard(node):
                total = total + OPS[node.op].cost
            stack.extend(children(node))
    return total


def _is_guard(node: Call) -> bool:
    """Whether a node only asks where an element is, or chooses by that: borders are no work."""
    asked = node.args[0] if node.op == "where" else node
    return not any(isinstance(n, (Load, Reduce)) for n in walk(asked))
