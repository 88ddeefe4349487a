"""Matrix products on CPUs: the Loop IR of packed, register-tiled kernels (GotoBLAS, BLIS).

The work is cut into tasks, one for each block of rows and panel of columns. A panel is as wide as
the register tile, so that one piece of it, a few hundred steps of k deep, stays in the first-level
cache while the block's rows pass by. Four plans differ in where the panel comes from:

| plan | rows | the panel of B |
|---|---|---|
| dot | few, B contiguous along k | not packed: inner products along k |
| direct | few, B contiguous along columns | not packed: B is read once anyway |
| panel | some | packed by the task that uses it, into the cache |
| shared | many | all of B packed beforehand, in parallel |

A symbolic number of rows gets several plans and chooses when it runs. Half types are widened as
they are packed. What the body does with the sum (bias, activation, residual, rounding) happens on
each block of a panel right after its last sum, while the block is in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce as fold

from terrazzo.chips.spec import ChipSpec
from terrazzo.dtypes import DType, float32, float64
from terrazzo.expr.ir import Program, Tensor
from terrazzo.expr.lower import storage_size
from terrazzo.expr.matmul import Factor, MatrixProduct, match_product
from terrazzo.index import Index, Var, bounds, ceildiv, coefficient, maximum, minimum, substitute
from terrazzo.loop.ir import Alloc, Buffer, For, Function, If, Stmt, Store, block
from terrazzo.loop.tiles import dot_tile, fma_tile, transpose_tile
from terrazzo.scalar import (
    Axis,
    Const,
    Load,
    Reduce,
    Scalar,
    as_scalar,
    call,
    cast,
    rewrite,
    substitute_indices,
)

# Register tiles as (rows, vectors of columns), best first, by number of vector registers: rows x
# vectors accumulators, the vectors of B, and one element of A fit. Measured on AVX-512: 6x4 and
# 8x3 reach 97 % of the peak, 12x2 91 %; on AVX2 6x2 reaches 96 %. The price of a tile is how much
# longer it takes for the same work.
_TILES = {
    32: ((6, 4, 1.0), (8, 3, 1.0), (12, 2, 1.08), (14, 1, 1.3)),
    16: ((6, 2, 1.0), (4, 3, 1.05), (10, 1, 1.25)),
}
_DOT_TILES = {32: (4, 4), 16: (2, 4)}  # inner products: rows and columns
_DOT_BLOCK = 64  # columns of one task
_TASK_FLOPS = 2 * 64**3  # below this a task of its own does not pay
_PACK_ELEMENTS = 16384  # elements worth packing in a task of their own
_DOT_ROWS = 12  # up to here inner products beat transposing B into panels
_PANEL_ROWS = 256  # up to here one task packs a panel for all rows
_FEW_COLUMNS = 8
_GROUP_COLUMNS = 512  # columns of a task with packed blocks of A
_BLOCK_ROWS = 384
_TASKS_PER_CORE = 4


def lower_contraction(program: Program, chip: ChipSpec) -> Function | None:
    """The kernel of a program that is one matrix product; None if it is something else."""
    product = match_product(program)
    if product is None or not _is_supported(product):
        return None
    return _Gemm(program, product, chip).function()


def _is_supported(product: MatrixProduct) -> bool:
    wide = product.reduce.dtype
    if wide not in (float32, float64):
        return False
    for factor in (product.a, product.b):
        load = factor.load
        if load is not None and not (load.dtype.is_float and load.dtype.bits <= wide.bits):
            return False
    return coefficient(product.out_address, product.column.var) is not None


@dataclass(frozen=True)
class _Place:
    """Where a matrix lies: element (i, j) of it is at `at + i*outer + j*inner`."""

    buffer: Buffer
    at: Index
    outer: Index
    inner: Index


Values = Mapping[Var, Index]


class _Gemm:
    """One kernel in the making."""

    def __init__(self, program: Program, product: MatrixProduct, chip: ChipSpec):
        self.program, self.product, self.chip = program, product, chip
        self.wide: DType = product.reduce.dtype
        self.names = {d.name for d in program.dims}
        self.buffers: dict[Tensor, Buffer] = {}
        for tensor, constant in (*((t, True) for t in program.inputs), (product.stage, False)):
            name = self.fresh(tensor.name)
            self.buffers[tensor] = Buffer(name, tensor.dtype, storage_size(tensor), constant)
        self.out = self.buffers[product.stage]
        self.m: Index = 1 if product.row is None else product.row.extent
        self.n, self.k = product.column.extent, product.k.extent
        self.batch = _product(a.extent for a in product.batch)
        self.lanes = chip.lanes(self.wide.bits)
        self.mr, vectors = self.choose_tile()
        self.nr = vectors * self.lanes
        # A piece of a panel takes two thirds of the first-level cache; rows of A pass by.
        most = max(64, min(512, chip.l1_bytes * 2 // (self.nr * self.wide.itemsize)))
        self.k_passes: Index = maximum(ceildiv(self.k, most), 1)
        self.kc: Index = ceildiv(self.k, self.k_passes)
        self.kc_most = most if not isinstance(self.kc, int) else self.kc

    def choose_tile(self) -> tuple[int, int]:
        tiles = _TILES[32 if self.chip.vector_registers >= 32 else 16]
        if not isinstance(self.n, int):
            return tiles[0][:2]
        n = self.n

        def price(tile: tuple[int, int, float]) -> float:
            width = tile[1] * self.lanes
            return -(-n // width) * width * tile[2]

        return min(tiles, key=price)[:2]

    def fresh(self, name: str) -> str:
        number, result = 0, name
        while result in self.names:
            number += 1
            result = f"{name}{number}"
        self.names.add(result)
        return result

    def var(self, name: str, extent: Index | None = None) -> Var:
        top = bounds(extent)[1] if extent is not None else None
        return Var(self.fresh(name), 0, None if top is None else max(top - 1, 0))

    # ------------------------------------------------------------ the function
    def function(self) -> Function:
        params = tuple(self.buffers.values())
        size: Index = 0
        for buffer in params:
            size = size + buffer.size * buffer.dtype.itemsize
        return Function(self.program.name, params, self.program.dims, self.plans(),
                        self.product.stage.origin, self.batch * self.m * self.n * self.k * 2, size)

    def plans(self) -> Stmt:
        """The plan for the number of rows, or the choice between plans."""
        choices: list[tuple[int, Callable[[], Stmt]]] = []
        if self.along_k(self.product.b):
            choices.append((_DOT_ROWS, self.dot_plan))
        elif self.along_columns(self.product.b):
            choices.append((2 * self.mr, self.direct_plan))
        choices.append((_PANEL_ROWS, self.panel_plan))
        low, high = bounds(self.m)
        needed = [(top, plan) for top, plan in choices if low is None or top >= low]
        result: Stmt | None = None
        if high is None or high > _PANEL_ROWS:
            result = self.shared_plan()
        for top, plan in reversed(needed):
            if result is None or (high is not None and high <= top):
                result = plan()
            else:
                result = If(call("le", as_scalar(self.m), top), plan(), result)
        assert result is not None
        return result

    def along_k(self, factor: Factor) -> bool:
        return factor.stride(self.product.k.var) == 1 and self.is_affine(factor)

    def along_columns(self, factor: Factor) -> bool:
        return factor.stride(self.product.column.var) == 1 and self.is_affine(factor)

    def is_affine(self, factor: Factor) -> bool:
        product = self.product
        side = product.row if factor is product.a else product.column
        return factor.stride(None if side is None else side.var) is not None and (
            factor.stride(product.k.var) is not None)

    # ------------------------------------------------------------ addresses
    def on_buffers(self, value: Scalar, values: Values, total: Scalar | None = None) -> Scalar:
        """An expression with flat addresses, at some place; `total` stands for the sum."""

        def visit(node: Scalar) -> Scalar | None:
            if isinstance(node, Reduce):
                return total
            if isinstance(node, Load) and isinstance(node.source, Tensor):
                address = node.source.flat(node.indices)
                return Load(node.dtype, self.buffers[node.source], (address,))
            return None

        return rewrite(substitute_indices(value, dict(values)), visit)

    def batch_values(self, number: Index) -> dict[Var, Index]:
        """The batch axes of the batch's member with this number."""
        values: dict[Var, Index] = {}
        for axis in reversed(self.product.batch):
            last = axis is self.product.batch[0]
            values[axis.var] = number if last else number % axis.extent
            number = number // axis.extent
        return values

    def member(self, factor: Factor, values: Values) -> Index:
        """The number of the matrix that a factor contributes to a member of the batch."""
        number: Index = 0
        for axis in self.product.batch_of(factor):
            number = number * axis.extent + values[axis.var]
        return number

    def members(self, factor: Factor) -> Index:
        return _product(a.extent for a in self.product.batch_of(factor))

    def member_values(self, factor: Factor, number: Index) -> dict[Var, Index]:
        """The batch axes a factor depends on, for its matrix with this number."""
        values: dict[Var, Index] = {}
        axes = self.product.batch_of(factor)
        for axis in reversed(axes):
            values[axis.var] = number if axis is axes[0] else number % axis.extent
            number = number // axis.extent
        return values

    def in_place(self, factor: Factor, side: Axis | None, values: Values) -> _Place:
        """A factor where it lies in memory."""
        load, address = factor.load, factor.address
        assert load is not None and address is not None
        start = {**values, self.product.k.var: 0}
        if side is not None:
            start[side.var] = 0
        outer, inner = factor.stride(side.var if side else None), factor.stride(self.product.k.var)
        assert outer is not None and inner is not None
        return _Place(self.buffers[load.source], substitute(address, start), outer, inner)

    # ------------------------------------------------------------ packing A
    def with_a(self, rows_along_k: bool, plan: Callable[[Callable[[Values], _Place]], Stmt]
               ) -> Stmt:
        """A plan that reads A: where it lies if that will do, else from a widened copy."""
        product, factor = self.product, self.product.a
        load = factor.load
        if load is not None and load.dtype is self.wide and self.is_affine(factor) and (
                not rows_along_k or factor.stride(product.k.var) == 1):
            return plan(lambda values: self.in_place(factor, product.row, values))
        # The copy is contiguous along the axis that A is contiguous along, if it may be.
        row_var = None if product.row is None else product.row.var
        along_rows = not rows_along_k and row_var is not None and factor.stride(row_var) == 1
        size = self.m * self.k
        packed = Buffer(self.fresh("a_packed"), self.wide, self.members(factor) * size)
        outer_size, inner_size = (self.k, self.m) if along_rows else (self.m, self.k)
        line, at = self.var("line"), self.var("at", inner_size)
        outer, inner = line % outer_size, at
        values = self.member_values(factor, line // outer_size)
        values[product.k.var] = outer if along_rows else inner
        if row_var is not None:
            values[row_var] = inner if along_rows else outer
        value = cast(self.on_buffers(factor.value, values), self.wide)
        copy = For(line, 0, self.members(factor) * outer_size,
                   For(at, 0, inner_size, Store(packed, line * inner_size + at, value), "vector"),
                   "parallel", _grain(_PACK_ELEMENTS, inner_size))

        def place(values: Values) -> _Place:
            start = self.member(factor, values) * size
            return _Place(packed, start, *((1, self.m) if along_rows else (self.k, 1)))

        return Alloc(packed, block(copy, plan(place)))

    # ------------------------------------------------------------ packing B
    def pack_panel(self, target: Buffer, at: Index, values: Values, first: Index, columns: Index,
                   start: Index, depth: Index) -> Stmt:
        """Copy `depth` rows of a panel, from row `start` of B on; missing columns become zeros."""
        product, factor, nr = self.product, self.product.b, self.nr
        if self.along_k(factor):
            place = self.in_place(factor, product.column, values)
            return transpose_tile(target, at, place.buffer,
                                  place.at + first * place.outer + start, depth, nr, place.outer,
                                  nr, columns)
        p = self.var("p", self.kc_most)

        def row(extent: Index) -> Stmt:
            j = self.var("j", nr)
            here = {**values, product.k.var: start + p, product.column.var: first + j}
            value = cast(self.on_buffers(factor.value, here), self.wide)
            return For(j, 0, extent, Store(target, at + p * nr + j, value), "vector")

        if columns == nr:
            return For(p, 0, depth, row(nr))
        j = self.var("j", nr)
        zeros = For(j, columns, nr, Store(target, at + p * nr + j, Const(self.wide, 0)), "vector")
        return If(call("eq", as_scalar(columns), nr), For(p, 0, depth, row(nr)),
                  For(p, 0, depth, block(row(columns), zeros)))

    def pack_all(self, packed: Buffer) -> Stmt:
        """All panels of B, in parallel: pieces of a few rows, so that B is read along its rows."""
        factor, nr = self.product.b, self.nr
        group = 1 if self.along_k(factor) else 8
        depth = 256 if self.along_k(factor) else 64
        panels, pieces = ceildiv(self.n, nr), ceildiv(self.k, depth)
        groups = ceildiv(panels, group)
        task, panel = self.var("task"), self.var("panel", group)
        number, rest = task // (pieces * groups), task % (pieces * groups)
        start = (rest // groups) * depth
        jp = (rest % groups) * group + panel
        values = self.member_values(factor, number)
        steps = minimum(depth, self.k - start)
        copy = self.pack_panel(packed, ((number * panels + jp) * self.k + start) * nr, values,
                               jp * nr, self.columns(jp * nr), start, steps)
        body = For(panel, 0, minimum(group, panels - (rest % groups) * group), copy)
        return For(task, 0, self.members(factor) * pieces * groups, body, "parallel",
                   _grain(_PACK_ELEMENTS, depth * group * nr))

    def columns(self, first: Index) -> Index:
        """How many columns a panel that begins at `first` has."""
        if isinstance(self.n, int) and self.n % self.nr == 0:
            return self.nr
        return minimum(self.nr, self.n - first)

    # ------------------------------------------------------------ plans by panels
    def direct_plan(self) -> Stmt:
        """B as it lies: for so few rows it is read about once."""
        factor = self.product.b

        def b_place(values: Values, _: Index) -> _Place:
            place = self.in_place(factor, self.product.column, values)
            return _Place(place.buffer, place.at, place.inner, place.outer)

        return self.with_a(False, lambda a: self.tasks(a, self.m, b_place, whole_k=True))

    def panel_plan(self) -> Stmt:
        """Each task packs its own panel, piece by piece, for all rows."""
        piece = Buffer(self.fresh("panel"), self.wide, self.kc_most * self.nr)
        return self.with_a(False, lambda a: self.tasks(a, self.m, None, piece))

    def shared_plan(self) -> Stmt:
        """All of B is packed first; a task then packs blocks of A and multiplies (BLIS)."""
        factor, nr = self.product.b, self.nr
        panels = ceildiv(self.n, nr)
        size = self.members(factor) * panels * self.k * nr
        if not isinstance(self.m, int):
            size = size * minimum(1, self.m // (_PANEL_ROWS + 1))  # no memory for other plans
        packed = Buffer(self.fresh("b_packed"), self.wide, size)

        def b_place(values: Values, panel: Index, start: Index) -> _Place:
            first = (self.member(factor, values) * panels + panel) * self.k + start
            return _Place(packed, first * nr, nr, 1)

        return Alloc(packed, block(self.pack_all(packed), self.block_tasks(b_place)))

    def block_tasks(self, b_place: Callable[[Values, Index, Index], _Place]) -> Stmt:
        """One task for each member of the batch, block of rows and group of panels.

        A piece of the block of A, `kc` deep, is packed into the second-level cache and meets the
        panels of the group one by one.
        """
        nr, mr, cores = self.nr, self.mr, self.chip.cores
        panels = ceildiv(self.n, nr)
        groups = maximum(ceildiv(panels, max(1, _GROUP_COLUMNS // nr)), 1)
        group = ceildiv(panels, groups)
        room = self.chip.l2_bytes * 45 // 100 // (self.kc_most * self.wide.itemsize)
        most = max(8 * mr, min(_BLOCK_ROWS, room) // mr * mr)
        # Enough tasks for every core, as long as blocks are not tiny.
        wanted = ceildiv(_TASKS_PER_CORE * cores, maximum(groups * self.batch, 1))
        blocks = maximum(ceildiv(self.m, most),
                         minimum(wanted, maximum(ceildiv(self.m, 8 * mr), 1)))
        rows = ceildiv(ceildiv(self.m, mr), blocks) * mr
        task = self.var("task")
        values = self.batch_values(task // (blocks * groups))
        first_row = (task // groups) % blocks * rows
        count = maximum(minimum(rows, self.m - first_row), 0)
        first_panel = task % groups * group
        a_block = Buffer(self.fresh("a_block"), self.wide, most * self.kc_most)
        local = None
        if not self.sums_in_output():
            width = bounds(group)[1]
            local = Buffer(self.fresh("sums"), self.wide,
                           most * nr * (width or _GROUP_COLUMNS // nr))

        def one_pass(start: Index, depth: Index, accumulate: bool, last: Scalar | bool) -> Stmt:
            number = self.var("panel", group)
            panel = first_panel + number
            first, columns = panel * nr, self.columns(panel * nr)
            sums = self.sums(local, values, first_row, first)
            if local is not None:
                sums = _Place(local, number * most * nr, nr, 1)
            a = _Place(a_block, 0, depth, 1)
            tiles = self.row_tiles(sums, a, b_place(values, panel, start), depth, count, columns,
                                   accumulate)
            finish = None
            if last is not False:
                finish = self.epilogue(sums, values, first_row, count, first, columns, nr)
            if finish is not None and isinstance(last, Scalar):
                finish = If(last, finish)
            return block(self.pack_block(a_block, values, first_row, count, start, depth),
                         For(number, 0, minimum(group, panels - first_panel), block(tiles, finish)))

        body = self.passes(one_pass)
        for buffer in (local, a_block):
            if buffer is not None:
                body = Alloc(buffer, body)
        return For(task, 0, self.batch * blocks * groups, body, "parallel",
                   _grain(_TASK_FLOPS, rows * self.k * group * (2 * nr)))

    def passes(self, one_pass: Callable[[Index, Index, bool, Scalar | bool], Stmt]) -> Stmt:
        """Pieces of k one after the other; the first one sets the sums, the others add to them."""
        if self.k_passes == 1:
            return one_pass(0, self.k, False, True)
        number = self.var("pass")
        at = number * self.kc
        only = False if isinstance(self.k_passes, int) else call("eq", as_scalar(self.k_passes), 1)
        last = call("eq", as_scalar(number + 1), as_scalar(self.k_passes))
        return block(one_pass(0, minimum(self.kc, self.k), False, only),
                     For(number, 1, self.k_passes, one_pass(
                         at, minimum(self.kc, self.k - at), True, last)))

    def pack_block(self, target: Buffer, values: Values, first_row: Index, rows: Index,
                   start: Index, depth: Index) -> Stmt:
        """Copy a piece of rows of A, widened, one row after the other."""
        product = self.product
        i, p = self.var("i", rows), self.var("p", self.kc_most)
        here = {**values, product.k.var: start + p}
        if product.row is not None:
            here[product.row.var] = first_row + i
        value = cast(self.on_buffers(product.a.value, here), self.wide)
        store = Store(target, i * depth + p, value)
        return For(i, 0, rows, For(p, 0, depth, store, "vector"))

    def tasks(self, a_place: Callable[[Values], _Place], rows: Index,
              b_place: Callable[[Values, Index], _Place] | None, piece: Buffer | None = None,
              whole_k: bool = False) -> Stmt:
        """One task for each member of the batch, block of `rows` rows and panel of columns."""
        nr = self.nr
        panels = ceildiv(self.n, nr)
        blocks: Index = 1 if rows is self.m else ceildiv(self.m, maximum(rows, 1))
        task = self.var("task")
        number, panel = task // (blocks * panels), task % panels
        first_row = (task // panels) % blocks * rows if blocks != 1 else 0
        values = self.batch_values(number)
        count = self.m if blocks == 1 else minimum(rows, self.m - first_row)
        first = panel * nr
        columns = self.columns(first)
        a = a_place(values)
        local = None
        if not self.sums_in_output():
            most = bounds(rows)[1]
            local = Buffer(self.fresh("sums"), self.wide,
                           (_PANEL_ROWS if most is None else most) * nr)
        sums = self.sums(local, values, first_row, first)

        def one_pass(start: Index, depth: Index, accumulate: bool, _: Scalar | bool) -> Stmt:
            packing = None
            if b_place is None:
                assert piece is not None
                packing = self.pack_panel(piece, 0, values, first, columns, start, depth)
                b = _Place(piece, 0, nr, 1)
            else:
                whole = b_place(values, panel)
                b = _Place(whole.buffer, whole.at + first + start * whole.outer, whole.outer, 1)
            shifted = _Place(a.buffer, a.at + first_row * a.outer + start * a.inner, a.outer,
                             a.inner)
            return block(packing, self.row_tiles(sums, shifted, b, depth, count, columns,
                                                 accumulate))

        passes = one_pass(0, self.k, False, True) if whole_k else self.passes(one_pass)
        body = block(passes, self.epilogue(sums, values, first_row, count, first, columns, nr))
        for buffer in (local, piece):
            if buffer is not None:
                body = Alloc(buffer, body)
        work = maximum(minimum(rows, self.m) * self.k * (2 * nr), 1)
        return For(task, 0, self.batch * blocks * panels, body, "parallel",
                   _grain(_TASK_FLOPS, work))

    # ------------------------------------------------------------ sums and what is made of them
    def sums_in_output(self) -> bool:
        """Whether the output can hold the sums until the epilogue has seen them."""
        row, address = self.product.row, self.product.out_address
        return self.out.dtype is self.wide and coefficient(
            address, self.product.column.var) == 1 and (
            row is None or coefficient(address, row.var) is not None)

    def sums(self, local: Buffer | None, values: Values, first_row: Index, first: Index) -> _Place:
        if local is not None:
            return _Place(local, 0, self.nr, 1)
        row, address = self.product.row, self.product.out_address
        start = {**values, self.product.column.var: first}
        stride: Index = 0
        if row is not None:
            start[row.var] = first_row
            found = coefficient(address, row.var)
            assert found is not None
            stride = found
        return _Place(self.out, substitute(address, start), stride, 1)

    def epilogue(self, sums: _Place, values: Values, first_row: Index, rows: Index, first: Index,
                 columns: Index, width: int) -> Stmt | None:
        """Store what the body makes of a block of sums."""
        product = self.product
        if sums.buffer is self.out and isinstance(product.body, Reduce):
            return None
        i = self.var("i", rows)

        def loop(extent: Index) -> Stmt:
            j = self.var("j", width)
            here = {**values, product.column.var: first + j}
            if product.row is not None:
                here[product.row.var] = first_row + i
            total = Load(self.wide, sums.buffer, (sums.at + i * sums.outer + j,))
            value = self.on_buffers(product.body, here, total)
            return For(j, 0, extent, Store(self.out, substitute(product.out_address, here),
                                           cast(value, self.out.dtype)), "vector")

        if columns == width:
            return For(i, 0, rows, loop(width))
        # A row of known length becomes straight code.
        return If(call("eq", as_scalar(columns), width), For(i, 0, rows, loop(width)),
                  For(i, 0, rows, loop(columns)))

    def row_tiles(self, sums: _Place, a: _Place, b: _Place, depth: Index, rows: Index,
                  columns: Index, accumulate: bool) -> Stmt:
        """All rows of a block, a register tile at a time; what is left takes a smaller tile."""
        mr, nr = self.mr, self.nr

        def tile(row: Index, height: int, live: Index | None) -> Stmt:
            return fma_tile(sums.buffer, sums.at + row * sums.outer, a.buffer,
                            a.at + row * a.outer, b.buffer, b.at, depth, a.outer, a.inner,
                            b.outer, sums.outer, height, nr, accumulate, live)

        def full(live: Index | None) -> Stmt:
            i = self.var("tile", ceildiv(rows, mr))
            return For(i, 0, rows // mr, tile(i * mr, mr, live))

        ragged = None if columns == nr else columns
        whole = full(None)
        if ragged is not None:
            whole = If(call("eq", as_scalar(columns), nr), whole, full(ragged))
        return block(whole, self.remainder(rows, mr, lambda row, height: tile(row, height, ragged)))

    def remainder(self, rows: Index, height: int, tile: Callable[[Index, int], Stmt]
                  ) -> Stmt | None:
        """The rows that do not fill a tile: one smaller tile of just their number."""
        # Blocks begin at multiples of the tile, so what is left of the last block is what is
        # left of all rows.
        row = rows // height * height
        if isinstance(self.m, int):
            left = self.m % height
            if left == 0:
                return None
            fits = tile(row, left)
            return fits if isinstance(rows, int) else If(
                call("eq", as_scalar(rows % height), left), fits)
        result: Stmt | None = None
        for left in range(height - 1, 0, -1):
            result = If(call("eq", as_scalar(rows % height), left), tile(row, left), result)
        return result

    # ------------------------------------------------------------ inner products
    def dot_plan(self) -> Stmt:
        """Few rows times rows of B: both are read along k, and B only once."""
        return self.with_a(True, self.dot_tasks)

    def dot_tasks(self, a_place: Callable[[Values], _Place]) -> Stmt:
        product = self.product
        mr, nr = _DOT_TILES[32 if self.chip.vector_registers >= 32 else 16]
        if self.m == 1:
            mr, nr = 1, min(_FEW_COLUMNS, self.lanes)
        nr = min(nr, self.lanes)
        blocks = ceildiv(self.n, _DOT_BLOCK)
        task = self.var("task")
        values = self.batch_values(task // blocks)
        first = task % blocks * _DOT_BLOCK
        columns: Index = _DOT_BLOCK
        if not (isinstance(self.n, int) and self.n % _DOT_BLOCK == 0):
            columns = minimum(_DOT_BLOCK, self.n - first)
        local = None if self.sums_in_output() else Buffer(
            self.fresh("sums"), self.wide, _DOT_ROWS * _DOT_BLOCK)
        sums = self.sums(local, values, 0, first)
        if local is not None:
            sums = _Place(local, 0, _DOT_BLOCK, 1)
        a, b = a_place(values), self.in_place(product.b, product.column, values)
        group = self.var("group", _DOT_BLOCK // nr)
        at = group * nr

        def tile(row: Index, height: int, live: Index | None) -> Stmt:
            return dot_tile(sums.buffer, sums.at + row * sums.outer + at, a.buffer,
                            a.at + row * a.outer, b.buffer, b.at + (first + at) * b.outer, self.k,
                            a.outer, b.outer, sums.outer, height, nr, False, live)

        def rows(live: Index | None) -> Stmt:
            i = self.var("tile", ceildiv(self.m, mr))
            return block(For(i, 0, self.m // mr, tile(i * mr, mr, live)),
                         self.remainder(self.m, mr, lambda row, h: tile(row, h, live)))

        ragged = columns != _DOT_BLOCK and not (isinstance(self.n, int) and self.n % nr == 0)
        body = block(For(group, 0, ceildiv(columns, nr), rows(
            minimum(nr, columns - at) if ragged else None)),
            self.epilogue(sums, values, 0, self.m, first, columns, _DOT_BLOCK))
        if local is not None:
            body = Alloc(local, body)
        work = maximum(self.m * self.k * (2 * _DOT_BLOCK), 1)
        return For(task, 0, self.batch * blocks, body, "parallel", _grain(_TASK_FLOPS, work))


def _product(extents: Sequence[Index] | object) -> Index:
    return fold(lambda x, y: x * y, extents, 1)  # type: ignore[call-overload, no-any-return]


def _grain(worth: int, work: Index) -> Index:
    """Iterations worth a task, given the work of one."""
    return ceildiv(worth, maximum(work, 1))
