"""Addresses, loads and stores."""

from __future__ import annotations

from terrazzo.base.scalar import Call, Scalar, call, cast
from terrazzo.dtypes import int64
from terrazzo.triton_cpu.frontend.addresses import below
from terrazzo.triton_cpu.frontend.elementwise import constant
from terrazzo.triton_cpu.frontend.lower import Handler, Lowering
from terrazzo.triton_cpu.frontend.nest import Write
from terrazzo.triton_cpu.frontend.ttir import Op, Type
from terrazzo.triton_cpu.frontend.values import Indices, Value, dtype_of


def _addptr(lowering: Lowering, op: Op) -> None:
    pointers, offsets = (lowering.operand(op, n) for n in (0, 1))
    lowering.define(op, lambda i: pointers.pointer(i).moved(cast(offsets.scalar(i), int64)))


def only_alive(lowering: Lowering, mask: Value | None, type_: Type) -> Value | None:
    """Where memory may be touched: nowhere after an assertion failed."""
    alive = lowering.watch.alive
    if alive is None:
        return mask
    return Value(Type(type_.shape, "i1", is_tile=type_.is_tile), lambda i: (
        alive[0] if mask is None else call("and", alive[0], mask.scalar(i))))


def _load(lowering: Lowering, op: Op) -> None:
    segments = op.attrs.get("operandSegmentSizes", [1, len(op.operands) > 1, len(op.operands) > 2])
    pointers = lowering.operand(op, 0)
    mask = only_alive(lowering, lowering.operand(op, 1) if segments[1] else None, op.type)
    other = lowering.operand(op, 1 + segments[1]) if segments[2] else None
    dtype = dtype_of(op.type.elem)

    def element(i: Indices) -> Scalar:
        pointer = pointers.pointer(i)
        value: Scalar = pointer.buffer[pointer.offset]
        if mask is None:
            return value
        fallback = constant(dtype, 0) if other is None else other.scalar(i)
        return Call(dtype, "where", (mask.scalar(i), value, fallback))

    lowering.memory.read.add(lowering.base(pointers))
    value = lowering.define(op, element)
    if op.type.count == 1:
        lowering.materialise(value, "scalar")
        return
    lowering.memory.load_pointers[op.results[0]] = op.operands[0]
    if op.attrs.get("isVolatile"):
        lowering.materialise(value, "loaded")
        return
    lowering.lazy.pending.append((op.results[0], value))
    if lowering.target.scratchpad and lowering.uses.needed_again(op.results[0]):
        lowering.lazy.deferred.append((op.results[0], value))


def _store(lowering: Lowering, op: Op) -> None:
    pointers, values = (lowering.operand(op, n) for n in (0, 1))
    mask = only_alive(lowering, lowering.operand(op, 2) if len(op.operands) > 2 else None,
                      pointers.type)

    def writes(i: Indices) -> list[Write]:
        pointer = pointers.pointer(i)
        return [Write(pointer.buffer, pointer.offset, values.scalar(i), None,
                      None if mask is None else mask.scalar(i), streaming)]

    streaming = _streaming(lowering, pointers)
    lowering.emit(lowering.nest(pointers.type.shape, writes))


def _streaming(lowering: Lowering, pointers: Value) -> bool | Scalar:
    """When a store goes past the caches: all programs together write much, and read none of it."""
    buffer, limits = lowering.base(pointers), lowering.target.streams
    if limits is None or buffer in lowering.memory.read:
        return False
    x, y, z = lowering.signature.grid
    size = x * y * z * lowering.turns * (pointers.type.count * buffer.dtype.itemsize)
    smallest, limit = limits
    return call("and", below(smallest - 1, size), below(size, limit))


HANDLERS: dict[str, Handler] = {"tt.addptr": _addptr, "tt.load": _load, "tt.store": _store}
SINKS = frozenset({"tt.store"})
