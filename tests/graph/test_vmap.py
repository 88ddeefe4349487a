"""vmap of every operator: what it gives for a batch is what the operator gives for each row."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.compiler.driver import compile_graph
from terrazzo.dtypes import as_dtype
from terrazzo.errors import ArgumentError, AxisError, ShapeError
from terrazzo.graph.autodiff import vjp_graph
from terrazzo.graph.evaluate import run
from terrazzo.graph.ir import Graph, TensorType, operator_named
from terrazzo.graph.trace import trace

sys.path[:0] = [str(Path(__file__).parents[1])]

from test_every_operator import CASES, DIFFERENTIABLE, TOLERANCE, Case, inputs_of  # noqa: E402

ROWS_OF_BATCH = 3
# Their tables point into each other: other numbers in them make no sense, so they stay the same.
TABLES = {"tree_ensemble"}


def function_of(name: str, row: Case, present: Sequence[bool]) -> Any:
    op = operator_named(name)

    def function(*given: Any) -> Any:
        values = iter(given)
        args = [next(values) if here else None for here in present]
        return row.call(op, *args) if row.call is not None else op(*args, **row.attrs)

    return function


def traced(function: Any, arrays: Sequence[np.ndarray]) -> Graph:
    return trace(function, [TensorType(a.shape, as_dtype(a.dtype)) for a in arrays], "vmapped")[0]


def close(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> None:
    for got, want in zip(found, wanted, strict=True):
        assert got.shape == want.shape and as_dtype(got.dtype) is as_dtype(want.dtype)
        if as_dtype(want.dtype).kind not in ("f", "c"):
            np.testing.assert_array_equal(got, want)
            continue
        tolerance = 4 * TOLERANCE[as_dtype(want.dtype).real.name]
        largest = float(np.max(np.abs(want), initial=1.0, where=np.isfinite(want)))
        np.testing.assert_allclose(got, want, tolerance, tolerance * largest)


def batches(name: str, row: Case) -> Any:
    """The case's inputs, a batch of them, and which inputs differ from row to row."""
    made = [inputs_of(row, np.random.default_rng(seed), "float32") for seed in range(
        ROWS_OF_BATCH)]
    single = [a for a in made[0] if a is not None]
    present = [a is not None for a in made[0]]
    stacked = [np.stack(column) for column in zip(*(
        [a for a in arrays if a is not None] for arrays in made))]
    chosen = [[True] * len(single)]
    if len(single) > 1 and name not in TABLES:
        chosen += [[i == k for i in range(len(single))] for k in range(len(single))]
    return function_of(name, row, present), single, stacked, chosen


def check(name: str, row: Case, gradient: bool) -> None:
    function, single, stacked, chosen = batches(name, row)
    for flags in chosen:
        arrays = [s if flag else a for a, s, flag in zip(single, stacked, flags)]
        axes = tuple(0 if flag else None for flag in flags)
        one, many = traced(function, single), traced(tz.vmap(function, axes), arrays)
        if gradient:
            one, many = vjp_graph(one), vjp_graph(many)
        rows = [[a[k] if flag else a for a, flag in zip(arrays, flags)]
                for k in range(ROWS_OF_BATCH)]
        rng = np.random.default_rng(5)
        weights = [rng.normal(size=v.type.shape).astype(v.dtype.np)
                   for v in many.inputs[len(arrays):]]
        found = run(many, [*arrays, *weights])
        each = [run(one, [*given, *(w[k] for w in weights)]) for k, given in enumerate(rows)]
        wanted = [np.stack(column) for column in zip(*each)]
        if gradient:  # what all rows share has the sum of their gradients
            floats = [f for f, v in zip(flags, one.inputs) if v.dtype.is_float]
            wanted = [w if f else w.sum(0) for w, f in zip(wanted, floats, strict=True)]
        close(found, wanted)


@pytest.mark.parametrize(("name", "row"), [p for p in CASES if p.values[1].inputs])
def test_values(name: str, row: Case) -> None:
    check(name, row, gradient=False)


@pytest.mark.parametrize(("name", "row"), DIFFERENTIABLE)
def test_gradients(name: str, row: Case) -> None:
    check(name, row, gradient=True)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "row"), [p for p in CASES if p.values[1].inputs])
def test_compiled(name: str, row: Case) -> None:
    function, single, stacked, chosen = batches(name, row)
    for flags in chosen[:2]:
        arrays = [s if flag else a for a, s, flag in zip(single, stacked, flags)]
        graph = traced(tz.vmap(function, tuple(0 if flag else None for flag in flags)), arrays)
        close(compile_graph(graph).run(arrays), run(graph, arrays))


# ---------------------------------------------------------------- compiled, nested, with gradients
X = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(4, 5)).astype(np.float32)


def test_compiled_calls() -> None:
    products = tz.vmap(lambda x, y: tz.dot(x, y))
    np.testing.assert_allclose(products(X, Y), (X * Y).sum(1), rtol=1e-5)
    by_columns = tz.vmap(lambda x, y: tz.dot(x, y), in_axes=1)
    np.testing.assert_allclose(by_columns(X, Y), (X * Y).sum(0), rtol=1e-5, atol=1e-6)
    for n in (2, 6, 3):  # sizes that vary
        np.testing.assert_allclose(products(X[:n], Y[:n]), (X * Y).sum(1)[:n], rtol=1e-5)


def test_axes() -> None:
    outer = tz.vmap(lambda x, y: x * y, in_axes=(0, None), out_axes=1)
    np.testing.assert_array_equal(outer(X[0], X[1]), np.outer(X[1], X[0]))
    nested = tz.vmap(lambda p, x: p["w"] * x + p["b"], in_axes=({"w": 0, "b": None}, 0))
    np.testing.assert_allclose(nested({"w": X, "b": X[0]}, Y), X * Y + X[0], rtol=1e-5)
    results = tz.vmap(lambda x: {"a": x, "b": (x.sum(), 3.0)}, out_axes={"a": 1, "b": (0, None)})(X)
    np.testing.assert_array_equal(results["a"], X.T)
    assert results["b"][0].shape == (4,) and results["b"][1].shape == ()
    np.testing.assert_array_equal(tz.vmap(lambda x: 3.0, in_axes=-1)(X), np.full(5, 3.0))


def test_nested_and_of_gradients() -> None:
    table = tz.vmap(tz.vmap(lambda x, y: x * y, in_axes=(None, 0)), in_axes=(0, None))
    np.testing.assert_array_equal(table(X[0], X[1]), np.outer(X[0], X[1]))

    def loss(w: Any, x: Any) -> Any:
        return tz.sum(tz.tanh(x * w) ** 2)

    each = tz.vmap(tz.grad(loss), in_axes=(None, 0))(X[0], Y)  # a gradient for every example
    np.testing.assert_allclose(each, np.stack([tz.grad(loss)(X[0], y) for y in Y]), rtol=1e-5)
    of_all = tz.grad(lambda w, y: tz.sum(tz.vmap(loss, in_axes=(None, 0))(w, y)))(X[0], Y)
    np.testing.assert_allclose(of_all, each.sum(0), rtol=1e-5)
    jacobian = tz.vmap(tz.vjp(tz.softmax), in_axes=(None, 0))(X[0], np.eye(5, dtype=np.float32))
    s = np.asarray(tz.softmax(X[0]))
    np.testing.assert_allclose(jacobian, np.diag(s) - np.outer(s, s), atol=1e-6)


def test_control_flow() -> None:
    def halved(x: Any) -> Any:  # as often as its row needs
        return tz.while_loop(lambda s: s[1] > 1, lambda s: (s[0] + 1, s[1] / 2), (0, x))

    counts, values = tz.vmap(halved)(np.array([1, 8, 3, 100], np.float32))
    np.testing.assert_array_equal(counts, [0, 3, 2, 7])
    np.testing.assert_allclose(values, [1, 1, 0.75, 0.78125])
    turns = tz.vmap(lambda x: tz.while_loop(
        lambda s: s[0] < 5, lambda s: (s[0] + 1, s[1] * x), (0, x))[1])(X)
    np.testing.assert_allclose(turns, X ** 6, rtol=1e-5)
    chosen = tz.vmap(lambda x: tz.cond(x.sum() > 0, lambda: x * 2, lambda: -x))(X)
    np.testing.assert_array_equal(chosen, np.where(X.sum(1, keepdims=True) > 0, X * 2, -X))
    common = tz.vmap(lambda x, p: tz.cond(p, lambda: x * 2, lambda: -x), in_axes=(0, None))
    np.testing.assert_array_equal(common(X, np.bool_(True)), X * 2)

    def running(x: Any) -> Any:
        return tz.scan(lambda c, row: (c + row, c * row), np.float32(0), x)

    last, rows = tz.vmap(running)(X)
    np.testing.assert_allclose(last, X.sum(1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(rows, (np.cumsum(X, 1) - X) * X, rtol=1e-4, atol=1e-5)
    slopes = tz.grad(lambda x: tz.sum(tz.vmap(running)(x)[1]))(X)
    np.testing.assert_allclose(slopes, X.sum(1, keepdims=True) - X, rtol=1e-4, atol=1e-5)


def test_gradient_rules_of_users_hold_for_each_row() -> None:
    @tz.op(name="test_straight_through", grad=lambda node, g: [g])
    def straight(x: Any) -> Any:
        return tz.round(x)

    slopes = tz.grad(lambda x: tz.sum(tz.vmap(straight)(x) * Y))(X)
    np.testing.assert_array_equal(slopes, Y)
    slopes = tz.vmap(tz.grad(lambda x, y: tz.sum(straight(x) * y)))(X, Y)
    np.testing.assert_array_equal(slopes, Y)


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: tz.vmap(tz.add)(X, Y[:2]), ShapeError, "4 rows of one argument and 2 of another"),
    (lambda: tz.vmap(tz.add, in_axes=(0, 1, 0))(X, Y), ArgumentError, "does not fit"),
    (lambda: tz.vmap(tz.exp, in_axes=None)(X), ArgumentError, "nothing to count rows by"),
    (lambda: tz.vmap(tz.exp)(np.float32(1)), ShapeError, "has none"),
    (lambda: tz.vmap(tz.exp, in_axes=2)(X), AxisError, "axis 2"),
    (lambda: tz.vmap(tz.exp, out_axes=None)(X), ArgumentError, "depends on the rows"),
    (lambda: tz.vmap(lambda x: tz.nonzero(x))(X), tz.errors.TracedControlFlow, "nonzero"),
])
def test_what_cannot_be(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
