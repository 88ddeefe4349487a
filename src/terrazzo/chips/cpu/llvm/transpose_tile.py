"""The template of `transpose_tile`: blocks of a matrix, transposed in registers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from terrazzo.chips.cpu.llvm.builder import Builder, Val, const, vec
from terrazzo.chips.cpu.llvm.tile_parts import FLOATS, elements, pointers, widen, write_once

if TYPE_CHECKING:
    from terrazzo.chips.cpu.llvm.expressions import Scope
    from terrazzo.chips.cpu.llvm.loops import LoopEmitter
    from terrazzo.loop.ir import Tile


def emit_transpose_tile(emitter: LoopEmitter, tile: Tile, scope: Scope) -> bool:
    """A vector of rows and a few columns at a time, transposed in registers."""
    elems = elements(tile)
    if elems is None:
        return False
    nr = int(tile.constants["nr"])
    width = emitter.chip.lanes(8 * FLOATS[elems[0]])
    if nr % width or width == 1:
        return False
    b = emitter.b
    d, s = pointers(emitter, tile, scope)
    k, ldd, lds, columns = (emitter.index(size, scope) for size in tile.sizes)
    shape = _Transpose(width, elems[0], elems[1], k.literal is None or k.literal < width)
    name = f"transpose_{width}_{elems[0]}_{elems[1]}{'_any' if shape.any_k else ''}"
    write_once(emitter.module, name, ["ptr"] * 2 + ["i64"] * 4, shape.write)
    for first in range(0, nr, width):
        source = b.gep(elems[1], s, b.mul(lds, first), inbounds=False)
        b.call("void", name, [b.gep(elems[0], d, first), source, k, ldd, lds,
                              b.sub(columns, first)])
    return True


@dataclass(frozen=True)
class _Transpose:
    width: int
    target: str
    source: str
    any_k: bool  # there may be fewer columns than a block has

    def write(self, b: Builder, params: list[Val]) -> None:
        d, s, k, ldd, lds, rows = params
        width, align = self.width, FLOATS[self.target]
        size = min(width, 16 // align)  # columns of a block: within 128 bits shuffles are cheap
        # A row that is not there is the last one that is; the last block begins early enough to
        # be whole. So no block needs masks.
        last = b.sub(rows, 1)
        offsets = [b.mul(lds, b.smin(const("i64", r), last)) for r in range(width)]

        def block(at: Val, _: list[Val]) -> None:
            p = b.smin(at, b.sub(k, size))
            pointer = b.gep(self.source, s, p, inbounds=False)
            raw = [b.load(vec(self.source, size), b.gep(self.source, pointer, off, inbounds=False),
                          FLOATS[self.source]) for off in offsets]
            columns = transposed(b, [widen(b, joined(b, raw[r::size]), self.target)
                                      for r in range(size)])
            for r, column in enumerate(columns):
                b.store(column, b.gep(self.target, d, b.mul(b.add(p, r), ldd)), align)

        def short(p: Val, _: list[Val]) -> None:
            def element(r: Val, _: list[Val]) -> None:
                off = b.add(b.mul(lds, b.smin(r, last)), p)
                item = b.load(self.source, b.gep(self.source, s, off, inbounds=False),
                              FLOATS[self.source])
                b.store(widen(b, item, self.target),
                        b.gep(self.target, d, b.add(b.mul(p, ldd), r)), align)

            b.loop(0, width, 1, element)

        if self.any_k:
            b.if_(b.icmp("sge", k, size), lambda: b.loop(0, k, size, block),
                  lambda: b.loop(0, k, 1, short))
        else:
            b.loop(0, k, size, block)


def joined(b: Builder, parts: list[Val]) -> Val:
    """Short vectors side by side in one."""
    while len(parts) > 1:
        parts = [b.shuffle(x, y, list(range(2 * x.lanes)))
                 for x, y in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def transposed(b: Builder, rows: list[Val]) -> list[Val]:
    """Square blocks that lie side by side in the lanes of their rows, each transposed.

    Every round interleaves the lanes of two rows; once around, each lane has come to its place.
    """
    size, width = len(rows), rows[0].lanes
    low = [block + lane // 2 + lane % 2 * width
           for block in range(0, width, size) for lane in range(size)]
    orders = low, [lane + size // 2 for lane in low]
    for _ in range(size.bit_length() - 1):
        rows = [b.shuffle(rows[n], rows[n + size // 2], order)
                for n in range(size // 2) for order in orders]
    return rows
