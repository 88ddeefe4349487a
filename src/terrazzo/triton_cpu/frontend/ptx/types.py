"""Types of PTX, and the bits of registers read as one of them."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from terrazzo.base.scalar import Call, Const, Scalar, call, cast
from terrazzo.dtypes import (
    DType,
    bfloat16,
    bool_,
    float8_e4m3fn,
    float8_e5m2,
    float16,
    float32,
    float64,
    int8,
    int16,
    int32,
    int64,
    uint8,
    uint16,
    uint32,
    uint64,
)
from terrazzo.triton_cpu.frontend.ptx.parse import Immediate

UNSIGNED: dict[int, DType] = {8: uint8, 16: uint16, 32: uint32, 64: uint64}
SIGNED: dict[int, DType] = {8: int8, 16: int16, 32: int32, 64: int64}


@dataclass(frozen=True)
class Kind:
    """What a type of PTX says: lanes side by side in a register, the first in the lowest bits.

    Formats of less than 8 bits have no type of ours: `small` names them, and lanes hold codes.
    """

    dtype: DType
    lanes: int = 1
    bits: int = 0  # of a lane
    small: str = ""

    @property
    def lane_bits(self) -> int:
        return self.bits or self.dtype.bits

    @property
    def total_bits(self) -> int:
        return self.lane_bits * self.lanes


_PLAIN = {
    **{f"{letter}{bits}": table[bits] for letter, table in (
        ("b", UNSIGNED), ("u", UNSIGNED), ("s", SIGNED)) for bits in (8, 16, 32, 64)},
    "f16": float16, "bf16": bfloat16, "f32": float32, "f64": float64, "pred": bool_,
    "e4m3": float8_e4m3fn, "e5m2": float8_e5m2,
}
KINDS: dict[str, Kind] = {
    **{name: Kind(dtype) for name, dtype in _PLAIN.items()},
    **{f"{name}x2": Kind(_PLAIN[name], 2) for name in (
        "f16", "bf16", "f32", "u16", "s16", "e4m3", "e5m2")},
    **{f"{name}x4": Kind(_PLAIN[name], 4) for name in ("e4m3", "e5m2", "u8", "s8")},
    **{f"e2m1x{n}": Kind(uint8, n, 4, "e2m1") for n in (2, 4)},
    **{f"{name}x{n}": Kind(uint8, n, 8, name) for name in ("e2m3", "e3m2") for n in (2, 4)},
    "ue8m0x2": Kind(uint8, 2, 8, "ue8m0"),
    "tf32": Kind(float32),
}


def as_bits(value: Scalar, bits: int) -> Scalar:
    """The lowest bits of a register as an integer without sign."""
    if value.dtype is bool_:
        return cast(value, UNSIGNED[bits])
    if not value.dtype.is_integer:
        value = Call(UNSIGNED[value.dtype.bits], "bitcast", (value,))
    return cast(value, UNSIGNED[bits])


def as_type(value: Scalar, dtype: DType) -> Scalar:
    """What a register holds, read as a type: wider registers are cut, narrower ones extended."""
    if value.dtype is dtype:
        return value
    if dtype is bool_:
        return call("ne", value, Const(value.dtype, 0))
    if dtype.is_integer and value.dtype.is_integer:
        return cast(value, dtype)
    bits = as_bits(value, dtype.bits)
    return cast(bits, dtype) if dtype.is_integer else Call(dtype, "bitcast", (bits,))


def literal(number: Immediate, dtype: DType) -> Scalar:
    """A number in an instruction of a type; an integer among floats stands for bits."""
    value = number.value
    if dtype is bool_:
        return Const(bool_, bool(value))
    if isinstance(value, float):
        if dtype.is_float:
            return Const(dtype, value)
        kind = ("<d", "<Q") if dtype.bits == 64 else ("<f", "<I")
        value = int(struct.unpack(kind[1], struct.pack(kind[0], value))[0])
    if dtype.is_float:
        return as_type(Const(UNSIGNED[dtype.bits], value % (1 << dtype.bits)), dtype)
    value %= 1 << dtype.bits
    if dtype.is_signed and value >> (dtype.bits - 1):
        value -= 1 << dtype.bits
    return Const(dtype, value)


def split(value: Scalar, kind: Kind) -> list[Scalar]:
    """The lanes of a register."""
    if kind.lanes == 1:
        return [as_type(value, kind.dtype)]
    bits = kind.lane_bits
    whole = as_bits(value, max(kind.total_bits, 8))
    lanes = []
    for n in range(kind.lanes):
        part = whole if n == 0 else call("shr", whole, Const(whole.dtype, n * bits))
        if bits < 8:
            part = call("and", part, Const(whole.dtype, (1 << bits) - 1))
        lanes.append(as_type(cast(part, UNSIGNED[max(bits, 8)]), kind.dtype))
    return lanes


def join(lanes: list[Scalar], kind: Kind) -> Scalar:
    """A register made of lanes."""
    if kind.lanes == 1:
        return lanes[0]
    bits, total = kind.lane_bits, max(kind.total_bits, 8)
    whole = as_bits(as_bits(lanes[0], max(bits, 8)), total)
    for n, lane in enumerate(lanes[1:], 1):
        part = as_bits(as_bits(lane, max(bits, 8)), total)
        whole = call("or", whole, call("shl", part, Const(part.dtype, n * bits)))
    return whole
