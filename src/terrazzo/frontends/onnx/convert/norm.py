"""Normalisations. Statistics are taken in float32 for half types, whatever stash_type says: more
exact than asked for is no error."""

from __future__ import annotations

from typing import Any

from terrazzo.base.shapes import Shape, normalize_axis
from terrazzo.dtypes import DType, float32
from terrazzo.frontends.onnx.registry import Call, Result, converts
from terrazzo.graph.ir import Value
from terrazzo.index import proves_eq
from terrazzo.ops import elementwise as e
from terrazzo.ops import norm as n
from terrazzo.ops.arrange import pad
from terrazzo.ops.reduce import in_shape, in_type, vector_norm, wide_mean, widened
from terrazzo.ops.shape import broadcast_to, reshape, span


# ---------------------------------------------------------------- over channels
@converts("BatchNormalization")
def batch_normalization(call: Call) -> Result:
    x, scale, bias, mean, var = (call.value(i) for i in range(5))
    eps = call.attr("epsilon", 1e-5)
    if call.version < 9 and not call.attr("spatial", 1):
        call.unsupported("normalises every place by itself (spatial=0), an option of old versions")
    if call.version < 14:
        if any(call.wants(i) for i in range(1, 5)):
            call.unsupported("is asked for statistics, as in training with an old version")
    elif call.attr("training_mode", 0):
        return _training(call, x, scale, bias, mean, var, eps)
    if x.ndim == 1:  # a batch of single numbers: one channel
        return in_shape(n.batch_norm(in_shape(x, (*x.shape, 1)), mean, var, scale, bias, eps=eps),
                        x.shape)
    return n.batch_norm(x, mean, var, scale, bias, eps=eps)


def _training(call: Call, x: Value, scale: Value, bias: Value, mean: Value, var: Value,
              eps: float) -> Result:
    """Normalised by the batch's own statistics, of which running ones take their share."""
    y, batch_mean, batch_var = n.batch_norm_train(x, scale, bias, eps=eps)
    keep = call.attr("momentum", 0.9)

    def moved(old: Value, new: Value) -> Value:
        return in_type(widened(old) * keep + new * (1 - keep), old.dtype)

    return y, moved(mean, batch_mean), moved(var, batch_var)


@converts("InstanceNormalization")
def instance_normalization(call: Call) -> Value:
    return n.instance_norm(call.value(0), call.value(1), call.value(2),
                           eps=call.attr("epsilon", 1e-5))


@converts("GroupNormalization")
def group_normalization(call: Call) -> Value:
    x, scale, bias = call.value(0), call.value(1), call.value(2)
    groups = call.attr("num_groups")
    if call.version < 21:  # scale and bias were one number a group
        each = x.shape[1] // groups
        scale, bias = (_repeated(p, groups, each) for p in (scale, bias))
    return n.group_norm(x, scale, bias, groups=groups, eps=call.attr("epsilon", 1e-5))


def _repeated(parameter: Value, groups: int, each: Any) -> Value:
    stretched = broadcast_to(in_shape(parameter, (groups, 1)), shape=(groups, each))
    return reshape(stretched, shape=(groups * each,))


@converts("LRN")
def local_response_normalization(call: Call) -> Value:
    x, size = call.value(0), call.attr("size")
    alpha, beta, bias = call.attr("alpha", 1e-4), call.attr("beta", 0.75), call.attr("bias", 1.0)
    wide = widened(x)
    before = (size - 1) // 2
    borders = [(0, 0), (before, size - 1 - before), *[(0, 0)] * (x.ndim - 2)]
    squares = pad(wide * wide, pad_width=borders)
    total = span(squares, 1, 0, x.shape[1])
    for k in range(1, size):
        total = total + span(squares, 1, k, x.shape[1] + k)
    return in_type(wide / e.power(bias + (alpha / size) * total, beta), x.dtype)


@converts("MeanVarianceNormalization")
def mean_variance_normalization(call: Call) -> Value:
    x = call.value(0)
    axes = tuple(call.attr("axes", [0, 2, 3]))
    wide = widened(x)
    centred = wide - wide_mean(wide, axes)
    deviation = e.sqrt(wide_mean(centred * centred, axes))
    return in_type(centred / (deviation + 1e-9), x.dtype)


# ---------------------------------------------------------------- over trailing axes
def same_shape(a: Shape, b: Shape) -> bool:
    """Whether two shapes are certainly equal."""
    return len(a) == len(b) and all(proves_eq(i, j) for i, j in zip(a, b, strict=True))


def layer_normalized(x: Value, scale: Value | None, bias: Value | None, axis: int, eps: float,
                     stash: DType = float32) -> tuple[Value, Value, Value]:
    """The normalised x, its means and its inverse standard deviations."""
    first = normalize_axis(axis, x.ndim)
    axes = tuple(range(first, x.ndim))
    fits = all(p is None or same_shape(p.shape, x.shape[first:]) for p in (scale, bias))
    wide = widened(x)
    if fits:
        y = n.layer_norm(x, scale, bias, axis=axes, eps=eps)
    else:
        y = _scaled(n.layer_norm(wide, axis=axes, eps=eps), scale, bias, x.dtype)
    mean = wide_mean(wide, axes)
    centred = wide - mean
    inverse = e.rsqrt(wide_mean(centred * centred, axes) + eps)
    return y, in_type(mean, stash), in_type(inverse, stash)


def _scaled(y: Value, scale: Value | None, bias: Value | None, dtype: DType) -> Value:
    """A scale and bias of any shape that broadcasts, applied before rounding."""
    if scale is not None:
        y = y * in_type(scale, y.dtype)
    if bias is not None:
        y = y + in_type(bias, y.dtype)
    return in_type(y, dtype)


def rms_normalized(x: Value, scale: Value | None, axis: int, eps: float) -> Value:
    """x over its root mean square along the axes from `axis` on, times scale."""
    first = normalize_axis(axis, x.ndim)
    axes = tuple(range(first, x.ndim))
    if scale is None or same_shape(scale.shape, x.shape[first:]):
        return n.rms_norm(x, scale, axis=axes, eps=eps)
    return _scaled(n.rms_norm(widened(x), axis=axes, eps=eps), scale, None, x.dtype)


@converts("LayerNormalization")
def layer_normalization(call: Call) -> Result:
    return layer_normalized(call.value(0), call.optional(1), call.optional(2),
                            call.attr("axis", -1), call.attr("epsilon", 1e-5),
                            call.dtype("stash_type", float32))


@converts("RMSNormalization")
def rms_normalization(call: Call) -> Value:
    return rms_normalized(call.value(0), call.value(1), call.attr("axis", -1),
                          call.attr("epsilon", 1e-5))


@converts("LpNormalization")
def lp_normalization(call: Call) -> Value:
    x, p, axis = call.value(0), call.attr("p", 2), call.attr("axis", -1)
    if p not in (1, 2):
        call.unsupported(f"takes the norm of order {p}; there are 1 and 2")
    wide = widened(x)
    length = vector_norm(wide, axis=axis, keepdims=True, ord=p)
    return in_type(wide / e.where(e.equal(length, 0), 1, length), x.dtype)
