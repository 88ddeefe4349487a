"""Pooling: the largest element, the sum or the mean of every window of the last axes.

Three primitives work channels last, [N, *S, C], so that neighbouring channels fill vectors; what
models use is [N, C, *S], any number of spatial axes, made of them. Padding is explicit, a pair
(before, after) an axis; it never wins a maximum and adds nothing to a sum.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from terrazzo.base.scalar import Axis, Scalar, as_scalar, call
from terrazzo.base.scalar import cast as cast_scalar
from terrazzo.base.scalar import reduce as reduce_scalar
from terrazzo.base.scalar import where as where_scalar
from terrazzo.base.scalar_table import lowest
from terrazzo.base.shapes import contiguous_strides, dims_text
from terrazzo.dtypes import int64
from terrazzo.errors import ArgumentError, DTypeError, RankError, ShapeError, user_location
from terrazzo.expr.ir import Tensor, compute, fresh_axis
from terrazzo.graph.applying import constant
from terrazzo.graph.ir import Node, TensorType, Value
from terrazzo.index import Index, ceildiv, maximum, minimum
from terrazzo.index.guards import all_equal, ask, known
from terrazzo.loop.interpret import convert
from terrazzo.ops.creation import arange, full
from terrazzo.ops.define import operator, primitive, with_shape
from terrazzo.ops.elementwise import absolute, divide, power
from terrazzo.ops.indexing import scatter
from terrazzo.ops.reduce import in_type, max_, sum_, wide_mean, widened
from terrazzo.ops.shape import (
    channels_first,
    channels_last,
    place,
    ravel,
    reshape,
    slice_,
)

Pairs = tuple[tuple[Index, Index], ...]


# ---------------------------------------------------------------- windows
def per_axis(value: Any, rank: int, name: str, default: Any = None) -> tuple[Any, ...]:
    """One entry for every spatial axis, from one for all of them or a sequence."""
    if value is None:
        value = default
    entries = (value,) * rank if isinstance(value, int) else tuple(value)
    if len(entries) != rank:
        raise ArgumentError(f"{name} {value} does not fit {rank} spatial axes",
                            where=user_location(), hint="give one number, or one an axis")
    return entries


def padding_pairs(padding: Any, rank: int) -> Pairs:
    """Padding as a pair (before, after) for every spatial axis."""
    return tuple((p, p) if not isinstance(p, (tuple, list)) else (p[0], p[1])
                 for p in per_axis(padding, rank, "padding", 0))


def pooled_size(n: Index, window: int, stride: int, pair: tuple[Index, Index], dilation: int
                ) -> Index:
    """How many windows fit along an axis."""
    return (n + pair[0] + pair[1] - dilation * (window - 1) - 1) // stride + 1


def ceil_overhang(n: int, window: int, stride: int, pair: tuple[int, int], dilation: int) -> int:
    """What a padded axis lacks for the last window that ceil mode adds.

    A window that would start after the axis and its front padding is not added (as in torch).
    """
    room = n + sum(pair) - dilation * (window - 1) - 1
    count = -(-room // stride) + 1
    if (count - 1) * stride >= n + pair[0]:
        count -= 1
    return max(0, (count - 1) * stride - room)


def same_padding(n: int, window: int, stride: int, dilation: int, upper: bool) -> tuple[int, int]:
    """ONNX's SAME_UPPER and SAME_LOWER: as many windows as strides begin; the odd one goes last."""
    total = max(0, (-(-n // stride) - 1) * stride + dilation * (window - 1) + 1 - n)
    small, large = total // 2, total - total // 2
    return (small, large) if upper else (large, small)


def _windows_type(x: TensorType, *, window: Any, strides: Any, padding: Any, dilation: Any
                  ) -> TensorType:
    rank = len(x.shape) - 2
    if rank < 1:
        raise RankError(f"pooling needs a batch, channels and at least one spatial axis, not "
                        f"{dims_text(x.shape)}", where=user_location())
    if not len(window) == len(strides) == len(padding) == len(dilation) == rank:
        raise ArgumentError(f"a window {tuple(window)} with strides {tuple(strides)}, padding "
                            f"{tuple(padding)} and dilation {tuple(dilation)} does not fit "
                            f"{rank} spatial axes", where=user_location())
    if any(n < 1 for n in (*window, *strides, *dilation)):
        raise ArgumentError("windows, strides and dilation are at least 1", where=user_location())
    if any(ask("<", p, 0) for pair in padding for p in pair):
        raise ArgumentError(f"padding {tuple(padding)} is negative", where=user_location(),
                            hint="crop with a slice")
    sizes = tuple(map(pooled_size, x.shape[1:-1], window, strides, padding, dilation))
    if any(ask("<", n, 1) for n in sizes):
        raise ShapeError(f"a window {tuple(window)} with dilation {tuple(dilation)} does not fit "
                         f"in {dims_text(x.shape[1:-1])} with padding {tuple(padding)}",
                         where=user_location())
    return with_shape(x, (x.shape[0], *sizes, x.shape[-1]))


def _window(x: Tensor, o: Sequence[Index], *, window: Any, strides: Any, padding: Any,
            dilation: Any) -> tuple[list[Axis], tuple[Index, ...]]:
    """Axes over the elements of an output's window that are not padding, and where those lie.

    Ranges that end at the border need no masks. Written out, windows of 4 and 9 elements were not
    faster (Ice Lake, 64 to 512 channels).
    """
    axes, places = [], []
    for d, (n, at, size, stride, (before, _), step) in enumerate(zip(
            x.shape[1:-1], o, window, strides, padding, dilation, strict=True)):
        start = at * stride - before
        first = maximum(0, ceildiv(-start, step))
        end = minimum(size, ceildiv(n - start, step))
        axis = fresh_axis(f"k{d}", size)
        axes.append(Axis(axis.var, first, maximum(first, end)))
        places.append(start + step * axis.var)
    return axes, tuple(places)


def _numpy_taps(x: np.ndarray, out: Any, window: Any, strides: Any, padding: Any, dilation: Any,
                filler: Any) -> np.ndarray:
    """All windows as a new first axis."""
    width = [(0, 0), *((int(a), int(b)) for a, b in padding), (0, 0)]
    padded = np.pad(x, width, constant_values=filler)
    taps = []
    for tap in itertools.product(*map(range, window)):
        spans = tuple(slice(k * d, k * d + (n - 1) * s + 1, s)
                      for k, d, n, s in zip(tap, dilation, out.shape[1:-1], strides))
        taps.append(padded[(slice(None), *spans)])
    return np.stack(taps)


# ---------------------------------------------------------------- the largest of a window
def _no_complex(x: TensorType) -> None:
    if x.dtype.is_complex:
        raise DTypeError(f"pooling needs ordered numbers, not {x.dtype.name}",
                         where=user_location())


def _window_max_type(x: TensorType, **attrs: Any) -> TensorType:
    _no_complex(x)
    return _windows_type(x, **attrs)


def _window_max_numpy(x: np.ndarray, *, out: TensorType, **attrs: Any) -> np.ndarray:
    wide = x.astype(out.dtype.compute.np)
    taps = _numpy_taps(wide, out, filler=lowest(out.dtype.compute), **attrs)
    return convert(np.max(taps, axis=0), out.dtype)


def _window_max_grad(node: Node, g: Value) -> list[Value | None]:
    """The whole gradient goes to the first of those that share the maximum, as in torch."""
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    spatial = math.prod(x.shape[1:-1])
    flat = (x.shape[0], spatial, x.shape[-1])
    chosen = (y.shape[0], math.prod(y.shape[1:-1]), y.shape[-1])
    where = window_argmax(x, y, **node.attrs)
    zeros = full(shape=flat, value=0, dtype=x.dtype.compute)
    total = scatter(zeros, reshape(where, shape=chosen),
                    reshape(in_type(g, x.dtype.compute), shape=chosen), axis=1, reduce="add")
    return [reshape(total, shape=x.shape)]


@primitive(family="pool", kind="contract", infer=_window_max_type, reference=_window_max_numpy,
           grad=_window_max_grad)
def window_max(x: Any, *, window: Any, strides: Any, padding: Any, dilation: Any,
               out: TensorType) -> Tensor:
    """the largest element of every window of [N, *S, C]; nan wins"""
    combine = "or" if out.dtype.is_bool else "max"

    def element(n: Index, *rest: Index) -> Scalar:
        *o, c = rest
        axes, place = _window(x, o, window=window, strides=strides, padding=padding,
                              dilation=dilation)
        return reduce_scalar(combine, x[(n, *place, c)], axes)

    return compute(out.shape, element, origin="window_max")


def _argmax_type(x: TensorType, largest: TensorType, **attrs: Any) -> TensorType:
    shape = _window_max_type(x, **attrs).shape
    if not all_equal(largest.shape, shape):
        raise ShapeError(f"window_argmax needs the largest of each window, {dims_text(shape)}, not "
                         f"{dims_text(largest.shape)}", where=user_location())
    return TensorType(shape, int64)


def _argmax_numpy(x: np.ndarray, largest: np.ndarray, *, out: TensorType, **attrs: Any
                  ) -> np.ndarray:
    spatial = x.shape[1:-1]
    places = np.arange(math.prod(spatial)).reshape(1, *spatial, 1)
    taps = _numpy_taps(x.astype(np.float64) if x.dtype.kind not in "biu" else x, out,
                       filler=0, **attrs)
    where = _numpy_taps(np.broadcast_to(places, x.shape), out, filler=-1, **attrs)
    hit = (taps == largest.astype(taps.dtype)) | (taps != taps)
    return np.min(np.where(hit & (where >= 0), where, np.iinfo(np.int64).max), axis=0)


@primitive(family="pool", kind="contract", infer=_argmax_type, reference=_argmax_numpy,
           differentiable=False)
def window_argmax(x: Any, largest: Any, *, window: Any, strides: Any, padding: Any, dilation: Any,
                  out: TensorType) -> Tensor:
    """the row-major spatial position in x of the first element of a window that is the largest

    `largest` is what window_max found; a nan counts as the largest.
    """
    def element(n: Index, *rest: Index) -> Scalar:
        *o, c = rest
        axes, place = _window(x, o, window=window, strides=strides, padding=padding,
                              dilation=dilation)
        value = x[(n, *place, c)]
        hit = call("eq", value, largest[(n, *rest)])
        if value.dtype.is_float:
            hit = call("or", hit, call("ne", value, value))
        position = as_scalar(ravel(place, x.shape[1:-1]))
        return reduce_scalar("min", where_scalar(hit, cast_scalar(position, int64),
                                                 np.iinfo(np.int64).max), axes)

    return compute(out.shape, element, origin="window_argmax")


# ---------------------------------------------------------------- the sum of a window
def _window_sum_numpy(x: np.ndarray, *, out: TensorType, **attrs: Any) -> np.ndarray:
    taps = _numpy_taps(x.astype(out.dtype.compute.np), out, filler=0, **attrs)
    return convert(np.sum(taps, axis=0, dtype=taps.dtype), out.dtype)


def _window_sum_grad(node: Node, g: Value) -> list[Value | None]:
    """Each element gets the gradients of the windows it is in, one axis after the other."""
    x = node.inputs[0]
    assert x is not None
    rows = zip(*(node.attrs[k] for k in ("window", "strides", "padding", "dilation")))
    for axis, (size, stride, (before, after), step) in enumerate(rows, 1):
        def along(entry: Any, rest: Sequence[Any], axis: int = axis) -> tuple[Any, ...]:
            return tuple(entry if d == axis else r for d, r in enumerate(rest))

        n = x.shape[axis]
        padded = along(n + before + after, g.shape)
        zeros, ones = (0,) * g.ndim, (1,) * g.ndim
        total: Any = None
        for k in range(size):
            part = place(g, shape=padded, starts=along(k * step, zeros),
                         steps=along(stride, ones))
            total = part if total is None else total + part
        g = slice_(total, starts=along(before, zeros), stops=along(before + n, total.shape),
                   steps=ones)
    return [g]


@primitive(family="pool", kind="contract", infer=_windows_type, reference=_window_sum_numpy,
           grad=_window_sum_grad)
def window_sum(x: Any, *, window: Any, strides: Any, padding: Any, dilation: Any,
               out: TensorType) -> Tensor:
    """the sum of every window of [N, *S, C]"""
    wide = out.dtype.compute

    def element(n: Index, *rest: Index) -> Scalar:
        *o, c = rest
        axes, place = _window(x, o, window=window, strides=strides, padding=padding,
                              dilation=dilation)
        return cast_scalar(reduce_scalar("add", cast_scalar(x[(n, *place, c)], wide), axes),
                           out.dtype)

    return compute(out.shape, element, origin="window_sum")


# ---------------------------------------------------------------- in the layout of models
def _channels_last(x: Value) -> Value:
    if x.ndim < 3:
        raise RankError(f"pooling needs [batch, channels, ...] with at least one spatial axis, not "
                        f"{dims_text(x.shape)}", where=user_location())
    known(x.shape[1])  # vectors are of channels: without their number a pool takes twice as long
    return channels_last(x)


def _attrs(x: Value, window: Any, strides: Any, padding: Any, dilation: Any) -> dict[str, Any]:
    rank = max(x.ndim - 2, 1)
    size = per_axis(window, rank, "window")
    return {"window": size, "strides": per_axis(strides, rank, "strides", size),
            "padding": padding_pairs(padding, rank),
            "dilation": per_axis(dilation, rank, "dilation", 1)}


@operator(family="pool")
def max_pool(x: Any, *, window: Any, strides: Any = None, padding: Any = 0,
             dilation: Any = 1) -> Any:
    """the largest element of every window of [N, C, *S]; strides are the window if not given"""
    attrs = _attrs(x, window, strides, padding, dilation)
    return channels_first(window_max(_channels_last(x), **attrs))


@operator(family="pool")
def max_pool_indices(x: Any, *, window: Any, strides: Any = None, padding: Any = 0,
                     dilation: Any = 1, storage_order: int = 0) -> Any:
    """max_pool, and where in x each element was found, counted through all of [N, C, *S]

    `storage_order` 1 counts spatial axes column by column, as ONNX does.
    """
    largest, position = max_pool_places(x, window, strides, padding, dilation)
    sizes = x.shape[2:]
    if storage_order:
        position = sum(position // stride % n * weight for n, stride, weight in zip(
            sizes, contiguous_strides(sizes), contiguous_strides(sizes[::-1])[::-1]))
    plane = math.prod(sizes)
    ones = (1,) * len(sizes)
    first = reshape(arange(start=x.shape[0] * x.shape[1], dtype=int64) * plane,
                    shape=(x.shape[0], x.shape[1], *ones))
    return largest, position + first


def max_pool_places(x: Value, window: Any, strides: Any, padding: Any, dilation: Any
                    ) -> tuple[Value, Value]:
    """max_pool, and where in its channel each element was found, counted row by row."""
    attrs = _attrs(x, window, strides, padding, dilation)
    last = _channels_last(x)
    largest = window_max(last, **attrs)
    return channels_first(largest), channels_first(window_argmax(last, largest, **attrs))


@operator(family="pool")
def average_pool(x: Any, *, window: Any, strides: Any = None, padding: Any = 0, dilation: Any = 1,
                 count_include_pad: bool = False, overhang: Any = 0) -> Any:
    """the mean of every window of [N, C, *S]; padding counts as zeros, or not at all

    `overhang` is padding after an axis (from ceil mode) that never counts.
    """
    attrs = _attrs(x, window, strides, padding, dilation)
    over = per_axis(overhang, len(attrs["window"]), "overhang")
    counted = attrs["padding"] if count_include_pad else ((0, 0),) * len(over)
    attrs["padding"] = tuple((a, b + c) for (a, b), c in zip(attrs["padding"], over))
    total = window_sum(_channels_last(widened(x)), **attrs)
    return in_type(channels_first(divide(total, _counts(x, total, counted, attrs))), x.dtype)


def _counts(x: Value, total: Value, counted: Pairs, attrs: dict[str, Any]) -> Value:
    """How many elements each window's sum is divided by."""
    sizes = x.shape[2:]
    if attrs["padding"] == counted:
        return constant(float(math.prod(attrs["window"])), total.dtype)
    if all(isinstance(n, int) for n in (*sizes, *(p for pair in counted for p in pair))):
        result = np.ones((1,) * total.ndim)
        for d, row in enumerate(zip(sizes, total.shape[1:-1], counted, *attrs.values())):
            result = result * _counts_along(*row).reshape(
                tuple(-1 if e == d + 1 else 1 for e in range(total.ndim)))
        return constant(result, total.dtype)
    ones: Any = full(shape=(1, *sizes, 1), value=1, dtype=total.dtype)
    inside = tuple((a - c, b - d) for (a, b), (c, d) in zip(attrs["padding"], counted))
    if counted != ((0, 0),) * len(counted):
        ones = full(shape=(1, *(n + a + b for n, (a, b) in zip(sizes, counted)), 1), value=1,
                    dtype=total.dtype)
    return window_sum(ones, **{**attrs, "padding": inside})


def _counts_along(n: int, count: int, counted: tuple[int, int], size: int, stride: int,
                  pair: tuple[int, int], step: int) -> np.ndarray:
    starts = np.arange(count)[:, None] * stride - pair[0]
    places = starts + np.arange(size)[None] * step
    return np.sum((places >= -counted[0]) & (places < n + counted[1]), axis=1)


@operator(family="pool")
def lp_pool(x: Any, *, window: Any, strides: Any = None, padding: Any = 0, dilation: Any = 1,
            p: float = 2) -> Any:
    """the p-norm of every window of [N, C, *S]"""
    attrs = _attrs(x, window, strides, padding, dilation)
    total = window_sum(_channels_last(power(absolute(widened(x)), float(p))), **attrs)
    return in_type(channels_first(power(total, 1.0 / p)), x.dtype)


# ---------------------------------------------------------------- whole tensors
def _spatial(x: Value) -> tuple[int, ...]:
    if x.ndim < 3:
        raise RankError(f"global pooling needs [batch, channels, ...] with at least one spatial "
                        f"axis, not {dims_text(x.shape)}", where=user_location())
    return tuple(range(2, x.ndim))


@operator(family="pool")
def global_average_pool(x: Any) -> Any:
    """the mean over all spatial axes of [N, C, *S], which become 1"""
    return in_type(wide_mean(widened(x), _spatial(x)), x.dtype)


@operator(family="pool")
def global_max_pool(x: Any) -> Any:
    """the largest element over all spatial axes of [N, C, *S], which become 1"""
    return max_(x, axis=_spatial(x), keepdims=True)


@operator(family="pool")
def global_lp_pool(x: Any, *, p: float = 2) -> Any:
    """the p-norm over all spatial axes of [N, C, *S], which become 1"""
    total = sum_(power(absolute(widened(x)), float(p)), axis=_spatial(x), keepdims=True)
    return in_type(power(total, 1.0 / p), x.dtype)


@operator(family="pool")
def max_unpool(x: Any, indices: Any, *, output_shape: Any, indices_shape: Any = None) -> Any:
    """zeros with the elements of x where max_pool_indices found them

    `indices_shape` is the shape that indices count through, `output_shape` if not given; it is
    laid into the corner of a larger output.
    """
    shape = tuple(output_shape)
    inner = shape if indices_shape is None else tuple(indices_shape)
    zeros = full(shape=(math.prod(inner),), value=0, dtype=x.dtype)
    flat = scatter(zeros, reshape(indices, shape=(-1,)), reshape(x, shape=(-1,)), axis=0)
    laid = reshape(flat, shape=inner)
    if inner == shape:
        return laid
    return place(laid, shape=shape, starts=(0,) * len(shape), steps=(1,) * len(shape))
