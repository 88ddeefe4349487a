"""Operations on single elements: a table from names in TTIR to scalar expressions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from terrazzo.base.scalar import Call, Const, FromIndex, Scalar, call, cast, where
from terrazzo.base.scalar_table import OPS
from terrazzo.dtypes import DType, bool_, float64, int32
from terrazzo.index import proves_le
from terrazzo.triton_cpu.frontend.conversions import convert_float, narrowed
from terrazzo.triton_cpu.frontend.externals import external
from terrazzo.triton_cpu.frontend.externals_bits import high_product
from terrazzo.triton_cpu.frontend.externals_rounding import times
from terrazzo.triton_cpu.frontend.inline_asm import ELEMENTWISE, assembly
from terrazzo.triton_cpu.frontend.ttir import Op
from terrazzo.triton_cpu.frontend.values import UNSIGNED, dtype_of

_KEEP_SIGN = ("cast", "add", "mul", "floordiv", "fmod", "min", "max")
ALONE = "alone"  # an attribute of products that are rounded whatever happens to them next
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
        known = _without_neutral(name, *args)
        if known is not None:
            return known
        return call(one_bit[name] if args[0].dtype is bool_ else name, *args)

    return rule


def _without_neutral(name: str, a: Scalar, b: Scalar) -> Scalar | None:
    """The result where an operand is a literal 0 or 1 that leaves nothing to compute."""
    known = [_literal(a), _literal(b)]
    if name == "mul":
        if 0 in known:
            return Const(a.dtype, 0)
        if 1 in known and a.dtype is not bool_:
            return b if known[0] == 1 else a
    elif known[1] == 0:
        return a
    elif name == "add" and known[0] == 0:
        return b
    return None


def _literal(value: Scalar) -> int | None:
    if isinstance(value, Const):
        return int(value.value)
    if isinstance(value, FromIndex) and isinstance(value.index, int):
        return value.index
    if isinstance(value, Call) and value.op == "sub":
        a, b = (_literal(x) for x in value.args)
        return a - b if a is not None and b is not None else None
    if isinstance(value, Call) and value.op == "cast" and value.args[0].dtype.is_integer:
        inner = _literal(value.args[0])
        return inner if inner in (0, 1) else None
    return None


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
    return cast(high_product(*(cast(a, UNSIGNED[a.dtype]) for a in args)), args[0].dtype)


def _select(op: Op, args: list[Scalar]) -> Scalar:
    return where(*args)


def _product(op: Op, args: list[Scalar]) -> Scalar:
    """Sums may take a product in, unless the kernel is compiled without such fusion."""
    return times(*args) if op.attrs.get(ALONE) else call("mul", *args)


def _fused(op: Op, args: list[Scalar]) -> Scalar:
    """a * b + c with a single rounding; halves are exact enough in f64 to be rounded from there."""
    if args[0].dtype.bits < 32:
        return narrowed(call("fma", *(cast(a, float64) for a in args)), args[0].dtype)
    return call("fma", *args)


def _assembly(op: Op, args: list[Scalar]) -> Scalar:
    """Inline assembly inside functions of elements; see `lower_asm` for all other places."""
    return assembly(op).apply([[a] for a in args], {})[0][0]


RULES: dict[str, Rule] = {
    "tt.extern_elementwise": external, ELEMENTWISE: _assembly,
    "arith.addi": _bits("add"), "arith.subi": _bits("sub"), "arith.muli": _bits("mul"),
    "arith.andi": _same("and"), "arith.ori": _same("or"), "arith.xori": _same("xor"),
    "arith.shli": _same("shl"), "arith.shrsi": _same("shr"), "arith.shrui": _unsigned("shr"),
    "arith.divsi": _divide_towards_zero, "arith.divui": _unsigned("floordiv"),
    "arith.ceildivsi": lambda op, a: call("neg", call("floordiv", call("neg", a[0]), a[1])),
    "arith.floordivsi": _same("floordiv"),
    "arith.remsi": _same("fmod"), "arith.remui": _unsigned("fmod"),
    "arith.minsi": _same("min"), "arith.maxsi": _same("max"),
    "arith.minui": _unsigned("min"), "arith.maxui": _unsigned("max"),
    "arith.addf": _same("add"), "arith.subf": _same("sub"), "arith.mulf": _product,
    "arith.divf": _same("div"), "arith.remf": _same("fmod"), "arith.negf": _same("neg"),
    "arith.maximumf": _same("max"), "arith.minimumf": _same("min"),
    "arith.maxnumf": _ignoring_nan("gt"), "arith.minnumf": _ignoring_nan("lt"),
    "arith.cmpi": _compare_integers, "arith.cmpf": _compare_floats, "arith.select": _select,
    "arith.extsi": _sign_extend, "arith.extui": _zero_extend, "arith.trunci": _truncate,
    "arith.index_cast": _cast, "arith.extf": _cast, "arith.truncf": convert_float,
    "arith.sitofp": _from_signed,
    "arith.uitofp": lambda op, a: cast(cast(a[0], UNSIGNED[a[0].dtype]), dtype_of(op.type.elem)),
    "arith.fptosi": _cast, "arith.fptoui": _to_unsigned,
    "arith.bitcast": _bitcast, "tt.bitcast": _bitcast,
    "math.absf": _same("abs"), "math.absi": _same("abs"),
    "math.fma": _fused,
    "tt.fp_to_fp": convert_float, "tt.clampf": _clamp, "tt.mulhiui": _high_product,
    "tt.precise_divf": _same("div"), "tt.precise_sqrt": _same("sqrt"),
    "tt.approx_divf": _same("div"),
    **{row.mlir: _same(row.name) for row in OPS.values() if isinstance(row.mlir, str)},
}
# What is worth a place in memory rather than a second evaluation.
EXPENSIVE = frozenset(
    {name for name in RULES if name.startswith(("math.", "tt.extern", "ptx."))}
    - {"math.absf", "math.absi", "math.fma", "math.floor", "math.ceil"}
    | {"arith.divf", "arith.divsi", "arith.remsi", "arith.divui", "arith.remui", "arith.remf",
       "tt.precise_divf", "tt.precise_sqrt", "tt.approx_divf", "tt.mulhiui"})


def constant(dtype: DType, value: Any) -> Scalar:
    """A literal as TTIR gives it: bits without a sign."""
    if dtype is bool_:
        return Const(dtype, bool(value))
    return Const(dtype, float(value) if dtype.is_float else int(value))
