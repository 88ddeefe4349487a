"""Operations on single elements: a table from names in TTIR to scalar expressions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from terrazzo.dtypes import DType, bool_, float32, int32, int64, uint32, uint64
from terrazzo.errors import UnsupportedOperator
from terrazzo.index import proves_le
from terrazzo.scalar import OPS, Call, Const, FromIndex, Scalar, call, cast, where
from terrazzo.triton_cpu.ttir import Op
from terrazzo.triton_cpu.values import UNSIGNED, dtype_of

_KEEP_SIGN = ("cast", "add", "mul", "floordiv", "fmod", "min", "max")
Rule = Callable[[Op, list[Scalar]], Scalar]


def _same(name: str) -> Rule:
    return lambda op, args: call(name, *args)


def _unsigned(name: str) -> Rule:
    def rule(op: Op, args: list[Scalar]) -> Scalar:
        result = call(name, *(cast(a, UNSIGNED[a.dtype]) for a in args))
        return result if result.dtype is bool_ else cast(result, args[0].dtype)

    return rule


def _bits(name: str) -> Rule:
    """Sums, differences and products of truth values are arithmetic of one bit."""
    one_bit = {"add": "xor", "sub": "xor", "mul": "and"}

    def rule(op: Op, args: list[Scalar]) -> Scalar:
        return call(one_bit[name] if args[0].dtype is bool_ else name, *args)

    return rule


def _divide_towards_zero(op: Op, args: list[Scalar]) -> Scalar:
    a, b = args
    if not_negative(a) and not_negative(b):
        return call("floordiv", a, b)
    return call("floordiv", call("sub", a, call("fmod", a, b)), b)


def not_negative(value: Scalar) -> bool:
    """Whether an integer is certainly not negative (when sums and products do not overflow)."""
    if isinstance(value, Const):
        return bool(value.value >= 0)
    if isinstance(value, FromIndex):
        return proves_le(0, value.index)
    return isinstance(value, Call) and value.op in _KEEP_SIGN and all(
        not_negative(a) for a in value.args)


def _cast(op: Op, args: list[Scalar]) -> Scalar:
    return cast(args[0], dtype_of(op.type.elem))


def _sign_extend(op: Op, args: list[Scalar]) -> Scalar:
    target = dtype_of(op.type.elem)
    if args[0].dtype is bool_:
        return where(args[0], Const(target, -1), Const(target, 0))
    return cast(args[0], target)


def _zero_extend(op: Op, args: list[Scalar]) -> Scalar:
    return cast(cast(args[0], UNSIGNED[args[0].dtype]), dtype_of(op.type.elem))


def _truncate(op: Op, args: list[Scalar]) -> Scalar:
    target = dtype_of(op.type.elem)
    if target is bool_:
        return call("ne", call("and", args[0], Const(args[0].dtype, 1)), Const(args[0].dtype, 0))
    return cast(args[0], target)


def _from_signed(op: Op, args: list[Scalar]) -> Scalar:
    value = _sign_extend(op, args) if args[0].dtype is bool_ else args[0]
    return cast(value, dtype_of(op.type.elem))


def _to_unsigned(op: Op, args: list[Scalar]) -> Scalar:
    target = dtype_of(op.type.elem)
    return cast(cast(args[0], UNSIGNED[target]), target)


def _bitcast(op: Op, args: list[Scalar]) -> Scalar:
    target = dtype_of(op.type.elem)
    if args[0].dtype is target:
        return args[0]
    return Call(target, "bitcast", (args[0],))


_SIGNED_PREDICATES = ("eq", "ne", "lt", "le", "gt", "ge")


def _compare_integers(op: Op, args: list[Scalar]) -> Scalar:
    number = int(op.attrs["predicate"])
    if args[0].dtype is bool_ and number >= 2:
        args = [cast(a, int32) for a in args]
        if number < 6:  # a signed bit is 0 or -1
            args = [call("neg", a) for a in args]
    if number < 6:
        return call(_SIGNED_PREDICATES[number], *args)
    return call(_SIGNED_PREDICATES[number - 4], *(
        cast(a, UNSIGNED.get(a.dtype, a.dtype)) for a in args))


# Ordered comparisons are false where one side is nan, unordered ones are true there.
_ORDERED = {1: "eq", 2: "gt", 3: "ge", 4: "lt", 5: "le"}
_UNORDERED = {9: "le", 10: "lt", 11: "ge", 12: "gt"}


def _compare_floats(op: Op, args: list[Scalar]) -> Scalar:
    number = int(op.attrs["predicate"])
    a, b = args
    if number in (0, 15):
        return Const(bool_, number == 15)
    if number in _ORDERED:
        return call(_ORDERED[number], a, b)
    if number in _UNORDERED:
        return call("not", call(_UNORDERED[number], a, b))
    if number == 13:
        return call("ne", a, b)
    unordered = call("or", call("isnan", a), call("isnan", b))
    if number == 14:
        return unordered
    if number == 7:
        return call("not", unordered)
    if number == 8:
        return call("or", unordered, call("eq", a, b))
    return call("or", call("lt", a, b), call("gt", a, b))  # 6: ordered and not equal


def _ignoring_nan(better: str) -> Rule:
    def rule(op: Op, args: list[Scalar]) -> Scalar:
        a, b = args
        return where(call("or", call(better, a, b), call("isnan", b)), a, b)

    return rule


def _clamp(op: Op, args: list[Scalar]) -> Scalar:
    x, low, high = args
    clamped = call("min", call("max", x, low), high)
    if "all" in str(op.attrs.get("propagateNan", "")) or op.attrs.get("propagateNan") == 65535:
        return clamped
    return where(call("isnan", x), low, clamped)


def _high_product(op: Op, args: list[Scalar]) -> Scalar:
    """The upper half of a product without sign."""
    if args[0].dtype is int32:
        wide = [cast(cast(a, uint32), uint64) for a in args]
        return cast(call("shr", call("mul", *wide), Const(uint64, 32)), int32)
    a, b = (cast(x, uint64) for x in args)
    low, shift = Const(uint64, 0xFFFFFFFF), Const(uint64, 32)
    a0, a1, b0, b1 = (call("and", a, low), call("shr", a, shift), call("and", b, low),
                      call("shr", b, shift))
    first = call("mul", a0, b0)
    middle = call("add", call("mul", a1, b0), call("shr", first, shift))
    cross = call("add", call("mul", a0, b1), call("and", middle, low))
    total = call("add", call("mul", a1, b1), call("shr", middle, shift))
    return cast(call("add", total, call("shr", cross, shift)), int64)


def _select(op: Op, args: list[Scalar]) -> Scalar:
    return where(*args)


def _convert_float(op: Op, args: list[Scalar]) -> Scalar:
    """Between float types; rounding towards zero is asked for by an attribute."""
    source, target = args[0].dtype, dtype_of(op.type.elem)
    if "rtz" in str(op.attrs.get("rounding", "")) or op.attrs.get("rounding") == 0:
        if target.bits < 32 and target.name == "bfloat16" and source is float32:
            bits = call("and", Call(int32, "bitcast", (args[0],)), Const(int32, -65536))
            return cast(Call(float32, "bitcast", (bits,)), target)
    return cast(args[0], target)


def _external(op: Op, args: list[Scalar]) -> Scalar:
    """A function of our libdevice, by the name of a scalar operation."""
    name = str(op.attrs.get("symbol", "")).removeprefix("tz_")
    if name not in OPS:
        raise UnsupportedOperator(f"the external function {op.attrs.get('symbol')!r} is not there "
                                  "on the CPU", hint="use triton.language.extra.libdevice")
    return call(name, *args)


RULES: dict[str, Rule] = {
    "tt.extern_elementwise": _external,
    "arith.addi": _bits("add"), "arith.subi": _bits("sub"), "arith.muli": _bits("mul"),
    "arith.andi": _same("and"), "arith.ori": _same("or"), "arith.xori": _same("xor"),
    "arith.shli": _same("shl"), "arith.shrsi": _same("shr"), "arith.shrui": _unsigned("shr"),
    "arith.divsi": _divide_towards_zero, "arith.divui": _unsigned("floordiv"),
    "arith.ceildivsi": lambda op, a: call("neg", call("floordiv", call("neg", a[0]), a[1])),
    "arith.floordivsi": _same("floordiv"),
    "arith.remsi": _same("fmod"), "arith.remui": _unsigned("fmod"),
    "arith.minsi": _same("min"), "arith.maxsi": _same("max"),
    "arith.minui": _unsigned("min"), "arith.maxui": _unsigned("max"),
    "arith.addf": _same("add"), "arith.subf": _same("sub"), "arith.mulf": _same("mul"),
    "arith.divf": _same("div"), "arith.remf": _same("fmod"), "arith.negf": _same("neg"),
    "arith.maximumf": _same("max"), "arith.minimumf": _same("min"),
    "arith.maxnumf": _ignoring_nan("gt"), "arith.minnumf": _ignoring_nan("lt"),
    "arith.cmpi": _compare_integers, "arith.cmpf": _compare_floats, "arith.select": _select,
    "arith.extsi": _sign_extend, "arith.extui": _zero_extend, "arith.trunci": _truncate,
    "arith.index_cast": _cast, "arith.extf": _cast, "arith.truncf": _cast,
    "arith.sitofp": _from_signed,
    "arith.uitofp": lambda op, a: cast(cast(a[0], UNSIGNED[a[0].dtype]), dtype_of(op.type.elem)),
    "arith.fptosi": _cast, "arith.fptoui": _to_unsigned,
    "arith.bitcast": _bitcast, "tt.bitcast": _bitcast,
    "math.absf": _same("abs"), "math.absi": _same("abs"),
    "math.fma": lambda op, a: call("add", call("mul", a[0], a[1]), a[2]),
    "tt.fp_to_fp": _convert_float, "tt.clampf": _clamp, "tt.mulhiui": _high_product,
    "tt.precise_divf": _same("div"), "tt.precise_sqrt": _same("sqrt"),
    "tt.approx_divf": _same("div"),
    **{f"math.{name}": _same(name) for name in (
        "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "sqrt",
        "rsqrt", "erf", "floor", "ceil", "trunc", "tanh", "sinh", "cosh", "asin", "acos", "atan",
        "atan2", "cbrt", "copysign")},
    "math.roundeven": _same("round"), "math.powf": _same("pow"),
}
# What is worth a place in memory rather than a second evaluation.
EXPENSIVE = frozenset(
    {name for name in RULES if name.startswith(("math.", "tt.extern"))}
    - {"math.absf", "math.absi", "math.fma", "math.floor", "math.ceil"}
    | {"arith.divf", "arith.divsi", "arith.remsi", "arith.divui", "arith.remui", "arith.remf",
       "tt.precise_divf", "tt.precise_sqrt", "tt.approx_divf", "tt.mulhiui"})


def constant(dtype: DType, value: Any) -> Scalar:
    """A literal as TTIR gives it: bits without a sign."""
    if dtype is bool_:
        return Const(dtype, bool(value))
    return Const(dtype, float(value) if dtype.is_float else int(value))
