"""Operators on images and other grids: sampling at given places, and regions.

Everything that reads at computed places goes through `_sample`, which works channels last: one
place is then one run of memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from terrazzo.base.shapes import dims_text, num_elements
from terrazzo.dtypes import int64
from terrazzo.errors import ArgumentError, RankError, ShapeError, user_location
from terrazzo.graph.applying import as_value, constant
from terrazzo.graph.ir import Value
from terrazzo.index import Index
from terrazzo.index.guards import granted, known
from terrazzo.ops.contract import matmul
from terrazzo.ops.creation import arange
from terrazzo.ops.define import operator
from terrazzo.ops.elementwise import (
    absolute,
    astype,
    bitwise_and,
    bitwise_or,
    ceil,
    floor,
    greater,
    greater_equal,
    less,
    less_equal,
    maximum,
    minimum,
    remainder,
    where,
)
from terrazzo.ops.elementwise import round as round_even
from terrazzo.ops.indexing import take_at
from terrazzo.ops.pool import padding_pairs, per_axis, pooled_size
from terrazzo.ops.reduce import in_type, max_, sum_, widened
from terrazzo.ops.shape import (
    channels_first,
    channels_last,
    expand_dims,
    permute_dims,
    reshape,
    span,
)


def _spatial(name: str, x: Value, ranks: Sequence[int] = ()) -> tuple[Index, ...]:
    """The spatial sizes of [N, C, *S]."""
    sizes = x.shape[2:]
    if not sizes or (ranks and len(sizes) not in ranks):
        raise RankError(f"{name} needs [batch, channels, ...] with "
                        f"{' or '.join(map(str, ranks)) or 'some'} spatial axes, not "
                        f"{dims_text(x.shape)}", where=user_location())
    return sizes


def _known_spatial(name: str, x: Value, ranks: Sequence[int] = ()) -> tuple[int, ...]:
    """The spatial sizes of [N, C, *S], all of which have to be known."""
    sizes = _spatial(name, x, ranks)
    found = tuple(n for n in map(known, sizes) if isinstance(n, int))
    if len(found) != len(sizes):
        raise ShapeError(f"{name} needs known spatial sizes, not {dims_text(x.shape)}",
                         where=user_location())
    return found


def _real(n: Index, beside: Value) -> Any:
    """A size in float arithmetic: a number, or a value of the type of what it meets."""
    return float(n) if isinstance(n, int) else in_type(as_value(n), beside.dtype)


# ---------------------------------------------------------------- sampling at computed places
@dataclass(frozen=True, eq=False)
class _Tap:
    """One neighbour along an axis of every place: its index, its weight, whether it exists."""

    index: Value
    weight: Value | None = None
    inside: Value | None = None


def _keys_weights(ratio: Value) -> list[Value]:
    """Weights of four neighbours in cubic convolution (Keys, 1981) with a = -0.75."""
    a = -0.75

    def near(x: Value) -> Value:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Value) -> Value:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return [far(ratio + 1), near(ratio), near(1 - ratio), far(2 - ratio)]


def _reflected(x: Value, low: Any, high: Any) -> Value:
    """A coordinate mirrored at both borders until it lies between them."""
    width = high - low
    if not isinstance(width, Value) and width <= 0:
        return x * 0 + low
    away = remainder(absolute(x - low), 2 * width)
    return low + minimum(away, 2 * width - away)


def _taps(x: Value, count: Index, mode: str, padding_mode: str, align_corners: bool
          ) -> list[_Tap]:
    """The neighbours of coordinates (in elements) along an axis of so many."""
    size = _real(count, x)
    low, high = (0.0, size - 1.0) if align_corners else (-0.5, size - 0.5)
    if mode == "nearest":
        x = round_even(x)
    if padding_mode in ("border", "reflection"):
        outside = bitwise_or(less(x, low), greater(x, high))
        inner = minimum(maximum(x, 0.0), size - 1.0) if padding_mode == "border" else _reflected(
            x, low, high)
        x = where(outside, inner, x)
    left = floor(x)
    ratio = x - left
    weights: list[Any] = {"nearest": lambda: [None], "linear": lambda: [1 - ratio, ratio],
                          "cubic": lambda: _keys_weights(ratio)}[mode]()
    taps = []
    for k, weight in enumerate(weights):
        at = left + float(k - (1 if mode == "cubic" else 0))
        inside = None
        if padding_mode == "zeros":
            inside = bitwise_and(greater_equal(at, 0.0), less_equal(at, size - 1.0))
        elif padding_mode == "reflection":
            at = _reflected(at, low, high)
        at = minimum(maximum(at, 0.0), size - 1.0)
        taps.append(_Tap(astype(at, dtype=int64), weight, inside))
    return taps


def _sample(x: Value, batch: Value, taps: Sequence[Sequence[_Tap]], extra: Sequence[Value] = ()
            ) -> list[tuple[Value, Value | None]]:
    """Elements of x [N, *S, ...] at all neighbours of some places, each with its weight.

    `batch` and `extra` index the axes before and after the spatial ones. What does not exist is 0.
    """
    count = 1 + len(taps) + len(extra)
    found = []
    for corner in itertools.product(*taps):
        value = take_at(x, batch, *(tap.index for tap in corner), *extra,
                        axes=tuple(range(count)))
        tail = x.ndim - count
        weight = _product([tap.weight for tap in corner if tap.weight is not None])
        inside: Any = None
        for tap in corner:
            if tap.inside is not None:
                inside = tap.inside if inside is None else bitwise_and(inside, tap.inside)
        if inside is not None:
            value = where(_with_tail(inside, tail), value, 0)
        found.append((value, None if weight is None else _with_tail(weight, tail)))
    return found


def _product(values: Sequence[Value]) -> Value | None:
    result: Any = None
    for value in values:
        result = value if result is None else result * value
    return result


def _with_tail(x: Value, count: int) -> Value:
    """x with axes of size 1 at the end, to broadcast over channels."""
    return reshape(x, shape=(*x.shape, *(1,) * count))


def _weighted_sum(samples: Sequence[tuple[Value, Value | None]]) -> Value:
    total: Any = None
    for value, weight in samples:
        term = value if weight is None else value * weight
        total = term if total is None else total + term
    return total


def _batch_index(size: Index, rank: int) -> Value:
    """0, 1, ... along the first of so many axes."""
    return reshape(arange(start=size, dtype=int64), shape=(size, *(1,) * (rank - 1)))


_BORDERS = ("zeros", "border", "edge", "reflection")
_GRID_MODES = {"bilinear": "linear", "bicubic": "cubic", "linear": "linear", "cubic": "cubic",
               "nearest": "nearest"}


@operator(family="vision")
def grid_sample(x: Any, grid: Any, *, mode: str = "linear", padding_mode: str = "zeros",
                align_corners: bool = False) -> Any:
    """elements of x [N, C, *S] at the places of grid [N, *O, len(S)]: [N, C, *O]

    Places go from -1 to 1 along an axis, the last axis first. Beyond are "zeros", the "border" or
    its "reflection". Modes are nearest, linear and cubic. A place beyond the "border" is moved to
    it (as in ONNX); with "edge" only the elements around are (as torch's bicubic mode does).
    """
    if mode not in _GRID_MODES or padding_mode not in _BORDERS:
        raise ArgumentError(f"grid_sample has no mode {mode!r} with padding_mode "
                            f"{padding_mode!r}", where=user_location(),
                            hint="use nearest, linear or cubic; zeros, border, edge or reflection")
    sizes = _spatial("grid_sample", x)
    if grid.ndim != x.ndim or grid.shape[-1] != len(sizes):
        raise ShapeError(f"grid_sample of {dims_text(x.shape)} needs a grid of {x.ndim} axes, the "
                         f"last of size {len(sizes)}, not {dims_text(grid.shape)}",
                         where=user_location())
    places = widened(grid)
    taps = []
    for d, n in enumerate(sizes):
        k = len(sizes) - 1 - d
        g = reshape(span(places, -1, k, k + 1), shape=grid.shape[:-1])
        size = _real(n, g)
        at = (g + 1) / 2.0 * (size - 1.0) if align_corners else ((g + 1) * size - 1) / 2.0
        taps.append(_taps(at, n, _GRID_MODES[mode], padding_mode, align_corners))
    batch = _batch_index(x.shape[0], grid.ndim - 1)
    source = channels_last(x if mode == "nearest" else widened(x))
    return in_type(channels_first(_weighted_sum(_sample(source, batch, taps))), x.dtype)


@operator(family="vision")
def affine_grid(theta: Any, *, size: Any, align_corners: bool = False) -> Any:
    """the grid [N, *S, len(S)] for grid_sample that affine maps theta [N, r, r + 1] make of size"""
    spatial = tuple(int(n) for n in size[2:])
    rank = len(spatial)
    if theta.ndim != 3 or theta.shape[1:] != (rank, rank + 1):
        raise ShapeError(f"affine_grid of {rank} axes needs maps [N, {rank}, {rank + 1}], not "
                         f"{dims_text(theta.shape)}", where=user_location())
    lines = [_unit_places(n, align_corners) for n in spatial]
    mesh = np.meshgrid(*lines, indexing="ij")
    points = np.stack([*mesh[::-1], np.ones(spatial)], axis=-1).reshape(-1, rank + 1)
    wide = widened(theta)
    grid = matmul(constant(points, wide.dtype), permute_dims(wide, axes=(0, 2, 1)))
    return in_type(reshape(grid, shape=(theta.shape[0], *spatial, rank)), theta.dtype)


def _unit_places(n: int, align_corners: bool) -> np.ndarray:
    if align_corners:
        return np.linspace(-1, 1, n) if n > 1 else np.zeros(1)
    return (2 * np.arange(n) + 1) / n - 1


# ---------------------------------------------------------------- regions
def _region_samples(start: Value, extent: Value, count: int, sampling_ratio: int, size: Index
                    ) -> tuple[Value, Value]:
    """Coordinates [R, count, samples] of samples in the bins of regions, and how many there are.

    Without a ratio their number depends on the region: at most as many as a region as wide as the
    image has.
    """
    bins = reshape(extent / float(count), shape=(*extent.shape, 1, 1))
    most = sampling_ratio if sampling_ratio > 0 else (size + count - 1) // count
    wanted = ceil(bins) if sampling_ratio <= 0 else bins * 0 + float(sampling_ratio)
    number = minimum(wanted, _real(most, bins))
    step = reshape(arange(start=most, dtype=int64), shape=(1, 1, most)) + 0.5
    bin_index = reshape(arange(start=count, dtype=int64), shape=(1, count, 1))
    first = reshape(start, shape=(*start.shape, 1, 1))
    at = first + bin_index * bins + step * bins / maximum(number, 1.0)
    return at, number


def _is_drawn(at: Value, number: Value) -> Value:
    """Which of the samples that there is room for are taken."""
    most = at.shape[-1]
    return less(reshape(arange(start=most, dtype=int64), shape=(1, 1, most)), number)


def _region_taps(at: Value, number: Value, count: Index) -> list[_Tap]:
    """Neighbours of samples: up to one element outside counts as the border."""
    size = _real(count, at)
    near = bitwise_and(greater_equal(at, -1.0), less_equal(at, size))
    inside = bitwise_and(near, _is_drawn(at, number))
    kept = minimum(maximum(at, 0.0), size - 1.0)
    left = floor(kept)
    ratio = kept - left
    right = minimum(left + 1, size - 1.0)
    return [_Tap(astype(index, dtype=int64), weight, inside)
            for index, weight in ((left, 1 - ratio), (right, ratio))]


def _spread_axes(taps: Sequence[_Tap], axes: Sequence[int]) -> list[_Tap]:
    def wide(v: Value | None) -> Any:
        for axis in axes:
            v = v if v is None else expand_dims(v, axis=axis)
        return v

    return [_Tap(wide(t.index), wide(t.weight), wide(t.inside)) for t in taps]


@operator(family="vision")
def roi_align(x: Any, rois: Any, batch_indices: Any, *, output_height: int = 1,
              output_width: int = 1, sampling_ratio: int = 0, spatial_scale: float = 1.0,
              mode: str = "avg", half_pixel: bool = True) -> Any:
    """regions of x [N, C, H, W] in bins: the mean or maximum of samples between elements

    rois are [R, 4] as (x1, y1, x2, y2), batch_indices [R]. With `sampling_ratio` 0 bins hold a
    sample an element; a region wider than the image has as many as one that is as wide.
    """
    if mode not in ("avg", "max"):
        raise ArgumentError(f"roi_align has no mode {mode!r}", where=user_location(),
                            hint="use avg or max")
    sizes = _spatial("roi_align", x, (2,))
    corners = widened(rois) * float(spatial_scale) - (0.5 if half_pixel else 0.0)
    taps, places, numbers = [], [], []
    for d, (n, count) in enumerate(zip(sizes, (output_height, output_width))):
        first, last = (reshape(span(corners, -1, k, k + 1), shape=(rois.shape[0],))
                       for k in (1 - d, 3 - d))
        extent = last - first if half_pixel else maximum(last - first, 1.0)
        at, number = _region_samples(first, extent, count, sampling_ratio, n)
        places.append(at)
        numbers.append(number)
        # Axes are [R, rows, samples, columns, samples].
        taps.append(_spread_axes(_region_taps(at, number, n), (3, 4) if d == 0 else (1, 2)))
    batch = reshape(astype(batch_indices, dtype=int64), shape=(rois.shape[0], 1, 1, 1, 1))
    source = channels_last(widened(x))
    samples = _sample(source, batch, taps)
    count_all = maximum(reshape(numbers[0] * numbers[1], shape=(rois.shape[0], 1, 1, 1)), 1.0)
    if mode == "avg":
        return in_type(channels_first(sum_(_weighted_sum(samples), axis=(2, 4)) / count_all),
                       x.dtype)
    # ONNX takes the maximum over weighted neighbours, not over samples.
    largest: Any = None
    for value, weight in samples:
        largest = value * weight if largest is None else maximum(largest, value * weight)
    drawn = bitwise_and(*(_spread_axes([_Tap(_is_drawn(at, number))], axes)[0].index
                          for at, number, axes in zip(places, numbers, ((3, 4), (1, 2)))))
    result = max_(where(_with_tail(drawn, 1), largest, -math.inf), axis=(2, 4))
    return in_type(channels_first(where(greater(result, -math.inf), result, 0.0)), x.dtype)


@operator(family="vision")
def max_roi_pool(x: Any, rois: Any, *, pooled_shape: Any, spatial_scale: float = 1.0) -> Any:
    """the largest element in each bin of regions of x [N, C, H, W]

    rois are [R, 5] as (batch, x1, y1, x2, y2); corners are rounded to elements and included. An
    empty bin gives 0.
    """
    sizes = _spatial("max_roi_pool", x, (2,))
    count = rois.shape[0]
    columns = [reshape(span(rois, -1, k, k + 1), shape=(count,)) for k in range(5)]
    found = take_at(channels_last(x), astype(columns[0], dtype=int64), axes=(0,))
    empty: Any = None
    for d, (n, bins) in enumerate(zip(sizes, pooled_shape)):
        start, end = (floor(widened(columns[k]) * float(spatial_scale) + 0.5)
                      for k in (2 - d, 4 - d))
        wide = reshape(maximum(end - start + 1, 1.0) / float(bins), shape=(count, 1, 1))
        index = reshape(arange(start=bins, dtype=int64), shape=(1, bins, 1))
        first = reshape(start, shape=(count, 1, 1))
        size = _real(n, wide)
        low = minimum(maximum(floor(index * wide) + first, 0.0), size)
        high = minimum(maximum(ceil((index + 1) * wide) + first, 0.0), size)
        at = reshape(arange(start=n, dtype=int64), shape=(1, 1, n))
        inside = bitwise_and(greater_equal(at, low), less(at, high))  # [R, bins, n]
        none = less_equal(high, low)
        if d == 0:  # [R, 1, H, W, C] -> [R, rows, W, C]
            chosen = where(_with_tail(inside, 2), expand_dims(found, axis=1), -math.inf)
            found, empty = max_(chosen, axis=2), none
        else:  # [R, rows, 1, W, C] -> [R, rows, columns, C]
            mask = _with_tail(expand_dims(inside, axis=1), 1)
            found = max_(where(mask, expand_dims(found, axis=2), -math.inf), axis=3)
            empty = bitwise_or(empty, reshape(none, shape=(count, 1, bins)))
    return in_type(channels_first(where(_with_tail(empty, 1), 0.0, found)), x.dtype)


# ---------------------------------------------------------------- deformable convolution
@operator(family="vision")
def deform_conv(x: Any, weight: Any, offset: Any, bias: Any = None, mask: Any = None, *,
                strides: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
                offset_groups: int = 1) -> Any:
    """a convolution of x [N, C, *S] whose window is moved by offsets, tap by tap

    weight is [O, C/groups, *K], offset [N, offset_groups * K * len(S), *out], mask (a factor for
    each tap) [N, offset_groups * K, *out]. Samples between elements are linear, outside 0.
    """
    sizes = _spatial("deform_conv", x)
    rank, window = len(sizes), _known_spatial("deform_conv", weight, (len(sizes),))
    steps, gaps = per_axis(strides, rank, "strides"), per_axis(dilation, rank, "dilation")
    pads = padding_pairs(padding, rank)
    out = tuple(map(pooled_size, sizes, window, steps, pads, gaps))
    taps, batch = math.prod(window), x.shape[0]
    needed = (batch, offset_groups * taps * rank, *out)
    if offset.ndim != len(needed) or not all(
            granted("==", n, m) for n, m in zip(offset.shape, needed)):
        raise ShapeError(f"deform_conv needs offsets of shape {dims_text(needed)}, not "
                         f"{dims_text(offset.shape)}", where=user_location())
    # Places have the axes [N, *out, taps, offset groups].
    moves = reshape(widened(offset), shape=(batch, offset_groups, taps, rank, *out))
    moves = permute_dims(moves, axes=(0, *range(4, 4 + rank), 2, 1, 3))
    neighbours = []
    for d, n in enumerate(sizes):
        base = reshape(arange(start=out[d], dtype=int64) * steps[d] - pads[d][0], shape=tuple(
            out[d] if e == d + 1 else 1 for e in range(rank + 3)))
        tap = (np.indices(window)[d].reshape(-1) * gaps[d]).reshape(
            (*(1,) * (rank + 1), taps, 1))
        move = reshape(span(moves, -1, d, d + 1), shape=moves.shape[:-1])
        at = move + in_type(base + constant(tap), move.dtype)
        neighbours.append(_taps(at, n, "linear", "zeros", True))
    channels = x.shape[1]
    source = reshape(channels_last(widened(x)), shape=(
        batch, *sizes, offset_groups, channels // offset_groups))
    group = reshape(arange(start=offset_groups, dtype=int64), shape=(
        *(1,) * (rank + 2), offset_groups))
    samples = _weighted_sum(_sample(source, _batch_index(batch, rank + 3), neighbours, [group]))
    if mask is not None:
        factor = permute_dims(reshape(mask, shape=(batch, offset_groups, taps, *out)),
                              axes=(0, *range(3, 3 + rank), 2, 1))
        samples = samples * _with_tail(factor, 1)
    result = _grouped_product(reshape(samples, shape=(batch, *out, taps, channels)), weight,
                              groups)
    if bias is not None:
        result = result + bias
    return in_type(channels_first(result), x.dtype)


def _grouped_product(samples: Value, weight: Value, groups: int) -> Value:
    """Sums over taps and channels of [N, *out, taps, C] with weights [O, C/groups, *K]."""
    *lead, taps, channels = samples.shape
    rows, outputs = num_elements(lead), weight.shape[0]
    flat = reshape(weight, shape=(groups, outputs // groups, channels // groups, taps))
    factors = reshape(permute_dims(flat, axes=(0, 3, 2, 1)), shape=(
        groups, taps * (channels // groups), outputs // groups))
    split = reshape(samples, shape=(rows, taps, groups, channels // groups))
    columns = reshape(permute_dims(split, axes=(2, 0, 1, 3)), shape=(
        groups, rows, taps * (channels // groups)))
    product = matmul(columns, in_type(factors, columns.dtype))
    return reshape(permute_dims(product, axes=(1, 0, 2)), shape=(*lead, outputs))
