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
    x, y = (e.astype(v, dtype=out.dtype) if isinstance(v, Value) else v for v in (x, y))
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


@aten("clone", "alias", "detach", "lift_fresh_copy", "contiguous", "view_of")
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
