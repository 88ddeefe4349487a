"""Convolutions against torch in float64: paddings, strides, dilations, groups, ranks, gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from checking import (
    check_gradient,
    check_primitive,
    close,
    draw,
    evaluate,
    express,
    infer,
    op,
)

import terrazzo as tz
from terrazzo.base.shapes import dim
from terrazzo.dtypes import float32
from terrazzo.errors import ArgumentError, DTypeError, RankError, ShapeError
from terrazzo.graph.ir import TensorType
from terrazzo.ops.conv import conv, conv_transpose, convolve

torch = pytest.importorskip("torch")
F = torch.nn.functional


def reference(x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, strides: Any, padding: Any,
              dilation: Any, groups: int) -> np.ndarray:
    """torch's convolution in float64; `padding` is pairs (before, after)."""
    pads = [n for pair in reversed(padding) for n in pair]
    given = F.pad(torch.from_numpy(x.astype(np.float64)), pads)
    layer = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[x.ndim - 2]
    return layer(given, torch.from_numpy(w.astype(np.float64)),
                 None if bias is None else torch.from_numpy(bias.astype(np.float64)), strides, 0,
                 dilation, groups).numpy()


CASES: list[tuple[Sequence[int], Sequence[int], dict[str, Any]]] = [
    ((2, 3, 9), (5, 3, 3), {}),
    ((1, 4, 10), (6, 2, 4), {"strides": 3, "padding": ((2, 1),), "groups": 2}),
    ((2, 3, 7, 8), (5, 3, 3, 3), {"padding": 1}),
    ((1, 17, 9, 6), (24, 17, 3, 2), {"strides": (2, 1), "padding": ((0, 2), (1, 0))}),
    ((1, 5, 9, 9), (1, 5, 3, 3), {"dilation": (2, 3), "padding": 2}),
    ((2, 1, 5, 5), (3, 1, 5, 5), {}),
    ((1, 6, 5, 6), (6, 1, 3, 3), {"padding": 1, "groups": 6}),
    ((1, 6, 5, 6), (12, 1, 3, 3), {"padding": 1, "groups": 6, "strides": 2}),
    ((2, 12, 4, 5), (6, 4, 1, 1), {"groups": 3}),
    ((1, 3, 4, 5, 6), (4, 3, 2, 3, 2), {"padding": (1, 0, 1), "strides": (1, 2, 1)}),
]


@pytest.mark.parametrize(("shape", "weight", "attrs"), CASES, ids=str)
def test_conv_is_torchs(shape: Sequence[int], weight: Sequence[int], attrs: dict[str, Any],
                        rng: np.random.Generator) -> None:
    x, w, b = draw(rng, shape), draw(rng, weight), draw(rng, weight[:1])
    rank = len(shape) - 2
    given = attrs.get("padding", 0)
    pads = [(p, p) if isinstance(p, int) else p for p in (
        [given] * rank if isinstance(given, int) else given)]
    expected = reference(x, w, b, attrs.get("strides", 1), pads, attrs.get("dilation", 1),
                         attrs.get("groups", 1))
    close(evaluate(conv, x, w, b, **attrs), expected, rtol=1e-5, atol=1e-4)
    close(np.asarray(tz.conv(x, w, b, **attrs)), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("shape", "weight", "attrs"), [
    ((2, 3, 5), (3, 4, 3), {}),
    ((1, 4, 4, 5), (4, 3, 3, 2), {"strides": 2, "padding": 1, "output_padding": 1}),
    ((1, 4, 4, 5), (4, 3, 4, 4), {"strides": (2, 3), "padding": (1, 2), "groups": 2}),
    ((1, 2, 4, 7), (2, 5, 3, 3), {"dilation": (2, 1), "padding": 3}),
    ((1, 2, 3, 2, 3), (2, 1, 2, 2, 2), {"strides": 2, "groups": 2}),
    ((2, 4, 5, 4), (4, 3, 2, 5), {"strides": (3, 2), "output_padding": (2, 1), "padding": (0, 1)}),
    ((1, 6, 5), (6, 2, 7), {"strides": 2, "padding": 3, "output_padding": 1, "groups": 3}),
], ids=str)
def test_conv_transpose_is_torchs(shape: Sequence[int], weight: Sequence[int],
                                  attrs: dict[str, Any], rng: np.random.Generator) -> None:
    groups = attrs.get("groups", 1)
    x, w, b = draw(rng, shape), draw(rng, weight), draw(rng, (weight[1] * groups,))
    layer = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}[len(shape) - 2]
    expected = layer(*(torch.from_numpy(a.astype(np.float64)) for a in (x, w, b)),
                     attrs.get("strides", 1), attrs.get("padding", 0),
                     attrs.get("output_padding", 0), groups, attrs.get("dilation", 1)).numpy()
    close(evaluate(conv_transpose, x, w, b, **attrs), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int8", "int32"])
def test_expression_is_the_reference(dtype: str, rng: np.random.Generator) -> None:
    x, w = draw(rng, (2, 5, 6, 4), dtype), draw(rng, (3, 2, 4, 7), dtype)
    for padding in (((1, 2), (0, 1)), ((0, 0), (-1, 1))):
        check_primitive("convolve", x, w, strides=(1, 2), padding=padding, dilation=(1, 2))
    attrs: dict[str, Any] = {"strides": (1, 2), "padding": ((1, 0), (0, 1)), "dilation": (1, 1),
                             "groups": 2}
    w = draw(rng, (3, 2, 2, 6), dtype)
    close(express(op("convolve"), [x, w], **attrs), evaluate(op("convolve"), x, w, **attrs))


def test_half_types_are_summed_in_float32(rng: np.random.Generator) -> None:
    x = np.full((1, 1, 4096, 1), 1.0, np.float16)
    w = np.full((1, 4096, 1, 1), 0.125, np.float16)
    got = evaluate(convolve, x, w, strides=(1, 1), padding=((0, 0), (0, 0)), dilation=(1, 1))
    assert got.ravel() == 512  # one at a time in float16 it would stop at 256


@pytest.mark.parametrize("attrs", [
    {"strides": (2, 1), "padding": ((1, 1), (0, 2)), "dilation": (1, 2)},
    {"strides": (1, 3), "padding": ((2, 0), (3, 3)), "dilation": (2, 1), "groups": 2},
    {"strides": (3, 2), "padding": ((0, 0), (-1, -1)), "dilation": (1, 1), "groups": 4},
], ids=str)
def test_gradients(attrs: dict[str, Any], rng: np.random.Generator) -> None:
    x = draw(rng, (2, 7, 8, 4), "float64")
    w = draw(rng, (3, 2, 4 // attrs.get("groups", 1), 8), "float64")
    check_gradient(convolve, x, w, wrt=(0, 1), **attrs)


@pytest.mark.parametrize(("shape", "weight", "attrs"), [
    ((2, 3, 7, 8), (4, 3, 3, 3), {"strides": 2, "padding": 1}),
    ((2, 4, 8, 9), (4, 2, 3, 3), {"strides": 2, "padding": 1, "groups": 2}),
    ((2, 4, 9, 8), (4, 4, 1, 1), {"strides": 2}),  # most of the input is never read
    ((2, 4, 9, 8), (5, 4, 1, 3), {"strides": (2, 3), "padding": (0, 1)}),
    ((1, 4, 9, 9), (4, 4, 2, 2), {"strides": 3, "padding": 1}),
    ((1, 4, 10, 13), (4, 4, 7, 5), {"strides": (2, 3), "padding": (3, 2)}),
    ((1, 4, 13), (4, 4, 5), {"strides": 4, "padding": 2}),
    ((1, 3, 70), (4, 3, 40), {"strides": 20}),  # more phases than kernels
    ((1, 2, 5, 6, 7), (2, 2, 3, 2, 1), {"strides": 2, "padding": (1, 0, 0)}),
], ids=str)
def test_gradient_of_what_is_read_in_strides(shape: Sequence[int], weight: Sequence[int],
                                             attrs: dict[str, Any], rng: np.random.Generator
                                             ) -> None:
    """Each phase of the strides is a convolution of its own; compiled, against torch."""
    x, w = draw(rng, shape), draw(rng, weight)
    layer = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(shape) - 2]
    read = torch.from_numpy(x.astype(np.float64)).requires_grad_()
    y = layer(read, torch.from_numpy(w.astype(np.float64)), None, attrs["strides"],
              attrs.get("padding", 0), 1, attrs.get("groups", 1))
    g = draw(rng, y.shape)
    y.backward(torch.from_numpy(g.astype(np.float64)))
    got = tz.grad(lambda x, w, g: tz.sum(tz.conv(x, w, **attrs) * g))(x, w, g)
    close(np.asarray(got), read.grad.numpy(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("shape", "outputs", "attrs"), [
    ((2, 5, 6, 7), 3, {}),
    ((2, 5, 6, 7), 3, {"strides": 2}),
    ((1, 4, 9, 5), 6, {"strides": (3, 2)}),
    ((2, 5, 6, 7), 3, {"padding": ((0, 2), (0, 0))}),  # pixels that meet nothing but zeros
    ((2, 5, 6, 7), 3, {"padding": 1, "strides": 2}),
    ((2, 6, 4, 4), 4, {"groups": 2}),
    ((3, 4, 11), 5, {"strides": 2}),
], ids=str)
def test_gradient_of_the_weight_of_one_pixel(
        shape: Sequence[int], outputs: int, attrs: dict[str, Any], rng: np.random.Generator
        ) -> None:
    rank = len(shape) - 2
    x = rng.standard_normal(shape).astype(np.float32)
    w = rng.standard_normal((outputs, shape[1] // attrs.get("groups", 1), *(1,) * rank)).astype(
        np.float32)
    check_gradient(op("conv"), x, w, wrt=(0, 1), **attrs)


def test_verify_agrees_on_values_and_gradients() -> None:
    shapes = [(1, 5, 6, 3), (3, 3, 3, 4)]
    report = tz.verify(
        lambda x, w: convolve(x, w, strides=(1, 2), padding=((1, 1), (1, 0)), dilation=(1, 1)),
        *(np.random.default_rng(0).standard_normal(s).astype(np.float32) for s in shapes),
        dtypes=["float32"])
    assert [row.dtype for row in report.rows] == ["float32"]


def test_empty_batch(rng: np.random.Generator) -> None:
    x, w = draw(rng, (0, 3, 5, 5)), draw(rng, (4, 3, 3, 3))
    assert np.asarray(tz.conv(x, w, padding=1)).shape == (0, 4, 5, 5)


def test_special_values_reach_only_their_windows(rng: np.random.Generator) -> None:
    x, w = draw(rng, (1, 2, 6, 6)), draw(rng, (3, 2, 3, 3))
    x[0, 1, 0, 0] = np.nan
    got = np.asarray(tz.conv(x, w, padding=1))
    assert np.isnan(got[0, :, :2, :2]).all()
    assert np.isfinite(got[0, :, 2:]).all() and np.isfinite(got[0, :, :, 2:]).all()


def test_symbolic_sizes() -> None:
    n, h = dim("n"), dim("h")
    x, w = (TensorType(shape, float32) for shape in ((n, h, h * 2, 8), (3, 3, 8, 5)))
    found = infer(convolve, x, w, strides=(1, 2), padding=((1, 1), (0, 0)), dilation=(1, 1))
    assert found.shape == (n, h, (h * 2 - 3) // 2 + 1, 5)


@pytest.mark.parametrize(("error", "shape", "weight", "attrs"), [
    (RankError, (2, 3), (4, 3, 3), {}),
    (RankError, (2, 3, 5, 5), (4, 3, 3), {}),
    (ShapeError, (2, 3, 5, 5), (4, 2, 3, 3), {}),
    (ShapeError, (2, 4, 5, 5), (5, 2, 3, 3), {"groups": 2}),
    (ShapeError, (2, 3, 5, 5), (4, 3, 7, 3), {}),
    (ArgumentError, (2, 3, 5, 5), (4, 3, 3, 3), {"padding": -1}),
    (ArgumentError, (2, 3, 5, 5), (4, 3, 3, 3), {"strides": (1, 1, 1)}),
    (ArgumentError, (2, 3, 5, 5), (4, 3, 3, 3), {"strides": 0}),
], ids=str)
def test_errors(error: type[Exception], shape: Sequence[int], weight: Sequence[int],
                attrs: dict[str, Any]) -> None:
    with pytest.raises(error):
        infer(conv, TensorType(tuple(shape), float32), TensorType(tuple(weight), float32), **attrs)


def test_booleans_are_refused() -> None:
    with pytest.raises(DTypeError):
        evaluate(conv, np.ones((1, 1, 3), bool), np.ones((1, 1, 2), bool))
