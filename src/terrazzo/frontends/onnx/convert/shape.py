"""Operators that move elements: reshape, transpose, slices, padding, joining and splitting."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from terrazzo.base.shapes import broadcast_shapes, normalize_axis, num_elements
from terrazzo.frontends.onnx.importer import literal
from terrazzo.frontends.onnx.reasons import NeedsValue
from terrazzo.frontends.onnx.registry import Call, converts
from terrazzo.graph.ir import Value
from terrazzo.index import (
    Index,
    IndexExpr,
    ceildiv,
    maximum,
    minimum,
    proves_eq,
    proves_le,
)
from terrazzo.index.guards import ask, granted
from terrazzo.ops import arrange, joining
from terrazzo.ops import shape as s
from terrazzo.ops.lookups import take

_BORDERS: dict[str, Literal["reflect", "edge", "wrap"]] = {
    "reflect": "reflect", "edge": "edge", "wrap": "wrap"}
_ENDLESS = 1 << 30  # a slice to here means to the end
_SURELY_INSIDE = 16  # an axis that a slice cuts at a number up to this is taken to be as long


def axes_of(call: Call, i: int, since: int) -> list[int] | None:
    """Axes that were an attribute before some version and are input number i from then on."""
    if call.version < since:
        return call.attr("axes")
    return call.ints(i) if call.has(i) else None


@converts("Identity")
def identity(call: Call) -> Value:
    return call.value(0)


# ---------------------------------------------------------------- other shapes
@converts("Reshape")
def reshape(call: Call) -> Value:
    x, sizes = call.value(0), call.sizes(1)
    if not call.attr("allowzero", 0):
        if any(isinstance(n, int) and n == 0 for n in sizes[x.ndim:]):
            call.unsupported(f"copies a size that the {x.ndim} axes of its input do not have")
        sizes = [x.shape[d] if isinstance(n, int) and n == 0 else n for d, n in enumerate(sizes)]
    return s.reshape(x, shape=tuple(sizes))


@converts("Flatten")
def flatten(call: Call) -> Value:
    x, axis = call.value(0), call.attr("axis", 1)
    axis += x.ndim if axis < 0 else 0
    return s.reshape(x, shape=(num_elements(x.shape[:axis]), num_elements(x.shape[axis:])))


@converts("Squeeze")
def squeeze(call: Call) -> Value:
    x, axes = call.value(0), axes_of(call, 1, since=13) or None  # none at all are all of size 1
    if axes is None and any(isinstance(n, IndexExpr) for n in x.shape):
        call.unsupported("names no axes, and which sizes are 1 is not known")
    return s.squeeze(x, axis=None if axes is None else tuple(axes))


@converts("Unsqueeze")
def unsqueeze(call: Call) -> Value:
    return s.expand_dims(call.value(0), axis=tuple(axes_of(call, 1, since=13) or ()))


@converts("Transpose")
def transpose(call: Call) -> Value:
    return s.transpose(call.value(0), axes=call.attr("perm"))


@converts("Expand")
def expand(call: Call) -> Value:
    x = call.value(0)
    return s.broadcast_to(x, shape=broadcast_shapes(x.shape, tuple(call.sizes(1))))


@converts("Tile", since=6)
def tile(call: Call) -> Value:
    return arrange.tile(call.value(0), repetitions=tuple(call.sizes(1)))


# ---------------------------------------------------------------- joining and splitting
@converts("Concat")
def concat(call: Call) -> Value:
    return joining.concat(*call.values(), axis=call.attr("axis", 1))


@converts("Split")
def split(call: Call) -> tuple[Value, ...]:
    x, parts = call.value(0), len(call.node.output)
    axis = normalize_axis(call.attr("axis", 0), x.ndim)
    n = x.shape[axis]
    sizes: Sequence[Index] | None = call.attr("split")
    if call.has(1):
        sizes = call.sizes(1)
    if sizes is None:
        # Equal parts, of which the last are shorter where they do not come out even.
        each = n // parts if proves_eq(n // parts * parts, n) else ceildiv(n, parts)
        cuts = [minimum(each * k, n) for k in range(parts + 1)]
        return tuple(s.span(x, axis, a, b) for a, b in pairwise(cuts))
    if len(sizes) != parts or not granted("==", _total(sizes), n):
        call.unsupported(f"splits {n} elements into {parts} parts of sizes {list(sizes)}")
    starts = [_total(sizes[:k]) for k in range(parts)]
    return tuple(s.span(x, axis, a, a + size) for a, size in zip(starts, sizes))


def _total(sizes: Sequence[Index]) -> Index:
    total: Index = 0
    for n in sizes:
        total = total + n
    return total


# ---------------------------------------------------------------- slices
@converts("Slice", until=10)
def slice_1(call: Call) -> Value:
    return _sliced(call, call.attr("starts"), call.attr("ends"), call.attr("axes"), None)


@converts("Slice", since=10)
def slice_10(call: Call) -> Value:
    return _sliced(call, call.sizes(1), call.sizes(2), call.ints(3) if call.has(3) else None,
                   call.ints(4) if call.has(4) else None)


def _sliced(call: Call, starts: Sequence[Index], ends: Sequence[Index],
            axes: Sequence[int] | None, steps: Sequence[int] | None) -> Value:
    x = call.value(0)
    axes = range(len(starts)) if axes is None else [normalize_axis(a, x.ndim) for a in axes]
    steps = [1] * len(starts) if steps is None else steps
    if not len(starts) == len(ends) == len(axes) == len(steps) or 0 in steps:
        call.unsupported(f"has starts {list(starts)}, ends {list(ends)}, axes {list(axes)} and "
                         f"steps {list(steps)}, which do not go together")
    cuts: list[tuple[Index, Index, int]] = [(0, n, 1) for n in x.shape]
    for start, end, axis, step in zip(starts, ends, axes, steps):
        n = x.shape[axis]
        low, high = (0, n) if step > 0 else (-1, n - 1)
        # Going back, a start before the first element is the first one.
        first = _clamped(start, n, low if step > 0 else minimum(0, high), high)
        cuts[axis] = (first, _clamped(end, n, low, high), step)
    if all(step == 1 and a == 0 and proves_eq(b, n) for (a, b, step), n in zip(cuts, x.shape)):
        return x
    return s.slice_(x, starts=tuple(a for a, _, _ in cuts), stops=tuple(b for _, b, _ in cuts),
                    steps=tuple(step for _, _, step in cuts))


def _clamped(end: Index, n: Index, low: Index, high: Index) -> Index:
    """A bound of a slice: counted from the back if negative, then moved to low..high.

    Where that depends on symbolic sizes, the slice is assumed to lie inside the tensor, unless it
    is cut by a large number, which exporters write for "at most so many" and for "to the end".
    """
    if isinstance(end, int):
        if abs(end) >= _ENDLESS:
            return high if end > 0 else low
        likely = abs(end) <= _SURELY_INSIDE
        end = end + n if end < 0 else end
    else:
        likely = True
        from_back = proves_le(end, 0) and granted("<=", end, -1)
        if from_back or not granted("<=", 0, end):
            end = end + n
    if not (proves_le(end, high) or (likely and granted("<=", end, high))):
        end = minimum(end, high)
    inside = proves_le(low, end) or (likely and granted("<=", low, end))
    return end if inside else maximum(end, low)


# ---------------------------------------------------------------- borders
@converts("Pad")
def pad(call: Call) -> Value:
    x, mode = call.value(0), call.attr("mode", "constant")
    if call.version < 11:
        widths, filling = call.attr("pads"), call.attr("value", 0.0)
    else:
        widths, filling = call.sizes(1), call.number(2) if call.has(2) else 0
    axes = [normalize_axis(a, x.ndim) for a in call.ints(3)] if call.has(3) else range(x.ndim)
    if len(widths) != 2 * len(axes):
        call.unsupported(f"has {len(widths)} pads for {len(axes)} axes")
    pairs: list[Any] = [(0, 0)] * x.ndim
    for k, axis in enumerate(axes):
        pairs[axis] = (widths[k], widths[k + len(axes)])
    if any(isinstance(w, IndexExpr) and not granted("<=", 0, w) for w in widths):
        raise NeedsValue(call.node.input[1])
    if mode == "constant":
        kind = x.dtype.np.type
        return arrange.pad(x, pad_width=tuple(pairs), value=kind(filling).item()
                           if x.dtype.np.kind in "biufc" else float(kind(filling)))
    for axis, (before, after) in enumerate(pairs):
        if (before, after) != (0, 0):
            x = _bordered(call, x, axis, before, after, mode)
    return x


def _bordered(call: Call, x: Value, axis: int, before: Index, after: Index, mode: str) -> Value:
    """One axis continued on both sides by its own elements."""
    if mode not in _BORDERS:
        call.unsupported(f"has no mode {mode!r}")
    n = x.shape[axis]
    if isinstance(n, int) and isinstance(before, int) and isinstance(after, int):
        first, last = max(0, -before), max(0, -after)
        x = s.span(x, axis, first, max(first, n - last))
        n, before, after = max(n - first - last, 0), max(before, 0), max(after, 0)
        if max(before, after) > n - (mode == "reflect") and n > 0:
            # Wider than the axis: its elements come several times.
            order: Any = np.pad(np.arange(n), (before, after), mode=_BORDERS[mode])
            return take(x, literal(order), axis=axis)
    elif mode != "edge":
        room = n - 1 if mode == "reflect" else n
        if not granted("<=", maximum(before, after), room):
            raise NeedsValue(call.node.input[1])
    pairs = tuple((before, after) if d == axis else (0, 0) for d in range(x.ndim))
    return arrange.pad(x, pad_width=pairs, mode=mode)


@converts("CenterCropPad")
def center_crop_pad(call: Call) -> Value:
    x, sizes = call.value(0), call.sizes(1)
    axes = call.attr("axes") or range(x.ndim)
    for axis, size in zip(axes, sizes):
        axis = normalize_axis(axis, x.ndim)
        n = x.shape[axis]
        crops = ask("<=", size, n)
        if crops is None:
            raise NeedsValue(call.node.input[1])
        if crops:
            first = (n - size) // 2
            x = s.span(x, axis, first, first + size)
        else:
            first = (size - n) // 2
            x = arrange.pad(x, pad_width=tuple(
                (first, size - n - first) if d == axis else (0, 0) for d in range(x.ndim)))
    return x


# ---------------------------------------------------------------- blocks of pixels
@converts("DepthToSpace")
def depth_to_space(call: Call) -> Value:
    x, size = call.value(0), call.attr("blocksize")
    batch, channels, height, width = _image(call, x)
    if call.attr("mode", "DCR") == "DCR":
        blocks, order = (batch, size, size, channels // size**2, height, width), (0, 3, 4, 1, 5, 2)
    else:
        blocks, order = (batch, channels // size**2, size, size, height, width), (0, 1, 4, 2, 5, 3)
    return s.reshape(s.permute_dims(s.reshape(x, shape=blocks), axes=order),
                     shape=(batch, channels // size**2, height * size, width * size))


@converts("SpaceToDepth")
def space_to_depth(call: Call) -> Value:
    x, size = call.value(0), call.attr("blocksize")
    batch, channels, height, width = _image(call, x)
    blocks = (batch, channels, height // size, size, width // size, size)
    order = (0, 3, 5, 1, 2, 4) if call.attr("mode", "DCR") == "DCR" else (0, 1, 3, 5, 2, 4)
    return s.reshape(s.permute_dims(s.reshape(x, shape=blocks), axes=order),
                     shape=(batch, channels * size**2, height // size, width // size))


def _image(call: Call, x: Value) -> tuple[Index, ...]:
    if x.ndim != 4:
        call.unsupported(f"needs images of 4 axes, not {x.ndim}")
    return x.shape
