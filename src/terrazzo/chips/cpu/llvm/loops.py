"""Writes Loop IR as LLVM code: statements, local memory, parallel loops handed to the pool.

Vector loops are widened in `vector_loops`; values and addresses are made in `expressions`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from terrazzo.base.scalar import Load, Scalar
from terrazzo.base.scalar import walk as walk_scalar
from terrazzo.chips.cpu.llvm import scalars
from terrazzo.chips.cpu.llvm.builder import HANDS_ON, Builder, Module, Val, const
from terrazzo.chips.cpu.llvm.decisions import products_apart
from terrazzo.chips.cpu.llvm.expressions import ScalarCode, Scope, index_algebra
from terrazzo.chips.cpu.llvm.scalars import combine, from_memory, memory_type, to_memory
from terrazzo.chips.cpu.llvm.vector_loops import VectorLoop, widenable
from terrazzo.chips.spec import ChipSpec
from terrazzo.dtypes import int64
from terrazzo.errors import CodegenError
from terrazzo.index import (
    Index,
    IndexExpr,
    Var,
    bounds,
    free_vars,
    interpret,
)
from terrazzo.loop.digits import by_digits
from terrazzo.loop.ir import (
    THREADS,
    Alloc,
    Atomic,
    Block,
    Buffer,
    For,
    Function,
    If,
    Let,
    Pause,
    Stmt,
    Store,
    Tile,
    While,
    block,
    children,
    indices_of,
    roots_of,
    walk,
)

STACK_LIMIT = 32 * 1024  # bytes of one local buffer that may live on the stack
STATUS = "tz_status"  # a variable of the module: 1 after memory ran out
# Lines of one function, if there are statements to split it at: some of LLVM's passes take time
# that grows faster than a function. Kernels of 14,000 to 90,000 lines took it 20 to 35 % less time
# in parts.
LARGEST_FUNCTION = 2000
# So that uneven chunks balance out: a thread that is done takes over chunks of others. Sixteen
# threads of three chunks are a set of the pool, in which each thread keeps to its own first.
CHUNKS_PER_THREAD = 3
# Of short iterations, several chunks of a thread have so many grains each: taking one costs time.
GRAINS_OF_SEVERAL = 16


class LoopEmitter:
    """Writes the functions of one kernel into a module."""

    def __init__(self, module: Module, chip: ChipSpec, name: str):
        self.module, self.chip, self.name = module, chip, name
        self.b: Builder
        self.threads: Val
        self.in_parallel = False
        self.outlined = 0
        # Stores that bypass the caches: only where we know how to order them again.
        self.may_stream = chip.llvm_triple.startswith("x86_64")
        self.streamed = False
        self.planned: set[Var] = set()  # numbers that are computed, as parts for these threads
        self.roomy: set[Buffer] = set()  # local ones: a last vector may reach past their end

    # ------------------------------------------------------------ functions
    def function(self, function: Function) -> None:
        """Write `void name.main(pointers..., sizes..., i64 threads)`."""
        inner = f"{function.name}.main"
        slots = [(b.name, "ptr") for b in function.params] + [(d.name, "i64")
                                                              for d in function.dims]
        alone = {i for i, buffer in enumerate(function.params) if buffer.bounded}
        params = [("ptr noalias" if i in alone else ty, f"p{i}") for i, (_, ty) in
                  enumerate(slots)]
        outlined = isinstance(function.body, For) and function.body.kind in ("parallel", "program")
        self.b = Builder(self.module, inner, [*params, ("i64", "threads")], linkage="internal",
                         attrs=HANDS_ON if outlined else "nounwind noinline")
        if function.origin:
            self.b.comment(function.origin)
        values = self.b.params
        self.threads = values[-1]
        sizes = dict(zip(function.dims, values[len(function.params):], strict=False))
        scope = Scope({THREADS: self.threads, **sizes},
                      dict(zip(function.params, values, strict=False)))
        self.body(products_apart(function.body), scope)

    def body(self, stmt: Stmt, scope: Scope) -> None:
        """A function's body: its scratch memory, the statement, the end."""
        heap = self.reserve(stmt, scope)
        self.stmt(stmt, scope)
        for pointer in heap:
            self.b.call("void", "free", [pointer])
        self.settle()
        self.b.ret()

    def settle(self) -> None:
        """Make streaming stores visible before anybody hears that they are done."""
        if self.streamed:
            self.b.call("void", "llvm.x86.sse.sfence", [])
            self.streamed = False

    def reserve(self, stmt: Stmt, scope: Scope) -> list[Val]:
        """Local buffers are made once a function, not once an iteration, where sizes allow."""
        large: list[Buffer] = []
        for alloc in _allocs(stmt, stop_at_parallel=not self.in_parallel):
            buffer = alloc.buffer
            size = bounds(buffer.size)[1]
            if size is not None and size * buffer.dtype.itemsize <= STACK_LIMIT:
                elem, lanes = memory_type(buffer.dtype), self.chip.lanes(8 * buffer.dtype.itemsize)
                if size > 1:
                    size = -(-size // lanes) * lanes
                    self.roomy.add(buffer)
                scope.memory[buffer] = self.b.alloca(f"[{max(size, 1)} x {elem}]")
            elif free_vars(_upper(buffer.size)) <= scope.env.keys():
                large.append(buffer)
        return [self.allocate(large, scope)] if large else []

    def allocate(self, buffers: Sequence[Buffer], scope: Scope) -> Val:
        """Memory from the heap, one piece for all; when there is none, the function gives up and
        says so."""
        b = self.b
        starts = [const("i64", 0)]
        for buffer in buffers:
            count = self.index(_upper(buffer.size), scope)
            size = b.mul(b.add(count, 64), buffer.dtype.itemsize)
            starts.append(b.add(starts[-1], b.and_(b.add(size, 63), -64)))
        memory = b.call("ptr", "aligned_alloc", [const("i64", 64), starts[-1]])
        failed, fine = b.new_label("failed"), b.new_label("fine")
        b.cond_br(b.icmp("eq", b.cast("ptrtoint", memory, "i64"), 0), failed, fine)
        b.start_block(failed)
        b.store(const("i64", 1), self.module.global_(STATUS, "i64", "0", linkage=""), 8)
        b.ret()
        b.start_block(fine)
        for buffer, start in zip(buffers, starts, strict=False):
            scope.memory[buffer] = b.gep("i8", memory, start)
        return memory

    # ------------------------------------------------------------ statements
    def stmt(self, stmt: Stmt, scope: Scope) -> None:
        heap: list[Val] = []
        while isinstance(stmt, (Alloc, Let)):  # large kernels are thousands of them, nested
            if isinstance(stmt, Let):
                value = self.value(stmt.value, scope)
                value = scalars.cast(self.b, value, stmt.value.dtype, int64)
                scope = self.inside(scope, stmt.var, value)
                self.planned.add(stmt.var)
            elif stmt.buffer not in scope.memory:  # its size is known only here
                scope = Scope(scope.env, dict(scope.memory), scope.lanes)
                heap.append(self.allocate([stmt.buffer], scope))
            stmt = stmt.body
        self.bare(stmt, scope)
        for memory in reversed(heap):
            self.b.call("void", "free", [memory])

    def bare(self, stmt: Stmt, scope: Scope) -> None:
        """A statement that begins with no name and no buffer of its own."""
        if isinstance(stmt, Block):
            left = stmt.stmts
            while left:
                if self.in_parallel and scope.lanes is None and self.b.length > LARGEST_FUNCTION:
                    group = _for_one_function(left)
                    self.apart(block(*left[:group]), scope)
                else:
                    group = 1
                    self.stmt(left[0], scope)
                left = left[group:]
        elif isinstance(stmt, For):
            self.loop(stmt, scope)
        elif isinstance(stmt, If):
            condition = self.value(stmt.cond, scope)
            orelse = stmt.orelse
            self.b.if_(condition, lambda: self.stmt(stmt.then, scope),
                       None if orelse is None else lambda: self.stmt(orelse, scope))
        elif isinstance(stmt, Tile):
            self.tile(stmt, scope)
        elif isinstance(stmt, While):
            self.while_(stmt, scope)
        elif isinstance(stmt, Atomic):
            self.atomic(stmt, scope)
        elif isinstance(stmt, Pause):
            self.pause(stmt, scope)
        else:
            assert isinstance(stmt, Store)
            self.store(stmt, scope)

    def while_(self, loop: While, scope: Scope) -> None:
        b = self.b
        test, body, after = (b.new_label(name) for name in ("test", "again", "after"))
        b.br(test)
        b.start_block(test)
        b.cond_br(self.value(loop.cond, scope), body, after)
        b.start_block(body)
        self.stmt(loop.body, scope)
        b.br(test, "" if loop.hoist else f", !llvm.loop {self.module.loop_metadata(False)}")
        b.start_block(after)

    def atomic(self, stmt: Atomic, scope: Scope) -> None:
        dtype = stmt.buffer.dtype
        pointer = self.address(stmt.buffer, stmt.index, scope)
        bits = f"i{8 * dtype.itemsize}"
        value = to_memory(self.b, self.value(stmt.value, scope), dtype)
        if stmt.kind == "load":
            before = self.b.cast("bitcast", self.b.load(
                bits, pointer, dtype.itemsize, ordering="seq_cst"), value.ty)
        elif stmt.kind == "compare":
            assert stmt.expected is not None
            expected = to_memory(self.b, self.value(stmt.expected, scope), dtype)
            # Floats are compared by their bits.
            old, new = (self.b.cast("bitcast", v, bits) for v in (expected, value))
            found, _ = self.b.compare_exchange(pointer, old, new)
            before = self.b.cast("bitcast", found, value.ty)
        else:
            before = self.b.atomic_rmw(scalars.atomic_name(stmt.kind, dtype), pointer, value)
        if stmt.old is not None:
            place = self.address(stmt.old[0], stmt.old[1], scope)
            self.b.store(before, place, dtype.itemsize)

    def pause(self, stmt: Pause, scope: Scope) -> None:
        """The system's scheduler decides: there may be more threads than cores."""
        b = self.b
        b.call("i32", "sched_yield", [])
        if stmt.clock is not None:
            now = b.alloca("i64", 2)
            b.call("i32", "clock_gettime", [const("i32", time.CLOCK_MONOTONIC), now])
            seconds, rest = (b.load("i64", b.gep("i64", now, i), 8) for i in range(2))
            b.store(b.add(b.mul(seconds, 10**9), rest), self.address(*stmt.clock, scope), 8)

    def tile(self, tile: Tile, scope: Scope) -> None:
        from terrazzo.chips.cpu.llvm.tiles import template_of

        template = template_of(tile.intrinsic.name)
        if template is None or not template(self, tile, scope):
            self.stmt(tile.expand(), scope)

    def loop(self, loop: For, scope: Scope) -> None:
        lo, hi = self.index(loop.lo, scope), self.index(loop.hi, scope)
        if loop.kind in ("parallel", "program") and not self.in_parallel:
            self.parallel(loop, lo, hi, scope)
        elif loop.kind == "serial" and loop.hi - loop.lo == 1:  # a name for a number
            self.stmt(loop.body, self.inside(scope, loop.var, lo))
        elif loop.kind == "vector" and widenable(loop):
            VectorLoop(self, loop, scope).emit(lo, hi)
        elif loop.kind == "unrolled" and lo.literal is not None and hi.literal is not None:
            for i in range(lo.literal, hi.literal):
                self.stmt(loop.body, self.inside(scope, loop.var, const("i64", i)))
        else:
            self.b.loop(lo, hi, 1, lambda iv, _: self.stmt(
                loop.body, self.inside(scope, loop.var, iv)), hoist=loop.hoist)

    def inside(self, scope: Scope, var: Var, value: Val) -> Scope:
        return Scope({**scope.env, var: value}, scope.memory, scope.lanes)

    def apart(self, stmt: Stmt, scope: Scope) -> None:
        """Write a statement as a function of its own, and call it."""
        vars_, buffers = _used_vars(stmt), _used_buffers(stmt)
        env = {v: val for v, val in scope.env.items() if v in vars_}
        memory = {x: p for x, p in scope.memory.items() if x in buffers}
        self.outlined += 1
        name = f"{self.name}.part{self.outlined}"
        values = [*memory.values(), *env.values()]
        self.b.call("void", name, values)
        outer, self.b = self.b, self.builder(name, list(memory), values)
        given = self.b.params
        self.stmt(stmt, Scope(dict(zip(env, given[len(memory):], strict=True)),
                              dict(zip(memory, given, strict=False))))
        self.b.ret()
        self.b = outer

    def builder(self, name: str, buffers: Sequence[Buffer], values: Sequence[Val],
                more: Sequence[tuple[str, str]] = ()) -> Builder:
        """A function of some buffers and numbers of the one that is being written, and of more."""
        alone = {i for i, buffer in enumerate(buffers) if buffer.bounded}
        params = [("ptr noalias" if i in alone else v.ty, f"c{i}") for i, v in enumerate(values)]
        return Builder(self.module, name, [*params, *more], linkage="internal",
                       attrs="nounwind noinline")

    def parallel(self, loop: For, lo: Val, hi: Val, scope: Scope) -> None:
        """Outline the loop's body; the pool calls it with a number of a chunk of iterations."""
        b, module = self.b, self.module
        self.outlined += 1
        task = f"{self.name}.task{self.outlined}"
        vars_, used = _used_vars(loop), _used_buffers(loop.body)
        env = {v: val for v, val in scope.env.items() if v in vars_}
        buffers = {x: p for x, p in scope.memory.items() if x in used}
        chunks = self.chunks(b.smax(b.sub(hi, lo), 0), self.index(loop.grain, scope))
        captured = [*buffers.values(), *env.values(), lo, hi, chunks]
        context = b.alloca("i64", len(captured))
        for i, value in enumerate(captured):
            b.store(value, b.gep("i64", context, i), 8)
        outer = (self.b, self.threads, self.in_parallel)

        chunk = Builder(module, task, [("ptr", "context"), ("i64", "chunk")], linkage="internal",
                        attrs=HANDS_ON)
        loaded = [chunk.load(v.ty, chunk.gep("i64", chunk.params[0], i), 8)
                  for i, v in enumerate(captured)]
        first, last, parts = loaded[-3:]
        # Chunks of all sizes in between: no thread's share is more than one iteration larger.
        count, number = chunk.sub(last, first), chunk.params[1]
        begin, end = (chunk.add(first, chunk.sdiv(chunk.mul(count, n), parts))
                      for n in (number, chunk.add(number, 1)))
        chunk.call("void", f"{task}.body", [*loaded[:-3], begin, end])
        chunk.ret()

        self.b = self.builder(f"{task}.body", list(buffers), captured[:-3],
                              [("i64", "begin"), ("i64", "end")])
        self.in_parallel, self.threads = True, const("i64", 1)
        values = self.b.params
        inner = Scope(dict(zip(env, values[len(buffers):], strict=False)),
                      dict(zip(buffers, values, strict=False)))
        heap = self.reserve(loop.body, inner)
        chunk_lo, chunk_hi = Var("begin", 0), Var("end", 0)
        inner.env.update({chunk_lo: values[-2], chunk_hi: values[-1]})
        self.stmt(by_digits(For(loop.var, chunk_lo, chunk_hi, loop.body),
                            env.keys() - self.planned), inner)
        for pointer in heap:
            self.b.call("void", "free", [pointer])
        self.settle()
        self.b.ret()
        self.b, self.threads, self.in_parallel = outer
        if chunks.literal == 1:
            self.b.call("void", task, [context, const("i64", 0)])
        else:
            self.b.call("void", "tz_parallel_for", [Val("ptr", (f"@{task}",)), context, chunks,
                                                    self.threads])

    def chunks(self, count: Val, grain: Val) -> Val:
        """How many chunks iterations make: of at least `grain` each, the same number a thread.

        Where there is less work than that for all threads, fewer threads get one chunk each.
        """
        b = self.b
        wanted = b.sdiv(b.add(count, b.sub(grain, 1)), b.smax(grain, 1))
        # Iterations that are worth a chunk each may be long ones.
        enough = b.select(b.icmp("sgt", grain, 1), const("i64", GRAINS_OF_SEVERAL),
                          const("i64", 1))
        several = b.sdiv(wanted, b.smax(b.mul(self.threads, enough), 1))
        each = b.smax(b.smin(several, CHUNKS_PER_THREAD), 1)
        shared = b.smin(wanted, b.mul(self.threads, each))
        return b.select(b.icmp("sle", self.threads, 1), const("i64", 1), b.smax(shared, 1))

    # ------------------------------------------------------------ indices
    def index(self, index: Index, scope: Scope) -> Val:
        """An index expression as an i64."""
        if not isinstance(index, IndexExpr):
            return const("i64", index)
        return interpret(index, index_algebra(self.b, index, lambda v: self.variable(v, scope)))

    def variable(self, var: Var, scope: Scope) -> Val:
        try:
            return scope.env[var]
        except KeyError:
            raise CodegenError(f"{var} is used outside its loop in {self.name}",
                               hint="this is a bug in lowering") from None

    # ------------------------------------------------------------ scalar code
    def value(self, root: Scalar, scope: Scope, guard: Val | None = None) -> Val:
        """A scalar expression, outside vector loops."""
        return ScalarCode(self, scope).emit(root, guard)

    def store(self, stmt: Store, scope: Scope) -> None:
        if stmt.mask is not None:
            bare = replace(stmt, mask=None)
            self.b.if_(self.value(stmt.mask, scope), lambda: self.store(bare, scope))
            return
        value = self.value(stmt.value, scope)
        pointer = self.address(stmt.buffer, stmt.index, scope)
        dtype = stmt.buffer.dtype
        align = dtype.itemsize
        elem = memory_type(dtype)
        if stmt.reduce is not None:
            old = from_memory(self.b, self.b.load(elem, pointer, align), dtype)
            value = combine(self.b, stmt.reduce, old, value, dtype)
        self.b.store(to_memory(self.b, value, dtype), pointer, align)

    def address(self, buffer: Buffer, index: Index | Scalar, scope: Scope) -> Val:
        place = (ScalarCode(self, scope).computed_place(index) if isinstance(index, Scalar)
                 else self.index(index, scope))
        return self.b.gep(memory_type(buffer.dtype), scope.memory[buffer], place)


def _allocs(stmt: Stmt, stop_at_parallel: bool) -> list[Alloc]:
    found = []
    todo = [stmt]
    while todo:
        node = todo.pop()
        if isinstance(node, Alloc):
            found.append(node)
        if stop_at_parallel and isinstance(node, For) and node.kind in ("parallel", "program"):
            continue
        todo += [node.expand()] if isinstance(node, Tile) else reversed(children(node))
    return found


def _for_one_function(stmts: Sequence[Stmt]) -> int:
    """How many statements, from the first on, make a function of about the largest size."""
    room = LARGEST_FUNCTION
    for number, stmt in enumerate(stmts):
        for inner in walk(stmt):
            room -= 10  # a loop's head and end, and four vectors a turn, as a rule
            for root in roots_of(inner):
                room -= 2 * sum(1 for _ in walk_scalar(root)) if isinstance(root, Scalar) else 2
            if room < 0:
                return max(number, 1)
    return len(stmts)


def _upper(size: Index) -> Index:
    """A size that holds for every iteration: loop variables at their bounds."""
    top = bounds(size)[1]
    return size if top is None else top


def _used_vars(body: Stmt) -> set[Var]:
    return {var for stmt in walk(body) for index in indices_of(stmt) for var in free_vars(index)}


def _used_buffers(body: Stmt) -> set[Buffer]:
    used: set[Buffer] = set()
    for stmt in walk(body):
        if isinstance(stmt, Store):
            used.add(stmt.buffer)
        elif isinstance(stmt, Atomic):
            used |= {stmt.buffer} if stmt.old is None else {stmt.buffer, stmt.old[0]}
        elif isinstance(stmt, Pause) and stmt.clock is not None:
            used.add(stmt.clock[0])
        elif isinstance(stmt, Tile):
            used |= {buffer for buffer, _ in stmt.places}
        for root in roots_of(stmt):
            if isinstance(root, Scalar):
                used |= {n.source for n in walk_scalar(root) if isinstance(n, Load)}
    return used


