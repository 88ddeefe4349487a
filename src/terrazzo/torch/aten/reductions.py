"""Sums, extrema, moments, softmax and running sums."""

from __future__ import annotations

import math
from typing import Any

from terrazzo.base.shapes import normalize_axis
from terrazzo.graph.ir import TensorType, Value
from terrazzo.ops import norm, reduce, scan
from terrazzo.ops.creation import zeros
from terrazzo.ops.elementwise import astype, bitcast, bitwise_xor
from terrazzo.ops.getitem import getitem
from terrazzo.ops.joining import concat
from terrazzo.ops.shape import permute_dims, reshape
from terrazzo.torch.aten.registry import aten, unsupported


def _axes(x: Value, dim: Any) -> tuple[int, ...] | None:
    """Axes as ours take them; none given, or an empty list, means all of them."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim) or x.ndim == 0:
        return None
    dims = dim if isinstance(dim, (list, tuple)) else (dim,)
    return tuple(sorted({normalize_axis(d, x.ndim) for d in dims}))


@aten("sum.default", "sum.dim_IntList", typed=True)
def sum_(x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None, *, out: TensorType
         ) -> Any:
    if x.ndim == 0:
        return astype(x, dtype=out.dtype)
    return reduce.sum_(x, axis=_axes(x, dim), keepdims=keepdim, dtype=out.dtype)


@aten("prod.default", "prod.dim_int", typed=True)
def prod(x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None, *, out: TensorType
         ) -> Any:
    if x.ndim == 0:
        return astype(x, dtype=out.dtype)
    return reduce.prod(x, axis=_axes(x, dim), keepdims=keepdim, dtype=out.dtype)


@aten("mean.default", "mean.dim", typed=True)
def mean(x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None, *, out: TensorType
         ) -> Any:
    x = x if x.dtype is out.dtype else astype(x, dtype=out.dtype)
    return x if x.ndim == 0 else reduce.mean(x, axis=_axes(x, dim), keepdims=keepdim)


@aten("amax", "max.default")
def amax(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return x if x.ndim == 0 else reduce.max_(x, axis=_axes(x, dim), keepdims=keepdim)


@aten("amin", "min.default")
def amin(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return x if x.ndim == 0 else reduce.min_(x, axis=_axes(x, dim), keepdims=keepdim)


@aten("max.dim")
def max_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    return amax(x, dim, keepdim), argmax(x, dim, keepdim)


@aten("min.dim")
def min_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    return amin(x, dim, keepdim), argmin(x, dim, keepdim)


@aten("argmax")
def argmax(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return _place(reduce.argmax, x, dim, keepdim)


@aten("argmin")
def argmin(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return _place(reduce.argmin, x, dim, keepdim)


def _place(function: Any, x: Value, dim: int | None, keepdim: bool) -> Any:
    if x.ndim == 0:
        return reshape(function(reshape(x, shape=(1,)), axis=0), shape=())
    return function(x, axis=dim, keepdims=keepdim)


@aten("any")
def any_(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return _truth(reduce.any_, x, dim, keepdim)


@aten("all")
def all_(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return _truth(reduce.all_, x, dim, keepdim)


def _truth(function: Any, x: Value, dim: Any, keepdim: bool) -> Any:
    truth = x if x.dtype.is_bool else x != 0
    return truth if x.ndim == 0 else function(truth, axis=_axes(x, dim), keepdims=keepdim)


@aten("var.correction", "var.dim")
def var(x: Any, dim: Any = None, correction: Any = 1, keepdim: bool = False) -> Any:
    x = x if x.ndim else reshape(x, shape=(1,))
    return reduce.var(x, axis=_axes(x, dim), correction=1 if correction is None else correction,
                      keepdims=keepdim and x.ndim > 0)


@aten("var_mean.correction")
def var_mean(x: Any, dim: Any = None, correction: Any = 1, keepdim: bool = False) -> Any:
    return var(x, dim, correction, keepdim), reduce.mean(x, axis=_axes(x, dim), keepdims=keepdim)


@aten("logsumexp")
def logsumexp(x: Any, dim: Any, keepdim: bool = False) -> Any:
    return reduce.logsumexp(x, axis=_axes(x, dim), keepdims=keepdim)


@aten("_softmax", typed=True)
def softmax(x: Any, dim: int, half_to_float: bool = False, *, out: TensorType) -> Any:
    return _along(norm.softmax, astype(x, dtype=out.dtype), dim)


@aten("_safe_softmax", typed=True)
def safe_softmax(x: Any, dim: int, dtype: Any = None, *, out: TensorType) -> Any:
    return _along(norm.safe_softmax, astype(x, dtype=out.dtype), dim)


@aten("_log_softmax", typed=True)
def log_softmax(x: Any, dim: int, half_to_float: bool = False, *, out: TensorType) -> Any:
    return _along(norm.log_softmax, astype(x, dtype=out.dtype), dim)


def _along(function: Any, x: Value, dim: int) -> Any:
    if x.ndim == 0:
        return reshape(function(reshape(x, shape=(1,)), axis=0), shape=())
    return function(x, axis=dim)


@aten("cumsum", typed=True)
def cumsum(x: Any, dim: int, dtype: Any = None, *, out: TensorType) -> Any:
    x = astype(x, dtype=out.dtype)
    return x if x.ndim == 0 else scan.cumsum(x, axis=dim, dtype=out.dtype)


@aten("cumprod", typed=True)
def cumprod(x: Any, dim: int, dtype: Any = None, *, out: TensorType) -> Any:
    x = astype(x, dtype=out.dtype)
    return x if x.ndim == 0 else scan.cumprod(x, axis=dim, dtype=out.dtype)


@aten("hash_tensor", typed=True)
def hash_tensor(x: Any, dim: Any = (), keepdim: bool = False, mode: int = 0, *, out: TensorType
                ) -> Any:
    """The bits of all elements in double precision, or as long integers, each or-ed exclusively."""
    axes = _axes(x, dim)
    axes = tuple(range(x.ndim)) if axes is None else axes
    kept = tuple(d for d in range(x.ndim) if d not in axes)
    count = math.prod(x.shape[d] for d in axes)
    if mode or not isinstance(count, int):
        unsupported("a hash in another mode, or of a size that varies")
    wide = astype(x, dtype="float64") if x.dtype.is_float else astype(x, dtype="int64")
    bits = bitcast(wide, dtype="uint64")
    rows = reshape(permute_dims(bits, axes=(*axes, *kept)),
                   shape=(count, *(x.shape[d] for d in kept)))
    if count == 0:
        return zeros(shape=out.shape, dtype=out.dtype)
    while count > 1:  # one half with the other; of an odd number the last waits
        half = count // 2
        folded = bitwise_xor(getitem(rows, slice(0, half)), getitem(rows, slice(half, 2 * half)))
        last = [getitem(rows, slice(2 * half, count))] if count % 2 else []
        rows = concat(folded, *last, axis=0) if last else folded
        count -= half
    return reshape(rows, shape=out.shape)
