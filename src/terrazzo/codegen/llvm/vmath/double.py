"""Functions on f64: libm, lane by lane, and what the hardware rounds correctly by itself."""

from __future__ import annotations

from collections.abc import Callable

from terrazzo.codegen.llvm.builder import Builder, Val
from terrazzo.codegen.llvm.vmath.parts import map_lanes


def libm(name: str) -> Callable[..., Val]:
    """The emitter that calls a function of the C library on every lane."""

    def emitter(b: Builder, *args: Val) -> Val:
        return map_lanes(b, name, args)

    return emitter


def rounding(name: str) -> Callable[[Builder, Val], Val]:
    """The emitter of a rounding instruction, for f32 and f64 alike."""

    def emitter(b: Builder, x: Val) -> Val:
        return b.intrinsic(f"llvm.{name}", [x], x.ty)

    return emitter


def rsqrt(b: Builder, x: Val) -> Val:
    return b.fdiv(1.0, b.sqrt(x))


def sigmoid(b: Builder, x: Val) -> Val:
    """exp(-|x|) never overflows, and keeps the small results of very negative x."""
    e = map_lanes(b, "exp", [b.fneg(b.fabs(x))])
    numerator = b.select(b.fcmp("olt", x, 0.0), e, 1.0)
    return b.fdiv(numerator, b.fadd(e, 1.0))
