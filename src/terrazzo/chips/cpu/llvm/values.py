"""Typed operands of LLVM IR as text: types taken apart, literals written exactly."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

_VECTOR = re.compile(r"<(\d+) x (.+)>$")
_INT = re.compile(r"i(\d+)$")
_FLOAT_SUFFIX = {"float": "f32", "double": "f64", "half": "f16", "bfloat": "bf16", "ptr": "p0"}


@cache
def split_type(ty: str) -> tuple[int, str]:
    """Lanes and element type of a type."""
    match = _VECTOR.match(ty)
    return (int(match[1]), match[2]) if match else (1, ty)


def lanes_of(ty: str) -> int:
    """Number of lanes of a type: 1 for scalars."""
    return split_type(ty)[0]


def elem_of(ty: str) -> str:
    """Element type of a vector type, or the scalar type itself."""
    return split_type(ty)[1]


@cache
def vec(elem: str, lanes: int) -> str:
    """The type of `lanes` elements: the element type itself when there is one lane."""
    return elem if lanes == 1 else f"<{lanes} x {elem}>"


@cache
def type_suffix(ty: str) -> str:
    """The part of an intrinsic's name that stands for a type: v16f32 for <16 x float>."""
    lanes, elem = split_type(ty)
    text = _FLOAT_SUFFIX.get(elem, elem)
    return text if lanes == 1 else f"v{lanes}{text}"


@dataclass(frozen=True, slots=True)
class Val:
    """A typed operand: one text, or a bundle of texts for independent values of the same type."""

    ty: str
    parts: tuple[str, ...]

    @property
    def lanes(self) -> int:
        return split_type(self.ty)[0]

    @property
    def elem(self) -> str:
        return split_type(self.ty)[1]

    @property
    def count(self) -> int:
        return len(self.parts)

    @property
    def text(self) -> str:
        """The only operand text; an error when this is a bundle."""
        (text,) = self.parts
        return text

    @property
    def literal(self) -> int | None:
        """The value of an integer literal (scalar, not a bundle), or None."""
        if len(self.parts) == 1:
            text = self.parts[0]
            if text[0] in "0123456789-" and self.ty[0] == "i":
                return int(text)
            if self.ty == "i1" and text in ("true", "false"):
                return int(text == "true")
        return None

    def split(self) -> list[Val]:
        """The parts of a bundle as values of their own."""
        return [Val(self.ty, (part,)) for part in self.parts]


Operand = Val | int | float


def bundle(values: Sequence[Val]) -> Val:
    """Joins values of one type into one bundle."""
    ty = values[0].ty
    for value in values:
        if value.ty != ty:
            raise TypeError(f"a bundle holds one type; got {ty} and {value.ty}")
    return Val(ty, tuple(part for value in values for part in value.parts))


def _float_bits(elem: str, value: float) -> str:
    if elem == "double":
        return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"
    if elem == "half":
        return f"0xH{struct.unpack('<H', struct.pack('<e', value))[0]:04X}"
    try:
        single = struct.pack("<f", value)
    except OverflowError:
        single = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    if elem == "float":
        # LLVM writes floats as the bits of the double of the same value.
        return f"0x{struct.unpack('<Q', struct.pack('<d', struct.unpack('<f', single)[0]))[0]:016X}"
    bits = struct.unpack("<I", single)[0]
    if math.isnan(value):
        return "0xR7FC0"
    return f"0xR{(bits + 0x7FFF + ((bits >> 16) & 1)) >> 16:04X}"


_const_cache: dict[tuple[str, int | bytes], Val] = {}


def const(ty: str, value: float | bool) -> Val:
    """An exact literal of a scalar type, or of a vector type with all lanes equal."""
    lanes, elem = split_type(ty)
    floating = elem in ("float", "double", "half", "bfloat")
    # Bits as the key: 0.0 and -0.0 are equal as Python numbers and must stay apart.
    key = (ty, struct.pack("<d", value) if floating else int(value))
    found = _const_cache.get(key)
    if found is not None:
        return found
    if floating:
        text = _float_bits(elem, value)
    elif elem == "ptr":
        if value:
            raise TypeError("the only pointer literal is null: const('ptr', 0)")
        text = "null"
    else:
        if isinstance(value, float) and value != int(value):
            raise TypeError(f"{value} is not an integer literal for {ty}")
        match = _INT.match(elem)
        if match is None:
            raise TypeError(f"no literals of type {ty}")
        bits = int(match[1])
        if bits == 1:
            text = "true" if value else "false"
        else:
            wrapped = int(value) & ((1 << bits) - 1)
            text = str(wrapped - (1 << bits) if wrapped >> (bits - 1) else wrapped)
    if lanes > 1:
        text = "zeroinitializer" if text in ("0", "null", "false") else f"splat ({elem} {text})"
    result = Val(ty, (text,))
    _const_cache[key] = result
    return result


@cache
def iota(ty: str) -> Val:
    """The vector <0, 1, 2, ...> of an integer or float vector type (0 for a scalar type)."""
    lanes, elem = split_type(ty)
    if lanes == 1:
        return const(ty, 0)
    return Val(ty, (f"<{', '.join(f'{elem} {const(elem, i).text}' for i in range(lanes))}>",))
