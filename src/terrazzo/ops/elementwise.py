"""Elementwise operators: arithmetic, elementary functions, comparison, logic, bits, casts."""

# Gradient rules name operators that are defined further down.
# mypy: disable-error-code="has-type"

from __future__ import annotations

import math
from typing import Any

import numpy as np

from terrazzo.base.scalar import Call
from terrazzo.base.scalar import cast as cast_scalar
from terrazzo.base.shapes import broadcast_shapes
from terrazzo.dtypes import as_dtype
from terrazzo.errors import DTypeError, user_location
from terrazzo.expr.ir import Tensor, compute
from terrazzo.graph.ir import Node, Operator, TensorType, Value
from terrazzo.loop.interpret import convert
from terrazzo.ops.define import broadcast_load, elementwise, operator, primitive

# A gradient rule gets the node and the gradient of its result and answers with one gradient an
# input (None: no gradient). Broadcasting is undone by the caller.


def _unary(name: str, rule: Any, doc: str, *, scalar_op: str | None = None,
           result: str = "float") -> Operator:
    """A unary operator; `rule(x, y, g)` gives the gradient from input, result and gradient."""
    def grad(node: Node, g: Value) -> list[Value | None]:
        return [rule(node.inputs[0], node.outputs[0], g)]

    return elementwise(name, scalar_op, result=result, grad=grad if rule else None, doc=doc,
                       differentiable=rule is not None)


def _binary(name: str, rule: Any, doc: str, *, scalar_op: str | None = None,
            result: str = "promote") -> Operator:
    """A binary operator; `rule(x, y, z, g)` gives both gradients (z is the result)."""
    def grad(node: Node, g: Value) -> list[Value | None]:
        return list(rule(node.inputs[0], node.inputs[1], node.outputs[0], g))

    return elementwise(name, scalar_op, arity=2, result=result, grad=grad if rule else None,
                       doc=doc, differentiable=rule is not None)


# ---------------------------------------------------------------- arithmetic
add = _binary("add", lambda x, y, z, g: (g, g), "x + y")
subtract = _binary("subtract", lambda x, y, z, g: (g, -g), "x - y", scalar_op="sub")
multiply = _binary("multiply", lambda x, y, z, g: (g * y, g * x), "x * y", scalar_op="mul")
divide = _binary("divide", lambda x, y, z, g: (g / y, -g * z / y), "x / y; integers give floats",
                 scalar_op="div", result="float")
floor_divide = _binary("floor_divide", None, "x // y, rounded down", scalar_op="floordiv")
remainder = _binary("remainder", lambda x, y, z, g: (g, -g * floor(x / y)),
                    "x % y with the sign of y", scalar_op="mod")
fmod = _binary("fmod", lambda x, y, z, g: (g, -g * trunc(x / y)), "x % y with the sign of x")
_half = 0.5


def _split_ties(x: Value, y: Value, z: Value, g: Value) -> tuple[Value, Value]:
    share = where(equal(x, y), _half * g, g)
    return where(equal(x, z), share, 0), where(equal(y, z), share, 0)


maximum = _binary("maximum", _split_ties, "the larger; nan wins", scalar_op="max")
minimum = _binary("minimum", _split_ties, "the smaller; nan wins", scalar_op="min")


def _power_grad(x: Value, y: Value, z: Value, g: Value) -> tuple[Value, Value]:
    dx = g * y * where(equal(y, 0), 0, power(x, y - 1))
    dy = g * where(equal(x, 0), 0, z * log(where(equal(x, 0), 1, x)))
    return dx, dy


power = _binary("power", _power_grad, "x ** y", scalar_op="pow")
atan2 = _binary("atan2", lambda x, y, z, g: (g * y / (x * x + y * y), -g * x / (x * x + y * y)),
                "the angle of the point (y, x)", result="float")


def _hypot_grad(x: Value, y: Value, z: Value, g: Value) -> tuple[Value, Value]:
    length = where(equal(z, 0), 1, z)  # at the origin every slope between -1 and 1 is one; take 0
    return g * x / length, g * y / length


hypot = _binary("hypot", _hypot_grad, "sqrt(x*x + y*y)", result="float")
copysign = _binary("copysign", lambda x, y, z, g: (g * where(
    equal(signbit(x), signbit(y)), 1.0, -1.0), None), "x with the sign of y", result="float")

negative = _unary("negative", lambda x, y, g: -g, "-x", scalar_op="neg", result="promote")
absolute = _unary("absolute", lambda x, y, g: g * sign(x), "|x|", scalar_op="abs",
                  result="promote")
sign = _unary("sign", lambda x, y, g: 0.0 * g, "-1, 0 or 1", result="promote")
sqrt = _unary("sqrt", lambda x, y, g: 0.5 * g / y, "square root")
rsqrt = _unary("rsqrt", lambda x, y, g: -0.5 * g * y / x, "1 / sqrt(x)")
cbrt = _unary("cbrt", lambda x, y, g: g / (3.0 * y * y), "cube root")
floor = _unary("floor", lambda x, y, g: 0.0 * g, "rounded down")
ceil = _unary("ceil", lambda x, y, g: 0.0 * g, "rounded up")
trunc = _unary("trunc", lambda x, y, g: 0.0 * g, "rounded to zero")
round = _unary("round", lambda x, y, g: 0.0 * g, "rounded to the nearest, halves to even")

# ---------------------------------------------------------------- elementary functions
exp = _unary("exp", lambda x, y, g: g * y, "e ** x")
exp2 = _unary("exp2", lambda x, y, g: g * y * math.log(2), "2 ** x")
expm1 = _unary("expm1", lambda x, y, g: g * (y + 1), "e ** x - 1, accurate near 0")
log = _unary("log", lambda x, y, g: g / x, "natural logarithm")
log2 = _unary("log2", lambda x, y, g: g / (x * math.log(2)), "logarithm of base 2")
log10 = _unary("log10", lambda x, y, g: g / (x * math.log(10)), "logarithm of base 10")
log1p = _unary("log1p", lambda x, y, g: g / (1 + x), "log(1 + x), accurate near 0")
sin = _unary("sin", lambda x, y, g: g * cos(x), "sine")
cos = _unary("cos", lambda x, y, g: -g * sin(x), "cosine")
tan = _unary("tan", lambda x, y, g: g * (1 + y * y), "tangent")
asin = _unary("asin", lambda x, y, g: g * rsqrt(1 - x * x), "inverse sine")
acos = _unary("acos", lambda x, y, g: -g * rsqrt(1 - x * x), "inverse cosine")
atan = _unary("atan", lambda x, y, g: g / (1 + x * x), "inverse tangent")
sinh = _unary("sinh", lambda x, y, g: g * cosh(x), "hyperbolic sine")
cosh = _unary("cosh", lambda x, y, g: g * sinh(x), "hyperbolic cosine")
tanh = _unary("tanh", lambda x, y, g: g * (1 - y * y), "hyperbolic tangent")
asinh = _unary("asinh", lambda x, y, g: g * rsqrt(x * x + 1), "inverse hyperbolic sine")
acosh = _unary("acosh", lambda x, y, g: g * rsqrt(x * x - 1), "inverse hyperbolic cosine")
atanh = _unary("atanh", lambda x, y, g: g / (1 - x * x), "inverse hyperbolic tangent")
_TWO_OVER_ROOT_PI = 2 / math.sqrt(math.pi)
erf = _unary("erf", lambda x, y, g: g * (_TWO_OVER_ROOT_PI * exp(-x * x)), "error function")
erfc = _unary("erfc", lambda x, y, g: -g * (_TWO_OVER_ROOT_PI * exp(-x * x)), "1 - erf(x)")
erfinv = _unary("erfinv", lambda x, y, g: g * (exp(y * y) / _TWO_OVER_ROOT_PI), "inverse of erf")
lgamma = _unary("lgamma", lambda x, y, g: g * digamma(x), "log of |gamma(x)|")
digamma = _unary("digamma", None, "derivative of lgamma")
sigmoid = _unary("sigmoid", lambda x, y, g: g * y * (1 - y), "1 / (1 + exp(-x))")

# ---------------------------------------------------------------- comparison, logic, bits
equal = _binary("equal", None, "x == y", scalar_op="eq", result="bool")
not_equal = _binary("not_equal", None, "x != y", scalar_op="ne", result="bool")
less = _binary("less", None, "x < y", scalar_op="lt", result="bool")
less_equal = _binary("less_equal", None, "x <= y", scalar_op="le", result="bool")
greater = _binary("greater", None, "x > y", scalar_op="gt", result="bool")
greater_equal = _binary("greater_equal", None, "x >= y", scalar_op="ge", result="bool")
isnan = _unary("isnan", None, "whether x is nan", result="bool")
isinf = _unary("isinf", None, "whether x is infinite", result="bool")
isfinite = _unary("isfinite", None, "whether x is neither nan nor infinite", result="bool")
bitwise_and = _binary("bitwise_and", None, "x & y", scalar_op="and", result="bits")
bitwise_or = _binary("bitwise_or", None, "x | y", scalar_op="or", result="bits")
bitwise_xor = _binary("bitwise_xor", None, "x ^ y", scalar_op="xor", result="bits")
bitwise_invert = _unary("bitwise_invert", None, "~x", scalar_op="not", result="bits")
bitwise_left_shift = _binary("bitwise_left_shift", None, "x << y", scalar_op="shl", result="bits")
bitwise_right_shift = _binary("bitwise_right_shift", None, "x >> y", scalar_op="shr",
                              result="bits")


@operator(family="elementwise", differentiable=False, unify=True)
def logical_and(x: Any, y: Any) -> Any:
    """x and y, as truth values"""
    return bitwise_and(not_equal(x, 0), not_equal(y, 0))


@operator(family="elementwise", differentiable=False, unify=True)
def logical_or(x: Any, y: Any) -> Any:
    """x or y, as truth values"""
    return bitwise_or(not_equal(x, 0), not_equal(y, 0))


@operator(family="elementwise", differentiable=False, unify=True)
def logical_xor(x: Any, y: Any) -> Any:
    """either x or y, as truth values"""
    return bitwise_xor(not_equal(x, 0), not_equal(y, 0))


@operator(family="elementwise", differentiable=False)
def logical_not(x: Any) -> Any:
    """not x, as a truth value"""
    return equal(x, 0)


# ---------------------------------------------------------------- choosing and converting
def _where_type(c: TensorType, x: TensorType, y: TensorType) -> TensorType:
    from terrazzo.dtypes import promote

    return TensorType(broadcast_shapes(c.shape, x.shape, y.shape), promote(x.dtype, y.dtype))


def _where_numpy(c: np.ndarray, x: np.ndarray, y: np.ndarray, out: TensorType) -> np.ndarray:
    return np.where(c.astype(bool), convert(x, out.dtype), convert(y, out.dtype))


def _where_grad(node: Node, g: Value) -> list[Value | None]:
    c = node.inputs[0]
    return [None, where(c, g, 0), where(c, 0, g)]


@primitive(family="elementwise", infer=_where_type, reference=_where_numpy, grad=_where_grad,
           unify=True)
def where(condition: Any, x: Any, y: Any, *, out: TensorType) -> Tensor:
    """x where the condition holds, else y"""
    def element(*i: Any) -> Any:
        test = broadcast_load(condition, i)
        if not test.dtype.is_bool:
            from terrazzo.base.scalar import call

            test = call("ne", test, 0)
        return Call(out.dtype, "where", (test, cast_scalar(broadcast_load(x, i), out.dtype),
                                         cast_scalar(broadcast_load(y, i), out.dtype)))

    return compute(out.shape, element, origin="where")


def _astype_type(x: TensorType, *, dtype: Any) -> TensorType:
    return TensorType(x.shape, as_dtype(dtype))


def _astype_numpy(x: np.ndarray, out: TensorType, *, dtype: Any) -> np.ndarray:
    return convert(x, out.dtype)


@primitive(family="elementwise", infer=_astype_type, reference=_astype_numpy,
           grad=lambda node, g: [astype(g, node.inputs[0].dtype)])
def astype(x: Any, *, dtype: Any, out: TensorType) -> Tensor:
    """x converted to another type"""
    return compute(out.shape, lambda *i: cast_scalar(x[i], out.dtype), origin="astype")


def _bitcast_type(x: TensorType, *, dtype: Any) -> TensorType:
    target = as_dtype(dtype)
    if target.bits != x.dtype.bits:
        raise DTypeError(f"bitcast reads {x.dtype.bits} bits of {x.dtype.name} as {target.bits} of "
                         f"{target.name}", where=user_location(),
                         hint="both types must have the same width; astype converts values")
    return TensorType(x.shape, target)


def _bitcast_numpy(x: np.ndarray, out: TensorType, *, dtype: Any) -> np.ndarray:
    return np.ascontiguousarray(x).view(out.dtype.np).reshape(x.shape)


@primitive(family="elementwise", infer=_bitcast_type, reference=_bitcast_numpy,
           differentiable=False)
def bitcast(x: Any, *, dtype: Any, out: TensorType) -> Tensor:
    """the bits of x read as another type of the same width"""
    return compute(out.shape, lambda *i: Call(out.dtype, "bitcast", (x[i],)), origin="bitcast")


@operator(family="elementwise", differentiable=False)
def signbit(x: Any) -> Any:
    """whether the sign of x is negative, also for -0.0"""
    return less(copysign(1.0, x), 0.0)
