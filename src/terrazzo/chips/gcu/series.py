"""Sums of index expressions over a loop, in closed form.

What a loop counts in an iteration is mostly a line in its variable, or blocks of a row of which the
last is shorter than the others: a line cut off a step above its end. Both have short sums.
"""

from __future__ import annotations

from typing import NamedTuple

from terrazzo.index import (
    Index,
    IndexExpr,
    Max,
    Min,
    Var,
    bounds,
    coefficient,
    free_vars,
    maximum,
    minimum,
    substitute,
)
from terrazzo.index.nodes import canonical, items, without_atom


class Clamp(NamedTuple):
    """`min(max(first + step * var, lo), lo + |step|)`."""

    first: Index
    step: int
    lo: Index


def mentions(index: Index, var: Var) -> bool:
    """Whether a variable is in an index."""
    return isinstance(index, IndexExpr) and var in free_vars(index)


def positive(amount: Index) -> Index:
    """An amount, but 0 where it is negative."""
    least = bounds(amount)[0]
    return amount if least is not None and least >= 0 else maximum(amount, 0)


def total(amount: Index, var: Var, lo: Index, hi: Index) -> Index | None:
    """The sum of an amount over lo <= var < hi; None where it has no closed form that we know."""
    count = positive(hi - lo)
    if not mentions(amount, var):
        return amount * count
    plain: Index = 0
    made: Index = 0
    for monomial, factor in items(amount):
        cut = [atom for atom in monomial if atom is not var and mentions(atom, var)]
        if not cut:
            plain = plain + canonical({monomial: factor})
            continue
        rest = canonical({without_atom(monomial, cut[0]): factor})
        clamp = clamp_of(cut[0], var)
        if clamp is None or mentions(rest, var):
            return None
        made = made + rest * _of_blocks(clamp, lo, lo + count)
    step = coefficient(plain, var)
    if step is None:
        return None
    return made + _of_line(substitute(plain, {var: 0}), step, lo, count)


def _of_line(first: Index, step: Index, lo: Index, count: Index) -> Index:
    return first * count + step * (count * (2 * lo + count - 1) // 2)


def clamp_of(index: IndexExpr, var: Var) -> Clamp | None:
    """A minimum or maximum as blocks of a row, if it is that."""
    ends: dict[type, Index] = {}
    inner: Index = index
    while isinstance(inner, (Min, Max)):
        varying = [arg for arg in inner.args if mentions(arg, var)]
        others = [arg for arg in inner.args if not mentions(arg, var)]
        if len(varying) != 1 or not others or type(inner) in ends:
            return None
        end = others[0]
        for other in others[1:]:
            end = (minimum if isinstance(inner, Min) else maximum)(end, other)
        ends[type(inner)] = end
        inner = varying[0]
    step = coefficient(inner, var)
    lo, hi = ends.get(Max), ends.get(Min)
    if lo is None and maximum(index, 0) is index:
        lo = 0  # which nobody writes, as it holds anyway
    if not isinstance(step, int) or lo is None or hi is None or hi - lo != abs(step) or not step:
        return None  # others have sums too, but so long that a count in the loop is shorter
    return Clamp(substitute(inner, {var: 0}), step, lo)


def _of_blocks(clamp: Clamp, start: Index, end: Index) -> Index:
    """The sum over start <= var < end of blocks of a row, of which the last is shorter.

    Each is what is left of the row before it, less what is left behind it.
    """
    first = clamp.first - clamp.lo - (0 if clamp.step < 0 else clamp.step)

    def left(at: Index) -> Index:
        return maximum(first + clamp.step * at, 0)

    between = left(start) - left(end) if clamp.step < 0 else left(end) - left(start)
    return clamp.lo * (end - start) + between
