"""Reading at places that tensors tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from terrazzo.base.shapes import broadcast_shapes, normalize_axis
from terrazzo.graph.ir import Value
from terrazzo.graph.reach import must_reach
from terrazzo.ops import indexing, lookups
from terrazzo.ops.creation import zeros
from terrazzo.ops.getitem import getitem
from terrazzo.ops.shape import permute_dims, reshape
from terrazzo.torch.aten.registry import aten, unsupported


@aten("embedding")
def embedding(weight: Any, indices: Any, *padding_and_more: Any, **more: Any) -> Any:
    must_reach(indices, weight.shape[0], wraps=False)
    return lookups.embedding(weight, indices)


@aten("index_select")
def index_select(x: Any, dim: int, index: Any) -> Any:
    rows = with_axis(x)
    must_reach(index, rows.shape[normalize_axis(dim, rows.ndim)], wraps=False)
    taken = lookups.take(rows, with_axis(index), axis=dim)
    return taken if x.ndim else reshape(taken, shape=())


@aten("gather")
def gather(x: Any, dim: int, index: Any, sparse_grad: bool = False) -> Any:
    if index.size == 0:
        return zeros(shape=index.shape, dtype=x.dtype)
    rows, places = with_axis(x), with_axis(index)
    axis = normalize_axis(dim, rows.ndim)
    must_reach(index, rows.shape[axis], wraps=False)
    # An index may be smaller than x in the other axes: then the rest of x is not looked at.
    found = indexing.gather(_first_rows(rows, places, axis), places, axis=axis)
    return reshape(found, shape=index.shape)


def with_axis(x: Value) -> Value:
    """A single number as a row of one."""
    return x if x.ndim else reshape(x, shape=(1,))


def _first_rows(x: Value, index: Value, axis: int) -> Value:
    cuts = tuple(slice(None) if d == axis or x.shape[d] is index.shape[d]
                 or x.shape[d] == index.shape[d] else slice(0, index.shape[d])
                 for d in range(x.ndim))
    return x if all(cut == slice(None) for cut in cuts) else getitem(x, cuts)


@aten("take")
def take(x: Any, index: Any) -> Any:
    if index.size == 0:
        return zeros(shape=index.shape, dtype=x.dtype)
    flat = reshape(x, shape=(-1,))
    must_reach(index, flat.shape[0])
    return lookups.take(flat, index, axis=0)


def indexed_axes(x: Value, indices: Sequence[Any], safe: bool = True
                 ) -> tuple[list[int], list[Value]]:
    """The axes that are indexed, and by what; of an unsafe index torch says that it is inside."""
    axes = [d for d, i in enumerate(indices) if i is not None]
    found = [indices[d] for d in axes]
    if any(i.dtype.is_bool or i.dtype.name == "uint8" for i in found):
        unsupported("an index by a mask, whose result has no known size")
    empty = any(x.shape[d] == 0 for d in range(x.ndim) if d not in axes)
    for axis, places in zip(axes, found) if safe and not empty else ():
        must_reach(places, x.shape[axis])
    return axes, found


@aten("_unsafe_index.Tensor")
def unsafe_index(x: Any, indices: Sequence[Any]) -> Any:
    return index(x, indices, safe=False)


@aten("index.Tensor")
def index(x: Any, indices: Sequence[Any], safe: bool = True) -> Any:
    axes, found = indexed_axes(x, indices, safe)
    if not axes:
        return x
    taken = indexing.take_at(x, *found, axes=tuple(axes))
    first, rank = axes[0], len(broadcast_shapes(*(i.shape for i in found)))
    if axes != list(range(first, first + len(axes))) and first:
        # Index tensors apart from each other put their axes in front.
        taken = permute_dims(taken, axes=(*range(first, first + rank), *range(first),
                                          *range(first + rank, taken.ndim)))
    return taken
