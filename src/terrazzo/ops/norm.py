"""Normalisations: softmax and its kin, and layer, group, instance, batch and rms norms.

Statistics take two passes (the mean, then the mean of centred squares), which does not cancel
whatever the mean is. Half types are normalised in float32 and rounded once, at the end.
"""

from __future__ import annotations

import math
from typing import Any

from terrazzo.base.shapes import dims_text, normalize_axes, normalize_axis
from terrazzo.errors import RankError, ShapeError, user_location
from terrazzo.graph.ir import Node, Value
from terrazzo.index import Index
from terrazzo.index.guards import all_equal, multiple
from terrazzo.ops.define import operator
from terrazzo.ops.elementwise import equal, exp, log, rsqrt, where
from terrazzo.ops.reduce import (
    Axes,
    float_type,
    in_shape,
    in_type,
    row_max,
    sum_,
    wide_mean,
    widened,
)


# ---------------------------------------------------------------- softmax
def _softmax_grad(node: Node, g: Value) -> list[Value | None]:
    y, wide = widened(node.outputs[0]), widened(g)
    return [y * (wide - sum_(wide * y, axis=node.attrs["axis"], keepdims=True))]


@operator(family="norm", grad=_softmax_grad)
def softmax(x: Any, *, axis: Axes = -1) -> Any:
    """exp(x) scaled to a sum of 1 along an axis"""
    wide = widened(x)
    e = exp(wide - row_max(wide, axis))
    # The sum is at least 1, so its reciprocal is safe, and a product is far cheaper a row.
    scale = 1 / sum_(e, axis=axis, keepdims=True)
    return in_type(e * scale, float_type(x.dtype))


@operator(family="norm", grad=_softmax_grad)
def safe_softmax(x: Any, *, axis: Axes = -1) -> Any:
    """softmax that gives zeros, not nan, where everything along the axis is -inf"""
    wide = widened(x)
    top = row_max(wide, axis)
    e = exp(wide - where(equal(top, -math.inf), 0, top))
    total = sum_(e, axis=axis, keepdims=True)
    return in_type(e / where(equal(total, 0), 1, total), float_type(x.dtype))


def _log_softmax_grad(node: Node, g: Value) -> list[Value | None]:
    wide = widened(g)
    total = sum_(wide, axis=node.attrs["axis"], keepdims=True)
    return [wide - exp(widened(node.outputs[0])) * total]


@operator(family="norm", grad=_log_softmax_grad)
def log_softmax(x: Any, *, axis: Axes = -1) -> Any:
    """log(softmax(x)), accurate where softmax would vanish"""
    wide = widened(x)
    shifted = wide - row_max(wide, axis)
    total = log(sum_(exp(shifted), axis=axis, keepdims=True))
    return in_type(shifted - total, float_type(x.dtype))


# ---------------------------------------------------------------- over trailing axes
def _trailing_axes(name: str, x: Value, axis: Axes, *parameters: Value | None) -> tuple[int, ...]:
    """The axes to normalise over, which must be the last ones, as the parameters' shape is."""
    axes = normalize_axes(axis, x.ndim)
    if axes != tuple(range(x.ndim - len(axes), x.ndim)):
        raise ShapeError(f"{name} normalises the last axes of {x.type}, not axes {axes}",
                         where=user_location(), hint="move them to the end with permute_dims")
    over = x.shape[x.ndim - len(axes):]
    for parameter in parameters:
        if parameter is not None and not all_equal(parameter.shape, over):
            raise ShapeError(f"{name} over {dims_text(over)} got a weight or bias of shape "
                             f"{dims_text(parameter.shape)}", where=user_location(),
                             hint="both have the shape of the normalised axes")
    return axes


def _moments(x: Value, axes: Axes) -> tuple[Value, Value, Value]:
    """The mean, x less the mean, and the variance."""
    mean = wide_mean(x, axes)
    centred = x - mean
    return mean, centred, wide_mean(centred * centred, axes)


def _scaled(y: Value, weight: Value | None, bias: Value | None) -> Value:
    if weight is not None:
        y = y * in_type(weight, y.dtype)
    return y if bias is None else y + in_type(bias, y.dtype)


def _layer_norm_grad(node: Node, g: Value) -> list[Value | None]:
    x, weight, bias = node.inputs
    assert x is not None
    axes = normalize_axes(node.attrs["axis"], x.ndim)
    _, centred, variance = _moments(widened(x), axes)
    scale = rsqrt(variance + node.attrs["eps"])
    unit, wide = centred * scale, widened(g)
    inner = _scaled(wide, weight, None)
    dx = scale * (inner - wide_mean(inner, axes) - unit * wide_mean(inner * unit, axes))
    return [dx, None if weight is None else wide * unit, None if bias is None else wide]


@operator(family="norm", grad=_layer_norm_grad)
def layer_norm(x: Any, weight: Any = None, bias: Any = None, *, axis: Axes = -1,
               eps: float = 1e-5) -> Any:
    """x with mean 0 and variance 1 over its last axis or axes, then times weight plus bias"""
    axes = _trailing_axes("layer_norm", x, axis, weight, bias)
    _, centred, variance = _moments(widened(x), axes)
    return in_type(_scaled(centred * rsqrt(variance + eps), weight, bias), float_type(x.dtype))


def _rms_norm_grad(node: Node, g: Value) -> list[Value | None]:
    x, weight = node.inputs
    assert x is not None
    axes = normalize_axes(node.attrs["axis"], x.ndim)
    wide, wide_g = widened(x), widened(g)
    scale = rsqrt(wide_mean(wide * wide, axes) + node.attrs["eps"])
    unit, inner = wide * scale, _scaled(wide_g, weight, None)
    dx = scale * (inner - unit * wide_mean(inner * unit, axes))
    return [dx, None if weight is None else wide_g * unit]


@operator(family="norm", grad=_rms_norm_grad)
def rms_norm(x: Any, weight: Any = None, *, axis: Axes = -1, eps: float = 1e-6) -> Any:
    """x over its root mean square along its last axis or axes, then times weight"""
    axes = _trailing_axes("rms_norm", x, axis, weight)
    wide = widened(x)
    scale = rsqrt(wide_mean(wide * wide, axes) + eps)
    return in_type(_scaled(wide * scale, weight, None), float_type(x.dtype))


# ---------------------------------------------------------------- over channels
def _per_channel(parameter: Value | None, x: Value, axis: int, name: str) -> Any:
    """A vector of one number a channel, in a shape that broadcasts against x."""
    if parameter is None:
        return None
    channels = x.shape[axis]
    if not all_equal(parameter.shape, (channels,)):
        raise ShapeError(f"{name} of {x.type} needs one number for each of its {channels} "
                         f"channels, got shape {dims_text(parameter.shape)}",
                         where=user_location())
    return in_shape(widened(parameter), (channels, *(1,) * (x.ndim - axis - 1)))


def _require_channels(name: str, x: Value) -> Index:
    if x.ndim < 2:
        raise RankError(f"{name} needs [batch, channels, ...], got {x.type}",
                        where=user_location())
    return x.shape[1]


@operator(family="norm")
def group_norm(x: Any, weight: Any = None, bias: Any = None, *, groups: int,
               eps: float = 1e-5) -> Any:
    """[batch, channels, ...] normalised within groups of channels, then times weight plus bias"""
    channels = _require_channels("group_norm", x)
    if groups < 1 or not multiple(channels, groups):
        raise ShapeError(f"group_norm cannot split {channels} channels into {groups} groups",
                         where=user_location(), hint="the channels must be a multiple of groups")
    shape = (x.shape[0], groups, channels // groups, *x.shape[2:])
    _, centred, variance = _moments(widened(in_shape(x, shape)), tuple(range(2, len(shape))))
    parameters = [None if p is None else
                  in_shape(p, (groups, channels // groups, *(1,) * (x.ndim - 2)))
                  for p in (_per_channel(weight, x, 1, "group_norm"),
                            _per_channel(bias, x, 1, "group_norm"))]
    y = in_type(_scaled(centred * rsqrt(variance + eps), *parameters), float_type(x.dtype))
    return in_shape(y, x.shape)


@operator(family="norm")
def instance_norm(x: Any, weight: Any = None, bias: Any = None, *, eps: float = 1e-5) -> Any:
    """[batch, channels, ...] with every channel of every sample normalised by itself"""
    _require_channels("instance_norm", x)
    _, centred, variance = _moments(widened(x), tuple(range(2, x.ndim)))
    y = _scaled(centred * rsqrt(variance + eps), _per_channel(weight, x, 1, "instance_norm"),
                _per_channel(bias, x, 1, "instance_norm"))
    return in_type(y, float_type(x.dtype))


@operator(family="norm")
def batch_norm(x: Any, mean: Any, var: Any, weight: Any = None, bias: Any = None, *,
               axis: int = 1, eps: float = 1e-5) -> Any:
    """x normalised by known means and variances of its channels, then times weight plus bias"""
    axis = normalize_axis(axis, x.ndim)
    wide = widened(x)
    means, variances, weights, biases = (_per_channel(p, wide, axis, "batch_norm")
                                         for p in (mean, var, weight, bias))
    scale = _scaled(rsqrt(variances + eps), weights, None)
    return in_type(_scaled((wide - means) * scale, None, biases), float_type(x.dtype))


@operator(family="norm")
def batch_norm_train(x: Any, weight: Any = None, bias: Any = None, *, axis: int = 1,
                     eps: float = 1e-5) -> Any:
    """x normalised by its own channels' statistics, with the means and (biased) variances"""
    axis = normalize_axis(axis, x.ndim)
    mean, centred, variance = _moments(
        widened(x), tuple(d for d in range(x.ndim) if d != axis))
    y = _scaled(centred * rsqrt(variance + eps),
                _per_channel(weight, x, axis, "batch_norm_train"),
                _per_channel(bias, x, axis, "batch_norm_train"))
    channels = (x.shape[axis],)
    return in_type(y, float_type(x.dtype)), in_shape(mean, channels), in_shape(variance, channels)
