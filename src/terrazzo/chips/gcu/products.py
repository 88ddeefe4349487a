"""Matrix products of our own compiler on a described chip: blocks for its scratchpad.

A task makes one block of results. It brings pieces of both factors to the scratchpad, whatever they
are computed from there, lets the matrix unit add their products up, and does what follows the
product (a bias, an activation) with the sums before they leave. Factors of a half type stay so in
the scratchpad, and the matrix unit takes several steps of them at once; their products are numbers
of float32, as all sums are, so nothing is lost. Sizes are known numbers; products of others run as
the host's do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from terrazzo.base.scalar import (
    Call,
    Load,
    Reduce,
    Scalar,
    cast,
    const,
    rewrite,
    substitute_indices,
)
from terrazzo.chips.gcu.blocks import common_half, ranked_blocks
from terrazzo.chips.gcu.description import Description
from terrazzo.dtypes import float32
from terrazzo.expr.ir import Program, Tensor
from terrazzo.expr.lower import storage_size
from terrazzo.expr.matmul import Factor, MatrixProduct, match_product
from terrazzo.expr.reductions import fresh_name
from terrazzo.index import Index, Var, minimum, substitute
from terrazzo.loop.ir import Alloc, Buffer, For, Function, Stmt, Store, block
from terrazzo.loop.tiles import fma_tile

_ROWS, _COLUMNS = 4, 16  # of the tiles that the host computes at once; every block is made of them


def product_template(program: Program, chip: Description) -> Function | None:
    """The kernel of a program that is one matrix product; None if it is something else."""
    product = match_product(program)
    if product is None or product.reduce.dtype is not float32:
        return None
    axes = (*product.batch, product.row, product.column, product.k)
    extents = [1 if axis is None else axis.extent for axis in axes]
    numbers = [n for n in extents if isinstance(n, int) and n > 0]
    if len(numbers) < len(extents):
        return None
    return _Product(program, product, chip, numbers).function()


def _narrow(value: Scalar) -> Scalar:
    """A factor as it was before it was widened to the type of the sum."""
    return value.args[0] if isinstance(value, Call) and value.op == "cast" else value


class _Product:
    """A product in the making."""

    def __init__(self, program: Program, product: MatrixProduct, chip: Description,
                 extents: list[int]):
        self.program, self.product = program, product
        *batch, self.m, self.n, self.k = extents
        self.batch = batch
        self.many = math.prod(batch)
        self.names = {d.name for d in program.dims}
        self.buffers = {tensor: Buffer(self.fresh(tensor.name), tensor.dtype, storage_size(tensor),
                                       tensor is not product.stage)
                        for tensor in (*program.inputs, product.stage)}
        self.dtype = common_half(chip, (
            _narrow(factor.value).dtype for factor in (product.a, product.b))) or float32
        self.rows, self.columns, self.steps = ranked_blocks(
            chip, (self.m, self.n, self.k), self.many, self.dtype.itemsize,
            chip.depth(self.dtype.short) or 1, sums=1, result=product.stage.dtype.itemsize)[0]

    def fresh(self, name: str) -> str:
        made = fresh_name(name, self.names)
        self.names.add(made)
        return made

    def var(self, name: str, count: int) -> Var:
        return Var(self.fresh(name), 0, count - 1)

    def function(self) -> Function:
        down, across = math.ceil(self.m / self.rows), math.ceil(self.n / self.columns)
        tasks = self.many * down * across
        task = self.var("task", tasks)
        values: dict[Var, Index] = {}
        number: Index = task // (down * across)
        for axis, extent in reversed(list(zip(self.product.batch, self.batch))):
            values[axis.var] = number % extent
            number = number // extent
        body = self.task(values, task // across % down * self.rows, task % across * self.columns)
        params = tuple(self.buffers.values())
        size: Index = 0
        for buffer in params:
            size = size + buffer.size * buffer.dtype.itemsize
        return Function(self.program.name, params, self.program.dims,
                        For(task, 0, tasks, body, "parallel"), self.product.stage.origin,
                        2 * self.many * self.m * self.n * self.k, size)

    # ------------------------------------------------------------ one block of results
    def task(self, values: Mapping[Var, Index], top: Index, left: Index) -> Stmt:
        sums, a, b = (Buffer(self.fresh(name), dtype, size) for name, dtype, size in (
            ("sums", float32, self.rows * self.columns),
            ("a_piece", self.dtype, self.rows * self.steps),
            ("b_piece", self.dtype, self.steps * self.columns)))
        product = self.product
        i = self.var("i", self.rows * self.columns)
        piece = self.var("piece", math.ceil(self.k / self.steps))
        first = piece * self.steps
        rows, columns, steps = (minimum(most, whole - at) for most, whole, at in (
            (self.rows, self.m, top), (self.columns, self.n, left), (self.steps, self.k, first)))
        # The left factor lies as in memory, so that its copy is one of neighbours.
        by_steps = product.row is None or product.a.stride(product.k.var) == 1
        down, on = (self.steps, 1) if by_steps else (1, self.rows)
        pieces = For(piece, 0, math.ceil(self.k / self.steps), block(
            self.brought(product.a, a, None if product.row is None else product.row.var, values,
                         (top, rows, down), (first, steps, on)),
            self.brought(product.b, b, product.column.var, values, (left, columns, 1),
                         (first, steps, self.columns)),
            self.multiplied(sums, a, b, steps, down, on)))
        body = block(For(i, 0, self.rows * self.columns, Store(sums, i, const(0.0)), "vector"),
                     pieces, self.finished(sums, values, (top, rows), (left, columns)))
        for buffer in (b, a, sums):
            body = Alloc(buffer, body)
        return body

    def brought(self, factor: Factor, piece: Buffer, side: Var | None, values: Mapping[Var, Index],
                along: tuple[Index, Index, int], deep: tuple[Index, Index, int]) -> Stmt:
        """A piece of a factor in the scratchpad: where it begins, how far it goes, in what steps.
        """
        (start, count, step), (first, steps, stride) = along, deep
        n, p = self.var("n", max(self.rows, self.columns)), self.var("p", self.steps)
        here = {**values, self.product.k.var: first + p}
        if side is not None:
            here[side] = start + n
        value = factor.value if piece.dtype is float32 else _narrow(factor.value)
        store = Store(piece, n * step + p * stride, cast(self.on_buffers(value, here),
                                                         piece.dtype))
        if step == 1 and (side is None or factor.stride(side) == 1 or stride != 1):
            return For(p, 0, steps, For(n, 0, count, store, "vector"))
        return For(n, 0, count, For(p, 0, steps, store, "vector"))

    def multiplied(self, sums: Buffer, a: Buffer, b: Buffer, steps: Index, down: int, on: int
                   ) -> Stmt:
        row, column = (self.var("row", self.rows // _ROWS),
                       self.var("column", self.columns // _COLUMNS))
        tile = fma_tile(sums, row * _ROWS * self.columns + column * _COLUMNS, a, row * _ROWS * down,
                        b, column * _COLUMNS, steps, down, on, self.columns, self.columns, _ROWS,
                        _COLUMNS, True)
        return For(column, 0, self.columns // _COLUMNS, For(row, 0, self.rows // _ROWS, tile))

    def finished(self, sums: Buffer, values: Mapping[Var, Index], down: tuple[Index, Index],
                 across: tuple[Index, Index]) -> Stmt:
        """What the program does with the sums, and where it puts them."""
        product, (top, rows), (left, columns) = self.product, down, across
        i, j = self.var("i", self.rows), self.var("j", self.columns)
        here = {**values, product.column.var: left + j}
        if product.row is not None:
            here[product.row.var] = top + i
        out = self.buffers[product.stage]
        value = self.on_buffers(product.body, here, sums[i * self.columns + j])
        store = Store(out, substitute(product.out_address, here), cast(value, out.dtype))
        return For(i, 0, rows, For(j, 0, columns, store, "vector"))

    def on_buffers(self, value: Scalar, values: Mapping[Var, Index], total: Scalar | None = None
                   ) -> Scalar:
        """An expression with flat addresses, at some place; `total` stands for the sum."""

        def visit(node: Scalar) -> Scalar | None:
            if isinstance(node, Reduce):
                return total
            if isinstance(node, Load) and isinstance(node.source, Tensor):
                return Load(node.dtype, self.buffers[node.source], (
                    node.source.flat(node.indices),))
            return None

        return rewrite(substitute_indices(value, values), visit)
