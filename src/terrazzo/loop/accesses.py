"""What a statement reads and writes, and whether the order of two statements matters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from terrazzo.base.scalar import Scalar, const, loads
from terrazzo.index import Index, Var, coefficient, free_vars, proves_lt
from terrazzo.loop.bounds import Interval, interval_of
from terrazzo.loop.ir import Buffer, For, If, Let, Stmt, Store, Tile, children

ANYWHERE = const(0)  # an index that is a scalar may point anywhere


@dataclass(frozen=True)
class Access:
    """One place in memory that a statement touches."""

    buffer: Buffer
    index: Index | Scalar
    writes: bool
    inner: dict[Var, Interval]  # the loops around it, inside the statement that was asked about


def accesses(stmt: Stmt) -> list[Access]:
    """Every access of a statement."""
    found: list[Access] = []
    named: set[Var] = set()
    todo: list[tuple[Stmt, dict[Var, Interval]]] = [(stmt, {})]
    while todo:
        node, inner = todo.pop()
        if isinstance(node, For):
            inner = {**inner, node.var: Interval(node.lo, node.hi - 1)}
        elif isinstance(node, If):
            found += _reads(node.cond, inner)
        elif isinstance(node, Store):
            found += _reads(node.value, inner)
            if isinstance(node.index, Scalar):
                found += _reads(node.index, inner)
            if node.mask is not None:
                found += _reads(node.mask, inner)
            found.append(Access(node.buffer, node.index, True, inner))
        elif isinstance(node, Let):
            found += _reads(node.value, inner)
            named.add(node.var)
        elif isinstance(node, Tile):
            todo.append((node.expand(), inner))
        todo += [(child, inner) for child in reversed(children(node))]
    if named:  # what a name stands for may be another number in every iteration
        found = [a if isinstance(a.index, Scalar) or named.isdisjoint(free_vars(a.index))
                 else replace(a, index=ANYWHERE) for a in found]
    return found


def _reads(value: Scalar, inner: dict[Var, Interval]) -> Iterator[Access]:
    return (Access(load.source, load.indices[0], False, inner) for load in loads(value))


def buffers_of(stmt: Stmt) -> set[Buffer]:
    """The buffers that a statement touches."""
    return {access.buffer for access in accesses(stmt)}


@dataclass
class Footprint:
    """The buffers that statements touch, and those that they write."""

    touched: set[Buffer] = field(default_factory=set)
    written: set[Buffer] = field(default_factory=set)

    def add(self, other: Footprint) -> None:
        self.touched |= other.touched
        self.written |= other.written

    def conflicts(self, other: Footprint) -> bool:
        """Whether the order of the two matters."""
        return not (self.written.isdisjoint(other.touched)
                    and other.written.isdisjoint(self.touched))


def footprint(found: list[Access]) -> Footprint:
    """The buffers of some accesses."""
    return Footprint({a.buffer for a in found}, {a.buffer for a in found if a.writes})


def meet_in_turn(loop: For, first: list[Access], second: list[Access]) -> bool:
    """Whether accesses of `second` meet those of `first` in the same iteration of a loop only."""
    around = {loop.var: Interval(loop.lo, loop.hi - 1)}
    by_buffer: dict[Buffer, list[Access]] = {}
    for x in first:
        by_buffer.setdefault(x.buffer, []).append(x)
    return all(_apart(x, y, loop.var, around) for y in second
               for x in by_buffer.get(y.buffer, ()) if x.writes or y.writes)


def _apart(x: Access, y: Access, var: Var, around: dict[Var, Interval]) -> bool:
    """Whether two accesses meet only in the same iteration of `var`.

    They do if each moves by `step` and both stay within less than a step of each other.
    """
    if isinstance(x.index, Scalar) or isinstance(y.index, Scalar):
        return False
    step = coefficient(x.index, var)
    if step is None or coefficient(y.index, var) != step:
        return False
    spans = [interval_of(index - step * var, _closed(inner, around))
             for index, inner in ((x.index, x.inner), (y.index, y.inner))]
    for p, q in (spans, spans[::-1]):
        if p.hi is None or q.lo is None or not proves_lt(p.hi - q.lo, step):
            return False
    return True


def _closed(inner: dict[Var, Interval], around: dict[Var, Interval]) -> dict[Var, Interval]:
    """The inner loops' ranges with ends that depend on nothing that varies."""
    ranges = dict(around)
    for var, (lo, hi) in inner.items():
        ranges[var] = Interval(None if lo is None else interval_of(lo, ranges).lo,
                               None if hi is None else interval_of(hi, ranges).hi)
    return ranges
