"""Which way a reduction runs through memory: along rows, or down columns."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from terrazzo.base.scalar import Axis, FromIndex, Load, Reduce, Scalar, loads, walk
from terrazzo.expr.ir import Tensor
from terrazzo.index import Index, Var, bounds, coefficient, free_vars

UNKNOWN = 1 << 10  # elements along an axis whose length nothing is known about


def reductions(stage: Tensor) -> list[Reduce]:
    """The reductions in a stage."""
    assert stage.body is not None
    return [n for n in walk(stage.body) if isinstance(n, Reduce)]


def unit_stride_axis(stage: Tensor, axes: Sequence[Axis]) -> Axis | None:
    """The axis along which what a stage reduces is contiguous, or stays where it is.

    Where tensors are contiguous along one axis each, the largest of them decides.
    """
    best: tuple[int, int, Axis] | None = None
    operands = [(load, _told(load), _about(load.source.shape))
                for node in reductions(stage) for load in loads(node.value)]
    for axis in axes:
        apart = along = 0  # elements of tensors whose neighbours lie apart, or side by side
        for load, told, size in operands:
            step = None if axis.var in told else coefficient(_address(load), axis.var)
            if step == 1:
                along = max(along, size)
            elif step != 0:
                apart = max(apart, size)
        if along and (best is None or (-apart, along) > best[:2]):
            best = (-apart, along, axis)
    return None if best is None else best[2]


def _address(load: Load) -> Index:
    """Where a load reads, but for what data tells."""
    return load.source.flat([0 if isinstance(i, Scalar) else i for i in load.indices])


def _told(load: Load) -> set[Var]:
    """What those indices of a load vary with that data tells."""
    return set().union(*(_variables(i) for i in load.indices if isinstance(i, Scalar)))


def _about(shape: Sequence[Index]) -> int:
    """How many elements a tensor has at most, as far as is known."""
    tops = (bounds(n)[1] for n in shape)
    return prod(UNKNOWN if top is None else max(top, 1) for top in tops)


def _variables(index: Scalar) -> set[Var]:
    """What an index that data tells varies with."""
    found: set[Var] = set()
    for node in walk(index):
        if isinstance(node, FromIndex):
            found |= free_vars(node.index)
        elif isinstance(node, Load):
            found |= set().union(*(free_vars(i) for i in node.indices
                                   if not isinstance(i, Scalar)))
    return found


def reduces_columns(stage: Tensor) -> bool:
    """Whether neighbours in memory belong to different results of a stage."""
    reduced = [a for n in reductions(stage) for a in n.axes]
    along = unit_stride_axis(stage, [*stage.axes, *reduced])
    return along is not None and any(along is a for a in stage.axes)
