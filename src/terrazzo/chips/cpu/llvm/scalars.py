"""LLVM code of the scalar operations, by the names of the table, for any lanes and bundle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from terrazzo.base.scalar_table import REDUCTIONS
from terrazzo.chips.cpu.llvm import vmath
from terrazzo.chips.cpu.llvm.builder import Builder, Val, vec
from terrazzo.chips.cpu.llvm.convert import from_f32, to_f32
from terrazzo.dtypes import DType, float32, int8, uint8
from terrazzo.errors import UnsupportedDType

_FLOATS = {"float64": "double", "float32": "float", "float16": "half", "bfloat16": "bfloat"}
_FP8 = {"float8_e4m3fn": "e4m3fn", "float8_e5m2": "e5m2", "float8_e4m3fnuz": "e4m3fnuz",
        "float8_e5m2fnuz": "e5m2fnuz", "float4_e2m1fn": "e2m1fn"}


def register_type(dtype: DType) -> str:
    """The LLVM type of a value in a register; fp8 values are kept as their bits."""
    if dtype.is_bool:
        return "i1"
    if dtype.is_complex:
        raise UnsupportedDType(f"there is no code for {dtype.name} on this chip",
                               hint="split real and imaginary parts")
    return _FLOATS.get(dtype.name) or f"i{max(dtype.bits, 8)}"


def memory_type(dtype: DType) -> str:
    """The LLVM type of an element in memory."""
    return "i8" if dtype.is_bool else register_type(dtype)


def to_memory(b: Builder, value: Val, dtype: DType) -> Val:
    """A register value as it is stored."""
    return b.cast("zext", value, "i8") if dtype.is_bool else value


def from_memory(b: Builder, value: Val, dtype: DType) -> Val:
    """A stored value as it is computed with."""
    return b.icmp("ne", value, 0) if dtype.is_bool else value


def constant(dtype: DType, value: object, lanes: int = 1) -> Val:
    """A literal of a type."""
    import numpy as np

    from terrazzo.chips.cpu.llvm.builder import const

    ty = vec(register_type(dtype), lanes)
    if dtype.name in _FP8:
        return const(ty, int(np.asarray(value, dtype.np).reshape(1).view(np.uint8)[0]))
    if dtype.is_float:
        return const(ty, float(value))  # type: ignore[arg-type]
    return const(ty, bool(value) if dtype.is_bool else int(value))  # type: ignore[call-overload]


# ---------------------------------------------------------------- conversions
def cast(b: Builder, value: Val, source: DType, target: DType) -> Val:
    """Convert between any two types, by way of float32 for the narrow floats."""
    if source is target:
        return value
    if source.is_integer and source.bits < 8:  # a host byte holds the bits alone, without a sign
        spare = 8 - source.bits
        high = b.shl(value, spare)
        value = b.ashr(high, spare) if source.is_signed else b.lshr(high, spare)
    if target.is_integer and target.bits < 8:
        byte = int8 if target.is_signed else uint8
        return b.and_(cast(b, value, source, byte), (1 << target.bits) - 1)
    if source.is_float and source.bits < 32:
        wide = to_f32(b, value, _FP8.get(source.name, ""))
        return cast(b, wide, float32, target)
    if target.is_float and target.bits < 32:
        if source is not float32:
            value = cast(b, value, source, float32)
        return from_f32(b, value, _FP8.get(target.name) or _FLOATS[target.name])
    elem = register_type(target)
    if target.is_bool:
        if source.is_float:
            return b.fcmp("une", value, b.const(value.ty, 0.0))
        return b.icmp("ne", value, 0)
    if source.is_float:
        if target.is_float:
            return b.cast("fpext" if target.bits > source.bits else "fptrunc", value, elem)
        return _float_to_int(b, value, target)
    if target.is_float:
        return b.cast("sitofp" if source.is_signed else "uitofp", value, elem)
    if not source.is_bool and max(target.bits, 8) == max(source.bits, 8):
        return value
    if target.bits < source.bits:
        return b.cast("trunc", value, elem)
    return b.cast("sext" if source.is_signed else "zext", value, elem)


def _float_to_int(b: Builder, value: Val, target: DType) -> Val:
    """Truncate; what does not fit is cut from a wider integer, as C compilers and numpy do."""
    if target.bits == 64 and not target.is_signed:
        return _saturate(b, value, 64, signed=False)
    wide = _saturate(b, value, 64 if target.bits == 64 or (
        target.bits == 32 and not target.is_signed) else 32)
    elem = register_type(target)
    return wide if wide.elem == elem else b.cast("trunc", wide, elem)


def _saturate(b: Builder, value: Val, bits: int, signed: bool = True) -> Val:
    """LLVM's fptosi.sat, which it would do lane by lane: nan is 0, what is too large the limit."""
    zero = b.const(value.ty, 0.0)
    limit = 2.0 ** (bits - signed)
    if signed:
        inside = b.and_(b.fcmp("oge", value, -limit), b.fcmp("olt", value, limit))
    else:
        inside = b.and_(b.fcmp("ogt", value, zero), b.fcmp("olt", value, limit))
    safe = b.cast("fptosi" if signed else "fptoui", b.select(inside, value, zero), f"i{bits}")
    if signed:
        lowest = b.const(safe.ty, -(1 << (bits - 1)))
        safe = b.select(b.fcmp("olt", value, -limit), lowest, safe)
    highest = b.const(safe.ty, (1 << (bits - 1)) - 1 if signed else -1)
    return b.select(b.fcmp("oge", value, limit), highest, safe)


# ---------------------------------------------------------------- operations
def emit(b: Builder, op: str, args: Sequence[Val], dtype: DType) -> Val:
    """One operation on values of `dtype` (the type of its arguments)."""
    if dtype.is_bool:
        table = _BOOL
    elif dtype.is_float:
        table = _FLOAT
    else:
        table = _SIGNED if dtype.is_signed else _UNSIGNED
    rule = table.get(op)
    if rule is not None:
        return rule(b, *args)
    if dtype.is_float:
        return vmath.emit(b, op, args)
    raise UnsupportedDType(f"{op} has no meaning for {dtype.name}",
                           hint="cast to a float type first")


# Of these, the first operand is a number; where the second is nan, it stays the first. That is
# one instruction on x86.
_OF_NUMBERS = {"max of numbers": "ogt", "min of numbers": "olt"}


def combine(b: Builder, op: str, x: Val, y: Val, dtype: DType) -> Val:
    """One step of a reduction; half types are combined in float32."""
    wide = dtype.compute
    if op in _OF_NUMBERS:
        assert dtype is wide
        return b.select(b.fcmp(_OF_NUMBERS[op], y, x), y, x)
    values = (cast(b, x, dtype, wide), cast(b, y, dtype, wide))
    return cast(b, emit(b, REDUCTIONS[op].op, values, wide), wide, dtype)


def fold(b: Builder, op: str, value: Val, dtype: DType) -> Val:
    """The parts of a bundle combined to one vector."""
    return b.fold(lambda x, y: combine(b, op, x, y, dtype), value)


def horizontal(b: Builder, op: str, value: Val, dtype: DType) -> Val:
    """All parts and lanes of a bundle combined to one scalar, as a balanced tree."""
    value = fold(b, op, value, dtype)
    lanes = value.lanes
    while lanes > 1:
        half = lanes // 2
        low = b.shuffle(value, None, list(range(half)))
        high = b.shuffle(value, None, list(range(half, lanes)))
        if half == 1:
            low, high = b.extract(value, 0), b.extract(value, 1)
        value = combine(b, op, low, high, dtype)
        lanes = half
    return value


def atomic_name(kind: str, dtype: DType) -> str:
    """LLVM's name of an atomic operation on a type."""
    if kind == "exchange":
        return "xchg"
    if dtype.is_float:
        return f"f{kind}"
    return f"u{kind}" if kind in ("max", "min") and not dtype.is_signed else kind


def _maximum(better: str) -> Callable[[Builder, Val, Val], Val]:
    """numpy's maximum and minimum: nan wins. x86's max returns its second operand for nan."""

    def rule(b: Builder, x: Val, y: Val) -> Val:
        if _is_number(x):
            return b.select(b.fcmp(better, x, y), x, y)
        if _is_number(y):
            return b.select(b.fcmp(better, y, x), y, x)
        best = b.select(b.fcmp(better, x, y), x, y)
        return b.select(b.fcmp("uno", x, x), x, best)

    return rule


def _is_number(value: Val) -> bool:
    text = value.parts[0]
    return value.count == 1 and text.startswith(("0x", "splat", "zeroinit")) and "7FF8" not in text


def _sign(b: Builder, x: Val) -> Val:
    zero = b.const(x.ty, 0.0)
    below = b.select(b.fcmp("olt", x, zero), b.const(x.ty, -1.0),
                     b.select(b.fcmp("oeq", x, zero), zero, x))
    return b.select(b.fcmp("ogt", x, zero), b.const(x.ty, 1.0), below)


def _float_mod(b: Builder, x: Val, y: Val) -> Val:
    zero = b.const(x.ty, 0.0)
    rest = b.frem(x, y)
    differ = b.xor(b.fcmp("olt", y, zero), b.fcmp("olt", rest, zero))
    moved = b.select(differ, b.fadd(rest, y), rest)
    return b.select(b.fcmp("oeq", rest, zero), b.copysign(zero, y), moved)


def _float_floordiv(b: Builder, x: Val, y: Val) -> Val:
    zero, one = b.const(x.ty, 0.0), b.const(x.ty, 1.0)
    rest = b.frem(x, y)
    quotient = b.fdiv(b.fsub(x, rest), y)
    nonzero = b.fcmp("une", rest, zero)
    differ = b.xor(b.fcmp("olt", y, zero), b.fcmp("olt", rest, zero))
    quotient = b.select(b.and_(nonzero, differ), b.fsub(quotient, one), quotient)
    down = b.intrinsic("llvm.floor", [quotient], x.ty)
    close = b.fcmp("ogt", b.fsub(quotient, down), b.const(x.ty, 0.5))
    down = b.select(close, b.fadd(down, one), down)
    true = b.fdiv(x, y)
    down = b.select(b.fcmp("oeq", quotient, zero), b.copysign(zero, true), down)
    return b.select(b.fcmp("oeq", y, zero), true, down)


def _safe_divisor(b: Builder, x: Val, y: Val, signed: bool) -> tuple[Val, Val, Val | None]:
    """A divisor that cannot trap, whether y was zero, and where x / -1 would overflow."""
    one = b.const(y.ty, 1)
    zero = b.icmp("eq", y, 0)
    safe = b.select(zero, one, y)
    if not signed:
        return safe, zero, None
    minus = b.icmp("eq", y, -1)
    return b.select(minus, one, safe), zero, minus


def _int_floordiv(signed: bool) -> Callable[[Builder, Val, Val], Val]:
    def rule(b: Builder, x: Val, y: Val) -> Val:
        safe, zero, minus = _safe_divisor(b, x, y, signed)
        nothing = b.const(x.ty, 0)
        if minus is None:
            return b.select(zero, nothing, b.udiv(x, safe))
        quotient = b.sdiv(x, safe)
        rest = b.sub(x, b.mul(quotient, safe))
        differ = b.icmp("slt", b.xor(rest, safe), 0)
        down = b.select(b.and_(b.icmp("ne", rest, 0), differ), b.sub(quotient, 1), quotient)
        down = b.select(minus, b.sub(nothing, x), down)
        return b.select(zero, nothing, down)

    return rule


def _int_mod(signed: bool, floor: bool) -> Callable[[Builder, Val, Val], Val]:
    def rule(b: Builder, x: Val, y: Val) -> Val:
        safe, zero, minus = _safe_divisor(b, x, y, signed)
        nothing = b.const(x.ty, 0)
        if minus is None:
            return b.select(zero, nothing, b.urem(x, safe))
        rest = b.srem(x, safe)
        if floor:
            differ = b.and_(b.icmp("ne", rest, 0), b.icmp("slt", b.xor(rest, safe), 0))
            rest = b.select(differ, b.add(rest, safe), rest)
        return b.select(b.or_(zero, minus), nothing, rest)

    return rule


def _int_pow(signed: bool) -> Callable[[Builder, Val, Val], Val]:
    def rule(b: Builder, x: Val, y: Val) -> Val:
        """Square and multiply over all bits of the exponent."""
        bits = int(x.elem[1:])
        one, zero = b.const(x.ty, 1), b.const(x.ty, 0)

        def body(_: Val, state: list[Val]) -> list[Val]:
            base, exponent, result = state
            odd = b.icmp("ne", b.and_(exponent, 1), 0)
            result = b.select(odd, b.mul(result, base), result)
            return [b.mul(base, base), b.lshr(exponent, 1), result]

        spread = max(x.count, y.count)
        start = [v if v.count == spread else Val(v.ty, v.parts * spread)
                 for v in (x, y, one)]
        result = b.loop(0, bits, 1, body, start)[2]
        if not signed:
            return result
        # A negative power of an integer is 0, but for 1 and -1.
        odd = b.icmp("ne", b.and_(y, 1), 0)
        unit = b.select(b.icmp("eq", x, 1), one, b.select(
            b.icmp("eq", x, -1), b.select(odd, b.const(x.ty, -1), one), zero))
        return b.select(b.icmp("slt", y, 0), unit, result)

    return rule


def _shift(op: str, over: str) -> Callable[[Builder, Val, Val], Val]:
    def rule(b: Builder, x: Val, y: Val) -> Val:
        bits = int(x.elem[1:])
        inside = b.icmp("ult", y, bits)
        shifted = getattr(b, op)(x, b.select(inside, y, b.const(y.ty, 0)))
        beyond = b.ashr(x, bits - 1) if over == "sign" else b.const(x.ty, 0)
        return b.select(inside, shifted, beyond)

    return rule


def _compare(signed: bool) -> dict[str, Callable[..., Val]]:
    letter = "s" if signed else "u"
    names = {"eq": "eq", "ne": "ne", "lt": letter + "lt", "le": letter + "le",
             "gt": letter + "gt", "ge": letter + "ge"}
    return {op: (lambda b, x, y, p=p: b.icmp(p, x, y)) for op, p in names.items()}


def _float_compare() -> dict[str, Callable[..., Val]]:
    names = {"eq": "oeq", "ne": "une", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge"}
    return {op: (lambda b, x, y, p=p: b.fcmp(p, x, y)) for op, p in names.items()}


def _bits() -> dict[str, Callable[..., Val]]:
    return {
        "and": lambda b, x, y: b.and_(x, y),
        "or": lambda b, x, y: b.or_(x, y),
        "xor": lambda b, x, y: b.xor(x, y),
        "not": lambda b, x: b.xor(x, b.const(x.ty, -1 if x.elem != "i1" else True)),
    }


def _int_common() -> dict[str, Callable[..., Val]]:
    return {
        **_bits(),
        "add": lambda b, x, y: b.add(x, y),
        "sub": lambda b, x, y: b.sub(x, y),
        "mul": lambda b, x, y: b.mul(x, y),
        "neg": lambda b, x: b.sub(b.const(x.ty, 0), x),
        "shl": _shift("shl", "zero"),
        "isnan": lambda b, x: b.const(vec("i1", x.lanes), False),
        "isinf": lambda b, x: b.const(vec("i1", x.lanes), False),
        "isfinite": lambda b, x: b.const(vec("i1", x.lanes), True),
        "floor": lambda b, x: x, "ceil": lambda b, x: x,
        "trunc": lambda b, x: x, "round": lambda b, x: x,
    }


_SIGNED: dict[str, Callable[..., Val]] = {
    **_int_common(), **_compare(True),
    "floordiv": _int_floordiv(True), "mod": _int_mod(True, True), "fmod": _int_mod(True, False),
    "min": lambda b, x, y: b.smin(x, y), "max": lambda b, x, y: b.smax(x, y),
    "abs": lambda b, x: b.smax(x, b.sub(b.const(x.ty, 0), x)),
    "sign": lambda b, x: b.smax(b.smin(x, b.const(x.ty, 1)), b.const(x.ty, -1)),
    "shr": _shift("ashr", "sign"), "pow": _int_pow(True),
}
_UNSIGNED: dict[str, Callable[..., Val]] = {
    **_int_common(), **_compare(False),
    "floordiv": _int_floordiv(False), "mod": _int_mod(False, True),
    "fmod": _int_mod(False, False),
    "min": lambda b, x, y: b.select(b.icmp("ult", x, y), x, y),
    "max": lambda b, x, y: b.select(b.icmp("ugt", x, y), x, y),
    "abs": lambda b, x: x,
    "sign": lambda b, x: b.select(b.icmp("ne", x, 0), b.const(x.ty, 1), b.const(x.ty, 0)),
    "shr": _shift("lshr", "zero"), "pow": _int_pow(False),
}
_BOOL: dict[str, Callable[..., Val]] = {
    **_bits(), **_compare(False),
    "add": lambda b, x, y: b.or_(x, y), "mul": lambda b, x, y: b.and_(x, y),
    "max": lambda b, x, y: b.or_(x, y), "min": lambda b, x, y: b.and_(x, y),
    "abs": lambda b, x: x,
    "isnan": lambda b, x: b.const(x.ty, False), "isinf": lambda b, x: b.const(x.ty, False),
    "isfinite": lambda b, x: b.const(x.ty, True),
}
# A product and a sum may become one fused multiply-add: it is more accurate, and compilers for
# every chip do the same.
_CONTRACT = "contract"
_FLOAT: dict[str, Callable[..., Val]] = {
    **_float_compare(),
    "add": lambda b, x, y: b.fadd(x, y, _CONTRACT),
    "sub": lambda b, x, y: b.fsub(x, y, _CONTRACT),
    "mul": lambda b, x, y: b.fmul(x, y, _CONTRACT),
    "div": lambda b, x, y: b.fdiv(x, y),
    "fma": lambda b, x, y, z: b.fma(x, y, z),
    "floordiv": _float_floordiv, "mod": _float_mod,
    "fmod": lambda b, x, y: b.frem(x, y),
    "min": _maximum("olt"), "max": _maximum("ogt"),
    "neg": lambda b, x: b.fneg(x),
    "abs": lambda b, x: b.fabs(x),
    "sign": _sign,
    "copysign": lambda b, x, y: b.copysign(x, y),
    "isnan": lambda b, x: b.fcmp("uno", x, x),
    "isinf": lambda b, x: b.fcmp("oeq", b.fabs(x), b.const(x.ty, float("inf"))),
    "isfinite": lambda b, x: b.fcmp("olt", b.fabs(x), b.const(x.ty, float("inf"))),
}
