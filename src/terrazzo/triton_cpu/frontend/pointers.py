"""Pointers that do not lead into one argument: addresses loaded, computed, or chosen from two.

They are elements of a buffer that begins at address zero, so that everything which works for
pointers into tensors (affine addresses, vector loads, masks) works for them too. Memory is only
reached through pointers that are aligned to the type they point to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.base.scalar import Const, FromIndex, Scalar, call, where
from terrazzo.dtypes import DType, int64
from terrazzo.index import Index
from terrazzo.loop.ir import Buffer
from terrazzo.triton_cpu.frontend.ttir import Type
from terrazzo.triton_cpu.frontend.values import Element, Indices, Pointer, Value, dtype_of

if TYPE_CHECKING:
    from terrazzo.triton_cpu.frontend.lower import Lowering

ANYWHERE = -1  # in place of an argument's number: a buffer that begins at address zero


def memory(lowering: Lowering, dtype: DType) -> Buffer:
    """All memory, as elements of a type."""
    return _view(lowering, ANYWHERE, "memory", dtype)


def as_type(lowering: Lowering, buffer: Buffer, dtype: DType) -> Buffer:
    """The same address as a pointer to another type."""
    return buffer if buffer.dtype is dtype else _view(
        lowering, lowering.signature.argument_of(buffer), buffer.name, dtype)


def _view(lowering: Lowering, argument: int, name: str, dtype: DType) -> Buffer:
    for buffer, number in lowering.signature.params:
        if number == argument and buffer.dtype is dtype:
            return buffer
    buffer = Buffer(f"{name}_{dtype.short}", dtype, 0, bounded=False)
    lowering.signature.params.append((buffer, argument))
    return buffer


def may_overlap(lowering: Lowering, a: Buffer, b: Buffer) -> bool:
    """Whether two pointers may lead to the same memory."""
    numbers = {lowering.signature.argument_of(a), lowering.signature.argument_of(b)}
    return len(numbers) == 1 or ANYWHERE in numbers


def address(lowering: Lowering, pointer: Pointer) -> Scalar:
    """A pointer as a number of bytes."""
    size = pointer.buffer.dtype.itemsize
    place = pointer.offset if size == 1 else call("mul", pointer.offset, Const(int64, size))
    if pointer.rest is not None:
        place = call("or", place, pointer.rest)
    begin = _begin(lowering, pointer.buffer)
    return place if isinstance(begin, int) else call("add", FromIndex(int64, begin), place)


def pointer_to(lowering: Lowering, place: Scalar, dtype: DType) -> Pointer:
    """A number of bytes as a pointer."""
    size = dtype.itemsize
    if size == 1:
        return Pointer(memory(lowering, dtype), place)
    return Pointer(memory(lowering, dtype),
                   call("shr", place, Const(int64, size.bit_length() - 1)),
                   call("and", place, Const(int64, size - 1)))


def absolute(lowering: Lowering, pointer: Pointer) -> Pointer:
    """The same place, counted from address zero."""
    dtype = pointer.buffer.dtype
    begin = _begin(lowering, pointer.buffer)
    if isinstance(begin, int):
        return pointer
    return Pointer(memory(lowering, dtype), call(
        "add", FromIndex(int64, begin // dtype.itemsize), pointer.offset), pointer.rest)


def _begin(lowering: Lowering, buffer: Buffer) -> Index:
    number = lowering.signature.argument_of(buffer)
    return 0 if number == ANYWHERE else lowering.signature.address_of(number)


def reinterpreted(lowering: Lowering, pointer: Pointer, dtype: DType) -> Pointer:
    """The same place as a pointer to another type."""
    old, new = pointer.buffer.dtype.itemsize, dtype.itemsize
    buffer = as_type(lowering, pointer.buffer, dtype)
    if old == new:
        return Pointer(buffer, pointer.offset, pointer.rest)
    if pointer.rest is not None:
        return pointer_to(lowering, address(lowering, pointer), dtype)
    if old > new:
        return Pointer(buffer, call("mul", pointer.offset, Const(int64, old // new)))
    ratio = Const(int64, new // old)
    beyond = call("mul", call("mod", pointer.offset, ratio), Const(int64, old))
    return Pointer(buffer, call("floordiv", pointer.offset, ratio), beyond)


def choose(lowering: Lowering, condition: Scalar, yes: Element, no: Element) -> Element:
    """One of two elements, which may be pointers into different tensors."""
    if isinstance(yes, Scalar) and isinstance(no, Scalar):
        return where(condition, yes, no)
    assert isinstance(yes, Pointer) and isinstance(no, Pointer)
    if yes.buffer is not no.buffer:
        yes, no = absolute(lowering, yes), absolute(lowering, no)
    rest = None
    if yes.rest is not None or no.rest is not None:
        rest = where(condition, *(Const(int64, 0) if p.rest is None else p.rest
                                  for p in (yes, no)))
    return Pointer(yes.buffer, where(condition, yes.offset, no.offset), rest)


def memory_type(type_: Type) -> DType:
    """What a tile is kept as in memory: of pointers, the addresses are."""
    return int64 if type_.pointer else dtype_of(type_.elem)


def kept(lowering: Lowering, type_: Type, buffer: Buffer, place: Index | Scalar) -> Element:
    """An element of a tile that lies in memory, as `memory_type` says."""
    if type_.pointer:
        return pointer_to(lowering, buffer[place], dtype_of(type_.elem))
    return buffer[place]


def number(lowering: Lowering, value: Value, i: Indices) -> Scalar:
    """An element as a number: of a pointer, the address."""
    element = value.at(i)
    return address(lowering, element) if isinstance(element, Pointer) else element
