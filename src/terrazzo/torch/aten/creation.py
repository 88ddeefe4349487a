"""Tensors made of nothing but numbers."""

from __future__ import annotations

from typing import Any

from terrazzo.graph.applying import as_value
from terrazzo.graph.ir import TensorType, Value
from terrazzo.index import IndexExpr
from terrazzo.ops import creation
from terrazzo.ops.arrange import eye as our_eye
from terrazzo.ops.elementwise import astype
from terrazzo.ops.shape import broadcast_to
from terrazzo.torch.aten.registry import aten, converts, unsupported


def filled(out: TensorType, value: Any) -> Any:
    """A tensor of one number or value, or of a size that varies."""
    if isinstance(value, IndexExpr):
        value = as_value(value)
    if isinstance(value, Value):
        return broadcast_to(astype(value, dtype=out.dtype), shape=out.shape)
    return creation.full(shape=out.shape, value=value, dtype=out.dtype)


@aten("full.default", typed=True)
def full(size: Any, value: Any, dtype: Any = None, *, out: TensorType) -> Any:
    return filled(out, value)


@aten("full_like", "new_full", typed=True)
def full_like(x: Any, *args: Any, out: TensorType, fill_value: Any = None, dtype: Any = None
              ) -> Any:
    return filled(out, args[-1] if args else fill_value)


@aten("zeros_like", "zeros.default", "new_zeros", "empty.memory_format", "empty_like",
      "new_empty", "_efficientzerotensor", "empty_strided", "new_empty_strided",
      "empty_permuted", typed=True)
def zeros(*args: Any, out: TensorType, **kwargs: Any) -> Any:
    return filled(out, 0)


@aten("ones_like", "ones.default", "new_ones", typed=True)
def ones(*args: Any, out: TensorType, **kwargs: Any) -> Any:
    return filled(out, 1)


@aten("fill.Scalar", "fill.Tensor", typed=True)
def fill(x: Any, value: Any, *, out: TensorType) -> Any:
    return filled(out, value)


@aten("scalar_tensor", typed=True)
def scalar_tensor(value: Any, dtype: Any = None, *, out: TensorType) -> Any:
    return filled(out, value)


@aten("arange.start_step", typed=True)
def arange(start: Any, end: Any, step: Any = 1, dtype: Any = None, *, out: TensorType) -> Any:
    if any(isinstance(v, float) for v in (start, end, step)):
        return creation.arange(start=float(start), stop=float(end), step=float(step),
                               dtype=out.dtype)
    return creation.arange(start=start, stop=end, step=step, dtype=out.dtype)


@aten("arange.default", "arange.start", typed=True)
def arange_to(*ends: Any, out: TensorType, dtype: Any = None) -> Any:
    start, end = ends if len(ends) == 2 else (0, ends[0])
    return arange(start, end, out=out)


@converts("prims.iota.default", typed=True)
def iota(length: Any, start: Any = 0, step: Any = 1, dtype: Any = None,
         requires_grad: bool = False, *, out: TensorType) -> Any:
    places = creation.arange(start=length, dtype=out.dtype)
    return places * step + start


@aten("eye.default", "eye.m", typed=True)
def eye(n: Any, m: Any = None, dtype: Any = None, *, out: TensorType) -> Any:
    return our_eye(n_rows=n, n_cols=n if m is None else m, dtype=out.dtype)


@aten("linspace.default", typed=True)
def linspace(start: Any, end: Any, steps: Any, dtype: Any = None, *, out: TensorType) -> Any:
    if not isinstance(steps, int) or isinstance(start, Value) or isinstance(end, Value):
        unsupported("linspace with ends that are tensors, or with a number of steps that varies")
    if not out.dtype.is_float:
        unsupported("linspace of integers")
    if steps < 2:
        return filled(out, start)
    # From both ends, so that the last element is exactly `end`, as in torch.
    place = creation.arange(start=steps, dtype=out.dtype.compute)
    step = (end - start) / (steps - 1)
    rising, falling = place * step + start, (place - (steps - 1)) * step + end
    from terrazzo.ops.elementwise import where

    return astype(where(place < steps // 2, rising, falling), dtype=out.dtype)
