"""Fourier transforms along an axis, of whatever length it has.

Complex numbers are real ones whose last axis holds two parts. A length that is a product of small
primes is transformed by butterflies (`fourier_loops`); any other short one by a matrix product with
known numbers, and a long one by a convolution of a handier length (Bluestein). Real numbers of even
length are transformed as half as many complex ones. A symbolic length is a product with a matrix
that the graph computes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from terrazzo.base.shapes import Shape, num_elements
from terrazzo.dtypes import float64
from terrazzo.errors import ShapeError, user_location
from terrazzo.graph.applying import as_value, constant
from terrazzo.graph.ir import Node, Value
from terrazzo.index import Index, IndexExpr
from terrazzo.ops.arrange import flip, moveaxis, pad
from terrazzo.ops.contract import batch_matmul
from terrazzo.ops.creation import arange
from terrazzo.ops.define import operator
from terrazzo.ops.elementwise import cos, sin
from terrazzo.ops.fourier_loops import (
    LONGEST_COLUMN,
    half_roots,
    real_halves,
    transformed_columns,
    transformed_lines,
)
from terrazzo.ops.fourier_plans import is_smooth
from terrazzo.ops.fourier_rows import transformed_rows
from terrazzo.ops.joining import concat, stack
from terrazzo.ops.reduce import in_type
from terrazzo.ops.shape import reshape, span

DIRECT = 512  # up to this length one matrix product is an answer
_TINY = 24  # up to this length it is the best one: too few numbers for vectors of columns
_SHORT = 48  # the same for real numbers, whose matrix is half as wide
_HALVED = 10  # from this even length on halves are transformed apart: of 8 it takes longer
_WIDE = 8  # columns side by side that are worth a vector


# ---------------------------------------------------------------- complex numbers
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


def transform(x: Any, sign: int, scale: float = 1.0) -> Any:
    """scale * the sum of x[j] * exp(sign * 2 pi i j k / n) over j, for complex x [..., n, 2]."""
    n = x.shape[-2]
    assert isinstance(n, int)
    if n > _TINY and is_smooth(n):
        return transformed_lines(x, sign, scale)
    if n <= DIRECT:
        return _direct(x, scale * _matrix(n, sign))
    return _bluestein(x, sign, scale)


def _direct(x: Any, matrix: np.ndarray) -> Any:
    """Complex lines x [..., n, 2] times the matrix of their transform.

    Of an even length, halves are added and subtracted first: every other number of the result comes
    of their sums, the rest of their differences. That is half the work, and half the rounding:
    products of 16 numbers erred 1.5 times as much as butterflies do, and much more where numbers
    are nearly alike.
    """
    n = x.shape[-2]
    if n % 2 or n < _HALVED:
        flat = reshape(x, shape=(*x.shape[:-2], 2 * n))
        return reshape(_product(flat, _as_real(matrix)), shape=x.shape)
    half, shape = n // 2, (*x.shape[:-2], n)
    first, last = (reshape(span(x, -2, at, at + half), shape=shape) for at in (0, half))
    parts = [_product(given, _as_real(matrix[:half, odd::2]))
             for odd, given in enumerate((first + last, first - last))]
    apart = [reshape(part, shape=(*x.shape[:-2], half, 1, 2)) for part in parts]
    return reshape(concat(*apart, axis=-2), shape=x.shape)


def transform_axis(x: Any, axis: int, sign: int, scale: float = 1.0) -> Any:
    """The same along any axis but the last, in place where its columns are worth a vector."""
    n = x.shape[axis]
    inner = num_elements(x.shape[axis + 1:-1])
    if not (isinstance(n, int) and 1 < n <= LONGEST_COLUMN and is_smooth(n)
            and isinstance(inner, int) and inner >= _WIDE):
        lines = moveaxis(x, source=axis, destination=-2)
        return moveaxis(transform(lines, sign, scale), source=-2, destination=axis)
    merged = reshape(x, shape=(*x.shape[:axis + 1], inner, 2))
    return reshape(transformed_columns(merged, sign, scale), shape=x.shape)


def transform_symbolic(x: Any, sign: int) -> Any:
    """The same, unscaled, for n that is not known."""
    *outer, n, _ = x.shape
    turns = reshape(arange(start=n), shape=(n, 1)) * arange(start=n) % as_value(n)
    angles = in_type(turns, float64) * (sign * 2 * math.pi / in_type(as_value(n), float64))
    real, imaginary = (in_type(f(angles), x.dtype) for f in (cos, sin))
    rows = num_elements(outer)
    re, im = (reshape(span(x, -1, k, k + 1), shape=(rows, n)) for k in (0, 1))
    parts = (batch_matmul(re, real) - batch_matmul(im, imaginary),
             batch_matmul(re, imaginary) + batch_matmul(im, real))
    return reshape(stack(*parts, axis=-1), shape=x.shape)


def _bluestein(x: Any, sign: int, scale: float) -> Any:
    """A convolution with a chirp: j k = (j^2 + k^2 - (k - j)^2) / 2."""
    n = x.shape[-2]
    size = 1 << (2 * n - 2).bit_length()
    squares = np.arange(n, dtype=object) ** 2 % (2 * n)
    chirp = np.exp(sign * 1j * math.pi / n * squares.astype(np.float64))
    kernel = np.zeros(size, complex)
    kernel[:n] = chirp.conj()
    kernel[size - n + 1:] = chirp[:0:-1].conj()
    room = ((0, 0),) * (x.ndim - 2) + ((0, size - n), (0, 0))
    spectrum = transform(pad(_times(x, chirp), pad_width=room), -1)
    spectrum = _times(spectrum, np.fft.fft(kernel) * (scale / size))
    return _times(span(transform(spectrum, 1), -2, 0, n), chirp)


# ---------------------------------------------------------------- real numbers
def _ends(count: int, dtype: Any, inner: float) -> Any:
    """1 at both ends of a half spectrum [count, 2], and `inner` between."""
    weights = np.full((count, 1), inner)
    weights[[0, -1]] = 1
    return constant(weights, dtype)


def _rfft_grad(node: Node, g: Value) -> list[Value | None]:
    count = g.shape[-2]
    assert isinstance(count, int)
    return [irfft_lines(g * _ends(count, g.dtype, 0.5), scale=1.0)]


def _half(shape: Shape, axes: int, less: int = 0) -> int:
    n = shape[-axes] if len(shape) >= axes else 0
    if not isinstance(n, int) or n == 0 or (less == 0 and n % 2) or n <= less:
        raise ShapeError(f"the length {n} of a real transform by halves has to be even, known and "
                         "not 0", where=user_location(), hint="call tz.rfft or tz.irfft")
    return n // 2 if less == 0 else n - less


@operator(family="signal", grad=_rfft_grad)
def rfft_lines(x: Any) -> Any:
    """the first half [..., n / 2 + 1, 2] of the transforms of real x [..., n], for even n"""
    half = _half(x.shape, 1)
    given = reshape(x, shape=(*x.shape[:-1], half, 2))
    rows = transformed_rows(given, inverse=False)
    if rows is not None:
        return rows
    pairs = transform(given, -1)
    return real_halves(pairs, constant(half_roots(half, -1), x.dtype), inverse=False)


def _irfft_grad(node: Node, g: Value) -> list[Value | None]:
    count = g.shape[-1] // 2 + 1
    assert isinstance(count, int)
    return [rfft_lines(g) * (node.attrs["scale"] * _ends(count, g.dtype, 2.0))]


@operator(family="signal", grad=_irfft_grad)
def irfft_lines(x: Any, *, scale: float) -> Any:
    """the n real numbers whose transforms begin with x [..., n / 2 + 1, 2], times scale * n"""
    half = _half(x.shape, 2, 1)
    made = transformed_rows(x, inverse=True, scale=scale)
    if made is None:
        pairs = real_halves(x, constant(half_roots(half, 1), x.dtype), inverse=True)
        made = transform(pairs, 1, 2 * scale)
    return reshape(made, shape=(*x.shape[:-2], 2 * half))


def _by_halves(n: int) -> bool:
    """Whether real numbers are best transformed as half as many complex ones."""
    return n % 2 == 0 and ((n > _SHORT and is_smooth(n // 2)) or n > DIRECT)


def forward_real(x: Any, count: Index) -> Any:
    """The first `count` numbers of the transforms of real x [..., n]."""
    n = x.shape[-1]
    if isinstance(n, int) and _by_halves(n) and count == n // 2 + 1:
        return rfft_lines(x)
    if isinstance(n, int) and n <= DIRECT and not (n > _SHORT and is_smooth(n)):
        assert isinstance(count, int)
        matrix = _matrix(n, -1)[:, :count]
        both = np.stack([matrix.real, matrix.imag], -1).reshape(n, 2 * count)
        return reshape(_product(x, both), shape=(*x.shape[:-1], count, 2))
    whole = pad(reshape(x, shape=(*x.shape, 1)), pad_width=((0, 0),) * x.ndim + ((0, 1),))
    made = transform_symbolic(whole, -1) if isinstance(n, IndexExpr) else transform(whole, -1)
    return span(made, -2, 0, count)


def inverse_real(x: Any, n: int, scale: float) -> Any:
    """The n real numbers whose transforms begin with x [..., n // 2 + 1, 2], times scale * n."""
    count = n // 2 + 1
    if _by_halves(n):
        return irfft_lines(x, scale=scale)
    if n <= DIRECT:
        matrix = _matrix(n, 1)[:count] * scale
        matrix[1:(n + 1) // 2] *= 2  # stand also for their mirror images
        real = np.stack([matrix.real, -matrix.imag], 1)
        real[[0] if n % 2 else [0, count - 1], 1] = 0  # their imaginary parts count for nothing
        return _product(reshape(x, shape=(*x.shape[:-2], 2 * count)), real.reshape(2 * count, n))
    signs = constant(np.array([1.0, -1.0]), x.dtype)
    mirrored = flip(span(x, -2, 1, count), axis=-2) * signs  # n is odd
    first = span(x, -2, 0, 1) * constant(np.array([1.0, 0.0]), x.dtype)
    whole = concat(first, span(x, -2, 1, count), mirrored, axis=-2)
    made = span(transform(whole, 1, scale), -1, 0, 1)
    return reshape(made, shape=(*x.shape[:-2], n))
