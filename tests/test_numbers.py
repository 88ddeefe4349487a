"""Python numbers that are passed as arguments mean what the same numbers mean when written out."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import terrazzo as tz
import terrazzo.ops  # fills the table of operators
from terrazzo.graph.ir import OPERATORS

HALVES = [ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn]
ALL = [*HALVES, np.float32, np.float64]
X = np.arange(1, 9) * 0.37
BINARY = [op.name for op in OPERATORS.values()
          if op.family == "elementwise" and op.unify and len(op.tensor_params) == 2]
assert len(BINARY) > 20


def same(found: Any, wanted: Any) -> None:
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found.astype(np.float64), wanted.astype(np.float64))


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("name", [n for n in BINARY if not n.startswith(("bitwise", "logical"))])
def test_every_operator_of_two(name: str, dtype: Any) -> None:
    x, op = X.astype(dtype), OPERATORS[name]
    same(op(x, 0.1), tz.jit(lambda x: op(x, 0.1))(x))
    same(op(0.1, x), tz.jit(lambda x: op(0.1, x))(x))


def step(x: Any, a: Any, b: Any, c: Any) -> Any:
    return x * a + x ** b - (a * c - -b / 3) * x


@pytest.mark.parametrize("dtype", ALL)
def test_functions_and_operators(dtype: Any) -> None:
    x = X.astype(dtype)
    wanted = tz.jit(lambda x: step(x, 0.1, 1.7, 0.3))(x)
    same(tz.jit(step)(x, 0.1, 1.7, 0.3), wanted)
    made = tz.op(step, name="test_step")
    same(made(x, 0.1, 1.7, 0.3), wanted)
    same(tz.jit(lambda x: made(x, 0.1, 1.7, 0.3))(x), wanted)
    same(tz.jit(lambda x, a: made(x, a, 1.7, 0.3))(x, 0.1), wanted)
    same(tz.jit(lambda x, a: tz.jit(step)(x, a, 1.7, 0.3))(x, 0.1), wanted)


def test_numbers_take_the_type_of_each_tensor_they_meet() -> None:
    single, double = np.ones(3, np.float32), np.ones(3)
    a, b = tz.jit(lambda x, y, k: (x * k, y * (k * 2)))(single, double, 0.1)
    assert a.dtype == np.float32 and b.dtype == np.float64
    np.testing.assert_array_equal(b, np.full(3, 0.2))
    whole = tz.jit(lambda x, k: x + k)(np.arange(3, dtype=np.int32), 0.5)
    assert whole.dtype == np.float32


def test_arrays_keep_their_type() -> None:
    x = X.astype(ml_dtypes.bfloat16)
    assert tz.multiply(x, np.float32(0.1)).dtype == np.float32
    assert tz.jit(lambda x, k: x * k)(x, np.array(0.1, np.float32)).dtype == np.float32


def test_gradients_by_numbers() -> None:
    x = X.astype(ml_dtypes.bfloat16)
    slope = tz.grad(lambda k, x: tz.sum(x * k, dtype="float32"))(0.1, x)
    assert slope.dtype == np.float32
    np.testing.assert_allclose(slope, x.astype(np.float64).sum(), rtol=1e-2)
    own = tz.op(lambda x, k: x * k, name="test_own_rule", grad=lambda node, g: [g, None])
    assert own(x, 0.1).dtype == x.dtype
