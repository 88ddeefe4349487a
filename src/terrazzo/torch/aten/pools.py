"""Pools of all kinds, with their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from terrazzo.graph.applying import constant
from terrazzo.graph.autodiff import gradients
from terrazzo.graph.ir import TensorType, Value
from terrazzo.ops import elementwise as e
from terrazzo.ops import pool, reduce
from terrazzo.ops.arrange import pad
from terrazzo.ops.contract import tensordot
from terrazzo.ops.creation import zeros
from terrazzo.ops.indexing import gather, scatter, take_at
from terrazzo.ops.reduce import widened
from terrazzo.ops.shape import channels_first, channels_last, permute_dims, reshape
from terrazzo.torch.aten.registry import aten, unsupported


def _each(value: Any, rank: int) -> tuple[Any, ...]:
    return tuple(value) * rank if len(value) == 1 else tuple(value)


def _attrs(kernel: Any, stride: Any, padding: Any, dilation: Any, rank: int) -> dict[str, Any]:
    return dict(window=_each(kernel, rank), strides=_each(stride or kernel, rank),
                padding=tuple((p, p) for p in _each(padding, rank)),
                dilation=_each(dilation, rank))


def _overhang(x: Value, attrs: dict[str, Any], ceil_mode: bool) -> tuple[int, ...]:
    """What the last windows of ceil mode lack after each axis."""
    rank = len(attrs["window"])
    if not ceil_mode:
        return (0,) * rank
    sizes: Sequence[Any] = x.shape[-rank:]
    if not all(isinstance(n, int) for n in sizes):
        unsupported("pooling with ceil_mode for sizes that vary")
    return tuple(map(pool.ceil_overhang, sizes, attrs["window"], attrs["strides"],
                     attrs["padding"], attrs["dilation"]))


def _batched(x: Value, rank: int) -> Value:
    return x if x.ndim == rank + 2 else reshape(x, shape=(1, *x.shape))


def _plane(x: Value, rank: int) -> Any:
    return math.prod(x.shape[-rank:])


@aten("max_pool2d_with_indices", "max_pool3d_with_indices", typed=True)
def max_pool_with_indices(x: Any, kernel_size: Any, stride: Any = (), padding: Any = (0,),
                          dilation: Any = (1,), ceil_mode: bool = False, *,
                          out: Sequence[TensorType]) -> Any:
    rank = len(kernel_size) if len(kernel_size) > 1 else x.ndim - 2
    attrs = _attrs(kernel_size, stride, padding, dilation, rank)
    over = _overhang(x, attrs, ceil_mode)
    attrs["padding"] = tuple((a, b + c) for (a, b), c in zip(attrs["padding"], over))
    y, places = pool.max_pool_places(_batched(x, rank), **attrs)
    return tuple(reshape(v, shape=t.shape) for v, t in zip((y, places), out))


@aten("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward")
def max_pool_backward(grad: Any, x: Any, kernel_size: Any, stride: Any, padding: Any,
                      dilation: Any, ceil_mode: bool, indices: Any) -> Any:
    return _to_places(grad, x, indices, len(kernel_size) if len(kernel_size) > 1 else x.ndim - 2)


@aten("adaptive_max_pool2d_backward")
def adaptive_max_pool2d_backward(grad: Any, x: Any, indices: Any) -> Any:
    return _to_places(grad, x, indices, 2)


@aten("adaptive_max_pool3d_backward")
def adaptive_max_pool3d_backward(grad: Any, x: Any, indices: Any) -> Any:
    return _to_places(grad, x, indices, 3)


def _to_places(grad: Value, x: Value, indices: Value, rank: int) -> Value:
    """Zeros in the shape of x, plus each gradient at its place within a channel."""
    if grad.size == 0 or x.size == 0:
        return zeros(shape=x.shape, dtype=grad.dtype)
    # Channels last: what comes before and after a pool mostly lies so.
    images = [channels_last(_batched(v, rank)) for v in (grad, indices)]
    batch, *_, channels = images[0].shape
    flat = [reshape(v, shape=(batch, _plane(grad, rank), channels)) for v in images]
    empty = zeros(shape=(batch, _plane(x, rank), channels), dtype=grad.dtype.compute)
    summed = scatter(empty, flat[1], e.astype(flat[0], dtype=grad.dtype.compute), axis=1,
                     reduce="add")
    found = channels_first(reshape(summed, shape=(batch, *x.shape[-rank:], channels)))
    return e.astype(reshape(found, shape=x.shape), dtype=grad.dtype)


@aten("max_unpool2d", "max_unpool3d", typed=True)
def max_unpool(x: Any, indices: Any, output_size: Any, *more: Any, out: TensorType) -> Any:
    rank = len(output_size)
    lead = x.shape[:-rank]
    if x.size == 0 or math.prod(out.shape) == 0:
        return zeros(shape=out.shape, dtype=x.dtype)
    flat = [reshape(v, shape=(*lead, _plane(x, rank))) for v in (x, indices)]
    empty = zeros(shape=(*lead, math.prod(out.shape[-rank:])), dtype=x.dtype)
    return reshape(scatter(empty, flat[1], flat[0], axis=len(lead)), shape=out.shape)


# ---------------------------------------------------------------- means
def _check_floats(x: Value) -> None:
    if not x.dtype.is_float:
        unsupported("a pool of integers, which torch refuses")


def _average(x: Value, kernel_size: Any, stride: Any, padding: Any, ceil_mode: bool,
             count_include_pad: bool, divisor: Any, rank: int) -> Value:
    _check_floats(x)
    attrs = _attrs(kernel_size, stride, padding, (1,), rank)
    over = _overhang(x, attrs, ceil_mode)
    batched = _batched(x, rank)
    if divisor is None:
        y = pool.average_pool(batched, count_include_pad=count_include_pad, overhang=over, **attrs)
    else:
        width = ((0, 0), (0, 0), *((a, b + c) for (a, b), c in zip(attrs["padding"], over)))
        attrs["padding"] = 0
        y = pool.average_pool(pad(widened(batched), pad_width=width), **attrs)
        y = e.astype(y * (math.prod(attrs["window"]) / divisor), dtype=x.dtype)
    return y if x.ndim == rank + 2 else reshape(y, shape=y.shape[1:])


def _average_pool(rank: int) -> None:
    @aten(f"avg_pool{rank}d")
    def forward(x: Any, kernel_size: Any, stride: Any = (), padding: Any = (0,),
                ceil_mode: bool = False, count_include_pad: bool = True,
                divisor_override: Any = None) -> Any:
        return _average(x, kernel_size, stride, padding, ceil_mode, count_include_pad,
                        divisor_override, rank)

    if rank == 1:
        return

    @aten(f"avg_pool{rank}d_backward")
    def backward(grad: Any, x: Any, kernel_size: Any, stride: Any, padding: Any, ceil_mode: bool,
                 count_include_pad: bool, divisor_override: Any) -> Any:
        y = _average(x, kernel_size, stride, padding, ceil_mode, count_include_pad,
                     divisor_override, rank)
        return gradients([y], [grad], [x])[0]


for _rank in (1, 2, 3):
    _average_pool(_rank)


# ---------------------------------------------------------------- windows that cover all
def _windows(n: Any, count: Any) -> list[tuple[int, int]]:
    """Where each of some windows that cover an axis evenly begins and ends."""
    if not isinstance(n, int) or not isinstance(count, int):
        unsupported("adaptive pooling of sizes that vary")
    return [(i * n // count, -(-(i + 1) * n // count)) for i in range(count)]


@aten("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", typed=True)
def adaptive_average_pool(x: Any, size: Any, *, out: TensorType) -> Any:
    _check_floats(x)
    rank = len(size)
    axes = tuple(range(x.ndim - rank, x.ndim))
    if all(n == 1 for n in size):
        return reduce.mean(x, axis=axes, keepdims=True)
    sizes: list[Any] = [(x.shape[d], out.shape[d]) for d in axes]
    if x.size == 0 or math.prod(out.shape) == 0:
        return zeros(shape=out.shape, dtype=x.dtype)
    if all(isinstance(n, int) and isinstance(m, int) and n % m == 0 for n, m in sizes):
        return _average(x, [n // m for n, m in sizes], (), (0,), False, True, None, rank)
    y = widened(x)
    for d, (n, count) in zip(axes, sizes):
        weights = np.zeros((count, n))
        for i, (start, stop) in enumerate(_windows(n, count)):
            weights[i, start:stop] = 1 / (stop - start)
        y = _product_along(y, weights, d)
    return e.astype(y, dtype=x.dtype)


def _product_along(x: Value, weights: np.ndarray, axis: int) -> Value:
    """A matrix applied to every column along an axis."""
    made = tensordot(x, constant(weights, x.dtype), axes=((axis,), (1,)))
    order = [*range(axis), x.ndim - 1, *range(axis, x.ndim - 1)]
    return permute_dims(made, axes=tuple(order))


def _adaptive_backward(grad: Any, x: Any, *, rank: int) -> Any:
    if x.size == 0 or grad.size == 0:
        return zeros(shape=x.shape, dtype=x.dtype)
    y = adaptive_average_pool(x, list(grad.shape[-rank:]), out=grad.type)
    return gradients([y], [grad], [x])[0]


for _rank in (2, 3):
    aten(f"_adaptive_avg_pool{_rank}d_backward")(partial(_adaptive_backward, rank=_rank))


@aten("adaptive_max_pool2d", "adaptive_max_pool3d", typed=True)
def adaptive_max_pool(x: Any, size: Any, *, out: Sequence[TensorType]) -> Any:
    _check_floats(x)
    rank, kept = len(size), x.ndim - len(size)
    if math.prod(out[0].shape) == 0:
        return tuple(zeros(shape=t.shape, dtype=t.dtype) for t in out)
    windows, place = x, constant(np.zeros((1,) * (2 * rank), np.int64))
    for k in range(rank):
        n, count = x.shape[kept + k], out[0].shape[kept + k]
        bounds = _windows(n, count)
        most = max(stop - start for start, stop in bounds)
        # A window that is shorter than others counts its last element again.
        at = np.array([[min(start + i, stop - 1) for i in range(most)] for start, stop in bounds])
        windows = take_at(windows, constant(at), axes=(kept + 2 * k,))
        shape = [1] * (2 * rank)
        shape[k], shape[rank + k] = at.shape
        place = place * n + constant(at.reshape(shape))
    order = (*range(kept), *(kept + 2 * k for k in range(rank)),
             *(kept + 2 * k + 1 for k in range(rank)))
    counts = out[0].shape[kept:]
    flat = reshape(permute_dims(windows, axes=order), shape=(*out[0].shape, -1))
    first = reduce.argmax(flat, axis=-1, keepdims=True)
    places = reshape(place, shape=(*(1 for _ in range(kept)), *counts, -1))
    spread = e.add(places, zeros(shape=flat.shape, dtype="int64"))
    return tuple(reshape(gather(v, first, axis=flat.ndim - 1), shape=out[0].shape)
                 for v in (flat, spread))
