"""Operators on indices and values in formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from terrazzo import te
from terrazzo.errors import ArgumentError, DTypeError, IndexOutOfRange, TracedControlFlow

n = te.dim("n")
N = 9
X = te.placeholder((N,), name="X")
K = te.reduce_axis(4, name="k")
AT = np.arange(N)
DATA = np.array([-3, 1, 4, -1, 0, 9, -2, 6, 4], np.float32)


def shifted(x: np.ndarray, by: int) -> np.ndarray:
    return np.r_[np.zeros(by), x[:-by]]


@pytest.mark.parametrize(("element", "reference"), [
    (lambda i: te.if_then_else(i < 3, 1.0, 2.0), lambda x: np.where(AT < 3, 1, 2)),
    (lambda i: te.if_then_else(i <= 3, 1.0, 2.0), lambda x: np.where(AT <= 3, 1, 2)),
    (lambda i: te.if_then_else(3 < i, 1.0, 2.0), lambda x: np.where(AT > 3, 1, 2)),  # noqa: SIM300
    (lambda i: te.if_then_else(i > 3, 1.0, 2.0), lambda x: np.where(AT > 3, 1, 2)),
    (lambda i: te.if_then_else(i == 3, 1.0, 2.0), lambda x: np.where(AT == 3, 1, 2)),
    (lambda i: te.if_then_else(i != 3, 1.0, 2.0), lambda x: np.where(AT != 3, 1, 2)),
    (lambda i: te.if_then_else(i % 2 == 0, X[i], -X[i]), lambda x: np.where(AT % 2, -x, x)),
    (lambda i: te.if_then_else(i >= 2, X[i - 2], 0.0), lambda x: shifted(x, 2)),
    (lambda i: te.where(te.all(i >= 1, i < N - 1), X[i - 1] + X[i + 1], X[i]),
     lambda x: np.r_[x[0], x[:-2] + x[2:], x[-1]]),
    (lambda i: te.where(te.any(i == 0, i == N - 1), 0.0, X[i - 1] + X[i + 1]),
     lambda x: np.r_[0, x[:-2] + x[2:], 0]),
    (lambda i: te.where((i >= 1) & (i < 5) | (i == 8), X[i - 1], 0.0),
     lambda x: np.where((AT >= 1) & (AT < 5) | (AT == 8), shifted(x, 1), 0)),
    (lambda i: te.where(~(i < 3), X[i - 3], 0.0), lambda x: shifted(x, 3)),
    (lambda i: te.where((i < 3) ^ (X[i] > 0), 1.0, 0.0),
     lambda x: ((AT < 3) ^ (x > 0)).astype(float)),
    (lambda i: te.where(X[i] == 4.0, 1.0, 0.0), lambda x: (x == 4).astype(float)),
    (lambda i: te.where(X[i] != X[8], 1.0, 0.0), lambda x: (x != x[8]).astype(float)),
    (lambda i: te.where(i < te.cast(X[i], "int64"), 1.0, 0.0),
     lambda x: (x > AT).astype(float)),
    (lambda i: te.sum(te.where(i >= K, X[i - K], 0.0), axis=K),
     lambda x: x + shifted(x, 1) + shifted(x, 2) + shifted(x, 3)),
    (lambda i: te.sum(te.where(te.all(K != 2, i + K < N), X[i + K], 0.0), axis=K),
     lambda x: sum(np.r_[x[d:], np.zeros(d)] for d in (0, 1, 3))),
    (lambda i: X[i] * i + (2 - i) * 0.5, lambda x: x * AT + (2 - AT) * 0.5),
    (lambda i: X[i] ** 2 + 2.0 ** te.cast(i, "float32") + abs(X[i]) + +X[i],
     lambda x: x ** 2 + 2.0 ** AT + np.abs(x) + x),
    (lambda i: np.float32(2) * X[i] + np.int64(1) * X[(i + np.int64(1)) % N],
     lambda x: 2 * x + np.roll(x, -1)),
    (lambda i: te.where(i == i, X[N - 1 - i], 0.0), lambda x: x[::-1]),
])
def test_operators(element: Any, reference: Any, check: Any) -> None:
    y = te.compute((N,), lambda i: element(i) + X[i], name="y")
    check(te.schedule(y), [X, y], [DATA], (reference(DATA) + DATA).astype(np.float32))


def test_conditions_are_tensors_too(check: Any) -> None:
    y = te.compute((N,), lambda i: (X[i] > 0.0) | (i == 4), name="y")
    assert y.dtype.name == "bool"
    check(te.schedule(y), [X, y], [DATA], (DATA > 0) | (AT == 4))


@pytest.mark.parametrize("size", [1, 2, 16, 33])
def test_borders_of_symbolic_sizes(size: int, check: Any) -> None:
    x = te.placeholder((n,), name="x")
    y = te.compute((n + 3,), lambda i: te.if_then_else(te.all(i >= 1, i - 1 < n), x[i - 1], -1.0),
                   name="y")
    z = te.compute((n,), lambda i: te.if_then_else(n - 1 == i, 5.0, x[i]), name="z")
    data = np.arange(size, dtype=np.float32)
    s = te.schedule(y, z)
    s[y].vectorize("i")
    last = data.copy()
    last[-1] = 5
    check(s, [x, y, z], [data], np.r_[-1, data, -1, -1].astype("f"), last)


def test_a_condition_that_lets_too_much_through() -> None:
    with pytest.raises(IndexOutOfRange, match=r"i - 2 of dimension 0 of X"):
        te.compute((N,), lambda i: te.if_then_else(i >= 1, X[i - 2], 0.0))
    with pytest.raises(IndexOutOfRange, match=r"i \+ 1 of dimension 0 of X"):
        te.compute((N,), lambda i: te.if_then_else(te.any(i < N - 1, i < 100), X[i + 1], 0.0))
    with pytest.raises(IndexOutOfRange):
        te.compute((N,), lambda i: te.if_then_else(i != 3, X[i - 1], 0.0))
    with pytest.raises(IndexOutOfRange):
        te.compute((N,), lambda i: te.if_then_else(te.any(i != 0, X[i] > 0.0), X[i - 1], 0.0))


@pytest.mark.parametrize("condition", [
    lambda i: i != 0, lambda i: ~(i == 0),
    lambda i: ~te.all(i < 1, i >= 0), lambda i: te.any(i > 0, i < 0),
])
def test_what_conditions_tell_of_symbolic_sizes(condition: Any) -> None:
    """Proved for all sizes, so nothing is left to check at the call."""
    x = te.placeholder((n,), name="x")
    y = te.compute((n,), lambda i: te.if_then_else(condition(i), x[i - 1], 0.0), name="y")
    assert te.build(te.schedule(y), [x, y], "interpreter").unproved == ()


@pytest.mark.parametrize("element", [
    lambda i: X[i] if i < 3 else 0.0,
    lambda i: X[i] if X[i] > 0.0 else 0.0,
    lambda i: te.where(0 <= i < 3, X[i], 0.0),
    lambda i: te.where(i > 1 and i < 3, X[i], 0.0),
    lambda i: te.where(not i, X[i], 0.0),
    lambda i: X[min(i, 3)],
    lambda i: X[i] if i in (1, 2) else 0.0,
    lambda i: sum(X[j] for j in range(i)),
    lambda i: float(X[i]),
    lambda i: te.sum(X[K] if K == 2 else 0.0, axis=K),
])
def test_python_cannot_decide(element: Any) -> None:
    with pytest.raises(TracedControlFlow, match="differs from element to element") as caught:
        te.compute((N,), element)
    assert "te.if_then_else" in str(caught.value)
    assert "test_terms.py" in str(caught.value)


@pytest.mark.parametrize("element", [
    lambda i: te.if_then_else(n == 4, X[i], 0.0),  # sizes are compared by identity
    lambda i: te.if_then_else(te.all(i < 3, n == 4), X[i], 0.0),
    lambda i: te.if_then_else((i < 3) & (n == 4), X[i], 0.0),
    lambda i: te.if_then_else((n == 4) | (i < 3), X[i], 0.0),
])
def test_what_python_decided_is_no_condition(element: Any) -> None:
    with pytest.raises(ArgumentError, match=r"False before any element.*\n?.*te\.eq"):
        te.compute((N,), element)


def test_what_is_no_condition() -> None:
    with pytest.raises(DTypeError, match=r"X\[i\] is float32, not a condition"):
        te.compute((N,), lambda i: te.where(X[i], 1.0, 0.0))
    with pytest.raises(ArgumentError, match="no condition to join"):
        te.all()
    with pytest.raises(ArgumentError, match="means nothing in a formula"):
        te.compute((N,), lambda i: X[i] + "one")


def test_sizes_are_compared_by_functions(check: Any) -> None:
    x = te.placeholder((n,), name="x")
    y = te.compute((n,), lambda i: te.where(te.eq(n, 4), x[i], 0.0), name="y")
    s = te.schedule(y)
    for size in (3, 4):
        data = np.ones(size, np.float32)
        check(s, [x, y], [data], data * (size == 4))


def test_functions_of_numpy(check: Any) -> None:
    y = te.compute((N,), lambda i: np.exp(X[i] * 0.1) + np.maximum(X[i], 2) * np.float32(2),
                   name="y")
    check(te.schedule(y), [X, y], [DATA], np.exp(DATA * 0.1) + np.maximum(DATA, 2) * 2)
    with pytest.raises(ArgumentError, match=r"numpy.heaviside means nothing in a formula"):
        te.compute((N,), lambda i: np.heaviside(X[i], 0.5))
    with pytest.raises(ArgumentError, match="means nothing in a formula"):
        te.compute((N,), lambda i: X[i] + np.array([1, 2]))
    with pytest.raises(ArgumentError, match="means nothing in a formula"):
        te.compute((N,), lambda i: np.array([1, 2]) + X[i])


@pytest.mark.parametrize("index", ["a", 1.5, slice(None), None, True])
def test_what_is_no_index(index: Any) -> None:
    with pytest.raises(ArgumentError, match="cannot read X at"):
        te.compute((N,), lambda i: X[index])


@pytest.mark.parametrize("value", [None, "one", X, np.ones(2)])
def test_what_is_no_value(value: Any) -> None:
    with pytest.raises(ArgumentError, match="the function of y answers with"):
        te.compute((N,), lambda i: value, name="y")
    with pytest.raises(ArgumentError, match="an axis cannot run over"):
        te.reduce_axis(value)
