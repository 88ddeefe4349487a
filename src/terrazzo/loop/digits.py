"""Loops over a number whose digits are what is meant, where the radix is known when they run.

A fused loop runs over `task`, and its body asks for `task // width % height` and `task % width`.
Divisions by known numbers are multiplications in machine code; one by a symbolic size takes as long
as dozens of operations on vectors. So the loop becomes one over rows around one over what is in a
row, of which the first and the last may be ragged.

A radix that is the number of parts of a plan is no size: tasks of a plan are long, and two loops
more in each product of matrices cost time to compile for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from terrazzo.base.scalar import as_scalar, call
from terrazzo.index import (
    FloorDiv,
    Index,
    IndexExpr,
    Max,
    Min,
    Mod,
    Sum,
    Var,
    bounds,
    ceildiv,
    free_vars,
    maximum,
    minimum,
)
from terrazzo.loop.ir import For, If, Stmt, indices_of, substitute_vars, walk

_MOST_DIGITS = 2  # further ones change too seldom for their divisions to matter


def by_digits(loop: For, sizes: Set[Var], digits: int = _MOST_DIGITS) -> Stmt:
    """A serial loop as loops over the digits of its variable, as far as radices are of `sizes`."""
    radix = _radix(loop, sizes) if digits and sizes else None
    if radix is None:
        return loop
    name = loop.var.name
    row, rest = Var(f"{name}.row", 0), Var(f"{name}.rest", 0, radix - 1)
    body = substitute_vars(loop.body, {loop.var: row * radix + rest})
    within = For(rest, maximum(loop.lo - row * radix, 0), minimum(loop.hi - row * radix, radix),
                 body)
    rows = by_digits(For(row, loop.lo // radix, ceildiv(loop.hi, radix), within), sizes,
                     digits - 1)
    low = bounds(radix)[0]
    if low is not None and low > 0:
        return rows
    # Where there is nothing to run over, the radix may be 0.
    return If(call("lt", as_scalar(loop.lo), as_scalar(loop.hi)), rows)


def _radix(loop: For, sizes: Set[Var]) -> Index | None:
    """What the last digit of a loop's variable counts up to, if it is asked for and symbolic."""
    for stmt in walk(loop.body):
        for index in indices_of(stmt):
            for node in _parts(index):
                if isinstance(node, Mod) and node.num is loop.var and (
                        set() < free_vars(node.den) <= sizes):
                    return node.den
    return None


def _parts(index: Index) -> Iterator[IndexExpr]:
    """Every expression in an index, each once."""
    left: list[Index] = [index]
    seen: set[Index] = set()
    while left:
        node = left.pop()
        if not isinstance(node, IndexExpr) or node in seen:
            continue
        seen.add(node)
        yield node
        if isinstance(node, (FloorDiv, Mod)):
            left += (node.num, node.den)
        elif isinstance(node, (Min, Max)):
            left += node.args
        elif isinstance(node, Sum):
            left += (atom for monomial, _ in node.terms for atom in monomial)
