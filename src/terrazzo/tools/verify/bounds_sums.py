"""Bounds of reductions, products of matrices and recurrences: roundings that add up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from terrazzo.base.scalar_accuracy import may_vanish
from terrazzo.dtypes import bfloat16
from terrazzo.graph.evaluate import run_node
from terrazzo.graph.ir import Node
from terrazzo.index import Var
from terrazzo.tools.verify.bounded import (
    Bounded,
    accumulated,
    error_run,
    finite,
    growth,
    smallest,
    wide,
)

_FLUSHED_BELOW = 2.0**-126  # what products of bfloat16 take for zero, read or made


# ---------------------------------------------------------------- reductions
def _count(node: Node, inputs: Sequence[Bounded | None], values: Sequence[np.ndarray]) -> int:
    """How many elements are combined into one."""
    x = inputs[0]
    assert x is not None
    if node.op.name == "cumulative":
        return max(1, x.value.shape[node.attrs["axis"]])
    return max(1, x.value.size // max(values[0].size, 1))


def _plain(attrs: Mapping[str, Any]) -> dict[str, Any]:
    return {"dtype": None} if "dtype" in attrs else {}


def summed(node: Node, inputs: list[Bounded | None], values: list[np.ndarray],
           dims: Mapping[Var, int]) -> list[np.ndarray]:
    """Sums, and running sums: errors add up, and so do the roundings."""
    (x,) = inputs
    assert x is not None
    (magnitude,) = error_run(node, [finite(x.value)], dims, **_plain(node.attrs))
    (carried,) = error_run(node, [x.error], dims, **_plain(node.attrs))
    return [accumulated(magnitude, carried, _count(node, inputs, values), node.types[0].dtype)]


def multiplied(node: Node, inputs: list[Bounded | None], values: list[np.ndarray],
               dims: Mapping[Var, int]) -> list[np.ndarray]:
    """Products: relative errors add up."""
    (x,) = inputs
    assert x is not None
    dtype = node.types[0].dtype.compute
    plain = _plain(node.attrs)

    def product(array: np.ndarray) -> np.ndarray:
        return error_run(node, [array], dims, **plain)[0]

    size = finite(x.value)
    if not dtype.is_float:
        return [np.where(error_run(node, [1.0 + (x.error > 0)], dims, **plain)[0] > 1, np.inf, 0)]
    most = product(size + x.error)
    error = most - product(size) + growth(_count(node, inputs, values)) * dtype.eps * most
    # The order of multiplying decides whether a partial product leaves the range of the type.
    leaves = (product(np.maximum(size, 1.0)) > dtype.max) | (
        product(np.where(size > 0, np.minimum(size, 1.0), 1.0)) < float(
            ml_dtypes.finfo(dtype.np).smallest_normal))
    return [np.where(leaves, np.inf, error)]


def extreme(node: Node, inputs: list[Bounded | None], values: list[np.ndarray],
            dims: Mapping[Var, int]) -> list[np.ndarray]:
    """max, min, any and all: off by no more than the worst of their inputs."""
    (x,) = inputs
    assert x is not None
    sign = -1.0 if node.op.name in ("min", "all") else 1.0
    if node.op.name in ("any", "all"):
        return [np.where(_reduced(node, x.error, dims), np.inf, 0.0)]
    return [sign * error_run(node, [sign * x.error], dims)[0]]


def _reduced(node: Node, error: np.ndarray, dims: Mapping[Var, int]) -> np.ndarray:
    unsure = error > 0
    given = ~unsure if node.op.name == "all" else unsure
    (answer,) = run_node(node, [given], dims)
    return ~answer if node.op.name == "all" else answer


# ---------------------------------------------------------------- contractions
def contracted(node: Node, inputs: list[Bounded | None], values: list[np.ndarray],
               dims: Mapping[Var, int]) -> list[np.ndarray]:
    """Products of matrices, and convolutions."""
    x, y = inputs
    assert x is not None and y is not None

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return error_run(node, [a, b], dims)[0]

    left, right = finite(x.value), finite(y.value)
    carried = np.zeros(values[0].shape)
    if node.op.name == "batch_matmul" and all(
            v is not None and v.dtype is bfloat16 for v in node.inputs):
        x, y = _flushed(x), _flushed(y)
        carried += 2 * left.shape[-2 if node.attrs["transpose_x"] else -1] * _FLUSHED_BELOW
    if not x.exact:
        carried = carried + product(x.error, right + y.error)
    if not y.exact:
        carried = carried + product(left, y.error)
    # An infinity times what may have vanished is nan, or an infinity.
    for one, other in ((np.isinf(x.value), may_vanish(y)), (may_vanish(x), np.isinf(y.value))):
        if one.any() and other.any():
            carried = np.where(product(one * 1.0, other * 1.0) > 0, np.inf, carried)
    if node.op.name == "convolve":
        # Whether an infinite weight meets the zeros of the padding, or nothing, is left open.
        open_ = ~np.isfinite(y.value).all(axis=tuple(range(y.value.ndim - 1)))
        carried = np.where(open_, np.inf, carried)
        count = math.prod(y.value.shape[:-1])
    else:
        count = x.value.shape[-2 if node.attrs["transpose_x"] else -1]
    return [accumulated(product(left, right), carried, max(count, 1), node.types[0].dtype)]


def _flushed(x: Bounded) -> Bounded:
    """Instructions that multiply bfloat16 take denormal numbers for zero."""
    size = np.abs(x.value)
    return Bounded(x.value, x.error + np.where(size < _FLUSHED_BELOW, size, 0.0))


def integer_contraction(node: Node, inputs: list[Bounded | None], values: list[np.ndarray],
                        dims: Mapping[Var, int]) -> list[np.ndarray]:
    """Sums of products of bytes that may be some off."""
    x, y = inputs
    assert x is not None and y is not None

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.abs(wide(run_node(node, [a, b], dims)[0]))

    known = [np.where(np.isfinite(b.error), b.error, 0.0) for b in (x, y)]
    sizes = [finite(b.value) for b in (x, y)]
    error = product(known[0], sizes[1] + known[1]) + product(sizes[0], known[1])
    lost = [np.isinf(b.error) * 1.0 for b in (x, y)]
    touched = product(lost[0], np.ones_like(sizes[1])) + product(np.ones_like(sizes[0]), lost[1])
    return [np.where(touched > 0, np.inf, error)]


# ---------------------------------------------------------------- scans
def cumulative(node: Node, inputs: list[Bounded | None], values: list[np.ndarray],
               dims: Mapping[Var, int]) -> list[np.ndarray]:
    """A scan is as far off as the reductions that it consists of."""
    if node.attrs["op"] == "add":
        return summed(node, inputs, values, dims)
    if node.attrs["op"] == "mul":
        return multiplied(node, inputs, values, dims)
    return sorted_values(node, inputs, values, dims)


def sorted_values(node: Node, inputs: list[Bounded | None], values: list[np.ndarray],
                  dims: Mapping[Var, int]) -> list[np.ndarray]:
    """Sorting is 1-Lipschitz in its values, like a running maximum.

    Positions are known only when the values are.
    """
    (x,) = inputs
    assert x is not None
    worst = float(np.max(x.error, initial=0.0))
    return [np.full(v.shape, worst if i == 0 else (np.inf if worst else 0.0))
            for i, v in enumerate(values)]


def linear_recurrence(node: Node, inputs: list[Bounded | None], values: list[np.ndarray],
                      dims: Mapping[Var, int]) -> list[np.ndarray]:
    """The error of h[t] = a[t] * h[t-1] + b[t] follows a recurrence of the same form."""
    a, b = inputs
    assert a is not None and b is not None
    dtype = node.types[0].dtype.compute
    factor, term = finite(a.value), finite(b.value)
    (size,) = error_run(node, [factor + a.error, term + b.error], dims)
    axis = node.attrs["axis"]
    worst = np.max(size, axis=axis, keepdims=True, initial=0.0)
    added = b.error + a.error * worst + 2 * dtype.eps * worst + smallest(dtype)
    (error,) = error_run(node, [factor + a.error, added], dims)
    return [np.where(worst > dtype.max, np.inf, error)]
