"""Symbolic intervals: the least and greatest value of an index when some variables range freely."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import NamedTuple

from terrazzo.index import (
    Algebra,
    Index,
    IndexExpr,
    Max,
    Min,
    Var,
    free_vars,
    interpret,
    maximum,
    minimum,
    proves_eq,
    proves_le,
    proves_lt,
)


class Interval(NamedTuple):
    """`lo <= x <= hi`, both ends included; None where no end is known."""

    lo: Index | None
    hi: Index | None

    @property
    def is_point(self) -> bool:
        return self.lo is not None and self.lo == self.hi


UNKNOWN = Interval(None, None)


def point(value: Index) -> Interval:
    """The interval that holds one value."""
    return Interval(value, value)


def interval_of(index: Index, ranges: Mapping[Var, Interval]) -> Interval:
    """Where an index lies when the variables of `ranges` take all their values, others stay."""
    if not isinstance(index, IndexExpr) or ranges.keys().isdisjoint(free_vars(index)):
        return point(index)
    return interpret(index, Algebra(
        constant=point,
        variable=lambda var: ranges.get(var, point(var)),
        add=_add,
        multiply=_multiply,
        floordiv=_floordiv,
        mod=_mod,
        minimum=_minimum,
        maximum=_maximum,
    ))


def hull(a: Interval, b: Interval) -> Interval:
    """The least interval around two."""
    return Interval(
        None if a.lo is None or b.lo is None else minimum(a.lo, b.lo),
        None if a.hi is None or b.hi is None else maximum(a.hi, b.hi),
    )


def clip(inner: Interval, outer: Interval) -> Interval:
    """The part of one interval that lies in another; an unknown end becomes the other's."""
    lo = inner.lo if outer.lo is None else (
        outer.lo if inner.lo is None else maximum(outer.lo, inner.lo))
    hi = inner.hi if outer.hi is None else (
        outer.hi if inner.hi is None else minimum(outer.hi, inner.hi))
    return Interval(lo, hi)


def _add(a: Interval, b: Interval) -> Interval:
    return Interval(
        None if a.lo is None or b.lo is None else plus(a.lo, b.lo),
        None if a.hi is None or b.hi is None else plus(a.hi, b.hi),
    )


def plus(a: Index, b: Index) -> Index:
    """`a + b`, with constants moved into minima and maxima, where further clipping meets them."""
    if isinstance(a, int):
        a, b = b, a
    if isinstance(b, int) and isinstance(a, (Min, Max)):
        combine = minimum if isinstance(a, Min) else maximum
        return reduce(combine, (arg + b for arg in a.args))
    return a + b


def length(lo: Index, hi: Index) -> Index:
    """`hi - lo`, as `min(16, n - o*16)` where hi is `min(o*16 + 16, n)` and lo is `o*16`."""
    if isinstance(hi, Min):
        return reduce(minimum, (arg - lo for arg in hi.args))
    return hi - lo


def _scale(a: Interval, factor: Index) -> Interval:
    if proves_le(0, factor):
        return Interval(
            None if a.lo is None else a.lo * factor, None if a.hi is None else a.hi * factor)
    if proves_le(factor, 0):
        return Interval(
            None if a.hi is None else a.hi * factor, None if a.lo is None else a.lo * factor)
    return UNKNOWN


def _multiply(a: Interval, b: Interval) -> Interval:
    if a.is_point and b.is_point:
        assert a.lo is not None and b.lo is not None
        return point(a.lo * b.lo)
    if b.is_point:
        assert b.lo is not None
        return _scale(a, b.lo)
    if a.is_point:
        assert a.lo is not None
        return _scale(b, a.lo)
    if all(x.lo is not None and proves_le(0, x.lo) for x in (a, b)):
        assert a.lo is not None and b.lo is not None
        return Interval(a.lo * b.lo, None if a.hi is None or b.hi is None else a.hi * b.hi)
    return UNKNOWN


def _floordiv(a: Interval, b: Interval) -> Interval:
    if not b.is_point or b.lo is None:
        return Interval(0, a.hi) if a.lo is not None and proves_le(0, a.lo) else UNKNOWN
    return Interval(
        None if a.lo is None else a.lo // b.lo, None if a.hi is None else a.hi // b.lo)


def _mod(a: Interval, b: Interval) -> Interval:
    if b.hi is None:
        return Interval(0, None)
    if not b.is_point:
        return Interval(0, b.hi - 1)
    if a.lo is not None and a.hi is not None and proves_eq(a.lo // b.hi, a.hi // b.hi):
        return Interval(a.lo % b.hi, a.hi % b.hi)
    top = b.hi - 1
    if a.lo is not None and a.hi is not None and proves_le(0, a.lo) and proves_lt(a.hi, top):
        top = a.hi
    return Interval(0, top)


def _minimum(a: Interval, b: Interval) -> Interval:
    lo = None if a.lo is None or b.lo is None else minimum(a.lo, b.lo)
    hi = a.hi if b.hi is None else b.hi if a.hi is None else minimum(a.hi, b.hi)
    return Interval(lo, hi)


def _maximum(a: Interval, b: Interval) -> Interval:
    lo = a.lo if b.lo is None else b.lo if a.lo is None else maximum(a.lo, b.lo)
    hi = None if a.hi is None or b.hi is None else maximum(a.hi, b.hi)
    return Interval(lo, hi)
