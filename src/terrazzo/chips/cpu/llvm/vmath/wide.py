"""Functions on f32 computed in f64, where f32 arithmetic would lose too much.

One rounding to f32 at the end makes them accurate to little more than half an ulp, and the range
of f64 takes the overflow and the denormals of f32 in its stride. Coefficients are minimax fits of
our own, with relative errors under 2e-11.
"""

from __future__ import annotations

import math

from terrazzo.chips.cpu.llvm.builder import Builder, Val
from terrazzo.chips.cpu.llvm.vmath.parts import (
    ROUNDER_DOUBLE,
    at_least,
    at_most,
    bits,
    huge_lanes_from_libm,
    narrow,
    part_by_part,
    poly,
    signed_power,
    widen,
)

_LOG2_E = 1.4426950408889634
_LN2 = 0.6931471805599453
_HALF_PI = (1.5707963267948966, 6.123233995736766e-17)
_ONE = 0x3FF0000000000000
_MANTISSA = (1 << 52) - 1
_SQRT_HALF = 0x3FE6A09E667F3BCD

# (e^r - 1 - r) / r^2 on |r| <= ln(2)/2
_EXP = (
    0.5000000000105301,
    0.16666666754139203,
    0.041666665952968106,
    0.008333289052778265,
    0.0013888985257143654,
    0.00019904909921356152,
    2.479639064988016e-05,
)
# (2^r - 1) / r on |r| <= 1/2
_EXP2 = (
    0.6931471807056938,
    0.24022651068801046,
    0.055504103630387866,
    0.00961803776678767,
    0.0013333936489749933,
    0.000154668830369839,
    1.5196064884434193e-05,
)
# log(1 + f) / f and log2(1 + f) / f on sqrt(1/2) <= 1 + f <= sqrt(2)
_LOG = (
    0.9999999999859558,
    -0.5000000002943126,
    0.3333333433362364,
    -0.24999994076747992,
    0.19999881160314617,
    -0.1666694362081307,
    0.14290986454892546,
    -0.12497479131726603,
    0.11005086864325862,
    -0.0992292234726784,
    0.10033240844139042,
    -0.0990055319413288,
    0.053624908446866806,
)
_LOG2 = (
    1.4426950408687018,
    -0.7213475208690848,
    0.48089836139414266,
    -0.36067367476781725,
    0.2885372936826049,
    -0.24045316908256667,
    0.2061753529004362,
    -0.18030051174302733,
    0.15876984224344717,
    -0.1431575077350987,
    0.14474906831421186,
    -0.14283479375853517,
    0.07736439317736023,
)
# (sinh(r) / r - 1) / r^2 and (cosh(r) - 1) / r^2 in r^2, on |r| <= ln(2)/2
_SINH = (0.1666666675476918, 0.008333288881640368, 0.0001990501276034843)
_COSH = (
    0.4999999999959704,
    0.04166666699221028,
    0.0013888807144227678,
    2.4882464365167995e-05,
)
# (sin(r) / r - 1) / r^2 and (cos(r) - 1) / r^2 in r^2, on |r| <= pi/4
_SIN = (
    -0.16666666666629978,
    0.008333333325010506,
    -0.00019841263691454148,
    2.7555331661682728e-06,
    -2.475986819640114e-08,
)
_COS = (
    -0.49999999999999406,
    0.041666666666485906,
    -0.0013888888870435333,
    2.4801578594524545e-05,
    -2.7555233714460415e-07,
    2.063012544900618e-09,
)
# Two parts of pi/2 are enough up to here; the largest f32 are beyond any reduction in f64.
_TAN_LIMIT = 2.0**30
# e^(x^2) erfc(x) in (x - 3) / (x + 3), on 0 <= x <= 10.1, where erfc is the least denormal
_ERFCX = (
    0.17900115118078397,
    -0.3262335601446237,
    0.24560380197532417,
    -0.1501159310923072,
    0.07166582829712043,
    -0.02439258333367662,
    0.00426921983650634,
    0.0007083274452945262,
    -0.0005973108180764604,
    4.324431001662485e-05,
    6.397477667954944e-05,
    -9.514793494505792e-06,
    -6.682888832197401e-06,
)


def _power_of_two(b: Builder, shifted: Val) -> Val:
    """2^j from j + rounder."""
    return b.bitcast(b.add(b.shl(bits(b, shifted), 52), _ONE), shifted.ty)


def _reduce_exp(b: Builder, x: Val) -> tuple[Val, Val]:
    """x = j ln 2 + r: gives j + rounder and r. |x| is small, so one part of ln 2 is enough."""
    shifted = b.fma(x, _LOG2_E, ROUNDER_DOUBLE)
    return shifted, b.fma(b.fsub(shifted, ROUNDER_DOUBLE), -_LN2, x)


def exp_wide(b: Builder, x: Val) -> Val:
    """exp in f64 for |x| < 700, to 1e-11."""
    shifted, r = _reduce_exp(b, x)
    power = _power_of_two(b, shifted)
    return b.fma(power, b.fma(b.fmul(r, r), poly(b, r, _EXP), r), power)


def _split_log(b: Builder, x: Val) -> tuple[Val, Val]:
    """x = 2^e (1 + f) with 1 + f between sqrt(1/2) and sqrt(2): gives e and 1 + f."""
    # All in operations that AVX2 has on 64-bit lanes: no arithmetic shift, no conversion.
    moved = b.add(bits(b, x), _ONE - _SQRT_HALF)
    above = b.or_(b.lshr(moved, 52), 0x4330000000000000)
    exponent = b.fsub(b.bitcast(above, x.ty), 2.0**52 + 1023.0)
    mantissa = b.add(b.and_(moved, _MANTISSA), _SQRT_HALF)
    return exponent, b.bitcast(mantissa, x.ty)


def log_wide(b: Builder, x: Val) -> Val:
    """log in f64 for positive normal x, to 2e-11, relative near 1 too."""
    exponent, mantissa = _split_log(b, x)
    f = b.fsub(mantissa, 1.0)
    return b.fma(exponent, _LN2, b.fmul(f, poly(b, f, _LOG)))


def _log1p_wide(b: Builder, x: Val) -> Val:
    """log(1 + x) in f64 for 1 + x positive and normal; x itself where 1 + x would lose it."""
    exponent, mantissa = _split_log(b, b.fadd(x, 1.0))
    f = b.select(b.fcmp("oeq", exponent, 0.0), x, b.fsub(mantissa, 1.0))
    return b.fma(exponent, _LN2, b.fmul(f, poly(b, f, _LOG)))


def _log_edges(b: Builder, x: Val, result: Val) -> Val:
    """Puts right what the logarithm of x is outside 0 < x < inf."""
    below = b.select(b.fcmp("oeq", x, 0.0), b.const(x.ty, -math.inf), b.const(x.ty, math.nan))
    outside = b.select(b.fcmp("ole", x, 0.0), below, x)
    inside = b.and_(b.fcmp("ogt", x, 0.0), b.fcmp("olt", x, math.inf))
    return b.select(inside, result, outside)


@part_by_part
def log2(b: Builder, x: Val) -> Val:
    exponent, mantissa = _split_log(b, widen(b, x))
    f = b.fsub(mantissa, 1.0)
    return _log_edges(b, x, narrow(b, b.fma(f, poly(b, f, _LOG2), exponent)))


@part_by_part
def log10(b: Builder, x: Val) -> Val:
    result = b.fmul(log_wide(b, widen(b, x)), 1.0 / math.log(10.0))
    return _log_edges(b, x, narrow(b, result))


@part_by_part
def log1p(b: Builder, x: Val) -> Val:
    result = b.copysign(narrow(b, _log1p_wide(b, widen(b, x))), x)
    above = b.fadd(x, 1.0)
    # In f32 1 + x may round to 0 or 1 but keeps its side, which is all the edges need.
    inside = b.and_(b.fcmp("ogt", x, -1.0), b.fcmp("olt", x, math.inf))
    return b.select(inside, result, _log_edges(b, above, above))


@part_by_part
def expm1(b: Builder, x: Val) -> Val:
    # Above, f32 overflows; below, the result rounds to -1.
    limited = at_least(b, at_most(b, x, 90.0), -30.0)
    shifted, r = _reduce_exp(b, widen(b, limited))
    power = _power_of_two(b, shifted)
    minus_one = b.fma(b.fmul(r, r), poly(b, r, _EXP), r)
    result = b.fma(power, minus_one, b.fsub(power, 1.0))
    return b.copysign(narrow(b, result), x)


def _sinh_parts(b: Builder, x: Val) -> tuple[Val, Val, Val, Val]:
    """sinh(r), cosh(r), and sinh and cosh of j ln 2, where |x| = j ln 2 + r."""
    shifted, r = _reduce_exp(b, widen(b, at_most(b, b.fabs(x), 95.0)))
    z = b.fmul(r, r)
    sinh_r = b.fma(b.fmul(poly(b, z, _SINH), z), r, r)
    cosh_r = b.fma(poly(b, z, _COSH), z, 1.0)
    up = b.fmul(_power_of_two(b, shifted), 0.5)
    down = b.fmul(_power_of_two(b, b.fsub(2 * ROUNDER_DOUBLE, shifted)), 0.5)
    return sinh_r, cosh_r, b.fsub(up, down), b.fadd(up, down)


@part_by_part
def sinh(b: Builder, x: Val) -> Val:
    """By the addition theorem: no division, and accurate near 0."""
    sinh_r, cosh_r, sinh_j, cosh_j = _sinh_parts(b, x)
    return b.copysign(narrow(b, b.fma(sinh_j, cosh_r, b.fmul(cosh_j, sinh_r))), x)


@part_by_part
def cosh(b: Builder, x: Val) -> Val:
    sinh_r, cosh_r, sinh_j, cosh_j = _sinh_parts(b, x)
    return narrow(b, b.fma(cosh_j, cosh_r, b.fmul(sinh_j, sinh_r)))


@part_by_part
def asinh(b: Builder, x: Val) -> Val:
    """log1p(a + a^2 / (1 + sqrt(a^2 + 1))); squares of f32 do not overflow f64."""
    a = widen(b, b.fabs(x))
    root = b.sqrt(b.fma(a, a, 1.0))
    inner = b.fadd(a, b.fdiv(b.fmul(a, a), b.fadd(root, 1.0)))
    finite = b.fcmp("olt", b.fabs(x), math.inf)
    result = b.copysign(narrow(b, _log1p_wide(b, inner)), x)
    return b.select(finite, result, x)


@part_by_part
def acosh(b: Builder, x: Val) -> Val:
    """log1p(t + sqrt(t^2 + 2t)) with t = x - 1, accurate near 1."""
    t = b.fadd(widen(b, x), -1.0)
    inner = b.fadd(t, b.sqrt(b.fmul(t, b.fadd(t, 2.0))))
    inside = b.and_(b.fcmp("oge", x, 1.0), b.fcmp("olt", x, math.inf))
    outside = b.select(b.fcmp("olt", x, 1.0), b.const(x.ty, math.nan), x)
    return b.select(inside, narrow(b, _log1p_wide(b, inner)), outside)


@part_by_part
def atanh(b: Builder, x: Val) -> Val:
    """log1p(2a / (1 - a)) / 2"""
    a = b.fabs(x)
    wide_a = widen(b, a)
    inner = b.fdiv(b.fadd(wide_a, wide_a), b.fsub(1.0, wide_a))
    result = narrow(b, b.fmul(_log1p_wide(b, inner), 0.5))
    edge = b.select(b.fcmp("oeq", a, 1.0), b.const(x.ty, math.inf), b.const(x.ty, math.nan))
    return b.copysign(b.select(b.fcmp("olt", a, 1.0), result, edge), x)


@part_by_part
def tan(b: Builder, x: Val) -> Val:
    a = b.fabs(x)
    wide_a = widen(b, a)
    shifted = b.fma(wide_a, 2.0 / math.pi, ROUNDER_DOUBLE)
    j = b.fsub(shifted, ROUNDER_DOUBLE)
    r = b.fma(j, -_HALF_PI[1], b.fma(j, -_HALF_PI[0], wide_a))
    sine, cosine = _sin_cos_wide(b, r)
    odd = b.icmp("ne", b.and_(bits(b, shifted), 1), 0)
    numerator = b.select(odd, b.fneg(cosine), sine)
    quotient = narrow(b, b.fdiv(numerator, b.select(odd, sine, cosine)))
    # On |x|, so that -0 keeps its sign.
    sign = b.and_(bits(b, x), 0x80000000)
    result = b.bitcast(b.xor(bits(b, quotient), sign), x.ty)
    return huge_lanes_from_libm(b, "tan", x, b.fcmp("ogt", a, _TAN_LIMIT), result)


def _sin_cos_wide(b: Builder, r: Val) -> tuple[Val, Val]:
    """sin and cos in f64 for |r| <= pi/4, to 1e-14."""
    z = b.fmul(r, r)
    return b.fma(b.fmul(poly(b, z, _SIN), z), r, r), b.fma(poly(b, z, _COS), z, 1.0)


@part_by_part
def pow(b: Builder, x: Val, y: Val) -> Val:
    """2^(y log2 |x|), with IEEE 754's results at the edges."""
    a = b.fabs(x)
    exponent, mantissa = _split_log(b, widen(b, a))
    f = b.fsub(mantissa, 1.0)
    logarithm = b.fma(f, poly(b, f, _LOG2), exponent)
    finite = b.fcmp("olt", a, math.inf)
    logarithm = b.select(finite, logarithm, widen(b, a))
    is_zero = b.fcmp("oeq", a, 0.0)
    logarithm = b.select(is_zero, b.const(logarithm.ty, -math.inf), logarithm)
    product = b.fmul(widen(b, y), logarithm)
    # x^0 and 1^y are 1 even when the other operand is nan or infinite.
    one = b.or_(b.fcmp("oeq", y, 0.0), b.fcmp("oeq", a, 1.0))
    product = b.select(one, b.const(product.ty, 0.0), product)
    product = at_least(b, at_most(b, product, 200.0), -200.0)
    shifted = b.fadd(product, ROUNDER_DOUBLE)
    r = b.fsub(product, b.fsub(shifted, ROUNDER_DOUBLE))
    mantissa_part = bits(b, b.fma(r, poly(b, r, _EXP2), 1.0))
    scaled = b.bitcast(b.add(mantissa_part, b.shl(bits(b, shifted), 52)), product.ty)
    result = narrow(b, b.select(b.fcmp("uno", product, product), product, scaled))
    return signed_power(b, x, y, result, finite)


@part_by_part
def cbrt(b: Builder, x: Val) -> Val:
    """x y^2 with y = x^(-1/3), found by fourth-order iterations without a division."""
    a = b.fabs(x)
    wide_a = widen(b, a)
    # A third of the exponent (and, roughly, of the mantissa) by multiplying the high word.
    high = b.lshr(bits(b, wide_a), 32)
    third = b.lshr(b.mul(high, 0x55555556), 32)
    y = b.bitcast(b.shl(b.sub(0x553EF0FF, third), 32), wide_a.ty)
    for _ in range(2):
        h = b.fma(b.fmul(wide_a, y), b.fneg(b.fmul(y, y)), 1.0)
        y = b.fma(b.fmul(y, h), b.fma(h, b.fma(h, 14 / 81, 2 / 9), 1 / 3), y)
    result = b.copysign(narrow(b, b.fmul(b.fmul(wide_a, y), y)), x)
    usual = b.and_(b.fcmp("ogt", a, 0.0), b.fcmp("olt", a, math.inf))
    return b.select(usual, result, x)


@part_by_part
def hypot(b: Builder, x: Val, y: Val) -> Val:
    wide_x, wide_y = widen(b, x), widen(b, y)
    result = narrow(b, b.sqrt(b.fma(wide_x, wide_x, b.fmul(wide_y, wide_y))))
    infinite = b.or_(
        b.fcmp("oeq", b.fabs(x), math.inf),
        b.fcmp("oeq", b.fabs(y), math.inf),
    )
    return b.select(infinite, b.const(x.ty, math.inf), result)


@part_by_part
def erfc(b: Builder, x: Val) -> Val:
    """e^(-x^2) times a fit of e^(x^2) erfc(x) for x >= 0, reflected for x < 0."""
    a = widen(b, at_most(b, b.fabs(x), 10.1))
    t = b.fdiv(b.fadd(a, -3.0), b.fadd(a, 3.0))
    positive = b.fmul(exp_wide(b, b.fneg(b.fmul(a, a))), poly(b, t, _ERFCX))
    negative = b.fcmp("olt", x, 0.0)
    return narrow(b, b.select(negative, b.fsub(2.0, positive), positive))
