"""Solving an equation between symbolic integers for one of its variables."""

from __future__ import annotations

from terrazzo.index.nodes import (
    Index,
    IndexExpr,
    Sum,
    Var,
    bounds,
    canonical,
    exact_quotient,
    items,
    sort_key,
)
from terrazzo.index.queries import free_vars


def solved(left: Index, right: Index) -> tuple[Var, Index] | None:
    """A variable and what it must be for two expressions to be equal; None where none shows it.

    Of several, one whose value is plain and cannot be negative: sizes never are, and proofs about
    what remains want to know.
    """
    difference = left - right
    if not isinstance(difference, IndexExpr):
        return None
    difference = _without_common_factor(difference)
    found = [(var, value) for var in free_vars(difference)
             if (value := _value_of(var, difference)) is not None]
    return min(found, key=_effort, default=None)


def _without_common_factor(e: IndexExpr) -> Index:
    """`n*h - m*h` is zero where `n - m` is."""
    first, *others = [monomial for monomial, _ in items(e)]
    for atom in dict.fromkeys(first):
        if all(atom in monomial for monomial in others):
            quotient = exact_quotient(e, atom)
            if isinstance(quotient, IndexExpr):
                return _without_common_factor(quotient)
    return e


def _value_of(var: Var, difference: Index) -> Index | None:
    factor = dict(items(difference)).get((var,))
    if factor not in (1, -1):
        return None
    rest = canonical({m: f for m, f in items(difference) if m != (var,)})
    return None if var in free_vars(rest) else -factor * rest


def _effort(solution: tuple[Var, Index]) -> tuple[object, ...]:
    var, value = solution
    low = bounds(value)[0]
    terms = len(value.terms) if isinstance(value, Sum) else 0
    # Among equals the last name goes, so that what stays does not depend on the order of questions.
    return (low is None or low < 0, isinstance(value, IndexExpr) and not isinstance(value, Var),
            terms, [-ord(c) for c in var.name], sort_key(value))
