"""Convolutions on CPUs, what is decided first: copies of rows, register tiles, tasks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, cached_property

from terrazzo.chips.cpu.conv_parts import ConvKernel
from terrazzo.chips.cpu.conv_shape import TileShape, choose_tile
from terrazzo.chips.cpu.division import by_threads, longest_share, thread_counts
from terrazzo.chips.cpu.kernel_parts import Names
from terrazzo.chips.spec import ChipSpec
from terrazzo.expr.convolution import Convolution, Space
from terrazzo.expr.ir import Program, Tensor
from terrazzo.index import Index, ceildiv, minimum

_STRIPS_TRIED = 512
_STRIP_SHARE = 0.4  # of the second-level cache, for the rows of a task and its output
_WEIGHT_CYCLES, _COPY_CYCLES = 2.5, 8.0  # of a line that is read again, or copied
_FAR_CYCLES = 8.0  # of a line that comes from main memory
_FAR_SHARE = 1 / 8  # of the last cache: strips that are larger do not stay there
_SHARED_CYCLES = 4.0  # of a line of input that another core made
_TASK_CYCLES = 1000
_LINE = 64
_WAY = 4096  # bytes of one way of the first-level cache: addresses so far apart share a set
_FEW_PIXELS = 9  # have room in a set, next to weights


@dataclass(frozen=True)
class Copy:
    """Whether rows are copied, and how far apart pixels are in the copy.

    A window of 1 skips pixels: the copy leaves them out, by `row_step` and `column_step`.
    """

    needed: bool
    pitch: int
    row_step: int
    column_step: int


@dataclass(frozen=True)
class Tiling:
    """Register tiles: a row of pixels is `larger` ones of `across` pixels, then ones of one less.

    `run` steps of k read neighbours in memory.
    """

    shape: TileShape
    is_run: bool  # whether the channels of neighbouring taps are one run of numbers
    run: int
    width: int  # of a vector
    nr: int
    panels: int
    tiles: Index
    larger: Index

    def start(self, tile: Index) -> Index:
        """The first column of a tile."""
        across = self.shape.across
        if not isinstance(self.tiles, int):
            return tile * across
        return tile * (across - 1) + minimum(tile, self.larger)


@dataclass(frozen=True, eq=False)
class Division:
    """Tasks: strips of rows (of tiles, where there is one row), and ranges of panels."""

    names: Names  # of the three sizes, which depend on the number of threads
    by_columns: bool
    strip: Index
    range: Index
    ranges: Index
    most_strip: int
    most_range: int


def covered(space: Space, count: Index) -> Index:
    """How much of the input lies under so many neighbouring positions."""
    if space.taps == 1:
        return count
    return (count - 1) * space.stride + (space.taps - 1) * space.dilation + 1


class PlannedConv(ConvKernel):
    """A convolution of any number of groups, with all sizes of its kernel."""

    def __init__(self, program: Program, conv: Convolution, chip: ChipSpec,
                 constants: frozenset[Tensor]):
        super().__init__(program, conv, chip, constants)
        self.copy = self.plan_copy()
        self.tiling = self.plan_tiles()
        if self.is_crowded():
            self.copy = replace(self.copy, needed=True)
        self.division = self.plan_tasks()

    @cached_property
    def share(self) -> int:
        """Outputs of a group."""
        share = self.conv.share
        assert isinstance(share, int)
        return share

    @cached_property
    def depth(self) -> int:
        """Steps of k."""
        return self.conv.channels * math.prod(s.taps for s in self.spaces)

    def strip_width(self) -> Index:
        """At most so many pixels are in a row of a strip."""
        division = self.division
        return division.most_strip * self.tiling.shape.across if division.by_columns else (
            self.column.extent)

    def plan_copy(self) -> Copy:
        conv, row, column, item = self.conv, self.row, self.column, self.wide.itemsize
        channels = conv.channels
        needed = (self.x.dtype is not self.wide or column.below or column.size is not None
                  or (channels > 1 and conv.x_channel != 1))
        column_step = column.stride if column.taps == 1 else 1
        apart = column.stride // column_step * channels * item
        pitch = channels + (_LINE // item if apart % (_WAY // 4) == 0 else 0)
        return Copy(needed, pitch, row.stride if row.taps == 1 else 1, column_step)

    def plan_tiles(self) -> Tiling:
        conv, column, copy = self.conv, self.column, self.copy
        # Channels of neighbouring taps are one run of numbers, where nothing lies between them.
        is_run = column.taps == 1 or (
            column.dilation * (copy.pitch if copy.needed else column.step)
            == conv.channels * (1 if copy.needed else conv.x_channel))
        run = conv.channels * (column.taps if is_run else 1)
        shape = choose_tile(column.extent, self.row.extent, self.share, self.depth, run,
                            self.chip, self.wide.itemsize)
        width = min(self.lanes, 1 << (self.share - 1).bit_length())
        nr, total, across = shape.vectors * width, column.extent, shape.across
        tiles: Index = ceildiv(total, across)
        larger: Index = total // across
        if isinstance(total, int):
            tiles = math.ceil(total / across)
            larger = total - (across - 1) * tiles
        return Tiling(shape, is_run, run, width, nr, math.ceil(self.share / nr), tiles, larger)

    def is_crowded(self) -> bool:
        """Whether pixels of a tile would push each other out of the first-level cache."""
        step = self.column.stride * self.column.step
        return isinstance(step, int) and step * self.wide.itemsize % _WAY == 0 and (
            self.tiling.shape.across > _FEW_PIXELS and self.column.taps == 1)

    def plan_tasks(self) -> Division:
        """The division that is done first, by the number of threads.

        Each strip reads all weights of its panels, and each range of panels all rows of its strip.
        """
        height, width, tiling = self.row.extent, self.column.extent, self.tiling
        by_columns = isinstance(height, int) and height == 1
        if by_columns:
            total, unit = tiling.tiles if isinstance(tiling.tiles, int) else 64, 1
            pixels = tiling.shape.across
        else:
            total, unit = height if isinstance(height, int) else 64, tiling.shape.down
            pixels = width if isinstance(width, int) else 64 * tiling.shape.across
        units = math.ceil(total / unit)
        # All counts of strips, as long as they differ much; of an absurdly long image, few.
        counts = [*range(1, min(units, _STRIPS_TRIED) + 1)]
        while counts[-1] < units:
            counts.append(min(2 * counts[-1], units))
        heights = {math.ceil(units / strips) for strips in counts}
        batch = 1 if self.conv.batch is None else self.conv.batch.extent
        others = self.conv.groups * math.prod(
            n for n in (batch, *(s.extent for s in self.spaces[:-2])) if isinstance(n, int))

        @cache
        def plan(threads: int) -> tuple[int, ...]:
            options = []
            for height in heights:
                tasks = others * math.ceil(units / height)
                covers = covered(self.column, height * unit * pixels) if by_columns else (
                    covered(self.row, height * unit) * covered(self.column, pixels))
                # One range, or as many as make one, two or four tasks a thread.
                for each in (0, 1, 2, 4):
                    ranges = min(max(math.ceil(each * threads / tasks), 1), tiling.panels)
                    size = math.ceil(tiling.panels / ranges)
                    ranges = math.ceil(tiling.panels / size)
                    share = longest_share(tasks * ranges, threads)
                    options.append((self.cycles(
                        height * unit * pixels, covers, size, share, threads > 1),
                        height * unit, size, ranges))
            return min(options)[1:]

        plans = [plan(threads) for threads in thread_counts(self.chip)]
        most_strip = max(strip for strip, _, _ in plans)
        most_range = max(size for _, size, _ in plans)
        names = Names(self.fresh)
        strip, size, ranges = by_threads(self.chip, plan)
        return Division(names, by_columns, names("strip_size", strip, most_strip),
                        names("range_size", size, most_range),
                        names("ranges", ranges, tiling.panels), most_strip, most_range)

    def cycles(self, pixels: int, covers: Index, panels: int, share: float, shared: bool) -> float:
        """What a thread takes for its share of tasks, each some pixels under some panels.

        The input of one layer is the output of another, where threads had strips, too: who has
        the same one finds it in its cache, all else comes from the caches of other cores.
        """
        item, tiling = self.wide.itemsize, self.tiling
        assert isinstance(covers, int)
        input_bytes = covers * self.copy.pitch * item * math.prod(
            s.taps for s in self.spaces[:-2])
        outputs = min(self.share, panels * tiling.nr)
        results = pixels * outputs * item
        weights = self.depth * panels * tiling.nr * item
        room = int(_STRIP_SHARE * self.chip.l2_bytes) if self.chip.l2_bytes else 1 << 18
        # Cycles for a line: weights that stay in the cache cost little to read again.
        again = _WEIGHT_CYCLES if weights > self.chip.l2_bytes else (
            0.5 if tiling.shape.chunk else 0.1)
        lines = input_bytes * (
            (_COPY_CYCLES if self.copy.needed else 0.5) + shared * _SHARED_CYCLES)
        if input_bytes + results > room:
            lines += panels * input_bytes * _WEIGHT_CYCLES + results
        last = max(int(_FAR_SHARE * self.chip.l3_bytes), 4 * self.chip.l2_bytes, room)
        if tiling.shape.chunk and input_bytes + results > last:
            # Each chunk of weights meets all pixels, whose sums come and go.
            read = panels * input_bytes * math.ceil(self.depth / tiling.run)
            lines += (read + 2 * results * math.ceil(self.depth / tiling.shape.chunk)) * _FAR_CYCLES
        products = self.depth * outputs * pixels / (2 * self.lanes)
        task = products + (lines + weights * again) / _LINE + _TASK_CYCLES
        return share * task + weights * _WEIGHT_CYCLES / _LINE
