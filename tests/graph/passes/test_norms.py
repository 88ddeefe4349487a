"""Norms taken apart are found again, with their parameters, however they are written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import terrazzo as tz
from terrazzo.dtypes import float32
from terrazzo.graph.passes.norms import NORMS

sys.path.insert(0, str(Path(__file__).parent))
from patterns import operators, rewritten

EPS = 1e-5


def as_imported(x: Any) -> Any:
    """ReduceMean, as the importer writes it."""
    return tz.sum(x, axis=(2,), keepdims=True) / x.shape[-1]


def centred(x: Any) -> Any:
    return x - as_imported(x)


def variance(x: Any) -> Any:
    return as_imported(tz.power(centred(x), 2.0)) + EPS


def mean_square(x: Any) -> Any:
    return as_imported(x * x) + EPS


LAYER: dict[str, Callable[[Any], Any]] = {
    "division by a root": lambda x: centred(x) / tz.sqrt(variance(x)),
    "product": lambda x: centred(x) / tz.sqrt(EPS + as_imported(centred(x) * centred(x))),
    "rsqrt": lambda x: centred(x) * tz.rsqrt(variance(x)),
    "reciprocal": lambda x: tz.reciprocal(tz.sqrt(variance(x))) * centred(x),
    "quotient": lambda x: centred(x) * (1.0 / tz.sqrt(variance(x))),
    "power": lambda x: centred(x) / tz.power(variance(x), 0.5),
}
RMS: dict[str, Callable[[Any], Any]] = {
    "rsqrt": lambda x: x * tz.rsqrt(mean_square(x)),
    "power": lambda x: x * tz.rsqrt(as_imported(tz.power(x, 2.0)) + EPS),
    "square": lambda x: tz.rsqrt(EPS + as_imported(tz.square(x))) * x,
    "reciprocal": lambda x: x * tz.reciprocal(tz.sqrt(mean_square(x))),
    "quotient": lambda x: x * (1.0 / tz.sqrt(mean_square(x))),
    "division by a root": lambda x: x / tz.sqrt(mean_square(x)),
    "negative power": lambda x: x * tz.power(mean_square(x), -0.5),
}


@pytest.fixture
def x(rng: np.random.Generator) -> np.ndarray:
    return (3.0 + 2.0 * rng.standard_normal((2, 5, 8))).astype(np.float32)


@pytest.fixture
def weight(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal(8, np.float32)


@pytest.mark.parametrize("form", LAYER)
def test_layer_norm(form: str, x: np.ndarray) -> None:
    after, fired = rewritten(NORMS, LAYER[form], x)
    assert fired == {"layer norm"} and operators(after) == ["layer_norm"]
    assert after.nodes[-1].attrs["eps"] == np.float32(EPS)


@pytest.mark.parametrize("form", RMS)
def test_rms_norm(form: str, x: np.ndarray) -> None:
    after, fired = rewritten(NORMS, RMS[form], x)
    assert fired == {"rms norm"} and operators(after) == ["rms_norm"]


@pytest.mark.parametrize("shape", [(8,), (1, 1, 8)])
def test_parameters(shape: tuple[int, ...], x: np.ndarray, weight: np.ndarray) -> None:
    def form(x: Any, w: Any) -> Any:
        return w * LAYER["division by a root"](x) + (w + 1.0)

    after, fired = rewritten(NORMS, form, x, weight.reshape(shape))
    assert fired == {"layer norm", "weight of a norm", "bias of a norm"}
    assert after.outputs[0].node is not None and after.outputs[0].node.op.name == "layer_norm"
    assert "multiply" not in operators(after)


@pytest.mark.parametrize("form", [
    lambda x, w: w * RMS["rsqrt"](x), lambda x, w: RMS["division by a root"](x) * w,
    lambda x, w: x * (tz.rsqrt(mean_square(x)) * w)])
def test_weight_of_rms_norm(form: Callable[..., Any], x: np.ndarray, weight: np.ndarray) -> None:
    after, fired = rewritten(NORMS, form, x, weight)
    assert "rms norm" in fired and operators(after) == ["rms_norm"]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_types_are_widened_by_the_operator(dtype: Any, x: np.ndarray, weight: np.ndarray
                                                ) -> None:
    def form(x: Any, w: Any) -> Any:  # as Llama does it
        wide = tz.astype(x, dtype=float32)
        return w * tz.astype(RMS["rsqrt"](wide), dtype=x.dtype)

    after, fired = rewritten(NORMS, form, x.astype(dtype), weight.astype(dtype))
    assert fired == {"rms norm", "norm of a half type", "weight of a norm"}
    assert operators(after) == ["rms_norm"]


def test_over_several_axes(x: np.ndarray) -> None:
    def form(x: Any) -> Any:
        d = x - tz.sum(x, axis=(1, 2), keepdims=True) / 40
        return d / tz.sqrt(tz.sum(d * d, axis=(1, 2), keepdims=True) / 40 + EPS)

    after, fired = rewritten(NORMS, form, x)
    assert fired == {"layer norm"} and after.nodes[-1].attrs["axis"] == (1, 2)


def off_centre(x: Any) -> Any:
    d = x - as_imported(x * 2.0)
    return d / tz.sqrt(as_imported(d * d) + EPS)


@pytest.mark.parametrize("form", [
    lambda x: centred(x) / (variance(x)),  # no root
    lambda x: centred(x) / tz.sqrt(as_imported(tz.power(centred(x), 4.0)) + EPS),
    lambda x: centred(x) / tz.sqrt(variance(x * 2.0)),
    lambda x: x * tz.rsqrt(mean_square(x + 1.0)),
    lambda x: x * tz.rsqrt(tz.sum(x * x, axis=(2,), keepdims=True) + EPS),  # no mean
    lambda x: x * tz.rsqrt(tz.sum(x * x, axis=(1,), keepdims=True) / 5 + EPS),  # not the last axis
    lambda x: x * tz.rsqrt(tz.sum(x * x, axis=(2,), keepdims=True) / 7 + EPS),  # of another size
    lambda x: x * tz.rsqrt(as_imported(x * x)),  # no eps
])
def test_what_is_something_else_stays(form: Callable[..., Any], x: np.ndarray) -> None:
    assert rewritten(NORMS, form, x)[1] == set()


def test_what_is_centred_elsewhere_is_an_rms_norm(x: np.ndarray) -> None:
    after, fired = rewritten(NORMS, off_centre, x)
    assert fired == {"rms norm"} and "rms_norm" in operators(after)


@pytest.mark.parametrize("shape", [(5, 1), (2, 5, 8), (1,)])
def test_factors_along_other_axes_stay(shape: tuple[int, ...], x: np.ndarray,
                                       rng: np.random.Generator) -> None:
    w = rng.standard_normal(shape, np.float32)
    after, fired = rewritten(NORMS, lambda x, w: w * RMS["rsqrt"](x), x, w)
    assert fired == {"rms norm"} and operators(after) == ["rms_norm", "multiply"]


def test_a_norm_that_others_read_keeps_its_weight_outside(x: np.ndarray, weight: np.ndarray
                                                          ) -> None:
    def form(x: Any, w: Any) -> Any:
        y = RMS["rsqrt"](x)
        return w * y + tz.exp(-y)

    assert rewritten(NORMS, form, x, weight)[1] == {"rms norm"}
