"""Indices that are data, brought inside what they index."""

from __future__ import annotations

from terrazzo.base.scalar import Scalar, as_scalar, call, cast, where
from terrazzo.dtypes import int64
from terrazzo.index import Index


def in_range(index: Scalar, size: Index) -> Scalar:
    """An index brought into 0..size-1: counted from the end if negative, then clipped."""
    place = cast(index, int64)
    if index.dtype.is_signed:
        place = where(call("lt", place, 0), call("add", place, as_scalar(size)), place)
    return call("max", call("min", place, as_scalar(size - 1)), 0)
