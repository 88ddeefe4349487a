"""Reductions, places of extrema, and running sums and products.

Results keep the input's type, so integers are reduced wide and cut back to their own width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from terrazzo.base.shapes import normalize_axes, normalize_axis
from terrazzo.dtypes import DType, float64
from terrazzo.frontends.onnx.registry import Call, converts
from terrazzo.graph.ir import Value
from terrazzo.index import IndexExpr
from terrazzo.ops import elementwise as e
from terrazzo.ops import reduce as r
from terrazzo.ops.arrange import flip
from terrazzo.ops.creation import full
from terrazzo.ops.scan import cumprod, cumsum

Axes = tuple[int, ...]


def _floats(x: Value) -> Value:
    """x in a float type that loses as little as possible: float64 for integers."""
    return r.widened(x) if x.dtype.is_float else r.in_type(x, float64)


def _own(function: Callable[..., Value]) -> Callable[[Value, Axes, bool], Value]:
    return lambda x, axes, keep: function(x, axis=axes, keepdims=keep, dtype=x.dtype)


def _in_floats(function: Callable[[Value, Axes, bool], Value]
               ) -> Callable[[Value, Axes, bool], Value]:
    return lambda x, axes, keep: r.in_type(function(_floats(x), axes, keep), x.dtype)


def _extremum(function: Callable[..., Value], nothing: Callable[[DType], Any]
              ) -> Callable[[Value, Axes, bool], Value]:
    """An extremum; of no elements it is what every element would replace."""

    def reduced(x: Value, axes: Axes, keep: bool) -> Value:
        if any(x.shape[d] == 0 and not isinstance(x.shape[d], IndexExpr) for d in axes):
            return full(shape=r.reduced_shape(x.shape, axes, keep), value=nothing(x.dtype),
                        dtype=x.dtype)
        return function(x, axis=axes, keepdims=keep)

    return reduced


def _sum(x: Value, axes: Axes, keep: bool) -> Value:
    return r.sum_(x, axis=axes, keepdims=keep, dtype=x.dtype)


def _sum_of_squares(x: Value, axes: Axes, keep: bool) -> Value:
    return _sum(x * x, axes, keep)


_REDUCTIONS: dict[str, Callable[[Value, Axes, bool], Value]] = {
    "ReduceSum": _own(r.sum_),
    "ReduceProd": _own(r.prod),
    "ReduceMax": _extremum(r.max_, lambda t: -math.inf if t.is_float else t.min),
    "ReduceMin": _extremum(r.min_, lambda t: math.inf if t.is_float else t.max),
    "ReduceMean": _in_floats(lambda x, axes, keep: r.wide_mean(x, axes, keep)),
    "ReduceL1": lambda x, axes, keep: r.in_type(_sum(e.absolute(
        x if x.dtype.is_integer else r.widened(x)), axes, keep), x.dtype),
    "ReduceL2": _in_floats(lambda x, axes, keep: e.sqrt(_sum_of_squares(x, axes, keep))),
    "ReduceLogSum": _in_floats(lambda x, axes, keep: e.log(_sum(x, axes, keep))),
    "ReduceLogSumExp": _in_floats(
        lambda x, axes, keep: r.logsumexp(x, axis=axes, keepdims=keep)),
    "ReduceSumSquare": lambda x, axes, keep: r.in_type(_sum_of_squares(
        x if x.dtype.is_integer else r.widened(x), axes, keep), x.dtype),
}


@converts(*_REDUCTIONS)
def reduced(call: Call) -> Value:
    """Axes are an attribute, or an input in later versions."""
    x = call.value(0)
    axes = call.ints(1) if call.has(1) else call.attr("axes", [])
    if not axes and call.attr("noop_with_empty_axes", 0):
        return _REDUCTIONS[call.node.op_type](x, (), True)
    over = normalize_axes(tuple(axes) or None, x.ndim)
    return _REDUCTIONS[call.node.op_type](x, over, bool(call.attr("keepdims", 1)))


_PLACES = {"ArgMax": r.argmax, "ArgMin": r.argmin}


@converts(*_PLACES)
def place_of_extremum(call: Call) -> Value:
    x = call.value(0)
    axis = normalize_axis(call.attr("axis", 0), x.ndim)
    keep = bool(call.attr("keepdims", 1))
    find = _PLACES[call.node.op_type]
    if not call.attr("select_last_index", 0):
        return find(x, axis=axis, keepdims=keep)
    return x.shape[axis] - 1 - find(flip(x, axis=axis), axis=axis, keepdims=keep)


_RUNNING = {"CumSum": cumsum, "CumProd": cumprod}


@converts(*_RUNNING)
def running(call: Call) -> Value:
    x = call.value(0)
    return _RUNNING[call.node.op_type](
        x, axis=int(call.number(1)), dtype=x.dtype, exclusive=bool(call.attr("exclusive", 0)),
        reverse=bool(call.attr("reverse", 0)))
