"""Reductions over segments of an axis, and over bags of rows of a table.

Which segment an element belongs to is told by where segments start: as many have started at it or
before it. Elements after the last segment belong to one more, which is cut off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from terrazzo.graph.ir import TensorType, Value
from terrazzo.graph.reach import must_reach
from terrazzo.index import Index
from terrazzo.ops import elementwise as e
from terrazzo.ops import indexing, lookups
from terrazzo.ops.creation import arange, full, ones, zeros
from terrazzo.ops.getitem import getitem
from terrazzo.ops.joining import concat
from terrazzo.ops.reduce import sum_
from terrazzo.ops.scan import cumsum
from terrazzo.ops.shape import broadcast_to, permute_dims, reshape
from terrazzo.torch.aten.registry import aten, unsupported

_HOW = {"sum": "add", "mean": "add", "prod": "mul", "max": "max", "min": "min"}
_NEUTRAL = {"add": 0.0, "mul": 1.0, "max": -math.inf, "min": math.inf}


def _gathered(rows: Value, places: Value, count: Index, how: str, start: float = math.nan) -> Value:
    """Rows combined into so many, each into the one whose place is told."""
    into = full(shape=(count, *rows.shape[1:]), dtype=rows.dtype,
                value=_NEUTRAL[how] if math.isnan(start) else start)
    return indexing.scatter_at(into, rows, places, axes=(0,), reduce=how)


def _spread(x: Value, like: Value) -> Value:
    """One number a row as wide as rows of something else."""
    return reshape(x, shape=(*x.shape, *(1 for _ in range(like.ndim - x.ndim))))


# ---------------------------------------------------------------- segments
class _Segments:
    """Segments of an axis of some data, with what is in front of the axis taken together."""

    def __init__(self, data: Value, lengths: Value | None, offsets: Value | None):
        told = lengths if lengths is not None else offsets
        if told is None:
            unsupported("segments that are told by indices")
        self.lead = tuple(told.shape[:-1])
        self.inner = tuple(data.shape[told.ndim:])
        batch, n = math.prod(self.lead), data.shape[told.ndim - 1]
        told = reshape(e.astype(told, dtype="int64"), shape=(batch, told.shape[-1]))
        if lengths is not None:
            ends = cumsum(told, axis=1)
            starts, self.lengths = ends - told, told
        else:
            starts = getitem(told, (slice(None), slice(0, told.shape[1] - 1)))
            ends = getitem(told, (slice(None), slice(1, None)))
            self.lengths = ends - starts
        self.count = self.lengths.shape[1]
        number = arange(start=n, dtype="int64")
        # As many have ended at an element or before it: segments that are empty among them.
        ended = _gathered(ones(shape=(batch * self.count,), dtype="int64"),
                          reshape(ends + _rows(batch, n + 1), shape=(-1,)), batch * (n + 1), "add")
        ended = cumsum(reshape(ended, shape=(batch, n + 1)), axis=1)
        ended = getitem(ended, (slice(None), slice(0, n)))
        first = getitem(starts, (slice(None), slice(0, 1)))
        outside = e.less(reshape(number, shape=(1, n)), first)  # before where the first one starts
        place = e.where(outside, self.count, e.minimum(ended, self.count))
        self.places = reshape(place + _rows(batch, self.count + 1), shape=(-1,))
        self.batch, self.shape = batch, tuple(data.shape)

    def rows(self, data: Value) -> Value:
        return reshape(data, shape=(math.prod(self.shape[:len(self.lead) + 1]), *self.inner))

    def combined(self, rows: Value, how: str, start: float = math.nan) -> Value:
        """What is in each segment, of each batch: [batch, count, *inner]."""
        made = _gathered(rows, self.places, self.batch * (self.count + 1), how, start)
        apart = reshape(made, shape=(self.batch, self.count + 1, *self.inner))
        return getitem(apart, (slice(None), slice(0, self.count)))

    def at_elements(self, x: Value) -> Value:
        """For each element what there is of its segment, given [batch, count, *inner]."""
        rest = tuple(x.shape[2:])
        last = zeros(shape=(self.batch, 1, *rest), dtype=x.dtype)
        wide = reshape(concat(x, last, axis=1), shape=(self.batch * (self.count + 1), *rest))
        return lookups.take(wide, self.places, axis=0)

    def grouped(self, x: Value) -> Value:
        """What there is of segments, as torch has it, by batches."""
        return reshape(x, shape=(self.batch, self.count, *self.inner))


def _rows(batch: Index, width: Index) -> Value:
    """Where each of so many rows of a width starts, in a column."""
    return reshape(arange(start=batch, dtype="int64") * width, shape=(batch, 1))


@aten("segment_reduce", typed=True)
def segment_reduce(data: Any, reduce: str, lengths: Any = None, indices: Any = None,
                   offsets: Any = None, axis: int = 0, unsafe: bool = False, initial: Any = None,
                   *, out: TensorType) -> Any:
    start = math.nan if initial is None else float(initial)
    if math.prod(out.shape) == 0 or data.size == 0:
        if math.prod(out.shape) and reduce == "mean" and initial is None:
            return full(shape=out.shape, value=math.nan, dtype=out.dtype)
        value = _NEUTRAL[_HOW[reduce]] if initial is None else initial
        return full(shape=out.shape, value=value, dtype=out.dtype)
    parts = _Segments(data, lengths, offsets)
    wide = e.astype(parts.rows(data), dtype=data.dtype.compute)
    made = parts.combined(wide, _HOW[reduce], start)
    if reduce == "mean":
        count = _spread(parts.lengths, made)
        empty = full(shape=(), value=start, dtype=made.dtype)  # nan, or what there was before
        made = e.where(e.greater(count, 0), made / e.astype(e.maximum(count, 1), dtype=made.dtype),
                       empty)
    return reshape(made, shape=out.shape)


@aten("_segment_reduce_backward", typed=True)
def segment_reduce_backward(grad: Any, output: Any, data: Any, reduce: str, lengths: Any = None,
                            offsets: Any = None, axis: int = 0, initial: Any = None, *,
                            out: TensorType) -> Any:
    if data.size == 0 or grad.size == 0:
        return zeros(shape=out.shape, dtype=out.dtype)
    parts = _Segments(data, lengths, offsets)
    wide = data.dtype.compute
    rows = parts.rows(data)
    g = e.astype(parts.grouped(grad), dtype=wide)
    if reduce == "mean":
        count = e.astype(e.maximum(parts.lengths, 1), dtype=wide)
        g = g / _spread(count, g)
    here = parts.at_elements(g)
    if reduce in ("max", "min"):
        chosen = e.logical_or(e.equal(rows, parts.at_elements(parts.grouped(output))),
                              e.isnan(rows))
        chosen = e.astype(chosen, dtype=wide)
        count = e.maximum(parts.at_elements(parts.combined(chosen, "add")), 1)
        # Shared by all that are it; torch shares out what is positive only.
        here = e.where(e.greater(here, 0), here / count, here) * chosen
    elif reduce == "prod":
        here = here * _product_of_others(parts, e.astype(rows, dtype=wide), initial)
    return reshape(here, shape=out.shape)


def _product_of_others(parts: _Segments, rows: Value, initial: Any) -> Value:
    """Of all in a segment but one: where one is zero, nothing can be divided by it."""
    is_zero = e.equal(rows, 0)
    zero_count = parts.at_elements(parts.combined(e.astype(is_zero, dtype=rows.dtype), "add"))
    safe = e.where(is_zero, 1.0, rows)
    product = parts.at_elements(parts.combined(safe, "mul", 1.0 if initial is None
                                               else float(initial)))
    others = zero_count - e.astype(is_zero, dtype=rows.dtype)
    return e.where(e.greater(others, 0), 0.0, product / safe)


# ---------------------------------------------------------------- bags
def _bags(indices: Value, offsets: Value) -> Value:
    """The bag of each index."""
    n = indices.shape[0]
    starts = _gathered(ones(shape=offsets.shape, dtype="int64"), offsets, n + 1, "add")
    return getitem(cumsum(starts, axis=0), slice(0, n)) - 1


def _counts(indices: Value, bags: Value, count: Index, padding_idx: int) -> tuple[Value, Value]:
    """Whether each index counts (those of padding do not), and how many do in each bag."""
    counts = e.astype(e.not_equal(indices, padding_idx), dtype="int64")
    return counts, _gathered(counts, bags, count, "add")


@aten("_embedding_bag", "_embedding_bag_forward_only", typed=True)
def embedding_bag(weight: Any, indices: Any, offsets: Any, scale_grad_by_freq: bool = False,
                  mode: int = 0, sparse: bool = False, per_sample_weights: Any = None,
                  include_last_offset: bool = False, padding_idx: int = -1, *,
                  out: Sequence[TensorType]) -> Any:
    count = out[0].shape[0]
    if indices.size == 0 or math.prod(out[0].shape) == 0:
        return tuple(zeros(shape=t.shape, dtype=t.dtype) for t in out)
    if include_last_offset:
        offsets = getitem(offsets, slice(0, count))
    must_reach(indices, weight.shape[0], wraps=False)
    indices = e.astype(indices, dtype="int64")
    bags = _bags(indices, e.astype(offsets, dtype="int64"))
    counts, sizes = _counts(indices, bags, count, padding_idx)
    rows = e.astype(lookups.take(weight, indices, axis=0), dtype=weight.dtype.compute)
    inside = e.greater(_spread(counts, rows), 0)
    chosen = zeros(shape=(count,), dtype="int64")
    if mode == 2:
        made, chosen = _largest(rows, indices, bags, inside, sizes)
    else:
        if per_sample_weights is not None:
            rows = rows * _spread(e.astype(per_sample_weights, dtype=rows.dtype), rows)
        made = _gathered(e.where(inside, rows, 0.0), bags, count, "add")
        if mode == 1:
            made = made / _spread(e.astype(e.maximum(sizes, 1), dtype=made.dtype), made)
    # Beside a sum torch tells no sizes, and beside a mean it tells them twice.
    told = {0: (chosen, chosen), 1: (sizes, sizes), 2: (sizes, chosen)}[mode]
    found = (made, bags, *told)
    return tuple(v if tuple(v.shape) == tuple(t.shape) else zeros(shape=t.shape, dtype=t.dtype)
                 for v, t in zip(found, out))


def _largest(rows: Value, indices: Value, bags: Value, inside: Value, sizes: Value
             ) -> tuple[Value, Value]:
    """The largest of each column in a bag, and the row of the table that it is first found in."""
    n, width = rows.shape
    count = sizes.shape[0]
    most = _gathered(e.where(inside, rows, -math.inf), bags, count, "max")
    number = broadcast_to(reshape(arange(start=n, dtype="int64"), shape=(n, 1)), shape=(n, width))
    there = e.logical_and(e.equal(rows, lookups.take(most, bags, axis=0)), inside)
    into = full(shape=(count, width), value=n, dtype="int64")
    first = indexing.scatter_at(into, e.where(there, number, n), bags, axes=(0,), reduce="min")
    row = lookups.take(indices, e.minimum(first, n - 1), axis=0)
    filled = e.greater(_spread(sizes, most), 0)
    return e.where(filled, most, 0.0), e.where(filled, row, 0)


@aten("_embedding_bag_backward", typed=True)
def embedding_bag_backward(grad: Any, indices: Any, offsets: Any, offset2bag: Any, bag_size: Any,
                           maximum_indices: Any, num_weights: Any, scale_grad_by_freq: bool,
                           mode: int, sparse: bool, per_sample_weights: Any = None,
                           padding_idx: int = -1, *, out: TensorType) -> Any:
    if sparse:
        unsupported("a gradient that is sparse")
    if scale_grad_by_freq:  # torch 2.13 looks up some of them at other indices
        unsupported("a gradient that is divided by frequencies, which torch has its own way with")
    if indices.size == 0 or grad.size == 0:
        return zeros(shape=out.shape, dtype=out.dtype)
    count = grad.shape[0]
    indices = e.astype(indices, dtype="int64")
    bags = _bags(indices, getitem(e.astype(offsets, dtype="int64"), slice(0, count)))
    counts, sizes = _counts(indices, bags, count, padding_idx)
    g = e.astype(grad, dtype=grad.dtype.compute)
    if mode == 2:
        g = e.where(e.greater(_spread(sizes, g), 0), g, 0.0)
        return _to_columns(g, e.astype(maximum_indices, dtype="int64"), out)
    if mode == 1:
        g = g / _spread(e.astype(e.maximum(sizes, 1), dtype=g.dtype), g)
    rows = lookups.take(g, bags, axis=0)
    if per_sample_weights is not None:
        rows = rows * _spread(e.astype(per_sample_weights, dtype=rows.dtype), rows)
    rows = e.where(e.greater(_spread(counts, rows), 0), rows, 0.0)
    return _gathered(rows, indices, out.shape[0], "add")


def _to_columns(g: Value, places: Value, out: TensorType) -> Value:
    """Each number added to the row of the table that is told for it, in its column."""
    table = zeros(shape=(out.shape[1], out.shape[0]), dtype=g.dtype)
    made = indexing.scatter(table, permute_dims(places, axes=(1, 0)), permute_dims(g, axes=(1, 0)),
                            axis=1, reduce="add")
    return permute_dims(made, axes=(1, 0))


@aten("_embedding_bag_per_sample_weights_backward")
def embedding_bag_weights_backward(grad: Any, weight: Any, indices: Any, offsets: Any,
                                   offset2bag: Any, mode: int, padding_idx: int = -1) -> Any:
    if indices.size == 0:
        return zeros(shape=indices.shape, dtype=grad.dtype)
    indices = e.astype(indices, dtype="int64")
    bags = _bags(indices, getitem(e.astype(offsets, dtype="int64"), slice(0, grad.shape[0])))
    wide = grad.dtype.compute
    rows = lookups.take(e.astype(grad, dtype=wide), bags, axis=0)
    products = sum_(rows * e.astype(lookups.take(weight, indices, axis=0), dtype=wide), axis=1)
    return e.where(e.equal(indices, padding_idx), 0.0, products)
