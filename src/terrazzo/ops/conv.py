"""Convolutions: the primitive `convolve`, channels last, and layers as torch and ONNX lay them out.

A pixel's channels are neighbours in memory here, so a row of a window is one run of numbers. The
layers permute on their way in and out; between layers the permutations cancel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from terrazzo.base.contraction import Contraction
from terrazzo.base.scalar import Axis, Const, Scalar, as_scalar, call
from terrazzo.base.scalar import cast as cast_scalar
from terrazzo.base.scalar import reduce as reduce_scalar
from terrazzo.base.scalar import where as where_scalar
from terrazzo.dtypes import DType, promote
from terrazzo.errors import ArgumentError, DTypeError, RankError, ShapeError, user_location
from terrazzo.expr.ir import Tensor, compute, reduce_axis
from terrazzo.graph.ir import Node, TensorType, Value
from terrazzo.index import Index, proves_le
from terrazzo.index.guards import ask, granted, known, multiple
from terrazzo.ops.arrange import flip
from terrazzo.ops.contract import batch_matmul
from terrazzo.ops.creation import full
from terrazzo.ops.define import operator, primitive
from terrazzo.ops.joining import stack
from terrazzo.ops.reduce import in_shape
from terrazzo.ops.shape import channels_first, channels_last, permute_dims, place, slice_

Pads = tuple[tuple[Index, Index], ...]
MOST_PHASES = 16  # of the gradient of an input read in strides: each is a kernel


# ---------------------------------------------------------------- the primitive
def _convolve_type(x: TensorType, w: TensorType, *, strides: tuple[int, ...], padding: Pads,
                   dilation: tuple[int, ...], groups: int) -> TensorType:
    rank = len(x.shape) - 2
    if rank < 1 or len(w.shape) != len(x.shape):
        raise RankError(f"convolve needs x [batch, *sizes, channels] and w [*sizes, channels / "
                        f"groups, outputs], got {x} and {w}", where=user_location())
    if not len(strides) == len(padding) == len(dilation) == rank:
        raise ArgumentError(f"convolve over {rank} axes needs {rank} strides, paddings and "
                            "dilations", where=user_location())
    if min(*strides, *dilation, groups) < 1:
        raise ArgumentError("strides, dilations and groups of a convolution are at least 1",
                            where=user_location())
    channels, outputs = x.shape[-1], w.shape[-1]
    if not granted("==", w.shape[-2] * groups, channels):
        raise ShapeError(f"a convolution in {groups} groups of {channels} channels needs weights "
                         f"of {channels // groups} channels, not {w.shape[-2]}",
                         where=user_location())
    if not multiple(outputs, groups):
        raise ShapeError(f"{outputs} outputs of a convolution do not divide into {groups} groups",
                         where=user_location())
    dtype = promote(x.dtype, w.dtype)
    if dtype.is_bool or dtype.is_complex:
        raise DTypeError(f"convolve takes real numbers, not {dtype.name}", where=user_location())
    sizes = [_output_size(*sizes) for sizes in zip(
        x.shape[1:-1], w.shape[:-2], strides, padding, dilation, strict=True)]
    return TensorType((x.shape[0], *sizes, outputs), dtype)


def _output_size(size: Index, window: Index, stride: int, pads: tuple[Index, Index],
                 dilation: int) -> Index:
    room = size + pads[0] + pads[1] - (window - 1) * dilation - 1
    if ask("<", room, 0) or ask("<=", window, 0):
        raise ShapeError(
            f"a window of {window} with dilation {dilation} does not fit in {size} elements with "
            f"{pads[0]} and {pads[1]} of padding", where=user_location(),
            hint="pad more, or make the window smaller")
    return room // stride + 1


def _convolve_numpy(x: np.ndarray, w: np.ndarray, out: TensorType, *, strides: tuple[int, ...],
                    padding: Pads, dilation: tuple[int, ...], groups: int) -> np.ndarray:
    """One matrix product for each element of the window."""
    wide = out.dtype.compute.np
    rank = len(strides)
    known: Any = padding
    around = [(0, 0), *((max(lo, 0), max(hi, 0)) for lo, hi in known), (0, 0)]
    x = np.pad(x.astype(wide), around)
    w = w.astype(wide)
    shape: Any = out.shape
    batch, *sizes, outputs = shape
    x = x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    w = w.reshape(*w.shape[:-1], groups, outputs // groups)
    total = np.zeros((batch, *sizes, groups, outputs // groups), wide)
    for tap in np.ndindex(*w.shape[:rank]):
        at = [t * d + max(-lo, 0) for t, d, (lo, _) in zip(tap, dilation, known, strict=True)]
        window = x[(slice(None), *(slice(a, a + (n - 1) * s + 1, s) for a, n, s in zip(
            at, sizes, strides, strict=True)))]
        weight = w[tap]
        if weight.shape[0] == 1:
            total += window * weight[0]
        elif groups == 1:
            total[..., 0, :] += window[..., 0, :] @ weight[:, 0]
        else:
            total += (window[..., None, :] @ np.moveaxis(weight, 1, 0))[..., 0, :]
    return total.reshape(batch, *sizes, outputs).astype(out.dtype.np)


def _convolve_grad(node: Node, g: Value) -> list[Value | None]:
    x, w = node.inputs
    assert x is not None and w is not None
    attrs = node.attrs
    strides, dilation, groups = attrs["strides"], attrs["dilation"], attrs["groups"]
    return [_grad_of_input(g, x, w, strides, attrs["padding"], dilation, groups),
            _grad_of_weight(g, x, w, strides, attrs["padding"], dilation, groups)]


def _grad_of_input(g: Value, x: Value, w: Value, strides: tuple[int, ...], padding: Pads,
                   dilation: tuple[int, ...], groups: int) -> Value:
    """The gradient under the window turned around."""
    starts = [lo for lo, _ in padding if isinstance(lo, int)]
    if 1 < math.prod(strides) <= MOST_PHASES and max(dilation) == 1 and (
            len(starts) == len(strides) and all(isinstance(n, int) for n in w.shape)):
        return _phase_by_phase(g, x.shape, w, strides, starts, groups)
    spread = _spread(g, strides)
    pads = []
    for size, wide, window, step, (lo, _) in zip(
            x.shape[1:-1], spread.shape[1:-1], w.shape[:-2], dilation, padding, strict=True):
        pads.append(((window - 1) * step - lo, size - wide + lo))
    return convolve(spread, _turned(w, groups), strides=(1,) * len(strides), padding=tuple(pads),
                    dilation=dilation, groups=groups)


def _phase_by_phase(g: Value, shape: Sequence[Index], w: Value, strides: tuple[int, ...],
                    starts: Sequence[int], groups: int) -> Value:
    """The gradient of an input that was read in strides, without products by zeros in between.

    Element `stride * j + p` met the taps `r`, `r + stride`, ... only, where r is `p + start` less
    whole strides. So each p has a convolution of its own, and they are laid side by side.
    """
    def phase(at: tuple[int, ...], counts: Sequence[Index]) -> Value:
        firsts = [(p + lo) % s for p, lo, s in zip(at, starts, strides)]
        if any(proves_le(n, first) for first, n in zip(firsts, w.shape)):
            return full(shape=(shape[0], *counts, shape[-1]), value=0, dtype=w.dtype)
        taps = slice_(w, starts=(*firsts, 0, 0), stops=w.shape, steps=(*strides, 1, 1))
        before = [n - 1 - (p + lo) // s for n, p, lo, s in zip(taps.shape, at, starts, strides)]
        after = [n - have - lo + taps - 1 for n, have, lo, taps in zip(
            counts, g.shape[1:-1], before, taps.shape)]
        return convolve(g, _turned(taps, groups), strides=(1,) * len(strides),
                        padding=tuple(zip(before, after, strict=True)),
                        dilation=(1,) * len(strides), groups=groups)

    sizes, last = shape[1:-1], len(strides) + 1
    if all(n == 1 for n, s in zip(w.shape, strides) if s > 1):  # the others met no tap
        at = tuple(-lo % s for lo, s in zip(starts, strides))
        only = phase(at, [(n - p + s - 1) // s for n, p, s in zip(sizes, at, strides)])
        return place(only, shape=tuple(shape), starts=(0, *at, 0), steps=(1, *strides, 1))
    counts = [(n + s - 1) // s for n, s in zip(sizes, strides)]
    made = {at: phase(at, counts) for at in itertools.product(*map(range, strides))}
    for axis in range(last - 1, 0, -1):
        made = {at: _interleaved([made[*at, p] for p in range(strides[axis - 1])], axis)
                for at in itertools.product(*map(range, strides[:axis - 1]))}
    return slice_(made[()], starts=(0,) * (last + 1), stops=tuple(shape), steps=(1,) * (last + 1))


def _interleaved(parts: Sequence[Value], axis: int) -> Value:
    """The elements of some tensors in turns along an axis."""
    if len(parts) == 1:
        return parts[0]
    n = parts[0].shape
    return in_shape(stack(*parts, axis=axis + 1),
                    (*n[:axis], n[axis] * len(parts), *n[axis + 1:]))


def _grad_of_weight(g: Value, x: Value, w: Value, strides: tuple[int, ...], padding: Pads,
                    dilation: tuple[int, ...], groups: int) -> Value:
    """The input under the gradient as a window: channels and batch trade places."""
    if groups == 1 and all(n == 1 for n in w.shape[:-2]) and all(
            lo == 0 and proves_le(hi, 0) for lo, hi in padding):
        return _grad_of_product(g, x, w, strides)
    rank = len(strides)
    space = tuple(range(1, rank + 1))
    within = w.shape[-2]
    split = in_shape(x, (*x.shape[:-1], groups, within))
    images = permute_dims(split, axes=(rank + 2, *space, rank + 1, 0))
    images = in_shape(images, (within, *x.shape[1:-1], x.shape[0] * groups))
    window = permute_dims(g, axes=(*space, 0, rank + 1))
    pads = tuple((lo, (taps - 1) * d + (n - 1) * s + 1 - size - lo)
                 for (lo, _), taps, d, n, s, size in zip(
                     padding, w.shape[:-2], dilation, g.shape[1:-1], strides, x.shape[1:-1],
                     strict=True))
    found = convolve(images, window, strides=dilation, padding=pads, dilation=strides,
                     groups=groups)
    return permute_dims(found, axes=(*space, 0, rank + 1))


def _grad_of_product(g: Value, x: Value, w: Value, strides: tuple[int, ...]) -> Value:
    """The gradient of the weight of a window of one pixel: a product of two matrices."""
    sizes = [(n - 1) * s + 1 for n, s in zip(g.shape[1:-1], strides, strict=True)]
    met = slice_(x, starts=(0,) * x.ndim, stops=(x.shape[0], *sizes, x.shape[-1]),
                 steps=(1, *strides, 1))
    pixels = math.prod(g.shape[:-1])
    rows, columns = (in_shape(v, (1, pixels, v.shape[-1])) for v in (met, g))
    return in_shape(batch_matmul(rows, columns, transpose_x=True), w.shape)


def _spread(x: Value, strides: Sequence[int]) -> Value:
    """x with `stride - 1` zeros between neighbours."""
    if all(s == 1 for s in strides):
        return x
    sizes = [(n - 1) * s + 1 for n, s in zip(x.shape[1:-1], strides, strict=True)]
    return place(x, shape=(x.shape[0], *sizes, x.shape[-1]), starts=(0,) * x.ndim,
                 steps=(1, *strides, 1))


def _turned(w: Value, groups: int) -> Value:
    """Weights for the way back: windows turned around, inputs and outputs exchanged."""
    rank = w.ndim - 2
    within, outputs = w.shape[-2:]
    turned = flip(w, axis=tuple(range(rank)))
    if groups > 1:
        turned = in_shape(turned, (*w.shape[:rank], within, groups, outputs // groups))
        turned = permute_dims(turned, axes=(*range(rank), rank + 2, rank + 1, rank))
        return in_shape(turned, (*w.shape[:rank], outputs // groups, groups * within))
    return permute_dims(turned, axes=(*range(rank), rank + 1, rank))


class Window(NamedTuple):
    """What a convolution sums over. Axes of one step are none: a window of 1 is a product."""

    taps: tuple[Axis | None, ...]
    channel: Axis | None
    within: Index  # channels of a group
    share: Index  # outputs of a group
    groups: int

    @staticmethod
    def of(weights: Sequence[Index], groups: int) -> Window:
        """The window of weights [*K, C/groups, O]."""
        *sizes, within, outputs = weights
        taps = tuple(None if n == 1 else reduce_axis(n, f"k{d}") for d, n in enumerate(sizes))
        channel = None if within == 1 and any(taps) else reduce_axis(within, "c")
        return Window(taps, channel, within, outputs // groups, groups)

    @property
    def axes(self) -> tuple[Axis, ...]:
        return tuple(a for a in (*self.taps, self.channel) if a is not None)

    @property
    def at_tap(self) -> tuple[Index, ...]:
        return tuple(0 if t is None else t.var for t in self.taps)

    @property
    def at_channel(self) -> Index:
        """The channel's number within its group."""
        return 0 if self.channel is None else self.channel.var

    def source(self, output: Index) -> Index:
        """The channel's number for some output."""
        return self.at_channel if self.groups == 1 else (
            output // self.share * self.within + self.at_channel)

    def roles(self, image: Index, place: Sequence[Index], output: Index) -> Contraction:
        """Which axis of the sum is which."""
        return Contraction(
            (image,), output, None if self.channel is None else self.channel.var, tuple(place),
            tuple(None if t is None else t.var for t in self.taps), self.groups)


@primitive(family="conv", kind="contract", infer=_convolve_type, reference=_convolve_numpy,
           grad=_convolve_grad)
def convolve(x: Any, w: Any, *, strides: tuple[int, ...], padding: Pads,
             dilation: tuple[int, ...], groups: int = 1, out: TensorType) -> Tensor:
    """sums of products under a moving window, channels last: x [N, *S, C], w [*K, C/groups, O]

    `padding` is (before, after) of each axis, in zeros; a negative one leaves elements out. Half
    floats accumulate in float32.
    """
    wide: DType = out.dtype.compute
    window = Window.of(w.shape, groups)

    def element(n: Index, *rest: Index) -> Scalar:
        *place, output = rest
        tests: list[Scalar] = []
        where: list[Index] = []
        for d, (o, k) in enumerate(zip(place, window.at_tap, strict=True)):
            at = o * strides[d] + k * dilation[d] - padding[d][0]
            where.append(at)
            if not proves_le(padding[d][0], 0):
                tests.append(call("ge", as_scalar(at), 0))
            if not proves_le(padding[d][1], 0):
                tests.append(call("lt", as_scalar(at), as_scalar(x.shape[d + 1])))
        left: Scalar = x[(n, *where, window.source(output))]
        if tests:
            inside = tests[0]
            for test in tests[1:]:
                inside = call("and", inside, test)
            left = where_scalar(inside, left, Const(x.dtype, 0))
        right = w[(*window.at_tap, window.at_channel, output)]
        product = cast_scalar(left, wide) * cast_scalar(right, wide)
        total = reduce_scalar("add", product, window.axes, window.roles(n, place, output))
        return cast_scalar(total, out.dtype)

    return compute(out.shape, element, origin="convolve")


# ---------------------------------------------------------------- layers
def _each(value: Any, rank: int, name: str) -> tuple[int, ...]:
    """A number for each axis, from one number or several."""
    given = (value,) * rank if isinstance(value, int) else tuple(value)
    if len(given) != rank:
        raise ArgumentError(f"{name} {value!r} of a convolution over {rank} axes must be a number "
                            f"or {rank} numbers", where=user_location())
    return given


def _pads(padding: Any, rank: int) -> Pads:
    """(before, after) of each axis, from a number, one number an axis, or such pairs."""
    given = (padding,) * rank if isinstance(padding, int) else tuple(padding)
    pairs = tuple((p, p) if isinstance(p, int) else tuple(p) for p in given)
    if len(pairs) != rank or any(
            len(p) != 2 or any(ask("<", n, 0) for n in p) for p in pairs):
        raise ArgumentError(
            f"padding {padding!r} of a convolution over {rank} axes must be a number, {rank} "
            "numbers, or as many pairs (before, after), none of them negative",
            where=user_location())
    return pairs


def _require_layer(name: str, x: Value, w: Value, layout: str) -> int:
    rank = x.ndim - 2
    if rank < 1 or w.ndim != x.ndim:
        raise RankError(f"{name} needs x [batch, channels, *sizes] and a weight {layout}, got "
                        f"{x.type} and {w.type}", where=user_location(),
                        hint="add a batch axis with tz.expand_dims if x has none")
    return rank


def _fix_weights(weight: Value) -> None:
    """Sizes of weights are those of a layer: its code is made for them, and for any image.

    Register tiles, panels and the loops over a window are nothing without these numbers; with
    symbolic ones a convolution was measured 50 to 100 times as slow.
    """
    for size in weight.shape:
        known(size)


@operator(family="conv")
def conv(x: Any, weight: Any, bias: Any = None, *, strides: Any = 1, padding: Any = 0,
         dilation: Any = 1, groups: int = 1) -> Any:
    """a layer of convolutions: x [N, C, *S], weight [O, C/groups, *K]; any number of axes

    `padding` is a number, one an axis, or pairs (before, after), in zeros.
    """
    rank = _require_layer("conv", x, weight, "[outputs, channels / groups, *sizes]")
    _fix_weights(weight)
    result = convolve(channels_last(x), permute_dims(weight, axes=(*range(2, rank + 2), 1, 0)),
                      strides=_each(strides, rank, "strides"), padding=_pads(padding, rank),
                      dilation=_each(dilation, rank, "dilation"), groups=groups)
    return channels_first(result if bias is None else result + bias)


@operator(family="conv")
def conv_transpose(x: Any, weight: Any, bias: Any = None, *, strides: Any = 1, padding: Any = 0,
                   output_padding: Any = 0, dilation: Any = 1, groups: int = 1) -> Any:
    """what turns a convolution's gradient back: x [N, C, *S], weight [C, O/groups, *K]"""
    rank = _require_layer("conv_transpose", x, weight, "[channels, outputs / groups, *sizes]")
    _fix_weights(weight)
    steps, gaps = _each(strides, rank, "strides"), _each(dilation, rank, "dilation")
    extra, pads = _each(output_padding, rank, "output_padding"), _pads(padding, rank)
    channels = weight.shape[0]
    if not multiple(channels, groups):
        raise ShapeError(f"{channels} channels do not divide into {groups} groups",
                         where=user_location())
    ends = tuple((lo, hi - more) for (lo, hi), more in zip(pads, extra, strict=True))
    known = all(isinstance(n, int) for n in weight.shape[2:])
    way = _by_phases if known and max(steps) > 1 and max(gaps) == 1 else _by_spreading
    result = way(channels_last(x), weight, steps, ends, gaps, groups)
    return channels_first(result if bias is None else result + bias)


def _by_spreading(x: Value, weight: Value, strides: tuple[int, ...], ends: Pads,
                  dilation: tuple[int, ...], groups: int) -> Value:
    """A transposed convolution as one over x with zeros between its elements."""
    channels, share, *taps = weight.shape
    space = tuple(range(len(taps)))
    split = in_shape(weight, (groups, channels // groups, share, *taps))
    moved = permute_dims(split, axes=(*(d + 3 for d in space), 1, 0, 2))
    window = flip(in_shape(moved, (*taps, channels // groups, groups * share)), axis=space)
    around = tuple(((n - 1) * d - lo, (n - 1) * d - hi) for n, d, (lo, hi) in zip(
        taps, dilation, ends, strict=True))
    return convolve(_spread(x, strides), window, strides=(1,) * len(taps), padding=around,
                    dilation=dilation, groups=groups)


def _by_phases(x: Value, weight: Value, strides: tuple[int, ...], ends: Pads,
               dilation: tuple[int, ...], groups: int) -> Value:
    """A transposed convolution as one for each phase of the strides (sub-pixel convolution).

    Output `q * stride + r` meets the taps `r`, `r + stride`, ... only, over x from q down. So all
    phases are outputs of one convolution over x as it is, and are then laid side by side.
    """
    rank = len(strides)
    channels, share = weight.shape[:2]
    taps: Any = weight.shape[2:]
    known: Any = ends
    turns = [-(-n // s) for n, s in zip(taps, strides, strict=True)]
    whole = [m * s for m, s in zip(turns, strides, strict=True)]
    filled = place(weight, shape=(channels, share, *whole), starts=(0,) * weight.ndim,
                   steps=(1,) * weight.ndim)
    pairs = [n for pair in zip(turns, strides, strict=True) for n in pair]
    split = in_shape(filled, (groups, channels // groups, share, *pairs))
    moved = permute_dims(split, axes=(*range(3, 3 + 2 * rank, 2), 1, 0,
                                      *range(4, 4 + 2 * rank, 2), 2))
    phases = share
    for stride in strides:
        phases = phases * stride
    window = flip(in_shape(moved, (*turns, channels // groups, groups * phases)),
                  axis=tuple(range(rank)))
    made = convolve(x, window, strides=(1,) * rank, padding=tuple((m - 1, m - 1) for m in turns),
                    dilation=(1,) * rank, groups=groups)
    sizes = made.shape[1:-1]
    apart = in_shape(made, (x.shape[0], *sizes, groups, *strides, share))
    beside = permute_dims(apart, axes=(0, *(a for d in range(rank) for a in (
        1 + d, rank + 2 + d)), rank + 1, 2 * rank + 2))
    full = tuple(n * s for n, s in zip(sizes, strides, strict=True))
    result = in_shape(beside, (x.shape[0], *full, groups * share))
    # What hangs over is cut off; what output padding adds beyond the last tap is zero.
    over = [w - n + hi for w, n, (_, hi) in zip(whole, taps, known, strict=True)]
    stops = [n - max(cut, 0) for n, cut in zip(full, over, strict=True)]
    starts = [lo for lo, _ in known]
    result = slice_(result, starts=(0, *starts, 0), stops=(x.shape[0], *stops, groups * share),
                    steps=(1,) * (rank + 2))
    if min(over) < 0:
        result = place(result, shape=(x.shape[0], *(n - min(cut, 0) for n, cut in zip(
            result.shape[1:-1], over, strict=True)), groups * share),
            starts=(0,) * (rank + 2), steps=(1,) * (rank + 2))
    return result
