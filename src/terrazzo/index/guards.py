"""Questions about symbolic sizes that nothing proves: answered for the sizes at hand, and kept.

Code that is compiled for symbolic sizes may rest on an answer only if every call checks it. So a
question (`n == 8`, `3 < n`) that the algebra cannot decide is put to the `Questions` in force: it
answers by the sizes of the call that is being traced, and remembers the answer as a `Guard`. What
was compiled then serves every call whose sizes give the same answers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from terrazzo.index.nodes import Index, IndexExpr, Var
from terrazzo.index.proofs import proves_eq, proves_le, proves_lt
from terrazzo.index.queries import divisible, evaluate, free_vars, substitute

RELATIONS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le,
}
_OPPOSITE = {"==": "!=", "!=": "==", "<": ">=", "<=": ">"}


class Guard(NamedTuple):
    """A relation between sizes that compiled code relies on."""

    relation: str
    left: Index
    right: Index

    def holds(self, sizes: Mapping[Any, int]) -> bool:
        """Whether sizes (by variable or by name) keep to it."""
        try:
            left, right = evaluate(self.left, sizes), evaluate(self.right, sizes)
        except ZeroDivisionError:  # a question that was never asked of such sizes
            return False
        return RELATIONS[self.relation](left, right)

    def __str__(self) -> str:
        return f"{self.left} {self.relation} {self.right}"


@dataclass(eq=False)
class Questions:
    """Answers for the sizes of one call, and the guards that they amount to."""

    sizes: Mapping[Any, int]
    guards: dict[Guard, None] = field(default_factory=dict)

    def answer(self, relation: str, left: Index, right: Index) -> bool | None:
        """Decide by the sizes at hand, and remember."""
        guard = Guard(relation, left, right)
        if guard.holds(self.sizes):
            self.guards[guard] = None
            return True
        self.guards[opposite(guard)] = None
        return False

    def grant(self, relation: str, left: Index, right: Index) -> bool:
        """Decide about something without which the program makes no sense."""
        return bool(self.answer(relation, left, right))

    def shortcut(self, relation: str, left: Index, right: Index) -> bool:
        """Decide about a way that is open only where something holds."""
        return Guard(relation, left, right).holds(self.sizes) and bool(
            self.answer(relation, left, right))

    def equalities(self) -> dict[Var, Index]:
        """Variables that the answers leave no choice, and what each is equal to."""
        found: dict[Var, Index] = {}
        for guard in self.guards:
            if guard.relation == "==":
                left, right = substitute(guard.left, found), substitute(guard.right, found)
                for var, other in ((left, right), (right, left)):
                    if isinstance(var, Var) and isinstance(other, (int, Var)) and var != other:
                        found = {v: substitute(e, {var: other}) for v, e in found.items()}
                        found[var] = other
                        break
        return found


class CallQuestions(Questions):
    """Answers while a function is traced for symbolic sizes: those of the call are all at hand."""

    def decide(self, relation: str, left: Index, right: Index) -> bool:
        """Whether a relation holds: proved, or under a guard."""
        known = decided(relation, left, right)
        return bool(self.answer(relation, left, right)) if known is None else known

    def value(self, size: Index) -> int:
        """What a size is in this call; nothing is remembered."""
        return int(evaluate(size, self.sizes))

    def fix(self, size: Index) -> int:
        """What a size is in this call, which becomes the only one: its variables are fixed."""
        for var in sorted(free_vars(size), key=lambda v: v.name):
            self.answer("==", var, self.value(var))
        return self.value(size)


def opposite(guard: Guard) -> Guard:
    """The guard that holds where this one does not."""
    relation = _OPPOSITE[guard.relation]
    if relation in RELATIONS:
        return Guard(relation, guard.left, guard.right)
    return Guard("<" if relation == ">" else "<=", guard.right, guard.left)


_questions: ContextVar[Questions | None] = ContextVar("questions", default=None)


@contextmanager
def asking(sizes: Mapping[Any, int] | Questions) -> Iterator[Questions]:
    """Inside, questions that cannot be proved are answered for these sizes and kept."""
    asked = sizes if isinstance(sizes, Questions) else Questions(sizes)
    token = _questions.set(asked)
    try:
        yield asked
    finally:
        _questions.reset(token)


class _Settled(Questions):
    """What holds of sizes while a graph that was checked is rewritten: all that it needs."""

    def answer(self, relation: str, left: Index, right: Index) -> bool | None:
        return None

    def grant(self, relation: str, left: Index, right: Index) -> bool:
        return relation == "=="

    def shortcut(self, relation: str, left: Index, right: Index) -> bool:
        return False


@contextmanager
def rewriting() -> Iterator[None]:
    """Inside, sizes that have to agree do, unless somebody is there to be asked.

    A rewrite has the type of what it replaces. That its operators fit together follows from what
    was granted when the graph was made, which the algebra alone may not prove.
    """
    if _questions.get() is not None:
        yield
        return
    with asking(_Settled({})):
        yield


def call_questions() -> CallQuestions | None:
    """Who answers while a function is traced for symbolic sizes; None where nobody does."""
    asked = _questions.get()
    return asked if isinstance(asked, CallQuestions) else None


def decided(relation: str, left: Index, right: Index) -> bool | None:
    """What the algebra says of a relation for all sizes; None where it depends on them."""
    if not isinstance(left, IndexExpr) and not isinstance(right, IndexExpr):
        return RELATIONS[relation](left, right)
    if relation == "<":
        return True if proves_lt(left, right) else False if proves_le(right, left) else None
    if relation == "<=":
        return True if proves_le(left, right) else False if proves_lt(right, left) else None
    if proves_eq(left, right):
        return relation == "=="
    if proves_lt(left, right) or proves_lt(right, left):
        return relation == "!="
    return None


def ask(relation: str, left: Index, right: Index) -> bool | None:
    """Whether a relation holds: proved, or for the sizes at hand under a guard.

    None where it depends on sizes and nobody is there to answer (see `asking`).
    """
    known = decided(relation, left, right)
    if known is not None:
        return known
    asked = _questions.get()
    return None if asked is None else asked.answer(relation, left, right)


def shortcut(relation: str, left: Index, right: Index) -> bool:
    """Whether a relation holds that a simpler way needs.

    As `ask`, but where it does not hold, nothing is kept: the way round serves all sizes.
    """
    known = decided(relation, left, right)
    if known is not None:
        return known
    asked = _questions.get()
    return asked is not None and asked.shortcut(relation, left, right)


def granted(relation: str, left: Index, right: Index) -> bool:
    """Whether what an operator needs of sizes holds: what it raises an error about otherwise.

    As `ask`, but it may be taken for granted before sizes are at hand (and is checked at each
    call): matrices that are multiplied agree in the inner size, or the model makes no sense.
    """
    known = decided(relation, left, right)
    if known is not None:
        return known
    asked = _questions.get()
    return asked is not None and asked.grant(relation, left, right)


def all_equal(a: Sequence[Index], b: Sequence[Index]) -> bool:
    """Whether two shapes are the same, which is granted as above."""
    return len(a) == len(b) and all(granted("==", m, n) for m, n in zip(a, b, strict=True))


def multiple(size: Index, of: Index) -> bool:
    """Whether a size is a multiple of a positive number, which is granted as above."""
    if isinstance(of, int) and divisible(size, of):
        return True
    return granted("==", size % of, 0)


def known(size: Index) -> Index:
    """A size that has to be a number: fixed while a function is traced, else as it is."""
    asked = call_questions()
    return size if asked is None else asked.fix(size)


def ordinary(size: Index) -> None:
    """Make sure that a symbolic size is at least 2 while a function is traced, or fix it.

    0 and 1 mean something of their own (nothing to do, stretch), and are told from other sizes by
    comparing with these numbers. So no symbolic size is ever one of them.
    """
    asked = call_questions()
    if asked is not None and isinstance(size, IndexExpr) and not asked.decide("<=", 2, size):
        asked.fix(size)
