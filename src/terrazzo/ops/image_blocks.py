"""Operators on images that sample nothing: blocks of pixels, columns of windows, channels."""

from __future__ import annotations

import math
from typing import Any

from terrazzo.base.shapes import dims_text, num_elements
from terrazzo.errors import ArgumentError, ShapeError, user_location
from terrazzo.graph.ir import Value
from terrazzo.index import Index
from terrazzo.index.guards import granted, multiple
from terrazzo.ops.arrange import pad
from terrazzo.ops.define import operator
from terrazzo.ops.elementwise import (
    power,
)
from terrazzo.ops.pool import padding_pairs, per_axis, pooled_size
from terrazzo.ops.reduce import in_type, widened
from terrazzo.ops.shape import (
    channels_first,
    channels_last,
    permute_dims,
    place,
    reshape,
    slice_,
    span,
)


# ---------------------------------------------------------------- blocks and columns
def _check_block(name: str, mode: str, blocksize: int, divided: Index, x: Value) -> None:
    if mode not in ("DCR", "CRD"):
        raise ArgumentError(f"{name} has no mode {mode!r}", where=user_location(),
                            hint="use DCR or CRD")
    if x.ndim != 4 or not multiple(divided, blocksize**2):
        raise ShapeError(f"{name} of {dims_text(x.shape)} by blocks of {blocksize} does not come "
                         "out even", where=user_location())


@operator(family="vision")
def depth_to_space(x: Any, *, blocksize: int, mode: str = "DCR") -> Any:
    """channels of [N, C, H, W] laid out as blocks: [N, C / b**2, H * b, W * b]

    Mode "DCR" finds the place in the block in the first part of the channels, "CRD" in the last.
    """
    _check_block("depth_to_space", mode, blocksize, x.shape[1] if x.ndim == 4 else 0, x)
    n, c, h, w = x.shape
    b, rest = blocksize, c // blocksize**2
    last = channels_last(x)
    if mode == "DCR":
        parts = permute_dims(reshape(last, shape=(n, h, w, b, b, rest)), axes=(0, 1, 3, 2, 4, 5))
    else:
        parts = permute_dims(reshape(last, shape=(n, h, w, rest, b, b)), axes=(0, 1, 4, 2, 5, 3))
    return channels_first(reshape(parts, shape=(n, h * b, w * b, rest)))


@operator(family="vision")
def space_to_depth(x: Any, *, blocksize: int, mode: str = "DCR") -> Any:
    """blocks of [N, C, H, W] as channels: [N, C * b**2, H / b, W / b]; undoes depth_to_space"""
    size = x.shape[2] * x.shape[3] if x.ndim == 4 else 0
    _check_block("space_to_depth", mode, blocksize, size, x)
    n, c, h, w = x.shape
    b = blocksize
    if not all(multiple(m, b) for m in (h, w)):
        raise ShapeError(f"space_to_depth of {dims_text(x.shape)} by blocks of {b} does not come "
                         "out even", where=user_location())
    order = (0, 1, 3, 2, 4, 5) if mode == "DCR" else (0, 1, 3, 5, 2, 4)
    blocks = reshape(channels_last(x), shape=(n, h // b, b, w // b, b, c))
    parts = permute_dims(blocks, axes=order)
    return channels_first(reshape(parts, shape=(n, h // b, w // b, c * b * b)))


@operator(family="vision")
def col2im(x: Any, *, image_shape: Any, block_shape: Any, strides: Any = 1, padding: Any = 0,
           dilation: Any = 1) -> Any:
    """columns [N, C * block, places] added up to an image [N, C, *image_shape]"""
    image, block = tuple(image_shape), tuple(block_shape)
    rank = len(image)
    steps, gaps = per_axis(strides, rank, "strides"), per_axis(dilation, rank, "dilation")
    pads = padding_pairs(padding, rank)
    counts = tuple(map(pooled_size, image, block, steps, pads, gaps))
    channels = x.shape[1] // math.prod(block)
    if not granted("==", channels * math.prod(block), x.shape[1]) or not granted("==",
            num_elements(counts), x.shape[2]):
        raise ShapeError(f"col2im of {dims_text(x.shape)}: a block {dims_text(block)} at "
                         f"{dims_text(counts)} places does not give that many columns",
                         where=user_location())
    y = reshape(x, shape=(x.shape[0], channels, *block, *counts))
    for d in range(rank):  # the places of axis d come to lie where those of axis 0 began
        y = _fold(y, 1 + rank, image[d], steps[d], pads[d], gaps[d], block[d])
    return y


def _fold(y: Value, axis: int, size: int, stride: int, pair: Any, step: int, taps: int) -> Value:
    """Add up the slices of axis 2 where they lie along another, which loses axis 2."""
    total: Any = None
    for k in range(taps):
        part = reshape(span(y, 2, k, k + 1), shape=(*y.shape[:2], *y.shape[3:]))
        starts = tuple(k * step if d == axis else 0 for d in range(part.ndim))
        shape = tuple(size + pair[0] + pair[1] if d == axis else n
                      for d, n in enumerate(part.shape))
        laid = place(part, shape=shape, starts=starts,
                     steps=tuple(stride if d == axis else 1 for d in range(part.ndim)))
        total = laid if total is None else total + laid
    return slice_(total, starts=tuple(pair[0] if d == axis else 0 for d in range(total.ndim)),
                  stops=tuple(pair[0] + size if d == axis else n
                              for d, n in enumerate(total.shape)), steps=(1,) * total.ndim)


# ---------------------------------------------------------------- channels
@operator(family="vision")
def lrn(x: Any, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> Any:
    """local response normalisation: x over a power of the squares of `size` channels around it"""
    wide = widened(x)
    before, channels = (size - 1) // 2, x.shape[1]
    squares = pad(wide * wide, pad_width=tuple(
        (before, size - 1 - before) if d == 1 else (0, 0) for d in range(x.ndim)))
    total: Any = None
    for k in range(size):  # shifted sums work in either layout
        part = span(squares, 1, k, k + channels)
        total = part if total is None else total + part
    return in_type(wide / power(bias + alpha / size * total, beta), x.dtype)
