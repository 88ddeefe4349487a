"""Shapes of tensors: tuples of dimensions, each a number or a symbolic integer."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from terrazzo.errors import AxisError, BroadcastError
from terrazzo.index import Index, Var
from terrazzo.index.guards import granted

Shape: TypeAlias = tuple[Index, ...]


def dim(name: str) -> Var:
    """A symbolic dimension; zero is a possible size, so that empty tensors are covered.

    >>> import terrazzo as tz
    >>> tz.dim("n") + 1
    n + 1
    """
    return Var(name)


def dims(names: str) -> tuple[Var, ...]:
    """Several symbolic dimensions at once.

    >>> import terrazzo as tz
    >>> n, m = tz.dims("n m")
    >>> n * m + 1
    m*n + 1
    """
    return tuple(map(dim, names.replace(",", " ").split()))


def dims_text(shape: Iterable[Index]) -> str:
    """A shape as messages and printed graphs show it: `[n, 4, m*2]`."""
    return f"[{', '.join(map(str, shape))}]"


def broadcast_shapes(*shapes: Shape) -> Shape:
    """The shape operands stretch to together, by numpy's rules.

    Dimensions are aligned from the right; of each set, those that are not 1 must be provably equal.
    """
    rank = max(map(len, shapes), default=0)
    return tuple(_broadcast_axis(axis, shapes) for axis in range(-rank, 0))


def _broadcast_axis(axis: int, shapes: tuple[Shape, ...]) -> Index:
    sizes = [shape[axis] for shape in shapes if -axis <= len(shape) and shape[axis] != 1]
    for size in sizes[1:]:
        if not granted("==", sizes[0], size):
            known = isinstance(sizes[0], int) and isinstance(size, int)
            raise BroadcastError(
                f"shapes {' and '.join(map(dims_text, shapes))} do not broadcast: "
                f"axis {axis} is {sizes[0]} in one operand and {size} in another",
                hint=None if known else _SYMBOLIC_HINT,
            )
    return sizes[0] if sizes else 1


_SYMBOLIC_HINT = (
    "sizes must be equal or 1, and a symbolic size is equal only to the same dimension; "
    "give both operands the same dimension, or known sizes"
)


def normalize_axis(axis: int, rank: int) -> int:
    """An axis counted from the front, given one that may count from the back."""
    try:
        axis = operator.index(axis)
    except TypeError:
        raise AxisError(f"{axis!r} is not an axis", hint="axes are whole numbers") from None
    if not -rank <= axis < rank:
        hint = f"use {-rank} to {rank - 1}" if rank else "a scalar has no axes; leave the axis out"
        raise AxisError(f"axis {axis} does not exist in a tensor of rank {rank}", hint=hint)
    return axis % rank


def normalize_axes(axes: int | Iterable[int] | None, rank: int) -> tuple[int, ...]:
    """Distinct axes counted from the front, in order; None means all of them."""
    if axes is None:
        return tuple(range(rank))
    if isinstance(axes, (str, bytes, dict)):  # Iterable, but of no axes, and maybe of nothing
        raise AxisError(f"{axes!r} is not an axis", hint="axes are whole numbers")
    given = tuple(axes) if isinstance(axes, Iterable) else (axes,)
    normal = sorted(normalize_axis(axis, rank) for axis in given)
    if len(set(normal)) < len(normal):
        raise AxisError(f"axes {given} name an axis of a tensor of rank {rank} twice")
    return tuple(normal)


def num_elements(shape: Iterable[Index]) -> Index:
    """How many elements a tensor of this shape has."""
    count: Index = 1
    for size in shape:
        count = count * size
    return count


def unflatten(flat: Index, extents: Sequence[Index]) -> list[Index]:
    """The index along each axis of the element that is `flat`-th in row-major order."""
    result: list[Index] = []
    for d, extent in enumerate(extents):
        inner = num_elements(extents[d + 1:])
        if any(isinstance(n, int) and n == 0 for n in (extent, inner)):
            result.append(0)
        else:
            result.append(flat // inner if d == 0 else flat // inner % extent)
    return result


def contiguous_strides(shape: Shape) -> tuple[Index, ...]:
    """Distances between neighbours along each axis, in elements, for row-major storage."""
    strides: list[Index] = []
    step: Index = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * size
    return tuple(reversed(strides))


def likely_shapes(count: int) -> Iterator[list[tuple[int, ...]]]:
    """Shapes that operators of so many tensors often take, the plainest first."""
    if count == 0:
        yield []
        return
    yield [(8, 16)] * count
    yield [(8, 16), *[(16,)] * (count - 1)]  # normalisation: a weight, a bias
    yield [(8, 16), (16, 8), *[(8,)] * (count - 2)][:count]  # products of matrices
    yield [(8, 16), (12, 16), *[(12,)] * (count - 2)][:count]  # a layer: [outputs, inputs]
    yield [(2, 3, 8, 16)] * count
    yield [(16,)] * count
    yield [()] * count
    yield [(2, 6, 8, 8), *[(6,)] * (count - 1)]  # images and channels
