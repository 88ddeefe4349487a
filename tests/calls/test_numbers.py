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


@pytest.mark.parametrize("dtype", ALL)
def test_operators_with_a_rule_of_their_own(dtype: Any) -> None:
    x = X.astype(dtype)
    wanted = tz.jit(lambda x: step(x, 0.1, 1.7, 0.3))(x)
    made = tz.op(step, name="test_step_with_rule", grad=lambda node, g: [g, None, None, None])
    same(made(x, 0.1, 1.7, 0.3), wanted)
    same(tz.jit(lambda x: made(x, 0.1, 1.7, 0.3))(x), wanted)
    same(tz.jit(lambda x, a: made(x, a, 1.7, 0.3))(x, 0.1), wanted)
    same(tz.vmap(lambda x: made(x, 0.1, 1.7, 0.3))(x[None])[0], wanted)


@pytest.mark.parametrize("dtype", ALL)
def test_a_rule_sees_numbers_as_numbers(dtype: Any) -> None:
    scaled = tz.op(lambda x, k: x * k, name="test_scaled", grad=lambda node, g: [
        g * node.inputs[1], tz.sum(tz.astype(g * node.inputs[0], "float32"))])
    x = X.astype(dtype)
    by_x, by_k = tz.vjp(scaled, (0, 1))(x, 0.1, x)
    same(by_x, tz.jit(lambda x: x * 0.1)(x))
    assert np.ndim(by_k) == 0 and by_k.dtype == np.result_type(dtype, np.float32)
    np.testing.assert_allclose(by_k, (x.astype(np.float64) ** 2).sum(), rtol=5e-2)
    inside = tz.jit(lambda x: tz.vjp(scaled, (0, 1))(x, 0.1, x))(x)
    same(inside[0], by_x)


@pytest.mark.parametrize("derived", [
    lambda f: lambda x: tz.value_and_grad(f)(0.1, x)[0],
    lambda f: lambda x: tz.jvp(f, (0.1, x), (1.0, None))[0]])
def test_numbers_in_a_trace_stay_numbers_when_differentiated_by(derived: Any) -> None:
    x = X.astype(ml_dtypes.bfloat16)
    f = derived(lambda k, x: tz.sum(x * k))
    assert tz.jit(f)(x).dtype == f(x).dtype == x.dtype


def test_a_rule_and_tensors_of_two_types() -> None:
    made = tz.op(lambda x, y, k: (x * k, y * k), name="test_two_types",
                 grad=lambda node, g, h: [g * node.inputs[2], h * node.inputs[2], None])
    x, y = X.astype(ml_dtypes.bfloat16), X.astype(np.float32)
    a, b = made(x, y, 0.1)
    same(a, tz.jit(lambda x: x * 0.1)(x))
    same(b, tz.jit(lambda x: x * 0.1)(y))


# ---------------------------------------------------------------- steps of Adam
def adam(form: str, beta1: Any = 0.9, beta2: Any = 0.999) -> Any:
    """What a step changes the parameter by, in the ways that people write it."""
    def change(m: Any, v: Any, g: Any) -> Any:
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        if form == "eps inside the root":
            return m / tz.sqrt(v + 1e-8)
        if form == "with bias correction":
            m, v = m / (1 - beta1 ** 3), v / (1 - beta2 ** 3)
        return m / (tz.sqrt(v) + 1e-8)

    return change


@pytest.mark.parametrize("form", ["plain", "eps inside the root", "with bias correction"])
def test_bfloat16_gradients_of_adam_are_nan_only_where_those_of_float32_are(
        form: str, rng: np.random.Generator) -> None:
    sizes = 10.0 ** rng.uniform(-38, 38, (3, 4000)) * rng.choice([-1, 1], (3, 4000))
    sizes[rng.random(sizes.shape) < 0.1] = 0  # the root of 0 has no slope: nan in both types
    m, v, g = sizes.astype(ml_dtypes.bfloat16)
    v = np.abs(v)
    slopes = tz.grad(lambda *state: tz.sum(adam(form)(*state)), argnums=(0, 1, 2))
    halves = slopes(m, v, g)
    wide = slopes(*(a.astype(np.float32) for a in (m, v, g)))
    for half, full in zip(halves, wide, strict=True):
        assert half.dtype == ml_dtypes.bfloat16
        assert not (np.isnan(half.astype(np.float32)) & ~np.isnan(full)).any()
        assert np.isfinite(full).mean() > 0.3, "too few that say anything"


def test_a_rate_that_is_a_bfloat16_array_is_rounded_and_its_correction_is_nan() -> None:
    """0.999 is no bfloat16: as an array it is 1, and `1 - beta2 ** step` is 0. docs/language.md."""
    zeros, ones = np.zeros(4, ml_dtypes.bfloat16), np.ones(4, ml_dtypes.bfloat16)
    beta2 = ml_dtypes.bfloat16(0.999)
    assert float(beta2) == 1
    change = adam("with bias correction", beta2=np.asarray(beta2))
    assert np.isnan(tz.jit(change)(zeros, zeros, ones).astype(np.float32)).all()
    number = tz.jit(adam("with bias correction"))(zeros, zeros, ones)
    np.testing.assert_allclose(number.astype(np.float32), 0.639, rtol=0.01)
