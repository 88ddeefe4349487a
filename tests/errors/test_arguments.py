"""What users read when arguments do not fit an operator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from messages import refuses

import terrazzo as tz
from terrazzo.errors import (
    ArgumentError,
    AxisError,
    BroadcastError,
    DeviceError,
    DTypeError,
    GradientError,
    IndexOutOfRange,
    RankError,
    ShapeError,
    UnknownOperator,
    UnsupportedDType,
)
from terrazzo.graph.ir import operator_named

HERE = r"test_arguments\.py:\d+"


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


# ---------------------------------------------------------------- shapes
def test_shapes_that_do_not_broadcast() -> None:
    refuses(lambda: tz.add(ones(3, 4), ones(5, 4)), BroadcastError,
            r"shapes \[3, 4\] and \[5, 4\] do not broadcast: axis -2 is 3 .* and 5",
            hint="equal or 1")


def test_sizes_of_a_product_that_differ() -> None:
    refuses(lambda: tz.matmul(ones(3, 4), ones(5, 4)), ShapeError,
            r"matmul of \[3, 4\] and \[5, 4\] multiplies along sizes 4 and 5", hint="transpose",
            where=HERE)


def test_product_with_a_scalar() -> None:
    refuses(lambda: tz.matmul(ones(3, 4), np.float32(3)), RankError,
            "matmul needs vectors or matrices, got a scalar", hint=r"\*", where=HERE)


def test_reshape_to_another_number_of_elements() -> None:
    refuses(lambda: tz.reshape(ones(3, 4), shape=(5, 5)), ShapeError,
            "12 and would be 25", hint="product", where=HERE)


def test_two_unknown_sizes() -> None:
    refuses(lambda: tz.reshape(ones(3, 4), shape=(-1, -1)), ShapeError,
            "at most one size may be -1", where=HERE)


def test_unequal_parts() -> None:
    refuses(lambda: tz.split(ones(3, 4), indices_or_sections=5, axis=1), ShapeError,
            r"axis 1 of \[3, 4\] does not split into 5 equal parts", hint="tuple", where=HERE)


def test_concat_of_different_ranks() -> None:
    refuses(lambda: tz.concat(ones(3, 4), ones(3, 3, 3)), ShapeError,
            r"cannot concat \[3, 4\] and \[3, 3, 3\]", where=HERE)


def test_maximum_of_nothing() -> None:
    refuses(lambda: tz.max(ones(0, 3), axis=0), ShapeError, "no elements to choose from",
            where=HERE)


def test_more_elements_than_there_are() -> None:
    refuses(lambda: tz.topk(ones(3, 4), k=99), ShapeError, "topk of 99 elements .* has 4",
            where=HERE)


# ---------------------------------------------------------------- axes and indices
@pytest.mark.parametrize(("axis", "message", "hint"), [
    (5, "axis 5 does not exist in a tensor of rank 2", "use -2 to 1"),
    ((0, 0), r"axes \(0, 0\) name an axis of a tensor of rank 2 twice", None),
    (1.5, "1.5 is not an axis", "whole numbers"),
])
def test_axes(axis: Any, message: str, hint: str | None) -> None:
    refuses(lambda: tz.sum(ones(3, 4), axis=axis), AxisError, message, hint=hint)


@pytest.mark.parametrize(("key", "error", "message"), [
    (7, IndexOutOfRange, "index 7 is outside axis 0 of size 3"),
    ((0, 0, 0), RankError, r"3 indices for \[3, 4\]"),
    ("a", DTypeError, "a str is no index"),
    (slice(None, None, 0), ArgumentError, "a step other than 0"),
])
def test_subscripts(key: Any, error: type[Any], message: str) -> None:
    refuses(lambda: tz.jit(lambda a: a[key])(ones(3, 4)), error, message, where=HERE)


def test_indices_that_are_no_integers() -> None:
    refuses(lambda: tz.take(ones(3, 4), ones(1), axis=0), DTypeError,
            "take needs integer indices, not float32", hint="astype", where=HERE)


# ---------------------------------------------------------------- types
def test_bits_of_floats() -> None:
    refuses(lambda: tz.bitwise_and(ones(3), ones(3)), DTypeError,
            "bitwise_and works on integers and booleans, not on float32", hint="astype",
            where=HERE)


def test_arithmetic_of_booleans() -> None:
    refuses(lambda: tz.negative(ones(3, dtype=bool)), DTypeError,
            "negative works on numbers, not on booleans", hint="logical", where=HERE)


def test_unknown_type() -> None:
    refuses(lambda: tz.astype(ones(3), dtype="float33"), DTypeError,
            "'float33' is not a data type", hint="float32, float16")


@pytest.mark.parametrize("array", [
    np.array([object()]), np.array(["a"]), np.array(["2020-01-01"], "datetime64[D]"),
    np.ones(3, np.longdouble),
], ids=["object", "text", "date", "longdouble"])  # fmt: skip
def test_arrays_of_other_things(array: np.ndarray) -> None:
    refuses(lambda: tz.exp(array), DTypeError, "is not a data type that terrazzo knows",
            hint="float32")


def test_functions_without_a_meaning_for_complex_numbers() -> None:
    refuses(lambda: tz.erf(ones(3, dtype=np.complex64)), UnsupportedDType,
            "there is no erf of complex numbers", hint="tz.real")


# ---------------------------------------------------------------- calls
@pytest.mark.parametrize(("call", "message"), [
    (lambda x: tz.add(x), r"add\(x, y, /\) misses its argument 'y'"),
    (lambda x: tz.exp(x, x, x), r"exp\(x, /\) got 2 arguments too many"),
    (lambda x: tz.softmax(x, axes=1), r"softmax\(x, \*, axis=-1\) has no argument 'axes'"),
    (lambda x: tz.exp(None), r"exp\(x, /\) got None for 'x'"),
    (lambda x: tz.concat(), "concat needs at least one tensor"),
    (lambda x: tz.einsum("ij->z", x), "einsum 'ij->z' cannot give the result an axis 'z'"),
])
def test_calls(call: Any, message: str, x: np.ndarray) -> None:
    refuses(lambda: call(x), ArgumentError, message, where=HERE)


def test_things_that_are_no_tensors() -> None:
    refuses(lambda: tz.exp({}), ArgumentError, "cannot make a tensor of dict", hint="numpy arrays")
    refuses(lambda: tz.exp([[1, 2], [3]]), ArgumentError, "cannot make a tensor of a list",
            hint="same length")
    refuses(lambda: tz.exp("hello"), DTypeError, "is not a data type that terrazzo knows")


def test_misspelt_operator_is_guessed() -> None:
    refuses(lambda: operator_named("sofmax"), UnknownOperator, "no operator 'sofmax'",
            hint="softmax")


def test_level_that_does_not_exist(x: np.ndarray) -> None:
    refuses(lambda: tz.exp.lower(x, "lop"), ArgumentError, "'cpu' has no level 'lop'",
            hint="graph, canonical, expr")
    refuses(lambda: tz.softmax.lower(x, "asm", chip="cuda"), ArgumentError,
            "the chip 'cuda' has no level 'asm'",
            hint="graph, canonical, expr, schedule, loop, triton")
    refuses(lambda: tz.softmax.lower(x, "loop", target="tpu"), DeviceError, "no chip 'tpu'",
            hint="cpu, cuda")
    refuses(lambda: tz.exp.lower(x), ArgumentError, "needs a level", hint='lower.x, "loop"')
    refuses(lambda: tz.exp.verify(levels=["lop"]), ArgumentError, "no level 'lop'", hint="expr")
    refuses(lambda: tz.exp.bench(), ArgumentError, "without arguments", hint="pass arrays")


@pytest.mark.parametrize("given, answer", [
    ("0 gradients", lambda x, w, g: []), ("1 gradient", lambda x, w, g: [g * w]),
    ("1 gradient", lambda x, w, g: g * w), ("3 gradients", lambda x, w, g: [g * w, g * x, g])])
def test_a_gradient_rule_answers_for_every_input(given: str, answer: Any, x: np.ndarray) -> None:
    product = tz.op(lambda x, w: x * w, name="test_product",
                    grad=lambda node, g: answer(*node.inputs, g))
    refuses(lambda: tz.grad(lambda x: tz.sum(product(x, x + 1)))(x), GradientError,
            f"the gradient rule of test_product returned {given}, and the operator has 2 inputs",
            hint="a list of 2")
