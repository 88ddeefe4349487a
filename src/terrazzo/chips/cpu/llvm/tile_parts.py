"""What the templates of tiles share: their functions, masks, and how sums are stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from terrazzo.chips.cpu.description import PAIRS_NEED
from terrazzo.chips.cpu.llvm.builder import Builder, Module, Val, const, iota, vec
from terrazzo.chips.cpu.llvm.convert import to_f32
from terrazzo.chips.cpu.llvm.scalars import memory_type

if TYPE_CHECKING:
    from terrazzo.chips.cpu.llvm.expressions import Scope
    from terrazzo.chips.cpu.llvm.loops import LoopEmitter
    from terrazzo.chips.spec import ChipSpec
    from terrazzo.loop.ir import Tile

FLOATS = {"float": 4, "double": 8, "half": 2, "bfloat": 2}


def elements(tile: Tile) -> list[str] | None:
    """LLVM's types of the places, or None if they are not floats that widen to the first."""
    elems = [memory_type(buffer.dtype) for buffer, _ in tile.places]
    if elems[0] == "float" and all(e in FLOATS and e != "double" for e in elems):
        return elems
    return elems if all(e == "double" for e in elems) else None


def write_once(module: Module, name: str, params: Sequence[str],
               body: Callable[[Builder, list[Val]], None], attributes: str = "") -> None:
    if module.defines(name):
        return
    formals = [(ty, f"p{i}") for i, ty in enumerate(params)]
    b = Builder(module, name, formals, linkage="internal",
                attrs=f"nounwind noinline {attributes}".rstrip())
    body(b, list(b.params))
    b.ret()


def pointers(emitter: LoopEmitter, tile: Tile, scope: Scope) -> list[Val]:
    return [emitter.address(buffer, at, scope) for buffer, at in tile.places]


def width_of(lanes: int, columns: int) -> int:
    """The vector for a number of columns: no wider than the chip's, no wider than needed."""
    width = 1
    while width < min(lanes, columns):
        width *= 2
    return width


def mask_below(b: Builder, width: int, live: Val) -> Val:
    """The lanes below `live`; a negative number means none."""
    if width == 1:
        return b.icmp("slt", const("i64", 0), live)
    # 32-bit comparisons fill one register where 64-bit ones would fill two.
    low = b.cast("trunc", b.smax(b.smin(live, width), 0), "i32")
    return b.icmp("slt", iota(vec("i32", width)), b.splat(low, width))


def widen(b: Builder, value: Val, elem: str) -> Val:
    return value if value.elem == elem else to_f32(b, value)


def finish(b: Builder, accumulate: Val, sums: Sequence[Val],
            places: Sequence[tuple[Val, Val | None]], align: int) -> None:
    """Store sums, or add them to what is there; one function does both, for less code."""

    def store(add: bool) -> None:
        for value, (pointer, mask) in zip(sums, places, strict=True):
            if add:
                value = b.fadd(load_vector(b, value.ty, pointer, mask, align), value)
            store_vector(b, value, pointer, mask, align)

    b.if_(accumulate, lambda: store(True), lambda: store(False))


def load_vector(b: Builder, ty: str, pointer: Val, mask: Val | None, align: int) -> Val:
    if mask is None:
        return b.load(ty, pointer, align)
    if mask.lanes == 1:
        return b.if_values(mask, lambda: [b.load(ty, pointer, align)], lambda: [const(ty, 0)])[0]
    return b.masked_load(ty, pointer, mask, 0, align)


def store_vector(b: Builder, value: Val, pointer: Val, mask: Val | None, align: int) -> None:
    if mask is None:
        b.store(value, pointer, align)
    elif mask.lanes == 1:
        b.if_(mask, lambda: b.store(value, pointer, align))
    else:
        b.masked_store(value, pointer, mask, align)


def pairs_allowed(chip: ChipSpec) -> str:
    """The attribute of a function that multiplies pairs of bfloat16, where others must not."""
    if chip.vector_bits == 512:
        return ""
    more = ",".join(f"+{name}" for name in PAIRS_NEED)
    bits = chip.vector_bits
    return (f'"target-features"="{chip.llvm_features},{more}" "prefer-vector-width"="{bits}" '
            f'"min-legal-vector-width"="{bits}"')


def add_pairs(b: Builder, total: Val, left: Val, right: Val) -> Val:
    """Sums of float32 plus the products of two neighbours each; factors are bits of bfloat16."""
    pairs = vec("bfloat", 2 * total.lanes)
    return b.call(total.ty, f"llvm.x86.avx512bf16.dpbf16ps.{32 * total.lanes}",
                  [total, b.bitcast(left, pairs), b.bitcast(right, pairs)])
