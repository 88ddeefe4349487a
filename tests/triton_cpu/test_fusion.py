"""Loops that join, stores past the caches, and divisions that are products: results stay right."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402


def loops_of(kernel) -> list[str]:
    """The vector loops of a compiled kernel, as their bodies."""
    return kernel.asm["loop"].split("vector for")[1:]


@triton.jit
def two_sums_kernel(x, out, other, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < n
    values = tl.load(x + at, mask=inside, other=0.0)
    total = tl.sum(values, axis=0)
    squares = tl.sum(values * values, axis=0)
    tl.store(out + at, values + total, mask=inside)
    tl.store(other + at, values - squares, mask=inside)


@pytest.mark.parametrize("n", [1, 15, 64, 100, 128])
@pytest.mark.parametrize("in_place", [False, True])
def test_sums_share_a_loop_and_what_was_loaded_outlives_a_store_in_place(
        n: int, in_place: bool) -> None:
    x = torch.randn(n)
    before = x.clone()
    out, other = (x if in_place else torch.empty(n)), torch.empty(n)
    kernel = two_sums_kernel[(1,)](x, out, other, n, BLOCK=128)
    torch.testing.assert_close(out, before + before.sum())
    torch.testing.assert_close(other, before - (before * before).sum())
    assert sum("+=" in body for body in loops_of(kernel)) == 1


@triton.jit
def mirrored_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < n, other=0.0)
    tl.store(out + at, values * 2, mask=at < n)
    tl.store(out + (n - 1 - at), values, mask=at < n // 2)


@pytest.mark.parametrize("n", [2, 33, 128])
def test_stores_to_the_same_places_stay_in_order(n: int) -> None:
    x, out = torch.randn(n), torch.zeros(n)
    mirrored_kernel[(1,)](x, out, n, BLOCK=128)
    wanted = x * 2
    wanted[n - n // 2:] = x[: n // 2].flip(0)
    torch.testing.assert_close(out, wanted)


@triton.jit
def written_then_read_kernel(x, scratch, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(scratch + at, tl.load(x + at, mask=at < n) * 3, mask=at < n)
    tl.debug_barrier()
    tl.store(out + at, tl.load(scratch + at, mask=at < n) + 1, mask=at < n)


def test_what_was_written_is_read_again_even_through_another_argument() -> None:
    n = 100
    x = torch.randn(n)
    scratch, out = torch.empty(n), torch.empty(n)
    wanted = x * 3 + 1
    written_then_read_kernel[(1,)](x, scratch, out, n, BLOCK=128)
    torch.testing.assert_close(out, wanted)
    written_then_read_kernel[(1,)](x, x, out, n, BLOCK=128)
    torch.testing.assert_close(out, wanted)


@triton.jit
def triple_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) * 3, mask=at < n)


@pytest.mark.parametrize("skip", [0, 1])
@pytest.mark.parametrize("n", [1 << 21, (1 << 21) - 5])
def test_large_outputs_past_the_caches(n: int, skip: int) -> None:
    """Two million elements are enough to go past the caches, where addresses allow for it."""
    x = torch.randn(n + skip)[skip:]
    out = torch.full((n + skip + 16,), 7.0)
    kernel = triple_kernel[(triton.cdiv(n, 1024),)](x, out[skip:], n, BLOCK=1024)
    assert "# streaming if" in kernel.asm["loop"]
    assert torch.equal(out[skip: skip + n], x * 3)
    assert (out[:skip] == 7).all() and (out[skip + n:] == 7).all()


@triton.jit
def divide_kernel(x, y, out, n, PRECISE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < n, other=1.0)
    by = tl.load(y)
    if PRECISE:
        result = tl.div_rn(values, by)
    else:
        result = values / by
    tl.store(out + at, result, mask=at < n)


@pytest.mark.parametrize("divisor", [3.0, 1e-30, -7.1e20, 0.0, float("inf"), float("nan")])
def test_division_by_one_number_for_all(divisor: float) -> None:
    x = torch.cat((torch.randn(100), torch.tensor([0.0, float("inf"), float("nan"), -0.0])))
    y, out = torch.tensor([divisor]), torch.empty_like(x)
    divide_kernel[(1,)](x, y, out, x.numel(), PRECISE=True, BLOCK=128)
    torch.testing.assert_close(out, x / y, rtol=0, atol=0, equal_nan=True)
    divide_kernel[(1,)](x, y, out, x.numel(), PRECISE=False, BLOCK=128)
    # Two units in the last place, which is what Triton promises.
    torch.testing.assert_close(out, x / y, rtol=2.4e-7, atol=0, equal_nan=True)


@triton.jit
def extremes_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    high = tl.max(tl.load(x + at, mask=at < n, other=-float("inf")), axis=0)
    low = tl.min(tl.load(x + at, mask=at < n, other=float("inf")), axis=0)
    tl.store(out, high)
    tl.store(out + 1, low)


@pytest.mark.parametrize("n", [1, 17, 255, 256])
def test_extremes_leave_out_nan(n: int) -> None:
    x, out = torch.randn(n), torch.empty(2)
    x[n // 2:: 3] = float("nan")
    x[0] = 0.5
    extremes_kernel[(1,)](x, out, n, BLOCK=256)
    numbers = x[~x.isnan()]
    assert out.tolist() == [numbers.max().item(), numbers.min().item()]
