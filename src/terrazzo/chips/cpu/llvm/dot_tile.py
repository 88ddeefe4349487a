"""The template of `dot_tile`: inner products along k."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from terrazzo.chips.cpu.bfloat import adds_pairs
from terrazzo.chips.cpu.llvm.builder import Builder, Val, const, vec
from terrazzo.chips.cpu.llvm.sum_blocks import SUM_VECTORS, in_blocks
from terrazzo.chips.cpu.llvm.tile_parts import (
    FLOATS,
    add_pairs,
    elements,
    finish,
    load_vector,
    mask_below,
    pairs_allowed,
    pointers,
    widen,
    write_once,
)

if TYPE_CHECKING:
    from terrazzo.chips.cpu.llvm.expressions import Scope
    from terrazzo.chips.cpu.llvm.loops import LoopEmitter
    from terrazzo.loop.ir import Tile


def emit_dot_tile(emitter: LoopEmitter, tile: Tile, scope: Scope) -> bool:
    """A vector of partial sums for each element of C, added up across the lanes at the end."""
    elems = elements(tile)
    mr, nr = int(tile.constants["mr"]), int(tile.constants["nr"])
    if elems is None:
        return False
    width = emitter.chip.lanes(8 * FLOATS[elems[0]])
    # One row uses each vector of B once, straight from memory; more rows keep it in a register.
    registers = mr * nr + (nr if mr > 1 else 1) + 1
    paired = elems == ["float", "bfloat", "bfloat"] and adds_pairs(emitter.chip)
    there = 32 if paired else emitter.chip.vector_registers
    if nr & (nr - 1) or nr > width or registers > there:
        return False
    sizes = [emitter.index(s, scope) for s in tile.sizes]
    name = f"dot_{mr}x{nr}_{'_'.join(elems)}{'_masked' if len(sizes) > 4 else ''}"
    shape = _Dot(mr, nr, width, tuple(elems), 2 if paired else 1)
    write_once(emitter.module, name, ["ptr"] * 3 + ["i1"] + ["i64"] * len(sizes), shape.write,
               pairs_allowed(emitter.chip) if paired else "")
    emitter.b.call("void", name, [*pointers(emitter, tile, scope),
                                  const("i1", bool(tile.constants["accumulate"])), *sizes])
    return True


@dataclass(frozen=True)
class _Dot:
    mr: int
    nr: int
    width: int
    elems: tuple[str, ...]
    together: int  # 2: neighbours along k are multiplied as pairs of bfloat16

    def write(self, b: Builder, params: list[Val]) -> None:
        c, a, right, accumulate, k, lda, ldb, ldc, *live = params
        a_rows = [b.gep(self.elems[1], a, b.mul(lda, r)) for r in range(self.mr)]
        # A column that is not there reads the last one that is: nobody looks at its sum.
        last = b.sub(live[0], 1) if live else const("i64", self.nr - 1)
        columns = [b.smin(const("i64", j), last) for j in range(self.nr)]
        b_rows = [b.gep(self.elems[2], right, b.mul(ldb, j)) for j in columns]
        zero = const(vec(self.elems[0], self.width), 0.0)

        def step(mask: Val | None) -> Callable[[Val, list[Val]], list[Val]]:
            def body(place: Val, sums: list[Val]) -> list[Val]:
                row = [self.load(b, 2, p, place, mask) for p in b_rows]
                if mask is None and self.mr > 1:
                    self.ask_for_next(b, b_rows, b.add(place, b.mul(ldb, self.nr)))
                for r in range(self.mr):
                    item = self.load(b, 1, a_rows[r], place, mask)
                    for j in range(self.nr):
                        at = r * self.nr + j
                        sums[at] = self.add(b, sums[at], item, row[j])
                return sums
            return body

        mask = mask_below(b, self.nr, live[0]) if live else None
        starts = range(0, self.mr * self.nr, self.nr)
        places = [(b.gep(self.elems[0], c, b.mul(ldc, r)), mask) for r in range(self.mr)]
        steps = self.width * self.together
        whole = b.and_(k, -steps)
        edge = mask_below(b, steps, b.sub(k, whole))

        def block(start: Val, end: Val, is_first: Val, _: list[Val]) -> list[Val]:
            stop = b.smin(end, whole)
            sums = b.loop(start, stop, steps, step(None), [zero] * (self.mr * self.nr))
            sums = b.loop(stop, end, steps, step(edge), sums)
            totals = add_lanes(b, sums)
            rows = [slice_of(b, totals[at // self.width], at % self.width, self.nr)
                    for at in starts]
            finish(b, b.or_(accumulate, b.xor(is_first, True)), rows, places,
                   FLOATS[self.elems[0]])
            return []

        in_blocks(b, k, SUM_VECTORS * steps, [], block)

    def ask_for_next(self, b: Builder, rows: Sequence[Val], at: Val) -> None:
        """Bring what the next tile reads of B nearer, as far along k as this one has come.

        A single row reads fast enough for the processor to notice where it goes; between the
        products of several it does not, and with 3 to 12 rows of A waits up to half the time.
        """
        for row in rows:
            b.prefetch(b.gep(self.elems[2], row, at, inbounds=False), locality=2)

    def load(self, b: Builder, which: int, base: Val, at: Val, mask: Val | None) -> Val:
        elem = self.elems[which]
        pointer = b.gep(elem, base, at)
        if self.together == 2:
            return load_vector(b, vec("i16", 2 * self.width), pointer, mask, 2)
        return widen(b, load_vector(b, vec(elem, self.width), pointer, mask, FLOATS[elem]),
                     self.elems[0])

    def add(self, b: Builder, total: Val, left: Val, right: Val) -> Val:
        if self.together == 2:
            return add_pairs(b, total, left, right)
        return b.fma(left, right, total)


def slice_of(b: Builder, value: Val, first: int, count: int) -> Val:
    if count == value.lanes:
        return value
    return b.shuffle(value, None, list(range(first, first + count)))


def add_lanes(b: Builder, sums: Sequence[Val]) -> list[Val]:
    """Vectors whose lanes are, in order, the sums over the lanes of the given vectors.

    Two vectors at a time, halves of groups of lanes are brought together and added: three
    instructions for each given vector, where adding up each by itself would take ten.
    """
    width = sums[0].lanes
    zero = const(sums[0].ty, 0.0)
    results = []
    for first in range(0, len(sums), width):
        values = list(sums[first:first + width])
        owners = [[at] * width for at in range(len(values))]
        count = 1
        while count < len(values):
            count *= 2
        values += [zero] * (count - len(values))
        owners += [[-1] * width] * (count - len(owners))
        group = width
        while group > 1:
            half = group // 2
            paired = len(values) > 1
            fresh, fresh_owners = [], []
            for at in range(0, len(values), 2 if paired else 1):
                x = values[at]
                y = values[at + 1] if paired else x
                both = owners[at] + (owners[at + 1] if paired else owners[at])
                low = _halves(width, group, 0)
                high = [lane + half for lane in low]
                fresh.append(b.fadd(b.shuffle(x, y, low), b.shuffle(x, y, high)))
                fresh_owners.append([both[lane] for lane in low])
            values, owners, group = fresh, fresh_owners, half
        order = [owners[0].index(at) if at in owners[0] else -1 for at in range(width)]
        results.append(b.shuffle(values[0], None, order))
    return results


def _halves(width: int, group: int, first: int) -> list[int]:
    """First halves of every group of two vectors, vectors alternating below 128 bits."""
    half = group // 2
    lanes = []
    starts = range(first, width, group)
    if group > 4:  # whole pieces of 128 bits: all of the first vector, then all of the second
        order = [(v, s) for v in (0, 1) for s in starts]
    else:  # within pieces of 128 bits, where shuffles are cheap
        piece = 4
        order = [(v, s) for p in range(0, width, piece) for v in (0, 1)
                 for s in range(p + first, min(p + piece, width), group)]
    for v, s in order:
        lanes += [v * width + s + i for i in range(half)]
    return lanes
