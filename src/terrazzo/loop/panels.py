"""Panels packed while code runs: rows of memory become columns side by side.

Weights mostly lie with their columns far apart and steps of k side by side, in an order that is not
the panel's: those of a convolution `[outputs][channels][taps]` go into `[taps][channels][outputs]`.
Gathered one by one, each element touches a line of its own, and a line comes as often as it has
elements. So whole runs are read, transposed in registers into a scratch that stays in the cache,
and written from there as rows of the panel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from terrazzo.base.scalar import Const, as_scalar, call, cast
from terrazzo.index import Index, Var, bounds
from terrazzo.loop.ir import Alloc, Buffer, For, If, Stmt, Store, block
from terrazzo.loop.tiles import transpose_tile

_TOGETHER = 16  # columns that go through the scratch at a time, where they divide the panel


@dataclass(frozen=True)
class KAxis:
    """An axis of k: how many steps, how far apart in the original and in the panel."""

    count: Index
    stride: Index
    room: int


@dataclass(frozen=True, eq=False)
class Panel:
    """A panel of `width` columns, `live` of which there are; the others shall be zeros."""

    packed: Buffer
    to: Index
    source: Buffer
    start: Index
    width: int
    live: Index
    column: Index  # how far apart columns are in the original
    fresh: Callable[[str], str]  # makes a name that nothing else in the kernel has

    def filled(self, k: Sequence[KAxis]) -> Stmt:
        """The code that fills it, all steps of k."""
        k = _joined(k)
        run = _run(k) if self.column != 1 else []
        if not run:
            return self._copied(k)
        outer = [axis for n, axis in enumerate(k) if n not in run]
        if len(run) == 1:
            inner = k[run[0]]
            code = self._loops(outer, lambda at, to: transpose_tile(
                self.packed, self.to + to, self.source, self.start + at, inner.count, inner.room,
                self.column, self.width, self.live))
        else:
            code = self._loops(outer, lambda at, to: self._through_scratch(k, run, at, to))
        if self.live == self.width:
            return code
        zeros = self._loops(k, lambda _, to: self._zeros(to))
        return block(code, If(call("lt", as_scalar(self.live), self.width), zeros))

    def _through_scratch(self, k: Sequence[KAxis], run: Sequence[int], at: Index, to: Index
                         ) -> Stmt:
        """Steps that are one run in the original, and not in the panel."""
        together = _TOGETHER if self.width % _TOGETHER == 0 else self.width
        length: Index = 1
        lines: dict[int, Index] = {}  # between the steps of an axis in the scratch
        for n in run:
            lines[n], length = length * together, length * k[n].count
        most = bounds(length)[1]
        assert most is not None
        scratch = Buffer(self.fresh("turned"), self.packed.dtype, most * together)
        parts = self.width // together
        part, j = self._below("part", parts), self._below("j", together)
        column = part * together
        turned = transpose_tile(scratch, 0, self.source, self.start + at + column * self.column,
                                length, together, self.column, together, self.live - column)
        here = [KAxis(k[n].count, lines[n], k[n].room) for n in sorted(run)]
        rows = self._loops(here, lambda line, row: For(j, 0, together, Store(
            self.packed, self.to + to + column + row + j, scratch[line + j]), "vector"))
        return Alloc(scratch, For(part, 0, parts, block(turned, rows)))

    def _copied(self, k: Sequence[KAxis]) -> Stmt:
        """Row by row."""
        j = self._below("j", self.width)

        def row(at: Index, to: Index) -> Stmt:
            item = cast(self.source[self.start + at + j * self.column], self.packed.dtype)
            copy = For(j, 0, self.live, Store(self.packed, self.to + to + j, item), "vector")
            return block(copy, self._zeros(to))

        return self._loops(k, row)

    def _zeros(self, to: Index) -> Stmt:
        j, zero = self._below("j", self.width), Const(self.packed.dtype, 0)
        return For(j, self.live, self.width, Store(self.packed, self.to + to + j, zero), "vector")

    def _loops(self, k: Sequence[KAxis], make: Callable[[Index, Index], Stmt]) -> Stmt:
        """Loops over axes of k, around code for a place in the original and in the panel."""
        at: Index = 0
        to: Index = 0
        loops = []
        for axis in k:
            var = self._below("p", axis.count)
            at, to = at + var * axis.stride, to + var * axis.room
            loops.append((var, axis.count))
        code = make(at, to)
        for var, count in reversed(loops):
            code = For(var, 0, count, code)
        return code

    def _below(self, name: str, extent: Index) -> Var:
        most = bounds(extent)[1]
        return Var(self.fresh(name), 0, None if most is None else max(most - 1, 0))


def _joined(k: Sequence[KAxis]) -> list[KAxis]:
    """The axes with neighbours joined, where two are one in both memories."""
    axes: list[KAxis] = []
    for axis in k:
        if axis.count == 1:
            continue
        last = axes[-1] if axes else None
        if last is not None and isinstance(axis.count, int) and isinstance(axis.stride, int) and (
                last.stride == axis.count * axis.stride and last.room == axis.count * axis.room):
            axes[-1] = KAxis(last.count * axis.count, axis.stride, axis.room)
        else:
            axes.append(axis)
    return axes


def _run(k: Sequence[KAxis]) -> list[int]:
    """Which axes are one run of numbers in the original, the innermost first."""
    run: list[int] = []
    length: Index = 1
    while isinstance(length, int):
        found = [n for n, axis in enumerate(k) if n not in run and axis.stride == length]
        if not found:
            break
        run.append(found[0])
        length = length * k[found[0]].count
    return run
