"""What can be proved about symbolic integers: comparisons that hold for all values."""

from __future__ import annotations

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


def proves_le(a: Index, b: Index) -> bool:
    """Whether `a <= b` holds for every value of the variables; False also means "unknown"."""
    return _nonnegative(b - a, _PROOF_DEPTH)


def proves_lt(a: Index, b: Index) -> bool:
    """Whether `a < b` holds for every value of the variables; False also means "unknown"."""
    return _nonnegative(b - a - 1, _PROOF_DEPTH)


def proves_eq(a: Index, b: Index) -> bool:
    """Whether `a == b` holds for every value of the variables; False also means "unknown"."""
    return a == b or (proves_le(a, b) and proves_le(b, a))


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
    elif isinstance(atom, Var) and atom.hi is not None:
        yield (others + scale * atom.hi,)


def _times_divisor(others: Index, scale: Index, div: FloorDiv, product: Index) -> Index:
    """`others + scale*div` with `div*den` bounded by `product`, up to a positive factor."""
    ratio = exact_quotient(scale, div.den)
    return others * div.den + scale * product if ratio is None else others + ratio * product
