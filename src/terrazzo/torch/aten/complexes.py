"""Complex numbers and Fourier transforms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from terrazzo.graph.ir import TensorType
from terrazzo.ops import complex as c
from terrazzo.ops import spectra
from terrazzo.ops.elementwise import isnan, less, negative, where
from terrazzo.torch.aten.registry import CONVERTERS, Converter, aten, unsupported

CONVERTERS.update({f"aten.{name}": Converter(function) for name, function in {
    "view_as_real": c.view_as_real, "view_as_complex": c.view_as_complex, "real": c.real,
    "imag": c.imag, "_conj": c.conj, "_conj_physical": c.conj, "conj_physical": c.conj,
    "_neg_view": negative,
    "complex": c.complex_, "polar": c.polar, "view_as_real_copy": c.view_as_real,
    "view_as_complex_copy": c.view_as_complex}.items()})


@aten("angle", promotes="INT_TO_FLOAT")
def angle(x: Any) -> Any:
    if x.dtype.is_complex:
        return c.angle(x)
    return where(isnan(x), x, where(less(x, 0), math.pi, 0.0))


@aten("resolve_conj", "resolve_neg")
def resolved(x: Any) -> Any:
    return x


# torch names by a number what transforms are divided by: nothing, the root of the length, it.
_DIVISORS = (lambda n: 1.0, lambda n: 1 / math.sqrt(n), lambda n: 1 / n)


def _scale(sizes: Sequence[Any], normalization: int) -> float:
    if not all(isinstance(n, int) for n in sizes):
        unsupported("a Fourier transform of a length that varies")
    return _DIVISORS[normalization](max(math.prod(sizes), 1))


def _scaled(y: Any, scale: float) -> Any:
    return y if scale == 1 else y * scale


@aten("_fft_c2c")
def fft_c2c(x: Any, dim: Sequence[int], normalization: int, forward: bool) -> Any:
    if not dim:
        return x
    scale = _scale([x.shape[d] for d in dim], normalization)
    axes = tuple(dim)
    if forward:
        return _scaled(spectra.fftn(x, axes=axes), scale)
    return _scaled(spectra.ifftn(x, axes=axes, norm="forward"), scale)


@aten("_fft_r2c")
def fft_r2c(x: Any, dim: Sequence[int], normalization: int, onesided: bool) -> Any:
    scale = _scale([x.shape[d] for d in dim], normalization)
    function = spectra.rfftn if onesided else spectra.fftn
    return _scaled(function(x, axes=tuple(dim)), scale)


@aten("_fft_c2r", typed=True)
def fft_c2r(x: Any, dim: Sequence[int], normalization: int, last_dim_size: Any, *,
            out: TensorType) -> Any:
    sizes = [last_dim_size if d == dim[-1] else x.shape[d] for d in dim]
    scale = _scale(sizes, normalization)
    y = spectra.irfftn(x, s=tuple(sizes), axes=tuple(dim), norm="forward")
    return _scaled(y, scale)
