"""Signals: discrete Fourier transforms, windows, mel filters.

A complex tensor is a real one whose last axis holds real and imaginary parts. A short transform is
one matrix product with known numbers; a long one is split into two shorter ones (Cooley and Tukey),
or, when its length is a large prime, into a convolution of a handier length (Bluestein). So nearly
all arithmetic happens in matrix products. One of symbolic length is a product with a matrix that
the graph computes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from terrazzo.dtypes import DType, as_dtype, float64
from terrazzo.errors import ArgumentError, DTypeError, ShapeError, user_location
from terrazzo.graph.ir import Value, as_value, constant
from terrazzo.index import Index, IndexExpr
from terrazzo.index.guards import ask, granted, known
from terrazzo.ops.arrange import flip, moveaxis, pad, sliding_window
from terrazzo.ops.contract import batch_matmul
from terrazzo.ops.creation import arange
from terrazzo.ops.define import operator
from terrazzo.ops.elementwise import cos, sin
from terrazzo.ops.reduce import in_type
from terrazzo.ops.shape import concat, permute_dims, reshape, span, stack
from terrazzo.shapes import dims_text, normalize_axis, num_elements

_DIRECT = 512  # up to this length one matrix product


# ---------------------------------------------------------------- transforms along the last axis
def _matrix(n: int, sign: int) -> np.ndarray:
    """exp(sign * 2 pi i j k / n) for all j, k < n; angles are reduced before they are rounded."""
    turns = np.outer(np.arange(n), np.arange(n)) % n
    return np.exp(sign * 2j * math.pi / n * turns)


def _as_real(matrix: np.ndarray) -> np.ndarray:
    """[2 n, 2 m] that multiplies interleaved rows as the complex [n, m] multiplies complex ones."""
    n, m = matrix.shape
    wide = np.empty((n, 2, m, 2))
    wide[:, 0, :, 0] = wide[:, 1, :, 1] = matrix.real
    wide[:, 0, :, 1] = matrix.imag
    wide[:, 1, :, 0] = -matrix.imag
    return wide.reshape(2 * n, 2 * m)


def _product(x: Any, matrix: np.ndarray) -> Any:
    """The last axis of x times a known matrix."""
    rows = num_elements(x.shape[:-1])
    flat = reshape(x, shape=(rows, x.shape[-1]))
    made = batch_matmul(flat, constant(matrix, x.dtype))
    return reshape(made, shape=(*x.shape[:-1], matrix.shape[1]))


def _times(x: Any, factors: np.ndarray) -> Any:
    """Complex x times known complex numbers, which broadcast."""
    re, im = (reshape(span(x, -1, k, k + 1), shape=x.shape[:-1]) for k in (0, 1))
    a, b = constant(factors.real, x.dtype), constant(factors.imag, x.dtype)
    return stack(re * a - im * b, re * b + im * a, axis=-1)


def _transform(x: Any, sign: int) -> Any:
    """The sum of x[j] * exp(sign * 2 pi i j k / n) over j, for complex x of shape [..., n, 2]."""
    n = x.shape[-2]
    if isinstance(n, IndexExpr):
        return _transform_symbolic(x, sign)
    if n <= _DIRECT:
        flat = reshape(x, shape=(*x.shape[:-2], 2 * n))
        return reshape(_product(flat, _as_real(_matrix(n, sign))), shape=x.shape)
    rows = _divisor(n)
    return _bluestein(x, sign) if rows == 1 else _split(x, sign, rows)


def _transform_symbolic(x: Any, sign: int) -> Any:
    *outer, n, _ = x.shape
    turns = reshape(arange(start=n), shape=(n, 1)) * arange(start=n) % as_value(n)
    angles = in_type(turns, float64) * (sign * 2 * math.pi / in_type(as_value(n), float64))
    real, imaginary = (in_type(f(angles), x.dtype) for f in (cos, sin))
    rows = num_elements(outer)
    re, im = (reshape(span(x, -1, k, k + 1), shape=(rows, n)) for k in (0, 1))
    parts = (batch_matmul(re, real) - batch_matmul(im, imaginary),
             batch_matmul(re, imaginary) + batch_matmul(im, real))
    return reshape(stack(*parts, axis=-1), shape=x.shape)


def _divisor(n: int) -> int:
    """The largest divisor of n up to its square root."""
    return next(d for d in range(math.isqrt(n), 0, -1) if n % d == 0)


def _split(x: Any, sign: int, rows: int) -> Any:
    """Transforms along the columns and then the rows of x laid out as a matrix."""
    *outer, n, _ = x.shape
    columns, rank = n // rows, len(outer)
    table = reshape(x, shape=(*outer, rows, columns, 2))
    swapped = (*range(rank), rank + 1, rank, rank + 2)
    table = _transform(permute_dims(table, axes=swapped), sign)  # [columns, rows]
    turns = np.outer(np.arange(columns), np.arange(rows))
    table = _times(table, np.exp(sign * 2j * math.pi / n * turns))
    table = _transform(permute_dims(table, axes=swapped), sign)  # [rows, columns]
    return reshape(permute_dims(table, axes=swapped), shape=x.shape)


def _bluestein(x: Any, sign: int) -> Any:
    """A convolution with a chirp: j k = (j^2 + k^2 - (k - j)^2) / 2."""
    n = x.shape[-2]
    size = 1 << (2 * n - 2).bit_length()
    squares = np.arange(n, dtype=object) ** 2 % (2 * n)
    chirp = np.exp(sign * 1j * math.pi / n * squares.astype(np.float64))
    kernel = np.zeros(size, complex)
    kernel[:n] = chirp.conj()
    kernel[size - n + 1:] = chirp[:0:-1].conj()
    room = ((0, 0),) * (x.ndim - 2) + ((0, size - n), (0, 0))
    spectrum = _transform(pad(_times(x, chirp), pad_width=room), -1)
    spectrum = _times(spectrum, np.fft.fft(kernel) / size)
    return _times(span(_transform(spectrum, 1), -2, 0, n), chirp)


def _forward_real(x: Any, count: Index) -> Any:
    """The first `count` numbers of the transform of real x [..., n]."""
    n = x.shape[-1]
    if isinstance(count, int) and n <= _DIRECT:
        matrix = _matrix(n, -1)[:, :count]
        both = np.stack([matrix.real, matrix.imag], -1).reshape(n, 2 * count)
        return reshape(_product(x, both), shape=(*x.shape[:-1], count, 2))
    whole = pad(reshape(x, shape=(*x.shape, 1)), pad_width=((0, 0),) * x.ndim + ((0, 1),))
    return span(_transform(whole, -1), -2, 0, count)


def _inverse_real(x: Any, n: int) -> Any:
    """The n real numbers whose transform begins with x [..., n // 2 + 1, 2]."""
    count = n // 2 + 1
    if n <= _DIRECT:
        matrix = _matrix(n, 1)[:count] / n
        matrix[1:(n + 1) // 2] *= 2  # stand also for their mirror images
        real = np.stack([matrix.real, -matrix.imag], 1)
        real[[0] if n % 2 else [0, count - 1], 1] = 0  # their imaginary parts count for nothing
        return _product(reshape(x, shape=(*x.shape[:-2], 2 * count)), real.reshape(2 * count, n))
    mirrored = flip(span(x, -2, 1, (n + 1) // 2), axis=-2)
    signs = np.array([1.0, -1.0])
    whole = concat(x, mirrored * constant(signs, x.dtype), axis=-2)
    made = span(_transform(whole, 1), -1, 0, 1)
    return reshape(made * (1.0 / n), shape=(*x.shape[:-2], n))


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


def _resized(x: Any, n: int) -> Any:
    """x [..., any, 2] cut or filled up with zeros to n."""
    have = x.shape[-2]
    if have < n:
        return pad(x, pad_width=((0, 0),) * (x.ndim - 2) + ((0, n - have), (0, 0)))
    return span(x, -2, 0, n) if have > n else x


@operator(family="signal")
def dft(x: Any, *, axis: int = -2, length: Index | None = None, inverse: bool = False,
        onesided: bool = False) -> Any:
    """the discrete Fourier transform along an axis; the last axis holds one or two parts

    `length` cuts the signal or fills it up with zeros. One-sided: only the first half of the
    result, or, for the inverse, real numbers from the first half.
    """
    _check_signal("dft", x, 2)
    axis = normalize_axis(axis, x.ndim)
    if axis == x.ndim - 1:
        raise ArgumentError("the last axis holds real and imaginary parts; dft goes along another",
                            where=user_location())
    n: Index
    if (inverse and onesided) or not (length is None or granted("==", length, x.shape[axis])) or (
            not granted("<=", x.shape[axis], _DIRECT)):  # a long one is split by its divisors
        have = _known_length(x, axis, "dft")
        n = length if length is not None else 2 * (have - 1) if inverse and onesided else have
    else:
        n = x.shape[axis]
    if not granted("<=", 1, n) and ask("<=", 1, n) is False:
        raise ArgumentError(f"the length of a dft is at least 1, not {n}", where=user_location())
    narrow: DType = x.dtype
    lines = moveaxis(in_type(x, narrow.compute), source=axis, destination=-2)
    if isinstance(n, int):
        lines = _resized(lines, n // 2 + 1 if inverse and onesided else n)
    result = _along_lines(lines, n, inverse, onesided)
    result = moveaxis(result, source=-2, destination=axis)
    return in_type(result, narrow)


def _along_lines(x: Any, n: Index, inverse: bool, onesided: bool) -> Any:
    """The transform of x [..., n, 1 or 2] along its last axis but one."""
    if x.shape[-1] == 1 and not inverse:
        return _forward_real(reshape(x, shape=x.shape[:-1]), n // 2 + 1 if onesided else n)
    if x.shape[-1] == 1:
        x = pad(x, pad_width=((0, 0),) * (x.ndim - 1) + ((0, 1),))
    if inverse and onesided:
        assert isinstance(n, int)
        made = _inverse_real(x, n)
        return reshape(made, shape=(*made.shape, 1))
    result = _transform(x, 1 if inverse else -1)
    if inverse:
        return result / in_type(as_value(n), x.dtype) if isinstance(n, IndexExpr) else (
            result * (1.0 / n))
    return span(result, -2, 0, n // 2 + 1) if onesided else result


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
