"""Templates for tile intrinsics: hand-shaped code where plain loops would leave speed behind.

A template gets the emitter, the tile and the scope, and answers whether it wrote code; when it
declines, the intrinsic's meaning is written as loops. Each shape of a tile becomes one internal
function, however often the kernel uses it: that keeps machine code and compile time small, and a
call costs little against the loop over k inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from terrazzo.codegen.llvm.builder import Builder, Module, Val, const, iota, vec
from terrazzo.codegen.llvm.convert import to_f32
from terrazzo.codegen.llvm.int8_tile import emit_integer_tile
from terrazzo.codegen.llvm.scalars import memory_type
from terrazzo.codegen.llvm.sum_blocks import SUM_STEPS, SUM_VECTORS, in_blocks
from terrazzo.codegen.llvm.tile_transpose import emit_transposed_copy
from terrazzo.codegen.llvm.window_tile import emit_window_tile

if TYPE_CHECKING:
    from terrazzo.codegen.llvm.expressions import Scope
    from terrazzo.codegen.llvm.loops import LoopEmitter
    from terrazzo.loop.ir import Tile

# Rows of B asked for ahead of their use. A panel comes from the second-level cache or from further
# away; measured on 1024 and 2048 cubed this brings 7 %.
_ROWS_AHEAD = 8
_FLOATS = {"float": 4, "double": 8, "half": 2, "bfloat": 2}


def _elements(tile: Tile) -> list[str] | None:
    """LLVM's types of the places, or None if they are not floats that widen to the first."""
    elems = [memory_type(buffer.dtype) for buffer, _ in tile.places]
    if elems[0] == "float" and all(e in _FLOATS and e != "double" for e in elems):
        return elems
    return elems if all(e == "double" for e in elems) else None


def _write_once(module: Module, name: str, params: Sequence[str],
                body: Callable[[Builder, list[Val]], None]) -> None:
    if module.defines(name):
        return
    formals = [(ty, f"p{i}") for i, ty in enumerate(params)]
    b = Builder(module, name, formals, linkage="internal", attrs="nounwind noinline")
    body(b, list(b.params))
    b.ret()


def _pointers(emitter: LoopEmitter, tile: Tile, scope: Scope) -> list[Val]:
    return [emitter.address(buffer, at, scope) for buffer, at in tile.places]


def _width(lanes: int, columns: int) -> int:
    """The vector for a number of columns: no wider than the chip's, no wider than needed."""
    width = 1
    while width < min(lanes, columns):
        width *= 2
    return width


def _mask(b: Builder, width: int, live: Val) -> Val:
    """The lanes below `live`; a negative number means none."""
    if width == 1:
        return b.icmp("slt", const("i64", 0), live)
    # 32-bit comparisons fill one register where 64-bit ones would fill two.
    low = b.cast("trunc", b.smax(b.smin(live, width), 0), "i32")
    return b.icmp("slt", iota(vec("i32", width)), b.splat(low, width))


def _widen(b: Builder, value: Val, elem: str) -> Val:
    return value if value.elem == elem else to_f32(b, value)


# ---------------------------------------------------------------- outer products
def _fma_tile(emitter: LoopEmitter, tile: Tile, scope: Scope) -> bool:
    """Rows of accumulators in registers; one row of B and one column of A for each step of k."""
    elems = _elements(tile)
    if elems is None:
        return False
    mr, nr = int(tile.constants["mr"]), int(tile.constants["nr"])
    near = bool(tile.constants.get("near"))
    width, rows = _registers(emitter, elems[0], nr)
    if rows < 1:
        return False
    b = emitter.b
    c, a, *more = _fma_operands(emitter, tile, scope)
    lda, ldc = more[4], more[7]
    for first in range(0, mr, rows):
        shape = _Fma(min(rows, mr - first), nr, width, tuple(elems[:3]), near)
        b.call("void", shape.function(emitter.module, len(more) > 9), [
            b.gep(elems[0], c, b.mul(ldc, first)), b.gep(elems[1], a, b.mul(lda, first)), *more])
    return True


def _registers(emitter: LoopEmitter, elem: str, nr: int) -> tuple[int, int]:
    """The width of vectors, and how many rows of accumulators there are registers for."""
    width = _width(emitter.chip.lanes(8 * _FLOATS[elem]), nr)
    vectors, registers = -(-nr // width), emitter.chip.vector_registers
    return width, 0 if vectors > registers - 2 else max(1, (registers - vectors - 1) // vectors)


def _fma_operands(emitter: LoopEmitter, tile: Tile, scope: Scope) -> list[Val]:
    """What functions of tiles take: C, A, B, S, whether to add, sizes, and live columns if any."""
    c, a, right, *soon = _pointers(emitter, tile, scope)
    *sizes, k, lda, a_step, ldb, ldc = [
        emitter.index(s, scope) for s in tile.sizes[:6 if tile.intrinsic.name == "fma_rows" else 5]]
    live = [emitter.index(s, scope) for s in tile.sizes[len(sizes) + 5:]]
    # Without a hint, what the hint asks for is the first row of B, which is there.
    share = live.pop() if soon else const("i64", 0)
    if live and live[0].literal == int(tile.constants["nr"]):
        live = []
    return [c, a, right, soon[0] if soon else right,
            const("i1", bool(tile.constants["accumulate"])), *sizes, k, lda, a_step, ldb, ldc,
            share, *live]


def _fma_rows(emitter: LoopEmitter, tile: Tile, scope: Scope) -> bool:
    """Tiles below each other: one function goes through the rows, for all kernels of a module."""
    elems = _elements(tile)
    if elems is None:
        return False
    mr, nr = int(tile.constants["mr"]), int(tile.constants["nr"])
    near = bool(tile.constants.get("near"))
    width, rows = _registers(emitter, elems[0], nr)
    if rows < mr:
        return False
    given = _fma_operands(emitter, tile, scope)
    live = given[12:]
    shape = _FmaRows(_Fma(mr, nr, width, tuple(elems[:3]), near), bool(live),
                     bool(live) and live[0].literal is not None, emitter.module)
    name = shape.shape.name(bool(live)).replace("fma", "edge" if shape.narrow else "rows", 1)
    _write_once(emitter.module, name, ["ptr"] * 4 + ["i1"] + ["i64"] * (7 + len(live)),
                shape.write)
    emitter.b.call("void", name, given)
    return True


@dataclass(frozen=True)
class _FmaRows:
    """Whole tiles, then one tile for each bit of the number of rows left: few shapes."""

    shape: _Fma
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
class _Fma:
    mr: int
    nr: int
    width: int
    elems: tuple[str, ...]
    near: bool  # B is in the nearest cache: asking for it ahead would take slots from the FMAs

    def name(self, masked: bool) -> str:
        return (f"fma_{self.mr}x{self.nr}_{'_'.join(self.elems)}{'_near' if self.near else ''}"
                f"{'_masked' if masked else ''}")

    def function(self, module: Module, masked: bool) -> str:
        """The name of the function that computes such a tile, which is written if need be."""
        name = self.name(masked)
        _write_once(module, name, ["ptr"] * 4 + ["i1"] + ["i64"] * (6 + masked), self.write)
        return name

    def write(self, b: Builder, params: list[Val]) -> None:
        c, a, right, soon, accumulate, k, lda, a_step, ldb, ldc, share, *live = params
        masks = self.masks(b, live[0] if live else None)
        c_rows = [b.gep(self.elems[0], c, b.mul(ldc, r)) for r in range(self.mr)]
        for row in c_rows:
            # Rows of C are far apart: asked for now, they arrive while the sums are made.
            for at in range(0, self.nr, 64 // _FLOATS[self.elems[0]]):
                b.prefetch(b.gep(self.elems[0], row, at), write=True)
        a_rows = [b.mul(lda, r) for r in range(self.mr)]
        zero = const(vec(self.elems[0], self.width), 0.0)
        far = b.mul(ldb, _ROWS_AHEAD)
        places = [(b.gep(self.elems[0], row, v * self.width), mask)
                  for row in c_rows for v, mask in enumerate(masks)]

        def step(_: Val, state: list[Val]) -> list[Val]:
            pa, pb, later, *sums = state
            if not self.near:
                b.prefetch(later, locality=2)
                ahead = b.gep(self.elems[2], pb, far, inbounds=False)
                for at in range(0, self.nr, 64 // _FLOATS[self.elems[2]]):
                    b.prefetch(b.gep(self.elems[2], ahead, at, inbounds=False))
            row = [self.load_b(b, b.gep(self.elems[2], pb, v * self.width), masks[v])
                   for v in range(len(masks))]
            for r in range(self.mr):
                item = b.load(self.elems[1], b.gep(self.elems[1], pa, a_rows[r]),
                              _FLOATS[self.elems[1]])
                spread = b.splat(_widen(b, item, self.elems[0]), self.width)
                for v, value in enumerate(row):
                    at = r * len(masks) + v
                    sums[at] = b.fma(spread, value, sums[at])
            return [b.gep(self.elems[1], pa, a_step), b.gep(self.elems[2], pb, ldb),
                    b.gep(self.elems[2], later, share, inbounds=False), *sums]

        def block(start: Val, end: Val, is_first: Val, state: list[Val]) -> list[Val]:
            pa, pb, later, *sums = b.loop(start, end, 1, step, [*state, *[zero] * len(places)])
            _finish(b, b.or_(accumulate, b.xor(is_first, True)), sums, places,
                    _FLOATS[self.elems[0]])
            return [pa, pb, later]

        in_blocks(b, k, SUM_STEPS, [a, right, soon], block)

    def masks(self, b: Builder, live: Val | None) -> list[Val | None]:
        """One mask a vector of columns; None where all its lanes are there."""
        starts = range(0, self.nr, self.width)
        if live is None:
            return [None if at + self.width <= self.nr else
                    _mask(b, self.width, const("i64", self.nr - at)) for at in starts]
        return [_mask(b, self.width, b.sub(live, at)) for at in starts]

    def load_b(self, b: Builder, pointer: Val, mask: Val | None) -> Val:
        elem = self.elems[2]
        return _widen(b, _load(b, vec(elem, self.width), pointer, mask, _FLOATS[elem]),
                      self.elems[0])


def _finish(b: Builder, accumulate: Val, sums: Sequence[Val],
            places: Sequence[tuple[Val, Val | None]], align: int) -> None:
    """Store sums, or add them to what is there; one function does both, for less code."""

    def store(add: bool) -> None:
        for value, (pointer, mask) in zip(sums, places, strict=True):
            if add:
                value = b.fadd(_load(b, value.ty, pointer, mask, align), value)
            _store(b, value, pointer, mask, align)

    b.if_(accumulate, lambda: store(True), lambda: store(False))


def _load(b: Builder, ty: str, pointer: Val, mask: Val | None, align: int) -> Val:
    if mask is None:
        return b.load(ty, pointer, align)
    if mask.lanes == 1:
        return b.if_values(mask, lambda: [b.load(ty, pointer, align)], lambda: [const(ty, 0)])[0]
    return b.masked_load(ty, pointer, mask, 0, align)


def _store(b: Builder, value: Val, pointer: Val, mask: Val | None, align: int) -> None:
    if mask is None:
        b.store(value, pointer, align)
    elif mask.lanes == 1:
        b.if_(mask, lambda: b.store(value, pointer, align))
    else:
        b.masked_store(value, pointer, mask, align)


# ---------------------------------------------------------------- inner products
def _dot_tile(emitter: LoopEmitter, tile: Tile, scope: Scope) -> bool:
    """A vector of partial sums for each element of C, added up across the lanes at the end."""
    elems = _elements(tile)
    mr, nr = int(tile.constants["mr"]), int(tile.constants["nr"])
    if elems is None:
        return False
    width = emitter.chip.lanes(8 * _FLOATS[elems[0]])
    # One row uses each vector of B once, straight from memory; more rows keep it in a register.
    registers = mr * nr + (nr if mr > 1 else 1) + 1
    if nr & (nr - 1) or nr > width or registers > emitter.chip.vector_registers:
        return False
    sizes = [emitter.index(s, scope) for s in tile.sizes]
    name = f"dot_{mr}x{nr}_{'_'.join(elems)}{'_masked' if len(sizes) > 4 else ''}"
    shape = _Dot(mr, nr, width, tuple(elems))
    _write_once(emitter.module, name, ["ptr"] * 3 + ["i1"] + ["i64"] * len(sizes), shape.write)
    emitter.b.call("void", name, [*_pointers(emitter, tile, scope),
                                  const("i1", bool(tile.constants["accumulate"])), *sizes])
    return True


@dataclass(frozen=True)
class _Dot:
    mr: int
    nr: int
    width: int
    elems: tuple[str, ...]

    def write(self, b: Builder, params: list[Val]) -> None:
        c, a, right, accumulate, k, lda, ldb, ldc, *live = params
        a_rows = [b.gep(self.elems[1], a, b.mul(lda, r)) for r in range(self.mr)]
        # A column that is not there reads the last one that is: nobody looks at its sum.
        last = b.sub(live[0], 1) if live else const("i64", self.nr - 1)
        columns = [b.smin(const("i64", j), last) for j in range(self.nr)]
        b_rows = [b.gep(self.elems[2], right, b.mul(ldb, j)) for j in columns]
        zero = const(vec(self.elems[0], self.width), 0.0)

        def step(mask: Val | None) -> Callable[[Val, list[Val]], list[Val]]:
            def body(at: Val, sums: list[Val]) -> list[Val]:
                row = [self.load(b, 2, p, at, mask) for p in b_rows]
                for r in range(self.mr):
                    item = self.load(b, 1, a_rows[r], at, mask)
                    for j in range(self.nr):
                        sums[r * self.nr + j] = b.fma(item, row[j], sums[r * self.nr + j])
                return sums
            return body

        mask = _mask(b, self.nr, live[0]) if live else None
        starts = range(0, self.mr * self.nr, self.nr)
        places = [(b.gep(self.elems[0], c, b.mul(ldc, r)), mask) for r in range(self.mr)]
        whole = b.and_(k, -self.width)
        edge = _mask(b, self.width, b.sub(k, whole))

        def block(start: Val, end: Val, is_first: Val, _: list[Val]) -> list[Val]:
            stop = b.smin(end, whole)
            sums = b.loop(start, stop, self.width, step(None), [zero] * (self.mr * self.nr))
            sums = b.loop(stop, end, self.width, step(edge), sums)
            totals = _add_lanes(b, sums)
            rows = [_slice(b, totals[at // self.width], at % self.width, self.nr) for at in starts]
            _finish(b, b.or_(accumulate, b.xor(is_first, True)), rows, places,
                    _FLOATS[self.elems[0]])
            return []

        in_blocks(b, k, SUM_VECTORS * self.width, [], block)

    def load(self, b: Builder, which: int, base: Val, at: Val, mask: Val | None) -> Val:
        elem = self.elems[which]
        pointer = b.gep(elem, base, at)
        return _widen(b, _load(b, vec(elem, self.width), pointer, mask, _FLOATS[elem]),
                      self.elems[0])


def _slice(b: Builder, value: Val, first: int, count: int) -> Val:
    if count == value.lanes:
        return value
    return b.shuffle(value, None, list(range(first, first + count)))


def _add_lanes(b: Builder, sums: Sequence[Val]) -> list[Val]:
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


# ---------------------------------------------------------------- transposition
def _transpose_tile(emitter: LoopEmitter, tile: Tile, scope: Scope) -> bool:
    """A vector of rows and a few columns at a time, transposed in registers."""
    elems = _elements(tile)
    if elems is None:
        return False
    nr = int(tile.constants["nr"])
    width = emitter.chip.lanes(8 * _FLOATS[elems[0]])
    if nr % width or width == 1:
        return False
    b = emitter.b
    d, s = _pointers(emitter, tile, scope)
    k, ldd, lds, columns = (emitter.index(size, scope) for size in tile.sizes)
    shape = _Transpose(width, elems[0], elems[1], k.literal is None or k.literal < width)
    name = f"transpose_{width}_{elems[0]}_{elems[1]}{'_any' if shape.any_k else ''}"
    _write_once(emitter.module, name, ["ptr"] * 2 + ["i64"] * 4, shape.write)
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
        width, align = self.width, _FLOATS[self.target]
        size = min(width, 16 // align)  # columns of a block: within 128 bits shuffles are cheap
        # A row that is not there is the last one that is; the last block begins early enough to
        # be whole. So no block needs masks.
        last = b.sub(rows, 1)
        offsets = [b.mul(lds, b.smin(const("i64", r), last)) for r in range(width)]

        def block(at: Val, _: list[Val]) -> None:
            p = b.smin(at, b.sub(k, size))
            pointer = b.gep(self.source, s, p, inbounds=False)
            raw = [b.load(vec(self.source, size), b.gep(self.source, pointer, off, inbounds=False),
                          _FLOATS[self.source]) for off in offsets]
            columns = _transposed(b, [_widen(b, _joined(b, raw[r::size]), self.target)
                                      for r in range(size)])
            for r, column in enumerate(columns):
                b.store(column, b.gep(self.target, d, b.mul(b.add(p, r), ldd)), align)

        def short(p: Val, _: list[Val]) -> None:
            def element(r: Val, _: list[Val]) -> None:
                off = b.add(b.mul(lds, b.smin(r, last)), p)
                item = b.load(self.source, b.gep(self.source, s, off, inbounds=False),
                              _FLOATS[self.source])
                b.store(_widen(b, item, self.target),
                        b.gep(self.target, d, b.add(b.mul(p, ldd), r)), align)

            b.loop(0, width, 1, element)

        if self.any_k:
            b.if_(b.icmp("sge", k, size), lambda: b.loop(0, k, size, block),
                  lambda: b.loop(0, k, 1, short))
        else:
            b.loop(0, k, size, block)


def _joined(b: Builder, parts: list[Val]) -> Val:
    """Short vectors side by side in one."""
    while len(parts) > 1:
        parts = [b.shuffle(x, y, list(range(2 * x.lanes)))
                 for x, y in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _transposed(b: Builder, rows: list[Val]) -> list[Val]:
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


TEMPLATES: dict[str, Callable[..., bool]] = {
    "fma_tile": _fma_tile,
    "fma_rows": _fma_rows,
    "dot_tile": _dot_tile,
    "transpose_tile": _transpose_tile,
    "transposed_copy": emit_transposed_copy,
    "integer_tile": emit_integer_tile,
    "window_tile": emit_window_tile,
}
