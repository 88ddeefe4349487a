"""Windows that are cut off at edges, as whole windows with conditions.

A window of a pool ends where its image does, so that each row of such a reduction has a length of
its own, and a program would have one row. Of equal lengths, many rows run side by side.
"""

from __future__ import annotations

from dataclasses import replace

from terrazzo.base.scalar import (
    Axis,
    Load,
    Reduce,
    Scalar,
    as_scalar,
    call,
    identity_of,
    rewrite,
    substitute_indices,
    where,
)
from terrazzo.expr.ir import Program, Tensor, fresh_axis
from terrazzo.index import bounds, free_vars

_LONGEST = 64  # positions of a range that are worth to be tested one by one


def even_windows(program: Program) -> Program:
    """The program with equal ranges for all rows, where they are short; scans keep theirs."""
    if program.scans:
        return program
    table: dict[Tensor, Tensor] = {}

    def visit(node: Scalar) -> Scalar | None:
        if isinstance(node, Load) and node.source in table:
            return Load(node.dtype, table[node.source], node.indices)
        return _even(node) if isinstance(node, Reduce) and node.reducer is None else None

    for stage in program.stages:
        assert stage.body is not None
        body = rewrite(stage.body, visit)
        table[stage] = stage if body is stage.body else replace(stage, body=body)
    if all(old is new for old, new in table.items()):
        return program
    return replace(program, stages=tuple(table.values()),
                   outputs=tuple(table[o] for o in program.outputs))


def _even(node: Reduce) -> Reduce | None:
    axes, value = list(node.axes), node.value
    tests: list[Scalar] = []
    for d, axis in enumerate(node.axes):
        whole = _whole(axis)
        if whole is None or (free_vars(axis.lo) | free_vars(axis.hi)) & {a.var for a in node.axes}:
            continue
        axes[d] = whole
        value = substitute_indices(value, {axis.var: whole.var})
        place = as_scalar(whole.var)
        tests += [call("ge", place, as_scalar(axis.lo))] if axis.lo != whole.lo else []
        tests += [call("lt", place, as_scalar(axis.hi))] if axis.hi != whole.hi else []
    if not tests:
        return None
    inside = tests[0]
    for test in tests[1:]:
        inside = call("and", inside, test)
    return replace(node, axes=tuple(axes), value=where(inside, value, identity_of(node)))


def _whole(axis: Axis) -> Axis | None:
    """The range that holds those of all rows, if theirs differ and that one is short."""
    if not free_vars(axis.extent):
        return None
    low, top = bounds(axis.lo)[0], bounds(axis.hi)[1]
    if low is None or top is None or not 0 < top - low <= _LONGEST:
        return None
    return fresh_axis(axis.var.name, top, low)
