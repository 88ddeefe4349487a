"""Ranges and views of tiles: the same elements at other indices."""

from __future__ import annotations

from functools import partial

from terrazzo.base.scalar import Const, FromIndex, Scalar, call
from terrazzo.dtypes import int32, int64
from terrazzo.index import Index
from terrazzo.loop.ir import Buffer
from terrazzo.triton_cpu.frontend.lower import Handler, Lowering
from terrazzo.triton_cpu.frontend.nest import Write
from terrazzo.triton_cpu.frontend.pointers import choose, memory_type, number
from terrazzo.triton_cpu.frontend.ttir import Op
from terrazzo.triton_cpu.frontend.values import Indices, Pointer, Value, flat, unflat


def _make_range(lowering: Lowering, op: Op) -> None:
    start = op.attrs["start"]
    lowering.define(op, lambda i: FromIndex(int32, i[0] + start))


def _splat(lowering: Lowering, op: Op) -> None:
    source = lowering.operand(op, 0)
    zeros = tuple(0 for _ in source.type.shape)
    lowering.define(op, lambda i: source.at(zeros))


def _broadcast(lowering: Lowering, op: Op) -> None:
    source = lowering.operand(op, 0)
    sizes = source.type.shape
    lowering.define(op, lambda i: source.at(tuple(
        0 if n == 1 else k for n, k in zip(sizes, i, strict=True))))


def _expand_dims(lowering: Lowering, op: Op) -> None:
    source, axis = lowering.operand(op, 0), op.attrs["axis"]
    lowering.define(op, lambda i: source.at(i[:axis] + i[axis + 1:]))


def _reshape(lowering: Lowering, op: Op) -> None:
    source, shape = lowering.operand(op, 0), op.type.shape
    lowering.define(op, lambda i: source.at(unflat(source.type.shape, flat(shape, i))))


def _trans(lowering: Lowering, op: Op) -> None:
    source, order = lowering.operand(op, 0), op.attrs["order"]

    def view(i: Indices) -> Scalar | Pointer:
        there: list[Index] = [0] * len(order)
        for new, old in enumerate(order):
            there[old] = i[new]
        return source.at(tuple(there))

    lowering.define(op, view)


def _join(lowering: Lowering, op: Op) -> None:
    a, b = (lowering.operand(op, n) for n in (0, 1))
    lowering.define(op, lambda i: choose(
        lowering, call("eq", FromIndex(int64, i[-1]), Const(int64, 0)), a.at(i[:-1]), b.at(i[:-1])))


def _split(lowering: Lowering, op: Op) -> None:
    source = lowering.operand(op, 0)
    for part, (name, type_) in enumerate(zip(op.results, op.types, strict=True)):
        lowering.env[name] = Value(type_, partial(_part, source, part))


def _part(source: Value, number: int, i: Indices) -> Scalar | Pointer:
    return source.at((*i, number))


def _cat(lowering: Lowering, op: Op) -> None:
    a, b = (lowering.operand(op, n) for n in (0, 1))
    size = a.type.shape[0]
    buffer = lowering.local("cat", memory_type(op.type), op.type.count)
    rest = a.type.count // size
    for start, part in ((0, a), (size * rest, b)):
        lowering.emit(lowering.nest(part.type.shape, partial(_copy, lowering, part, buffer, start)))
    lowering.env[op.results[0]] = lowering.stored(op.type, buffer)


def _copy(lowering: Lowering, source: Value, target: Buffer, start: int, i: Indices
          ) -> list[Write]:
    return [Write(target, flat(source.type.shape, i) + start, number(lowering, source, i))]


HANDLERS: dict[str, Handler] = {
    "tt.make_range": _make_range, "tt.splat": _splat, "tt.unsplat": _splat,
    "tt.broadcast": _broadcast, "tt.expand_dims": _expand_dims, "tt.reshape": _reshape,
    "tt.trans": _trans, "tt.join": _join, "tt.split": _split, "tt.cat": _cat,
}
SINKS = frozenset({"tt.cat"})
