"""Fourier transforms of complex numbers, by the names and options of numpy.fft and torch.fft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from terrazzo.base.shapes import normalize_axes, normalize_axis
from terrazzo.dtypes import default_float
from terrazzo.errors import ArgumentError, DTypeError, user_location
from terrazzo.index import Index
from terrazzo.index.guards import known
from terrazzo.ops.complex import view_as_complex, whole
from terrazzo.ops.define import operator
from terrazzo.ops.joining import concat
from terrazzo.ops.reduce import in_type
from terrazzo.ops.shape import reshape, span
from terrazzo.ops.signal import transformed

_NORMS = ("backward", "ortho", "forward")


def _in_parts(x: Any) -> Any:
    """Numbers with a last axis of one or two parts, in a type that transforms are made for."""
    if x.dtype.is_complex:
        return whole(x)
    wide = x.dtype.compute if x.dtype.is_float else default_float
    return in_type(reshape(x, shape=(*x.shape, 1)), wide)


def _along(x: Any, n: Index | None, axis: int, norm: str | None, inverse: bool, onesided: bool
           ) -> Any:
    """One transform, on parts."""
    norm = norm or "backward"
    if norm not in _NORMS:
        raise ArgumentError(f"a Fourier transform has no norm {norm!r}", where=user_location(),
                            hint=f"one of {', '.join(_NORMS)}")
    axis = normalize_axis(axis, x.ndim - 1)
    have = known(x.shape[axis])  # butterflies are made for one length
    size = n
    if size is None:
        size = 2 * (have - 1) if inverse and onesided else have
    factor = 1.0
    if norm == "forward":
        if not isinstance(size, int):
            raise ArgumentError("norm='forward' needs a length that is known",
                                where=user_location())
        factor = float(size) if inverse else 1.0 / max(size, 1)
    return transformed(x, axis, n, inverse, onesided, factor, norm == "ortho")


def _real_only(name: str, x: Any) -> None:
    if x.dtype.is_complex:
        raise DTypeError(f"{name} transforms real numbers, not {x.dtype.name}",
                         where=user_location(), hint="use the transform without the r")


@operator(family="signal")
def fft(x: Any, *, n: Any = None, axis: int = -1, norm: str = "backward") -> Any:
    """the discrete Fourier transform along an axis, cut or filled up with zeros to n"""
    return view_as_complex(_along(_in_parts(x), n, axis, norm, False, False))


@operator(family="signal")
def ifft(x: Any, *, n: Any = None, axis: int = -1, norm: str = "backward") -> Any:
    """the inverse of fft"""
    return view_as_complex(_along(_in_parts(x), n, axis, norm, True, False))


@operator(family="signal")
def rfft(x: Any, *, n: Any = None, axis: int = -1, norm: str = "backward") -> Any:
    """the first n // 2 + 1 numbers of the transform of real numbers, which tell the others"""
    _real_only("rfft", x)
    return view_as_complex(_along(_in_parts(x), n, axis, norm, False, True))


@operator(family="signal")
def irfft(x: Any, *, n: Any = None, axis: int = -1, norm: str = "backward") -> Any:
    """the n real numbers whose transform begins with x; n is even unless it is given"""
    made = _along(_in_parts(x), n, axis, norm, True, True)
    return reshape(made, shape=made.shape[:-1])


def _axes(x: Any, s: Sequence[Any] | None, axes: Sequence[int] | None
          ) -> list[tuple[int, Any]]:
    """Axes and the lengths that are asked for, the last one first."""
    rank = x.ndim
    if axes is None:
        axes = tuple(range(rank)) if s is None else tuple(range(rank - len(s), rank))
    lengths = [None] * len(axes) if s is None else list(s)
    if len(lengths) != len(axes):
        raise ArgumentError(f"a transform along {len(axes)} axes was given {len(lengths)} lengths",
                            where=user_location())
    return list(zip((normalize_axis(a, rank) for a in axes), lengths, strict=True))[::-1]


def _over(x: Any, s: Any, axes: Any, norm: str, inverse: bool) -> Any:
    made = _in_parts(x)
    for axis, n in _axes(x, s, axes):
        made = _along(made, n, axis, norm, inverse, False)
    return view_as_complex(made)


@operator(family="signal")
def fftn(x: Any, *, s: Any = None, axes: Any = None, norm: str = "backward") -> Any:
    """the discrete Fourier transform along several axes, all of them unless named"""
    return _over(x, s, axes, norm, False)


@operator(family="signal")
def ifftn(x: Any, *, s: Any = None, axes: Any = None, norm: str = "backward") -> Any:
    """the inverse of fftn"""
    return _over(x, s, axes, norm, True)


@operator(family="signal")
def rfftn(x: Any, *, s: Any = None, axes: Any = None, norm: str = "backward") -> Any:
    """rfft along the last of several axes, then fft along the others"""
    _real_only("rfftn", x)
    (last, n), *others = _axes(x, s, axes)
    made = _along(_in_parts(x), n, last, norm, False, True)
    for axis, n in others:
        made = _along(made, n, axis, norm, False, False)
    return view_as_complex(made)


@operator(family="signal")
def irfftn(x: Any, *, s: Any = None, axes: Any = None, norm: str = "backward") -> Any:
    """the inverse of rfftn"""
    (last, n), *others = _axes(x, s, axes)
    made = _in_parts(x)
    for axis, length in reversed(others):
        made = _along(made, length, axis, norm, True, False)
    made = _along(made, n, last, norm, True, True)
    return reshape(made, shape=made.shape[:-1])


@operator(family="signal")
def fft2(x: Any, *, s: Any = None, axes: Any = (-2, -1), norm: str = "backward") -> Any:
    """the discrete Fourier transform along two axes"""
    return _over(x, s, axes, norm, False)


@operator(family="signal")
def ifft2(x: Any, *, s: Any = None, axes: Any = (-2, -1), norm: str = "backward") -> Any:
    """the inverse of fft2"""
    return _over(x, s, axes, norm, True)


@operator(family="signal")
def rfft2(x: Any, *, s: Any = None, axes: Any = (-2, -1), norm: str = "backward") -> Any:
    """rfft along the second of two axes, then fft along the first"""
    return rfftn(x, s=s, axes=axes, norm=norm)


@operator(family="signal")
def irfft2(x: Any, *, s: Any = None, axes: Any = (-2, -1), norm: str = "backward") -> Any:
    """the inverse of rfft2"""
    return irfftn(x, s=s, axes=axes, norm=norm)


def _shifted(x: Any, axes: Any, back: bool) -> Any:
    for axis in normalize_axes(axes, x.ndim):
        n = x.shape[axis]
        first = n // 2 if back else n - n // 2
        x = concat(span(x, axis, first, n), span(x, axis, 0, first), axis=axis)
    return x


@operator(family="signal")
def fftshift(x: Any, *, axes: Any = None) -> Any:
    """frequencies from the lowest to the highest, with 0 in the middle"""
    return _shifted(x, axes, False)


@operator(family="signal")
def ifftshift(x: Any, *, axes: Any = None) -> Any:
    """the inverse of fftshift"""
    return _shifted(x, axes, True)


__all__ = ["fft", "fft2", "fftn", "fftshift", "ifft", "ifft2", "ifftn", "ifftshift", "irfft",
           "irfft2", "irfftn", "rfft", "rfft2", "rfftn"]
