"""Prints a matrix product as a Triton kernel: tiles of the result, each a loop of `tl.dot` over k.

What comes after the sum (bias, activation, residual, rounding) is computed on the tile while it is
in registers. A factor is any expression of its row or column and of k, or zero outside a condition:
so convolutions are products as well (`expr/implicit.py`). Operands are read through addresses, or
through tensor descriptors where a chip has an engine that copies tiles (TMA); a persistent kernel
has one program for each multiprocessor, which loads of its next tile while it still computes this
one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from terrazzo.base.scalar import Call, Load, Reduce, Scalar, substitute_indices
from terrazzo.base.shapes import num_elements, unflatten
from terrazzo.chips.spec import FAST_FP8_SUMS, ChipSpec, LaunchRules
from terrazzo.codegen.triton.dot_factors import FLOAT8, as_it_lies, dot_type, numbered
from terrazzo.codegen.triton.emit import Emitter
from terrazzo.codegen.triton.lines import NO_DEPS, NO_GUARD, Block, Guard, Names, Value
from terrazzo.codegen.triton.module import RESERVED, Size, Written
from terrazzo.codegen.triton.spelling import ATOM, type_text
from terrazzo.dtypes import float32, int8
from terrazzo.expr.ir import Program, Tensor
from terrazzo.expr.matmul import Factor, MatrixProduct
from terrazzo.index import (
    FloorDiv,
    Index,
    Mod,
    Var,
    bounds,
    ceildiv,
    minimum,
    substitute,
)


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
    pieces: bool = False  # steps of k are told by their piece and their place in it
    roles: bool = False  # one warp loads, two groups multiply (`codegen/gluon/float8.py`)


def product_kernel(program: Program, product: MatrixProduct, chip: ChipSpec, tiling: Tiling, *,
                   wide: bool | None = None) -> Written:
    """The kernel of a program that is this product, cut in this way."""
    kernel = _DotKernel(program, product, chip, tiling, wide)
    kernel.write()
    return kernel.written()


class DotEmitter(Emitter):
    """Writes factors, and what follows the sum, which is there already."""

    sums = Value("sums")

    def index(self, e: Index) -> Value:
        """Quotients have names: what they depend on does not change in the loop, mostly."""
        value = super().index(e)
        if isinstance(e, FloorDiv | Mod) and value.deps:
            return replace(self.bind(value, "at"), index=e)
        return value

    def reduce(self, node: Reduce, guard: Guard) -> Value:
        return self.sums


class _DotKernel:
    """One kernel while it is written."""

    def __init__(self, program: Program, product: MatrixProduct, chip: ChipSpec, tiling: Tiling,
                 wide: bool | None):
        self.program, self.product, self.tiling = program, product, tiling
        self.rules: LaunchRules = chip.launch
        self.fast_sums = chip.has(FAST_FP8_SUMS)
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
        self.emitter = DotEmitter(self.names, self.dims, self.pointers, self.no_space, tile=True,
                                   wide=wide, libdevice=chip.has("libdevice"))
        made = dot_type(product)
        assert made is not None and product.row is not None
        self.dtype, self.row = made, product.row
        self.block_rows = self.constant("ROWS", tiling.rows)
        self.block_columns = self.constant("COLUMNS", tiling.columns)
        self.depth = self.constant("DEPTH", tiling.depth)
        self.member = numbered("%member", self.members)
        # What k is in a factor's text, and the variable of its lanes: for a, for b.
        self.k_of: dict[bool, tuple[Index, Var]] = {}
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
        start = self.names.fresh("start")
        head, binds = (self.pieces if self.tiling.pieces else self.steps)(start)
        with emitter.loop(head, binds):
            if readers is not None:
                a, b = (reader.text(start) for reader in readers)
            else:
                a, b = self.operand(product.a, False), self.operand(product.b, True)
            self.line(f"sums = tl.dot({a}, {b}, sums{self.precision()})")

    def steps(self, start: str) -> tuple[str, set[Var]]:
        """The loop over k where each step has a number, and what it makes known."""
        k, emitter = self.product.k, self.emitter
        down = numbered("%k", k.extent)
        self.k_of = {False: (k.var, k.var), True: (down, down)}
        for var, direction in ((k.var, "[None, :]"), (down, "[:, None]")):
            lanes = f"{start} + tl.arange(0, {self.depth}){direction}"
            emitter.blocks[var] = Block(
                var, self.names.fresh(k.var.name), k.extent,
                f"({lanes}).to(tl.int64)" if self.wide else lanes, self.depth, self.exact_depth)
        bound = emitter.index(k.extent).text
        return f"for {start} in range(0, {bound}, {self.depth}):", {k.var, down}

    def pieces(self, start: str) -> tuple[str, set[Var]]:
        """The loop over k by pieces: which one it is, and places in it."""
        k, depth, emitter = self.product.k, self.tiling.depth, self.emitter
        assert isinstance(k.extent, int) and self.exact_depth
        count = k.extent // depth
        piece = numbered("%piece", count)
        emitter.blocks[piece] = Block(piece, self.names.fresh("piece"), count,
                                      f"{start}.to(tl.int64)") if self.wide else Block(
                                          piece, start, count)
        for is_b, direction in ((False, "[None, :]"), (True, "[:, None]")):
            lane = numbered("%k_down" if is_b else "%k", depth)
            lanes = f"tl.arange(0, {self.depth}){direction}"
            emitter.blocks[lane] = Block(
                lane, self.names.fresh(k.var.name), depth,
                f"{lanes}.to(tl.int64)" if self.wide else lanes, self.depth, True)
            emitter.scopes[0].binds.add(lane)
            self.k_of[is_b] = piece * depth + lane, lane
        return f"for {start} in range(0, {count}):", {piece}

    def precision(self) -> str:
        if self.dtype is float32:
            return f', input_precision="{self.tiling.precision}"'
        if self.dtype in FLOAT8 and not self.fast_sums:
            # Tensor cores keep 14 bits of sums of 8-bit floats: each piece is added in float32.
            return f", max_num_imprecise_acc={self.depth}"
        return ", out_dtype=tl.int32" if self.dtype is int8 else ""

    # ------------------------------------------------------------ operands by address
    def operand(self, factor: Factor, is_b: bool) -> str:
        """A piece of a factor as it is multiplied; beyond the end of k it is zero."""
        emitter = self.emitter
        place, k = self.k_of[is_b]
        whole = {**self.at, self.product.k.var: place}
        lanes = frozenset({k, self.product.column.var if is_b else self.row.var})
        read = factor.guarded
        if read is not None and as_it_lies(read[0], self.dtype):
            return self.loaded(*read, whole, lanes)
        value = emitter.root(substitute_indices(factor.value, whole))
        text = emitter.typed(value, factor.value.dtype).inside(ATOM)
        if factor.value.dtype is not self.dtype:
            text = f"{text}.to({type_text(self.dtype)})"
        if not lanes <= value.deps:
            text = f"({text} + tl.zeros({self.shape(is_b)}, {type_text(self.dtype)}))"
        end = emitter.mask(frozenset({k}))
        if end is not None:
            text = f"tl.where({end.text}, {text}, 0)"
        return emitter.bind(Value(text, ATOM, value.deps | lanes), "factor").text

    def loaded(self, load: Load, condition: Scalar | None, whole: dict[Var, Index],
               lanes: frozenset[Var]) -> str:
        """A factor as it lies in memory, zero outside its tensor and its condition."""
        emitter = self.emitter
        source: Tensor = load.source
        guard = NO_GUARD
        if condition is not None:
            inside = emitter.root(substitute_indices(condition, whole))
            guard = Guard((emitter.bind(inside, "inside"),))
        indices = [substitute(i, whole) for i in load.indices if not isinstance(i, Scalar)]
        address = emitter.address(source, indices, NO_GUARD)
        needed = address.deps | guard.deps | lanes
        mask = emitter.inside(needed, guard)
        zero = "0.0" if source.dtype in FLOAT8 else "0"  # whole numbers do not become 8-bit floats
        masked = f", mask={mask}, other={zero}" if mask else ""
        text = f"tl.load({emitter.place(self.pointers[source], address, needed)}{masked})"
        return emitter.bind(Value(text, ATOM, needed), source.name).text

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


__all__ = ["DotEmitter", "Tiling", "product_kernel"]
