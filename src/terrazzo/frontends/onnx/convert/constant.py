"""Tensors made from nothing: constants, fills, ranges, identity matrices."""

from __future__ import annotations

from typing import Any

import numpy as np

from terrazzo.dtypes import DType
from terrazzo.frontends.onnx.importer import astype, literal
from terrazzo.frontends.onnx.reasons import NeedsValue
from terrazzo.frontends.onnx.registry import Call, converts
from terrazzo.graph.ir import Value
from terrazzo.index import Index, IndexExpr, bounds, ceildiv, maximum
from terrazzo.ops.arrange import eye
from terrazzo.ops.creation import arange, full

# Attributes of Constant whose type is not written with the value.
_PLAIN = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64,
          "value_ints": np.int64}


@converts("Constant")
def constant(call: Call) -> Value:
    for name in ("value", "sparse_value"):
        array = call.attr(name)
        if array is not None:
            if array.dtype.kind in "OUS":
                call.unsupported("holds strings, which cannot be compiled")
            return literal(array)
    for name, kind in _PLAIN.items():
        value = call.attr(name)
        if value is not None:
            return literal(np.asarray(value, kind))
    call.unsupported("holds strings, which cannot be compiled")


@converts("ConstantOfShape")
def constant_of_shape(call: Call) -> Value:
    shape = tuple(call.sizes(0))
    if any(isinstance(n, int) and n < 0 for n in shape):
        call.unsupported(f"is asked for the shape {shape}")
    filling = call.attr("value", np.zeros(1, np.float32))
    if filling.dtype.kind in "OUS" or filling.size != 1:
        call.unsupported("fills with something that is not one number")
    item = filling.reshape(-1)[0]
    number = item.item() if filling.dtype.kind in "biufc" else float(item)
    return full(shape=shape, value=number, dtype=filling.dtype)


@converts("Range")
def range_(call: Call) -> Value:
    start, limit = (_bound(call, i) for i in range(2))
    delta = _bound(call, 2) if call.has(2) else 1  # com.microsoft's may leave it out
    dtype = call.value(0).dtype
    if not isinstance(delta, IndexExpr) and delta == 0:
        call.unsupported("has a delta of 0")
    if any(isinstance(n, IndexExpr) for n in (start, limit, delta)):
        return _symbolic_range(call, start, limit, delta, dtype)
    count = max(0, int(np.ceil((limit - start) / delta))) if dtype.is_float else (
        max(0, -((start - limit) // delta)))
    if dtype.is_float and count:
        # Half the last step is left over, so that rounding does not change how many there are.
        return arange(start=float(start), stop=float(start + (count - 0.5) * delta),
                      step=float(delta), dtype=dtype)
    return arange(start=start, stop=start + count * delta, step=delta, dtype=dtype)


def _bound(call: Call, i: int) -> Any:
    known = call.known(i)
    if known is None:
        raise NeedsValue(call.node.input[i])
    item = known.reshape(-1)[0]
    return item if isinstance(item, IndexExpr) else call.number(i) if (
        known.dtype != object) else int(item)


def _symbolic_range(call: Call, start: Index, limit: Index, delta: Index, dtype: DType) -> Value:
    """A range between sizes; the step has to be a number, as loops walk by numbers."""
    if isinstance(delta, IndexExpr) or any(n != int(n) for n in (start, delta)
                                           if not isinstance(n, IndexExpr)):
        raise NeedsValue(call.node.input[next(i for i in range(3) if isinstance(
            _bound(call, i), IndexExpr))])
    delta = int(delta)
    if not isinstance(limit, IndexExpr):
        limit = int(np.ceil(limit) if delta > 0 else np.floor(limit))
    start = start if isinstance(start, IndexExpr) else int(start)
    count = ceildiv(limit - start, delta) if delta > 0 else ceildiv(start - limit, -delta)
    low = bounds(count)[0]
    if low is None or low < 0:
        count = maximum(count, 0)
    if start == 0 and delta == 1:
        return arange(start=count, dtype=dtype)
    steps = arange(start=count) * delta + start
    return astype(steps, dtype=dtype)


@converts("EyeLike")
def eye_like(call: Call) -> Value:
    x = call.value(0)
    if x.ndim != 2:
        call.unsupported(f"needs a matrix, not {x.ndim} axes")
    return eye(n_rows=x.shape[0], n_cols=x.shape[1], k=call.attr("k", 0),
               dtype=call.dtype("dtype", x.dtype))
