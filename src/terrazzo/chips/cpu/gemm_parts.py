"""Matrix products on CPUs, what is decided first: register tile, panels, where operands lie."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from terrazzo.base.scalar import Axis, Scalar, loads
from terrazzo.chips.cpu.kernel_parts import Kernel, Names, Place, product_of
from terrazzo.chips.spec import ChipSpec
from terrazzo.dtypes import DType
from terrazzo.expr.ir import Program, Tensor
from terrazzo.expr.lower import storage_size
from terrazzo.expr.matmul import Factor, MatrixProduct
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
from terrazzo.loop.ir import Buffer, Stmt
from terrazzo.loop.packing import Packing, Steps

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
DIRECT_ROWS = {32: 12, 16: 6}  # up to here B is read where it lies
_DIRECT_VECTORS = 8
_SUMS_AT_ONCE = 4  # that hide the latency of one, where memory sets the pace
STRIP_ROWS = 2  # up to here a task reads B in strips: a few rows of B, many columns
_STRIP_DEPTH = 128
_NARROW_ROWS = 32  # up to here constants of half types stay as narrow as they are
PANEL_ROWS = 256  # up to here tasks read A where it lies, and each packs its panel
_PANEL_ROWS_WHEN_FEW = 64  # the same when few panels would be packed by several tasks each
PIECE_DEPTH = 512  # steps of k in a piece; 256 to 1024 differ little
# With fewer rows a panel that comes from memory is waited for longer, and must be asked for nearer
# to its use: with 64 rows, pieces of 256 are 10 % faster than of 512; with 128 rows, 2 % slower.
_SHALLOW_DEPTH = 256
_SHALLOW_ROWS = 96
TASKS_PER_CORE = 4

Values = Mapping[Var, Index]
PlaceOf = Callable[[Values], Place]
Pass = Callable[[Index, Index, bool, "Scalar | bool"], Stmt]


@dataclass(frozen=True)
class Pieces:
    """k in pieces: how many there are, the steps of all but the last, and the most that may be."""

    count: Index
    steps: Index
    most: int


class ProductKernel(Kernel):
    """One product in the making: its sizes, its register tile, and where operands lie."""

    def __init__(self, program: Program, product: MatrixProduct, chip: ChipSpec,
                 constants: frozenset[Tensor]):
        super().__init__(program, chip)
        self.product = product
        self.can_pack = self.is_constant_matrix(product.b, constants)
        self.mr, vectors = self.choose_tile()
        self.nr = vectors * self.lanes
        self.packing = self.packing_of_b() if self.can_pack else None
        for tensor in (*program.inputs, product.stage):
            name, dtype, size = self.fresh(tensor.name), tensor.dtype, storage_size(tensor)
            if self.packing is not None and tensor is self.b_tensor:
                dtype, size = self.packing.dtype, self.packing.size
            self.buffers[tensor] = Buffer(name, dtype, size, tensor is not product.stage)
        self.pieces = self.choose_pieces()
        self.a_copy: Buffer | None = None

    @cached_property
    def together(self) -> int:
        """Steps of k that lie side by side in packed panels."""
        return 1

    @cached_property
    def wide(self) -> DType:
        """The type of the sums."""
        return self.product.reduce.dtype

    @cached_property
    def item(self) -> DType:
        """The type of elements that are packed when the kernel runs."""
        return self.wide

    @cached_property
    def lanes(self) -> int:
        return self.chip.lanes(self.wide.bits)

    @cached_property
    def registers(self) -> int:
        """Registers that the tile is made for: 16 or 32."""
        return 32 if self.chip.vector_registers >= 32 else 16

    @property
    def out(self) -> Buffer:
        return self.buffers[self.product.stage]

    @cached_property
    def row_var(self) -> Var | None:
        return None if self.product.row is None else self.product.row.var

    @cached_property
    def m(self) -> Index:
        return 1 if self.product.row is None else self.product.row.extent

    @cached_property
    def n(self) -> Index:
        return self.product.column.extent

    @cached_property
    def k(self) -> Index:
        return self.product.k.extent

    @cached_property
    def batch(self) -> Index:
        return product_of(a.extent for a in self.product.batch)

    @cached_property
    def panel_rows(self) -> int:
        """Up to how many rows tasks read A where it lies, and each packs its panel."""
        panels = bounds(self.batch * ceildiv(self.n, self.nr))[1]
        few = self.packing is None and panels is not None and (
            panels < TASKS_PER_CORE // 2 * self.chip.cores)
        return PANEL_ROWS if not few else _PANEL_ROWS_WHEN_FEW

    def choose_pieces(self) -> Pieces:
        """How k is cut: a piece of a panel takes an eighth of the second-level cache at most."""
        deepest = self.chip.l2_bytes // 8 // (self.nr * self.item.itemsize) // 2 * 2
        shallow = self.packing is not None and not (
            isinstance(self.m, int) and self.m > _SHALLOW_ROWS)
        most = max(64, min(_SHALLOW_DEPTH if shallow else PIECE_DEPTH, deepest))
        if self.reads_strips():
            most = _STRIP_DEPTH
        count, steps = self.pieces_of_k(most)
        return Pieces(count, steps, max(steps, 1) if isinstance(steps, int) else most)

    def pieces_of_k(self, most: int) -> tuple[Index, Index]:
        """How many pieces k is cut into, and the steps of all but the last."""
        count: Index = maximum(ceildiv(self.k, most), 1)
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
            around = math.ceil(whole / (TASKS_PER_CORE * self.chip.cores))
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
        return isinstance(self.m, int) and 0 < self.m <= DIRECT_ROWS[self.registers]

    def reads_strips(self) -> bool:
        return isinstance(self.m, int) and self.m <= STRIP_ROWS and not self.can_pack and (
            self.is_along(self.product.b, self.product.column.var))

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
