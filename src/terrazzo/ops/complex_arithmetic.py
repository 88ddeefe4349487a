"""The arithmetic of complex numbers, on their real and imaginary parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from terrazzo.graph.ir import Value
from terrazzo.ops import elementwise as ew
from terrazzo.ops.elementwise import where

Parts = tuple[Value, Value | None]  # None: a real number


def imaginary(p: Parts) -> Value:
    """The imaginary part, zeros of a real number."""
    return ew.multiply(p[0], 0.0) if p[1] is None else p[1]


def add(a: Parts, b: Parts) -> Parts:
    return a[0] + b[0], b[1] if a[1] is None else a[1] if b[1] is None else a[1] + b[1]


def negative(a: Parts) -> Parts:
    return -a[0], None if a[1] is None else -a[1]


def subtract(a: Parts, b: Parts) -> Parts:
    return add(a, negative(b)) if a[1] is None or b[1] is None else (a[0] - b[0], a[1] - b[1])


def multiply(a: Parts, b: Parts) -> Parts:
    if a[1] is None:
        return a[0] * b[0], None if b[1] is None else a[0] * b[1]
    if b[1] is None:
        return a[0] * b[0], a[1] * b[0]
    return a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]


def divide(a: Parts, b: Parts) -> Parts:
    """By the larger part of the divisor first (after Smith), so that no square overflows."""
    if b[1] is None:
        return a[0] / b[0], None if a[1] is None else a[1] / b[0]
    size = ew.maximum(ew.absolute(b[0]), ew.absolute(b[1]))
    size = where(ew.equal(size, 0), 1, size)
    c, d = b[0] / size, b[1] / size
    length = b[0] * c + b[1] * d
    im = imaginary(a)
    return (a[0] * c + im * d) / length, (im * c - a[0] * d) / length


def size_of(a: Parts) -> Value:
    return ew.absolute(a[0]) if a[1] is None else ew.hypot(a[0], a[1])


def exp(a: Parts) -> Parts:
    grown, im = ew.exp(a[0]), imaginary(a)
    return grown * ew.cos(im), grown * ew.sin(im)


def log(a: Parts) -> Parts:
    """log |z| from |z|^2 - 1 where that is small, which the size itself would lose."""
    re, im = a[0], imaginary(a)
    size = ew.hypot(re, im)
    large, small = ew.maximum(ew.absolute(re), ew.absolute(im)), ew.minimum(
        ew.absolute(re), ew.absolute(im))
    near = ew.bitwise_and(ew.greater(size, 0.7), ew.less(size, 1.5))
    beyond = where(near, (large - 1) * (large + 1) + small * small, 0)
    return where(near, 0.5 * ew.log1p(beyond), ew.log(size)), ew.atan2(im, re)


def sqrt(a: Parts) -> Parts:
    """The larger part of the root from a sum that does not cancel, the other from the product."""
    re, im = a[0], imaginary(a)
    larger = ew.sqrt(0.5 * (ew.absolute(re) + ew.hypot(re, im)))
    nothing = ew.equal(larger, 0)
    smaller = ew.absolute(im) / where(nothing, 1, 2 * larger)
    right = ew.greater_equal(re, 0)
    return where(right, larger, smaller), ew.copysign(where(right, smaller, larger), im)


def tanh(a: Parts) -> Parts:
    t, im = ew.tanh(a[0]), imaginary(a)
    c, s = ew.cos(im), ew.sin(im)
    length = c * c + t * t * (s * s)
    return t / length, s * c * (1 - t * t) / length


def turned(a: Parts) -> Parts:
    """i * z"""
    return -imaginary(a), a[0]


def turned_back(a: Parts) -> Parts:
    return imaginary(a), -a[0]


def power(a: Parts, b: Parts) -> Parts:
    """exp(b * log(a)); what 0 is raised to decides between 0 and 1."""
    grown = exp(multiply(log(a), b))
    zero = ew.equal(size_of(a), 0)
    start = where(ew.equal(size_of(b), 0), 1, 0)
    return where(zero, start, grown[0]), where(zero, 0, imaginary(grown))


def expm1(a: Parts) -> Parts:
    """e ** z - 1: near 0 by what does not cancel there."""
    im = imaginary(a)
    half = ew.sin(0.5 * im)
    return ew.expm1(a[0]) * ew.cos(im) - 2 * (half * half), ew.exp(a[0]) * ew.sin(im)


def log1p(a: Parts) -> Parts:
    """log(1 + z), by |1 + z|^2 - 1 where z is small."""
    re, im = a[0], imaginary(a)
    small = ew.less(size_of(a), 0.5)
    beyond = where(small, re * (2 + re) + im * im, 0)
    plain = log((1 + re, im))
    return where(small, 0.5 * ew.log1p(beyond), plain[0]), plain[1]


# Inverse functions after Kahan, "Branch cuts for complex elementary functions" (1987): by roots of
# 1 - z and 1 + z, so that nothing overflows and zeros keep their signs along the cuts.
def _roots(a: Parts, b: Parts) -> tuple[Parts, Parts]:
    return sqrt(a), sqrt(b)


def asin(a: Parts) -> Parts:
    re, im = a[0], imaginary(a)
    p, q = _roots((1 - re, -im), (1 + re, im))
    (pr, pi), (qr, qi) = (p[0], imaginary(p)), (q[0], imaginary(q))
    return ew.atan2(re, pr * qr - pi * qi), ew.asinh(pr * qi - pi * qr)


def acos(a: Parts) -> Parts:
    re, im = a[0], imaginary(a)
    p, q = _roots((1 - re, -im), (1 + re, im))
    (pr, pi), (qr, qi) = (p[0], imaginary(p)), (q[0], imaginary(q))
    return 2 * ew.atan2(pr, qr), ew.asinh(qr * pi - qi * pr)


def acosh(a: Parts) -> Parts:
    re, im = a[0], imaginary(a)
    p, q = _roots((re - 1, im), (re + 1, im))
    (pr, pi), (qr, qi) = (p[0], imaginary(p)), (q[0], imaginary(q))
    return ew.asinh(pr * qr + pi * qi), 2 * ew.atan2(pi, qr)


def atanh(a: Parts) -> Parts:
    """Of the right half of the plane, turned over for the left one: the logarithm is small there.

    Far from 1 numbers are taken by their inverse, whose square does not overflow.
    """
    re, im = ew.absolute(a[0]), imaginary(a)
    far = ew.greater(ew.maximum(re, ew.absolute(im)), 1e9)
    near = where(far, 0, re), where(far, 0, im)
    gap = (1 - near[0]) * (1 - near[0]) + near[1] * near[1]
    width = divide((re * 0 + 1, None), (where(far, re, 1), where(far, im, 0)))[0]
    grown = where(far, width, 0.25 * ew.log1p(4 * near[0] / gap))
    turn = where(far, ew.copysign(re * 0 + math.pi / 2, im),
                 0.5 * ew.atan2(2 * near[1], (1 - near[0]) * (1 + near[0]) - near[1] * near[1]))
    return ew.copysign(grown, a[0]), turn


ARITHMETIC: dict[str, Callable[..., Parts]] = {
    "add": add, "subtract": subtract, "multiply": multiply, "divide": divide,
    "negative": negative, "exp": exp, "log": log, "sqrt": sqrt, "power": power,
    "tanh": tanh,
    "sinh": lambda a: (ew.sinh(a[0]) * ew.cos(imaginary(a)),
                       ew.cosh(a[0]) * ew.sin(imaginary(a))),
    "cosh": lambda a: (ew.cosh(a[0]) * ew.cos(imaginary(a)),
                       ew.sinh(a[0]) * ew.sin(imaginary(a))),
    "sin": lambda a: (ew.sin(a[0]) * ew.cosh(imaginary(a)),
                      ew.cos(a[0]) * ew.sinh(imaginary(a))),
    "cos": lambda a: (ew.cos(a[0]) * ew.cosh(imaginary(a)),
                      -(ew.sin(a[0]) * ew.sinh(imaginary(a)))),
    "tan": lambda a: turned_back(tanh(turned(a))),
    "sigmoid": lambda a: divide((a[0] * 0 + 1, None), add((a[0] * 0 + 1, None),
                                                            exp(negative(a)))),
    "exp2": lambda a: (ew.exp2(a[0]) * ew.cos(imaginary(a) * math.log(2)),
                       ew.exp2(a[0]) * ew.sin(imaginary(a) * math.log(2))),
    "expm1": expm1, "log1p": log1p,
    "log2": lambda a: _scaled(log(a), 1 / math.log(2)),
    "log10": lambda a: _scaled(log(a), 1 / math.log(10)),
    "rsqrt": lambda a: divide((a[0] * 0 + 1, None), sqrt(a)),
    "asin": asin, "acos": acos, "acosh": acosh, "atanh": atanh,
    "asinh": lambda a: turned_back(asin(turned(a))),
    "atan": lambda a: turned_back(atanh(turned(a))),
    "sign": lambda a: divide(a, (where(ew.equal(size_of(a), 0), 1, size_of(a)), None)),
}
ASKED: dict[str, Callable[..., Value]] = {
    "absolute": size_of,
    "equal": lambda a, b: ew.bitwise_and(ew.equal(a[0], b[0]), ew.equal(_zero(a), _zero(b))),
    "not_equal": lambda a, b: ew.bitwise_or(ew.not_equal(a[0], b[0]),
                                            ew.not_equal(_zero(a), _zero(b))),
    "isnan": lambda a: ew.bitwise_or(ew.isnan(a[0]), ew.isnan(a[1])),
    "isinf": lambda a: ew.bitwise_or(ew.isinf(a[0]), ew.isinf(a[1])),
    "isfinite": lambda a: ew.bitwise_and(ew.isfinite(a[0]), ew.isfinite(a[1])),
}


PAIRWISE = ("add", "subtract", "negative")  # of both parts alike


def _scaled(a: Parts, factor: float) -> Parts:
    return a[0] * factor, imaginary(a) * factor


def _zero(a: Parts) -> Any:
    return 0 if a[1] is None else a[1]
