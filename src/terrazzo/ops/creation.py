"""Operators that make tensors from nothing: constants, sizes, ranges."""

from __future__ import annotations

from typing import Any

import numpy as np

from terrazzo.base.scalar import Const, FromIndex
from terrazzo.base.scalar import cast as cast_scalar
from terrazzo.dtypes import as_dtype, default_float, default_int, int64
from terrazzo.errors import ArgumentError
from terrazzo.expr.ir import Tensor, compute
from terrazzo.graph.ir import TensorType
from terrazzo.index import Index
from terrazzo.ops.define import operator, primitive


def _constant_type(*, value: np.ndarray) -> TensorType:
    return TensorType(value.shape, as_dtype(value.dtype))


def _constant_numpy(*, value: np.ndarray, out: TensorType) -> np.ndarray:
    return value.astype(out.dtype.np)


@primitive(family="creation", infer=_constant_type, reference=_constant_numpy)
def constant(*, value: np.ndarray, out: TensorType) -> Tensor:
    """a literal array; scalars are folded into the code, larger ones are bound as inputs"""
    assert value.size == 1, "larger constants are inputs of the executable"
    return compute(out.shape, lambda *i: Const(out.dtype, value.reshape(()).item()
                                               if value.dtype.kind in "biufc"
                                               else float(value.reshape(()))),
                   origin="constant")


def _dimension_numpy(*, size: Index, out: TensorType) -> np.ndarray:
    return np.asarray(size, np.int64)


@primitive(family="creation", infer=lambda *, size: TensorType((), int64),
           reference=_dimension_numpy)
def dimension(*, size: Index, out: TensorType) -> Tensor:
    """a (symbolic) size as a value"""
    return compute((), lambda: FromIndex(int64, size), origin="dimension")


def _full_type(*, shape: Any, value: Any, dtype: Any = None) -> TensorType:
    shape = (shape,) if not isinstance(shape, (tuple, list)) else tuple(shape)
    kind = as_dtype(dtype) if dtype is not None else (
        as_dtype(bool) if isinstance(value, bool) else
        default_int if isinstance(value, int) else default_float)
    return TensorType(shape, kind)


def _full_numpy(*, shape: Any, value: Any, dtype: Any = None, out: TensorType) -> np.ndarray:
    sizes: Any = out.shape
    return np.full(sizes, value).astype(out.dtype.np)


@primitive(family="creation", infer=_full_type, reference=_full_numpy)
def full(*, shape: Any, value: Any, dtype: Any = None, out: TensorType) -> Tensor:
    """a tensor of one value"""
    return compute(out.shape, lambda *i: Const(out.dtype, value), origin="full")


@operator(family="creation")
def zeros(*, shape: Any, dtype: Any = "float32") -> Any:
    """a tensor of zeros"""
    return full(shape=shape, value=0, dtype=dtype)


@operator(family="creation")
def ones(*, shape: Any, dtype: Any = "float32") -> Any:
    """a tensor of ones"""
    return full(shape=shape, value=1, dtype=dtype)


@operator(family="creation")
def zeros_like(x: Any, *, dtype: Any = None) -> Any:
    """zeros of the shape and type of x"""
    return full(shape=x.shape, value=0, dtype=dtype or x.dtype)


@operator(family="creation")
def ones_like(x: Any, *, dtype: Any = None) -> Any:
    """ones of the shape and type of x"""
    return full(shape=x.shape, value=1, dtype=dtype or x.dtype)


@operator(family="creation")
def full_like(x: Any, *, value: Any, dtype: Any = None) -> Any:
    """one value in the shape and type of x"""
    return full(shape=x.shape, value=value, dtype=dtype or x.dtype)


def _arange_type(*, start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> TensorType:
    if step == 0:
        raise ArgumentError("arange needs a step other than 0")
    if stop is None:
        start, stop = 0, start
    if all(isinstance(v, int) for v in (start, stop, step)):
        count: Index = max(0, -(-(stop - start) // step))
    elif any(isinstance(v, float) for v in (start, stop, step)):
        count = max(0, int(np.ceil((stop - start) / step)))
    else:
        count = (stop - start + (step - 1)) // step
    is_float = any(isinstance(v, float) for v in (start, stop, step))
    return TensorType((count,), as_dtype(dtype) if dtype is not None else (
        default_float if is_float else default_int))


def _arange_numpy(*, start: Any, stop: Any = None, step: Any = 1, dtype: Any = None,
                  out: TensorType) -> np.ndarray:
    first = 0 if stop is None else start
    count: Any = out.shape[0]
    return (first + step * np.arange(count)).astype(out.dtype.np)


@primitive(family="creation", infer=_arange_type, reference=_arange_numpy)
def arange(*, start: Any, stop: Any = None, step: Any = 1, dtype: Any = None,
           out: TensorType) -> Tensor:
    """start, start + step, ... up to but not including stop"""
    first = 0 if stop is None else start

    def element(i: Any) -> Any:
        if isinstance(first, float) or isinstance(step, float):
            wide = cast_scalar(FromIndex(int64, i), as_dtype("float64"))
            return cast_scalar(wide * float(step) + float(first), out.dtype)
        return cast_scalar(FromIndex(int64, first + i * step), out.dtype)

    return compute(out.shape, element, origin="arange")
