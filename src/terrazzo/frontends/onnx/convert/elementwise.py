"""Arithmetic, comparison, logic, bits and casts: operators that go element by element.

ONNX keeps the type of the first input where numpy would widen: what a table of ours answers in
another type is cast back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from terrazzo.base.scalar_table import Absent, by_operator
from terrazzo.dtypes import DType, float64, promote
from terrazzo.frontends.onnx.registry import Call, converts, converts_each, has_converter
from terrazzo.graph.ir import Value, operator_named
from terrazzo.ops import activation as a
from terrazzo.ops import elementwise as e
from terrazzo.ops.creation import full
from terrazzo.ops.reduce import in_type


def _keeps_type(function: Callable[..., Value]) -> Callable[..., Value]:
    """A function whose result is cast to the type of its first input."""
    return lambda x, *others: in_type(function(x, *others), x.dtype)


# ---------------------------------------------------------------- arithmetic with a twist
def truncated_quotient(x: Value, y: Value) -> Value:
    """x / y of integers, rounded towards zero as in C."""
    # Without its remainder x is a multiple of y, where rounding down and cutting off agree.
    return e.floor_divide(e.subtract(x, e.fmod(x, y)) if x.dtype.is_signed else x, y)


@converts("Div")
def div(call: Call) -> Value:
    x, y = call.value(0), call.value(1)
    return e.divide(x, y) if x.dtype.is_float else truncated_quotient(x, y)


@converts("Mod")
def mod(call: Call) -> Value:
    return (e.fmod if call.attr("fmod", 0) else e.remainder)(call.value(0), call.value(1))


@converts("Pow")
def pow(call: Call) -> Value:
    x, y = call.value(0), call.value(1)
    if x.dtype is y.dtype:
        return e.power(x, y)
    if y.dtype.is_float and not x.dtype.is_float and x.dtype.bits > 16:
        x_wide, y = in_type(x, float64), in_type(y, float64)  # exact up to 2**53
        return in_type(e.power(x_wide, y), x.dtype)
    if x.dtype.is_float:
        y = in_type(y, promote(x.dtype, y.dtype))
    return in_type(e.power(x, y), x.dtype)


@converts("BitShift")
def bit_shift(call: Call) -> Value:
    shifts = {"LEFT": e.bitwise_left_shift, "RIGHT": e.bitwise_right_shift}
    direction = call.attr("direction", "")
    if direction not in shifts:
        call.unsupported(f"shifts in the direction {direction!r}; there are LEFT and RIGHT")
    return shifts[direction](call.value(0), call.value(1))


def _variadic(function: Callable[..., Value]) -> Callable[..., Value]:
    return lambda *values: functools.reduce(function, values)


def _mean(*values: Value) -> Value:
    dtype = values[0].dtype
    total = functools.reduce(e.add, (in_type(v, dtype.compute) for v in values))
    return in_type(total / float(len(values)), dtype)


def _sum(*values: Value) -> Value:
    dtype = values[0].dtype
    return in_type(functools.reduce(e.add, (in_type(v, dtype.compute) for v in values)), dtype)


converts_each({"Max": _variadic(e.maximum), "Min": _variadic(e.minimum), "Mean": _mean,
               "Sum": _sum})


@converts("Clip", until=11)
def clip_to_attributes(call: Call) -> Value:
    low, high = call.attr("min"), call.attr("max")
    return a.clip(call.value(0), low, high)


@converts("Clip", since=11)
def clip(call: Call) -> Value:
    return a.clip(call.value(0), call.optional(1), call.optional(2))


@converts("IsInf")
def is_inf(call: Call) -> Value:
    x = call.value(0)
    negative, positive = call.attr("detect_negative", 1), call.attr("detect_positive", 1)
    if negative and positive:
        return e.isinf(x)
    if not negative and not positive:
        return full(shape=x.shape, value=False, dtype="bool")
    sided = (e.less if negative else e.greater)(x, 0)
    return e.bitwise_and(e.isinf(x), sided)


# ---------------------------------------------------------------- conversions
def converted(x: Value, dtype: DType, saturate: bool) -> Value:
    """x in another type by ONNX's rules: 8-bit floats may keep what is too large at their limit."""
    if dtype.is_float and dtype.bits == 8 and saturate and not x.dtype.is_bool:
        limit = dtype.max
        wide = in_type(x, x.dtype.compute if x.dtype.is_float else float64)
        return in_type(a.hardtanh(wide, min=-limit, max=limit), dtype)
    return in_type(x, dtype)


@converts("Cast")
def cast(call: Call) -> Value:
    return converted(call.value(0), call.dtype("to"), bool(call.attr("saturate", 1)))


@converts("CastLike")
def cast_like(call: Call) -> Value:
    return converted(call.value(0), call.value(1).dtype, bool(call.attr("saturate", 1)))


@converts("BitCast")
def bit_cast(call: Call) -> Value:
    x, dtype = call.value(0), call.dtype("to")
    if x.dtype.is_bool or dtype.is_bool:  # bytes of 0 and 1
        same_width = x.dtype.itemsize == dtype.itemsize
        return in_type(x, dtype) if same_width else call.unsupported("changes the width")
    if x.dtype.bits != dtype.bits:
        call.unsupported(f"reads {x.dtype.name} as {dtype.name}, which has another width")
    return x if x.dtype is dtype else e.bitcast(x, dtype=dtype)


# ---------------------------------------------------------------- whatever has no twist
def _as_in_the_table() -> dict[str, Callable[..., Value]]:
    """Operators that are rows of the table of scalar operations, and not converted above."""
    table: dict[str, Callable[..., Value]] = {}
    for name, row in by_operator().items():
        names = set() if isinstance(row.onnx, Absent) else {
            row.onnx} if isinstance(row.onnx, str) else set(row.onnx.values())
        function = operator_named(name)
        kept = function if row.result in ("bool", "bits") or row.written else _keeps_type(function)
        table |= {other: kept for other in names if not has_converter(other)}
    return table


converts_each(_as_in_the_table())
