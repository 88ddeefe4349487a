"""Counts as closed forms: sums of index expressions, each of which counts where its guards hold.

A guard is an index that must not be negative. What a condition on sizes and loop variables decides
is a sum of guarded terms of which one holds, so a count under it can be added up over the loops
around it, and is written down once, outside of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce

from terrazzo.base.scalar import Call, Const, FromIndex, Scalar, as_scalar, call, const, walk
from terrazzo.base.scalar import where as choose
from terrazzo.chips.gcu.series import mentions, positive
from terrazzo.chips.gcu.series import total as total_of
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
from terrazzo.index.nodes import canonical, items, sort_key
from terrazzo.loop.ir import For

VECTOR, MATRIX, SCALAR, LOAD, STORE, LOCAL, TRANSFERS, LAUNCHES = range(8)
COUNTERS = 8
Guards = tuple[Index, ...]
When = tuple[Guards, ...]  # of which at most one holds as a whole
Sides = tuple[When, When]  # where a condition holds, and where it does not
ALWAYS: When = ((),)
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
        for more in when:
            for guards, row in other.terms.items():
                joint = _joined(guards, more)
                if joint is not None:
                    for counter, amount in enumerate(row):
                        self.add(counter, amount, joint)

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

    def counters(self) -> set[int]:
        """The counters that it counts."""
        return {counter for row in self.terms.values() for counter, amount in enumerate(row)
                if not isinstance(amount, int) or amount}

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
    """Both, without those that hold anyway or by another one; None where they never do."""
    kept = list(guards)
    for guard in more:
        known = holds(guard)
        if known is False or any(_below_zero(guard + other) for other in kept):
            return None
        if known is None:
            apart = [guard - other for other in kept]
            if any(isinstance(d, int) and d >= 0 for d in apart):
                continue
            kept = [other for other, d in zip(kept, apart) if not isinstance(d, int)]
            kept.append(guard)
    return tuple(sorted(kept, key=sort_key)) if kept != list(guards) else guards


def _below_zero(index: Index) -> bool:
    return isinstance(index, int) and index < 0


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


def when(condition: Scalar) -> Sides | None:
    """Where a condition holds, and where not; None where data decides it, or where it is long."""
    known: dict[int, Sides | None] = {}
    for node in walk(condition):
        known[id(node)] = _when(node, known)
    return known[id(condition)]


def _when(condition: Scalar, known: Mapping[int, Sides | None]) -> Sides | None:
    if isinstance(condition, Const):
        return (ALWAYS, ()) if condition.value else ((), ALWAYS)
    if not isinstance(condition, Call) or not condition.dtype.is_bool:
        return None
    if condition.op in ("eq", "ne", *_DISTANCE):
        values = [as_index(a) for a in condition.args]
        if values[0] is None or values[1] is None:
            return None
        apart = values[0] - values[1]
        if condition.op in _DISTANCE:
            sign, shift = _DISTANCE[condition.op]
            return _guarded(sign * apart + shift)
        equal = _both_hold(_guarded(apart), _guarded(-apart))
        return equal if condition.op == "eq" else _swapped(equal)
    parts = [part for a in condition.args if (part := known[id(a)]) is not None]
    if condition.op not in ("and", "or", "not") or len(parts) < len(condition.args):
        return None
    if condition.op == "not":
        return _swapped(parts[0])
    if condition.op == "and":
        return _both_hold(*parts)
    return _swapped(_both_hold((parts[0][1], parts[0][0]), (parts[1][1], parts[1][0])))


def _swapped(sides: Sides | None) -> Sides | None:
    return None if sides is None else (sides[1], sides[0])


def _both_hold(a: Sides, b: Sides) -> Sides | None:
    """Where two conditions hold; else the first does not, or it does and the second does not."""
    holding, second = both(a[0], b[0]), both(a[0], b[1])
    if holding is None or second is None or len(a[1]) + len(second) > _MOST_TERMS:
        return None
    return holding, (*a[1], *second)


def both(a: When, b: When) -> When | None:
    """Where both hold; None where that has too many terms."""
    made = [joint for guards in a for more in b
            if (joint := _joined(guards, more)) is not None]
    return tuple(made) if len(made) <= _MOST_TERMS else None


def _guarded(guard: Index) -> Sides:
    """Where an index is not negative, and where it is.

    What is said without a minimum or maximum can be said of loops that it hangs on.
    """
    holding, failing = _split(guard), _split(-guard - 1)
    if len(failing) > 1 == len(holding):
        return _all_of(failing)[::-1]
    return _all_of(holding)


def _split(guard: Index) -> Guards:
    """A guard as several that hold together exactly where it does: of a minimum, all sides."""
    for monomial, factor in items(guard):
        if len(monomial) == 1 and isinstance(monomial[0], Min if factor > 0 else Max):
            rest = guard - canonical({monomial: factor})
            return tuple(part for side in monomial[0].args
                         for part in _split(rest + factor * side))
    return (guard,)


def _all_of(guards: Guards) -> Sides:
    """Where all guards hold; else the first fails, or it holds and the second fails, and so on."""
    joint = _joined((), guards)
    if joint is None:
        return (), ALWAYS
    parts = (_joined(joint[:n], (-guard - 1,)) for n, guard in enumerate(joint))
    return (joint,), tuple(part for part in parts if part is not None)
