"""Where the elements of a tensor are in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.expr.ir import Tensor
from terrazzo.expr.plan import Stage
from terrazzo.expr.schedule import Split
from terrazzo.index import Index, ceildiv
from terrazzo.loop.ir import Buffer
from terrazzo.scalar import Scalar, call
from terrazzo.shapes import num_elements


@dataclass(frozen=True, eq=False)
class Place:
    """Where a tensor's elements are: a whole tensor in a parameter, or a region of it in a local.

    A local begins at `base` and holds `sizes` elements of each dimension, in the order `parts`:
    (dimension, divisor, size) says that `offset // divisor % size` is one coordinate of storage.
    """

    buffer: Buffer
    tensor: Tensor
    base: tuple[Index, ...] | None = None
    parts: tuple[tuple[int, int, Index], ...] = ()

    def address(self, indices: Sequence[Index | Scalar]) -> Index | Scalar:
        """The address of an element of the tensor."""
        if self.base is None:
            return self.tensor.flat(indices)
        storage = Tensor(self.buffer.name, tuple(size for _, _, size in self.parts),
                         self.buffer.dtype)
        counted = [sum(1 for d, _, _ in self.parts if d == dim) for dim in range(len(indices))]
        coordinates = []
        for dim, divisor, size in self.parts:
            at = _minus(indices[dim], self.base[dim])
            if divisor > 1:
                at = _apply("floordiv", at, divisor)
            if counted[dim] > 1 and not self._is_outermost(dim, divisor):
                at = _apply("mod", at, size)
            coordinates.append(at)
        return storage.flat(coordinates)

    def _is_outermost(self, dim: int, divisor: int) -> bool:
        return all(other <= divisor for d, other, _ in self.parts if d == dim)


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


def storage_parts(stage: Stage, sizes: Sequence[Index]) -> tuple[tuple[int, int, Index], ...]:
    if stage.packed is None:
        return tuple((d, 1, size) for d, size in enumerate(sizes))
    splits = {r.axis: r for r in stage.nest.relations if isinstance(r, Split)}
    parts: dict[str, tuple[int, int, Index]] = {}

    def take_apart(axis: str, dim: int, divisor: int, size: Index) -> None:
        step = splits.get(axis)
        if step is None:
            parts[axis] = dim, divisor, size
            return
        take_apart(step.outer, dim, divisor * step.factor, ceildiv(size, step.factor))
        take_apart(step.inner, dim, divisor, step.factor)

    for dim, (axis, size) in enumerate(zip(stage.nest.data, sizes, strict=True)):
        take_apart(axis, dim, 1, size)
    return tuple(parts[axis] for axis in stage.packed)
