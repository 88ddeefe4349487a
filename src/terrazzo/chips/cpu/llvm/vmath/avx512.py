"""AVX-512 instructions that take exponents apart and look up tables in registers.

Each has a generic counterpart where it is used; `usable` says which to write.
"""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.chips.cpu.llvm.builder import Builder, Val, const, vec

_NEEDED = {512: {"avx512f"}, 256: {"avx512f", "avx512vl"}}
_BITS = {"float": 32, "double": 64}
_CURRENT_ROUNDING = 4
# getmant: mantissas in [0.75, 1.5), nan for negative numbers.
_MANTISSA_MODE = 0b1011


def usable(b: Builder, x: Val, elem: str = "float") -> bool:
    """Whether these instructions exist for vectors like x, and its elements are such ones."""
    width = x.lanes * _BITS.get(x.elem, 0)
    return x.elem == elem and _NEEDED.get(width, {"no such width"}) <= b.module.features


def scale(b: Builder, x: Val, exponent: Val) -> Val:
    """x * 2^floor(exponent), rounded once, whatever the exponent."""
    return _masked(b, "scalef", [x, exponent], x.lanes, x.elem)


def exponent_of(b: Builder, x: Val) -> Val:
    """floor(log2 |x|) as a float, for denormals too; -inf for 0 and inf for infinity."""
    return _masked(b, "getexp", [x], x.lanes)


def mantissa_of(b: Builder, x: Val) -> Val:
    """x scaled by a power of two into [0.75, 1.5); nan for negative x."""
    return _masked(b, "getmant", [x, const("i32", _MANTISSA_MODE)], x.lanes)


def _masked(b: Builder, name: str, args: Sequence[Val], lanes: int, elem: str = "float") -> Val:
    """Calls one of LLVM's masked intrinsics with all lanes on."""
    ty, width = vec(elem, lanes), lanes * _BITS[elem]
    # A mask has eight bits at least.
    operands = [*args, Val(ty, ("poison",)), const(f"i{max(lanes, 8)}", -1)]
    if width == 512:
        operands.append(const("i32", _CURRENT_ROUNDING))
    kind = "ps" if elem == "float" else "pd"
    return b.call(ty, f"llvm.x86.avx512.mask.{name}.{kind}.{width}", operands)


def lookup(b: Builder, table: Sequence[float], index: Val) -> Val:
    """table[index % 16] lane by lane, from 16 entries held in one or two registers."""
    lanes = index.lanes
    ty = vec("float", lanes)
    halves = [_vector(ty, table[i : i + lanes]) for i in range(0, 16, lanes)]
    if lanes == 16:
        return b.call(ty, "llvm.x86.avx512.permvar.sf.512", [halves[0], index])
    return b.call(ty, "llvm.x86.avx512.vpermi2var.ps.256", [halves[0], index, halves[1]])


def _vector(ty: str, values: Sequence[float]) -> Val:
    items = ", ".join("float " + const("float", value).text for value in values)
    return Val(ty, (f"<{items}>",))
