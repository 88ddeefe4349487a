"""Kernels for symbolic sizes are those for fixed ones: the same plans, the same results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.base.shapes import dim
from terrazzo.calls.levels import lower
from terrazzo.dtypes import float32
from terrazzo.graph.ir import TensorType
from terrazzo.graph.trace import trace

H, W, N = dim("h"), dim("w"), dim("n")


def loops(function: Callable[..., Any], *shapes: Sequence[Any]) -> str:
    """The Loop IR for symbolic sizes."""
    graph, _ = trace(function, [TensorType(tuple(s), float32) for s in shapes])
    return lower(graph, "loop")


def varying(function: Callable[..., Any], wanted: Callable[..., np.ndarray],
            sizes: Sequence[Sequence[tuple[int, ...]]], rng: np.random.Generator) -> None:
    """Call one function with all sizes; from the second on, they are symbolic."""
    run = tz.jit(function)
    for shapes in sizes:
        given = [rng.standard_normal(s).astype(np.float32) for s in shapes]
        expected = wanted(*(x.astype(np.float64) for x in given))
        np.testing.assert_allclose(run(*given), expected, rtol=1e-5, atol=1e-5)
    (family,) = run.table.families.values()
    made = sum(found is not None for vs in family.variants.values() for _, found in vs)
    assert 0 < made < len(sizes) - 1  # sizes of which a result of one row is made have their own


def windows(x: np.ndarray, k: int, stride: int, filler: float) -> np.ndarray:
    """All windows of the last two axes, padded by half of one: [..., rows, columns, k, k]."""
    around = [(0, 0)] * (x.ndim - 2) + [(k // 2, k // 2)] * 2
    padded = np.pad(x, around, constant_values=filler)
    every = np.lib.stride_tricks.sliding_window_view(padded, (k, k), axis=(-2, -1))
    return every[..., ::stride, ::stride, :, :]


# Narrow rows, rows of less than a tile, of some tiles and a rest, several rests; tall and flat.
IMAGES = [(9, 9), (2, 3), (3, 2), (5, 4), (4, 7), (11, 12), (7, 13), (2, 18), (19, 20), (6, 33)]


@pytest.mark.parametrize(("window", "stride", "channels"), [
    (3, 1, 40), (3, 2, 24), (5, 1, 3), (5, 3, 16), (7, 1, 24), (7, 2, 40)])
def test_depthwise(window: int, stride: int, channels: int, rng: np.random.Generator) -> None:
    varying(lambda x, w: tz.relu(tz.conv(x, w, strides=stride, padding=window // 2,
                                         groups=channels)),
            lambda x, w: np.maximum(np.einsum("nchwij,cij->nchw", windows(
                x, window, stride, 0), w[:, 0]), 0),
            [((2, channels, *image), (channels, 1, window, window)) for image in IMAGES], rng)


def test_layers_have_code_of_their_own_for_any_image(rng: np.random.Generator) -> None:
    """Weights of another size are another layer; images of another size are not."""
    run = tz.jit(lambda x, w: tz.conv(x, w, padding=w.shape[-1] // 2))
    layers = [(8, 3, 3), (16, 8, 3), (3, 16, 1)]
    for outputs, channels, window in layers:
        w = rng.standard_normal((outputs, channels, window, window)).astype(np.float32)
        for n, h, width in ((1, 9, 9), (2, 5, 12), (3, 17, 4), (2, 6, 33)):
            x = rng.standard_normal((n, channels, h, width)).astype(np.float32)
            every = windows(x.astype(np.float64), window, 1, 0)
            np.testing.assert_allclose(run(x, w), np.einsum("nchwij,ocij->nohw", every, w),
                                       rtol=1e-4, atol=1e-4)
    (family,) = run.table.families.values()
    made = [g for vs in family.variants.values() for g, found in vs if found is not None]
    assert len(made) <= len(layers) + 2  # and for batches of 1 and for the first sizes that vary


@pytest.mark.parametrize(("window", "stride"), [(3, 2), (5, 1)])
def test_pools(window: int, stride: int, rng: np.random.Generator) -> None:
    sizes = [((2, 5, *image),) for image in IMAGES]
    attrs = {"window": window, "strides": stride, "padding": window // 2}
    varying(lambda x: tz.max_pool(x, **attrs),
            lambda x: windows(x, window, stride, -np.inf).max((-2, -1)), sizes, rng)
    varying(lambda x: tz.average_pool(x, **attrs),
            lambda x: np.nanmean(windows(x, window, stride, np.nan), (-2, -1)), sizes, rng)


@pytest.mark.parametrize("axes", [(1, 0, 2), (0, 2, 1), (2, 1, 0), (1, 2, 0)], ids=str)
def test_transposes(axes: tuple[int, ...], rng: np.random.Generator) -> None:
    varying(lambda x: tz.permute_dims(x, axes=axes), lambda x: x.transpose(axes),
            [(s,) for s in ((8, 9, 10), (2, 2, 2), (3, 70, 5), (2, 65, 130), (17, 16, 64))], rng)


def test_transposes_are_tiled() -> None:
    assert "transposed_copy" in loops(lambda x: tz.permute_dims(x, axes=(0, 2, 3, 1)),
                                      (N, 32, H, W))


def test_a_guarded_read_is_not_turned_as_a_whole(rng: np.random.Generator) -> None:
    """What lies outside is read nowhere, so a tile of it must not be copied."""
    varying(lambda x: tz.transpose(tz.pad(x, pad_width=((1, 2), (3, 1)))),
            lambda x: np.pad(x, ((1, 2), (3, 1))).T,
            [((n, m),) for n, m in ((5, 6), (2, 2), (70, 9), (64, 131))], rng)
