"""Reductions of two elements each are expressions: sorting networks are made of them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = [pytest.mark.triton, pytest.mark.torch]


@triton.jit
def reduce_pairs(x, total, best, place, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                 AXIS: tl.constexpr):
    tile = tl.load(x + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])
    lanes = tl.arange(0, ROWS * COLUMNS // 2)
    tl.store(total + lanes, tl.sum(tl.exp(tile), AXIS))
    value, index = tl.max(tile, AXIS, return_indices=True)
    tl.store(best + lanes, value)
    tl.store(place + lanes, index)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("n", [1, 4, 64])
def test_pairs(n: int, axis: int) -> None:
    x = torch.randn((2, n) if axis == 0 else (n, 2))
    x.view(-1)[0] = float("inf")
    total, best = torch.empty(n), torch.empty(n)
    place = torch.empty(n, dtype=torch.int32)
    reduce_pairs[(1,)](x, total, best, place, *x.shape, axis)
    torch.testing.assert_close(total, x.exp().sum(axis))
    assert torch.equal(best, x.amax(axis))
    assert torch.equal(place.long(), x.argmax(axis))


@triton.jit
def swap_in_place(x, rounds, N: tl.constexpr):
    at = tl.arange(0, N)
    tile = tl.load(x + at)
    for _ in range(rounds):
        pairs = tl.reshape(tile, (N // 2, 2))
        total = tl.broadcast_to(tl.sum(pairs, 1)[:, None], (N // 2, 2))
        tile = tl.reshape(total - pairs, (N,)) + 1
    tl.store(x + at, tile)


@pytest.mark.parametrize("rounds", [0, 1, 4])
def test_pairs_of_a_tile_that_a_loop_carries(rounds: int) -> None:
    x = torch.arange(32, dtype=torch.int32)
    expected = x.clone()
    for _ in range(rounds):
        expected = expected.view(-1, 2).flip(1).reshape(-1) + 1
    swap_in_place[(1,)](x, rounds, N=32)
    assert torch.equal(x, expected)


@triton.jit
def sort_rows(x, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(x + at, tl.sort(tl.load(x + at)))


def test_a_sort_keeps_one_tile_for_each_step() -> None:
    x = torch.randn(3, 64)
    expected = x.sort(-1).values
    kernel = sort_rows[(3,)](x, N=64)
    assert torch.equal(x, expected)
    steps = 6 * 7 // 2  # of a bitonic network
    assert kernel.asm["loop"].count("alloc ") <= 2 * steps
