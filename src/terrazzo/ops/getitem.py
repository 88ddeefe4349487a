"""x[key] by numpy's rules: numbers, slices, None, ... and integer tensors."""

from __future__ import annotations

import operator as python
from typing import Any

import numpy as np

from terrazzo.base.nests import leaves
from terrazzo.base.shapes import Shape, broadcast_shapes, dims_text
from terrazzo.errors import ArgumentError, DTypeError, IndexOutOfRange, RankError, user_location
from terrazzo.graph.ir import Operator, Value
from terrazzo.graph.sizes import plain
from terrazzo.index import Index, IndexExpr, maximum, minimum, proves_eq
from terrazzo.index.guards import ask
from terrazzo.ops.define import fronted, operator
from terrazzo.ops.indexing import take_at
from terrazzo.ops.shape import permute_dims, reshape, slice_


def _normal_bound(bound: Any, n: Index, default: Index, below: Index) -> Index:
    """A slice bound by Python's rules: from the end if negative, and clipped to below..n."""
    if bound is None:
        return default
    if not isinstance(bound, IndexExpr):
        bound = python.index(bound)
    negative = ask("<", bound, 0)
    if negative:
        return maximum(n + bound, below)
    inside = minimum(bound, n if below == 0 else n - 1)
    return maximum(inside, below) if negative is None else inside


def _normal_slice(s: slice, n: Index) -> tuple[Index, Index, int]:
    step = 1 if s.step is None else python.index(s.step)
    if step == 0:
        raise ArgumentError("a slice needs a step other than 0", where=user_location())
    if step > 0:
        return _normal_bound(s.start, n, 0, 0), _normal_bound(s.stop, n, n, 0), step
    return _normal_bound(s.start, n, n - 1, -1), _normal_bound(s.stop, n, -1, -1), step


def _is_tensor(item: Any) -> bool:
    return isinstance(item, (Value, np.ndarray, list)) or hasattr(item, "detach")


def _of_list(items: list[Any]) -> Any:
    """An index tensor that is written as a list, maybe of lists; one with values stays."""
    if any(isinstance(i, Value) or hasattr(i, "detach") for i in leaves(items)):
        return items
    array = np.asarray(items)
    return array.astype(np.int64) if array.dtype.kind in "iu" or not array.size else array


def _normal_key(key: Any, shape: Shape) -> tuple[tuple[Any, ...], list[Any]]:
    """A subscript as plain data (kind, numbers...) and the index tensors it holds."""
    items = list(key) if isinstance(key, tuple) else [key]
    count = sum(item is not None and item is not Ellipsis for item in items)
    dots = [k for k, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1 or count > len(shape):
        raise RankError(f"{count} indices for {dims_text(shape)}" if not dots[1:] else
                        "an index has more than one '...'", where=user_location())
    at = dots[0] if dots else len(items)
    items[at:at + 1] = [slice(None)] * (len(shape) - count)
    normal: list[tuple[Any, ...]] = []
    tensors: list[Any] = []
    axis = 0
    for item in items:
        if item is None:
            normal.append(("new",))
            continue
        n = shape[axis]
        if isinstance(item, (bool, np.bool_)):
            raise DTypeError("True and False are no indices here", where=user_location(),
                             hint="use None for a new axis, or tz.where to choose elements")
        if isinstance(item, slice):
            normal.append(("range", *_normal_slice(item, n)))
        elif _is_tensor(item):
            normal.append(("tensor",))
            tensors.append(_of_list(item) if isinstance(item, list) else item)
        else:
            normal.append(("at", _single_index(item, n, axis)))
        axis += 1
    return tuple(normal), tensors


def _single_index(item: Any, n: Index, axis: int) -> Index:
    try:
        index = item if isinstance(item, IndexExpr) else python.index(item)
    except TypeError:
        raise DTypeError(f"a {type(item).__name__} is no index", where=user_location(),
                         hint="use integers, slices, None, ... and integer tensors") from None
    if ask("<", index, -n) or ask("<=", n, index):
        raise IndexOutOfRange(f"index {index} is outside axis {axis} of size {n}",
                              where=user_location())
    return index + n if ask("<", index, 0) else index


@operator(family="indexing")
def getitem(x: Any, *indices: Any, key: Any) -> Any:
    """x[key], by numpy's rules; boolean masks are refused, as their result has no known size"""
    items = [item for item in key if item[0] != "new"]
    ranges = {"at": lambda i: (i, i + 1, 1), "range": lambda *r: r}
    cuts = [(0, n, 1) if item[0] == "tensor" else ranges[item[0]](*item[1:])
            for item, n in zip(items, x.shape, strict=True)]
    if any(not (start == 0 and step == 1 and proves_eq(stop, n))
           for (start, stop, step), n in zip(cuts, x.shape)):
        starts, stops, steps = zip(*cuts)
        x = slice_(x, starts=starts, stops=stops, steps=steps)
    kinds = [item[0] for item in items if item[0] != "at"]
    x = _in_shape(x, tuple(n for n, item in zip(x.shape, items) if item[0] != "at"))
    rank, front = 0, False
    if indices:
        axes = tuple(d for d, kind in enumerate(kinds) if kind == "tensor")
        rank = len(broadcast_shapes(*(i.shape for i in indices)))
        x = take_at(x, *indices, axes=axes)
        # Index tensors apart from each other put their axes in front, numbers counting as such.
        advanced = [k for k, item in enumerate(key) if item[0] in ("tensor", "at")]
        front = advanced[-1] - advanced[0] + 1 > len(advanced)
        if front and axes[0]:
            x = permute_dims(x, axes=(*range(axes[0], axes[0] + rank), *range(axes[0]),
                                      *range(axes[0] + rank, x.ndim)))
    sizes = iter(x.shape)
    shape: list[Index] = [next(sizes) for _ in range(rank)] if front else []
    for item in key:
        if item[0] == "new":
            shape.append(1)
        elif item[0] == "range":
            shape.append(next(sizes))
        elif item[0] == "tensor" and rank and not front:
            shape += [next(sizes) for _ in range(rank)]
            rank = 0
    return _in_shape(x, tuple(shape))


def _in_shape(x: Value, shape: Shape) -> Value:
    return x if tuple(x.shape) == shape else reshape(x, shape=shape)


def _getitem_front(x: Any, key: Any) -> Any:
    shape = x.shape if hasattr(x, "shape") else np.shape(x)
    normal, tensors = _normal_key(plain(key), tuple(shape))
    return Operator.__call__(getitem, x, *tensors, key=normal)


getitem = fronted(getitem, _getitem_front)

