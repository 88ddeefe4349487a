"""Operators that arrange elements anew: pad, flip, roll, tile, triangles, diagonals, grids.

All are made of the primitives of `shape`, and so are their gradients.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from terrazzo.base.shapes import Shape, dims_text, normalize_axes, normalize_axis, num_elements
from terrazzo.errors import ArgumentError, RankError, ShapeError, user_location
from terrazzo.graph.ir import operator_named
from terrazzo.index import IndexExpr, maximum
from terrazzo.index.guards import ask, known
from terrazzo.ops.creation import arange
from terrazzo.ops.define import operator
from terrazzo.ops.elementwise import astype, equal, greater_equal, less_equal, where
from terrazzo.ops.joining import concat
from terrazzo.ops.shape import (
    as_shape,
    broadcast_to,
    expand_dims,
    moveaxis,
    place,
    require_rank,
    reshape,
    slice_,
    span,
)


# ---------------------------------------------------------------- padding
def _pad_pairs(pad_width: Any, rank: int) -> list[Any]:
    if isinstance(pad_width, (int, np.integer, IndexExpr)):
        return [(pad_width, pad_width)] * rank
    pairs = [p if isinstance(p, (tuple, list)) else None for p in pad_width]
    if len(pairs) == 2 and None in pairs:
        return [tuple(pad_width)] * rank
    if len(pairs) == 1 and pairs[0] is not None:
        pairs = pairs * rank
    if len(pairs) != rank or any(p is None or len(p) != 2 for p in pairs):
        raise ArgumentError(f"pad_width {pad_width} does not fit a tensor of {rank} axes",
                            where=user_location(),
                            hint="give a number, a pair (before, after), or one pair an axis")
    return [tuple(p) for p in pairs if p is not None]


def _mirrored(x: Any, axis: int, before: int, after: int, skip: int) -> list[Any]:
    """x between its own mirror images; `skip` is 1 where the edge itself is not repeated."""
    n = x.shape[axis]
    left = span(x, axis, before - 1 + skip, skip - 1, -1)
    return [left, x, span(x, axis, n - 1 - skip, n - 1 - skip - after, -1)]


def _repeated_edge(x: Any, axis: int, before: int, after: int) -> list[Any]:
    def shape(size: int) -> Shape:
        return tuple(size if d == axis else n for d, n in enumerate(x.shape))

    n = x.shape[axis]
    return [broadcast_to(span(x, axis, 0, 1), shape=shape(before)), x,
            broadcast_to(span(x, axis, n - 1, n), shape=shape(after))]


_BORDERS = {
    "reflect": lambda x, d, a, b: _mirrored(x, d, a, b, 1),
    "symmetric": lambda x, d, a, b: _mirrored(x, d, a, b, 0),
    "edge": _repeated_edge,
    "wrap": lambda x, d, a, b: [span(x, d, x.shape[d] - a, x.shape[d]), x, span(x, d, 0, b)],
}


@operator(family="shape")
def pad(x: Any, *, pad_width: Any, mode: str = "constant", value: Any = 0) -> Any:
    """x with a border: of `value`, or made of x itself by "reflect", "symmetric", "edge", "wrap"

    `pad_width` is numpy's; negative widths crop. A border made of x is at most as wide as x.
    """
    pairs = _pad_pairs(pad_width, x.ndim)
    if mode != "constant" and mode not in _BORDERS:
        raise ArgumentError(f"pad has no mode {mode!r}", where=user_location(),
                            hint="use constant, " + ", ".join(_BORDERS))
    for d, (before, after) in enumerate(pairs):
        crop = [-w if ask("<", w, 0) else 0 for w in (before, after)]
        x = span(x, d, crop[0], x.shape[d] - crop[1])
    pairs = [tuple(0 if ask("<", w, 0) else w for w in pair) for pair in pairs]
    if mode == "constant":
        if all(pair == (0, 0) for pair in pairs):
            return x
        return place(x, shape=tuple(a + n + b for n, (a, b) in zip(x.shape, pairs)),
                     starts=tuple(a for a, _ in pairs), steps=(1,) * x.ndim, value=value)
    for d, (a, b) in enumerate(pairs):
        room = x.shape[d] - (1 if mode == "reflect" else 0)
        if mode != "edge" and any(ask("<", room, w) for w in (a, b)):
            raise ShapeError(f"pad in mode {mode!r} by {(a, b)} is wider than axis {d} of "
                             f"{dims_text(x.shape)}", where=user_location(),
                             hint="pad in several steps")
        if (a, b) != (0, 0):
            if x.shape[d] == 0:
                raise ShapeError(f"pad in mode {mode!r} has nothing to repeat along axis {d} of "
                                 f"{dims_text(x.shape)}", where=user_location())
            x = concat(*_BORDERS[mode](x, d, a, b), axis=d)
    return x


# ---------------------------------------------------------------- reordering and repeating
@operator(family="shape")
def flip(x: Any, *, axis: Any = None) -> Any:
    """the elements in reverse order along axes"""
    axes = normalize_axes(axis, x.ndim)
    if not axes:
        return x
    return slice_(x, starts=tuple(n - 1 if d in axes else 0 for d, n in enumerate(x.shape)),
                  stops=tuple(-1 if d in axes else n for d, n in enumerate(x.shape)),
                  steps=tuple(-1 if d in axes else 1 for d in range(x.ndim)))


@operator(family="shape")
def roll(x: Any, *, shift: Any, axis: Any = None) -> Any:
    """the elements moved along axes, those that fall off entering at the other end"""
    if axis is None:
        return reshape(roll(reshape(x, shape=(-1,)), shift=shift, axis=0), shape=x.shape)
    axes = [axis] if isinstance(axis, int) else list(axis)
    shifts = [shift] * len(axes) if isinstance(shift, int) else list(shift)
    for by, a in zip(shifts, axes, strict=True):
        d = normalize_axis(a, x.ndim)
        n = x.shape[d]
        cut = n - by % maximum(n, 1)
        if cut != n:
            x = concat(span(x, d, cut, n), span(x, d, 0, cut), axis=d)
    return x


@operator(family="shape")
def tile(x: Any, *, repetitions: Any) -> Any:
    """x repeated as a whole along every axis"""
    times = as_shape(repetitions)
    rank = max(len(times), x.ndim)
    times = (1,) * (rank - len(times)) + times
    shape = (1,) * (rank - x.ndim) + x.shape
    spread = tuple(n for pair in zip((1,) * rank, shape) for n in pair)
    wide = tuple(n for pair in zip(times, shape) for n in pair)
    merged = tuple(t * n for t, n in zip(times, shape))
    return reshape(broadcast_to(reshape(x, shape=spread), shape=wide), shape=merged)


@operator(family="shape")
def repeat(x: Any, *, repeats: Any, axis: int | None = None) -> Any:
    """every element repeated along an axis; `repeats` is a number, or a tuple of one an element"""
    if axis is None:
        x, axis = reshape(x, shape=(-1,)), 0
    axis = normalize_axis(axis, x.ndim)
    n = x.shape[axis]
    if isinstance(repeats, (tuple, list)):
        if n != len(repeats):
            raise ShapeError(f"repeat got {len(repeats)} counts for the {n} elements of axis "
                             f"{axis}", where=user_location())
        return operator_named("take")(x, np.repeat(np.arange(n), repeats), axis=axis)
    wide = (*x.shape[:axis + 1], repeats, *x.shape[axis + 1:])
    return reshape(broadcast_to(expand_dims(x, axis=axis + 1), shape=wide),
                   shape=(*x.shape[:axis], n * repeats, *x.shape[axis + 1:]))


@operator(family="shape")
def sliding_window(x: Any, *, size: int, step: int = 1, axis: int = -1) -> Any:
    """windows of x along an axis, which becomes the windows' axis; their elements come last"""
    axis = normalize_axis(axis, x.ndim)
    count = maximum((x.shape[axis] - size) // step + 1, 0)  # none, where none fits
    starts = reshape(arange(start=count) * step, shape=(count, 1))
    windows = operator_named("take")(x, starts + arange(start=size), axis=axis)
    return moveaxis(windows, source=axis + 1, destination=-1)


# ---------------------------------------------------------------- triangles and diagonals
def _rows_and_columns(shape: Shape) -> tuple[Any, Any]:
    rows, columns = shape[-2:]
    return reshape(arange(start=rows), shape=(rows, 1)), reshape(
        arange(start=columns), shape=(1, columns))


@operator(family="shape")
def tril(x: Any, *, k: int = 0) -> Any:
    """x with zeros above the k-th diagonal of its last two axes"""
    require_rank(x, 2, "tril")
    row, column = _rows_and_columns(x.shape)
    return where(less_equal(column, row + k), x, 0)


@operator(family="shape")
def triu(x: Any, *, k: int = 0) -> Any:
    """x with zeros below the k-th diagonal of its last two axes"""
    require_rank(x, 2, "triu")
    row, column = _rows_and_columns(x.shape)
    return where(greater_equal(column, row + k), x, 0)


@operator(family="shape")
def eye(*, n_rows: Any, n_cols: Any = None, k: int = 0, dtype: Any = "float32") -> Any:
    """ones on the k-th diagonal, zeros elsewhere"""
    row, column = _rows_and_columns((n_rows, n_rows if n_cols is None else n_cols))
    return astype(equal(column, row + k), dtype=dtype)


@operator(family="shape")
def diagonal(x: Any, *, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
    """the elements at (i, i + offset) of two axes, as a last axis"""
    require_rank(x, 2, "diagonal")
    x = moveaxis(x, source=(axis1, axis2), destination=(-2, -1))
    rows, columns = x.shape[-2:]
    first = offset if offset >= 0 else -offset * columns
    room = (rows, columns - offset) if offset >= 0 else (rows + offset, columns)
    smaller = ask("<=", *room)
    if smaller is None:
        raise ShapeError(f"the length of diagonal {offset} of {dims_text(x.shape)} is not known",
                         where=user_location())
    count = maximum(room[0] if smaller else room[1], 0)
    # Neighbours on a diagonal are one row and one column apart in the flattened matrix.
    flat = reshape(x, shape=(*x.shape[:-2], rows * columns))
    if count == 0:
        return span(flat, -1, 0, 0)
    step = known(columns) + 1
    if not isinstance(step, int):
        raise ShapeError(f"diagonal needs a known number of columns, not {columns}",
                         where=user_location())
    return span(flat, -1, first, first + (count - 1) * step + 1, step)


@operator(family="shape")
def diag(x: Any, *, k: int = 0) -> Any:
    """the k-th diagonal of a matrix, or the matrix with a vector on its k-th diagonal"""
    if x.ndim == 2:
        return diagonal(x, offset=k)
    size = known(x.shape[0]) if x.ndim == 1 else None
    if not isinstance(size, int):
        raise RankError(f"diag takes a matrix or a vector of known size, not {dims_text(x.shape)}",
                        where=user_location())
    n = size + abs(k)
    flat = place(x, shape=(n * n,), starts=(k if k >= 0 else -k * n,), steps=(n + 1,))
    return reshape(flat, shape=(n, n))


@operator(family="shape")
def meshgrid(*xs: Any, indexing: str = "xy") -> Any:
    """coordinate tensors of the grid that vectors span; "xy" swaps the first two axes"""
    if indexing not in ("xy", "ij"):
        raise ArgumentError(f"meshgrid has no indexing {indexing!r}", where=user_location(),
                            hint="use xy or ij")
    order = list(range(len(xs)))
    if indexing == "xy" and len(xs) > 1:
        order[:2] = [1, 0]
    sizes = [num_elements(x.shape) for x in xs]
    shape = tuple(sizes[order.index(d)] for d in range(len(xs)))
    return tuple(broadcast_to(reshape(x, shape=tuple(
        sizes[k] if d == order[k] else 1 for d in range(len(xs)))), shape=shape)
        for k, x in enumerate(xs))
