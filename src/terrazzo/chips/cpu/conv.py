"""Convolutions on CPUs: register tiles of neighbouring pixels by vectors of output channels.

With channels last, a row of a window is one run of numbers in memory. So a convolution is a matrix
product whose rows overlap: pixels of the tile are rows, a step of one pixel apart, and the loop
over k runs along the window. Nothing is unfolded (no im2col):

| what | how |
|---|---|
| padding above and below | taps outside are left out of the loops |
| padding left and right | rows are copied into a scratch with zeros around them |
| other types, channels not last | widened and transposed by the same copy |
| weights | in panels `[outputs / nr][taps][channels][nr]`, packed ahead where they are constant |
| bias, residual, activation | on the sums in registers, where that is little work |

A task is a strip of rows and a range of panels: the strip stays in the second-level cache, and a
panel meets all its pixels before the next one comes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from terrazzo.base.scalar import Const, Load, Scalar, as_scalar, call, cast
from terrazzo.chips.cpu.conv_parts import ConvKernel, Place, Values
from terrazzo.chips.cpu.conv_shape import choose_tile
from terrazzo.chips.cpu.depthwise import Depthwise, keeps_channels_apart
from terrazzo.chips.cpu.division import by_threads, longest_share, thread_counts
from terrazzo.chips.cpu.kernel_parts import Names
from terrazzo.chips.spec import ChipSpec
from terrazzo.dtypes import float32, float64
from terrazzo.expr.convolution import NO_SPACE, Convolution, match_convolution
from terrazzo.expr.ir import Program, Tensor
from terrazzo.index import Index, Var, ceildiv, maximum, minimum
from terrazzo.loop.ir import Alloc, Buffer, For, Function, If, Stmt, Store, block
from terrazzo.loop.packing import Packing
from terrazzo.loop.tile_transpose import transposed_copy
from terrazzo.loop.window_tile import Level, Pixels, window_tile

Taps = list[tuple[Index, Index]]  # of each axis: the first tap that is inside, and how many

_STRIPS_TRIED = 512
_STRIP_SHARE = 0.4  # of the second-level cache, for the rows of a task and its output
_WEIGHT_CYCLES, _COPY_CYCLES = 2.5, 8.0  # of a line that is read again, or copied
_SHARED_CYCLES = 4.0  # of a line of input that another core made
_TASK_CYCLES = 1000
_TASK_FLOPS = 1 << 17  # below this a task of its own does not pay
_PACK_ELEMENTS = 16384  # elements worth packing in a task of their own
_LINE = 64
_WAY = 4096  # bytes of one way of the first-level cache: addresses so far apart share a set
_FEW_CHANNELS = 4  # are copied one by one
_FEW_PIXELS = 9  # have room in a set, next to weights


def lower_convolution(program: Program, chip: ChipSpec, constants: frozenset[Tensor]
                      ) -> Function | None:
    """The kernel of a program that is one convolution; None if it is something else."""
    conv = match_convolution(program)
    if conv is None or not _is_supported(conv):
        return None
    if keeps_channels_apart(conv):
        return Depthwise(program, conv, chip, constants).lowered()
    return _Dense(program, conv.merged(), chip, constants).lowered()


def _is_supported(conv: Convolution) -> bool:
    wide = conv.reduce.dtype
    if wide not in (float32, float64) or conv.outputs.extent == 0 or conv.channels == 0:
        return False
    return isinstance(conv.outputs.extent, int) and all(
        load.dtype is wide or (load.dtype.compute is wide and load.dtype.bits == 16)
        for load in (conv.x, conv.w))


# ---------------------------------------------------------------- what a task works on
@dataclass(frozen=True, eq=False)
class _Source:
    """Where a task reads pixels: memory, and how far positions, taps and channels are apart."""

    buffer: Buffer
    start: Index  # of the task's first position, at tap 0
    positions: tuple[Index, ...]
    taps: tuple[Index, ...]
    channel: Index


@dataclass(frozen=True, eq=False)
class _Strip:
    """The pixels of a task under one panel."""

    weights: Place
    source: _Source
    values: Values  # of the axes other than rows and columns, at the first output
    outer: Taps  # of the axes other than rows and columns
    y: Index
    rows: Index
    x: Index
    first_tile: Index
    tiles: Index
    live: int  # outputs of the panel
    sums: Buffer | None  # where sums are kept, if not in the output

    @property
    def end_tile(self) -> Index:
        return self.first_tile + self.tiles


class _Dense(ConvKernel):
    """One convolution in the making, of any number of groups."""

    def __init__(self, program: Program, conv: Convolution, chip: ChipSpec,
                 constants: frozenset[Tensor]):
        super().__init__(program, conv, chip, constants)
        # Two axes at least: rows and columns.
        missing = max(0, 2 - len(conv.spaces))
        self.spaces = (NO_SPACE,) * missing + conv.spaces
        self.row, self.column = self.spaces[-2:]
        share = conv.share
        assert isinstance(share, int)
        self.share: int = share
        self.depth = conv.channels * math.prod(s.taps for s in self.spaces)
        self.plan_copy()
        # Channels of neighbouring taps are one run of numbers, where nothing lies between them.
        self.is_run = self.column.taps == 1 or (
            self.column.dilation * (self.pitch if self.copies else self.column.step)
            == conv.channels * (1 if self.copies else conv.x_channel))
        self.run = conv.channels * (self.column.taps if self.is_run else 1)
        self.shape = choose_tile(self.column.extent, self.row.extent, share, self.depth, self.run,
                                 chip, self.wide.itemsize)
        self.copies |= self.is_crowded()
        self.width = min(self.lanes, 1 << (share - 1).bit_length())
        self.nr = self.shape.vectors * self.width
        self.panels = math.ceil(share / self.nr)
        self.plan_columns()
        self.plan_tasks()

    # ------------------------------------------------------------ decisions
    def plan_columns(self) -> None:
        """A row of pixels as tiles: `larger` ones of `across` pixels, then ones of one less."""
        width, across = self.column.extent, self.shape.across
        if isinstance(width, int):
            self.tiles: Index = math.ceil(width / across)
            self.larger: Index = width - (across - 1) * math.ceil(width / across)
        else:
            self.tiles, self.larger = ceildiv(width, across), width // across

    def plan_copy(self) -> None:
        """Whether rows are copied, and how far apart pixels are in the copy."""
        conv, column = self.conv, self.column
        channels = conv.channels
        self.copies = (self.x.dtype is not self.wide or column.below or column.size is not None
                       or (channels > 1 and conv.x_channel != 1))
        self.pitch = channels
        # A window of 1 skips pixels: the copy leaves them out.
        self.row_step = self.row.stride if self.row.taps == 1 else 1
        self.column_step = column.stride if column.taps == 1 else 1
        apart = column.stride // self.column_step * channels * self.wide.itemsize
        if apart % (_WAY // 4) == 0:
            self.pitch += _LINE // self.wide.itemsize

    def is_crowded(self) -> bool:
        """Whether pixels of a tile would push each other out of the first-level cache."""
        step = self.column.stride * self.column.step
        return isinstance(step, int) and step * self.wide.itemsize % _WAY == 0 and (
            self.shape.across > _FEW_PIXELS and self.column.taps == 1)

    def rows_of(self, rows: Index) -> Index:
        """Rows of the input under so many rows of the output."""
        space = self.row
        if space.taps == 1:
            return rows
        return (rows - 1) * space.stride + (space.taps - 1) * space.dilation + 1

    def columns_of(self, columns: Index) -> Index:
        """Columns of the input under so many columns of the output."""
        space = self.column
        if space.taps == 1:
            return columns
        return (columns - 1) * space.stride + (space.taps - 1) * space.dilation + 1

    def plan_tasks(self) -> None:
        """Strips of rows (or of columns, where there is one row) and ranges of panels.

        Each strip reads all weights of its panels, and each range of panels all rows of its strip:
        the division that is done first is taken, by the number of threads.
        """
        height, width = self.row.extent, self.column.extent
        self.by_columns = isinstance(height, int) and height == 1
        if self.by_columns:
            total, unit = self.tiles if isinstance(self.tiles, int) else 64, 1
            pixels = self.shape.across
        else:
            total, unit = height if isinstance(height, int) else 64, self.shape.down
            pixels = width if isinstance(width, int) else 64 * self.shape.across
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
                # One range, or as many as make one, two or four tasks a thread.
                for each in (0, 1, 2, 4):
                    ranges = min(max(math.ceil(each * threads / tasks), 1), self.panels)
                    size = math.ceil(self.panels / ranges)
                    ranges = math.ceil(self.panels / size)
                    share = longest_share(tasks * ranges, threads)
                    options.append((self.cycles(height * unit, pixels, size, share, threads > 1),
                                    height * unit, size, ranges))
            return min(options)[1:]

        plans = [plan(threads) for threads in thread_counts(self.chip)]
        self.most_strip = max(strip for strip, _, _ in plans)
        self.most_range = max(size for _, size, _ in plans)
        # Rows, or tiles of columns; panels; and how many such ranges of panels there are.
        self.divided = Names(self.fresh)
        strip, size, ranges = by_threads(self.chip, plan)
        self.strip = self.divided("strip_size", strip, self.most_strip)
        self.range = self.divided("range_size", size, self.most_range)
        self.ranges = self.divided("ranges", ranges, self.panels)

    def cycles(self, strip: int, pixels: int, panels: int, share: float, shared: bool) -> float:
        """What a thread takes for its share of tasks, each a strip under some panels.

        The input of one layer is the output of another, where threads had strips, too: who has
        the same one finds it in its cache, all else comes from the caches of other cores.
        """
        item = self.wide.itemsize
        if self.by_columns:
            covered = self.columns_of(strip * pixels)
        else:
            covered = self.rows_of(strip) * self.columns_of(pixels)
        assert isinstance(covered, int)
        input_bytes = covered * self.pitch * item * math.prod(s.taps for s in self.spaces[:-2])
        outputs = min(self.share, panels * self.nr)
        results = strip * pixels * outputs * item
        weights = self.depth * panels * self.nr * item
        room = int(_STRIP_SHARE * self.chip.l2_bytes) if self.chip.l2_bytes else 1 << 18
        # Cycles for a line: weights that stay in the cache cost little to read again.
        again = _WEIGHT_CYCLES if weights > self.chip.l2_bytes else 0.5 if self.shape.chunk else 0.1
        lines = input_bytes * ((_COPY_CYCLES if self.copies else 0.5) + shared * _SHARED_CYCLES)
        if input_bytes + results > room:
            lines += panels * input_bytes * _WEIGHT_CYCLES + results
        products = self.depth * outputs * strip * pixels / (2 * self.lanes)
        task = products + (lines + weights * again) / _LINE + _TASK_CYCLES
        return share * task + weights * _WEIGHT_CYCLES / _LINE

    # ------------------------------------------------------------ the function
    def lowered(self) -> Function:
        """The kernel."""
        packing = self.packing() if self.may_pack else None
        if packing is not None:
            source = self.conv.w.source
            self.packed[list(self.buffers).index(source)] = packing
            self.w = self.buffers[source] = Buffer(self.w.name, self.wide, packing.size, True)
            return self.function(self.tasks(self.w))
        size = self.conv.groups * self.panels * self.depth * self.nr
        packed = Buffer(self.fresh("w_packed"), self.wide, size)
        return self.function(Alloc(packed, block(self.pack(packed), self.tasks(packed))))

    def packing(self) -> Packing | None:
        """How constant weights shall lie, if their strides are known."""
        conv = self.conv
        steps = [(s.taps, s.w_step) for s in self.spaces] + [(conv.channels, conv.w_channel)]
        numbers = [conv.w_output, conv.w_start, *(step for _, step in steps)]
        if not all(isinstance(n, int) for n in numbers):
            return None
        output, start, *between = (n for n in numbers if isinstance(n, int))
        k = tuple((n, step) for (n, _), step in zip(steps, between, strict=True))
        return Packing(self.wide, self.nr, (self.share, output), k,
                       ((conv.groups, self.share * output),), start)

    def pack(self, packed: Buffer) -> Stmt:
        """All weights in panels, in parallel."""
        conv, nr = self.conv, self.nr
        taps = math.prod(s.taps for s in self.spaces)
        task, names = self.var("task"), Names(self.fresh)
        group = names("group", task // (self.panels * taps))
        panel = names("panel", task // taps % self.panels)
        tap = names("tap", task % taps)
        c, j, rest = self.var("c", conv.channels), self.var("j", nr), self.var("j", nr)
        first = names("outputs", panel * nr)
        at = conv.w_start + c * conv.w_channel + (group * self.share + first + j) * conv.w_output
        left = tap
        for space in reversed(self.spaces):
            at = at + left % space.taps * space.w_step
            left = left // space.taps
        to = names("to", task * (conv.channels * nr)) + c * nr
        live = names("live", minimum(nr, self.share - first), nr)
        value = cast(Load(self.w.dtype, self.w, (at,)), self.wide)
        body = For(c, 0, conv.channels, block(
            For(j, 0, live, Store(packed, to + j, value), "vector"),
            For(rest, live, nr, Store(packed, to + rest, Const(self.wide, 0)), "vector")))
        return For(task, 0, conv.groups * self.panels * taps, names.around(body), "parallel",
                   max(1, _PACK_ELEMENTS // (conv.channels * nr)))

    def tasks(self, weights: Buffer) -> Stmt:
        """One task for each member of the batch, group, strip and range of panels."""
        conv, names, divided = self.conv, Names(self.fresh), self.divided
        task = self.var("task")
        outer = self.spaces[:-2]
        strips = divided("strips", ceildiv(
            self.tiles if self.by_columns else self.row.extent, self.strip))
        batch: Index = 1 if conv.batch is None else conv.batch.extent
        left: Index = task
        values: dict[Var, Index] = {}
        strip = names("strip", left % strips)
        left = left // strips
        for space in reversed(outer):
            assert space.position is not None
            values[space.position.var] = names("slice", left % space.extent)
            left = left // space.extent
        member = names("member", left % batch)
        if conv.batch is not None:
            values[conv.batch.var] = member
        left = left // batch
        group = names("group", left % conv.groups)
        panels = names("panels", left // conv.groups * self.range)
        count = strips * batch * conv.groups * self.ranges
        for space in outer:
            count = count * space.extent
        body = self.task(weights, values, member, group, panels, strip)
        flops = 2 * self.depth * self.range * self.nr * self.strip
        pixels = self.shape.across if self.by_columns else self.column.extent
        return divided.around(For(task, 0, count, names.around(body), "parallel",
                                  ceildiv(_TASK_FLOPS, maximum(flops * pixels, 1))))

    def task(self, weights: Buffer, values: dict[Var, Index], member: Index, group: Index,
             panels: Index, strip: Index) -> Stmt:
        """A strip of pixels under all panels of a range."""
        names = Names(self.fresh)
        first_tile: Index = 0
        y: Index = 0
        rows, tiles = self.row.extent, self.tiles
        if self.by_columns:
            first_tile = names("tile_first", strip * self.strip)
            tiles = names("tiles", minimum(self.strip, self.tiles - first_tile),
                          self.most_strip)
        else:
            y = names("y_first", strip * self.strip)
            rows = names("rows", minimum(self.strip, self.row.extent - y),
                         self.most_strip)
        x = names("x_first", self.tile_start(first_tile))
        outer = []
        for space in self.spaces[:-2]:
            assert space.position is not None
            outer.append(self.taps(names, space, values[space.position.var]))
        start = self.conv.x_start + member * self.conv.x_batch + group * self.conv.x_group
        for space in self.spaces[:-2]:
            assert space.position is not None
            start = start + values[space.position.var] * (space.stride * space.step)
        start = start + y * (self.row.stride * self.row.step) + x * (
            self.column.stride * self.column.step)
        scratch, fill, source = None, None, self.in_place(start)
        if self.copies:
            columns = names("columns", self.columns_of(minimum(
                self.column.extent, self.tile_start(first_tile + tiles)) - x))
            scratch, fill, source = self.copied(start, outer, y, x, rows, columns)
        number = self.var("number", self.most_range)

        def panel(number: Index, live: int) -> Stmt:
            inner = Names(self.fresh)
            which = inner("panel", panels + number)
            b = inner("b", (group * self.panels + which) * (self.depth * self.nr))
            output = inner("output", group * self.share + which * self.nr)
            here = {**values, self.conv.outputs.var: output}
            stored = self.sums_in_output or (self.after is not None and not self.shape.chunk)
            sums = None if stored else Buffer(
                self.fresh("sums"), self.wide, self.strip_pixels() * self.nr)
            strip = _Strip((weights, b), source, here, outer, y, rows, x, first_tile, tiles, live,
                           sums)
            code = self.in_chunks(strip) if self.shape.chunk else self.at_once(strip)
            return inner.around(code if sums is None else Alloc(sums, code))

        full, rest = divmod(self.share, self.nr)
        code: list[Stmt] = [For(number, 0, maximum(minimum(self.range, full - panels), 0),
                                panel(number, self.nr))] if full else []
        if rest:
            last = panel(full - panels, rest)
            code.append(last if self.ranges == 1 else If(
                call("ge", as_scalar(panels + self.range), self.panels), last))
        body = block(fill, *code)
        return names.around(body if scratch is None else Alloc(scratch, body))

    def tile_start(self, tile: Index) -> Index:
        """The first column of a tile."""
        across = self.shape.across
        if not isinstance(self.tiles, int):
            return tile * across
        return tile * (across - 1) + minimum(tile, self.larger)

    # ------------------------------------------------------------ reading
    def in_place(self, start: Index) -> _Source:
        """Pixels where they lie."""
        return _Source(self.x, start, tuple(s.stride * s.step for s in self.spaces),
                       tuple(s.dilation * s.step for s in self.spaces), self.conv.x_channel)

    def copied(self, start: Index, outer: Taps, y: Index, x: Index,
               rows: Index, columns: Index) -> tuple[Buffer, Stmt, _Source]:
        """A scratch with the rows that a task needs, zeros left and right of them."""
        row, column = self.row, self.column
        tall = self.rows_of(self.most_strip if not self.by_columns else 1)
        wide = self.columns_of(self.most_strip * self.shape.across if self.by_columns
                               else column.extent)
        line = wide * self.pitch
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
                                self.row_step, self.rows_of(rows))
        left, right = self.inside(names, column.below, column.before - x * column.stride,
                                  column.size, self.column_step, columns)
        inner = Names(self.fresh)
        here = inner("from", at + line_number * (self.row_step * row.step) + left * (
            self.column_step * column.step))
        there = inner("to", to + line_number * line)
        copy = block(self.zeros(scratch, there, 0, left * self.pitch),
                     self.copy_row(scratch, there + left * self.pitch, here, right - left),
                     self.zeros(scratch, there, right * self.pitch, columns * self.pitch))
        stmt: Stmt = For(line_number, low, high, inner.around(copy))
        for var, lo, hi in reversed(loops):
            stmt = For(var, lo, hi, stmt)
        positions = (*(0 for _ in steps), row.stride // self.row_step * line,
                     column.stride // self.column_step * self.pitch)
        taps = (*steps, row.dilation * line, column.dilation * self.pitch)
        return scratch, names.around(stmt), _Source(scratch, 0, positions, taps, 1)

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
        apart = self.column_step * self.column.step
        together = channels == 1 or conv.x_channel == 1
        if together and apart == channels and self.pitch == channels:
            e = self.var("e")
            value = cast(self.x[at + e], self.wide)
            return For(e, 0, count * channels, Store(scratch, to + e, value), "vector")
        if not together and self.x.dtype is self.wide and apart == 1 and channels > _FEW_CHANNELS:
            return transposed_copy(scratch, to, self.x, at, count, channels, self.pitch,
                                   conv.x_channel)
        q, c = self.var("q"), self.var("c", channels)
        value = cast(self.x[at + q * apart + c * conv.x_channel], self.wide)
        kind = "vector" if together or channels > _FEW_CHANNELS else "unrolled"
        return For(q, 0, count, For(c, 0, channels, Store(
            scratch, to + q * self.pitch + c, value), kind))

    # ------------------------------------------------------------ strips
    def at_once(self, strip: _Strip) -> Stmt:
        """All pixels of a strip, each tile with its whole window."""
        down, row = self.shape.down, self.row
        weights = strip.weights[1]

        def tiles_of(line: Index, height: int, taps: tuple[Index, Index]) -> Stmt:
            def tile(column: Index, across: int) -> Stmt:
                a: Index = 0
                b: Index = 0
                levels: list[Level] = [(self.run, strip.source.channel, self.nr)]
                if not self.is_run:
                    levels.insert(0, (self.column.taps, strip.source.taps[-1],
                                      self.nr * self.conv.channels))
                inner = self.nr * self.conv.channels * self.column.taps
                for space, step, (first, count) in zip(
                        reversed(self.spaces[:-1]), reversed(strip.source.taps[:-1]),
                        reversed((*strip.outer, taps)), strict=True):
                    a, b = a + first * step, b + first * inner
                    levels.insert(0, (count, step, inner))
                    inner = inner * space.taps
                soon = self.asks_for(strip, line, column, weights + inner, self.depth)
                return self.tile(strip, line, height, column, across, a, weights + b, levels, soon)

            return self.row_of_tiles(strip, tile)

        def single(line: Index) -> Stmt:
            names = Names(self.fresh)
            taps = self.taps(names, row, strip.y + line)
            return names.around(tiles_of(line, 1, taps))

        number, line = self.var("block"), self.var("line", self.most_strip)
        if down == 1:
            code: Stmt = For(line, 0, strip.rows, single(line))
        else:
            # Several rows in one tile where their windows lie inside, else one by one.
            first = number * down
            code = tiles_of(first, down, (0, row.taps))
            inside = self.lie_inside(strip, first)
            if inside is not None:
                end = minimum(first + down, strip.rows)
                code = If(inside, code, For(line, first, end, single(line)))
            code = For(number, 0, ceildiv(strip.rows, down), code)
        if self.is_plain or self.after is not None:
            return code
        return block(code, self.finished(strip))

    def lie_inside(self, strip: _Strip, first: Index) -> Scalar | None:
        """Whether there are enough rows from one on, and their windows lie inside the image."""
        down, row = self.shape.down, self.row
        tests: list[Scalar] = []
        if not (isinstance(row.extent, int) and row.extent % down == 0):
            tests.append(call("le", as_scalar(first + down), as_scalar(strip.rows)))
        reach = (strip.y + first) * row.stride - row.before
        if row.below:
            tests.append(call("ge", as_scalar(reach), 0))
        if row.size is not None:
            last = reach + (down - 1) * row.stride + (row.taps - 1) * row.dilation
            tests.append(call("lt", as_scalar(last), as_scalar(row.size)))
        inside = tests[0] if tests else None
        for test in tests[1:]:
            inside = call("and", inside, test)
        return inside

    def in_chunks(self, strip: _Strip) -> Stmt:
        """All pixels of a strip, under one chunk of the panel after the other.

        A chunk stays in the first-level cache while all pixels meet it.
        """
        chunk, down, row, nr = self.shape.chunk, self.shape.down, self.row, self.nr
        source = strip.source
        names = Names(self.fresh)
        loops: list[tuple[Var, Index, Index]] = []
        a: Index = 0
        b: Index = 0
        inner = nr * self.depth
        for space, step, (first, count) in zip(self.spaces[:-2], source.taps, strip.outer,
                                               strict=False):
            tap = self.var("plane", space.taps)
            loops.append((tap, first, first + count))
            inner //= space.taps
            a, b = a + tap * step, b + tap * inner
        tap = self.var("k_row", row.taps)
        loops.append((tap, 0, row.taps))
        a, b = a + tap * source.taps[-2], b + tap * (inner // row.taps)
        reach = row.before - tap * row.dilation
        low: Index = 0
        high = strip.rows
        if row.below:
            low = names("low", minimum(maximum(ceildiv(reach, row.stride) - strip.y, 0),
                                       strip.rows), self.most_strip)
        if row.size is not None:
            high = names("high", maximum(minimum(ceildiv(
                row.size + reach, row.stride) - strip.y, strip.rows), low), self.most_strip)
        if not self.is_run:
            tap = self.var("k_column", self.column.taps)
            loops.append((tap, 0, self.column.taps))
            a, b = a + tap * source.taps[-1], b + tap * (nr * self.conv.channels)
        piece = self.var("chunk", math.ceil(self.run / chunk))
        loops.append((piece, 0, math.ceil(self.run / chunk)))
        steps: Index = chunk if self.run % chunk == 0 else names(
            "steps", minimum(chunk, self.run - piece * chunk), chunk)
        a = names("a_chunk", a + piece * (chunk * source.channel))
        b = names("b_chunk", strip.weights[1] + b + piece * (chunk * nr))

        def tiles_of(line: Index, height: int) -> Stmt:
            def tile(column: Index, across: int) -> Stmt:
                soon = self.asks_for(strip, line - low, column, b + chunk * nr, chunk)
                return self.tile(strip, line, height, column, across, a, b,
                                 [(steps, source.channel, nr)], soon, adds=True)

            return self.row_of_tiles(strip, tile)

        number, line = self.var("block"), self.var("line", self.most_strip)
        blocks = (high - low) // down
        code = block(For(number, 0, blocks, tiles_of(low + number * down, down)),
                     None if down == 1 else For(line, low + blocks * down, high,
                                                tiles_of(line, 1)))
        code = names.around(code)
        for var, lo, hi in reversed(loops):
            code = For(var, lo, hi, code)
        return block(self.cleared(strip), code, None if self.is_plain else self.finished(strip))

    def row_of_tiles(self, strip: _Strip, make: Callable[[Index, int], Stmt]) -> Stmt:
        """The tiles of one row: larger ones, smaller ones, or what is left of an unknown width."""
        across, end = self.shape.across, strip.end_tile
        tile, smaller = self.var("tile"), self.var("tile")
        code: list[Stmt] = []
        if self.larger != 0:
            code.append(For(tile, strip.first_tile, minimum(end, self.larger),
                            make(self.tile_start(tile), across)))
        if isinstance(self.tiles, int):
            if self.larger != self.tiles:
                code.append(For(smaller, maximum(strip.first_tile, self.larger), end,
                                make(self.tile_start(smaller), across - 1)))
            return block(*code)
        # One tile for each bit of the number of pixels left: few shapes, little code.
        names = Names(self.fresh)
        left = names("left", self.column.extent % across, across - 1)
        begin = self.larger * across
        bits = [If(call("eq", as_scalar(left // size % 2), 1),
                   make(begin + left // (2 * size) * (2 * size), size))
                for size in (1 << bit for bit in reversed(range((across - 1).bit_length())))]
        code.append(If(call("gt", as_scalar(end), as_scalar(self.larger)),
                       names.around(block(*bits))))
        return block(*code)

    # ------------------------------------------------------------ tiles
    def tile(self, strip: _Strip, line: Index, height: int, column: Index, across: int, a: Index,
             b: Index, levels: list[Level], soon: tuple[Index, Index] | None, adds: bool = False
             ) -> Stmt:
        """One register tile; `a` is where its taps begin, seen from its first pixel."""
        conv, nr, source = self.conv, self.nr, strip.source
        names = Names(self.fresh)
        at = names("column", column)
        here = self.pixel(strip, line, at)
        a = a + source.start + line * source.positions[-2] + (at - strip.x) * source.positions[-1]
        levels = [level for level in levels if level[0] != 1] or [(1, 0, 0)]
        to, c_step = (self.out, self.at(conv.out_address, here)), self.pixels(conv.out_address)
        if strip.sums is not None:
            width = self.strip_width()
            to = strip.sums, (line * width + at - strip.x) * nr
            c_step = Pixels(nr, width * nr)
        vectors = math.ceil(strip.live / self.width)
        after = None if adds else self.after
        return names.around(window_tile(
            to, (source.buffer, names("a", a)), (strip.weights[0], names("b", b)), levels,
            strip.live, c_step, Pixels(source.positions[-1], source.positions[-2]), height, across,
            vectors * self.width, accumulate=adds, finish=None if after is None else after.finish,
            operands=() if after is None else self.operands(here), soon=soon, near=adds))

    def asks_for(self, strip: _Strip, line: Index, column: Index, begin: Index, steps: int
                 ) -> tuple[Index, Index] | None:
        """Where weights of the next tiles lie, and the share of them that a tile asks for.

        Weights of a whole model come from far away, and only the first tile to use them would
        wait: all tiles together ask for the next ones ahead. Narrow tiles are busy loading as it
        is, so they ask only where not even one layer's weights stay in the cache.
        """
        weights = self.depth * self.panels * self.nr * self.wide.itemsize
        tiles = self.most_strip if self.by_columns else self.tiles
        near = self.panels == 1 and not self.shape.chunk
        if near or not isinstance(tiles, int) or (
                self.shape.vectors <= 2 and weights < self.chip.l2_bytes):
            return None
        count = tiles if self.by_columns else math.ceil(self.most_strip / self.shape.down) * tiles
        share = math.ceil(self.nr / count)
        number = (column - strip.x) // self.shape.across
        if not self.by_columns:
            number = line // self.shape.down * tiles + number
        return begin + number * (steps * share), share

    def pixel(self, strip: _Strip, line: Index, x: Index) -> dict[Var, Index]:
        """The values of all axes at a pixel."""
        here = dict(strip.values)
        for space, at in ((self.row, strip.y + line), (self.column, x)):
            if space.position is not None:
                here[space.position.var] = at
        return here

    def strip_width(self) -> Index:
        """At most so many pixels are in a row of a strip."""
        return self.most_strip * self.shape.across if self.by_columns else self.column.extent

    def strip_pixels(self) -> Index:
        """At most so many pixels are in a strip."""
        return self.strip_width() * (1 if self.by_columns else self.most_strip)

    # ------------------------------------------------------------ loops over pixels
    def cleared(self, strip: _Strip) -> Stmt:
        """Set the sums of a strip under a panel to zero."""
        return self.over_pixels(strip, lambda here, buffer, at: Store(
            buffer, at, Const(self.wide, 0)))

    def finished(self, strip: _Strip) -> Stmt:
        """Store what the body makes of the sums of a strip under a panel."""

        def store(here: dict[Var, Index], buffer: Buffer, at: Index) -> Stmt:
            value = cast(self.on_buffers(self.conv.body, here, buffer[at]), self.out.dtype)
            return Store(self.out, self.at(self.conv.out_address, here), value)

        return self.over_pixels(strip, store)

    def over_pixels(self, strip: _Strip, make: Callable[[dict[Var, Index], Buffer, Index], Stmt]
                    ) -> Stmt:
        """A statement for each output of a strip under a panel, given where its sum is."""
        output = self.conv.outputs.var
        line, column = self.var("line", self.most_strip), self.var("column")
        j = self.var("j", self.nr)
        here = self.pixel(strip, line, strip.x + column)
        here[output] = strip.values[output] + j
        buffer, at = self.out, self.at(self.conv.out_address, here)
        if strip.sums is not None:
            buffer, at = strip.sums, (line * self.strip_width() + column) * self.nr + j
        end = minimum(self.column.extent, self.tile_start(strip.end_tile)) - strip.x
        return For(line, 0, strip.rows, For(column, 0, end, For(
            j, 0, strip.live, make(here, buffer, at), "vector")))
