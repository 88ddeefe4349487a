"""Boxes of detectors: those that overlap better ones are left out, greedily."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from terrazzo.base.places import in_range
from terrazzo.base.scalar import OPS, Const, Scalar, as_scalar, call
from terrazzo.base.scalar import cast as cast_scalar
from terrazzo.base.shapes import dims_text
from terrazzo.dtypes import float32, int32, int64
from terrazzo.errors import ShapeError, user_location
from terrazzo.expr.ir import fresh_axis
from terrazzo.graph.ir import TensorType
from terrazzo.index import Index, Var, minimum
from terrazzo.index.guards import all_equal, known
from terrazzo.loop.ir import Block, Buffer, For, If, Let, Stmt, Store, While, block
from terrazzo.ops.creation import arange, full
from terrazzo.ops.define import operator, primitive
from terrazzo.ops.elementwise import astype, less, where
from terrazzo.ops.joining import stack
from terrazzo.ops.lookups import nonzero, take
from terrazzo.ops.reduce import sum_
from terrazzo.ops.shape import reshape
from terrazzo.ops.sorting import allocate, argsort


def _select_type(boxes: TensorType, scores: TensorType, order: TensorType, limit: TensorType,
                 overlap: TensorType, *, most: int, center_point_box: bool
                 ) -> tuple[TensorType, TensorType]:
    batch, classes, count = scores.shape
    if order.shape != scores.shape or not order.dtype.is_integer:
        raise ShapeError(f"select_boxes needs an order {dims_text(scores.shape)} of integers, not "
                         f"{order}", where=user_location())
    if len(boxes.shape) != 3 or not all_equal(
            boxes.shape, (batch, count, 4)):
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
            if scores[b, c, i] <= limit or counts[b, c] >= most:
                break
            if not alive[i] or np.isnan(scores[b, c, i]):
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

    Two boxes overlap that share more of their union than `overlap`. `order` goes from the best
    down: the first score that is not above `limit` ends it, and nan does not count.
    """
    batch, classes, count = scores.shape

    def build(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> Stmt:
        if 0 in (batch, classes):
            return Block(())
        task, q = fresh_axis("task", batch * classes), fresh_axis("q", most)
        state = Buffer("state", int64, 2)  # how many boxes were looked at, how many chosen
        chosen, counts = outputs
        choose = None if 0 in (count, most) else _greedy(
            inputs, chosen, state, task.var, scores.shape, most, center_point_box)
        body = block(
            For(q.var, 0, most, Store(chosen, task.var * most + q.var, as_scalar(0)), "vector"),
            Store(state, 0, as_scalar(0)), Store(state, 1, as_scalar(0)), choose,
            Store(counts, task.var, state[1]))
        return For(task.var, 0, task.hi, allocate([state], body), "parallel")

    return build


def _greedy(inputs: Sequence[Buffer], chosen: Buffer, state: Buffer, task: Var,
            shape: Sequence[Index], most: int, center: bool) -> Stmt:
    """The boxes of one class from the best down, each compared with those chosen before."""
    boxes, scores, order, limit, overlap = inputs
    _, classes, count = shape
    looked, found = state[0], state[1]
    names = ("top", "left", "bottom", "right", "size")
    kept = [Buffer(name, float32, most) for name in names]
    here, hit = Buffer("here", float32, len(names)), Buffer("hit", int32, 1)
    rank = in_range(order[call("min", looked, as_scalar(count - 1)) + as_scalar(task * count)],
                    count)
    score = scores[rank + as_scalar(task * count)]
    # Scores only fall from here on, but for nan, which comes first.
    more = call("and", call("and", call("lt", looked, as_scalar(count)),
                            call("lt", found, as_scalar(most))), call("not", score <= limit[0]))
    box, held = Var("box"), Var("held")
    sides = _corners(lambda i: boxes[(task // classes * count + box) * 4 + i], center)
    k = fresh_axis("k", held).var
    ends = [call("max" if i < 2 else "min", side[k], here[i]) for i, side in enumerate(kept[:4])]
    shared = _area(ends)
    crossed = call("and", shared > 0.0, shared / (kept[4][k] + here[4] - shared) > overlap[0])
    choose = block(*(Store(b, held, here[i]) for i, b in enumerate(kept)),
                   Store(chosen, task * most + held, as_scalar(box)),
                   Store(state, 1, found + 1))
    wanted = call("and", call("eq", hit[0], as_scalar(0)), score > limit[0])
    turn = Let(box, rank, Let(held, found, block(
        *(Store(here, i, side) for i, side in enumerate((*sides, _area(sides)))),
        Store(hit, 0, Const(int32, 0)),
        For(k, 0, held, Store(hit, 0, cast_scalar(crossed, int32), "max"), "vector"),
        If(wanted, choose),
        Store(state, 0, looked + 1))))
    return allocate([*kept, here, hit], While(more, turn))


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
    room = known(count if most is None else minimum(most, count))
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
