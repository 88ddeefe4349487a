"""Atomic operations, histograms and gathers, with many programs on the same memory."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = [pytest.mark.triton, pytest.mark.torch]


@triton.jit
def combine(x_ptr, add_ptr, max_ptr, min_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + tl.program_id(0) * N + i)
    tl.atomic_add(add_ptr + i % 4, x)
    tl.atomic_max(max_ptr, tl.max(x, 0))
    tl.atomic_min(min_ptr + i, x, mask=i < N // 2)


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "float64", "uint32"])
def test_many_programs_combine(dtype: str) -> None:
    kind = getattr(torch, dtype)
    x = torch.randint(0 if dtype[0] == "u" else -50, 50, (40, 64)).to(kind)
    big = 1000
    total, best = torch.zeros(4, dtype=kind), torch.zeros(1, dtype=kind)
    least = torch.full((64,), big).to(kind)
    combine[(40,)](x, total, best, least, N=64)
    wide = x.to(torch.int64)
    assert total.to(torch.int64).tolist() == wide.reshape(-1, 4).sum(0).tolist()
    assert int(best.to(torch.int64)) == int(wide.max())
    expected = wide.amin(0)
    expected[32:] = big
    assert least.to(torch.int64).tolist() == expected.tolist()


@triton.jit
def bits(out_ptr, old_ptr):
    pid = tl.program_id(0)
    tl.atomic_or(out_ptr, 1 << pid)
    tl.atomic_xor(out_ptr + 1, 3)
    tl.atomic_and(out_ptr + 2, ~(1 << pid))
    tl.store(old_ptr + pid, tl.atomic_add(out_ptr + 3, 1))
    tl.atomic_xchg(out_ptr + 4, 77)
    tl.atomic_cas(out_ptr + 5, pid, pid + 1)


def test_bits_and_what_was_there_before() -> None:
    out = torch.tensor([0, 0, -1, 0, 0, 100], dtype=torch.int32)
    old = torch.empty(20, dtype=torch.int32)
    bits[(20,)](out, old)
    assert out.tolist() == [(1 << 20) - 1, 0, -(1 << 20), 20, 77, 100]
    assert sorted(old.tolist()) == list(range(20))


@triton.jit
def under_lock(lock_ptr, count_ptr):
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    tl.store(count_ptr, tl.load(count_ptr) + 1)
    tl.atomic_xchg(lock_ptr, 0)


def test_a_lock() -> None:
    lock, count = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    under_lock[(500,)](lock, count)
    assert count.item() == 500


@triton.jit
def count(x_ptr, out_ptr, picked_ptr, N: tl.constexpr, BINS: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.store(out_ptr + tl.arange(0, BINS), tl.histogram(x, BINS))
    tl.store(picked_ptr + tl.arange(0, N), tl.gather(x * 2, x, 0))


def test_histogram_and_gather() -> None:
    x = torch.randint(0, 16, (256,), dtype=torch.int32)
    out, picked = torch.empty(16, dtype=torch.int32), torch.empty(256, dtype=torch.int32)
    count[(1,)](x, out, picked, N=256, BINS=16)
    assert torch.equal(out, torch.bincount(x, minlength=16).int())
    assert torch.equal(picked, x[x.long()] * 2)
