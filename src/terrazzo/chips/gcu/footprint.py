"""The places in main memory that accesses touch while loops run: how many, and what moving takes.

Places are counted by the index: a sum of loop variables times steps has as many as there are
iterations, but for rows that overlap (a window that moves on) and for loops that it does not
mention. An index that data enters is a new place every time, of whole granules of memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from terrazzo.base.scalar import Scalar
from terrazzo.chips.gcu.description import Description
from terrazzo.chips.gcu.series import clamp_of, mentions, positive, total
from terrazzo.chips.gcu.tally import (
    LOAD,
    STORE,
    TRANSFERS,
    Guards,
    Tally,
    When,
    bound_by,
    holds,
    is_short,
)
from terrazzo.index import (
    Index,
    IndexExpr,
    Var,
    bounds,
    ceildiv,
    coefficient,
    free_vars,
    maximum,
    minimum,
    substitute,
)
from terrazzo.loop.bounds import Interval, interval_of, plus
from terrazzo.loop.ir import Buffer, For


@dataclass(frozen=True, eq=False)
class Access:
    """A place in main memory, in all the loops around it, outside in."""

    buffer: Buffer
    reads: bool
    writes: bool
    index: Index  # the part of it that no data enters
    data: Scalar | None  # the rest
    hangs: frozenset[Var]  # loops that the rest hangs on
    loops: tuple[For, ...]
    only: When


# ---------------------------------------------------------------- the places of an access
@dataclass(frozen=True)
class Shape:
    """Places at `base`, and from there on `trips[i]` of them, `steps[i]` apart."""

    base: Index
    steps: tuple[Index, ...]
    trips: tuple[Index, ...]
    apart: Index  # how many times all of them, at places that nobody foresees
    most: Index | None  # places that there are at all
    guards: Guards
    scattered: bool  # data decides where rows of it begin

    @property
    def names(self) -> frozenset[Var]:
        """The variables that the number of places hangs on."""
        indices = (*self.trips, self.apart, *self.guards, 0 if self.most is None else self.most)
        return frozenset[Var]().union(*(free_vars(i) for i in indices
                                        if isinstance(i, IndexExpr)))

    def elements(self, wider: Index = 0) -> Index:
        """How many places there are; `wider` lengthens the innermost row."""
        total: Index = self.apart
        for number, trip in enumerate(self.trips):
            total = total * (trip + wider if number == 0 else trip)
        return total if self.most is None else minimum(total, self.most)

    def bytes(self, access: Access, granule: int) -> Index:
        """How many bytes are moved for them."""
        size = access.buffer.dtype.itemsize
        if not self.scattered:
            return self.elements() * size
        row = self.trips[0] if self.trips and self.steps[0] == 1 else 1
        whole = ceildiv(row * size, granule) * granule
        total: Index = self.apart * whole
        for number, trip in enumerate(self.trips):
            total = total * (1 if number == 0 and self.steps[0] == 1 else trip)
        return total


def shape_of(access: Access, depth: int, guards: Guards) -> Shape | None:
    """The places of an access while the loops from `depth` on run; None: nobody knows."""
    inner = access.loops[depth:]
    ranges: dict[Var, Interval] = {}
    rest = _about_others(guards, {loop.var for loop in inner})
    for loop in inner:
        lo, hi = interval_of(loop.lo, ranges).lo, interval_of(loop.hi, ranges).hi
        if lo is None or hi is None:
            return None
        # Before the loops inside are looked at: their ranges may hang on this one.
        ranges[loop.var] = _clip(guards, loop.var, Interval(lo, hi - 1), ranges)
    dims: list[tuple[Index, Index]] = []
    apart: Index = 1
    first: dict[Var, Index] = {}
    is_line = True
    blocks = _blocks(access, inner, ranges, guards)
    for var, (lo, hi) in ranges.items():
        assert lo is not None and hi is not None
        step, trip = coefficient(access.index, var), positive(plus(hi - lo, 1))
        trip = blocks.get(var, trip)
        if step is None or var in access.hangs:
            is_line = is_line and step is not None
            apart = apart * trip
        elif step != 0:
            dims.append((step, trip))
        first[var] = lo
    most = None
    if not is_line and access.data is None and access.hangs.isdisjoint(ranges):
        span = interval_of(access.index, ranges)
        most = None if span.lo is None or span.hi is None else positive(span.hi - span.lo + 1)
    merged = _merged(dims)
    base = substitute(access.index, first)
    return Shape(base, tuple(s for s, _ in merged), tuple(t for _, t in merged), apart, most, rest,
                 access.data is not None or not access.hangs.isdisjoint(ranges))


def _blocks(access: Access, inner: Sequence[For], ranges: Mapping[Var, Interval], guards: Guards
            ) -> dict[Var, Index]:
    """Loops over blocks of a row, of which the last is shorter: how often both run, as one loop.

    The inner one has the length of the row then, and the one around it a single iteration.
    """
    made: dict[Var, Index] = {}
    for number, loop in enumerate(inner):
        length = positive(loop.hi - loop.lo)
        step = coefficient(access.index, loop.var)
        if not isinstance(length, IndexExpr) or step is None or step == 0:
            continue
        names = free_vars(length)
        around = [outer for outer in inner[:number] if outer.var in names]
        if len(around) != 1 or around[0].var in made or mentions(loop.lo, around[0].var) or any(
                mentions(guard, loop.var) for guard in guards):
            continue
        var = around[0].var
        clamp, (lo, hi) = clamp_of(length, var), ranges[var]
        if clamp is None or clamp.lo != 0 or not access.hangs.isdisjoint((var, loop.var)) or (
                coefficient(access.index, var) != abs(clamp.step) * step):
            continue
        assert lo is not None and hi is not None
        row = total(length, var, lo, hi + 1)
        if row is not None:
            made[loop.var], made[var] = row, 1
    return made


def _about_others(guards: Guards, inner: set[Var]) -> Guards:
    """The guards that no inner loop decides: those of one loop clip it, others are left out."""
    return tuple(g for g in guards if not isinstance(g, IndexExpr) or inner.isdisjoint(
        free_vars(g)))


def _clip(guards: Guards, var: Var, whole: Interval, around: Mapping[Var, Interval]) -> Interval:
    """The iterations of a loop in which the guards about it hold."""
    lo, hi = whole
    assert lo is not None and hi is not None
    for guard in guards:
        names = free_vars(guard) if isinstance(guard, IndexExpr) else set()
        clip = bound_by(guard, var) if var in names and names.isdisjoint(around) else None
        if clip is not None:
            lo = lo if clip[0] is None else maximum(lo, clip[0])
            hi = hi if clip[1] is None else minimum(hi, clip[1] - 1)
    return Interval(lo, hi)


def _merged(dims: list[tuple[Index, Index]]) -> list[tuple[Index, Index]]:
    """Steps from small to large, where rows that overlap are one: a window that moves on."""
    numbers = sorted(((abs(s), t) for s, t in dims if isinstance(s, int)), key=lambda d: d[0])
    made: list[tuple[Index, Index]] = []
    for step, trip in numbers:
        if made:
            last, length = made[-1]
            assert isinstance(last, int)
            most = bounds(length)[1]
            # Of rows whose length only a run tells, whether they overlap is not worth a condition.
            if step % last == 0 and most is not None and step // last <= most:
                joint = step // last * (trip - 1) + length
                exact = isinstance(length, int)
                made[-1] = (last, joint if exact else minimum(trip * length, joint))
                continue
        made.append((step, trip))
    return made + [(s, t) for s, t in dims if not isinstance(s, int)]


# ---------------------------------------------------------------- the places of many accesses
Row = tuple[Access, Shape]


@dataclass
class Footprint:
    """The places that accesses touch together: what is moved for them, and the room they take."""

    chip: Description
    loads: dict[tuple[object, ...], list[Row]] = field(default_factory=dict)
    stores: dict[tuple[object, ...], list[Row]] = field(default_factory=dict)
    made: set[tuple[object, ...]] = field(default_factory=set)  # written before it was read
    tally: Tally = field(default_factory=Tally)
    size: Index = 0

    def add(self, access: Access, shape: Shape) -> None:
        """One more access, in the order in which they happen."""
        place = (access.buffer, id(access.data), shape.steps, shape.base)
        key = (access.buffer, id(access.data), shape.steps, shape.guards)
        if access.reads and place not in self.made:
            self.loads.setdefault(key, []).append((access, shape))
        if access.writes:
            if not access.reads:
                self.made.add(place)
            self.stores.setdefault(key, []).append((access, shape))

    def settle(self) -> None:
        """Counts what was added."""
        room: dict[object, dict[object, Index]] = {}
        for counter, groups in ((LOAD, self.loads), (STORE, self.stores)):
            for key, rows in groups.items():
                buffer, guards = key[0], rows[0][1].guards
                for amount in self._union(rows):
                    self.tally.add(counter, amount, guards)
                    self.tally.add(TRANSFERS, self._pieces(amount), guards)
                    by_guards = room.setdefault(buffer, {})
                    by_guards[guards, counter] = by_guards.get((guards, counter), 0) + amount
        for sizes in room.values():
            known = [size for size in sizes.values() if isinstance(size, int)]
            self.size = self.size + max(known, default=0)
            for size in sizes.values():
                self.size = self.size + (0 if isinstance(size, int) else size)

    def _pieces(self, size: Index) -> Index:
        """In how many transfers so much is moved."""
        most = bounds(size)[1]
        if most is not None and most <= self.chip.transfer_bytes and not isinstance(size, int):
            return 1  # the shorter ones at the end of a row are transfers too
        return ceildiv(size, self.chip.transfer_bytes)

    def _union(self, rows: list[Row]) -> list[Index]:
        """The bytes of accesses with the same steps, one number for each stretch of memory."""
        by_base: dict[Index, Row] = {}
        for access, shape in rows:
            seen = by_base.get(shape.base)
            if seen is None or _longer(shape, seen[1]):
                by_base[shape.base] = (access, shape)
        sizes = [shape.bytes(access, self.chip.granule) for access, shape in by_base.values()]
        joint = _stretch(by_base)
        if joint is not None:
            whole: Index = 0
            for size in sizes:
                whole = whole + size
            if isinstance(whole, int) or isinstance(joint, int) or is_short(whole - joint):
                return [minimum(whole, joint)]
        return sizes


def _longer(a: Shape, b: Shape) -> bool:
    """Whether one shape surely has no fewer places than another."""
    return holds(a.elements() - b.elements()) is not False and a.trips != b.trips


def _stretch(rows: Mapping[Index, Row]) -> Index | None:
    """The bytes from the first to the last of places that lie a known distance apart."""
    if len(rows) < 2:
        return None
    (access, shape), first = next(iter(rows.values())), next(iter(rows))
    apart = [distance for base in rows if isinstance(distance := base - first, int)]
    step = shape.steps[0] if shape.steps else 1
    if (not isinstance(step, int) or access.data is not None or len(apart) < len(rows)
            or any(s.trips != shape.trips for _, s in rows.values())):
        return None
    wider = ceildiv(max(apart) - min(apart), step)
    size = access.buffer.dtype.itemsize
    return shape.elements(wider) * size if shape.steps else (1 + wider) * size
