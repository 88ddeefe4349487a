"""The convention of `@tz.op(grad=rule)`, as docs/language.md tells it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.errors import GradientError

X = np.linspace(-2, 2, 12).reshape(3, 4)


def with_rule(rule: Callable[..., Any], body: Callable[..., Any] = lambda x, y: x * y) -> Any:
    return tz.op(body, name="test_rule", grad=rule)


def test_what_a_rule_is_given() -> None:
    seen: dict[str, Any] = {}

    def rule(node: Any, *gs: Any) -> list[Any]:
        seen.update(inputs=[None if v is None else v.shape for v in node.inputs],
                    attrs=node.attrs["power"], outputs=[v.shape for v in node.outputs],
                    gs=[None if g is None else (g.shape, str(g.dtype)) for g in gs])
        return [gs[0] * node.outputs[0], None, gs[0] * 3]

    def body(x: Any, y: Any = None, *, power: int = 2, **more: Any) -> Any:
        return {"a": x ** power, "count": tz.argmax(x, axis=1), "b": (tz.sum(x), more["w"] * 2)}

    made = tz.op(body, name="test_seen", grad=rule)
    slope = tz.grad(lambda x: tz.sum(made(x, power=3, w=X[0])["a"]))(X)
    assert seen == {"inputs": [(3, 4), None, (4,)], "attrs": 3,
                    "outputs": [(3, 4), (3,), (), (4,)],
                    "gs": [((3, 4), "float64"), None, ((), "float64"), ((4,), "float64")]}
    np.testing.assert_allclose(slope, X ** 3)


@pytest.mark.parametrize(("answer", "wanted"), [
    (lambda g, x, y: [g * y, g * x], (X, X)),
    (lambda g, x, y: (g * y, None), (X, 0 * X)),
    (lambda g, x, y: [tz.sum(g), 2.0], (12 + 0 * X, 2 + 0 * X)),  # stretched
    (lambda g, x, y: [tz.expand_dims(g, axis=0) * np.ones((5, 1, 1)), g], (5 + 0 * X, 1 + 0 * X)),
    (lambda g, x, y: [np.ones(4), np.float32(3)], (1 + 0 * X, 3 + 0 * X)),
])
def test_what_a_rule_may_answer(answer: Callable[..., Any], wanted: tuple[Any, Any]) -> None:
    made = with_rule(lambda node, g: answer(g, *node.inputs))
    got = tz.grad(lambda x, y: tz.sum(made(x, y)), argnums=(0, 1))(X, X)
    for mine, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs)


def test_one_input_needs_no_list() -> None:
    made = tz.op(lambda x: x * x, name="test_alone", grad=lambda node, g: 7 * g)
    np.testing.assert_allclose(tz.grad(lambda x: tz.sum(made(x)))(X), 7 + 0 * X)


@pytest.mark.parametrize(("answer", "message"), [
    (lambda g: [g], "returned 1 gradient, and the operator has 2 inputs"),
    (lambda g: [g, g, g], "returned 3 gradients, and the operator has 2 inputs"),
    (lambda g: None, "returned 1 gradient, and the operator has 2 inputs"),
    (lambda g: [g, "g"], "returned a str for its input 1"),
    (lambda g: [{"x": g}, g], "returned a dict for its input 0"),
    (lambda g: [g, tz.sum(g, axis=1)], r"returned f64\[3\] for its input 1, which is f64\[3, 4\]"),
    (lambda g: [g[:, :3], g], r"returned f64\[3, 3\] for its input 0"),
])
def test_mistakes_name_the_operator(answer: Callable[..., Any], message: str) -> None:
    made = with_rule(lambda node, g: answer(g))
    for derived in (tz.grad(lambda x, y: tz.sum(made(x, y))),
                    lambda x, y: tz.jvp(made, (x, y), (x, y))):
        with pytest.raises(GradientError, match=f"the gradient rule of test_rule {message}"):
            derived(X, X)


def test_the_example_of_the_guide() -> None:
    def rule(node: Any, g: Any) -> list[Any]:
        x, limit = node.inputs
        return [tz.where(tz.abs(x) < limit * node.attrs["slack"], g, 0.0), None]

    clipped = tz.op(lambda x, limit, *, slack=1.0: tz.clip(x, -limit, limit), name="test_clipped",
                    grad=rule)
    got = tz.grad(lambda x: tz.sum(clipped(x, 1.0, slack=1.5)))(X)
    np.testing.assert_array_equal(got, np.abs(X) < 1.5)
    by_rows = tz.vmap(tz.grad(lambda x: tz.sum(clipped(x, 1.0))))(X)
    np.testing.assert_array_equal(by_rows, np.abs(X) < 1)
