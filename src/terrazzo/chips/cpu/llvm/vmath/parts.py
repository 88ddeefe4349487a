"""Pieces the functions share: polynomials, clamps, exponent tricks, lane-by-lane calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps

from terrazzo.chips.cpu.llvm.builder import Builder, Module, Operand, Val, bundle, vec

# Adding 1.5 * 2^mantissa_bits rounds a float to an integer, left in the low bits of the sum.
ROUNDER_SINGLE = 1.5 * 2.0**23
ROUNDER_DOUBLE = 1.5 * 2.0**52


def poly(b: Builder, x: Val, coefficients: Sequence[Operand]) -> Val:
    """Evaluates c0 + c1 x + c2 x^2 + ... by Estrin's scheme, whose dependency chain is short."""
    terms: list[Operand] = list(coefficients)
    power = x
    while True:
        paired: list[Operand] = [
            b.fma(power, high, low) for low, high in zip(terms[::2], terms[1::2], strict=False)
        ]
        terms = paired + ([terms[-1]] if len(terms) % 2 else [])
        if len(terms) == 1:
            (result,) = terms
            if not isinstance(result, Val):
                raise ValueError("a polynomial needs at least two coefficients")
            return result
        power = b.fmul(power, power)


def at_most(b: Builder, x: Val, limit: float) -> Val:
    """min(x, limit) that lets nan through; one instruction on x86."""
    return b.select(b.fcmp("ogt", x, limit), b.const(x.ty, limit), x)


def at_least(b: Builder, x: Val, limit: float) -> Val:
    """max(x, limit) that lets nan through; one instruction on x86."""
    return b.select(b.fcmp("olt", x, limit), b.const(x.ty, limit), x)


def int_of(x: Val) -> str:
    """The integer type as wide as a float type, lane by lane."""
    return vec("i32" if x.elem == "float" else "i64", x.lanes)


def bits(b: Builder, x: Val) -> Val:
    return b.bitcast(x, int_of(x))


def signed_power(b: Builder, x: Val, y: Val, result: Val, finite: Val) -> Val:
    """x^y, given |x|^y and whether |x| is finite.

    Of negative x, odd integers y keep the sign, others drop it, and fractions have no result.
    """
    half_y = b.fmul(y, 0.5)
    integral = b.fcmp("oeq", b.intrinsic("llvm.trunc", [y], y.ty), y)
    even = b.fcmp("oeq", b.intrinsic("llvm.trunc", [half_y], y.ty), half_y)
    negative = b.icmp("slt", bits(b, x), 0)
    odd = b.and_(integral, b.xor(even, b.const(even.ty, True)))
    result = b.select(b.and_(negative, odd), b.fneg(result), result)
    proper = b.and_(b.fcmp("olt", x, 0.0), finite)
    invalid = b.and_(proper, b.xor(integral, b.const(integral.ty, True)))
    return b.select(invalid, b.const(x.ty, math.nan), result)


def widen(b: Builder, x: Val) -> Val:
    return b.cast("fpext", x, "double")


def narrow(b: Builder, x: Val) -> Val:
    return b.cast("fptrunc", x, "float")


def part_by_part(emitter: Callable[..., Val]) -> Callable[..., Val]:
    """Makes an emitter write the parts of a bundle one after the other.

    For functions in f64: there a part already is two registers, and more at a time only spill.
    """

    @wraps(emitter)
    def wrapped(b: Builder, *args: Val) -> Val:
        count = max(arg.count for arg in args)
        parts = [[Val(arg.ty, (arg.parts[i % arg.count],)) for arg in args] for i in range(count)]
        return bundle([emitter(b, *part) for part in parts])

    return wrapped


def any_lane(b: Builder, mask: Val) -> Val:
    """Whether any lane of any part of a bundle is set, as one scalar."""
    return b.reduce("or", b.fold(b.or_, mask))


def map_lanes(b: Builder, name: str, args: Sequence[Val]) -> Val:
    """Calls a C function on doubles lane by lane, through a loop kept out of line.

    Lanes travel through the stack, so that the caller's code stays small and keeps its registers
    for the usual path. f32 lanes are converted on the way, which rounds the result correctly.
    """
    first = args[0]
    helper = _lane_loop(b.module, name, first.elem, len(args))
    count = max(arg.count for arg in args)
    width = 4 if first.elem == "float" else 8
    areas = []
    for arg in args:
        area = b.alloca(first.elem, count * first.lanes)
        for i in range(count):
            part = Val(arg.ty, (arg.parts[i % arg.count],))
            b.store(part, b.gep(first.elem, area, i * first.lanes), width)
        areas.append(area)
    # Results overwrite the first operand.
    b.call("void", helper, [*areas, b.const("i64", count * first.lanes)])
    return Val(
        first.ty,
        tuple(
            b.load(first.ty, b.gep(first.elem, areas[0], i * first.lanes), width).text
            for i in range(count)
        ),
    )


def huge_lanes_from_libm(b: Builder, name: str, x: Val, huge: Val, result: Val) -> Val:
    """The result, but libm's in lanes that are huge: a branch, as hardly any vector has one.

    The other lanes keep their result, so that no number depends on its neighbours.
    """
    return b.if_values(
        any_lane(b, huge),
        lambda: [b.select(huge, map_lanes(b, name, [x]), result)],
        lambda: [result],
    )[0]


_ORDERS = ("jn", "yn")  # their first argument is an int of C


def _lane_loop(module: Module, name: str, elem: str, arity: int) -> str:
    helper = f"lanes.{name}.{elem}"
    if module.defines(helper):
        return helper
    params = [("ptr", f"x{i}") for i in range(arity)] + [("i64", "count")]
    f = Builder(module, helper, params, attrs="nounwind noinline", linkage="internal")
    *areas, count = f.params
    width = 4 if elem == "float" else 8

    def body(i: Val, _: list[Val]) -> None:
        operands = [f.load(elem, f.gep(elem, area, i), width) for area in areas]
        if elem == "float":
            operands = [widen(f, operand) for operand in operands]
        if name in _ORDERS:
            operands[0] = f.cast("fptosi", operands[0], "i32")
        result = f.call("double", name, operands)
        f.store(narrow(f, result) if elem == "float" else result, f.gep(elem, areas[0], i), width)

    f.loop(0, count, 1, body)
    f.ret()
    return helper
