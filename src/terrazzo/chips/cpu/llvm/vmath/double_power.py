"""Powers and hyperbolic sines on f64, in vectors: within 2 ulp.

A power magnifies the error of the logarithm by its exponent's size, so that logarithm is a sum of
two numbers (double-double arithmetic, with fused multiply-adds for what products are rounded by).
"""

from __future__ import annotations

import math

from terrazzo.chips.cpu.llvm.builder import Builder, Val
from terrazzo.chips.cpu.llvm.vmath.double import (
    LN2,
    LOG2_E,
    Pair,
    plus,
    power_of,
    reduced,
    scaled,
    split_any,
)
from terrazzo.chips.cpu.llvm.vmath.parts import (
    ROUNDER_DOUBLE,
    at_least,
    at_most,
    poly,
    signed_power,
)

# ((2 atanh(s) - 2 s) / s^3 - 2/3) / s^2 in s^2, s = f / (2 + f), sqrt(1/2) <= 1 + f <= sqrt(2)
_LOG = (
    0.4,
    0.28571428571429364,
    0.22222222221655905,
    0.18181818335388164,
    0.15384594963027332,
    0.13334804665706856,
    0.1170623710163287,
    0.1172317058838018,
)
_TWO_THIRDS = (0.6666666666666666, 3.700743415417188e-17)
# (sinh(x) / x - 1) / x^2 in x^2, on |x| <= 1: its Taylor series, whose next term is under 1e-17
_SINH = tuple(1 / math.factorial(n) for n in range(3, 19, 2))


def _times(b: Builder, x: Pair, y: Pair) -> Pair:
    high = b.fmul(x[0], y[0])
    low = b.fma(x[0], y[0], b.fneg(high))
    return high, b.fadd(low, b.fma(x[0], y[1], b.fmul(x[1], y[0])))


def _logarithm(b: Builder, x: Val) -> Pair:
    """log(x) of positive finite x, to some 2^-64."""
    exponent, f = split_any(b, x)
    below = plus(b, b.const(x.ty, 2.0), f)
    quotient = b.fdiv(f, below[0])
    left = b.fsub(b.fma(quotient, b.fneg(below[0]), f), b.fmul(quotient, below[1]))
    s = quotient, b.fdiv(left, below[0])
    z = _times(b, s, s)
    tail = b.fmul(z[0], poly(b, z[0], _LOG))
    high, low = plus(b, b.const(x.ty, _TWO_THIRDS[0]), tail)
    curve = _times(b, s, _times(b, z, (high, b.fadd(low, _TWO_THIRDS[1]))))
    first, lost = plus(b, b.fmul(exponent, LN2[0]), b.fadd(s[0], s[0]))
    total, more = plus(b, first, curve[0])
    rest = b.fma(exponent, LN2[1], b.fadd(b.fadd(s[1], s[1]), curve[1]))
    return total, b.fadd(b.fadd(lost, more), rest)


def _exponential(b: Builder, high: Val, low: Val) -> Val:
    """e^(high + low)"""
    high = at_least(b, at_most(b, high, 711.0), -747.0)
    j = b.fsub(b.fma(high, LOG2_E, ROUNDER_DOUBLE), ROUNDER_DOUBLE)
    near, less = b.fma(j, -LN2[0], high), b.fsub(b.fmul(j, LN2[1]), low)
    r = b.fsub(near, less)
    return scaled(b, power_of(b, r, b.fsub(b.fsub(near, r), less)), j)


def pow(b: Builder, x: Val, y: Val) -> Val:
    """e^(y log |x|), with IEEE 754's results at the edges."""
    a = b.fabs(x)
    finite = b.fcmp("olt", a, math.inf)
    is_zero = b.fcmp("oeq", a, 0.0)
    total, rest = _logarithm(b, a)
    usual = b.and_(finite, b.fcmp("one", a, 0.0))
    edge = b.select(is_zero, b.const(x.ty, -math.inf), a)
    total = b.select(usual, total, edge)
    product = b.fmul(y, total)
    low = b.fma(y, rest, b.fma(y, total, b.fneg(product)))
    low = b.select(b.fcmp("olt", b.fabs(product), 800.0), low, b.const(x.ty, 0.0))
    # x^0 and 1^y are 1 even when the other operand is nan or infinite.
    one = b.or_(b.fcmp("oeq", y, 0.0), b.fcmp("oeq", a, 1.0))
    zero = b.const(x.ty, 0.0)
    result = _exponential(b, b.select(one, zero, product), b.select(one, zero, low))
    return signed_power(b, x, y, result, finite)


def _half_power(b: Builder, a: Val) -> Val:
    """e^a / 2, which overflows later than e^a."""
    j, r, rest = reduced(b, at_most(b, a, 712.0))
    return scaled(b, power_of(b, r, rest), b.fsub(j, 1.0))


def sinh(b: Builder, x: Val) -> Val:
    a = b.fabs(x)
    half = _half_power(b, a)
    large = b.fsub(half, b.fdiv(0.25, half))
    z = b.fmul(a, a)
    small = b.fma(b.fmul(poly(b, z, _SINH), z), a, a)
    return b.copysign(b.select(b.fcmp("olt", a, 1.0), small, large), x)


def cosh(b: Builder, x: Val) -> Val:
    half = _half_power(b, b.fabs(x))
    return b.fadd(half, b.fdiv(0.25, half))
