"""Operators whose number of results depends on values: room for all, and a count.

The first `count` results are real, the rest are zeros or repeats. A host that knows the count cuts
them off; inside a graph they keep their size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from terrazzo.base.keys import sort_key
from terrazzo.base.scalar import as_scalar, call
from terrazzo.base.scalar import cast as cast_scalar
from terrazzo.base.shapes import dims_text, normalize_axis, num_elements
from terrazzo.dtypes import as_dtype, bool_, int64
from terrazzo.errors import ShapeError, user_location
from terrazzo.expr.ir import fresh_axis
from terrazzo.graph.ir import TensorType
from terrazzo.index.guards import ask
from terrazzo.loop.ir import Alloc, Block, Buffer, For, If, Stmt, Store, block
from terrazzo.ops.creation import arange, full
from terrazzo.ops.define import operator, primitive
from terrazzo.ops.elementwise import (
    astype,
    bitwise_and,
    bitwise_or,
    equal,
    isnan,
    logical_not,
    not_equal,
    where,
)
from terrazzo.ops.indexing import scatter
from terrazzo.ops.joining import stack
from terrazzo.ops.lookups import nonzero, take
from terrazzo.ops.reduce import sum_
from terrazzo.ops.scan import cumsum
from terrazzo.ops.shape import moveaxis, reshape, span
from terrazzo.ops.sorting import sort_pairs


# ---------------------------------------------------------------- nonzero, compress
@operator(family="padded", differentiable=False)
def nonzero_padded(x: Any) -> Any:
    """the indices of elements that are not 0, one row an axis, and how many there are"""
    size = num_elements(x.shape)
    table = stack(*nonzero(x, size=size), axis=0) if x.ndim else full(
        shape=(0, size), value=0, dtype="int64")
    return table, sum_(astype(not_equal(x, 0), dtype="int64"))


@operator(family="padded", differentiable=False)
def compress_padded(x: Any, condition: Any, *, axis: int | None = None) -> Any:
    """the slices of x along an axis where a condition holds, in front, and how many there are

    Without an axis x is flattened. A condition may be shorter than the axis: the rest is left out.
    """
    if condition.ndim != 1:
        raise ShapeError(f"compress needs a vector of conditions, not "
                         f"{dims_text(condition.shape)}", where=user_location())
    if axis is None:
        x, axis = reshape(x, shape=(-1,)), 0
    axis = normalize_axis(axis, x.ndim)
    n, m = x.shape[axis], condition.shape[0]
    if ask("<", n, m):
        condition = span(condition, 0, 0, n)
    chosen = nonzero(condition, size=n)[0]
    return take(x, chosen, axis=axis), sum_(astype(not_equal(condition, 0), dtype="int64"))


# ---------------------------------------------------------------- unique
def _groups(order: Any, fresh: Any, in_order: bool) -> tuple[Any, Any, Any, Any]:
    """First indices, inverse, counts and number of groups of equal elements.

    `order` lists the elements so that equal ones are neighbours, the first in front; `fresh` says
    where a group begins. Groups are numbered in that order, or by their first elements.
    """
    n = order.shape[0]
    zeros = full(shape=(n,), value=0, dtype="int64")
    group = cumsum(astype(fresh, dtype="int64"), axis=0) - 1
    if not in_order:
        begins = scatter(zeros, order, astype(fresh, dtype="int64"), axis=0)
        number = cumsum(begins, axis=0) - 1
        first = scatter(zeros, group, where(fresh, order, 0), axis=0, reduce="max")
        group = take(number, take(first, group, axis=0), axis=0)
    firsts = scatter(zeros, group, where(fresh, order, 0), axis=0, reduce="max")
    inverse = scatter(zeros, order, group, axis=0)
    counts = scatter(zeros, group, full(shape=(n,), value=1, dtype="int64"), axis=0, reduce="add")
    return firsts, inverse, counts, sum_(astype(fresh, dtype="int64"))


@operator(family="padded", differentiable=False)
def unique_padded(x: Any, *, sorted: bool = True) -> Any:
    """the different elements of the flattened x: values, first indices, inverse, counts, how many

    In rising order, or in that of their first appearance. nan equals nan here.
    """
    flat = reshape(x, shape=(-1,))
    n = flat.shape[0]
    if n == 0:
        none = full(shape=(0,), value=0, dtype="int64")
        return flat, none, none, none, full(shape=(), value=0, dtype="int64")
    values, order = sort_pairs(flat, axis=0)
    places = arange(start=n)
    first = equal(places, 0)
    before = take(values, where(first, 0, places - 1), axis=0)
    same = equal(before, values)
    if flat.dtype.is_float:
        same = bitwise_or(same, bitwise_and(isnan(before), isnan(values)))
    fresh = bitwise_or(first, logical_not(same))
    firsts, inverse, counts, count = _groups(order, fresh, sorted)
    return take(flat, firsts, axis=0), firsts, inverse, counts, count


def _rank_type(x: TensorType) -> tuple[TensorType, TensorType]:
    if len(x.shape) != 2:
        raise ShapeError(f"rank_rows needs a matrix, not {dims_text(x.shape)}",
                         where=user_location())
    return TensorType(x.shape[:1], int64), TensorType(x.shape[:1], bool_)


def _rank_numpy(x: np.ndarray, *, out: Any) -> tuple[np.ndarray, np.ndarray]:
    if as_dtype(x.dtype).is_float:
        x = x.astype(np.float64)  # half types do not sort nan to the end
    order = np.arange(len(x))
    for column in range(x.shape[1] - 1, -1, -1):
        order = order[np.argsort(x[order, column], kind="stable")]
    rank = np.empty(len(x), np.int64)
    rank[order] = np.arange(len(x))
    fresh = np.ones(len(x), bool)
    for before, after in pairwise(order):
        a, b = x[before], x[after]
        fresh[after] = not np.all((a == b) | ((a != a) & (b != b)))
    return rank, fresh


@primitive(family="padded", infer=_rank_type, reference=_rank_numpy, loops=True,
           differentiable=False)
def rank_rows(x: Any, *, out: tuple[TensorType, TensorType]) -> Any:
    """the place of each row among all rows in order, and whether no row before is equal

    Rows are compared element by element. Every row counts those before it: n*n comparisons.
    """
    n, m = x.shape

    def build(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> Stmt:
        if n == 0:
            return Block(())
        i, j, c = fresh_axis("i", n), fresh_axis("j", n), fresh_axis("c", m)
        rank, twin = Buffer("rank", int64, 1), Buffer("twin", int64, 1)
        sign = Buffer("sign", int64, 1)  # of row j against row i, 0 while they are equal
        mine, other = (sort_key(inputs[0][r.var * m + c.var], False) for r in (i, j))
        compare = For(c.var, 0, m, If(call("eq", sign[0], 0), Store(
            sign, 0, cast_scalar(call("gt", other, mine), int64)
            - cast_scalar(call("lt", other, mine), int64))))
        earlier = call("lt", as_scalar(j.var), as_scalar(i.var))
        equal_before = call("and", call("eq", sign[0], 0), earlier)
        before = call("or", call("lt", sign[0], 0), equal_before)
        each = block(Store(sign, 0, as_scalar(0)), compare,
                     Store(rank, 0, cast_scalar(before, int64), "add"),
                     Store(twin, 0, cast_scalar(equal_before, int64), "add"))
        body = block(Store(rank, 0, as_scalar(0)), Store(twin, 0, as_scalar(0)),
                     For(j.var, 0, n, each), Store(outputs[0], i.var, rank[0]),
                     Store(outputs[1], i.var, call("eq", twin[0], 0)))
        for buffer in (rank, twin, sign):
            body = Alloc(buffer, body)
        return For(i.var, 0, n, body, "parallel")

    return build


@operator(family="padded", differentiable=False)
def unique_slices_padded(x: Any, *, axis: int, sorted: bool = True) -> Any:
    """the different slices of x along an axis: slices, first indices, inverse, counts, how many"""
    axis = normalize_axis(axis, x.ndim)
    n = x.shape[axis]
    rows = reshape(moveaxis(x, source=axis, destination=0), shape=(n, num_elements(
        m for d, m in enumerate(x.shape) if d != axis)))
    rank, fresh = rank_rows(rows)
    places = arange(start=n)
    order = scatter(places, rank, places, axis=0)
    firsts, inverse, counts, count = _groups(order, take(fresh, order, axis=0), sorted)
    return take(x, firsts, axis=axis), firsts, inverse, counts, count
