"""What cvt means: between integers, floats, and packed formats of 4 to 16 bits, in all modes."""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.base.scalar import Const, Scalar, call, cast, where
from terrazzo.dtypes import DType, bfloat16, float16, float32, float64, int32, int64, uint8, uint32
from terrazzo.triton_cpu.frontend.conversions import NEAREST, TOWARDS_ZERO, narrowed
from terrazzo.triton_cpu.frontend.externals_rounding import float_of, integer_of, next_down, next_up
from terrazzo.triton_cpu.frontend.ptx.arithmetic import Form, flushed, relu, saturated
from terrazzo.triton_cpu.frontend.ptx.types import Kind, as_type, join, split

_TO_INTEGRAL = {"rni": "rn", "rzi": "rz", "rmi": "rd", "rpi": "ru"}
_INTEGRAL = {"rn": "round", "rz": "trunc", "rd": "floor", "ru": "ceil"}


def converted(form: Form, operands: list[Scalar]) -> Scalar:
    """The result of cvt; operands are registers, of vectors their items, as they are."""
    if len(form.kinds) != 2:
        raise form.instruction.refused()
    target, source = form.kinds
    if "rs" in form.modifiers:
        return _stochastic(form, target, operands)
    lanes = [lane for value in reversed(operands) for lane in split(value, source)]
    if len(lanes) != target.lanes:
        raise form.instruction.refused()
    return join([_converted(form, lane, source, target) for lane in lanes], target)


def _converted(form: Form, value: Scalar, source: Kind, target: Kind) -> Scalar:
    if source.small:
        value = _decoded(value, source.small)
    if "ftz" in form.modifiers:
        value = flushed(value)
    if target.small:
        return _encoded(form, relu(value) if "relu" in form.modifiers else value, target)
    if value.dtype.is_float:
        result = _from_float(form, value, target)
    elif target.dtype.is_float:
        result = _from_integer(form, value, target.dtype)
    else:
        result = _between_integers(form, value, target.dtype)
    if target.dtype.is_float:
        if "ftz" in form.modifiers:
            result = flushed(result)
        if "sat" in form.modifiers:
            result = saturated(result)
        if "relu" in form.modifiers:
            result = relu(result)
    return result


def _between_integers(form: Form, value: Scalar, target: DType) -> Scalar:
    if "sat" in form.modifiers:
        wide = cast(value, int64)
        wide = call("min", wide, Const(int64, min(target.max, (1 << 63) - 1)))
        value = call("max", wide, Const(int64, target.min))
    return cast(value, target)


def _from_integer(form: Form, value: Scalar, target: DType) -> Scalar:
    mode = form.rounding() or "rn"
    if target.bits >= 32:
        return float_of(target, mode)(value)
    if mode not in ("rn", "rz"):
        raise form.instruction.refused()
    return narrowed(cast(value, float64), target, TOWARDS_ZERO if mode == "rz" else NEAREST)


def _from_float(form: Form, value: Scalar, target: Kind) -> Scalar:
    integral = next((m for s, m in _TO_INTEGRAL.items() if s in form.modifiers), "")
    dtype = target.dtype
    if not dtype.is_float:
        return _to_integer(value, dtype, integral or "rz")
    if integral:
        value = call(_INTEGRAL[integral], value)
    if "tf32" in form.instruction.suffixes:
        return _tf32(form, value)
    if dtype.bits >= value.dtype.bits:
        return cast(value, dtype)
    if dtype is float32:
        return float_of(float32, form.rounding() or "rn")(value)
    return _to_small_float(form, value, dtype)


def _to_integer(value: Scalar, target: DType, mode: str) -> Scalar:
    """Saturated; nan is 0."""
    wide = cast(value, value.dtype.compute)
    if target.bits >= 32:
        result = integer_of(target, mode)(wide)
    else:
        whole = call("min", call("max", call(_INTEGRAL[mode], wide), Const(wide.dtype, target.min)),
                     Const(wide.dtype, target.max))
        result = cast(cast(whole, int32), target)
    return where(call("isnan", wide), Const(target, 0), result)


def _to_small_float(form: Form, value: Scalar, target: DType) -> Scalar:
    """To 16 or 8 bits; formats of 8 bits always saturate, nan is their one nan."""
    mode = form.rounding() or "rn"
    if mode in ("rd", "ru"):
        return _directed(value, target, mode)
    result = narrowed(value, target, TOWARDS_ZERO if mode == "rz" else NEAREST)
    if target.bits == 8:
        return where(call("isnan", value), as_type(Const(uint8, 0x7F), target), result)
    if "satfinite" in form.modifiers:
        beyond = call("and", call("isinf", result), call("not", call("isnan", value)))
        largest = cast(call("copysign", Const(float32, target.max), cast(value, float32)), target)
        result = where(beyond, largest, result)
    return result


def _directed(value: Scalar, target: DType, mode: str) -> Scalar:
    """Up or down: the nearest one, or its neighbour where that lies on the wrong side."""
    nearest = narrowed(value, target)
    wide = cast(nearest, value.dtype)
    wrong = call("gt" if mode == "rd" else "lt", wide, value)
    return where(wrong, next_down(nearest) if mode == "rd" else next_up(nearest), nearest)


def _tf32(form: Form, value: Scalar) -> Scalar:
    """float32 with ten bits of fraction; `.rna` rounds halves away from zero."""
    code = as_type(value, uint32)
    last = Const(uint32, 1 << 13)
    if "rna" in form.modifiers:
        code = call("add", code, Const(uint32, 1 << 12))
    elif form.rounding() == "rn":
        odd = call("and", call("shr", code, Const(uint32, 13)), Const(uint32, 1))
        code = call("add", code, call("add", Const(uint32, (1 << 12) - 1), odd))
    elif form.rounding() != "rz":
        raise form.instruction.refused()
    cut = as_type(call("and", code, call("not", call("sub", last, Const(uint32, 1)))), float32)
    return where(call("isfinite", value), cut, value)


# ---------------------------------------------------------------- formats below 8 bits
@dataclass(frozen=True)
class Small:
    """A format of a few bits without infinity: fraction bits, least exponent, largest number."""

    fraction: int
    least: int  # the exponent of the smallest normal number
    largest: float
    bits: int


SMALL = {"e2m1": Small(1, 0, 6.0, 4), "e2m3": Small(3, 0, 7.5, 6), "e3m2": Small(2, -2, 28.0, 6)}


def _encoded(form: Form, value: Scalar, target: Kind) -> Scalar:
    """The code of a float in a small format; nan becomes the largest number."""
    if target.small == "ue8m0":
        return _exponent(form, value)
    if form.rounding() != "rn" or "satfinite" not in form.modifiers:
        raise form.instruction.refused()
    return _code(call("round", _quanta(value, SMALL[target.small])[0]), value, target.small)


def _quanta(value: Scalar, form: Small) -> tuple[Scalar, Scalar]:
    """How many steps of its neighbourhood a magnitude has, and the step (a power of two)."""
    x = cast(value, float32)
    x = call("min", call("abs", x), Const(float32, form.largest))
    x = where(call("isnan", value), Const(float32, form.largest), x)
    code = call("and", as_type(x, uint32), Const(uint32, 0x7F800000))
    lowest = Const(uint32, (form.least + 127) << 23)
    power = call("max", code, lowest)
    step = as_type(call("sub", power, Const(uint32, form.fraction << 23)), float32)
    return call("div", x, step), step


def _code(steps: Scalar, value: Scalar, small: str) -> Scalar:
    """The code of so many steps: those of the exponent before it, and what is beyond."""
    form = SMALL[small]
    _, step = _quanta(value, form)
    exponent = call("sub", call("shr", as_type(step, uint32), Const(uint32, 23)),
                    Const(uint32, form.least + 127 - form.fraction))
    count = cast(cast(steps, int32), uint32)
    magnitude = call("add", call("shl", exponent, Const(uint32, form.fraction)), count)
    most = Const(uint32, (1 << (form.bits - 1)) - 1)
    negative = call("and", call("not", call("isnan", value)), call(
        "lt", as_type(cast(value, float32), int32), Const(int32, 0)))
    sign = where(negative, Const(uint32, 1 << (form.bits - 1)), Const(uint32, 0))
    return cast(call("or", call("min", magnitude, most), sign), uint8)


def _exponent(form: Form, value: Scalar) -> Scalar:
    """ue8m0: an exponent alone, rounded down or up; nan is 255."""
    code = as_type(cast(value, float32), uint32)
    code = call("and", code, Const(uint32, 0x7FFFFFFF))
    up = "rp" in form.modifiers
    if not up and "rz" not in form.modifiers:
        raise form.instruction.refused()
    if up:  # below the normal numbers lies 2**-127 alone
        least = call("le", code, Const(uint32, 0x400000))
        code = where(least, Const(uint32, 0), call("add", code, Const(uint32, 0x7FFFFF)))
    exponent = call("min", call("shr", code, Const(uint32, 23)), Const(uint32, 254))
    return where(call("isnan", value), Const(uint8, 255), cast(exponent, uint8))


def _decoded(code: Scalar, small: str) -> Scalar:
    """The number of a code in a small format."""
    wide = cast(code, uint32)
    if small == "ue8m0":
        normal = as_type(call("shl", wide, Const(uint32, 23)), float32)
        tiny = where(call("eq", wide, Const(uint32, 0)), Const(float32, 2.0**-127), normal)
        return where(call("eq", wide, Const(uint32, 255)), Const(float32, float("nan")), tiny)
    form = SMALL[small]
    magnitude = call("and", wide, Const(uint32, (1 << (form.bits - 1)) - 1))
    exponent = call("shr", magnitude, Const(uint32, form.fraction))
    fraction = call("and", magnitude, Const(uint32, (1 << form.fraction) - 1))
    moved = call("or", call("shl", call("add", exponent, Const(uint32, form.least + 126)),
                            Const(uint32, 23)),
                 call("shl", fraction, Const(uint32, 23 - form.fraction)))
    tiny = call("mul", cast(fraction, float32), Const(float32, 2.0**(form.least - form.fraction)))
    value = where(call("eq", exponent, Const(uint32, 0)), tiny, as_type(moved, float32))
    sign = call("ne", call("and", wide, Const(uint32, 1 << (form.bits - 1))), Const(uint32, 0))
    return where(sign, call("neg", value), value)


# ---------------------------------------------------------------- stochastic rounding
def _stochastic(form: Form, target: Kind, operands: list[Scalar]) -> Scalar:
    """`.rs`: up or down by chance, each as likely as the other neighbour is near.

    Which of the random bits belong to which lane is not the choice of any one GPU: lanes share
    the bits of the operand evenly.
    """
    *values, random = operands
    if len(values) != target.lanes:
        raise form.instruction.refused()
    bits = 32 // target.lanes
    chances = split(as_type(random, uint32), Kind(uint32, target.lanes, bits)) if (
        bits >= 8) else []
    results = []
    for value, chance in zip(reversed(values), chances, strict=True):
        if "relu" in form.modifiers:
            value = relu(value)
        value, chance = as_type(value, float32), cast(chance, uint32)
        results.append(_by_chance(form, value, target, chance, bits))
    return join(results, target)


def _by_chance(form: Form, value: Scalar, target: Kind, chance: Scalar, bits: int) -> Scalar:
    part = call("mul", cast(cast(chance, int32), float32), Const(float32, 2.0**-bits))
    if target.small:
        steps, _ = _quanta(value, SMALL[target.small])
        return _code(call("floor", call("add", steps, part)), value, target.small)
    dtype = target.dtype
    down = narrowed(value, dtype, TOWARDS_ZERO)
    if dtype in (float16, bfloat16):
        up = where(call("lt", value, Const(float32, 0.0)), next_down(down), next_up(down))
    else:  # codes of magnitudes are in order, and the largest is not passed
        code = as_type(down, uint8)
        top = call("ge", call("abs", cast(down, float32)), Const(float32, dtype.max))
        up = as_type(where(top, code, call("add", code, Const(uint8, 1))), dtype)
    near, far = (call("abs", cast(x, float32)) for x in (down, up))
    exact = call("abs", value)
    goes = call("lt", call("mul", part, call("sub", far, near)), call("sub", exact, near))
    result = where(goes, up, down)
    if dtype.bits == 8:
        return where(call("isnan", value), as_type(Const(uint8, 0x7F), dtype), result)
    if "satfinite" in form.modifiers:
        result = where(call("and", call("isinf", result), call("isfinite", value)), down, result)
    return where(call("isfinite", value), result, cast(value, dtype))
