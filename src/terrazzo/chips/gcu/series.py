"""Sums of index expressions over a loop, in closed form.

What a loop counts in an iteration is a line in its variable, or a line that is cut off above and
below: the last block of a row is shorter than the others. Both have sums without a loop.
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
    ceildiv,
    coefficient,
    free_vars,
    maximum,
    minimum,
    substitute,
)
from terrazzo.index.nodes import canonical, items, without_atom


class Clamp(NamedTuple):
    """`min(max(first + step * var, lo), hi)`, where lo <= hi; None: no such end."""

    first: Index
    step: int
    lo: Index | None
    hi: Index | None


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
        made = made + rest * _of_clamp(clamp, lo, lo + count)
    step = coefficient(plain, var)
    if step is None:
        return None
    return made + _of_line(substitute(plain, {var: 0}), step, lo, count)


def _of_line(first: Index, step: Index, lo: Index, count: Index) -> Index:
    return first * count + step * (count * (2 * lo + count - 1) // 2)


def clamp_of(index: IndexExpr, var: Var) -> Clamp | None:
    """A minimum or maximum as a line that is cut off, if it is one."""
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
    if not isinstance(step, int) or step == 0 or (lo is None and hi is None):
        return None
    if lo is not None and hi is not None and (bounds(hi - lo)[0] or -1) < 0 and hi != lo:
        return None
    return Clamp(substitute(inner, {var: 0}), step, lo, hi)


def _of_clamp(clamp: Clamp, start: Index, end: Index) -> Index:
    """Its sum over start <= var < end: a flat piece, a slope, a flat piece."""
    first, step, lo, hi = clamp
    if lo is not None and hi is not None and hi - lo == abs(step):
        return lo * (end - start) + _of_blocks(clamp, start, end)
    left, right = (hi, lo) if step < 0 else (lo, hi)
    width = abs(step)
    falls = first if step < 0 else -first

    def crossing(level: Index) -> Index:  # where the line passes a level
        return falls - level if step < 0 else level + falls

    begin = start if left is None else _within(crossing(left) // width + 1, start, end)
    stop = end if right is None else _within(ceildiv(crossing(right), width), begin, end)
    made = _of_line(first, step, begin, stop - begin)
    if left is not None:
        made = made + left * (begin - start)
    return made if right is None else made + right * (end - stop)


def _of_blocks(clamp: Clamp, start: Index, end: Index) -> Index:
    """The sum where the slope is one step long: blocks of a row, of which the last is shorter.

    Each is what is left of the row before it, less what is left behind it.
    """
    assert clamp.lo is not None
    first = clamp.first - clamp.lo - (0 if clamp.step < 0 else clamp.step)

    def left(at: Index) -> Index:
        return maximum(first + clamp.step * at, 0)

    return left(start) - left(end) if clamp.step < 0 else left(end) - left(start)


def _within(place: Index, start: Index, end: Index) -> Index:
    return minimum(maximum(place, start), end)
