"""Vector loops of Loop IR as loops over vectors.

A vector loop is widened here and nowhere above: its variable becomes `base + lane`, and what an
address does with that variable decides between one scalar load, a vector load and a gather.
Several vectors run side by side as one bundle (see builder.py), and a last masked iteration takes
what does not fill a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from terrazzo.base.scalar import OPS, REDUCTIONS, Call, Const, FromIndex, Load, Scalar
from terrazzo.base.scalar import children as scalar_children
from terrazzo.base.scalar import walk as walk_scalar
from terrazzo.chips.cpu.llvm import scalars
from terrazzo.chips.cpu.llvm.builder import Val, const, vec
from terrazzo.chips.cpu.llvm.expressions import Lanes, ScalarCode, Scope
from terrazzo.chips.cpu.llvm.scalars import (
    combine,
    from_memory,
    horizontal,
    memory_type,
    register_type,
    to_memory,
)
from terrazzo.chips.cpu.llvm.vector_code import VectorCode
from terrazzo.index import (
    bounds,
    coefficient,
    free_vars,
    substitute,
)
from terrazzo.loop.ir import (
    Block,
    For,
    Store,
)

if TYPE_CHECKING:
    from terrazzo.chips.cpu.llvm.loops import LoopEmitter

SHORT_LOOP = 8  # vectors
# Additions of an element that fill the processor by themselves, unless each waits for the one
# before: a sum of 80 exponentials is as fast in one vector as in two side by side, and half the
# code; a chain of as many sines takes 1.6 times as long.
LONG_BODY = 1000


def widenable(loop: For) -> bool:
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

CHEAP = 4  # additions for an element, at most, in a loop whose time is that of its memory


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
        bits = max(8, *map(self.widest, self.stmts))
        width = max(1, self.e.chip.vector_bits // bits)
        while trip is not None and width > 1 and width // 2 >= max(trip, 1):
            width //= 2
        return width

    def widest(self, stmt: Store) -> int:
        """The bits of the widest value that a statement has in its lanes.

        What is moved and not computed with is as narrow as it lies, and an address that goes on
        evenly is one number for all lanes.
        """
        moved = stmt.reduce is None and isinstance(stmt.value, (Load, Const))
        if moved and self.goes_on_evenly(stmt.value):
            return max(stmt.buffer.dtype.bits, stmt.value.dtype.bits)
        bits, seen, stack = stmt.buffer.dtype.compute.bits, set(), [stmt.value]
        while stack:
            node = stack.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            if isinstance(node, (Load, Call)) and not node.dtype.is_bool:
                bits = max(bits, node.dtype.compute.bits)
            if not self.goes_on_evenly(node):
                stack.extend(scalar_children(node))
        return bits

    def goes_on_evenly(self, node: Scalar) -> bool:
        """Whether a node is a number, or a load of neighbours: its address is a sum with the lane.

        A sum with a multiple of the lane is taken for one too; it only costs a wide gather.
        """
        if not isinstance(node, Load):
            return isinstance(node, Const)
        (index,) = node.indices
        if not isinstance(index, Scalar):
            return coefficient(index, self.loop.var) in (0, 1)
        stack = [index]
        while stack:
            part = stack.pop()
            varies = any(self.varies(n) for n in walk_scalar(part))
            if not varies or isinstance(part, FromIndex):
                continue
            if not (isinstance(part, Call) and part.op in ("add", "sub", "mul")):
                return False
            stack.extend(part.args)
        return True

    def depth(self, width: int, trip: int | None) -> int:
        """Vectors side by side: enough to hide latency, few enough to stay in registers."""
        nodes = [n for s in self.stmts for n in walk_scalar(s.value)]
        if any(_looks_up_narrow(n) for n in nodes):
            return 1
        price = self.price()
        if price > LONG_BODY and price >= 4 * self.longest_chain():
            return 1
        registers = self.e.chip.vector_registers
        depth = 4 if price <= 12 and registers >= 16 else 2
        if price <= 60 and registers >= 32:
            depth = 4
        if self.reductions and price <= 4:
            # Of rows of any length, as short ones as there are: they pay for every accumulator.
            several = registers >= 32 and len(self.reductions) == 1 and trip is not None
            depth = 8 if several else 4
        if trip is not None:
            whole = max(trip // width, 1)
            # A short loop of known length becomes straight code.
            if whole <= SHORT_LOOP and price * whole <= (64 if self.reductions else 32):
                return whole
            if whole <= SHORT_LOOP and not self.reductions:
                depth = 2  # too few turns to pay for more code
            while depth > whole:
                depth //= 2
        return max(depth, 1)

    def price(self) -> int:
        """Additions for one element."""
        return sum(OPS[n.op].cost for s in self.stmts for n in walk_scalar(s.value)
                   if isinstance(n, Call) and n.op != "cast")

    def longest_chain(self) -> int:
        """Additions of which each waits for the one before."""
        ends: dict[int, int] = {}
        for stmt in self.stmts:
            for node in walk_scalar(stmt.value):
                own = OPS[node.op].cost if isinstance(node, Call) and node.op != "cast" else 0
                ends[id(node)] = own + max((ends[id(c)] for c in scalar_children(node)), default=0)
        return max(ends.values(), default=0)

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
        # A loop of a few vectors at most is all tail, which is a fifth of the code.
        most = bounds(self.loop.hi - self.loop.lo)[1]
        short = trip is None and most is not None and most <= width * SHORT_LOOP
        if short:
            depth = 1
        self.hoist(certain=trip is not None)
        streaming = self.streaming(width) if not short and (
            trip is None or trip >= 16 * width) else None
        bypass = None
        if streaming is not None and isinstance(streaming.streaming, Scalar):
            bypass = self.b.and_(self.e.value(streaming.streaming, self.scope),
                                 self.b.icmp("eq", self.misaligned(streaming, lo, width), 0))
            self.e.streamed = True
        elif streaming is not None:
            lo, trip = self.peel(streaming, lo, hi, width), None
        middle, partial = lo, self.identities(width, 1)

        def whole() -> list[Val]:
            return self.whole_vectors(lo, hi, width, depth, trip, streaming, bypass)

        if trip is not None:
            middle, *partial = whole()
        elif not short:  # of few vectors, what several side by side need before and after is waste
            many = self.b.icmp("sge", self.b.sub(hi, lo), 2 * width)
            middle, *partial = self.b.if_values(many, whole, lambda: [lo, *partial])
        if trip is None or trip % (width * depth):
            partial = self.tail(middle, hi, width, trip, partial)
        for stmt, value in zip(self.reductions, partial, strict=True):
            self.finish(stmt, value)

    def identities(self, width: int, depth: int) -> list[Val]:
        """Accumulators of so many vectors that hold nothing yet."""
        return [Val(vec(register_type(s.buffer.dtype), width), (scalars.constant(
            s.buffer.dtype, REDUCTIONS[s.reduce or "add"].identity(s.buffer.dtype),
            width).text,) * depth) for s in self.reductions]

    def whole_vectors(self, lo: Val, hi: Val, width: int, depth: int, trip: int | None,
                      streaming: Store | None, bypass: Val | None) -> list[Val]:
        """Vectors side by side, and where they end; then accumulators of one vector each."""
        b, step = self.b, width * depth
        middle = b.add(lo, b.mul(b.sdiv(b.sub(hi, lo), step), step))
        accumulators = self.identities(width, depth)
        if bypass is not None and not accumulators and self.price() <= CHEAP:
            self.stream_or_not(lo, middle, width, depth, streaming, bypass)
        else:
            accumulators = b.loop(lo, middle, step, lambda iv, acc: self.iteration(
                Lanes(self.loop.var, iv, width, depth, aligned=streaming, bypass=bypass,
                      even=_even(lo, width)), acc),
                accumulators)
        while trip is None and depth > 2:
            depth //= 2
            accumulators = [self.halved(s, a) for s, a in zip(
                self.reductions, accumulators, strict=True)]
            middle, accumulators = self.fewer(middle, hi, width, depth, accumulators)
        return [middle, *(scalars.fold(b, self.combining(s), a, s.buffer.dtype)
                          for s, a in zip(self.reductions, accumulators, strict=True))]

    def fewer(self, lo: Val, hi: Val, width: int, depth: int, accumulators: list[Val]
              ) -> tuple[Val, list[Val]]:
        """So many vectors side by side once more, if as many are left: one by one, each would wait
        for the one before."""
        whole = self.b.and_(self.b.sub(hi, lo), -width * depth)
        middle = self.b.add(lo, whole)
        return middle, self.b.loop(lo, middle, width * depth, lambda iv, acc: self.iteration(
            Lanes(self.loop.var, iv, width, depth, even=_even(lo, width)), acc), accumulators)

    def halved(self, stmt: Store, value: Val) -> Val:
        """An accumulator of half as many vectors."""
        half = value.count // 2
        low, high = (Val(value.ty, parts) for parts in (value.parts[:half], value.parts[half:]))
        return combine(self.b, self.combining(stmt), low, high, stmt.buffer.dtype)

    def stream_or_not(self, lo: Val, hi: Val, width: int, depth: int, store: Store | None,
                      bypass: Val) -> None:
        """A loop that does little but move memory, for stores past the caches and through them.

        Through the caches, one line a turn in two halves: with fresh memory, which is what the
        largest outputs are, whole lines and several a turn were measured 8 % slower.
        """
        def turns(lanes: int, vectors: int, aligned: Store | None) -> None:
            self.b.loop(lo, hi, lanes * vectors, lambda iv, acc: self.iteration(
                Lanes(self.loop.var, iv, lanes, vectors, aligned=aligned), acc), [])

        self.b.if_(bypass, lambda: turns(width, depth, store),
                   lambda: turns(max(width // 2, 1), 2, None))

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
        # What is left are a few vectors at most: 32 bits count them in half the registers of 64.
        iota = self.b.iota(vec("i32", width))

        def masked(iv: Val, acc: list[Val]) -> Sequence[Val]:
            left = self.b.sub(hi, iv)
            low = self.b.cast("trunc", left, "i32")
            mask = self.b.icmp("ult", iota, self.b.splat(low, width))
            live = None if left.literal is None else min(left.literal, width)
            return self.iteration(Lanes(self.loop.var, iv, width, 1, mask, live=live), acc)

        if trip is not None and trip % width == 0:
            return self.b.loop(middle, hi, width, lambda iv, acc: self.iteration(
                Lanes(self.loop.var, iv, width, 1, even=_even(middle, width)), acc), partial)
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
        held: Val | None = None  # the first half of a pair
        for at, stmt in enumerate(self.stmts):
            number = self.numbers.get(id(stmt))
            value = self.widened(code.emit(
                stmt.value if number is None else number, lanes.mask), lanes)
            if id(stmt) in state:
                fresh = combine(self.b, self.combining(stmt), state[id(stmt)], value,
                                stmt.buffer.dtype)
                if lanes.mask is not None:
                    fresh = self.b.select(lanes.mask, fresh, state[id(stmt)])
                state[id(stmt)] = fresh
            elif held is None and self.begins_pair(code, at):
                held = value
            else:
                if held is not None:
                    code.store_pairs(self.stmts[at - 1], [held, value])
                    held = None
                else:
                    code.store(stmt, value)
                code.forget(stmt.buffer)
                code.memo.clear()
        return [state[id(s)] for s in self.reductions]

    def begins_pair(self, code: VectorCode, at: int) -> bool:
        """Whether a store and the next one fill pairs of neighbouring elements between them."""
        if at + 1 >= len(self.stmts):
            return False
        stmts = self.stmts[at:at + 2]
        first, second = stmts
        if isinstance(first.index, Scalar) or isinstance(second.index, Scalar):
            return False
        plain = all(s.reduce is None and s.mask is None and s.streaming is False for s in stmts)
        return (plain and first.buffer is second.buffer and second.index - first.index == 1
                and coefficient(first.index, self.loop.var) == 2
                and code.in_pairs(first.buffer, first.index)
                and substitute(first.index, {self.loop.var: 0}) % 2 == 0
                and not any(isinstance(n, Load) and n.source is first.buffer
                            for n in walk_scalar(second.value)))

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


def _even(start: Val, width: int) -> bool:
    """Whether vectors from here on begin at multiples of their width."""
    return start.literal is not None and start.literal % width == 0


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
    order = list(walk_scalar(root))
    inside: set[int] = set()  # one of the branches
    for node in reversed(order):  # whoever uses a node comes before it
        if id(node) in inside:
            inside.update(id(n) for n in scalar_children(node))
        elif isinstance(node, Call) and node.op == "where":
            inside.update(id(n) for n in node.args[1:])
    changed = {id(n) for n in order
               if id(n) in inside and isinstance(n, Load) and not code.in_bounds(n)}
    for node in order:
        if any(id(c) in changed for c in scalar_children(node)):
            changed.add(id(node))
    return changed


def _static_trip(lo: Val, hi: Val) -> int | None:
    if lo.literal is None or hi.literal is None:
        return None
    return max(hi.literal - lo.literal, 0)
