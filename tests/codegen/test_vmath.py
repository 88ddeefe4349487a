"""Vector maths: errors in ulp over stratified inputs, special values, and every vector shape."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from terrazzo.base.scalar import OPS
from terrazzo.chips.cpu.description import host
from terrazzo.chips.cpu.llvm.builder import Builder, Module, Val, const
from terrazzo.chips.cpu.llvm.vmath import FUNCTIONS, emit


def _load_benchmark() -> ModuleType:
    """benchmarks/ulp.py, which measures what these tests assert, on fewer inputs here."""
    path = Path(__file__).parents[2] / "benchmarks" / "ulp.py"
    spec = importlib.util.spec_from_file_location("terrazzo_benchmark_ulp", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


ulp = _load_benchmark()
NATIVE_LANES = host().vector_bits // 32
INPUTS = 1 << 18

EXACT = {"sqrt": 0.5, "floor": 0.0, "ceil": 0.0, "trunc": 0.0, "round": 0.0}
# The promise is 2 ulp (4 for these three); what runs in f64 does much better, and should.
SPECIAL = ("erfinv", "lgamma", "digamma")
IN_DOUBLE = {name for name, f in FUNCTIONS.items() if f.single.__module__.endswith(".wide")}


def _limit(name: str) -> float:
    if name in EXACT:
        return EXACT[name]
    if name in IN_DOUBLE:
        return 0.55
    return 4.0 if name in SPECIAL else 2.0


def _functions() -> list[object]:
    return [
        pytest.param(name, marks=pytest.mark.torch) if name in ulp.NEEDS_TORCH else name
        for name in FUNCTIONS
    ]


@pytest.mark.parametrize("name", _functions())
def test_single_precision_with_the_processors_own_instructions(name: str) -> None:
    apply = ulp.compile_function(name, lanes=NATIVE_LANES, count=2)
    worst = ulp.worst_error(name, INPUTS, apply)
    assert worst.ulp <= _limit(name), worst


@pytest.mark.parametrize("name", _functions())
def test_single_precision_with_generic_instructions(name: str) -> None:
    apply = ulp.compile_function(name, lanes=8, count=1, generic=True)
    worst = ulp.worst_error(name, INPUTS, apply)
    assert worst.ulp <= _limit(name), worst


@pytest.mark.parametrize("name", ["exp", "log", "tanh", "erf", "sin", "pow", "atan2", "lgamma"])
@pytest.mark.parametrize(("lanes", "count"), [(1, 1), (1, 3), (8, 2), (8, 4), (16, 1), (16, 4)])
def test_lanes_and_bundles_do_not_change_results(name: str, lanes: int, count: int) -> None:
    operands = next(ulp.inputs(name, 1 << 13))
    expected = ulp.compile_function(name, lanes=16, count=2, generic=True)(*operands)
    result = ulp.compile_function(name, lanes=lanes, count=count, generic=True)(*operands)
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("name", ["exp", "log", "tanh", "erf"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_both_widths_of_processor_instructions_agree(name: str, count: int) -> None:
    operands = next(ulp.inputs(name, 1 << 13))
    wide = ulp.compile_function(name, lanes=NATIVE_LANES, count=count)(*operands)
    narrow = ulp.compile_function(name, lanes=8, count=count)(*operands)
    np.testing.assert_array_equal(wide, narrow)


@pytest.mark.parametrize("generic", [False, True])
@pytest.mark.parametrize(
    ("name", "x", "expected"),
    [
        ("exp", [math.inf, -math.inf, 0.0, 88.8, -103.9], [math.inf, 0.0, 1.0, math.inf, 1e-45]),
        ("exp2", [127.0, 128.0, -149.0, -151.0], [2.0**127, math.inf, 2.0**-149, 0.0]),
        ("log", [0.0, -0.0, 1.0, math.inf, -1.0],
         [-math.inf, -math.inf, 0.0, math.inf, math.nan]),
        ("log2", [8.0, 2.0**-149, 2.0**127], [3.0, -149.0, 127.0]),
        ("tanh", [math.inf, -math.inf, -0.0, 50.0], [1.0, -1.0, -0.0, 1.0]),
        ("erf", [math.inf, -math.inf, -0.0, 5.0], [1.0, -1.0, -0.0, 1.0]),
        ("sigmoid", [math.inf, -math.inf, 0.0], [1.0, 0.0, 0.5]),
        ("sin", [-0.0, math.inf], [-0.0, math.nan]),
        ("acosh", [1.0, 0.5], [0.0, math.nan]),
        ("atanh", [1.0, -1.0, 2.0], [math.inf, -math.inf, math.nan]),
        ("cbrt", [-27.0, -0.0, -math.inf], [-3.0, -0.0, -math.inf]),
        ("rsqrt", [0.0, math.inf, -1.0, 4.0], [math.inf, 0.0, math.nan, 0.5]),
        ("erfinv", [1.0, -1.0, 1.5, -0.0], [math.inf, -math.inf, math.nan, -0.0]),
        ("digamma", [0.0, -0.0, -2.0, math.inf], [-math.inf, math.inf, math.nan, math.inf]),
        ("round", [0.5, 1.5, 2.5, -0.5], [0.0, 2.0, 2.0, -0.0]),
    ],
)  # fmt: skip
def test_edges(name: str, x: list[float], expected: list[float], generic: bool) -> None:
    for value in (math.nan, -math.nan):
        x, expected = [*x, value], [*expected, math.nan]
    want = np.array(expected, np.float32)
    got = ulp.compile_function(name, generic=generic)(np.array(x, np.float32))
    np.testing.assert_array_equal(got, want)
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got[numbers]), np.signbit(want[numbers]))


def test_huge_angles_are_reduced_exactly() -> None:
    x = np.array([3.4028235e38, -1e30, 65537.0, 2.0**100, 1e10] * 16, np.float32)
    for name in ("sin", "cos", "tan"):
        errors = ulp.errors_in_ulp(
            ulp.compile_function(name)(x), ulp.REFERENCES[name](x.astype(np.float64))
        )
        assert errors.max() <= 2.0, name


# Away from zeros, where relative errors say nothing.
DOUBLE_RANGE = {
    **dict.fromkeys(("log", "log2", "log10", "sqrt", "rsqrt", "pow"), (0.001, 30.0)),
    "acosh": (1.0, 30.0),
    "digamma": (1.6, 30.0),
    "lgamma": (3.0, 30.0),
}
# erfinv refines a fit with libm's erf, digamma sums ten terms, and the reference for lgamma is
# Python's own: a few units more than libm against libm.
DOUBLE_TOLERANCE = {
    # 2 ulp against libm's 1
    **dict.fromkeys(("expm1", "log2", "log10", "tanh", "sinh", "asinh", "acosh", "atanh",
                     "atan2"), 1e-15),
    "erfinv": 2e-15,
    "digamma": 1e-14,
    "lgamma": 2e-15,
    "sigmoid": 1e-15,
    "rsqrt": 1e-15,
}


@pytest.mark.parametrize("name", _functions())
def test_double_precision_is_near_libm(name: str, rng: np.random.Generator) -> None:
    if name in ulp.NEEDS_TORCH:
        pytest.importorskip("torch")
    operands = [
        rng.uniform(*DOUBLE_RANGE.get(name, (-0.999, 0.999)), 1000)
        for _ in range(FUNCTIONS[name].arity)
    ]
    got = ulp.compile_function(name, np.float64, lanes=8, count=2)(*operands)
    exact = ulp.REFERENCES[name](*operands)
    np.testing.assert_allclose(got, exact, rtol=DOUBLE_TOLERANCE.get(name, 5e-16), atol=0)


# The largest errors that many times as many inputs showed are 0.7 (exp, exp2, asin), 0.8 (log,
# log1p, sin, cos, acos, pow), 0.9 (atan), 1.0 (tan), 1.1 (cosh, hypot), 1.2 (asinh, atanh), 1.3
# (expm1), 1.5 (atan2), 1.6 (log2, log10, sinh, acosh), 2.1 (sigmoid) and 2.3 (tanh) ulp.
DOUBLE_ULP = {
    **dict.fromkeys(("exp", "exp2", "log", "log1p", "sin", "cos", "asin", "acos", "atan"), 1.0),
    **dict.fromkeys(("tan", "cosh", "asinh", "atanh"), 1.5),
    **dict.fromkeys(("expm1", "log2", "log10", "sinh", "acosh"), 2.0),
    **dict.fromkeys(("sigmoid", "tanh"), 2.5),
}
DOUBLE_ULP_OF_TWO = {"pow": 1.0, "atan2": 2.0, "hypot": 1.5}
_NUMPY = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "atan2": "arctan2",
          "asinh": "arcsinh", "acosh": "arccosh", "atanh": "arctanh", "pow": "power"}


def _wide(name: str, *operands: np.ndarray) -> np.ndarray:
    """The function in a wider type than f64."""
    wide = [x.astype(np.longdouble) for x in operands]
    if name == "sigmoid":
        e = np.exp(-np.abs(wide[0]))
        return np.where(wide[0] < 0, e, 1) / (1 + e)
    result: np.ndarray = getattr(np, _NUMPY.get(name, name))(*wide)
    return result


def _check_double(name: str, got: np.ndarray, exact: np.ndarray, limit: float) -> None:
    """Results against those of a wider type: what is finite, signs of zeros, errors in ulp."""
    rounded = exact.astype(np.float64)
    same = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(rounded))
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(rounded))
    np.testing.assert_array_equal(np.signbit(got[rounded == 0]), np.signbit(rounded[rounded == 0]))
    unit = np.spacing(np.abs(np.where(np.isfinite(rounded), rounded, 1.0)))
    assert np.where(same, 0, np.abs(got - exact) / unit).max() <= limit, name


def _double_inputs(rng: np.random.Generator) -> np.ndarray:
    """All exponents, where the functions do something, near 1, near multiples of pi/2, edges."""
    count = 20_000
    anywhere = rng.integers(0, 2**64, count, dtype=np.uint64).view(np.float64)
    usual = rng.standard_normal(count) * rng.choice([1e-8, 1e-3, 1.0, 3.0, 30.0, 300.0], count)
    near_one = np.abs(1 + rng.standard_normal(count) * rng.choice([1e-12, 1e-6, 0.01, 0.3], count))
    edges = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 5e-324, -5e-324, 2.3e-308, 1e308,
             709.78, 709.9, -745.1, -746.0, 1024.0, -1074.0, -1075.5, 22.0, 2.0**20, 1e6, 1e22]
    angles = np.arange(1, 3000) * (np.pi / 2)
    return np.concatenate([anywhere, usual, near_one, edges, angles])


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 60, reason="needs a wider type than f64")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("generic", [False, True])
@pytest.mark.parametrize("name", DOUBLE_ULP)
def test_double_precision_in_vectors(name: str, generic: bool, rng: np.random.Generator) -> None:
    x = _double_inputs(rng)
    got = ulp.compile_function(name, np.float64, lanes=8, count=2, generic=generic)(x)
    _check_double(name, got, _wide(name, x), DOUBLE_ULP[name])


def _pairs(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Any two numbers, all pairs of special ones, and powers of all sizes."""
    x, y = _double_inputs(rng), rng.permutation(_double_inputs(rng))
    edges = np.array([0.0, 1.0, np.inf, np.nan, 5e-324, 1e-300, 1e300, 0.5, 2.0, 3.0, 2.5, 1e17])
    edges = np.concatenate([edges, -edges])
    base = np.abs(1 + rng.standard_normal(20_000) * rng.choice([1e-9, 1e-3, 0.3, 1e5], 20_000))
    reach = rng.uniform(-746, 710, base.size) / np.log(base)
    whole = rng.integers(-60, 60, base.size).astype(np.float64)
    return (np.concatenate([x, np.repeat(edges, edges.size), base, -base]),
            np.concatenate([y, np.tile(edges, edges.size), reach, whole]))


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 60, reason="needs a wider type than f64")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("generic", [False, True])
@pytest.mark.parametrize("name", DOUBLE_ULP_OF_TWO)
def test_two_operands_in_double_precision(name: str, generic: bool, rng: np.random.Generator
                                          ) -> None:
    operands = _pairs(rng)
    got = ulp.compile_function(name, np.float64, lanes=8, count=2, generic=generic)(*operands)
    _check_double(name, got, _wide(name, *operands), DOUBLE_ULP_OF_TWO[name])


@pytest.mark.parametrize("generic", [False, True])
def test_erf_in_double_precision(generic: bool, rng: np.random.Generator) -> None:
    x = np.concatenate([rng.standard_normal(4000) * rng.choice([1e-300, 1e-8, 0.3, 1.0, 4.0], 4000),
                        [0.0, -0.0, 1.0, -1.0, 5.9, 6.1, 40.0, np.inf, -np.inf, np.nan, 5e-324]])
    got = ulp.compile_function("erf", np.float64, lanes=8, count=2, generic=generic)(x)
    exact = np.array([math.erf(v) for v in x])  # itself within 1 ulp
    np.testing.assert_allclose(got, exact, rtol=3 * 1.2e-16, atol=0)
    np.testing.assert_array_equal(np.signbit(got[x == 0]), np.signbit(x[x == 0]))


def test_wrong_operands_are_refused() -> None:
    b = Builder(Module(), "f", [])
    with pytest.raises(TypeError, match="takes 2 operands"):
        emit(b, "pow", [const("float", 1.0)])
    with pytest.raises(TypeError, match="f32 or f64"):
        emit(b, "exp", [Val("<8 x half>", ("%x",))])
    with pytest.raises(TypeError, match="f32 or f64"):
        emit(b, "pow", [const("float", 1.0), const("double", 1.0)])


def test_references_of_what_the_c_library_computes() -> None:
    one = np.array([1.0, 2.0])
    np.testing.assert_allclose(OPS["j0"].numpy(one), [0.7651976865579666, 0.22389077914123567])
    np.testing.assert_allclose(OPS["jn"].numpy(np.array([2.0, 3.0]), one),
                               [0.1149034849319005, 0.12894324947440205])
    np.testing.assert_array_equal(OPS["remainder"].numpy(np.array([5.0, 7.0]), one + 1), [1.0, 1.0])
    np.testing.assert_array_equal(OPS["tgamma"].numpy(one + 3), [6.0, 24.0])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_fused_reference_rounds_once(dtype: type) -> None:
    eps = np.finfo(dtype).eps
    x = np.array([1 + eps, 1 - eps / 2, np.inf, 2.0, np.finfo(dtype).max], dtype)
    z = np.array([-1 - 2 * eps, -1 + eps, 1.0, np.nan, -np.inf], dtype)
    want = np.array([eps * eps, eps * eps / 4, np.inf, np.nan, -np.inf], dtype)
    np.testing.assert_array_equal(OPS["fma"].numpy(x, x, z), want)
