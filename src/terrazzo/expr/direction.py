"""Which way a reduction runs through memory: along rows, or down columns."""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.base.scalar import Axis, Reduce, Scalar, loads, walk
from terrazzo.base.shapes import num_elements
from terrazzo.expr.ir import Tensor
from terrazzo.index import bounds, coefficient

UNKNOWN = 1 << 20  # elements of a tensor whose size nothing is known about


def reductions(stage: Tensor) -> list[Reduce]:
    """The reductions in a stage."""
    assert stage.body is not None
    return [n for n in walk(stage.body) if isinstance(n, Reduce)]


def unit_stride_axis(stage: Tensor, axes: Sequence[Axis]) -> Axis | None:
    """The axis along which the largest tensor that a stage reduces is contiguous."""
    best: tuple[int, Axis] | None = None
    for node in reductions(stage):
        for load in loads(node.value):
            if any(isinstance(i, Scalar) for i in load.indices):
                continue
            address = load.source.flat(load.indices)
            for axis in axes:
                if coefficient(address, axis.var) == 1:
                    top = bounds(num_elements(load.source.shape))[1]
                    size = UNKNOWN if top is None else max(top, 1)
                    if best is None or size > best[0]:
                        best = (size, axis)
    return None if best is None else best[1]


def reduces_columns(stage: Tensor) -> bool:
    """Whether neighbours in memory belong to different results of a stage."""
    reduced = [a for n in reductions(stage) for a in n.axes]
    along = unit_stride_axis(stage, [*stage.axes, *reduced])
    return along is not None and any(along is a for a in stage.axes)
