"""Resizing by interpolation, in all the ways that ONNX's Resize can say.

Interpolation works on one axis after the other: every element of the result is a weighted sum of a
few elements ("taps") along the axis. Where sizes are known when a graph is made, taps and weights
are computed here in float64 and become constants; a graph holds takes, products and sums. Where
they are symbolic, the graph computes them too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add as operator_add
from typing import Any, NamedTuple

import numpy as np

from terrazzo.base.shapes import dims_text, normalize_axis
from terrazzo.dtypes import float64, int64
from terrazzo.errors import ArgumentError, ShapeError, user_location
from terrazzo.graph.applying import as_value, constant
from terrazzo.graph.ir import Value
from terrazzo.index import Index, IndexExpr
from terrazzo.index.guards import granted, known
from terrazzo.ops.arrange import repeat
from terrazzo.ops.creation import arange
from terrazzo.ops.define import operator
from terrazzo.ops.elementwise import ceil, equal, logical_and, maximum, minimum, where
from terrazzo.ops.elementwise import round as round_even
from terrazzo.ops.indexing import take_at
from terrazzo.ops.reduce import in_type, sum_, widened
from terrazzo.ops.shape import reshape, span

SPELLED_OUT = 8  # taps that are added one by one; more are a reduction


# ---------------------------------------------------------------- coordinates
class _Axis(NamedTuple):
    """One axis to resize: sizes before and after, their ratio as it was given, and the region.

    All are numbers, or values of a graph where sizes are symbolic.
    """

    size: Any
    result: Any
    scale: Any
    roi: tuple[float, float] = (0.0, 1.0)

    @property
    def ideal(self) -> Any:
        """The size the result would have if sizes were not whole."""
        return self.scale * self.size


def _if_one(n: Any, then: Any, otherwise: Any) -> Any:
    """What to take by whether a size is 1."""
    return where(equal(n, 1.0), then, otherwise) if isinstance(n, Value) else (
        then if n == 1 else otherwise)


def _half_pixel(axis: _Axis, y: Any) -> Any:
    return (y + 0.5) / axis.scale - 0.5


def _half_pixel_symmetric(axis: _Axis, y: Any) -> Any:
    """The middle of the input is the middle of the result."""
    return axis.size / 2 * (1 - axis.result / axis.ideal) + (y + 0.5) / axis.scale - 0.5


def _pytorch_half_pixel(axis: _Axis, y: Any) -> Any:
    return _if_one(axis.ideal, y * 0 - 0.5, _half_pixel(axis, y))


def _align_corners(axis: _Axis, y: Any) -> Any:
    steps = _if_one(axis.ideal, 1.0, axis.ideal - 1)
    return _if_one(axis.ideal, y * 0, y * (axis.size - 1) / steps)


def _crop(axis: _Axis, y: np.ndarray) -> np.ndarray:
    start, end = map(np.float32, axis.roi)  # the type that models hold regions in
    steps, ideal = (y, axis.ideal - 1) if axis.ideal != 1 else (np.full(len(y), 0.5), 1)
    return steps * (end - start) * (axis.size - 1) / ideal + start * (axis.size - 1)


# Each in the order of arithmetic that ONNX writes, as a place that falls on an element must do so.
_COORDINATES: dict[str, Callable[[_Axis, Any], Any]] = {
    "half_pixel": _half_pixel,
    "half_pixel_symmetric": _half_pixel_symmetric,
    "pytorch_half_pixel": _pytorch_half_pixel,
    "align_corners": _align_corners,
    "asymmetric": lambda axis, y: y / axis.scale,
    "tf_half_pixel_for_nn": lambda axis, y: (y + 0.5) / axis.scale,  # of ONNX 11 and 12
    "tf_crop_and_resize": _crop,
}


# ---------------------------------------------------------------- weights
# A weight rule gets how far right of its left neighbour each place lies, in (0, 1], and answers
# with weights of the neighbours: as many to the left as to the right.
_NEAREST: dict[str, Callable[[Any], Any]] = {
    "round_prefer_floor": lambda ratio: ratio > 0.5,
    "round_prefer_ceil": lambda ratio: ratio >= 0.5,
    "floor": lambda ratio: ratio >= 1,
    "ceil": lambda ratio: ratio > 0,
}


def _nearest_weights(ratio: np.ndarray, nearest_mode: str) -> np.ndarray:
    right = _NEAREST[nearest_mode](ratio)
    return np.stack([~right, right], axis=1).astype(np.float64)


def _hat(x: np.ndarray) -> np.ndarray:
    return np.clip(1 - np.abs(x), 0, 1)


def _keys(x: np.ndarray, a: float) -> np.ndarray:
    """The cubic convolution kernel of Keys (1981)."""
    x = np.abs(x)
    near = (a + 2) * x**3 - (a + 3) * x**2 + 1
    far = a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


def _filtered(ratio: np.ndarray, kernel: Callable[[np.ndarray], np.ndarray], reach: int,
              scale: float) -> np.ndarray:
    """Weights of a kernel of some reach, made wider by 1 / scale."""
    first = math.floor(-reach / scale) + 1
    offsets = np.arange(first, 2 - first)
    return kernel((offsets[None] - ratio[:, None]) * scale)


def _taps(axis: _Axis, *, mode: str, coordinate_transformation_mode: str, nearest_mode: str,
          cubic_coeff_a: float, exclude_outside: bool, antialias: bool
          ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Which elements make up each result, their weights, and where none do."""
    places = _COORDINATES[coordinate_transformation_mode](
        axis, np.arange(axis.result, dtype=np.float64))
    outside = None
    if coordinate_transformation_mode == "tf_crop_and_resize":
        outside = (places < 0) | (places > axis.size - 1)
    left = np.ceil(places).astype(np.int64) - 1
    ratio = places - left
    if mode == "nearest":
        weights = _nearest_weights(ratio, nearest_mode)
    else:
        scale = min(axis.scale, 1.0) if antialias else 1.0
        kernel, reach = (_hat, 1) if mode == "linear" else (
            lambda x: _keys(x, cubic_coeff_a), 2)
        weights = _filtered(ratio, kernel, reach, scale)
        if antialias:
            weights = weights / weights.sum(axis=1, keepdims=True)
    count = weights.shape[1]
    indices = left[:, None] + np.arange(count)[None] - (count // 2 - 1)
    if exclude_outside:
        weights = np.where((indices < 0) | (indices >= axis.size), 0.0, weights)
        total = weights.sum(axis=1, keepdims=True)
        weights = weights / np.where(total == 0, 1.0, total)
    return np.clip(indices, 0, axis.size - 1), weights, outside


# ---------------------------------------------------------------- symbolic sizes
def _symbolic_axis(x: Value, d: int, count: Index, scale: float | None, *, mode: str,
                   coordinate_transformation_mode: str, nearest_mode: str, cubic_coeff_a: float,
                   exclude_outside: bool) -> Value:
    """One axis resized by taps that the graph computes, in float64 as above."""
    size = x.shape[d]
    before, after = (in_type(as_value(n), float64) for n in (size, count))
    axis = _Axis(before, after, after / before if scale is None else scale)
    places = _COORDINATES[coordinate_transformation_mode](
        axis, in_type(arange(start=count), float64))
    left = ceil(places) - 1.0
    ratio = places - left

    def taken(offset: Any) -> Value:
        place = minimum(maximum(left + offset, 0.0), before - 1.0)
        return take_at(x, in_type(place, int64), axes=(d,))

    if mode == "nearest":
        return taken(where(_NEAREST[nearest_mode](ratio), 1.0, 0.0))
    if mode == "linear":
        weights = {0: 1.0 - ratio, 1: ratio}
    else:
        weights = {offset: _keys_at(offset, ratio, cubic_coeff_a) for offset in (-1, 0, 1, 2)}
    if exclude_outside:
        inside = {o: logical_and(left + float(o) >= 0.0, left + float(o) < before)
                  for o in weights}
        weights = {o: where(inside[o], w, 0.0) for o, w in weights.items()}
        total = reduce(operator_add, weights.values())
        weights = {o: w / where(equal(total, 0.0), 1.0, total) for o, w in weights.items()}
    wide = tuple(-1 if a == d else 1 for a in range(x.ndim))
    terms = [taken(float(o)) * in_type(reshape(w, shape=wide), x.dtype)
             for o, w in weights.items()]
    return reduce(operator_add, terms)


def _keys_at(offset: int, ratio: Value, a: float) -> Value:
    """The weight of a neighbour by the kernel of Keys."""
    x = ratio - float(offset) if offset <= 0 else float(offset) - ratio
    if offset in (0, 1):
        return ((a + 2) * x - (a + 3)) * x * x + 1.0
    return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a


def _unknown_size(shape: Sequence[Index], axis: int) -> ShapeError:
    return ShapeError(f"resize needs to know axis {axis} of {dims_text(shape)}",
                      where=user_location(), hint="leave it out of the axes")


def _scaled_size(n: Index, scale: float) -> Index | None:
    """A symbolic size times a scale; None for scales that are not exact in binary."""
    numerator, denominator = float(scale).as_integer_ratio()
    return n * numerator // denominator if denominator <= 1 << 10 else None


# ---------------------------------------------------------------- one axis of a tensor
def _along(array: np.ndarray, rank: int, axis: int) -> np.ndarray:
    return array.reshape(tuple(-1 if d == axis else 1 for d in range(rank)))


def _choose(x: Value, places: np.ndarray, axis: int) -> Value:
    """The slices of x at known places: a slice or copies where they are evenly spread."""
    size, count = x.shape[axis], len(places)
    if isinstance(size, int) and count % size == 0 and np.array_equal(
            places, np.repeat(np.arange(size), count // size)):
        return x if count == size else repeat(x, repeats=count // size, axis=axis)
    steps = np.diff(places)
    if count > 1 and steps[0] > 0 and np.all(steps == steps[0]):
        step = int(steps[0])
        return span(x, axis, int(places[0]), int(places[-1]) + 1, step)
    return take_at(x, constant(places), axes=(axis,))


def interpolated(x: Value, axis: int, indices: np.ndarray, weights: np.ndarray) -> Value:
    """Weighted sums of elements along an axis; taps without any weight are left out."""
    used = np.any(weights != 0, axis=0)
    indices, weights = indices[:, used], weights[:, used]
    chosen = np.argmax(weights, axis=1)
    if np.array_equal(np.max(weights, axis=1), np.ones(len(weights))) and np.all(
            np.sum(weights != 0, axis=1) == 1):
        return _choose(x, indices[np.arange(len(indices)), chosen], axis)
    if indices.shape[1] <= SPELLED_OUT:
        total: Any = None
        for places, weight in zip(indices.T, weights.T):
            term = _choose(x, places, axis) * constant(_along(weight, x.ndim, axis), x.dtype)
            total = term if total is None else total + term
        return total
    taken = take_at(x, constant(indices), axes=(axis,))
    wide = weights.reshape((*weights.shape, *(1,) * (x.ndim - axis - 1)))
    return sum_(taken * constant(wide, x.dtype), axis=axis + 1)


# ---------------------------------------------------------------- operators
def resized(shape: Sequence[Index], *, sizes: Sequence[Index] | None = None,
            scales: Sequence[float] | None = None, axes: Sequence[int] | None = None,
            keep_aspect_ratio_policy: str = "stretch"
            ) -> tuple[tuple[Index, ...], tuple[float | None, ...]]:
    """The sizes and scales of all axes that ONNX's Resize means by some of sizes or scales.

    A scale is None where it is the ratio of sizes of which one is symbolic.

    A policy of "not_larger" or "not_smaller" takes one scale for all axes, the smallest or the
    largest that the sizes ask for.
    """
    rank = len(shape)
    chosen = tuple(range(rank)) if axes is None else tuple(normalize_axis(a, rank) for a in axes)
    given = sizes if sizes is not None else scales
    if given is None or (sizes is not None and scales is not None) or len(given) != len(chosen):
        raise ArgumentError(f"resize of {len(chosen)} axes needs as many sizes or scales (one of "
                            f"the two), not sizes={sizes} and scales={scales}",
                            where=user_location())
    new: list[Index] = list(shape)
    factors: list[float | None] = [1.0] * rank
    value: Any
    for a, value in zip(chosen, given):
        n = shape[a]
        if isinstance(n, IndexExpr) or isinstance(value, IndexExpr):
            if value == (n if sizes is not None else 1):
                continue
            size = value if sizes is not None else _scaled_size(n, value)
            if size is not None and keep_aspect_ratio_policy == "stretch":
                new[a] = size
                factors[a] = None if sizes is not None else float(value)
                continue
            n, value = known(n), known(value) if sizes is not None else value
            if isinstance(n, IndexExpr) or isinstance(value, IndexExpr):
                raise _unknown_size(shape, a)
        factors[a] = value / max(n, 1) if sizes is not None else float(value)
        new[a] = int(value) if sizes is not None else int(n * float(value))
    if sizes is not None and keep_aspect_ratio_policy != "stretch":
        pick = {"not_larger": min, "not_smaller": max}.get(keep_aspect_ratio_policy)
        if pick is None:
            raise ArgumentError(f"resize has no policy {keep_aspect_ratio_policy!r}",
                                where=user_location(), hint="use stretch, not_larger, not_smaller")
        scale: float = pick(factors[a] or 0.0 for a in chosen)
        for a in chosen:
            n = known(shape[a])
            assert isinstance(n, int)
            factors[a], new[a] = scale, int(scale * n + 0.5)
    return tuple(new), tuple(factors)


def _check_modes(mode: str, antialias: bool, **chosen: tuple[str, Mapping[str, Any]]) -> None:
    known: dict[str, Any] = {"nearest": 0, "linear": 0, "cubic": 0}
    for name, (value, table) in {"mode": (mode, known), **chosen}.items():
        if value not in table:
            raise ArgumentError(f"resize has no {name} {value!r}", where=user_location(),
                                hint="use " + ", ".join(table))
    if antialias and mode == "nearest":
        raise ArgumentError("resize has no antialiasing for the nearest element",
                            where=user_location(), hint="use mode linear or cubic")


@operator(family="resize")
def resize(x: Any, *, sizes: Any = None, scales: Any = None, axes: Any = None,
           mode: str = "nearest", coordinate_transformation_mode: str = "half_pixel",
           nearest_mode: str = "round_prefer_floor", cubic_coeff_a: float = -0.75,
           exclude_outside: bool = False, antialias: bool = False, roi: Any = None,
           extrapolation_value: float = 0.0, keep_aspect_ratio_policy: str = "stretch") -> Any:
    """x with other sizes, by interpolation: nearest, linear or cubic; arguments are ONNX Resize's

    `sizes`, `scales` and `roi` (starts, then ends) are for `axes`, or for all of them.
    """
    _check_modes(mode, antialias, nearest_mode=(nearest_mode, _NEAREST),
                 coordinate_transformation_mode=(coordinate_transformation_mode, _COORDINATES))
    rank = x.ndim
    new, factors = resized(x.shape, sizes=sizes, scales=scales, axes=axes,
                           keep_aspect_ratio_policy=keep_aspect_ratio_policy)
    regions = _regions(roi, axes, rank)
    y = x
    if mode != "nearest":  # halves of integers are exact in float64 only
        y = in_type(x, float64) if x.dtype.is_integer else widened(x)
    crops = coordinate_transformation_mode == "tf_crop_and_resize"
    for d in range(rank):
        n, count = x.shape[d], new[d]
        if n == count and factors[d] in (1, None) and (not crops or regions[d] == (0.0, 1.0)):
            continue
        scale = factors[d]
        if isinstance(n, IndexExpr) or isinstance(count, IndexExpr):
            # How many taps there are hangs on the scale where sizes shrink.
            if not crops and not (antialias and not granted("<=", n, count)):
                y = _symbolic_axis(y, d, count, scale, mode=mode,
                                   coordinate_transformation_mode=coordinate_transformation_mode,
                                   nearest_mode=nearest_mode, cubic_coeff_a=cubic_coeff_a,
                                   exclude_outside=exclude_outside)
                continue
            n, count = known(n), known(count)
            if isinstance(n, IndexExpr) or isinstance(count, IndexExpr):
                raise _unknown_size(x.shape, d)
        scale = count / max(n, 1) if scale is None else scale
        if n == 0 or count < 0:
            raise ShapeError(f"cannot resize axis {d} of {dims_text(x.shape)} to {count}",
                             where=user_location())
        indices, weights, outside = _taps(
            _Axis(n, count, scale, regions[d]), mode=mode,
            coordinate_transformation_mode=coordinate_transformation_mode,
            nearest_mode=nearest_mode, cubic_coeff_a=cubic_coeff_a,
            exclude_outside=exclude_outside, antialias=antialias)
        y = interpolated(y, d, indices, weights)
        if outside is not None and outside.any():
            y = where(constant(_along(outside, rank, d)), constant(extrapolation_value, y.dtype),
                      y)
    return _back(y, x)


def _regions(roi: Any, axes: Any, rank: int) -> list[tuple[float, float]]:
    regions = [(0.0, 1.0)] * rank
    chosen = range(rank) if axes is None else [normalize_axis(a, rank) for a in axes]
    if roi is not None:
        bounds = [float(n) for n in roi]
        for k, a in enumerate(chosen):
            regions[a] = (bounds[k], bounds[len(chosen) + k])
    return regions


def _back(y: Value, source: Value) -> Value:
    """A result in the type of its source; integers are rounded and clipped."""
    dtype = source.dtype
    if dtype.is_integer and not y.dtype.is_integer:
        y = round_even(minimum(maximum(y, float(dtype.min)), float(dtype.max)))
    return in_type(y, dtype)


@operator(family="resize")
def upsample(x: Any, *, scales: Any, mode: str = "nearest") -> Any:
    """x with every axis larger by a factor: ONNX's Upsample"""
    return resize(x, scales=tuple(scales), mode=mode, nearest_mode="floor",
                  coordinate_transformation_mode="asymmetric")
