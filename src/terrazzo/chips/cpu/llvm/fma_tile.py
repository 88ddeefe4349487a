"""The templates of `fma_tile` and `fma_rows`: outer products, their sums in registers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from terrazzo.chips.cpu.llvm.builder import Builder, Module, Val, const, vec
from terrazzo.chips.cpu.llvm.sum_blocks import SUM_STEPS, in_blocks
from terrazzo.chips.cpu.llvm.tile_parts import (
    FLOATS,
    elements,
    finish,
    load_vector,
    mask_below,
    pointers,
    widen,
    width_of,
    write_once,
)

if TYPE_CHECKING:
    from terrazzo.chips.cpu.llvm.expressions import Scope
    from terrazzo.chips.cpu.llvm.loops import LoopEmitter
    from terrazzo.chips.spec import ChipSpec
    from terrazzo.loop.ir import Tile

# Rows of B asked for ahead of their use. A panel comes from the second-level cache or from further
# away; measured on 1024 and 2048 cubed this brings 7 %.
ROWS_AHEAD = 8


def emit_fma_tile(emitter: LoopEmitter, tile: Tile, scope: Scope) -> bool:
    """Rows of accumulators in registers; one row of B and one column of A for each step of k."""
    shape = _shape(emitter, tile)
    return shape is not None and emit_tile(emitter, tile, scope, shape)


def emit_fma_rows(emitter: LoopEmitter, tile: Tile, scope: Scope) -> bool:
    """Tiles below each other: one function goes through the rows, for all kernels of a module."""
    shape = _shape(emitter, tile)
    return shape is not None and emit_rows(emitter, tile, scope, shape)


def _shape(emitter: LoopEmitter, tile: Tile) -> Fma | None:
    elems, nr = elements(tile), int(tile.constants["nr"])
    if elems is None:
        return None
    width = width_of(emitter.chip.lanes(8 * FLOATS[elems[0]]), nr)
    return Fma(int(tile.constants["mr"]), nr, width, tuple(elems[:3]),
               bool(tile.constants.get("near")))


def emit_tile(emitter: LoopEmitter, tile: Tile, scope: Scope, shape: Fma) -> bool:
    """A tile as calls of an internal function, as many as its rows need to fit the registers."""
    rows = _rows_in_registers(emitter, shape)
    if rows < 1:
        return False
    b = emitter.b
    c, a, *more = _operands(emitter, tile, scope, 5)
    lda, ldc = more[4], more[7]
    for first in range(0, shape.mr, rows):
        part = replace(shape, mr=min(rows, shape.mr - first))
        b.call("void", part.function(emitter.module, len(more) > 9), [
            b.gep(shape.elems[0], c, b.mul(ldc, first)),
            b.gep(shape.elems[1], a, b.mul(lda, first)), *more])
    return True


def _rows_in_registers(emitter: LoopEmitter, shape: Fma) -> int:
    """How many rows of accumulators there are registers for."""
    vectors, registers = -(-shape.nr // shape.width), shape.registers(emitter.chip)
    return 0 if vectors > registers - 2 else max(1, (registers - vectors - 1) // vectors)


def _operands(emitter: LoopEmitter, tile: Tile, scope: Scope, count: int) -> list[Val]:
    """What functions of tiles take: C, A, B, S, whether to add, `count` sizes, live columns."""
    c, a, right, *soon = pointers(emitter, tile, scope)
    *sizes, k, lda, a_step, ldb, ldc = [emitter.index(s, scope) for s in tile.sizes[:count]]
    live = [emitter.index(s, scope) for s in tile.sizes[count:]]
    # Without a hint, what the hint asks for is the first row of B, which is there.
    share = live.pop() if soon else const("i64", 0)
    if live and live[0].literal == int(tile.constants["nr"]):
        live = []
    return [c, a, right, soon[0] if soon else right,
            const("i1", bool(tile.constants["accumulate"])), *sizes, k, lda, a_step, ldb, ldc,
            share, *live]


def emit_rows(emitter: LoopEmitter, tile: Tile, scope: Scope, shape: Fma) -> bool:
    """So many rows of tiles as there are when it runs."""
    if _rows_in_registers(emitter, shape) < shape.mr:
        return False
    given = _operands(emitter, tile, scope, 6)  # the number of rows comes first
    live = given[12:]
    rows = _FmaRows(shape, bool(live), bool(live) and live[0].literal is not None, emitter.module)
    name = f"{'edge' if rows.narrow else 'rows'}_{shape.name(bool(live))}"
    write_once(emitter.module, name, ["ptr"] * 4 + ["i1"] + ["i64"] * (7 + len(live)), rows.write)
    emitter.b.call("void", name, given)
    return True


class _FmaRows(NamedTuple):
    """Whole tiles, then one tile for each bit of the number of rows left: few shapes."""

    shape: Fma
    masked: bool  # there may be fewer columns than the tile has
    narrow: bool  # there always are
    module: Module

    def write(self, b: Builder, params: list[Val]) -> None:
        c, a, right, soon, accumulate, rows, k, lda, a_step, ldb, ldc, share, *live = params
        mr, elems = self.shape.mr, self.shape.elems

        def tile(row: Val, later: Val, height: int, masked: bool) -> None:
            shape = replace(self.shape, mr=height)
            b.call("void", shape.function(self.module, masked), [
                b.gep(elems[0], c, b.mul(ldc, row)), b.gep(elems[1], a, b.mul(lda, row)), right,
                later, accumulate, k, lda, a_step, ldb, ldc, share, *(live if masked else [])])

        def whole(masked: bool) -> None:
            b.loop(0, tiles, 1, lambda i, _: tile(b.mul(i, mr), b.gep(
                elems[2], soon, b.mul(b.mul(k, share), i), inbounds=False), mr, masked))

        tiles = b.udiv(rows, mr)
        if self.masked and not self.narrow:
            b.if_(b.icmp("eq", live[0], self.shape.nr), lambda: whole(False), lambda: whole(True))
        else:
            whole(self.masked)
        done = b.mul(tiles, mr)
        left = b.sub(rows, done)

        def some(size: int) -> None:
            row = b.add(done, b.and_(left, -2 * size))
            b.if_(b.icmp("ne", b.and_(left, size), 0), lambda: tile(row, soon, size, self.masked))

        for bit in reversed(range((mr - 1).bit_length())):
            some(1 << bit)


@dataclass(frozen=True)
class Fma:
    mr: int
    nr: int
    width: int
    elems: tuple[str, ...]
    near: bool  # B is in the nearest cache: asking for it ahead would take slots from the FMAs
    attributes: str = ""  # of the function

    def name(self, masked: bool) -> str:
        return (f"fma_{self.mr}x{self.nr}_{'_'.join(self.elems)}{'_near' if self.near else ''}"
                f"{'_masked' if masked else ''}")

    def registers(self, chip: ChipSpec) -> int:
        return chip.vector_registers

    def function(self, module: Module, masked: bool) -> str:
        """The name of the function that computes such a tile, which is written if need be."""
        name = self.name(masked)
        write_once(module, name, ["ptr"] * 4 + ["i1"] + ["i64"] * (6 + masked), self.write,
                   self.attributes)
        return name

    def write(self, b: Builder, params: list[Val]) -> None:
        c, a, right, soon, accumulate, k, lda, a_step, ldb, ldc, share, *live = params
        masks = self.masks(b, live[0] if live else None)
        c_rows = [b.gep(self.elems[0], c, b.mul(ldc, r)) for r in range(self.mr)]
        for row in c_rows:
            # Rows of C are far apart: asked for now, they arrive while the sums are made.
            for at in range(0, self.nr, 64 // FLOATS[self.elems[0]]):
                b.prefetch(b.gep(self.elems[0], row, at), write=True)
        a_rows = [b.mul(lda, r) for r in range(self.mr)]
        zero = const(vec(self.elems[0], self.width), 0.0)
        far = b.mul(ldb, ROWS_AHEAD)
        places = [(b.gep(self.elems[0], row, v * self.width), mask)
                  for row in c_rows for v, mask in enumerate(masks)]

        def step(_: Val, state: list[Val]) -> list[Val]:
            pa, pb, later, *sums = state
            if not self.near:
                b.prefetch(later, locality=2)
                ahead = b.gep(self.elems[2], pb, far, inbounds=False)
                for at in range(0, self.nr, 64 // FLOATS[self.elems[2]]):
                    b.prefetch(b.gep(self.elems[2], ahead, at, inbounds=False))
            row = [self.load_b(b, b.gep(self.elems[2], pb, v * self.width), masks[v])
                   for v in range(len(masks))]
            for r in range(self.mr):
                item = b.load(self.elems[1], b.gep(self.elems[1], pa, a_rows[r]),
                              FLOATS[self.elems[1]])
                spread = b.splat(widen(b, item, self.elems[0]), self.width)
                for v, value in enumerate(row):
                    at = r * len(masks) + v
                    sums[at] = b.fma(spread, value, sums[at])
            return [b.gep(self.elems[1], pa, a_step), b.gep(self.elems[2], pb, ldb),
                    b.gep(self.elems[2], later, share, inbounds=False), *sums]

        def block(start: Val, end: Val, is_first: Val, state: list[Val]) -> list[Val]:
            pa, pb, later, *sums = b.loop(start, end, 1, step, [*state, *[zero] * len(places)])
            finish(b, b.or_(accumulate, b.xor(is_first, True)), sums, places,
                    FLOATS[self.elems[0]])
            return [pa, pb, later]

        in_blocks(b, k, SUM_STEPS, [a, right, soon], block)

    def masks(self, b: Builder, live: Val | None) -> list[Val | None]:
        """One mask a vector of columns; None where all its lanes are there."""
        starts = range(0, self.nr, self.width)
        if live is None:
            return [None if at + self.width <= self.nr else
                    mask_below(b, self.width, const("i64", self.nr - at)) for at in starts]
        return [mask_below(b, self.width, b.sub(live, at)) for at in starts]

    def load_b(self, b: Builder, pointer: Val, mask: Val | None) -> Val:
        elem = self.elems[2]
        return widen(b, load_vector(b, vec(elem, self.width), pointer, mask, FLOATS[elem]),
                      self.elems[0])
