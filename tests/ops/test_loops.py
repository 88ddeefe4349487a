"""fori_loop and associative_scan: values, gradients, nests, sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.errors import ArgumentError, ShapeError

X = np.random.default_rng(3).normal(size=(7, 4)).astype(np.float32)


@pytest.mark.parametrize(("lower", "upper"), [(0, 5), (2, 5), (3, 3), (4, 1)])
def test_fori_loop_counts(lower: int, upper: int) -> None:
    wanted = 1
    for i in range(lower, upper):
        wanted = wanted * 2 + i
    assert tz.fori_loop(lower, upper, lambda i, s: s * 2 + i, 1) == wanted
    computed = tz.jit(lambda n: tz.fori_loop(lower, n, lambda i, s: s * 2 + i, 1))
    assert computed(np.array(upper)) == wanted
    both = tz.jit(lambda m, n: tz.fori_loop(m, n, lambda i, s: s * 2 + i, 1))
    assert both(np.array(lower), np.array(upper)) == wanted


def test_fori_loop_of_nests_and_captured_values() -> None:
    def power(x: Any) -> Any:
        return tz.fori_loop(0, 3, lambda i, s: {"y": s["y"] * x, "n": s["n"] + i},
                            {"y": tz.ones_like(x), "n": 0})

    found = tz.jit(power)(X)
    np.testing.assert_allclose(found["y"], X ** 3, rtol=1e-5)
    assert found["n"] == 3
    np.testing.assert_allclose(tz.grad(lambda x: tz.sum(power(x)["y"]))(X), 3 * X ** 2, rtol=1e-5)


def test_fori_loop_over_a_size_that_varies() -> None:
    total = tz.jit(lambda x: tz.fori_loop(0, x.shape[0], lambda i, s: s + x[i], tz.zeros(
        shape=(4,), dtype=x.dtype)))
    for n in (3, 5, 7, 2):
        np.testing.assert_allclose(total(X[:n]), X[:n].sum(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("count", range(1, 10))
def test_prefixes_of_every_length(count: int, reverse: bool) -> None:
    x = np.random.default_rng(count).normal(size=(3, count)).astype(np.float32)
    wide = x.astype(np.float64)[:, ::-1] if reverse else x.astype(np.float64)
    wanted = np.cumsum(wide, 1)[:, ::-1] if reverse else np.cumsum(wide, 1)
    found = tz.associative_scan(tz.add, x, axis=1, reverse=reverse)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_prefixes_of_pairs() -> None:
    """h = a * h + b, which is not commutative: the order of arguments counts."""
    def compose(first: Any, then: Any) -> Any:
        (a, b), (c, d) = first, then
        return a * c, b * c + d

    a, b = X, X[::-1].copy()
    h, wanted = np.zeros(4), []
    for k in range(7):
        h = a[k].astype(np.float64) * h + b[k]
        wanted.append(h)
    found = tz.associative_scan(compose, (a, b))[1]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)

    def loss(a: Any, b: Any) -> Any:
        return tz.sum(tz.associative_scan(compose, (a, b))[1] ** 2)

    def by_recurrence(a: Any, b: Any) -> Any:
        return tz.sum(tz.linear_recurrence(a, b, axis=0) ** 2)

    for got, want in zip(tz.grad(loss, (0, 1))(a, b), tz.grad(by_recurrence, (0, 1))(a, b)):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_products_of_matrices() -> None:
    m = np.random.default_rng(4).normal(size=(6, 3, 3)).astype(np.float32)
    found = tz.associative_scan(lambda a, b: b @ a, m)
    wanted, product = [], np.eye(3)
    for step in m:
        product = step @ product
        wanted.append(product)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_sizes_that_vary_and_mistakes() -> None:
    running = tz.jit(lambda x: tz.associative_scan(tz.maximum, x))
    for n in (3, 6, 1, 7):
        np.testing.assert_array_equal(running(X[:n]), np.maximum.accumulate(X[:n]))
    with pytest.raises(ShapeError, match="7 elements of one tensor"):
        tz.associative_scan(lambda a, b: a, (X, X[:3]))
    with pytest.raises(ArgumentError, match="another nesting"):
        tz.associative_scan(lambda a, b: (a, b), X)
    with pytest.raises(ArgumentError, match="no elements"):
        tz.associative_scan(lambda a, b: a, ())
