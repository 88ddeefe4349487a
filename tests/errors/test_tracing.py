"""What users read when a function cannot be traced or differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from messages import refuses

import terrazzo as tz
from terrazzo.errors import (
    ArgumentError,
    DTypeError,
    GradientError,
    NotDifferentiable,
    TracedControlFlow,
)

HERE = r"test_tracing\.py:\d+"


def with_if(x: Any) -> Any:
    if tz.sum(x) > 0:
        return x
    return -x


def with_while(x: Any) -> Any:
    while x:
        x = x - 1
    return x


def with_float(x: Any) -> Any:
    return x * float(tz.sum(x))


def with_range(x: Any) -> Any:
    for _ in range(tz.sum(x)):
        x = x + 1
    return x


def with_numpy(x: Any) -> Any:
    return np.asarray(x)


def with_assignment(x: Any) -> Any:
    x[0] = 1
    return x


@pytest.mark.parametrize(("function", "message"), [
    (with_if, "Python's if, while, and, or, not needs the value of a traced tensor"),
    (with_while, "Python's if, while, and, or, not"),
    (with_float, r"float\(\) needs the value of a traced tensor of type f32\[\]"),
    (with_range, "using it as a Python index"),
    (with_numpy, "a numpy function needs the value"),
    (with_assignment, "would change a traced tensor"),
])
def test_values_are_not_known_while_tracing(function: Callable[..., Any], message: str,
                                            x: np.ndarray) -> None:
    refuses(lambda: tz.jit(function)(x), TracedControlFlow, message, hint="tz.where",
            where=f"{HERE} in {function.__name__}")


def test_nothing_returned(x: np.ndarray) -> None:
    def nothing(x: Any) -> None:
        pass

    refuses(lambda: tz.jit(nothing)(x), ArgumentError, "nothing returned None", hint="return")
    refuses(lambda: tz.op(nothing, name="test_nothing")(x), ArgumentError,
            "test_nothing returned None", hint="return")


def test_text_returned(x: np.ndarray) -> None:
    refuses(lambda: tz.jit(lambda x: "hello")(x), DTypeError, "is not a data type")


def test_condition_of_many_values(x: np.ndarray) -> None:
    refuses(lambda: tz.jit(lambda a: tz.cond(a, lambda: a, lambda: a))(x), DTypeError,
            "cond needs a single truth value", hint="tz.all", where=HERE)


@pytest.mark.parametrize(("call", "error", "message", "hint"), [
    (lambda x: tz.grad(lambda a: a * 2)(x), GradientError, "only a scalar has a gradient", "sum"),
    (lambda x: tz.grad(tz.sum)(np.ones(3, np.int32)), GradientError,
     r"cannot be differentiated by an argument of type i32\[3\]", "float"),
    (lambda x: tz.grad(lambda a: tz.sum(a), argnums=3)(x), GradientError,
     "there is none of number 3", "argnums"),
    (lambda x: tz.vjp(lambda a: a * 2)(x, np.ones(2, np.float32)), GradientError,
     r"is f32\[3, 4\], but its cotangent is f32\[2\]", "same shape"),
    (lambda x: tz.grad(lambda a: tz.sum(tz.floor_divide(a, 2.0)))(x), NotDifferentiable,
     "floor_divide has no gradient", "stop_gradient"),
], ids=["not scalar", "integer", "argnums", "cotangent", "not differentiable"])
def test_gradients(call: Any, error: type[Any], message: str, hint: str, x: np.ndarray) -> None:
    refuses(lambda: call(x), error, message, hint=hint, where=HERE)
