"""Convolutions on CPUs, where a task reads pixels: in place, or in rows that it has copied."""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.base.scalar import Const, cast
from terrazzo.chips.cpu.conv_plan import PlannedConv, covered
from terrazzo.chips.cpu.kernel_parts import Names
from terrazzo.index import Index, Var, ceildiv, maximum, minimum
from terrazzo.loop.ir import Buffer, For, Stmt, Store, block
from terrazzo.loop.tile_transpose import transposed_copy

Taps = list[tuple[Index, Index]]  # of each axis: the first tap that is inside, and how many

_FEW_CHANNELS = 4  # are copied one by one


@dataclass(frozen=True, eq=False)
class Source:
    """Where a task reads pixels: memory, and how far positions, taps and channels are apart."""

    buffer: Buffer
    start: Index  # of the task's first position, at tap 0
    positions: tuple[Index, ...]
    taps: tuple[Index, ...]
    channel: Index


class ReadingConv(PlannedConv):
    """A convolution whose tasks have a source of pixels."""

    def in_place(self, start: Index) -> Source:
        """Pixels where they lie."""
        return Source(self.x, start, tuple(s.stride * s.step for s in self.spaces),
                       tuple(s.dilation * s.step for s in self.spaces), self.conv.x_channel)

    def copied(self, start: Index, outer: Taps, y: Index, x: Index,
               rows: Index, columns: Index) -> tuple[Buffer, Stmt, Source]:
        """A scratch with the rows that a task needs, zeros left and right of them."""
        row, column = self.row, self.column
        tall = covered(row, 1 if self.division.by_columns else self.division.most_strip)
        wide = covered(column, self.strip_width())
        line = wide * self.copy.pitch
        steps: list[Index] = []  # between taps of the outer axes
        size: Index = tall * line
        for space in reversed(self.spaces[:-2]):
            steps.insert(0, size)
            size = size * space.taps
        scratch = Buffer(self.fresh("rows"), self.wide, size)
        names = Names(self.fresh)
        at: Index = start
        to: Index = 0
        loops: list[tuple[Var, Index, Index]] = []
        for space, step, (first, count) in zip(self.spaces[:-2], steps, outer, strict=True):
            tap = self.var("plane", space.taps)
            loops.append((tap, first, first + count))
            at, to = at + tap * (space.dilation * space.step), to + tap * step
        line_number = self.var("line", tall)
        low, high = self.inside(names, row.below, row.before - y * row.stride, row.size,
                                self.copy.row_step, covered(self.row, rows))
        left, right = self.inside(names, column.below, column.before - x * column.stride,
                                  column.size, self.copy.column_step, columns)
        inner = Names(self.fresh)
        here = inner("from", at + line_number * (self.copy.row_step * row.step) + left * (
            self.copy.column_step * column.step))
        there = inner("to", to + line_number * line)
        copy = block(self.zeros(scratch, there, 0, left * self.copy.pitch),
                     self.copy_row(scratch, there + left * self.copy.pitch, here, right - left),
                     self.zeros(scratch, there, right * self.copy.pitch, columns * self.copy.pitch))
        stmt: Stmt = For(line_number, low, high, inner.around(copy))
        for var, lo, hi in reversed(loops):
            stmt = For(var, lo, hi, stmt)
        positions = (*(0 for _ in steps), row.stride // self.copy.row_step * line,
                     column.stride // self.copy.column_step * self.copy.pitch)
        taps = (*steps, row.dilation * line, column.dilation * self.copy.pitch)
        return scratch, names.around(stmt), Source(scratch, 0, positions, taps, 1)

    def inside(self, names: Names, below: bool, before: Index, size: Index | None, step: int,
               count: Index) -> tuple[Index, Index]:
        """Which of `count` elements, `step` apart and `before` ahead of the first, exist."""
        low: Index = 0
        high = count
        if below:
            low = names("low", maximum(minimum(ceildiv(before, step), count), 0))
        if size is not None:
            high = names("high", maximum(minimum(ceildiv(size + before, step), count), low))
        return low, high

    def zeros(self, buffer: Buffer, at: Index, first: Index, end: Index) -> Stmt | None:
        if first is end or first == end:
            return None
        e = self.var("e")
        return For(e, first, end, Store(buffer, at + e, Const(self.wide, 0)), "vector")

    def copy_row(self, scratch: Buffer, to: Index, at: Index, count: Index) -> Stmt:
        """Some pixels of one row, channels last."""
        conv, channels = self.conv, self.conv.channels
        apart = self.copy.column_step * self.column.step
        together = channels == 1 or conv.x_channel == 1
        if together and apart == channels and self.copy.pitch == channels:
            e = self.var("e")
            value = cast(self.x[at + e], self.wide)
            return For(e, 0, count * channels, Store(scratch, to + e, value), "vector")
        if not together and self.x.dtype is self.wide and apart == 1 and channels > _FEW_CHANNELS:
            return transposed_copy(scratch, to, self.x, at, count, channels, self.copy.pitch,
                                   conv.x_channel)
        q, c = self.var("q"), self.var("c", channels)
        value = cast(self.x[at + q * apart + c * conv.x_channel], self.wide)
        kind = "vector" if together or channels > _FEW_CHANNELS else "unrolled"
        return For(q, 0, count, For(c, 0, channels, Store(
            scratch, to + q * self.copy.pitch + c, value), kind))
