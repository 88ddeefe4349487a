"""Conversions between f32 and the small float types, in instructions that vectorise.

f16 has instructions of its own on every CPU we target but old x86. bf16 and the floats of 8 bits
and fewer go through integer operations: LLVM would turn them into scalar library calls. The latter
are held as i8.
Rounding is to nearest, ties to even; what overflows becomes infinity where there is one (e5m2),
else nan (e4m3fn, the fnuz types), else the largest number (e2m1fn), as in ml_dtypes.
"""

from __future__ import annotations

from typing import NamedTuple

from terrazzo.chips.cpu.llvm.builder import Builder, Val

__all__ = ["from_f32", "to_f32"]

_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000


class _Small(NamedTuple):
    """How a small float type is laid out."""

    bits: int
    mantissa_bits: int
    bias: int
    infinity: int  # what overflows becomes: the code of infinity, of a nan, or the largest number
    nan: int
    has_infinity: bool
    fnuz: bool = False  # the code of -0.0 is the only nan: there is one zero, and no infinity
    has_nan: bool = True


_FP8 = {
    "e4m3fn": _Small(bits=8, mantissa_bits=3, bias=7, infinity=0x7F, nan=0x7F, has_infinity=False),
    "e5m2": _Small(bits=8, mantissa_bits=2, bias=15, infinity=0x7C, nan=0x7E, has_infinity=True),
    "e4m3fnuz": _Small(bits=8, mantissa_bits=3, bias=8, infinity=0x80, nan=0x80,
                       has_infinity=False, fnuz=True),
    "e5m2fnuz": _Small(bits=8, mantissa_bits=2, bias=16, infinity=0x80, nan=0x80,
                       has_infinity=False, fnuz=True),
    "e2m1fn": _Small(bits=4, mantissa_bits=1, bias=1, infinity=7, nan=0, has_infinity=False,
                     has_nan=False),
}

_HALF = _Small(bits=16, mantissa_bits=10, bias=15, infinity=0x7C00, nan=0x7E00, has_infinity=True)


def _has_half(b: Builder) -> bool:
    """Whether the CPU converts f16 itself: all we know do, but x86 before AVX."""
    return "sse2" not in b.module.features or "f16c" in b.module.features


def to_f32(b: Builder, v: Val, kind: str = "") -> Val:
    """A half, bfloat or smaller value as f32, exactly; `kind` names the type that an i8 holds."""
    if v.elem == "float":
        return v
    if v.elem == "half":
        if not _has_half(b):
            return _decode(b, b.cast("bitcast", v, "i16"), _HALF)
        return b.cast("fpext", v, "float")
    if v.elem == "bfloat":
        wide = b.cast("zext", b.cast("bitcast", v, "i16"), "i32")
        return b.cast("bitcast", b.shl(wide, 16), "float")
    if kind in ("e5m2", "e4m3fn") and _has_half(b):
        return _through_half(b, v, _FP8[kind])
    return _decode(b, v, _FP8[kind])


def from_f32(b: Builder, v: Val, elem: str) -> Val:
    """f32 rounded to 'half', 'bfloat', or to a type of 8 bits or fewer, such as 'e5m2' (as i8)."""
    if elem == "float":
        return v
    if elem == "half":
        if not _has_half(b):
            return b.cast("bitcast", _encode(b, v, _HALF), "half")
        return b.cast("fptrunc", v, "half")
    if elem == "bfloat":
        return _to_bfloat(b, v)
    return _encode(b, v, _FP8[elem])


def _to_bfloat(b: Builder, v: Val) -> Val:
    bits = b.cast("bitcast", v, "i32")
    lowest = b.and_(b.lshr(bits, 16), 1)
    rounded = b.lshr(b.add(b.add(bits, 0x7FFF), lowest), 16)
    # Rounding could carry a nan over into infinity; its top bits with the quiet bit are a nan.
    quiet = b.or_(b.lshr(bits, 16), 0x40)
    result = b.select(b.fcmp("uno", v, v), quiet, rounded)
    return b.cast("bitcast", b.cast("trunc", result, "i16"), "bfloat")


def _through_half(b: Builder, v: Val, small: _Small) -> Val:
    """As an f16 of the same bits, scaled: converting a denormal of those takes no longer."""
    code = b.cast("zext", v, "i16")
    if small.mantissa_bits == 2:  # the upper half of an f16
        return b.cast("fpext", b.cast("bitcast", b.shl(code, 8), "half"), "float")
    magnitude = b.and_(code, 0x7F)
    placed = b.or_(b.shl(b.and_(code, 0x80), 8),
                   b.shl(magnitude, _HALF.mantissa_bits - small.mantissa_bits))
    wide = b.cast("fpext", b.cast("bitcast", placed, "half"), "float")
    number = b.fmul(wide, 2.0 ** (_HALF.bias - small.bias))
    return b.select(b.icmp("eq", magnitude, small.nan), b.const(wide.ty, float("nan")), number)


def _decode(b: Builder, v: Val, small: _Small) -> Val:
    code = b.cast("zext", v, "i32")
    top = 1 << (small.bits - 1)
    magnitude = b.and_(code, top - 1)
    sign = b.shl(b.and_(code, top), 32 - small.bits)
    # The code's bits, put where f32 has its exponent and mantissa, are the value scaled by a
    # power of two, for small denormals too: f32 denormals are scaled up by the multiplication.
    placed = b.shl(magnitude, 23 - small.mantissa_bits)
    scaled = b.fmul(b.cast("bitcast", placed, "float"), 2.0 ** (127 - small.bias))
    bits = b.cast("bitcast", scaled, "i32")
    special = b.or_(placed, _INFINITY)
    if not small.has_infinity:
        special = b.or_(special, 0x400000)
    if small.has_nan:
        is_special = (b.icmp("eq", b.and_(code, 2 * top - 1), top) if small.fnuz
                      else b.icmp("uge", magnitude, small.infinity))
        bits = b.select(is_special, special, bits)
    return b.cast("bitcast", b.or_(bits, sign), "float")


def _encode(b: Builder, v: Val, small: _Small) -> Val:
    bits = b.cast("bitcast", v, "i32")
    magnitude = b.and_(bits, _MAGNITUDE)
    sign = b.and_(b.lshr(bits, 32 - small.bits), 1 << (small.bits - 1))
    shift = 23 - small.mantissa_bits
    # Normal results: rebias the exponent and round the dropped bits; a carry grows the exponent.
    lowest = b.and_(b.lshr(magnitude, shift), 1)
    rebias = ((127 - small.bias) << 23) - ((1 << (shift - 1)) - 1)
    normal = b.lshr(b.add(b.sub(magnitude, rebias), lowest), shift)
    # Denormal results: adding a power of two whose ulp is the least denormal lets the FPU round.
    anchor = 2.0 ** (1 - small.bias - small.mantissa_bits + 23)
    absolute = b.cast("bitcast", magnitude, "float")
    anchored = b.cast("bitcast", b.fadd(absolute, anchor), "i32")
    denormal = b.sub(anchored, b.cast("bitcast", b.const(v.ty, anchor), "i32"))
    tiny = b.icmp("ult", magnitude, (128 - small.bias) << 23)
    code = b.select(tiny, denormal, normal)
    # Signed comparison is enough: codes of finite numbers and of overflows are all positive.
    code = b.intrinsic("llvm.smin", [code, b.const(code.ty, small.infinity)], code.ty)
    code = b.select(b.icmp("ugt", magnitude, _INFINITY), b.const(code.ty, small.nan), code)
    if small.fnuz:
        sign = b.select(b.icmp("eq", code, 0), b.const(code.ty, 0), sign)
    return b.cast("trunc", b.or_(code, sign), f"i{max(small.bits, 8)}")
