"""The pipeline of passes: what it makes of real code, and that it never changes a value."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrazzo.dtypes import float32, int32
from terrazzo.graph.autodiff import vjp_graph
from terrazzo.graph.derivatives import grad
from terrazzo.graph.evaluate import run
from terrazzo.graph.ir import OPERATORS, Graph, TensorType, Value
from terrazzo.graph.passes import canonicalize
from terrazzo.graph.trace import trace


class Ops:
    """Operators by name: `op.add(x, y)`."""

    def __getattr__(self, name: str) -> Any:
        return OPERATORS[name]


op = Ops()
X = TensorType((3, 4), float32)


def test_second_derivative_comes_out_as_by_hand() -> None:
    graph, _ = trace(grad(grad(lambda x: x**3)), [TensorType((), float32)], "second")
    assert str(canonicalize(graph)[0]) == """\
graph second(x0: f32[]):
    %2: f32[] = multiply(6.0, x0)
    return %2"""


def test_gradient_of_a_layer_has_no_transposes_and_no_composites() -> None:
    def layer(x: Value, w: Value) -> Value:
        return op.gelu(x @ w.T).sum()

    graph, _ = trace(grad(layer, (0, 1)), [X, TensorType((5, 4), float32)])
    after, log = canonicalize(graph)
    names = {node.op.name for node in after.nodes}
    assert "permute_dims" not in names and "broadcast_to" not in names
    assert not any(node.op.is_composite for node in after.nodes)
    assert "transpose into a matrix product, right" in {a.rule for a in log}


def test_it_is_a_fixpoint() -> None:
    graph, _ = trace(lambda x: op.softmax(x * 1 + (x - 0)) / 2, [X])
    once, first = canonicalize(graph)
    twice, second = canonicalize(once)
    assert first and second == [] and str(once) == str(twice)


def test_graphs_inside_nodes_are_canonical_too() -> None:
    def walk(x: Value) -> Value:
        return op.scan(lambda h, row: (op.softmax(h * 1 + row), h), x[0], x)[0]

    graph, _ = trace(walk, [X])
    after, log = canonicalize(graph)
    (body,) = [v for n in after.nodes for v in n.attrs.values() if isinstance(v, Graph)]
    assert not any(n.op.is_composite for n in body.nodes)
    assert "multiply by one" in {a.rule for a in log}
    x = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)
    np.testing.assert_array_equal(run(graph, [x])[0], run(after, [x])[0])


def test_a_thousand_nodes_take_less_than_a_second() -> None:
    def long(x: Value) -> Value:
        for _ in range(60):
            x = op.layer_norm(op.tanh(x * 1.0 + 0.5) / 4.0 + x)
        return x

    graph, _ = trace(long, [X])
    start = time.perf_counter()
    after, _ = canonicalize(graph)
    assert len(after.nodes) > 500
    assert time.perf_counter() - start < 5.0  # 0.2 s when the machine is idle


# ---------------------------------------------------------------- random graphs keep their values
SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-38, 3e38, 1.0, -1.0, 0.5, -2.5],
                   np.float32)
FLOAT_STEPS = {
    "binary": ["add", "subtract", "multiply", "divide", "maximum", "minimum"],
    "unary": ["negative", "absolute", "sqrt", "floor", "sign", "exp"],
    "number": [0.0, -0.0, 1.0, -1.0, 2.0, 0.25, 3.0],
}
INT_STEPS = {
    "binary": ["add", "subtract", "multiply", "maximum", "minimum", "bitwise_and", "bitwise_xor"],
    "unary": ["negative", "absolute", "sign", "bitwise_invert"],
    "number": [0, 1, -1, 2, 7],
}


@st.composite
def programs(draw: st.DrawFn, steps: dict[str, list[Any]], type: TensorType) -> Graph:
    """A random graph over two inputs of shape [3, 4], whose every value has that shape."""

    def program(x: Value, y: Value) -> tuple[Value, ...]:
        values = [x, y]

        def pick() -> Value:
            return draw(st.sampled_from(values))

        for _ in range(draw(st.integers(1, 12))):
            kind = draw(st.sampled_from(["binary", "unary", "number", "where", "move", "reduce"]))
            if kind == "binary":
                made = OPERATORS[draw(st.sampled_from(steps["binary"]))](pick(), pick())
            elif kind == "unary":
                made = OPERATORS[draw(st.sampled_from(steps["unary"]))](pick())
            elif kind == "number":
                name = draw(st.sampled_from(["add", "subtract", "multiply", "maximum"]))
                pair = [pick(), draw(st.sampled_from(steps["number"]))]
                made = OPERATORS[name](*draw(st.permutations(pair)))
            elif kind == "where":
                test = OPERATORS[draw(st.sampled_from(["less", "equal", "greater_equal"]))]
                made = op.where(test(pick(), pick()), pick(), pick())
            elif kind == "move":
                turned = op.permute_dims(op.reshape(pick(), shape=(4, 3)), axes=(1, 0))
                made = op.reshape(turned, shape=(3, 4)) if draw(st.booleans()) else turned
            else:
                axis = draw(st.integers(0, 1))
                row = op.max(pick(), axis=axis, keepdims=True)
                made = op.broadcast_to(row, shape=(3, 4)) if draw(st.booleans()) else (
                    op.minimum(row, pick()))
            values.append(made)
        return tuple(values[-3:])

    return trace(program, [type, type], "random")[0]


def assert_same_bits(graph: Graph, arrays: list[np.ndarray]) -> None:
    after, _ = canonicalize(graph)
    for before, now in zip(run(graph, arrays), run(after, arrays), strict=True):
        assert before.dtype == now.dtype
        np.testing.assert_array_equal(before, now)
        if before.dtype.kind == "f":
            known = ~np.isnan(before)
            np.testing.assert_array_equal(np.signbit(before)[known], np.signbit(now)[known],
                                          err_msg=f"{graph}\n{after}")


@settings(max_examples=60)
@given(programs(FLOAT_STEPS, X), st.randoms(use_true_random=False))
def test_random_float_graphs_keep_every_bit(graph: Graph, random: Any) -> None:
    arrays = [np.array(random.choices(list(SPECIAL), k=12), np.float32).reshape(3, 4)
              for _ in range(2)]
    assert_same_bits(graph, arrays)


@settings(max_examples=40)
@given(programs(INT_STEPS, TensorType((3, 4), int32)), st.randoms(use_true_random=False))
def test_random_integer_graphs_keep_every_bit(graph: Graph, random: Any) -> None:
    pool = [0, 1, -1, 2, 2**31 - 1, -2**31, 12345]
    arrays = [np.array(random.choices(pool, k=12), np.int32).reshape(3, 4) for _ in range(2)]
    assert_same_bits(graph, arrays)


@settings(max_examples=25)
@given(programs({**FLOAT_STEPS, "unary": ["negative", "tanh", "sin", "exp"]}, X),
       st.integers(0, 2**16))
def test_gradients_of_random_graphs_keep_their_values(graph: Graph, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pulled = vjp_graph(graph)
    arrays = [rng.normal(size=(3, 4)) for _ in pulled.inputs]
    after, _ = canonicalize(pulled)
    for before, now in zip(run(pulled, arrays, wide=True), run(after, arrays, wide=True),
                           strict=True):
        np.testing.assert_allclose(before, now, rtol=1e-12)


@pytest.mark.parametrize("level", ["basic", "extended", "layout", "all"])
def test_every_level_of_the_setting_compiles(level):
    import terrazzo as tz

    x = np.ones((3, 4), np.float32) * 3
    with tz.knobs.override(opt_level=level):
        got = tz.jit(lambda x: x * 1.0 + tz.power(x, 2.0))(x)
    np.testing.assert_allclose(got, 12.0)
