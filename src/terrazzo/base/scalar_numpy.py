"""What scalar operations mean, as functions of numpy arrays, where numpy has none that fits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from terrazzo.dtypes import as_dtype


def each(function: Callable[[float], float]) -> Callable[[Any], Any]:
    """A function of a number as one of arrays, computed in float64."""

    def reference(x: Any) -> Any:
        x = np.asarray(x)
        vectorised = np.vectorize(function, otypes=[np.float64])
        return vectorised(x.astype(np.float64)).astype(x.dtype) if x.size else x.copy()

    return reference


def lgamma(x: float) -> float:
    """log |gamma(x)|, infinite at the poles."""
    if x in (np.inf, -np.inf):
        return np.inf
    if x <= 0 and x == int(x):
        return np.inf
    try:
        return math.lgamma(x)
    except OverflowError:
        return np.inf


def digamma(x: float) -> float:
    """The derivative of lgamma."""
    if np.isnan(x) or x == -np.inf:
        return np.nan
    if x == np.inf:
        return np.inf
    if x == 0:
        return -math.copysign(np.inf, x)
    if x < 0:
        if x == int(x):
            return np.nan
        return digamma(1 - x) - math.pi / math.tan(math.pi * (x - round(x)))
    shift = 0.0
    while x < 20:  # recurrence up to where the asymptotic series holds to the last bit
        shift -= 1 / x
        x += 1
    y = 1 / (x * x)
    series = y * (1 / 12 - y * (1 / 120 - y * (1 / 252 - y * (1 / 240 - y * (1 / 132)))))
    return shift + math.log(x) - 0.5 / x - series


def erfinv(y: float) -> float:
    """The inverse of erf."""
    from statistics import NormalDist

    if not -1 <= y <= 1:
        return math.nan
    if abs(y) == 1:
        return math.copysign(math.inf, y)
    if y == 0:
        return y
    if abs(y) < 0.9:
        x = NormalDist().inv_cdf((y + 1) / 2) / math.sqrt(2)
    else:
        tail = (1 - abs(y)) / 2
        x = math.copysign(-NormalDist().inv_cdf(tail) / math.sqrt(2), y)
    for _ in range(2):  # Newton steps bring it to float64's accuracy
        error = math.erf(x) - y if abs(y) < 0.5 else math.copysign(
            (1 - abs(y)) - math.erfc(abs(x)), y)
        x -= error * math.sqrt(math.pi) / 2 * math.exp(x * x)
    return x


def libm(name: str, arity: int) -> Callable[..., Any]:
    """A function of the C library on float64; an order comes first, as in jn."""

    def reference(*args: Any) -> Any:
        import ctypes
        import ctypes.util

        function = ctypes.CDLL(ctypes.util.find_library("m"))[name]
        order = ctypes.c_int if name in ("jn", "yn") else ctypes.c_double
        function.argtypes = (order, *(ctypes.c_double,) * (arity - 1))
        function.restype = ctypes.c_double
        vectorised = np.vectorize(
            lambda first, *rest: function(int(first) if order is ctypes.c_int else first, *rest),
            otypes=[np.float64])
        return vectorised(*args).astype(np.asarray(args[-1]).dtype)

    return reference


def _fma_of_numbers(a: float, b: float, c: float, single: bool) -> float:
    from fractions import Fraction

    if not np.isfinite([a, b]).all() or a * b == 0:
        return a * b + c
    if not np.isfinite(c):
        return c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c
    try:
        nearest = float(exact)
    except OverflowError:
        return np.inf if exact > 0 else -np.inf
    # On the way to float32 float64 must be rounded to odd, or the second rounding could err.
    if single and Fraction(nearest) != exact and np.float64(nearest).view(np.int64) % 2 == 0:
        return float(np.nextafter(nearest, np.inf if exact > nearest else -np.inf))
    return nearest


def fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    a, b, c = np.broadcast_arrays(a, b, c)
    single = np.vectorize(_fma_of_numbers, otypes=[np.float64])
    with np.errstate(all="ignore"):
        return single(a, b, c, a.dtype == np.float32).astype(a.dtype) if a.size else a.copy()


def _quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    def reference(*args: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*args)

    return reference


floor_divide, remainder = _quiet(np.floor_divide), _quiet(np.remainder)


def power(x: Any, y: Any) -> Any:
    """As C has it: for the power of a half numpy takes a root, which minus infinity has not."""
    result = np.asarray(np.power(x, y))
    if as_dtype(result.dtype).is_float:
        result = np.where((np.asarray(x) == -np.inf) & (np.asarray(y) == 0.5), np.inf,
                          result).astype(result.dtype)
    return result


def rsqrt(x: Any) -> Any:
    """1 / sqrt(x)"""
    return (1 / np.sqrt(x)).astype(np.asarray(x).dtype)


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x))"""
    with np.errstate(all="ignore"):
        return (1 / (1 + np.exp(-x))).astype(np.asarray(x).dtype)


def _shift(function: Callable[..., Any], over: Callable[[Any], Any]) -> Callable[..., Any]:
    def reference(a: Any, b: Any) -> Any:
        a, b = np.broadcast_arrays(a, b)
        bits = a.dtype.itemsize * 8
        inside = (b >= 0) & (b < bits)
        safe = np.where(inside, b, 0).astype(a.dtype)
        return np.where(inside, function(a, safe), np.asarray(over(a)).astype(a.dtype))

    return reference


shift_left = _shift(np.left_shift, np.zeros_like)
shift_right = _shift(np.right_shift, lambda a: np.where(a < 0, -1, 0))


def same(x: Any) -> Any:
    """Conversions: what they give is up to the type of the result, which their callers know."""
    return x
