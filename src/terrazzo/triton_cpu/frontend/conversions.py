"""Conversions between float types as Triton means them: rounding modes, saturation, fp8e4b15.

The code generator converts to nearest, as ml_dtypes does. Here is what differs on a GPU, in
operations on bits that vectorise: types of 8 bits saturate (also what was infinite), rounding may
go towards zero, and nothing is ever rounded twice.
"""

from __future__ import annotations

from typing import Any

from terrazzo.base.scalar import Call, Const, Scalar, call, cast, where
from terrazzo.dtypes import DType, float16, float32, float64, int8, int16, int32, int64
from terrazzo.errors import UnsupportedOperator
from terrazzo.triton_cpu.frontend.ttir import Op
from terrazzo.triton_cpu.frontend.values import dtype_of

BITS: dict[int, DType] = {8: int8, 16: int16, 32: int32, 64: int64}
TOWARDS_ZERO, NEAREST = "rtz", "rtne"
# Numbers of the attribute, where it is not spelled out.
_MODES = {0: TOWARDS_ZERO, 1: NEAREST}
_E4B15_LARGEST = 0x3F80  # 1.875 as a code of f16


def convert_float(op: Op, args: list[Scalar]) -> Scalar:
    """The rule of tt.fp_to_fp and arith.truncf."""
    given = op.attrs.get("rounding", NEAREST)
    mode = _MODES.get(given, given)
    for name in (TOWARDS_ZERO, NEAREST):
        if name in str(mode):
            return narrowed(args[0], dtype_of(op.type.elem), name)
    raise UnsupportedOperator(f"rounding {given!r} between floats is not there on the CPU",
                              hint="use fp_downcast_rounding='rtne' or 'rtz'")


def bits_of(value: Scalar) -> Scalar:
    """The code of a float, as an integer of its size."""
    return Call(BITS[value.dtype.bits], "bitcast", (value,))


def narrowed(value: Scalar, target: DType, mode: str = NEAREST) -> Scalar:
    """A float as another float type, rounded once if that has less room."""
    if value.dtype.bits <= target.bits and target.bits > 8:
        return cast(value, target)
    if value.dtype is float64 and target.bits < 32:
        value = to_odd(value, float32)
    value = cast(value, value.dtype.compute)
    if target.bits <= 8:
        value = call("min", call("max", value, Const(value.dtype, target.min)),
                     Const(value.dtype, target.max))
    nearest = cast(value, target)
    return nearest if mode == NEAREST else _towards_zero(value, nearest)


def _towards_zero(value: Scalar, nearest: Scalar) -> Scalar:
    """What was rounded away from zero steps back: codes are ordered as magnitudes are."""
    beyond = call("gt", call("abs", cast(nearest, value.dtype)), call("abs", value))
    code = bits_of(nearest)
    back = call("sub", code, Const(code.dtype, 1))
    if nearest.dtype.name.endswith("fnuz"):  # where -0 would be, these types have their nan
        back = where(call("eq", back, Const(code.dtype, -128)), Const(code.dtype, 0), back)
    return Call(nearest.dtype, "bitcast", (where(beyond, back, code),))


def to_odd(value: Scalar, target: DType) -> Scalar:
    """Towards zero, with the last bit set where anything was lost (rounding to odd).

    A type that has two bits less can be rounded to from here as if from the exact value.
    """
    nearest = cast(value, target)
    code = bits_of(_towards_zero(value, nearest))
    lost = cast(call("ne", cast(nearest, value.dtype), value), code.dtype)
    return Call(target, "bitcast", (call("or", code, lost),))


# ---------------------------------------------------------------- fp8e4b15, which TTIR holds as i8
def from_e4b15(code: Scalar) -> Scalar:
    """f16 has the same bias, so that a code of four exponent bits is its middle part."""
    wide = cast(code, int16)
    sign = call("shl", call("and", wide, Const(int16, 0x80)), Const(int16, 8))
    magnitude = call("shl", call("and", wide, Const(int16, 0x7F)), Const(int16, 7))
    return Call(float16, "bitcast", (call("or", sign, magnitude),))


def to_e4b15(value: Scalar, mode: str) -> Scalar:
    """There is neither infinity nor nan: what is too large becomes the largest, 1.875."""
    if value.dtype.bits < 32 and value.dtype is not float16:
        value = cast(value, float32)
    half = bits_of(value if value.dtype is float16 else to_odd(value, float16))
    magnitude = call("min", call("and", half, Const(int16, 0x7FFF)),
                     Const(int16, _E4B15_LARGEST))
    if mode == NEAREST:
        last = call("and", call("shr", magnitude, Const(int16, 7)), Const(int16, 1))
        magnitude = call("add", call("add", magnitude, Const(int16, 0x3F)), last)
    sign = call("and", call("shr", half, Const(int16, 8)), Const(int16, 0x80))
    return cast(call("or", call("shr", magnitude, Const(int16, 7)), sign), int8)


def convert_custom_types(value: Any, dst_type: Any, rounding: Any, _semantic: Any = None) -> Any:
    """What Triton's front end calls for every cast from or to fp8e4b15."""
    from triton.language import core

    def external(name: str, argument: Any, result: Any) -> Any:
        return core.extern_elementwise("", "", [argument], {(argument.dtype,): (name, result)},
                                       is_pure=True, _semantic=_semantic)

    if value.dtype.is_fp8e4b15():
        return _semantic.cast(external("tz_from_e4b15", value, core.float16), dst_type)
    if not value.dtype.is_floating():
        value = _semantic.cast(value, core.float32)
    mode = TOWARDS_ZERO if "RTZ" in str(rounding) else NEAREST
    return external(f"tz_to_e4b15_{mode}", value, core.float8e4b15)
