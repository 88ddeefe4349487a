"""Suppression of boxes: against onnx's reference, the plain algorithm, and corner cases."""

from __future__ import annotations

import numpy as np
import pytest
from by_onnx import by_onnx
from checking import check, close, op

import terrazzo as tz
from terrazzo.dtypes import float32
from terrazzo.errors import ShapeError
from terrazzo.graph.ir import TensorType, Value


def boxes_in(rng: np.random.Generator, batch: int, n: int) -> np.ndarray:
    centre, size = rng.uniform(0, 60, (batch, n, 2)), rng.uniform(1, 30, (batch, n, 2))
    return np.concatenate([centre - size / 2, centre + size / 2], -1).astype(np.float32)


def plain(boxes: np.ndarray, scores: np.ndarray, overlap: float, least: float, most: int
          ) -> list[int]:
    """One class in float64, pair by pair."""
    kept: list[int] = []
    y0, x0, y1, x1 = boxes.astype(np.float64).T
    area = (y1 - y0) * (x1 - x0)
    for i in np.argsort(-scores, kind="stable"):
        height = np.minimum(y1[i], y1[kept]) - np.maximum(y0[i], y0[kept])
        width = np.minimum(x1[i], x1[kept]) - np.maximum(x0[i], x0[kept])
        shared = np.maximum(height, 0) * np.maximum(width, 0)
        if scores[i] > least and len(kept) < most and not (
                shared / (area[i] + area[kept] - shared) > overlap).any():
            kept.append(int(i))
    return kept


@pytest.mark.parametrize("n, most", [(1, 1), (37, 37), (200, 20), (200, 200)])
def test_against_the_plain_algorithm(n: int, most: int, rng: np.random.Generator) -> None:
    boxes, scores = boxes_in(rng, 2, n), rng.random((2, 3, n)).astype(np.float32)
    rows, count = tz.non_max_suppression_padded(
        boxes, scores, np.int64(most), np.float32(0.35), np.float32(0.2))
    expected = [(b, c, i) for b in range(2) for c in range(3)
                for i in plain(boxes[b], scores[b, c], 0.35, 0.2, most)]
    np.testing.assert_array_equal(rows[:int(count)], expected)


@pytest.mark.onnx
@pytest.mark.parametrize("center", [0, 1])
@pytest.mark.parametrize("threshold", [None, 0.4])
def test_non_max_suppression(center: int, threshold: float | None,
                             rng: np.random.Generator) -> None:
    boxes = rng.uniform(0, 1, (2, 20, 4)).astype(np.float32)
    scores = np.round(rng.uniform(0, 1, (2, 3, 20)), 1).astype(np.float32)  # some are equal
    for most, overlap in ((5, 0.2), (50, 0.5), (0, 0.5)):
        inputs = [boxes, scores, np.array([most]), np.array([overlap], np.float32),
                  None if threshold is None else np.array([threshold], np.float32)]
        (expected,) = by_onnx("NonMaxSuppression", inputs, opset=11, center_point_box=center)
        rows, count = tz.non_max_suppression_padded(*inputs, center_point_box=bool(center))
        close(rows[:int(count)], expected)
    check(op("non_max_suppression_padded"), *(a for a in inputs if a is not None),
          center_point_box=bool(center))


def test_boxes_that_only_touch_stay() -> None:
    boxes = np.array([[[0, 0, 1, 1], [0, 1, 1, 2], [0, 0, 0, 0]]], np.float32)
    scores = np.array([[[0.5, 0.9, 0.1]]], np.float32)
    rows, count = tz.non_max_suppression_padded(boxes, scores, np.int64(9), np.float32(0))
    close(rows[:int(count), 2], np.array([1, 0, 2]))
    # Room for fewer than there are, and no limit given at all.
    rows, count = tz.non_max_suppression_padded(boxes, scores, np.int64(9), most=2)
    assert rows.shape == (2, 3) and int(count) == 2
    assert int(tz.non_max_suppression_padded(boxes, scores)[1]) == 0


def test_scores_that_are_no_numbers_do_not_count() -> None:
    scores = np.array([[[np.nan, 0.5, -np.inf, 0.7]]], np.float32)
    rows, count = tz.non_max_suppression_padded(
        np.zeros((1, 4, 4), np.float32), scores, np.int64(9), np.float32(0.5))
    np.testing.assert_array_equal(rows[:int(count), 2], [3, 1])


@pytest.mark.parametrize("shape", [(0, 2, 5), (1, 0, 5), (1, 2, 0)])
def test_empty(shape: tuple[int, int, int]) -> None:
    batch, _, n = shape
    _, count = tz.non_max_suppression_padded(np.zeros((batch, n, 4), np.float32),
                                             np.zeros(shape, np.float32), np.int64(5))
    assert int(count) == 0


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(ShapeError, match="do not fit scores"):
        tz.non_max_suppression_padded(Value(TensorType((1, 4, 4), float32)),
                                      Value(TensorType((1, 2, 5), float32)))
