"""Atomic operations, histograms and gathers, with many programs on the same memory."""

from __future__ import annotations

import faulthandler
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from terrazzo.errors import KernelStuck
from terrazzo.knobs import knobs

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


# ---------------------------------------------------------------- programs that wait for others
@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """End the process with a trace of all threads if a kernel never comes back."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@triton.jit
def meet_twice(arrived_ptr, x_ptr, out_ptr, N: tl.constexpr):
    pid, programs = tl.program_id(0), tl.num_programs(0)
    i = tl.arange(0, N)
    tl.store(x_ptr + pid, pid + 1)
    tl.atomic_add(arrived_ptr, 1)
    while tl.atomic_add(arrived_ptr, 0) < programs:
        pass
    total = tl.sum(tl.load(x_ptr + i, mask=i < programs, other=0), 0)
    tl.store(out_ptr + pid, total)
    tl.atomic_add(arrived_ptr + 1, 1)
    while tl.atomic_cas(arrived_ptr + 1, programs, programs) != programs:
        pass
    total = tl.sum(tl.load(out_ptr + i, mask=i < programs, other=0), 0)
    tl.store(x_ptr + pid, total)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("programs", [1, 2, 7, 64])
def test_a_barrier_over_the_grid(programs: int, threads: int) -> None:
    arrived = torch.zeros(2, dtype=torch.int32)
    x, out = torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    with at_most(60), knobs.override(threads=threads):
        meet_twice[(programs,)](arrived, x, out, N=64)
    once = programs * (programs + 1) // 2
    assert out[:programs].tolist() == [once] * programs
    assert x[:programs].tolist() == [once * programs] * programs


def test_barriers_of_two_launches_at_once() -> None:
    def launch(n: int) -> list[int]:
        arrived = torch.zeros(2, dtype=torch.int32)
        x, out = torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
        meet_twice[(n,)](arrived, x, out, N=64)
        return out[:n].tolist()

    launch(2)
    with at_most(60), ThreadPoolExecutor(4) as pool:
        for n, answer in zip((30, 40, 50, 60), pool.map(launch, (30, 40, 50, 60)), strict=True):
            assert answer == [n * (n + 1) // 2] * n


def test_a_lock_with_more_programs_than_threads() -> None:
    lock, count = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with at_most(60):
        kernel = under_lock[(5000,)](lock, count)
    assert kernel.metadata.waits and count.item() == 5000


@triton.jit
def one_after_the_other(done_ptr, out_ptr):
    pid = tl.program_id(0)
    if pid > 0:
        while tl.atomic_cas(done_ptr + pid - 1, 1, 1) != 1:
            pass
        tl.store(out_ptr + pid, tl.load(out_ptr + pid - 1) + 1)
    tl.atomic_xchg(done_ptr + pid, 1)


def test_a_chain_of_any_length() -> None:
    done, out = torch.zeros(3000, dtype=torch.int32), torch.zeros(3000, dtype=torch.int32)
    with at_most(60):
        one_after_the_other[(3000,)](done, out)
    assert torch.equal(out, torch.arange(3000, dtype=torch.int32))


@triton.jit
def wait_for_a_flag(flag_ptr, out_ptr):
    if tl.program_id(0) == 0:
        while tl.load(flag_ptr, volatile=True) == 0:
            pass
        tl.store(out_ptr, 5)
    else:
        tl.atomic_xchg(flag_ptr, 1)


def test_a_volatile_flag() -> None:
    flag, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with at_most(60):
        wait_for_a_flag[(2,)](flag, out)
    assert out.item() == 5


@triton.jit
def find_a_place(keys_ptr, table_ptr, N: tl.constexpr):
    key = tl.load(keys_ptr + tl.program_id(0))
    place = key % N
    found = tl.atomic_cas(table_ptr + place, -1, key)
    while (found != -1) & (found != key):
        place = (place + 1) % N
        found = tl.atomic_cas(table_ptr + place, -1, key)


def test_a_loop_that_moves_on_does_not_wait() -> None:
    keys = torch.randint(0, 1000, (40,), dtype=torch.int32)
    table = torch.full((64,), -1, dtype=torch.int32)
    kernel = find_a_place[(40,)](keys, table, N=64)
    assert not kernel.metadata.waits
    assert sorted(table[table >= 0].tolist()) == sorted(set(keys.tolist()))


if hasattr(tl, "atomic_poll"):  # since Triton 3.9
    @triton.jit
    def hand_over(flags_ptr, x_ptr, out_ptr, N: tl.constexpr):
        i = tl.arange(0, N)
        if tl.program_id(0) == 0:
            tl.atomic_poll(flags_ptr + i, 1)
            x = tl.atomic_load(x_ptr + i, mask=i < N // 2)
            tl.store(out_ptr + i, x, mask=i < N // 2)
        else:
            tl.atomic_store(x_ptr + i, i * 10, mask=i < N // 2)
            tl.atomic_store(flags_ptr + i, 1)

    @triton.jit
    def give_up(flags_ptr, found_ptr, limit, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(found_ptr + i, tl.atomic_poll(flags_ptr + i, 1, timeout_ns=limit))

    def test_atomic_loads_stores_and_polls() -> None:
        flags, x, out = (torch.full((8,), v, dtype=torch.int32) for v in (0, 7, -1))
        with at_most(60):
            kernel = hand_over[(2,)](flags, x, out, N=8)
        assert kernel.metadata.waits
        assert x.tolist() == [0, 10, 20, 30, 7, 7, 7, 7]
        assert out.tolist() == [0, 10, 20, 30, -1, -1, -1, -1]

    @pytest.mark.parametrize("limit", [0, 20_000_000])
    def test_polls_that_give_up(limit: int) -> None:
        flags = torch.tensor([1, 0, 1, 1], dtype=torch.int32)
        found = torch.zeros(4, dtype=torch.int8)
        give_up[(1,)](flags, found, limit, N=4)
        start = time.perf_counter()
        with at_most(60):
            give_up[(1,)](flags, found, limit, N=4)
        assert found.tolist() == [1, 0, 1, 1]
        assert time.perf_counter() - start >= limit * 1e-9


# ---------------------------------------------------------------- programs that wait in vain
@triton.jit
def wait_for_the_next(flags_ptr, LAST: tl.constexpr):
    pid = tl.program_id(0)
    if pid < LAST:
        while tl.atomic_cas(flags_ptr + pid + 1, 1, 1) != 1:
            pass
    tl.atomic_xchg(flags_ptr + pid, 1)


@triton.jit
def wait_in_assembly(flag_ptr):
    tl.inline_asm_elementwise(
        "{ .reg .u32 t; .reg .pred p; again: ld.acquire.gpu.global.u32 t, [$1]; "
        "setp.ne.u32 p, t, 1; @p bra again; }", "=r,l", [flag_ptr], tl.int32, False, 1)


def test_programs_that_wait_for_ever_are_named_with_their_line() -> None:
    flags = torch.zeros(2000, dtype=torch.int32)
    with at_most(60), knobs.override(wait_limit=0.2):
        with pytest.raises(KernelStuck) as caught:
            wait_for_the_next[(2000,)](flags, 1999)
        line = wait_for_the_next.fn.__code__.co_firstlineno + 4
        named = rf"test_atomics.py:{line}: program \(\d+, 0, 0\) of `wait_for_the_next`"
        assert re.search(named, str(caught.value))
        assert "TZ_WAIT_LIMIT" in str(caught.value)
        flags.zero_()
        with pytest.raises(KernelStuck, match=r"test_atomics.py:\d+: program \(0, 0, 0\)"):
            wait_in_assembly[(1,)](flags)
    with at_most(60):
        wait_for_the_next[(64,)](flags, 63)  # the next launch is as good as any
    assert flags[:64].all()


def test_waiting_ends_in_time_for_others() -> None:
    """One that waits less than the limit is not disturbed."""
    done, out = torch.zeros(300, dtype=torch.int32), torch.zeros(300, dtype=torch.int32)
    with at_most(60), knobs.override(wait_limit=30.0):
        one_after_the_other[(300,)](done, out)
    assert torch.equal(out, torch.arange(300, dtype=torch.int32))
