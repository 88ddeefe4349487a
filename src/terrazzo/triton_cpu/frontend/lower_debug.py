"""`tl.device_print` and `tl.device_assert`: their code, and the text that users see.

After an assertion failed, the program goes on but touches memory no more: an assertion is often
there to guard the access that follows.
"""

from __future__ import annotations

import math
import struct
from functools import partial

import numpy as np

from terrazzo.base.scalar import Call, Const, Scalar, call, cast
from terrazzo.dtypes import bool_, float64, int64
from terrazzo.loop.ir import Buffer, If, Stmt, Store, block
from terrazzo.triton_cpu.frontend import reports
from terrazzo.triton_cpu.frontend.lower import Handler, Lowering
from terrazzo.triton_cpu.frontend.pointers import number
from terrazzo.triton_cpu.frontend.reports import Launch, Record, lane_text, shorter
from terrazzo.triton_cpu.frontend.ttir import Module, Op, walk
from terrazzo.triton_cpu.frontend.values import Indices, Value, dtype_of, flat

FAILED = 0  # the only thing that an assertion reports
NOTHING = -1  # in place of an operand's number: there is only text


# ---------------------------------------------------------------- in the kernel
def alive_buffer(lowering: Lowering, module: Module) -> Buffer | None:
    """Whether the program may still touch memory, for kernels that assert."""
    if not any(op.name == "tt.assert" for f in module.functions.values()
               for region in f.regions for op in walk(region)):
        return None
    buffer = lowering.local("alive", bool_, 1)
    lowering.watch.prologue.append(Store(buffer, 0, Const(bool_, True)))
    return buffer


def while_alive(lowering: Lowering, stmt: Stmt) -> Stmt:
    """A statement that is left out after an assertion failed."""
    return stmt if lowering.watch.alive is None else If(lowering.watch.alive[0], stmt)


def _print(lowering: Lowering, op: Op) -> None:
    signs = op.attrs.get("isSigned") or [0] * len(op.operands)
    operands = [[list(t.shape), "" if t.pointer else t.elem, bool(signed)]
                for t, signed in zip(op.operand_types, signs, strict=True)]
    report = reports.of(lowering)
    site = report.site("print", lowering.module.where(op), prefix=op.attrs["prefix"],
                       hex=bool(op.attrs.get("hex")), operands=operands)
    if not op.operands:
        lowering.emit(while_alive(lowering, report.every(site, NOTHING, 0, reports.word(0))))
    for n, (name, type_) in enumerate(zip(op.operands, op.operand_types, strict=True)):
        lowering.emit(while_alive(lowering, reports.each(
            lowering, type_.shape, partial(_line, lowering, site, n, lowering.env[name]))))


def _line(lowering: Lowering, site: int, operand: int, value: Value, i: Indices) -> Stmt:
    """What is printed of one element."""
    return reports.of(lowering).every(site, operand, flat(value.type.shape, i),
                                      _bits(lowering, value, i))


def _bits(lowering: Lowering, value: Value, i: Indices) -> Scalar:
    element = number(lowering, value, i)
    if element.dtype.is_float:
        return Call(int64, "bitcast", (cast(element, float64),))
    return cast(element, int64)


def _assert(lowering: Lowering, op: Op) -> None:
    condition = lowering.operand(op, 0)
    shape = condition.type.shape
    report = reports.of(lowering)
    site = report.site("assert", lowering.module.where(op), message=str(op.attrs["message"]),
                       shape=list(shape))
    alive = lowering.watch.alive
    assert alive is not None
    failed = lowering.local("failed", bool_, 1)

    def check(i: Indices) -> Stmt:
        return If(call("not", condition.scalar(i)), block(
            Store(failed, 0, Const(bool_, True)), report.first(site, FAILED, flat(shape, i))))

    lowering.emit(Store(failed, 0, Const(bool_, False)))
    lowering.emit(while_alive(lowering, reports.each(lowering, shape, check)))
    lowering.emit(If(failed[0], Store(alive, 0, Const(bool_, False))))


HANDLERS: dict[str, Handler] = {"tt.print": _print, "tt.assert": _assert}
SINKS = frozenset(HANDLERS)


# ---------------------------------------------------------------- after the launch
def printed_text(launch: Launch, record: Record) -> str:
    """One line, as Triton prints it on a GPU."""
    site = record.site
    program = f"pid {launch.program(record.program)}"
    if record.detail == NOTHING:
        return f"{program}{site['prefix']}"
    shape, elem, signed = site["operands"][record.detail]
    widths = [math.ceil(math.log10(n)) for n in shape]
    indices = np.unravel_index(record.lane, tuple(shape)) if shape else ()
    index = ", ".join(f"{int(i):{w or 1}}" for i, w in zip(indices, widths, strict=True))
    which = f"(operand {record.detail}) " if len(site["operands"]) > 1 else ""
    value = _value_text(record.value, elem, signed, site["hex"])
    return f"{program} idx ({index}){site['prefix']}{which}{value}"


def _value_text(bits: int, elem: str, signed: bool, as_hex: bool) -> str:
    if not elem:
        return f"0x{bits & (1 << 64) - 1:x}"
    dtype = dtype_of(elem)
    if dtype.is_float:
        value = struct.unpack("<d", struct.pack("<q", bits))[0]
        if not as_hex:
            return f"{value:f}"
        bits = int.from_bytes(np.array(value).astype(dtype.np).tobytes(), "little")
    width = max(dtype.bits, 1)
    if as_hex:
        return f"0x{bits & (1 << width) - 1:0{max(width // 4, 1)}x}"
    return str(bits if signed else bits & (1 << width) - 1)


def assertion_text(launch: Launch, record: Record) -> str:
    """What is said about a failed assertion."""
    site = record.site
    more = f" ({record.count - 1} more)" if record.count > 1 else ""
    return (f"{shorter(site['where'])}: device-side assert failed in `{launch.table['kernel']}`, "
            f"program {launch.program(record.program)}{lane_text(site['shape'], record.lane)}: "
            f"{site['message'] or 'no message'}{more}")
