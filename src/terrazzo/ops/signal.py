"""Signals: discrete Fourier transforms as ONNX has them, windows, mel filters.

Here the last axis of a tensor holds real and imaginary parts, or real ones alone.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from terrazzo.base.shapes import dims_text, normalize_axis
from terrazzo.dtypes import DType, as_dtype
from terrazzo.errors import ArgumentError, DTypeError, ShapeError, user_location
from terrazzo.graph.applying import as_value, constant
from terrazzo.graph.ir import Value
from terrazzo.index import Index, IndexExpr
from terrazzo.index.guards import ask, granted, known
from terrazzo.ops.arrange import flip, moveaxis, pad, sliding_window
from terrazzo.ops.define import operator
from terrazzo.ops.fourier import (
    DIRECT,
    forward_real,
    inverse_real,
    transform,
    transform_axis,
    transform_symbolic,
)
from terrazzo.ops.joining import concat
from terrazzo.ops.reduce import in_type
from terrazzo.ops.shape import reshape, span


# ---------------------------------------------------------------- what users call
def _known_length(x: Value, axis: int, name: str) -> int:
    n = known(x.shape[axis])
    if not isinstance(n, int):
        raise ShapeError(f"{name} along axis {axis} of {dims_text(x.shape)} needs its size to be "
                         "known", where=user_location())
    return n


def _check_signal(name: str, x: Value, least: int) -> None:
    if x.ndim < least or x.shape[-1] not in (1, 2):
        raise ShapeError(f"{name} needs a last axis of 1 (real) or 2 (complex) numbers after the "
                         f"signal's, not {dims_text(x.shape)}", where=user_location())
    if not x.dtype.is_float:
        raise DTypeError(f"{name} works on floats, not on {x.dtype.name}", where=user_location(),
                         hint="cast with tz.astype(x, 'float32') first")


def _resized(x: Any, axis: int, n: int) -> Any:
    """x cut or filled up with zeros to n along an axis."""
    have = x.shape[axis]
    if have < n:
        return pad(x, pad_width=tuple((0, n - have if d == axis else 0) for d in range(x.ndim)))
    return span(x, axis, 0, n) if have > n else x


@operator(family="signal")
def dft(x: Any, *, axis: int = -2, length: Index | None = None, inverse: bool = False,
        onesided: bool = False) -> Any:
    """the discrete Fourier transform along an axis; the last axis holds one or two parts

    `length` cuts the signal or fills it up with zeros. One-sided: only the first half of the
    result, or, for the inverse, real numbers from the first half.
    """
    return transformed(x, axis, length, inverse, onesided)


def transformed(x: Any, axis: int, length: Index | None, inverse: bool, onesided: bool,
                factor: float = 1.0, root: bool = False) -> Any:
    """What `dft` answers, times a factor; with `root`, by the root of the length both ways."""
    _check_signal("dft", x, 2)
    axis = normalize_axis(axis, x.ndim)
    if axis == x.ndim - 1:
        raise ArgumentError("the last axis holds real and imaginary parts; dft goes along another",
                            where=user_location())
    n: Index
    if (inverse and onesided) or not (length is None or granted("==", length, x.shape[axis])) or (
            not granted("<=", x.shape[axis], DIRECT)):  # how a long one is done depends on it
        have = _known_length(x, axis, "dft")
        n = length if length is not None else 2 * (have - 1) if inverse and onesided else have
    else:
        n = x.shape[axis]
    if not granted("<=", 1, n) and ask("<=", 1, n) is False:
        raise ArgumentError(f"the length of a dft is at least 1, not {n}", where=user_location())
    narrow: DType = x.dtype
    if isinstance(n, int):
        factor *= n ** (0.5 if inverse else -0.5) if root else 1.0
    elif root or factor != 1:
        raise ShapeError(f"a transform of {n} numbers, which are not known, is not scaled",
                         where=user_location())
    wide = in_type(x, narrow.compute)
    if isinstance(n, int) and wide.shape[-1] == 2 and not onesided:
        resized = _resized(wide, axis, n)
        return in_type(transform_axis(resized, axis, 1 if inverse else -1,
                                      factor / n if inverse else factor), narrow)
    lines = moveaxis(wide, source=axis, destination=-2)
    if isinstance(n, int):
        lines = _resized(lines, lines.ndim - 2, n // 2 + 1 if inverse and onesided else n)
    result = _along_lines(lines, n, inverse, onesided, factor)
    result = moveaxis(result, source=-2, destination=axis)
    return in_type(result, narrow)


def _along_lines(x: Any, n: Index, inverse: bool, onesided: bool, factor: float = 1.0) -> Any:
    """The transform of x [..., n, 1 or 2] along its last axis but one."""
    if x.shape[-1] == 1 and not inverse:
        line = reshape(x, shape=x.shape[:-1])
        if onesided or isinstance(n, IndexExpr):
            return _times(forward_real(line, n // 2 + 1 if onesided else n), factor)
        return _mirrored(_times(forward_real(line, n // 2 + 1), factor), n)
    if x.shape[-1] == 1:
        x = pad(x, pad_width=((0, 0),) * (x.ndim - 1) + ((0, 1),))
    if inverse and onesided:
        assert isinstance(n, int)
        made = inverse_real(x, n, factor / n)
        return reshape(made, shape=(*made.shape, 1))
    sign = 1 if inverse else -1
    if isinstance(n, IndexExpr):
        result = transform_symbolic(x, sign)
        result = result / in_type(as_value(n), x.dtype) if inverse else result
    else:
        result = transform(x, sign, factor / n if inverse else factor)
    return span(result, -2, 0, n // 2 + 1) if onesided else result


def _times(x: Any, factor: float) -> Any:
    return x if factor == 1 else x * factor


def _mirrored(half: Any, n: int) -> Any:
    """All n numbers of the transform of real ones, of which half are the others' conjugates."""
    signs = constant(np.array([1.0, -1.0]), half.dtype)
    rest = flip(span(half, -2, 1, (n + 1) // 2), axis=-2) * signs
    return concat(half, rest, axis=-2)


@operator(family="signal")
def stft(signal: Any, window: Any = None, *, frame_step: int, frame_length: int | None = None,
         onesided: bool = True) -> Any:
    """the transforms of overlapping frames of a signal [batch, length, 1 or 2], times a window"""
    _check_signal("stft", signal, 3)
    if frame_length is None:
        frame_length = _known_length(signal, 1, "stft") if window is None else (
            _known_length(window, 0, "the window of an stft"))
    length = signal.shape[1]
    if frame_step < 1 or frame_length < 1 or ask("<", length, frame_length):
        raise ArgumentError(f"stft with frames of {frame_length} every {frame_step} of a signal of "
                            f"{length}", where=user_location())
    if window is not None and window.shape != (frame_length,):
        raise ShapeError(f"stft with frames of {frame_length} needs as long a window, not "
                         f"{dims_text(window.shape)}", where=user_location())
    narrow = signal.dtype
    wide = in_type(signal, narrow.compute)
    frames = sliding_window(wide, size=frame_length, step=frame_step, axis=1)
    if window is not None:
        frames = frames * in_type(window, wide.dtype)
    frames = moveaxis(frames, source=-1, destination=2)  # [batch, frame, time, part]
    result = _along_lines(frames, frame_length, False, onesided)
    return in_type(result, narrow)


# ---------------------------------------------------------------- windows and filters
def _window(terms: tuple[float, ...], size: int, periodic: bool, dtype: Any) -> Any:
    """The sum of terms[k] * cos(2 pi k j / n) over k; n is `size`, less 1 if not periodic."""
    if size < 0:
        raise ArgumentError(f"a window of {size} numbers", where=user_location())
    angle = 2 * math.pi * np.arange(size) / max(size if periodic else size - 1, 1)
    values = sum(a * np.cos(k * angle) for k, a in enumerate(terms))
    return constant(np.asarray(values), as_dtype(dtype))


@operator(family="signal", differentiable=False)
def hann_window(*, size: int, periodic: bool = True, dtype: Any = "float32") -> Any:
    """a raised cosine, 0 at its ends"""
    return _window((0.5, -0.5), size, periodic, dtype)


@operator(family="signal", differentiable=False)
def hamming_window(*, size: int, periodic: bool = True, dtype: Any = "float32") -> Any:
    """a raised cosine, 4/46 at its ends, with ONNX's coefficients 25/46 and 21/46"""
    return _window((25 / 46, -21 / 46), size, periodic, dtype)


@operator(family="signal", differentiable=False)
def blackman_window(*, size: int, periodic: bool = True, dtype: Any = "float32") -> Any:
    """a sum of three cosines, 0 at its ends"""
    return _window((0.42, -0.5, 0.08), size, periodic, dtype)


@operator(family="signal", differentiable=False)
def mel_weight_matrix(*, num_mel_bins: int, dft_length: int, sample_rate: float,
                      lower_edge_hertz: float, upper_edge_hertz: float,
                      dtype: Any = "float32") -> Any:
    """weights [dft_length // 2 + 1, num_mel_bins] that sum a spectrum into triangular mel bands

    Bands are evenly spaced in mels and begin and end at whole frequencies, as ONNX defines it.
    """
    mels = 2595 / math.log(10)
    low, high = (mels * math.log1p(edge / 700) for edge in (lower_edge_hertz, upper_edge_hertz))
    points = low + np.arange(num_mel_bins + 2) * ((high - low) / (num_mel_bins + 2))
    hertz = 700 * np.expm1(points / mels)
    left, center, right = (np.floor_divide((dft_length + 1) * hertz, sample_rate)[k:][:num_mel_bins]
                           for k in range(3))
    at = np.arange(dft_length // 2 + 1)[:, None]
    rising, falling = center - left, right - center
    with np.errstate(all="ignore"):
        up = np.where(rising > 0, (at - left) / rising, 1.0)
        down = (right - at) / falling
    weights = np.where((at >= left) & (at <= center), up, 0.0)
    weights = np.where((at >= center) & (at < right), down, weights)
    return constant(weights, as_dtype(dtype))
