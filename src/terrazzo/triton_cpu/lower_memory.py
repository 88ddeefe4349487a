"""Addresses, loads and stores."""

from __future__ import annotations

from terrazzo.dtypes import int64
from terrazzo.scalar import Call, Const, Scalar, call, cast
from terrazzo.triton_cpu.elementwise import constant
from terrazzo.triton_cpu.lower import Handler, Lowering
from terrazzo.triton_cpu.nest import Write
from terrazzo.triton_cpu.ttir import Op
from terrazzo.triton_cpu.values import Indices, Pointer, Value, dtype_of


def _addptr(lowering: Lowering, op: Op) -> None:
    pointers, offsets = (lowering.operand(op, n) for n in (0, 1))

    def moved(i: Indices) -> Pointer:
        pointer = pointers.pointer(i)
        step = cast(offsets.scalar(i), int64)
        if isinstance(pointer.offset, Const) and pointer.offset.value == 0:
            return Pointer(pointer.buffer, step)
        return Pointer(pointer.buffer, call("add", pointer.offset, step))

    lowering.define(op, moved)


def _load(lowering: Lowering, op: Op) -> None:
    segments = op.attrs.get("operandSegmentSizes", [1, len(op.operands) > 1, len(op.operands) > 2])
    pointers = lowering.operand(op, 0)
    mask = lowering.operand(op, 1) if segments[1] else None
    other = lowering.operand(op, 1 + segments[1]) if segments[2] else None
    dtype = dtype_of(op.type.elem)

    def element(i: Indices) -> Scalar:
        pointer = pointers.pointer(i)
        value: Scalar = pointer.buffer[pointer.offset]
        if mask is None:
            return value
        fallback = constant(dtype, 0) if other is None else other.scalar(i)
        return Call(dtype, "where", (mask.scalar(i), value, fallback))

    if op.type.count == 1:
        value = Value(op.type, element)
        lowering.materialise(value, "scalar")
        lowering.env[op.results[0]] = value
        return
    value = lowering.define(op, element)
    lowering.load_pointers[op.results[0]] = op.operands[0]
    if op.attrs.get("isVolatile"):
        lowering.materialise(value, "loaded")
    else:
        lowering.pending.append((op.results[0], value))


def _store(lowering: Lowering, op: Op) -> None:
    pointers, values = (lowering.operand(op, n) for n in (0, 1))
    mask = lowering.operand(op, 2) if len(op.operands) > 2 else None

    def writes(i: Indices) -> list[Write]:
        pointer = pointers.pointer(i)
        return [Write(pointer.buffer, pointer.offset, values.scalar(i), None,
                      None if mask is None else mask.scalar(i))]

    lowering.emit(lowering.nest(pointers.type.shape, writes))


HANDLERS: dict[str, Handler] = {"tt.addptr": _addptr, "tt.load": _load, "tt.store": _store}
SINKS = frozenset({"tt.store"})
