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
from collections.abc import Callable, Mapping

from terrazzo.base.scalar import (
    Axis,
    Const,
    Load,
    Reduce,
    Scalar,
    as_scalar,
    call,
    cast,
    loads,
    rewrite,
    substitute_indices,
)
from terrazzo.chips.cpu.division import by_threads, longest_share, more_tasks
from terrazzo.chips.cpu.kernel_parts import Names, Place, digits, grain_of, is_below, product_of
from terrazzo.chips.spec import ChipSpec
from terrazzo.dtypes import DType, float32, float64
from terrazzo.expr.ir import Program, Tensor
from terrazzo.expr.lower import storage_size
from terrazzo.expr.matmul import Factor, MatrixProduct, match_product
from terrazzo.expr.reductions import fresh_name
from terrazzo.index import (
    Index,
    Var,
    bounds,
    ceildiv,
    coefficient,
    maximum,
    minimum,
    substitute,
)
from terrazzo.loop.ir import Alloc, Buffer, For, Function, If, Stmt, Store, Tile, block
from terrazzo.loop.packing import Packing, Steps
from terrazzo.loop.tiles import dot_tile, fma_rows, fma_tile, transpose_tile

# Register tiles as (rows, vectors of columns, price), by number of vector registers: rows x vectors
# accumulators, the vectors of B, and one element of A fit. The price is how much longer the same
# work takes. Measured on AVX-512: 6x4 and 8x3 reach 97 % of the peak, 12x2 91 %; on AVX2, 6x2 96 %.
_TILES = {
    32: ((6, 4, 1.0), (8, 3, 1.03), (12, 2, 1.08), (14, 1, 1.3)),
    16: ((6, 2, 1.0), (4, 3, 1.05), (10, 1, 1.25)),
}
# Rows of the tile by vectors of columns, where B is so small that it stays in the nearest cache:
# sums enough to hide the latency of one, and less code for the rows that are left over.
_SMALL_TILES = {1: 8, 2: 4, 3: 4, 4: 4}
_SMALL_ELEMENTS = 4096
_DOT_TILES = {32: (4, 4), 16: (2, 4)}  # inner products: rows and columns
_DOT_COLUMNS_OF_ONE_ROW = 8
_DOT_BLOCK = 32  # columns of a task of inner products
_DOT_ROWS = 12  # up to here inner products beat transposing B into panels
_DIRECT_ROWS = {32: 12, 16: 6}  # up to here B is read where it lies
_DIRECT_VECTORS = 8
_SUMS_AT_ONCE = 4  # that hide the latency of one, where memory sets the pace
_STRIP_ROWS = 2  # up to here a task reads B in strips: a few rows of B, many columns
_STRIP_DEPTH = 128
_STRIP_COLUMNS = 1024
_NARROW_ROWS = 32  # up to here constants of half types stay as narrow as they are
_PANEL_ROWS = 256  # up to here tasks read A where it lies, and each packs its panel
_PANEL_ROWS_WHEN_FEW = 64  # the same when few panels would be packed by several tasks each
_PIECE_DEPTH = 512  # steps of k in a piece; 256 to 1024 differ little
# With fewer rows a panel that comes from memory is waited for longer, and must be asked for nearer
# to its use: with 64 rows, pieces of 256 are 10 % faster than of 512; with 128 rows, 2 % slower.
_SHALLOW_DEPTH = 256
_SHALLOW_ROWS = 96
_GROUP_COLUMNS = 1024  # columns of a task with packed blocks of A
_BLOCK_ROWS = 192  # rows of such a block
# Cycles for each step of k, beside two multiplications of vectors a cycle: to bring a vector of a
# panel from another cache, to pack one, to pack an element of a block of A; and those of a task.
_FETCH_CYCLES, _PACK_CYCLES, _BLOCK_CYCLES, _TASK_CYCLES = 0.5, 2.0, 0.25, 300
_MOST_BLOCKS = 64  # of rows that are tried
_TASKS_PER_CORE = 4
_TASK_FLOPS = 1 << 17  # below this a task of its own does not pay
_PACK_ELEMENTS = 16384  # elements worth packing in a task of their own

Values = Mapping[Var, Index]


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


PlaceOf = Callable[[Values], Place]
Pass = Callable[[Index, Index, bool, "Scalar | bool"], Stmt]


class Gemm:
    """One kernel in the making; `together` steps of k lie side by side in packed panels."""

    together = 1

    def __init__(self, program: Program, product: MatrixProduct, chip: ChipSpec,
                 constants: frozenset[Tensor]):
        self.program, self.product, self.chip = program, product, chip
        self.wide: DType = product.reduce.dtype
        self.names = {d.name for d in program.dims}
        self.row_var = None if product.row is None else product.row.var
        self.m: Index = 1 if product.row is None else product.row.extent
        self.n, self.k = product.column.extent, product.k.extent
        self.batch = product_of(a.extent for a in product.batch)
        self.lanes = chip.lanes(self.wide.bits)
        self.registers = self.vector_registers()
        self.can_pack = self.is_constant_matrix(product.b, constants)
        self.mr, vectors = self.choose_tile()
        self.nr = vectors * self.lanes
        self.packing = self.packing_of_b() if self.can_pack else None
        self.buffers: dict[Tensor, Buffer] = {}
        for tensor in (*program.inputs, product.stage):
            name, dtype, size = self.fresh(tensor.name), tensor.dtype, storage_size(tensor)
            if self.packing is not None and tensor is self.b_tensor:
                dtype, size = self.packing.dtype, self.packing.size
            self.buffers[tensor] = Buffer(name, dtype, size, tensor is not product.stage)
        self.out = self.buffers[product.stage]
        # A piece of a panel takes an eighth of the second-level cache, a block of A about a half.
        deepest = chip.l2_bytes // 8 // (self.nr * self.item.itemsize) // 2 * 2
        shallow = self.packing is not None and not (
            isinstance(self.m, int) and self.m > _SHALLOW_ROWS)
        self.kc_most = max(64, min(_SHALLOW_DEPTH if shallow else _PIECE_DEPTH, deepest))
        if self.reads_strips():
            self.kc_most = _STRIP_DEPTH
        self.k_passes, self.kc = self.pieces_of_k()
        if isinstance(self.kc, int):
            self.kc_most = max(self.kc, 1)
        self.a_copy: Buffer | None = None
        panels = bounds(self.batch * ceildiv(self.n, self.nr))[1]
        few = self.packing is None and panels is not None and (
            panels < _TASKS_PER_CORE // 2 * chip.cores)
        self.panel_rows = _PANEL_ROWS if not few else _PANEL_ROWS_WHEN_FEW

    def vector_registers(self) -> int:
        """Registers that the tile is made for: 16 or 32."""
        return 32 if self.chip.vector_registers >= 32 else 16

    @property
    def item(self) -> DType:
        """The type of elements that are packed when the kernel runs."""
        return self.wide

    def pieces_of_k(self) -> tuple[Index, Index]:
        """How many pieces k is cut into, and the steps of all but the last."""
        count: Index = maximum(ceildiv(self.k, self.kc_most), 1)
        return count, ceildiv(self.k, count)

    def choose_tile(self) -> tuple[int, int]:
        """Rows and vectors of columns of the register tile."""
        tiles, n = _TILES[self.registers], self.n
        if isinstance(self.m, int) and self.has_few_rows() and (
                self.can_pack or self.is_along(self.product.b, self.product.column.var)):
            # All rows in one tile, which is the wider the fewer they are: B is read just once.
            widest = min(_DIRECT_VECTORS, 3 * self.registers // 4 // self.m)
            if not isinstance(n, int):
                return self.m, max(1, widest)
            # Narrower where there would be too few panels to go round, but not so narrow that
            # each sum waits for the one before.
            whole = math.ceil(n / self.lanes)
            around = math.ceil(whole / (_TASKS_PER_CORE * self.chip.cores))
            fewest = math.ceil(_SUMS_AT_ONCE / self.m)
            return self.m, max(1, min(widest, whole, max(around, fewest)))
        if not isinstance(n, int):
            return tiles[0][:2]
        vectors = math.ceil(n / self.lanes)
        if self.is_small() and vectors in _SMALL_TILES and 8 * vectors <= self.registers:
            return _SMALL_TILES[vectors], vectors

        def price(tile: tuple[int, int, float]) -> float:
            width = tile[1] * self.lanes
            return math.ceil(n / width) * width * tile[2]

        return min(tiles, key=price)[:2]

    def is_small(self) -> bool:
        """Whether any number of rows meets a B that stays in the nearest cache."""
        n, k = self.n, self.k
        return self.can_pack and not isinstance(self.m, int) and (
            isinstance(n, int) and isinstance(k, int) and n * k <= _SMALL_ELEMENTS)

    def has_few_rows(self) -> bool:
        return isinstance(self.m, int) and 0 < self.m <= _DIRECT_ROWS[self.registers]

    def reads_strips(self) -> bool:
        return isinstance(self.m, int) and self.m <= _STRIP_ROWS and not self.can_pack and (
            self.is_along(self.product.b, self.product.column.var))

    def fresh(self, name: str) -> str:
        result = fresh_name(name, self.names)
        self.names.add(result)
        return result

    def var(self, name: str, extent: Index | None = None) -> Var:
        top = None if extent is None else bounds(extent)[1]
        return Var(self.fresh(name), 0, None if top is None else max(top - 1, 0))

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
            choices.append((_DIRECT_ROWS[self.registers], self.direct_plan))
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

    def reads_a_once(self) -> bool:
        """Whether one panel, packed when compiling, holds all columns: A is read where it lies."""
        return not isinstance(self.m, int) and self.packing is not None and (
            isinstance(self.n, int) and self.n <= self.nr) and self.reads_a_in_place(False)

    def reads_a_in_place(self, along_k: bool) -> bool:
        """Whether tiles can read A where it lies, which for some has to be `along_k`."""
        factor = self.product.a
        return factor.load is not None and factor.load.dtype is self.item and (
            self.is_affine(factor)) and (not along_k or factor.stride(self.product.k.var) == 1)

    def is_along(self, factor: Factor, var: Var) -> bool:
        """Whether a factor is contiguous along an axis, and regular along the other."""
        return factor.stride(var) == 1 and self.is_affine(factor)

    def is_affine(self, factor: Factor) -> bool:
        side = self.row_var if factor is self.product.a else self.product.column.var
        return factor.stride(side) is not None and factor.stride(self.product.k.var) is not None

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

        return rewrite(substitute_indices(value, values), visit)

    def member(self, factor: Factor, values: Values) -> Index:
        """The number of the matrix that a factor contributes to a member of the batch."""
        number: Index = 0
        for axis in self.product.batch_of(factor):
            number = number * axis.extent + values[axis.var]
        return number

    def members(self, factor: Factor) -> Index:
        return product_of(a.extent for a in self.product.batch_of(factor))

    def in_place(self, factor: Factor, values: Values) -> Place:
        """A factor where it lies in memory: rows of A, or columns of B, by k."""
        side = self.row_var if factor is self.product.a else self.product.column.var
        load, address = factor.load, factor.address
        outer, inner = factor.stride(side), factor.stride(self.product.k.var)
        assert load is not None and address is not None
        assert outer is not None and inner is not None
        start = {**values, self.product.k.var: 0}
        if side is not None:
            start[side] = 0
        return Place(self.buffers[load.source], substitute(address, start), outer, inner)

    def columns(self, lets: Names, first: Index, width: int) -> Index:
        """How many of `width` columns there are from `first` on."""
        if isinstance(self.n, int) and self.n % width == 0:
            return width
        if isinstance(self.n, int) and self.n < width:
            return self.n
        return lets("columns", minimum(width, self.n - first), width)

    # ------------------------------------------------------------ constant B
    @property
    def b_tensor(self) -> Tensor:
        assert self.product.b.load is not None
        return self.product.b.load.source

    def is_constant_matrix(self, factor: Factor, constants: frozenset[Tensor]) -> bool:
        """Whether a factor is a constant, read nowhere else, that strides describe."""
        load, address = factor.load, factor.address
        if load is None or address is None or load.source not in constants:
            return False
        product = self.product
        others = sum(other.source is load.source for other in loads(product.body))
        axes = (*product.batch_of(factor), product.column, product.k)
        return others == 1 and all(isinstance(n, int) for n in (
            substitute(address, {a.var: 0 for a in axes}), *(a.extent for a in axes),
            *(coefficient(address, a.var) for a in axes)))

    def packing_of_b(self) -> Packing:
        """The layout of B: panels as wide as the register tile."""
        product, factor = self.product, self.product.b
        load, address = factor.load, factor.address
        assert load is not None and address is not None

        def steps(axis: Axis) -> Steps:
            stride = coefficient(address, axis.var)
            assert isinstance(axis.extent, int) and isinstance(stride, int)
            return axis.extent, stride

        axes = (*product.batch_of(factor), product.column, product.k)
        start = substitute(address, {a.var: 0 for a in axes})
        assert isinstance(start, int)
        # Few rows wait for memory, and half the bytes take half the time; many rows would widen
        # the same elements over and over.
        narrow = not isinstance(self.m, int) or self.m <= _NARROW_ROWS
        return Packing(load.dtype if narrow else self.wide, self.nr, steps(product.column),
                       (steps(product.k),), tuple(map(steps, product.batch_of(factor))), start)

    def packed_panel(self, packed: Buffer, matrix: Index, panel: Index, start: Index) -> Place:
        """A panel of packed B from some step of k on."""
        panels, together = ceildiv(self.n, self.nr), self.together
        steps = (matrix * panels + panel) * ceildiv(self.k, together) + start // together
        return Place(packed, together * (steps * self.nr), together * self.nr, together)

    def next_share(self, rows: Index) -> Index:
        """How much of the next panel each step of k asks for, so that all of it is in time."""
        line = 64 // self.wide.itemsize
        return minimum(ceildiv(self.nr * self.mr, maximum(rows, 1)), line)

    # ------------------------------------------------------------ packing A
    def with_a(self, along_k: bool, plan: Callable[[PlaceOf], Stmt]) -> Stmt:
        """A plan that reads A: where it lies if that will do, else from a widened copy."""
        product, factor = self.product, self.product.a
        k_var = product.k.var
        if self.reads_a_in_place(along_k):
            return plan(lambda values: self.in_place(factor, values))
        # The copy is contiguous along the axis that A is contiguous along, if it may be.
        by_k = not along_k and self.row_var is not None and factor.stride(self.row_var) == 1
        if self.a_copy is None:
            rows = minimum(self.m, _PANEL_ROWS)
            self.a_copy = Buffer(self.fresh("a_copy"), self.wide,
                                 self.members(factor) * rows * self.k)
        copy = self.a_copy
        lines, length = (self.k, self.m) if by_k else (self.m, self.k)
        line, at = self.var("line"), self.var("at", length)
        lets = Names(self.fresh)
        values = digits(lets("matrix", line // lines), product.batch_of(factor))
        index = lets("index", line % lines)
        values[k_var] = index if by_k else at
        if self.row_var is not None:
            values[self.row_var] = at if by_k else index
        value = cast(self.on_buffers(factor.value, values), self.wide)
        fill = For(line, 0, self.members(factor) * lines, lets.around(
            For(at, 0, length, Store(copy, line * length + at, value), "vector")),
            "parallel", grain_of(_PACK_ELEMENTS, length))

        def place(values: Values) -> Place:
            start = self.member(factor, values) * self.m * self.k
            return Place(copy, start, *((1, self.m) if by_k else (self.k, 1)))

        return block(fill, plan(place))

    def block_place(self, target: Buffer, rows: int, depth: int) -> Place:
        """How a block of A lies when it is packed: one row after the other."""
        return Place(target, 0, depth, 1)

    def pack_block(self, target: Place, values: Values, first_row: Index, rows: Index,
                   start: Index, depth: Index) -> Stmt:
        """Copy a piece of some rows of A, widened, one row after the other."""
        if self.row_var is not None and self.is_along(self.product.a, self.row_var):
            a = self.in_place(self.product.a, values).moved(first_row, start)
            q, lets = self.var("q"), Names(self.fresh)
            at = lets("at", q * self.lanes)
            live = lets("live", minimum(self.lanes, depth - at), self.lanes)
            return For(q, 0, ceildiv(depth, self.lanes), lets.around(transpose_tile(
                target.buffer, target.moved(0, at).at, a.buffer, a.moved(0, at).at, rows,
                target.outer, a.inner, self.lanes, live)))
        i, p = self.var("i"), self.var("p", self.kc_most)
        here = {**values, self.product.k.var: start + p}
        if self.row_var is not None:
            here[self.row_var] = first_row + i
        value = cast(self.on_buffers(self.product.a.value, here), self.wide)
        store = Store(target.buffer, target.moved(i, p).at, value)
        return For(i, 0, rows, For(p, 0, depth, store, "vector"))

    # ------------------------------------------------------------ packing B
    def pack_panel(self, target: Buffer, at: Index, values: Values, first: Index, columns: Index,
                   start: Index, depth: Index) -> Stmt:
        """Copy `depth` rows of a panel, from row `start` of B on, filled up to its full width."""
        product, factor, nr = self.product, self.product.b, self.nr
        if self.is_along(factor, product.k.var):
            b = self.in_place(factor, values).moved(first, start)
            return transpose_tile(target, at, b.buffer, b.at, depth, nr, b.outer, nr, columns)
        p = self.var("p", self.kc_most)

        def row(extent: Index) -> Stmt:
            j, rest = self.var("j", nr), self.var("j", nr)
            here = {**values, product.k.var: start + p, product.column.var: first + j}
            value = cast(self.on_buffers(factor.value, here), self.wide)
            copy = For(j, 0, extent, Store(target, at + p * nr + j, value), "vector")
            if extent == nr:
                return copy
            zero = Store(target, at + p * nr + rest, Const(self.wide, 0))
            return block(copy, For(rest, extent, nr, zero, "vector"))

        return self.by_width(columns, nr, lambda extent: For(p, 0, depth, row(extent)))

    def by_width(self, columns: Index, width: int, make: Callable[[Index], Stmt]) -> Stmt:
        """Code for a full width, which is known, and for what is left at the edge."""
        if isinstance(columns, int):
            return make(columns)
        return If(call("eq", as_scalar(columns), width), make(width), make(columns))

    def pack_all(self, packed: Buffer) -> Stmt:
        """All panels of B, in parallel: pieces of a few rows, so that B is read along its rows."""
        product, factor, nr = self.product, self.product.b, self.nr
        # Eight panels side by side are read along rows of B; a transposed B has no rows.
        depth, group = (256, 1) if self.is_along(factor, product.k.var) else (64, 8)
        outer, lets = Names(self.fresh), Names(self.fresh)
        panels = outer("panels", ceildiv(self.n, nr))
        pieces = outer("pieces", maximum(ceildiv(self.k, depth), 1))
        groups = outer("groups", ceildiv(panels, group))
        task, side = self.var("task"), self.var("side", group)
        matrix = lets("matrix", task // (pieces * groups))
        start = lets("start", task // groups % pieces * depth)
        first_panel = lets("first_panel", task % groups * group)
        panel = lets("panel", first_panel + side) if group == 1 else first_panel + side
        inner = Names(self.fresh)
        values = digits(matrix, product.batch_of(factor))
        first = inner("first", panel * nr)
        # The name is of what is multiplied by `together`, so that nobody forgets that it is.
        at = self.together * inner("to", self.packed_panel(
            packed, matrix, panel, start).at // self.together)
        steps = lets("steps", minimum(depth, self.k - start), depth)
        copy = inner.around(self.pack_panel(packed, at, values, first, self.columns(
            inner, first, nr), start, steps))
        body = lets.around(For(side, 0, minimum(group, panels - first_panel), copy))
        return outer.around(For(task, 0, self.members(factor) * pieces * groups, body, "parallel",
                                grain_of(_PACK_ELEMENTS, depth * group * nr)))

    # ------------------------------------------------------------ sums and what is made of them
    def sums_in_output(self) -> bool:
        """Whether the output can hold the sums until the epilogue has seen them."""
        address = self.product.out_address
        return (self.out.dtype is self.wide or self.rounds_in_tiles()) and coefficient(
            address, self.product.column.var) == 1 and (
            self.row_var is None or coefficient(address, self.row_var) is not None)

    def rounds_in_tiles(self) -> bool:
        """Whether the tiles themselves give results that are narrower than the sums."""
        return False

    def output(self, values: Values, first_row: Index, first: Index) -> Place:
        """The output from some row and column on."""
        address = self.product.out_address
        start = {**values, self.product.column.var: first}
        stride: Index | None = 0
        if self.row_var is not None:
            start[self.row_var] = first_row
            stride = coefficient(address, self.row_var)
        assert stride is not None
        return Place(self.out, substitute(address, start), stride, 1)

    def epilogue(self, sums: Place, values: Values, first_row: Index, rows: Index, first: Index,
                 columns: Index, width: int) -> Stmt | None:
        """Store what the body makes of a block of sums."""
        product = self.product
        if sums.buffer is self.out and (
                isinstance(product.body, Reduce) or self.rounds_in_tiles()):
            return None
        i = self.var("i")

        def row(extent: Index) -> Stmt:
            j = self.var("j", width)
            here = {**values, product.column.var: first + j}
            if self.row_var is not None:
                here[self.row_var] = first_row + i
            total = Load(self.wide, sums.buffer, (sums.at + i * sums.outer + j,))
            value = cast(self.on_buffers(product.body, here, total), self.out.dtype)
            address = substitute(product.out_address, here)
            return For(j, 0, extent, Store(self.out, address, value), "vector")

        return self.by_width(columns, width, lambda extent: For(i, 0, rows, row(extent)))

    def row_tiles(self, sums: Place, a: Place, b: Place, depth: Index, rows: Index,
                  columns: Index, accumulate: bool, soon: tuple[Index, Index] | None = None
                  ) -> Stmt:
        """All rows of a block, a register tile at a time; what is left takes smaller tiles.

        `soon` is where the next piece of B lies, and how much of it each step of k asks for.
        """
        mr, nr = self.mr, self.nr

        def tile(row: Index, height: int, live: Index) -> Tile:
            hint = None if soon is None else (soon[0] + row // mr * depth * soon[1], soon[1])
            return self.tile(sums.moved(row, 0), a.moved(row, 0), b, depth, height, accumulate,
                             live, hint)

        if not isinstance(self.m, int):
            return self.tiles_below(tile(0, mr, columns), rows)

        def whole(live: Index) -> Stmt:
            i = self.var("tile")
            return For(i, 0, rows // mr, tile(i * mr, mr, live))

        return block(None if is_below(rows, mr) else self.by_width(columns, nr, whole),
                     self.remainder(rows, mr, lambda row, height: tile(row, height, columns)))

    def tile(self, sums: Place, a: Place, b: Place, depth: Index, height: int, accumulate: bool,
             live: Index, soon: tuple[Index, Index] | None) -> Tile:
        """One register tile."""
        return fma_tile(sums.buffer, sums.at, a.buffer, a.at, b.buffer, b.at, depth, a.outer,
                        a.inner, b.outer, sums.outer, height, self.nr, accumulate, live, soon,
                        self.is_small())

    def tiles_below(self, tile: Tile, rows: Index) -> Stmt:
        """Tiles below each other, for a number of rows that is known when the kernel runs."""
        return fma_rows(tile, rows)

    def remainder(self, rows: Index, height: int, tile: Callable[[Index, int], Stmt]
                  ) -> Stmt | None:
        """The rows that do not fill a tile, in smaller tiles."""
        # Blocks begin at multiples of the tile, so what is left of the last block is what is
        # left of all rows, and of other blocks there is nothing left.
        row = rows // height * height
        if isinstance(self.m, int):
            left = self.m % height
            if left == 0:
                return None
            fits = tile(row, left)
            return fits if isinstance(rows, int) else If(
                call("eq", as_scalar(rows % height), left), fits)
        # One tile for each bit of the number of rows left: few shapes, little code.
        lets = Names(self.fresh)
        count = lets("left", rows % height, height - 1)
        return lets.around(block(*(
            If(call("eq", as_scalar(count // size % 2), 1),
               tile(row + count // (2 * size) * (2 * size), size))
            for size in (1 << bit for bit in reversed(range((height - 1).bit_length()))))))

    def passes(self, one_pass: Pass) -> Stmt:
        """Pieces of k one after the other; the first one sets the sums, the others add to them.

        A pass gets its first step, the number of steps, whether it adds, and whether it is last.
        """
        if self.k_passes == 1:
            return one_pass(0, self.k, False, True)
        lets = Names(self.fresh)
        count, piece = lets("passes", self.k_passes), lets("piece", self.kc, self.kc_most)
        number, inner = self.var("pass"), Names(self.fresh)
        start = inner("start", number * piece)
        depth = inner("depth", minimum(piece, self.k - start), self.kc_most)
        only = False if isinstance(count, int) else call("eq", as_scalar(count), 1)
        last = call("eq", as_scalar(number + 1), as_scalar(count))
        return lets.around(block(
            one_pass(0, minimum(piece, self.k), False, only),
            For(number, 1, count, inner.around(one_pass(start, depth, True, last)))))

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
            even = min(_TASKS_PER_CORE // 2 * self.chip.cores, math.ceil(2 * self.n / width))
            width = math.ceil(self.n / max(even, math.ceil(self.n / width)))
        width = math.ceil(width / nr) * nr
        blocks = outer("blocks", ceildiv(self.n, width))
        task = self.var("task")
        values = digits(lets("member", task // blocks), self.product.batch)
        first = lets("first", task % blocks * width)
        columns = self.columns(lets, first, width)
        local = None if self.sums_in_output() else Buffer(
            self.fresh("sums"), self.wide, _STRIP_ROWS * width)
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
        piece = Buffer(self.fresh("panel"), self.item, self.kc_most * self.nr)
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
            return maximum(blocks, ceildiv(ceildiv(m, self.mr), _PANEL_ROWS // self.mr))
        tiles, panels = math.ceil(m / self.mr), batch * math.ceil(n / self.nr)
        vectors, depth = self.nr // self.lanes, k if isinstance(k, int) else _PIECE_DEPTH
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
        blocks = outer("blocks", self.row_blocks(piece is not None), _PANEL_ROWS)
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
                        _PANEL_ROWS)
        a = lets.place("a", a_place(values).moved(first_row, 0))
        local = None
        if not self.sums_in_output():
            most = bounds(self.m)[1]
            most = _PANEL_ROWS if most is None else min(most, _PANEL_ROWS)
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
                    soon = (b.at + depth * nr, share)
            elif piece is None:
                lying = self.in_place(self.product.b, values).moved(first, start)
                b = Place(lying.buffer, lying.at, lying.inner, 1)
            else:
                packing = self.pack_panel(piece, 0, values, first, columns, start, depth)
                b = Place(piece, 0, self.together * nr, self.together)
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

        def plan(threads: int) -> tuple[int, ...]:
            def cycles(divided: tuple[int, int]) -> float:
                blocks, groups = divided
                each = math.ceil(tiles / blocks) * self.mr * (
                    math.ceil(panels / groups) * vectors / 2 + _BLOCK_CYCLES)
                return longest_share(batch * blocks * groups, threads) * (
                    each + _TASK_CYCLES / _PIECE_DEPTH)

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
        room = self.chip.l2_bytes * 45 // 100 // (self.kc_most * self.item.itemsize)
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
        pitch = math.ceil(self.kc_most / self.lanes) * self.lanes
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
                                   (b.at + self.k * nr, share))
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
