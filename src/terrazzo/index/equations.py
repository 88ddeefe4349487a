"""What a relation between symbolic integers says about one of its variables."""

from __future__ import annotations

import math
from collections.abc import Iterator

from terrazzo.index.nodes import (
    FloorDiv,
    Index,
    IndexExpr,
    Max,
    Min,
    Sum,
    Var,
    bounds,
    canonical,
    exact_quotient,
    items,
    sort_key,
)
from terrazzo.index.queries import evaluate, free_vars

_LARGEST = 1 << 40  # lower bounds beyond this are not looked for


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


def _without_common_factor(e: Index) -> Index:
    """`n*h*2 - m*h*2` is zero where `n - m` is."""
    number = math.gcd(*(factor for _, factor in items(e)))
    if number > 1:
        e = canonical({monomial: factor // number for monomial, factor in items(e)})
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


def orders(left: Index, right: Index) -> list[tuple[Index, Index]] | None:
    """Pairs a <= b that make two expressions equal by deciding a minimum or maximum in them.

    `n - 1` is `max(n - 1, 0)` where `0 <= n - 1`. None where no one decision does it.
    """
    difference = left - right
    for atom in _choices(difference):
        for choice in atom.args:
            if _with(difference, atom, choice) == 0:
                others = [a for a in atom.args if a != choice]
                return [(a, choice) if isinstance(atom, Max) else (choice, a) for a in others]
    return None


def _choices(e: Index) -> Iterator[Min | Max]:
    return (atom for monomial, _ in items(e) for atom in monomial if isinstance(atom, Min | Max))


def _with(e: Index, atom: IndexExpr, value: Index) -> Index:
    """A polynomial with another value for one of its atoms."""
    total: Index = 0
    for monomial, factor in items(e):
        term: Index = factor
        for a in monomial:
            term = term * (value if a == atom else a)
        total = total + term
    return total


def raised(small: Index, large: Index) -> tuple[Var, Var] | None:
    """A variable and the same one with the lower bound that `small <= large` gives it.

    For relations of one variable that, once true, stay so as it grows; None for others.
    """
    room = large - small
    if not isinstance(room, IndexExpr) or len(free_vars(room)) != 1 or not _grows(room):
        return None
    (var,) = free_vars(room)
    low = var.lo
    if low is None or evaluate(room, {var: low}) >= 0:
        return None
    step = 1
    while evaluate(room, {var: low + step}) < 0:
        step *= 2
        if step > _LARGEST:
            return None
    below, enough = low, low + step
    while enough - below > 1:
        middle = (below + enough) // 2
        below, enough = (middle, enough) if evaluate(room, {var: middle}) < 0 else (below, middle)
    if isinstance(var.hi, int) and enough > var.hi:
        return None
    return var, Var(var.name, enough, var.hi)


def _grows(e: Index) -> bool:
    """Whether an expression of sizes never becomes smaller when they grow."""
    match e:
        case Sum():
            return all(factor > 0 and all(map(_grows, monomial)) and _sign_kept(monomial)
                       for monomial, factor in e.terms)
        case FloorDiv(num=num, den=int()):
            return _grows(num)
        case Min(args=args) | Max(args=args):
            return all(map(_grows, args))
    return isinstance(e, Var | int)


def _sign_kept(monomial: tuple[IndexExpr, ...]) -> bool:
    """Whether factors may be multiplied without turning growth round."""
    lows = [bounds(a)[0] for a in monomial]
    return len(monomial) == 1 or all(low is not None and low >= 0 for low in lows)
