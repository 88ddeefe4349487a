"""The template of `transposed_copy`: square blocks are transposed in registers.

A block's rows are whole vectors on both sides, so memory sees only contiguous loads and stores.
Streaming stores bypass the caches where the rows of D are aligned, which is found out at run time.
A matrix of a few dense columns (colours of pixels, halves of complex numbers) is taken apart, or
put together, by shuffles across that many vectors.
Blocks that stick out of the copied region are masked, where the chip has masked moves of such
elements; elsewhere what sticks out is copied one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from terrazzo.chips.cpu.llvm.builder import Builder, Val, const, iota, vec
from terrazzo.chips.spec import ChipSpec

if TYPE_CHECKING:
    from terrazzo.chips.cpu.llvm.expressions import Scope
    from terrazzo.chips.cpu.llvm.loops import LoopEmitter
    from terrazzo.loop.ir import Tile

LARGEST_BLOCK = 16  # rows of a block: with the shuffles' temporaries this fills 32 registers
FEW = 4  # as many dense columns are taken apart as a whole


def emit_transposed_copy(emitter: LoopEmitter, tile: Tile, scope: Scope) -> bool:
    """Write the tile as a call of an internal function, one for each type and pair of strides."""
    (target, d_at), (source, s_at) = tile.places
    if target.dtype is not source.dtype:
        return False
    bits = 8 * target.dtype.itemsize
    elem = f"i{bits}"
    registers = emitter.chip.vector_registers
    width = min(emitter.chip.lanes(bits), LARGEST_BLOCK, registers // 2)
    if width < 2:
        return False
    b = emitter.b
    rows, columns, ldd, lds = [emitter.index(s, scope) for s in tile.sizes]
    while rows.literal and columns.literal and 4 <= width >= 2 * max(rows.literal, columns.literal):
        width //= 2  # a small matrix would leave most of a large block empty
    strides = "_".join("x" if s.literal is None else str(s.literal) for s in (ldd, lds))
    # Half a line alone is worse than the cache: the memory takes whole lines only.
    streaming = bool(tile.constants["streaming"]) and emitter.may_stream and width * bits == 512
    # Dense rows of S that become few rows of D, or the other way round.
    apart = rows.literal if rows.literal == lds.literal and _is_few(rows) else None
    together = columns.literal if columns.literal == ldd.literal and _is_few(columns) else None
    kind = f"apart_{apart}" if apart else f"together_{together}" if together else "blocks"
    name = f"transposed_copy_{elem}_{strides}_{kind}_{width}{'_streaming' * streaming}"
    if not emitter.module.defines(name):
        formals = [("ptr noalias", "d"), ("ptr noalias", "s")] + [
            ("i64", n) for n in ("rows", "columns", "ldd", "lds")]
        inner = Builder(emitter.module, name, formals, linkage="internal",
                        attrs="nounwind noinline")
        d, s, *sizes = inner.params
        known = [given if given.literal is not None else param
                 for given, param in zip((ldd, lds), sizes[2:], strict=True)]
        copy = _Copy(inner, elem, width, _has_masks(emitter.chip, bits), streaming, d, s,
                     *sizes[:2], *known)
        if apart:
            copy.take_apart(apart)
        elif together:
            copy.put_together(together)
        else:
            copy.write()
        inner.ret()
    pointers = [emitter.address(target, d_at, scope), emitter.address(source, s_at, scope)]
    b.call("void", name, [*pointers, rows, columns, ldd, lds])
    emitter.streamed |= streaming
    return True


def _is_few(size: Val) -> bool:
    return size.literal is not None and 2 <= size.literal <= FEW


def _has_masks(chip: ChipSpec, bits: int) -> bool:
    if bits < 32:
        return chip.has("avx512bw", "avx512vl")
    return chip.has("avx2")


@dataclass
class _Copy:
    b: Builder
    elem: str
    width: int
    masked: bool
    streaming: bool
    d: Val
    s: Val
    rows: Val
    columns: Val
    ldd: Val
    lds: Val

    @property
    def align(self) -> int:
        return int(self.elem[1:]) // 8

    def write(self) -> None:
        b, width = self.b, self.width
        whole_rows, whole_columns = b.and_(self.rows, -width), b.and_(self.columns, -width)

        def strips(streaming: bool) -> None:
            if streaming:
                # Neighbouring lines of S one after the other: they share pages, come in pairs.
                b.loop(0, whole_columns, width, lambda j, _: b.loop(
                    0, whole_rows, width, lambda i, _: self.block(i, j, True)))
            else:
                # Along rows of D, whose lines are not whole: each is finished while it is near.
                b.loop(0, whole_rows, width, lambda i, _: b.loop(
                    0, whole_columns, width, lambda j, _: self.block(i, j, False)))

        if self.streaming:
            address = b.cast("ptrtoint", self.d, "i64")
            rest = b.and_(b.or_(address, b.mul(self.ldd, self.align)), width * self.align - 1)
            b.if_(b.icmp("eq", rest, 0), lambda: strips(True), lambda: strips(False))
        else:
            strips(False)
        b.if_(b.icmp("slt", whole_columns, self.columns), lambda: b.loop(
            0, whole_rows, width, lambda i, _: self.edge(
                i, b.add(i, width), whole_columns, self.columns)))
        b.if_(b.icmp("slt", whole_rows, self.rows),
              lambda: self.edge(whole_rows, self.rows, const("i64", 0), self.columns))

    def block(self, i: Val, j: Val, streaming: bool) -> None:
        """One whole block: rows of S in, rows of D out."""
        b = self.b
        source = b.gep(self.elem, self.s, b.add(b.mul(j, self.lds), i))
        target = b.gep(self.elem, self.d, b.add(b.mul(i, self.ldd), j))
        ty = vec(self.elem, self.width)
        rows = [b.load(ty, b.gep(self.elem, source, b.mul(self.lds, r)), self.align)
                for r in range(self.width)]
        for r, column in enumerate(transposed(b, rows)):
            b.store(column, b.gep(self.elem, target, b.mul(self.ldd, r)),
                    self.align * self.width if streaming else self.align, nontemporal=streaming)

    def edge(self, i_lo: Val, i_hi: Val, j_lo: Val, j_hi: Val) -> None:
        """A part that is less than a block high or wide."""
        b, width = self.b, self.width
        if not self.masked:
            b.loop(i_lo, i_hi, 1, lambda i, _: b.loop(j_lo, j_hi, 1, lambda j, _: self.one(i, j)))
            return
        b.loop(j_lo, j_hi, width, lambda j, _: self.masked_block(
            i_lo, j, b.sub(i_hi, i_lo), b.sub(j_hi, j)))

    def one(self, i: Val, j: Val) -> None:
        b = self.b
        value = b.load(self.elem, b.gep(self.elem, self.s, b.add(b.mul(j, self.lds), i)),
                       self.align)
        b.store(value, b.gep(self.elem, self.d, b.add(b.mul(i, self.ldd), j)), self.align)

    def masked_block(self, i: Val, j: Val, rows: Val, columns: Val) -> None:
        b, ty = self.b, vec(self.elem, self.width)
        in_rows, in_columns = self.lanes_below(rows), self.lanes_below(columns)
        source = b.gep(self.elem, self.s, b.add(b.mul(j, self.lds), i))
        target = b.gep(self.elem, self.d, b.add(b.mul(i, self.ldd), j))
        nothing = const(vec("i1", self.width), False)
        loaded = [b.masked_load(
            ty, b.gep(self.elem, source, b.mul(self.lds, r), inbounds=False),
            b.select(b.icmp("slt", const("i64", r), columns), in_rows, nothing), 0, self.align)
            for r in range(self.width)]
        for r, column in enumerate(transposed(b, loaded)):
            mask = b.select(b.icmp("slt", const("i64", r), rows), in_columns, nothing)
            at = b.gep(self.elem, target, b.mul(self.ldd, r), inbounds=False)
            b.masked_store(column, at, mask, self.align)

    # ------------------------------------------------------------ few dense columns
    def take_apart(self, few: int) -> None:
        """Row i of D is every `few`-th element of S."""
        b, width = self.b, self.width

        def step(j: Val, _: list[Val]) -> None:
            whole = b.load(vec(self.elem, few * width),
                           b.gep(self.elem, self.s, b.mul(j, few)), self.align)
            for i in range(few):
                row = b.shuffle(whole, None, list(range(i, few * width, few)))
                b.store(row, b.gep(self.elem, self.d, b.add(b.mul(self.ldd, i), j)), self.align)

        whole_columns = b.and_(self.columns, -width)
        b.loop(0, whole_columns, width, step)
        b.loop(0, few, 1, lambda i, _: b.loop(
            whole_columns, self.columns, 1, lambda j, _: self.one(i, j)))

    def put_together(self, few: int) -> None:
        """Column j of S is every `few`-th element of D."""
        b, width = self.b, self.width

        def step(i: Val, _: list[Val]) -> None:
            whole = b.load(vec(self.elem, width), b.gep(self.elem, self.s, i), self.align)
            for j in range(1, few):
                at = b.gep(self.elem, self.s, b.add(b.mul(self.lds, j), i))
                column = b.load(vec(self.elem, width), at, self.align)
                # The vector grows by one column at a time; what is past the end is never used.
                padded = b.shuffle(column, None, [lane % width for lane in range(j * width)])
                whole = b.shuffle(whole, padded, list(range((j + 1) * width)))
            order = [j * width + lane for lane in range(width) for j in range(few)]
            b.store(b.shuffle(whole, None, order), b.gep(self.elem, self.d, b.mul(i, few)),
                    self.align)

        whole_rows = b.and_(self.rows, -width)
        b.loop(0, whole_rows, width, step)
        b.loop(whole_rows, self.rows, 1, lambda i, _: b.loop(
            0, few, 1, lambda j, _: self.one(i, j)))

    def lanes_below(self, count: Val) -> Val:
        b = self.b
        low = b.cast("trunc", b.smin(count, self.width), "i32")
        return b.icmp("slt", iota(vec("i32", self.width)), b.splat(low, self.width))


def transposed(b: Builder, rows: list[Val]) -> list[Val]:
    """The transpose of a square block held as rows: each round swaps halves of twice the size."""
    width = len(rows)
    half = width // 2
    while half:
        # Lane l of row r trades places with its mirror image across the diagonal of its block.
        low = [lane if not lane & half else width + lane - half for lane in range(width)]
        high = [lane + half if not lane & half else width + lane for lane in range(width)]
        fresh = list(rows)
        for r in range(width):
            if not r & half:
                fresh[r] = b.shuffle(rows[r], rows[r + half], low)
                fresh[r + half] = b.shuffle(rows[r], rows[r + half], high)
        rows = fresh
        half //= 2
    return rows
