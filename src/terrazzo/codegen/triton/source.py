"""Prints a fused group as a Triton module: one kernel, and a `launch` that knows its grid.

- A pointwise group runs over blocks of its elements in row-major order, or over tiles of two
  axes where it turns an operand.
- Rows run one a program instance when they are contiguous, the whole row in one block if it fits.
- Reductions down columns, and rows too short for an instance each, run as tiles: several rows
  beside each other, all reduced along the same direction.
"""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.base.scalar import FromIndex, Load, Reduce, Scalar, loads, walk
from terrazzo.base.shapes import num_elements, unflatten
from terrazzo.chips.spec import ChipSpec, LaunchRules
from terrazzo.codegen.triton.emit import Emitter
from terrazzo.codegen.triton.lines import Block, Names
from terrazzo.codegen.triton.module import (
    MAX_WARPS,
    RESERVED,
    Size,
    UpTo,
    Written,
    module_text,
    warps_for,
)
from terrazzo.codegen.triton.spelling import PRODUCT, type_text
from terrazzo.codegen.triton.transposes import Tile, Turn, counts, tile_for, turn_of
from terrazzo.errors import UnsupportedOperator
from terrazzo.expr.collapse import collapse
from terrazzo.expr.ir import Program, Tensor
from terrazzo.index import Index, IndexExpr, Var, bounds, ceildiv, coefficient, free_vars

POINTWISE_BLOCK = 4096  # bytes of an instance's elements: best of 2 to 16 KiB on an H200
# A longer row does not fit the registers of one instance; half types are read again from the
# caches in less time than it takes to unpack so many.
ROW_BLOCK, NARROW_ROW_BLOCK = 1 << 15, 1 << 14
# Positions taken at once of a row that is walked in a loop, if its length is known and if not
# (it may be short then): best of 2048, 4096 and 8192 on an H200, by up to a third.
LONG_ROW_BLOCK, ANY_ROW_BLOCK = 8192, 4096
LONE_BLOCK = 1 << 14  # the same when one instance does it all, and only loads in flight help
TILE, TILE_ROWS = 1024, (64, 32, 16)  # elements of a tile of columns; how many columns, from best
SHORT_ROW, SHORT_TILE = 64, 1024  # rows up to this length share an instance, up to this in all
# The same of rows of which nothing but results is written: best of 1 to 16 rows on an H200.
READ_ROW, READ_TILE = 1024, 4096
READ_BYTES = 64  # that a thread of those has under way

_REASONS = {
    "contraction": "matrix products are printed by dot.py",
    "attention": "attention is printed by attention.py",
    "opaque": "its loops are written for CPUs",
    "host": "it runs on the host",
}


@dataclass(frozen=True)
class Blocks:
    """How much one instance of a kernel does; 0: as the rules of this file say."""

    block: int = 0  # elements, or positions of a row that are taken at once
    rows: int = 0  # of a tile
    warps: int = 0


BY_RULE = Blocks()


def triton_source(program: Program, chip: ChipSpec | None = None) -> str:
    """The Triton module of a pointwise or rows group, as text.

    Its `launch(*inputs, *outputs)` takes tensors in the layout the program says (row major unless
    a tensor has strides) and runs the kernel; sizes that no tensor shows are keyword arguments.
    Without a chip the text is for any, and Triton's interpreter runs it too.
    """
    return module_text(program, triton_kernel(program, chip))


def triton_kernel(program: Program, chip: ChipSpec | None = None, *, wide: bool | None = None,
                  fits: bool = False, blocks: Blocks = BY_RULE) -> Written:
    """The same as a kernel with all that a launch must know of it.

    `wide` says whether addresses have 64 bits; by default they do where 32 might not suffice.
    `fits` says that rows of unknown length are short enough for one block each; `blocks` may say
    how it is cut, of sizes that are known.
    """
    if program.kind not in ("pointwise", "rows"):
        reason = _REASONS.get(program.kind, "only pointwise and rows groups have it")
        raise UnsupportedOperator(
            f"group {program.name!r} of kind {program.kind!r} has no Triton source: {reason}",
            hint="compile it for the CPU, or give the operator a kernel of its own")
    for tensor in (*program.inputs, *program.stages):
        type_text(tensor.dtype)  # refuses types Triton has not, with their name
    kernel = _Kernel(collapse(program), chip, wide, fits, blocks)
    kernel.write()
    return kernel.written()


class _Kernel:
    """One kernel while it is written: its parameters, its lines and its launch."""

    def __init__(self, program: Program, chip: ChipSpec | None, wide: bool | None,
                 fits: bool, blocks: Blocks):
        self.program, self.chip, self.fits, self.blocks = program, chip, fits, blocks
        self.names = Names(RESERVED)
        self.name = self.names.fresh(program.name)
        tensors = (*program.inputs, *program.outputs)
        self.pointers = {t: self.names.fresh(f"{t.name}_ptr") for t in tensors}
        self.dims = {var: self.names.fresh(var.name) for var in _dims(program)}
        self.constants: dict[str, Size] = {}  # constexpr parameters and what launch gives them
        self.instances: Index = 1
        self.rows_an_instance = 1
        self.looped = False
        self.warps = blocks.warps  # 0: as many as its lanes want
        self.lanes = 1  # elements an instance holds at once, at most
        self.widest = max(t.dtype.bits for t in tensors)
        self.rules = LaunchRules() if chip is None else chip.launch
        self.exact_grid = self.rules.accepts_all
        stages = program.stages
        self.rows = 0 if program.kind == "pointwise" else _row_rank(program)
        self.row_extents = [a.extent for a in stages[0].axes[:self.rows]]
        self.columns = self.rows > 0 and runs_down_columns(program, self.rows)
        self.tile = self.rows > 0 and _prefers_tiles(program, self.rows)
        self.streams = program.kind == "rows" and streams(program, self.rows)
        self.turn = None if self.rows or program.kind == "rows" else turn_of(program)
        sizes = [num_elements(t.shape) for t in (*program.inputs, *stages)]
        if wide is None:
            wide = any(top is None or top >= 1 << 31 for top in (bounds(n)[1] for n in sizes))
        self.emitter = Emitter(self.names, self.dims, self.pointers, self.make_space,
                               tile=self.tile or self.turn is not None, wide=wide,
                               libdevice=chip is not None and chip.has("libdevice"))

    def write(self) -> None:
        if self.turn is not None:
            self.write_turned(self.turn)
        elif self.program.kind == "pointwise":
            self.write_pointwise()
        else:
            self.write_rows()

    def written(self) -> Written:
        programs = ceildiv(self.instances, self.rows_an_instance)
        return Written(self.name, tuple(self.emitter.scopes[0].lines), self.pointers, self.dims,
                       programs, self.constants, self.warps or self.warps_by_rule(),
                       self.emitter.wide, self.rules)

    def warps_by_rule(self) -> int:
        if self.streams:  # what is read is added up at once, so registers do not limit it
            lines = self.lanes * self.read_bytes // (32 * READ_BYTES)
            return self.rules.warps_for(max(1, min(MAX_WARPS, lines)))
        return warps_for(self.lanes, 32 if self.looped else self.widest, self.rules)

    @property
    def read_bytes(self) -> int:
        """Of an element of the widest operand."""
        return max((t.dtype.itemsize for t in self.program.inputs), default=4)

    def instance(self) -> str:
        return "tl.program_id(0).to(tl.int64)" if self.emitter.wide else "tl.program_id(0)"

    def constant(self, name: str, value: Size) -> str:
        name = self.names.fresh(name)
        self.constants[name] = value
        return name

    # ------------------------------------------------------------ pointwise
    def write_pointwise(self) -> None:
        emitter, stages = self.emitter, self.program.stages
        extents = [a.extent for a in stages[0].axes]
        total = num_elements(extents)
        places: list[Index] = []
        if extents:
            size = min(self.blocks.block or POINTWISE_BLOCK // self.widest * 8,
                       _power_of_two(total))
            block = self.constant("BLOCK", size)
            self.instances, self.rows_an_instance, self.lanes = total, size, size
            exact = self.exact_grid and isinstance(total, int) and total % size == 0
            var = _base("offsets", total)
            name = self.names.fresh("offsets")
            emitter.add_block(Block(var, name, total, (
                f"{self.instance()} * {block} + tl.arange(0, {block})"), block, exact))
            places = unflatten(var, extents)
            if len(places) > 1:
                emitter.axes = dict(zip(places, stages[0].axes))
        for stage in self.program.outputs:
            emitter.store(stage, places, emitter.stage_value(stage, places))

    def write_turned(self, turn: Turn) -> None:
        """A pointwise group over tiles: positions of one axis down, of another across."""
        emitter, axes = self.emitter, self.program.stages[0].axes
        extents = [a.extent for a in axes]
        tile = self.turned_tile(turn, extents)
        sides = {turn.down: ("down", self.constant("ROWS", tile.down), tile.down, "[:, None]"),
                 turn.across: ("across", self.constant("BLOCK", tile.across), tile.across,
                               "[None, :]")}
        grid = counts(turn, extents, tile.down, tile.across)
        self.instances, self.warps = num_elements(grid), tile.warps
        self.skip_extra_programs()
        number = _base("number", self.instances)
        emitter.add_block(Block(number, self.names.fresh("tile"), self.instances, self.instance(),
                                "", True))
        places: list[Index] = []
        for d, (axis, at) in enumerate(zip(axes, unflatten(number, grid), strict=True)):
            places.append(at)
            if d not in sides:
                if isinstance(at, IndexExpr):
                    emitter.axes[at] = axis
                continue
            side, size, lanes, direction = sides[d]
            exact = isinstance(axis.extent, int) and axis.extent % lanes == 0
            places[d] = var = _base(side, axis.extent)
            start = emitter.index(at)
            here = f"{start.inside(PRODUCT)} * {size} + " if start.text != "0" else ""
            emitter.add_block(Block(var, self.names.fresh(axis.var.name), axis.extent,
                                    f"{here}tl.arange(0, {size}){direction}", size, exact))
        for stage in self.program.outputs:
            emitter.store(stage, places, emitter.stage_value(stage, places))

    def turned_tile(self, turn: Turn, extents: list[Index]) -> Tile:
        cores = self.chip.cores if self.chip is not None else 1
        rule, chosen = tile_for(turn, extents, self.widest, cores), self.blocks
        return Tile(chosen.rows or rule.down, chosen.block or rule.across,
                    chosen.warps or self.rules.warps_for(rule.warps))

    def skip_extra_programs(self) -> None:
        if not self.exact_grid:
            total = self.emitter.index(self.instances).text
            self.emitter.line(f"if tl.program_id(0) >= {total}:", frozenset())
            self.emitter.line("    return  # the chip rounds grids up", frozenset())

    # ------------------------------------------------------------ rows
    def write_rows(self) -> None:
        emitter = self.emitter
        places = self.row_places()
        for stage in self.program.stages:
            if _reductions(stage):
                if len(stage.axes) > self.rows:
                    raise UnsupportedOperator(
                        f"stage {stage.name!r} reduces to more than one value a row, which has "
                        "no Triton source", hint="make it a group of its own")
                emitter.stage_value(stage, places)
        wide_outputs: dict[Index, list[Tensor]] = {}
        for stage in self.program.outputs:
            if len(stage.axes) == self.rows:
                emitter.store(stage, places, emitter.stage_value(stage, places))
            else:
                extent = num_elements([a.extent for a in stage.axes[self.rows:]])
                wide_outputs.setdefault(extent, []).append(stage)
        for extent, outputs in wide_outputs.items():
            block = emitter.space(extent, outputs[0].axes[-1].var.name)
            with emitter.position(block):
                for stage in outputs:
                    inner = unflatten(block.var, [a.extent for a in stage.axes[self.rows:]])
                    here = [*places, *inner]
                    emitter.store(stage, here, emitter.stage_value(stage, here))

    def row_places(self) -> list[Index]:
        """The row axes in terms of the one index that an instance or a lane of it has."""
        if not self.rows:
            return []
        axes = self.program.stages[0].axes[:self.rows]
        total = num_elements(self.row_extents)
        name = self.names.fresh(axes[0].var.name if self.rows == 1 else "row")
        var = _base("row", total)
        declaration, size, exact = self.instance(), "", True
        self.instances = total
        if self.tile:
            rows = self.tile_rows()
            self.rows_an_instance = rows
            size = self.constant("ROWS", rows)
            declaration += f" * {size} + tl.arange(0, {size})[None, :]"
            exact = self.exact_grid and isinstance(total, int) and total % rows == 0
        else:
            self.skip_extra_programs()
        self.emitter.row = Block(var, name, total, declaration, size, exact)
        self.emitter.add_block(self.emitter.row)
        self.emitter.variable(var)
        places = unflatten(var, self.row_extents)
        if self.rows > 1:
            self.emitter.axes = dict(zip(places, axes))
        return places

    @property
    def short_row(self) -> int:
        """The longest row of those that share an instance."""
        return READ_ROW if self.streams else SHORT_ROW

    def tile_rows(self) -> int:
        """Rows of a tile: many for wide loads, but not so many that multiprocessors idle."""
        rows = num_elements(self.row_extents)
        if self.blocks.rows:
            return min(self.blocks.rows, _power_of_two(rows))
        longest = longest_row(self.program)
        cores = self.chip.cores if self.chip is not None else 1
        if longest is not None and longest <= self.short_row and not self.columns:
            wanted = SHORT_TILE // _power_of_two(longest)
            if self.streams:  # larger tiles, if there are enough of them
                wanted = max(1, READ_TILE // _power_of_two(longest))
                while isinstance(rows, int) and wanted > 1 and rows < 2 * cores * wanted:
                    wanted //= 2
            return min(wanted, _power_of_two(rows))
        enough = [n for n in TILE_ROWS if not isinstance(rows, int) or rows >= 2 * cores * n]
        return min(enough[0] if enough else TILE_ROWS[-1], _power_of_two(rows))

    def make_space(self, extent: Index, name: str) -> Block:
        """How positions of a row are taken: all at once, or in a loop."""
        most = ROW_BLOCK if self.widest == 32 else NARROW_ROW_BLOCK
        if self.tile:  # sums of columns stay in their lanes, so few positions at a time will do
            least = 4 if self.columns else self.short_row
            most = self.blocks.block or max(TILE // self.rows_an_instance, least)
        step = most
        if not self.tile:
            step = LONG_ROW_BLOCK if isinstance(extent, int) else ANY_ROW_BLOCK
            step = step if self.rows else LONE_BLOCK
            if self.blocks.block:
                most = step = self.blocks.block
        looped = not isinstance(extent, int) or _power_of_two(extent) > most
        if self.fits and not self.tile and not isinstance(extent, int):
            looped, size = False, most
        else:
            size = step if looped else _power_of_two(extent)
        self.lanes = max(self.lanes, size * self.rows_an_instance)
        self.looped |= looped and not self.tile
        known = isinstance(extent, int) or not free_vars(extent) <= self.dims.keys()
        block = self.constant("BLOCK", size if known else UpTo(size, extent))
        exact = isinstance(extent, int) and extent > 0 and extent % size == 0
        var = _base(f"position{len(self.emitter.spaces)}", extent)
        lanes = f"tl.arange(0, {block})" + ("[:, None]" if self.tile else "")
        return Block(var, self.names.fresh(name), extent, None if looped else lanes, block, exact,
                     looped)


# ---------------------------------------------------------------- questions about programs
def _base(name: str, extent: Index) -> Var:
    """An index variable of the kernel; `%` keeps it apart from the program's own."""
    if isinstance(extent, int):
        return Var(f"%{name}", 0, max(extent - 1, 0))
    return Var(f"%{name}", 0, extent - 1)


def _power_of_two(n: Index) -> int:
    return 1 << max(n - 1, 0).bit_length() if isinstance(n, int) else 1 << 62


def _reductions(stage: Tensor) -> list[Reduce]:
    assert stage.body is not None
    return [n for n in walk(stage.body) if isinstance(n, Reduce)]


def _row_rank(program: Program) -> int:
    """How many leading axes number the rows."""
    if "rows" in program.attrs:
        return int(program.attrs["rows"])
    return min(len(s.axes) for s in program.stages if _reductions(s))


def longest_row(program: Program) -> int | None:
    """The most positions any reduction has, or None if that is not known."""
    sizes = [num_elements([a.extent for a in node.axes])
             for stage in program.stages for node in _reductions(stage)]
    known = [n for n in sizes if isinstance(n, int)]
    return max(known) if len(known) == len(sizes) else None


def _prefers_tiles(program: Program, rows: int) -> bool:
    """Whether neighbouring rows should run side by side: short ones, and columns."""
    if any((free_vars(a.lo) | free_vars(a.hi)) & {x.var for x in stage.axes[:rows]}
           for stage in program.stages for node in _reductions(stage) for a in node.axes):
        return False  # each row has its own length
    longest = longest_row(program)
    short = READ_ROW if streams(program, rows) else SHORT_ROW
    return bool(program.attrs.get("tiles")) or runs_down_columns(program, rows) or (
        longest is not None and longest <= short)


def streams(program: Program, rows: int) -> bool:
    """Whether all that a program does is to read rows once, and to write results of them.

    Windows, which overlap, and products are something else; columns have wide loads anyway.
    """
    if program.attrs.get("tiles") or any(len(o.axes) != rows for o in program.outputs):
        return False
    if runs_down_columns(program, rows):
        return False
    return all(len(node.axes) == 1 and all(_is_beside(n, node.axes[0].var)
                                           for n in loads(node.value))
               for stage in program.stages for node in _reductions(stage))


def _is_beside(load: Load, var: Var) -> bool:
    """Whether what an index numbers lies side by side in memory."""
    if load.source.body is not None:
        return True
    return not any(isinstance(i, Scalar) for i in load.indices) and (
        coefficient(load.source.flat(load.indices), var) == 1)


def runs_down_columns(program: Program, rows: int) -> bool:
    """Whether what lies side by side in memory are rows, not the positions of a row."""
    along_rows = along_positions = False
    for stage in program.stages:
        for node in _reductions(stage):
            row_vars = {a.var for a in stage.axes[:rows]}
            for load in loads(node.value):
                if any(isinstance(i, Scalar) for i in load.indices):
                    continue
                address = load.source.flat(load.indices)
                along_rows |= any(coefficient(address, v) == 1 for v in row_vars)
                along_positions |= any(coefficient(address, a.var) == 1 for a in node.axes)
    return along_rows and not along_positions


def _dims(program: Program) -> list[Var]:
    """The symbolic sizes of a program, also those that only its masks mention."""
    own = {a.var for s in program.stages for a in s.axes}
    found = set(program.dims)
    for stage in program.stages:
        assert stage.body is not None
        for node in walk(stage.body):
            if isinstance(node, FromIndex):
                found |= free_vars(node.index)
            elif isinstance(node, Load):
                found = found.union(*(free_vars(i) for i in node.indices
                                      if not isinstance(i, Scalar)))
            elif isinstance(node, Reduce):
                own |= {a.var for a in node.axes}
    return sorted(found - own, key=lambda v: v.name)
