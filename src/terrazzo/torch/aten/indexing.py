"""Reading and writing at places that tensors tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from terrazzo.base.shapes import broadcast_shapes, normalize_axis
from terrazzo.graph.ir import Value
from terrazzo.ops import indexing, lookups
from terrazzo.ops.elementwise import astype, where
from terrazzo.ops.getitem import getitem
from terrazzo.ops.shape import broadcast_to, permute_dims, reshape
from terrazzo.torch.aten.registry import aten, unsupported


@aten("embedding")
def embedding(weight: Any, indices: Any, *padding_and_more: Any, **more: Any) -> Any:
    return lookups.embedding(weight, indices)


@aten("index_select")
def index_select(x: Any, dim: int, index: Any) -> Any:
    if x.ndim == 0:
        unsupported("index_select of a tensor without axes")
    if index.ndim == 0:
        index = reshape(index, shape=(1,))
    return lookups.take(x, index, axis=dim)


@aten("gather")
def gather(x: Any, dim: int, index: Any, sparse_grad: bool = False) -> Any:
    if x.ndim == 0 or index.ndim == 0:
        unsupported("gather with a tensor without axes")
    axis = normalize_axis(dim, x.ndim)
    # An index may be smaller than x in the other axes: then the rest of x is not looked at.
    return indexing.gather(_first_rows(x, index, axis), index, axis=axis)


def _first_rows(x: Value, index: Value, axis: int) -> Value:
    cuts = tuple(slice(None) if d == axis or x.shape[d] is index.shape[d]
                 or x.shape[d] == index.shape[d] else slice(0, index.shape[d])
                 for d in range(x.ndim))
    return x if all(cut == slice(None) for cut in cuts) else getitem(x, cuts)


_HOW = {"add": "add", "multiply": "mul", "sum": "add", "prod": "mul", "amax": "max",
        "amin": "min"}


def _scattered(x: Value, dim: int, index: Value, src: Any, how: str) -> Any:
    if x.ndim == 0 or index.ndim == 0:
        unsupported("scatter with a tensor without axes")
    axis = normalize_axis(dim, x.ndim)
    if any(x.shape[d] is not index.shape[d] and x.shape[d] != index.shape[d]
           for d in range(x.ndim) if d != axis):
        unsupported("scatter with fewer indices than the tensor has rows")
    if isinstance(src, Value):
        src = astype(src, dtype=x.dtype)
        if src.ndim:
            cuts = tuple(slice(0, n) for n in index.shape)
            src = src if tuple(src.shape) == tuple(index.shape) else getitem(src, cuts)
    else:
        from terrazzo.ops.creation import full

        src = full(shape=index.shape, value=src, dtype=x.dtype)
    return indexing.scatter(x, index, broadcast_to(src, shape=index.shape), axis=axis, reduce=how)


@aten("scatter.src", "scatter.value")
def scatter(x: Any, dim: int, index: Any, src: Any = None, value: Any = None) -> Any:
    return _scattered(x, dim, index, value if src is None else src, "set")


@aten("scatter.reduce", "scatter.value_reduce")
def scatter_with(x: Any, dim: int, index: Any, src: Any, reduce: str = "add") -> Any:
    return _scattered(x, dim, index, src, _HOW[reduce])


@aten("scatter_add")
def scatter_add(x: Any, dim: int, index: Any, src: Any) -> Any:
    return _scattered(x, dim, index, src, "add")


@aten("scatter_reduce.two")
def scatter_reduce(x: Any, dim: int, index: Any, src: Any, reduce: str, include_self: bool = True
                   ) -> Any:
    if reduce not in _HOW or not include_self:
        unsupported("scatter_reduce by a mean, or without the tensor itself")
    return _scattered(x, dim, index, src, _HOW[reduce])


def _indices(x: Value, indices: Sequence[Any]) -> tuple[list[int], list[Value]]:
    """The axes that are indexed, and by what."""
    axes = [d for d, i in enumerate(indices) if i is not None]
    found = [indices[d] for d in axes]
    if any(i.dtype.is_bool or i.dtype.name == "uint8" for i in found):
        unsupported("an index by a mask, whose result has no known size")
    return axes, found


@aten("index.Tensor", "_unsafe_index.Tensor")
def index(x: Any, indices: Sequence[Any]) -> Any:
    axes, found = _indices(x, indices)
    if not axes:
        return x
    taken = indexing.take_at(x, *found, axes=tuple(axes))
    first, rank = axes[0], len(broadcast_shapes(*(i.shape for i in found)))
    if axes != list(range(first, first + len(axes))) and first:
        # Index tensors apart from each other put their axes in front.
        taken = permute_dims(taken, axes=(*range(first, first + rank), *range(first),
                                          *range(first + rank, taken.ndim)))
    return taken


@aten("index_put", "_unsafe_index_put")
def index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    used = [i for i in indices if i is not None]
    if len(used) == 1 and used[0].dtype.is_bool and not accumulate and values.ndim == 0:
        mask = used[0]
        lead = next(d for d, i in enumerate(indices) if i is not None)
        shape = (*(1 for _ in range(lead)), *mask.shape,
                 *(1 for _ in range(x.ndim - lead - mask.ndim)))
        return where(reshape(mask, shape=shape), astype(values, dtype=x.dtype), x)
    axes, found = _indices(x, indices)
    if axes != list(range(axes[0], axes[0] + len(axes))):
        unsupported("writing at indices of axes that are apart from each other")
    joint = broadcast_shapes(*(i.shape for i in found))
    shape = (*x.shape[:axes[0]], *joint, *x.shape[axes[-1] + 1:])
    values = broadcast_to(astype(values, dtype=x.dtype), shape=shape)
    return indexing.scatter_at(x, values, *found, axes=tuple(axes),
                               reduce="add" if accumulate else "set")


@aten("index_add")
def index_add(x: Any, dim: int, index: Any, source: Any, alpha: Any = 1) -> Any:
    if x.ndim == 0:
        unsupported("index_add to a tensor without axes")
    axis = normalize_axis(dim, x.ndim)
    if index.ndim == 0:
        index = reshape(index, shape=(1,))
    updates = source if alpha == 1 else source * alpha
    return indexing.scatter_at(x, astype(updates, dtype=x.dtype), index, axes=(axis,),
                               reduce="add")
