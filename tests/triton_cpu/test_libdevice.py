"""Every function of libdevice against float64 references, in units of the last place.

References have 30 digits (mpmath, which comes with torch) or are exact (fractions). f32 results
that are computed in f64 are right but for one rounding; the vector maths promises 2 ulp (4 for
erfinv and lgamma). In f64 the C library is within 2 ulp (cbrt: 4), what is composed within 8.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
mp = pytest.importorskip("mpmath")
libdevice = pytest.importorskip("triton.language.extra.libdevice")

pytestmark = [pytest.mark.triton, pytest.mark.torch]

SIZE = 80


@triton.jit
def one_argument(x_ptr, out_ptr, n, NAMES: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    for k in tl.static_range(len(NAMES)):
        x = tl.load(x_ptr + k * n + i, mask=i < n)
        tl.store(out_ptr + k * n + i, getattr(libdevice, NAMES[k])(x), mask=i < n)


@triton.jit
def two_arguments(x_ptr, y_ptr, out_ptr, n, NAMES: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    y = tl.load(y_ptr + i, mask=i < n)
    for k in tl.static_range(len(NAMES)):
        tl.store(out_ptr + k * n + i, getattr(libdevice, NAMES[k])(x, y), mask=i < n)


@triton.jit
def three_arguments(x_ptr, y_ptr, z_ptr, out_ptr, n, NAMES: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    y = tl.load(y_ptr + i, mask=i < n)
    z = tl.load(z_ptr + i, mask=i < n)
    for k in tl.static_range(len(NAMES)):
        tl.store(out_ptr + k * n + i, getattr(libdevice, NAMES[k])(x, y, z), mask=i < n)


@triton.jit
def four_arguments(x_ptr, y_ptr, z_ptr, w_ptr, out_ptr, n, NAMES: tl.constexpr,
                   BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    y = tl.load(y_ptr + i, mask=i < n)
    z = tl.load(z_ptr + i, mask=i < n)
    w = tl.load(w_ptr + i, mask=i < n)
    for k in tl.static_range(len(NAMES)):
        tl.store(out_ptr + k * n + i, getattr(libdevice, NAMES[k])(x, y, z, w), mask=i < n)


KERNELS = {1: one_argument, 2: two_arguments, 3: three_arguments, 4: four_arguments}


def evaluate(names: tuple[str, ...], out: str, *args: np.ndarray) -> dict[str, np.ndarray]:
    """What some functions of the same types answer, from one kernel.

    A single argument may be a matrix, with a row for each function.
    """
    n = args[0].shape[-1]
    if len(args) == 1:
        args = (np.broadcast_to(args[0], (len(names), n)),)
    tensors = [torch.from_numpy(a.copy()) for a in args]
    result = torch.zeros((len(names), n), dtype=getattr(torch, out))
    KERNELS[len(args)][(1,)](*tensors, result, n, NAMES=names, BLOCK=triton.next_power_of_2(n))
    return dict(zip(names, result.numpy(), strict=True))


def errors(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """How far results are from references of f64, in units of the last place of the results."""
    kind = got.dtype.type
    with np.errstate(all="ignore"):
        nearest = want.astype(kind)
        ulp = np.spacing(np.abs(nearest)).astype(np.float64)
        apart = np.abs(got.astype(np.float64) - want) / ulp
    same = (got == nearest) | (np.isnan(got) & np.isnan(nearest))
    return np.where(same, 0.0, np.nan_to_num(apart, nan=np.inf))


def check(got: np.ndarray, want: np.ndarray, limit: float, *args: np.ndarray) -> None:
    assert np.isfinite(want).any()
    apart = errors(got, np.asarray(want, np.float64))
    worst = int(np.argmax(apart))
    assert apart[worst] <= limit, (apart[worst], [a[worst] for a in args], got[worst], want[worst])


# ---------------------------------------------------------------- functions of one float
class Unary(NamedTuple):
    """A reference, the range of its arguments, and the errors allowed in f32 and in f64."""

    exact: Callable[[Any], Any]
    low: float
    high: float
    single: float = 2.0
    double: float = 2.0


def _round_away(x: Any) -> Any:
    return mp.sign(x) * mp.floor(abs(x) + 0.5)


UNARY: dict[str, Unary] = {
    "exp": Unary(mp.exp, -80, 80), "exp2": Unary(lambda x: mp.mpf(2) ** x, -100, 100),
    "exp10": Unary(lambda x: mp.mpf(10) ** x, -37, 37), "expm1": Unary(mp.expm1, -20, 20),
    "log": Unary(mp.log, 0, 1e6), "log2": Unary(lambda x: mp.log(x, 2), 0, 1e6),
    "log10": Unary(mp.log10, 0, 1e6), "log1p": Unary(mp.log1p, -0.99, 100),
    "sin": Unary(mp.sin, -100, 100), "cos": Unary(mp.cos, -100, 100),
    "tan": Unary(mp.tan, -100, 100), "asin": Unary(mp.asin, -1, 1),
    "acos": Unary(mp.acos, -1, 1), "atan": Unary(mp.atan, -50, 50),
    "sinh": Unary(mp.sinh, -20, 20), "cosh": Unary(mp.cosh, -20, 20),
    "tanh": Unary(mp.tanh, -5, 5), "asinh": Unary(mp.asinh, -100, 100),
    "acosh": Unary(mp.acosh, 1, 100), "atanh": Unary(mp.atanh, -1, 1),
    "cbrt": Unary(lambda x: mp.sign(x) * mp.cbrt(abs(x)), -1e6, 1e6, 2, 4),
    "rcbrt": Unary(lambda x: mp.sign(x) / mp.cbrt(abs(x)), -1e6, 1e6, 2, 4),
    "sqrt": Unary(mp.sqrt, 0, 1e6, 0.5, 0.5), "rsqrt": Unary(lambda x: 1 / mp.sqrt(x), 0, 1e6),
    "floor": Unary(mp.floor, -9, 9, 0, 0), "ceil": Unary(mp.ceil, -9, 9, 0, 0),
    "trunc": Unary(lambda x: mp.sign(x) * mp.floor(abs(x)), -9, 9, 0, 0),
    "rint": Unary(mp.nint, -9, 9, 0, 0), "nearbyint": Unary(mp.nint, -9, 9, 0, 0),
    "round": Unary(_round_away, -9, 9, 0, 0), "abs": Unary(abs, -9, 9, 0, 0),
    "erf": Unary(mp.erf, -3, 3), "erfc": Unary(mp.erfc, -3, 9, 2, 8),
    "erfinv": Unary(mp.erfinv, -1, 1, 4, 4),
    "erfcx": Unary(lambda x: mp.exp(x * x) * mp.erfc(x), -9, 40, 1, 8),
    "erfcinv": Unary(lambda x: mp.erfinv(1 - x), 0, 2, 1, 8),
    "normcdf": Unary(mp.ncdf, -12, 8, 1, 8),
    "normcdfinv": Unary(lambda p: mp.sqrt(2) * mp.erfinv(2 * p - 1), 0, 1, 1, 8),
    "lgamma": Unary(mp.loggamma, 3, 100, 4, 4), "tgamma": Unary(mp.gamma, -20, 30, 1, 8),
    "sinpi": Unary(mp.sinpi, -100, 100, 1, 2), "cospi": Unary(mp.cospi, -100, 100, 1, 2),
    "cyl_bessel_i0": Unary(lambda x: mp.besseli(0, x), -80, 80, 1, 8),
    "cyl_bessel_i1": Unary(lambda x: mp.besseli(1, x), -80, 80, 1, 8),
    "logb": Unary(lambda x: mp.mpf(math.frexp(x)[1] - 1), -1e30, 1e30, 0, 0),
    **{f"fast_{name}f": Unary(function, low, high) for name, function, low, high in (
        ("sin", mp.sin, -9, 9), ("cos", mp.cos, -9, 9), ("tan", mp.tan, -1, 1),
        ("exp", mp.exp, -80, 80), ("exp10", lambda x: mp.mpf(10) ** x, -9, 9),
        ("log", mp.log, 0, 9), ("log2", lambda x: mp.log(x, 2), 0, 9), ("log10", mp.log10, 0, 9),
        ("tanh", mp.tanh, -5, 5))},
    "saturatef": Unary(lambda x: min(max(x, 0), 1), -1, 2, 0),
    "rsqrt_rn": Unary(lambda x: 1 / mp.sqrt(x), 0, 1e6, 0.5),
}
# The zeros of Bessel functions are no multiples of anything: errors there count in units of 1.
BESSEL = {"j0": (mp.besselj, 0), "j1": (mp.besselj, 1), "y0": (mp.bessely, 0),
          "y1": (mp.bessely, 1)}
ONLY_SINGLE = frozenset(name for name in UNARY if name.startswith("fast_")) | {
    "saturatef", "rsqrt_rn"}


INF, NAN = math.inf, math.nan
EDGES: dict[str, list[tuple[float, float]]] = {
    "exp10": [(INF, INF), (-INF, 0.0), (NAN, NAN), (0.0, 1.0), (39.0, INF)],
    "sinpi": [(INF, NAN), (NAN, NAN), (0.0, 0.0), (-0.0, -0.0), (0.5, 1.0), (1.5, -1.0), (1e30, 0)],
    "cospi": [(INF, NAN), (NAN, NAN), (0.5, 0.0), (1.0, -1.0), (1e30, 1.0)],
    "rcbrt": [(INF, 0.0), (0.0, INF), (-0.0, -INF), (NAN, NAN), (-8.0, -0.5)],
    "erfcx": [(INF, 0.0), (-INF, INF), (NAN, NAN), (0.0, 1.0)],
    "erfcinv": [(0.0, INF), (2.0, -INF), (1.0, 0.0), (-1.0, NAN), (3.0, NAN), (NAN, NAN)],
    "normcdf": [(INF, 1.0), (-INF, 0.0), (0.0, 0.5), (NAN, NAN)],
    "normcdfinv": [(0.0, -INF), (1.0, INF), (0.5, 0.0), (2.0, NAN), (NAN, NAN)],
    "tgamma": [(5.0, 24.0), (0.0, INF), (-0.0, -INF), (INF, INF), (-1.0, NAN), (NAN, NAN)],
    "cyl_bessel_i0": [(0.0, 1.0), (INF, INF), (-INF, INF), (NAN, NAN)],
    "cyl_bessel_i1": [(0.0, 0.0), (-0.0, -0.0), (INF, INF), (-INF, -INF), (NAN, NAN)],
    "round": [(0.5, 1.0), (-0.5, -1.0), (0.49999997, 0.0), (-0.2, -0.0), (8388609.0, 8388609.0),
              (INF, INF), (NAN, NAN)],
    "logb": [(0.0, -INF), (INF, INF), (-INF, INF), (NAN, NAN), (1e-40, -133.0), (1.0, 0.0)],
    "saturatef": [(NAN, 0.0), (INF, 1.0), (-INF, 0.0)],
}


def numbers(low: float, high: float, kind: type) -> np.ndarray:
    """Numbers all over a range and, in growing steps, from zero (or the lower end) upwards."""
    rng = np.random.default_rng(0)
    steps = np.geomspace(1e-4, 0.999, SIZE // 2)
    steps = np.where(np.arange(SIZE // 2) % 3 != 0, max(low, 0.0) + steps * (high - max(low, 0.0)),
                     low * steps if low < 0 else low + steps * (high - low))
    inner = rng.uniform(low, high, SIZE // 2) * 0.999 + 0.0005 * (low + high)
    return np.concatenate([inner, steps]).astype(kind)


def exactly(function: Callable[..., Any], *args: np.ndarray) -> np.ndarray:
    with mp.workdps(30):
        return np.array([float(mp.re(function(*map(mp.mpf, map(float, row)))))
                         for row in zip(*args, strict=True)])


@cache
def answers(dtype: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Arguments and results of all functions of one number, from one kernel; edges come last."""
    names = tuple(n for n in (*UNARY, *BESSEL) if dtype == "float32" or n not in ONLY_SINGLE)
    ranges = {name: UNARY[name][1:3] for name in UNARY} | {
        name: (0.5 if name[0] == "y" else -40, 40) for name in BESSEL}
    longest = max(map(len, EDGES.values()))
    args = {name: np.append(numbers(*ranges[name], getattr(np, dtype)), np.resize(
        [x for x, _ in EDGES.get(name, [(1.0, 1.0)])], longest)).astype(dtype) for name in names}
    return args, evaluate(names, dtype, np.stack([args[name] for name in names]))


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_functions_of_one_number(name: str, dtype: str) -> None:
    row = UNARY[name]
    if dtype == "float64" and name in ONLY_SINGLE:
        pytest.skip("a function of f32 only")
    args, results = answers(dtype)
    x = args[name][:SIZE]
    check(results[name][:SIZE], exactly(row.exact, x),
          row.single if dtype == "float32" else row.double, x)


@pytest.mark.parametrize("name", BESSEL)
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-7), ("float64", 1e-15)])
def test_bessel_functions(name: str, dtype: str, limit: float) -> None:
    function, order = BESSEL[name]
    args, results = answers(dtype)
    want = exactly(lambda v: function(order, v), args[name][:SIZE])
    np.testing.assert_allclose(results[name][:SIZE], want, rtol=0, atol=limit)


def test_bessel_functions_of_any_order() -> None:
    x = numbers(0.5, 20, np.float64)
    n = np.resize(np.array([0, 1, 2, 5, 9, -3], np.int32), x.shape)
    got = evaluate(("jn", "yn"), "float64", n, x)
    for name, function in (("jn", mp.besselj), ("yn", mp.bessely)):
        with mp.workdps(30):
            want = [float(function(int(k), float(v))) for k, v in zip(n, x, strict=True)]
        np.testing.assert_allclose(got[name], want, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("name", EDGES)
def test_edges(name: str) -> None:
    want = np.array([y for _, y in EDGES[name]], np.float32)
    got = answers("float32")[1][name][SIZE : SIZE + want.size]
    np.testing.assert_array_equal(got, want)
    signed = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got[signed]), np.signbit(want[signed]))


# ---------------------------------------------------------------- several floats
SEVERAL: dict[str, tuple[int, Callable[..., Any], float]] = {
    "pow": (2, mp.power, 2.0), "fast_powf": (2, mp.power, 2.0),
    "atan2": (2, mp.atan2, 2.0), "hypot": (2, mp.hypot, 1.0),
    "rhypot": (2, lambda x, y: 1 / mp.hypot(x, y), 2.0),
    "fmod": (2, lambda x, y: mp.sign(x) * (abs(x) - abs(y) * mp.floor(abs(x) / abs(y))), 0.0),
    "remainder": (2, lambda x, y: x - y * mp.nint(x / y), 0.0),
    "copysign": (2, lambda x, y: abs(x) * mp.sign(y), 0.0),
    "fdim": (2, lambda x, y: max(x - y, 0), 0.5),
    "fast_dividef": (2, lambda x, y: x / y, 0.5), "fma": (3, lambda x, y, z: x * y + z, 0.5),
    "norm3d": (3, lambda *v: mp.sqrt(sum(x * x for x in v)), 2.0),
    "rnorm3d": (3, lambda *v: 1 / mp.sqrt(sum(x * x for x in v)), 2.0),
    "norm4d": (4, lambda *v: mp.sqrt(sum(x * x for x in v)), 2.0),
    "rnorm4d": (4, lambda *v: 1 / mp.sqrt(sum(x * x for x in v)), 2.0),
}


@cache
def answers_of_several(dtype: str, arity: int) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    args = [rng.uniform(-9, 9, SIZE).astype(dtype) for _ in range(arity)]
    args[0] = np.abs(args[0])  # a power of a negative number is none
    names = tuple(name for name, row in SEVERAL.items() if row[0] == arity and (
        dtype == "float32" or not name.startswith("fast_")))
    return args, evaluate(names, dtype, *args)


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_functions_of_several_numbers(name: str, dtype: str) -> None:
    arity, function, limit = SEVERAL[name]
    if name.startswith("fast_") and dtype == "float64":
        pytest.skip("a function of f32 only")
    args, results = answers_of_several(dtype, arity)
    # Two roundings that are half a unit each: hypot of hypot, one over a length.
    slack = 1.0 if dtype == "float64" and "norm" in name else 0.0
    check(results[name], exactly(function, *args), limit + slack, *args)


def test_lengths_neither_overflow_nor_lose_infinity() -> None:
    x = np.array([3e200, INF, 0.0, 1e-200], np.float64)
    y = np.array([4e200, NAN, 0.0, 0.0], np.float64)
    got = evaluate(("norm3d", "rnorm3d"), "float64", x, y, np.zeros(4))
    np.testing.assert_allclose(got["norm3d"], [5e200, INF, 0.0, 1e-200], rtol=1e-15)
    np.testing.assert_allclose(got["rnorm3d"], [2e-201, 0.0, INF, 1e200], rtol=1e-15)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_neighbours(dtype: str) -> None:
    x = np.array([0.0, -0.0, 1.0, -1.0, 1e-45, INF, NAN, 1.0, 2.0, 3e38], dtype)
    y = np.array([1.0, -1.0, 2.0, -INF, -1.0, 0.0, 1.0, NAN, 2.0, INF], dtype)
    got = evaluate(("nextafter",), dtype, x, y)["nextafter"]
    np.testing.assert_array_equal(got, np.nextafter(x, y))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_powers_of_two_and_exponents(dtype: str) -> None:
    rng = np.random.default_rng(2)
    x = np.concatenate([rng.uniform(-2, 2, SIZE), [0.0, -0.0, INF, NAN, 1e-40, 1e38]])
    x = x.astype(dtype)
    n = rng.integers(-1100, 1100, x.size).astype(np.int32)
    n[::3] //= 8
    got = evaluate(("ldexp", "scalbn"), dtype, x, n)
    with np.errstate(all="ignore"):
        want = np.ldexp(x.astype(np.float64), n) if dtype == "float64" else np.ldexp(x, n)
    for result in got.values():
        np.testing.assert_array_equal(result, want)
    exponents = evaluate(("ilogb",), "int32", x)["ilogb"]
    special = {0.0: -(2**31), INF: 2**31 - 1}
    for value, exponent in zip(x, exponents, strict=True):
        number = abs(float(value))
        if not math.isnan(number):
            assert exponent == special.get(number, math.frexp(number)[1] - 1)


def test_integer_powers() -> None:
    x = np.array([-2.0, 3.0, -1.0, 0.0, -0.0, 1.5, -1.0, 2.0], np.float32)
    n = np.array([3, -2, 2**30 + 1, 0, -1, 10, 2**30, 200], np.int32)
    got = evaluate(("pow",), "float32", x, n)["pow"]
    want = np.array([-8.0, 1 / 9, -1.0, 1.0, -INF, 1.5**10, 1.0, INF], np.float32)
    np.testing.assert_allclose(got, want, rtol=2e-7)


def test_tests_and_signs() -> None:
    x = np.array([1.0, -1.0, 0.0, -0.0, INF, -INF, NAN], np.float32)
    got = evaluate(("isnan", "isinf", "finitef"), "bool", x)
    np.testing.assert_array_equal(got["isnan"], np.isnan(x))
    np.testing.assert_array_equal(got["isinf"], np.isinf(x))
    np.testing.assert_array_equal(got["finitef"], np.isfinite(x))
    np.testing.assert_array_equal(evaluate(("isfinited",), "bool", x.astype(float))["isfinited"],
                                  np.isfinite(x))
    np.testing.assert_array_equal(evaluate(("signbit",), "int32", x)["signbit"] != 0,
                                  np.signbit(x))


# ---------------------------------------------------------------- directions of rounding
def directed(exact: Fraction, kind: type, mode: str) -> float:
    """A number rounded to a float type by comparing with neighbours."""
    big = float(np.finfo(kind).max)
    near = kind(min(max(float(exact), -big), big)) if abs(exact) < 10**308 else kind(
        big if exact > 0 else -big)
    with np.errstate(over="ignore"):
        down = near if Fraction(float(near)) <= exact else np.nextafter(near, kind(-INF))
        up = near if Fraction(float(near)) >= exact else np.nextafter(near, kind(INF))
    return {"rd": down, "ru": up, "rz": down if exact > 0 else up}[mode]


ARITHMETIC: dict[str, Callable[..., Fraction]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b, "rcp": lambda a: 1 / a, "fma": lambda a, b, c: a * b + c,
}


@cache
def operands(dtype: str, arity: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(3)
    scale = 30 if dtype == "float32" else 200  # within the range, with results that are inexact
    values = tuple((rng.uniform(1, 2, SIZE) * 2.0 ** rng.integers(-scale, scale, SIZE)
                    * rng.choice([-1, 1], SIZE)).astype(dtype) for _ in range(arity))
    if arity > 1:  # near one another, where a tiny part decides
        values[1][: SIZE // 2] = values[0][: SIZE // 2] * np.asarray(1.25, dtype)
    if dtype == "float32":
        extremes = np.array([3e38, 1e-38, -3e38, 1e-45, 2e-30], np.float32)
        for i, value in enumerate(values):
            value[-5:] = np.roll(extremes, i)
    return values


@cache
def directed_answers(dtype: str, arity: int) -> dict[str, np.ndarray]:
    names = [name for name, f in ARITHMETIC.items() if f.__code__.co_argcount == arity]
    names += ["sqrt"] if arity == 1 else []
    return evaluate(tuple(f"{name}_{mode}" for name in names for mode in ("rn", "rz", "rd", "ru")),
                    dtype, *operands(dtype, arity))


@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_directed_arithmetic(name: str, dtype: str) -> None:
    function = ARITHMETIC[name]
    args = operands(dtype, function.__code__.co_argcount)
    kind = getattr(np, dtype)
    got = directed_answers(dtype, len(args))
    exact = [function(*(Fraction(float(v)) for v in row)) for row in zip(*args, strict=True)]
    for mode in ("rz", "rd", "ru"):
        want = [directed(value, kind, mode) for value in exact]
        if mode == "rz":
            np.testing.assert_array_equal(got[f"{name}_{mode}"], want)
        else:  # beyond the largest number lies infinity
            big = np.finfo(kind).max
            inside = np.array([abs(v) <= Fraction(float(big)) for v in exact])
            np.testing.assert_array_equal(got[f"{name}_{mode}"][inside], np.array(want)[inside])
    nearest = got[f"{name}_rn"]
    assert ((nearest == got[f"{name}_rd"]) | (nearest == got[f"{name}_ru"])).all()
    apart = [abs(Fraction(float(v)) - e) <= Fraction(float(np.spacing(abs(v)))) / 2
             for v, e in zip(nearest, exact, strict=True) if np.isfinite(v)]
    assert all(apart)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_directed_roots(dtype: str) -> None:
    values = operands(dtype, 1)[0]
    x = values[values > 0]
    got = {f"sqrt_{m}": directed_answers(dtype, 1)[f"sqrt_{m}"] for m in ("rn", "rz", "rd", "ru")}
    assert all(np.isnan(roots[values < 0]).all() for roots in got.values())
    got = {name: roots[values > 0] for name, roots in got.items()}
    np.testing.assert_array_equal(got["sqrt_rn"], np.sqrt(x))
    np.testing.assert_array_equal(got["sqrt_rd"], got["sqrt_rz"])
    for value, down, up in zip(x, got["sqrt_rd"], got["sqrt_ru"], strict=True):
        exact = Fraction(float(value))
        assert Fraction(float(down)) ** 2 <= exact <= Fraction(float(up)) ** 2
        assert up == down or up == np.nextafter(down, x.dtype.type(INF))


def test_sums_of_opposites_are_negative_zero_when_rounded_down() -> None:
    x, y = np.array([1.0, 0.0, -0.0], np.float32), np.array([-1.0, 0.0, 0.0], np.float32)
    got = evaluate(("add_rd", "add_ru"), "float32", x, y)
    np.testing.assert_array_equal(np.signbit(got["add_rd"]), [True, False, True])
    assert not np.signbit(got["add_ru"]).any()


@pytest.mark.parametrize("source", ["float", "double"])
@pytest.mark.parametrize("target", ["int", "uint", "ll", "ull"])
def test_floats_to_integers(source: str, target: str) -> None:
    kind = {"float": np.float32, "double": np.float64}[source]
    bits, signed = (64 if "ll" in target else 32), not target.startswith("u")
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 3.7, -3.7, 1e30, -1e30, INF, -INF, NAN, 3e9, -3e9,
                  1e10, 2.0**31], kind)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    rules = {"rn": np.rint, "rz": np.trunc, "rd": np.floor, "ru": np.ceil}
    got = evaluate(tuple(f"{source}2{target}_{mode}" for mode in rules), f"int{bits}", x)
    for mode, rule in rules.items():
        want = [0 if math.isnan(v) else low if v < low else high if v > high else int(v)
                for v in map(float, rule(x))]
        result = got[f"{source}2{target}_{mode}"]
        assert [int(v) for v in (result if signed else result.view(f"uint{bits}"))] == want


@pytest.mark.parametrize("source", ["int", "uint", "ll", "ull"])
@pytest.mark.parametrize("target", ["float", "double"])
def test_integers_to_floats(source: str, target: str) -> None:
    kind = {"float": np.float32, "double": np.float64}[target]
    dtype = {"int": np.int32, "uint": np.uint32, "ll": np.int64, "ull": np.uint64}[source]
    rng = np.random.default_rng(4)
    info = np.iinfo(dtype)
    x = np.concatenate([rng.integers(info.min, info.max, SIZE, dtype), np.array(
        [0, 1, info.max, info.min, 2**24 + 1, 2**30 + 1], dtype)])
    modes = ("rz", "rd", "ru")
    got = evaluate(tuple(f"{source}2{target}_{m}" for m in ("rn", *modes)), kind.__name__, x)
    np.testing.assert_array_equal(got[f"{source}2{target}_rn"], x.astype(kind))
    for mode in modes:
        want = [directed(Fraction(int(v)), kind, mode) for v in x]
        np.testing.assert_array_equal(got[f"{source}2{target}_{mode}"], want)


def test_doubles_to_floats() -> None:
    rng = np.random.default_rng(5)
    x = np.concatenate([rng.normal(size=SIZE), [1e-50, -1e-50, 1e-40, 3.4028235e38, 1.0]])
    got = evaluate(tuple(f"double2float_{m}" for m in ("rn", "rz", "rd", "ru")), "float32", x)
    np.testing.assert_array_equal(got["double2float_rn"], x.astype(np.float32))
    for mode in ("rz", "rd", "ru"):
        want = [directed(Fraction(v), np.float32, mode) for v in map(float, x)]
        np.testing.assert_array_equal(got[f"double2float_{mode}"], want)
    assert np.isinf(evaluate(("double2float_ru",), "float32", np.array([1e300]))[
        "double2float_ru"]).all()


@pytest.mark.parametrize("name", ["llrint", "llround"])
def test_rounding_to_integers(name: str) -> None:
    x = np.array([0.5, 1.5, -0.5, -2.5, 1e10, -1e18], np.float64)
    want = [0, 2, 0, -2, 10**10, -(10**18)] if name == "llrint" else [
        1, 2, -1, -3, 10**10, -(10**18)]
    assert evaluate((name,), "int64", x)[name].tolist() == want


# ---------------------------------------------------------------- bits
def integers(dtype: type, seed: int = 0) -> np.ndarray:
    info = np.iinfo(dtype)
    values = np.random.default_rng(seed).integers(info.min, info.max, SIZE, dtype, endpoint=True)
    values[:6] = [0, 1, info.max, info.min, info.max - 1, 6]
    return np.roll(values, seed)


@pytest.mark.parametrize("bits", [32, 64])
def test_counting_bits(bits: int) -> None:
    x = integers(getattr(np, f"int{bits}"))
    words = [int(v) & (2**bits - 1) for v in x]
    got = evaluate(("popc", "clz", "ffs"), "int32", x)
    assert got["popc"].tolist() == [bin(w).count("1") for w in words]
    assert got["clz"].tolist() == [bits - w.bit_length() for w in words]
    assert got["ffs"].tolist() == [(w & -w).bit_length() for w in words]
    mirrored = evaluate(("brev",), f"int{bits}", x)["brev"]
    assert [int(v) & (2**bits - 1) for v in mirrored] == [
        int(format(w, f"0{bits}b")[::-1], 2) for w in words]


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64"])
def test_high_products(dtype: str) -> None:
    x, y = (integers(getattr(np, dtype), seed) for seed in (0, 1))
    want = [int(a) * int(b) >> (x.itemsize * 8) for a, b in zip(x, y, strict=True)]
    assert evaluate(("mulhi",), dtype, x, y)["mulhi"].tolist() == want


@pytest.mark.parametrize("dtype", ["int32", "uint32"])
def test_arithmetic_of_integers(dtype: str) -> None:
    x, y = (integers(getattr(np, dtype), seed) for seed in (0, 1))
    got = evaluate(("mul24", "hadd", "rhadd"), dtype, x, y)
    signed = dtype == "int32"

    def low(v: int) -> int:
        v &= 0xFFFFFF
        return v - 2**24 if signed and v >= 2**23 else v

    pairs = [(int(a), int(b)) for a, b in zip(x, y, strict=True)]
    assert [int(v) & 0xFFFFFFFF for v in got["mul24"]] == [
        low(a) * low(b) & 0xFFFFFFFF for a, b in pairs]
    assert got["hadd"].tolist() == [(a + b) >> 1 for a, b in pairs]
    assert got["rhadd"].tolist() == [(a + b + 1) >> 1 for a, b in pairs]
    z = integers(np.uint32, 2)
    apart = evaluate(("sad",), dtype, x, y, z)["sad"]
    assert [int(v) & 0xFFFFFFFF for v in apart] == [
        abs(a - b) + int(c) & 0xFFFFFFFF for (a, b), c in zip(pairs, z, strict=True)]


def test_bytes_are_chosen() -> None:
    x, y, selector = (integers(np.int32, seed) for seed in (0, 1, 2))
    got = evaluate(("byte_perm",), "int32", x, y, selector)["byte_perm"]
    for a, b, s, result in zip(x, y, selector, got, strict=True):
        source = a.tobytes() + b.tobytes()
        assert result.tobytes() == bytes(source[int(s) >> (4 * k) & 7] for k in range(4))


def test_bits_of_floats() -> None:
    x, y = integers(np.int32), integers(np.int32, 1)
    single = evaluate(("int_as_float",), "float32", x)["int_as_float"]
    np.testing.assert_array_equal(single.view(np.int32), x)
    back = evaluate(("float_as_int", "float_as_uint"), "int32", x.view(np.float32))
    np.testing.assert_array_equal(back["float_as_int"], x)
    np.testing.assert_array_equal(back["float_as_uint"], x)
    unsigned = evaluate(("uint_as_float",), "float32", x.view(np.uint32))["uint_as_float"]
    np.testing.assert_array_equal(unsigned.view(np.int32), x)
    double = evaluate(("hiloint2double",), "float64", x, y)["hiloint2double"]
    words = double.view(np.int64)
    np.testing.assert_array_equal(words >> 32, x)
    parts = evaluate(("double2hiint", "double2loint"), "int32", double)
    np.testing.assert_array_equal(parts["double2hiint"], x)
    np.testing.assert_array_equal(parts["double2loint"], y)
    np.testing.assert_array_equal(
        evaluate(("double_as_longlong",), "int64", double)["double_as_longlong"], words)
    np.testing.assert_array_equal(evaluate(("longlong_as_double",), "float64", words)[
        "longlong_as_double"].view(np.int64), words)


def test_high_word_of_reciprocal() -> None:
    x = np.array([3.0, -7.0, 0.1])
    got = evaluate(("rcp64h",), "float64", x)["rcp64h"]
    np.testing.assert_array_equal(got.view(np.int64), (1 / x).view(np.int64) & -(1 << 32))


# ---------------------------------------------------------------- the whole list, and what is not
def test_every_name_of_libdevice_is_there() -> None:
    from terrazzo.triton_cpu import libdevice as own

    names = [name for name, item in vars(libdevice).items()
             if callable(item) and getattr(item, "__module__", "") == libdevice.__name__]
    assert len(names) >= 190
    assert [name for name in names if not hasattr(own, name)] == []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_accepted(dtype: str) -> None:
    x = torch.linspace(0.1, 3, 50).to(getattr(torch, dtype))
    out = torch.empty(2, 50, dtype=x.dtype)
    one_argument[(1,)](torch.stack([x, x]), out, 50, NAMES=("exp", "sinpi"), BLOCK=64)
    wide = x.double()
    torch.testing.assert_close(out[0], wide.exp().to(x.dtype), rtol=0, atol=0)
    torch.testing.assert_close(out[1], torch.sin(wide * math.pi).to(x.dtype), rtol=0, atol=2e-5)


def test_wrong_types_and_unknown_names_are_explained() -> None:
    x = np.arange(4, dtype=np.int32)
    with pytest.raises(triton.CompilationError) as error:
        evaluate(("exp",), "float32", x)
    assert "libdevice.exp does not take (int32)" in str(error.value.__cause__ or error.value)
    from terrazzo.triton_cpu import libdevice as own

    with pytest.raises(AttributeError, match=r"libdevice\.nonsense does not exist"):
        _ = own.nonsense


def test_symbols_of_other_libraries() -> None:
    from terrazzo.base.scalar import Const
    from terrazzo.dtypes import float32, float64, int32, int64
    from terrazzo.triton_cpu.frontend.externals import _of_others

    cases = {
        ("__nv_expf", float32): "exp", ("__nv_exp", float64): "exp", ("__nv_popcll", int64): "popc",
        ("__ocml_exp_f32", float32): "exp", ("__ocml_tanh_f64", float64): "tanh",
        ("__nv_fabsf", float32): "fabs", ("__nv_llabs", int64): "abs", ("__nv_isnand", float64):
        "isnan", ("__nv_fsqrt_rn", float32): "sqrt_rn", ("__nv_abs", int32): "abs",
    }
    for (symbol, dtype), name in cases.items():
        found = _of_others(symbol, [Const(dtype, 0)])
        assert found is not None and found[0] == name, symbol
    assert _of_others("__nv_umulhi", [Const(int32, 0)] * 2) == ("mulhi", "uu:u")
    assert _of_others("__nv_fmaf_rn", [Const(float32, 0.0)] * 3) == ("fma_rn", "sss:s")
    assert _of_others("__nv_nonsense", [Const(float32, 0.0)]) is None
