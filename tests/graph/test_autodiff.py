"""Reverse-mode differentiation: graphs, functions, nesting, and what goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.base.shapes import dim
from terrazzo.dtypes import float16, float32, float64, int32, int64
from terrazzo.errors import GradientError, NotDifferentiable
from terrazzo.graph.applying import apply
from terrazzo.graph.autodiff import grad_graph, gradients, stop_gradient, vjp_graph
from terrazzo.graph.derivatives import grad, grad_function, value_and_grad, vjp
from terrazzo.graph.evaluate import run
from terrazzo.graph.ir import OPERATORS, Graph, TensorType, Value
from terrazzo.graph.passes import canonicalize
from terrazzo.graph.trace import trace
from terrazzo.ops.elementwise import (
    astype,
    cos,
    exp,
    floor_divide,
    less,
    multiply,
    sin,
    tanh,
    where,
)

X = np.array([0.3, -1.2, 2.0])


def scalar(x: Any) -> Any:
    return OPERATORS["sum"](x)


def names_of(graph: Graph) -> list[str]:
    return [node.op.name for node in graph.nodes]


# ---------------------------------------------------------------- functions
def test_grad_of_a_scalar_function() -> None:
    np.testing.assert_allclose(grad(lambda x: sin(x) * x)(np.float64(2.0)),
                               np.cos(2) * 2 + np.sin(2))


def test_value_and_grad_answer_both() -> None:
    value, gradient = value_and_grad(lambda x: scalar(x * x))(X)
    np.testing.assert_allclose(value, np.sum(X * X))
    np.testing.assert_allclose(gradient, 2 * X)


def test_several_arguments() -> None:
    by_x, by_y = grad(lambda x, y: scalar(x * exp(y)), argnums=(0, 1))(X, 2 * X)
    np.testing.assert_allclose(by_x, np.exp(2 * X))
    np.testing.assert_allclose(by_y, X * np.exp(2 * X))
    np.testing.assert_allclose(grad(lambda x, y: scalar(x * y), argnums=-1)(X, 2 * X), X)


def test_nested_arguments_give_nested_gradients() -> None:
    params = {"w": X, "layers": [X + 1, (X * 2,)]}

    def loss(p: Any, scale: float) -> Any:
        return scalar(p["w"] * p["layers"][0] * p["layers"][1][0]) * scale

    found = grad(loss)(params, 3.0)
    np.testing.assert_allclose(found["w"], 3 * (X + 1) * X * 2)
    assert isinstance(found["layers"], list) and isinstance(found["layers"][1], tuple)


def test_vjp_weighs_every_element() -> None:
    weights = np.array([1.0, 0.0, -2.0])
    np.testing.assert_allclose(vjp(sin)(X, weights), weights * np.cos(X))
    two = vjp(lambda x: (x * x, {"s": scalar(x)}))(X, (weights, {"s": np.float64(5.0)}))
    np.testing.assert_allclose(two, weights * 2 * X + 5)


def test_higher_orders_nest() -> None:
    f = grad(grad(grad(lambda x: sin(x) * x)))
    x = np.float64(0.7)
    np.testing.assert_allclose(f(x), -3 * np.sin(x) - x * np.cos(x))


def test_hessian_vector_product() -> None:
    def product(x: Any, v: Any) -> Any:
        return grad(lambda y: scalar(grad(lambda z: scalar(z**3))(y) * v))(x)

    v = np.array([1.0, -2.0, 0.5])
    graph, _ = trace(product, [TensorType((3,), float64)] * 2)
    np.testing.assert_allclose(run(graph, [X, v])[0], 6 * X * v)


def test_what_a_function_captures_is_constant() -> None:
    def outer(x: Value) -> Value:
        square = x * x
        return grad(lambda y: y * square)(x)  # not 3 x**2: square does not pass through y

    graph, _ = trace(outer, [TensorType((), float64)])
    np.testing.assert_allclose(run(graph, [np.float64(3.0)])[0], 9.0)


def test_traced_values_make_nodes() -> None:
    x = Value(TensorType((), float32), name="x")
    result = grad(lambda y: y * y)(x)
    assert isinstance(result, Value)
    value, gradient = value_and_grad(lambda y: y * y)(x)
    (a, b) = run(Graph("g", (x,), (value, gradient)), [np.float32(3.0)])
    assert (a, b) == (9.0, 6.0)


def test_an_unused_argument_has_a_gradient_of_zeros() -> None:
    np.testing.assert_array_equal(grad(lambda x, y: scalar(x), argnums=1)(X, X), np.zeros(3))


def test_on_values_a_gradient_is_values() -> None:
    assert isinstance(grad_function(scalar)(Value(TensorType((), float32))), Value)


# ---------------------------------------------------------------- graphs
def test_vjp_graph_takes_a_cotangent_for_each_float_output() -> None:
    graph, _ = trace(lambda x, n: (x * n, n + 1, tanh(x)),
                     [TensorType((3,), float64), TensorType((3,), int64)], names=("x", "n"))
    pulled = vjp_graph(graph)
    assert [v.name for v in pulled.inputs] == ["x", "n", "d_0", "d_2"]
    assert len(pulled.outputs) == 1, "integers have no gradient"
    n, a, b = np.arange(3), np.ones(3), np.array([1.0, 2.0, 3.0])
    np.testing.assert_allclose(run(pulled, [X, n, a, b])[0], n + b * (1 - np.tanh(X) ** 2))


def test_integers_asked_for_have_zeros() -> None:
    graph, _ = trace(lambda x, n: x * n, [TensorType((), float32), TensorType((), int32)])
    by_n, by_x = run(vjp_graph(graph, wrt=(1, 0)), [np.float32(2), np.int32(3), np.float32(1)])
    assert by_n == 0 and by_n.dtype == np.int32 and by_x == 3


def test_grad_graph_text() -> None:
    graph, _ = trace(lambda x: OPERATORS["sum"](sin(x)), [TensorType((3,), float32)], "f")
    assert str(grad_graph(graph)) == """\
graph f_grad(x0: f32[3]):
    %1: f32[] = full(dtype=float32, shape=(), value=1)
    %2: f32[1] = reshape(%1, shape=(1,))
    %3: f32[3] = broadcast_to(%2, shape=(3,))
    %4: f32[3] = cos(x0)
    %5: f32[3] = multiply(%3, %4)
    return %5"""


def test_broadcast_operands_get_gradients_of_their_own_shape() -> None:
    n = dim("n")
    types = [TensorType(s, float64) for s in ((n, 4), (4,), (n, 1), (), (1, 1, 4))]
    graph, _ = trace(lambda a, b, c, d, e: a * b + c * d - e, types)
    pulled = vjp_graph(graph)
    assert [v.shape for v in pulled.outputs] == [t.shape for t in types]
    rng = np.random.default_rng(0)
    a, b, c, d, e = (rng.normal(size=s) for s in ((3, 4), (4,), (3, 1), (), (1, 1, 4)))
    g = rng.normal(size=(1, 3, 4))
    found = run(pulled, [a, b, c, d, e, g])
    np.testing.assert_allclose(found[0], g[0] * b)
    np.testing.assert_allclose(found[1], (g[0] * a).sum(0))
    np.testing.assert_allclose(found[2], (g[0] * d).sum(1, keepdims=True))
    np.testing.assert_allclose(found[3], (g[0] * c).sum())
    np.testing.assert_allclose(found[4], -g.sum((0, 1), keepdims=True))


def test_gradients_have_the_type_of_their_input() -> None:
    graph, _ = trace(lambda x, y: x * y, [TensorType((2,), float16), TensorType((2,), float32)])
    assert [v.dtype for v in vjp_graph(graph).outputs] == [float16, float32]
    cast, _ = trace(lambda x: astype(astype(x, dtype="float64"), dtype="float32"),
                    [TensorType((2,), float16)])
    assert vjp_graph(cast).outputs[0].dtype is float16


def test_fan_out_adds_up() -> None:
    np.testing.assert_allclose(
        grad(lambda x: scalar(x * x + x * sin(x) - x))(X),
        2 * X + np.sin(X) + X * np.cos(X) - 1)


def test_an_output_that_is_an_input_passes_its_cotangent_on() -> None:
    graph, _ = trace(lambda x: (x, x * 2, x), [TensorType((3,), float64)])
    ones = np.ones(3)
    np.testing.assert_allclose(run(vjp_graph(graph), [X, ones, ones, 3 * ones])[0], 6 * ones)


def test_gradients_stop_at_inner_values() -> None:
    x = Value(TensorType((), float64))
    inner = sin(x)
    outer = inner * inner * x
    by_inner, by_x = gradients([outer], [Value(outer.type)], [inner, x])
    assert by_inner is not None and by_x is not None
    names = {n.op.name for n in Graph("g", (), (by_x,)).nodes}
    assert "cos" not in names, "with inner held fixed, only the direct path counts"


def test_composites_are_differentiated_through_and_repeated_inputs_count_once() -> None:
    product = replace(multiply, name="product", infer=None, expr=None, reference=None, grad=None,
                      body=lambda x, y: x * y)
    graph, _ = trace(lambda x: apply(product, [x, x], {}), [TensorType((3,), float64)])
    np.testing.assert_allclose(run(vjp_graph(graph), [X, np.ones(3)])[0], 2 * X)


def test_deep_graphs_need_no_recursion() -> None:
    def deep(x: Value) -> Value:
        for _ in range(3000):
            x = x * 1.0001
        return x

    np.testing.assert_allclose(grad(deep)(np.float64(1.0)), 1.0001**3000)


# ---------------------------------------------------------------- what stops a gradient
def test_comparisons_and_integers_stop_the_gradient() -> None:
    np.testing.assert_allclose(grad(lambda x: scalar(where(less(x, 0), x, x * x)))(X),
                               np.where(X < 0, 1, 2 * X))
    np.testing.assert_array_equal(
        grad(lambda x: scalar(astype(astype(x, dtype="int32"), dtype="float64")))(X), np.zeros(3))


def test_stop_gradient_makes_a_constant() -> None:
    np.testing.assert_allclose(grad(lambda x: scalar(x * stop_gradient(x * x)))(X), X * X)
    assert names_of(canonicalize(trace(stop_gradient, [TensorType((3,), float64)])[0])[0]) == []


def test_operators_without_a_gradient_say_so() -> None:
    with pytest.raises(NotDifferentiable, match="floor_divide has no gradient") as info:
        grad(lambda x: scalar(floor_divide(x, 2.0)))(X)
    assert "test_autodiff.py" in str(info.value)


def test_operators_without_a_gradient_are_fine_off_the_path() -> None:
    np.testing.assert_allclose(
        grad(lambda x, y: scalar(x * floor_divide(y, 2.0)))(X, X), np.floor(X / 2))


def test_a_missing_rule_is_reported() -> None:
    broken = replace(cos, name="broken", grad=None)
    with pytest.raises(NotDifferentiable, match="no gradient rule"):
        grad(lambda x: scalar(apply(broken, [x], {})))(X)


@pytest.mark.parametrize(("call", "text"), [
    (lambda: grad(lambda x: x * 2)(X), r"sum\(\)"),
    (lambda: grad(lambda x: scalar(less(x, 0)))(X), "float type"),
    (lambda: grad(lambda x: scalar(x))(np.arange(3)), "argument of type i64"),
    (lambda: grad(lambda x: scalar(x), argnums=1)(X), "called with 1 arguments"),
    (lambda: vjp(sin)(X, np.ones(2)), "its cotangent is"),
    (lambda: vjp(lambda x: (x, x))(X, X), "2 results, but 1 cotangents"),
])
def test_wrong_uses_say_what_to_do(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(GradientError, match=text) as info:
        call()
    assert "try:" in str(info.value)


# ---------------------------------------------------------------- forward mode
def test_jvp_pushes_nested_tangents_forward(rng: np.random.Generator) -> None:
    x, w = rng.normal(size=(3, 4)), rng.normal(size=4)
    t = rng.normal(size=(3, 4))

    def f(p: Any, n: Any) -> Any:
        return {"y": tz.sin(p["x"]) * p["w"], "i": tz.argmax(p["x"], axis=-1) + n}

    value, pushed = tz.jvp(f, ({"x": x, "w": w}, np.int64(2)), ({"x": t, "w": None}, None))
    np.testing.assert_allclose(value["y"], np.sin(x) * w)
    np.testing.assert_allclose(pushed["y"], np.cos(x) * t * w)
    assert not pushed["i"].any()
    both = tz.jvp(f, ({"x": x, "w": w}, 2), ({"x": t, "w": w}, None))[1]
    np.testing.assert_allclose(both["y"], np.cos(x) * t * w + np.sin(x) * w)


def test_jvp_inside_a_trace_and_of_a_gradient(rng: np.random.Generator) -> None:
    """A product with the Hessian, forward over reverse."""
    x, t = rng.normal(size=6), rng.normal(size=6)
    hessian = tz.jit(lambda x, t: tz.jvp(tz.grad(lambda x: tz.sum(x ** 3)), (x,), (t,))[1])
    np.testing.assert_allclose(hessian(x, t), 6 * x * t)


def test_jvp_says_what_is_missing() -> None:
    x = np.ones(3)
    with pytest.raises(GradientError, match="given 2 tensors, but 1 tangents"):
        tz.jvp(lambda x, y: x * y, (x, x), (x,))
    with pytest.raises(GradientError, match=r"is f64\[3\], but its tangent is f64\[2\]"):
        tz.jvp(lambda x: x, (x,), (x[:2],))
    with pytest.raises(NotDifferentiable, match="while_loop"):
        tz.jvp(lambda x: tz.while_loop(lambda s: tz.sum(s) < 1, lambda s: s * 2, x), (x,), (x,))


def test_more_beside_the_value() -> None:
    x = np.array([1.0, 2.0, 3.0], np.float32)

    def loss(x: Any) -> Any:
        return (x * x).sum(), {"twice": x * 2, "none": None}

    slope, more = tz.grad(loss, has_aux=True)(x)
    np.testing.assert_array_equal(slope, 2 * x)
    np.testing.assert_array_equal(more["twice"], 2 * x)
    assert more["none"] is None
    (value, more), slope = tz.value_and_grad(loss, has_aux=True)(x)
    assert value == 14
    np.testing.assert_array_equal(slope, more["twice"])
    inside = tz.jit(lambda x: tz.grad(loss, has_aux=True)(x)[1]["twice"] + 1)(x)
    np.testing.assert_array_equal(inside, 2 * x + 1)
    with pytest.raises(GradientError, match="asks for a pair"):
        tz.grad(lambda x: x.sum(), has_aux=True)(x)
