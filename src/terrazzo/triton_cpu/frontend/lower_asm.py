"""Inline assembly: expressions where it only computes, else a loop over its elements."""

from __future__ import annotations

from functools import partial

from terrazzo.base.scalar import Const, FromIndex, Scalar
from terrazzo.dtypes import DType, bool_, int32
from terrazzo.index import Index
from terrazzo.loop.ir import Buffer, For, If, Let, Stmt, Store, block
from terrazzo.triton_cpu.frontend.addresses import Names, Reader
from terrazzo.triton_cpu.frontend.inline_asm import (
    EFFECTS,
    ELEMENTWISE,
    PACKED,
    PROGRAM_REGISTERS,
    Assembly,
    assembly,
    located,
)
from terrazzo.triton_cpu.frontend.lower import HANDLERS as GENERAL
from terrazzo.triton_cpu.frontend.lower import Handler, Lowering
from terrazzo.triton_cpu.frontend.nest import Write
from terrazzo.triton_cpu.frontend.patience import Patience
from terrazzo.triton_cpu.frontend.pointers import number, pointer_to
from terrazzo.triton_cpu.frontend.ptx.effects import Memory, statements
from terrazzo.triton_cpu.frontend.ptx.run import Specials
from terrazzo.triton_cpu.frontend.ttir import Op
from terrazzo.triton_cpu.frontend.values import Indices, Value, flat, unflat


def _specials(lowering: Lowering) -> Specials:
    """Which program of which grid is running."""
    variables = (*lowering.signature.program, *lowering.signature.grid)
    return {name: FromIndex(int32, v) for name, v in zip(PROGRAM_REGISTERS, variables, strict=True)}


def _elements(lowering: Lowering, op: Op, places: list[Indices]) -> list[list[Scalar]]:
    """The elements of every operand at some places."""
    return [[number(lowering, lowering.env[o], p[:len(lowering.env[o].type.shape)])
             for p in places] for o in op.operands]


def _elementwise(lowering: Lowering, op: Op) -> None:
    """An expression for each result, as for other operations on elements."""
    if len(op.results) == 1 and op.operands and not any(t.pointer for t in op.operand_types) and (
            not _names_program(assembly(op))):
        GENERAL["tt.extern_elementwise"](lowering, op)
        return
    specials, known = _specials(lowering), {}

    def results(i: Indices) -> list[list[Scalar]]:
        if i not in known:
            known[i] = assembly(op).apply(_elements(lowering, op, [i]), specials)
        return known[i]

    for n, (name, type_) in enumerate(zip(op.results, op.types, strict=True)):
        value = lowering.env[name] = Value(type_, partial(_result, results, n))
        value.weight = 1 + max((lowering.env[o].weight for o in op.operands), default=0)
        lowering.materialise(value, "asm")


def _result(results: object, n: int, i: Indices) -> Scalar:
    found = results(i)[n][0]  # type: ignore[operator]
    assert isinstance(found, Scalar)
    return found


def _names_program(code: Assembly) -> bool:
    return any(name in code.text for name in PROGRAM_REGISTERS)


def _packed(lowering: Lowering, op: Op) -> None:
    """Several neighbours at once."""
    code, shape = assembly(op), op.type.shape
    made = [lowering.local("asm", t, op.type.count) for t in code.results]
    specials, pack = _specials(lowering), code.pack

    def writes(i: Indices) -> list[Write]:
        places: list[Indices] = [(*i[:-1], i[-1] * pack + k) for k in range(pack)]
        results = code.apply(_elements(lowering, op, places), specials)
        return [Write(buffer, flat(shape, p), results[n][k])
                for n, buffer in enumerate(made) for k, p in enumerate(places)]

    if not shape or shape[-1] % pack:
        raise lowering.unsupported(op, f"rows of {shape[-1] if shape else 1} elements cannot be "
                                       f"handed over {pack} at a time")
    lowering.emit(lowering.nest((*shape[:-1], shape[-1] // pack), writes))
    for name, type_, buffer in zip(op.results, op.types, made, strict=True):
        lowering.env[name] = lowering.stored(type_, buffer)


def _effects(lowering: Lowering, op: Op) -> None:
    """Element after element, in order: it reads or writes memory, or waits."""
    code, type_ = assembly(op), op.type
    made = [lowering.local("asm", t, type_.count) for t in code.results]
    if type_.count % code.pack:
        raise lowering.unsupported(op, f"{type_.count} elements cannot be handed over "
                                       f"{code.pack} at a time")
    count = type_.count // code.pack
    group = lowering.fresh("group", 0, count - 1)
    places: list[Index] = [group * code.pack + k for k in range(code.pack)]
    names = Names((), lowering.fresh)
    reader = Reader(names)
    given = code.registers([
        [reader.settle(e) for e in items]
        for items in _elements(lowering, op, [unflat(type_.shape, p) for p in places])])

    def place(at: Scalar, dtype: DType) -> tuple[Buffer, Scalar]:
        pointer = pointer_to(lowering, at, dtype)
        return pointer.buffer, pointer.offset

    with located(lowering.module, op):
        body, registers = statements(code.program, given, code.widths, _specials(lowering),
                                     Memory(lowering.local, place, *_waiting(lowering, op)))
    results = code.elements({name: buffer[0] for name, buffer in registers.items()})
    stores: list[Stmt] = [Store(buffer, p, results[n][k])
                          for n, buffer in enumerate(made) for k, p in enumerate(places)]
    body = block(body, *stores)
    for var, named in reversed(names.bound):
        body = Let(var, named, body)
    if lowering.watch.alive is not None:
        body = If(lowering.watch.alive[0], body)
    lowering.emit(For(group, 0, count, body))
    for name, result, buffer in zip(op.results, op.types, made, strict=True):
        lowering.env[name] = lowering.stored(result, buffer)


def _waiting(lowering: Lowering, op: Op) -> tuple[Stmt, Stmt, Scalar]:
    """What a loop does before it, in each turn, and when it ends all the same."""
    if not assembly(op).waits:
        return block(), block(), Const(bool_, False)
    patience = Patience(lowering, op)
    return patience.begin(), patience.turn(), patience.over[0]


HANDLERS: dict[str, Handler] = {ELEMENTWISE: _elementwise, PACKED: _packed, EFFECTS: _effects}
SINKS = frozenset({PACKED, EFFECTS})
