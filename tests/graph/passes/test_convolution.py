"""Batch norms, factors, offsets and borders around constant weights become part of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.graph.passes.convolution import CONVOLUTION

sys.path.insert(0, str(Path(__file__).parent))
from patterns import operators, rewritten

rng = np.random.default_rng(7)


def random(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def norm(y: Any, channels: int = 6, **attrs: Any) -> Any:
    variance = np.abs(random(channels)) + np.float32(0.1)
    return tz.batch_norm(y, random(channels), variance, random(channels), random(channels), **attrs)


X = random(2, 4, 7, 6)
W, B = random(6, 4, 3, 3), random(6)
CHANNELS = random(6, 1, 1)
# Weights differ by one rounding each, and so do all terms of the sums that results are.
TERMS = 40.0

LAYERS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda x: tz.conv(x, W, B, padding=1),
    "no bias": lambda x: tz.conv(x, W, strides=2, padding=(0, 1), dilation=(2, 1)),
    "groups": lambda x: tz.conv(x, random(6, 2, 3, 3), B, groups=2),
    "depthwise": lambda x: tz.conv(tz.concat(x, x, axis=1)[:, :6], random(6, 1, 3, 3), groups=6),
    "transposed": lambda x: tz.conv_transpose(x, random(4, 6, 3, 3), B, strides=2),
    "transposed in groups": lambda x: tz.conv_transpose(x, random(4, 3, 3, 3), groups=2),
}
AFTER: dict[str, Callable[[Any], Any]] = {
    "batch norm into the layer before": norm,
    "factor into the layer before": lambda y: CHANNELS * y,
    "divisor into the layer before": lambda y: y / (np.abs(CHANNELS) + np.float32(0.1)),
    "offset into the convolution before": lambda y: y - CHANNELS,
}


@pytest.mark.parametrize("rule", AFTER)
@pytest.mark.parametrize("layer", LAYERS)
def test_after_a_convolution(layer: str, rule: str) -> None:
    after, fired = rewritten(CONVOLUTION, lambda x: AFTER[rule](LAYERS[layer](x)), X,
                             roundings=TERMS)
    assert fired == {rule}
    assert operators(after)[-1].startswith("conv")


def test_a_chain_is_one_convolution() -> None:
    after, fired = rewritten(
        CONVOLUTION, lambda x: norm((tz.conv(x, W) + CHANNELS) * CHANNELS) * 0.5, X,
        roundings=TERMS)
    assert operators(after) == ["conv"]
    assert fired == {"batch norm into the layer before", "factor into the layer before",
                     "offset into the convolution before"}


PRODUCTS: dict[str, Callable[[Any], Any]] = {
    "matmul": lambda x: x @ random(6, 5),
    "with a bias": lambda x: x @ random(6, 5) + random(5),
    "gemm": lambda x: random(5) + tz.batch_matmul(x, random(5, 6), transpose_y=True),
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_after_a_matrix_product(product: str) -> None:
    made = PRODUCTS[product]
    after, fired = rewritten(CONVOLUTION, lambda x: norm(made(x), 5), random(9, 6), roundings=TERMS)
    assert fired == {"batch norm into the layer before"}
    assert operators(after)[-2:] == [operators(after)[-2], "add"] and len(operators(after)) == 2
    after, fired = rewritten(CONVOLUTION, lambda x: random(5) * made(x), random(3, 9, 6),
                             roundings=TERMS)
    assert fired == {"factor into the layer before"} and "multiply" not in operators(after)


@pytest.mark.parametrize("groups", [1, 2])
def test_batch_norm_before(groups: int) -> None:
    after, fired = rewritten(
        CONVOLUTION, lambda x: tz.conv(norm(x, 4), random(6, 4 // groups, 3, 3), B, groups=groups),
        X, roundings=TERMS)
    assert fired == {"batch norm into the convolution after"} and operators(after) == ["conv"]


@pytest.mark.parametrize(("width", "padding"), [
    (((0, 0), (0, 0), (1, 2), (0, 3)), 0), (((0, 0), (0, 0), (1, 1), (1, 1)), ((0, 1), (2, 0)))])
def test_border_before(width: Any, padding: Any) -> None:
    after, fired = rewritten(
        CONVOLUTION, lambda x: tz.conv(tz.pad(x, pad_width=width), W, B, padding=padding), X,
        roundings=0)
    assert fired == {"border into the convolution after"} and operators(after) == ["conv"]


def test_border_of_a_crop() -> None:
    width = ((0, 0), (0, 0), (-1, 1), (2, 0))
    after, fired = rewritten(CONVOLUTION, lambda x: tz.conv(tz.pad(x, pad_width=width), W), X,
                             roundings=0)
    assert fired == {"border into the convolution after"}
    assert operators(after) == ["slice", "conv"]


def read_twice(x: Any) -> Any:
    y = tz.conv(x, W)
    return y * CHANNELS + tz.exp(y)


@pytest.mark.parametrize("function", [
    lambda x: tz.conv(x, W) * random(5, 4),  # along other axes
    lambda x: tz.conv(x, W) / np.zeros((6, 1, 1), np.float32),
    lambda x: tz.conv(x, W) * np.full((6, 1, 1), np.inf, np.float32),
    lambda x: tz.conv(x, x[:1, :, :3, :3]) * random(1, 1, 1),  # weights that are computed
    lambda x: tz.relu(tz.conv(x, W)) * CHANNELS,
    lambda x: norm(tz.conv(x, W), 4, axis=3),
    lambda x: tz.conv(norm(x, 4), W, padding=1),  # zeros around are not normalised
    lambda x: tz.conv(tz.pad(x, pad_width=1), random(6, 6, 3, 3)),  # more channels
    lambda x: tz.conv(tz.pad(x, pad_width=((0, 0), (0, 0), (1, 1), (1, 1)), value=1.0), W),
    lambda x: tz.conv(tz.pad(x, pad_width=((0, 0), (0, 0), (1, 1), (1, 1)), mode="edge"), W),
    lambda x: (x @ random(6, 5)) * 0.125,  # the scale of attention
    lambda x: (x @ random(2, 4, 6, 5)) * random(5),  # a matrix for each of a batch
    read_twice,
])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_what_is_something_else_stays(function: Callable[..., Any]) -> None:
    from patterns import graph_of

    from terrazzo.graph.rewrite import rewrite

    assert rewrite(graph_of(function, X), CONVOLUTION)[1] == []


def test_half_types_keep_their_weights() -> None:
    x, w = X.astype(np.float16), W.astype(np.float16)
    fired = rewritten(CONVOLUTION, lambda x: tz.conv(x, w) * CHANNELS.astype(np.float16), x)[1]
    assert fired == set()


def test_needs_only_the_basic_level() -> None:
    assert len(CONVOLUTION.up_to("basic")) == len(CONVOLUTION)
