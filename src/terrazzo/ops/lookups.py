"""Operators made of taking, gathering and scattering: lookups, counts, places of what is true."""

from __future__ import annotations

from typing import Any

import numpy as np

from terrazzo.base.shapes import (
    Shape,
    broadcast_shapes,
    contiguous_strides,
    dims_text,
    normalize_axis,
)
from terrazzo.errors import (
    ArgumentError,
    RankError,
    TracedControlFlow,
    user_location,
)
from terrazzo.graph.ir import Operator, Value, operator_named
from terrazzo.graph.scopes import tracing
from terrazzo.index import maximum
from terrazzo.index.guards import known
from terrazzo.ops.creation import arange, full
from terrazzo.ops.define import fronted, operator
from terrazzo.ops.elementwise import (
    astype,
    bitwise_and,
    bitwise_invert,
    bitwise_or,
    equal,
    isnan,
    less,
    less_equal,
    not_equal,
    where,
)
from terrazzo.ops.indexing import gather, scatter, scatter_at, take_at, taken_shape
from terrazzo.ops.shape import (
    broadcast_to,
    expand_dims,
    reshape,
    span,
)


@operator(family="indexing")
def take(x: Any, indices: Any, *, axis: int | None = None) -> Any:
    """the slices of x at indices along an axis; without one, elements of the flattened x"""
    if axis is None:
        x, axis = reshape(x, shape=(-1,)), 0
    return take_at(x, indices, axes=(normalize_axis(axis, x.ndim),))


@operator(family="indexing")
def take_along_axis(x: Any, indices: Any, *, axis: int = -1) -> Any:
    """one index an element along an axis, both tensors broadcast along the others"""
    if x.ndim != indices.ndim:
        raise RankError(f"take_along_axis needs as many axes in {dims_text(indices.shape)} as in "
                        f"{dims_text(x.shape)}", where=user_location())
    axis = normalize_axis(axis, x.ndim)

    def others(shape: Shape) -> Shape:
        return tuple(1 if d == axis else n for d, n in enumerate(shape))

    joint = broadcast_shapes(others(x.shape), others(indices.shape))
    wide = [broadcast_to(t, shape=tuple(t.shape[d] if d == axis else n
                                        for d, n in enumerate(joint))) for t in (x, indices)]
    return gather(*wide, axis=axis)


@operator(family="indexing")
def embedding(weight: Any, indices: Any) -> Any:
    """the rows of a table at indices"""
    return take_at(weight, indices, axes=(0,))


@operator(family="indexing", differentiable=False)
def one_hot(indices: Any, *, num_classes: Any, axis: int = -1, dtype: Any = "float32") -> Any:
    """1 at each index of a new axis, 0 elsewhere; an index outside gives zeros"""
    axis = normalize_axis(axis, indices.ndim + 1)
    classes = reshape(arange(start=num_classes, dtype=indices.dtype), shape=tuple(
        num_classes if d == axis else 1 for d in range(indices.ndim + 1)))
    return astype(equal(expand_dims(indices, axis=axis), classes), dtype=dtype)


@operator(family="indexing")
def index_update(x: Any, indices: Any, updates: Any, *, axis: int = 0, reduce: str = "set") -> Any:
    """x with whole slices along an axis replaced by updates, or combined with them"""
    axis = normalize_axis(axis, x.ndim)
    shape = taken_shape(x.shape, [indices.shape], [axis])
    return scatter_at(x, broadcast_to(updates, shape=shape), indices, axes=(axis,), reduce=reduce)


def columns_of(indices: Value) -> list[Value]:
    """The coordinates that the last axis of an index tensor holds."""
    count = known(indices.shape[-1]) if indices.ndim else None
    if not isinstance(count, int):
        raise RankError(f"the last axis of {dims_text(indices.shape)} must hold a known number of "
                        "coordinates", where=user_location())
    return [reshape(span(indices, -1, k, k + 1), shape=indices.shape[:-1]) for k in range(count)]


@operator(family="indexing")
def gather_nd(x: Any, indices: Any, *, batch_dims: int = 0) -> Any:
    """the slices of x at coordinates, which the last axis of indices holds"""
    places = columns_of(indices)
    rank = indices.ndim - 1
    batch = [reshape(arange(start=x.shape[b]), shape=tuple(
        x.shape[b] if d == b else 1 for d in range(rank))) for b in range(batch_dims)]
    return take_at(x, *batch, *places, axes=tuple(range(batch_dims + len(places))))


@operator(family="indexing")
def scatter_nd(x: Any, indices: Any, updates: Any, *, reduce: str = "set") -> Any:
    """x with slices at coordinates, which the last axis of indices holds, replaced or combined"""
    places = columns_of(indices)
    return scatter_at(x, updates, *places, axes=tuple(range(len(places))), reduce=reduce)


@operator(family="indexing", unify=True)
def masked_fill(x: Any, mask: Any, value: Any) -> Any:
    """x with one value where the mask holds"""
    return where(mask, astype(value, dtype=x.dtype), x)


@operator(family="indexing", differentiable=False)
def searchsorted(x: Any, values: Any, *, side: str = "left") -> Any:
    """where values would be inserted into the sorted vector x; side says on which side of equals"""
    if side not in ("left", "right") or x.ndim != 1:
        raise ArgumentError(f"searchsorted takes a vector and side='left' or 'right', not "
                            f"{dims_text(x.shape)} and {side!r}", where=user_location())
    wide = expand_dims(values, axis=-1)
    before = less(x, wide) if side == "left" else less_equal(x, wide)
    if x.dtype.is_float and values.dtype.is_float:  # nan comes after every number, as in sort
        last = isnan(wide)
        before = bitwise_or(before, last if side == "right" else bitwise_and(
            last, bitwise_invert(isnan(x))))
    return operator_named("sum")(astype(before, dtype="int64"), axis=-1)


@operator(family="indexing", differentiable=False)
def bincount(x: Any, *, length: int) -> Any:
    """how often each of 0..length-1 occurs in a vector; other numbers are not counted"""
    known = bitwise_and(less(-1, x), less(x, length))
    zeros = full(shape=(length,), value=0, dtype="int64")
    return scatter(zeros, x, astype(known, dtype="int64"), reduce="add")


# ---------------------------------------------------------------- nonzero
@operator(family="indexing", differentiable=False)
def nonzero(x: Any, *, size: Any = None, fill_value: int = 0) -> Any:
    """the indices of elements that are not 0, one vector an axis

    A graph needs to know how many: inside one give `size`, of which the rest is `fill_value`.
    """
    if size is None:
        raise TracedControlFlow(
            "nonzero has as many results as there are elements that are not 0, which is not known "
            "while tracing", hint="give size=, the number of indices to make room for, or choose "
            "elements with tz.where(mask, x, 0)")
    found = reshape(not_equal(x, 0), shape=(-1,))
    total = found.shape[0]
    rank = operator_named("cumsum")(astype(found, dtype="int64"), axis=0)
    # Whatever is not wanted is written one past the end and cut off.
    slot = where(bitwise_and(found, less_equal(rank, size)), rank - 1, size)
    room = full(shape=(size + 1,), value=0, dtype="int64")
    flat = span(scatter(room, slot, arange(start=total), axis=0), 0, 0, size)
    count = operator_named("sum")(astype(found, dtype="int64"))
    inside = less(arange(start=size), count)
    strides = contiguous_strides(x.shape)
    return tuple(where(inside, flat // maximum(stride, 1) % maximum(n, 1), fill_value)
                 for n, stride in zip(x.shape, strides))


def _nonzero_front(x: Any, *, size: Any = None, fill_value: int = 0) -> Any:
    if np.ndim(x) == 0 if not isinstance(x, Value) else x.ndim == 0:
        raise RankError("nonzero of a number: it has no axes, so there are no indices",
                        where=user_location(), hint="compare it with 0 instead")
    if size is None and not isinstance(x, Value) and not tracing():
        size = int(np.count_nonzero(np.asarray(x)))
    return Operator.__call__(nonzero, x, size=size, fill_value=fill_value)


nonzero = fronted(nonzero, _nonzero_front)
