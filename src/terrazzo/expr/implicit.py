"""Convolutions as matrix products: positions are rows, outputs columns, taps and channels k.

What lies under the window at a position is a row of a matrix that nobody makes: the place of each
of its elements follows from quotients and remainders of the row's number and of k. Where the window
hangs over an edge, an element is a load under a condition (`Factor.guarded`). Groups are a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from terrazzo.base.scalar import Axis, Scalar, rewrite, substitute_indices
from terrazzo.base.shapes import num_elements, unflatten
from terrazzo.expr.contraction import ContractionStage, match_contraction
from terrazzo.expr.ir import Program, fresh_axis
from terrazzo.index import Index, Var, coefficient

PIECE = 16  # steps of k that matrix units multiply at once


def implicit_product(program: Program) -> Program | None:
    """A convolution as a program that is one product, `y[row, column]`; None for all others."""
    found = match_contraction(program)
    if found is None or not found.positions or found.stage.strides is not None:
        return None
    stage, reduce, outputs, groups = found.stage, found.reduce, found.outputs, found.groups
    row, places = _merged("row", found.places)
    k, taps = _merged("k", order_of_k(found))
    columns: tuple[Axis, ...] = (outputs,)
    if groups > 1:
        share = outputs.extent // groups
        columns = (fresh_axis("group", groups), fresh_axis(outputs.var.name, share))
        places[outputs.var] = columns[0].var * share + columns[1].var
    total = replace(reduce, axes=(k,), value=substitute_indices(reduce.value, taps),
                    contraction=None)
    body = rewrite(found.body, lambda node: total if node is reduce else None)
    axes = (row, *columns)
    made = replace(stage, axes=axes, shape=tuple(a.hi for a in axes),
                   body=substitute_indices(body, places))
    return replace(program, stages=(made,), outputs=(made,), attrs={"rows": len(axes)})


def _merged(name: str, axes: Sequence[Axis]) -> tuple[Axis, dict[Var, Index]]:
    """One axis in the place of several, and those in terms of it."""
    extents = [a.extent for a in axes]
    one = fresh_axis(name, num_elements(extents))
    return one, dict(zip((a.var for a in axes), unflatten(one.var, extents), strict=True))


def order_of_k(found: ContractionStage) -> list[Axis]:
    """The axes of the sum, of which the last is the fastest.

    Channels, where each piece of k then has one tap; of fewer channels, what lies side by side in
    memory.
    """
    channel, axes = found.channel, list(found.reduce.axes)
    if channel is not None and isinstance(channel.extent, int) and channel.extent % PIECE == 0:
        return [*(a for a in axes if a is not channel), channel]
    read = found.x.guarded
    address = None if read is None else read[0].source.flat(read[0].indices)
    if address is None or isinstance(address, Scalar):
        return axes
    steps = {a: coefficient(address, a.var) for a in axes}
    known = {a: n for a, n in steps.items() if isinstance(n, int)}
    return sorted(axes, key=lambda a: -known[a]) if len(known) == len(axes) else axes


__all__ = ["PIECE", "implicit_product", "order_of_k"]
