"""Sorting networks are one vector loop a stage, and sort."""

from __future__ import annotations

import numpy as np
import pytest

from terrazzo.index import Var, substitute
from terrazzo.loop.lanes import lanes_in_vector, steps_in_vector

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = [pytest.mark.triton, pytest.mark.torch]


@triton.jit
def sort_kernel(x, out, ROWS: tl.constexpr, N: tl.constexpr, DOWN: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + at, tl.sort(tl.load(x + at), dim=1, descending=DOWN))


@triton.jit
def topk_kernel(x, out, ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * N + tl.arange(0, N)[None, :]
    to = tl.arange(0, ROWS)[:, None] * K + tl.arange(0, K)[None, :]
    tl.store(out + to, tl.topk(tl.load(x + at), K, dim=1))


@triton.jit
def flip_kernel(x, out, ROWS: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + at, tl.flip(tl.load(x + at), dim=1) + tl.cumsum(tl.load(x + at), axis=1))


@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize(("rows", "n"), [(1, 4), (2, 8), (1, 16), (4, 64), (8, 32)])
def test_sort(rows: int, n: int, down: bool) -> None:
    x = torch.randn(rows, n)
    out = torch.zeros_like(x)
    sort_kernel[(1,)](x, out, rows, n, down)
    assert torch.equal(out, x.sort(1, descending=down).values)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "int8", "int16", "int64"])
def test_sort_of_other_types(dtype: str) -> None:
    x = (torch.randn(4, 64) * 50).to(getattr(torch, dtype))
    out = torch.zeros_like(x)
    sort_kernel[(1,)](x, out, 4, 64, False)
    assert torch.equal(out, x.sort(1).values)


def test_a_stage_is_one_vector_loop() -> None:
    x = torch.randn(16, 256)
    out = torch.zeros_like(x)
    kernel = sort_kernel[(1,)](x, out, 16, 256, False)
    assert torch.equal(out, x.sort(1).values)
    text = kernel.asm["loop"]
    assert text.count("vector for i_") == 8 * 9 // 2 - 1  # the last one is the store's own loop
    assert text.count("        for ") <= 2  # rows of what is loaded and stored
    assert "gather" not in kernel.asm["llir"]


@pytest.mark.parametrize("k", [1, 4, 16])
def test_topk(k: int) -> None:
    x = torch.randn(4, 64)
    out = torch.zeros(4, k)
    topk_kernel[(1,)](x, out, 4, 64, k)
    assert torch.equal(out, x.topk(k, 1).values)


def test_flip_and_cumsum() -> None:
    x = torch.randint(-9, 9, (4, 64)).float()
    out = torch.zeros_like(x)
    flip_kernel[(1,)](x, out, 4, 64)
    assert torch.equal(out, x.flip(1) + x.cumsum(1))


def test_places_in_a_vector() -> None:
    i = Var("i", 0, 1023)
    for index in (i // 2 * 2, i // 2 * 2 + 1, i // 8 * 8 + i % 4 + 4, i - i % 16 + 15 - i % 16,
                  i // 32 * 32 + i % 16):
        found = lanes_in_vector(index, i, 16)
        assert found is not None
        for start in (0, 16, 512):
            values = np.array([substitute(index, {i: start + lane}) for lane in range(16)])
            assert np.array_equal(values - values[0] + found[0], found[1])
            assert (values[0] - found[0]) % 16 == 0
    assert steps_in_vector(i // 16 % 2, i, 16) == (0,) * 16
    assert lanes_in_vector(i // 32 * 32 + i * 2 % 32, i, 16) is None
    assert steps_in_vector(i * i, i, 16) is None
