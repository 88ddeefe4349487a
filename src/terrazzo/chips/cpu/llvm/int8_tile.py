"""The template of `integer_tile`: rows of 32-bit sums in registers, a group of k at a time.

| places of A and B | chip | instruction |
|---|---|---|
| u8 and i8, four together | AVX-512 VNNI, AVX-VNNI | `vpdpbusd` |
| i16 and i16, two together | any x86 with SSE2 | `vpmaddwd` and an addition |

`vpmaddubsw` would take bytes on older chips, but its sums of two products saturate at 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from terrazzo.chips.cpu.llvm.builder import Builder, Val, const, iota, vec
from terrazzo.chips.cpu.quant import adds_bytes, adds_words

if TYPE_CHECKING:
    from terrazzo.chips.cpu.llvm.expressions import Scope
    from terrazzo.chips.cpu.llvm.loops import LoopEmitter
    from terrazzo.loop.ir import Tile

# Groups of B asked for ahead of their use: a panel comes from the second-level cache.
_GROUPS_AHEAD = 8
_LINE = 64  # bytes of a cache line
_DOT_BYTES = "llvm.x86.avx512.vpdpbusd."
_DOT_WORDS = {128: "llvm.x86.sse2.pmadd.wd", 256: "llvm.x86.avx2.pmadd.wd",
              512: "llvm.x86.avx512.pmaddw.d.512"}


def emit_integer_tile(emitter: LoopEmitter, tile: Tile, scope: Scope) -> bool:
    """Write the tile as calls of an internal function, one for each shape."""
    chip = emitter.chip
    (c, _), (a, _), (right, _), _, *table = tile.places
    mr, nr = int(tile.constants["mr"]), int(tile.constants["nr"])
    together = int(tile.constants["together"])
    types = (c.dtype.name, a.dtype.name, right.dtype.name, together)
    bytes_at_once = types == ("int32", "uint8", "int8", 4) and adds_bytes(chip)
    words_at_once = types == ("int32", "int16", "int16", 2) and adds_words(chip)
    width = chip.lanes(32)
    if not (bytes_at_once or words_at_once) or nr % width:
        return False
    vectors = nr // width
    # Words need a register for the products before they are added to the sums.
    rows = (chip.vector_registers - vectors - (1 if bytes_at_once else 2)) // vectors
    if rows < 1:
        return False
    b = emitter.b
    pointers = [emitter.address(buffer, at, scope) for buffer, at in tile.places]
    groups, lda, ldc, segments, jump, share, *live = [
        emitter.index(s, scope) for s in tile.sizes]
    if live and live[0].literal == nr:
        live = []
    sizes = [groups, lda, ldc, segments, jump, share, *live]
    elem = "i8" if bytes_at_once else "i16"
    for first in range(0, mr, rows):
        shape = _Tile(min(rows, mr - first), vectors, width, elem, together, bool(table),
                      bool(tile.constants["near"]), share.literal != 0)
        name = (f"integer_tile_{shape.mr}x{nr}_{elem}{'_scattered' * bool(table)}"
                f"{'_near' * shape.near}{'_asking' * shape.asking}{'_masked' if live else ''}")
        if not emitter.module.defines(name):
            formals = [("ptr", f"p{i}") for i in range(5)] + [("i1", "accumulate")] + [
                ("i64", f"n{i}") for i in range(len(sizes))]
            inner = Builder(emitter.module, name, formals, linkage="internal",
                            attrs="nounwind noinline")
            shape.write(inner, list(inner.params))
            inner.ret()
        left = pointers[1] if table else b.gep(elem, pointers[1], b.mul(lda, first))
        begins = b.gep("i64", pointers[4], first) if table else const("ptr", 0)
        b.call("void", name, [b.gep("i32", pointers[0], b.mul(ldc, first)), left, *pointers[2:4],
                              begins, const("i1", bool(tile.constants["accumulate"])), *sizes])
    return True


@dataclass(frozen=True)
class _Tile:
    mr: int
    vectors: int
    width: int
    elem: str
    together: int
    scattered: bool  # rows of A begin where a table says
    near: bool  # C is in the nearest cache
    asking: bool  # for what is needed soon

    def write(self, b: Builder, params: list[Val]) -> None:
        c, a, right, soon, begins, accumulate, *sizes = params
        groups, lda, ldc, segments, jump, share, *live = sizes
        sums = vec("i32", self.width)
        masks = [self.mask(b, b.sub(live[0], v * self.width)) if live else None
                 for v in range(self.vectors)]
        c_rows = [b.gep("i32", c, b.mul(ldc, r)) for r in range(self.mr)]
        places = [(b.gep("i32", row, v * self.width), masks[v])
                  for row in c_rows for v in range(self.vectors)]
        for pointer, _ in () if self.near else places:
            # Rows of C may be far apart: asked for now, they arrive while the sums are made.
            b.prefetch(pointer, write=True)
        rows = [b.load("i64", b.gep("i64", begins, r), 8) if self.scattered else b.mul(lda, r)
                for r in range(self.mr)]
        panel_step = self.vectors * self.width * self.together
        size = 1 if self.elem == "i8" else 2

        def group(_: Val, state: list[Val]) -> list[Val]:
            pa, pb, later, *totals = state
            if self.asking:
                b.prefetch(later, locality=2)
                later = b.gep(self.elem, later, share, inbounds=False)
            ahead = b.gep(self.elem, pb, _GROUPS_AHEAD * panel_step, inbounds=False)
            for at in range(0, panel_step * size, _LINE):
                b.prefetch(b.gep("i8", ahead, at, inbounds=False))
            packed = [b.load(sums, b.gep("i32", pb, v * self.width), size)
                      for v in range(self.vectors)]
            for r in range(self.mr):
                item = b.load("i32", b.gep(self.elem, pa, rows[r]), size)
                spread = b.splat(item, self.width)
                for v, value in enumerate(packed):
                    at = r * self.vectors + v
                    totals[at] = self.add_products(b, totals[at], spread, value)
            return [b.gep(self.elem, pa, self.together), b.gep(self.elem, pb, panel_step), later,
                    *totals]

        def segment(_: Val, state: list[Val]) -> list[Val]:
            pa, *rest = state
            _, *rest = b.loop(0, groups, 1, group, [pa, *rest])
            return [b.gep(self.elem, pa, jump), *rest]

        zero = const(sums, 0)
        _, _, _, *totals = b.loop(0, segments, 1, segment, [a, right, soon, *[zero] * len(places)])

        def store(add: bool) -> None:
            for value, (pointer, mask) in zip(totals, places, strict=True):
                if mask is None:
                    b.store(b.add(b.load(sums, pointer, 4), value) if add else value, pointer, 4)
                else:
                    old = b.masked_load(sums, pointer, mask, 0, 4) if add else None
                    b.masked_store(value if old is None else b.add(old, value), pointer, mask, 4)

        b.if_(accumulate, lambda: store(True), lambda: store(False))

    def mask(self, b: Builder, live: Val) -> Val:
        low = b.cast("trunc", b.smax(b.smin(live, self.width), 0), "i32")
        return b.icmp("slt", iota(vec("i32", self.width)), b.splat(low, self.width))

    def add_products(self, b: Builder, total: Val, left: Val, right: Val) -> Val:
        bits = 32 * self.width
        if self.elem == "i8":
            small = vec("i8", bits // 8)
            return b.call(total.ty, f"{_DOT_BYTES}{bits}",
                          [total, b.bitcast(left, small), b.bitcast(right, small)])
        small = vec("i16", bits // 16)
        products = b.call(total.ty, _DOT_WORDS[bits],
                          [b.bitcast(left, small), b.bitcast(right, small)])
        return b.add(total, products)
