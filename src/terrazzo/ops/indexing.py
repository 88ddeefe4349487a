"""Operators whose addresses are data: take, gather, scatter.

Negative indices count from the end. An index that is still outside is moved to the nearest element,
here and in compiled code, so nothing ever reads or writes outside a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from terrazzo.base.places import in_range
from terrazzo.base.scalar import Const, Scalar, as_scalar, call
from terrazzo.base.scalar import cast as cast_scalar
from terrazzo.base.scalar import where as where_scalar
from terrazzo.base.shapes import (
    Shape,
    broadcast_shapes,
    contiguous_strides,
    dims_text,
    normalize_axis,
    num_elements,
)
from terrazzo.dtypes import int64
from terrazzo.errors import (
    ArgumentError,
    DTypeError,
    IndexOutOfRange,
    RankError,
    ShapeError,
    user_location,
)
from terrazzo.expr.ir import Tensor, compute, fresh_axis
from terrazzo.graph.ir import Node, TensorType, Value
from terrazzo.index import Index, ceildiv, maximum, minimum
from terrazzo.index.guards import all_equal, ask
from terrazzo.loop.interpret import convert
from terrazzo.loop.ir import Block, Buffer, For, Stmt, Store, block
from terrazzo.ops.creation import arange, full
from terrazzo.ops.define import broadcast_load, primitive
from terrazzo.ops.elementwise import (
    astype,
    equal,
    where,
)
from terrazzo.ops.scatter_sums import chained_updates, is_rounded
from terrazzo.ops.shape import (
    ravel,
    reshape,
    unravel,
)


# ---------------------------------------------------------------- indices
def in_range_numpy(index: np.ndarray, size: int) -> np.ndarray:
    """An index brought into 0..size-1, as `base.places` does with one."""
    place = index.astype(np.int64)
    return np.clip(np.where(place < 0, place + size, place), 0, size - 1)


def _check_indices(name: str, x: TensorType, indices: Sequence[TensorType],
                   axes: Sequence[int]) -> None:
    for index, axis in zip(indices, axes, strict=True):
        if not index.dtype.is_integer:
            raise DTypeError(
                f"{name} needs integer indices, not {index.dtype.name}", where=user_location(),
                hint="choose by a mask with tz.where(mask, x, 0), or turn it into indices with "
                     "tz.nonzero(mask, size=...)" if index.dtype.is_bool else
                     "cast them with tz.astype(indices, 'int64')")
        if x.shape[axis] == 0 and all(n != 0 for n in index.shape):
            raise IndexOutOfRange(f"{name} finds no element in axis {axis} of {dims_text(x.shape)}",
                                  where=user_location())


# ---------------------------------------------------------------- take_at and its opposite
def taken_shape(shape: Shape, indices: Sequence[Shape], axes: Sequence[int]) -> Shape:
    """The axes become one set of axes, that of the indices, where the first of them was."""
    return (*shape[:axes[0]], *broadcast_shapes(*indices),
            *(n for d, n in enumerate(shape) if d > axes[0] and d not in axes))


def _check_axes(axes: Any, count: int, rank: int) -> None:
    if len(axes) != count or list(axes) != sorted(set(axes)) or not all(
            0 <= a < rank for a in axes) or not count:
        raise ArgumentError(f"{count} index tensors need {count} axes of the {rank} in rising "
                            f"order, not {tuple(axes)}", where=user_location())


def _take_at_type(x: TensorType, *indices: TensorType, axes: Any) -> TensorType:
    _check_axes(axes, len(indices), len(x.shape))
    _check_indices("take", x, indices, axes)
    return TensorType(taken_shape(x.shape, [i.shape for i in indices], axes), x.dtype)


def _take_at_numpy(x: np.ndarray, *indices: np.ndarray, axes: Any, out: Any) -> np.ndarray:
    if 0 in out.shape:
        return np.zeros(out.shape, out.dtype.np)
    first = axes[0]
    together = np.moveaxis(x, axes, range(first, first + len(axes)))
    places = tuple(in_range_numpy(i, x.shape[a]) for i, a in zip(indices, axes, strict=True))
    return together[(slice(None),) * first + places]


def _take_at_grad(node: Node, g: Value) -> list[Value | None]:
    x, *indices = node.inputs
    assert x is not None
    zeros = full(shape=x.shape, value=0, dtype=x.dtype)
    total = scatter_at(zeros, astype(g, dtype=x.dtype), *indices, axes=node.attrs["axes"],
                       reduce="add")
    return [total, *(None for _ in indices)]


@primitive(family="indexing", infer=_take_at_type, reference=_take_at_numpy, grad=_take_at_grad)
def take_at(x: Any, *indices: Any, axes: Any, out: TensorType) -> Tensor:
    """elements of x at index tensors, one an axis of `axes`, broadcast together

    Their axes stand in the result where the first of `axes` was.
    """
    first, rank = axes[0], len(broadcast_shapes(*(i.shape for i in indices)))
    kept_after = [d for d in range(first, len(x.shape)) if d not in axes]

    def element(*i: Index) -> Scalar:
        place: list[Any] = [*i[:first], *(0 for _ in range(first, len(x.shape)))]
        for index, axis in zip(indices, axes, strict=True):
            place[axis] = in_range(broadcast_load(index, i[first:first + rank]), x.shape[axis])
        for d, n in zip(kept_after, i[first + rank:], strict=True):
            place[d] = n
        return guarded(x[tuple(place)], [x.shape[a] for a in axes])

    return compute(out.shape, element, origin="take")


def guarded(load: Scalar, sizes: Sequence[Index]) -> Scalar:
    """A load that gives 0 where an axis it is clipped to turns out to be empty."""
    for n in sizes:
        if not isinstance(n, int):
            load = where_scalar(call("gt", as_scalar(n), 0), load, Const(load.dtype, 0))
    return load


# Neighbouring elements one task handles at a time: shorter runs miss the caches (64 of float32 was
# three times slower than 512), longer ones leave nothing to share out.
_BLOCK = 256
_SHORT = 16  # elements that are not worth a vector
_REDUCES = {"set": None, "add": "add", "mul": "mul", "max": "max", "min": "min"}


def _check_reduce(reduce: str) -> None:
    if reduce not in _REDUCES:
        raise ArgumentError(f"scatter has no reduce={reduce!r}", where=user_location(),
                            hint="use " + ", ".join(_REDUCES))


def copy_loops(source: Buffer, target: Buffer, piece: int = 4096) -> Stmt:
    """A copy of a whole buffer, or of its only number all over, in pieces for several threads."""
    size = target.size
    part = fresh_axis("part", ceildiv(size, piece))
    i = fresh_axis("i", size)
    number = source.size == 1
    copy = For(i.var, part.var * piece, minimum(size, part.var * piece + piece),
               Store(target, i.var, source[0 if number else i.var]), "vector")
    return For(part.var, 0, part.hi, copy, "parallel")


def _scatter_loops(x: Buffer, out: Buffer, before: Index, steps: Index, after: Index,
                   write: Callable[[Index, Index, Index], Stmt]) -> Stmt:
    """Copy x, then write `steps` updates in order; what differs in `before` or `after` is
    independent and may run in parallel."""
    if 0 in (before, steps, after):
        return copy_loops(x, out)
    blocks = ceildiv(after, _BLOCK)
    task = fresh_axis("task", before * blocks)
    row, start = task.var // maximum(blocks, 1), task.var % maximum(blocks, 1) * _BLOCK
    step, column = fresh_axis("step", steps), fresh_axis("column", after)
    inner = For(column.var, start, minimum(after, start + _BLOCK),
                write(row, step.var, column.var),
                "serial" if isinstance(after, int) and after < _SHORT else "vector")
    return block(copy_loops(x, out),
                 For(task.var, 0, task.hi, For(step.var, 0, steps, inner), "parallel"))


def _address(parts: Sequence[tuple[Index | Scalar, Index]]) -> Index | Scalar:
    """The sum of indices times strides, of which some are computed."""
    plain: Index = 0
    computed: Scalar | None = None
    for index, stride in parts:
        if isinstance(index, Scalar):
            term = index if stride == 1 else call("mul", index, as_scalar(stride))
            computed = term if computed is None else call("add", computed, term)
        else:
            plain = plain + index * stride
    if computed is None:
        return plain
    return computed if plain == 0 else call("add", as_scalar(plain), computed)


def _scatter_at_type(x: TensorType, updates: TensorType, *indices: TensorType, axes: Any,
                     reduce: str) -> TensorType:
    _check_reduce(reduce)
    _check_axes(axes, len(indices), len(x.shape))
    _check_indices("scatter", x, indices, axes)
    expected = taken_shape(x.shape, [i.shape for i in indices], axes)
    if not all_equal(expected, updates.shape):
        raise ShapeError(f"scatter into {dims_text(x.shape)} needs updates of shape "
                         f"{dims_text(expected)}, not {dims_text(updates.shape)}",
                         where=user_location(), hint="stretch them with tz.broadcast_to")
    return x


_NUMPY_AT = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def _write_numpy(target: np.ndarray, places: tuple[Any, ...], updates: np.ndarray,
                 reduce: str) -> None:
    """Apply updates in order: the last one to the same place wins or comes on top."""
    if reduce != "set":
        _NUMPY_AT[reduce].at(target, places, updates)
        return
    flat = np.ravel_multi_index(np.broadcast_arrays(*places), target.shape).ravel()
    values = np.broadcast_to(updates, np.broadcast_shapes(*(np.shape(p) for p in places))).ravel()
    # numpy leaves open which of several writes to one place stays.
    unique, last = np.unique(flat[::-1], return_index=True)
    target.reshape(-1)[unique] = values[::-1][last]


def _scatter_at_numpy(x: np.ndarray, updates: np.ndarray, *indices: np.ndarray, axes: Any,
                      reduce: str, out: TensorType) -> np.ndarray:
    result = np.ascontiguousarray(x, dtype=out.dtype.compute.np).copy()
    if updates.size and result.size:
        rank = np.ndim(np.broadcast_arrays(*indices)[0])
        grid = np.meshgrid(*(np.arange(n) for n in updates.shape), indexing="ij", sparse=True)
        kept = iter([*grid[:axes[0]], *grid[axes[0] + rank:]])
        tail = updates.ndim - axes[0] - rank
        chosen = {a: in_range_numpy(i, x.shape[a]) for i, a in zip(indices, axes, strict=True)}
        places = tuple(chosen[d].reshape(chosen[d].shape + (1,) * tail) if d in chosen
                       else next(kept) for d in range(x.ndim))
        _write_numpy(result, places, updates.astype(result.dtype), reduce)
    return convert(result, out.dtype)


def _scatter_gradients(x: Value, updates: Value, result: Value, g: Any, reduce: str,
                       gather: Callable[[Any], Any],
                       scatter: Callable[[Value, Value, str], Value]) -> tuple[Value, Value]:
    """Gradients by x and by the updates, for any way of addressing.

    Of updates that are set at the same place the last has the gradient. Those that share a maximum
    share its gradient.
    """
    if reduce == "set":
        order = reshape(arange(start=num_elements(updates.shape)), shape=updates.shape)
        last = scatter(full(shape=x.shape, value=-1, dtype=order.dtype), order, "set")
        return (scatter(g, full(shape=updates.shape, value=0, dtype=g.dtype), "set"),
                where(equal(gather(last), order), gather(g), 0))
    if reduce == "add":
        return g, gather(g)
    if reduce == "mul":
        others = scatter(full(shape=x.shape, value=1, dtype=x.dtype), updates, "mul")
        # The product of the others: of what is not 0, where nothing but the update itself is.
        x_zero, zero = equal(x, 0), equal(updates, 0)
        factor = where(zero, 1, updates)
        product = scatter(where(x_zero, 1, x), factor, "mul")
        zeros = scatter(astype(x_zero, dtype=int64), astype(zero, dtype=int64), "add")
        alone = equal(gather(zeros), astype(zero, dtype=int64))
        return g * others, where(alone, gather(g * product) / factor, 0)
    kept = astype(equal(x, result), dtype=x.dtype)
    won = astype(equal(updates, gather(result)), dtype=x.dtype)
    share = g / scatter(kept, won, "add")
    return share * kept, gather(share) * won


def _scatter_at_grad(node: Node, g: Value) -> list[Value | None]:
    x, updates, *indices = node.inputs
    assert x is not None and updates is not None
    axes = node.attrs["axes"]
    dx, du = _scatter_gradients(
        x, updates, node.outputs[0], g, node.attrs["reduce"],
        lambda y: take_at(y, *indices, axes=axes),
        lambda y, u, how: scatter_at(y, u, *indices, axes=axes, reduce=how))
    return [dx, du, *(None for _ in indices)]


@primitive(family="indexing", infer=_scatter_at_type, reference=_scatter_at_numpy,
           grad=_scatter_at_grad, loops=True, starts_from_first=True)
def scatter_at(x: Any, updates: Any, *indices: Any, axes: Any, reduce: str = "set",
               out: TensorType) -> Any:
    """x with updates written where take_at would read: set, add, mul, max or min

    Updates of the same place are applied in order.
    """
    joint = broadcast_shapes(*(i.shape for i in indices))
    first = axes[0]
    kept_before = list(range(first))
    kept_after = [d for d in range(first, len(out.shape)) if d not in axes]
    after_shape = tuple(out.shape[d] for d in kept_after)
    sizes = (num_elements(out.shape[:first]), num_elements(joint), num_elements(after_shape))
    strides = contiguous_strides(out.shape)

    def build(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> Stmt:
        base, source, *places = inputs

        def chosen(step: Index) -> list[Scalar]:
            """The indices of an update."""
            at, found = unravel(step, joint), []
            for buffer, type, axis in zip(places, indices, axes, strict=True):
                own = at[len(joint) - len(type.shape):]
                flat = ravel([0 if n == 1 else i for n, i in zip(type.shape, own)], type.shape)
                found.append(in_range(buffer[flat], out.shape[axis]))
            return found

        def address(row: Index, step: Index, column: Index) -> Index | Scalar:
            return _address([
                *zip(unravel(row, out.shape[:first]), (strides[d] for d in kept_before)),
                *zip(chosen(step), (strides[axis] for axis in axes)),
                *zip(unravel(column, after_shape), (strides[d] for d in kept_after))])

        def write(row: Index, step: Index, column: Index) -> Stmt:
            value = source[(row * sizes[1] + step) * sizes[2] + column]
            return Store(outputs[0], address(row, step, column), cast_scalar(value, out.dtype),
                         _REDUCES[reduce])

        if num_elements(out.shape) == 0:
            return Block(())
        if is_rounded(out.dtype, reduce) and 0 not in sizes:
            grid = tuple(out.shape[axis] for axis in axes)
            return block(copy_loops(base, outputs[0]), chained_updates(
                base[0] if base.size == 1 else None, outputs[0], source, reduce, sizes,
                num_elements(grid), lambda step: as_scalar(_address(list(zip(
                    chosen(step), contiguous_strides(grid))))), address))
        return _scatter_loops(base, outputs[0], *sizes, write)

    return build


# ---------------------------------------------------------------- gather and scatter by element
def _check_elements(name: str, x: TensorType, indices: TensorType, axis: int) -> int:
    if len(indices.shape) != len(x.shape) or not x.shape:
        raise RankError(f"{name} needs indices of as many axes as {dims_text(x.shape)} has, at "
                        f"least one, not {dims_text(indices.shape)}", where=user_location())
    axis = normalize_axis(axis, len(x.shape))
    _check_indices(name, x, [indices], [axis])
    for d, (n, size) in enumerate(zip(indices.shape, x.shape)):
        if d != axis and not ask("<=", n, size):
            raise ShapeError(f"{name}: axis {d} of the indices {dims_text(indices.shape)} is "
                             f"longer than that of {dims_text(x.shape)}", where=user_location())
    return axis


def _gather_type(x: TensorType, indices: TensorType, *, axis: int) -> TensorType:
    _check_elements("gather", x, indices, axis)
    return TensorType(indices.shape, x.dtype)


def _element_places(indices: np.ndarray, axis: int, size: int) -> tuple[np.ndarray, ...]:
    grid = list(np.meshgrid(*map(np.arange, indices.shape), indexing="ij", sparse=True))
    grid[axis] = in_range_numpy(indices, size)
    return tuple(grid)


def _gather_numpy(x: np.ndarray, indices: np.ndarray, *, axis: int,
                  out: Any) -> np.ndarray:
    if indices.size == 0:
        return np.zeros(out.shape, out.dtype.np)
    axis = normalize_axis(axis, x.ndim)
    return x[_element_places(indices, axis, x.shape[axis])]


def _gather_grad(node: Node, g: Value) -> list[Value | None]:
    x, indices = node.inputs
    assert x is not None
    wide = x.dtype.compute
    zeros = full(shape=x.shape, value=0, dtype=wide)
    return [scatter(zeros, indices, astype(g, dtype=wide), axis=node.attrs["axis"],
                    reduce="add"), None]


@primitive(family="indexing", infer=_gather_type, reference=_gather_numpy, grad=_gather_grad)
def gather(x: Any, indices: Any, *, axis: int, out: TensorType) -> Tensor:
    """y[i, j] = x[indices[i, j], j] for axis 0: one index an element of the result"""
    axis = normalize_axis(axis, len(x.shape))

    def element(*i: Index) -> Scalar:
        place: list[Any] = list(i)
        place[axis] = in_range(indices[i], x.shape[axis])
        return guarded(x[tuple(place)], [x.shape[axis]])

    return compute(out.shape, element, origin="gather")


def _scatter_type(x: TensorType, indices: TensorType, updates: TensorType, *, axis: int,
                  reduce: str) -> TensorType:
    _check_reduce(reduce)
    _check_elements("scatter", x, indices, axis)
    if not all_equal(indices.shape, updates.shape):
        raise ShapeError(f"scatter has indices {dims_text(indices.shape)} but updates "
                         f"{dims_text(updates.shape)}; the shapes must be equal",
                         where=user_location())
    return x


def _scatter_numpy(x: np.ndarray, indices: np.ndarray, updates: np.ndarray, *, axis: int,
                   reduce: str, out: TensorType) -> np.ndarray:
    result = np.ascontiguousarray(x, dtype=out.dtype.compute.np).copy()
    axis = normalize_axis(axis, x.ndim)
    if indices.size:
        _write_numpy(result, _element_places(indices, axis, x.shape[axis]),
                     updates.astype(result.dtype), reduce)
    return convert(result, out.dtype)


def _scatter_grad(node: Node, g: Value) -> list[Value | None]:
    x, indices, updates = node.inputs
    assert x is not None and updates is not None
    axis = node.attrs["axis"]
    dx, du = _scatter_gradients(
        x, updates, node.outputs[0], g, node.attrs["reduce"],
        lambda y: gather(y, indices, axis=axis),
        lambda y, u, how: scatter(y, indices, u, axis=axis, reduce=how))
    return [dx, None, du]


@primitive(family="indexing", infer=_scatter_type, reference=_scatter_numpy, grad=_scatter_grad,
           loops=True, starts_from_first=True)
def scatter(x: Any, indices: Any, updates: Any, *, axis: int = 0, reduce: str = "set",
            out: TensorType) -> Any:
    """x with x[indices[i, j], j] = updates[i, j] (axis 0): set, add, mul, max or min

    Updates of the same place are applied in order.
    """
    axis = normalize_axis(axis, len(out.shape))
    shape, strides = indices.shape, contiguous_strides(out.shape)
    sizes = (num_elements(shape[:axis]), shape[axis], num_elements(shape[axis + 1:]))

    def build(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> Stmt:
        base, places, source = inputs

        def write(row: Index, step: Index, column: Index) -> Stmt:
            flat = (row * sizes[1] + step) * sizes[2] + column
            at = (*unravel(row, shape[:axis]), in_range(places[flat], out.shape[axis]),
                  *unravel(column, shape[axis + 1:]))
            return Store(outputs[0], _address(list(zip(at, strides))),
                         cast_scalar(source[flat], out.dtype), _REDUCES[reduce])

        return _scatter_loops(base, outputs[0], *sizes, write)

    return build
