"""Functions of single elements, mapped over tiles."""

from __future__ import annotations

from functools import partial

from terrazzo.base.scalar import Scalar
from terrazzo.index import Index
from terrazzo.loop.ir import Buffer, For
from terrazzo.triton_cpu.frontend.functions import apply, is_plain
from terrazzo.triton_cpu.frontend.lower import Handler, Lowering
from terrazzo.triton_cpu.frontend.lower_control import blocks
from terrazzo.triton_cpu.frontend.nest import Write
from terrazzo.triton_cpu.frontend.ttir import Op
from terrazzo.triton_cpu.frontend.values import (
    Element,
    Indices,
    constant_value,
    dtype_of,
    flat,
    unflat,
)


def _map(lowering: Lowering, op: Op) -> None:
    """A function gets `pack` neighbours of each operand, one after the other."""
    shape, pack = op.operand_types[0].shape, int(op.attrs.get("pack", 1))
    made = [lowering.local("mapped", dtype_of(t.elem), t.count) for t in op.types]
    if is_plain(lowering.module, op.regions[0]) and shape and shape[-1] % pack == 0:
        _as_expressions(lowering, op, made, shape, pack)
    else:
        _as_loop(lowering, op, made, shape, pack)
    for name, type_, buffer in zip(op.results, op.types, made, strict=True):
        lowering.env[name] = lowering.stored(type_, buffer)


def _as_expressions(lowering: Lowering, op: Op, made: list[Buffer], shape: tuple[int, ...],
                    pack: int) -> None:
    def writes(i: Indices) -> list[Write]:
        places = [(*i[:-1], i[-1] * pack + k) for k in range(pack)]
        results = apply(lowering, op.regions[0], [
            lowering.env[o].scalar(p) for o in op.operands for p in places])
        return [Write(buffer, flat(shape, p), results[n * pack + k])
                for n, buffer in enumerate(made) for k, p in enumerate(places)]

    lowering.emit(lowering.nest((*shape[:-1], shape[-1] // pack), writes))


def _as_loop(lowering: Lowering, op: Op, made: list[Buffer], shape: tuple[int, ...],
             pack: int) -> None:
    """Element after element: the function has loops of its own, or reads memory."""
    count = op.operand_types[0].count // pack
    group = lowering.fresh("group", 0, count - 1)
    places: list[Index] = [group * pack + k for k in range(pack)]
    body = op.regions[0]
    args: list[Element] = [
        lowering.env[o].at(unflat(shape, p)) for o in op.operands for p in places]
    for (name, type_), element in zip(body[0].args, args, strict=True):
        lowering.env[name] = constant_value(type_, element)

    def returned(end: Op) -> None:
        results = [lowering.env[o].scalar() for o in end.operands]
        for n, buffer in enumerate(made):
            for k, place in enumerate(places):
                lowering.emit(lowering.nest((), partial(
                    _write, buffer, place, results[n * pack + k])))

    outer = lowering.lazy.copy()
    inner = lowering.inside(lambda: blocks(lowering, body, returned))
    lowering.lazy = outer
    lowering.emit(For(group, 0, count, inner))


def _write(buffer: Buffer, place: Index, value: Scalar, i: Indices) -> list[Write]:
    return [Write(buffer, place, value)]


HANDLERS: dict[str, Handler] = {"tt.map_elementwise": _map}
SINKS = frozenset(HANDLERS)
