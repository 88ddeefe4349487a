"""Convolutions that keep channels apart (depthwise), on CPUs: vectors along the channels.

Channels are neighbours in memory and do not mix, so each vector of channels is a small convolution
of its own. A tile is some pixels of a row by some vectors, all sums in registers; pixels and
weights are read where they lie. Pixels whose window hangs over the left or right edge come one at a
time, by more vectors, and leave out the taps outside.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

from terrazzo.base.scalar import Load, Scalar, as_scalar, call, cast
from terrazzo.chips.cpu.conv_parts import ConvKernel, Values
from terrazzo.chips.cpu.division import by_threads, longest_share
from terrazzo.chips.cpu.kernel_parts import Names
from terrazzo.chips.spec import ChipSpec
from terrazzo.expr.convolution import Convolution
from terrazzo.expr.ir import Program, Tensor
from terrazzo.index import Index, Var, ceildiv, maximum, minimum
from terrazzo.loop.ir import Alloc, Buffer, For, Function, If, Stmt, Store, block
from terrazzo.loop.packing import Packing
from terrazzo.loop.window_tile import Level, Pixels, window_tile

_TASK_FLOPS = 1 << 15  # below this a task of its own does not pay
_PART_PRICE = 0.5  # of a part of a row, in blocks of channels
_MOST_PIXELS = 6  # more read from too many places at once: measured on images beyond the caches
_FEW_TAPS = 8  # more are not held in registers
_EDGE_VECTORS = 8  # of a pixel at the edge: enough sums to hide the latency of one


def keeps_channels_apart(conv: Convolution) -> bool:
    """Whether each output belongs to one channel, and all channels to one run in memory."""
    return conv.groups > 1 and conv.channels == 1 and conv.share == 1 and conv.x_group == 1 and (
        conv.stage.dtype.compute is conv.reduce.dtype)


class Depthwise(ConvKernel):
    """One such convolution in the making."""

    def __init__(self, program: Program, conv: Convolution, chip: ChipSpec,
                 constants: frozenset[Tensor]):
        super().__init__(program, conv, chip, constants)
        self.first_channel: Index = 0
        self.end_channel: Index = self.count
        self.w_start, self.w_steps = conv.w_start, [s.w_step for s in self.spaces]

    @cached_property
    def count(self) -> int:
        """How many channels there are."""
        count = self.conv.outputs.extent
        assert isinstance(count, int)
        return count

    @cached_property
    def registers(self) -> int:
        return 32 if self.chip.vector_registers >= 32 else 16

    @cached_property
    def block(self) -> int:
        """Channels that tiles of either kind fill."""
        return math.lcm(self.vectors, self.edge_vectors()) * self.lanes

    @cached_property
    def vectors(self) -> int:
        """Vectors of a tile: the channels should fill them, and pixels be few loads each."""
        whole, taps = math.ceil(self.count / self.lanes), self.column.taps

        def price(vectors: int) -> float:
            pixels = self.pixels_of(vectors)
            loads = pixels * self.column.stride + 2 * taps
            return math.ceil(whole / vectors) * vectors * max(loads, taps * pixels / 2) / pixels

        return min((v for v in (2, 1, 3, 4) if self.pixels_of(v) >= 2), key=price, default=1)

    def edge_vectors(self) -> int:
        """Vectors of a pixel at the edge."""
        return _EDGE_VECTORS * self.registers // 32

    def pixels_of(self, vectors: int) -> int:
        """How many pixels of so many vectors a tile can have."""
        # Sums, a row of weights and a pixel fit in registers.
        taps = min(self.column.taps, _FEW_TAPS)
        return min(max(1, (self.registers - 2) // vectors - taps), _MOST_PIXELS)

    # ------------------------------------------------------------ weights
    def lowered(self) -> Function:
        """The kernel."""
        conv = self.conv
        if conv.w_output == 1:
            return self.function(self.tasks(self.w))
        # Weights of one tap side by side.
        taps = [s.taps for s in self.spaces]
        size = math.prod(taps) * self.count
        numbers = (conv.w_output, conv.w_start, *self.w_steps)
        known = [n for n in numbers if isinstance(n, int)]
        packing = None
        if self.may_pack and len(known) == len(numbers):
            k = tuple(zip(taps, known[2:], strict=True))
            packing = Packing(self.w.dtype, self.count, (self.count, known[0]), k, (), known[1])
        packed = Buffer(self.fresh("w_packed"), self.w.dtype, size)
        fill = self.packed_weights(packed, taps)
        self.w_start = 0
        self.w_steps = [self.count * math.prod(taps[d + 1:]) for d in range(len(taps))]
        if packing is None:
            return self.function(Alloc(packed, block(fill, self.tasks(packed))))
        self.packed[list(self.buffers).index(conv.w.source)] = packing
        self.buffers[conv.w.source] = Buffer(self.w.name, self.w.dtype, size, True)
        return self.function(self.tasks(self.w))

    def packed_weights(self, packed: Buffer, taps: list[int]) -> Stmt:
        tap, j = self.var("tap"), self.var("j", self.count)
        at = self.conv.w_start + j * self.conv.w_output
        left: Index = tap
        for count, step in zip(reversed(taps), reversed(self.w_steps), strict=True):
            at = at + left % count * step
            left = left // count
        return For(tap, 0, math.prod(taps), For(j, 0, self.count, Store(
            packed, tap * self.count + j, Load(self.w.dtype, self.w, (at,))), "vector"))

    # ------------------------------------------------------------ tasks
    def tasks(self, weights: Buffer) -> Stmt:
        """One task for each row of pixels, or for some channels of it."""
        conv, names, divided = self.conv, Names(self.fresh), Names(self.fresh)
        task = self.var("task")
        values: dict[Var, Index] = {}
        parts = divided("parts", self.channel_parts(), self.channel_blocks())
        left: Index = task // parts
        if parts != 1:
            part, blocks = names("part", task % parts), self.channel_blocks()
            self.first_channel = names("first_channel", part * blocks // parts * self.block)
            self.end_channel = names("end_channel", minimum(
                (part + 1) * blocks // parts * self.block, self.count), self.count)
        y = names("y", left % self.row.extent)
        left = left // self.row.extent
        count = self.row.extent
        for space in reversed(self.spaces[:-2]):
            assert space.position is not None
            values[space.position.var] = names("slice", left % space.extent)
            left, count = left // space.extent, count * space.extent
        if conv.batch is not None:
            values[conv.batch.var] = member = names("member", left)
            count = count * conv.batch.extent
        else:
            member = 0
        if self.row.position is not None:
            values[self.row.position.var] = y
        start = conv.x_start + member * conv.x_batch
        first_w: Index = self.w_start
        levels: list[Level] = []
        for space, w_step in zip(self.spaces[:-1], self.w_steps, strict=False):
            at = 0 if space.position is None else values[space.position.var]
            first, taps = self.taps(names, space, at)
            start = start + (at * space.stride + first * space.dilation) * space.step
            first_w = first_w + first * w_step
            if taps != 1:
                levels.append((taps, space.dilation * space.step, w_step))
        start, first_w = names("x_row", start), names("w_row", first_w)
        body = self.row_of_pixels(weights, first_w, start, values, levels)
        window = math.prod(s.taps for s in self.spaces)
        work = self.column.extent * (2 * self.count * window) // parts
        return divided.around(For(task, 0, count * parts, names.around(body), "parallel",
                                  ceildiv(_TASK_FLOPS, maximum(work, 1))))

    def channel_blocks(self) -> int:
        """How many blocks of channels there are that tasks may divide."""
        return math.ceil(self.count / self.block)

    def channel_parts(self) -> int | Scalar:
        """Into how many parts of channels a row is divided, where rows alone do not go round."""
        sizes = [s.extent for s in self.spaces[:-1]]
        sizes += [] if self.conv.batch is None else [self.conv.batch.extent]
        rows = math.prod(n if isinstance(n, int) else 64 for n in sizes)

        def plan(threads: int) -> tuple[int, ...]:
            blocks = self.channel_blocks()
            return (min(range(1, blocks + 1), key=lambda parts: (
                longest_share(rows * parts, threads) * (math.ceil(blocks / parts) + _PART_PRICE))),)

        return by_threads(self.chip, plan)[0]

    def row_of_pixels(self, weights: Buffer, first_w: Index, start: Index, values: Values,
                      levels: list[Level]) -> Stmt:
        """The pixels of a row: those at the left edge, those inside, those at the right edge."""
        space = self.column
        width = space.extent
        left: Index = 0
        right = width
        if space.below:
            left = minimum(ceildiv(space.before, space.stride), width)
        if space.size is not None:
            fits = space.size + space.before - (space.taps - 1) * space.dilation
            right = maximum(minimum(ceildiv(fits, space.stride), width), left)
        whole = [*levels, (space.taps, space.dilation * space.step, self.w_steps[-1])]
        if space.taps == 1:
            whole = levels or [(1, 0, 0)]

        def edge(first: Index, end: Index) -> Stmt | None:
            if first is end or first == end:
                return None
            at, names = self.var("edge"), Names(self.fresh)
            tap, count = self.taps(names, space, at)
            clipped = [*levels, (count, space.dilation * space.step, self.w_steps[-1])]
            a = names("a", start + (at * space.stride + tap * space.dilation) * space.step)
            b = names("b", first_w + tap * self.w_steps[-1])
            return For(at, first, end, names.around(self.by_channels(
                self.edge_vectors(), lambda channel, nr, live: self.tile(
                    weights, b, a, values, at, clipped, 1, channel, nr, live))))

        def inside(at: Index, across: int) -> Stmt:
            names = Names(self.fresh)
            at = names("at", at)
            a = names("a", start + at * (space.stride * space.step))
            vectors = self.vectors if across > 1 else self.edge_vectors()
            return names.around(self.by_channels(vectors, lambda channel, nr, live: self.tile(
                weights, first_w, a, values, at, whole, across, channel, nr, live)))

        return block(edge(0, left), self.in_tiles(left, right, inside), edge(right, width))

    def in_tiles(self, first: Index, end: Index, make: Callable[[Index, int], Stmt]) -> Stmt:
        """Tiles of about as many pixels as registers allow."""
        most = self.pixels_of(self.vectors)
        tile, other, more = self.var("tile"), self.var("tile"), self.var("tile")
        count = end - first
        if isinstance(count, int):
            if count <= 0:
                return block()
            tiles = math.ceil(count / most)
            small, larger = divmod(count, tiles)
            parts = [For(tile, 0, larger, make(first + tile * (small + 1), small + 1))
                     if larger else None,
                     For(more, 0, tiles - larger, make(
                         first + larger * (small + 1) + more * small, small))]
            return block(*parts)
        # Tiles of one size and of half that. The last one begins so much earlier that it is a whole
        # one: computing some pixels twice costs less than tiles of few pixels.
        half, singles = max(most // 2, 1), For(more, first, end, make(more, 1))
        full = minimum((count + most - half - 1) // most, count // most * 2)
        left = maximum(count - full * most, 0)
        return If(call("ge", as_scalar(count), half), block(
            For(tile, 0, full, make(minimum(first + tile * most, end - most), most)),
            For(other, 0, ceildiv(left, half), make(minimum(
                first + full * most + other * half, end - half), half))), singles)

    def by_channels(self, vectors: int, make: Callable[[Index, int, int], Stmt]) -> Stmt:
        """All channels, so many vectors at a time; what is left takes a narrower tile."""
        wide = vectors * self.lanes
        full, rest = divmod(self.count, wide)
        number = self.var("number", max(full, 1))
        code: list[Stmt] = []
        if full:
            code.append(For(number, self.first_channel // wide,
                            minimum(self.end_channel // wide, full),
                            make(number * wide, wide, wide)))
        if rest:
            last = make(full * wide, math.ceil(rest / self.lanes) * self.lanes, rest)
            code.append(last if self.end_channel == self.count else If(
                call("eq", as_scalar(self.end_channel), self.count), last))
        return block(*code)

    def tile(self, weights: Buffer, b: Index, a: Index, values: Values, column: Index,
             levels: list[Level], across: int, channel: Index, nr: int, live: int) -> Stmt:
        """Some pixels by some vectors of channels."""
        conv, space = self.conv, self.column
        here = {**values, conv.outputs.var: channel}
        if space.position is not None:
            here[space.position.var] = column
        to, steps = (self.out, self.at(conv.out_address, here)), self.pixels(conv.out_address)
        if self.is_plain or self.after is not None or self.sums_in_output:
            sums = None
        else:
            sums = Buffer(self.fresh("sums"), self.wide, across * nr)
            to, steps = (sums, 0), Pixels(nr, 0)
        tile = window_tile(
            to, (self.x, a + channel), (weights, b + channel), levels, live, steps,
            Pixels(space.stride * space.step, 0), 1, across, nr, lanewise=True,
            finish=None if self.after is None else self.after.finish,
            operands=self.operands(here))
        code = block(tile, self.epilogue(here, across, nr, live, sums))
        return code if sums is None else Alloc(sums, code)

    def epilogue(self, values: Values, across: int, nr: int, live: int, sums: Buffer | None
                 ) -> Stmt | None:
        """Store what the body makes of the sums of a tile, where that is much work."""
        if self.is_plain or self.after is not None:
            return None
        conv, space = self.conv, self.column
        x, j = self.var("x", across), self.var("j", live)
        here = dict(values)
        if space.position is not None:
            here[space.position.var] = values[space.position.var] + x
        here[conv.outputs.var] = values[conv.outputs.var] + j
        at = self.at(conv.out_address, here)
        total = self.out[at] if sums is None else sums[x * nr + j]
        value = cast(self.on_buffers(conv.body, here, total), self.out.dtype)
        return For(x, 0, across, For(j, 0, live, Store(self.out, at, value), "vector"))
