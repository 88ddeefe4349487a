"""The templates of the tiles of `loop/pair_tile.py`: x86's `vdpbf16ps`.

It takes numbers below 2^-126 for zero, in what it reads and in what it makes, and rounds each of
the two additions by itself, to nearest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from terrazzo.chips.cpu.bfloat import adds_pairs
from terrazzo.chips.cpu.llvm.builder import Builder, Val, const, vec
from terrazzo.chips.cpu.llvm.fma_tile import ROWS_AHEAD, Fma, emit_rows, emit_tile
from terrazzo.chips.cpu.llvm.scalars import memory_type
from terrazzo.chips.cpu.llvm.sum_blocks import SUM_STEPS, in_blocks
from terrazzo.chips.cpu.llvm.tile_parts import (
    FLOATS,
    add_pairs,
    finish,
    load_vector,
    pairs_allowed,
    pointers,
    store_vector,
    write_once,
)
from terrazzo.chips.cpu.llvm.transpose_tile import joined, transposed

if TYPE_CHECKING:
    from terrazzo.chips.cpu.llvm.expressions import Scope
    from terrazzo.chips.cpu.llvm.loops import LoopEmitter
    from terrazzo.chips.spec import ChipSpec
    from terrazzo.loop.ir import Tile

_LINE = 64  # bytes of a cache line


def emit_pair_tile(emitter: LoopEmitter, tile: Tile, scope: Scope) -> bool:
    """Rows of accumulators in registers; a pair of rows of B for each pair of steps of k."""
    shape = _shape(emitter, tile)
    return shape is not None and emit_tile(emitter, tile, scope, shape)


def emit_pair_rows(emitter: LoopEmitter, tile: Tile, scope: Scope) -> bool:
    """Tiles below each other."""
    shape = _shape(emitter, tile)
    return shape is not None and emit_rows(emitter, tile, scope, shape)


def _shape(emitter: LoopEmitter, tile: Tile) -> Pairs | None:
    mr, nr = int(tile.constants["mr"]), int(tile.constants["nr"])
    width = emitter.chip.lanes(32)
    elems = tuple(memory_type(buffer.dtype) for buffer, _ in tile.places[:3])
    if not adds_pairs(emitter.chip) or nr % width or elems[1:] != ("bfloat", "bfloat") or (
            elems[0] not in ("float", "bfloat")):
        return None
    return Pairs(mr, nr, width, elems, bool(tile.constants.get("near")),
                 pairs_allowed(emitter.chip), bool(tile.constants["paired"]),
                 bool(tile.constants["even"]))


@dataclass(frozen=True)
class Pairs(Fma):
    """A tile of pairs; sizes count elements, `a_step` and `ldb` of paired B go a pair further."""

    paired: bool = True
    even: bool = False

    def registers(self, chip: ChipSpec) -> int:
        return 32

    def name(self, masked: bool) -> str:
        return (f"pairs_{self.mr}x{self.nr}_{self.elems[0]}{'' if self.paired else '_rows'}"
                f"{'_even' * self.even}{'_near' * self.near}{'_masked' * masked}")

    def write(self, b: Builder, params: list[Val]) -> None:
        c, a, right, soon, accumulate, k, lda, a_step, ldb, ldc, share, *live = params
        masks = self.masks(b, live[0] if live else None)
        c_rows = [b.gep(self.elems[0], c, b.mul(ldc, r)) for r in range(self.mr)]
        places = [(b.gep(self.elems[0], row, v * self.width), mask)
                  for row in c_rows for v, mask in enumerate(masks)]
        for row in c_rows:
            # Rows of C are far apart: asked for now, they arrive while the sums are made.
            for at in range(0, self.nr * FLOATS[self.elems[0]], _LINE):
                b.prefetch(b.gep("i8", row, at), write=True)
        a_rows = [b.mul(lda, r) for r in range(self.mr)]
        zero = const(vec("float", self.width), 0.0)
        further = ldb if self.paired else b.mul(ldb, 2)
        far = b.mul(further, ROWS_AHEAD)
        pairs, left_over = b.lshr(k, 1), b.and_(k, 1)

        def step(whole: bool, state: list[Val]) -> list[Val]:
            pa, pb, later, *sums = state
            if not self.near:
                b.prefetch(later, locality=2)
                ahead = b.gep("bfloat", pb, far, inbounds=False)
                for row in (ahead,) if self.paired else (ahead, b.gep("bfloat", ahead, ldb,
                                                                      inbounds=False)):
                    for at in range(0, self.nr * (4 if self.paired else 2), _LINE):
                        b.prefetch(b.gep("i8", row, at, inbounds=False))
            rows = [self.pairs_of_b(b, b.gep("bfloat", pb, v * self.width * (1 + self.paired)),
                                    ldb, masks[v], whole) for v in range(len(masks))]
            for r in range(self.mr):
                spread = b.splat(self.pair_of_a(b, b.gep("bfloat", pa, a_rows[r]), whole),
                                 self.width)
                for v, row in enumerate(rows):
                    at = r * len(masks) + v
                    sums[at] = add_pairs(b, sums[at], spread, row)
            return [b.gep("bfloat", pa, a_step), b.gep("bfloat", pb, further),
                    b.gep("bfloat", later, b.mul(share, 2), inbounds=False), *sums]

        def block(start: Val, end: Val, is_first: Val, state: list[Val]) -> list[Val]:
            state = b.loop(start, end, 1, lambda _, state: step(True, state),
                           [*state, *[zero] * len(places)])
            if not self.even:
                rest = b.select(b.icmp("eq", end, pairs), left_over, const("i64", 0))
                state = b.loop(0, rest, 1, lambda _, state: step(False, state), state)
            if self.elems[0] == "float":
                finish(b, b.or_(accumulate, b.xor(is_first, True)), state[3:], places, 4)
                return state[:3]
            for total, (pointer, mask) in zip(state[3:], places, strict=True):
                store_vector(b, _rounded(b, total), pointer, mask, 2)
            return []

        if self.elems[0] == "float":
            in_blocks(b, pairs, SUM_STEPS, [a, right, soon], block)
        else:
            block(const("i64", 0), pairs, const("i1", True), [a, right, soon])

    def pair_of_a(self, b: Builder, pointer: Val, whole: bool) -> Val:
        if whole:
            return b.load("i32", pointer, 2)
        return b.cast("zext", b.load("i16", pointer, 2), "i32")

    def pairs_of_b(self, b: Builder, pointer: Val, ldb: Val, mask: Val | None, whole: bool) -> Val:
        """A vector of pairs, as bits; panels are filled up with zeros, rows are not."""
        if self.paired:
            return b.load(vec("i32", self.width), pointer, 2)
        row = vec("i16", self.width)
        first = load_vector(b, row, pointer, mask, 2)
        second = const(row, 0) if not whole else load_vector(
            b, row, b.gep("bfloat", pointer, ldb), mask, 2)
        lanes = [lane // 2 + lane % 2 * self.width for lane in range(2 * self.width)]
        return b.shuffle(first, second, lanes)


def _rounded(b: Builder, total: Val) -> Val:
    """The bits of float32 rounded to bfloat16."""
    narrow = vec("bfloat", total.lanes)
    made = b.call(narrow, f"llvm.x86.avx512bf16.cvtneps2bf16.{32 * total.lanes}", [total])
    return b.bitcast(made, vec("i16", total.lanes))


def emit_pair_panel(emitter: LoopEmitter, tile: Tile, scope: Scope) -> bool:
    """Pairs are moved as 32 bits: a vector of rows and four pairs at a time."""
    nr = int(tile.constants["nr"])
    width = emitter.chip.lanes(32)
    if [buffer.dtype.bits for buffer, _ in tile.places] != [16, 16] or nr % width or width == 1:
        return False
    b = emitter.b
    d, s = pointers(emitter, tile, scope)
    k, ldd, lds, columns = (emitter.index(size, scope) for size in tile.sizes)
    name = f"pair_panel_{width}"
    write_once(emitter.module, name, ["ptr"] * 2 + ["i64"] * 4,
               lambda b, params: _write_panel(b, params, width))
    for first in range(0, nr, width):
        b.call("void", name, [b.gep("i16", d, 2 * first),
                              b.gep("i16", s, b.mul(lds, first), inbounds=False), k, ldd, lds,
                              b.sub(columns, first)])
    return True


def _write_panel(b: Builder, params: list[Val], width: int) -> None:
    d, s, k, ldd, lds, rows = params
    size = 4  # pairs of a block: within 128 bits shuffles are cheap
    pairs = b.lshr(k, 1)
    # A row that is not there is the last one that is; the last block begins early enough to be
    # whole. So no block needs masks.
    last = b.sub(rows, 1)
    offsets = [b.mul(lds, b.smin(const("i64", r), last)) for r in range(width)]

    def block(at: Val, _: list[Val]) -> None:
        q = b.smin(at, b.sub(pairs, size))
        pointer = b.gep("i16", s, b.mul(q, 2), inbounds=False)
        raw = [b.load(vec("i32", size), b.gep("i16", pointer, off, inbounds=False), 2)
               for off in offsets]
        columns = transposed(b, [joined(b, raw[r::size]) for r in range(size)])
        for r, column in enumerate(columns):
            b.store(column, b.gep("i16", d, b.mul(b.add(q, r), ldd)), 2)

    def column(q: Val, bits: str) -> None:
        def element(r: Val, _: list[Val]) -> None:
            at = b.add(b.mul(lds, b.smin(r, last)), b.mul(q, 2))
            item = b.load(bits, b.gep("i16", s, at, inbounds=False), 2)
            b.store(item if bits == "i32" else b.cast("zext", item, "i32"),
                    b.gep("i16", d, b.add(b.mul(q, ldd), b.mul(r, 2))), 2)

        b.loop(0, width, 1, element)

    b.if_(b.icmp("sge", pairs, size), lambda: b.loop(0, pairs, size, block),
          lambda: b.loop(0, pairs, 1, lambda q, _: column(q, "i32")))
    b.if_(b.icmp("ne", b.and_(k, 1), 0), lambda: column(pairs, "i16"))
