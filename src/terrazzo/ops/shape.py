"""Operators that move elements without computing: reshape, transpose, broadcast, slice.

Five primitives carry them, with `concat` (`joining.py`): `reshape`, `permute_dims`, `broadcast_to`,
`slice` and its opposite `place` (a tensor laid into a larger one, which is also what padding is).
"""

from __future__ import annotations

import operator as python
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from terrazzo.base.scalar import Const, Scalar, as_scalar, call
from terrazzo.base.scalar import where as where_scalar
from terrazzo.base.shapes import (
    Shape,
    broadcast_shapes,
    contiguous_strides,
    dims_text,
    normalize_axes,
    normalize_axis,
    num_elements,
)
from terrazzo.errors import (
    ArgumentError,
    AxisError,
    IndexOutOfRange,
    RankError,
    ShapeError,
    user_location,
)
from terrazzo.expr.ir import Tensor, compute
from terrazzo.graph.ir import (
    Node,
    TensorType,
    Value,
    operator_named,
)
from terrazzo.index import Index, IndexExpr, bounds, ceildiv, maximum, proves_eq
from terrazzo.index.guards import all_equal, ask, granted, multiple
from terrazzo.ops.define import broadcast_load, operator, primitive, with_shape


def as_shape(sizes: Any) -> Shape:
    """A tuple of sizes from one size or several."""
    if isinstance(sizes, IndexExpr) or not isinstance(sizes, Iterable):
        sizes = (sizes,)
    return tuple(n if isinstance(n, IndexExpr) else python.index(n) for n in sizes)


# ---------------------------------------------------------------- reshape
def _reshape_type(x: TensorType, *, shape: Any) -> TensorType:
    sizes = as_shape(shape)
    unknown = [d for d, n in enumerate(sizes) if isinstance(n, int) and n < 0]
    if len(unknown) > 1 or any(sizes[d] != -1 for d in unknown):
        raise ShapeError(f"cannot reshape to {dims_text(sizes)}: at most one size may be -1 and "
                         "none may be smaller", where=user_location())
    total = num_elements(x.shape)
    if unknown:
        given = num_elements(n for d, n in enumerate(sizes) if d != unknown[0])
        if given == 0:
            raise ShapeError(f"the -1 in {dims_text(sizes)} could be anything, as another size is "
                             "0", where=user_location(), hint="write the size out")
        sizes = tuple(total // given if d == unknown[0] else n for d, n in enumerate(sizes))
        fits = multiple(total, given)
    else:
        fits = granted("==", total, num_elements(sizes))
    if not fits:
        symbolic = not isinstance(total, int) or not isinstance(num_elements(sizes), int)
        raise ShapeError(
            f"cannot reshape {dims_text(x.shape)} to {dims_text(as_shape(shape))}: the number of "
            f"elements is {total} and would be {num_elements(sizes)}", where=user_location(),
            hint="the two must be equal for every value of the symbolic sizes; name a size that is "
                 "a multiple of 8 n*8" if symbolic else "keep the product of the sizes")
    return with_shape(x, sizes)


def matching_groups(a: Shape, b: Shape) -> list[tuple[range, range]]:
    """Split two shapes of equally many elements into the shortest runs that correspond.

    `[n, 4, 8]` and `[n, 32]` give `(n | n), (4, 8 | 32)`: indices never mix across groups, so
    reshapes that only split or merge neighbours need no division by symbolic sizes.
    """
    groups, i, j = [], 0, 0
    while i < len(a) or j < len(b):
        ends = sorted(((p, q) for p in range(i, len(a) + 1) for q in range(j, len(b) + 1)),
                      key=sum)[1:]
        p, q = next(((p, q) for p, q in ends
                     if proves_eq(num_elements(a[i:p]), num_elements(b[j:q]))), (len(a), len(b)))
        groups.append((range(i, p), range(j, q)))
        i, j = p, q
    return groups


def unravel(linear: Any, shape: Shape) -> tuple[Any, ...]:
    """The indices of the element at a row-major position, which may be an index or a scalar."""
    found: list[Any] = []
    for d, (n, stride) in enumerate(zip(shape, contiguous_strides(shape))):
        if n == 1:
            found.append(0)
            continue
        place = linear if stride == 1 else (
            call("floordiv", linear, as_scalar(stride)) if isinstance(linear, Scalar)
            else linear // stride)
        if d > 0 and any(m != 1 for m in shape[:d]):
            place = call("mod", place, as_scalar(n)) if isinstance(place, Scalar) else place % n
        found.append(place)
    return tuple(found)


def ravel(indices: Sequence[Index], shape: Shape) -> Index:
    """The row-major position of an element."""
    position: Index = 0
    for i, stride in zip(indices, contiguous_strides(shape), strict=True):
        position = position + i * stride
    return position


def is_empty(shape: Shape) -> bool:
    """Whether a tensor certainly has no elements."""
    return any(n == 0 for n in shape)


def _reshape_grad(node: Node, g: Value) -> list[Value | None]:
    return [reshape(g, shape=_input(node).shape)]


@primitive(family="shape", infer=_reshape_type, grad=_reshape_grad,
           reference=lambda x, *, shape, out: x.reshape(out.shape))
def reshape(x: Any, *, shape: Any, out: TensorType) -> Tensor:
    """the same elements in another shape; one size may be -1"""
    groups = [] if is_empty(x.shape) else matching_groups(x.shape, out.shape)

    def element(*i: Index) -> Scalar:
        if is_empty(x.shape):
            return Const(out.dtype, 0)
        place: list[Index] = []
        for source, target in groups:
            linear = ravel(i[target.start:target.stop], out.shape[target.start:target.stop])
            place += unravel(linear, x.shape[source.start:source.stop])
        return x[tuple(place)]

    return compute(out.shape, element, origin="reshape")


def _input(node: Node, number: int = 0) -> Value:
    value = node.inputs[number]
    assert value is not None
    return value


@operator(family="shape")
def flatten(x: Any, *, start_axis: int = 0, end_axis: int = -1) -> Any:
    """the axes from start_axis to end_axis merged into one"""
    if x.ndim == 0:
        return reshape(x, shape=(1,))
    first, last = normalize_axis(start_axis, x.ndim), normalize_axis(end_axis, x.ndim)
    if first > last:
        raise AxisError(f"flatten from axis {first} to axis {last} has nothing to merge",
                        where=user_location(), hint="start_axis comes before end_axis")
    merged = num_elements(x.shape[first:last + 1])
    return reshape(x, shape=(*x.shape[:first], merged, *x.shape[last + 1:]))


@operator(family="shape")
def expand_dims(x: Any, *, axis: Any = 0) -> Any:
    """new axes of size 1 at the given places of the result"""
    count = 1 if isinstance(axis, int) else len(axis)
    new = set(normalize_axes(axis, x.ndim + count))
    old = iter(x.shape)
    return reshape(x, shape=tuple(1 if d in new else next(old) for d in range(x.ndim + count)))


@operator(family="shape")
def squeeze(x: Any, *, axis: Any = None) -> Any:
    """the given axes of size 1 removed; without `axis`, every axis that is known to be of size 1"""
    gone = normalize_axes(axis, x.ndim) if axis is not None else tuple(
        d for d, n in enumerate(x.shape) if n == 1)
    for d in gone:
        if x.shape[d] != 1:
            raise ShapeError(f"cannot squeeze axis {d} of {dims_text(x.shape)}: its size is "
                             f"{x.shape[d]}, not 1", where=user_location())
    return reshape(x, shape=tuple(n for d, n in enumerate(x.shape) if d not in gone))


# ---------------------------------------------------------------- transposes
def _permutation(axes: Any, rank: int) -> tuple[int, ...]:
    order = tuple(normalize_axis(a, rank) for a in axes)
    if sorted(order) != list(range(rank)):
        raise AxisError(f"axes {tuple(axes)} are not an order of the {rank} axes of the tensor",
                        where=user_location(), hint="name each axis once")
    return order


def _permute_type(x: TensorType, *, axes: Any) -> TensorType:
    return with_shape(x, tuple(x.shape[a] for a in _permutation(axes, len(x.shape))))


def _permute_grad(node: Node, g: Value) -> list[Value | None]:
    order = _permutation(node.attrs["axes"], g.ndim)
    return [permute_dims(g, axes=tuple(order.index(d) for d in range(g.ndim)))]


def _permute_numpy(x: np.ndarray, *, axes: Any, out: TensorType) -> np.ndarray:
    return np.transpose(x, _permutation(axes, x.ndim))


@primitive(family="shape", infer=_permute_type, grad=_permute_grad, reference=_permute_numpy)
def permute_dims(x: Any, *, axes: Any, out: TensorType) -> Tensor:
    """axis d of the result is axis axes[d] of x"""
    order = _permutation(axes, len(x.shape))
    return compute(out.shape, lambda *i: x[tuple(i[order.index(d)] for d in range(len(order)))],
                   origin="permute_dims")


def channels_last(x: Value) -> Value:
    """[batch, channels, *sizes] as [batch, *sizes, channels]."""
    return permute_dims(x, axes=(0, *range(2, x.ndim), 1))


def channels_first(x: Value) -> Value:
    """[batch, *sizes, channels] as [batch, channels, *sizes]."""
    return permute_dims(x, axes=(0, x.ndim - 1, *range(1, x.ndim - 1)))


@operator(family="shape")
def transpose(x: Any, *, axes: Any = None) -> Any:
    """the axes in another order; reversed when none is given"""
    return permute_dims(x, axes=tuple(range(x.ndim))[::-1] if axes is None else tuple(axes))


@operator(family="shape")
def swapaxes(x: Any, *, axis1: int, axis2: int) -> Any:
    """two axes exchanged"""
    order = list(range(x.ndim))
    a, b = normalize_axis(axis1, x.ndim), normalize_axis(axis2, x.ndim)
    order[a], order[b] = order[b], order[a]
    return permute_dims(x, axes=tuple(order))


@operator(family="shape")
def moveaxis(x: Any, *, source: Any, destination: Any) -> Any:
    """axes moved to other places, the rest in order"""
    sources = [source] if isinstance(source, int) else list(source)
    targets = [destination] if isinstance(destination, int) else list(destination)
    moved = [normalize_axis(a, x.ndim) for a in sources]
    to = [normalize_axis(a, x.ndim) for a in targets]
    if len(set(moved)) != len(sources) or len(set(to)) != len(targets) or len(moved) != len(to):
        raise AxisError(f"moveaxis from {source} to {destination}: give as many distinct places "
                        "as distinct axes", where=user_location())
    order = [d for d in range(x.ndim) if d not in moved]
    for target, axis in sorted(zip(to, moved)):
        order.insert(target, axis)
    return permute_dims(x, axes=tuple(order))


@operator(family="shape")
def matrix_transpose(x: Any) -> Any:
    """the last two axes exchanged"""
    require_rank(x, 2, "matrix_transpose")
    return swapaxes(x, axis1=-2, axis2=-1)


def require_rank(x: Any, least: int, name: str) -> None:
    if x.ndim < least:
        raise RankError(f"{name} needs a tensor of at least {least} axes, not {dims_text(x.shape)}",
                        where=user_location())


# ---------------------------------------------------------------- broadcasting
def _broadcast_type(x: TensorType, *, shape: Any) -> TensorType:
    sizes = as_shape(shape)
    joint = broadcast_shapes(x.shape, sizes)
    if not all_equal(joint, sizes):
        raise ShapeError(f"{dims_text(x.shape)} does not broadcast to {dims_text(sizes)}",
                         where=user_location(), hint="only axes of size 1 stretch, and new axes "
                         "come in front")
    return with_shape(x, sizes)


def _broadcast_grad(node: Node, g: Value) -> list[Value | None]:
    shape = _input(node).shape
    extra = g.ndim - len(shape)
    summed = tuple(range(extra)) + tuple(
        extra + d for d, n in enumerate(shape) if n == 1 and g.shape[extra + d] != 1)
    if not summed:
        return [g]
    return [reshape(operator_named("sum")(g, axis=summed), shape=shape)]


@primitive(family="shape", infer=_broadcast_type, grad=_broadcast_grad,
           reference=lambda x, *, shape, out: np.array(np.broadcast_to(x, out.shape)))
def broadcast_to(x: Any, *, shape: Any, out: TensorType) -> Tensor:
    """axes of size 1 stretched, and new ones put in front, to fill a shape"""
    return compute(out.shape, lambda *i: broadcast_load(x, i), origin="broadcast_to")


# ---------------------------------------------------------------- slices
def _slice_size(start: Index, stop: Index, step: int) -> Index:
    """How many elements `start, start + step, ...` has before `stop`."""
    size = ceildiv(stop - start, step) if step > 0 else ceildiv(start - stop, -step)
    low = bounds(size)[0]
    return size if low is not None and low >= 0 else maximum(size, 0)


def _outside(first: Index, last: Index, n: Index) -> bool:
    """Whether an axis of n elements lacks one of two."""
    return any(ask("<", e, 0) or ask("<=", n, e) for e in (first, last))


def _slice_type(x: TensorType, *, starts: Any, stops: Any, steps: Any) -> TensorType:
    rank = len(x.shape)
    if not len(starts) == len(stops) == len(steps) == rank:
        raise RankError(f"slice of {dims_text(x.shape)} needs {rank} starts, stops and steps",
                        where=user_location())
    shape: list[Index] = []
    for d, (n, start, stop, step) in enumerate(zip(x.shape, starts, stops, steps)):
        if step == 0:
            raise ArgumentError("a slice needs a step other than 0", where=user_location())
        if step == 1 and start == 0 and stop is n:
            shape.append(n)
            continue
        size = _slice_size(start, stop, step)
        if _outside(start, start + (size - 1) * step, n) and ask("!=", size, 0):
            raise IndexOutOfRange(f"slice {start}:{stop}:{step} of axis {d} reads outside its size "
                                  f"{n}", where=user_location(), hint="slice bounds of this "
                                  "operator do not wrap; write x[a:b:c] for Python's rules")
        shape.append(size)
    return with_shape(x, tuple(shape))


def _numpy_slices(starts: Any, sizes: Any, steps: Any) -> tuple[slice, ...]:
    """Python slices for `size` elements from `start`; a stop before 0 has to be None."""
    stops = (start + size * step for start, size, step in zip(starts, sizes, steps))
    return tuple(slice(start, stop if stop >= 0 and size > 0 else None if size > 0 else start, step)
                 for start, stop, size, step in zip(starts, stops, sizes, steps))


def _slice_numpy(x: np.ndarray, *, starts: Any, stops: Any, steps: Any,
                 out: TensorType) -> np.ndarray:
    return x[_numpy_slices(starts, out.shape, steps)].copy()


def _slice_grad(node: Node, g: Value) -> list[Value | None]:
    return [place(g, shape=_input(node).shape, starts=node.attrs["starts"],
                  steps=node.attrs["steps"])]


@primitive(family="shape", infer=_slice_type, reference=_slice_numpy, grad=_slice_grad)
def slice_(x: Any, *, starts: Any, stops: Any, steps: Any, out: TensorType) -> Tensor:
    """elements start, start + step, ... before stop of every axis; bounds do not wrap or clip

    A negative step walks down, and a stop of -1 is then before the first element.
    """
    return compute(out.shape, lambda *i: x[tuple(
        start + n * step for n, start, step in zip(i, starts, steps))], origin="slice")


def span(x: Any, axis: int, start: Index, stop: Index, step: int = 1) -> Any:
    """A slice of one axis, all of the others."""
    axis = normalize_axis(axis, x.ndim)
    if step == 1 and start == 0 and proves_eq(stop, x.shape[axis]):
        return x
    return slice_(x, starts=tuple(start if d == axis else 0 for d in range(x.ndim)),
                  stops=tuple(stop if d == axis else n for d, n in enumerate(x.shape)),
                  steps=tuple(step if d == axis else 1 for d in range(x.ndim)))


def _place_type(x: TensorType, *, shape: Any, starts: Any, steps: Any, value: Any) -> TensorType:
    sizes = as_shape(shape)
    for n, size, start, step in zip(x.shape, sizes, starts, steps, strict=True):
        if step == 1 and start == 0 and n is size:
            continue
        if _outside(start, start + (n - 1) * step, size) and ask("!=", n, 0):
            raise IndexOutOfRange(f"{dims_text(x.shape)} placed at {tuple(starts)} with steps "
                                  f"{tuple(steps)} does not fit in {dims_text(sizes)}",
                                  where=user_location())
    return with_shape(x, sizes)


def _place_numpy(x: np.ndarray, *, shape: Any, starts: Any, steps: Any, value: Any,
                 out: Any) -> np.ndarray:
    result = np.full(out.shape, value).astype(out.dtype.np)
    result[_numpy_slices(starts, x.shape, steps)] = x
    return result


def _place_grad(node: Node, g: Value) -> list[Value | None]:
    starts, steps = node.attrs["starts"], node.attrs["steps"]
    stops = tuple(start + n * step for start, n, step in zip(starts, _input(node).shape, steps))
    return [slice_(g, starts=starts, stops=stops, steps=steps)]


@primitive(family="shape", infer=_place_type, reference=_place_numpy, grad=_place_grad)
def place(x: Any, *, shape: Any, starts: Any, steps: Any, value: Any = 0,
          out: TensorType) -> Tensor:
    """x laid into a tensor of one value, at start, start + step, ... of every axis

    The opposite of slice; with steps of 1 it pads, with larger ones it dilates.
    """
    if is_empty(x.shape):
        return compute(out.shape, lambda *i: Const(out.dtype, value), origin="place")

    def element(*i: Index) -> Scalar:
        tests: list[Scalar] = []
        at: list[Index] = []
        for d, (start, step) in enumerate(zip(starts, steps)):
            n, gap = x.shape[d], abs(step)
            if start == 0 and step == 1 and proves_eq(n, out.shape[d]):
                at.append(i[d])
                continue
            offset = i[d] - start if step > 0 else start - i[d]
            at.append(offset // gap)
            if step < 0 or start != 0:
                tests.append(call("ge", as_scalar(offset), 0))
            tests.append(call("lt", as_scalar(offset), as_scalar(n * gap)))
            if gap > 1:
                tests.append(call("eq", as_scalar(offset % gap), 0))
        result: Scalar = x[tuple(at)]
        if not tests:
            return result
        inside = tests[0]
        for test in tests[1:]:
            inside = call("and", inside, test)
        return where_scalar(inside, result, Const(out.dtype, value))

    return compute(out.shape, element, origin="place")
