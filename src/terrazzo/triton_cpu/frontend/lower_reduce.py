"""Reductions and scans, with any combining function."""

from __future__ import annotations

from functools import partial

from terrazzo.base.scalar import REDUCTIONS, Call, Const, Scalar, call, cast, walk, where
from terrazzo.dtypes import DType
from terrazzo.index import Index
from terrazzo.loop.ir import Buffer, For
from terrazzo.triton_cpu.frontend.functions import apply
from terrazzo.triton_cpu.frontend.lower import NAMED_REDUCTIONS, Handler, Lowering, is_named
from terrazzo.triton_cpu.frontend.nest import Write
from terrazzo.triton_cpu.frontend.ttir import Op
from terrazzo.triton_cpu.frontend.uses import is_pair
from terrazzo.triton_cpu.frontend.values import Indices, Value, dtype_of, flat

_IGNORES_NAN = frozenset({"arith.maxnumf", "arith.minnumf"})
LANES = 16  # side by side in reductions by a function that no vector loop knows


def _reduce(lowering: Lowering, op: Op) -> None:
    values = [lowering.env[o] for o in op.operands]
    axis, shape = op.attrs["axis"], values[0].type.shape
    if is_pair(op):
        _pair_reduce(lowering, op, values, axis)
    elif is_named(op):
        _named_reduce(lowering, op, values[0], op.regions[0][0].ops[0].name, axis)
    else:
        _any_reduce(lowering, op, values, axis, shape)


def _pair_reduce(lowering: Lowering, op: Op, values: list[Value], axis: int) -> None:
    """Two elements each, combined where the result is used: sorting networks are full of them."""
    def result(n: int, i: Indices) -> Scalar:
        return apply(lowering, op.regions[0], [
            v.scalar((*i[:axis], side, *i[axis:])) for side in (0, 1) for v in values])[n]

    for n, (name, type_) in enumerate(zip(op.results, op.types, strict=True)):
        value = lowering.env[name] = Value(type_, partial(result, n))
        # Counted, not summed up: one of the two elements is often multiplied by zero.
        probe = tuple(lowering.fresh("probe", 0, size - 1) if size > 1 else 0
                      for size in type_.shape)
        value.weight = sum(isinstance(node, Call) for node in walk(value.scalar(probe)))


def _named_reduce(lowering: Lowering, op: Op, value: Value, name: str, axis: int) -> None:
    shape = value.type.shape
    rest = shape[:axis] + shape[axis + 1:]
    dtype = dtype_of(value.type.elem)
    wide: DType = dtype.compute
    kind = NAMED_REDUCTIONS[name]
    total = lowering.local(kind, wide, op.type.count)
    start = Const(wide, REDUCTIONS[kind].identity(wide))
    lowering.emit(lowering.nest(rest, lambda i: [Write(total, flat(rest, i), start)]))
    kept: list[tuple[Value, Buffer]] = []

    def writes(i: Indices) -> list[Write]:
        element = cast(value.scalar(i), wide)
        if name in _IGNORES_NAN:
            element = where(call("isnan", element), start, element)
        made = []
        for _, other in lowering.lazy.deferred:
            if other.type.shape == shape and i in other.memo:
                buffer = lowering.local("kept", dtype_of(other.type.elem), other.type.count)
                made.append(Write(buffer, flat(shape, i), other.scalar(i)))
                kept.append((other, buffer))
        return [*made, Write(total, flat(rest, i[:axis] + i[axis + 1:]), element, kind)]

    lowering.emit(lowering.nest(shape, writes, innermost=len(shape) - 1))
    for other, buffer in kept:
        lowering.keep(other, buffer)
    lowering.env[op.results[0]] = lowering.stored(op.type, total, dtype)


def _any_reduce(lowering: Lowering, op: Op, values: list[Value], axis: int,
                shape: tuple[int, ...]) -> None:
    """Some elements side by side along the axis, then those with each other."""
    length = shape[axis]
    rest = shape[:axis] + shape[axis + 1:]
    lanes = min(LANES, length) if axis == len(shape) - 1 else 1
    wide = (*rest, lanes)
    count = int(lanes)
    for n in rest:
        count *= n
    types = [dtype_of(v.type.elem) for v in values]
    sums = [lowering.local("best", t, count) for t in types]
    fresh = [lowering.local("better", t, count) for t in types]

    def source(i: Indices, turn: Index) -> Indices:
        *outer, lane = i
        return (*outer[:axis], turn * lanes + lane, *outer[axis:])

    lowering.emit(lowering.nest(wide, lambda i: [
        Write(s, flat(wide, i), v.scalar(source(i, 0))) for s, v in zip(sums, values)]))

    def step(shape_: tuple[int, ...], other: list[Value] | None, turn: Index, half: int) -> None:
        def writes(i: Indices) -> list[Write]:
            here = flat(wide, i)
            old: list[Scalar] = [s[here] for s in sums]
            new = ([v.scalar(source(i, turn)) for v in other] if other is not None
                   else [s[flat(wide, (*i[:-1], i[-1] + half))] for s in sums])
            made = apply(lowering, op.regions[0], [*old, *new])
            return [*(Write(f, here, m) for f, m in zip(fresh, made)),
                    *(Write(s, here, f[here]) for s, f in zip(sums, fresh))]

        lowering.emit(lowering.nest(shape_, writes, innermost=len(shape_) - 1))

    if length > lanes:
        turn = lowering.fresh("turn", 1, length // lanes - 1)
        body = lowering.inside(lambda: step(wide, values, turn, 0))
        lowering.emit(For(turn, 1, length // lanes, body))
    half = lanes // 2
    while half:
        step((*rest, half), None, 0, half)
        half //= 2
    for name, type_, s in zip(op.results, op.types, sums, strict=True):
        lowering.env[name] = Value(type_, partial(_first_lane, s, wide))


def _first_lane(buffer: Buffer, shape: tuple[int, ...], i: Indices) -> Scalar:
    return buffer[flat(shape, (*i, 0))]


def _scan(lowering: Lowering, op: Op) -> None:
    values = [lowering.env[o] for o in op.operands]
    axis, shape = op.attrs["axis"], values[0].type.shape
    length = shape[axis]
    rest = shape[:axis] + shape[axis + 1:]
    made = [lowering.local("scan", dtype_of(v.type.elem), v.type.count) for v in values]

    def place(i: Indices, at: Index) -> Indices:
        along = length - 1 - at if op.attrs.get("reverse") else at
        return (*i[:axis], along, *i[axis:])

    lowering.emit(lowering.nest(rest, lambda i: [
        Write(m, flat(shape, place(i, 0)), v.scalar(place(i, 0)))
        for m, v in zip(made, values)]))
    if length > 1:
        turn = lowering.fresh("turn", 1, length - 1)

        def writes(i: Indices) -> list[Write]:
            old: list[Scalar] = [m[flat(shape, place(i, turn - 1))] for m in made]
            new = apply(lowering, op.regions[0],
                        [*old, *(v.scalar(place(i, turn)) for v in values)])
            return [Write(m, flat(shape, place(i, turn)), n) for m, n in zip(made, new)]

        body = lowering.inside(lambda: lowering.emit(lowering.nest(rest, writes)))
        lowering.emit(For(turn, 1, length, body))
    for name, type_, m in zip(op.results, op.types, made, strict=True):
        lowering.env[name] = lowering.stored(type_, m)


HANDLERS: dict[str, Handler] = {"tt.reduce": _reduce, "tt.scan": _scan}
SINKS = frozenset(HANDLERS)
