"""Scalar expressions and indices as LLVM values: one at a time, or in the lanes of vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from terrazzo.base.scalar import Call, Const, FromIndex, Load, Scalar, Undefined
from terrazzo.base.scalar import children as scalar_children
from terrazzo.base.scalar import walk as walk_scalar
from terrazzo.base.unwind import Walk, unwind
from terrazzo.chips.cpu.llvm import scalars
from terrazzo.chips.cpu.llvm.builder import Builder, Val, bundle, const, vec
from terrazzo.chips.cpu.llvm.scalars import (
    combine,
    from_memory,
    memory_type,
    register_type,
    to_memory,
)
from terrazzo.dtypes import int64
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
    Buffer,
    Store,
)
from terrazzo.loop.lanes import lanes_in_vector, steps_in_vector

if TYPE_CHECKING:
    from terrazzo.chips.cpu.llvm.loops import LoopEmitter


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
    live: int | None = None  # how many lanes the mask keeps, if it is the same number always
    even: bool = False  # vectors begin at multiples of their width


@dataclass
class Scope:
    """What code at one place can see: variables, buffers, values known before the loop."""

    env: dict[Var, Val]
    memory: dict[Buffer, Val]
    lanes: Lanes | None = None
    known: dict[int, Val] = field(default_factory=dict)  # by id of the scalar node
    stored: dict[tuple[Buffer, Index], Val] = field(default_factory=dict)


def index_algebra(b: Builder, whole: Index, variable: Callable[[Var], Val]) -> Algebra[Val]:
    """How the operations of an index are written; unsigned ones where nothing is negative."""
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


class ScalarCode:
    """Emits scalar expressions at one place, each shared node once."""

    def __init__(self, emitter: LoopEmitter, scope: Scope):
        self.e, self.scope, self.b = emitter, scope, emitter.b
        self.memo: dict[tuple[int, Val | None], Val] = {}
        self.numbered: dict[tuple[object, ...], Val] = {}  # local value numbering
        self.safe: set[int] = set()  # all that these nodes are made of may be read anywhere
        self.unsafe: set[int] = set()
        self.certain: set[int] = set()
        self.outer: Val | None = None

    def emit(self, root: Scalar, guard: Val | None = None) -> Val:
        """The value of an expression; with a guard, loads happen only where it holds."""
        known = all(id(c) in self.safe for c in scalar_children(root))
        for node in (root,) if known else walk_scalar(root):
            outside = isinstance(node, Load) and not self.in_bounds(node)
            unsafe = outside or any(id(c) in self.unsafe for c in scalar_children(node))
            (self.unsafe if unsafe else self.safe).add(id(node))
        self.certain = self.evaluated_anyway(root) if id(root) in self.unsafe else set()
        self.outer = guard
        return unwind(self.visit(root, guard))

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

    def visit(self, node: Scalar, guard: Val | None) -> Walk[Val]:
        known = self.scope.known.get(id(node))
        if known is not None:
            return known
        if id(node) not in self.unsafe:
            guard = None
        elif id(node) in self.certain:
            guard = self.outer
        key = (id(node), guard)
        if key not in self.memo:
            self.memo[key] = yield self.compute(node, guard)
        return self.memo[key]

    def compute(self, node: Scalar, guard: Val | None) -> Walk[Val]:
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
                self.numbered[key] = yield self.load(node, guard)
            return self.numbered[key]
        assert isinstance(node, Call), type(node)
        if node.op == "where":
            return (yield self.where(node, guard))
        args = []
        for argument in node.args:
            args.append((yield self.visit(argument, guard)))
        key = (node.op, node.dtype, node.args[0].dtype, tuple(args))
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

    def where(self, node: Call, guard: Val | None) -> Walk[Val]:
        condition = yield self.visit(node.args[0], guard)
        yes, no = node.args[1], node.args[2]
        then_guard = else_guard = guard
        if id(yes) in self.unsafe:
            then_guard = self.both(guard, condition)
        if id(no) in self.unsafe:
            inverse = self.b.xor(condition, const(condition.ty, True))
            else_guard = self.both(guard, inverse)
        chosen = yield self.visit(yes, then_guard)
        other = yield self.visit(no, else_guard)
        condition, a, b = self.spread([condition, chosen, other])
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

    def load(self, node: Load, guard: Val | None) -> Walk[Val]:
        dtype = node.source.dtype
        elem = memory_type(dtype)
        place = yield self.place(node.indices[0], None)

        # The address is made outside the branch: what it is made of may be used again later.
        pointer = self.b.gep(elem, self.scope.memory[node.source], place)

        def read() -> list[Val]:
            return [self.b.load(elem, pointer, dtype.itemsize)]

        value = (read() if guard is None else
                 self.b.if_values(guard, read, lambda: [const(elem, 0)]))[0]
        return from_memory(self.b, value, dtype)

    def place(self, index: Index | Scalar, guard: Val | None) -> Walk[Val]:
        return (yield self.visit(index, guard)) if isinstance(index, Scalar) else (
            self.index_value(index))


# ---------------------------------------------------------------- in lanes
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
        steps = steps_in_vector(index, var, self.lanes.width) if (
            self.lanes.even and coefficient(index, var) is None) else None
        if steps is not None:
            ty = vec("i64", self.lanes.width)
            first = self.b.splat(self.at_starts(index), self.lanes.width)
            return self.b.add(first, Val(ty, (f"<{', '.join(f'i64 {s}' for s in steps)}>",)))
        if self.lanes.iota is None:
            b, width = self.b, self.lanes.width
            starts = b.splat(self.starts(), width)
            self.lanes.iota = starts if width == 1 else b.add(starts, b.iota(vec("i64", width)))
        lane_values = self.lanes.iota

        def variable(v: Var) -> Val:
            return lane_values if v is var else self.e.variable(v, self.scope)

        return interpret(index, index_algebra(self.b, index, variable))

    def at_starts(self, index: Index) -> Val:
        """An index in lane 0 of every part."""
        if not isinstance(index, IndexExpr):
            return const("i64", index)
        starts = self.starts()
        return interpret(index, index_algebra(self.b, index, lambda v: (
            starts if v is self.lanes.var else self.e.variable(v, self.scope))))

    def shuffled(self, source: Buffer, index: Index, elem: str) -> Val | None:
        """A load that takes the elements of one aligned vector in another order, if it is one."""
        width = self.lanes.width
        if not (self.lanes.even and width > 1 and source.bounded and isinstance(source.size, int)
                and source.size % width == 0):
            return None
        found = lanes_in_vector(index, self.lanes.var, width)
        low, high = bounds(index)
        if found is None or low is None or high is None or low < 0 or high >= source.size:
            return None
        first, places = found
        pointer = self.b.gep(elem, self.scope.memory[source], self.at_starts(index - first))
        if pointer.count != self.lanes.count:
            pointer = Val(pointer.ty, pointer.parts * self.lanes.count)
        loaded = self.b.load(vec(elem, width), pointer, source.dtype.itemsize)
        return loaded if places == tuple(range(width)) else self.b.shuffle(loaded, None, places)

    def load(self, node: Load, guard: Val | None) -> Walk[Val]:
        index, source = node.indices[0], node.source
        dtype, elem = source.dtype, memory_type(source.dtype)
        if not isinstance(index, Scalar):
            if (source, index) in self.stored:
                return self.stored[(source, index)]
            step = coefficient(index, self.lanes.var)
            uniform = guard is None or guard.lanes == 1
            if isinstance(step, int) and step == 0 and (uniform or guard is self.lanes.mask):
                # In a masked tail at least one lane is alive, so the element is there.
                return (yield super().load(node, None if guard is self.lanes.mask else guard))
            if isinstance(step, int) and step == 1:
                return from_memory(self.b, self.contiguous(source, index, elem, guard), dtype)
            if isinstance(step, int) and step == -1 and self.lanes.width > 1:
                return from_memory(self.b, self.backwards(source, index, elem, guard), dtype)
            if isinstance(step, int) and abs(step) == 2 and self.in_pairs(source, index):
                made = self.every_other(source, index, elem, guard, step < 0)
                return from_memory(self.b, made, dtype)
            vectors = self.shuffled(source, index, elem) if step is None else None
            if vectors is not None:
                return from_memory(self.b, vectors, dtype)
        elif unwind(self.scalar_step(index)) == 1:
            # Rows of a table: where a row begins is data, how it goes on is not.
            first = self.b.gep(elem, self.scope.memory[source], self.at_lane_zero(index))
            return from_memory(self.b, self.vectors(first, source, elem, guard), dtype)
        place = yield self.place(index, guard)
        return from_memory(self.b, self.gather(source, place, elem, guard), dtype)

    def scalar_step(self, node: Scalar) -> Walk[int | None]:
        """How far a computed index moves from lane to lane; None if that is not one number."""
        if isinstance(node, Const) or id(node) in self.scope.known:
            return 0
        if isinstance(node, FromIndex):
            step = coefficient(node.index, self.lanes.var)
            return step if isinstance(step, int) else None
        if not isinstance(node, Call) or node.op not in ("add", "sub", "mul"):
            return None
        steps = []
        for arg in node.args:
            step = yield self.scalar_step(arg)
            if step is None:
                return None
            steps.append(step)
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

    def visit(self, node: Scalar, guard: Val | None) -> Walk[Val]:
        # In the masked tail every load that varies with the lane needs the mask: what is safe to
        # read is so for the elements that there are.
        if self.lanes.mask is not None and isinstance(node, Load) and (
                guard is None or id(node) not in self.unsafe):
            known = self.scope.known.get(id(node))
            return known if known is not None else (yield self.compute(node, self.lanes.mask))
        return (yield from super().visit(node, guard))

    def pointer(self, source: Buffer, index: Index, elem: str) -> Val:
        """The address of lane 0 of every part, for an index that moves with the lane."""
        at = self.e.index(substitute(index, {self.lanes.var: 0}), self.scope)
        # In two steps, of which the first stays the same in the loop.
        start = self.b.gep(elem, self.scope.memory[source], at, inbounds=False)
        return self.parts(self.b.gep(elem, start, self.lanes.base, inbounds=False), elem)

    def parts(self, first: Val, elem: str) -> Val:
        """The addresses of all parts, given that of the first."""
        if self.lanes.count == 1:
            return first
        return bundle([self.b.gep(elem, first, u * self.lanes.width)
                       for u in range(self.lanes.count)])

    def ends_in_room(self, buffer: Buffer, index: Index) -> bool:
        """Whether lanes that are not alive lie behind a local buffer, where there is room for them.

        Reading and writing them, too, keeps sums of columns in registers: a masked store would
        keep the whole buffer in memory, and a load after it waits until it is there.
        """
        lanes = self.lanes
        if lanes.live is None or lanes.count > 1 or lanes.base.literal is None or (
                buffer not in self.e.roomy):
            return False
        first = substitute(index, {lanes.var: lanes.base.literal})
        return isinstance(first, int) and first % lanes.width == 0 and (
            first + lanes.live == buffer.size)

    def contiguous(self, source: Buffer, index: Index, elem: str, guard: Val | None) -> Val:
        if guard is self.lanes.mask and self.ends_in_room(source, index):
            guard = None
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

    def in_pairs(self, buffer: Buffer, index: Index) -> bool:
        """Whether an index of every other element meets one of each pair that a buffer is made of,
        always the same one: so the other may be touched too."""
        return (self.lanes.width > 1 and buffer.bounded and buffer.size % 2 == 0
                and isinstance(substitute(index, {self.lanes.var: 0}) % 2, int))

    def pair_pointer(self, buffer: Buffer, index: Index, elem: str, backwards: bool = False
                     ) -> tuple[Val, int]:
        """The address of the lowest pair of every part, and which of a pair an index means."""
        width, sign = self.lanes.width, -1 if backwards else 1
        at = substitute(index, {self.lanes.var: 0})
        which = at % 2
        assert isinstance(which, int)
        lowest = at - which - 2 * (width - 1) * backwards
        start = self.b.gep(elem, self.scope.memory[buffer], self.e.index(lowest, self.scope),
                           inbounds=False)
        first = self.b.gep(elem, start, self.b.mul(self.lanes.base, 2 * sign), inbounds=False)
        if self.lanes.count > 1:
            first = bundle([self.b.gep(elem, first, sign * 2 * u * width, inbounds=False)
                            for u in range(self.lanes.count)])
        return first, which

    def pair_masks(self, guard: Val | None, backwards: bool = False) -> list[Val | None]:
        """The lanes of two neighbouring vectors of pairs, given those of the pairs."""
        if guard is None:
            return [None, None]
        width = self.lanes.width
        mask = self.b.splat(guard, width) if guard.lanes == 1 else guard
        pairs = range(width)[::-1] if backwards else range(width)
        return [self.b.shuffle(mask, None, [pairs[(half + i) // 2] for i in range(width)])
                for half in (0, width)]

    def every_other(self, source: Buffer, index: Index, elem: str, guard: Val | None,
                    backwards: bool) -> Val:
        """One of each of as many pairs as there are lanes, out of two whole vectors."""
        width, align = self.lanes.width, source.dtype.itemsize
        pointer, which = self.pair_pointer(source, index, elem, backwards)
        loaded = []
        for half, mask in enumerate(self.pair_masks(guard, backwards)):
            at = self.b.gep(elem, pointer, half * width, inbounds=False)
            loaded.append(self.b.load(vec(elem, width), at, align) if mask is None else
                          self.b.masked_load(vec(elem, width), at, mask, 0, align))
        pairs = range(width)[::-1] if backwards else range(width)
        return self.b.shuffle(loaded[0], loaded[1], [2 * pair + which for pair in pairs])

    def store_pairs(self, first: Store, values: Sequence[Val]) -> None:
        """Store neighbouring elements, one vector of each, as two whole vectors."""
        buffer, index = first.buffer, first.index
        assert not isinstance(index, Scalar)
        width, align = self.lanes.width, buffer.dtype.itemsize
        elem = memory_type(buffer.dtype)
        pointer, _ = self.pair_pointer(buffer, index, elem)
        low, high = (to_memory(self.b, v, buffer.dtype) for v in values)
        for half, mask in enumerate(self.pair_masks(self.lanes.mask)):
            at = self.b.gep(elem, pointer, half * width, inbounds=False)
            lanes = [(half * width + i) // 2 + i % 2 * width for i in range(width)]
            data = self.b.shuffle(low, high, lanes)
            if mask is None:
                self.b.store(data, at, align)
            else:
                self.b.masked_store(data, at, mask, align)
        self.stored = {k: v for k, v in self.stored.items() if k[0] is not buffer}

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
            if mask is self.lanes.mask and self.ends_in_room(buffer, index):
                mask = None
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
            elif self.lanes.live == 1 and stmt.mask is None:
                # LLVM makes one lane of a truncating masked store as wide as it was before.
                self.b.store(self.b.extract(data, 0), pointer, align)
            else:
                self.b.masked_store(data, pointer, mask, align)
            self.stored = {k: v for k, v in self.stored.items() if k[0] is not buffer}
            if stmt.mask is None:
                self.stored[(buffer, index)] = value
            return
        place = unwind(self.place(index, None))
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
