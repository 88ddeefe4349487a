"""Inverse circular and hyperbolic functions and hypot on f64, in vectors: within 2 ulp.

Intervals and the order of sums are fdlibm's, with fused multiply-adds; coefficients are Chebyshev
fits of our own. An angle is found from two sides, so that atan and atan2 divide once.
"""

from __future__ import annotations

import math

from terrazzo.chips.cpu.llvm.builder import Builder, Val
from terrazzo.chips.cpu.llvm.vmath.double import Pair, log1p_of_sum, plus
from terrazzo.chips.cpu.llvm.vmath.parts import bits, poly

_HALF_PI = (1.5707963267948966, 6.123233995736766e-17)
_LN2 = 0.6931471805599453
_BIG = 2.0**60  # from here on x + 1 is x, and squares may overflow

# (asin(s) - s) / s^3 in s^2, on s <= 1/2
_ASIN = (
    0.16666666666666669,
    0.07499999999998433,
    0.044642857146355436,
    0.030381944138530792,
    0.0223721729421645,
    0.01735239272057948,
    0.013971212977324232,
    0.01147917738229329,
    0.01032281454438744,
    0.005457505952877555,
    0.017400881373986626,
    -0.014851889888344275,
    0.02875785317504976,
)
# (atan(q) - q) / q^3 in q^2, on |q| <= 7/16
_ATAN = (
    -0.3333333333333333,
    0.19999999999999407,
    -0.1428571428556615,
    0.11111111096587743,
    -0.09090908353048914,
    0.07692285488748961,
    -0.06666240859157958,
    0.05876935494585449,
    -0.05216607405460034,
    0.044919636735098856,
    -0.033121322447451154,
    0.014766420771263722,
)
# Up to which tangent an angle is measured from where: angle = origin + atan(q), where q is
# (a y - b x) / (a x + b y) for the tangent b / a of the origin.
_ORIGINS = (  # tangent up to here, a, b, the origin and what it was rounded by, and pi - origin
    (7 / 16, 1.0, 0.0, (0.0, 0.0), (3.141592653589793, 1.2246467991473532e-16)),
    (11 / 16, 2.0, 1.0, (0.4636476090008061, 2.2698777452961687e-17),
     (2.677945044588987, 1.5527705369303147e-16)),
    (19 / 16, 1.0, 1.0, (0.7853981633974483, 3.061616997868383e-17),
     (2.356194490192345, 9.184850993605148e-17)),
    (39 / 16, 1.0, 1.5, (0.982793723247329, 1.3903311031230998e-17),
     (2.158798930342464, 2.1958367134601997e-16)),
    (math.inf, 0.0, 1.0, _HALF_PI, _HALF_PI),
)


# -- from sine and cosine --------------------------------------------------------------------------


def _asin_parts(b: Builder, x: Val) -> tuple[Val, Val, Val, Val]:
    """Whether |x| > 1/2; then s, asin(s) - s, and what s was rounded by, where s is |x| or else
    sqrt((1 - |x|) / 2)."""
    a = b.fabs(x)
    large = b.fcmp("ogt", a, 0.5)
    flipped = b.fma(a, -0.5, 0.5)
    z = b.select(large, flipped, b.fmul(a, a))
    root = b.sqrt(flipped)
    lost = b.fdiv(b.fma(root, b.fneg(root), flipped), b.fadd(root, root))
    lost = b.select(b.fcmp("ogt", root, 0.0), lost, b.const(x.ty, 0.0))
    s = b.select(large, root, a)
    return large, s, b.fmul(b.fmul(poly(b, z, _ASIN), z), s), lost


def asin(b: Builder, x: Val) -> Val:
    """pi/2 - 2 asin(s) from 1/2 on, where the first difference is followed by its own error."""
    large, s, rest, lost = _asin_parts(b, x)
    start = b.fma(s, -2.0, _HALF_PI[0])
    behind = b.fma(s, -2.0, b.fsub(_HALF_PI[0], start))
    low = b.fma(b.fadd(rest, lost), -2.0, b.fadd(behind, _HALF_PI[1]))
    return b.copysign(b.select(large, b.fadd(start, low), b.fadd(s, rest)), x)


def acos(b: Builder, x: Val) -> Val:
    large, s, rest, lost = _asin_parts(b, x)
    negative = b.fcmp("olt", x, 0.0)
    # Near 0 it is pi/2 - asin(x), near 1 twice asin(s), near -1 pi less that.
    near = b.fsub(_HALF_PI[0], b.fsub(b.copysign(s, x), b.fsub(_HALF_PI[1], b.copysign(rest, x))))
    half = b.fadd(s, b.fadd(rest, lost))
    far = b.fsub(_HALF_PI[0], b.fadd(s, b.fsub(b.fadd(rest, lost), _HALF_PI[1])))
    turned = b.select(negative, far, half)
    return b.select(large, b.fadd(turned, turned), near)


# -- from the tangent ------------------------------------------------------------------------------


def _angle(b: Builder, y: Val, x: Val, left: Val | None = None) -> Val:
    """The angle of (x, y), both at least 0 and their ratio a number; `left`: of (-x, y)."""
    *before, last = _ORIGINS

    def constant(value: float) -> Val:
        return b.const(y.ty, value)

    # a y - b x and a x + b y; the products with 0, 1 and 2 are exact.
    numerator, denominator = b.fneg(x), y
    right, turned = ([constant(v) for v in origin] for origin in last[3:])
    for limit, a, c, origin, other in reversed(before):
        here = b.fcmp("ole", y, b.fmul(x, limit))
        top = y if c == 0 else b.fma(x, -c, b.fmul(y, a))
        below = x if c == 0 else b.fma(y, c, b.fmul(x, a))
        numerator = b.select(here, top, numerator)
        denominator = b.select(here, below, denominator)
        right = [b.select(here, constant(v), w) for v, w in zip(origin, right, strict=True)]
        turned = [b.select(here, constant(v), w) for v, w in zip(other, turned, strict=True)]
    q = b.fdiv(numerator, denominator)
    high, low = right
    if left is not None:
        q = b.select(left, b.fneg(q), q)
        high, low = (b.select(left, t, r) for t, r in zip(turned, right, strict=True))
    z = b.fmul(q, q)
    curve = b.fmul(b.fmul(poly(b, z, _ATAN), z), q)
    return b.fadd(high, b.fadd(q, b.fadd(curve, low)))


def atan(b: Builder, x: Val) -> Val:
    return b.copysign(_angle(b, b.fabs(x), b.const(x.ty, 1.0)), x)


def atan2(b: Builder, y: Val, x: Val) -> Val:
    ay, ax = b.fabs(y), b.fabs(x)
    big = b.select(b.fcmp("ogt", ay, ax), ay, ax)
    # Neither sums of huge sides nor quotients of denormal ones.
    scale = b.select(b.fcmp("ogt", big, 2.0**1000), b.const(x.ty, 2.0**-10), b.const(x.ty, 1.0))
    scale = b.select(b.fcmp("olt", big, 2.0**-900), b.const(x.ty, 2.0**100), scale)
    # inf/inf counts as 1/1 and 0/0 as 0/1; a nan in either operand makes the quotient nan.
    one = b.const(x.ty, 1.0)
    both = b.and_(b.fcmp("oeq", ay, math.inf), b.fcmp("oeq", ax, math.inf))
    up = b.select(both, one, b.fmul(ay, scale))
    across = b.select(b.or_(both, b.fcmp("oeq", big, 0.0)), one, b.fmul(ax, scale))
    # The sign bit, not a comparison: atan2(0, -0) is pi.
    return b.copysign(_angle(b, up, across, b.icmp("slt", bits(b, x), 0)), y)


# -- hyperbolic ------------------------------------------------------------------------------------


def _log_of_double(b: Builder, near: Pair, a: Val) -> Val:
    """log1p of a sum, but log(2 a) where a is large."""
    big = b.fcmp("ogt", a, _BIG)
    zero = b.const(a.ty, 0.0)
    result = log1p_of_sum(b, b.select(big, a, near[0]), b.select(big, zero, near[1]))
    return b.fadd(result, b.select(big, b.const(a.ty, _LN2), zero))


def asinh(b: Builder, x: Val) -> Val:
    """log1p(a + a^2 / (1 + sqrt(a^2 + 1)))"""
    a = b.fabs(x)
    square = b.fmul(a, a)
    near = plus(b, a, b.fdiv(square, b.fadd(b.sqrt(b.fma(a, a, 1.0)), 1.0)))
    return b.copysign(_log_of_double(b, near, a), x)


def acosh(b: Builder, x: Val) -> Val:
    """log1p(t + sqrt(t^2 + 2t)) with t = x - 1, accurate near 1; nan below."""
    t = b.fadd(x, -1.0)
    near = plus(b, b.sqrt(b.fma(t, t, b.fadd(t, t))), t)
    result = _log_of_double(b, near, x)
    return b.select(b.fcmp("olt", x, 1.0), b.const(x.ty, math.nan), result)


def atanh(b: Builder, x: Val) -> Val:
    """log1p(2a / (1 - a)) / 2; below 1/2 that is 2a + 2a^2 / (1 - a), which loses less."""
    a = b.fabs(x)
    twice = b.fadd(a, a)
    small = b.fcmp("olt", a, 0.5)
    quotient = b.fdiv(b.select(small, b.fmul(twice, a), twice), b.fsub(1.0, a))
    inner, rest = plus(b, b.select(small, twice, b.const(x.ty, 0.0)), quotient)
    rest = b.select(small, rest, b.const(x.ty, 0.0))
    result = b.fmul(log1p_of_sum(b, inner, rest), 0.5)
    return b.copysign(b.select(b.fcmp("ogt", a, 1.0), b.const(x.ty, math.nan), result), x)


def hypot(b: Builder, x: Val, y: Val) -> Val:
    """sqrt(x^2 + y^2), whose squares neither overflow nor vanish."""
    ax, ay = b.fabs(x), b.fabs(y)
    big = b.select(b.fcmp("ogt", ay, ax), ay, ax)
    huge, tiny = b.fcmp("ogt", big, 2.0**500), b.fcmp("olt", big, 2.0**-450)
    one = b.const(x.ty, 1.0)
    down = b.select(huge, b.const(x.ty, 2.0**-600), b.select(tiny, b.const(x.ty, 2.0**600), one))
    up = b.select(huge, b.const(x.ty, 2.0**600), b.select(tiny, b.const(x.ty, 2.0**-600), one))
    ax, ay = b.fmul(ax, down), b.fmul(ay, down)
    result = b.fmul(b.sqrt(b.fma(ax, ax, b.fmul(ay, ay))), up)
    infinite = b.or_(b.fcmp("oeq", b.fabs(x), math.inf), b.fcmp("oeq", b.fabs(y), math.inf))
    return b.select(infinite, b.const(x.ty, math.inf), result)
