"""Writes Loop IR as LLVM code: widens vector loops, unrolls, hands parallel loops to the pool.

A vector loop is widened here and nowhere above: its variable becomes `base + lane`, and what an
address does with that variable decides between one scalar load, a vector load and a gather.
Several vectors run side by side as one bundle (see builder.py), and a last masked iteration takes
what does not fill a vector.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from terrazzo.chips.spec import ChipSpec
from terrazzo.codegen.llvm import scalars
from terrazzo.codegen.llvm.builder import Builder, Module, Val, bundle, const, vec
from terrazzo.codegen.llvm.scalars import (
    combine,
    from_memory,
    horizontal,
    memory_type,
    register_type,
    to_memory,
)
from terrazzo.dtypes import int64
from terrazzo.errors import CodegenError
from terrazzo.index import (
    Algebra,
    Index,
    IndexExpr,
    Var,
    bounds,
    coefficient,
    free_vars,
    interpret,
    proves_le,
    proves_lt,
    substitute,
)
from terrazzo.loop.ir import (
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
    children,
    walk,
)
from terrazzo.scalar import (
    OPS,
    REDUCTIONS,
    Call,
    Const,
    FromIndex,
    Load,
    Scalar,
    Undefined,
)
from terrazzo.scalar import children as scalar_children
from terrazzo.scalar import walk as walk_scalar

STACK_LIMIT = 32 * 1024  # bytes of one local buffer that may live on the stack
STATUS = "tz_status"  # a variable of the module: 1 after memory ran out
CHUNKS_PER_THREAD = 4  # so that uneven chunks balance out; measured on the pool


@dataclass
class Lanes:
    """The widened variable of a vector loop: part u, lane l holds base + u * width + l."""

    var: Var
    base: Val
    width: int
    count: int
    mask: Val | None = None
    iota: Val | None = None  # the variable's values as a vector, made when first needed
    aligned: Store | None = None  # the streaming store whose vectors lie on their boundaries
    bypass: Val | None = None  # whether it does go past the caches; None: it does
    alone: bool = False  # only the first lane is alive


@dataclass
class Scope:
    """What code at one place can see: variables, buffers, values known before the loop."""

    env: dict[Var, Val]
    memory: dict[Buffer, Val]
    lanes: Lanes | None = None
    known: dict[int, Val] = field(default_factory=dict)  # by id of the scalar node
    stored: dict[tuple[Buffer, Index], Val] = field(default_factory=dict)


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

    # ------------------------------------------------------------ functions
    def function(self, function: Function) -> None:
        """Write `void name.main(pointers..., sizes..., i64 threads)`."""
        inner = f"{function.name}.main"
        slots = [(b.name, "ptr") for b in function.params] + [(d.name, "i64")
                                                              for d in function.dims]
        alone = {i for i, buffer in enumerate(function.params) if buffer.bounded}
        params = [("ptr noalias" if i in alone else ty, f"p{i}") for i, (_, ty) in
                  enumerate(slots)]
        self.b = Builder(self.module, inner, [*params, ("i64", "threads")], linkage="internal",
                         attrs="nounwind noinline")
        if function.origin:
            self.b.comment(function.origin)
        values = self.b.params
        self.threads = values[-1]
        scope = Scope(dict(zip(function.dims, values[len(function.params):], strict=False)),
                      dict(zip(function.params, values, strict=False)))
        self.body(function.body, scope)

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
        heap: list[Val] = []
        for alloc in _allocs(stmt, stop_at_parallel=not self.in_parallel):
            buffer = alloc.buffer
            size = bounds(buffer.size)[1]
            if size is not None and size * buffer.dtype.itemsize <= STACK_LIMIT:
                elem = memory_type(buffer.dtype)
                scope.memory[buffer] = self.b.alloca(f"[{max(size, 1)} x {elem}]")
            elif free_vars(_upper(buffer.size)) <= scope.env.keys():
                scope.memory[buffer] = self.allocate(buffer, scope, heap)
                heap.append(scope.memory[buffer])
        return heap

    def allocate(self, buffer: Buffer, scope: Scope, held: Sequence[Val]) -> Val:
        """Memory from the heap; when there is none, the function gives up and says so."""
        b = self.b
        count = self.index(_upper(buffer.size), scope)
        total = b.mul(b.add(count, 64), buffer.dtype.itemsize)
        pointer = b.call("ptr", "aligned_alloc", [const("i64", 64), b.and_(b.add(total, 63), -64)])
        failed, fine = b.new_label("failed"), b.new_label("fine")
        b.cond_br(b.icmp("eq", b.cast("ptrtoint", pointer, "i64"), 0), failed, fine)
        b.start_block(failed)
        for other in held:
            b.call("void", "free", [other])
        b.store(const("i64", 1), self.module.global_(STATUS, "i64", "0", linkage=""), 8)
        b.ret()
        b.start_block(fine)
        return pointer

    # ------------------------------------------------------------ statements
    def stmt(self, stmt: Stmt, scope: Scope) -> None:
        if isinstance(stmt, Block):
            for inner in stmt.stmts:
                self.stmt(inner, scope)
        elif isinstance(stmt, For):
            self.loop(stmt, scope)
        elif isinstance(stmt, If):
            condition = self.value(stmt.cond, scope)
            orelse = stmt.orelse
            self.b.if_(condition, lambda: self.stmt(stmt.then, scope),
                       None if orelse is None else lambda: self.stmt(orelse, scope))
        elif isinstance(stmt, Alloc):
            if stmt.buffer in scope.memory:
                self.stmt(stmt.body, scope)
            else:  # its size is known only here
                pointer = self.allocate(stmt.buffer, scope, ())
                memory = {**scope.memory, stmt.buffer: pointer}
                self.stmt(stmt.body, Scope(scope.env, memory, scope.lanes))
                self.b.call("void", "free", [pointer])
        elif isinstance(stmt, Tile):
            self.tile(stmt, scope)
        elif isinstance(stmt, Let):
            value = scalars.cast(self.b, self.value(stmt.value, scope), stmt.value.dtype, int64)
            self.stmt(stmt.body, self.inside(scope, stmt.var, value))
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
        from terrazzo.codegen.llvm.tiles import TEMPLATES

        template = TEMPLATES.get(tile.intrinsic.name)
        if template is None or not template(self, tile, scope):
            self.stmt(tile.expand(), scope)

    def loop(self, loop: For, scope: Scope) -> None:
        lo, hi = self.index(loop.lo, scope), self.index(loop.hi, scope)
        if loop.kind in ("parallel", "program") and not self.in_parallel:
            self.parallel(loop, lo, hi, scope)
        elif loop.kind == "vector" and _widenable(loop):
            VectorLoop(self, loop, scope).emit(lo, hi)
        elif loop.kind == "unrolled" and lo.literal is not None and hi.literal is not None:
            for i in range(lo.literal, hi.literal):
                self.stmt(loop.body, self.inside(scope, loop.var, const("i64", i)))
        else:
            self.b.loop(lo, hi, 1, lambda iv, _: self.stmt(
                loop.body, self.inside(scope, loop.var, iv)), hoist=loop.hoist)

    def inside(self, scope: Scope, var: Var, value: Val) -> Scope:
        return Scope({**scope.env, var: value}, scope.memory, scope.lanes)

    def parallel(self, loop: For, lo: Val, hi: Val, scope: Scope) -> None:
        """Outline the loop's body; the pool calls it with a number of a chunk of iterations."""
        b, module = self.b, self.module
        self.outlined += 1
        task = f"{self.name}.task{self.outlined}"
        needed = _used_vars(loop)
        env = {v: val for v, val in scope.env.items() if v in needed}
        buffers = {x: p for x, p in scope.memory.items() if x in _used_buffers(loop.body)}
        # Chunks: at least `grain` iterations each, at most a few a thread.
        count = b.sub(hi, lo)
        grain = self.index(loop.grain, scope)
        wanted = b.sdiv(b.add(count, b.sub(grain, 1)), b.smax(grain, 1))
        chunks = b.smax(b.smin(wanted, b.mul(self.threads, CHUNKS_PER_THREAD)), 1)
        chunks = b.select(b.icmp("sle", self.threads, 1), const("i64", 1), chunks)
        per = b.sdiv(b.add(count, b.sub(chunks, 1)), chunks)
        captured = [*buffers.values(), *env.values(), lo, hi, per]
        context = b.alloca("i64", len(captured))
        for i, value in enumerate(captured):
            b.store(value, b.gep("i64", context, i), 8)
        outer = (self.b, self.threads, self.in_parallel)

        chunk = Builder(module, task, [("ptr", "context"), ("i64", "chunk")], linkage="internal")
        loaded = [chunk.load(v.ty, chunk.gep("i64", chunk.params[0], i), 8)
                  for i, v in enumerate(captured)]
        first, last, step = loaded[-3:]
        begin = chunk.add(first, chunk.mul(chunk.params[1], step))
        end = chunk.smin(chunk.add(begin, step), last)
        chunk.call("void", f"{task}.body", [*loaded[:-3], begin, end])
        chunk.ret()

        alone = {i for i, buffer in enumerate(buffers) if buffer.bounded}
        params = [("ptr noalias" if i in alone else v.ty, f"c{i}")
                  for i, v in enumerate(captured[:-3])]
        self.b = Builder(module, f"{task}.body", [*params, ("i64", "begin"), ("i64", "end")],
                         linkage="internal", attrs="nounwind noinline")
        self.in_parallel, self.threads = True, const("i64", 1)
        values = self.b.params
        inner = Scope(dict(zip(env, values[len(buffers):], strict=False)),
                      dict(zip(buffers, values, strict=False)))
        heap = self.reserve(loop.body, inner)
        self.b.loop(values[-2], values[-1], 1, lambda iv, _: self.stmt(
            loop.body, self.inside(inner, loop.var, iv)))
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

    # ------------------------------------------------------------ indices
    def index(self, index: Index, scope: Scope) -> Val:
        """An index expression as an i64."""
        if not isinstance(index, IndexExpr):
            return const("i64", index)
        return interpret(index, _index_algebra(self.b, index, lambda v: self.variable(v, scope)))

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
        place = (self.value(index, scope) if isinstance(index, Scalar)
                 else self.index(index, scope))
        return self.b.gep(memory_type(buffer.dtype), scope.memory[buffer], place)


def _index_algebra(b: Builder, whole: Index, variable: Callable[[Var], Val]) -> Algebra[Val]:
    nonnegative = bounds(whole)[0] is not None and _all_nonnegative(whole)

    def lift(x: Val, y: Val) -> tuple[Val, Val]:
        if x.lanes == y.lanes:
            return x, y
        return (b.splat(x, y.lanes), y) if x.lanes == 1 else (x, b.splat(y, x.lanes))

    def floordiv(x: Val, y: Val) -> Val:
        x, y = lift(x, y)
        if nonnegative:
            return b.udiv(x, y)
        quotient = b.sdiv(x, y)
        rest = b.sub(x, b.mul(quotient, y))
        return b.select(b.icmp("slt", rest, 0), b.sub(quotient, 1), quotient)

    def mod(x: Val, y: Val) -> Val:
        x, y = lift(x, y)
        if nonnegative:
            return b.urem(x, y)
        rest = b.srem(x, y)
        return b.select(b.icmp("slt", rest, 0), b.add(rest, y), rest)

    return Algebra[Val](
        constant=lambda n: const("i64", n),
        variable=variable,
        add=lambda x, y: b.add(*lift(x, y)),
        multiply=lambda x, y: b.mul(*lift(x, y)),
        floordiv=floordiv,
        mod=mod,
        minimum=lambda x, y: b.smin(*lift(x, y)),
        maximum=lambda x, y: b.smax(*lift(x, y)),
    )


def _all_nonnegative(index: Index) -> bool:
    """Whether every numerator in the expression is provably not negative."""
    from terrazzo.index import FloorDiv, Max, Min, Mod, Sum

    if not isinstance(index, IndexExpr) or isinstance(index, Var):
        return True
    if isinstance(index, (FloorDiv, Mod)):
        return proves_le(0, index.num) and _all_nonnegative(index.num)
    if isinstance(index, (Min, Max)):
        return all(_all_nonnegative(a) for a in index.args)
    assert isinstance(index, Sum)
    return all(_all_nonnegative(atom) for monomial, _ in index.terms for atom in monomial)


def _allocs(stmt: Stmt, stop_at_parallel: bool) -> list[Alloc]:
    found = []
    if isinstance(stmt, Alloc):
        found.append(stmt)
    if stop_at_parallel and isinstance(stmt, For) and stmt.kind in ("parallel", "program"):
        return found
    for child in children(stmt):
        found += _allocs(child, stop_at_parallel)
    if isinstance(stmt, Tile):
        found += _allocs(stmt.expand(), stop_at_parallel)
    return found


def _upper(size: Index) -> Index:
    """A size that holds for every iteration: loop variables at their bounds."""
    top = bounds(size)[1]
    return size if top is None else top


def _used_vars(loop: For) -> set[Var]:
    used: set[Var] = set(free_vars(loop.lo)) | free_vars(loop.hi) | free_vars(loop.grain)
    for stmt in walk(loop.body):
        if isinstance(stmt, For):
            used |= free_vars(stmt.lo) | free_vars(stmt.hi) | free_vars(stmt.grain)
        elif isinstance(stmt, Alloc):
            used |= free_vars(stmt.buffer.size)
        elif isinstance(stmt, Tile):
            for _, offset in stmt.places:
                used |= free_vars(offset)
            for size in stmt.sizes:
                used |= free_vars(size)
        for root in _roots(stmt):
            if not isinstance(root, Scalar):
                used |= free_vars(root)
                continue
            for node in walk_scalar(root):
                if isinstance(node, FromIndex):
                    used |= free_vars(node.index)
                elif isinstance(node, Load) and not isinstance(node.indices[0], Scalar):
                    used |= free_vars(node.indices[0])
    return used


def _roots(stmt: Stmt) -> list[Index | Scalar]:
    if isinstance(stmt, Store):
        return [stmt.index, stmt.value, *([] if stmt.mask is None else [stmt.mask]),
                *([stmt.streaming] if isinstance(stmt.streaming, Scalar) else [])]
    if isinstance(stmt, Let):
        return [stmt.value]
    if isinstance(stmt, Atomic):
        return [stmt.index, stmt.value, *([] if stmt.expected is None else [stmt.expected]),
                *([] if stmt.old is None else [stmt.old[1]])]
    if isinstance(stmt, Pause):
        return [] if stmt.clock is None else [stmt.clock[1]]
    return [stmt.cond] if isinstance(stmt, (If, While)) else []


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
        for root in _roots(stmt):
            if isinstance(root, Scalar):
                used |= {n.source for n in walk_scalar(root) if isinstance(n, Load)}
    return used


# ---------------------------------------------------------------- expressions
class ScalarCode:
    """Emits scalar expressions at one place, each shared node once."""

    def __init__(self, emitter: LoopEmitter, scope: Scope):
        self.e, self.scope, self.b = emitter, scope, emitter.b
        self.memo: dict[tuple[int, Val | None], Val] = {}
        self.numbered: dict[tuple[object, ...], Val] = {}  # local value numbering
        self.unsafe: set[int] = set()
        self.certain: set[int] = set()
        self.outer: Val | None = None

    def emit(self, root: Scalar, guard: Val | None = None) -> Val:
        """The value of an expression; with a guard, loads happen only where it holds."""
        for node in walk_scalar(root):
            outside = isinstance(node, Load) and not self.in_bounds(node)
            if outside or any(id(c) in self.unsafe for c in scalar_children(node)):
                self.unsafe.add(id(node))
        self.certain, self.outer = self.evaluated_anyway(root), guard
        return self.visit(root, guard)

    def evaluated_anyway(self, root: Scalar) -> set[int]:
        """Unsafe nodes whose value is needed whatever the conditions are.

        They need no guard of their own, so all their users share one load.
        """
        guarded = [n for n in walk_scalar(root) if id(n) in self.unsafe and (
            isinstance(n, Load) or (isinstance(n, Call) and n.op == "where"))]
        bit = {id(n): 1 << i for i, n in enumerate(guarded)}
        needs: dict[int, int] = {}
        for node in walk_scalar(root):
            below = [needs[id(c)] for c in scalar_children(node)]
            if isinstance(node, Call) and node.op == "where":
                below = [below[0], below[1] & below[2]]
            needs[id(node)] = bit.get(id(node), 0)
            for mask in below:
                needs[id(node)] |= mask
        return {id(n) for n in guarded if needs[id(root)] & bit[id(n)]}

    def in_bounds(self, load: Load) -> bool:
        index = load.indices[0]
        if isinstance(index, Scalar):
            return bool(load.source.bounded)  # clipped by the operator, unless there is no size
        return proves_le(0, index) and proves_lt(index, load.source.size)

    def visit(self, node: Scalar, guard: Val | None) -> Val:
        known = self.scope.known.get(id(node))
        if known is not None:
            return known
        if id(node) not in self.unsafe:
            guard = None
        elif id(node) in self.certain:
            guard = self.outer
        key = (id(node), guard)
        if key not in self.memo:
            self.memo[key] = self.compute(node, guard)
        return self.memo[key]

    def compute(self, node: Scalar, guard: Val | None) -> Val:
        if isinstance(node, Const):
            return scalars.constant(node.dtype, node.value)
        if isinstance(node, Undefined):
            return self.b.undefined(register_type(node.dtype))
        if isinstance(node, FromIndex):
            value = self.index_value(node.index)
            elem = register_type(node.dtype)
            return value if elem == "i64" else scalars.cast(self.b, value, int64, node.dtype)
        if isinstance(node, Load):
            place = node.indices[0]
            key: tuple[object, ...] = (node.source, id(place) if isinstance(place, Scalar)
                                       else place, guard)
            if key not in self.numbered:
                self.numbered[key] = self.load(node, guard)
            return self.numbered[key]
        assert isinstance(node, Call), type(node)
        if node.op == "where":
            return self.where(node, guard)
        args = tuple(self.visit(a, guard) for a in node.args)
        key = (node.op, node.dtype, node.args[0].dtype, args)
        if key not in self.numbered:
            self.numbered[key] = self.operation(node, self.spread(args))
        return self.numbered[key]

    def operation(self, node: Call, args: Sequence[Val]) -> Val:
        source = node.args[0].dtype
        if node.op == "cast":
            return scalars.cast(self.b, args[0], source, node.dtype)
        if node.op == "bitcast":
            return self.b.cast("bitcast", args[0], register_type(node.dtype))
        return scalars.emit(self.b, node.op, args, source)

    def forget(self, buffer: Buffer) -> None:
        """After a store: what was loaded from the buffer may have changed."""
        self.numbered = {k: v for k, v in self.numbered.items() if k[0] is not buffer}

    def where(self, node: Call, guard: Val | None) -> Val:
        condition = self.visit(node.args[0], guard)
        yes, no = node.args[1], node.args[2]
        then_guard = else_guard = guard
        if id(yes) in self.unsafe:
            then_guard = self.both(guard, condition)
        if id(no) in self.unsafe:
            inverse = self.b.xor(condition, const(condition.ty, True))
            else_guard = self.both(guard, inverse)
        values = [condition, self.visit(yes, then_guard), self.visit(no, else_guard)]
        condition, a, b = self.spread(values)
        return self.b.select(condition, a, b)

    def both(self, a: Val | None, b: Val) -> Val:
        if a is None:
            return b
        x, y = self.spread([a, b])
        return self.b.and_(x, y)

    def spread(self, args: Sequence[Val]) -> list[Val]:
        """Bring operands to the same number of lanes."""
        lanes = max(a.lanes for a in args)
        return [a if a.lanes == lanes else self.b.splat(a, lanes) for a in args]

    def index_value(self, index: Index) -> Val:
        return self.e.index(index, self.scope)

    def load(self, node: Load, guard: Val | None) -> Val:
        dtype = node.source.dtype
        elem = memory_type(dtype)

        # The address is made outside the branch: what it is made of may be used again later.
        pointer = self.b.gep(elem, self.scope.memory[node.source], self.place(node))

        def read() -> list[Val]:
            return [self.b.load(elem, pointer, dtype.itemsize)]

        value = (read() if guard is None else
                 self.b.if_values(guard, read, lambda: [const(elem, 0)]))[0]
        return from_memory(self.b, value, dtype)

    def place(self, node: Load) -> Val:
        index = node.indices[0]
        return self.visit(index, None) if isinstance(index, Scalar) else self.index_value(index)


# ---------------------------------------------------------------- vector loops
def _widenable(loop: For) -> bool:
    """Whether the body is plain stores whose reductions have an order we may choose."""
    stmts = loop.body.stmts if isinstance(loop.body, Block) else (loop.body,)
    for stmt in stmts:
        if not isinstance(stmt, Store):
            return False
        if isinstance(stmt.index, Scalar):
            if stmt.reduce is not None:
                return False
            continue
        step = coefficient(stmt.index, loop.var)
        if stmt.reduce is not None and step is None:
            return False
        if stmt.reduce is None and (step is None or step == 0):
            return False
    return True


class VectorLoop:
    """One vector loop being written."""

    def __init__(self, emitter: LoopEmitter, loop: For, scope: Scope):
        # A scope of its own: what is known before this loop need not be known beside it.
        self.e, self.loop, self.scope = emitter, loop, replace(scope)
        self.b = emitter.b
        self.stmts: list[Store] = [s for s in (
            loop.body.stmts if isinstance(loop.body, Block) else (loop.body,))
            if isinstance(s, Store)]
        self.written = {s.buffer for s in self.stmts}
        self.reductions = [s for s in self.stmts if self.reduces(s)]
        self.numbers = {id(s): n for s in self.reductions if (
            n := _extremum_of_numbers(s)) is not None}

    def reduces(self, stmt: Store) -> bool:
        return stmt.reduce is not None and not isinstance(stmt.index, Scalar) and (
            coefficient(stmt.index, self.loop.var) == 0)

    def combining(self, stmt: Store) -> str:
        """How a reduction's values are combined."""
        return (stmt.reduce or "") + " of numbers" * (id(stmt) in self.numbers)

    # ------------------------------------------------------------ shape of the code
    def width(self, trip: int | None) -> int:
        """Lanes: what fits a register of the widest type in play, no more than the trip count."""
        bits = 8
        for stmt in self.stmts:
            bits = max(bits, stmt.buffer.dtype.compute.bits)
            for node in walk_scalar(stmt.value):
                if isinstance(node, (Load, Call)) and not node.dtype.is_bool:
                    bits = max(bits, node.dtype.compute.bits)
        width = max(1, self.e.chip.vector_bits // max(bits, 8))
        while trip is not None and width > 1 and width // 2 >= max(trip, 1):
            width //= 2
        return width

    def depth(self, width: int, trip: int | None) -> int:
        """Vectors side by side: enough to hide latency, few enough to stay in registers."""
        nodes = [n for s in self.stmts for n in walk_scalar(s.value)]
        if any(_looks_up_narrow(n) for n in nodes):
            return 1
        price = sum(OPS[n.op].cost for n in nodes if isinstance(n, Call) and n.op != "cast")
        registers = self.e.chip.vector_registers
        depth = 4 if price <= 12 and registers >= 16 else 2
        if price <= 60 and registers >= 32:
            depth = 4
        if self.reductions and price <= 4:
            depth = 8 if registers >= 32 and len(self.reductions) == 1 else 4
        if trip is not None:
            whole = max(trip // width, 1)
            # A short loop of known length becomes straight code.
            if whole <= 8 and price * whole <= 64:
                return whole
            while depth > whole:
                depth //= 2
        return max(depth, 1)

    def emit(self, lo: Val, hi: Val) -> None:
        trip = _static_trip(lo, hi)
        if trip is None and self.reductions:
            # Sums that add nothing, as of what a mask left over, cost nothing.
            self.b.if_(self.b.icmp("slt", lo, hi), lambda: self.widen(lo, hi, None))
        elif trip != 0:
            self.widen(lo, hi, trip)

    def widen(self, lo: Val, hi: Val, trip: int | None) -> None:
        """Whole vectors side by side, then what is left."""
        width = self.width(trip)
        depth = self.depth(width, trip)
        # A loop of a few vectors at most is all tail, which is half the code.
        most = bounds(self.loop.hi - self.loop.lo)[1]
        short = trip is None and most is not None and most <= width * depth
        if short:
            depth = 1
        self.hoist(certain=trip is not None)
        accumulators = [Val(vec(register_type(s.buffer.dtype), width),
                            (scalars.constant(s.buffer.dtype, REDUCTIONS[s.reduce or "add"]
                                              .identity(s.buffer.dtype), width).text,) * depth)
                        for s in self.reductions]
        step = width * depth
        streaming = self.streaming(width) if not short and (
            trip is None or trip >= 16 * width) else None
        bypass = None
        if streaming is not None and isinstance(streaming.streaming, Scalar):
            bypass = self.b.and_(self.e.value(streaming.streaming, self.scope),
                                 self.b.icmp("eq", self.misaligned(streaming, lo, width), 0))
            self.e.streamed = True
        elif streaming is not None:
            lo, trip = self.peel(streaming, lo, hi, width), None
        count = self.b.sub(hi, lo)
        whole = self.b.mul(self.b.sdiv(count, step), step)
        middle = lo if short else self.b.add(lo, whole)
        if not short:
            accumulators = self.b.loop(lo, middle, step, lambda iv, acc: self.iteration(
                Lanes(self.loop.var, iv, width, depth, aligned=streaming, bypass=bypass), acc),
                accumulators)
        partial = [scalars.fold(self.b, self.combining(s), a, s.buffer.dtype)
                   for s, a in zip(self.reductions, accumulators, strict=True)]
        if trip is None or trip % step:
            partial = self.tail(middle, hi, width, trip, partial)
        for stmt, value in zip(self.reductions, partial, strict=True):
            self.finish(stmt, value)

    def streaming(self, width: int) -> Store | None:
        """A store that bypasses the caches, if this loop has one."""
        if width == 1 or not self.e.may_stream:
            return None
        for stmt in self.stmts:
            if self.reductions and stmt.streaming is True:
                continue  # iterations before the first boundary would need sums of their own
            # Part of a line alone is worse than the cache: the memory takes whole lines only.
            whole = 8 * width * stmt.buffer.dtype.itemsize == self.e.chip.vector_bits
            if stmt.streaming is not False and whole and stmt.reduce is None and (
                    not isinstance(stmt.index, Scalar)
                    and coefficient(stmt.index, self.loop.var) == 1):
                return stmt
        return None

    def peel(self, stmt: Store, lo: Val, hi: Val, width: int) -> Val:
        """Do the iterations before the first address that a streaming store may begin at."""
        b, size = self.b, stmt.buffer.dtype.itemsize
        rest = self.misaligned(stmt, lo, width)
        first = b.smin(b.add(lo, b.udiv(rest, size)), hi)
        b.if_(b.icmp("slt", lo, first), lambda: self.tail(lo, first, width, None, []))
        self.e.streamed = True
        return first

    def misaligned(self, stmt: Store, lo: Val, width: int) -> Val:
        """How many bytes are missing to the next boundary of a vector where a store begins."""
        b = self.b
        assert not isinstance(stmt.index, Scalar)
        at = b.add(self.e.index(substitute(stmt.index, {self.loop.var: 0}), self.scope), lo)
        address = b.cast("ptrtoint", b.gep(memory_type(stmt.buffer.dtype),
                                           self.scope.memory[stmt.buffer], at), "i64")
        return b.and_(b.sub(const("i64", 0), address), width * stmt.buffer.dtype.itemsize - 1)

    def tail(self, middle: Val, hi: Val, width: int, trip: int | None,
             partial: list[Val]) -> list[Val]:
        """What is left, one vector at a time, the last one masked."""
        if width == 1:
            return self.b.loop(middle, hi, 1, lambda iv, acc: self.iteration(
                Lanes(self.loop.var, iv, 1, 1), acc), partial)
        iota = self.b.iota(vec("i64", width))

        def masked(iv: Val, acc: list[Val]) -> Sequence[Val]:
            left = self.b.sub(hi, iv)
            mask = self.b.icmp("ult", iota, self.b.splat(left, width))
            return self.iteration(Lanes(self.loop.var, iv, width, 1, mask,
                                        alone=left.literal == 1), acc)

        if trip is not None and trip % width == 0:
            return self.b.loop(middle, hi, width, lambda iv, acc: self.iteration(
                Lanes(self.loop.var, iv, width, 1), acc), partial)
        return self.b.loop(middle, hi, width, masked, partial)

    def hoist(self, certain: bool) -> None:
        """Evaluate what does not change in the loop before it; bare addresses are read early only
        if the loop is certain to run."""
        code = ScalarCode(self.e, self.scope)
        known = dict(self.scope.known)
        for stmt in self.stmts:
            varying: set[int] = set()
            nodes = list(walk_scalar(stmt.value))
            guarded = _under_where(stmt.value, code)
            for node in nodes:
                early = certain or not isinstance(node, Load) or node.source.bounded
                if self.varies(node) or not early or any(
                        id(c) in varying for c in scalar_children(node)):
                    varying.add(id(node))
            for node in nodes:
                if (id(node) not in varying and id(node) not in known
                        and id(node) not in guarded and isinstance(node, (Call, Load))):
                    known[id(node)] = code.emit(node)
                    self.scope.known = known
        self.known = known

    def varies(self, node: Scalar) -> bool:
        if isinstance(node, FromIndex):
            return self.loop.var in free_vars(node.index)
        if isinstance(node, Load):
            if node.source in self.written:
                return True
            index = node.indices[0]
            return not isinstance(index, Scalar) and self.loop.var in free_vars(index)
        return False

    # ------------------------------------------------------------ one iteration
    def iteration(self, lanes: Lanes, accumulators: list[Val]) -> list[Val]:
        scope = Scope(self.scope.env, self.scope.memory, lanes, self.known)
        code = VectorCode(self.e, scope)
        state = dict(zip(map(id, self.reductions), accumulators, strict=True))
        for stmt in self.stmts:
            number = self.numbers.get(id(stmt))
            value = self.widened(code.emit(
                stmt.value if number is None else number, lanes.mask), lanes)
            if id(stmt) in state:
                fresh = combine(self.b, self.combining(stmt), state[id(stmt)], value,
                                stmt.buffer.dtype)
                if lanes.mask is not None:
                    fresh = self.b.select(lanes.mask, fresh, state[id(stmt)])
                state[id(stmt)] = fresh
            else:
                code.store(stmt, value)
                code.forget(stmt.buffer)
                code.memo.clear()
        return [state[id(s)] for s in self.reductions]

    def widened(self, value: Val, lanes: Lanes) -> Val:
        if value.lanes != lanes.width:
            value = self.b.splat(value, lanes.width)
        return value if value.count == lanes.count else Val(value.ty, value.parts * lanes.count)

    def finish(self, stmt: Store, value: Val) -> None:
        """Combine a vector accumulator into the element it stands for."""
        dtype = stmt.buffer.dtype
        total = horizontal(self.b, self.combining(stmt), value, dtype)
        pointer = self.e.address(stmt.buffer, stmt.index, self.scope)
        elem = memory_type(dtype)
        old = from_memory(self.b, self.b.load(elem, pointer, dtype.itemsize), dtype)
        total = combine(self.b, self.combining(stmt), old, total, dtype)
        self.b.store(to_memory(self.b, total, dtype), pointer, dtype.itemsize)


def _extremum_of_numbers(stmt: Store) -> Scalar | None:
    """What a maximum or minimum is taken of that leaves out nan, as in max(where(nan, -inf, x))."""
    value = stmt.value
    if not (stmt.reduce in ("max", "min") and isinstance(value, Call) and value.op == "where"
            and value.dtype.compute is stmt.buffer.dtype and value.dtype.is_float):
        return None
    test, start, number = value.args
    if isinstance(test, Call) and test.op == "isnan" and test.args[0] is number and (
            isinstance(start, Const)
            and start.value == REDUCTIONS[stmt.reduce or ""].identity(value.dtype)):
        return number
    return None


def _looks_up_narrow(node: Scalar) -> bool:
    """Whether a load of less than 32 bits has its address from memory: lanes go one by one then."""
    return isinstance(node, Load) and node.dtype.itemsize < 4 and any(
        isinstance(part, Load) for index in node.indices if isinstance(index, Scalar)
        for part in walk_scalar(index))


def _under_where(root: Scalar, code: ScalarCode) -> set[int]:
    """Nodes that can only be evaluated where some condition holds: not before the loop."""
    inside: set[int] = set()
    for node in walk_scalar(root):
        if isinstance(node, Call) and node.op == "where":
            for branch in node.args[1:]:
                inside |= {id(n) for n in walk_scalar(branch)
                           if isinstance(n, Load) and not code.in_bounds(n)}
    changed = set(inside)
    for node in walk_scalar(root):
        if any(id(c) in changed for c in scalar_children(node)):
            changed.add(id(node))
    return changed


def _static_trip(lo: Val, hi: Val) -> int | None:
    if lo.literal is None or hi.literal is None:
        return None
    return max(hi.literal - lo.literal, 0)


class VectorCode(ScalarCode):
    """Expressions inside a vector loop: a value is one scalar, or a bundle of vectors."""

    def __init__(self, emitter: LoopEmitter, scope: Scope):
        super().__init__(emitter, scope)
        assert scope.lanes is not None
        self.lanes: Lanes = scope.lanes
        self.stored: dict[tuple[Buffer, Index], Val] = {}

    def starts(self) -> Val:
        """The variable's value in lane 0 of every part."""
        b, lanes = self.b, self.lanes
        if lanes.count == 1:
            return lanes.base
        return bundle([b.add(lanes.base, u * lanes.width) for u in range(lanes.count)])

    def index_value(self, index: Index) -> Val:
        var = self.lanes.var
        if not isinstance(index, IndexExpr) or var not in free_vars(index):
            return self.e.index(index, self.scope)
        if self.lanes.iota is None:
            b, width = self.b, self.lanes.width
            starts = b.splat(self.starts(), width)
            self.lanes.iota = starts if width == 1 else b.add(starts, b.iota(vec("i64", width)))
        lane_values = self.lanes.iota

        def variable(v: Var) -> Val:
            return lane_values if v is var else self.e.variable(v, self.scope)

        return interpret(index, _index_algebra(self.b, index, variable))

    def load(self, node: Load, guard: Val | None) -> Val:
        index, source = node.indices[0], node.source
        dtype, elem = source.dtype, memory_type(source.dtype)
        if not isinstance(index, Scalar):
            if (source, index) in self.stored:
                return self.stored[(source, index)]
            step = coefficient(index, self.lanes.var)
            uniform = guard is None or guard.lanes == 1
            if isinstance(step, int) and step == 0 and (uniform or guard is self.lanes.mask):
                # In a masked tail at least one lane is alive, so the element is there.
                return super().load(node, None if guard is self.lanes.mask else guard)
            if isinstance(step, int) and step == 1:
                return from_memory(self.b, self.contiguous(source, index, elem, guard), dtype)
            if isinstance(step, int) and step == -1 and self.lanes.width > 1:
                return from_memory(self.b, self.backwards(source, index, elem, guard), dtype)
        elif self.scalar_step(index) == 1:
            # Rows of a table: where a row begins is data, how it goes on is not.
            first = self.b.gep(elem, self.scope.memory[source], self.at_lane_zero(index))
            return from_memory(self.b, self.vectors(first, source, elem, guard), dtype)
        place = self.visit(index, guard) if isinstance(index, Scalar) else self.index_value(index)
        return from_memory(self.b, self.gather(source, place, elem, guard), dtype)

    def scalar_step(self, node: Scalar) -> int | None:
        """How far a computed index moves from lane to lane; None if that is not one number."""
        if isinstance(node, Const) or id(node) in self.scope.known:
            return 0
        if isinstance(node, FromIndex):
            step = coefficient(node.index, self.lanes.var)
            return step if isinstance(step, int) else None
        if not isinstance(node, Call) or node.op not in ("add", "sub", "mul"):
            return None
        steps = [self.scalar_step(arg) for arg in node.args]
        if steps[0] is None or steps[1] is None:
            return None
        if node.op == "mul":
            for step, factor in ((steps[0], node.args[1]), (steps[1], node.args[0])):
                if isinstance(factor, Const):
                    return step * int(factor.value)
            return 0 if steps == [0, 0] else None
        return steps[0] + steps[1] if node.op == "add" else steps[0] - steps[1]

    def at_lane_zero(self, index: Scalar) -> Val:
        scope = self.e.inside(self.scope, self.lanes.var, self.lanes.base)
        scope.lanes, scope.known = None, self.scope.known
        return ScalarCode(self.e, scope).emit(index)

    def visit(self, node: Scalar, guard: Val | None) -> Val:
        # In the masked tail every load that varies with the lane needs the mask.
        if guard is None and self.lanes.mask is not None and isinstance(node, Load):
            known = self.scope.known.get(id(node))
            return known if known is not None else self.compute(node, self.lanes.mask)
        return super().visit(node, guard)

    def pointer(self, source: Buffer, index: Index, elem: str) -> Val:
        """The address of lane 0 of every part, for an index that moves with the lane."""
        at = substitute(index, {self.lanes.var: 0})
        base = self.b.add(self.e.index(at, self.scope), self.lanes.base)
        return self.parts(self.b.gep(elem, self.scope.memory[source], base), elem)

    def parts(self, first: Val, elem: str) -> Val:
        """The addresses of all parts, given that of the first."""
        if self.lanes.count == 1:
            return first
        return bundle([self.b.gep(elem, first, u * self.lanes.width)
                       for u in range(self.lanes.count)])

    def contiguous(self, source: Buffer, index: Index, elem: str, guard: Val | None) -> Val:
        return self.vectors(self.pointer(source, index, elem), source, elem, guard)

    def vectors(self, pointer: Val, source: Buffer, elem: str, guard: Val | None) -> Val:
        """Whole vectors from an address on."""
        if pointer.count != self.lanes.count:
            pointer = self.parts(pointer, elem)
        ty = vec(elem, self.lanes.width)
        align = source.dtype.itemsize
        if guard is None:
            return self.b.load(ty, pointer, align)
        if self.lanes.width == 1:
            return self.b.if_values(guard, lambda: [self.b.load(ty, pointer, align)],
                                    lambda: [const(ty, 0)])[0]
        if guard.lanes == 1:
            guard = self.b.splat(guard, self.lanes.width)
        return self.b.masked_load(ty, pointer, guard, 0, align)

    def backwards(self, source: Buffer, index: Index, elem: str, guard: Val | None) -> Val:
        width, align = self.lanes.width, source.dtype.itemsize
        mirrored = list(range(width))[::-1]
        at = substitute(index, {self.lanes.var: 0})
        last = self.b.sub(self.e.index(at, self.scope), self.starts())
        pointer = self.b.gep(elem, self.scope.memory[source], self.b.sub(last, width - 1),
                             inbounds=False)
        if guard is None:
            loaded = self.b.load(vec(elem, width), pointer, align)
        else:
            mask = self.b.splat(guard, width) if guard.lanes == 1 else self.b.shuffle(
                guard, None, mirrored)
            loaded = self.b.masked_load(vec(elem, width), pointer, mask, 0, align)
        return self.b.shuffle(loaded, None, mirrored)

    def gather(self, source: Buffer, place: Val, elem: str, guard: Val | None) -> Val:
        width = self.lanes.width
        if place.lanes != width:
            place = self.b.splat(place, width)
        pointers = self.b.gep(elem, self.scope.memory[source], place)
        if width == 1:
            if guard is None:
                return self.b.load(elem, pointers, source.dtype.itemsize)
            return self.b.if_values(
                guard, lambda: [self.b.load(elem, pointers, source.dtype.itemsize)],
                lambda: [const(elem, 0)])[0]
        mask = const(vec("i1", width), True) if guard is None else guard
        if mask.lanes == 1:
            mask = self.b.splat(mask, width)
        return self.b.masked_gather(vec(elem, width), pointers, mask, 0, source.dtype.itemsize)

    def store(self, stmt: Store, value: Val) -> None:
        """Store a bundle; a reducing store reads, combines and writes back."""
        buffer, index = stmt.buffer, stmt.index
        dtype, elem = buffer.dtype, memory_type(buffer.dtype)
        step = None if isinstance(index, Scalar) else coefficient(index, self.lanes.var)
        mask, align, width = self.lanes.mask, dtype.itemsize, self.lanes.width
        if stmt.mask is not None:
            kept = self.emit(stmt.mask, mask)
            kept = self.both(mask, kept if kept.lanes == width else self.b.splat(kept, width))
            mask = kept if kept.count == self.lanes.count else Val(
                kept.ty, kept.parts * self.lanes.count)
        if isinstance(step, int) and step == 1:
            assert not isinstance(index, Scalar)
            pointer = self.pointer(buffer, index, elem)
            if stmt.reduce is not None:
                old = from_memory(self.b, self.contiguous(buffer, index, elem, mask), dtype)
                value = combine(self.b, stmt.reduce, old, value, dtype)
            data = to_memory(self.b, value, dtype)
            if mask is not None and width == 1:
                self.b.if_(mask, lambda: self.b.store(data, pointer, align))
            elif stmt is self.lanes.aligned and mask is None:
                self.b.if_(self.lanes.bypass or const("i1", True),
                           lambda: self.b.store(data, pointer, align * width, nontemporal=True),
                           lambda: self.b.store(data, pointer, align))
            elif mask is None:
                self.b.store(data, pointer, align)
            elif self.lanes.alone and stmt.mask is None:
                # LLVM makes one lane of a truncating masked store as wide as it was before.
                self.b.store(self.b.extract(data, 0), pointer, align)
            else:
                self.b.masked_store(data, pointer, mask, align)
            self.stored = {k: v for k, v in self.stored.items() if k[0] is not buffer}
            if stmt.mask is None:
                self.stored[(buffer, index)] = value
            return
        place = self.visit(index, None) if isinstance(index, Scalar) else self.index_value(index)
        if stmt.reduce is not None:
            old = from_memory(self.b, self.gather(buffer, place, elem, mask), dtype)
            value = combine(self.b, stmt.reduce, old, value, dtype)
        if place.lanes != width:
            place = self.b.splat(place, width)
        pointers = self.b.gep(elem, self.scope.memory[buffer], place)
        data = to_memory(self.b, value, dtype)
        if width == 1 and mask is not None:
            self.b.if_(mask, lambda: self.b.store(data, pointers, align))
        elif width == 1:
            self.b.store(data, pointers, align)
        else:
            everywhere = const(vec("i1", width), True)
            self.b.masked_scatter(data, pointers, everywhere if mask is None else mask, align)
