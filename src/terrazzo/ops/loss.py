"""Loss functions, with torch's meaning of targets, weights and reductions.

All are worked out in float32 for half types, and the result is rounded once.
"""

from __future__ import annotations

from typing import Any

from terrazzo.base.shapes import dims_text, normalize_axis
from terrazzo.dtypes import DType, int64, promote
from terrazzo.errors import ArgumentError, DTypeError, ShapeError, user_location
from terrazzo.graph.applying import as_value
from terrazzo.graph.ir import Node, Value
from terrazzo.index import Index
from terrazzo.index.guards import all_equal, granted
from terrazzo.ops.activation import softplus, xlogy
from terrazzo.ops.creation import arange
from terrazzo.ops.define import operator
from terrazzo.ops.elementwise import (
    absolute,
    equal,
    exp,
    greater,
    less,
    less_equal,
    log,
    maximum,
    not_equal,
    where,
)
from terrazzo.ops.reduce import (
    float_type,
    in_shape,
    in_type,
    logsumexp,
    sum_,
    wide_mean,
    widened,
)


def _reduced(loss: Value, reduction: str, dtype: DType, total: Value | None = None) -> Value:
    """The losses, their sum, or their mean (over `total`, or their number)."""
    if reduction == "none":
        result = loss
    elif reduction == "sum":
        result = sum_(loss)
    elif reduction == "mean":
        result = wide_mean(loss, None, False) if total is None else sum_(loss) / total
    else:
        raise ArgumentError(f"there is no reduction {reduction!r}", where=user_location(),
                            hint='use "mean", "sum" or "none"')
    return in_type(result, dtype)


# ---------------------------------------------------------------- classes
def _class_axis(x: Value, axis: int | None) -> int:
    """Classes lie on axis 1, or on the only one, unless the axis is given."""
    return normalize_axis((1 if x.ndim > 1 else 0) if axis is None else axis, x.ndim)


def _pick(target: Value, classes: Index, axis: int, ndim: int) -> Value:
    """Where an element is of the target class. Comparing fuses with sums, unlike gathering."""
    places = in_shape(arange(start=classes, dtype=int64),
                      tuple(classes if d == axis else 1 for d in range(ndim)))
    spread = in_shape(target, (*target.shape[:axis], 1, *target.shape[axis:]))
    return equal(places, spread)


def _check_target(name: str, x: Value, target: Value, axis: int) -> None:
    if not target.dtype.is_integer:
        raise DTypeError(f"{name} needs class numbers of an integer type, got {target.type}",
                         where=user_location())
    expected = x.shape[:axis] + x.shape[axis + 1:]
    if not all_equal(target.shape, expected):
        raise ShapeError(f"{name} of {x.type} with classes on axis {axis} needs a target of shape "
                         f"{dims_text(expected)}, got {target.type}", where=user_location(),
                         hint="choose the axis of classes with axis=")


def _class_weight(weight: Value | None, x: Value, axis: int) -> Value | None:
    if weight is None:
        return None
    if weight.ndim != 1 or not granted("==", weight.shape[0], x.shape[axis]):
        raise ShapeError(f"a weight for each of the {x.shape[axis]} classes is needed, got "
                         f"{weight.type}", where=user_location())
    shape = tuple(n if d == axis else 1 for d, n in enumerate(x.shape))
    return in_shape(in_type(weight, x.dtype), shape)


def _indexed_loss(losses: Value, target: Value, weight: Value | None, axis: int,
                  ignore_index: int, spread_share: float) -> tuple[Value, Value]:
    """Each target's loss, and the total weight of the targets that count.

    `losses` has one loss a class; a share of the loss is spread evenly over all classes (label
    smoothing).
    """
    picked = _pick(target, losses.shape[axis], axis, losses.ndim)
    counts = not_equal(target, ignore_index)
    if weight is None:
        own = sum_(where(picked, losses, 0), axis=axis)
        total = in_type(sum_(counts), losses.dtype)
    else:
        own = sum_(where(picked, losses * weight, 0), axis=axis)
        total = sum_(where(counts, sum_(where(picked, weight, 0), axis=axis), 0))
    if spread_share:
        evenly = wide_mean(losses if weight is None else losses * weight, axis, False)
        own = (1 - spread_share) * own + spread_share * evenly
    return where(counts, own, 0), total


@operator(family="loss")
def nll_loss(x: Any, target: Any, weight: Any = None, *, axis: int | None = None,
             reduction: str = "mean", ignore_index: int = -100) -> Any:
    """minus the log-probability x of each target class"""
    axis = _class_axis(x, axis)
    _check_target("nll_loss", x, target, axis)
    wide = widened(x)
    loss, total = _indexed_loss(-wide, target, _class_weight(weight, wide, axis), axis,
                                ignore_index, 0.0)
    return _reduced(loss, reduction, float_type(x.dtype), total)


@operator(family="loss")
def cross_entropy(logits: Any, target: Any, weight: Any = None, *, axis: int | None = None,
                  reduction: str = "mean", ignore_index: int = -100,
                  label_smoothing: float = 0.0) -> Any:
    """minus the log of the softmax of logits at each target: class numbers, or probabilities

    Classes lie on axis 1 as in torch (on axis 0 of a vector); say axis=-1 for [batch, places,
    classes]. A weight has one number a class; targets equal to ignore_index do not count.
    """
    axis = _class_axis(logits, axis)
    wide = widened(logits)
    weights = _class_weight(weight, wide, axis)
    losses = logsumexp(wide, axis=axis, keepdims=True) - wide
    dtype = float_type(logits.dtype)
    if target.dtype.is_float:
        if not all_equal(target.shape, logits.shape):
            raise ShapeError(f"cross_entropy of {logits.type} needs probabilities of that shape, "
                             f"got {target.type}", where=user_location())
        share = in_type(target, wide.dtype)
        if label_smoothing:
            classes = in_type(as_value(wide.shape[axis]), wide.dtype)
            share = (1 - label_smoothing) * share + label_smoothing / classes
        terms = where(equal(share, 0), 0, losses * share)
        return _reduced(sum_(terms if weights is None else terms * weights, axis=axis),
                        reduction, dtype)
    _check_target("cross_entropy", logits, target, axis)
    loss, total = _indexed_loss(losses, target, weights, axis, ignore_index, label_smoothing)
    return _reduced(loss, reduction, dtype, total)


# ---------------------------------------------------------------- distances
def _distance(x: Value, y: Value, reduction: str, measure: Any) -> Value:
    dtype = float_type(promote(x.dtype, y.dtype))
    difference = in_type(x, dtype.compute) - in_type(y, dtype.compute)
    return _reduced(measure(difference), reduction, dtype)


@operator(family="loss")
def mse_loss(x: Any, y: Any, *, reduction: str = "mean") -> Any:
    """the square of x - y"""
    return _distance(x, y, reduction, lambda d: d * d)


@operator(family="loss")
def l1_loss(x: Any, y: Any, *, reduction: str = "mean") -> Any:
    """|x - y|"""
    return _distance(x, y, reduction, absolute)


@operator(family="loss")
def smooth_l1_loss(x: Any, y: Any, *, reduction: str = "mean", beta: float = 1.0) -> Any:
    """|x - y| - beta / 2, and the parabola (x - y)^2 / (2 beta) within beta of 0"""
    if beta == 0:
        return l1_loss(x, y, reduction=reduction)
    return _distance(x, y, reduction, lambda d: where(
        less(absolute(d), beta), (0.5 / beta) * d * d, absolute(d) - 0.5 * beta))


@operator(family="loss")
def huber_loss(x: Any, y: Any, *, reduction: str = "mean", delta: float = 1.0) -> Any:
    """(x - y)^2 / 2, and the line delta * (|x - y| - delta / 2) farther than delta from 0"""
    return _distance(x, y, reduction, lambda d: where(
        less_equal(absolute(d), delta), 0.5 * d * d, delta * (absolute(d) - 0.5 * delta)))


# ---------------------------------------------------------------- probabilities
_LOG_FLOOR = -100.0  # torch's: a probability of 0 costs 100, not infinity


def _floored_log(x: Value) -> Value:
    positive = greater(x, 0)
    return where(positive, maximum(log(where(positive, x, 1)), _LOG_FLOOR), _LOG_FLOOR)


def _binary_entropy_grad(node: Node, g: Value) -> list[Value | None]:
    x, y = node.inputs
    assert x is not None and y is not None
    # Where x is 0 or 1 the slope is infinite; like torch, we stop at 1e12.
    return [g * (x - y) / maximum(x * (1 - x), 1e-12),
            g * (_floored_log(1 - x) - _floored_log(x))]


@operator(family="loss", grad=_binary_entropy_grad)
def binary_entropy(x: Any, y: Any) -> Any:
    """-y log(x) - (1 - y) log(1 - x), element by element; logs end at -100"""
    return (y - 1) * _floored_log(1 - x) - y * _floored_log(x)


@operator(family="loss")
def binary_cross_entropy(x: Any, y: Any, weight: Any = None, *, reduction: str = "mean") -> Any:
    """the cross entropy of probabilities x and targets y of two classes"""
    dtype = float_type(promote(x.dtype, y.dtype))
    loss = binary_entropy(in_type(x, dtype.compute), in_type(y, dtype.compute))
    if weight is not None:
        loss = loss * in_type(weight, dtype.compute)
    return _reduced(loss, reduction, dtype)


@operator(family="loss")
def binary_cross_entropy_with_logits(x: Any, y: Any, weight: Any = None, pos_weight: Any = None, *,
                                     reduction: str = "mean") -> Any:
    """binary_cross_entropy(sigmoid(x), y); pos_weight multiplies the losses of positive targets"""
    dtype = float_type(promote(x.dtype, y.dtype))
    x, y, weight, pos_weight = (None if t is None else in_type(t, dtype.compute)
                                for t in (x, y, weight, pos_weight))
    # A sum of two terms that are never negative: nothing cancels in either tail.
    positive = y * softplus(-x)
    if pos_weight is not None:
        positive = positive * pos_weight
    loss = positive + (1 - y) * softplus(x)
    return _reduced(loss if weight is None else loss * weight, reduction, dtype)


@operator(family="loss")
def kl_div(x: Any, y: Any, *, reduction: str = "mean", log_target: bool = False) -> Any:
    """y * (log(y) - x) for log-probabilities x; "batchmean" divides the sum by the first size"""
    dtype = float_type(promote(x.dtype, y.dtype))
    x, y = in_type(x, dtype.compute), in_type(y, dtype.compute)
    terms = exp(y) * (y - x) if log_target else xlogy(y, y) - y * x
    if reduction == "batchmean":
        return in_type(sum_(terms) / as_value(terms.shape[0] if terms.ndim else 1), dtype)
    return _reduced(terms, reduction, dtype)
