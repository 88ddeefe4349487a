"""Closed forms against adding up."""

from __future__ import annotations

import random

import pytest

from terrazzo.chips.gcu.series import clamp_of, total
from terrazzo.index import Index, IndexExpr, Var, evaluate, maximum, minimum

t, m, n = Var("t", None), Var("m", None), Var("n", None)


def amounts(rng: random.Random) -> Index:
    """A sum of lines in t, some cut off, some times something else."""
    made: Index = 0
    for _ in range(rng.randint(1, 3)):
        step = rng.choice((-32, -7, -1, 1, 5, 16))
        line = rng.choice((m, n, 20, m + n)) + step * t + rng.randint(-9, 9)
        lo = rng.choice((0, -3, 5))
        hi = lo + abs(step)
        cut = rng.choice((line, minimum(maximum(line, lo), hi), maximum(minimum(line, hi), lo)))
        made = made + cut * rng.choice((1, 3, n, m + 2))
    return made


def test_sums_are_those_of_adding_up() -> None:
    rng = random.Random(5)
    for _ in range(400):
        amount = amounts(rng)
        lo, hi = rng.choice((0, 3, m)), rng.choice((0, 9, n, m + n))
        closed = total(amount, t, lo, hi)
        assert closed is not None
        for _ in range(8):
            at = {m: rng.randint(-40, 200), n: rng.randint(-40, 60)}
            start, end = (int(evaluate(e, at)) for e in (lo, hi))
            want = sum(int(evaluate(amount, {**at, t: turn})) for turn in range(start, end))
            assert evaluate(closed, at) == want


@pytest.mark.parametrize("amount", [t * t, t // 3, t % 4, minimum(t, m) * maximum(t, n),
                                    minimum(t * m, 3), minimum(maximum(t, m), n),
                                    minimum(t, m), minimum(maximum(m - t, 0), 7)])
def test_what_has_no_closed_form_here_has_none(amount: Index) -> None:
    assert total(amount, t, 0, n) is None


def test_a_clamp_is_a_line_with_ends() -> None:
    clamp = clamp_of(_expression(minimum(maximum(n - 32 * t, 0), 32)), t)
    assert clamp is not None and tuple(clamp) == (n, -32, 0)
    assert total(minimum(maximum(n - 32 * t, 0), 32), t, 0, 1000) == (
        maximum(n, 0) - maximum(n - 32_000, 0))


def _expression(index: Index) -> IndexExpr:
    assert isinstance(index, IndexExpr)
    return index
