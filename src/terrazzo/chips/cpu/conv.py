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

from terrazzo.base.scalar import Const, Scalar, as_scalar, call, cast
from terrazzo.chips.cpu.conv_parts import Place, Values
from terrazzo.chips.cpu.conv_plan import covered
from terrazzo.chips.cpu.conv_rows import Source, Taps
from terrazzo.chips.cpu.conv_weights import PackingConv
from terrazzo.chips.cpu.depthwise import Depthwise, keeps_channels_apart
from terrazzo.chips.cpu.kernel_parts import Names
from terrazzo.chips.spec import ChipSpec
from terrazzo.dtypes import float32, float64
from terrazzo.expr.convolution import Convolution, match_convolution
from terrazzo.expr.ir import Program, Tensor
from terrazzo.index import Index, Var, ceildiv, maximum, minimum
from terrazzo.loop.ir import Alloc, Buffer, For, Function, If, Stmt, Store, block
from terrazzo.loop.window_tile import Level, Pixels, window_tile

_TASK_FLOPS = 1 << 17  # below this a task of its own does not pay


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


@dataclass(frozen=True, eq=False)
class _Strip:
    """The pixels of a task under one panel."""

    weights: Place
    source: Source
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


class _Dense(PackingConv):
    """A convolution in the making: its tasks, their strips and tiles."""

    # ------------------------------------------------------------ the function
    def lowered(self) -> Function:
        """The kernel."""
        packing = self.packing() if self.may_pack else None
        if packing is not None:
            source = self.conv.w.source
            self.packed[list(self.buffers).index(source)] = packing
            self.buffers[source] = Buffer(self.w.name, self.wide, packing.size, True)
            return self.function(self.tasks(self.w))
        size = self.conv.groups * self.tiling.panels * self.depth * self.tiling.nr
        packed = Buffer(self.fresh("w_packed"), self.wide, size)
        return self.function(Alloc(packed, block(self.pack(packed), self.tasks(packed))))

    def tasks(self, weights: Buffer) -> Stmt:
        """One task for each member of the batch, group, strip and range of panels."""
        conv, names, division = self.conv, Names(self.fresh), self.division
        task = self.var("task")
        outer = self.spaces[:-2]
        strips = division.names("strips", ceildiv(
            self.tiling.tiles if division.by_columns else self.row.extent, division.strip))
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
        panels = names("panels", left // conv.groups * division.range)
        count = strips * batch * conv.groups * division.ranges
        for space in outer:
            count = count * space.extent
        body = self.task(weights, values, member, group, panels, strip)
        flops = 2 * self.depth * division.range * self.tiling.nr * division.strip
        pixels = self.tiling.shape.across if division.by_columns else self.column.extent
        return division.names.around(For(task, 0, count, names.around(body), "parallel",
                                  ceildiv(_TASK_FLOPS, maximum(flops * pixels, 1))))

    def task(self, weights: Buffer, values: dict[Var, Index], member: Index, group: Index,
             panels: Index, strip: Index) -> Stmt:
        """A strip of pixels under all panels of a range."""
        names, tiling, division = Names(self.fresh), self.tiling, self.division
        first_tile: Index = 0
        y: Index = 0
        rows, tiles = self.row.extent, tiling.tiles
        if division.by_columns:
            first_tile = names("tile_first", strip * division.strip)
            tiles = names("tiles", minimum(division.strip, tiling.tiles - first_tile),
                          division.most_strip)
        else:
            y = names("y_first", strip * division.strip)
            rows = names("rows", minimum(division.strip, self.row.extent - y),
                         division.most_strip)
        x = names("x_first", tiling.start(first_tile))
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
        if self.copy.needed:
            columns = names("columns", covered(self.column, minimum(
                self.column.extent, tiling.start(first_tile + tiles)) - x))
            scratch, fill, source = self.copied(start, outer, y, x, rows, columns)
        number = self.var("number", division.most_range)

        def panel(number: Index, live: int) -> Stmt:
            inner = Names(self.fresh)
            which = inner("panel", panels + number)
            b = inner("b", (group * tiling.panels + which) * (self.depth * tiling.nr))
            output = inner("output", group * self.share + which * tiling.nr)
            here = {**values, self.conv.outputs.var: output}
            stored = self.sums_in_output or (self.after is not None and not tiling.shape.chunk)
            sums = None if stored else Buffer(
                self.fresh("sums"), self.wide, self.strip_pixels() * tiling.nr)
            strip = _Strip((weights, b), source, here, outer, y, rows, x, first_tile, tiles, live,
                           sums)
            code = self.in_chunks(strip) if tiling.shape.chunk else self.at_once(strip)
            return inner.around(code if sums is None else Alloc(sums, code))

        full, rest = divmod(self.share, tiling.nr)
        code: list[Stmt] = [For(number, 0, maximum(minimum(division.range, full - panels), 0),
                                panel(number, tiling.nr))] if full else []
        if rest:
            last = panel(full - panels, rest)
            code.append(last if division.ranges == 1 else If(
                call("ge", as_scalar(panels + division.range), tiling.panels), last))
        body = block(fill, *code)
        return names.around(body if scratch is None else Alloc(scratch, body))

    # ------------------------------------------------------------ strips
    def at_once(self, strip: _Strip) -> Stmt:
        """All pixels of a strip, each tile with its whole window."""
        down, row = self.tiling.shape.down, self.row
        weights = strip.weights[1]

        def tiles_of(line: Index, height: int, taps: tuple[Index, Index]) -> Stmt:
            def tile(column: Index, across: int) -> Stmt:
                a: Index = 0
                b: Index = 0
                levels: list[Level] = [(self.tiling.run, strip.source.channel, self.tiling.nr)]
                if not self.tiling.is_run:
                    levels.insert(0, (self.column.taps, strip.source.taps[-1],
                                      self.tiling.nr * self.conv.channels))
                inner = self.tiling.nr * self.conv.channels * self.column.taps
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

        number, line = self.var("block"), self.var("line", self.division.most_strip)
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
        down, row = self.tiling.shape.down, self.row
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
        tiling, most = self.tiling, self.division.most_strip
        chunk, down, row, nr = tiling.shape.chunk, tiling.shape.down, self.row, tiling.nr
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
                                       strip.rows), most)
        if row.size is not None:
            high = names("high", maximum(minimum(ceildiv(
                row.size + reach, row.stride) - strip.y, strip.rows), low), most)
        if not tiling.is_run:
            tap = self.var("k_column", self.column.taps)
            loops.append((tap, 0, self.column.taps))
            a, b = a + tap * source.taps[-1], b + tap * (nr * self.conv.channels)
        piece = self.var("chunk", math.ceil(tiling.run / chunk))
        loops.append((piece, 0, math.ceil(tiling.run / chunk)))
        steps: Index = chunk if tiling.run % chunk == 0 else names(
            "steps", minimum(chunk, tiling.run - piece * chunk), chunk)
        a = names("a_chunk", a + piece * (chunk * source.channel))
        b = names("b_chunk", strip.weights[1] + b + piece * (chunk * nr))

        def tiles_of(line: Index, height: int) -> Stmt:
            def tile(column: Index, across: int) -> Stmt:
                soon = self.asks_for(strip, line - low, column, b + chunk * nr, chunk)
                return self.tile(strip, line, height, column, across, a, b,
                                 [(steps, source.channel, nr)], soon, adds=True)

            return self.row_of_tiles(strip, tile)

        number, line = self.var("block"), self.var("line", most)
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
        across, end = self.tiling.shape.across, strip.end_tile
        tile, smaller = self.var("tile"), self.var("tile")
        code: list[Stmt] = []
        if self.tiling.larger != 0:
            code.append(For(tile, strip.first_tile, minimum(end, self.tiling.larger),
                            make(self.tiling.start(tile), across)))
        if isinstance(self.tiling.tiles, int):
            if self.tiling.larger != self.tiling.tiles:
                code.append(For(smaller, maximum(strip.first_tile, self.tiling.larger), end,
                                make(self.tiling.start(smaller), across - 1)))
            return block(*code)
        # One tile for each bit of the number of pixels left: few shapes, little code.
        names = Names(self.fresh)
        left = names("left", self.column.extent % across, across - 1)
        begin = self.tiling.larger * across
        bits = [If(call("eq", as_scalar(left // size % 2), 1),
                   make(begin + left // (2 * size) * (2 * size), size))
                for size in (1 << bit for bit in reversed(range((across - 1).bit_length())))]
        code.append(If(call("gt", as_scalar(end), as_scalar(self.tiling.larger)),
                       names.around(block(*bits))))
        return block(*code)

    # ------------------------------------------------------------ tiles
    def tile(self, strip: _Strip, line: Index, height: int, column: Index, across: int, a: Index,
             b: Index, levels: list[Level], soon: tuple[Index, Index] | None, adds: bool = False
             ) -> Stmt:
        """One register tile; `a` is where its taps begin, seen from its first pixel."""
        conv, nr, source = self.conv, self.tiling.nr, strip.source
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
        vectors = math.ceil(strip.live / self.tiling.width)
        after = None if adds else self.after
        return names.around(window_tile(
            to, (source.buffer, names("a", a)), (strip.weights[0], names("b", b)), levels,
            strip.live, c_step, Pixels(source.positions[-1], source.positions[-2]), height, across,
            vectors * self.tiling.width, accumulate=adds,
            finish=None if after is None else after.finish,
            operands=() if after is None else self.operands(here), soon=soon, near=adds))

    def asks_for(self, strip: _Strip, line: Index, column: Index, begin: Index, steps: int
                 ) -> tuple[Index, Index] | None:
        """Where weights of the next tiles lie, and the share of them that a tile asks for.

        Weights of a whole model come from far away, and only the first tile to use them would
        wait: all tiles together ask for the next ones ahead. Narrow tiles are busy loading as it
        is, so they ask only where not even one layer's weights stay in the cache.
        """
        tiling, division = self.tiling, self.division
        weights = self.depth * tiling.panels * tiling.nr * self.wide.itemsize
        tiles = division.most_strip if division.by_columns else tiling.tiles
        near = tiling.panels == 1 and not tiling.shape.chunk
        if near or not isinstance(tiles, int) or (
                tiling.shape.vectors <= 2 and weights < self.chip.l2_bytes):
            return None
        count = tiles if division.by_columns else tiles * math.ceil(
            division.most_strip / tiling.shape.down)
        share = math.ceil(tiling.nr / count)
        number = (column - strip.x) // tiling.shape.across
        if not division.by_columns:
            number = line // tiling.shape.down * tiles + number
        return begin + number * (steps * share), share

    def pixel(self, strip: _Strip, line: Index, x: Index) -> dict[Var, Index]:
        """The values of all axes at a pixel."""
        here = dict(strip.values)
        for space, at in ((self.row, strip.y + line), (self.column, x)):
            if space.position is not None:
                here[space.position.var] = at
        return here

    def strip_pixels(self) -> Index:
        """At most so many pixels are in a strip."""
        return self.strip_width() * (1 if self.division.by_columns else self.division.most_strip)

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
        line, column = self.var("line", self.division.most_strip), self.var("column")
        j = self.var("j", self.tiling.nr)
        here = self.pixel(strip, line, strip.x + column)
        here[output] = strip.values[output] + j
        buffer, at = self.out, self.at(self.conv.out_address, here)
        if strip.sums is not None:
            buffer, at = strip.sums, (line * self.strip_width() + column) * self.tiling.nr + j
        end = minimum(self.column.extent, self.tiling.start(strip.end_tile)) - strip.x
        return For(line, 0, strip.rows, For(column, 0, end, For(
            j, 0, strip.live, make(here, buffer, at), "vector")))
