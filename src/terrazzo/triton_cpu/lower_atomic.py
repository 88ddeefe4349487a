"""Atomic operations on memory, element by element in order; histograms, which count."""

from __future__ import annotations

from terrazzo.dtypes import int64
from terrazzo.index import Index
from terrazzo.loop.ir import Atomic, Buffer, For, If, Let, Stmt
from terrazzo.scalar import Const, FromIndex, Scalar, call, cast
from terrazzo.triton_cpu.addresses import Names, Reader
from terrazzo.triton_cpu.lower import Handler, Lowering, as_type
from terrazzo.triton_cpu.nest import Write
from terrazzo.triton_cpu.ttir import Op
from terrazzo.triton_cpu.values import UNSIGNED, Indices, Value, dtype_of, flat

# Triton's numbers of the operations; those without a sign work on unsigned types.
_KINDS = {1: "and", 2: "or", 3: "xor", 4: "add", 5: "add", 6: "max", 7: "min", 8: "max",
          9: "min", 10: "exchange"}
_UNSIGNED = frozenset({8, 9})


def _read_modify_write(lowering: Lowering, op: Op) -> None:
    number = int(op.attrs["atomic_rmw_op"])
    if number not in _KINDS:
        raise lowering.unsupported(op, f"kind {number}")
    mask = lowering.operand(op, 2) if len(op.operands) > 2 else None
    _emit(lowering, op, _KINDS[number], lowering.operand(op, 1), None, mask,
          number in _UNSIGNED)


def _compare_and_swap(lowering: Lowering, op: Op) -> None:
    _emit(lowering, op, "compare", lowering.operand(op, 2), lowering.operand(op, 1), None, False)


def _emit(lowering: Lowering, op: Op, kind: str, value: Value, expected: Value | None,
          mask: Value | None, unsigned: bool) -> None:
    pointers = lowering.operand(op, 0)
    type_ = pointers.type
    shape, dtype = type_.shape, dtype_of(type_.elem)
    axes = [lowering.fresh(f"i{d}", 0, n - 1) if n > 1 else None for d, n in enumerate(shape)]
    i: Indices = tuple(0 if v is None else v for v in axes)
    old: tuple[Buffer, Index] | None = None
    if lowering.uses.count.get(op.results[0]):
        before = lowering.local("old", dtype, type_.count)
        old = before, flat(shape, i)
        if mask is not None:  # what was not touched reads as zero
            lowering.emit(lowering.nest(shape, lambda j: [
                Write(before, flat(shape, j), Const(dtype, 0))]))
        result = lowering.stored(op.type, before)
    else:
        result = Value(op.type, lambda j: Const(dtype, 0))
    pointer = pointers.pointer(i)
    names = Names((), lowering.fresh)
    reader = Reader(names)
    target = pointer.buffer
    given = reader.settle(value.scalar(i))
    if unsigned:
        target = as_type(lowering, target, UNSIGNED[dtype])
        given = cast(given, target.dtype)
    index = reader.index(pointer.offset)
    body: Stmt = Atomic(kind, target, pointer.offset if index is None else index, given,
                        None if expected is None else reader.settle(expected.scalar(i)), old)
    for var, named in reversed(names.bound):
        body = Let(var, named, body)
    if mask is not None:
        body = If(Reader(None).settle(mask.scalar(i)), body)
    for axis, n in reversed(list(zip(axes, shape, strict=True))):
        if axis is not None:
            body = For(axis, 0, n, body)
    lowering.emit(body)
    lowering.env[op.results[0]] = result


def _histogram(lowering: Lowering, op: Op) -> None:
    source = lowering.operand(op, 0)
    mask = lowering.operand(op, 1) if len(op.operands) > 1 else None
    bins, shape = op.type.shape[0], source.type.shape
    counts = lowering.local("counts", dtype_of(op.type.elem), bins)
    lowering.emit(lowering.nest((bins,), lambda i: [Write(counts, i[0], Const(counts.dtype, 0))]))

    def writes(i: Indices) -> list[Write]:
        place = cast(source.scalar(i), int64)
        inside: Scalar = call("and", call("ge", place, Const(int64, 0)),
                              call("lt", place, Const(int64, bins)))
        if mask is not None:
            inside = call("and", inside, mask.scalar(i))
        return [Write(counts, place, Const(counts.dtype, 1), "add", inside)]

    lowering.emit(lowering.nest(shape, writes))
    lowering.env[op.results[0]] = lowering.stored(op.type, counts)


def _gather(lowering: Lowering, op: Op) -> None:
    source, indices = lowering.operand(op, 0), lowering.operand(op, 1)
    axis, shape = op.attrs["axis"], source.type.shape
    buffer = lowering.materialise(source)
    stride = 1
    for n in shape[axis + 1:]:
        stride *= n

    def element(i: Indices) -> Scalar:
        rest = flat(shape, (*i[:axis], 0, *i[axis + 1:]))
        along = call("mul", cast(indices.scalar(i), int64), Const(int64, stride))
        return buffer[call("add", FromIndex(int64, rest), along)]

    value = lowering.define(op, element)
    lowering.materialise(value, "gathered")


HANDLERS: dict[str, Handler] = {
    "tt.atomic_rmw": _read_modify_write, "tt.atomic_cas": _compare_and_swap,
    "tt.histogram": _histogram, "tt.gather": _gather,
}
SINKS = frozenset(HANDLERS)
