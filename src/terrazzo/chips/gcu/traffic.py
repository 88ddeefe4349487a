"""What a kernel moves between main memory and the scratchpad, as a compiler for it would.

A statement whose places in main memory all fit into the scratchpad together brings each in once,
and takes each that it changed out once. A loop does so if one iteration of it fits: what stays the
same, or overlaps with the iteration before, is there already. What does not fit is looked at from
within, statement by statement. Where the sizes are known only when the kernel runs, whether it fits
is a condition in the count.

What only happens if data says so (branches, loops that wait) is counted in there, by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from terrazzo.base.scalar import Call, FromIndex, Load, Scalar, as_scalar
from terrazzo.base.scalar import loads as loads_of
from terrazzo.base.scalar import walk as walk_scalar
from terrazzo.base.unwind import Walk, unwind
from terrazzo.chips.gcu.description import Description
from terrazzo.chips.gcu.footprint import Access, Footprint, shape_of
from terrazzo.chips.gcu.tally import (
    ALWAYS,
    Tally,
    When,
    as_index,
    both,
    holds,
    is_short,
    is_unit,
)
from terrazzo.chips.gcu.work import Places, sides_of
from terrazzo.index import (
    Index,
    IndexExpr,
    Var,
    free_vars,
    substitute,
)
from terrazzo.loop.bounds import Interval, interval_of
from terrazzo.loop.ir import (
    Alloc,
    Atomic,
    Block,
    Buffer,
    For,
    If,
    Let,
    Stmt,
    Store,
    Tile,
    While,
    roots_of,
)


@dataclass
class Traffic:
    """The walk over one task of a kernel."""

    chip: Description
    local: frozenset[Buffer]  # what lies in the scratchpad
    room: Index  # bytes of the scratchpad for everything else
    places: Places
    skip: frozenset[int] = frozenset()  # loops that are counted by themselves
    task: Var | None = None  # its neighbours on a unit leave behind what they have
    found: dict[int, list[Access]] = field(default_factory=dict)  # by statement
    heads: dict[int, list[Access]] = field(default_factory=dict)  # of a statement's own values
    islands: list[Island] = field(default_factory=list)
    names: dict[Var, frozenset[Var]] = field(default_factory=dict)  # loops that a name hangs on
    root: Stmt | None = None  # what a task is behind its names
    values: dict[Var, Index] = field(default_factory=dict)  # of names that are only short for more

    def count(self, stmt: Stmt, known: frozenset[Var]) -> Tally:
        """All that a task moves; `known` are the names outside of it."""
        unwind(self._collect(stmt, (), ALWAYS, known))
        for island in self.islands:
            moved = unwind(self._moved(island.body, island.depth, island.known))
            self.places.add(island.stmt, moved, island.branch)
        self.root = stmt
        while isinstance(self.root, (Let, Alloc)) or (
                isinstance(self.root, For) and is_unit(self.root)):
            self.root = self.root.body
        return unwind(self._moved(stmt, 0, known))

    # ------------------------------------------------------------ finding
    def _collect(self, stmt: Stmt, loops: tuple[For, ...], only: When, known: frozenset[Var]
                 ) -> Walk[list[Access]]:
        """The accesses of a statement but for those that data decides about."""
        found: list[Access] = []
        if id(stmt) in self.skip:
            pass
        elif isinstance(stmt, Block):
            for inner in stmt.stmts:
                found += yield self._collect(inner, loops, only, known)
        elif isinstance(stmt, Tile):
            found = yield self._collect(stmt.expand(), loops, only, known)
        elif isinstance(stmt, For):
            if is_unit(stmt):
                self._name(stmt.var, as_scalar(stmt.lo), loops)
            else:
                loops = (*loops, replace(stmt, lo=substitute(stmt.lo, self.values),
                                         hi=substitute(stmt.hi, self.values)))
            found = yield self._collect(stmt.body, loops, only, known | {stmt.var})
        elif isinstance(stmt, If):
            found = yield self._branches(stmt, loops, only, known)
        else:
            if isinstance(stmt, Let):
                self._name(stmt.var, stmt.value, loops)
                known |= {stmt.var}
            found = self.heads[id(stmt)] = self._reads(stmt, loops, only)
            if isinstance(stmt, (Store, Atomic)):
                found = found + self._written(stmt, loops, only)
            elif isinstance(stmt, (Let, Alloc)):
                found = found + (yield self._collect(stmt.body, loops, only, known))
            elif isinstance(stmt, While):
                yield self._collect(stmt.body, loops, ALWAYS, known)
                self.islands.append(Island(stmt, 0, stmt.body, len(loops), known))
        self.found[id(stmt)] = found
        return found

    def _branches(self, stmt: If, loops: tuple[For, ...], only: When, known: frozenset[Var]
                  ) -> Walk[list[Access]]:
        found = self.heads[id(stmt)] = self._reads(stmt, loops, only)
        sides = sides_of(stmt)
        for branch, body in enumerate((stmt.then, stmt.orelse)):
            if body is not None:
                inner = ALWAYS  # within a branch that data chose, there is no further one
                if sides is not None:
                    side = tuple(tuple(substitute(g, self.values) for g in guards)
                                 for guards in sides[branch])
                    joint = both(only, side)
                    inner = only if joint is None else joint
                inside = yield self._collect(body, loops, inner, known)
                if sides is None:
                    self.islands.append(Island(stmt, branch, body, len(loops), known))
                else:
                    found = found + inside
        return found

    def _name(self, var: Var, value: Scalar, loops: tuple[For, ...]) -> None:
        """A name: inside of loops it is read as what it stands for, if that is an index."""
        short = as_index(value) if loops else None
        if short is not None:
            self.values[var] = substitute(short, self.values)
        self.names[var] = self._hangs(value, loops)

    def _hangs(self, value: Scalar, loops: tuple[For, ...]) -> frozenset[Var]:
        """The loops that a value may be another one in every iteration of."""
        mentioned: set[Var] = set()
        for node in walk_scalar(value):
            index = node.index if isinstance(node, FromIndex) else (
                node.indices[0] if isinstance(node, Load) else 0)
            if isinstance(index, IndexExpr):
                mentioned |= free_vars(substitute(index, self.values))
            if isinstance(node, Load) and node.source in self.local:
                mentioned |= {loop.var for loop in loops}  # somebody changes it
        return frozenset(mentioned).union(*(self.names.get(v, ()) for v in mentioned))

    def _reads(self, stmt: Stmt, loops: tuple[For, ...], only: When) -> list[Access]:
        plain = replace(stmt, streaming=False) if isinstance(stmt, Store) else stmt
        values = [root for root in roots_of(plain) if isinstance(root, Scalar)]
        return [self._access(load.source, load.indices[0], True, False, loops, only)
                for value in values for load in loads_of(value) if load.source not in self.local]

    def _written(self, stmt: Store | Atomic, loops: tuple[For, ...], only: When) -> list[Access]:
        if stmt.buffer in self.local:
            return []
        reads = isinstance(stmt, Atomic) or stmt.reduce is not None
        return [self._access(stmt.buffer, stmt.index, reads, True, loops, only)]

    def _access(self, buffer: Buffer, index: Index | Scalar, reads: bool, writes: bool,
                loops: tuple[For, ...], only: When) -> Access:
        plain, data = _parted(index) if isinstance(index, Scalar) else (index, None)
        hangs = frozenset[Var]() if data is None else self._hangs(data, loops)
        plain = substitute(plain, self.values)
        if isinstance(plain, IndexExpr) and self.names:
            hangs = hangs.union(*(self.names.get(v, ()) for v in free_vars(plain)))
        return Access(buffer, reads, writes, plain, data, hangs, loops, only)

    # ------------------------------------------------------------ counting
    def _moved(self, stmt: Stmt, depth: int, known: frozenset[Var]) -> Walk[Tally]:
        """What a statement moves, `depth` loops inside its task."""
        found = self.found[id(stmt)]
        if not found:
            return Tally()
        if isinstance(stmt, (Let, Alloc)) or (isinstance(stmt, For) and is_unit(stmt)):
            return (yield self._parts(stmt, depth, known))
        once = self._footprint(found, depth, known)
        is_whole = isinstance(stmt, (Block, If, For)) and not (
            isinstance(stmt, For) and stmt.kind == "vector")
        room = None if once is None else self._left(stmt, once, depth, known)
        if once is not None and room is not None and holds(room) and (
                stmt is self.root and self.task is not None):
            return self._shared(found, known)
        if not is_whole:
            assert once is not None, "the sizes of a leaf are known where it stands"
            return once.tally
        if once is None or room is None or holds(room) is False:
            return (yield self._parts(stmt, depth, known))
        if holds(room) or not is_short(room):
            return once.tally
        outer, self.places = self.places, Places(
            self.places.tasks, self.places.once, self.places.waiting)
        parts = yield self._parts(stmt, depth, known)
        inner, self.places = self.places, outer
        if not inner.inside and parts.terms == once.tally.terms:
            return parts
        fits: When = ((room,),)
        too_large: When = ((-room - 1,),)
        made = Tally()
        made.include(once.tally, fits)
        made.include(parts, too_large)
        for place, tally in inner.inside.items():
            self.places.inside.setdefault(place, Tally()).include(tally, too_large)
        return made

    def _shared(self, found: list[Access], known: frozenset[Var]) -> Tally:
        """What a task moves that fits: places that are the same in all tasks, a unit's first."""
        assert self.task is not None
        mine = {id(a): a for a in found if a.writes or self.task in a.hangs
                or (isinstance(a.index, IndexExpr) and self.task in free_vars(a.index))
                or any(self.task in free_vars(i) for loop in a.loops for i in (loop.lo, loop.hi)
                       if isinstance(i, IndexExpr))}
        made = Tally()
        first: When = ((self.chip.units - 1 - self.task,),)
        for accesses, only in ((list(mine.values()), ALWAYS),
                               ([a for a in found if id(a) not in mine], first)):
            part = self._footprint(accesses, 0, known)
            assert part is not None
            made.include(part.tally, only)
        return made

    def _left(self, stmt: Stmt, once: Footprint, depth: int, known: frozenset[Var]
              ) -> Index | None:
        """The room that a statement leaves in the scratchpad, negative if it does not fit."""
        if not isinstance(stmt, For):
            return self.room - once.size
        one = self._footprint(self.found[id(stmt)], depth + 1, known | {stmt.var})
        if one is None:
            return None
        if not is_short(one.size):  # no condition is made of it, so what it is at most will do
            return self.room - one.size
        lo, hi = (substitute(i, self.values) for i in (stmt.lo, stmt.hi))
        size = interval_of(one.size, {stmt.var: Interval(lo, hi - 1)}).hi
        return None if size is None else self.room - size

    def _parts(self, stmt: Stmt, depth: int, known: frozenset[Var]) -> Walk[Tally]:
        """What the statements inside of one move, each for itself."""
        made = Tally()
        if id(stmt) in self.heads:
            head = self._footprint(self.heads[id(stmt)], depth, known)
            assert head is not None
            made.include(head.tally)
        if isinstance(stmt, Block):
            for inner in stmt.stmts:
                made.include((yield self._moved(inner, depth, known)))
        elif isinstance(stmt, If):
            if sides_of(stmt) is not None:
                made.include((yield self._moved(stmt.then, depth, known)))
                if stmt.orelse is not None:
                    made.include((yield self._moved(stmt.orelse, depth, known)))
        elif isinstance(stmt, Alloc):
            made.include((yield self._moved(stmt.body, depth, known)))
        else:
            assert isinstance(stmt, (For, Let))
            deeper = depth + (isinstance(stmt, For) and not is_unit(stmt))
            inner = yield self._moved(stmt.body, deeper, known | {stmt.var})
            made.include(self.places.leave(stmt, inner))
        return made

    def _footprint(self, found: Iterable[Access], depth: int, known: frozenset[Var]
                   ) -> Footprint | None:
        """The places of some accesses, or None where their number is not known yet."""
        made = Footprint(self.chip)
        for access in found:
            for guards in access.only:
                shape = shape_of(access, depth, guards)
                if shape is None or not shape.names <= known:
                    return None
                made.add(access, shape)
        made.settle()
        return made


@dataclass(frozen=True)
class Island:
    """Statements that run only if data says so, and so are counted in there."""

    stmt: Stmt
    branch: int
    body: Stmt
    depth: int
    known: frozenset[Var]


def _parted(index: Scalar) -> tuple[Index, Scalar | None]:
    """An address that is computed: the part of it that is an index, and the rest."""
    total: Index = 0
    rest: Scalar = index
    while True:
        plain = as_index(rest)
        if plain is not None:
            return total + plain, None
        if isinstance(rest, Call) and rest.op == "cast" and rest.args[0].dtype.is_integer:
            rest = rest.args[0]
            continue
        sides = rest.args if isinstance(rest, Call) and rest.op == "add" else ()
        parts = [as_index(side) for side in sides]
        known = [n for n, part in enumerate(parts) if part is not None]
        if not known:
            return total, rest
        part = parts[known[0]]
        assert part is not None
        total, rest = total + part, sides[1 - known[0]]
