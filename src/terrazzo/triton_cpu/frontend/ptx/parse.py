"""A reader of PTX as it stands inside kernels: declarations, labels and instructions."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from functools import lru_cache

from terrazzo.errors import UnsupportedOperator


@dataclass(frozen=True)
class Register:
    """A register by its name: declared, special (`%tid.x`) or an operand of the asm (`$0`)."""

    name: str
    negated: bool = False  # of predicates


@dataclass(frozen=True)
class Immediate:
    """A number: `bits` of a float where it was given as one."""

    value: int | float


@dataclass(frozen=True)
class Vector:
    """Several operands in braces."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """The two predicates that a comparison sets: `p|q`."""

    first: Register
    second: Register


@dataclass(frozen=True)
class Address:
    """A place in memory: so many bytes after what a register holds."""

    base: Register | Immediate
    offset: int = 0


Operand = Register | Immediate | Vector | Pair | Address


@dataclass(frozen=True)
class Instruction:
    """An instruction, done only where its guard holds."""

    name: str  # up to the first dot
    suffixes: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Register | None
    text: str

    def refused(self, why: str = "has no meaning on the CPU") -> UnsupportedOperator:
        """The error that quotes this instruction."""
        return UnsupportedOperator(
            f"the PTX instruction `{self.text}` {why}",
            hint="docs/triton-cpu.md lists the instructions that run")


@dataclass(frozen=True)
class Program:
    """Instructions in order, where the labels stand among them, and the declared registers."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int] = field(default_factory=dict)  # the number of the next instruction
    registers: dict[str, str] = field(default_factory=dict)  # the type of each declared one


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_LABEL = re.compile(r"^([A-Za-z_$%][\w$]*)\s*:(?!:)")
_GUARD = re.compile(r"^@(!?)\s*([%$\w]+)\s+")
_OPCODE = re.compile(r"^([a-z]\w*)((?:\.[\w:]+)*)\s*")
_DECLARED = re.compile(r"^([%$\w]+)(?:<(\d+)>)?$")
_REGISTER = re.compile(r"^(!?)\s*(\$\d+|\$\{\d+(?::\w+)?\}|%?[A-Za-z_$][\w$]*(?:\.[xyzw])?)$")
_SUM = re.compile(r"^(.+?)\s*([+-])\s*(\w+)$")


@lru_cache(256)
def parse(text: str) -> Program:
    """Read the text of an asm; `{` and `}` around statements are scopes, and mean nothing here."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    registers: dict[str, str] = {}
    text = _COMMENT.sub(" ", text).replace("${:uid}", "").replace("$$", "$")
    for piece in text.split(";"):
        piece = piece.strip().lstrip("{}").strip()
        while (label := _LABEL.match(piece)) is not None:
            labels[label[1]] = len(instructions)
            piece = piece[label.end():].strip().lstrip("{}").strip()
        if piece.startswith(".reg"):
            registers.update(_declared(piece))
        elif piece:
            instructions.append(_instruction(piece))
    return Program(tuple(instructions), labels, registers)


def _declared(text: str) -> dict[str, str]:
    kind, *names = text.removeprefix(".reg").replace(",", " ").split()
    found: dict[str, str] = {}
    for name in names:
        match = _DECLARED.match(name)
        if match is None:
            raise UnsupportedOperator(f"the PTX declaration `{text}` cannot be read")
        many = [""] if match[2] is None else map(str, range(int(match[2])))
        found.update({match[1] + number: kind.lstrip(".") for number in many})
    return found


def _instruction(text: str) -> Instruction:
    shown = " ".join(text.split()) + ";"
    guard: Register | None = None
    found = _GUARD.match(text)
    if found is not None:
        guard = Register(found[2], found[1] == "!")
        text = text[found.end():]
    opcode = _OPCODE.match(text)
    if opcode is None:
        raise UnsupportedOperator(f"the PTX instruction `{shown}` cannot be read")
    operands = [_operand(o, shown) for o in _split(text[opcode.end():])]
    suffixes = tuple(s for s in opcode[2].split(".") if s)
    return Instruction(opcode[1], suffixes, tuple(operands), guard, shown)


def _split(text: str) -> list[str]:
    """Operands, at the commas that are in no bracket."""
    parts, depth, begin = [], 0, 0
    for place, sign in enumerate(text):
        depth += (sign in "{[(") - (sign in "}])")
        if sign == "," and depth == 0:
            parts.append(text[begin:place])
            begin = place + 1
    return [p.strip() for p in [*parts, text[begin:]] if p.strip()]


def _operand(text: str, shown: str) -> Operand:
    if text.startswith("{") and text.endswith("}"):
        return Vector(tuple(_operand(o, shown) for o in _split(text[1:-1])))
    if text.startswith("[") and text.endswith("]"):
        return _address(text[1:-1].strip(), shown)
    if "|" in text:
        first, second = (_operand(o.strip(), shown) for o in text.split("|", 1))
        if isinstance(first, Register) and isinstance(second, Register):
            return Pair(first, second)
    number = _number(text)
    if number is not None:
        return Immediate(number)
    register = _REGISTER.match(text)
    if register is None:
        raise UnsupportedOperator(
            f"the operand `{text}` of the PTX instruction `{shown}` cannot be read")
    name = re.sub(r"^\$\{(\d+).*\}$", r"$\1", register[2])
    return Register(name, register[1] == "!")


def _address(text: str, shown: str) -> Address:
    offset, found = 0, _SUM.match(text)
    if found is not None:
        distance = _number(found[3])
        if isinstance(distance, int):
            text, offset = found[1], distance if found[2] == "+" else -distance
    base = _operand(text, shown)
    if not isinstance(base, (Register, Immediate)):
        raise UnsupportedOperator(
            f"the address `[{text}]` of the PTX instruction `{shown}` cannot be read")
    return Address(base, offset)


_INTEGER = re.compile(r"^[+-]?(0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)U?$")
_BITS = re.compile(r"^([+-]?)0([fFdD])([0-9a-fA-F]{8}|[0-9a-fA-F]{16})$")
_DECIMAL = re.compile(r"^[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?$")


def _number(text: str) -> int | float | None:
    found = _BITS.match(text)
    if found is not None:
        kind = "<I", "<f"
        if len(found[3]) == 16:
            kind = "<Q", "<d"
        value = float(struct.unpack(kind[1], struct.pack(kind[0], int(found[3], 16)))[0])
        return -value if found[1] == "-" else value
    if _INTEGER.match(text):
        digits = text.rstrip("U")
        octal = re.match(r"^[+-]?0[0-7]+$", digits)
        return int(digits, 8 if octal else 0)
    return float(text) if _DECIMAL.match(text) else None
