"""Prints a matrix product as a Triton kernel: tiles of the result, each a loop of `tl.dot` over k.

What comes after the sum (bias, activation, residual, rounding) is computed on the tile while it is
in registers. Operands are read through addresses, or through tensor descriptors where a chip has an
engine that copies tiles (TMA); a persistent kernel has one program for each multiprocessor, which
loads of its next tile while it still computes this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from terrazzo.base.scalar import Call, Reduce, Scalar, substitute_indices
from terrazzo.base.shapes import num_elements
from terrazzo.chips.spec import ChipSpec, LaunchRules
from terrazzo.codegen.triton.emit import Emitter, unflatten
from terrazzo.codegen.triton.lines import NO_DEPS, NO_GUARD, Block, Guard, Names, Value
from terrazzo.codegen.triton.module import RESERVED, Size, Written
from terrazzo.codegen.triton.spelling import ATOM, type_text
from terrazzo.dtypes import DType, bfloat16, float16, float32, int8, int32
from terrazzo.expr.ir import Program, Tensor
from terrazzo.expr.matmul import Factor, MatrixProduct
from terrazzo.index import (
    Index,
    Var,
    bounds,
    ceildiv,
    divisible,
    free_vars,
    minimum,
    substitute,
)

HALVES = (float16, bfloat16)
DESCRIPTOR_BYTES = 16  # what strides and addresses that a descriptor describes are multiples of


@dataclass(frozen=True)
class Tiling:
    """How the work of a product is cut, and how its loop is run."""

    rows: int  # of a tile
    columns: int
    depth: int  # steps of k at a time
    warps: int = 4
    stages: int = 3  # pieces of k that are under way at once
    group: int = 8  # tiles of so many rows of tiles are neighbours in time: caches hold their rows
    persistent: bool = False
    descriptors: bool = False
    precision: str = "tf32x3"  # of float32


def dot_type(product: MatrixProduct) -> DType | None:
    """The type in which the factors of a product are multiplied; None where `tl.dot` has none."""
    wide = product.reduce.dtype
    loads = [factor.load for factor in (product.a, product.b)]
    types = {None if load is None else load.dtype for load in loads}
    if wide is int32:
        return int8 if types == {int8} else None
    if wide is float32 and len(types) == 1 and (only := types.pop()) in HALVES:
        return only
    return float32 if wide is float32 else None


def described(product: MatrixProduct, factor: Factor, side: Var | None, dtype: DType) -> bool:
    """Whether a tensor descriptor can read a factor: neighbours in memory, and strides of 16 bytes.
    """
    load = factor.load
    if load is None or load.dtype is not dtype or side is None:
        return False
    steps = [factor.stride(side), factor.stride(product.k.var)]
    if 1 not in steps:
        return False
    steps.remove(1)
    address = factor.address
    batch = [factor.stride(a.var) for a in product.batch_of(factor)]
    if None in steps or None in batch or address is None:
        return False
    first = substitute(address, {v: 0 for v in free_vars(address) if v in {
        side, product.k.var, *(a.var for a in product.batch)}})
    return all(divisible(n * dtype.itemsize, DESCRIPTOR_BYTES)
               for n in (*steps, *batch, first) if n is not None)


def product_kernel(program: Program, product: MatrixProduct, chip: ChipSpec, tiling: Tiling, *,
                   wide: bool | None = None) -> Written:
    """The kernel of a program that is this product, cut in this way."""
    kernel = _DotKernel(program, product, chip, tiling, wide)
    kernel.write()
    return kernel.written()


class _DotEmitter(Emitter):
    """Writes what follows the sum, which is there already."""

    sums = Value("sums")

    def reduce(self, node: Reduce, guard: Guard) -> Value:
        return self.sums


class _DotKernel:
    """One kernel while it is written."""

    def __init__(self, program: Program, product: MatrixProduct, chip: ChipSpec, tiling: Tiling,
                 wide: bool | None):
        self.program, self.product, self.tiling = program, product, tiling
        self.rules: LaunchRules = chip.launch
        self.cores = chip.cores
        self.names = Names(RESERVED)
        self.name = self.names.fresh(program.name)
        tensors = (*program.inputs, *program.outputs)
        self.pointers = {t: self.names.fresh(f"{t.name}_ptr") for t in tensors}
        self.dims = {var: self.names.fresh(var.name) for var in program.dims}
        self.constants: dict[str, Size] = {}
        if wide is None:
            tops = [bounds(num_elements(t.shape))[1] for t in tensors]
            wide = any(top is None or top >= 1 << 31 for top in tops)
        self.wide = wide
        self.emitter = _DotEmitter(self.names, self.dims, self.pointers, self.no_space, tile=True,
                                   wide=wide, libdevice=chip.has("libdevice"))
        made = dot_type(product)
        assert made is not None and product.row is not None
        self.dtype, self.row = made, product.row
        self.block_rows = self.constant("ROWS", tiling.rows)
        self.block_columns = self.constant("COLUMNS", tiling.columns)
        self.depth = self.constant("DEPTH", tiling.depth)
        self.member = _numbered("%member", self.members)
        self.k_down = _numbered("%k", product.k.extent)
        table = unflatten(self.member, [a.extent for a in product.batch])
        self.at: dict[Var, Index] = {a.var: i for a, i in zip(product.batch, table)}

    # ------------------------------------------------------------ sizes
    @property
    def m(self) -> Index:
        return self.row.extent

    @property
    def n(self) -> Index:
        return self.product.column.extent

    @property
    def members(self) -> Index:
        return num_elements([a.extent for a in self.product.batch])

    @property
    def tiles(self) -> Index:
        """Tiles of the result, in all."""
        return self.members * self.down * self.across

    @property
    def down(self) -> Index:
        return ceildiv(self.m, self.tiling.rows)

    @property
    def across(self) -> Index:
        return ceildiv(self.n, self.tiling.columns)

    @property
    def exact_depth(self) -> bool:
        k = self.product.k.extent
        return isinstance(k, int) and k % self.tiling.depth == 0

    def constant(self, name: str, value: Size) -> str:
        name = self.names.fresh(name)
        self.constants[name] = value
        return name

    def no_space(self, extent: Index, name: str) -> Block:
        raise AssertionError("the only sum of a product is the product")

    def written(self) -> Written:
        programs = minimum(self.tiles, self.cores) if self.tiling.persistent else self.tiles
        return Written(self.name, tuple(self.emitter.scopes[0].lines), self.pointers, self.dims,
                       programs, self.constants, self.rules.warps_for(self.tiling.warps),
                       self.wide, self.rules, self.tiling.stages, self.tiling.descriptors)

    # ------------------------------------------------------------ the kernel
    def write(self) -> None:
        emitter, product = self.emitter, self.product
        tile_vars = {self.row.var, product.column.var, self.member}
        readers = self.descriptors() if self.tiling.descriptors else None
        if not self.tiling.persistent:
            emitter.scopes[0].binds |= tile_vars
            emitter.line(f"tile = {self.instance()}", NO_DEPS)
            self.tile(readers)
            return
        tiles = emitter.index(self.tiles).text
        programs = self.constant("PROGRAMS", self.cores)
        head = f"for tile in tl.range({self.instance()}, {tiles}, {programs}, flatten=True):"
        with emitter.loop(head, tile_vars):
            self.tile(readers)

    def instance(self) -> str:
        return "tl.program_id(0).to(tl.int64)" if self.wide else "tl.program_id(0)"

    def line(self, text: str) -> None:
        """A line of the innermost scope."""
        emitter = self.emitter
        emitter.line(text, frozenset().union(*(s.binds for s in emitter.scopes)))

    def tile(self, readers: tuple[_Reader, _Reader] | None) -> None:
        """One tile of the result: its place, its sums, and what becomes of them."""
        emitter, product = self.emitter, self.product
        group = self.constant("GROUP", self.tiling.group)
        down, across = emitter.index(self.down).text, emitter.index(self.across).text
        place = "tile"
        if product.batch:
            whole = emitter.index(self.down * self.across).inside(ATOM)
            emitter.add_block(Block(self.member, self.names.fresh("member"), self.members))
            self.line(f"{emitter.blocks[self.member].name} = tile // {whole}")
            place = f"tile % {whole}"
        self.line(f"row_tile, column_tile = _tile_place({place}, {down}, {across}, {group})")
        self.add(self.row.var, self.row.var.name, self.m, f"row_tile * {self.block_rows}",
                 self.block_rows, "[:, None]")
        self.add(product.column.var, product.column.var.name, self.n,
                 f"column_tile * {self.block_columns}", self.block_columns, "[None, :]")
        acc = type_text(product.reduce.dtype)
        self.line(f"sums = tl.zeros(({self.block_rows}, {self.block_columns}), {acc})")
        self.sum_up(readers)
        emitter.sums = Value("sums", deps=frozenset({self.row.var, product.column.var}),
                             dtype=product.reduce.dtype)
        self.finish()

    def add(self, var: Var, name: str, extent: Index, start: str, size: str, direction: str
            ) -> None:
        """An index variable that has a lane for each row or column of a tile."""
        wanted = self.tiling.rows if direction.startswith("[:") else self.tiling.columns
        exact = isinstance(extent, int) and extent % wanted == 0
        self.emitter.blocks[var] = Block(
            var, self.names.fresh(name), extent, f"{start} + tl.arange(0, {size}){direction}",
            size, exact)

    def sum_up(self, readers: tuple[_Reader, _Reader] | None) -> None:
        emitter, product = self.emitter, self.product
        k = product.k.var
        start = self.names.fresh("start")
        bound = emitter.index(product.k.extent).text
        dims = {k: "[None, :]", self.k_down: "[:, None]"}
        for var, direction in dims.items():
            lanes = f"{start} + tl.arange(0, {self.depth}){direction}"
            emitter.blocks[var] = Block(
                var, self.names.fresh(k.name), product.k.extent,
                f"({lanes}).to(tl.int64)" if self.wide else lanes, self.depth, self.exact_depth)
        with emitter.loop(f"for {start} in range(0, {bound}, {self.depth}):", set(dims)):
            if readers is not None:
                a, b = (reader.text(start) for reader in readers)
            else:
                a = self.operand(product.a, {})
                b = self.operand(product.b, {k: self.k_down})
            self.line(f"sums = tl.dot({a}, {b}, sums{self.precision()})")

    def precision(self) -> str:
        if self.dtype is float32:
            return f', input_precision="{self.tiling.precision}"'
        return ", out_dtype=tl.int32" if self.dtype is int8 else ""

    # ------------------------------------------------------------ operands by address
    def operand(self, factor: Factor, table: Mapping[Var, Index]) -> str:
        """A piece of a factor as it is multiplied; beyond the end of k it is zero."""
        emitter = self.emitter
        whole = {**self.at, **table}
        load = factor.load
        k = self.k_down if table else self.product.k.var
        if load is not None and load.dtype is self.dtype:
            source: Tensor = load.source
            indices = [substitute(i, whole) for i in load.indices if not isinstance(i, Scalar)]
            address = emitter.address(source, indices, NO_GUARD)
            needed = address.deps | {k, self.product.column.var if table else self.row.var}
            mask = emitter.mask(needed)
            inside = f", mask={mask.text}, other=0" if mask else ""
            text = f"tl.load({emitter.place(self.pointers[source], address, needed)}{inside})"
            return emitter.bind(Value(text, ATOM, needed), source.name).text
        value = emitter.root(substitute_indices(factor.value, whole))
        text = emitter.typed(value, factor.value.dtype).inside(ATOM)
        if factor.value.dtype is not self.dtype:
            text = f"{text}.to({type_text(self.dtype)})"
        lanes = frozenset({k, self.product.column.var if table else self.row.var})
        if not lanes <= value.deps:
            text = f"({text} + tl.zeros({self.shape(bool(table))}, {type_text(self.dtype)}))"
        end = emitter.mask(frozenset({k}))
        if end is not None:
            text = f"tl.where({end.text}, {text}, 0)"
        return emitter.bind(Value(text, ATOM, value.deps | lanes), "factor").text

    def shape(self, is_b: bool) -> str:
        return f"[{self.depth}, {self.block_columns}]" if is_b else (
            f"[{self.block_rows}, {self.depth}]")

    # ------------------------------------------------------------ operands by descriptor
    def descriptors(self) -> tuple[_Reader, _Reader]:
        product = self.product
        return (self.descriptor(product.a, self.row.var, "row_tile", self.block_rows, False),
                self.descriptor(product.b, product.column.var, "column_tile", self.block_columns,
                                True))

    def descriptor(self, factor: Factor, side: Var, tile: str, size: str, is_b: bool) -> _Reader:
        """Make the descriptor of a factor: members of the batch, then rows of what lies together.
        """
        emitter, product = self.emitter, self.product
        load = factor.load
        assert load is not None
        along_k = factor.stride(product.k.var) == 1
        batch = product.batch_of(factor)
        inner, outer = (product.k.var, side) if along_k else (side, product.k.var)
        extents = {side: self.m if side is self.row.var else self.n,
                   product.k.var: product.k.extent}
        shape = [*(a.extent for a in batch), extents[outer], extents[inner]]
        strides = [*(factor.stride(a.var) for a in batch), factor.stride(outer), 1]
        sizes = {side: size, product.k.var: self.depth}
        block = [*("1" for _ in batch), sizes[outer], sizes[inner]]
        address = factor.address
        assert address is not None
        first = substitute(address, {v: 0 for v in (side, product.k.var, *(
            a.var for a in product.batch))})
        name = self.names.fresh(f"{load.source.name}_tiles")
        at = emitter.index(first).text
        base = self.pointers[load.source] + ("" if at == "0" else f" + {at}")
        texts = [emitter.index(n).text for n in shape]
        steps = [("1" if s == 1 else emitter.index(s).text) for s in strides if s is not None]
        emitter.line(f"{name} = tl.make_tensor_descriptor({base}, [{', '.join(texts)}], "
                     f"[{', '.join(steps)}], [{', '.join(block)}])", NO_DEPS)
        return _Reader(self, factor, name, f"{tile} * {size}", outer is product.k.var,
                       is_b == along_k, (self.depth, size) if outer is product.k.var else (
                           size, self.depth))

    # ------------------------------------------------------------ results
    def finish(self) -> None:
        """What follows the sum, and its way to memory."""
        emitter, product = self.emitter, self.product
        body = substitute_indices(product.body, self.at)
        stage = product.stage
        if body.dtype is not stage.dtype:
            body = Call(stage.dtype, "cast", (body,))
        value = emitter.typed(emitter.root(body), stage.dtype)
        address = emitter.index(substitute(product.out_address, self.at))
        needed = frozenset({self.row.var, product.column.var})
        mask = emitter.mask(needed)
        masked = f", mask={mask.text}" if mask else ""
        pointer = emitter.place(self.pointers[stage], address, needed)
        emitter.line(f"tl.store({pointer}, {value.text}{masked})", address.deps | needed,
                     stage.origin)


@dataclass(frozen=True, eq=False)
class _Reader:
    """How a piece of a factor is read through its descriptor."""

    kernel: _DotKernel
    factor: Factor
    name: str
    place: str  # of the first row or column of the tile
    k_first: bool
    turned: bool
    block: tuple[str, str]

    def text(self, start: str) -> str:
        kernel = self.kernel
        batch = kernel.product.batch_of(self.factor)
        members = [kernel.emitter.index(kernel.at[a.var]).text for a in batch]
        places = [start, self.place] if self.k_first else [self.place, start]
        whole = [f"({p}).to(tl.int32)" if kernel.wide else p for p in (*members, *places)]
        text = f"{self.name}.load([{', '.join(whole)}])"
        if batch:
            text += f".reshape({', '.join(self.block)})"
        text += ".T" if self.turned else ""
        load = self.factor.load
        assert load is not None
        name = kernel.names.fresh(load.source.name)
        kernel.line(f"{name} = {text}")
        return name


def _numbered(name: str, extent: Index) -> Var:
    if isinstance(extent, int):
        return Var(name, 0, max(extent - 1, 0))
    return Var(name, 0, extent - 1)


__all__ = ["HALVES", "Tiling", "described", "dot_type", "product_kernel"]
