"""Pointwise operators: tables of names, and a few with a parameter of their own.

Tensors meet in the type that torch's rules of promotion say, before the operator sees them.
"""

from __future__ import annotations

from typing import Any

import terrazzo.ops.activation as activation
import terrazzo.ops.elementwise as e
from terrazzo.base.scalar_table import by_operator
from terrazzo.dtypes import bool_
from terrazzo.graph.ir import TensorType, Value, operator_named
from terrazzo.torch.aten.registry import CONVERTERS, Converter, aten, converts, unsupported

# How torch finds the type of a result: `ELEMENTWISE_TYPE_PROMOTION_KIND` of torch._prims_common.
DEFAULT, TO_FLOAT, COMPARES = "DEFAULT", "INT_TO_FLOAT", "ALWAYS_BOOL"

# ATen's name (all overloads that take a tensor or number in each place) -> ours, beside the names
# that the table of scalar operations has. Of the first few torch leaves integers what they are.
_PLAIN = {
    "floor": "floor", "ceil": "ceil", "trunc": "trunc", "hypot": "hypot",
    "relu": "relu", "silu": "silu", "mish": "mish", "relu6": "relu6", "hardswish": "hardswish",
}

CONVERTERS.update({f"aten.{name}": Converter(operator_named(ours), promotes=DEFAULT)
                   for name, ours in _PLAIN.items()})


def _scaled(y: Any, alpha: Any) -> Any:
    if isinstance(alpha, Value):  # a number that is known when the code runs
        return y * alpha
    return y if alpha == 1 and not isinstance(alpha, bool) else y * alpha


@aten("add", promotes=DEFAULT)
def add(x: Any, y: Any, alpha: Any = 1) -> Any:
    if isinstance(x, Value) and x.dtype is bool_:
        return e.logical_or(x, y)
    return e.add(x, _scaled(y, alpha))


@aten("sub", promotes=DEFAULT)
def sub(x: Any, y: Any, alpha: Any = 1) -> Any:
    return e.subtract(x, _scaled(y, alpha))


@aten("rsub", promotes=DEFAULT)
def rsub(x: Any, y: Any, alpha: Any = 1) -> Any:
    return e.subtract(y, _scaled(x, alpha))


@aten("mul", promotes=DEFAULT)
def mul(x: Any, y: Any) -> Any:
    if isinstance(x, Value) and x.dtype is bool_:
        return e.logical_and(x, y)
    return e.multiply(x, y)


@aten("div.Tensor", "div.Scalar", "true_divide", promotes=TO_FLOAT)
def div(x: Any, y: Any) -> Any:
    return e.divide(x, y)


@aten("div.Tensor_mode", "div.Scalar_mode", typed=True)
def div_mode(x: Any, y: Any, rounding_mode: str | None = None, *, out: TensorType) -> Any:
    # Numbers keep their digits beside half types, as in eager mode.
    kind = out.dtype.compute if out.dtype.is_float else out.dtype
    x, y = (e.astype(v, dtype=kind) if isinstance(v, Value) else v for v in (x, y))
    if rounding_mode == "floor":
        return e.floor_divide(x, y)
    if rounding_mode is None:
        return e.divide(x, y)
    if out.dtype.is_float:
        return e.trunc(e.divide(x, y))
    remainder = e.fmod(x, y)
    return e.floor_divide(e.subtract(x, remainder), y)


@aten("pow", promotes=DEFAULT)
def pow(x: Any, y: Any) -> Any:
    if isinstance(y, (int, float)) and not isinstance(y, bool):
        if y == 2:
            return e.multiply(x, x)
        if y == 0.5:
            return e.sqrt(x)
        if y == 1:
            return x
        if y == -0.5:
            return e.rsqrt(x)
        if y == 3:
            return e.multiply(e.multiply(x, x), x)
        if isinstance(x, Value) and x.dtype.is_integer and y < 0:
            unsupported("a negative power of integers")
    return e.power(x, y)


@aten("remainder", promotes=DEFAULT)
def remainder(x: Any, y: Any) -> Any:
    return e.remainder(x, _divisor(x, y))


@aten("fmod", promotes=DEFAULT)
def fmod(x: Any, y: Any) -> Any:
    return e.fmod(x, _divisor(x, y))


def _divisor(x: Any, y: Any) -> Any:
    if isinstance(y, int) and y == 0 and isinstance(x, Value) and not x.dtype.is_float:
        unsupported("a remainder of integers by zero, which torch refuses")
    return y


@aten("sign", "sgn", promotes=DEFAULT)
def sign(x: Any) -> Any:
    # Of nan it is 0, as neither comparison holds.
    return e.where(e.isnan(x), 0, e.sign(x)) if x.dtype.is_float else e.sign(x)


@aten("round.default", promotes=DEFAULT)
def round(x: Any) -> Any:
    return e.round(x) if x.dtype.is_float else x


@aten("where.self")
def where(condition: Any, x: Any, y: Any) -> Any:
    return e.where(condition, x, y)


CONVERTERS["aten.where.self"] = Converter(where, promotes="WHERE")


@aten("clamp.default", "clamp.Tensor", promotes=DEFAULT)
def clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    # A nan of the tensor stays, as maximum and minimum have it.
    if min is not None:
        x = e.maximum(x, min)
    return x if max is None else e.minimum(x, max)


@aten("clamp_min", promotes=DEFAULT)
def clamp_min(x: Any, min: Any) -> Any:
    return e.maximum(x, min)


@aten("clamp_max", promotes=DEFAULT)
def clamp_max(x: Any, max: Any) -> Any:
    return e.minimum(x, max)


@aten("hardtanh", promotes=DEFAULT)
def hardtanh(x: Any, min_val: Any = -1, max_val: Any = 1) -> Any:
    return clamp(x, min_val, max_val)


@aten("gelu")
def gelu(x: Any, approximate: str = "none") -> Any:
    return activation.gelu(x, approximate=approximate)


@aten("leaky_relu")
def leaky_relu(x: Any, negative_slope: float = 0.01) -> Any:
    return activation.leaky_relu(x, negative_slope=negative_slope)


@aten("elu")
def elu(x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    if scale != 1 or input_scale != 1:
        negative = e.expm1(x * input_scale) * (alpha * scale)
        return e.where(e.greater(x, 0), x * scale, negative)
    return activation.elu(x, alpha=alpha)


@aten("softplus")
def softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    return activation.softplus(x, beta=beta, threshold=threshold)


@aten("_to_copy", typed=True)
def to_copy(x: Any, dtype: Any = None, *, out: TensorType) -> Any:
    return x if x.dtype is out.dtype else e.astype(x, dtype=out.dtype)


@converts("prims.convert_element_type.default", typed=True)
def convert_element_type(x: Any, dtype: Any, *, out: TensorType) -> Any:
    return x if x.dtype is out.dtype else e.astype(x, dtype=out.dtype)


@aten("clone", "alias", "detach", "lift_fresh", "lift_fresh_copy", "lift", "contiguous", "view_of")
def clone(x: Any) -> Any:
    return x


@aten("lerp.Scalar", "lerp.Tensor", promotes=DEFAULT)
def lerp(x: Any, y: Any, weight: Any) -> Any:
    return e.add(x, e.multiply(weight, e.subtract(y, x)))


@aten("addcmul", promotes=DEFAULT)
def addcmul(x: Any, y: Any, z: Any, value: Any = 1) -> Any:
    return e.add(x, _scaled(e.multiply(y, z), value))


@aten("addcdiv", promotes=DEFAULT)
def addcdiv(x: Any, y: Any, z: Any, value: Any = 1) -> Any:
    return e.add(x, _scaled(e.divide(y, z), value))


@aten("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(x: Any, mask: Any, value: Any) -> Any:
    if isinstance(value, Value):
        value = e.astype(value, dtype=x.dtype)
    return e.where(mask, value, x)


@aten("fmax", promotes=DEFAULT)
def fmax(x: Any, y: Any) -> Any:
    return _numbers_first(e.maximum, x, y)


@aten("fmin", promotes=DEFAULT)
def fmin(x: Any, y: Any) -> Any:
    return _numbers_first(e.minimum, x, y)


def _numbers_first(function: Any, x: Any, y: Any) -> Any:
    """Of two of which one is nan, the other."""
    both = function(x, y)
    if not both.dtype.is_float:
        return both
    return e.where(e.isnan(x), y, e.where(e.isnan(y), x, both))


@aten("round.decimals")
def round_to(x: Any, decimals: int = 0) -> Any:
    if not x.dtype.is_float:
        return x
    scale = 10.0 ** abs(decimals)
    if decimals < 0:
        return e.round(x / scale) * scale
    return e.round(x * scale) / scale if decimals else e.round(x)


_BITS = {"float32": ("int32", 23, 255), "float64": ("int64", 52, 2047)}


@aten("nextafter", promotes=DEFAULT)
def nextafter(x: Any, y: Any) -> Any:
    """Floats of one sign lie in the order of their bits."""
    if x.dtype.name == "bfloat16":  # the upper half of a float32
        y = e.astype(y, dtype="float32") if isinstance(y, Value) else y
        return _neighbour(e.astype(x, dtype="float32"), y, 1 << 16)
    return _neighbour(x, y, 1)


def _neighbour(x: Any, y: Any, step: int) -> Any:
    """The next of x in the direction of y, where neighbours are so many bits apart."""
    if x.dtype.name not in _BITS:
        unsupported(f"nextafter of {x.dtype.name}")
    whole = _BITS[x.dtype.name][0]
    y = e.add(y, e.multiply(x, 0)) if not isinstance(y, Value) else y
    bits = e.bitcast(x, dtype=whole)
    away = e.equal(e.less(x, y), e.greater(x, 0))
    moved = e.bitcast(e.where(away, bits + step, bits - step), dtype=x.dtype)
    tiny = e.bitcast(e.add(e.multiply(bits, 0), step), dtype=x.dtype)
    from_zero = e.where(e.less(x, y), tiny, e.negative(tiny))
    there = e.where(e.equal(x, 0), from_zero, moved)
    there = e.where(e.equal(x, y), y, there)
    return e.where(e.logical_or(e.isnan(x), e.isnan(y)), e.add(x, y), there)


@aten("frexp.Tensor")
def frexp(x: Any) -> Any:
    """The mantissa from a half to one, and the exponent, taken from the bits."""
    if x.dtype.name not in _BITS:  # a half type: float32 holds it, and half types its mantissa
        mantissa, exponent = frexp(e.astype(x, dtype="float32"))
        return e.astype(mantissa, dtype=x.dtype), exponent
    whole, width, most = _BITS[x.dtype.name]
    lift = 2.0 ** (width + 1)
    small = e.less(e.absolute(x), 2.0 ** (2 - most // 2))
    scaled = e.where(small, x * lift, x)  # so that it has a leading one
    bits = e.bitcast(scaled, dtype=whole)
    field = e.bitwise_and(e.bitwise_right_shift(bits, width), most)
    kept = e.bitwise_and(bits, ~(most << width) if whole == "int64" else
                         ~(most << width) & 0x7FFFFFFF | -(1 << 31))
    mantissa = e.bitcast(e.bitwise_or(kept, (most // 2 - 1) << width), dtype=x.dtype)
    exponent = field - (most // 2 - 1) - e.where(small, width + 1, 0)
    plain = e.logical_or(e.equal(x, 0), e.logical_not(e.isfinite(x)))
    return (e.where(plain, x, mantissa),
            e.astype(e.where(plain, 0, exponent), dtype="int32"))


# ---------------------------------------------------------------- whatever needs no function
def _of_the_table() -> dict[str, Converter]:
    """Rows of the table of scalar operations that torch has a name for, and none above."""
    packets = {".".join(name.split(".")[:2]) for name in CONVERTERS}
    kinds = {"bool": COMPARES, "float": TO_FLOAT}
    return {f"aten.{row.torch}": Converter(operator_named(name), promotes=kinds.get(
                row.result, DEFAULT))
            for name, row in by_operator().items()
            if isinstance(row.torch, str) and f"aten.{row.torch}" not in packets}


CONVERTERS.update(_of_the_table())
