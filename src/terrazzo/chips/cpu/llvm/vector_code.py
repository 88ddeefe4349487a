"""Scalar expressions in the lanes of vectors: one value for all, or a bundle of vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from terrazzo.base.scalar import Call, Const, FromIndex, Load, Scalar
from terrazzo.base.unwind import Walk, unwind
from terrazzo.chips.cpu.llvm.builder import Val, bundle, const, vec
from terrazzo.chips.cpu.llvm.expressions import Lanes, ScalarCode, Scope, index_algebra
from terrazzo.chips.cpu.llvm.scalars import (
    combine,
    from_memory,
    memory_type,
    to_memory,
)
from terrazzo.index import (
    Index,
    IndexExpr,
    Var,
    bounds,
    coefficient,
    free_vars,
    interpret,
    substitute,
)
from terrazzo.loop.ir import (
    Buffer,
    Store,
)
from terrazzo.loop.lanes import lanes_in_vector, steps_in_vector

if TYPE_CHECKING:
    from terrazzo.chips.cpu.llvm.loops import LoopEmitter


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
            self.lanes.width > 1 and self.lanes.even and coefficient(index, var) is None) else None
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
        return ScalarCode(self.e, scope).computed_place(index)

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
