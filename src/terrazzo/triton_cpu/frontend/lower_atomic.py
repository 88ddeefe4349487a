"""Atomic operations on memory, element by element in order; histograms, which count."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from terrazzo.base.scalar import Const, FromIndex, Scalar, call, cast
from terrazzo.dtypes import bool_, int64
from terrazzo.index import Index
from terrazzo.loop.ir import Atomic, Buffer, For, If, Let, Stmt, Store, While, block
from terrazzo.triton_cpu.frontend.addresses import Names, Reader
from terrazzo.triton_cpu.frontend.lower import Handler, Lowering
from terrazzo.triton_cpu.frontend.lower_memory import only_alive
from terrazzo.triton_cpu.frontend.nest import Write
from terrazzo.triton_cpu.frontend.patience import Patience
from terrazzo.triton_cpu.frontend.pointers import as_type, kept
from terrazzo.triton_cpu.frontend.ttir import Op
from terrazzo.triton_cpu.frontend.values import (
    UNSIGNED,
    Element,
    Indices,
    Pointer,
    Value,
    constant_value,
    dtype_of,
    flat,
)

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


def _load(lowering: Lowering, op: Op) -> None:
    mask = lowering.operand(op, 1) if len(op.operands) > 1 else None
    nothing = constant_value(op.type, Const(dtype_of(op.type.elem), 0))
    _emit(lowering, op, "load", nothing, None, mask, False)


def _store(lowering: Lowering, op: Op) -> None:
    mask = lowering.operand(op, 2) if len(op.operands) > 2 else None
    _emit(lowering, op, "exchange", lowering.operand(op, 1), None, mask, False)


def _emit(lowering: Lowering, op: Op, kind: str, value: Value, expected: Value | None,
          mask: Value | None, unsigned: bool) -> None:
    type_ = lowering.operand(op, 0).type
    shape, dtype = type_.shape, dtype_of(type_.elem)
    before: Buffer | None = None
    if op.results and lowering.uses.count.get(op.results[0]):
        before = lowering.local("old", dtype, type_.count)
        if not (mask is lowering.watch.alive is lowering.watch.sanitizer is None):
            # What is not touched reads as zero.
            lowering.emit(lowering.nest(shape, partial(_zero, before, shape)))

    def element(i: Indices, pointer: Pointer, reader: Reader) -> Stmt:
        given, target = reader.settle(value.scalar(i)), pointer.buffer
        if unsigned:
            target = as_type(lowering, target, UNSIGNED[dtype])
            given = cast(given, target.dtype)
        return Atomic(kind, target, _place(pointer, reader), given,
                      None if expected is None else reader.settle(expected.scalar(i)),
                      None if before is None else (before, flat(shape, i)))

    _each(lowering, op, mask, kind != "exchange", element)
    if op.results:
        lowering.env[op.results[0]] = constant_value(op.type, Const(dtype, 0)) if (
            before is None) else lowering.stored(op.type, before)


def _poll(lowering: Lowering, op: Op) -> None:
    """Wait until memory holds what is expected, element by element, or until time is up."""
    expected = lowering.operand(op, 1)
    limit = lowering.operand(op, 2) if len(op.operands) > 2 else None
    shape, dtype = op.type.shape, dtype_of(expected.type.elem)
    found = lowering.local("found", bool_, op.type.count)
    lowering.emit(lowering.nest(shape, partial(_zero, found, shape)))
    seen = lowering.local("seen", dtype, 1)
    patience = Patience(lowering, op)
    start, now = patience.start, patience.now
    lowering.emit(patience.begin())
    lowering.emit(Store(now, 0, start[0]))

    def element(i: Indices, pointer: Pointer, reader: Reader) -> Stmt:
        wanted = reader.settle(expected.scalar(i))
        look = Atomic("load", pointer.buffer, _place(pointer, reader), Const(dtype, 0), None,
                      (seen, 0))
        going = call("and", call("ne", seen[0], wanted), call("not", patience.over[0]))
        if limit is not None:
            going = call("and", going, call("lt", call("sub", now[0], start[0]),
                                            cast(limit.scalar(), int64)))
        return block(look, While(going, block(patience.turn(), look)),
                     Store(found, flat(shape, i), call("eq", seen[0], wanted)))

    _each(lowering, op, None, True, element)
    lowering.env[op.results[0]] = lowering.stored(op.type, found)


def _zero(buffer: Buffer, shape: tuple[int, ...], i: Indices) -> list[Write]:
    return [Write(buffer, flat(shape, i), Const(buffer.dtype, 0))]


def _place(pointer: Pointer, reader: Reader) -> Index | Scalar:
    index = reader.index(pointer.offset)
    return pointer.offset if index is None else index


def _each(lowering: Lowering, op: Op, mask: Value | None, reads: bool,
          element: Callable[[Indices, Pointer, Reader], Stmt]) -> None:
    """Do something with every element that an operation points to, one after the other."""
    pointers = lowering.operand(op, 0)
    type_ = pointers.type
    mask = only_alive(lowering, mask, type_)
    sanitizer = lowering.watch.sanitizer
    if sanitizer is not None:
        mask = sanitizer.allowed(op, pointers, mask, reads)
        sanitizer.tick(acquired=False)
    axes = [lowering.fresh(f"i{d}", 0, n - 1) if n > 1 else None
            for d, n in enumerate(type_.shape)]
    i: Indices = tuple(0 if v is None else v for v in axes)
    names = Names((), lowering.fresh)
    body = element(i, pointers.pointer(i), Reader(names))
    for var, named in reversed(names.bound):
        body = Let(var, named, body)
    if mask is not None:
        body = If(Reader(None).settle(mask.scalar(i)), body)
    for axis, n in reversed(list(zip(axes, type_.shape, strict=True))):
        if axis is not None:
            body = For(axis, 0, n, body)
    lowering.emit(body)
    if sanitizer is not None:
        sanitizer.tick(acquired=True)


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

    def element(i: Indices) -> Element:
        rest = flat(shape, (*i[:axis], 0, *i[axis + 1:]))
        along = call("mul", cast(indices.scalar(i), int64), Const(int64, stride))
        return kept(lowering, source.type, buffer, call("add", FromIndex(int64, rest), along))

    value = lowering.define(op, element)
    lowering.materialise(value, "gathered")


HANDLERS: dict[str, Handler] = {
    "tt.atomic_rmw": _read_modify_write, "tt.atomic_cas": _compare_and_swap,
    "tt.atomic_load": _load, "tt.atomic_store": _store, "tt.atomic_poll": _poll,
    "tt.histogram": _histogram, "tt.gather": _gather,
}
SINKS = frozenset(HANDLERS)
