"""Products of bfloat16 on CPUs that multiply them: `gemm.py` with steps of k in pairs.

The instruction adds two products of neighbours along k to each sum of float32
(`loop/pair_tile.py`). So nothing is widened when it is packed: panels hold pairs, and A is read
where it lies if it is contiguous along k. A that is contiguous along its rows is packed in pairs
as well, as B is. Processors without the instruction widen bfloat16 to float32 (`gemm.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from terrazzo.base.scalar import Call, Const, Reduce, Scalar
from terrazzo.chips.cpu.gemm import Gemm
from terrazzo.chips.cpu.gemm_parts import PlaceOf, Values
from terrazzo.chips.cpu.kernel_parts import Names, Place, digits, grain_of
from terrazzo.chips.spec import ChipSpec
from terrazzo.dtypes import DType, bfloat16, float32
from terrazzo.expr.ir import Program, Tensor
from terrazzo.expr.matmul import Factor, match_product
from terrazzo.index import Index, ceildiv, maximum, minimum
from terrazzo.loop.ir import Buffer, For, Function, Stmt, Store, Tile, block
from terrazzo.loop.packing import Packing
from terrazzo.loop.pair_tile import WHOLE_SUMS, pair_panel, pair_rows, pair_tile
from terrazzo.loop.tiles import Soon

_COPY_ELEMENTS = 16384  # elements worth packing in a task of their own


def adds_pairs(chip: ChipSpec) -> bool:
    """Whether a chip adds up products of two bfloat16, at its full width."""
    return chip.has("avx512bf16") and chip.vector_bits in (256, 512)


def lower_bfloat_product(program: Program, chip: ChipSpec,
                         constants: frozenset[Tensor] = frozenset()) -> Function | None:
    """The kernel of a program that is one product of bfloat16; None for all others."""
    product = match_product(program) if adds_pairs(chip) else None
    if product is None or product.reduce.dtype is not float32 or None in map(
            narrow_value, (product.a, product.b)):
        return None
    return _BfloatGemm(program, product, chip, constants).function()


def narrow_value(factor: Factor) -> Scalar | None:
    """A factor without its widening to the type of the sums; None unless it is a bfloat16."""
    node = factor.value
    while isinstance(node, Call) and node.op == "cast" and node.dtype is not bfloat16:
        node = node.args[0]
    return node if node.dtype is bfloat16 else None


class _BfloatGemm(Gemm):
    """One kernel in the making."""

    @cached_property
    def together(self) -> int:
        return 2

    @cached_property
    def registers(self) -> int:
        return 32  # of all processors that have the instruction

    @cached_property
    def item(self) -> DType:
        return bfloat16

    @cached_property
    def even(self) -> bool:
        """Whether k is known to be whole pairs."""
        return isinstance(self.k, int) and self.k % 2 == 0

    def pieces_of_k(self, most: int) -> tuple[Index, Index]:
        _, depth = super().pieces_of_k(most)
        whole = maximum(ceildiv(depth, 2) * 2, 2)
        return maximum(ceildiv(self.k, whole), 1), whole

    def narrow(self, factor: Factor, values: Values) -> Scalar:
        """An element of a factor."""
        value = narrow_value(factor)
        assert value is not None
        return self.on_buffers(value, values)

    def pairs_of(self, depth: Index, pair: Callable[[Index, bool], Stmt]) -> Stmt:
        """All pairs of some steps of k, by number; of the last there may be a half."""
        q, rest = self.var("q"), self.var("q")
        return block(For(q, 0, depth // 2, pair(q, True)), None if self.even else For(
            rest, depth // 2, ceildiv(depth, 2), pair(rest, False)))

    # ------------------------------------------------------------ A
    def reads_a_in_place(self, along_k: bool) -> bool:
        return super().reads_a_in_place(True)

    def lies_along_rows(self) -> bool:
        return self.row_var is not None and self.is_along(self.product.a, self.row_var)

    def with_a(self, along_k: bool, plan: Callable[[PlaceOf], Stmt]) -> Stmt:
        """A plan that reads A: where it lies if that will do, else from a copy in pairs."""
        product, factor = self.product, self.product.a
        if self.reads_a_in_place(along_k):
            return plan(lambda values: self.in_place(factor, values))
        depth = ceildiv(self.k, 2) * 2
        if self.a_copy is None:
            self.a_copy = Buffer(self.fresh("a_copy"), bfloat16, self.members(factor) * depth
                                 * minimum(self.m, self.panel_rows))
        copy, lets = self.a_copy, Names(self.fresh)
        in_pairs = self.lies_along_rows() and not along_k
        lines, length = (depth // 2, 2 * self.m) if in_pairs else (self.m, depth)
        line = self.var("line")
        values = digits(lets("matrix", line // lines), product.batch_of(factor))
        index, start = lets("index", line % lines), line * length
        if in_pairs:
            fill = self.pair_of_rows(copy, start, values, 0, self.m, 2 * index)
        else:
            at = self.var("at")
            here = {**values, product.k.var: at}
            if self.row_var is not None:
                here[self.row_var] = index
            fill = For(at, 0, self.k, Store(copy, start + at, self.narrow(factor, here)), "vector")
        copying = For(line, 0, self.members(factor) * lines, lets.around(fill), "parallel",
                      grain_of(_COPY_ELEMENTS, length))

        def place(values: Values) -> Place:
            begin = self.member(factor, values) * lines * length
            return Place(copy, begin, *((2, self.m) if in_pairs else (depth, 1)))

        return block(copying, plan(place))

    def pair_of_rows(self, target: Buffer, at: Index, values: Values, first_row: Index,
                     rows: Index, step: Index) -> Stmt:
        """Two steps of k of some rows of A, side by side; nobody reads more of an odd k."""
        i = self.var("i")
        assert self.row_var is not None
        here = {**values, self.row_var: first_row + i}
        second = step + 1 if self.even else minimum(step + 1, self.k - 1)
        return For(i, 0, rows, block(*(
            Store(target, at + 2 * i + t, self.narrow(
                self.product.a, {**here, self.product.k.var: step}))
            for t, step in enumerate((step, second)))), "vector")

    def block_place(self, target: Buffer, rows: int, depth: int) -> Place:
        return Place(target, 0, 2, rows) if self.lies_along_rows() else Place(target, 0, depth, 1)

    def pack_block(self, target: Place, values: Values, first_row: Index, rows: Index,
                   start: Index, depth: Index) -> Stmt:
        """Copy a piece of some rows of A, in pairs."""
        if self.lies_along_rows():
            q = self.var("q", self.pieces.most // 2)
            return For(q, 0, ceildiv(depth, 2), self.pair_of_rows(
                target.buffer, 2 * (q * target.inner), values, first_row, rows, start + 2 * q))
        i, p = self.var("i"), self.var("p", self.pieces.most)
        here = {**values, self.product.k.var: start + p}
        if self.row_var is not None:
            here[self.row_var] = first_row + i
        store = Store(target.buffer, target.moved(i, p).at, self.narrow(self.product.a, here))
        return For(i, 0, rows, For(p, 0, depth, store, "vector"))

    # ------------------------------------------------------------ B
    def packing_of_b(self) -> Packing:
        return replace(super().packing_of_b(), dtype=bfloat16, together=2)

    def pack_panel(self, target: Buffer, at: Index, values: Values, first: Index, columns: Index,
                   start: Index, depth: Index) -> Stmt:
        """Copy `depth` rows of a panel in pairs, filled up with zeros to pairs and full width."""
        product, factor, nr = self.product, self.product.b, self.nr
        if self.is_along(factor, product.k.var):
            b = self.in_place(factor, values).moved(first, start)
            return pair_panel(target, at, b.buffer, b.at, depth, 2 * nr, b.outer, nr, columns)

        def pair(q: Index, extent: Index, whole: bool) -> Stmt:
            j, rest = self.var("j", nr), self.var("j", 2 * nr)
            to, zero = at + q * (2 * nr), Const(bfloat16, 0)
            here = {**values, product.column.var: first + j}
            items = [self.narrow(factor, {**here, product.k.var: start + 2 * q + t})
                     for t in range(1 + whole)]
            copy = For(j, 0, extent, block(*(
                Store(target, to + 2 * j + t, item)
                for t, item in enumerate((*items, zero)[:2]))), "vector")
            if extent == nr:
                return copy
            return block(copy, For(rest, 2 * extent, 2 * nr, Store(target, to + rest, zero),
                                   "vector"))

        return self.by_width(columns, nr, lambda extent: self.pairs_of(
            depth, lambda q, whole: pair(q, extent, whole)))

    # ------------------------------------------------------------ tiles
    def rounds_in_tiles(self) -> bool:
        body = self.product.body
        return self.out.dtype is bfloat16 and isinstance(self.k, int) and self.k <= WHOLE_SUMS and (
            self.pieces.count == 1) and isinstance(body, Call) and body.op == "cast" and (
            isinstance(body.args[0], Reduce))

    def tile(self, sums: Place, a: Place, b: Place, depth: Index, height: int, accumulate: bool,
             live: Index, soon: Soon | None) -> Tile:
        return pair_tile(sums.buffer, sums.at, a.buffer, a.at, b.buffer, b.at, depth, a.outer,
                         2 * a.inner, b.outer, sums.outer, height, self.nr, accumulate,
                         b.inner == 2, self.even, live, soon, self.is_small())

    def tiles_below(self, tile: Tile, rows: Index) -> Stmt:
        return pair_rows(tile, rows)
