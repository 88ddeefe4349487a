"""Boxes of detectors: greedy suppression of those that overlap better ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from terrazzo.dtypes import float32, int32, int64
from terrazzo.errors import DTypeError, ShapeError, user_location
from terrazzo.expr.ir import fresh_axis
from terrazzo.graph.ir import TensorType
from terrazzo.index import Index, Var, minimum
from terrazzo.index.guards import all_equal
from terrazzo.loop.ir import Block, Buffer, For, If, Let, Stmt, Store, While, block
from terrazzo.ops.define import operator, primitive
from terrazzo.ops.elementwise import astype
from terrazzo.ops.sorting import allocate, argsort
from terrazzo.scalar import Scalar, as_scalar, call
from terrazzo.scalar import cast as cast_scalar
from terrazzo.scalar import where as where_scalar
from terrazzo.shapes import dims_text

_CORNERS = ("low_x", "low_y", "high_x", "high_y")


def _suppress_type(boxes: TensorType, scores: TensorType, order: TensorType, overlap: TensorType,
                   least: TensorType, *, most: Index, centred: bool
                   ) -> tuple[TensorType, TensorType]:
    if any(t.dtype is not float32 for t in (boxes, scores, overlap, least)):
        raise DTypeError("boxes, scores and thresholds of non_max_suppression are float32",
                         where=user_location())
    if len(boxes.shape) != 3 or len(scores.shape) != 3 or not all_equal(
            boxes.shape, (scores.shape[0], scores.shape[2], 4)):
        raise ShapeError(
            f"non_max_suppression needs boxes [batch, n, 4] and scores [batch, classes, n], not "
            f"{dims_text(boxes.shape)} and {dims_text(scores.shape)}", where=user_location())
    rows = scores.shape[:2]
    return TensorType((*rows, most), int64), TensorType(rows, int64)


def _suppress_numpy(boxes: np.ndarray, scores: np.ndarray, order: np.ndarray,
                    overlap: np.ndarray, least: np.ndarray, *, most: int, centred: bool,
                    out: tuple[TensorType, TensorType]) -> tuple[np.ndarray, np.ndarray]:
    chosen = np.full((*scores.shape[:2], most), -1, np.int64)
    counts = np.zeros(scores.shape[:2], np.int64)
    for b, c in np.ndindex(*counts.shape):
        corners = _corners_numpy(boxes[b], centred)
        left = order[b, c]
        if not np.isnan(least):
            left = left[scores[b, c][left] > least]
        kept: list[int] = []
        while left.size and len(kept) < most:
            kept.append(int(left[0]))
            left = left[1:][~_overlaps(corners[left[0]], corners[left[1:]], overlap)]
        chosen[b, c, :len(kept)], counts[b, c] = kept, len(kept)
    return chosen, counts


def _corners_numpy(boxes: np.ndarray, centred: bool) -> np.ndarray:
    """Boxes as [low x, low y, high x, high y]; either diagonal may be given, y first."""
    if centred:
        half = boxes[:, 2:] / 2
        return np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], axis=1)
    pairs = boxes.reshape(-1, 2, 2)[:, :, ::-1]
    return np.concatenate([pairs.min(axis=1), pairs.max(axis=1)], axis=1)


def _overlaps(one: np.ndarray, others: np.ndarray, threshold: Any) -> np.ndarray:
    """Which boxes share more than a part `threshold` of their union with one box."""
    sides = np.minimum(one[2:], others[:, 2:]) - np.maximum(one[:2], others[:, :2])
    shared = np.where((sides > 0).all(axis=1), sides.prod(axis=1), 0)
    area, areas = (one[2:] - one[:2]).prod(), (others[:, 2:] - others[:, :2]).prod(axis=1)
    union = area + areas - shared
    real = (shared > 0) & (area > 0) & (areas > 0) & (union > 0)
    return real & (shared / np.where(real, union, 1) > threshold)


@primitive(family="vision", infer=_suppress_type, reference=_suppress_numpy, loops=True)
def suppress(boxes: Any, scores: Any, order: Any, overlap: Any, least: Any, *, most: Index,
             centred: bool = False, out: tuple[TensorType, TensorType]) -> Any:
    """non_max_suppression of boxes whose order by score is known"""
    batch, classes, n = scores.shape

    def build(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> Stmt:
        if 0 in (batch, classes):
            return Block(())
        row, q = fresh_axis("row", batch * classes).var, fresh_axis("q", most).var
        state = Buffer("state", int64, 2)  # how many boxes were looked at, how many are kept
        chosen, counts = outputs
        steps: list[Stmt] = [
            For(q, 0, most, Store(chosen, row * most + q, as_scalar(-1)), "vector"),
            Store(state, 0, as_scalar(0)), Store(state, 1, as_scalar(0))]
        if n != 0 and most != 0:
            steps.append(_greedy(inputs, chosen, state, row, scores.shape, most, centred))
        steps.append(Store(counts, row, state[1]))
        return For(row, 0, batch * classes, allocate([state], block(*steps)), "parallel")

    return build


def _greedy(inputs: Sequence[Buffer], chosen: Buffer, state: Buffer, row: Var,
            shape: Sequence[Index], most: Index, centred: bool) -> Stmt:
    """The boxes of one class from the best down, each compared with those that were kept."""
    boxes, scores, order, threshold, least = inputs
    _, classes, n = shape
    looked, count = state[0], state[1]
    kept = [Buffer(name, float32, most) for name in (*_CORNERS, "area")]
    here, hit = Buffer("here", float32, len(kept)), Buffer("hit", int32, 1)
    rank = order[call("add", call("min", looked, as_scalar(n - 1)), as_scalar(row * n))]
    score = scores[call("add", rank, as_scalar(row * n))]
    unlimited = call("ne", least[0], least[0])
    # Scores only fall from here on, but for nan, which comes first.
    worth = call("or", unlimited, call("not", call("le", score, least[0])))
    more = call("and", call("and", call("lt", looked, as_scalar(n)),
                            call("lt", count, as_scalar(most))), worth)
    box, held = Var("box"), Var("held")
    sides = _corners(boxes, (row // classes * n + box) * 4, centred)
    sides.append(call("mul", call("sub", sides[2], sides[0]), call("sub", sides[3], sides[1])))
    k = fresh_axis("k", held).var
    shares = _overlap([b[k] for b in kept], [here[i] for i in range(len(kept))], threshold[0])
    keep = block(*(Store(b, held, here[i]) for i, b in enumerate(kept)),
                 Store(chosen, row * most + held, as_scalar(box)),
                 Store(state, 1, call("add", count, as_scalar(1))))
    wanted = call("and", call("eq", hit[0], as_scalar(0)),
                  call("or", unlimited, call("gt", score, least[0])))
    turn = Let(box, rank, Let(held, count, block(
        *(Store(here, i, side) for i, side in enumerate(sides)),
        Store(hit, 0, cast_scalar(as_scalar(0), int32)),
        For(k, 0, held, Store(hit, 0, cast_scalar(shares, int32), "max"), "vector"),
        If(wanted, keep),
        Store(state, 0, call("add", looked, as_scalar(1))))))
    return allocate([*kept, here, hit], While(more, turn))


def _corners(boxes: Buffer, at: Index, centred: bool) -> list[Scalar]:
    """The corners of the box that starts at a place, as `_corners_numpy` has them."""
    a, b, c, d = (boxes[at + i] for i in range(4))
    if not centred:
        return [call("min", b, d), call("min", a, c), call("max", b, d), call("max", a, c)]
    half = [call("mul", v, as_scalar(0.5)) for v in (c, d)]
    return [call("sub", a, half[0]), call("sub", b, half[1]),
            call("add", a, half[0]), call("add", b, half[1])]


def _overlap(one: Sequence[Scalar], other: Sequence[Scalar], threshold: Scalar) -> Scalar:
    """Whether two boxes, given by corners and area, share too much."""
    zero = as_scalar(0.0)
    width = call("sub", call("min", one[2], other[2]), call("max", one[0], other[0]))
    height = call("sub", call("min", one[3], other[3]), call("max", one[1], other[1]))
    apart = call("or", call("le", width, zero), call("le", height, zero))
    shared = where_scalar(apart, zero, call("mul", width, height))
    union = call("sub", call("add", one[4], other[4]), shared)
    condition = call("gt", call("div", shared, union), threshold)
    for size in (shared, one[4], other[4], union):
        condition = call("and", call("gt", size, zero), condition)
    return condition


@operator(family="vision", differentiable=False)
def non_max_suppression(boxes: Any, scores: Any, overlap: Any = 0.5, least: Any = float("nan"),
                        *, most: Any = None, centred: bool = False) -> Any:
    """the boxes of each class that overlap no better one too much: their numbers, and how many

    boxes is [batch, n, 4]: two corners, y before x, or with `centred` centre and size, x before
    y; scores is [batch, classes, n]. The first result is [batch, classes, most], best first, -1
    where there are no more. Boxes share too much when the shared part of their union exceeds
    `overlap`; those with scores up to `least` do not count.
    """
    n = scores.shape[-1]
    most = n if most is None else minimum(most, n)
    order = argsort(scores, axis=-1, descending=True)
    return suppress(astype(boxes, dtype=float32), astype(scores, dtype=float32), order,
                    astype(overlap, dtype=float32), astype(least, dtype=float32),
                    most=most, centred=centred)
