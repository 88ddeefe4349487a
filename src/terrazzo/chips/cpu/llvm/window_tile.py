"""The template of `window_tile`: a block of pixels by vectors of channels, held in registers.

Sizes that are numbers are written into the code: rows of pixels then are displacements of one
pointer, where a general stride would take a register each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from terrazzo.base.scalar_text import format_scalar
from terrazzo.chips.cpu.llvm.builder import Builder, Val, const, iota, vec
from terrazzo.chips.cpu.llvm.convert import to_f32
from terrazzo.chips.cpu.llvm.scalars import from_memory, memory_type, to_memory
from terrazzo.chips.cpu.llvm.sum_blocks import WINDOW_STEPS, in_blocks, last_block
from terrazzo.index import Var, bounds

if TYPE_CHECKING:
    from terrazzo.chips.cpu.llvm.expressions import Scope
    from terrazzo.chips.cpu.llvm.loops import LoopEmitter
    from terrazzo.loop.ir import Tile

_FLOATS = {"float": 4, "double": 8, "half": 2, "bfloat": 2}
_ROWS_AHEAD = 8  # of B: it comes from the second-level cache
_NARROW = 2  # vectors of a tile that gains from asking ahead; others are busy loading as it is
_FEW_STEPS = 8  # of the innermost level are written out, when channels are kept apart


def emit_window_tile(emitter: LoopEmitter, tile: Tile, scope: Scope) -> bool:
    """Write a call of the tile's function, and the function where it is new."""
    buffers = [buffer for buffer, _ in tile.places]
    finish = tile.constants["finish"]
    wide = buffers[0].dtype if finish is None else finish.total.dtype
    if wide is not buffers[0].dtype and tile.constants["accumulate"]:
        return False
    elems = [memory_type(dtype) for dtype in (wide, buffers[1].dtype, buffers[2].dtype)]
    if elems[0] not in ("float", "double") or any(
            e not in _FLOATS or (e != elems[0] and elems[0] == "double") for e in elems):
        return False
    facts = tile.constants
    nr = int(facts["nr"])
    lanes = emitter.chip.lanes(8 * _FLOATS[elems[0]])
    width = 1
    while width < min(lanes, nr):
        width *= 2
    pointers = [emitter.address(buffer, at, scope) for buffer, at in tile.places]
    sizes = [emitter.index(size, scope) for size in tile.sizes]
    shape = _Window(emitter, tile, width, tuple(elems))
    described = [elems, [b.dtype.short for b in buffers], nr, facts["down"], facts["across"],
                 facts["levels"], facts["accumulate"], facts["lanewise"], facts["asks"],
                 facts["near"],
                 [s.literal for s in sizes],
                 None if finish is None else (format_scalar(finish.value), finish.along)]
    digest = hashlib.sha256(str(described).encode()).hexdigest()[:12]
    name = f"window_{facts['down']}x{facts['across']}x{nr}_{digest}"
    given = [s for s in sizes if s.literal is None]
    if not emitter.module.defines(name):
        params = [("ptr", f"p{i}") for i in range(len(pointers))] + [
            ("i64", f"n{i}") for i in range(len(given))]
        b = Builder(emitter.module, name, params, linkage="internal", attrs="nounwind noinline")
        values = iter(b.params[len(pointers):])
        shape.write(b, list(b.params[:len(pointers)]),
                    [s if s.literal is not None else next(values) for s in sizes])
        b.ret()
    emitter.b.call("void", name, [*pointers, *given])
    return True


@dataclass(frozen=True)
class _Window:
    emitter: LoopEmitter
    tile: Tile
    width: int
    elems: tuple[str, ...]  # of sums, of A and of B

    def write(self, b: Builder, pointers: list[Val], sizes: list[Val]) -> None:
        facts = self.tile.constants
        nr, across, down = (int(facts[n]) for n in ("nr", "across", "down"))
        columns, *rest = sizes
        count = 3 * int(facts["levels"])
        levels = [(rest[i], rest[i + 1], rest[i + 2]) for i in range(0, count, 3)]
        steps = rest[count:]
        asked = (pointers.pop(), steps.pop()) if facts["asks"] else None
        masks = self.masks(b, columns, nr)

        def pixels(which: int) -> list[Val]:
            dx, dy = steps[2 * which], steps[2 * which + 1]
            return [b.add(b.mul(dx, x), b.mul(dy, y)) for y in range(down) for x in range(across)]

        c, a, right, *operands = pointers
        elem = memory_type(self.tile.places[0][0].dtype)
        c_rows = [b.gep(elem, c, offset) for offset in pixels(0)]
        offsets = [pixels(i + 2) for i in range(len(operands))]
        self.ask_for(b, operands, offsets, nr)
        soon = [] if asked is None else [asked[0]]
        sums = self.total(b, a, right, levels, pixels(1), masks, soon,
                          None if asked is None else asked[1])
        places = [(r, v, b.gep(elem, row, v * self.width)) for r, row in enumerate(c_rows)
                  for v in range(len(masks))]
        if facts["accumulate"]:
            sums = [b.fadd(self.load(b, elem, p, masks[v]), value)
                    for (_, v, p), value in zip(places, sums, strict=True)]
        if facts["finish"] is not None:
            sums = self.finished(b, places, sums, operands, offsets, masks)
        for (_, v, p), value in zip(places, sums, strict=True):
            one = columns.literal is not None and columns.literal - v * self.width == 1
            self.store(b, value, p, masks[v], one)

    # ------------------------------------------------------------ sums
    def total(self, b: Builder, a: Val, right: Val, levels: Sequence[tuple[Val, Val, Val]],
              rows: Sequence[Val], masks: Sequence[Val | None], soon: list[Val],
              share: Val | None) -> list[Val]:
        """The sums of all products under the window, long ones in blocks.

        A block is as many of the innermost levels as it may hold, or a piece of the innermost.
        """
        zero = const(vec(self.elems[0], self.width), 0.0)
        count = len(rows) * len(masks)
        outer = self.outer_levels()
        if outer == 0:
            return self.window(b, a, right, levels, rows, masks, [zero] * count + soon,
                               share)[:count]
        kept = b.alloca(vec(self.elems[0], self.width), count)
        places = [b.gep(vec(self.elems[0], self.width), kept, i) for i in range(count)]
        align = self.width * _FLOATS[self.elems[0]]
        for place in places:
            b.store(zero, place, align)

        def block(a: Val, right: Val, levels: Sequence[tuple[Val, Val, Val]], soon: list[Val]
                  ) -> list[Val]:
            found = self.window(b, a, right, levels, rows, masks, [zero] * count + soon, share)
            for value, place in zip(found[:count], places, strict=False):
                b.store(b.fadd(b.load(value.ty, place, align), value), place, align)
            return found[count:]

        def pieces(a: Val, right: Val, level: tuple[Val, Val, Val], soon: list[Val]) -> list[Val]:
            steps, a_step, b_step = level

            def piece(start: Val, end: Val, _: Val, soon: list[Val]) -> list[Val]:
                return block(b.gep(self.elems[1], a, b.mul(start, a_step), inbounds=False),
                             b.gep(self.elems[2], right, b.mul(start, b_step), inbounds=False),
                             [(b.sub(end, start), a_step, b_step)], soon)

            return in_blocks(b, steps, WINDOW_STEPS, soon, piece)

        def around(a: Val, right: Val, level: int, soon: list[Val]) -> list[Val]:
            if level == len(levels) - 1 < outer:
                return pieces(a, right, levels[-1], soon)
            if level == outer:
                return block(a, right, levels[outer:], soon)
            steps, a_step, b_step = levels[level]

            def step(_: Val, state: list[Val]) -> list[Val]:
                pa, pb, *soon = state
                soon = around(pa, pb, level + 1, soon)
                return [b.gep(self.elems[1], pa, a_step, inbounds=False),
                        b.gep(self.elems[2], pb, b_step, inbounds=False), *soon]

            return b.loop(0, steps, 1, step, [a, right, *soon])[2:]

        around(a, right, 0, soon)
        return [b.load(zero.ty, place, align) for place in places]

    def outer_levels(self) -> int:
        """How many levels are around a block of a sum: 0 if all is one block."""
        facts, steps = self.tile.constants, 1
        for level in reversed(range(int(facts["levels"]))):
            most = bounds(self.tile.sizes[1 + 3 * level])[1]
            if most is None or steps * most > last_block(WINDOW_STEPS):
                return 0 if facts["lanewise"] else level + 1
            steps *= most
        return 0

    def window(self, b: Builder, a: Val, right: Val, levels: Sequence[tuple[Val, Val, Val]],
               rows: Sequence[Val], masks: Sequence[Val | None], sums: list[Val],
               share: Val | None) -> list[Val]:
        """All products under the window, added to the sums; after those, what is asked for next."""
        count, a_step, b_step = levels[0]
        last = len(levels) == 1

        def step(_: Val, state: list[Val]) -> list[Val]:
            pa, pb, *values = state
            if not last:
                values = self.window(b, pa, pb, levels[1:], rows, masks, values, share)
            elif share is None:
                values = self.products(b, pa, pb, b_step, rows, masks, values)
            else:
                *values, soon = values
                b.prefetch(soon, locality=2)
                values = [*self.products(b, pa, pb, b_step, rows, masks, values),
                          b.gep(self.elems[2], soon, share, inbounds=False)]
            return [b.gep(self.elems[1], pa, a_step, inbounds=False),
                    b.gep(self.elems[2], pb, b_step, inbounds=False), *values]

        if last and self.tile.constants["lanewise"]:
            written = self.written_out(b, a, right, levels[0], rows, masks, sums)
            if written is not None:
                return written
        return b.loop(0, count, 1, step, [a, right, *sums])[2:]

    def products(self, b: Builder, a: Val, right: Val, b_step: Val, rows: Sequence[Val],
                 masks: Sequence[Val | None], sums: list[Val]) -> list[Val]:
        """One step of the window for all pixels."""
        lanewise = self.tile.constants["lanewise"]
        sums = list(sums)
        if not lanewise and not self.tile.constants["near"] and len(masks) <= _NARROW:
            ahead = b.gep(self.elems[2], right, b.mul(b_step, _ROWS_AHEAD), inbounds=False)
            for at in range(0, self.width * len(masks), 64 // _FLOATS[self.elems[2]]):
                b.prefetch(b.gep(self.elems[2], ahead, at, inbounds=False))
        # Panels of B are full, so only B as it lies in memory needs masks.
        row = self.vectors(b, 2, right, masks if lanewise else [None] * len(masks))
        for r, offset in enumerate(rows):
            pixel = b.gep(self.elems[1], a, offset, inbounds=False)
            if lanewise:
                items = self.vectors(b, 1, pixel, masks)
            else:
                item = b.load(self.elems[1], pixel, _FLOATS[self.elems[1]])
                items = [b.splat(_widen(b, item, self.elems[0]), self.width)] * len(row)
            for v, (item, weight) in enumerate(zip(items, row, strict=True)):
                at = r * len(row) + v
                sums[at] = b.fma(item, weight, sums[at])
        return sums

    def written_out(self, b: Builder, a: Val, right: Val, level: tuple[Val, Val, Val],
                    rows: Sequence[Val], masks: Sequence[Val | None], sums: list[Val]
                    ) -> list[Val] | None:
        """A row of the window without a loop: each pixel is loaded once, for all taps over it."""
        count, a_step, b_step = (n.literal for n in level)
        places = [r.literal for r in rows if r.literal is not None]
        if count is None or a_step is None or b_step is None or count > _FEW_STEPS or (
                len(places) < len(rows)):
            return None
        weights = [self.vectors(b, 2, b.gep(self.elems[2], right, tap * b_step, inbounds=False),
                                masks) for tap in range(count)]
        users: dict[int, list[tuple[int, int]]] = {}
        for r, place in enumerate(places):
            for tap in range(count):
                users.setdefault(place + tap * a_step, []).append((r, tap))
        sums = list(sums)
        for place, pairs in sorted(users.items()):
            items = self.vectors(b, 1, b.gep(self.elems[1], a, place, inbounds=False), masks)
            for r, tap in pairs:
                for v, item in enumerate(items):
                    at = r * len(items) + v
                    sums[at] = b.fma(item, weights[tap][v], sums[at])
        return sums

    def vectors(self, b: Builder, which: int, pointer: Val, masks: Sequence[Val | None]
                ) -> list[Val]:
        """The vectors of all columns from a place on."""
        elem = self.elems[which]
        return [self.load(b, elem, b.gep(elem, pointer, v * self.width, inbounds=False), mask)
                for v, mask in enumerate(masks)]

    # ------------------------------------------------------------ what follows the sum
    def ask_for(self, b: Builder, operands: Sequence[Val], offsets: Sequence[Sequence[Val]],
                nr: int) -> None:
        """Ask for operands that differ from pixel to pixel: they arrive while the sums are made."""
        for i, (operand, rows) in enumerate(zip(operands, offsets, strict=True)):
            if all(row.literal == 0 for row in rows):
                continue
            finish = self.tile.constants["finish"]
            elem, size = memory_type(finish.operands[i].dtype), finish.operands[i].dtype.itemsize
            for row in rows:
                for at in range(0, nr if finish.along[i] else 1, 64 // size):
                    b.prefetch(b.gep(elem, operand, b.add(row, at), inbounds=False))

    def finished(self, b: Builder, places: Sequence[tuple[int, int, Val]], sums: Sequence[Val],
                 operands: Sequence[Val], offsets: Sequence[Sequence[Val]],
                 masks: Sequence[Val | None]) -> list[Val]:
        """What the expression makes of each sum."""
        from terrazzo.chips.cpu.llvm.expressions import Lanes, Scope
        from terrazzo.chips.cpu.llvm.vector_code import VectorCode

        finish = self.tile.constants["finish"]
        zero = b.const("i64", 0)
        outer, self.emitter.b = self.emitter.b, b
        results = []
        fixed: dict[tuple[int, int], Val] = {}  # operands that are the same for every pixel
        for (r, v, _), total in zip(places, sums, strict=True):
            known = {id(finish.total): total}
            for i, (load, along) in enumerate(zip(finish.operands, finish.along, strict=True)):
                offset = offsets[i][r]
                still = all(o.literal == 0 for o in offsets[i])
                if still and (i, v) in fixed:
                    known[id(load)] = fixed[i, v]
                    continue
                dtype = load.dtype
                elem = memory_type(dtype)
                pointer = b.gep(elem, operands[i], offset)
                if along:
                    found = _loaded(b, vec(elem, self.width), b.gep(elem, pointer, v * self.width),
                                    masks[v], dtype.itemsize)
                else:
                    found = b.load(elem, pointer, dtype.itemsize)
                known[id(load)] = fixed[i, v] = from_memory(b, found, dtype)
            lanes = Lanes(Var("tj", 0), zero, self.width, 1, masks[v])
            value = VectorCode(self.emitter, Scope({}, {}, lanes, known)).emit(finish.value)
            results.append(value if value.lanes == self.width else b.splat(value, self.width))
        self.emitter.b = outer
        return results

    # ------------------------------------------------------------ memory
    def masks(self, b: Builder, columns: Val, nr: int) -> list[Val | None]:
        """One mask a vector of columns; None where all its lanes are there."""
        found: list[Val | None] = []
        for at in range(0, nr, self.width):
            live = columns.literal
            if live is not None and at + self.width <= live:
                found.append(None)
                continue
            low = b.cast("trunc", b.smax(b.smin(b.sub(columns, at), self.width), 0), "i32")
            found.append(b.icmp("slt", const("i64", 0), b.sub(columns, at)) if self.width == 1 else
                         b.icmp("slt", iota(vec("i32", self.width)), b.splat(low, self.width)))
        return found

    def load(self, b: Builder, elem: str, pointer: Val, mask: Val | None) -> Val:
        return _widen(b, _loaded(b, vec(elem, self.width), pointer, mask, _FLOATS[elem]),
                      self.elems[0])

    def store(self, b: Builder, value: Val, pointer: Val, mask: Val | None, one: bool) -> None:
        dtype = self.tile.places[0][0].dtype
        data, align = to_memory(b, value, dtype), dtype.itemsize
        if mask is None:
            b.store(data, pointer, align)
        elif mask.lanes == 1:
            b.if_(mask, lambda: b.store(data, pointer, align))
        elif one:
            # LLVM makes one lane of a truncating masked store as wide as it was before.
            b.store(b.extract(data, 0), pointer, align)
        else:
            b.masked_store(data, pointer, mask, align)


def _loaded(b: Builder, ty: str, pointer: Val, mask: Val | None, align: int) -> Val:
    if mask is None:
        return b.load(ty, pointer, align)
    if mask.lanes == 1:
        return b.if_values(mask, lambda: [b.load(ty, pointer, align)], lambda: [const(ty, 0)])[0]
    return b.masked_load(ty, pointer, mask, 0, align)


def _widen(b: Builder, value: Val, elem: str) -> Val:
    return value if value.elem == elem else to_f32(b, value)


