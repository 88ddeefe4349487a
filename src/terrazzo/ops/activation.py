"""Activation functions and other elementwise formulas, written to hold in both tails.

Formulas with several steps are worked out in float32 for half types (`worked_out_wide`), so a
result is rounded once. Gradients come from the bodies; a rule is given where a body has a corner
(relu at 0) or where a tail would give 0 * inf.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from terrazzo.base.shapes import normalize_axis
from terrazzo.dtypes import promote
from terrazzo.errors import ArgumentError, ShapeError, user_location
from terrazzo.graph.ir import Node, Value
from terrazzo.index.guards import granted, multiple
from terrazzo.ops.define import operator
from terrazzo.ops.elementwise import (
    absolute,
    bitwise_and,
    bitwise_invert,
    equal,
    erf,
    exp,
    expm1,
    greater,
    isnan,
    less,
    less_equal,
    log,
    log1p,
    maximum,
    minimum,
    sigmoid,
    sign,
    sin,
    tanh,
    where,
)
from terrazzo.ops.joining import split
from terrazzo.ops.reduce import float_type, in_shape, in_type


def worked_out_wide(body: Callable[..., Any]) -> Callable[..., Any]:
    """Give a formula its tensors in the joint type's arithmetic type, and round what it answers."""

    @functools.wraps(body)
    def in_wide(*tensors: Any, **attrs: Any) -> Any:
        dtype = float_type(promote(*(t.dtype for t in tensors if t is not None)))
        values = (None if t is None else in_type(t, dtype.compute) for t in tensors)
        return in_type(body(*values, **attrs), dtype)

    return in_wide


def _activation(body: Callable[..., Any] | None = None, *, grad: Callable[..., Any] | None = None,
                unify: bool = False) -> Any:
    """Define a formula that is worked out wide."""
    def make(formula: Callable[..., Any]) -> Any:
        return operator(worked_out_wide(formula), family="activation", grad=grad, unify=unify)

    return make if body is None else make(body)


def _unary_rule(rule: Callable[..., Any]) -> Callable[..., list[Value | None]]:
    """A gradient rule from a function of the input, the gradient and the attributes."""
    return lambda node, g: [rule(node.inputs[0], g, **node.attrs)]


# ---------------------------------------------------------------- cut and bent lines
@operator(family="activation", grad=_unary_rule(lambda x, g: where(greater(x, 0), g, 0)))
def relu(x: Any) -> Any:
    """x, or 0 if that is larger"""
    return maximum(x, 0)


def _inside(x: Any, g: Any, *, min: float, max: float) -> Any:
    return where(bitwise_and(greater(x, min), less(x, max)), g, 0)


@operator(family="activation", grad=_unary_rule(_inside))
def hardtanh(x: Any, *, min: float = -1.0, max: float = 1.0) -> Any:
    """x cut off at min and max"""
    return minimum(maximum(x, min), max)


@operator(family="activation")
def relu6(x: Any) -> Any:
    """x cut off at 0 and 6"""
    return hardtanh(x, min=0, max=6)


def _clip_grad(node: Node, g: Value) -> list[Value | None]:
    """Unlike hardtanh, an element on the limit counts as its own."""
    x, low, high = node.inputs
    assert x is not None
    dx, dlow, dhigh = g, None, None
    if low is not None:
        below = less(x, low)
        dx, dlow = where(below, 0, dx), where(below, g, 0)
    if high is not None:
        above = greater(x if low is None else maximum(x, low), high)
        dx, dhigh = where(above, 0, dx), where(above, g, 0)
        dlow = None if dlow is None else where(above, 0, dlow)
    return [dx, dlow, dhigh]


@operator(family="activation", grad=_clip_grad, unify=True)
def clip(x: Any, min: Any = None, max: Any = None) -> Any:
    """x, but at least min and at most max, which are numbers, tensors or None"""
    low = x if min is None else maximum(x, min)
    return low if max is None else minimum(low, max)


@_activation
def leaky_relu(x: Any, *, negative_slope: float = 0.01) -> Any:
    """x, or a fraction of it below 0"""
    return where(greater(x, 0), x, negative_slope * x)


@_activation
def prelu(x: Any, weight: Any) -> Any:
    """x, or below 0 x times weight: one number, one a channel (axis 1), or any that broadcasts"""
    if weight.ndim == 1 and weight.shape[0] != 1 and x.ndim > 1:
        if not granted("==", weight.shape[0], x.shape[1]):
            raise ShapeError(f"prelu of {x.type} needs one weight for each of its {x.shape[1]} "
                             f"channels, got {weight.shape[0]}", where=user_location())
        weight = in_shape(weight, (weight.shape[0], *(1,) * (x.ndim - 2)))
    return where(greater(x, 0), x, weight * x)


@_activation
def hardsigmoid(x: Any, *, alpha: float = 1 / 6, beta: float = 0.5) -> Any:
    """alpha * x + beta cut off at 0 and 1"""
    return hardtanh(alpha * x + beta, min=0.0, max=1.0)


@_activation
def hardswish(x: Any) -> Any:
    """x * hardsigmoid(x)"""
    return x * hardsigmoid(x)


@operator(family="activation")
def threshold(x: Any, *, threshold: float, value: float) -> Any:
    """x above a threshold, else a value"""
    return where(less_equal(x, threshold), value, x)


@operator(family="activation")
def hardshrink(x: Any, *, lambd: float = 0.5) -> Any:
    """x, but 0 within lambd of 0"""
    return where(less_equal(absolute(x), lambd), 0, x)


@_activation
def softshrink(x: Any, *, lambd: float = 0.5) -> Any:
    """x moved towards 0 by lambd, and 0 within lambd of it"""
    return where(less_equal(absolute(x), lambd), 0, x - lambd * sign(x))


# ---------------------------------------------------------------- exponential tails
def _not_above_zero(x: Value) -> Value:
    """x, or 0 if that is smaller: exponentials of it do not overflow. Its slope at 0 is 1."""
    return where(greater(x, 0), 0, x)


@_activation
def elu(x: Any, *, alpha: float = 1.0) -> Any:
    """x, or below 0 alpha * (exp(x) - 1)"""
    return where(greater(x, 0), x, alpha * expm1(_not_above_zero(x)))


@_activation
def celu(x: Any, *, alpha: float = 1.0) -> Any:
    """x, or below 0 alpha * (exp(x / alpha) - 1): smooth at 0 for every alpha"""
    return where(greater(x, 0), x, alpha * expm1(_not_above_zero(x) / alpha))


@_activation
def selu(x: Any) -> Any:
    """elu scaled so that layers keep mean 0 and variance 1 (self-normalising networks)"""
    return 1.0507009873554805 * elu(x, alpha=1.6732632423543772)


def _softplus_slope(x: Any, g: Any, *, beta: float, threshold: float) -> Any:
    return g * where(greater(beta * x, threshold), 1, sigmoid(beta * x))


@_activation(grad=_unary_rule(_softplus_slope))
def softplus(x: Any, *, beta: float = 1.0, threshold: float = 20.0) -> Any:
    """log(1 + exp(beta * x)) / beta, and x where beta * x is above the threshold"""
    scaled = beta * x
    smooth = (maximum(scaled, 0) + log1p(exp(-absolute(scaled)))) / beta
    return where(greater(scaled, threshold), x, smooth)


@_activation
def logsigmoid(x: Any) -> Any:
    """log(sigmoid(x)), accurate where sigmoid would vanish"""
    return -softplus(-x, threshold=math.inf)


@_activation
def silu(x: Any) -> Any:
    """x * sigmoid(x), also called swish"""
    return x * sigmoid(x)


@_activation
def quick_gelu(x: Any) -> Any:
    """x * sigmoid(1.702 * x)"""
    return x * sigmoid(1.702 * x)


@_activation
def mish(x: Any) -> Any:
    """x * tanh(softplus(x))"""
    return x * tanh(softplus(x))


@_activation
def gelu(x: Any, *, approximate: str = "none") -> Any:
    """x times the probability that a normal number is below x; "tanh" is the usual approximation"""
    if approximate == "none":
        # As every framework computes it: the negative tail is accurate absolutely, not relatively.
        return 0.5 * x * (1 + erf(math.sqrt(0.5) * x))
    if approximate == "tanh":
        # (1 + tanh(u)) / 2 is the sigmoid of 2u, without cancelling.
        return x * sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x)))
    raise ArgumentError(f"gelu has no approximation {approximate!r}", where=user_location(),
                        hint='use "none" or "tanh"')


@_activation
def softsign(x: Any) -> Any:
    """x / (1 + |x|)"""
    return x / (1 + absolute(x))


@_activation
def tanhshrink(x: Any) -> Any:
    """x - tanh(x)"""
    return x - tanh(x)


# ---------------------------------------------------------------- gates
def _halves(x: Value, axis: int, name: str) -> tuple[Value, Value]:
    axis = normalize_axis(axis, x.ndim)
    if not multiple(x.shape[axis], 2):
        raise ShapeError(f"{name} cannot cut axis {axis} of {x.type} into halves",
                         where=user_location(), hint="its size must be even")
    return split(x, indices_or_sections=2, axis=axis)


@operator(family="activation")
def glu(x: Any, *, axis: int = -1) -> Any:
    """the first half along an axis, times the sigmoid of the second"""
    first, second = _halves(x, axis, "glu")
    return first * sigmoid(second)


@operator(family="activation")
def swiglu(x: Any, *, axis: int = -1) -> Any:
    """the silu of the first half along an axis, times the second"""
    first, second = _halves(x, axis, "swiglu")
    return silu(first) * second


# ---------------------------------------------------------------- other formulas
def _logaddexp_grad(node: Node, g: Value) -> list[Value | None]:
    difference = _difference(*node.inputs)
    return [g * sigmoid(difference), g * sigmoid(-difference)]


def _difference(x: Any, y: Any) -> Any:
    """x - y, and 0 for equal infinities."""
    return where(equal(x, y), 0, x - y)


@_activation(grad=_logaddexp_grad, unify=True)
def logaddexp(x: Any, y: Any) -> Any:
    """log(exp(x) + exp(y)), without overflow"""
    return maximum(x, y) + log1p(exp(-absolute(_difference(x, y))))


@_activation
def sinc(x: Any) -> Any:
    """sin(pi x) / (pi x), and 1 at 0"""
    is_zero = equal(x, 0)
    angle = math.pi * where(is_zero, 1, x)
    return where(is_zero, 1, sin(angle) / angle)


@operator(family="elementwise")
def nan_to_num(x: Any, *, nan: float = 0.0, posinf: float | None = None,
               neginf: float | None = None) -> Any:
    """x with numbers for nan and the infinities; those are the largest of the type unless given"""
    if not x.dtype.is_float:
        return x
    x = where(isnan(x), nan, x)
    x = where(equal(x, math.inf), x.dtype.max if posinf is None else posinf, x)
    return where(equal(x, -math.inf), x.dtype.min if neginf is None else neginf, x)


@_activation(unify=True)
def lerp(x: Any, y: Any, weight: Any) -> Any:
    """x + weight * (y - x), exact at both ends"""
    way = y - x
    return where(less(weight, 0.5), x + weight * way, y - way * (1 - weight))


@operator(family="elementwise", unify=True)
def addcmul(x: Any, y: Any, z: Any, *, value: float = 1) -> Any:
    """x + value * y * z"""
    return x + (y * z if value == 1 else value * y * z)


def _xlogy_grad(node: Node, g: Value) -> list[Value | None]:
    x, y = node.inputs
    assert x is not None and y is not None
    nothing = bitwise_and(equal(x, 0), less_equal(y, 0))
    dx = where(nothing, 0, g * log(where(nothing, 1, y)))
    return [dx, where(equal(x, 0), 0, g * x / where(equal(x, 0), 1, y))]


@_activation(grad=_xlogy_grad, unify=True)
def xlogy(x: Any, y: Any) -> Any:
    """x * log(y), and 0 where x is 0, unless y is nan"""
    nothing = bitwise_and(equal(x, 0), bitwise_invert(isnan(y)))
    return where(nothing, 0, x * log(where(nothing, 1, y)))
