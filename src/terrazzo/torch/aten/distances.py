"""Distances between rows, by norms of any order, with their gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from terrazzo.graph.applying import constant
from terrazzo.graph.ir import TensorType, Value
from terrazzo.ops import elementwise as e
from terrazzo.ops import reduce
from terrazzo.ops.creation import zeros
from terrazzo.ops.indexing import scatter_at
from terrazzo.ops.lookups import take
from terrazzo.ops.shape import reshape
from terrazzo.torch.aten.registry import aten, unsupported


def _norm(difference: Value, p: float) -> Value:
    """The norm along the last axis."""
    size = e.absolute(difference)
    if p == 0:
        return reduce.sum_(e.astype(e.not_equal(size, 0), dtype=size.dtype), axis=-1)
    if p == 1:
        return reduce.sum_(size, axis=-1)
    if p == 2:
        return e.sqrt(reduce.sum_(size * size, axis=-1))
    if math.isinf(p):
        return reduce.max_(size, axis=-1)
    return e.power(reduce.sum_(e.power(size, p), axis=-1), 1.0 / p)


def _slope(difference: Value, grad: Value, norm: Value, p: float) -> Value:
    """The gradient of a norm by the difference; nothing where the norm has none."""
    grad, norm = (reshape(v, shape=(*v.shape, 1)) for v in (grad, norm))
    sign, size = e.sign(difference), e.absolute(difference)
    if p == 0:
        return zeros(shape=difference.shape, dtype=difference.dtype)
    if p == 1:
        return sign * grad
    if math.isinf(p):
        return e.where(e.equal(size, norm), sign * grad, 0)
    if p == 2:
        return e.where(e.equal(norm, 0), 0, difference / norm * grad)
    # Both powers may be large while their ratio is not: more digits than the result has.
    ratio = e.astype(size, dtype="float64") / e.where(e.equal(norm, 0), 1, norm)
    raised = e.where(e.equal(size, 0), 0, e.power(ratio, p - 1))
    return e.where(e.equal(norm, 0), 0, sign * e.astype(raised, dtype=grad.dtype) * grad)


def _differences(x: Value, y: Value) -> Value:
    rows = reshape(x, shape=(*x.shape[:-1], 1, x.shape[-1]))
    return rows - reshape(y, shape=(*y.shape[:-2], 1, *y.shape[-2:]))


@aten("_cdist_forward", typed=True)
def cdist(x: Any, y: Any, p: float, compute_mode: Any = None, *, out: TensorType) -> Any:
    if x.shape[-1] == 0 or math.prod(out.shape) == 0:
        return zeros(shape=out.shape, dtype=out.dtype)
    return _norm(_differences(x, y), p)


@aten("_cdist_backward", typed=True)
def cdist_backward(grad: Any, x: Any, y: Any, p: float, norm: Any, *, out: TensorType) -> Any:
    if x.size == 0 or y.size == 0:
        return zeros(shape=out.shape, dtype=out.dtype)
    return reduce.sum_(_slope(_differences(x, y), grad, norm, p), axis=-2)


def _pairs(n: Any) -> tuple[Value, Value]:
    if not isinstance(n, int):
        unsupported("distances between a number of rows that varies")
    first, second = np.triu_indices(n, 1)
    return constant(first), constant(second)


@aten("_pdist_forward", typed=True)
def pdist(x: Any, p: float = 2.0, *, out: TensorType) -> Any:
    if x.size == 0 or math.prod(out.shape) == 0:
        return zeros(shape=out.shape, dtype=out.dtype)
    first, second = _pairs(x.shape[0])
    return _norm(take(x, first, axis=0) - take(x, second, axis=0), p)


@aten("_pdist_backward", typed=True)
def pdist_backward(grad: Any, x: Any, p: float, norm: Any, *, out: TensorType) -> Any:
    if x.size == 0 or norm.size == 0:
        return zeros(shape=out.shape, dtype=out.dtype)
    first, second = _pairs(x.shape[0])
    slope = _slope(take(x, first, axis=0) - take(x, second, axis=0), grad, norm, p)
    made = scatter_at(zeros(shape=x.shape, dtype=slope.dtype), slope, first, axes=(0,),
                      reduce="add")
    return scatter_at(made, e.negative(slope), second, axes=(0,), reduce="add")
