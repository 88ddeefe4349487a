"""Integers that order as numbers do, by which values of every type are compared."""

from __future__ import annotations

from terrazzo.base.scalar import Call, Const, Scalar, call, cast, where
from terrazzo.dtypes import DType, float32, int32, int64, uint64


def key_type(dtype: DType) -> DType:
    """The integer type of the keys of a type."""
    wide = dtype.bits == 64 or (dtype.bits == 32 and dtype.kind == "u")
    return int64 if wide else int32


def sort_key(value: Scalar, descending: bool) -> Scalar:
    """An integer that orders as the value does; nan is the largest, -0.0 equals 0.0."""
    kind = key_type(value.dtype)
    if value.dtype.is_float:
        wide = value if kind is int64 else cast(value, float32)
        bits: Scalar = Call(kind, "bitcast", (wide,))
        top, infinity = (2**63, 0x7FF << 52) if kind is int64 else (2**31, 0xFF << 23)
        size = call("and", bits, top - 1)
        # Sign and magnitude become two's complement; both zeros get key 0.
        key = where(call("lt", bits, 0), call("neg", size), size)
        key = where(call("gt", size, infinity), Const(kind, top - 1), key)
    elif value.dtype is uint64:
        key = Call(kind, "bitcast", (call("xor", value, 2**63),))
    else:
        key = cast(value, kind)
    return call("not", key) if descending else key
