"""x.at[key].set(y) and its like, against assignment in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.errors import ArgumentError, TracedControlFlow

X = np.random.default_rng(5).normal(size=(4, 5)).astype(np.float32)
I = np.array([0, 2, 0])
KEYS: dict[str, Any] = {
    "number": 1, "negative": -1, "element": (2, 3), "slice": slice(1, 3), "step": (..., slice(
        None, None, 2)), "back": slice(None, None, -1), "mixed": (slice(1, 3), 2), "new": None,
    "tensor": I, "pairs": (I, np.array([1, 1, 1])), "rows and column": (I, 2),
    "apart": (I, slice(None)), "list": [1, 3],
}
NUMPY = {"set": None, "add": np.add, "mul": np.multiply, "min": np.minimum, "max": np.maximum}


def assigned(x: np.ndarray, key: Any, y: Any, how: str) -> np.ndarray:
    result = x.copy()
    if NUMPY[how] is None:
        result[key] = y
    else:
        NUMPY[how].at(result, key, y)
    return result


@pytest.mark.parametrize("how", NUMPY)
@pytest.mark.parametrize("name", KEYS)
def test_every_kind_of_key(name: str, how: str) -> None:
    key = KEYS[name]
    wanted = assigned(X, key, 0.5, how)
    found = tz.jit(lambda x: getattr(x.at[key], how)(0.5))(X)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    y = np.random.default_rng(6).normal(size=X[key].shape[-1:]).astype(np.float32)
    if how != "set" or name not in ("tensor", "apart"):  # of places written twice, the last stays
        np.testing.assert_allclose(tz.jit(lambda x, y: getattr(x.at[key], how)(y))(X, y),
                                   assigned(X, key, y, how), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", NUMPY)
def test_gradients(how: str) -> None:
    y = np.random.default_rng(7).normal(size=(2, 5)).astype(np.float32)

    @tz.op(name=f"test_at_{how}")
    def updated(x: Any, y: Any) -> Any:
        return getattr(x.at[np.array([3, 1])], how)(y) ** 2

    updated.verify(X, y)


def test_masks() -> None:
    both = X > 0
    np.testing.assert_array_equal(tz.jit(lambda x: x.at[x > 0].set(7))(X), np.where(both, 7, X))
    np.testing.assert_array_equal(tz.jit(lambda x: x.at[x > 0].mul(2))(X), np.where(both, 2 * X, X))
    rows = np.array([True, False, True, False])
    np.testing.assert_array_equal(tz.jit(lambda x: x.at[rows].set(x[1]))(X),
                                  np.where(rows[:, None], X[1], X))
    with pytest.raises(ArgumentError, match="given updates of"):
        tz.jit(lambda x: x.at[x > 0].set(x))(X)


def test_types_and_sizes() -> None:
    whole = np.arange(5, dtype=np.int32)
    found = tz.jit(lambda x: x.at[1:].add(2.7))(whole)  # as assignment does, it keeps the type
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, [0, 3, 4, 5, 6])
    last = tz.jit(lambda x: x.at[x.shape[0] - 1].set(0))
    for n in (3, 5, 4, 9):
        x = np.ones((n, 2), np.float32)
        np.testing.assert_array_equal(last(x), assigned(x, n - 1, 0, "set"))
    np.testing.assert_array_equal(tz.jit(lambda x: x.at[1].get() + x.at[1].subtract(1)[1])(X),
                                  X[1] + (X[1] - 1))


def test_vmap() -> None:
    found = tz.vmap(lambda x, i: x.at[i].add(1.0))(X, np.array([0, 4, 2, 2]))
    wanted = X.copy()
    wanted[np.arange(4), [0, 4, 2, 2]] += 1
    np.testing.assert_array_equal(found, wanted)


def test_assignment_says_how() -> None:
    def assign(x: Any) -> Any:
        x[0] = 1
        return x

    with pytest.raises(TracedControlFlow, match=r"x\.at\[\.\.\.\]\.set"):
        tz.jit(assign)(X)


def test_of_updates_of_one_place_the_last_has_the_gradient() -> None:
    y = np.arange(1, 4, dtype=np.float32)
    slopes = tz.grad(lambda y, x: tz.sum(x.at[I].set(y) ** 2))(y, X[0])
    np.testing.assert_array_equal(slopes, [0, 4, 6])
    rows = np.ones((3, 5), np.float32)
    slopes = tz.grad(lambda y, x: tz.sum(tz.index_update(x, I, y)))(rows, X)
    np.testing.assert_array_equal(slopes, np.array([[0], [1], [1]]) * rows)


def test_gradients_of_products_with_zeros() -> None:
    """The slope by one factor is the product of the others, also where it is 0 itself."""
    x = np.array([2.0, 0.0, 3.0, 5.0], np.float32)
    y = np.array([0.0, 7.0, 4.0, 0.0, 0.0, 6.0], np.float32)
    places = np.array([0, 1, 2, 2, 3, 3])
    wide_x, wide_y = x.astype(np.float64), y.astype(np.float64)
    wanted_y = [wide_x[p] * np.prod([wide_y[j] for j in range(6) if places[j] == p and j != i])
                for i, p in enumerate(places)]
    wanted_x = [np.prod(wide_y[places == p]) for p in range(4)]
    dx, dy = tz.grad(lambda x, y: tz.sum(x.at[places].mul(y)), (0, 1))(x, y)
    np.testing.assert_array_equal(dy, wanted_y)
    np.testing.assert_array_equal(dx, wanted_x)
    rows = tz.grad(lambda y, x: tz.sum(tz.index_update(x, I, y, reduce="mul")))(
        np.zeros((3, 5), np.float32), X)
    np.testing.assert_array_equal(rows, np.array([[0], [1], [0]]) * X[I])
