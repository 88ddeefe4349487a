"""Special functions composed from scalar operations, in f64 and accurate before fast.

f32 results are rounded once, from f64. Series have the coefficients of the textbooks (Abramowitz
and Stegun, 7.1, 9.6 and 9.7), computed here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from terrazzo.base.scalar import Call, Const, Scalar, call, cast, where
from terrazzo.dtypes import bool_, float64, int32, int64
from terrazzo.triton_cpu.frontend.conversions import bits_of


def number(value: float) -> Const:
    """A literal of f64."""
    return Const(float64, value)


def wide(x: Scalar) -> Scalar:
    """A float as f64."""
    return cast(x, float64)


def _horner(x: Scalar, coefficients: Sequence[float]) -> Scalar:
    result: Scalar = number(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        result = call("fma", result, x, number(c))
    return result


# ---------------------------------------------------------------- modified Bessel functions
_NEAR = 20.0  # from here on the asymptotic series is right to the last bit


def _power_series(order: int) -> list[float]:
    """Of I_n(x) / (x/2)^n in x^2/4: all positive, so nothing cancels."""
    return [float(Fraction(1, math.factorial(k) * math.factorial(k + order))) for k in range(52)]


def _asymptotic_series(order: int) -> list[float]:
    """Of I_n(x) sqrt(2 pi x) / e^x in 1/x."""
    terms, term = [1.0], Fraction(1)
    for k in range(1, 26):
        term *= -Fraction(4 * order * order - (2 * k - 1) ** 2, 8 * k)
        terms.append(float(term))
    return terms


def cyl_bessel_i(order: int, x: Scalar) -> Scalar:
    """The modified Bessel function of the first kind, of order 0 or 1."""
    x = wide(x)
    a = call("abs", x)
    near = call("min", a, number(_NEAR))
    half = call("mul", near, number(0.5))
    inner = _horner(call("mul", half, half), _power_series(order))
    if order:
        inner = call("mul", inner, half)
    far = call("max", a, number(_NEAR))
    # Half of the exponential at a time: the product overflows later than e^x does.
    root = call("exp", call("mul", far, number(0.5)))
    series = _horner(call("div", number(1.0), far), _asymptotic_series(order))
    scale = call("div", root, call("sqrt", call("mul", far, number(2 * math.pi))))
    outer = call("mul", call("mul", scale, series), root)
    outer = where(call("isinf", a), a, outer)
    result = where(call("le", a, number(_NEAR)), inner, outer)
    result = where(call("isnan", x), x, result)
    return call("copysign", result, x) if order else result


# ---------------------------------------------------------------- the error function's family
_ERFCX_FAR = 10.0


def _erfcx_series() -> list[float]:
    """Of erfcx(x) x sqrt(pi) in 1/x^2."""
    terms, term = [1.0], Fraction(1)
    for k in range(1, 19):
        term *= -Fraction(2 * k - 1, 2)
        terms.append(float(term))
    return terms


def erfcx(x: Scalar) -> Scalar:
    """e^(x^2) erfc(x); the square's rounding error would be magnified, so it is put back."""
    x = wide(x)
    near = call("min", x, number(_ERFCX_FAR))
    square = call("mul", near, near)
    lost = call("fma", near, near, call("neg", square))
    power = call("exp", square)
    power = where(call("isfinite", power), call("fma", power, lost, power), power)
    inner = call("mul", power, call("erfc", near))
    far = call("max", x, number(_ERFCX_FAR))
    inverse = call("div", number(1.0), far)
    outer = call("mul", call("mul", inverse, number(1 / math.sqrt(math.pi))),
                 _horner(call("mul", inverse, inverse), _erfcx_series()))
    result = where(call("gt", x, number(_ERFCX_FAR)), outer, inner)
    return where(call("isnan", x), x, result)


def erfcinv(x: Scalar) -> Scalar:
    """erfinv(1 - x) where that is accurate, else Newton's method on the logarithm of erfc."""
    x = wide(x)
    mirrored = call("gt", x, number(1.0))
    p = where(mirrored, call("sub", number(2.0), x), x)
    centre = call("erfinv", call("sub", number(1.0), p))
    tail = call("max", call("min", p, number(0.1)), number(2.0**-1022))
    logarithm = call("log", tail)
    # erfc(y) is about e^(-y^2) / (y sqrt(pi)).
    y: Scalar = call("sqrt", call("neg", logarithm))
    y = call("sqrt", call("neg", call("add", logarithm, call(
        "log", call("mul", y, number(math.sqrt(math.pi)))))))
    for _ in range(4):
        value = call("erfc", y)
        slope = call("mul", call("exp", call("neg", call("mul", y, y))),
                     number(2 / math.sqrt(math.pi)))
        step = call("div", call("mul", call("log", call("div", value, tail)), value), slope)
        y = call("add", y, step)
    result = where(call("lt", p, number(0.1)), y, centre)
    result = where(call("eq", p, number(0.0)), number(math.inf), result)
    result = where(call("lt", p, number(0.0)), number(math.nan), result)
    return where(mirrored, call("neg", result), result)


def normcdf(x: Scalar) -> Scalar:
    """erfc(-x / sqrt(2)) / 2, with the quotient's rounding error put back to first order."""
    x = wide(x)
    high = math.sqrt(0.5)
    low = float((Fraction(1, 2) - Fraction(high) ** 2) / (2 * Fraction(high)))
    t = call("mul", x, number(-high))
    lost = call("neg", call("fma", x, number(low), call("fma", x, number(high), t)))
    slope = call("mul", call("exp", call("neg", call("mul", t, t))),
                 number(-1 / math.sqrt(math.pi)))
    half = call("mul", call("erfc", t), number(0.5))
    return where(call("isinf", x), half, call("fma", slope, lost, half))


def normcdfinv(p: Scalar) -> Scalar:
    """The quantile of the normal distribution."""
    twice = call("mul", wide(p), number(2.0))
    # Subtracted from zero, so that the median is not -0.
    return call("sub", number(0.0), call("mul", erfcinv(twice), number(math.sqrt(2))))


# ---------------------------------------------------------------- angles in half turns
def _half_turns(x: Scalar) -> tuple[Scalar, Scalar]:
    """x without whole turns, between -1 and 1, exactly; and its size."""
    turns = call("round", call("mul", x, number(0.5)))
    rest = call("fma", turns, number(-2.0), x)
    return rest, call("abs", rest)


def _sine_of_half_turns(r: Scalar) -> Scalar:
    return call("sin", call("mul", r, number(math.pi)))


def sinpi(x: Scalar) -> Scalar:
    """sin(pi x), reduced before the product with pi."""
    rest, size = _half_turns(wide(x))
    folded = where(call("gt", size, number(0.5)), call("sub", number(1.0), size), size)
    sine = _sine_of_half_turns(call("copysign", folded, rest))
    return where(call("eq", folded, number(0.0)), call("copysign", number(0.0), wide(x)), sine)


def cospi(x: Scalar) -> Scalar:
    """cos(pi x), as the sine of the distance to a zero."""
    _, size = _half_turns(wide(x))
    near = call("cos", call("mul", size, number(math.pi)))
    return where(call("lt", size, number(0.25)), near,
                 _sine_of_half_turns(call("sub", number(0.5), size)))


# ---------------------------------------------------------------- lengths and powers of two
def norm(*args: Scalar) -> Scalar:
    """The length of a vector; an infinite part wins over nan."""
    if args[0].dtype is float64:
        length = args[0]
        for arg in args[1:]:
            length = call("hypot", length, arg)
    else:  # squares of f32 fit into f64
        length = number(0.0)
        for arg in args:
            length = call("fma", wide(arg), wide(arg), length)
        length = call("sqrt", length)
    infinite: Scalar = Const(bool_, False)
    for arg in args:
        infinite = call("or", infinite, call("isinf", arg))
    return where(infinite, Const(length.dtype, math.inf), length)


def reciprocal_norm(*args: Scalar) -> Scalar:
    """One over the length of a vector."""
    return call("div", number(1.0), wide(norm(*args)))


def _power_of_two(n: Scalar) -> Scalar:
    """2^n as f64, for exponents of normal numbers."""
    code = call("shl", call("add", cast(n, int64), Const(int64, 1023)), Const(int64, 52))
    return Call(float64, "bitcast", (code,))


def ldexp(x: Scalar, n: Scalar) -> Scalar:
    """x 2^n with one rounding: the first factors leave room above f64's least normal number."""
    if x.dtype is not float64:
        small = call("max", call("min", n, Const(int32, 400)), Const(int32, -400))
        return call("mul", wide(x), _power_of_two(small))
    left = call("max", call("min", n, Const(int32, 3000)), Const(int32, -3000))
    for lowest in (-969, -969, -1022):
        part = call("max", call("min", left, Const(int32, 1023)), Const(int32, lowest))
        x = call("mul", x, _power_of_two(part))
        left = call("sub", left, part)
    return x


def _exponent(x: Scalar) -> Scalar:
    """The exponent of a finite number that is not zero, as an integer."""
    a = call("abs", wide(x))
    small = call("lt", a, number(2.0**-1022))
    code = bits_of(where(small, call("mul", a, number(2.0**60)), a))
    plain = call("sub", call("shr", code, Const(int64, 52)), Const(int64, 1023))
    return where(small, call("sub", plain, Const(int64, 60)), plain)


def ilogb(x: Scalar) -> Scalar:
    """The exponent; the extreme integers for zero, nan and infinity."""
    lowest, highest = Const(int64, -(2**31)), Const(int64, 2**31 - 1)
    finite = where(call("eq", x, Const(x.dtype, 0.0)), lowest, _exponent(x))
    finite = where(call("isinf", x), highest, finite)
    return cast(where(call("isnan", x), lowest, finite), int32)


def logb(x: Scalar) -> Scalar:
    """The exponent as a float."""
    finite = where(call("eq", x, Const(x.dtype, 0.0)), number(-math.inf),
                   cast(_exponent(x), float64))
    return where(call("isfinite", x), finite, call("abs", wide(x)))


def power_of_integer(x: Scalar, n: Scalar) -> Scalar:
    """x^n; the sign follows from n's last bit, so n may be rounded."""
    size = call("pow", call("abs", x), cast(n, x.dtype))
    odd = call("ne", call("and", n, Const(n.dtype, 1)), Const(n.dtype, 0))
    return where(odd, call("copysign", size, x), size)
