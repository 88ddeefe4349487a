"""Inline assembly of kernels: which operands are which registers, and what kind of code it is.

Triton hands `pack` neighbouring elements of every operand to one run of the code. Elements below
32 bits share a register; results come first in the numbering, then the operands, one after the
other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from terrazzo.base.scalar import Const, Scalar, Undefined
from terrazzo.dtypes import DType, bool_
from terrazzo.errors import UnsupportedOperator
from terrazzo.triton_cpu.frontend.ptx.parse import Program, parse
from terrazzo.triton_cpu.frontend.ptx.run import (
    WIDTHS,
    Specials,
    expressions,
    has_effects,
    jumps_back,
)
from terrazzo.triton_cpu.frontend.ptx.types import UNSIGNED, Kind, as_bits, as_type, join, split
from terrazzo.triton_cpu.frontend.ttir import Module, Op, Type, walk
from terrazzo.triton_cpu.frontend.values import dtype_of

GIVEN = "tt.elementwise_inline_asm"
# What it becomes: an expression of an element, of several at once, or statements.
ELEMENTWISE, PACKED, EFFECTS = "ptx.elementwise", "ptx.packed", "ptx.effects"
PROGRAM_REGISTERS = tuple(f"%{name}.{axis}" for name in ("ctaid", "nctaid") for axis in "xyz")
ASSEMBLY = "assembly"  # the attribute that holds what was read


@dataclass(frozen=True)
class Assembly:
    """The code of one operation, with the element types around it."""

    text: str
    constraints: tuple[str, ...]
    pack: int
    operands: tuple[DType, ...]
    results: tuple[DType, ...]

    @cached_property
    def program(self) -> Program:
        return parse(self.text)

    @property
    def waits(self) -> bool:
        """Whether it has a loop: of assembly, those wait for other programs."""
        return jumps_back(self.program)

    @property
    def outputs(self) -> int:
        """How many registers hold results."""
        return sum(c.startswith("=") for c in self.constraints)

    @property
    def widths(self) -> dict[str, int]:
        """The bits of every register that the constraints name."""
        letters = [next((c for c in item if c in WIDTHS), "r") for item in self.constraints
                   if not item.startswith("~")]
        return {f"${n}": WIDTHS[letter] for n, letter in enumerate(letters)}

    def lanes(self, dtype: DType) -> Kind:
        """How elements of a type share a register."""
        return Kind(dtype, min(self.pack, max(32 // max(dtype.bits, 8), 1)))

    def registers(self, elements: list[list[Scalar]]) -> dict[str, Scalar]:
        """What the input registers hold, given `pack` elements of each operand."""
        values = []
        for items, dtype in zip(elements, self.operands, strict=True):
            kind = replace(self.lanes(dtype), bits=max(dtype.bits, 8))
            for n in range(0, self.pack, kind.lanes):
                values.append(join(items[n:n + kind.lanes], kind))
        inputs = [c for c in self.constraints if not c.startswith(("=", "~"))]
        if len(inputs) != len(values):
            raise UnsupportedOperator(
                f"inline assembly with the constraints {','.join(self.constraints)!r} has "
                f"{len(inputs)} inputs, but its operands fill {len(values)} registers")
        table = {}
        for n, (constraint, value) in enumerate(zip(inputs, values, strict=True)):
            table[f"${self.outputs + n}"] = value
            if constraint.isdigit():  # it begins in the register of a result
                table[f"${constraint}"] = value
        return table

    def elements(self, registers: dict[str, Scalar]) -> list[list[Scalar]]:
        """`pack` elements of each result, given what the registers hold in the end."""
        number, found = 0, []
        for dtype in self.results:
            kind, items = self.lanes(dtype), []
            for _ in range(0, self.pack, kind.lanes):
                value = registers.get(f"${number}", Const(UNSIGNED[32], 0))
                items += _elements(value, kind)
                number += 1
            found.append(items)
        return found

    def apply(self, elements: list[list[Scalar]], specials: Specials) -> list[list[Scalar]]:
        """The results as expressions of the operands."""
        return self.elements(expressions(self.program, self.registers(elements), specials))


def _elements(value: Scalar, kind: Kind) -> list[Scalar]:
    if kind.dtype is bool_:
        return [as_type(as_bits(v, 8), bool_) for v in split(value, Kind(UNSIGNED[8], kind.lanes))]
    return split(value, kind)


def read_assembly(module: Module) -> None:
    """Read the inline assembly of a kernel, and name its operations after what they need."""
    for function in module.functions.values():
        for op in walk(function.regions[0]):
            if op.name == GIVEN:
                _read(module, op)


def _read(module: Module, op: Op) -> None:
    constraints = tuple(c.strip() for c in str(op.attrs["constraints"]).split(",") if c.strip())
    made = Assembly(str(op.attrs["asm_string"]), constraints, int(op.attrs["packed_element"]),
                    tuple(_held(t) for t in op.operand_types), tuple(_held(t) for t in op.types))
    with located(module, op):
        effects = has_effects(made.program)
        if not effects:  # once now, so that errors know their line
            made.apply([[Undefined(t)] * made.pack for t in made.operands], {
                name: Undefined(UNSIGNED[32]) for name in PROGRAM_REGISTERS})
    op.name = EFFECTS if effects else ELEMENTWISE if made.pack == 1 else PACKED
    op.attrs[ASSEMBLY] = made


@contextmanager
def located(module: Module, op: Op) -> Iterator[None]:
    """Errors inside name the line of an operation."""
    try:
        yield
    except UnsupportedOperator as error:
        error.where = error.where or module.where(op)
        raise


def _held(type_: Type) -> DType:
    return UNSIGNED[64] if type_.pointer else dtype_of(type_.elem)


def assembly(op: Op) -> Assembly:
    """What was read of an operation."""
    found: Any = op.attrs[ASSEMBLY]
    assert isinstance(found, Assembly)
    return found
