"""What can be proved about symbolic integers: comparisons that hold for all values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

from terrazzo.index.nodes import (
    MEMO_SIZE,
    FloorDiv,
    Index,
    IndexExpr,
    Max,
    Min,
    Mod,
    Sum,
    Var,
    bounds,
    canonical,
    exact_quotient,
    items,
    without_atom,
)

# How many symbolic bounds a proof may chain; three covers mod-in-min-in-sum, deeper never paid.
_PROOF_DEPTH = 3
# Sums of more terms than this (addresses with symbolic strides) are tried one bound deep only: the
# number of chains grows with a power of the number of terms.
_LARGE_SUM = 8
# Sums of so many terms are first tried on examples, with sizes so far above their least.
_SMALL_SUM, _SIZES = 2, (1, 7, 1000)


def proves_le(a: Index, b: Index) -> bool:
    """Whether `a <= b` holds for every value of the variables; False also means "unknown"."""
    return _holds(b - a)


def proves_lt(a: Index, b: Index) -> bool:
    """Whether `a < b` holds for every value of the variables; False also means "unknown"."""
    return _holds(b - a - 1)


def proves_eq(a: Index, b: Index) -> bool:
    """Whether `a == b` holds for every value of the variables; False also means "unknown"."""
    return a == b or (proves_le(a, b) and proves_le(b, a))


@lru_cache(MEMO_SIZE)
def _holds(e: Index) -> bool:
    """Whether `0 <= e` can be proved; where an example shows the contrary, nobody need try."""
    if isinstance(e, Sum) and len(e.terms) > _SMALL_SUM and bounds(e)[0] is None and _refuted(e):
        return False
    return _nonnegative(e, _PROOF_DEPTH)


def _refuted(e: Index) -> bool:
    """Whether some values of the variables, each within its bounds, make an expression negative."""
    for size in _SIZES:
        for at_end in (True, False):
            try:
                if _example(e, size, at_end, {}) < 0:
                    return True
            except _NoExample:
                continue
    return False


class _NoExample(Exception):
    """No value is left for a variable, or a divisor is not positive."""


def _example(e: Index, size: int, at_end: bool, known: dict[Index, int]) -> int:
    """The value of an expression for sizes so far above their least, counters at either end."""
    if not isinstance(e, IndexExpr):
        return int(e)
    value = known.get(e)
    if value is not None:
        return value

    def part(x: Index) -> int:
        return _example(x, size, at_end, known)

    if isinstance(e, Var):
        low = -size if e.lo is None else e.lo
        high = low + size if e.hi is None else part(e.hi)
        if high < low:
            raise _NoExample
        value = high if at_end or e.hi is None else low
    elif isinstance(e, (FloorDiv, Mod)):
        num, den = part(e.num), part(e.den)
        if den <= 0:
            raise _NoExample
        value = num // den if isinstance(e, FloorDiv) else num % den
    elif isinstance(e, (Min, Max)):
        value = (min if isinstance(e, Min) else max)(map(part, e.args))
    else:
        value = sum(factor * math.prod(map(part, monomial)) for monomial, factor in items(e))
    known[e] = value
    return value


@lru_cache(MEMO_SIZE)
def _nonnegative(e: Index, depth: int) -> bool:
    """Whether `0 <= e` follows from intervals, or from bounding some atom by other expressions."""
    low = bounds(e)[0]
    if low is not None and low >= 0:
        return True
    if depth == 0 or isinstance(e, int):
        return False
    if depth > 1 and len(items(e)) > _LARGE_SUM:
        depth = 1
    return any(all(_nonnegative(case, depth - 1) for case in cases) for cases in _lower_bounds(e))


def _lower_bounds(e: IndexExpr) -> Iterator[tuple[Index, ...]]:
    """Ways to show `0 <= e`: lists of expressions that have to be nonnegative together."""
    for monomial, factor in items(e):
        for atom in dict.fromkeys(monomial):
            if isinstance(atom, Var) and len(monomial) == 1 and not isinstance(atom.hi, IndexExpr):
                continue  # intervals already say all there is to say
            scale = canonical({without_atom(monomial, atom): factor})
            low, high = bounds(scale)
            others = e - scale * atom
            if low is not None and low >= 0:
                yield from _with_atom_small(others, scale, atom)
            elif high is not None and high <= 0:
                yield from _with_atom_large(others, scale, atom)


def _with_atom_small(others: Index, scale: Index, atom: IndexExpr) -> Iterator[tuple[Index, ...]]:
    if isinstance(atom, Min):
        yield tuple(others + scale * arg for arg in atom.args)
    elif isinstance(atom, Max):
        yield from ((others + scale * arg,) for arg in atom.args)
    elif isinstance(atom, Mod):
        yield (others,)
    elif isinstance(atom, FloorDiv):
        yield (_times_divisor(others, scale, atom, atom.num - atom.den + 1),)
    elif isinstance(atom, Var) and atom.lo is not None:
        yield (others + scale * atom.lo,)


def _with_atom_large(others: Index, scale: Index, atom: IndexExpr) -> Iterator[tuple[Index, ...]]:
    if isinstance(atom, Min):
        yield from ((others + scale * arg,) for arg in atom.args)
    elif isinstance(atom, Max):
        yield tuple(others + scale * arg for arg in atom.args)
    elif isinstance(atom, Mod):
        yield (others + scale * (atom.den - 1),)
        low = bounds(atom.num)[0]
        if low is not None and low >= 0:
            yield (others + scale * atom.num,)
    elif isinstance(atom, FloorDiv):
        yield (_times_divisor(others, scale, atom, atom.num),)
        end = _at_end(atom.num)
        if end is not None and isinstance(atom.den, int):
            yield (others + scale * (end // atom.den),)
    elif isinstance(atom, Var) and atom.hi is not None:
        yield (others + scale * atom.hi,)


def _at_end(e: Index) -> Index | None:
    """The largest value of a counter up to a symbolic size, or of a multiple of it.

    A quotient is largest there too, and comes out where the size is a multiple of its divisor.
    """
    if isinstance(e, Var):
        return e.hi if isinstance(e.hi, IndexExpr) else None
    if not isinstance(e, Sum) or len(e.terms) > 1:
        return None
    ((monomial, factor),) = e.terms
    if factor < 0 or len(monomial) > 1 or not isinstance(monomial[0], Var):
        return None
    end = _at_end(monomial[0])
    return None if end is None else end * factor + e.constant


def _times_divisor(others: Index, scale: Index, div: FloorDiv, product: Index) -> Index:
    """`others + scale*div` with `div*den` bounded by `product`, up to a positive factor."""
    ratio = exact_quotient(scale, div.den)
    return others * div.den + scale * product if ratio is None else others + ratio * product
