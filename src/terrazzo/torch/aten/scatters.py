"""Writing at places that tensors tell."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from terrazzo.base.shapes import broadcast_shapes, normalize_axis
from terrazzo.graph.ir import TensorType, Value
from terrazzo.graph.reach import must_reach
from terrazzo.ops import indexing, lookups
from terrazzo.ops.creation import arange, full, ones, zeros
from terrazzo.ops.elementwise import astype, floor_divide, maximum, where
from terrazzo.ops.getitem import getitem
from terrazzo.ops.joining import stack
from terrazzo.ops.scan import cumsum
from terrazzo.ops.shape import broadcast_to, permute_dims, reshape
from terrazzo.torch.aten.indexing import indexed_axes, with_axis
from terrazzo.torch.aten.registry import aten

_HOW = {"add": "add", "multiply": "mul", "sum": "add", "prod": "mul", "amax": "max",
        "amin": "min", "mean": "add"}

Write = Callable[[Value, Any, str], Value]  # a tensor, what is written into it, and how


def _writer(x: Value, dim: int, index: Value) -> Write:
    """Writes what lies beside the index at the elements that it names along an axis."""
    index = with_axis(index)
    axis = normalize_axis(dim, max(x.ndim, 1))
    must_reach(index, with_axis(x).shape[axis], wraps=False)

    def write(into: Value, src: Any, how: str) -> Value:
        if index.size == 0:
            return into
        rows = with_axis(into)
        if isinstance(src, Value):
            src = with_axis(astype(src, dtype=into.dtype))
            if src.ndim == index.ndim and tuple(src.shape) != tuple(index.shape):
                src = getitem(src, tuple(slice(0, n) for n in index.shape))
            src = broadcast_to(src, shape=index.shape)
        else:
            src = full(shape=index.shape, value=src, dtype=into.dtype)
        if all(rows.shape[d] is n or rows.shape[d] == n
               for d, n in enumerate(index.shape) if d != axis):
            made = indexing.scatter(rows, index, src, axis=axis, reduce=how)
        else:  # fewer indices than there are rows: each is told its place in all axes
            places = [index if d == axis else _places(n, d, index.ndim)
                      for d, n in enumerate(index.shape)]
            made = indexing.scatter_at(rows, src, *places, axes=tuple(range(index.ndim)),
                                       reduce=how)
        return reshape(made, shape=into.shape)

    return write


def _places(n: Any, axis: int, rank: int) -> Value:
    return reshape(arange(start=n, dtype="int64"),
                   shape=tuple(n if d == axis else 1 for d in range(rank)))


def _combined(x: Value, write: Write, src: Any, reduce: str, include_self: bool) -> Value:
    """Elements combined with all that is written to them, and with what they were unless told."""
    how = _HOW[reduce]
    start = x
    if not include_self:
        start = write(x, _neutral(x, how), "set")
    made = write(start, src, how)
    if reduce != "mean":
        return made
    count = write((ones if include_self else zeros)(shape=x.shape, dtype=x.dtype), 1, "add")
    count = maximum(count, 1)
    return made / count if x.dtype.is_float else floor_divide(made, count)


def _neutral(x: Value, how: str) -> Any:
    if how in ("add", "mul"):
        return 0 if how == "add" else 1
    if x.dtype.is_float:
        return -float("inf") if how == "max" else float("inf")
    return x.dtype.min if how == "max" else x.dtype.max


@aten("scatter.src", "scatter.value")
def scatter(x: Any, dim: int, index: Any, src: Any = None, value: Any = None) -> Any:
    return _writer(x, dim, index)(x, value if src is None else src, "set")


@aten("scatter.reduce", "scatter.value_reduce")
def scatter_with(x: Any, dim: int, index: Any, src: Any, reduce: str = "add") -> Any:
    return _writer(x, dim, index)(x, src, _HOW[reduce])


@aten("scatter_add")
def scatter_add(x: Any, dim: int, index: Any, src: Any) -> Any:
    return _writer(x, dim, index)(x, src, "add")


@aten("scatter_reduce.two")
def scatter_reduce(x: Any, dim: int, index: Any, src: Any, reduce: str, include_self: bool = True
                   ) -> Any:
    return _combined(x, _writer(x, dim, index), src, reduce, include_self)


@aten("_unsafe_index_put")
def unsafe_index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    return index_put(x, indices, values, accumulate, safe=False)


@aten("index_put")
def index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False,
              safe: bool = True) -> Any:
    used = [i for i in indices if i is not None]
    if len(used) == 1 and used[0].dtype.is_bool:
        mask = used[0]
        lead = next(d for d, i in enumerate(indices) if i is not None)
        shape = (*(1 for _ in range(lead)), *mask.shape,
                 *(1 for _ in range(x.ndim - lead - mask.ndim)))
        if values.ndim == 0:
            written = astype(values, dtype=x.dtype)
            return where(reshape(mask, shape=shape), x + written if accumulate else written, x)
    axes, found = indexed_axes(x, indices, safe)
    joint = broadcast_shapes(*(i.shape for i in found))
    apart = axes != list(range(axes[0], axes[0] + len(axes)))
    kept = [n for d, n in enumerate(x.shape) if d not in axes]
    first = 0 if apart else axes[0]
    shape = (*kept[:first], *joint, *kept[first:])
    values = broadcast_to(astype(values, dtype=x.dtype), shape=shape)
    how = "add" if accumulate else "set"
    if not apart:
        return indexing.scatter_at(x, values, *found, axes=tuple(axes), reduce=how)
    # Indexed axes in front, as torch has the values then; and back.
    order = (*axes, *(d for d in range(x.ndim) if d not in axes))
    made = indexing.scatter_at(permute_dims(x, axes=order), values, *found,
                               axes=tuple(range(len(axes))), reduce=how)
    return permute_dims(made, axes=tuple(order.index(d) for d in range(x.ndim)))


def _slice_writer(x: Value, dim: int, index: Value, wraps: bool = False) -> Write:
    """Writes whole slices at places along an axis, which may count from its end."""
    axis = normalize_axis(dim, max(x.ndim, 1))
    index = with_axis(index)
    must_reach(index, with_axis(x).shape[axis], wraps=wraps)

    def write(into: Value, src: Any, how: str) -> Value:
        rows = with_axis(into)
        shape = tuple(index.shape[0] if d == axis else n for d, n in enumerate(rows.shape))
        if isinstance(src, Value):
            src = reshape(astype(src, dtype=into.dtype), shape=shape)
        else:
            src = full(shape=shape, value=src, dtype=into.dtype)
        if index.size == 0 or into.size == 0:
            return into
        made = indexing.scatter_at(rows, src, index, axes=(axis,), reduce=how)
        return reshape(made, shape=into.shape)

    return write


@aten("index_add")
def index_add(x: Any, dim: int, index: Any, source: Any, alpha: Any = 1) -> Any:
    return _slice_writer(x, dim, index)(x, source if alpha == 1 else source * alpha, "add")


@aten("index_copy")
def index_copy(x: Any, dim: int, index: Any, source: Any) -> Any:
    # What torch takes apart (index_fill) may count from the end, though a call of its own may not.
    return _slice_writer(x, dim, index, wraps=True)(x, source, "set")


@aten("index_reduce")
def index_reduce(x: Any, dim: int, index: Any, source: Any, reduce: str,
                 include_self: bool = True) -> Any:
    return _combined(x, _slice_writer(x, dim, index), source, reduce, include_self)


@aten("put")
def put(x: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    if index.size == 0:
        return x
    flat = [reshape(v, shape=(-1,)) for v in (x, source, index)]
    must_reach(index, flat[0].shape[0])
    made = indexing.scatter_at(flat[0], flat[1], flat[2], axes=(0,),
                               reduce="add" if accumulate else "set")
    return reshape(made, shape=x.shape)


@aten("masked_scatter")
def masked_scatter(x: Any, mask: Any, source: Any) -> Any:
    shape = broadcast_shapes(x.shape, mask.shape)
    x, mask = broadcast_to(x, shape=shape), broadcast_to(mask, shape=shape)
    if source.size == 0 or x.size == 0:
        return x
    number = cumsum(reshape(astype(mask, dtype="int64"), shape=(-1,)), axis=0) - 1
    taken = lookups.take(reshape(source, shape=(-1,)), maximum(number, 0), axis=0)
    return where(mask, reshape(astype(taken, dtype=x.dtype), shape=x.shape), x)


@aten("masked_scatter_backward", typed=True)
def masked_scatter_backward(grad: Any, mask: Any, sizes: Any, *, out: TensorType) -> Any:
    """What was read, in order: elements under the mask first, then zeros."""
    count = math.prod(out.shape)
    if count == 0 or grad.size == 0:
        return zeros(shape=out.shape, dtype=out.dtype)
    mask = reshape(broadcast_to(mask, shape=grad.shape), shape=(-1,))
    number = cumsum(astype(mask, dtype="int64"), axis=0) - 1
    # What is not under the mask goes to a place of its own, which is cut off.
    place = where(mask, number, count)
    made = indexing.scatter_at(zeros(shape=(count + 1,), dtype=grad.dtype),
                               reshape(grad, shape=(-1,)), place, axes=(0,), reduce="set")
    return reshape(getitem(made, slice(0, count)), shape=out.shape)


@aten("nonzero_static", typed=True)
def nonzero_static(x: Any, size: int, fill_value: int = -1, *, out: TensorType) -> Any:
    if math.prod(out.shape) == 0 or x.size == 0:
        return full(shape=out.shape, value=fill_value, dtype=out.dtype)
    found = lookups.nonzero(x, size=size, fill_value=fill_value)
    return stack(*found, axis=1)
