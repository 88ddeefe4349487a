"""From TTIR to Loop IR: one program of the grid as loops over flat buffers.

`Lowering` walks a function once. Elementwise operations, views and loads only make `Value`s;
operations that need elements (stores, reductions, products, loops that carry tiles) emit loop
nests. What a family of operations does lives in files of its own (`lower_reduce`, `lower_dot`,
`lower_control`), as functions in the table `HANDLERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.base.scalar import Call, Const, FromIndex, Scalar, Undefined, call, cast
from terrazzo.dtypes import DType, bool_, float32, float64, int32, int64
from terrazzo.errors import UnsupportedOperator
from terrazzo.index import Index, Var
from terrazzo.loop.ir import Alloc, Buffer, For, Function, Let, Stmt, Store, block
from terrazzo.loop.ir import walk as walk_stmts
from terrazzo.triton_cpu.frontend import pointers
from terrazzo.triton_cpu.frontend.addresses import Names, Reader
from terrazzo.triton_cpu.frontend.elementwise import EXPENSIVE, RULES, constant, not_negative
from terrazzo.triton_cpu.frontend.fusion import Item, fused
from terrazzo.triton_cpu.frontend.inline_asm import read_assembly
from terrazzo.triton_cpu.frontend.nest import Write, loops
from terrazzo.triton_cpu.frontend.quotients import is_free
from terrazzo.triton_cpu.frontend.state import Lazy, Memory, Scope, Signature, Target, Watch
from terrazzo.triton_cpu.frontend.ttir import Block, Module, Op, Type, walk
from terrazzo.triton_cpu.frontend.uses import find_uses, inner_ops, is_pair, writes_memory
from terrazzo.triton_cpu.frontend.values import (
    Element,
    Indices,
    Pointer,
    Value,
    constant_value,
    dtype_of,
    flat,
    forget_elements,
)

# Combining functions of one operation that vector loops know; others are run as they stand.
NAMED_REDUCTIONS = {
    "arith.addf": "add", "arith.addi": "add", "arith.mulf": "mul", "arith.muli": "mul",
    "arith.maxnumf": "max", "arith.maximumf": "max", "arith.maxsi": "max",
    "arith.minnumf": "min", "arith.minimumf": "min", "arith.minsi": "min",
    "arith.andi": "and", "arith.ori": "or",
}
Handler = Callable[["Lowering", Op], None]


class Lowering:
    """One function being lowered: its values so far, its statements, its local buffers."""

    def __init__(self, module: Module, target: Target):
        self.module, self.target = module, target
        self.env: dict[str, Value] = {}
        self.items: list[Item] = []
        self.scope = Scope()
        self.signature = Signature()
        self.lazy = Lazy()
        self.memory = Memory()
        self.watch = Watch()
        self.done: set[Op] = set()
        self.precise = any(op.name == "tt.precise_divf" for op in walk(module.entry.regions[0]))
        self.turns: Index = 1  # of all loops around what is being lowered
        self.known: tuple[Index, ...] = ()  # not negative, by the branches around it
        self.uses = find_uses(module.entry.regions[0])

    # ------------------------------------------------------------ names, statements, buffers
    def fresh(self, name: str, lo: int | None = None, hi: int | None = None) -> Var:
        return Var(self.scope.fresh(name), lo, hi)

    def emit(self, stmt: Stmt) -> None:
        self.items.append(stmt)

    def inside(self, body: Callable[[], None], known: Sequence[Index] = ()) -> Stmt:
        """The statements that `body` emits, as one; where some integers are not negative."""
        outer, self.items = self.items, []
        before, self.known = self.known, (*self.known, *known)
        already = len(self.memory.kept)
        body()
        inner, self.items = closed(fused(self.items)), outer
        self.known = before
        # Nobody knows whether it ran: what it was the first to write is not in memory after it.
        while len(self.memory.kept) > already:
            value, compute, buffer, weight = self.memory.kept.pop()
            value.compute, value.buffer, value.weight = compute, buffer, weight
            forget_elements()
        return inner

    def local(self, name: str, dtype: DType, size: int) -> Buffer:
        return self.scope.local(name, dtype, size)

    def nest(self, shape: Sequence[int], writes: Callable[[Indices], list[Write]],
             innermost: int | None = None) -> Stmt:
        return loops(shape, self.fresh, writes, innermost, self.precise,
                     foreseen=self.target.scratchpad, known=self.known)

    def index(self, value: Value) -> Index:
        """An integer scalar as an index, named if it has no other form."""
        names = Names((), self.fresh)
        found = Reader(names).index(value.scalar())
        assert found is not None
        self.items.extend(names.bound)
        return found

    # ------------------------------------------------------------ errors
    def unsupported(self, op: Op, why: str = "") -> UnsupportedOperator:
        detail = f": {why}" if why else ""
        return UnsupportedOperator(
            f"the operation {op.name} of kernel {self.module.entry.attrs['sym_name']!r} cannot "
            f"run on the CPU{detail}", where=self.module.where(op),
            hint="write it with functions of triton.language; docs/triton-cpu.md lists those "
                 "that run")

    # ------------------------------------------------------------ values in memory
    def stored(self, type_: Type, buffer: Buffer, dtype: DType | None = None) -> Value:
        """A value that lies in a buffer, row-major."""
        shape = type_.shape
        value = Value(type_, lambda i: pointers.kept(self, type_, buffer, flat(shape, i)))
        if dtype is not None:
            value.compute = lambda i: cast(buffer[flat(shape, i)], dtype)
        value.buffer = buffer
        return value

    def materialise(self, value: Value, name: str = "tile") -> Buffer:
        """Write a tile into a local buffer, unless it lies in one already."""
        if value.buffer is None:
            type_ = value.type
            buffer = self.local(name, pointers.memory_type(type_), type_.count)
            self.emit(self.nest(type_.shape, lambda i: [
                Write(buffer, flat(type_.shape, i), pointers.number(self, value, i))]))
            self.keep(value, buffer)
        assert value.buffer is not None
        return value.buffer

    def keep(self, value: Value, buffer: Buffer) -> None:
        """From now on a value is read from a buffer that holds it."""
        type_ = value.type
        self.memory.kept.append((value, value.compute, value.buffer, value.weight))
        value.buffer = buffer
        value.compute = lambda i: pointers.kept(self, type_, buffer, flat(type_.shape, i))
        forget_elements()
        self.lazy.forget(value)
        value.weight = 1

    def settle(self, op: Op) -> None:
        """Bring into memory what an operation is the first to need, or the last to see intact."""
        inside = inner_ops(op)
        *views, picked = self.uses.way_to_tile(op) if is_pair(op) else [""]
        for name, value in list(self.lazy.deferred):
            if not inside.isdisjoint(self.uses.sinks.get(name, ())):
                if name not in views and not self.keeps_what_it_reads(op, value):
                    self.materialise(value)
        if picked:  # its elements will be asked for at other places than its own
            self.materialise(self.env[picked])
            self.lazy.deferred = [p for p in self.lazy.deferred if p[0] not in views]
        if writes_memory(op):
            keep_lazy = {op} if not op.regions else set()
            self.lazy.pending = [(name, value) for name, value in self.lazy.pending
                            if not self.uses.sinks.get(name, set()) <= self.done]
            for name, value in list(self.lazy.pending):
                left = self.uses.sinks.get(name, set()) - self.done - keep_lazy
                if left or self.overlaps(op, name, value):
                    self.materialise(value, "loaded")

    def keeps_what_it_reads(self, op: Op, value: Value) -> bool:
        """Whether an operation's own loop over a tile can write another one of its shape."""
        return op.name == "tt.reduce" and is_named(op) and not is_pair(op) and (
            op.operand_types[0].shape == value.type.shape)

    def overlaps(self, op: Op, name: str, value: Value) -> bool:
        """Whether a store may write what the load it stores is still going to read."""
        if op not in self.uses.sinks.get(name, ()) or op.name != "tt.store":
            return op in self.uses.sinks.get(name, ())
        target = self.env[op.operands[0]]
        source = self.env[self.memory.load_pointers[name]]
        if source.type.shape != target.type.shape:
            return not source.type.is_tile or pointers.may_overlap(
                self, self.base(source), self.base(target))
        probe = tuple(self.fresh("probe", 0, n - 1) if n > 1 else 0 for n in target.type.shape)
        there, here = target.pointer(probe), source.pointer(probe)
        if there.buffer is not here.buffer:
            return pointers.may_overlap(self, there.buffer, here.buffer)
        reader = Reader(None)
        a, b = reader.index(there.offset), reader.index(here.offset)
        return there.offset is not here.offset and (a is None or a != b)

    def base(self, value: Value) -> Buffer:
        return value.pointer(tuple(0 for _ in value.type.shape)).buffer

    # ------------------------------------------------------------ blocks
    def block(self, block_: Block) -> Op | None:
        """Lower operations up to the terminator, which is the answer."""
        for op in block_.ops:
            if op.name in TERMINATORS:
                return op
            self.op(op)
        return None

    def op(self, op: Op) -> None:
        handler = HANDLERS.get(op.name)
        if self.watch.sanitizer is not None:
            handler = self.watch.sanitizer.handlers.get(op.name, handler)
        if handler is None:
            raise self.unsupported(op)
        if op.name in SINKS:
            self.settle(op)
        handler(self, op)
        self.done.add(op)

    def operand(self, op: Op, number: int) -> Value:
        return self.env[op.operands[number]]

    def define(self, op: Op, compute: Callable[[Indices], Scalar | Pointer]) -> Value:
        value = self.env[op.results[0]] = Value(op.type, compute)
        value.weight = max((self.env[o].weight for o in op.operands), default=0)
        return value


def is_named(op: Op) -> bool:
    """Whether a reduction combines by one operation of the two elements that loops know."""
    body = op.regions[0][0]
    if len(body.ops) != 2 or len(op.operands) != 1 or body.ops[0].name not in NAMED_REDUCTIONS:
        return False
    if op.operand_types[0].elem == "i1" and body.ops[0].name not in ("arith.andi", "arith.ori"):
        return False
    return sorted(body.ops[0].operands) == sorted(name for name, _ in body.args)


def closed(items: Sequence[Item]) -> Stmt:
    """Statements in order; a name covers all that follow it."""
    rest: list[Stmt] = []
    for item in reversed(items):
        if isinstance(item, tuple):
            rest = [Let(item[0], item[1], block(*reversed(rest)))]
        else:
            rest.append(item)
    return block(*reversed(rest))


# ---------------------------------------------------------------- elementwise operations and views
def _elementwise(lowering: Lowering, op: Op) -> None:
    args = [lowering.env[name] for name in op.operands]
    rule = RULES[op.name]
    if any(a.type.pointer for a in args) or op.type.pointer:
        _on_pointers(lowering, op, args)
        return
    # The condition of a select may be a single number beside tiles.
    value = lowering.define(op, lambda i: rule(op, [
        a.scalar(i[:len(a.type.shape)]) for a in args]))
    value.weight = 1 + sum(a.weight for a in set(args))
    dear = op.name in EXPENSIVE or value.weight > MOST_WEIGHT
    if not op.type.is_tile:
        if dear or op.name in _BRANCHY:
            _name_scalar(lowering, op, value)
    elif value.weight > LARGEST_WEIGHT:
        lowering.materialise(value)
    elif dear and lowering.uses.needed_again(op.results[0]) and not (
            op.name in _QUOTIENTS and _is_free(lowering, value)):
        value.weight = 1
        lowering.lazy.deferred.append((op.results[0], value))


def _is_free(lowering: Lowering, value: Value) -> bool:
    """Whether a quotient is part of addresses that need no division, so that none keeps it."""
    axes = [lowering.fresh("probe", 0, n - 1) if n > 1 else None for n in value.type.shape]
    ranges = {v: n for v, n in zip(axes, value.type.shape) if v is not None}
    element = value.scalar(tuple(0 if v is None else v for v in axes))
    return is_free(element, ranges, lowering.target.scratchpad)


_QUOTIENTS = frozenset({"arith.divsi", "arith.remsi"})
_BRANCHY = frozenset({"arith.select", "arith.minsi", "arith.maxsi", "arith.minui", "arith.maxui"})
MOST_WEIGHT = 24  # operations that may be repeated rather than kept in memory
LARGEST_WEIGHT = 400  # of any expression: compile time must not explode


def _name_scalar(lowering: Lowering, op: Op, value: Value) -> None:
    """Compute a number once, here, however many loops will use it."""
    element = value.scalar()
    if isinstance(element, (Const, FromIndex)):
        return
    if element.dtype.is_integer:
        var = lowering.fresh(op.results[0].strip("%").replace("#", "_"),
                             0 if not_negative(element) else None)
        lowering.items.append((var, element))
        lowering.define(op, lambda i: FromIndex(element.dtype, var))
    else:
        lowering.materialise(value, "scalar")
        value.weight = 1


def _on_pointers(lowering: Lowering, op: Op, args: list[Value]) -> None:
    if op.name == "arith.select":
        lowering.define(op, lambda i: pointers.choose(
            lowering, args[0].scalar(i[:len(args[0].type.shape)]), args[1].at(i), args[2].at(i)))
    elif op.name == "tt.bitcast":
        dtype = dtype_of(op.type.elem)
        lowering.define(op, lambda i: pointers.reinterpreted(
            lowering, args[0].pointer(i), dtype))
    else:
        raise lowering.unsupported(op, "on pointers")


def _pointer_to_number(lowering: Lowering, op: Op) -> None:
    source = lowering.operand(op, 0)
    lowering.define(op, lambda i: pointers.address(lowering, source.pointer(i)))


def _number_to_pointer(lowering: Lowering, op: Op) -> None:
    source, dtype = lowering.operand(op, 0), dtype_of(op.type.elem)
    lowering.define(op, lambda i: pointers.pointer_to(lowering, source.scalar(i), dtype))


def _constant(lowering: Lowering, op: Op) -> None:
    value, dtype = op.attrs["value"], dtype_of(op.type.elem)
    if not isinstance(value, list):
        literal = constant(dtype, value)
        lowering.define(op, lambda i: literal)
        return
    buffer = lowering.local("constant", dtype, op.type.count)
    for place, number in enumerate(value):
        lowering.emit(Store(buffer, place, constant(dtype, number)))
    lowering.env[op.results[0]] = lowering.stored(op.type, buffer)


def _program_id(lowering: Lowering, op: Op) -> None:
    value = FromIndex(int32, lowering.signature.program[op.attrs["axis"]])
    lowering.define(op, lambda i: value)


def _num_programs(lowering: Lowering, op: Op) -> None:
    value = FromIndex(int32, lowering.signature.grid[op.attrs["axis"]])
    lowering.define(op, lambda i: value)


def _nothing(lowering: Lowering, op: Op) -> None:
    """Assumptions and barriers: there is one thread a program."""


def _poison(lowering: Lowering, op: Op) -> None:
    dtype = dtype_of(op.type.elem)
    if op.type.pointer:
        nowhere = pointers.pointer_to(lowering, Const(int64, 0), dtype)
        lowering.define(op, lambda i: nowhere)
    else:
        lowering.define(op, lambda i: Undefined(dtype))


TERMINATORS = frozenset({"tt.return", "scf.yield", "scf.condition", "cf.br", "cf.cond_br",
                         "tt.reduce.return", "tt.scan.return", "tt.map_elementwise.return"})
HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(RULES, _elementwise),
    "arith.constant": _constant, "tt.get_program_id": _program_id,
    "tt.get_num_programs": _num_programs,
    "llvm.intr.assume": _nothing, "ttg.barrier": _nothing, "gpu.barrier": _nothing,
    "ub.poison": _poison,
    "tt.ptr_to_int": _pointer_to_number, "tt.int_to_ptr": _number_to_pointer,
}
SINKS: set[str] = set()  # operations that need elements, or write memory


@dataclass(frozen=True)
class Lowered:
    """A kernel as a function of Loop IR, and the arguments that its parameters come from.

    Its sizes are some arguments as 64-bit numbers (floats by their bits, pointers where they are
    calculated with), then the three sizes of the grid.
    """

    function: Function
    buffers: list[int]  # the number of an argument, or `pointers.ANYWHERE`
    numbers: list[int]
    kinds: str  # of each argument: "p" an address, "h" one of the host's, "i" or "f" a number
    reports: dict[str, Any] | None  # what the records of its last argument mean, if it has one

    @property
    def arguments(self) -> int:
        """How many there are."""
        return len(self.kinds)

    @property
    def local_bytes(self) -> int:
        """Memory for the tiles of one program."""
        sizes = [(a.buffer.size, a.buffer.dtype.itemsize) for a in walk_stmts(self.function.body)
                 if isinstance(a, Alloc)]
        return sum(count * size for count, size in sizes if isinstance(count, int))


def lower(module: Module, target: Target, sanitize: bool = False) -> Lowered:
    """Lower a kernel to Loop IR; with `sanitize`, every access to memory is checked."""
    from terrazzo.triton_cpu.frontend import (
        lower_asm,
        lower_atomic,
        lower_control,
        lower_debug,
        lower_dot,
        lower_dot_scaled,
        lower_map,
        lower_memory,
        lower_reduce,
        lower_views,
    )

    for family in (lower_control, lower_debug, lower_reduce, lower_dot, lower_dot_scaled,
                   lower_atomic, lower_map, lower_memory, lower_views, lower_asm):
        HANDLERS.update(family.HANDLERS)
        SINKS.update(family.SINKS)
    read_assembly(module)
    lowering = Lowering(module, target)
    entry, signature, watch = module.entry, lowering.signature, lowering.watch
    blocks = entry.regions[0]
    sizes: list[Var] = []
    numbers: list[int] = []
    for number, (name, type_) in enumerate(blocks[0].args):
        label = name.strip("%") or f"arg{number}"
        if type_.pointer:
            buffer = Buffer(label, dtype_of(type_.elem), 0, bounded=False)
            signature.params.append((buffer, number))
            element: Element = Pointer(buffer, Const(int64, 0))
        else:
            sizes.append(Var(label, None))
            numbers.append(number)
            element = argument(sizes[-1], dtype_of(type_.elem))
        lowering.env[name] = constant_value(type_, element)
    watch.alive = lower_debug.alive_buffer(lowering, module)
    if sanitize:
        from terrazzo.triton_cpu.frontend.sanitizer import Sanitizer

        watch.sanitizer = Sanitizer(lowering)
    body = lowering.inside(lambda: lower_control.blocks(lowering, blocks))
    body = block(*watch.prologue, body)
    program = Var("program", 0)
    x, y, z = signature.grid
    for var, place in zip(reversed(signature.program), (
            program // (x * y), program // x % y, program % x), strict=True):
        body = Let(var, FromIndex(int64, place), body)
    for buffer in lowering.scope.locals:
        body = Alloc(buffer, body)
    body = For(program, 0, x * y * z, body, "parallel")
    dims = (*sizes, *signature.addresses.values(), *signature.grid)
    function = Function(
        entry.attrs["sym_name"], tuple(b for b, _ in signature.params), dims, body)
    reports = None if watch.reports is None else watch.reports.table()
    kinds = "".join("p" if type_.pointer else "f" if dtype_of(type_.elem).is_float else "i"
                    for _, type_ in blocks[0].args) + "h" * (reports is not None)
    return Lowered(function, [n for _, n in signature.params], [*numbers, *signature.addresses],
                   kinds, reports)


def argument(var: Var, dtype: DType) -> Scalar:
    """A number that was passed as the bits of a 64-bit integer."""
    bits = FromIndex(int64, var)
    if dtype is bool_:
        return call("ne", bits, Const(int64, 0))
    if not dtype.is_float:
        return FromIndex(dtype, var)
    if dtype is float64:
        return Call(dtype, "bitcast", (bits,))
    return cast(Call(float32, "bitcast", (cast(bits, int32),)), dtype)
