"""A program of PTX that touches memory or loops, as statements: registers lie in local buffers.

Control flow is a loop over its straight pieces: a number says which one is next. That covers
whatever jumps there are, and such programs spend their time waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from terrazzo.base.scalar import Const, Scalar, call, cast, where
from terrazzo.dtypes import DType, bool_, float32, float64, int32, int64
from terrazzo.loop.ir import Atomic, Buffer, If, Pause, Stmt, Store, While, block
from terrazzo.triton_cpu.frontend.ptx.arithmetic import form_of
from terrazzo.triton_cpu.frontend.ptx.parse import (
    Address,
    Immediate,
    Instruction,
    Operand,
    Program,
    Register,
    Vector,
)
from terrazzo.triton_cpu.frontend.ptx.run import CLOCKS, JUMPS, MEMORY, Machine, Specials, target_of
from terrazzo.triton_cpu.frontend.ptx.types import UNSIGNED, as_bits, as_type, literal

_WEAK = frozenset({"weak", "nc"})
_ORDER = frozenset({"acquire", "release", "acq_rel", "relaxed", "volatile", "sc", "mmio"})
_HINTS = frozenset({"gpu", "sys", "cta", "cluster", "global", "ca", "cg", "cs", "lu", "cv", "wb",
                    "wt", "noftz", *_WEAK, *_ORDER})
_ATOMIC = {"add": "add", "and": "and", "or": "or", "xor": "xor", "min": "min", "max": "max",
           "exch": "exchange", "cas": "compare"}
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}


@dataclass(frozen=True)
class Memory:
    """Local buffers, all memory as elements of a type, and what loops do while they wait."""

    local: Callable[[str, DType, int], Buffer]
    place: Callable[[Scalar, DType], tuple[Buffer, Scalar]]
    begin: Stmt
    turn: Stmt
    over: Scalar  # no more waiting


class _Statements(Machine):
    def __init__(self, program: Program, specials: Specials, memory: Memory,
                 widths: Mapping[str, int]):
        super().__init__(program, specials)
        self.memory = memory
        self.widths = widths
        self.buffers: dict[str, Buffer] = {}
        self.clock: Buffer | None = None
        self.made: list[Stmt] = []

    # ------------------------------------------------------------ registers
    def buffer(self, name: str) -> Buffer:
        if name not in self.buffers:
            kind = self.program.registers.get(name, "b64")
            bits = self.widths.get(name) or int("".join(c for c in kind if c.isdigit()) or 64)
            dtype = bool_ if kind == "pred" else UNSIGNED[max(min(bits, 64), 8)]
            self.buffers[name] = self.memory.local("ptx", dtype, 1)
        return self.buffers[name]

    def get(self, name: str) -> Scalar:
        return self.buffer(name)[0]

    def put(self, name: str, value: Scalar) -> None:
        target = self.buffer(name)
        self.made.append(Store(target, 0, as_type(value, target.dtype)))

    def register(self, register: Register, instruction: Instruction) -> Scalar:
        if register.name in CLOCKS and register.name not in self.program.registers:
            return self._time(register.name)
        return super().register(register, instruction)

    def _time(self, name: str) -> Scalar:
        if self.clock is None:
            self.clock = self.memory.local("clock", int64, 1)
        self.made.append(Pause((self.clock, 0)))
        now: Scalar = self.clock[0]
        return call("shr", now, Const(int64, 32)) if name.endswith("_hi") else now

    # ------------------------------------------------------------ memory
    def do(self, instruction: Instruction) -> None:
        if instruction.name in MEMORY:
            self._check(instruction)
            if instruction.name in ("ld", "ldu"):
                self._load(instruction)
            elif instruction.name == "st":
                self._store(instruction)
            else:
                self._atomic(instruction)
        elif instruction.name == "nanosleep":
            self.made.append(Pause())
        else:
            super().do(instruction)

    def _check(self, instruction: Instruction) -> None:
        form = form_of(instruction)
        rest = {m for m in form.modifiers - _HINTS - _ATOMIC.keys() - _VECTORS.keys()
                if not m.startswith(("L1::", "L2::", "evict"))}
        if rest or len(form.kinds) != 1:
            raise instruction.refused()

    def _address(self, operand: Operand, instruction: Instruction) -> Scalar:
        if not isinstance(operand, Address):
            raise instruction.refused()
        base = operand.base
        place = literal(base, int64) if isinstance(base, Immediate) else as_type(
            self.register(base, instruction), int64)
        return call("add", place, Const(int64, operand.offset)) if operand.offset else place

    def _parts(self, operand: Operand, instruction: Instruction) -> tuple[Operand, ...]:
        count = next((n for m, n in _VECTORS.items() if m in instruction.suffixes), 1)
        parts = operand.items if isinstance(operand, Vector) else (operand,)
        if len(parts) != count:
            raise instruction.refused()
        return parts

    def _load(self, instruction: Instruction) -> None:
        target, source = instruction.operands[:2]
        dtype = form_of(instruction).kind.dtype
        begin = self._address(source, instruction)
        loose = not _ORDER.isdisjoint(instruction.suffixes) or jumps(self.program)
        size = dtype.itemsize
        for n, part in enumerate(self._parts(target, instruction)):
            at = call("add", begin, Const(int64, n * size)) if n else begin
            word = UNSIGNED[dtype.bits]
            memory, place = self.memory.place(at, word)
            seen = self.memory.local("seen", word, 1)
            self.made.append(
                Atomic("load", memory, place, Const(word, 0), None, (seen, 0)) if loose else
                Store(seen, 0, memory[place]))
            self.write(part, as_type(seen[0], dtype), instruction)

    def _store(self, instruction: Instruction) -> None:
        target, source = instruction.operands[:2]
        kind = form_of(instruction).kind
        begin = self._address(target, instruction)
        word = UNSIGNED[kind.dtype.bits]
        for n, part in enumerate(self._parts(source, instruction)):
            at = call("add", begin, Const(int64, n * word.itemsize)) if n else begin
            value = as_bits(self.read(part, kind, instruction)[0], word.bits)
            memory, place = self.memory.place(at, word)
            self.made.append(
                Store(memory, place, value) if _ORDER.isdisjoint(instruction.suffixes) else
                Atomic("exchange", memory, place, value))

    def _atomic(self, instruction: Instruction) -> None:
        """atom and red: what was there before goes to the first operand of atom."""
        operation = next((_ATOMIC[s] for s in instruction.suffixes if s in _ATOMIC), None)
        kind = form_of(instruction).kind
        if operation is None or kind.lanes > 1 or (
                kind.dtype.is_float and (operation != "add" or kind.dtype not in (
                    float32, float64))):
            raise instruction.refused()
        operands = list(instruction.operands)
        target = operands.pop(0) if instruction.name == "atom" else None
        at = self._address(operands.pop(0), instruction)
        given = [self.read(o, kind, instruction)[0] for o in operands]
        expected = given.pop(0) if operation == "compare" else None
        memory, place = self.memory.place(at, kind.dtype)
        old = self.memory.local("seen", kind.dtype, 1)
        self.made.append(Atomic(operation, memory, place, given[0], expected, (old, 0)))
        if target is not None:
            self.write(target, old[0], instruction)

    # ------------------------------------------------------------ straight pieces
    def piece(self, instructions: tuple[Instruction, ...]) -> Stmt:
        """Instructions one after the other, without jumps."""
        outer, self.made = self.made, []
        done: list[Stmt] = []
        for instruction in instructions:
            self.made = []
            condition = None if instruction.guard is None else as_type(
                self.register(instruction.guard, instruction), bool_)
            self.do(instruction)
            body = block(*self.made)
            done.append(body if condition is None else If(condition, body))
        self.made = outer
        return block(*done)


def jumps(program: Program) -> bool:
    """Whether a program has anything but straight code."""
    return any(i.name in JUMPS for i in program.instructions)


def statements(program: Program, inputs: Mapping[str, Scalar], widths: Mapping[str, int],
               specials: Specials, memory: Memory) -> tuple[Stmt, dict[str, Buffer]]:
    """A program as a statement, and the buffers that hold its registers in the end."""
    machine = _Statements(program, specials, memory, widths)
    for name in widths:
        machine.put(name, inputs.get(name, Const(UNSIGNED[widths[name]], 0)))
    begin, machine.made = machine.made, []
    if not jumps(program):
        return block(*begin, machine.piece(program.instructions)), machine.buffers
    going = memory.local("next", int32, 1)
    pieces = list(_pieces(program))
    numbers = {start: n for n, (start, _) in enumerate(pieces)}
    numbers.setdefault(len(program.instructions), len(pieces))
    branches: Stmt | None = None
    for start, end in reversed(pieces):
        branches = If(call("eq", going[0], Const(int32, numbers[start])),
                      _branch(machine, going, start, end, numbers), branches)
    assert branches is not None
    unfinished = call("lt", going[0], Const(int32, len(pieces)))
    loop = While(call("and", unfinished, call("not", memory.over)), block(memory.turn, branches))
    return (block(*begin, memory.begin, Store(going, 0, Const(int32, 0)), loop),
            machine.buffers)


def _pieces(program: Program) -> Iterator[tuple[int, int]]:
    """Where straight code begins and ends: at jumps, and where they lead to."""
    count = len(program.instructions)
    starts = {0, *(n + 1 for n, i in enumerate(program.instructions) if i.name in JUMPS),
              *(target_of(program, i) for i in program.instructions if i.name in JUMPS)}
    ordered = sorted(s for s in starts if s < count)
    yield from zip(ordered, [*ordered[1:], count], strict=True)


def _branch(machine: _Statements, going: Buffer, start: int, end: int, numbers: Mapping[int, int]
            ) -> Stmt:
    """A straight piece, and the number of what comes after it."""
    program = machine.program
    *body, last = program.instructions[start:end]
    following: Scalar = Const(int32, numbers[end])
    if last.name not in JUMPS:
        return block(machine.piece((*body, last)), Store(going, 0, following))
    target: Scalar = Const(int32, numbers[target_of(program, last)])
    done = machine.piece(tuple(body))
    if last.guard is not None:
        condition = as_type(machine.register(last.guard, last), bool_)
        target = where(condition, target, following)
    return block(done, Store(going, 0, cast(target, int32)))


