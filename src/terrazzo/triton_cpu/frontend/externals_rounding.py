"""Arithmetic with a direction of rounding: add_rz, sqrt_ru, int2float_rd and their like.

The exact result is held as a sum of two floats (error-free transformations: Knuth's TwoSum, the
product and residuals by fused multiply-add, Boldo and Muller's error of an fma). The first is
rounded to nearest, the sign of what is left tells whether it has to move by one. f32 is computed
in f64, where nothing overflows or underflows. In f64 a product below 2**-969 has no exact error.
"""

from __future__ import annotations

from collections.abc import Callable

from terrazzo.base.scalar import Call, Const, Scalar, call, cast, where
from terrazzo.dtypes import DType, float64, int64, uint32, uint64
from terrazzo.triton_cpu.frontend.conversions import bits_of

Pair = tuple[Scalar, Scalar]
MODES = ("rn", "rz", "rd", "ru")


# ---------------------------------------------------------------- no contraction
def plus(a: Scalar, b: Scalar) -> Scalar:
    """A sum that the compiler does not fuse with a product."""
    return call("fma", a, Const(a.dtype, 1.0), b)


def minus(a: Scalar, b: Scalar) -> Scalar:
    """A difference that the compiler does not fuse with a product."""
    return plus(a, call("neg", b))


def times(a: Scalar, b: Scalar) -> Scalar:
    """A product that the compiler does not fuse with a sum."""
    return call("fma", a, b, Const(a.dtype, -0.0))


# ---------------------------------------------------------------- neighbours
def next_up(x: Scalar) -> Scalar:
    """The next larger float."""
    code = bits_of(x)
    one, zero = Const(code.dtype, 1), Const(code.dtype, 0)
    step = where(call("lt", code, zero), call("sub", code, one), call("add", code, one))
    moved = where(call("eq", x, Const(x.dtype, 0.0)), one, step)
    return Call(x.dtype, "bitcast", (moved,))


def next_down(x: Scalar) -> Scalar:
    """The next smaller float."""
    return call("neg", next_up(call("neg", x)))


def next_after(x: Scalar, y: Scalar) -> Scalar:
    """The float next to x on the way to y; y itself where they are equal."""
    moved = where(call("lt", x, y), next_up(x), next_down(x))
    unordered = call("or", call("isnan", x), call("isnan", y))
    stays = where(unordered, call("add", x, y), y)
    return where(call("or", unordered, call("eq", x, y)), stays, moved)


# ---------------------------------------------------------------- exact results as pairs
def two_sum(a: Scalar, b: Scalar) -> Pair:
    """Knuth's TwoSum."""
    total = plus(a, b)
    part = minus(total, a)
    return total, plus(minus(a, minus(total, part)), minus(b, part))


def _overflown(pair: Pair, *args: Scalar) -> Pair:
    """Infinity made of finite numbers lies beyond the exact result."""
    total, error = pair
    made = call("isinf", total)
    for arg in args:
        made = call("and", made, call("isfinite", arg))
    return total, where(made, call("neg", total), error)


def _sum(a: Scalar, b: Scalar) -> Pair:
    return _overflown(two_sum(a, b), a, b)


def _difference(a: Scalar, b: Scalar) -> Pair:
    return _sum(a, call("neg", b))


def _product(a: Scalar, b: Scalar) -> Pair:
    near = times(a, b)
    return _overflown((near, call("fma", a, b, call("neg", near))), a, b)


def _quotient(a: Scalar, b: Scalar) -> Pair:
    near = call("div", a, b)
    rest = call("fma", call("neg", near), b, a)
    return _overflown((near, call("div", rest, b)), a, call("div", Const(b.dtype, 1.0), b))


def _reciprocal(a: Scalar) -> Pair:
    return _quotient(Const(a.dtype, 1.0), a)


def _root(a: Scalar) -> Pair:
    near = call("sqrt", a)
    rest = call("fma", call("neg", near), near, a)
    return near, call("div", rest, call("add", near, near))


def _fused(a: Scalar, b: Scalar, c: Scalar) -> Pair:
    near = call("fma", a, b, c)
    high = times(a, b)
    low = call("fma", a, b, call("neg", high))
    first, first_error = two_sum(c, low)
    second, second_error = two_sum(high, first)
    left = plus(minus(second, near), second_error)
    return _overflown((near, plus(left, first_error)), a, b, c)


def _number(x: Scalar) -> Pair:
    """A float or an integer as it is."""
    if x.dtype not in (int64, uint64):
        return cast(x, float64), Const(float64, 0.0)
    high = cast(call("shr", x, Const(x.dtype, 32)), float64)
    low = cast(call("and", x, Const(x.dtype, 0xFFFFFFFF)), float64)
    return two_sum(call("mul", high, Const(float64, 2.0**32)), low)


EXACT: dict[str, Callable[..., Pair]] = {
    "add": _sum, "sub": _difference, "mul": _product, "div": _quotient, "rcp": _reciprocal,
    "sqrt": _root, "fma": _fused,
}
TO_NEAREST: dict[str, Callable[..., Scalar]] = {
    "add": plus, "sub": minus, "mul": times, "div": lambda a, b: call("div", a, b),
    "rcp": lambda a: call("div", Const(a.dtype, 1.0), a), "sqrt": lambda a: call("sqrt", a),
    "fma": lambda a, b, c: call("fma", a, b, c),
}


# ---------------------------------------------------------------- rounding
def _settled(pair: Pair, target: DType, mode: str) -> Scalar:
    near, error = pair
    result = cast(near, target)
    if target is not float64:
        error = plus(minus(near, cast(result, float64)), error)
    zero, nothing = Const(target, 0.0), Const(float64, 0.0)
    down, up = call("lt", error, nothing), call("gt", error, nothing)
    if mode == "rz":
        down = call("and", down, call("gt", result, zero))
        up = call("and", up, call("lt", result, zero))
    if mode in ("rd", "rz"):
        result = where(down, next_down(result), result)
    if mode in ("ru", "rz"):
        result = where(up, next_up(result), result)
    return result


def rounded(name: str, mode: str) -> Callable[..., Scalar]:
    """An operation of EXACT with a mode of rounding, on f32 or f64."""

    def rule(*args: Scalar) -> Scalar:
        if mode == "rn":
            return TO_NEAREST[name](*args)
        result = _settled(EXACT[name](*(cast(a, float64) for a in args)), args[0].dtype, mode)
        if mode == "rd" and name in ("add", "sub"):
            # A difference of equals is -0 in this mode; 0 + 0 alone is 0.
            signs = [call("lt", bits_of(a), Const(bits_of(a).dtype, 0)) for a in args]
            if name == "sub":
                signs[1] = call("not", signs[1])
            negative = call("and", call("eq", result, Const(result.dtype, 0.0)),
                            call("or", *signs))
            result = where(negative, Const(result.dtype, -0.0), result)
        return result

    return rule


def float_of(target: DType, mode: str) -> Callable[[Scalar], Scalar]:
    """A conversion to f32 or f64 with a mode of rounding."""
    if mode == "rn":
        return lambda x: cast(x, target)
    return lambda x: _settled(_number(x), target, mode)


_TO_INTEGRAL = {"rn": "round", "rz": "trunc", "rd": "floor", "ru": "ceil"}


def integer_of(target: DType, mode: str) -> Callable[[Scalar], Scalar]:
    """A conversion of floats to an integer type, which saturates; nan is 0."""

    def rule(x: Scalar) -> Scalar:
        whole = call(_TO_INTEGRAL[mode], x)
        if target is uint32:  # a cast to 32 bits would wrap around
            whole = call("min", call("max", cast(whole, float64), Const(float64, 0.0)),
                         Const(float64, 2.0**32 - 1))
            return cast(cast(whole, int64), target)
        return cast(whole, target)

    return rule
