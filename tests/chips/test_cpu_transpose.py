"""Pointwise programs that read along another axis than they write run in tiles."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import terrazzo as tz


def loop_text(function: object, *arrays: np.ndarray) -> str:
    from terrazzo.calls.levels import lower

    return lower(tz.jit(function).graph(arrays, {}), "loop")  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(64, 64), (5, 17), (130, 67), (3, 1000), (1000, 2)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int8"])
def test_matrices(shape: tuple[int, int], dtype: str, rng: np.random.Generator) -> None:
    x = rng.integers(-9, 9, shape).astype(dtype)
    y = rng.integers(-9, 9, shape[::-1]).astype(dtype)
    np.testing.assert_array_equal(tz.transpose(x), x.T)
    np.testing.assert_array_equal(tz.jit(lambda x, y: tz.transpose(x) + y)(x, y), x.T + y)


@pytest.mark.parametrize("axes", list(itertools.permutations(range(4))), ids=str)
def test_permutations(axes: tuple[int, ...], rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, 17, 6, 33)).astype(np.float32)
    np.testing.assert_array_equal(tz.permute_dims(x, axes=axes), x.transpose(axes))


def test_one_tensor_read_both_ways(rng: np.random.Generator) -> None:
    x = rng.standard_normal((100, 100)).astype(np.float32)
    np.testing.assert_array_equal(tz.jit(lambda x: x - tz.transpose(x))(x), x - x.T)


def test_values_used_twice_stay_in_the_tile(rng: np.random.Generator) -> None:
    x = rng.standard_normal((70, 90)).astype(np.float32)

    def function(x: object) -> object:
        y = tz.exp(tz.transpose(x))
        return y / (1 + y * y)

    y = np.exp(x.T.astype(np.float64))
    np.testing.assert_allclose(tz.jit(function)(x), y / (1 + y * y), rtol=1e-6)


def test_sizes_that_vary(rng: np.random.Generator) -> None:
    turn = tz.jit(lambda x: tz.transpose(x))
    for n in (20, 31, 64, 129):
        x = rng.standard_normal((n, n + 3)).astype(np.float32)
        np.testing.assert_array_equal(turn(x), x.T)


def test_which_programs_are_tiled(rng: np.random.Generator) -> None:
    x = rng.standard_normal((64, 64)).astype(np.float32)
    assert "transposed_copy" in loop_text(lambda x: tz.transpose(x), x)
    assert "transposed_copy" in loop_text(lambda x, y: tz.transpose(x) * y, x, x)
    assert "transposed_copy" not in loop_text(lambda x: x + 1, x)
    thin = np.zeros((64, 1), np.float32)
    assert "transposed_copy" not in loop_text(lambda x: tz.transpose(x), thin)
