"""Functions on f32 computed in f32: the ones that models spend their time in.

Coefficients are minimax fits of our own (weighted least squares on Chebyshev points, reweighted
after Lawson, rounded to f32 one after the other); the error of each fit is under 2e-8, relative.
"""

from __future__ import annotations

import math
from functools import cache

from terrazzo.chips.cpu.llvm.builder import Builder, Val
from terrazzo.chips.cpu.llvm.vmath import avx512
from terrazzo.chips.cpu.llvm.vmath.parts import (
    ROUNDER_SINGLE,
    at_most,
    bits,
    huge_lanes_from_libm,
    poly,
)
from terrazzo.chips.cpu.llvm.vmath.tables import Table, saturating_table

_LOG2_E = 1.4426950216293335
# ln 2 in two parts (Cody-Waite): the first has few enough bits that j * LN2_HIGH is exact.
_LN2_HIGH = 0.693145751953125
_LN2_LOW = 1.4286068203094172e-06
_LN2 = 0.6931471824645996
_ONE = 0x3F800000
_SIGN = 0x80000000

# (e^r - 1 - r) / r^2 on |r| <= ln(2)/2
_EXP = (
    0.4999999403953552,
    0.1666652113199234,
    0.041668254882097244,
    0.008368676528334618,
    0.001382174319587648,
)
# (2^r - 1) / r on |r| <= 1/2
_EXP2 = (
    0.6931471824645996,
    0.24022643268108368,
    0.05550358444452286,
    0.009618997573852539,
    0.0013391495449468493,
    0.00015198983601294458,
)
# (log(1 + f) - f + f^2/2) / f^3 on -1/4 <= f < 1/2
_LOG = (
    0.3333345055580139,
    -0.2500010132789612,
    0.19990812242031097,
    -0.1664707213640213,
    0.1447855681180954,
    -0.1316356509923935,
    0.10467186570167542,
    -0.0450972355902195,
)
# (sin(r) / r - 1) / r^2 and (cos(r) - 1 + r^2/2) / r^4 in r^2, on |r| <= pi/4
_SIN = (-0.16666655242443085, 0.008332188241183758, -0.00019518072076607496)
_COS = (0.04166664555668831, -0.0013887309469282627, 2.4432338250335306e-05)
# pi/2 in three parts: x - j * HALF_PI[0] is exact for |x| below the limit.
_HALF_PI = (1.5707963705062866, -4.371138828673793e-08, -1.7151245100058819e-15)
_TRIG_LIMIT = 65536.0
# (asin(s) / s - 1) / s^2 in s^2, on |s| <= 1/2
_ASIN = (
    0.16666752099990845,
    0.07495307177305222,
    0.04546964168548584,
    0.02418149821460247,
    0.0421651192009449,
)
# (atan(s) / s - 1) / s^2 in s^2, on |s| <= 1
_ATAN = (
    -0.33333298563957214,
    0.1999853551387787,
    -0.14264124631881714,
    0.10951638966798782,
    -0.08401991426944733,
    0.05793443322181702,
    -0.031156206503510475,
    0.010903620161116123,
    -0.0017912840703502297,
)
# (tanh(x) / x - 1) / x^2 in x^2, on |x| <= 0.63
_TANH = (
    -0.33333277702331543,
    0.13331323862075806,
    -0.05372953042387962,
    0.020604873076081276,
    -0.0056657190434634686,
)
_TANH_SPLIT = 0.625
# erf(x) / x - 1 in x^2, on |x| <= 0.93
_ERF_SMALL = (
    0.12837915122509003,
    -0.37612488865852356,
    0.11281730979681015,
    -0.026762966066598892,
    0.0049873529933393,
    -0.0005959589616395533,
)
_ERF_SPLIT = 0.92578125
# log(erfc(t)) / t on 0.92 <= t <= 4, weighted by erfc(t)
_LOG_ERFC = (
    -1.1286520957946777,
    -0.6351361870765686,
    -0.1062626913189888,
    0.02378496155142784,
    -0.003653588006272912,
    0.0003256118798162788,
    -1.1518562132550869e-05,
)


def _reduce_exp(b: Builder, x: Val) -> tuple[Val, Val, Val]:
    """x = j ln 2 + r: gives j + rounder (j in its low bits), j, and e^r - 1."""
    shifted = b.fma(x, _LOG2_E, ROUNDER_SINGLE)
    j = b.fsub(shifted, ROUNDER_SINGLE)
    r = b.fma(j, -_LN2_HIGH, x)
    r = b.fma(j, -_LN2_LOW, r)
    return shifted, j, b.fma(b.fmul(r, r), poly(b, r, _EXP), r)


def _scale(b: Builder, x: Val, shifted: Val, j: Val) -> Val:
    """x * 2^j for x near 1 and any j a result of exp can need, denormals and overflow included."""
    if avx512.usable(b, x):
        return avx512.scale(b, x, j)
    # Two multiplications by half the exponent each, as 2^j itself may not be a float. The bits of
    # the rounder above j's leave the register in the shifts.
    whole = bits(b, shifted)
    half = b.lshr(whole, 1)
    powers = [b.bitcast(b.add(b.shl(part, 23), _ONE), x.ty) for part in (half, b.sub(whole, half))]
    return b.fmul(b.fmul(x, powers[0]), powers[1])


def exp(b: Builder, x: Val) -> Val:
    # Beyond these the result is infinity or zero; the exponent trick needs j in range.
    return _exp_below(b, at_most(b, x, 89.0))


def _exp_below(b: Builder, x: Val) -> Val:
    # What rounds to zero takes another way: an underflow costs over a hundred cycles on many CPUs,
    # and masked softmax is full of exp(-inf).
    zero = b.const(x.ty, 0.0)
    gone = b.fcmp("olt", x, -103.9725)
    shifted, j, minus_one = _reduce_exp(b, b.select(gone, zero, x))
    return b.select(gone, zero, _scale(b, b.fadd(minus_one, 1.0), shifted, j))


def exp2(b: Builder, x: Val) -> Val:
    zero = b.const(x.ty, 0.0)
    gone = b.fcmp("olt", x, -150.0)
    x = b.select(gone, zero, at_most(b, x, 129.0))
    shifted = b.fadd(x, ROUNDER_SINGLE)
    j = b.fsub(shifted, ROUNDER_SINGLE)
    r = b.fsub(x, j)
    return b.select(gone, zero, _scale(b, b.fma(r, poly(b, r, _EXP2), 1.0), shifted, j))


def sigmoid(b: Builder, x: Val) -> Val:
    """1 / (1 + e^-x), from exp(-|x|), which never overflows and keeps tiny results."""
    e = _exp_below(b, b.fneg(b.fabs(x)))
    # e / (1 + e) is e - e q, and 1 / (1 + e) is 1 - q: the quotient's rounding hardly shows.
    q = b.fdiv(e, b.fadd(e, 1.0))
    whole = b.select(b.fcmp("olt", x, 0.0), e, 1.0)
    return b.fma(b.fneg(q), whole, whole)


@cache
def _tanh_table() -> Table:
    return saturating_table(math.tanh, scale=0.63)


@cache
def _erf_table() -> Table:
    return saturating_table(math.erf, scale=0.27)


def _from_table(b: Builder, x: Val, table: Table) -> Val:
    """An odd function by table: about as many instructions as the degree of its pieces, twice."""
    # Just inside the last piece, where the results round to 1.
    a = at_most(b, b.fabs(x), 14.99 * table.scale)
    v = b.fma(a, 1.0 / table.scale, 1.0)
    index = b.lshr(bits(b, v), 21)
    d = b.fsub(a, avx512.lookup(b, table.anchors, index))
    first, second, *rest = (avx512.lookup(b, row, index) for row in table.coefficients)
    # The first piece is x + x * small, as its slope need not be an f32. Large terms come last,
    # each rounded once.
    start = b.select(b.fcmp("olt", v, 1.25), a, first)
    return b.copysign(b.fma(b.fma(poly(b, d, rest), d, second), d, start), x)


def _exp_in_range(b: Builder, x: Val) -> Val:
    """exp where the result is known to be normal."""
    shifted, _, minus_one = _reduce_exp(b, x)
    power = b.bitcast(b.add(b.shl(bits(b, shifted), 23), _ONE), x.ty)
    return b.fma(power, minus_one, power)


def tanh(b: Builder, x: Val) -> Val:
    """1 - 2 / (e^2x + 1), or a polynomial near 0, where that difference would cancel."""
    if avx512.usable(b, x):
        return _from_table(b, x, _tanh_table())
    z = b.fmul(x, x)
    near = b.fma(b.fmul(poly(b, z, _TANH), z), x, x)
    # From 9.02 on the result rounds to 1.
    a = at_most(b, b.fabs(x), 9.5)
    far = b.fsub(1.0, b.fdiv(2.0, b.fadd(_exp_in_range(b, b.fadd(a, a)), 1.0)))
    return b.copysign(b.select(b.fcmp("olt", a, _TANH_SPLIT), near, far), x)


def log(b: Builder, x: Val) -> Val:
    if avx512.usable(b, x):
        # The instructions' results for 0, infinity and negative numbers give log's by themselves.
        mantissa = avx512.mantissa_of(b, x)
        exponent = b.fsub(avx512.exponent_of(b, x), avx512.exponent_of(b, mantissa))
        return _log_of_parts(b, mantissa, exponent)
    tiny = b.fcmp("olt", x, 2.0**-126)
    normal = b.select(tiny, b.fmul(x, 2.0**23), x)
    lifted = b.select(tiny, b.const(x.ty, -23.0), b.const(x.ty, 0.0))
    three_quarters = 0x3F400000
    whole = bits(b, normal)
    high = b.and_(b.sub(whole, three_quarters), 0xFF800000)
    mantissa = b.bitcast(b.sub(whole, high), x.ty)
    exponent = b.fma(b.cast("sitofp", high, "float"), 2.0**-23, lifted)
    result = _log_of_parts(b, mantissa, exponent)
    # What is left: +inf and nan are their own logarithms, 0 gives -inf, negative numbers nan.
    below = b.select(b.fcmp("oeq", x, 0.0), b.const(x.ty, -math.inf), b.const(x.ty, math.nan))
    outside = b.select(b.fcmp("ole", x, 0.0), below, x)
    inside = b.and_(b.fcmp("ogt", x, 0.0), b.fcmp("olt", x, math.inf))
    return b.select(inside, result, outside)


def _log_of_parts(b: Builder, mantissa: Val, exponent: Val) -> Val:
    f = b.fsub(mantissa, 1.0)
    tail = b.fma(poly(b, f, _LOG), f, -0.5)
    return b.fma(exponent, _LN2, b.fma(tail, b.fmul(f, f), f))


def sin(b: Builder, x: Val) -> Val:
    return _sin_or_cos(b, x, "sin")


def cos(b: Builder, x: Val) -> Val:
    return _sin_or_cos(b, x, "cos")


def _sin_or_cos(b: Builder, x: Val, name: str) -> Val:
    """Cody-Waite reduction by pi/2."""
    a = b.fabs(x)
    shifted = b.fma(a, 2.0 / math.pi, ROUNDER_SINGLE)
    j = b.fsub(shifted, ROUNDER_SINGLE)
    r = a
    for part in _HALF_PI:
        r = b.fma(j, -part, r)
    z = b.fmul(r, r)
    sine = b.fma(b.fmul(poly(b, z, _SIN), z), r, r)
    cosine = b.fma(b.fma(poly(b, z, _COS), z, -0.5), z, 1.0)
    quadrant = bits(b, shifted)
    if name == "cos":
        quadrant = b.add(quadrant, 1)
    odd = b.icmp("ne", b.and_(quadrant, 1), 0)
    sign = b.shl(b.and_(quadrant, 2), 30)
    if name == "sin":
        # On |x|, so that -0 keeps its sign.
        sign = b.xor(sign, b.and_(bits(b, x), _SIGN))
    result = b.bitcast(b.xor(bits(b, b.select(odd, cosine, sine)), sign), x.ty)
    return huge_lanes_from_libm(b, name, x, b.fcmp("ogt", a, _TRIG_LIMIT), result)


def _asin_parts(b: Builder, x: Val) -> tuple[Val, Val, Val]:
    """Whether |x| > 1/2; then s and asin(s) - s, where s is |x| or else sqrt((1 - |x|) / 2)."""
    a = b.fabs(x)
    large = b.fcmp("ogt", a, 0.5)
    flipped = b.fma(a, -0.5, 0.5)
    z = b.select(large, flipped, b.fmul(a, a))
    s = b.select(large, b.sqrt(flipped), a)
    return large, s, b.fmul(b.fmul(poly(b, z, _ASIN), z), s)


def asin(b: Builder, x: Val) -> Val:
    large, s, rest = _asin_parts(b, x)
    # pi/2 - 2s - 2 rest, where the first difference is followed by its own error (Fast2Sum)
    start = b.fma(s, -2.0, _HALF_PI[0])
    lost = b.fma(s, -2.0, b.fsub(_HALF_PI[0], start))
    far = b.fadd(start, b.fma(rest, -2.0, b.fadd(lost, _HALF_PI[1])))
    return b.copysign(b.select(large, far, b.fadd(s, rest)), x)


def acos(b: Builder, x: Val) -> Val:
    large, s, rest = _asin_parts(b, x)
    p = b.fadd(s, rest)
    negative = b.fcmp("olt", x, 0.0)
    signed = b.copysign(p, x)
    near = b.fsub(_HALF_PI[0], b.fsub(signed, _HALF_PI[1]))
    twice = b.fadd(p, p)
    far = b.fsub(2 * _HALF_PI[0], b.fsub(twice, 2 * _HALF_PI[1]))
    return b.select(large, b.select(negative, far, twice), near)


def _atan_of_fraction(b: Builder, q: Val) -> Val:
    z = b.fmul(q, q)
    return b.fma(b.fmul(poly(b, z, _ATAN), z), q, q)


def _from_quarter(b: Builder, p: Val) -> Val:
    """pi/2 - p"""
    return b.fsub(_HALF_PI[0], b.fsub(p, _HALF_PI[1]))


def atan(b: Builder, x: Val) -> Val:
    a = b.fabs(x)
    large = b.fcmp("ogt", a, 1.0)
    p = _atan_of_fraction(b, b.select(large, b.fdiv(1.0, a), a))
    return b.copysign(b.select(large, _from_quarter(b, p), p), x)


def atan2(b: Builder, y: Val, x: Val) -> Val:
    ay, ax = b.fabs(y), b.fabs(x)
    steep = b.fcmp("ogt", ay, ax)
    small, big = b.select(steep, ax, ay), b.select(steep, ay, ax)
    quotient = b.fdiv(small, big)
    # inf/inf counts as 1 and 0/0 as 0; a nan in either operand makes the quotient nan.
    quotient = b.select(b.fcmp("oeq", small, big), b.const(x.ty, 1.0), quotient)
    quotient = b.select(b.fcmp("oeq", big, 0.0), small, quotient)
    p = _atan_of_fraction(b, quotient)
    p = b.select(steep, _from_quarter(b, p), p)
    left = b.fsub(2 * _HALF_PI[0], b.fsub(p, 2 * _HALF_PI[1]))
    # The sign bit, not a comparison: atan2(0, -0) is pi.
    negative = b.icmp("slt", bits(b, x), 0)
    return b.copysign(b.select(negative, left, p), y)


def erf(b: Builder, x: Val) -> Val:
    """1 - e^(log erfc), or a polynomial near 0."""
    if avx512.usable(b, x):
        return _from_table(b, x, _erf_table())
    a = b.fabs(x)
    z = b.fmul(x, x)
    small = b.fma(poly(b, z, _ERF_SMALL), x, x)
    # From 3.92 on the result rounds to 1.
    t = at_most(b, a, 4.0)
    big = b.fsub(1.0, _exp_in_range(b, b.fmul(poly(b, t, _LOG_ERFC), t)))
    return b.select(b.fcmp("ogt", a, _ERF_SPLIT), b.copysign(big, x), small)
