"""Activation functions, and softmax with its kin in the old and the new semantics.

Formulas that ours do not have are worked out in float32 for half types, and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from terrazzo.base.shapes import normalize_axis, num_elements
from terrazzo.dtypes import int64
from terrazzo.frontends.onnx.registry import Call, converts, converts_each
from terrazzo.graph.ir import Value
from terrazzo.ops import activation as a
from terrazzo.ops import elementwise as e
from terrazzo.ops.creation import arange
from terrazzo.ops.norm import log_softmax, softmax
from terrazzo.ops.reduce import argmax, in_shape, in_type, widened

converts_each({"Relu": a.relu, "HardSwish": a.hardswish, "Mish": a.mish, "Softsign": a.softsign})


def _with_attributes(function: Callable[..., Value], **attributes: tuple[str, Any]
                     ) -> Callable[[Call], Value]:
    """A converter that hands on attributes: our keyword = (ONNX's name, its default)."""
    return lambda call: function(call.value(0), **{
        ours: call.attr(name, default) for ours, (name, default) in attributes.items()})


def _wide(formula: Callable[..., Value]) -> Callable[..., Value]:
    return lambda x, **attributes: in_type(formula(widened(x), **attributes), x.dtype)


def _selu(x: Value, alpha: float, gamma: float) -> Value:
    return gamma * a.elu(x, alpha=alpha)


def _swish(x: Value, alpha: float) -> Value:
    return x * e.sigmoid(x if alpha == 1.0 else alpha * x)


def _thresholded(x: Value, alpha: float) -> Value:
    return e.where(e.greater(x, alpha), x, 0)


def _shrink(x: Value, lambd: float, bias: float) -> Value:
    return e.where(e.less(x, -lambd), x + bias, e.where(e.greater(x, lambd), x - bias, 0))


for _name, _converter in {
    "LeakyRelu": _with_attributes(a.leaky_relu, negative_slope=("alpha", 0.01)),
    "Elu": _with_attributes(a.elu, alpha=("alpha", 1.0)),
    "Celu": _with_attributes(a.celu, alpha=("alpha", 1.0)),
    "Selu": _with_attributes(_wide(_selu), alpha=("alpha", 1.6732631921768188),
                             gamma=("gamma", 1.0507010221481323)),
    "Gelu": _with_attributes(a.gelu, approximate=("approximate", "none")),
    "HardSigmoid": _with_attributes(a.hardsigmoid, alpha=("alpha", 0.2), beta=("beta", 0.5)),
    "Swish": _with_attributes(_wide(_swish), alpha=("alpha", 1.0)),
    "ThresholdedRelu": _with_attributes(_thresholded, alpha=("alpha", 1.0)),
    "Shrink": _with_attributes(_wide(_shrink), lambd=("lambd", 0.5), bias=("bias", 0.0)),
}.items():
    converts(_name)(_converter)


@converts("Softplus")
def softplus(call: Call) -> Value:
    return a.softplus(call.value(0), threshold=math.inf)


@converts("PRelu")
def prelu(call: Call) -> Value:
    x, slope = call.value(0), call.value(1)
    return e.where(e.less(x, 0), slope * x, x)


@converts("SwiGLU")
def swiglu(call: Call) -> Value:
    gate, value = widened(call.value(0)), widened(call.value(1))
    return in_type(_swish(gate, call.attr("alpha", 1.0)) * value, call.value(0).dtype)


# ---------------------------------------------------------------- softmax and its kin
def _hardmax(x: Value, *, axis: Any) -> Value:
    axes = axis if isinstance(axis, tuple) else (axis,)
    first = normalize_axis(axes[0], x.ndim)
    flat = in_shape(x, (*x.shape[:first], num_elements(x.shape[d] for d in axes),
                        *x.shape[first + len(axes):]))
    size = flat.shape[first]
    places = in_shape(arange(start=size, dtype=int64),
                      tuple(size if d == first else 1 for d in range(flat.ndim)))
    hit = e.equal(places, argmax(flat, axis=first, keepdims=True))
    return in_shape(in_type(hit, x.dtype), x.shape)


_NORMALISERS = {"Softmax": softmax, "LogSoftmax": log_softmax, "Hardmax": _hardmax}


@converts(*_NORMALISERS, until=13)
def over_trailing_axes(call: Call) -> Value:
    """Everything from the axis on counts as one row."""
    x = call.value(0)
    axis = call.attr("axis", 1)
    first = axis if axis == x.ndim else normalize_axis(axis, x.ndim)
    axes = tuple(range(first, x.ndim))
    return _NORMALISERS[call.node.op_type](x, axis=axes)


@converts(*_NORMALISERS, since=13)
def over_one_axis(call: Call) -> Value:
    return _NORMALISERS[call.node.op_type](call.value(0), axis=call.attr("axis", -1))
