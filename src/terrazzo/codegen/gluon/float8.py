"""Prints a product of 8-bit floats with exact sums for Hopper, in Gluon: its warps have roles.

Tensor cores keep 14 bits of such sums. So each piece of 128 steps of k is added in float32, which
takes as many registers once more, and instructions that in plain Triton wait for each other. Here
each program stays on its multiprocessor and goes through tiles of the result. One warp copies
pieces of both factors by TMA into a ring of stages; each group of four warps multiplies 64 rows of
a tile (wgmma), adds, and computes what comes after the sum: one group adds while the other one's
products are under way, and the next tile is loaded while this one is finished. On an H200 that
comes to 1204 TFLOP/s at 8192 cubed, plain Triton to 758. Sums that tensor cores keep gain nothing:
half types came to 0.927 of cuBLAS at 4096 cubed (plain Triton: 0.938), fast sums to the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from terrazzo.base.scalar import Call, substitute_indices
from terrazzo.base.shapes import num_elements
from terrazzo.chips.spec import FAST_FP8_SUMS, ChipSpec
from terrazzo.codegen.triton.dot import DotEmitter, Tiling
from terrazzo.codegen.triton.dot_factors import DESCRIPTOR_BYTES, FLOAT8, described, dot_type
from terrazzo.codegen.triton.lines import Block, Names, Value
from terrazzo.codegen.triton.maths import needed_functions
from terrazzo.codegen.triton.module import RESERVED, Written, wrapped
from terrazzo.codegen.triton.spelling import type_text
from terrazzo.expr.ir import Program, Tensor
from terrazzo.expr.matmul import Factor, MatrixProduct
from terrazzo.index import Index, Var, bounds, coefficient, divisible, minimum, substitute

_GROUPS, _GROUP_ROWS = 2, 64  # of four warps; rows of a tile that each multiplies
_PARTS, _PART = 2, 128  # of a tile's columns, whose products are one instruction; columns of each
_STEPS = 32  # of k that an instruction takes
# 128 columns were slower (1175 TFLOP/s). Four stages are 192 KB, and leave room for results.
TILING = Tiling(_GROUPS * _GROUP_ROWS, _PARTS * _PART, 128, warps=8, stages=4, persistent=True,
                descriptors=True, roles=True)
_LEAST_STEPS = 8  # pieces of k, below which a tile is done before all stages are full
_OUT_BYTES = 128  # of a row of a tile that go to memory at once
_OUTS = 2  # pieces that each group has on their way to memory
# Registers of a thread: of a program's twelve warps, of those that multiply, of the one that loads.
_REGISTERS, _OF_GROUP, _OF_LOADS = 168, 240, 24
# Operators that Gluon has of those that our kernels are written in.
_KNOWN = frozenset({
    "PropagateNan", "abs", "arange", "bfloat16", "ceil", "constexpr", "cos", "erf", "exp", "exp2",
    "float16", "float32", "float64", "float8e4nv", "float8e5", "floor", "fma", "full", "int1",
    "int16", "int32", "int64", "int8", "load", "log", "log2", "maximum", "minimum", "program_id",
    "sin", "sqrt", "static_range", "uint16", "uint32", "uint64", "uint8", "where"})


def serves(program: Program, product: MatrixProduct, spec: ChipSpec) -> bool:
    """Whether a product can be this kernel."""
    if not (spec.has("wgmma") and spec.has("tma")) or spec.has(FAST_FP8_SUMS) or (
            program.dims or product.batch or product.row is None):
        return False
    factors = (product.a, product.row.var), (product.b, product.column.var)
    kinds = {f.load.dtype for f, _ in factors if f.load is not None}
    k = product.k.extent
    if dot_type(product) not in FLOAT8 or len(kinds) != 1 or not all(
            f.stride(product.k.var) == 1 and described(product, f, side, FLOAT8[0])
            for f, side in factors):
        return False
    sizes = [bounds(num_elements(t.shape))[1] for t in (*program.inputs, *program.outputs)]
    if not isinstance(k, int) or k < _LEAST_STEPS * TILING.depth or any(
            n is None or not 0 < n < 1 << 31 for n in sizes):
        return False
    return _is_described(product) and _is_known(program, product, spec)


def _is_described(product: MatrixProduct) -> bool:
    """Whether a tensor descriptor can write the result."""
    assert product.row is not None
    address, size = product.out_address, product.stage.dtype.itemsize
    step = coefficient(address, product.row.var)
    first = substitute(address, {product.row.var: 0, product.column.var: 0})
    return coefficient(address, product.column.var) == 1 and step is not None and not (
        product.stage.dtype.is_bool or size > 4) and all(
            divisible(n * size, DESCRIPTOR_BYTES) for n in (step, first))


def _is_known(program: Program, product: MatrixProduct, spec: ChipSpec) -> bool:
    """Whether Gluon has all that comes after the sum."""
    try:
        made = product_kernel(program, product, spec)
    except NotImplementedError:
        return False
    code = [*made.helpers, *made.lines]
    text = re.sub("#.*", "", "\n".join([*needed_functions(code), *code]))
    return "libdevice." not in text and set(re.findall(r"\btl\.(\w+)", text)) <= _KNOWN


def product_kernel(program: Program, product: MatrixProduct, chip: ChipSpec) -> Written:
    """The kernel of a program that is this product."""
    return _Kernel(program, product, chip).written()


_OWN = ("a", "b", "fetch", "send", "tma", "mbarrier", "fence_async_shared", "warpgroup_mma",
        "warpgroup_mma_wait", "sums", "row", "column", "tile", "stage", "phase", "start", "made",
        "zeros", "filled", "empty", "ready", "barriers", "parts", "tiles", "row_tile",
        "column_tile", "out", "out_tiles", "out_parts", "a_tiles", "a_parts", "b_tiles", "b_parts",
        "WHICH", "LAYOUT", *(f"{name}_{i}" for name in ("sums", "empty") for i in range(2)),
        *(f"{name}_LAYOUT" for name in "AB"), "OUT_LAYOUT", "ROWS", "COLUMNS", "DEPTH", "STAGES",
        "PROGRAMS", "GROUP")  # names of the kernel's own, which no tensor has


class _Kernel:
    """One kernel while it is written."""

    def __init__(self, program: Program, product: MatrixProduct, chip: ChipSpec):
        self.program, self.product, self.chip = program, product, chip
        self.names = Names((*RESERVED, *_OWN))
        self.name = self.names.fresh(program.name)
        tensors = (*program.inputs, *program.outputs)
        self.pointers: dict[Tensor, str] = {t: self.names.fresh(f"{t.name}_ptr") for t in tensors}
        load = product.a.load
        assert load is not None and product.row is not None
        self.row, self.kind = product.row, type_text(load.dtype)
        self.out_width = _OUT_BYTES // product.stage.dtype.itemsize
        m, n, k = self.row.extent, product.column.extent, product.k.extent
        assert isinstance(m, int) and isinstance(n, int) and isinstance(k, int)
        self.m, self.n, self.k = m, n, k
        self.down, self.across = -(-m // TILING.rows), -(-n // TILING.columns)

    def written(self) -> Written:
        rest = self.rest()
        helpers = (rest, self.loads(), self.sums())
        constants = {"ROWS": TILING.rows, "COLUMNS": TILING.columns, "DEPTH": TILING.depth,
                     "STAGES": TILING.stages, "PROGRAMS": self.chip.cores, "GROUP": TILING.group}
        programs = minimum(self.down * self.across, self.chip.cores)
        return Written(self.name, tuple(self.main()), self.pointers, {}, programs, constants,
                       4, False, self.chip.launch, descriptors=True, gluon=True, helpers=helpers,
                       registers=_REGISTERS)

    # ------------------------------------------------------------ roles
    _CONSTANTS = ("ROWS", "COLUMNS", "DEPTH", "STAGES", "PROGRAMS", "GROUP")

    def function(self, role: str, parameters: Sequence[str], lines: Sequence[str]) -> str:
        return "\n".join(["@gluon.jit", *wrapped(f"def {self.name}_{role}(", parameters, "):"),
                          *lines])

    def constexprs(self) -> list[str]:
        return [f"{name}: tl.constexpr" for name in self._CONSTANTS]

    def tiles(self) -> list[str]:
        """The loop over a program's tiles."""
        return [f"    for tile in range(tl.program_id(0), {self.down * self.across}, PROGRAMS):",
                f"        row_tile, column_tile = _tile_place(tile, {self.down}, {self.across}, "
                "GROUP)"]

    @staticmethod
    def next_stage(indent: str) -> list[str]:
        return [indent + "stage += 1",
                indent + "phase = tl.where(stage == STAGES, phase ^ 1, phase)",
                indent + "stage = tl.where(stage == STAGES, 0, stage)"]

    def loads(self) -> str:
        """The role of the warp that loads: stage after stage, as the groups are done with them."""
        lines = ["    a_tiles, b_tiles = tiles", "    a_parts, b_parts = parts",
                 "    empty_0, empty_1, ready = barriers", "    stage = gl.to_tensor(0)",
                 "    phase = gl.to_tensor(1)", *self.tiles(),
                 f"        for start in range(0, {self.k}, DEPTH):",
                 "            mbarrier.wait(empty_0.index(stage), phase)",
                 "            mbarrier.wait(empty_1.index(stage), phase)",
                 "            filled = ready.index(stage)",
                 f"            mbarrier.expect(filled, {_GROUPS} * a_tiles.block_type.nbytes + "
                 f"{_PARTS} * b_tiles.block_type.nbytes)"]
        for name, count, width, side in (
                ("a", _GROUPS, _GROUP_ROWS, "row_tile * ROWS"),
                ("b", _PARTS, _PART, "column_tile * COLUMNS")):
            for i in range(count):
                first = f"{side} + {i * width}" if i else side
                lines.append(f"            fetch({name}_tiles, [{first}, start], filled, "
                             f"{name}_parts.index(stage * {count} + {i}))")
        return self.function("loads", ["tiles", "parts", "barriers", *self.constexprs()],
                             [*lines, *self.next_stage(" " * 12)])

    def sums(self) -> str:
        """The role of a group of warps: the sums of its rows, and what becomes of them."""
        lines = ["    a_parts, b_parts, out_parts = parts",
                 "    empty_0, empty_1, ready = barriers",
                 "    empty = empty_1 if WHICH else empty_0",
                 "    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], "
                 f"[16, {_PART}, {_STEPS}])",
                 "    stage = gl.to_tensor(0)", "    phase = gl.to_tensor(0)",
                 *self.tiles(),
                 f"        zeros = tl.full(({_GROUP_ROWS}, {_PART}), 0.0, tl.float32, LAYOUT)",
                 *(f"        sums_{i} = zeros" for i in range(_PARTS)),
                 f"        for start in range(0, {self.k}, DEPTH):",
                 *(" " * 12 + line for line in self.piece()), *self.next_stage(" " * 12)]
        for i in range(_PARTS):
            lines += [" " * 8 + line for line in self.finished(i)]
        lines.append("    tma.store_wait(0)")
        return self.function("sums", [*self.used(), "out_tiles", "parts", "barriers",
                                      "WHICH: tl.constexpr", *self.constexprs()], lines)

    @staticmethod
    def piece() -> list[str]:
        """What tensor cores make of a stage, added in float32."""
        lines = ["mbarrier.wait(ready.index(stage), phase)",
                 f"a = a_parts.index(stage * {_GROUPS} + WHICH)"]
        for i in range(_PARTS):
            lines += [f"b = b_parts.index(stage * {_PARTS} + {i}).permute((1, 0))",
                      "made = warpgroup_mma(a, b, zeros, use_acc=False, is_async=True)",
                      "made = warpgroup_mma_wait(0, deps=(made,))"]
            if i == _PARTS - 1:
                lines.append("mbarrier.arrive(empty.index(stage), count=1)")
            lines.append(f"sums_{i} += made")
        return lines

    def finished(self, part: int) -> list[str]:
        """What becomes of some columns' sums: pieces that fit into shared memory."""
        lines, pieces, width = [], [f"sums_{part}"], _PART
        while width > self.out_width:
            halves = []
            for name in pieces:
                both = [f"{name}_{i}" for i in range(2)]
                lines.append(f"{', '.join(both)} = {name}.reshape({_GROUP_ROWS}, 2, {width // 2})"
                             ".permute(0, 2, 1).split()")
                halves += both
            pieces, width = halves, width // 2
        for i, name in enumerate(pieces):
            first = part * _PART + i * width
            column = "column_tile * COLUMNS" + (f" + {first}" if first else "")
            given = [name, f"row_tile * ROWS + WHICH * {_GROUP_ROWS}", column, *self.used(),
                     "out_tiles", f"out_parts.index(WHICH * {_OUTS} + {i % _OUTS})"]
            lines += wrapped(f"{self.name}_rest(", given, ")")
        return lines

    def used(self) -> list[str]:
        """Pointers of what is read after the sum."""
        factors = [f.load.source for f in (self.product.a, self.product.b) if f.load is not None]
        return [name for t, name in self.pointers.items()
                if t is not self.product.stage and (t not in factors or self.reads_again(t))]

    def reads_again(self, tensor: Tensor) -> bool:
        return self.pointers[tensor] in self._rest_text

    # ------------------------------------------------------------ after the sum
    def rest(self) -> str:
        """The function of what comes after the sum, and its way to memory."""
        product, stage = self.product, self.product.stage
        emitter = DotEmitter(self.names, {}, self.pointers, _no_space, tile=True, wide=False,
                             libdevice=self.chip.has("libdevice"))
        column = product.column.var
        self.add(emitter, self.row.var, self.m, "row", _GROUP_ROWS, 1)
        self.add(emitter, column, self.n, "column", self.out_width, 0)
        emitter.scopes[0].binds |= {self.row.var, column}
        emitter.sums = Value("sums", deps=frozenset({self.row.var, column}),
                             dtype=product.reduce.dtype)
        body = substitute_indices(product.body, {})
        if body.dtype is not stage.dtype:
            body = Call(stage.dtype, "cast", (body,))
        value = emitter.typed(emitter.root(body), stage.dtype)
        lines = emitter.scopes[0].lines
        self._rest_text = "\n".join([*lines, value.text])
        return self.function("rest", ["sums", "row", "column", *self.used(), "out_tiles", "out"], [
            "    LAYOUT: gl.constexpr = sums.type.layout", *lines,
            f"    made = {value.text}  # {stage.origin}" if len(stage.origin) + len(
                value.text) < 80 else f"    made = {value.text}",
            f"    tma.store_wait({_OUTS - 1})  # what was there has left", "    out.store(made)",
            "    fence_async_shared()", "    send(out_tiles, [row, column], out)"])

    def add(self, emitter: DotEmitter, var: Var, extent: Index, start: str, size: int, along: int
            ) -> None:
        """An index variable that has a lane for each row or column."""
        direction = "[:, None]" if along else "[None, :]"
        wanted = TILING.rows if along else TILING.columns
        emitter.blocks[var] = Block(
            var, self.names.fresh(var.name), extent,
            f"{start} + tl.arange(0, {size}, gl.SliceLayout({along}, LAYOUT)){direction}",
            str(size), isinstance(extent, int) and extent % wanted == 0)

    # ------------------------------------------------------------ the kernel
    def main(self) -> list[str]:
        """Descriptors, shared memory and barriers; then the roles."""
        product, stage = self.product, self.product.stage
        out = product.out_address
        lines = [*self.described("a", product.a, self.row.var, self.m, _GROUP_ROWS, _GROUPS),
                 *self.described("b", product.b, product.column.var, self.n, _PART, _PARTS)]
        first = substitute(out, {self.row.var: 0, product.column.var: 0})
        lines += _tiles_lines("out", self.pointers[stage], first, [self.m, self.n],
                              coefficient(out, self.row.var), [_GROUP_ROWS, self.out_width],
                              type_text(stage.dtype), str(_GROUPS * _OUTS))
        lines += [f"    {name} = gl.allocate_shared_memory(gl.int64, [STAGES, 1], "
                  "mbarrier.MBarrierLayout())" for name in ("empty_0", "empty_1", "ready")]
        lines += ["    for i in tl.static_range(STAGES):",
                  *(f"        mbarrier.init({name}.index(i), count=1)"
                    for name in ("empty_0", "empty_1", "ready"))]
        lines.append("    fence_async_shared()  # copies see the barriers")
        constants = ", ".join(self._CONSTANTS)
        lines += ["    barriers = (empty_0, empty_1, ready)",
                  "    parts = (a_parts, b_parts, out_parts)"]
        lines.append("    gl.warp_specialize([")
        for which in range(_GROUPS):
            given = ", ".join([*self.used(), "out_tiles", "parts", "barriers", str(which)])
            lines += [f"        ({self.name}_sums, ({given},", f"            {constants})),"]
        lines += [f"        ({self.name}_loads, ((a_tiles, b_tiles), (a_parts, b_parts), barriers,",
                  f"            {constants})),", f"    ], [4, 1], [{_OF_GROUP}, {_OF_LOADS}])"]
        return lines

    def described(self, name: str, factor: Factor, side: Var, extent: int, size: int, count: int
                  ) -> list[str]:
        """The descriptor of a factor, and its stages."""
        k = self.product.k.var
        load, address = factor.load, factor.address
        assert load is not None and address is not None
        first = substitute(address, {side: 0, k: 0})
        return _tiles_lines(name, self.pointers[load.source], first, [extent, self.k],
                            factor.stride(side), [size, "DEPTH"], self.kind, f"STAGES * {count}")


def _tiles_lines(name: str, pointer: str, first: Index, shape: Sequence[int], step: Index | None,
                 block: Sequence[int | str], kind: str, count: str) -> list[str]:
    base = pointer if first == 0 else f"{pointer} + {first}"
    size = f"[{block[0]}, {block[1]}]"
    layout = f"{name.upper()}_LAYOUT"
    return [f"    {layout}: gl.constexpr = gl.NVMMASharedLayout.get_default_for({size}, {kind})",
            f"    {name}_tiles = tma.make_tensor_descriptor({base}, {list(shape)}, [{step}, 1], "
            f"{size}, {layout})",
            f"    {name}_parts = gl.allocate_shared_memory({kind}, [{count}, {size[1:-1]}], "
            f"{layout})"]


def _no_space(extent: Index, name: str) -> Block:
    raise NotImplementedError("the only sum of a product is the product")


__all__ = ["TILING", "product_kernel", "serves"]
