"""cond, while_loop and scan: against the same in Python, with captured values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from checking import check_gradient, close, draw, evaluate, op

from terrazzo.base.shapes import dims
from terrazzo.dtypes import float32, int64
from terrazzo.errors import ArgumentError, DTypeError, NotDifferentiable, ShapeError
from terrazzo.graph.autodiff import grad_graph
from terrazzo.graph.evaluate import run
from terrazzo.graph.ir import TensorType, Value
from terrazzo.graph.trace import trace

cond, while_loop, scan = op("cond"), op("while_loop"), op("scan")


def nodes_named(graph: Any, name: str) -> list[Any]:
    return [node for node in graph.nodes if node.op.name == name]


@pytest.mark.parametrize("truth", [True, False])
def test_cond(truth: bool, rng: np.random.Generator) -> None:
    x, y = draw(rng, (3, 4)), draw(rng, (4,))

    def choose(pred: Value, x: Value, y: Value) -> Any:
        return cond(pred, lambda a, b: (a + b, {"k": b}), lambda a, b: (a * 2.0, {"k": -b}), x, y)

    got = evaluate(choose, np.bool_(truth), x, y)
    expected = (x + y, y) if truth else (x * 2, -y)
    for a, b in zip(got, expected, strict=True):
        close(a, b)


def test_captured_values_become_operands(rng: np.random.Generator) -> None:
    x, w = draw(rng, (3,)), draw(rng, (3,))

    def function(x: Value, w: Value) -> Any:
        scaled = op("exp")(w)  # computed once, outside
        return cond(op("sum")(x) > 0.0, lambda a: a * scaled + w, lambda a: a - 1.0, x)

    graph, _ = trace(function, [TensorType((3,), float32)] * 2)
    (node,) = nodes_named(graph, "cond")
    assert len(node.inputs) == 4  # the predicate, x, scaled, w
    assert nodes_named(graph, "exp")
    for inner in (node.attrs["then_graph"], node.attrs["else_graph"]):
        assert [v.type for v in inner.inputs] == [TensorType((3,), float32)] * 3
        assert not nodes_named(inner, "exp")
    for sign in (1, -1):
        v = np.abs(x) * np.float32(sign)
        close(evaluate(function, v, w), v * np.exp(w) + w if sign > 0 else v - 1)


def test_a_branch_may_return_what_it_captured(rng: np.random.Generator) -> None:
    x = draw(rng, (2,))
    close(evaluate(lambda p, x: cond(p, lambda: x, lambda: op("zeros_like")(x)), np.True_, x), x)


def test_while_loop() -> None:
    def collatz(n: Value) -> Any:
        def step(state: dict[str, Value]) -> dict[str, Value]:
            value = state["value"]
            even = op("equal")(value % 2, 0)
            return {"value": op("where")(even, value // 2, value * 3 + 1),
                    "steps": state["steps"] + 1}

        return while_loop(lambda s: s["value"] > 1, step, {"value": n, "steps": 0})

    value, steps = evaluate(collatz, np.int64(27))
    assert (int(value), int(steps)) == (1, 111)
    assert int(evaluate(collatz, np.int64(1))[1]) == 0


def test_while_loop_captures(rng: np.random.Generator) -> None:
    x, limit = draw(rng, (3,), low=1, high=2), np.float32(50)

    def grow(x: Value, limit: Value) -> Any:
        factor = op("max")(x)
        return while_loop(lambda s: op("sum")(s) < limit, lambda s: s * factor, x)

    expected = x
    while expected.sum() < limit:
        expected = expected * x.max()
    close(evaluate(grow, x, limit), expected)


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.mark.parametrize("reverse", [False, True])
def test_scan(reverse: bool, rng: np.random.Generator) -> None:
    xs, w = draw(rng, (5, 3)), draw(rng, (3,))

    def walk(xs: Value, w: Value) -> Any:
        def step(carry: Pair, x: Value) -> Any:
            state = op("tanh")(carry.first * w + x)
            return Pair(state, carry.second + 1), (state * 2.0, x[0])

        return scan(step, Pair(op("zeros_like")(w), 0), xs, reverse=reverse)

    last, count, doubled, firsts = evaluate(walk, xs, w)
    state, states = np.zeros(3, np.float32), np.zeros((5, 3), np.float32)
    for k in range(5)[::-1 if reverse else 1]:
        state = states[k] = np.tanh(state * w + xs[k])
    close(last, state)
    close(doubled, states * 2)
    close(firsts, xs[:, 0])
    assert int(count) == 5


def test_scan_by_length_and_over_nothing(rng: np.random.Generator) -> None:
    powers = evaluate(lambda x: scan(lambda c, _: (c * x, c), 1.0, length=4)[1], np.float32(3))
    close(powers, np.array([1, 3, 9, 27], np.float32))
    last, ys = evaluate(lambda xs: scan(lambda c, x: (c + x, c), 0.0, xs),
                        np.zeros((0,), np.float32))
    assert float(last) == 0 and ys.shape == (0,)


def test_scan_with_a_symbolic_length(rng: np.random.Generator) -> None:
    (n,) = dims("n")
    xs = draw(rng, (4, 2))
    total, sums = evaluate(lambda xs: scan(lambda c, x: (c + x, c + x), np.zeros(2, "f4"), xs), xs,
                           shapes=[(n, 2)])
    close(total, xs.sum(0))
    close(sums, xs.cumsum(0))


def test_nested(rng: np.random.Generator) -> None:
    xs, w = draw(rng, (4, 3)), draw(rng, (3,))

    def function(xs: Value, w: Value) -> Any:
        def step(c: Value, x: Value) -> Any:
            grown = cond(op("sum")(x) > 0.0, lambda: c + x * w, lambda: c - w)
            return grown, while_loop(lambda s: op("sum")(s) < op("sum")(w), lambda s: s + 1.0, c)

        return scan(step, w * 0.0, xs)

    state, halted = np.zeros(3, np.float32), []
    for x in xs:
        inner = state
        while inner.sum() < w.sum():
            inner = inner + 1
        halted.append(inner)
        state = state + x * w if x.sum() > 0 else state - w
    got = evaluate(function, xs, w)
    close(got[0], state)
    close(got[1], np.stack(halted), rtol=1e-5)


def test_gradient_of_cond(rng: np.random.Generator) -> None:
    x, w = draw(rng, (3,), "float64"), draw(rng, (3,), "float64")

    def function(x: Value, w: Value, pred: Value) -> Any:
        outer = op("sin")(w)
        return cond(pred, lambda a: a * outer, lambda a: op("exp")(a), x)

    for truth in (True, False):
        check_gradient(function, x, w, np.bool_(truth), wrt=(0, 1))


@pytest.mark.parametrize("reverse", [False, True])
def test_gradient_of_scan(reverse: bool, rng: np.random.Generator) -> None:
    xs, w, h = draw(rng, (4, 3), "float64"), draw(rng, (3,), "float64"), draw(rng, (3,), "float64")

    def network(xs: Value, w: Value, h: Value, scale: Value) -> Any:
        def step(carry: Any, x: Value) -> Any:
            state, count = carry
            state = op("tanh")(state * w + x * scale)
            return (state, count + 1), state * x

        (last, _), ys = scan(step, (h, 0), xs, reverse=reverse)
        return ys + last

    check_gradient(network, xs, w, h, np.asarray(0.7), wrt=(0, 1, 2, 3))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("batch", [1, 2, 9])
def test_gradient_of_weights_in_a_scan(batch: int, reverse: bool, rng: np.random.Generator) -> None:
    """Products on either side, transposed or not, with rows of xs, with the state, with both."""
    xs, w, u, b = (draw(rng, s, "float64") for s in ((3, batch, 4), (4, 4), (4, 4), (4,)))

    def network(xs: Value, w: Value, u: Value, b: Value) -> Any:
        def step(h: Any, x: Value) -> Any:
            new = op("tanh")(h @ w + x @ u.T + b) + (w @ h.T).T
            return new, op("sigmoid")(new @ w) * h

        last, ys = scan(step, xs[0] * 0.5, xs, reverse=reverse)
        return ys + last

    check_gradient(network, xs, w, u, b, wrt=(0, 1, 2, 3))


def test_backward_scan_keeps_products_and_adds_weights_up_after_it() -> None:
    """Per step one product and no sum of a weight's size; none at all is computed again."""
    def network(xs: Value, w: Value, h: Value) -> Any:
        def step(h: Any, x: Value) -> Any:
            h = op("tanh")(h @ w + x)
            return h, h

        return op("sum")(scan(step, h, xs)[1])

    types = [TensorType(s, float32) for s in ((50, 8, 64), (64, 64), (8, 64))]
    graph = grad_graph(trace(network, types)[0], wrt=(0, 1, 2))
    forward, backward = nodes_named(graph, "scan")
    products = [[n for n in scan.attrs["body"].nodes if "matmul" in n.op.name]
                for scan in (forward, backward)]
    assert [len(found) for found in products] == [1, 1]
    assert backward.attrs["carries"] == 1
    assert [n.types[0].shape for n in nodes_named(graph, "batch_matmul")] == [(64, 64)]


def test_second_derivative_of_scan() -> None:
    graph, _ = trace(lambda x: scan(lambda c, _: (c * x, ()), 1.0, length=5)[0],
                     [TensorType((), float32)])
    twice = grad_graph(grad_graph(graph))
    close(run(twice, [np.asarray(2, np.float32)])[0], np.float32(20 * 2**3))


def test_wide_evaluation_is_float64_inside() -> None:
    x = np.float32(1) / np.float32(3)
    got = evaluate(lambda x: scan(lambda c, _: (c * x, c), 1.0, length=3)[0], x, wide=True)
    assert got.dtype == np.float64 and abs(float(got) - float(x) ** 3) < 1e-17


X, N = Value(TensorType((3,), float32)), Value(TensorType((), int64))
ERRORS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: cond(X, lambda: X, lambda: X), DTypeError, "single truth value"),
    (lambda: cond(N, lambda: X, lambda: X[:2]), DTypeError, "branches"),
    (lambda: cond(N, lambda: X, lambda: (X,)), ArgumentError, "nesting"),
    (lambda: while_loop(lambda s: s > 0, lambda s: s * 0.5, N), DTypeError, "changes the types"),
    (lambda: while_loop(lambda s: s > 0.0, lambda s: s, X), DTypeError, "single truth value"),
    (lambda: while_loop(lambda s: (s > 0, s > 1), lambda s: s, N), ArgumentError, "more than one"),
    (lambda: while_loop(lambda s: s[0] > 0, lambda s: s[0], (N,)), ArgumentError, "nesting"),
    (lambda: scan(lambda c, x: (c[:1], x), X, X), DTypeError, "changes the types"),
    (lambda: scan(lambda c, x: c + x, 0.0, X), ArgumentError, "pair"),
    (lambda: scan(lambda c, x: ((c, c), x), 0.0, X), ArgumentError, "nesting"),
    (lambda: scan(lambda c, x: (c, x), 0.0), ArgumentError, "length="),
    (lambda: scan(lambda c, x: (c, x), 0.0, N), ShapeError, "first axis"),
    (lambda: scan(lambda c, x: (c, x), 0.0, (X, X[:2])), ShapeError, "steps"),
]


@pytest.mark.parametrize(("function", "error", "text"), ERRORS, ids=[row[2] for row in ERRORS])
def test_errors(function: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        function()


def test_while_loop_has_no_gradient() -> None:
    with pytest.raises(NotDifferentiable, match=r"tz\.scan"):
        check_gradient(lambda x: while_loop(lambda s: s < 9.0, lambda s: s * 2.0, x),
                       np.asarray(1.0))
