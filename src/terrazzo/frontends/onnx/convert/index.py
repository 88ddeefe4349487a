"""Operators whose addresses are data: gathers, scatters, one-hot, top-k, reversed sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from terrazzo.base.shapes import contiguous_strides, normalize_axis, num_elements
from terrazzo.dtypes import int64
from terrazzo.frontends.onnx.importer import astype, literal
from terrazzo.frontends.onnx.reasons import NeedsValue
from terrazzo.frontends.onnx.registry import Call, converts
from terrazzo.graph.ir import Value
from terrazzo.graph.patterns import splat
from terrazzo.graph.reach import must_reach
from terrazzo.index import Index, maximum
from terrazzo.index.guards import granted
from terrazzo.ops import arrange, indexing, lookups
from terrazzo.ops.creation import arange
from terrazzo.ops.elementwise import equal, logical_and, where
from terrazzo.ops.joining import concat
from terrazzo.ops.selection import topk
from terrazzo.ops.shape import broadcast_to, expand_dims, reshape, span

_REDUCTIONS = {"none": "set", "add": "add", "mul": "mul", "max": "max", "min": "min"}


def _along(axis: int, rank: int, size: Index) -> Value:
    """0, 1, 2, ... along one of `rank` axes."""
    return reshape(arange(start=size), shape=tuple(size if d == axis else 1 for d in range(rank)))


# ---------------------------------------------------------------- gathering
@converts("Gather")
def gather(call: Call) -> Value:
    x, indices = call.value(0), call.value(1)
    axis = normalize_axis(call.attr("axis", 0), x.ndim)
    must_reach(indices, x.shape[axis])
    return lookups.take(x, indices, axis=axis)


@converts("GatherElements")
def gather_elements(call: Call) -> Value:
    x, indices = call.value(0), call.value(1)
    axis = normalize_axis(call.attr("axis", 0), x.ndim)
    must_reach(indices, x.shape[axis])
    return indexing.gather(x, indices, axis=axis)


@converts("GatherND")
def gather_nd(call: Call) -> Value:
    x, indices, batch = call.value(0), call.value(1), call.attr("batch_dims", 0)
    _must_reach_each(indices, x.shape[batch:])
    return lookups.gather_nd(x, indices, batch_dims=batch)


def _must_reach_each(indices: Value, sizes: Sequence[Index]) -> None:
    """Coordinates in the last axis have to be inside of these sizes, each of its own."""
    for places, size in zip(lookups.columns_of(indices), sizes):
        must_reach(places, size)


# ---------------------------------------------------------------- scattering
def _reduction(call: Call) -> str:
    name = call.attr("reduction", "none")
    if name not in _REDUCTIONS:
        call.unsupported(f"has no reduction {name!r}")
    return _REDUCTIONS[name]


@converts("ScatterElements", "Scatter")
def scatter_elements(call: Call) -> Value:
    x, indices, updates = (call.value(i) for i in range(3))
    axis = normalize_axis(call.attr("axis", 0), x.ndim)
    must_reach(indices, x.shape[axis])
    return indexing.scatter(x, indices, updates, axis=axis, reduce=_reduction(call))


@converts("ScatterND")
def scatter_nd(call: Call) -> Value:
    x, indices, updates = (call.value(i) for i in range(3))
    _must_reach_each(indices, x.shape)
    return lookups.scatter_nd(x, indices, updates, reduce=_reduction(call))


@converts("TensorScatter")
def tensor_scatter(call: Call) -> Value:
    """Every place of the cache reads what lands there: no order of writes, so it fuses."""
    cache, update, starts = call.value(0), call.value(1), call.optional(2)
    axis = normalize_axis(call.attr("axis", -2), cache.ndim)
    if axis == 0:
        call.unsupported("writes along the axis of the batch")
    size, count = cache.shape[axis], update.shape[axis]
    if count == 0:
        return cache
    place = _along(axis, cache.ndim, size)
    if starts is not None:
        batch = reshape(astype(starts, dtype=int64), shape=(-1, *(1 for _ in cache.shape[1:])))
        place = place - batch
    if call.attr("mode", "linear") == "circular":
        place = place % size
    taken = indexing.gather(update, broadcast_to(place, shape=cache.shape), axis=axis)
    return where(logical_and(place >= 0, place < count), taken, cache)


# ---------------------------------------------------------------- one-hot, orders, triangles
@converts("OneHot")
def one_hot(call: Call) -> Value:
    indices, values = astype(call.value(0), dtype=int64), call.value(2)
    depth = call.known(1)
    if depth is None:
        raise NeedsValue(call.node.input[1])
    size = depth.reshape(-1)[0]
    size = int(size) if depth.dtype != object or isinstance(size, int) else size
    axis = normalize_axis(call.attr("axis", -1), indices.ndim + 1)
    if call.version >= 11:  # before, negative indices were outside
        indices = where(indices < 0, indices + size, indices)
    hit = equal(expand_dims(indices, axis=axis), _along(axis, indices.ndim + 1, size))
    off, on = (reshape(span(values, 0, k, k + 1), shape=()) for k in range(2))
    return where(hit, on, off)


@converts("TopK")
def top_k(call: Call) -> tuple[Value, Value]:
    x, axis, largest = call.value(0), call.attr("axis", -1), bool(call.attr("largest", 1))
    k = call.attr("k") if call.version < 10 else call.sizes(1)[0]
    if not isinstance(k, int) and not granted("<=", k, x.shape[axis]):
        call.unsupported(f"wants {k} of {x.shape[axis]} elements")
    return topk(x, k=k, axis=axis, largest=largest)


@converts("Trilu")
def trilu(call: Call) -> Value:
    k = call.number(1) if call.has(1) else 0
    x, kept = call.value(0), arrange.triu if call.attr("upper", 1) else arrange.tril
    return astype(kept(x, k=k), dtype=x.dtype)  # the zeros of truth values are numbers


@converts("ReverseSequence")
def reverse_sequence(call: Call) -> Value:
    x, lengths = call.value(0), call.value(1)
    time, batch = call.attr("time_axis", 0), call.attr("batch_axis", 1)
    if {time, batch} != {0, 1}:
        call.unsupported(f"has time axis {time} and batch axis {batch}, which are 0 and 1")
    step, member = _along(time, 2, x.shape[time]), _along(batch, 2, x.shape[batch])
    ends = expand_dims(astype(lengths, dtype=int64), axis=time)
    source = where(step < ends, ends - 1 - step, step)
    return indexing.take_at(x, *((source, member) if time == 0 else (member, source)),
                            axes=(0, 1))


# ---------------------------------------------------------------- as many as there are
@converts("Compress")
def compress(call: Call) -> Value:
    chosen = call.known(1)
    if chosen is None or chosen.dtype == object:
        call.unsupported("has as many results as its condition is true, which is not known")
    x, axis = call.value(0), call.attr("axis")
    if axis is None:
        x, axis = reshape(x, shape=(-1,)), 0
    return lookups.take(x, literal(np.flatnonzero(chosen)), axis=axis)


@converts("NonZero")
def non_zero(call: Call) -> Value:
    x = call.value(0)
    known = call.known(0)
    if known is not None and known.dtype != object:
        return literal(np.array(np.nonzero(np.atleast_1d(known != 0)), np.int64)[:known.ndim])
    if splat(x) in (None, 0) or x.ndim == 0:
        call.unsupported("has as many results as there are elements that are not 0, which is not "
                         "known")
    # Older exporters write a range as the places of a tensor of ones.
    flat = arange(start=num_elements(x.shape))
    rows: list[Any] = [flat // maximum(stride, 1) % maximum(n, 1)
                       for n, stride in zip(x.shape, contiguous_strides(x.shape))]
    return concat(*(expand_dims(row, axis=0) for row in rows), axis=0)
