"""Sorting, what stands at a place in order, running extrema and searching."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from terrazzo.base.shapes import normalize_axis
from terrazzo.graph.ir import TensorType, Value
from terrazzo.ops import elementwise as e
from terrazzo.ops import indexing, reduce, scan, sorting
from terrazzo.ops.activation import logaddexp
from terrazzo.ops.creation import arange, full, zeros
from terrazzo.ops.getitem import getitem
from terrazzo.ops.loops import associative_scan
from terrazzo.ops.selection import topk as our_topk
from terrazzo.ops.shape import reshape
from terrazzo.torch.aten.registry import aten, unsupported


def _single(x: Value) -> tuple[Value, Value]:
    """What a tensor without axes answers: itself, at place 0."""
    return x, zeros(shape=(), dtype="int64")


@aten("sort.default")
def sort(x: Any, dim: int = -1, descending: bool = False) -> Any:
    return _sorted(x, dim, descending)


@aten("sort.stable")
def sort_stable(x: Any, stable: Any = True, dim: int = -1, descending: bool = False) -> Any:
    return _sorted(x, dim, descending)


def _sorted(x: Value, dim: int, descending: bool) -> tuple[Value, Value]:
    if x.ndim == 0:
        return _single(x)
    if x.dtype.is_bool:
        values, places = _sorted(e.astype(x, dtype="uint8"), dim, descending)
        return e.astype(values, dtype=x.dtype), places
    values, places = sorting.sort_pairs(x, axis=dim, descending=descending)
    return values, places


@aten("topk")
def topk(x: Any, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if x.ndim == 0:
        return _single(x)
    return our_topk(x, k=k, axis=dim, largest=largest)


def _at(x: Value, axis: int, place: Any, keepdim: bool) -> Value:
    """The elements at one place along an axis."""
    item = slice(place, place + 1) if keepdim else place
    return getitem(x, tuple(item if d == axis else slice(None) for d in range(x.ndim)))


@aten("kthvalue")
def kthvalue(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    if x.ndim == 0:
        return _single(x)
    axis = normalize_axis(dim, x.ndim)
    return tuple(_at(v, axis, k - 1, keepdim) for v in _sorted(x, axis, False))


@aten("median.dim")
def median_along(x: Any, dim: int, keepdim: bool = False) -> Any:
    return _median(x, dim, keepdim, skips_nan=False)


@aten("median.default")
def median_of_all(x: Any) -> Any:
    return _median(reshape(x, shape=(-1,)), 0, False, skips_nan=False)[0]


@aten("nanmedian.dim")
def nanmedian_along(x: Any, dim: int, keepdim: bool = False) -> Any:
    return _median(x, dim, keepdim, skips_nan=True)


@aten("nanmedian.default")
def nanmedian_of_all(x: Any) -> Any:
    return _median(reshape(x, shape=(-1,)), 0, False, skips_nan=True)[0]


def _median(x: Value, dim: int, keepdim: bool, *, skips_nan: bool) -> tuple[Value, Value]:
    """The lower of the two in the middle; nan, which sorting puts last, wins or is left out."""
    if x.ndim == 0:
        return _single(x)
    axis = normalize_axis(dim, x.ndim)
    values, places = _sorted(x, axis, False)
    n = x.shape[axis]
    if not x.dtype.is_float:
        return _at(values, axis, (n - 1) // 2, keepdim), _at(places, axis, (n - 1) // 2, keepdim)
    numbers = n - reduce.sum_(e.astype(e.isnan(x), dtype="int64"), axis=axis, keepdims=True)
    middle = e.floor_divide(numbers - 1, 2)
    if skips_nan:
        at = e.maximum(middle, 0)
    else:  # the first nan, if there is one
        at = e.where(e.less(numbers, n), numbers, middle)
    found = [indexing.gather(v, at, axis=axis) for v in (values, places)]
    if keepdim:
        return found[0], found[1]
    shape = tuple(m for d, m in enumerate(x.shape) if d != axis)
    return reshape(found[0], shape=shape), reshape(found[1], shape=shape)


@aten("mode")
def mode(x: Any, dim: int = -1, keepdim: bool = False) -> Any:
    """The most frequent element, the smallest of them, and where it stands last."""
    if x.ndim == 0:
        return _single(x)
    axis = normalize_axis(dim, x.ndim)
    values, places = _sorted(x, axis, False)
    wide = [reshape(values, shape=_with_one(values.shape, axis + k)) for k in (0, 1)]
    count = reduce.sum_(e.astype(e.equal(*wide), dtype="int64"), axis=axis)
    n = x.shape[axis]
    number = reshape(arange(start=n, dtype="int64"),
                     shape=tuple(n if d == axis else 1 for d in range(x.ndim)))
    most = reduce.max_(count, axis=axis, keepdims=True)
    first = reduce.min_(e.where(e.equal(count, most), number, n), axis=axis, keepdims=True)
    at = first + most - 1
    found = tuple(indexing.gather(v, at, axis=axis) for v in (values, places))
    if keepdim:
        return found
    shape = tuple(m for d, m in enumerate(x.shape) if d != axis)
    return tuple(reshape(v, shape=shape) for v in found)


def _with_one(shape: Any, axis: int) -> tuple[Any, ...]:
    return (*shape[:axis], 1, *shape[axis:])


@aten("cummax")
def cummax(x: Any, dim: int) -> Any:
    return _running(x, dim, scan.cummax)


@aten("cummin")
def cummin(x: Any, dim: int) -> Any:
    return _running(x, dim, scan.cummin)


def _running(x: Value, dim: int, function: Callable[..., Any]) -> Any:
    """Running extrema, and where each was last reached."""
    if x.ndim == 0:
        return _single(x)
    if x.dtype.is_bool:
        values, places = _running(e.astype(x, dtype="uint8"), dim, function)
        return e.astype(values, dtype=x.dtype), places
    axis = normalize_axis(dim, x.ndim)
    values = function(x, axis=axis)
    reached = e.equal(x, values)
    if x.dtype.is_float:
        reached = e.logical_or(reached, e.isnan(x))
    n = x.shape[axis]
    number = reshape(arange(start=n, dtype="int64"),
                     shape=tuple(n if d == axis else 1 for d in range(x.ndim)))
    return values, scan.cummax(e.where(reached, number, 0), axis=axis)


def _logaddexp(pair: Any, other: Any) -> Any:
    return logaddexp(pair, other)


@aten("logcumsumexp")
def logcumsumexp(x: Any, dim: int) -> Any:
    if x.ndim == 0 or x.size == 0:
        return x
    if not isinstance(x.shape[normalize_axis(dim, x.ndim)], int):
        unsupported("logcumsumexp along an axis of unknown length")
    # Gradients are differences of such sums: they need more digits than the result has.
    wide = e.astype(x, dtype="float64")
    return associative_scan(_logaddexp, wide, axis=normalize_axis(dim, x.ndim))


# ---------------------------------------------------------------- searching
@aten("searchsorted.Tensor")
def searchsorted(sequence: Any, values: Any, out_int32: bool = False, right: bool = False,
                 side: Any = None, sorter: Any = None) -> Any:
    if sorter is not None:
        sequence = indexing.gather(sequence, sorter, axis=sequence.ndim - 1)
    return counted_before(sequence, values, right or side == "right")


@aten("searchsorted.Scalar", typed=True)
def searchsorted_number(sequence: Any, value: Any, out_int32: bool = False, right: bool = False,
                        side: Any = None, sorter: Any = None, *, out: TensorType) -> Any:
    return searchsorted(sequence, full(shape=(), value=value, dtype=sequence.dtype), out_int32,
                        right, side, sorter)


@aten("bucketize.Tensor")
def bucketize(values: Any, boundaries: Any, out_int32: bool = False, right: bool = False) -> Any:
    return counted_before(boundaries, values, right)


def counted_before(sequence: Value, values: Value, right: bool) -> Value:
    """How many elements of the last axis come before each value; nan comes after everything."""
    if sequence.ndim == 1:
        rows = reshape(sequence, shape=(*(1 for _ in values.shape), *sequence.shape))
    else:
        rows = reshape(sequence, shape=_with_one(sequence.shape, sequence.ndim - 1))
    wide = reshape(values, shape=(*values.shape, 1))
    later = e.greater(rows, wide) if right else e.greater_equal(rows, wide)
    return reduce.sum_(e.astype(e.logical_not(later), dtype="int64"), axis=later.ndim - 1)
