"""Matrix products on CPUs, what tasks are made of: packing, register tiles, what follows sums."""

from __future__ import annotations

from collections.abc import Callable

from terrazzo.base.scalar import Const, Load, Reduce, as_scalar, call, cast
from terrazzo.chips.cpu.gemm_parts import PANEL_ROWS, Pass, PlaceOf, ProductKernel, Values
from terrazzo.chips.cpu.kernel_parts import Names, Place, digits, grain_of, is_below
from terrazzo.index import Index, ceildiv, coefficient, maximum, minimum, substitute
from terrazzo.loop.ir import Buffer, For, If, Stmt, Store, Tile, block
from terrazzo.loop.tiles import Soon, fma_rows, fma_tile, transpose_tile

_PACK_ELEMENTS = 16384  # elements worth packing in a task of their own


class TiledProduct(ProductKernel):
    """A product whose operands are packed, and whose blocks are register tiles."""

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
            rows = minimum(self.m, PANEL_ROWS)
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
        i, p = self.var("i"), self.var("p", self.pieces.most)
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
        p = self.var("p", self.pieces.most)

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
        """Whether the output can hold the sums until the epilogue has seen them.

        Rows of less than a vector are stored by masks, and what is loaded by a mask waits for that.
        """
        address = self.product.out_address
        if self.rounds_in_tiles():
            fits = True
        else:
            narrow = isinstance(self.n, int) and self.n < self.lanes
            fits = self.out.dtype is self.wide and (
                isinstance(self.product.body, Reduce) or not narrow)
        return fits and coefficient(address, self.product.column.var) == 1 and (
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
                  columns: Index, accumulate: bool, soon: Soon | None = None) -> Stmt:
        """All rows of a block, a register tile at a time; what is left takes smaller tiles.

        `soon` is what the next piece of B is, or is packed from: each tile asks for a part of it.
        """
        mr, nr = self.mr, self.nr

        def tile(row: Index, height: int, live: Index) -> Tile:
            hint = None if soon is None else soon._replace(
                at=soon.at + row // mr * depth * soon.share)
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
             live: Index, soon: Soon | None) -> Tile:
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
        if self.pieces.count == 1:
            return one_pass(0, self.k, False, True)
        lets = Names(self.fresh)
        pieces = self.pieces
        count, piece = lets("passes", pieces.count), lets("piece", pieces.steps, pieces.most)
        number, inner = self.var("pass"), Names(self.fresh)
        start = inner("start", number * piece)
        depth = inner("depth", minimum(piece, self.k - start), pieces.most)
        only = False if isinstance(count, int) else call("eq", as_scalar(count), 1)
        last = call("eq", as_scalar(number + 1), as_scalar(count))
        return lets.around(block(
            one_pass(0, minimum(piece, self.k), False, only),
            For(number, 1, count, inner.around(one_pass(start, depth, True, last)))))
