"""Operators that only move elements: views of all kinds, joins, padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from terrazzo.base.shapes import normalize_axis
from terrazzo.graph.applying import constant
from terrazzo.graph.ir import TensorType, Value
from terrazzo.index import Index
from terrazzo.index.guards import ask
from terrazzo.ops import arrange
from terrazzo.ops.creation import arange
from terrazzo.ops.elementwise import astype, where
from terrazzo.ops.getitem import getitem
from terrazzo.ops.indexing import scatter_at
from terrazzo.ops.joining import concat, stack
from terrazzo.ops.lookups import take
from terrazzo.ops.shape import broadcast_to, permute_dims, reshape
from terrazzo.torch.aten.registry import aten, converts, unsupported

# Those whose result torch calls a view, so that it may be made of its input outside of our code.
VIEWS = frozenset(f"aten.{name}" for name in (
    "view.default", "reshape.default", "_unsafe_view.default", "permute.default", "t.default",
    "transpose.int", "expand.default", "select.int", "slice.Tensor", "squeeze.default",
    "squeeze.dim", "squeeze.dims", "unsqueeze.default", "alias.default", "detach.default",
    "diagonal.default", "unfold.default", "as_strided.default", "_reshape_alias.default",
    "view_as_real.default", "real.default"))

# The same for those with several results.
PARTS = frozenset(f"aten.{name}" for name in (
    "split.Tensor", "split_with_sizes.default", "unbind.int", "chunk.default"))


def in_shape(x: Value, shape: Sequence[Index]) -> Value:
    """x with as many elements in another shape."""
    return x if tuple(x.shape) == tuple(shape) else reshape(x, shape=tuple(shape))


@aten("view.default", "reshape", "_unsafe_view", "_reshape_alias", "view_copy.default",
      "squeeze", "unsqueeze", "flatten", "squeeze_copy", "unsqueeze_copy", typed=True)
def view(x: Any, *how: Any, out: TensorType) -> Any:
    return in_shape(x, out.shape)


@converts("prims.collapse_view.default", "prims.split_dim.default",
          "prims.squeeze.default", typed=True)
def prims_view(x: Any, *how: Any, out: TensorType) -> Any:
    return in_shape(x, out.shape)


@aten("permute", "permute_copy")
def permute(x: Any, dims: Sequence[int]) -> Any:
    return permute_dims(x, axes=tuple(normalize_axis(d, x.ndim) for d in dims))


@aten("t")
def t(x: Any) -> Any:
    return permute_dims(x, axes=(1, 0)) if x.ndim == 2 else x


@aten("transpose.int")
def transpose(x: Any, dim0: int, dim1: int) -> Any:
    if x.ndim == 0:
        return x
    axes = list(range(x.ndim))
    a, b = normalize_axis(dim0, x.ndim), normalize_axis(dim1, x.ndim)
    axes[a], axes[b] = b, a
    return permute_dims(x, axes=tuple(axes))


@aten("expand", "expand_copy", typed=True)
def expand(x: Any, size: Any, implicit: bool = False, *, out: TensorType) -> Any:
    return broadcast_to(x, shape=out.shape)


@converts("prims.broadcast_in_dim.default", typed=True)
def broadcast_in_dim(x: Any, shape: Any, dims: Sequence[int], *, out: TensorType) -> Any:
    sizes: list[Index] = [1] * len(out.shape)
    for n, d in zip(x.shape, dims, strict=True):
        sizes[d] = n
    return broadcast_to(in_shape(x, sizes), shape=out.shape)


def _cut(x: Value, dim: int, item: Any) -> Value:
    dim = normalize_axis(dim, x.ndim)
    key = tuple(item if d == dim else slice(None) for d in range(x.ndim))
    return getitem(x, key)


@aten("select.int", "select_copy.int")
def select(x: Any, dim: int, index: Any) -> Any:
    return _cut(x, dim, index)


@aten("slice.Tensor", "slice_copy.Tensor")
def slice_tensor(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    big = 1 << 60  # torch writes the largest number for "to the end"
    return _cut(x, dim, slice(start, None if isinstance(end, int) and end >= big else end, step))


@aten("cat", typed=True)
def cat(tensors: Sequence[Any], dim: int = 0, *, out: TensorType) -> Any:
    given = [t for t in tensors if not (t.ndim == 1 and t.shape[0] == 0)]  # which torch leaves out
    if not given:
        return tensors[0]
    cast = [t if t.dtype is out.dtype else astype(t, dtype=out.dtype) for t in given]
    return cast[0] if len(cast) == 1 else concat(*cast, axis=dim)


@aten("stack", typed=True)
def stack_tensors(tensors: Sequence[Any], dim: int = 0, *, out: TensorType) -> Any:
    return stack(*(astype(t, dtype=out.dtype) for t in tensors), axis=dim)


def _pieces(x: Value, dim: int, sizes: Sequence[Index]) -> tuple[Value, ...]:
    found: list[Value] = []
    start: Index = 0
    for size in sizes:
        found.append(_cut(x, dim, slice(start, start + size)))
        start = start + size
    return tuple(found)


@aten("split.Tensor", "split_with_sizes", "unbind.int", "split_with_sizes_copy", "split_copy",
      "unbind_copy", "chunk", typed=True)
def split(x: Any, how: Any = 0, dim: int | None = None, *, out: Sequence[TensorType]) -> Any:
    if x.ndim != len(out[0].shape):
        dim = how
        return tuple(select(x, dim, i) for i in range(len(out)))
    axis = normalize_axis(dim or 0, x.ndim)
    return _pieces(x, axis, [t.shape[axis] for t in out])


@aten("constant_pad_nd")
def constant_pad_nd(x: Any, pad: Sequence[Any], value: Any = 0) -> Any:
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)][::-1]
    pairs = [(0, 0)] * (x.ndim - len(pairs)) + pairs
    for d, (before, after) in enumerate(pairs):  # a negative one cuts
        start = -before if ask("<", before, 0) else 0
        stop = x.shape[d] + after if ask("<", after, 0) else x.shape[d]
        x = _cut(x, d, slice(start, stop)) if (start, stop) != (0, x.shape[d]) else x
    width = tuple(tuple(0 if ask("<", n, 0) else n for n in pair) for pair in pairs)
    if all(pair == (0, 0) for pair in width):
        return x
    return arrange.pad(x, pad_width=width, value=value)


@aten("flip")
def flip(x: Any, dims: Sequence[int]) -> Any:
    return arrange.flip(x, axis=tuple(dims)) if dims else x


@aten("repeat")
def repeat(x: Any, repeats: Sequence[Any]) -> Any:
    return arrange.tile(x, repetitions=tuple(repeats))


@aten("roll")
def roll(x: Any, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    if not dims:
        return in_shape(arrange.roll(in_shape(x, (x.size,)), shift=shifts[0], axis=0), x.shape)
    return arrange.roll(x, shift=tuple(shifts), axis=tuple(dims))


@aten("tril")
def tril(x: Any, diagonal: int = 0) -> Any:
    return arrange.tril(x, k=diagonal)


@aten("triu")
def triu(x: Any, diagonal: int = 0) -> Any:
    return arrange.triu(x, k=diagonal)


@aten("diagonal", "diagonal_copy")
def diagonal(x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    return arrange.diagonal(x, offset=offset, axis1=dim1, axis2=dim2)


@aten("unfold", "unfold_copy")
def unfold(x: Any, dimension: int, size: int, step: int) -> Any:
    if x.ndim == 0:
        return getitem(in_shape(x, (1,)), slice(0, size))
    axis = normalize_axis(dimension, x.ndim)
    return arrange.sliding_window(x, size=size, step=step, axis=axis)


@aten("copy", typed=True)
def copy(x: Any, source: Any, non_blocking: bool = False, *, out: TensorType) -> Any:
    return broadcast_to(astype(source, dtype=out.dtype), shape=out.shape)


@aten("slice_scatter")
def slice_scatter(x: Any, src: Any, dim: int = 0, start: Any = None, end: Any = None,
                  step: int = 1) -> Any:
    axis = normalize_axis(dim, x.ndim)
    n = x.shape[axis]
    shape = tuple(n if d == axis else 1 for d in range(x.ndim))
    places = arange(start=n, dtype="int64")
    big = 1 << 60
    chosen = getitem(places, slice(start, None if isinstance(end, int) and end >= big else end,
                                   step))
    if step == 1 and isinstance(chosen.shape[0], int) and chosen.shape[0] == n:
        return broadcast_to(astype(src, dtype=x.dtype), shape=x.shape)
    first = 0 if start is None else start + n if ask("<", start, 0) else start
    count = chosen.shape[0]
    spread = arrange.place(src, shape=tuple(n if d == axis else m for d, m in enumerate(x.shape)),
                           starts=tuple(first if d == axis else 0 for d in range(x.ndim)),
                           steps=tuple(step if d == axis else 1 for d in range(x.ndim)))
    offset = in_shape(places, shape) - first
    inside = (offset >= 0) & (offset < count * step) & (offset % step == 0)
    return where(inside, astype(spread, dtype=x.dtype), x)


@aten("select_scatter")
def select_scatter(x: Any, src: Any, dim: int, index: Any) -> Any:
    axis = normalize_axis(dim, x.ndim)
    n = x.shape[axis]
    at = index + n if ask("<", index, 0) else index
    places = in_shape(arange(start=n, dtype="int64"),
                      tuple(n if d == axis else 1 for d in range(x.ndim)))
    wide = in_shape(astype(src, dtype=x.dtype),
                    tuple(1 if d == axis else m for d, m in enumerate(x.shape)))
    return where(places == at, wide, x)


# ---------------------------------------------------------------- by places in memory
def _storage(x: Value, lies: Any, size: Sequence[Any], stride: Sequence[Any], offset: Any
             ) -> tuple[Value, Value, tuple[int, ...]]:
    """The elements of x in the order of memory, the places of a view, and the order of axes."""
    strides, start = lies
    numbers = [*strides, *x.shape, *size, *stride, start, start if offset is None else offset]
    if not all(isinstance(n, int) for n in numbers):
        unsupported("a view by strides that vary")
    order = tuple(sorted(range(x.ndim), key=lambda d: (-strides[d], d)))
    step: Any = 1
    for d in reversed(order):
        if x.shape[d] != 1 and strides[d] != step:
            unsupported("a view by strides of a tensor with gaps")
        step *= x.shape[d]
    places = np.array(0 if offset is None else offset - start, np.int64)
    for n, s in zip(size, stride, strict=True):
        places = places[..., None] + np.arange(n) * s
    if places.size and not 0 <= places.min() <= places.max() < step:
        unsupported("a view of memory that is not the tensor's")
    return in_shape(permute_dims(x, axes=order), (step,)), constant(places), order


@aten("as_strided", "as_strided_copy", placed=True)
def as_strided(x: Any, size: Any, stride: Any, storage_offset: Any = None, *, lies: Any) -> Any:
    flat, places, _ = _storage(x, lies, size, stride, storage_offset)
    return take(flat, places, axis=0)


@aten("as_strided_scatter", placed=True)
def as_strided_scatter(x: Any, src: Any, size: Any, stride: Any, storage_offset: Any = None, *,
                       lies: Any) -> Any:
    flat, places, order = _storage(x, lies, size, stride, storage_offset)
    made = scatter_at(flat, astype(src, dtype=x.dtype), places, axes=(0,))
    inner = in_shape(made, tuple(x.shape[d] for d in order))
    return permute_dims(inner, axes=tuple(order.index(d) for d in range(x.ndim)))


@aten("diagonal_scatter")
def diagonal_scatter(x: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    number = in_shape(arange(start=x.size, dtype="int64"), x.shape)
    places = arrange.diagonal(number, offset=offset, axis1=dim1, axis2=dim2)
    made = scatter_at(in_shape(x, (x.size,)), astype(src, dtype=x.dtype), places, axes=(0,))
    return in_shape(made, x.shape)
