"""Questions about sizes: proved, or answered for the sizes at hand under a guard."""

from __future__ import annotations

import itertools

import pytest

from terrazzo.index import Index, Var
from terrazzo.index.guards import (
    RELATIONS,
    Guard,
    Questions,
    all_equal,
    ask,
    asking,
    decided,
    granted,
)

n, m = Var("n"), Var("m")


def test_what_is_proved_needs_no_guard() -> None:
    with asking({"n": 5}) as questions:
        assert ask("<=", 0, n) is True
        assert ask("<", n, n + 1) is True
        assert ask("==", n + 1, n) is False
        assert ask("!=", 3, 4) is True
    assert not questions.guards


def test_nobody_there_to_answer() -> None:
    assert ask("==", n, 8) is None
    assert decided("<", n, m) is None


@pytest.mark.parametrize("relation", RELATIONS)
def test_an_answer_becomes_a_guard_that_tells_calls_apart(relation: str) -> None:
    for size, other in itertools.product(range(4), repeat=2):
        with asking({"n": size, "m": other}) as questions:
            answer = ask(relation, n, m)
        assert answer is RELATIONS[relation](size, other)
        (guard,) = questions.guards
        for a, b in itertools.product(range(4), repeat=2):
            assert guard.holds({"n": a, "m": b}) is (RELATIONS[relation](a, b) is answer)


def test_guards_print() -> None:
    assert str(Guard("<=", n, m * 2)) == "n <= m*2"


def test_what_an_operator_needs_may_be_granted_before_sizes_are_at_hand() -> None:
    class Granting(Questions):
        def answer(self, relation: str, left: Index, right: Index) -> bool | None:
            return None

        def grant(self, relation: str, left: Index, right: Index) -> bool:
            self.guards[Guard(relation, left, right)] = None
            return True

    assert not granted("==", n, m)
    with asking(Granting({})) as questions:
        assert ask("==", n, m) is None
        assert granted("==", n, m) and all_equal((n, 4), (m, 4))
        assert not granted("==", n, n + 1) and not all_equal((n,), (m, m))
    assert [str(g) for g in questions.guards] == ["n == m"]
    with asking({"n": 3, "m": 4}):
        assert not granted("==", n, m)
