"""Scalar expressions and indices as LLVM values, one at a time (`vector_code.py`: in lanes)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from terrazzo.base.scalar import Call, Const, FromIndex, Load, Scalar, Undefined
from terrazzo.base.scalar import children as scalar_children
from terrazzo.base.scalar import walk as walk_scalar
from terrazzo.base.unwind import Walk, unwind
from terrazzo.chips.cpu.llvm import scalars
from terrazzo.chips.cpu.llvm.builder import Builder, Val, const
from terrazzo.chips.cpu.llvm.scalars import (
    from_memory,
    memory_type,
    register_type,
)
from terrazzo.dtypes import int64
from terrazzo.index import (
    Algebra,
    Index,
    IndexExpr,
    Var,
    bounds,
    proves_le,
    proves_lt,
)
from terrazzo.loop.ir import (
    Buffer,
    Store,
)

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

    return Algebra(
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
        if not isinstance(index, Scalar):
            return self.index_value(index)
        return self.counted_on(index, (yield self.visit(index, guard)))

    def computed_place(self, index: Scalar) -> Val:
        """A computed index, as `emit` makes it."""
        return self.counted_on(index, self.emit(index))

    def counted_on(self, index: Scalar, value: Val) -> Val:
        """An index without a sign in a type with one: an address extends it by its sign."""
        return value if index.dtype.is_signed else scalars.cast(self.b, value, index.dtype, int64)
