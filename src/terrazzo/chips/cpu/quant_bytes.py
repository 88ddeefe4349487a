"""Bytes in expressions: factors that are widened bytes, and floats that need not become bytes."""

from __future__ import annotations

from typing import TypeGuard

from terrazzo.base.scalar import Call, Const, Scalar, call, rewrite
from terrazzo.dtypes import DType, float32, int8, int32, uint8
from terrazzo.expr.matmul import Factor

_SMALL = (uint8, int8)
# A float32 of this size counts in ones: adding it rounds to an integer, ties to even.
_ROUNDING = 1.5 * 2**23


def small_value(factor: Factor) -> Scalar | None:
    """A factor without its widening to the type of the sums; None unless it is a byte."""
    node = factor.value
    while isinstance(node, Call) and node.op == "cast" and node.dtype not in _SMALL:
        node = node.args[0]
    return node if node.dtype in _SMALL else None


def without_bytes(body: Scalar) -> Scalar:
    """An expression in which floats that become bytes and floats again stay floats.

    `f32(i32(u8(bits(x + big) + zero)) - zero)`, where adding the big number rounds x, which is
    clamped to the range of the bytes, is `x + big - big`.
    """
    def visit(node: Scalar) -> Scalar | None:
        # From the outside in: to float, minus the zero point, widened, a byte, plus it, bits.
        if not _is_cast(node, float32):
            return None
        wide, taken = _offset(node.args[0], "sub")
        if not _is_cast(wide, int32) or not _is_cast(wide.args[0], *_SMALL):
            return None
        byte = wide.args[0]
        bits, given = _offset(byte.args[0], "add")
        if taken is None or taken != given or not _is_call(bits, "bitcast"):
            return None
        rounded = bits.args[0]
        if not _is_call(rounded, "add") or _number(rounded.args[1]) != _ROUNDING or not (
                _is_call(rounded.args[0], "min") and _is_call(rounded.args[0].args[0], "max")):
            return None
        low, high = _number(rounded.args[0].args[0].args[1]), _number(rounded.args[0].args[1])
        if low is None or high is None or low < byte.dtype.min - given or (
                high > byte.dtype.max - given):
            return None
        return call("sub", rounded, rounded.args[1])

    return rewrite(body, visit)


def _is_call(node: Scalar, op: str) -> TypeGuard[Call]:
    return isinstance(node, Call) and node.op == op


def _is_cast(node: Scalar, *dtypes: DType) -> TypeGuard[Call]:
    return isinstance(node, Call) and node.op == "cast" and node.dtype in dtypes


def _number(node: Scalar) -> float | None:
    return float(node.value) if isinstance(node, Const) else None


def _offset(node: Scalar, op: str) -> tuple[Scalar, int | None]:
    """A value without the constant that is added or subtracted, and that constant."""
    if not (isinstance(node, Call) and node.op == op):
        return node, 0
    number = node.args[1]
    while isinstance(number, Call) and number.op == "cast":
        number = number.args[0]
    return node.args[0], int(number.value) if isinstance(number, Const) else None
