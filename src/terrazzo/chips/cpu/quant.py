"""Products of small integers on CPUs: packed, register-tiled kernels with sums of 32 bits.

The scheme is that of `gemm.py`, with three differences. Steps of k come in groups, as the
instructions want them (`loop/int8_tile.py`): four bytes, unsigned by signed, where the chip adds up
products of bytes, else two words, to which both factors are widened when packed. B is packed as a
whole, when the graph is compiled if it is a constant. And what the body does with the sums
(requantising: scale, zero point, clamping, residuals) happens to each register tile by itself,
while it is in the first-level cache: the sums are four times as large as what they become.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from terrazzo.base.scalar import (
    Axis,
    Call,
    Const,
    Reduce,
    Scalar,
    as_scalar,
    call,
    cast,
    loads,
    substitute_indices,
    walk,
    where,
)
from terrazzo.chips.cpu.gemm import Gemm
from terrazzo.chips.cpu.gemm_parts import PlaceOf, Values
from terrazzo.chips.cpu.kernel_parts import Names, Place, digits, grain_of, is_below, product_of
from terrazzo.chips.cpu.quant_bytes import small_value, without_bytes
from terrazzo.chips.spec import ChipSpec
from terrazzo.dtypes import DType, int8, int16, int32, int64, uint8
from terrazzo.expr.contraction import match_contraction
from terrazzo.expr.ir import Program, Tensor
from terrazzo.expr.matmul import Factor, MatrixProduct, match_product
from terrazzo.index import Index, Var, bounds, ceildiv, coefficient, maximum, minimum, substitute
from terrazzo.loop.int8_tile import integer_tile
from terrazzo.loop.ir import Alloc, Buffer, For, Function, Stmt, Store, block
from terrazzo.loop.packing import Packing, Steps

PlanOf = Callable[[PlaceOf], Stmt]

# Register tiles as (rows, vectors of columns, price), as in gemm_parts.py, by registers and steps
# of k in a group; words need one more register. The prices of words are measured with AVX2.
_TILES = {
    (32, 4): ((6, 4, 1.0), (8, 3, 1.03), (12, 2, 1.08), (14, 1, 1.3)),
    (32, 2): ((6, 4, 1.0), (8, 3, 1.03), (12, 2, 1.08), (14, 1, 1.3)),
    (16, 4): ((6, 2, 1.0), (4, 3, 1.05), (10, 1, 1.25)),
    (16, 2): ((2, 4, 1.0), (3, 3, 1.01), (6, 2, 1.09), (10, 1, 1.3)),
}
_BLOCK_ROWS = 384  # rows of a task, where A is larger than the second-level cache
_MOST_ROWS = 2048  # rows of a task, where it is not
_TASKS_PER_CORE = 4
_TASK_PRODUCTS = 4 * 64**3  # below this a task of its own does not pay
_PACK_ELEMENTS = 65536  # elements worth packing in a task of their own


def _byte(factor: Factor) -> Scalar:
    value = small_value(factor)
    assert value is not None
    return value


def adds_bytes(chip: ChipSpec) -> bool:
    """Whether a chip adds up products of four bytes, at its full width."""
    if chip.vector_bits == 512:
        return chip.has("avx512vnni")
    return chip.vector_bits == 256 and (chip.has("avxvnni") or chip.has("avx512vnni", "avx512vl"))


def adds_words(chip: ChipSpec) -> bool:
    """Whether a chip adds up products of two words."""
    return chip.has("sse2")


@dataclass(frozen=True, eq=False)
class Window:
    """A product whose rows may be the places of a moving window: pixels, by number.

    k has `inner` axes, which are one contiguous stretch of A, and `leading` axes around them.
    """

    product: MatrixProduct
    leading: tuple[Axis, ...]
    inner: tuple[Axis, ...]


def lower_integer_product(program: Program, chip: ChipSpec,
                          constants: frozenset[Tensor] = frozenset()) -> Function | None:
    """The kernel of a program that is one product or convolution of bytes; None for all others."""
    if not adds_words(chip):
        return None
    product = match_product(program)
    if product is None or len(product.batch) > len(product.batch_of(product.b)):
        # Several axes of rows that are no one axis: a window that moves, if only in steps of two.
        window = match_window(program)
        if window is not None:
            return _IntegerConv(program, window, chip, constants).function()
    if product is None or product.reduce.dtype is not int32 or None in map(
            small_value, (product.a, product.b)):
        return None
    window = Window(product, (), (product.k,))
    return _IntegerGemm(program, window, chip, constants).function()


class _IntegerGemm(Gemm):
    """One kernel in the making."""

    def __init__(self, program: Program, window: Window, chip: ChipSpec,
                 constants: frozenset[Tensor]):
        self.leading, self.inner = window.leading, window.inner
        product = window.product
        super().__init__(program, replace(product, body=without_bytes(product.body)), chip,
                         constants)

    @cached_property
    def by_bytes(self) -> bool:
        """Whether bytes are multiplied as they are, and not as words."""
        return self.a_small.dtype is uint8 and self.b_small.dtype is int8 and adds_bytes(self.chip)

    @cached_property
    def together(self) -> int:
        return 4 if self.by_bytes else 2

    @cached_property
    def a_small(self) -> Scalar:
        return _byte(self.product.a)

    @cached_property
    def b_small(self) -> Scalar:
        return _byte(self.product.b)

    @cached_property
    def a_dtype(self) -> DType:
        return uint8 if self.by_bytes else int16

    @cached_property
    def b_dtype(self) -> DType:
        return int8 if self.by_bytes else int16

    @cached_property
    def stretch(self) -> Index:
        """Steps of k that are neighbours in A."""
        return product_of(a.extent for a in self.inner)

    @cached_property
    def groups(self) -> Index:
        return ceildiv(self.stretch, self.together)

    @cached_property
    def segments(self) -> Index:
        return self.leading[-1].extent if self.leading else 1

    @cached_property
    def rounds(self) -> Index:
        return product_of(a.extent for a in self.leading[:-1])

    @cached_property
    def k_padded(self) -> Index:
        return self.rounds * self.segments * self.groups * self.together

    @property
    def in_groups(self) -> bool:
        return isinstance(self.stretch, int) and self.stretch % self.together == 0

    def choose_tile(self) -> tuple[int, int]:
        """Rows and vectors of columns of the register tile."""
        tiles, n = _TILES[self.registers, self.together], self.n
        if not isinstance(n, int):
            return tiles[0][:2]

        def price(tile: tuple[int, int, float]) -> float:
            width = tile[1] * self.lanes
            return math.ceil(n / width) * width * tile[2]

        return min(tiles, key=price)[:2]

    # ------------------------------------------------------------ packing B
    def b_axes(self) -> tuple[Axis, ...]:
        return (*self.product.batch_of(self.product.b), self.product.column, *self.leading,
                *self.inner)

    def is_constant_matrix(self, factor: Factor, constants: frozenset[Tensor]) -> bool:
        """Whether B is a constant, read nowhere else, that strides describe."""
        load, address = factor.load, factor.address
        if load is None or address is None or load.source not in constants:
            return False
        others = sum(other.source is load.source for other in loads(self.product.body))
        return others == 1 and all(isinstance(a.extent, int) and isinstance(
            coefficient(address, a.var), int) for a in self.b_axes())

    def packing_of_b(self) -> Packing:
        """The layout of a constant B: panels of groups."""
        product, address = self.product, self.product.b.address
        assert address is not None

        def steps(axis: Axis) -> Steps:
            stride = coefficient(address, axis.var)
            assert isinstance(axis.extent, int) and isinstance(stride, int)
            return axis.extent, stride

        start = substitute(address, {a.var: 0 for a in self.b_axes()})
        assert isinstance(start, int) and isinstance(self.stretch, int)
        k = (*map(steps, self.leading), (self.stretch, steps(self.inner[-1])[1]))
        return Packing(self.b_dtype, self.nr, steps(product.column), k,
                       tuple(map(steps, product.batch_of(product.b))), start, self.together)

    def plans(self) -> Stmt:
        """B packed before anything else, unless it came so; then all tasks."""
        if self.packing is not None:
            return self.with_bytes(lambda a: self.tasks(a, self.buffers[self.b_tensor]))
        size = self.members(self.product.b) * ceildiv(self.n, self.nr) * self.nr * self.k_padded
        packed = Buffer(self.fresh("b_packed"), self.b_dtype, size)
        return Alloc(packed, block(self.pack_all(packed), self.with_bytes(
            lambda a: self.tasks(a, packed))))

    def pack_all(self, packed: Buffer) -> Stmt:
        """All panels of B, in parallel, filled up with zeros."""
        product, nr, together = self.product, self.nr, self.together
        outer, lets = Names(self.fresh), Names(self.fresh)
        panels = outer("panels", ceildiv(self.n, nr))
        task, s, q = self.var("task"), self.var("s"), self.var("q")
        j, t = self.var("j", nr), self.var("t", together)
        matrix = lets("matrix", task // panels)
        first = lets("first", task % panels * nr)
        k, column = q * together + t, first + j
        here = {**digits(matrix, product.batch_of(product.b)), **digits(s, self.leading),
                **digits(k, self.inner), product.column.var: column}
        value = cast(self.on_buffers(self.b_small, here), self.b_dtype)
        inside = [call("lt", as_scalar(at), as_scalar(end)) for at, end, width in (
            (k, self.stretch, together), (column, self.n, nr))
            if not (isinstance(end, int) and end % width == 0)]
        for condition in inside:
            value = where(condition, value, Const(self.b_dtype, 0))
        turns = self.rounds * self.segments
        at = (((task * turns + s) * self.groups + q) * nr + j) * together + t
        rows = For(s, 0, turns, For(q, 0, self.groups, For(t, 0, together, For(
            j, 0, nr, Store(packed, at, value), "vector"))))
        return outer.around(For(task, 0, self.members(product.b) * panels, lets.around(rows),
                                "parallel", grain_of(_PACK_ELEMENTS, self.k_padded * nr)))

    # ------------------------------------------------------------ reading A
    def with_bytes(self, plan: PlanOf) -> Stmt:
        """A plan that reads A: where it lies if that will do, else from a copy in whole groups."""
        product, factor, k_var = self.product, self.product.a, self.product.k.var
        if factor.load is not None and factor.load.dtype is self.a_dtype and self.in_groups and (
                self.is_affine(factor) and factor.stride(k_var) == 1):
            return plan(lambda values: self.in_place(factor, values))
        copy = Buffer(self.fresh("a_copy"), self.a_dtype,
                      self.members(factor) * self.m * self.k_padded)
        line, lets = self.var("line"), Names(self.fresh)
        values = digits(lets("matrix", line // self.m), product.batch_of(factor))
        if self.row_var is not None:
            values[self.row_var] = lets("index", line % self.m)
        at, rest = self.var("at"), self.var("rest")
        value = cast(self.on_buffers(self.a_small, {**values, k_var: at}), self.a_dtype)
        fill = block(
            For(at, 0, self.k, Store(copy, line * self.k_padded + at, value), "vector"),
            None if self.in_groups else For(rest, self.k, self.k_padded, Store(
                copy, line * self.k_padded + rest, Const(self.a_dtype, 0))))

        def place(values: Values) -> Place:
            start = self.member(factor, values) * self.m * self.k_padded
            return Place(copy, start, self.k_padded, 1)

        return Alloc(copy, block(
            For(line, 0, self.members(factor) * self.m, lets.around(fill), "parallel",
                grain_of(_PACK_ELEMENTS, self.k)), plan(place)))

    def a_bytes(self) -> Index:
        """How much of A there is for one member of the batch."""
        return self.m * self.k_padded * self.a_dtype.itemsize

    def table_of_rows(self, first_row: Index, count: Index, most: int
                      ) -> tuple[Buffer, Stmt] | None:
        """Where the rows of a task begin in A, if they are not evenly apart."""
        return None

    # ------------------------------------------------------------ the product
    def sharing(self, outer: Names, panels: Index) -> tuple[Index, Index, int]:
        """How many groups of panels and blocks of rows there are, and the most rows of a block.

        If A fits into the second-level cache, every panel of B is best read once, by one task.
        """
        mr = self.mr
        wanted = ceildiv(_TASKS_PER_CORE * self.chip.cores, maximum(self.batch, 1))
        size = bounds(self.a_bytes())[1]
        if size is not None and size <= self.chip.l2_bytes // 2:
            groups = outer("shares", maximum(minimum(panels, wanted), 1))
            most = _MOST_ROWS
        else:
            groups = 1
            depth = bounds(self.k_padded)[1]
            room = _BLOCK_ROWS if depth is None or self.leading else (
                self.chip.l2_bytes // 2 // max(depth * self.a_dtype.itemsize, 1))
            most = max(8 * mr, min(_BLOCK_ROWS, room))
        top = bounds(self.m)[1]
        most = math.ceil((most if top is None else min(most, max(top, 1))) / mr) * mr
        blocks = outer("blocks", maximum(ceildiv(self.m, most), minimum(
            ceildiv(wanted, groups), maximum(ceildiv(self.m, 4 * mr), 1))))
        return groups, blocks, most

    def tasks(self, a_place: PlaceOf, packed: Buffer) -> Stmt:
        """One task for each member of the batch, block of rows and group of panels."""
        nr, mr, factor = self.nr, self.mr, self.product.b
        outer, lets = Names(self.fresh), Names(self.fresh)
        panels = outer("panels", ceildiv(self.n, nr))
        groups, blocks, most = self.sharing(outer, panels)
        group = outer("group", ceildiv(panels, groups))
        rows = outer("rows", ceildiv(ceildiv(self.m, mr), blocks) * mr, most)
        task = self.var("task")
        values = digits(lets("member", task // (blocks * groups)), self.product.batch)
        first_row = lets("first_row", task // groups % blocks * rows)
        count = lets("count", maximum(minimum(rows, self.m - first_row), 0), most)
        first_panel = lets("first_panel", task % groups * group)
        matrix = lets("matrix", self.member(factor, values))
        # While one panel is used, its tiles together ask for the next one, which comes from a
        # further cache or from memory.
        share = None if self.has_few_rows() else outer("share", minimum(
            ceildiv(nr * self.together * mr, maximum(rows, 1)), 64 // self.b_dtype.itemsize))
        table = self.table_of_rows(first_row, count, most)
        a = a_place(values)
        a = lets.place("a", a if table is not None else a.moved(first_row, 0))
        local = None
        if not (isinstance(self.product.body, Reduce) and self.sums_in_output()):
            local = Buffer(self.fresh("sums"), int32, mr * nr)
        number, inner = self.var("number"), Names(self.fresh)
        panel = inner("panel", first_panel + number)
        first = inner("first", panel * nr)
        columns = self.columns(inner, first, nr)
        b_at = inner("b", (matrix * panels + panel) * (self.k_padded * nr))

        def tile(row: Index, height: int, live: Index) -> Stmt:
            at = Names(self.fresh)
            here = at("row", first_row + row)
            sums = Place(local, 0, nr, 1) if local is not None else at.place(
                "c", self.output(values, here, first))
            left = a if table is not None else a.moved(row, 0)
            product = self.rounds_of(lambda moved, number, adds: integer_tile(
                sums.buffer, sums.at, left.buffer, left.at + moved, packed,
                b_at + number * (self.segments * self.groups * self.together * nr), self.groups,
                a.outer, sums.outer, height, nr, self.together, adds,
                nr if local is not None else live, self.segments, self.jump(),
                None if table is None else (table[0], row), None if share is None else
                (b_at + self.k_padded * nr + row // mr * (self.k_padded // self.together) * share,
                 share), local is not None))
            finish = None if local is None else self.epilogue(
                sums, values, here, height, first, live, nr)
            return at.around(block(product, finish))

        i = self.var("tile")
        whole = None if is_below(self.m, mr) else self.by_width(columns, nr, lambda live: For(
            i, 0, count // mr, tile(i * mr, mr, live)))
        body: Stmt = For(number, 0, minimum(group, panels - first_panel), inner.around(block(
            whole, self.remainder(count, mr, lambda row, height: tile(row, height, columns)))))
        if local is not None:
            body = Alloc(local, body)
        if table is not None:
            body = Alloc(table[0], block(table[1], body))
        return outer.around(For(
            task, 0, self.batch * blocks * groups, lets.around(body), "parallel",
            grain_of(_TASK_PRODUCTS, rows * self.k_padded * group * nr)))

    def jump(self) -> Index:
        """How far apart the segments of a row of A are."""
        stride = self.product.a.stride(self.leading[-1].var) if self.leading else 0
        assert stride is not None
        return stride

    def rounds_of(self, tile: Callable[[Index, Index, bool], Stmt]) -> Stmt:
        """The tile for each round of leading axes: where it is in A, its number, and if it adds."""
        outer = self.leading[:-1]
        if not outer:
            return tile(0, 0, False)
        number, lets = self.var("round"), Names(self.fresh)
        moved: Index = 0
        for axis, at in digits(number, outer).items():
            stride = self.product.a.stride(axis)
            assert stride is not None
            moved = moved + at * stride
        return block(tile(0, 0, False), For(number, 1, self.rounds, lets.around(
            tile(lets("moved", moved), number, True))))


# ---------------------------------------------------------------- convolutions
def match_window(program: Program) -> Window | None:
    """The convolution of bytes that a program is, without padding and groups, or None.

    So is a product whose rows do not follow evenly: a window of one step that moves.
    """
    found = match_contraction(program)
    if found is None or found.outputs.extent == 1 or found.reduce.dtype is not int32 or not all(
            isinstance(a.extent, int) for a in (*found.stage.axes[1:], *found.reduce.axes)):
        return None
    column, stage = found.outputs, found.stage
    extent = product_of(a.extent for a in found.places)
    top = bounds(extent)[1]
    pixel = Axis(Var("pixel", 0, None if top is None else max(top - 1, 0)), 0, extent)
    values = digits(pixel.var, found.places)
    address = stage.flat([a.var for a in stage.axes])
    assert not isinstance(address, Scalar)
    body = substitute_indices(found.body, values)
    (reduce,) = [n for n in walk(body) if isinstance(n, Reduce)]
    assert isinstance(reduce.value, Call)
    left, right = map(Factor, reduce.value.args)
    if column.var in left.vars or pixel.var in right.vars or column.var not in right.vars:
        return None
    strides = {axis: (left.stride(axis.var), right.stride(axis.var)) for axis in reduce.axes}
    known = all(isinstance(n, int) for pair in strides.values() for n in pair)
    if None in map(small_value, (left, right)) or not known:
        return None
    leading, inner = list(reduce.axes[:-1]), [reduce.axes[-1]]
    while leading and all(near is not None and outer == inner[0].extent * near
                          for outer, near in zip(strides[leading[-1]], strides[inner[0]],
                                                 strict=True)):
        inner.insert(0, leading.pop())
    if strides[inner[-1]][0] != 1:
        return None
    product = MatrixProduct(stage, substitute(address, values), (), pixel, column, inner[-1], left,
                            right, reduce, body)
    return Window(product, tuple(leading), tuple(inner))


class _IntegerConv(_IntegerGemm):
    """A convolution in the making: rows of A are pixels, found by a table.

    A pixel's window is read where it lies, a row of it at a time (`segments`); windows overlap, so
    nothing is copied, unless bytes have to be widened or a stretch does not fill whole groups:
    then the copy may be read a little past its end.
    """

    def with_bytes(self, plan: PlanOf) -> Stmt:
        """A plan that reads A where it lies, or from a copy of the whole."""
        load = self.product.a.load
        assert load is not None
        source = self.buffers[load.source]
        if load.dtype is self.a_dtype and self.in_groups:
            return plan(lambda values: Place(source, 0, 0, 1))
        copy = Buffer(self.fresh("a_copy"), self.a_dtype, source.size + self.together)
        at, piece = self.var("at"), self.var("piece")
        start = piece * _PACK_ELEMENTS
        fill = For(piece, 0, ceildiv(source.size, _PACK_ELEMENTS), For(
            at, start, minimum(start + _PACK_ELEMENTS, source.size),
            Store(copy, at, cast(source[at], self.a_dtype)), "vector"), "parallel")
        return Alloc(copy, block(fill, plan(lambda values: Place(copy, 0, 0, 1))))

    def a_bytes(self) -> Index:
        load = self.product.a.load
        assert load is not None
        return self.buffers[load.source].size * self.a_dtype.itemsize

    def table_of_rows(self, first_row: Index, count: Index, most: int
                      ) -> tuple[Buffer, Stmt] | None:
        address = self.product.a.address
        assert address is not None and self.row_var is not None
        table, r = Buffer(self.fresh("begins"), int64, most), self.var("r", most)
        start: dict[Var, Index] = {a.var: 0 for a in (*self.leading, *self.inner)}
        begin = substitute(address, {**start, self.row_var: first_row + r})
        return table, For(r, 0, count, Store(table, r, as_scalar(begin, int64)))
