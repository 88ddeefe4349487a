"""Shapes of tensors: tuples of dimensions, each a number or a symbolic integer."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TypeAlias

from terrazzo.errors import ShapeError
from terrazzo.index import Index, Var, proves_eq

Shape: TypeAlias = tuple[Index, ...]


def dim(name: str) -> Var:
    """A symbolic dimension; zero is a possible size, so that empty tensors are covered."""
    return Var(name)


def dims(names: str) -> tuple[Var, ...]:
    """Several symbolic dimensions at once: `n, m = dims("n m")`."""
    return tuple(map(dim, names.replace(",", " ").split()))


def dims_text(shape: Iterable[Index]) -> str:
    """A shape as messages and printed graphs show it: `[n, 4, m*2]`."""
    return f"[{', '.join(map(str, shape))}]"


def broadcast_shapes(*shapes: Shape) -> Shape:
    """The shape operands stretch to together, by numpy's rules.

    Dimensions are aligned from the right; of each set, those that are not 1 must be provably equal.
    """
    rank = max(map(len, shapes), default=0)
    result: list[Index] = []
    for axis in range(-rank, 0):
        size: Index = 1
        for shape in shapes:
            if -axis > len(shape) or shape[axis] == 1:
                continue
            if size == 1:
                size = shape[axis]
            elif not proves_eq(size, shape[axis]):
                operands = " and ".join(map(dims_text, shapes))
                raise ShapeError(
                    f"shapes {operands} do not broadcast: axis {axis} is {size} in one operand "
                    f"and {shape[axis]} in another. Make the two equal or one of them 1"
                    + ("" if isinstance(size, int) and isinstance(shape[axis], int) else
                       "; symbolic dimensions are equal only if they have the same name")
                    + "."
                )  # fmt: skip
        result.append(size)
    return tuple(result)


def normalize_axis(axis: int, rank: int) -> int:
    """An axis counted from the front, given one that may count from the back."""
    axis = operator.index(axis)
    if not -rank <= axis < rank:
        allowed = f"use {-rank} to {rank - 1}" if rank else "a scalar has no axes"
        raise ShapeError(f"axis {axis} does not exist in a tensor of rank {rank}; {allowed}.")
    return axis % rank


def normalize_axes(axes: int | Iterable[int] | None, rank: int) -> tuple[int, ...]:
    """Distinct axes counted from the front, in order; None means all of them."""
    if axes is None:
        return tuple(range(rank))
    given = tuple(axes) if isinstance(axes, Iterable) else (axes,)
    normal = sorted(normalize_axis(axis, rank) for axis in given)
    if len(set(normal)) < len(normal):
        raise ShapeError(f"axes {given} name an axis of a tensor of rank {rank} twice.")
    return tuple(normal)


def num_elements(shape: Iterable[Index]) -> Index:
    """How many elements a tensor of this shape has."""
    count: Index = 1
    for size in shape:
        count = count * size
    return count


def contiguous_strides(shape: Shape) -> tuple[Index, ...]:
    """Distances between neighbours along each axis, in elements, for row-major storage."""
    strides: list[Index] = []
    step: Index = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * size
    return tuple(reversed(strides))
