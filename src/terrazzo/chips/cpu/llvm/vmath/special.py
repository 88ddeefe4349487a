"""Special functions that models rarely need: computed in f64, accurate before fast.

On f32 they are within 4 ulp. digamma's zeros at negative x are the exception: there the result is
the small difference of large terms, right to about 1e-15 absolutely.
"""

from __future__ import annotations

import math

from terrazzo.chips.cpu.llvm.builder import Builder, Val
from terrazzo.chips.cpu.llvm.vmath.parts import map_lanes, narrow, part_by_part, poly, widen
from terrazzo.chips.cpu.llvm.vmath.wide import log_wide

# erfinv(x) / x in w = -log(1 - x^2), for w <= 6
_ERFINV_CENTRE = (
    0.8862269257105116,
    0.23201365278167838,
    0.011549460489522717,
    -0.002335485013702858,
    -0.00012744784894010532,
    4.614707599407449e-05,
    2.1477138674414268e-06,
    -9.349401251094979e-07,
    -1.2621186851492244e-07,
    6.19254178553434e-08,
    -8.58655153373678e-09,
    5.637077653437067e-10,
    -1.5041226600192007e-11,
)
_ERFINV_SPLIT = 6.0
# erfinv(x) in sqrt(w), for w up to what f32 (17) and f64 (37) can hold
_ERFINV_TAIL_SINGLE = (
    -0.2008053428812992,
    1.4748371844552093,
    -0.7396296575142807,
    0.5258123992306329,
    -0.21485612513674612,
    0.05367690375315362,
    -0.007855751415456348,
    0.000499397316302064,
    2.598578854235251e-05,
    -6.363226963813653e-06,
    3.065576997536695e-07,
)
_ERFINV_TAIL_DOUBLE = (
    -0.12553112422239593,
    1.3007018044458927,
    -0.5755978898624896,
    0.4513989746081456,
    -0.2050756908048413,
    0.06033182836891371,
    -0.01193367717939346,
    0.001584650850268206,
    -0.00013595578948054699,
    6.826767127151118e-06,
    -1.5263683221714006e-07,
)

# Coefficients B_2k / 2k of digamma's asymptotic series in 1/x^2
_DIGAMMA_SERIES = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12)
# From here on the series is right to the last bit of f64.
_DIGAMMA_FAR = 10


def lgamma(b: Builder, x: Val) -> Val:
    return map_lanes(b, "lgamma", [x])


def _erfinv_fit(b: Builder, a: Val, tail: tuple[float, ...]) -> Val:
    """erfinv in f64 for 0 <= a < 1, as good as the fits are (Giles's choice of variables)."""
    w = b.fneg(log_wide(b, b.fma(b.fneg(a), a, 1.0)))
    centre = b.fmul(a, poly(b, w, _ERFINV_CENTRE))
    return b.select(b.fcmp("ogt", w, _ERFINV_SPLIT), poly(b, b.sqrt(w), tail), centre)


def _erfinv_edges(b: Builder, a: Val, result: Val, x: Val) -> Val:
    edge = b.select(b.fcmp("oeq", a, 1.0), b.const(x.ty, math.inf), b.const(x.ty, math.nan))
    return b.copysign(b.select(b.fcmp("olt", a, 1.0), result, edge), x)


@part_by_part
def erfinv(b: Builder, x: Val) -> Val:
    a = b.fabs(x)
    result = narrow(b, _erfinv_fit(b, widen(b, a), _ERFINV_TAIL_SINGLE))
    return _erfinv_edges(b, a, result, x)


@part_by_part
def erfinv_double(b: Builder, x: Val) -> Val:
    """The fit, then one step of Halley's method with libm's erf or, near 1, erfc."""
    a = b.fabs(x)
    y = _erfinv_fit(b, a, _ERFINV_TAIL_DOUBLE)
    near_zero = b.fsub(map_lanes(b, "erf", [y]), a)
    near_one = b.fsub(b.fsub(1.0, a), map_lanes(b, "erfc", [y]))
    error = b.select(b.fcmp("olt", a, 0.5), near_zero, near_one)
    slope = b.fmul(map_lanes(b, "exp", [b.fneg(b.fmul(y, y))]), 2 / math.sqrt(math.pi))
    step = b.fdiv(error, slope)
    y = b.fsub(y, b.fdiv(step, b.fma(y, step, 1.0)))
    return _erfinv_edges(b, a, y, x)


@part_by_part
def digamma(b: Builder, x: Val) -> Val:
    return narrow(b, digamma_double(b, widen(b, x)))


@part_by_part
def digamma_double(b: Builder, x: Val) -> Val:
    """Reflection for x < 0, recurrence up to 10, the asymptotic series from there."""
    negative = b.fcmp("olt", x, 0.0)
    z = b.select(negative, b.fsub(1.0, x), x)
    below = b.const(x.ty, 0.0)
    for _ in range(_DIGAMMA_FAR):
        near = b.fcmp("olt", z, float(_DIGAMMA_FAR))
        below = b.select(near, b.fadd(below, b.fdiv(1.0, z)), below)
        z = b.select(near, b.fadd(z, 1.0), z)
    inverse = b.fdiv(1.0, z)
    square = b.fmul(inverse, inverse)
    series = b.fmul(square, poly(b, square, _DIGAMMA_SERIES))
    far = b.fsub(map_lanes(b, "log", [z]), b.fma(inverse, 0.5, series))
    positive = b.fsub(far, below)
    fraction = b.fsub(x, b.intrinsic("llvm.roundeven", [x], x.ty))
    tangent = map_lanes(b, "tan", [b.fmul(fraction, math.pi)])
    reflected = b.fsub(positive, b.fdiv(math.pi, tangent))
    # Negative integers are poles without a side.
    reflected = b.select(b.fcmp("oeq", fraction, 0.0), b.const(x.ty, math.nan), reflected)
    return b.select(negative, reflected, positive)
