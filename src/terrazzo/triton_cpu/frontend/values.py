"""What an SSA value of TTIR is while a kernel is lowered: a function from indices to an element.

A tile is never held as a whole until something needs it in memory. Asking a tile for the element
at some indices gives a scalar expression, so a chain of elementwise operations is composition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from terrazzo import dtypes
from terrazzo.base.scalar import Const, Scalar, call
from terrazzo.dtypes import DType
from terrazzo.errors import UnsupportedDType
from terrazzo.index import Index
from terrazzo.loop.ir import Buffer
from terrazzo.triton_cpu.frontend.ttir import Type

DTYPES: dict[str, DType] = {
    "f64": dtypes.float64, "f32": dtypes.float32, "f16": dtypes.float16, "bf16": dtypes.bfloat16,
    "f8E4M3FN": dtypes.float8_e4m3fn, "f8E5M2": dtypes.float8_e5m2,
    "f8E4M3FNUZ": dtypes.float8_e4m3fnuz, "f8E5M2FNUZ": dtypes.float8_e5m2fnuz,
    "i64": dtypes.int64, "i32": dtypes.int32, "i16": dtypes.int16, "i8": dtypes.int8,
    "i1": dtypes.bool_, "index": dtypes.int64,
}
UNSIGNED: dict[DType, DType] = {
    dtypes.int64: dtypes.uint64, dtypes.int32: dtypes.uint32, dtypes.int16: dtypes.uint16,
    dtypes.int8: dtypes.uint8, dtypes.bool_: dtypes.bool_,
}


def dtype_of(elem: str) -> DType:
    """Our data type for an element type of MLIR."""
    try:
        return DTYPES[elem]
    except KeyError:
        raise UnsupportedDType(f"elements of type {elem} have no counterpart on the CPU",
                               hint=f"one of {', '.join(DTYPES)}") from None


@dataclass(frozen=True, eq=False)
class Pointer:
    """An element that is an address: so many elements into a buffer."""

    buffer: Buffer
    offset: Scalar
    rest: Scalar | None = None  # and so many bytes, which loads and stores take for zero

    def moved(self, elements: Scalar) -> Pointer:
        """The pointer so many elements further on."""
        if not (isinstance(self.offset, Const) and self.offset.value == 0):
            elements = call("add", self.offset, elements)
        return Pointer(self.buffer, elements, self.rest)


Element = Scalar | Pointer
Indices = tuple[Index, ...]


@dataclass(eq=False)
class Value:
    """A tile or a scalar as a function of its indices; the same indices give the same node."""

    type: Type
    compute: Callable[[Indices], Element]
    memo: dict[Indices, Element] = field(default_factory=dict)
    buffer: Buffer | None = None  # where it lies in memory, row-major, once it does
    weight: int = 0  # operations to compute an element
    known_at: int = 0  # how many values had been put into memory when `memo` was begun

    def at(self, indices: Indices = ()) -> Element:
        if self.known_at != _kept[0]:  # it may remember how one of them was computed before
            self.memo.clear()
            self.known_at = _kept[0]
        found = self.memo.get(indices)
        if found is None:
            found = self.memo[indices] = self.compute(indices)
        return found

    def scalar(self, indices: Indices = ()) -> Scalar:
        """The element where it must be a number."""
        element = self.at(indices)
        assert isinstance(element, Scalar), "a pointer where a number is needed"
        return element

    def pointer(self, indices: Indices = ()) -> Pointer:
        """The element where it must be an address."""
        element = self.at(indices)
        assert isinstance(element, Pointer), "a number where a pointer is needed"
        return element


_kept = [0]  # so many values, of all kernels


def forget_elements() -> None:
    """A value lies in memory from now on: nobody may hold on to how it was computed."""
    _kept[0] += 1


def constant_value(type_: Type, element: Element) -> Value:
    """A value whose elements are all the same expression."""
    return Value(type_, lambda i: element)


def flat(shape: tuple[int, ...], indices: Indices) -> Index:
    """The row-major position of an element."""
    place: Index = 0
    for size, i in zip(shape, indices, strict=True):
        place = place * size + i
    return place


def unflat(shape: tuple[int, ...], place: Index) -> Indices:
    """The indices of the element at a row-major position."""
    indices: list[Index] = []
    for size in reversed(shape):
        indices.append(place % size if size > 1 else 0)
        place = place // size
    return tuple(reversed(indices))
