"""What relations say about single sizes: checked by putting numbers in."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from terrazzo.index import Index, Var, evaluate, maximum, minimum, substitute
from terrazzo.index.equations import orders, raised, solved

n, m, k = Var("n"), Var("m"), Var("k")


@pytest.mark.parametrize(("left", "right", "var", "value"), [
    (n, m, n, m),  # the last name goes
    (n + m, m + k, n, k),
    (n, m + k, n, m + k),
    (n, 7, n, 7),
    (m + 3, n, n, m + 3),  # what remains cannot be negative
    (n * 8, m * 8 + k * 8, n, m + k),
    (n * k, m * k, n, m),
    (m // 2 + 1, n, n, m // 2 + 1),
])
def test_solved(left: Index, right: Index, var: Var, value: Index) -> None:
    assert solved(left, right) == (var, value)
    assert substitute(left - right, {var: value}) == 0


@pytest.mark.parametrize(("left", "right"), [(n, n), (n * 2, m * 3), (n // 2, m // 2), (3, 4)])
def test_not_solved(left: Index, right: Index) -> None:
    assert solved(left, right) is None


@pytest.mark.parametrize(("left", "right"), [
    (n - 1, maximum(n - 1, 0)),
    (minimum(n, m), n),
    (k * maximum(n * 2 - 1, 0), k * (n * 2 - 1)),
    (minimum(n, 4) + maximum(m, k), n + maximum(m, k)),
])
def test_orders_make_sides_equal(left: Index, right: Index) -> None:
    pairs = orders(left, right)
    assert pairs
    checked = 0
    for sizes in itertools.product(range(6), repeat=3):
        values = dict(zip("nmk", sizes, strict=True))
        if all(evaluate(a, values) <= evaluate(b, values) for a, b in pairs):
            assert evaluate(left, values) == evaluate(right, values)
            checked += 1
    assert checked
    assert orders(n, m) is None


@pytest.mark.parametrize("large", [n - 3, n // 10 - 1, n * 2 - 5, n * n - 20, maximum(n, 2) - 4,
                                   (n + 3) // 4 + n - 9])
def test_raised_is_the_least_that_will_do(large: Any) -> None:
    found = raised(0, large)
    assert found is not None and found[0] == n
    least = found[1].lo
    assert least and evaluate(large, {"n": least}) >= 0 > evaluate(large, {"n": least - 1})


@pytest.mark.parametrize(("small", "large"), [(n, 8), (0, n - m), (0, n), (0, n % 4 - 2)])
def test_not_raised(small: Index, large: Index) -> None:
    assert raised(small, large) is None
