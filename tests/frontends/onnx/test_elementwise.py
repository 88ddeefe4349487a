"""Converters of elementwise operators against ONNX's evaluator, over versions and types."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from one_node import check, run
from onnx import TensorProto
from several_nodes import Case, check_all

pytestmark = pytest.mark.onnx
FLOATS = ("float32", "float64", "float16")
WHOLE = ("int8", "int32", "int64", "uint8", "uint32", "uint64")
TOLERANCE = {"float64": 1e-12, "float32": 2e-6, "float16": 2e-3}


def unary(*operators: str) -> list[Case]:
    return [(op, [0], {}) for op in operators]


def binary(*operators: str) -> list[Case]:
    return [(op, [0, 1], {}) for op in operators]


@pytest.mark.parametrize("dtype", FLOATS)
def test_functions_of_one_float(rng: np.random.Generator, dtype: str) -> None:
    inside = rng.uniform(-0.95, 0.95, (3, 7)).astype(dtype)
    above = rng.uniform(1.05, 3, (3, 7)).astype(dtype)
    cases = unary("Abs", "Acos", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Cos", "Cosh",
                  "Exp", "Floor", "Neg", "Reciprocal", "Round", "Sigmoid", "Sign", "Sin", "Sinh",
                  "Tan", "Tanh")
    cases += [(op, [1], {}) for op in ("Acosh", "Log", "Sqrt", "Round", "Floor")]
    cases += unary("Erf") if dtype != "float64" else []  # the evaluator's has single precision
    check_all(cases, [inside, above], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] / 10)


@pytest.mark.parametrize("dtype", WHOLE)
def test_integers_keep_their_type(rng: np.random.Generator, dtype: str) -> None:
    low = 0 if dtype.startswith("u") else -100
    x = rng.integers(low, 100, (5, 8)).astype(dtype)
    y = rng.integers(1, 7, (8,)).astype(dtype)
    y[::2] = y[::2] if dtype.startswith("u") else -y[::2]
    cases = binary("Add", "Sub", "Mul", "Mod", "Max", "Min", "Equal", "Less", "GreaterOrEqual",
                   "BitwiseAnd", "BitwiseOr", "BitwiseXor")
    cases += unary("Abs", "Sign", "BitwiseNot") + [("Mod", [0, 1], {"fmod": 1})]
    check_all(cases + ([] if dtype.startswith("u") else unary("Neg")), [x, y])


@pytest.mark.parametrize("dtype", WHOLE)
def test_quotients_of_integers_are_cut_off(dtype: str) -> None:
    x, y = np.array([7, 7, 6, 100, 3], dtype), np.array([2, 3, 3, 7, 5], dtype)
    if not dtype.startswith("u"):
        x, y = np.concatenate([x, -x, x, -x]), np.concatenate([y, y, -y, -y])
    expected = np.trunc(x.astype(float) / y.astype(float)).astype(dtype)
    check("Div", [x, y], expected=[expected])


@pytest.mark.parametrize("dtype", [*FLOATS, "bfloat16"])
def test_pairs_of_floats(rng: np.random.Generator, dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x, y = rng.uniform(0.5, 3, (2, 3, 4)).astype(kind), rng.uniform(0.5, 3, (3, 1)).astype(kind)
    cases = binary("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Mean", "Less", "Greater",
                   "LessOrEqual", "GreaterOrEqual", "Equal")
    check_all(cases + [("Mean", [0, 1, 0], {}), ("Max", [0], {}), ("Mod", [0, 1], {"fmod": 1})],
              [x, y], rtol=TOLERANCE.get(dtype, 2e-2))


def test_nan_and_infinities() -> None:
    x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5, 2.5, -0.5], np.float32)
    y = np.float32(0.0)
    cases: list[Case] = [("IsInf", [0], {"detect_negative": a, "detect_positive": b})
                         for a in (0, 1) for b in (0, 1)]
    cases += unary("IsNaN", "Round", "Sign", "Abs", "Sqrt") + binary("Max", "Min", "Less")
    check_all(cases, [x, y])


def test_logic(rng: np.random.Generator) -> None:
    x, y = rng.random((4, 5)) < 0.5, rng.random(5) < 0.5
    numbers = [rng.standard_normal((4, 5)), rng.standard_normal(5)]
    cases = binary("And", "Or", "Xor", "Equal") + unary("Not") + [("Where", [0, 2, 3], {})]
    check_all(cases, [x, y, *numbers])


@pytest.mark.parametrize(("base", "exponent"), [
    ("float32", "int64"), ("float32", "float32"), ("float64", "int32"), ("float16", "int32"),
    ("int32", "float32"), ("int64", "float64"), ("int64", "int32"), ("float32", "uint8"),
])
def test_powers_keep_the_type_of_the_base(base: str, exponent: str) -> None:
    x, y = np.array([1, 2, 3, 5], base), np.array([3, 0, 2, 2], exponent)
    check("Pow", [x, y], rtol=1e-3 if base == "float16" else 1e-6)


@pytest.mark.parametrize("opset", [7, 11, 13])
@pytest.mark.parametrize("limits", [(-0.5, 0.7), (None, 0.2), (0.1, None), (None, None), (1, -1)],
                         ids=str)
def test_clip(rng: np.random.Generator, opset: int, limits: tuple[Any, Any]) -> None:
    x = rng.standard_normal((3, 6)).astype(np.float32)
    x[0, 0] = np.nan
    low, high = limits
    expected = np.minimum(np.maximum(x, -np.inf if low is None else low),
                          np.inf if high is None else high).astype(np.float32)
    if opset < 11:
        given = {"min": low, "max": high}
        attributes = {name: float(v) for name, v in given.items() if v is not None}
        check("Clip", [x], opset=opset, expected=[expected], **attributes)
    else:
        inputs = [None if v is None else np.float32(v) for v in limits]
        check("Clip", [x, *map(_array, inputs)], opset=opset, expected=[expected])


def _array(x: np.float32 | None) -> np.ndarray | None:
    return None if x is None else np.asarray(x)


def test_clip_of_integers() -> None:
    x = np.array([-7, 0, 9], np.int8)
    check("Clip", [x, np.array(-3, np.int8), np.array(5, np.int8)])


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint32", "int64"])
def test_shifts_by_more_than_there_is(dtype: str) -> None:
    bits = np.dtype(dtype).itemsize * 8
    x = np.array([1, 3, 100, 7, 90], dtype)
    shift = np.array([0, 1, 2, bits - 1, bits], dtype)
    right = np.where(shift < bits, x >> np.minimum(shift, bits - 1), 0).astype(dtype)
    left = np.where(shift < bits, x << np.minimum(shift, bits - 1), 0).astype(dtype)
    check("BitShift", [x, shift], opset=28, direction="RIGHT", expected=[right])
    check("BitShift", [x, shift], opset=28, direction="LEFT", expected=[left])


# ---------------------------------------------------------------- conversions
NUMBERS = {"float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE,
           "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16,
           "int8": TensorProto.INT8, "int32": TensorProto.INT32, "int64": TensorProto.INT64,
           "uint8": TensorProto.UINT8, "bool": TensorProto.BOOL, "uint64": TensorProto.UINT64}


@pytest.mark.parametrize("source", ["float32", "float16", "int32", "uint8", "bool", "bfloat16"])
def test_cast(source: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, source, source))
    x = np.array([0, 1, 2.75, 100, 3.2, 0.4]).astype(kind)
    check_all([("Cast", [0], {"to": code}) for code in NUMBERS.values()], [x])


def test_integers_wrap_when_cast() -> None:
    x = np.array([200, -200, 300, 70000, -1], np.int32)
    check_all([("Cast", [0], {"to": NUMBERS[t]}) for t in ("int8", "uint8", "int64", "bool")], [x])


@pytest.mark.parametrize("target", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("saturate", [0, 1])
def test_cast_to_eight_bits(target: str, saturate: int) -> None:
    x = np.array([0.0, 1.1, -3.3, 449, 1e6, -1e9, np.inf, -np.inf, np.nan, 1e-9], np.float32)
    code = {"float8_e4m3fn": TensorProto.FLOAT8E4M3FN, "float8_e5m2": TensorProto.FLOAT8E5M2}
    kind = np.dtype(getattr(ml_dtypes, target))
    limit = float(ml_dtypes.finfo(kind).max)
    expected = (np.clip(x, -limit, limit) if saturate else x).astype(kind)
    check("Cast", [x], to=code[target], saturate=saturate, expected=[expected])
    check("CastLike", [x, np.zeros(1, kind)], saturate=saturate, expected=[expected])


@pytest.mark.parametrize("kind", ["int4", "uint4"])
def test_cast_of_four_bits(kind: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, kind))
    x = np.arange(-8, 8).astype(np.int8).astype(dtype)
    check("Cast", [x], to=TensorProto.INT8, expected=[x.astype(np.int8)])
    check("Cast", [x], to=TensorProto.FLOAT, expected=[x.astype(np.float32)])
    code = TensorProto.INT4 if kind == "int4" else TensorProto.UINT4
    wide = np.arange(-20, 20, dtype=np.int32)
    check("Cast", [wide], to=code, expected=[wide.astype(dtype)])


def test_bitcast(rng: np.random.Generator) -> None:
    x = rng.standard_normal(5).astype(np.float32)
    check("BitCast", [x], opset=26, to=TensorProto.INT32, expected=[x.view(np.int32)])
    truth = np.array([True, False])
    check("BitCast", [truth], opset=26, to=TensorProto.UINT8, expected=[truth.view(np.uint8)])


@pytest.mark.parametrize("shape", [(), (0, 3), (1,)], ids=str)
def test_small_and_empty(shape: tuple[int, ...]) -> None:
    x = np.ones(shape, np.float32)
    for operator in ("Exp", "Add", "Mean"):
        (y,) = run(operator, [x] if operator == "Exp" else [x, x])
        assert y.shape == shape and y.dtype == np.float32
