"""topk, compiled: every type, tie, special number and size, with a k that is known and one that
is a size."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from checking import check, draw, op

import terrazzo as tz
from terrazzo.dtypes import as_dtype

TYPES = ["float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "uint32", "int64",
         "uint64", "bool"]


def ordered(x: np.ndarray, k: int, axis: int, largest: bool) -> tuple[np.ndarray, np.ndarray]:
    """The first k by a stable order in which nan is the largest, and their indices."""
    wide = x if x.dtype.kind in "iub" else x.astype(np.float64)
    ranks = np.unique(wide, return_inverse=True, equal_nan=True)[1].reshape(x.shape).astype(int)
    order = np.argsort(-ranks if largest else ranks, axis, kind="stable").take(range(k), axis)
    return np.take_along_axis(x, order, axis), order


def rows(rng: np.random.Generator, dtype: str, n: int) -> Iterator[np.ndarray]:
    """Data that is hard in one way each."""
    kind = as_dtype(dtype)
    yield draw(rng, (3, n), dtype, -100, 100)
    yield np.round(draw(rng, (2, n), dtype, -3, 3))  # many equal elements
    yield np.sort(draw(rng, (1, n), dtype, -100, 100))  # each is better than all before
    yield np.full((2, n), np.ones((), kind.np))
    if kind.is_integer:
        ends = np.iinfo(kind.np)
        yield rng.choice(np.array([ends.min, ends.max, 0], kind.np), (3, n))
        yield np.full((1, n), ends.min)
        yield np.full((1, n), ends.max)
    elif kind.is_float:
        special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0], kind.np)
        yield rng.choice(special, (4, n))
        yield np.full((1, n), np.nan, kind.np)


@tz.op
def first(x: tz.Tensor, like: tz.Tensor, *, axis: int = -1, largest: bool = True) -> tz.Tensor:
    return tz.topk(x, k=like.shape[0], axis=axis, largest=largest)


def same(got: tuple, x: np.ndarray, k: int, axis: int, largest: bool) -> None:
    values, indices = ordered(x, k, axis, largest)
    np.testing.assert_array_equal(np.asarray(got[1]), indices)
    bits = f"u{x.dtype.itemsize}"
    np.testing.assert_array_equal(np.asarray(got[0]).view(bits), values.view(bits))


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_size_for_k(dtype: str, largest: bool, rng: np.random.Generator) -> None:
    sizes = ((33, (0, 1, 2, 5, 33)), (700, (1, 3, 64, 65, 300, 699, 700)))
    with tz.knobs.override(dynamic="always"):
        for n, counts in sizes:
            for x in rows(rng, dtype, n):
                for k in counts:
                    got = first(x, np.zeros(k, np.float32), largest=largest)
                    same(got, x, k, -1, largest)


@pytest.mark.parametrize("dtype", ["float32", "int64", "bfloat16"])
@pytest.mark.parametrize("k", [0, 1, 5, 64, 65, 500])
def test_a_known_k(k: int, dtype: str, rng: np.random.Generator) -> None:
    function = tz.op(lambda x: tz.topk(x, k=k))
    for x in rows(rng, dtype, 500):
        same(function(x), x, k, -1, True)


@pytest.mark.parametrize("axis", [0, 1])
def test_other_axes(axis: int, rng: np.random.Generator) -> None:
    x = np.round(draw(rng, (150, 170, 2)))
    with tz.knobs.override(dynamic="always"):
        for k in (1, 2, 70, x.shape[axis]):
            for largest in (True, False):
                got = first(x, np.zeros(k, np.float32), axis=axis, largest=largest)
                same(got, x, k, axis, largest)


@pytest.mark.parametrize("n", [63, 64, 65, 127, 128, 129, 193])
def test_every_level_agrees(n: int, rng: np.random.Generator) -> None:
    """Around the sizes where one way of finding candidates ends and the next begins."""
    x = np.round(draw(rng, (2, n)))
    for k in (3, 32, n):
        check(op("topk"), x, k=k, expected=ordered(x, k, -1, True))
        check(op("topk"), x, k=k, largest=False, expected=ordered(x, k, -1, False), symbolic=True)
