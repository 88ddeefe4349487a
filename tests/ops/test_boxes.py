"""Suppression of boxes: by hand, against the plain algorithm, and its corner cases."""

from __future__ import annotations

import numpy as np
import pytest

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
    numbers, counts = tz.non_max_suppression(boxes, scores, 0.35, 0.2, most=most)
    assert numbers.shape == (2, 3, most)
    for b in range(2):
        for c in range(3):
            kept = plain(boxes[b], scores[b, c], 0.35, 0.2, most)
            assert counts[b, c] == len(kept)
            np.testing.assert_array_equal(numbers[b, c], kept + [-1] * (most - len(kept)))


def test_equal_scores_keep_their_order_and_corners_may_be_swapped() -> None:
    box = np.array([[[0, 0, 2, 2], [2, 2, 0, 0], [10, 10, 11, 11]]], np.float32)
    numbers, counts = tz.non_max_suppression(box, np.ones((1, 1, 3), np.float32), 0.5)
    assert numbers[0, 0].tolist() == [0, 2, -1] and counts.tolist() == [[2]]


def test_centres_and_sizes(rng: np.random.Generator) -> None:
    corners, scores = boxes_in(rng, 1, 50), rng.random((1, 2, 50)).astype(np.float32)
    low, high = corners[..., :2], corners[..., 2:]
    centred = np.concatenate([(low + high) / 2, high - low], -1)
    for a, b in zip(tz.non_max_suppression(corners, scores, 0.4),
                    tz.non_max_suppression(centred, scores, 0.4, centred=True), strict=True):
        np.testing.assert_array_equal(a, b)


def test_boxes_without_area_and_scores_that_are_no_numbers() -> None:
    box = np.zeros((1, 3, 4), np.float32)
    scores = np.array([[[np.nan, 0.5, 0.7]]], np.float32)
    assert tz.non_max_suppression(box, scores, 0.5)[1].tolist() == [[3]]
    numbers, _ = tz.non_max_suppression(box, scores, 0.5, 0.1)
    assert numbers[0, 0].tolist() == [2, 1, -1]


@pytest.mark.parametrize("shape", [(0, 2, 5), (1, 0, 5), (1, 2, 0)])
def test_empty(shape: tuple[int, int, int]) -> None:
    batch, classes, n = shape
    numbers, counts = tz.non_max_suppression(np.zeros((batch, n, 4), np.float32),
                                             np.zeros(shape, np.float32))
    assert numbers.shape == (batch, classes, n) and not counts.any()


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(ShapeError, match=r"boxes \[batch, n, 4\]"):
        tz.non_max_suppression(Value(TensorType((1, 5, 3), float32)),
                               Value(TensorType((1, 2, 5), float32)))
