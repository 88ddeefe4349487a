"""Where the elements of a tensor are in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from terrazzo.base.scalar import Scalar, call
from terrazzo.base.shapes import num_elements
from terrazzo.expr.ir import Tensor
from terrazzo.expr.schedule import Split
from terrazzo.expr.stage import Stage
from terrazzo.index import Index, ceildiv
from terrazzo.loop.ir import Buffer


class Part(NamedTuple):
    """One coordinate of storage: `offset // divisor % size` of a dimension's offset."""

    dimension: int
    divisor: Index
    size: Index
    outermost: bool = True  # of its dimension: there is nothing to take the remainder of


@dataclass(frozen=True, eq=False)
class Place:
    """Where a tensor's elements are: a whole tensor in a parameter, or a region of it in a local.

    A local begins at `base` and holds its elements in the order that `parts` say.
    """

    buffer: Buffer
    tensor: Tensor
    base: tuple[Index, ...] | None = None
    parts: tuple[Part, ...] = ()

    def address(self, indices: Sequence[Index | Scalar]) -> Index | Scalar:
        """The address of an element of the tensor."""
        if self.base is None:
            return self.tensor.flat(indices)
        storage = Tensor(self.buffer.name, tuple(part.size for part in self.parts),
                         self.buffer.dtype)
        coordinates = []
        for part in self.parts:
            at = _minus(indices[part.dimension], self.base[part.dimension])
            if part.divisor != 1:
                at = _apply("floordiv", at, part.divisor)
            if not part.outermost:
                at = _apply("mod", at, part.size)
            coordinates.append(at)
        return storage.flat(coordinates)


def _minus(index: Index | Scalar, base: Index) -> Any:
    if isinstance(index, Scalar):
        return index if base == 0 else call("sub", index, base)
    return index - base


def _apply(op: str, value: Any, other: Index) -> Any:
    if isinstance(value, Scalar):
        return call(op, value, other)
    return value // other if op == "floordiv" else value % other


def storage_size(tensor: Tensor) -> Index:
    """How many elements of memory a tensor spans, strides included."""
    if tensor.strides is None:
        return num_elements(tensor.shape)
    span: Index = tensor.offset + 1
    for size, stride in zip(tensor.shape, tensor.strides, strict=True):
        span = span + (size - 1) * stride
    return span


def storage_parts(stage: Stage, sizes: Sequence[Index]) -> tuple[Part, ...]:
    """How the elements of a stage's own memory follow each other; see `Place.parts`."""
    if stage.packed is None:
        return tuple(Part(d, 1, size) for d, size in enumerate(sizes))
    packed = stage.packed
    splits = {r.axis: r for r in stage.nest.relations if isinstance(r, Split)}
    parts: dict[str, Part] = {}

    def take_apart(axis: str, part: Part) -> None:
        step = splits.get(axis)
        if step is None or axis in packed:  # split after it was packed: its loops alone
            parts[axis] = part
            return
        piece = step.piece(part.size)
        take_apart(step.outer, part._replace(divisor=part.divisor * piece,
                                            size=ceildiv(part.size, piece)))
        take_apart(step.inner, part._replace(size=piece, outermost=False))

    for dim, (axis, size) in enumerate(zip(stage.nest.data, sizes, strict=True)):
        take_apart(axis, Part(dim, 1, size))
    return tuple(parts[axis] for axis in packed)
