"""Operators whose number of results depends on values: room for all, and a count.

The first `count` results are real, the rest are zeros or repeats. A host that knows the count cuts
them off; inside a graph they keep their size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from terrazzo.dtypes import as_dtype, bool_, float32, int64
from terrazzo.errors import ShapeError, user_location
from terrazzo.expr.ir import fresh_axis
from terrazzo.graph.ir import TensorType
from terrazzo.index import minimum
from terrazzo.index.guards import all_equal
from terrazzo.loop.ir import Alloc, Block, Buffer, For, If, Stmt, Store, block
from terrazzo.ops.creation import arange, full
from terrazzo.ops.define import operator, primitive
from terrazzo.ops.elementwise import (
    astype,
    bitwise_and,
    bitwise_or,
    equal,
    isnan,
    less,
    logical_not,
    not_equal,
    where,
)
from terrazzo.ops.indexing import in_range, nonzero, scatter, take
from terrazzo.ops.reduce import sum_
from terrazzo.ops.scan import cumsum
from terrazzo.ops.shape import moveaxis, reshape, span, stack
from terrazzo.ops.sorting import argsort, sort_key, sort_pairs
from terrazzo.scalar import OPS, Const, Scalar, as_scalar, call
from terrazzo.scalar import cast as cast_scalar
from terrazzo.shapes import dims_text, normalize_axis, num_elements


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
    if isinstance(n, int) and isinstance(m, int) and m > n:
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


# ---------------------------------------------------------------- non-maximum suppression
def _select_type(boxes: TensorType, scores: TensorType, order: TensorType, limit: TensorType,
                 overlap: TensorType, *, most: int, center_point_box: bool
                 ) -> tuple[TensorType, TensorType]:
    batch, classes, count = scores.shape
    if order.shape != scores.shape or not order.dtype.is_integer:
        raise ShapeError(f"select_boxes needs an order {dims_text(scores.shape)} of integers, not "
                         f"{order}", where=user_location())
    if len(boxes.shape) != 3 or boxes.shape[2] != 4 or not all_equal(
            boxes.shape[:2], (batch, count)):
        raise ShapeError(f"boxes {dims_text(boxes.shape)} do not fit scores "
                         f"{dims_text(scores.shape)}: [batch, boxes, 4] and [batch, classes, "
                         "boxes] are needed", where=user_location())
    return TensorType((batch, classes, most), int64), TensorType((batch, classes), int64)


def _corners(box: Callable[[int], Any], center: bool) -> tuple[Any, Any, Any, Any]:
    """Lower and upper ends along the two axes; any two opposite corners may be given."""
    if center:
        half = box(2) * 0.5, box(3) * 0.5
        return box(0) - half[0], box(1) - half[1], box(0) + half[0], box(1) + half[1]
    a, b, c, d = (box(k) for k in range(4))
    op = _array_math if isinstance(a, np.ndarray) else call
    return op("min", a, c), op("min", b, d), op("max", a, c), op("max", b, d)


def _array_math(name: str, *args: Any) -> Any:
    return OPS[name].numpy(*args)


def _select_numpy(boxes: np.ndarray, scores: np.ndarray, order: np.ndarray, limit: np.ndarray,
                  overlap: np.ndarray, *, most: int, center_point_box: bool, out: Any
                  ) -> tuple[np.ndarray, np.ndarray]:
    batch, classes, count = scores.shape
    chosen = np.zeros((batch, classes, most), np.int64)
    counts = np.zeros((batch, classes), np.int64)
    for b, c in np.ndindex(batch, classes):
        ends = np.stack(_corners(boxes[b].T.__getitem__, center_point_box))
        sizes = np.prod(np.maximum(ends[2:] - ends[:2], 0), axis=0)
        alive = np.ones(count, bool)
        for i in order[b, c]:
            if not alive[i] or not scores[b, c, i] > limit or counts[b, c] >= most:
                continue
            chosen[b, c, counts[b, c]] = i
            counts[b, c] += 1
            shared = np.prod(np.maximum(np.minimum(ends[2:], ends[2:, i:i + 1])
                                        - np.maximum(ends[:2], ends[:2, i:i + 1]), 0), axis=0)
            with np.errstate(all="ignore"):
                alive &= ~((shared > 0) & (shared / (sizes + sizes[i] - shared) > overlap))
    return chosen, counts


@primitive(family="padded", infer=_select_type, reference=_select_numpy, loops=True,
           differentiable=False)
def select_boxes(boxes: Any, scores: Any, order: Any, limit: Any, overlap: Any, *, most: int,
                 center_point_box: bool = False, out: tuple[TensorType, TensorType]) -> Any:
    """for each class, boxes by `order`, without those that overlap one chosen before; how many

    A chosen box crosses out all others that share more of their union than `overlap`, so that the
    work is that of the boxes chosen. Scores must be above `limit`.
    """
    batch, classes, count = scores.shape

    def build(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> Stmt:
        if 0 in (batch, classes, count, most):
            return Block(())
        boxes_, scores_, order_, limit_, overlap_ = inputs
        chosen, counts = outputs
        task, j, k = (fresh_axis("task", batch * classes), fresh_axis("j", count),
                      fresh_axis("k", count))
        sides = [Buffer(name, float32, count) for name in ("top", "left", "bottom", "right")]
        sizes, gone = Buffer("sizes", float32, count), Buffer("gone", bool_, count)
        here, found = Buffer("here", int64, 1), Buffer("found", int64, 1)
        first = task.var // classes * count
        ends = _corners(lambda q: boxes_[(first + j.var) * 4 + q], center_point_box)
        prepare = For(j.var, 0, count, block(
            *(Store(side, j.var, end) for side, end in zip(sides, ends, strict=True)),
            Store(sizes, j.var, _area([side[j.var] for side in sides])),
            Store(gone, j.var, Const(bool_, False))))
        at = here[0]
        shared = _area([call("max" if q < 2 else "min", side[j.var], side[at])
                        for q, side in enumerate(sides)])
        union = sizes[j.var] + sizes[at] - shared
        crossed = call("and", shared > 0.0, shared / union > overlap_[0])
        cross_out = For(j.var, 0, count, Store(gone, j.var, call("or", gone[j.var], crossed)),
                        "vector")
        place = as_scalar(task.var * most) + found[0]
        wanted = call("and", call("lt", found[0], most), call("and", call(
            "gt", scores_[as_scalar(task.var * count) + at], limit_[0]), call("not", gone[at])))
        choose = block(Store(chosen, place, at), Store(found, 0, as_scalar(1), "add"), cross_out)
        q = fresh_axis("q", most)
        body = block(
            For(q.var, 0, most, Store(chosen, task.var * most + q.var, as_scalar(0)), "vector"),
            Store(found, 0, as_scalar(0)), prepare,
            For(k.var, 0, count, block(Store(here, 0, in_range(order_[task.var * count + k.var],
                                                               count)),
                                       If(wanted, choose))),
            Store(counts, task.var, found[0]))
        for buffer in (*sides, sizes, gone, here, found):
            body = Alloc(buffer, body)
        return For(task.var, 0, task.hi, body, "parallel")

    return build


def _area(ends: Sequence[Scalar]) -> Scalar:
    """The area between lower and upper ends, 0 if they are crossed."""
    tall, wide = (call("max", ends[q + 2] - ends[q], 0.0) for q in (0, 1))
    return tall * wide


@operator(family="padded", differentiable=False)
def non_max_suppression_padded(boxes: Any, scores: Any, max_output_boxes_per_class: Any = None,
                               iou_threshold: Any = None, score_threshold: Any = None, *,
                               center_point_box: bool = False, most: int | None = None) -> Any:
    """rows (batch, class, box) of the boxes kept by non-maximum suppression, and how many

    Boxes [batch, boxes, 4] are two opposite corners, or a center and sizes; scores are [batch,
    classes, boxes]. `most` is how many boxes of a class there is room for: all, if not given.
    """
    if scores.ndim != 3:
        raise ShapeError(f"scores are [batch, classes, boxes], not {dims_text(scores.shape)}",
                         where=user_location())
    batch, classes, count = scores.shape
    room = count if most is None else minimum(most, count)
    if not isinstance(room, int):
        raise ShapeError(f"non-maximum suppression of {dims_text(scores.shape)} needs a known "
                         "number of boxes", where=user_location(), hint="give most=")
    limit = full(shape=(), value=-np.inf, dtype=float32) if score_threshold is None else (
        reshape(astype(score_threshold, dtype=float32), shape=()))
    overlap = full(shape=(), value=0, dtype=float32) if iou_threshold is None else (
        reshape(astype(iou_threshold, dtype=float32), shape=()))
    scores = astype(scores, dtype=float32)
    order = argsort(scores, axis=-1, descending=True)
    chosen, counts = select_boxes(astype(boxes, dtype=float32), scores, order, limit, overlap,
                                  most=room, center_point_box=center_point_box)
    if max_output_boxes_per_class is None:
        counts = counts * 0
    else:
        counts = _at_most(counts, reshape(max_output_boxes_per_class, shape=()))
    slot = arange(start=room)
    kept = less(slot, reshape(counts, shape=(batch, classes, 1)))
    places = nonzero(kept, size=batch * classes * room)
    total = sum_(counts)
    flat = (places[0] * classes + places[1]) * room + places[2]
    box = take(reshape(chosen, shape=(-1,)), flat, axis=0)
    return stack(places[0], places[1], box, axis=1), total


def _at_most(counts: Any, limit: Any) -> Any:
    limit = astype(limit, dtype="int64")
    limit = where(less(limit, 0), 0, limit)
    return where(less(limit, counts), limit, counts)
