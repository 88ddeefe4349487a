"""Functions on f64: within 2 ulp, in vectors; the rarest ones call libm lane by lane.

Arguments are reduced as fdlibm does it, with fused multiply-adds; coefficients are Chebyshev fits
of our own, whose relative errors are under 3e-18. All of it uses what AVX2 has on 64-bit lanes: no
arithmetic shift, no conversion between integers and floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from terrazzo.chips.cpu.llvm.builder import Builder, Val
from terrazzo.chips.cpu.llvm.vmath import avx512
from terrazzo.chips.cpu.llvm.vmath.parts import (
    ROUNDER_DOUBLE,
    at_least,
    at_most,
    bits,
    huge_lanes_from_libm,
    map_lanes,
    poly,
)

LOG2_E = 1.4426950408889634
# ln 2 and log10 2 in two parts: the first has few enough bits that its multiples are exact.
LN2 = (0.6931471805598903, 5.497923018708371e-14)
_LOG10_2 = (0.30102999566383914, 1.42050232272661e-13)
# 1 / ln 2 and 1 / ln 10, each with what it was rounded by.
_PER_LN2 = (1.4426950408889634, 2.0355273740931033e-17)
_PER_LN10 = (0.4342944819032518, 1.098319650216765e-17)
_HALF_PI = (1.5707963267948966, 6.123233995736766e-17, -1.4973849048591698e-33)
_ONE = 0x3FF0000000000000
_MANTISSA = (1 << 52) - 1
_SQRT_HALF = 0x3FE6A09E667F3BCD
_SMALLEST_NORMAL = 2.0**-1022
_TRIG_LIMIT = 2.0**20  # up to here three parts of pi/2 are enough

# (e^r - 1 - r) / r^2 on |r| <= ln(2)/2
_EXP = (
    0.5,
    0.1666666666666667,
    0.04166666666666667,
    0.008333333333326136,
    0.0013888888888883748,
    0.00019841269874820627,
    2.4801587325547743e-05,
    2.7557255400206422e-06,
    2.75572736431103e-07,
    2.5105217004720745e-08,
    2.0914686968086876e-09,
)
# (2 atanh(s) - 2 s) / s^3 in s^2, for s = f / (2 + f) and sqrt(1/2) <= 1 + f <= sqrt(2)
_LOG = (
    0.6666666666666666,
    0.4000000000000088,
    0.2857142857080323,
    0.2222222239180047,
    0.18181795630884753,
    0.15386240205813478,
    0.13268759668560612,
    0.13086767009948175,
)
# (sin(r) / r - 1) / r^2 and (cos(r) - 1 + r^2/2) / r^4 in r^2, on |r| <= pi/4
_SIN = (
    -0.16666666666666666,
    0.008333333333333331,
    -0.0001984126984126504,
    2.755731921932058e-06,
    -2.50521062259944e-08,
    1.6058530596645953e-10,
    -7.586636882825159e-13,
)
_COS = (
    0.041666666666666664,
    -0.0013888888888888887,
    2.4801587301584632e-05,
    -2.755731922139249e-07,
    2.0876755787492604e-09,
    -1.1470460319209511e-11,
    4.745838412531023e-14,
)
# erf(x) / x - 1 in x^2, on |x| <= 1
_ERF = (
    0.1283791670955126,
    -0.3761263890318375,
    0.11283791670954878,
    -0.02686617064507674,
    0.0052239776248174784,
    -0.0008548326980801447,
    0.00012055331110409494,
    -1.4925595235970651e-05,
    1.6460999970345427e-06,
    -1.6350307065234626e-07,
    1.4659736155673959e-08,
    -1.1372693191126323e-09,
    5.956905633653031e-11,
)
# e^(x^2) erfc(x) in (x - 2.5) / (x + 2.5), on 1 <= x <= 6.1, beyond which erf(x) is 1
_ERFCX = (
    0.2108063640611436,
    -0.3717367339489734,
    0.2517131932174494,
    -0.12503305237882384,
    0.03992253907557481,
    -0.003993701166278989,
    -0.002642365963782633,
    0.0008759154647111202,
    0.00022838036609210515,
    -0.0001288774396852454,
    -3.418206746696778e-05,
    1.861726521789047e-05,
    7.55135018402901e-06,
    -2.3148708111964424e-06,
    -1.7973257378093872e-06,
    1.3091745544657275e-07,
    3.370980494731954e-07,
)


def libm(name: str) -> Callable[..., Val]:
    """The emitter that calls a function of the C library on every lane."""

    def emitter(b: Builder, *args: Val) -> Val:
        return map_lanes(b, name, args)

    return emitter


def intrinsic(name: str) -> Callable[..., Val]:
    """The emitter of an instruction that LLVM has a name for, for f32 and f64 alike."""

    def emitter(b: Builder, *args: Val) -> Val:
        return b.intrinsic(f"llvm.{name}", args, args[0].ty)

    return emitter


def rsqrt(b: Builder, x: Val) -> Val:
    return b.fdiv(1.0, b.sqrt(x))


# -- exponentials ----------------------------------------------------------------------------------


def _power_of_two(b: Builder, shifted: Val) -> Val:
    """2^j from j + rounder, for normal results."""
    return b.bitcast(b.add(b.shl(bits(b, shifted), 52), _ONE), shifted.ty)


def scaled(b: Builder, x: Val, j: Val) -> Val:
    """x * 2^j, rounded once; in two steps, as 2^j itself may be beyond the normal numbers."""
    if avx512.usable(b, x, "double"):
        return avx512.scale(b, x, j)
    half = b.fma(j, 0.5, ROUNDER_DOUBLE)
    rest = b.fadd(b.fsub(j, b.fsub(half, ROUNDER_DOUBLE)), ROUNDER_DOUBLE)
    return b.fmul(b.fmul(x, _power_of_two(b, half)), _power_of_two(b, rest))


def reduced(b: Builder, x: Val) -> tuple[Val, Val, Val]:
    """x = j ln 2 + r: gives j, r, and what r was rounded by."""
    j = b.fsub(b.fma(x, LOG2_E, ROUNDER_DOUBLE), ROUNDER_DOUBLE)
    high, low = b.fma(j, -LN2[0], x), b.fmul(j, LN2[1])
    r = b.fsub(high, low)
    return j, r, b.fsub(b.fsub(high, r), low)


def _curve(b: Builder, r: Val, rest: Val) -> Val:
    """e^r - 1 - r for small r."""
    return b.fma(b.fmul(r, r), poly(b, r, _EXP), rest)


def power_of(b: Builder, r: Val, rest: Val) -> Val:
    """e^r for small r, rounded little more than once."""
    first = b.fadd(r, 1.0)
    lost = b.fsub(r, b.fsub(first, 1.0))
    return b.fadd(first, b.fadd(lost, _curve(b, r, rest)))


def exp(b: Builder, x: Val) -> Val:
    j, r, rest = reduced(b, at_least(b, at_most(b, x, 710.0), -746.0))
    return scaled(b, power_of(b, r, rest), j)


def exp2(b: Builder, x: Val) -> Val:
    limited = at_least(b, at_most(b, x, 1025.0), -1076.0)
    j = b.fsub(b.fadd(limited, ROUNDER_DOUBLE), ROUNDER_DOUBLE)
    f = b.fsub(limited, j)
    r = b.fmul(f, math.log(2))
    rest = b.fma(f, 2.319046813846299e-17, b.fma(f, math.log(2), b.fneg(r)))
    return scaled(b, power_of(b, r, rest), j)


def expm1(b: Builder, x: Val) -> Val:
    j, r, rest = reduced(b, at_least(b, at_most(b, x, 710.0), -40.0))
    # e^x overflows one step before 2^1024 e^r / 2^1024 does.
    high = b.fcmp("ogt", j, 1023.0)
    power = _power_of_two(b, b.fadd(b.select(high, b.const(x.ty, 1023.0), j), ROUNDER_DOUBLE))
    curve = _curve(b, r, rest)
    small = b.fadd(r, curve)
    lost = b.fadd(b.fsub(r, small), curve)
    result = b.fma(power, lost, b.fma(power, small, b.fsub(power, 1.0)))
    result = b.select(high, b.fmul(b.fmul(b.fadd(small, 1.0), power), 2.0), result)
    return b.copysign(b.select(b.fcmp("oeq", j, 0.0), small, result), x)


def sigmoid(b: Builder, x: Val) -> Val:
    """exp(-|x|) never overflows, and keeps the small results of very negative x."""
    e = exp(b, b.fneg(b.fabs(x)))
    numerator = b.select(b.fcmp("olt", x, 0.0), e, 1.0)
    return b.fdiv(numerator, b.fadd(e, 1.0))


def tanh(b: Builder, x: Val) -> Val:
    """t / (t + 2) for t = e^(2 |x|) - 1, and from 1 on 1 - 2 / (t + 2), which errs less."""
    a = at_most(b, b.fabs(x), 22.0)
    t = expm1(b, b.fadd(a, a))
    large = b.fcmp("oge", a, 1.0)
    quotient = b.fdiv(b.select(large, b.const(x.ty, -2.0), t), b.fadd(t, 2.0))
    return b.copysign(b.select(large, b.fadd(quotient, 1.0), quotient), x)


# -- logarithms ------------------------------------------------------------------------------------


def _split(b: Builder, x: Val) -> tuple[Val, Val]:
    """Positive normal x = 2^e (1 + f) with 1 + f from sqrt(1/2) to sqrt(2): gives e and f."""
    moved = b.add(bits(b, x), _ONE - _SQRT_HALF)
    above = b.or_(b.lshr(moved, 52), 0x4330000000000000)
    exponent = b.fsub(b.bitcast(above, x.ty), 2.0**52 + 1023.0)
    mantissa = b.add(b.and_(moved, _MANTISSA), _SQRT_HALF)
    return exponent, b.fsub(b.bitcast(mantissa, x.ty), 1.0)


def split_any(b: Builder, x: Val) -> tuple[Val, Val]:
    """The same for denormals too."""
    small = b.fcmp("olt", x, _SMALLEST_NORMAL)
    exponent, f = _split(b, b.select(small, b.fmul(x, 2.0**54), x))
    return b.fsub(exponent, b.select(small, b.const(x.ty, 54.0), b.const(x.ty, 0.0))), f


def _log_parts(b: Builder, f: Val) -> tuple[Val, Val]:
    """log(1 + f) = f - (half the square - the rest): gives half the square, and the rest."""
    s = b.fdiv(f, b.fadd(f, 2.0))
    z = b.fmul(s, s)
    half_square = b.fmul(b.fmul(f, f), 0.5)
    return half_square, b.fmul(s, b.fma(z, poly(b, z, _LOG), half_square))


def _log_near_one(b: Builder, f: Val) -> Val:
    half_square, rest = _log_parts(b, f)
    return b.fsub(f, b.fsub(half_square, rest))


def _edges(b: Builder, x: Val, result: Val) -> Val:
    """Puts right what the logarithm of x is outside 0 < x < inf."""
    below = b.select(b.fcmp("oeq", x, 0.0), b.const(x.ty, -math.inf), b.const(x.ty, math.nan))
    outside = b.select(b.fcmp("ole", x, 0.0), below, x)
    inside = b.and_(b.fcmp("ogt", x, 0.0), b.fcmp("olt", x, math.inf))
    return b.select(inside, result, outside)


def _log_sum(b: Builder, exponent: Val, f: Val, more: Val | None = None) -> Val:
    """exponent * ln 2 + log(1 + f), the large parts last."""
    half_square, rest = _log_parts(b, f)
    low = b.fma(exponent, LN2[1], rest)
    if more is not None:
        low = b.fadd(low, more)
    return b.fsub(b.fmul(exponent, LN2[0]), b.fsub(b.fsub(half_square, low), f))


def log(b: Builder, x: Val) -> Val:
    return _edges(b, x, _log_sum(b, *split_any(b, x)))


def log2(b: Builder, x: Val) -> Val:
    exponent, f = split_any(b, x)
    small = _log_near_one(b, f)
    product = b.fma(small, _PER_LN2[0], b.fmul(small, _PER_LN2[1]))
    return _edges(b, x, b.fadd(exponent, product))


def log10(b: Builder, x: Val) -> Val:
    exponent, f = split_any(b, x)
    small = _log_near_one(b, f)
    low = b.fma(exponent, _LOG10_2[1], b.fmul(small, _PER_LN10[1]))
    low = b.fma(small, _PER_LN10[0], low)
    return _edges(b, x, b.fma(exponent, _LOG10_2[0], low))


def log1p(b: Builder, x: Val) -> Val:
    return log1p_of_sum(b, x, None)


def log1p_of_sum(b: Builder, x: Val, rest: Val | None) -> Val:
    """log(u) for u = 1 + x, with what u was rounded by over u added; x itself where it is small.

    `rest` is what x was rounded by, if anything.
    """
    u = b.fadd(x, 1.0)
    exponent, f = _split(b, u)
    near = b.fcmp("oeq", exponent, 0.0)
    larger = b.fcmp("oge", x, 1.0)
    lost = b.select(larger, b.fsub(1.0, b.fsub(u, x)), b.fsub(x, b.fsub(u, 1.0)))
    lost = b.select(near, b.const(x.ty, 0.0), lost)
    rounding = b.fdiv(lost if rest is None else b.fadd(lost, rest), u)
    result = _log_sum(b, exponent, b.select(near, x, f), rounding)
    inside = b.and_(b.fcmp("ogt", x, -1.0), b.fcmp("olt", x, math.inf))
    return b.select(inside, b.copysign(result, x), _edges(b, u, u))


# -- circular functions ----------------------------------------------------------------------------


Pair = tuple[Val, Val]  # a number, and what it was rounded by


def plus(b: Builder, large: Val, small: Val) -> Pair:
    """The sum of two numbers, the first of them larger or 0 (Fast2Sum)."""
    high = b.fadd(large, small)
    return high, b.fsub(small, b.fsub(high, large))


def _sine_and_cosine(b: Builder, x: Val) -> tuple[Pair, Pair, Val]:
    """sin and cos of what x is from a multiple of pi/2, and the multiple + rounder."""
    shifted = b.fma(x, 2.0 / math.pi, ROUNDER_DOUBLE)
    j = b.fsub(shifted, ROUNDER_DOUBLE)
    first = b.fma(j, -_HALF_PI[0], x)
    # r and what it was rounded by (Knuth's sum), with what the product was, and the last part.
    second = b.fmul(j, -_HALF_PI[1])
    r = b.fadd(first, second)
    back = b.fsub(r, first)
    lost = b.fadd(b.fsub(first, b.fsub(r, back)), b.fsub(second, back))
    rest = b.fadd(lost, b.fma(j, -_HALF_PI[2], b.fma(j, -_HALF_PI[1], b.fneg(second))))
    z = b.fmul(r, r)
    half = b.fmul(z, 0.5)
    sine = plus(b, r, b.fma(b.fmul(z, r), poly(b, z, _SIN), b.fmul(rest, b.fsub(1.0, half))))
    whole = b.fsub(1.0, half)
    small = b.fma(b.fmul(z, z), poly(b, z, _COS),
                  b.fma(r, b.fneg(rest), b.fsub(b.fsub(1.0, whole), half)))
    return sine, plus(b, whole, small), shifted


def _circular(b: Builder, name: str, x: Val, quarter: int) -> Val:
    """sin of x and so many quarters of a turn."""
    (sine, _), (cosine, _), shifted = _sine_and_cosine(b, x)
    turns = b.add(bits(b, shifted), quarter)
    odd = b.icmp("ne", b.and_(turns, 1), 0)
    value = b.select(odd, cosine, sine)
    sign = b.shl(b.and_(turns, 2), 62)
    result = b.bitcast(b.xor(bits(b, value), sign), x.ty)
    if quarter == 0:  # -0 keeps its sign
        result = b.select(b.fcmp("oeq", x, 0.0), x, result)
    return huge_lanes_from_libm(b, name, x, b.fcmp("ogt", b.fabs(x), _TRIG_LIMIT), result)


def tan(b: Builder, x: Val) -> Val:
    """The quotient, and what it lacks with regard to what both numbers were rounded by."""
    sine, cosine, shifted = _sine_and_cosine(b, x)
    odd = b.icmp("ne", b.and_(bits(b, shifted), 1), 0)
    top, top_rest = (b.select(odd, b.fneg(c), s) for s, c in zip(sine, cosine, strict=True))
    below, below_rest = (b.select(odd, s, c) for s, c in zip(sine, cosine, strict=True))
    inverse = b.fdiv(1.0, below)
    quotient = b.fmul(top, inverse)
    lacks = b.fma(quotient, b.fneg(below_rest), top_rest)
    lacks = b.fadd(b.fma(quotient, b.fneg(below), top), lacks)
    result = b.fma(lacks, inverse, quotient)
    result = b.select(b.fcmp("oeq", x, 0.0), x, result)  # -0 keeps its sign
    return huge_lanes_from_libm(b, "tan", x, b.fcmp("ogt", b.fabs(x), _TRIG_LIMIT), result)


def sin(b: Builder, x: Val) -> Val:
    return _circular(b, "sin", x, 0)


def cos(b: Builder, x: Val) -> Val:
    return _circular(b, "cos", x, 1)


# -- the error function ----------------------------------------------------------------------------


def erf(b: Builder, x: Val) -> Val:
    """A fit up to 1; from there on 1 - e^(-x^2) times a fit of e^(x^2) erfc(x)."""
    a = at_most(b, b.fabs(x), 6.1)
    z = b.fmul(a, a)
    small = b.fma(poly(b, at_most(b, z, 1.0), _ERF), a, a)
    t = b.fdiv(b.fadd(a, -2.5), b.fadd(a, 2.5))
    large = b.fsub(1.0, b.fmul(exp(b, b.fneg(z)), poly(b, t, _ERFCX)))
    return b.copysign(b.select(b.fcmp("olt", a, 1.0), small, large), x)
