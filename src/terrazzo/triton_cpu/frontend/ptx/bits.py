"""What PTX does with the bits of registers: shifts, fields, bytes, truth tables."""

from __future__ import annotations

from terrazzo.base.scalar import Const, Scalar, call, cast, where
from terrazzo.dtypes import int32, int64, uint32, uint64
from terrazzo.triton_cpu.frontend.externals_bits import (
    count_ones,
    leading_zeros,
    permuted_bytes,
    reversed_bits,
)
from terrazzo.triton_cpu.frontend.ptx.arithmetic import Form, Row
from terrazzo.triton_cpu.frontend.ptx.types import SIGNED, UNSIGNED, Kind, split


def _amount(value: Scalar, by: Scalar) -> Scalar:
    """By how much to shift: more than a type has bits leaves what all of them leave."""
    most = Const(uint32, value.dtype.bits)
    return cast(call("min", cast(by, uint32), most), value.dtype)


def _shift_left(form: Form, a: Scalar, by: Scalar) -> Scalar:
    return call("shl", a, _amount(a, by))


def _shift_right(form: Form, a: Scalar, by: Scalar) -> Scalar:
    return call("shr", a, _amount(a, by))


def _funnel(form: Form, low: Scalar, high: Scalar, by: Scalar) -> Scalar:
    """Two registers shifted as one of 64 bits; the upper half is left, or the lower one."""
    whole = call("or", call("shl", cast(high, uint64), Const(uint64, 32)), cast(low, uint64))
    if "wrap" in form.modifiers:
        by = call("and", by, Const(uint32, 31))
    elif "clamp" in form.modifiers:
        by = call("min", by, Const(uint32, 32))
    else:
        raise form.instruction.refused()
    wide = cast(by, uint64)
    if "l" in form.modifiers:
        return cast(call("shr", call("shl", whole, wide), Const(uint64, 32)), uint32)
    return cast(call("shr", whole, wide), uint32)


def _field(form: Form, a: Scalar, start: Scalar, length: Scalar) -> Scalar:
    """bfe: some bits, with their sign where the type has one; beyond the end lies the sign."""
    bits = a.dtype.bits
    start, length = (call("and", x, Const(uint32, 255)) for x in (start, length))
    moved = call("shr", a, _amount(a, start))  # brings in the sign, or zeros
    unused = call("sub", Const(uint32, bits), call("min", length, Const(uint32, bits)))
    if a.dtype.is_signed:
        last = call("sub", call("add", start, length), Const(uint32, 1))
        beyond = call("ge", last, Const(uint32, bits))
        cut = call("shr", call("shl", moved, _amount(moved, unused)), _amount(moved, unused))
        moved = where(beyond, moved, cut)
        return where(call("eq", length, Const(uint32, 0)), Const(a.dtype, 0), moved)
    cut = call("shr", call("shl", moved, _amount(moved, unused)), _amount(moved, unused))
    return where(call("eq", length, Const(uint32, 0)), Const(a.dtype, 0), cut)


def _insert(form: Form, a: Scalar, b: Scalar, start: Scalar, length: Scalar) -> Scalar:
    """bfi: the lowest bits of one register in place of some bits of another."""
    start, length = (call("and", x, Const(uint32, 255)) for x in (start, length))
    one = Const(b.dtype, 1)
    ones = call("sub", call("shl", one, _amount(b, length)), one)
    mask = call("shl", ones, _amount(b, start))
    inserted = call("and", call("shl", a, _amount(a, start)), mask)
    return call("or", call("and", b, call("not", mask)), inserted)


def _truth_table(form: Form, a: Scalar, b: Scalar, c: Scalar, table: Scalar) -> Scalar:
    """lop3: for every bit of three registers, one of eight bits of a number."""
    if not isinstance(table, Const):
        raise form.instruction.refused()
    result: Scalar | None = None
    for row in range(8):
        if int(table.value) >> row & 1:
            parts = [x if row >> place & 1 else call("not", x)
                     for place, x in zip((2, 1, 0), (a, b, c), strict=True)]
            term = call("and", call("and", parts[0], parts[1]), parts[2])
            result = term if result is None else call("or", result, term)
    return Const(uint32, 0) if result is None else result


_SELECTORS = {  # of bytes, for the four values of the control's lowest two bits
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543), "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333), "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210), "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}


def _permute(form: Form, a: Scalar, b: Scalar, control: Scalar) -> Scalar:
    """prmt: four bytes out of eight; by default the fourth bit of a selector repeats the sign."""
    mode = next((m for m in _SELECTORS if m in form.modifiers), None)
    if mode is None:
        form.only()
        bytes_ = cast(permuted_bytes(a, b, control), uint32)
        signs: Scalar = Const(uint32, 0)
        for place in range(4):
            flag = call("and", control, Const(uint32, 8 << (4 * place)))
            byte = Const(uint32, 0xFF << (8 * place))
            negative = call("ne", call("and", bytes_, Const(uint32, 0x80 << (8 * place))),
                            Const(uint32, 0))
            repeated = where(negative, byte, Const(uint32, 0))
            kept = call("and", bytes_, byte)
            signs = call("or", signs, where(call("ne", flag, Const(uint32, 0)), repeated, kept))
        return signs
    chosen: Scalar = Const(uint32, _SELECTORS[mode][0])
    number = call("and", control, Const(uint32, 3))
    for value in (1, 2, 3):
        chosen = where(call("eq", number, Const(uint32, value)),
                       Const(uint32, _SELECTORS[mode][value]), chosen)
    return cast(permuted_bytes(a, b, chosen), uint32)


def _highest(form: Form, a: Scalar) -> Scalar:
    """bfind: the place of the highest bit that is not the sign, or all ones."""
    if a.dtype.is_signed:
        a = where(call("lt", a, Const(a.dtype, 0)), call("not", a), a)
    place = call("sub", Const(int32, a.dtype.bits - 1), leading_zeros(a))
    if "shiftamt" in form.modifiers:
        place = where(call("lt", place, Const(int32, 0)), place,
                      call("sub", Const(int32, a.dtype.bits - 1), place))
    return cast(place, uint32)


def _dot4(form: Form, a: Scalar, b: Scalar, c: Scalar) -> Scalar:
    """dp4a: four products of bytes and a sum."""
    first, second = form.kinds[0].dtype, form.kinds[1].dtype
    total = cast(c, int64)
    for x, y in zip(*(split(v, Kind((SIGNED if t.is_signed else UNSIGNED)[8], 4))
                      for v, t in ((a, first), (b, second))), strict=True):
        total = call("add", total, call("mul", cast(x, int64), cast(y, int64)))
    return cast(total, int32)


ROWS: dict[str, Row] = {
    "shl": Row(_shift_left, ("T", "u32")), "shr": Row(_shift_right, ("T", "u32")),
    "shf": Row(_funnel, ("b32", "b32", "u32")),
    "bfe": Row(_field, ("T", "u32", "u32")), "bfi": Row(_insert, ("T", "T", "u32", "u32")),
    "lop3": Row(_truth_table), "prmt": Row(_permute),
    "brev": Row(lambda form, a: reversed_bits(a)),
    "popc": Row(lambda form, a: cast(count_ones(a), uint32)),
    "clz": Row(lambda form, a: cast(leading_zeros(a), uint32)),
    "bfind": Row(_highest), "dp4a": Row(_dot4, ("b32", "b32", "b32")),
}
