"""Matrix products on CPUs: the Loop IR of packed, register-tiled kernels (GotoBLAS, BLIS).

The work is cut into tasks, one for each block of rows and panel of columns. A panel is as wide as
the register tile, so that one piece of it, a few hundred steps of k deep, stays in the first-level
cache while the block's rows pass by. The plans differ in where the panel comes from:

| plan | rows | the panel of B |
|---|---|---|
| packed | any, B a constant | packed when the graph was compiled (`loop/packing.py`) |
| dot | few, B contiguous along k | not packed: inner products along k |
| direct | few, B contiguous along columns | not packed: B is read once anyway |
| panel | some | packed by the task that uses it, into the cache |
| shared | many | all of B packed beforehand, in parallel |

A symbolic number of rows gets several plans and chooses when it runs. Half types are widened as
they are packed. What the body does with the sum (bias, activation, residual, rounding) happens on
each block of a panel right after its last sum, while the block is in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from terrazzo.base.scalar import Scalar, as_scalar, call
from terrazzo.chips.cpu.division import by_threads, longest_share, more_tasks
from terrazzo.chips.cpu.gemm_parts import (
    DIRECT_ROWS,
    PANEL_ROWS,
    PIECE_DEPTH,
    STRIP_ROWS,
    TASKS_PER_CORE,
    PlaceOf,
    Values,
)
from terrazzo.chips.cpu.gemm_tiles import TiledProduct
from terrazzo.chips.cpu.kernel_parts import Names, Place, digits, grain_of, is_below
from terrazzo.chips.spec import ChipSpec
from terrazzo.dtypes import float32, float64
from terrazzo.expr.ir import Program, Tensor
from terrazzo.expr.matmul import MatrixProduct, match_product
from terrazzo.index import Index, bounds, ceildiv, maximum, minimum
from terrazzo.loop.ir import Alloc, Buffer, For, Function, If, Stmt, block
from terrazzo.loop.tiles import Soon, dot_tile

_DOT_TILES = {32: (4, 4), 16: (2, 4)}  # inner products: rows and columns
_DOT_COLUMNS_OF_ONE_ROW = 8
_DOT_BLOCK = 32  # columns of a task of inner products
_DOT_ROWS = 12  # up to here inner products beat transposing B into panels
_STRIP_COLUMNS = 1024
_GROUP_COLUMNS = 1024  # columns of a task with packed blocks of A
_BLOCK_ROWS = 192  # rows of such a block
# Cycles for each step of k, beside two multiplications of vectors a cycle: to bring a vector of a
# panel from another cache, to pack one, to pack an element of a block of A; and those of a task.
_FETCH_CYCLES, _PACK_CYCLES, _BLOCK_CYCLES, _TASK_CYCLES = 0.5, 2.0, 0.25, 300
# Until a vector comes from the last cache, which blocks of 16 rows and more hide: 512 x 1024 x 2048
# in blocks of 12 rows took 1.35 times as long as in blocks of 174.
_FAR_CYCLES = 8
_MOST_BLOCKS = 64  # of rows that are tried
_TASK_FLOPS = 1 << 17  # below this a task of its own does not pay


def lower_contraction(program: Program, chip: ChipSpec,
                      constants: frozenset[Tensor] = frozenset()) -> Function | None:
    """The kernel of a program that is one matrix product; None if it is something else.

    `constants` are the inputs that a compiled graph may hold in any layout.
    """
    product = match_product(program)
    if product is None or not _is_supported(product):
        return None
    return Gemm(program, product, chip, constants).function()


def _is_supported(product: MatrixProduct) -> bool:
    wide = product.reduce.dtype
    if wide not in (float32, float64):
        return False
    loads = [factor.load for factor in (product.a, product.b)]
    return all(load is None or load.dtype is wide or (
        load.dtype.compute is wide and load.dtype.bits == 16) for load in loads)


class Gemm(TiledProduct):
    """A product with its plan."""

    # ------------------------------------------------------------ the function
    def function(self) -> Function:
        body = block() if 0 in (self.m, self.n, self.batch) else self.plans()
        if self.a_copy is not None:
            body = Alloc(self.a_copy, body)
        params = tuple(self.buffers.values())
        size: Index = 0
        for buffer in params:
            size = size + buffer.size * buffer.dtype.itemsize
        packed = {} if self.packing is None else {
            self.program.inputs.index(self.b_tensor): self.packing}
        return Function(self.program.name, params, self.program.dims, body,
                        self.product.stage.origin, self.batch * self.m * self.n * self.k * 2, size,
                        packed)

    def plans(self) -> Stmt:
        """The plan for the number of rows, or the choice between plans."""
        choices: list[tuple[int, Callable[[], Stmt]]] = []
        if self.packing is not None:
            pass  # the plans for more rows do for fewer
        elif self.is_along(self.product.b, self.product.k.var):
            choices.append((_DOT_ROWS, self.dot_plan))
        elif self.is_along(self.product.b, self.product.column.var):
            choices.append((DIRECT_ROWS[self.registers], self.direct_plan))
        choices.append((self.panel_rows, self.panel_plan))
        low, high = bounds(self.m)
        result: Stmt | None = None
        if self.reads_a_once():
            return self.panel_plan()
        if high is None or high > self.panel_rows:
            result = self.shared_plan() if self.packing is None else self.block_tasks(
                self.buffers[self.b_tensor])
        for most, plan in reversed(choices):
            if low is not None and low > most:
                continue
            if result is None or (high is not None and high <= most):
                result = plan()
            else:
                result = If(call("le", as_scalar(self.m), most), plan(), result)
        assert result is not None
        return result

    # ------------------------------------------------------------ direct and panel plans
    def direct_plan(self) -> Stmt:
        """B as it lies: for so few rows it is read about once."""
        if self.reads_strips():
            return self.with_a(False, self.strip_tasks)
        return self.with_a(False, lambda a: self.panel_tasks(a, None))

    def strip_tasks(self, a_place: PlaceOf) -> Stmt:
        """One task for each member of the batch and block of columns.

        Memory sets the pace here, and it likes long rows: the sums of many columns stay in the
        first-level cache while a few rows of B at a time pass by.
        """
        nr, outer, lets = self.nr, Names(self.fresh), Names(self.fresh)
        width = _STRIP_COLUMNS
        if isinstance(self.n, int):
            even = min(TASKS_PER_CORE // 2 * self.chip.cores, math.ceil(2 * self.n / width))
            width = math.ceil(self.n / max(even, math.ceil(self.n / width)))
        width = math.ceil(width / nr) * nr
        blocks = outer("blocks", ceildiv(self.n, width))
        task = self.var("task")
        values = digits(lets("member", task // blocks), self.product.batch)
        first = lets("first", task % blocks * width)
        columns = self.columns(lets, first, width)
        local = None if self.sums_in_output() else Buffer(
            self.fresh("sums"), self.wide, STRIP_ROWS * width)
        sums = Place(local, 0, width, 1) if local is not None else lets.place(
            "c", self.output(values, 0, first))
        a = lets.place("a", a_place(values))
        lying = lets.place("b", self.in_place(self.product.b, values).moved(first, 0))

        def one_pass(start: Index, depth: Index, accumulate: bool, _: Scalar | bool) -> Stmt:
            panel, inner = self.var("panel", width // nr), Names(self.fresh)
            at = inner("at", panel * nr)
            b = Place(lying.buffer, lying.moved(at, start).at, lying.inner, 1)
            live: Index = nr
            if not (isinstance(self.n, int) and self.n % nr == 0):
                live = inner("live", minimum(nr, columns - at), nr)
            return For(panel, 0, ceildiv(columns, nr), inner.around(self.row_tiles(
                sums.moved(0, at), a.moved(0, start), b, depth, self.m, live, accumulate)))

        body = block(self.passes(one_pass),
                     self.epilogue(sums, values, 0, self.m, first, columns, width))
        if local is not None:
            body = Alloc(local, body)
        return outer.around(For(task, 0, self.batch * blocks, lets.around(body), "parallel",
                                grain_of(_TASK_FLOPS, self.m * self.k * (2 * width))))

    def panel_plan(self) -> Stmt:
        """Each task packs its own panel, piece by piece, for all rows."""
        if self.packing is not None:
            return self.with_a(False, lambda a: self.panel_tasks(a, None))
        piece = Buffer(self.fresh("panel"), self.item, self.pieces.most * self.nr)
        return self.with_a(False, lambda a: self.panel_tasks(a, piece))

    def row_blocks(self, packs: bool) -> Index | Scalar:
        """Into how many blocks of rows the tasks of a panel divide it.

        Several, where panels alone do not keep all threads busy; but each task brings or packs
        its panel anew.
        """
        if self.has_few_rows():
            return 1
        m, n, batch, k = self.m, self.n, self.batch, self.k
        if not (isinstance(m, int) and isinstance(n, int) and isinstance(batch, int)):
            most = maximum(ceildiv(m, 4 * self.mr), 1)
            blocks = minimum(more_tasks(batch * ceildiv(n, self.nr)), most)
            if not self.reads_a_once():
                return blocks
            return maximum(blocks, ceildiv(ceildiv(m, self.mr), PANEL_ROWS // self.mr))
        tiles, panels = math.ceil(m / self.mr), batch * math.ceil(n / self.nr)
        vectors, depth = self.nr // self.lanes, k if isinstance(k, int) else PIECE_DEPTH
        once = depth * vectors * (_PACK_CYCLES if packs else _FETCH_CYCLES) + _TASK_CYCLES

        def plan(threads: int) -> tuple[int, ...]:
            def cycles(blocks: int) -> float:
                tile = depth * self.mr * vectors / 2
                return longest_share(panels * blocks, threads) * (tiles / blocks * tile + once)

            return (min(range(1, min(tiles, _MOST_BLOCKS) + 1), key=cycles),)

        return by_threads(self.chip, plan)[0]

    def panel_tasks(self, a_place: PlaceOf, piece: Buffer | None) -> Stmt:
        """One task for each member of the batch, panel of columns and block of rows.

        Blocks of one panel follow each other, so that a thread goes on with the panel it has.
        """
        nr, mr, outer, lets = self.nr, self.mr, Names(self.fresh), Names(self.fresh)
        panels = outer("panels", ceildiv(self.n, nr))
        blocks = outer("blocks", self.row_blocks(piece is not None), PANEL_ROWS)
        task = self.var("task")
        values = digits(lets("member", task // (panels * blocks)), self.product.batch)
        panel = lets("panel_number", task // blocks % panels)
        first = lets("first", panel * nr)
        columns = self.columns(lets, first, nr)
        first_row: Index = 0
        rows = self.m
        if blocks != 1:
            tiles, number = ceildiv(self.m, mr), lets("block", task % blocks)
            first_row = lets("first_row", number * tiles // blocks * mr)
            rows = lets("rows", minimum((number + 1) * tiles // blocks * mr, self.m) - first_row,
                        PANEL_ROWS)
        a = lets.place("a", a_place(values).moved(first_row, 0))
        local = None
        if not self.sums_in_output():
            most = bounds(self.m)[1]
            most = PANEL_ROWS if most is None else min(most, PANEL_ROWS)
            local = Buffer(self.fresh("sums"), self.wide, most * nr)
        sums = Place(local, 0, nr, 1) if local is not None else lets.place(
            "c", self.output(values, first_row, first))
        at_once = self.has_few_rows() if self.packing is not None else piece is None
        share = None if self.packing is None or at_once or self.is_small() else outer(
            "share", self.next_share(ceildiv(self.m, blocks)))

        def one_pass(start: Index, depth: Index, accumulate: bool, _: Scalar | bool) -> Stmt:
            packing, soon, inner = None, None, Names(self.fresh)
            if self.packing is not None:
                b = inner.place("b", self.packed_panel(
                    self.buffers[self.b_tensor], self.member(self.product.b, values), panel,
                    start))
                if share is not None:
                    soon = Soon(b.buffer, b.at + depth * nr, share)
            elif piece is None:
                lying = self.in_place(self.product.b, values).moved(first, start)
                b = Place(lying.buffer, lying.at, lying.inner, 1)
            else:
                packing = self.pack_panel(piece, 0, values, first, columns, start, depth)
                b = Place(piece, 0, self.together * nr, self.together)
                soon = self.next_panel(values, first, start, ceildiv(self.m, blocks))
            return inner.around(block(packing, self.row_tiles(
                sums, a.moved(0, start), b, depth, rows, columns, accumulate, soon)))

        sum_up = one_pass(0, self.k, False, True) if at_once else self.passes(one_pass)
        body = block(sum_up, self.epilogue(sums, values, first_row, rows, first, columns, nr))
        for buffer in (local, piece):
            if buffer is not None:
                body = Alloc(buffer, body)
        work = ceildiv(self.m, blocks) * self.k * (2 * nr)
        return outer.around(For(task, 0, self.batch * panels * blocks, lets.around(body),
                                "parallel", grain_of(_TASK_FLOPS, work)))

    def next_panel(self, values: Values, first: Index, start: Index, rows: Index
                   ) -> Soon | None:
        """What the next panel will be packed from, where it is one run of numbers.

        Packing alone waits for memory, which took a fifth of the time of 128 rows. Where rows of
        a panel lie apart, they are runs of lines themselves, which processors foresee.
        """
        factor = self.product.b
        if self.together != 1 or not self.is_along(factor, self.product.k.var):
            return None
        lying = self.in_place(factor, values).moved(first + self.nr, 0)
        if lying.buffer.dtype is not self.item or lying.outer != self.k:
            return None
        return Soon(lying.buffer, lying.at + start * self.nr, self.next_share(rows))

    # ------------------------------------------------------------ the shared plan
    def shared_plan(self) -> Stmt:
        """All of B is packed first; tasks then pack blocks of A and multiply (BLIS)."""
        factor, nr = self.product.b, self.nr
        depth = ceildiv(self.k, self.together) * self.together
        size = self.members(factor) * ceildiv(self.n, nr) * depth * nr
        if not isinstance(self.m, int):
            size = size * minimum(1, self.m // (self.panel_rows + 1))  # no memory for other plans
        packed = Buffer(self.fresh("b_packed"), self.item, size)
        return Alloc(packed, block(self.pack_all(packed), self.block_tasks(packed)))

    def blocks_and_groups(self, most_rows: int, most_panels: int
                          ) -> tuple[Index | Scalar, Index | Scalar]:
        """How many blocks of rows and groups of panels there are; each task packs its block."""
        m, n, batch = self.m, self.n, self.batch
        fewest = maximum(ceildiv(m, most_rows), 1)
        if not (isinstance(m, int) and isinstance(n, int) and isinstance(batch, int)):
            groups = maximum(ceildiv(ceildiv(n, self.nr), most_panels), 1)
            blocks = minimum(more_tasks(batch * groups), ceildiv(m, 8 * self.mr))
            return maximum(fewest, blocks), groups
        assert isinstance(fewest, int)
        tiles, panels = math.ceil(m / self.mr), math.ceil(n / self.nr)
        vectors, fewest_groups = self.nr // self.lanes, math.ceil(panels / most_panels)
        near = isinstance(self.k, int) and n * self.k * self.item.itemsize <= self.chip.l2_bytes
        arrives = _FETCH_CYCLES if near else _FAR_CYCLES

        def plan(threads: int) -> tuple[int, ...]:
            def cycles(divided: tuple[int, int]) -> float:
                blocks, groups = divided
                rows = math.ceil(tiles / blocks) * self.mr
                each = math.ceil(panels / groups) * vectors * (
                    max(rows / 2, arrives) + _FETCH_CYCLES) + rows * _BLOCK_CYCLES
                return longest_share(batch * blocks * groups, threads) * (
                    each + _TASK_CYCLES / PIECE_DEPTH)

            return min(((blocks, groups)
                        for blocks in range(fewest, min(tiles, fewest + _MOST_BLOCKS) + 1)
                        for groups in range(fewest_groups, min(panels, 4 * fewest_groups) + 1)),
                       key=cycles)

        divided = by_threads(self.chip, plan)
        return divided[0], divided[1]

    def block_tasks(self, packed: Buffer) -> Stmt:
        """One task for each member of the batch, block of rows and group of panels.

        A piece of the block of A, `kc` deep, is packed into the second-level cache and meets the
        panels of the group one by one.
        """
        nr, mr, factor = self.nr, self.mr, self.product.b
        outer, lets = Names(self.fresh), Names(self.fresh)
        panels = outer("panels", ceildiv(self.n, nr))
        most_panels = max(1, _GROUP_COLUMNS // nr)
        if isinstance(self.n, int):
            most_panels = min(most_panels, math.ceil(self.n / nr))
        room = self.chip.l2_bytes * 45 // 100 // (self.pieces.most * self.item.itemsize)
        most = max(8 * mr, min(_BLOCK_ROWS, room) // mr * mr)
        by_rows, by_columns = self.blocks_and_groups(most, most_panels)
        blocks, groups = outer("blocks", by_rows), outer("groups", by_columns)
        group = outer("group", ceildiv(panels, groups), most_panels)
        rows = outer("rows", ceildiv(ceildiv(self.m, mr), blocks) * mr, most)
        # While one panel is used, the tiles of a block together ask for the next one: without that
        # its first use waits for a further cache, which cost 10 to 15 % (1024 and 2048 cubed).
        share = outer("share", ceildiv(nr * mr, maximum(rows, 1)))
        task = self.var("task")
        values = digits(lets("member", task // (blocks * groups)), self.product.batch)
        first_row = lets("first_row", task // groups % blocks * rows)
        count = lets("count", maximum(minimum(rows, self.m - first_row), 0), most)
        first_panel = lets("first_panel", task % groups * group)
        matrix = lets("matrix", self.member(factor, values))
        pitch = math.ceil(self.pieces.most / self.lanes) * self.lanes
        a_block = Buffer(self.fresh("a_block"), self.item, most * pitch)
        a = self.block_place(a_block, most, pitch)
        local = None
        if not self.sums_in_output():
            local = Buffer(self.fresh("sums"), self.wide, most * nr * most_panels)

        def one_pass(start: Index, depth: Index, accumulate: bool, last: Scalar | bool) -> Stmt:
            number, inner = self.var("number", most_panels), Names(self.fresh)
            panel = inner("panel", first_panel + number)
            first = inner("first", panel * nr)
            columns = self.columns(inner, first, nr)
            sums = inner.place("c", self.output(values, first_row, first) if local is None
                               else Place(local, number * (most * nr), nr, 1))
            b = inner.place("b", self.packed_panel(packed, matrix, panel, start))
            tiles = self.row_tiles(sums, a, b, depth, count, columns, accumulate,
                                   Soon(b.buffer, b.at + self.k * nr, share))
            finish = None
            if last is not False:
                finish = self.epilogue(sums, values, first_row, count, first, columns, nr)
            if finish is not None and isinstance(last, Scalar):
                finish = If(last, finish)
            return block(self.pack_block(a, values, first_row, count, start, depth),
                         For(number, 0, minimum(group, panels - first_panel),
                             inner.around(block(tiles, finish))))

        body = self.passes(one_pass)
        for buffer in (local, a_block):
            if buffer is not None:
                body = Alloc(buffer, body)
        grain = grain_of(_TASK_FLOPS, rows * self.k * group * (2 * nr))
        return outer.around(For(task, 0, self.batch * blocks * groups, lets.around(body),
                                "parallel", grain))

    # ------------------------------------------------------------ inner products
    def dot_plan(self) -> Stmt:
        """Few rows times rows of B: both are read along k, and B only once."""
        return self.with_a(True, self.dot_tasks)

    def dot_tasks(self, a_place: PlaceOf) -> Stmt:
        """One task for each member of the batch and block of columns, with all rows."""
        mr, nr = _DOT_TILES[self.registers]
        if self.m == 1:
            mr, nr = 1, _DOT_COLUMNS_OF_ONE_ROW
        nr = min(nr, self.lanes)
        outer, lets, inner = Names(self.fresh), Names(self.fresh), Names(self.fresh)
        blocks = outer("blocks", ceildiv(self.n, _DOT_BLOCK))
        task, group = self.var("task"), self.var("group", _DOT_BLOCK // nr)
        values = digits(lets("member", task // blocks), self.product.batch)
        first = lets("first", task % blocks * _DOT_BLOCK)
        columns = self.columns(lets, first, _DOT_BLOCK)
        in_output = self.out.dtype is self.wide and self.sums_in_output()
        local = None if in_output else Buffer(
            self.fresh("sums"), self.wide, _DOT_ROWS * _DOT_BLOCK)
        sums = Place(local, 0, _DOT_BLOCK, 1) if local is not None else lets.place(
            "c", self.output(values, 0, first))
        a = lets.place("a", a_place(values))
        b = lets.place("b", self.in_place(self.product.b, values).moved(first, 0))
        at = inner("at", group * nr)
        live: Index = nr
        if not (isinstance(self.n, int) and self.n % nr == 0):
            live = inner("live", minimum(nr, columns - at), nr)

        def tile(row: Index, height: int) -> Stmt:
            to, left, right = sums.moved(row, at), a.moved(row, 0), b.moved(at, 0)
            return dot_tile(to.buffer, to.at, left.buffer, left.at, right.buffer, right.at, self.k,
                            a.outer, b.outer, sums.outer, height, nr, False, live)

        i = self.var("tile")
        tiles = block(None if is_below(self.m, mr) else For(i, 0, self.m // mr, tile(i * mr, mr)),
                      self.remainder(self.m, mr, tile))
        body = block(For(group, 0, ceildiv(columns, nr), inner.around(tiles)),
                     self.epilogue(sums, values, 0, self.m, first, columns, _DOT_BLOCK))
        if local is not None:
            body = Alloc(local, body)
        return outer.around(For(task, 0, self.batch * blocks, lets.around(body), "parallel",
                                grain_of(_TASK_FLOPS, self.m * self.k * (2 * _DOT_BLOCK))))
