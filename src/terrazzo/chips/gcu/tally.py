"""Counts as closed forms: sums of index expressions, each of which counts where its guards hold.

A guard is an index that must not be negative. What a condition on sizes and loop variables decides
is a sum of guarded terms (of "not", one minus them), so a count under it can be added up over the
loops around it, and is written down once, outside of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce

from terrazzo.base.scalar import Call, Const, FromIndex, Scalar, as_scalar, call, const, walk
from terrazzo.base.scalar import where as choose
from terrazzo.chips.gcu.series import mentions, positive
from terrazzo.chips.gcu.series import total as total_of
from terrazzo.index import (
    Index,
    IndexExpr,
    Var,
    bounds,
    ceildiv,
    coefficient,
    free_vars,
    maximum,
    minimum,
    substitute,
)
from terrazzo.index.nodes import items, sort_key
from terrazzo.loop.ir import For

VECTOR, MATRIX, SCALAR, LOAD, STORE, LOCAL, TRANSFERS, LAUNCHES = range(8)
COUNTERS = 8
Guards = tuple[Index, ...]
When = tuple[tuple[int, Guards], ...]  # a sum of signed products of guards: 0 or 1
ALWAYS: When = ((1, ()),)
_SHORT = 6  # terms of an expression
_MOST_TERMS = 8  # of a condition: beyond that, what it guards is counted where it runs


@dataclass
class Tally:
    """What is counted: for each product of guards, an amount for each counter."""

    terms: dict[Guards, list[Index]] = field(default_factory=dict)

    def add(self, counter: int, amount: Index, guards: Guards = ()) -> None:
        """Count more, where the guards hold."""
        if not isinstance(amount, int) or amount != 0:
            row = self.terms.setdefault(guards, [0] * COUNTERS)
            row[counter] = row[counter] + amount

    def include(self, other: Tally, when: When = ALWAYS) -> None:
        """Count what another one counts, where a condition holds."""
        for sign, more in when:
            for guards, row in other.terms.items():
                joint = _joined(guards, more)
                if joint is not None:
                    for counter, amount in enumerate(row):
                        self.add(counter, amount if sign == 1 else sign * amount, joint)

    def over(self, loop: For) -> tuple[Tally, Tally]:
        """What all iterations of a loop count together, and what of one has no such form."""
        closed, left = Tally(), Tally()
        for guards, row in self.terms.items():
            clipped = _clipped(guards, loop)
            for counter, amount in enumerate(row):
                total = None if clipped is None else total_of(amount, loop.var, *clipped[:2])
                if clipped is None or total is None:
                    left.add(counter, amount, guards)
                else:
                    closed.add(counter, total, clipped[2])
        return closed, left

    def without(self, var: Var) -> tuple[Tally, Tally]:
        """What does not hang on a name, and what does."""
        free, bound = Tally(), Tally()
        for guards, row in self.terms.items():
            for counter, amount in enumerate(row):
                hangs = any(mentions(i, var) for i in (*guards, amount))
                (bound if hangs else free).add(counter, amount, guards)
        return free, bound

    def where(self, values: Mapping[Var, Index]) -> Tally:
        """The same with variables replaced."""
        made = Tally()
        for guards, row in self.terms.items():
            joint = _joined((), tuple(substitute(g, values) for g in guards))
            if joint is not None:
                for counter, amount in enumerate(row):
                    made.add(counter, substitute(amount, values), joint)
        return made

    def amounts(self) -> Iterator[tuple[int, Scalar]]:
        """Each counter with what it counts; those that count nothing are left out."""
        totals: dict[int, list[Scalar]] = {}
        for guards, row in self.terms.items():
            tests = [call("ge", as_scalar(guard), const(0)) for guard in guards]
            holding = reduce(lambda a, b: call("and", a, b), tests) if tests else None
            for counter, amount in enumerate(row):
                if not isinstance(amount, int) or amount:
                    term = as_scalar(amount)
                    totals.setdefault(counter, []).append(
                        term if holding is None else choose(holding, term, const(0)))
        return ((counter, reduce(lambda a, b: a + b, terms))
                for counter, terms in sorted(totals.items()))

    def names(self) -> set[Var]:
        """The variables that it mentions."""
        found: set[Var] = set()
        for guards, row in self.terms.items():
            for index in (*guards, *row):
                if isinstance(index, IndexExpr):
                    found |= free_vars(index)
        return found


def trips(loop: For) -> Index:
    """How often a loop runs."""
    return positive(loop.hi - loop.lo)


def is_unit(loop: For) -> bool:
    """Whether a loop runs exactly once: it only names a value."""
    return (loop.hi - loop.lo) == 1


def holds(guard: Index) -> bool | None:
    """Whether a guard holds, where that is known."""
    low, high = bounds(guard)
    if low is not None and low >= 0:
        return True
    return False if high is not None and high < 0 else None


def is_short(index: Index) -> bool:
    """Whether an expression is worth a condition of its own: long ones are dear to compile."""
    return len(items(index)) <= _SHORT


def _joined(guards: Guards, more: Guards) -> Guards | None:
    """Both, without those that hold anyway; None where one never does."""
    kept = list(guards)
    for guard in more:
        known = holds(guard)
        if known is False:
            return None
        if known is None and guard not in kept:
            kept.append(guard)
    return tuple(sorted(kept, key=sort_key)) if len(kept) > len(guards) else guards


def _clipped(guards: Guards, loop: For) -> tuple[Index, Index, Guards] | None:
    """The iterations in which guards hold, first and one behind the last, and the other guards."""
    lo, hi, rest = loop.lo, loop.hi, []
    for guard in guards:
        if not mentions(guard, loop.var):
            rest.append(guard)
            continue
        clip = bound_by(guard, loop.var)
        if clip is None:
            return None
        lo = lo if clip[0] is None else maximum(lo, clip[0])
        hi = hi if clip[1] is None else minimum(hi, clip[1])
    return lo, hi, tuple(rest)


def bound_by(guard: Index, var: Var) -> tuple[Index | None, Index | None] | None:
    """From where on, or up to where, a guard holds, if it is a line in the variable."""
    step = coefficient(guard, var)
    if not isinstance(step, int) or step == 0:
        return None
    rest = substitute(guard, {var: 0})
    if step > 0:
        return ceildiv(-rest, step), None
    return None, rest // -step + 1


# ---------------------------------------------------------------- conditions
_ARITHMETIC = {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
               "min": minimum, "max": maximum}
# What is not negative exactly where a comparison holds: sign * (a - b) + shift.
_DISTANCE = {"lt": (-1, -1), "le": (-1, 0), "gt": (1, -1), "ge": (1, 0)}


def as_index(value: Scalar) -> Index | None:
    """A whole number that hangs on no data, as an index."""
    known: dict[int, Index | None] = {}
    for node in walk(value):  # arguments come first
        known[id(node)] = _index(node, known)
    return known[id(value)]


def _index(value: Scalar, known: Mapping[int, Index | None]) -> Index | None:
    if isinstance(value, FromIndex):
        return value.index
    if isinstance(value, Const) and value.dtype.is_integer:
        return int(value.value)
    if not isinstance(value, Call) or not value.dtype.is_integer:
        return None
    sides = [known[id(a)] for a in value.args]
    if value.op == "cast":
        return sides[0] if value.args[0].dtype.is_integer else None
    if value.op in _ARITHMETIC and sides[0] is not None and sides[1] is not None:
        return _ARITHMETIC[value.op](*sides)
    return None


def when(condition: Scalar) -> When | None:
    """A condition as guards; None where data decides it, or where it is too long."""
    known: dict[int, When | None] = {}
    for node in walk(condition):
        known[id(node)] = _when(node, known)
    return known[id(condition)]


def _when(condition: Scalar, known: Mapping[int, When | None]) -> When | None:
    if isinstance(condition, Const):
        return ALWAYS if condition.value else ()
    if not isinstance(condition, Call) or not condition.dtype.is_bool:
        return None
    if condition.op in ("eq", "ne", *_DISTANCE):
        sides = [as_index(a) for a in condition.args]
        if sides[0] is None or sides[1] is None:
            return None
        apart = sides[0] - sides[1]
        if condition.op in _DISTANCE:
            sign, shift = _DISTANCE[condition.op]
            return ((1, (sign * apart + shift,)),)
        return _equal(apart) if condition.op == "eq" else negated(_equal(apart))
    parts = [part for a in condition.args if (part := known[id(a)]) is not None]
    if condition.op not in ("and", "or", "not") or len(parts) < len(condition.args):
        return None
    if condition.op == "not":
        return negated(parts[0])
    if condition.op == "and":
        return both(*parts)
    neither = both(negated(parts[0]), negated(parts[1]))
    return None if neither is None else negated(neither)


def _equal(apart: Index) -> When:
    return ((1, (apart, -apart)),)


def negated(condition: When) -> When:
    """One where the other is zero."""
    return _summed([*ALWAYS, *((-sign, guards) for sign, guards in condition)])


def both(a: When, b: When) -> When | None:
    """The product of two conditions; None where it has too many terms."""
    made = []
    for sign, guards in a:
        for other, more in b:
            joint = _joined(guards, more)
            if joint is not None:
                made.append((sign * other, joint))
    short = _summed(made)
    return short if len(short) <= _MOST_TERMS else None


def _summed(terms: Iterable[tuple[int, Guards]]) -> When:
    totals: dict[Guards, int] = {}
    for sign, guards in terms:
        totals[guards] = totals.get(guards, 0) + sign
    return tuple((sign, guards) for guards, sign in totals.items() if sign)
