"""The loops of one stage at one place of a function: their variables, values and bounds.

Splits give ragged inner bounds, `min(factor, extent - outer*factor)`, so that no iteration needs
a test. Only where a bound cannot be said with the loops outside of it (a fusion of ragged loops, a
range that depends on a loop further in) does a loop run over too much, behind a guard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from terrazzo.base.scalar import FromIndex, Reduce, Scalar, call, rewrite, substitute_indices
from terrazzo.dtypes import int64
from terrazzo.expr.reductions import rename_axes
from terrazzo.expr.schedule import Fuse, Split
from terrazzo.expr.stage import Stage
from terrazzo.index import (
    Index,
    IndexExpr,
    Var,
    bounds,
    ceildiv,
    divisible,
    free_vars,
    maximum,
    minimum,
    proves_eq,
    proves_le,
    substitute,
)
from terrazzo.loop.bounds import Interval, clip, interval_of, length


class Root(NamedTuple):
    """An axis of the stage here: its variable, its range, and a size that surely holds it.

    The loop over an axis counts from `lo`; where a region begins at a varying place, from 0.
    """

    var: Var
    lo: Index
    hi: Index  # exclusive
    room: Index
    from_zero: bool = False


class Guard(NamedTuple):
    """A condition `lo <= value < hi` on an iteration that may be too much."""

    leaves: frozenset[str]
    value: Index
    lo: Index | None
    hi: Index

    def test(self) -> Scalar:
        inside = call("lt", _scalar(self.value), _scalar(self.hi))
        if self.lo is None:
            return inside
        return call("and", call("le", _scalar(self.lo), _scalar(self.value)), inside)


def _scalar(index: Index) -> Scalar:
    return FromIndex(int64, index)


def loop_var(name: str, lo: Index, hi: Index, outer: Iterable[Var] = ()) -> Var:
    """A loop's variable, with the bounds that hold whatever the loops in `outer` do."""
    low = bounds(lo)[0]
    top: Index | None = hi - 1
    if isinstance(top, IndexExpr) and not free_vars(top).isdisjoint(outer):
        top = bounds(top)[1]
    if isinstance(top, int) and low is not None:
        top = max(top, low)  # a loop that never runs has no values
    return Var(name, low, top)


class Instance:
    """One stage's loops in the making; values and bounds are worked out when asked for."""

    def __init__(self, stage: Stage, region: Sequence[tuple[Index, Index, Index]],
                 fresh: Callable[[str], str], loops: set[Var]):
        """`region` is (lo, hi, room) for each dimension; `loops` are all loop variables so far."""
        self.stage, self.nest = stage, stage.nest
        self._fresh, self._loops = fresh, loops
        self._split = {r.axis: r for r in stage.nest.relations if isinstance(r, Split)}
        self._made = {name: r for r in self._split.values() for name in (r.outer, r.inner)}
        self._fused: dict[str, Fuse] = {}
        self._fusion: dict[str, Fuse] = {}
        for relation in stage.nest.relations:
            if isinstance(relation, Fuse):
                self._fused[relation.outer] = self._fused[relation.inner] = relation
                self._fusion[relation.fused] = relation
        self.roots: dict[str, Root] = {}
        renamed: dict[Var, Var] = {}
        for axis, (lo, hi, room) in zip(stage.axes, region, strict=True):
            name = axis.var.name
            var = loop_var(self._root_name(name, isinstance(lo, IndexExpr)), lo, hi, loops)
            loops.add(var)
            renamed[axis.var] = var
            self.roots[name] = Root(var, lo, hi, room, isinstance(lo, IndexExpr))
        self.body = self._instantiate(substitute_indices(stage.body, renamed))
        self._values: dict[str, Index] = {}
        self._variables: dict[str, Var] = {}  # of the loops; those that run once have none
        self.passed: list[Guard] = []  # tested by what stands around the code being made

    def _root_name(self, axis: str, from_zero: bool = False) -> str:
        """A name for an axis' variable; the plain one only where that will be a loop's."""
        inner = from_zero or axis in self._split or axis in self._fused
        return self._fresh(f"{axis}.value" if inner else axis)

    def _instantiate(self, body: Scalar) -> Scalar:
        """Give the reductions that are loops their variables."""
        scheduled = set(self.nest.reduction)

        def visit(node: Scalar) -> Scalar | None:
            if not isinstance(node, Reduce):
                return None
            renamed: dict[Var, Var] = {}
            for axis in node.axes:
                name = axis.var.name
                if name not in scheduled:
                    continue
                lo, hi = (substitute(end, renamed) for end in (axis.lo, axis.hi))
                if name not in self.roots:
                    ranges = {r.var: Interval(r.lo, r.hi - 1) for r in self.roots.values()}
                    room = interval_of(hi - lo, ranges).hi
                    var = loop_var(self._root_name(name), lo, hi, self._loops)
                    self._loops.add(var)
                    self.roots[name] = Root(var, lo, hi, hi - lo if room is None else room)
                renamed[axis.var] = self.roots[name].var
            return rename_axes(node, renamed) if renamed else None

        return rewrite(body, visit)

    # ------------------------------------------------------------ values
    def value(self, axis: str) -> Index:
        """What an axis stands for, in variables of the loops; from its `lo` if it is a root."""
        if axis not in self._values:
            self._values[axis] = self._work_out(axis)
        return self._values[axis]

    def _work_out(self, axis: str) -> Index:
        root = self.roots.get(axis)
        start = 0 if root is None else self.resolve(root.lo)
        if axis in self._split:
            step = self._split[axis]
            return start + self.value(step.outer) * self.piece(step) + self.value(step.inner)
        if axis in self._fused:
            fuse = self._fused[axis]
            both, inner = self.value(fuse.fused), self.room(fuse.inner)
            if inner == 0:
                return start  # the loop never runs
            return start + (both // inner if axis == fuse.outer else both % inner)
        if proves_eq(self.extent(axis), 1):
            return start
        if root is not None and not root.from_zero:
            self._variables[axis] = root.var
            return root.var
        # Bounded by its room, not by its ragged extent: a plain number where possible.
        var = loop_var(self._fresh(axis), 0, self.room(axis), self._loops)
        self._loops.add(var)
        self._variables[axis] = var
        return start + var

    def extent(self, axis: str) -> Index:
        """How many values an axis has, in variables of the loops outside of it."""
        if axis in self.roots:
            root = self.roots[axis]
            return length(self.resolve(root.lo), self.resolve(root.hi))
        if axis in self._fusion:
            fuse = self._fusion[axis]
            return self.room(fuse.outer) * self.room(fuse.inner)
        step = self._made[axis]
        whole, piece = self.extent(step.axis), self.piece(step)
        if axis == step.outer:
            return ceildiv(whole, piece) if step.nparts is None else step.nparts
        if isinstance(piece, int) and divisible(whole, piece) and (
                step.nparts is None or proves_eq(whole, piece * step.nparts)):
            return piece
        rest = whole - self.value(step.outer) * piece
        if step.nparts is not None and not proves_le((step.nparts - 1) * piece, whole):
            rest = maximum(rest, 0)  # there may be fewer values than pieces
        return minimum(piece, rest)

    def piece(self, step: Split) -> Index:
        """The length of the pieces that an axis is cut into."""
        return step.piece(self.room(step.axis))

    def room(self, axis: str) -> Index:
        """A count of values that is never exceeded and depends on no loop of this stage."""
        if axis in self.roots:
            return self.roots[axis].room
        if axis in self._fusion:
            fuse = self._fusion[axis]
            return self.room(fuse.outer) * self.room(fuse.inner)
        step = self._made[axis]
        whole, piece = self.room(step.axis), self.piece(step)
        if axis == step.outer:
            return ceildiv(whole, piece) if step.nparts is None else step.nparts
        return whole if proves_le(whole, piece) else piece

    def resolve(self, index: Index) -> Index:
        """An index over the stage's axes, in variables of its loops."""
        if not isinstance(index, IndexExpr):
            return index
        used = free_vars(index)
        table = {r.var: self.value(n) for n, r in self.roots.items() if r.var in used}
        return substitute(index, {v: x for v, x in table.items() if v is not x})

    def substitution(self) -> dict[Var, Index]:
        """The value of every axis of the stage, for use in its body."""
        table = {r.var: self.value(n) for n, r in self.roots.items()}
        return {v: x for v, x in table.items() if v is not x}

    # ------------------------------------------------------------ loops
    def leaf_range(self, leaf: str) -> tuple[Index, Index]:
        """The bounds of a loop, as tight as they get."""
        root = self.roots.get(leaf)
        if root is not None and not root.from_zero:
            return self.resolve(root.lo), self.resolve(root.hi)
        return 0, self.extent(leaf)

    def variable(self, leaf: str) -> Var | None:
        """The variable of a loop, or None where it runs exactly once and no loop is needed."""
        self.value(leaf)
        return self._variables.get(leaf)

    def loop_range(self, leaf: str, opened: Iterable[str]) -> tuple[Index, Index, Guard | None]:
        """The bounds of a loop inside the loops `opened`, and a guard where they are too wide."""
        lo, hi = self.leaf_range(leaf)
        var = self.variable(leaf)
        assert var is not None
        later = self._unopened(opened)
        if free_vars(lo).isdisjoint(later) and free_vars(hi).isdisjoint(later):
            return lo, hi, None
        low, high = interval_of(lo, later).lo, interval_of(hi, later).hi
        if low is None or high is None:
            low, high = 0, self.room(leaf)
        guard = Guard(frozenset((leaf,)), var, None if lo == 0 else lo, hi)
        return low, high, guard

    def fusion_guards(self) -> list[Guard]:
        """Guards for fusions whose parts do not fill the room that the fused loop walks over."""
        found = []
        for fuse in self._fusion.values():
            for axis in (fuse.outer, fuse.inner):
                extent = self.extent(axis)
                if not proves_eq(extent, self.room(axis)):
                    start = self.resolve(self.roots[axis].lo) if axis in self.roots else 0
                    found.append(Guard(self.nest.leaves_of(axis), self.value(axis) - start, None,
                                       extent))
        return found

    def _unopened(self, opened: Iterable[str]) -> dict[Var, Interval]:
        inside = set(opened)
        ranges: dict[Var, Interval] = {}
        for leaf in reversed(self.nest.order):
            var = self.variable(leaf)
            if leaf in inside or var is None:
                continue
            if leaf in self.roots:
                lo, hi = self.leaf_range(leaf)
                ranges[var] = Interval(lo, hi - 1)
            else:
                ranges[var] = Interval(0, self.room(leaf) - 1)
        return _closed(ranges)

    def root_ranges(self, opened: Iterable[str]) -> tuple[dict[Var, Interval], dict[Var, Interval]]:
        """Where each axis lies inside the loops `opened`: exactly, and in whole pieces."""
        opened = set(opened)
        later = self._unopened(opened)
        exact: dict[Var, Interval] = {}
        whole: dict[Var, Interval] = {}
        guarded = bool(self.fusion_guards())
        for name, root in self.roots.items():
            around = interval_of(self.value(name), later)
            limits = Interval(interval_of(self.resolve(root.lo), later).lo,
                              interval_of(self.resolve(root.hi) - 1, later).hi)
            whole[root.var] = around
            inside = self.nest.leaves_of(name) <= opened and not guarded
            exact[root.var] = around if inside else clip(around, limits)
        return exact, whole


def _closed(ranges: dict[Var, Interval]) -> dict[Var, Interval]:
    """Ranges whose ends mention none of the ranging variables themselves."""
    for _ in ranges:
        open_ends = False
        for var, (lo, hi) in list(ranges.items()):
            mentioned = {v for end in (lo, hi) if end is not None for v in free_vars(end)}
            if mentioned.isdisjoint(ranges):
                continue
            open_ends = True
            ranges[var] = Interval(
                None if lo is None else interval_of(lo, ranges).lo,
                None if hi is None else interval_of(hi, ranges).hi)
        if not open_ends:
            break
    return ranges

