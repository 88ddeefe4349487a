"""A program of PTX without memory and jumps back, as scalar expressions: a value a register.

What is done under a condition chooses between the new value and the old one, so that vector loops
can hold it. `Machine` is what both ways of running share: reading operands, finding what an
instruction means, writing results.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from terrazzo.base.scalar import Const, Scalar, call, where
from terrazzo.dtypes import bool_, uint32, uint64
from terrazzo.triton_cpu.frontend.ptx import arithmetic, bits
from terrazzo.triton_cpu.frontend.ptx.arithmetic import Form, Row, combined, compared, form_of
from terrazzo.triton_cpu.frontend.ptx.convert import converted
from terrazzo.triton_cpu.frontend.ptx.parse import (
    Immediate,
    Instruction,
    Operand,
    Pair,
    Program,
    Register,
    Vector,
)
from terrazzo.triton_cpu.frontend.ptx.types import (
    KINDS,
    SIGNED,
    UNSIGNED,
    Kind,
    as_bits,
    as_type,
    join,
    literal,
    split,
)

ROWS: dict[str, Row] = {**arithmetic.ROWS, **bits.ROWS}
# One thread a program, and memory that all threads see in order: nothing to wait for.
NOTHING = frozenset({
    "bar", "barrier", "fence", "membar", "griddepcontrol", "nanosleep", "prefetch", "prefetchu",
    "discard", "applypriority", "setmaxnreg", "pmevent",
})
JUMPS = frozenset({"bra", "ret", "exit"})
MEMORY = frozenset({"ld", "ldu", "st", "atom", "red"})
CLOCKS = frozenset({"%clock", "%clock_hi", "%clock64", "%globaltimer", "%globaltimer_lo",
                    "%globaltimer_hi"})
# A program is one thread of one warp on one processor.
SPECIAL = {
    **{f"%{name}.{axis}": value for axis in "xyz" for name, value in (("tid", 0), ("ntid", 1))},
    "%laneid": 0, "%warpid": 0, "%nwarpid": 1, "%smid": 0, "%nsmid": 1, "%gridid": 0,
    "%lanemask_eq": 1, "%lanemask_le": 1, "%lanemask_lt": 0, "%lanemask_ge": 0xFFFFFFFF,
    "%lanemask_gt": 0xFFFFFFFE, "WARP_SZ": 1,
}
Specials = Mapping[str, Scalar]
WIDTHS = {"r": 32, "f": 32, "l": 64, "d": 64, "h": 16, "c": 8, "b": 8}


def has_effects(program: Program) -> bool:
    """Whether a program needs statements: it touches memory, jumps back or reads a clock."""
    return any(
        i.name in MEMORY or (i.name == "bra" and target_of(program, i) <= n)
        or any(isinstance(o, Register) and o.name in CLOCKS and o.name not in program.registers
               for o in i.operands)
        for n, i in enumerate(program.instructions))


def jumps_back(program: Program) -> bool:
    """Whether a program has a loop."""
    return any(i.name == "bra" and target_of(program, i) <= n
               for n, i in enumerate(program.instructions))


def target_of(program: Program, jump: Instruction) -> int:
    """The number of the instruction that a jump leads to."""
    label = jump.operands[0] if jump.operands else None
    if jump.name in ("ret", "exit"):
        return len(program.instructions)
    if not isinstance(label, Register) or label.name not in program.labels:
        raise jump.refused("jumps to a label that is not there")
    return program.labels[label.name]


class Machine(ABC):
    """Registers, and what instructions do to them."""

    def __init__(self, program: Program, specials: Specials):
        self.program = program
        self.specials = specials

    # ------------------------------------------------------------ registers
    @abstractmethod
    def get(self, name: str) -> Scalar:
        """What a register holds."""

    @abstractmethod
    def put(self, name: str, value: Scalar) -> None:
        """Make a register hold something else."""

    def register(self, register: Register, instruction: Instruction) -> Scalar:
        """What a register holds, whatever it is."""
        name = register.name
        if name in self.program.registers or name.startswith("$"):
            value = self.get(name)
        elif name in self.specials:
            value = self.specials[name]
        elif name in SPECIAL:
            value = Const(uint32, SPECIAL[name])
        else:
            raise instruction.refused(f"reads {name}, which is not there on the CPU")
        return call("not", as_type(value, bool_)) if register.negated else value

    def raw(self, operand: Operand, instruction: Instruction) -> Scalar:
        """An operand of any type: integers of 64 bits where it is a number."""
        if isinstance(operand, Register):
            return self.register(operand, instruction)
        if isinstance(operand, Immediate):
            number = operand.value
            kind = KINDS["f32"] if isinstance(number, float) else KINDS["b64"]
            return literal(operand, kind.dtype)
        raise instruction.refused()

    def read(self, operand: Operand, kind: Kind, instruction: Instruction) -> list[Scalar]:
        """The lanes of an operand of some type."""
        if isinstance(operand, Immediate):
            if kind.lanes == 1:
                return [literal(operand, kind.dtype)]
            return split(literal(operand, UNSIGNED[max(kind.total_bits, 8)]), kind)
        if isinstance(operand, Vector):  # of a packed type
            whole = self.packed(operand, kind.total_bits, instruction)
            return split(whole, kind)
        return split(self.raw(operand, instruction), kind)

    def packed(self, vector: Vector, total: int, instruction: Instruction) -> Scalar:
        """Registers side by side, the first in the lowest bits."""
        each = total // len(vector.items)
        parts = []
        for item in vector.items:
            if isinstance(item, Immediate):
                parts.append(literal(item, UNSIGNED[each]))
            else:
                parts.append(as_bits(self.raw(item, instruction), each))
        return join(parts, Kind(UNSIGNED[each], len(parts)))

    def write(self, operand: Operand, value: Scalar, instruction: Instruction) -> None:
        if isinstance(operand, Vector):
            each = Kind(UNSIGNED[value.dtype.bits // len(operand.items)], len(operand.items))
            for item, part in zip(operand.items, split(value, each), strict=True):
                self.write(item, part, instruction)
        elif isinstance(operand, Register):
            if operand.name != "_":
                self.put(operand.name, value)
        else:
            raise instruction.refused()

    # ------------------------------------------------------------ instructions
    def do(self, instruction: Instruction) -> None:
        """What an instruction does to registers."""
        form = form_of(instruction)
        if instruction.name in NOTHING:
            return
        special = _SPECIAL_FORMS.get(instruction.name)
        if special is not None:
            special(self, form)
            return
        row = ROWS.get(instruction.name)
        if row is None or not form.kinds:
            raise instruction.refused()
        target, *sources = instruction.operands
        kinds = [self._kind(form, name) for name in row.takes] or [form.kind] * len(sources)
        if len(kinds) != len(sources):
            raise instruction.refused("has another number of operands than it should")
        lanes = zip(*(self.read(o, k, instruction) for o, k in zip(sources, kinds, strict=True)),
                    strict=True)
        results = [row.meaning(form, *args) for args in lanes]
        self.write(target, join(results, form.kind) if len(results) > 1 else results[0],
                   instruction)

    @staticmethod
    def _kind(form: Form, name: str) -> Kind:
        if name == "T":
            return form.kind
        if name == "first":
            return form.kinds[0]
        if name == "wide":
            dtype = form.kind.dtype
            if "wide" not in form.modifiers:
                return form.kind
            return Kind((SIGNED if dtype.is_signed else UNSIGNED)[dtype.bits * 2])
        return KINDS[name]


def _move(machine: Machine, form: Form) -> None:
    """mov, and conversions of addresses between spaces, of which there is one."""
    instruction = form.instruction
    target, source = instruction.operands
    if isinstance(source, Vector):
        total = form.kind.total_bits if form.kinds else 64
        value = machine.packed(source, total, instruction)
    elif isinstance(source, Immediate):
        value = literal(source, form.kind.dtype)
    else:
        value = machine.raw(source, instruction)
        if isinstance(target, Vector):
            value = as_bits(value, form.kind.total_bits)
    machine.write(target, value, instruction)


def _convert(machine: Machine, form: Form) -> None:
    instruction = form.instruction
    target, *sources = instruction.operands
    if len(form.kinds) != 2:
        raise instruction.refused()
    flat = [item for o in sources for item in (o.items if isinstance(o, Vector) else (o,))]
    kind = form.kinds[1]
    values = [literal(o, kind.dtype) if isinstance(o, Immediate) and kind.lanes == 1
              else machine.raw(o, instruction) for o in flat]
    machine.write(target, converted(form, values), instruction)


def _set_predicate(machine: Machine, form: Form) -> None:
    """setp: for packed types a predicate for each lane, else one and its contrary."""
    instruction = form.instruction
    target, a, b, *rest = instruction.operands
    other = as_type(machine.raw(rest[0], instruction), bool_) if rest else None
    kind = form.kind
    lanes = [compared(form, x, y) for x, y in zip(
        machine.read(a, kind, instruction), machine.read(b, kind, instruction), strict=True)]
    if isinstance(target, Pair):
        if len(lanes) == 1:
            lanes.append(call("not", lanes[0]))
        for register, found in zip((target.first, target.second), lanes, strict=True):
            machine.write(register, combined(form, found, other), instruction)
    elif len(lanes) == 1:
        machine.write(target, combined(form, lanes[0], other), instruction)
    else:
        raise instruction.refused()


def _set(machine: Machine, form: Form) -> None:
    """set: all ones (of floats, 1.0) where a comparison holds."""
    instruction = form.instruction
    if len(form.kinds) != 2:
        raise instruction.refused()
    target, a, b, *rest = instruction.operands
    other = as_type(machine.raw(rest[0], instruction), bool_) if rest else None
    result, kind = form.kinds
    yes = Const(result.dtype, 1.0) if result.dtype.is_float else literal(
        Immediate(-1), result.dtype)
    lanes = [where(combined(form, compared(form, x, y), other), yes, Const(result.dtype, 0))
             for x, y in zip(machine.read(a, kind, instruction),
                             machine.read(b, kind, instruction), strict=True)]
    machine.write(target, join(lanes, result), instruction)


def _elect(machine: Machine, form: Form) -> None:
    """The one thread there is, is the one that is chosen."""
    target = form.instruction.operands[0]
    if not isinstance(target, Pair):
        raise form.instruction.refused()
    machine.write(target.first, Const(uint32, 0), form.instruction)
    machine.write(target.second, Const(bool_, True), form.instruction)


def _policy(machine: Machine, form: Form) -> None:
    machine.write(form.instruction.operands[0], Const(uint64, 0), form.instruction)


_SPECIAL_FORMS: dict[str, Callable[[Machine, Form], None]] = {
    "mov": _move, "cvta": _move, "cvt": _convert, "setp": _set_predicate, "set": _set,
    "elect": _elect, "createpolicy": _policy,
}
INSTRUCTIONS = frozenset(ROWS) | frozenset(_SPECIAL_FORMS) | NOTHING | JUMPS | MEMORY


class _Expressions(Machine):
    """Registers as expressions."""

    def __init__(self, program: Program, specials: Specials, registers: dict[str, Scalar]):
        super().__init__(program, specials)
        self.registers = registers
        self.condition: Scalar | None = None  # of what is being done

    def get(self, name: str) -> Scalar:
        return self.registers.get(name, Const(uint32, 0))

    def put(self, name: str, value: Scalar) -> None:
        old = self.registers.get(name)
        if self.condition is not None and old is not None:
            value = where(self.condition, value, as_type(old, value.dtype))
        self.registers[name] = value


def expressions(program: Program, inputs: Mapping[str, Scalar], specials: Specials
                ) -> dict[str, Scalar]:
    """What the registers hold in the end; those that were never written are missing."""
    machine = _Expressions(program, specials, dict(inputs))
    # Where a jump skips to, and whether it is taken: what is between runs if it is not.
    skipped: list[tuple[int, Scalar]] = []
    for number, instruction in enumerate(program.instructions):
        skipped = [(end, taken) for end, taken in skipped if end > number]
        conditions = [call("not", taken) for _, taken in skipped]
        if instruction.guard is not None:
            conditions.append(as_type(machine.register(instruction.guard, instruction), bool_))
        condition: Scalar | None = None
        for part in conditions:
            condition = part if condition is None else call("and", condition, part)
        if instruction.name in JUMPS:
            skipped.append((target_of(program, instruction),
                            Const(bool_, True) if condition is None else condition))
            continue
        machine.condition = condition
        machine.do(instruction)
    return machine.registers
