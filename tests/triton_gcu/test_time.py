"""Modelled time: the same in every run, on every processor, and what autotuning goes by."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from device_arrays import normal, zeros  # noqa: E402
from kernels import add, matmul, softmax  # noqa: E402

from terrazzo import gcu  # noqa: E402
from terrazzo.triton_gcu.chip import description  # noqa: E402
from terrazzo.triton_gcu.driver import modelled_bench, stream_cycles  # noqa: E402

pytestmark = pytest.mark.triton


def cycles_of_some_kernels() -> list[int]:
    """Cycles of an addition, a softmax and two products."""
    found = []

    def note(begin: int) -> None:
        found.append(stream_cycles() - begin)

    x, y, out = normal(57 * 1000), normal(57 * 1000, seed=1), zeros(57 * 1000)
    begin = stream_cycles()
    add[(57,)](x, y, out, 57 * 1000, BLOCK=1024)
    note(begin)
    begin = stream_cycles()
    softmax[(57,)](x, out, 1000, BLOCK=1024)
    note(begin)
    for dtype in (np.float32, np.float16):
        a, b, c = normal(100, 70, dtype=dtype), normal(70, 90, dtype=dtype), zeros(100, 90)
        begin = stream_cycles()
        matmul[(4 * 3,)](a, b, c, 100, 90, 70, 32, 32, 32)
        note(begin)
    return found


def test_cycles_are_the_same_in_ten_runs() -> None:
    runs = [cycles_of_some_kernels() for _ in range(10)]
    assert min(runs[0]) > description().launch_cycles
    assert all(run == runs[0] for run in runs)


@triton.jit
def scatter_add(places, values, chosen, out, BY_DATA: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = tl.load(chosen + i) != 0 if BY_DATA else i >= 0
    tl.atomic_add(out + tl.load(places + i), tl.load(values + i), mask, sem="relaxed")


def test_masks_of_atomics_take_their_time_whatever_they_hold() -> None:
    """Additions that data masks off are lanes, not branches: each would be a transfer by itself."""
    n = 48 * 256
    values, places = normal(n), zeros(n, dtype=np.int32)
    everywhere, nowhere = normal(n, seed=3), zeros(n)
    took = []
    for chosen, by_data in ((nowhere, False), (everywhere, True), (nowhere, True)):
        out, begin = zeros(1), stream_cycles()
        scatter_add[(48,)](places, values, chosen, out, by_data, BLOCK=256)
        took.append(stream_cycles() - begin)
        wanted = 0.0 if by_data and chosen is nowhere else values.values.sum(dtype=np.float64)
        np.testing.assert_allclose(out.numpy(), [wanted], atol=1e-2)
    plain, all_of_them, none = took
    assert all_of_them == none < 1.5 * plain


@triton.jit
def rows_of(x, FIRST: tl.constexpr, out, BLOCK: tl.constexpr):
    """Every other row of 64 elements, from a program on."""
    i = (tl.program_id(0) - FIRST) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i // 64 * 128 + i % 64))


@triton.jit
def two_in_one(x, y, out, other, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    if program < FIRST:
        rows_of(x, 0, out, BLOCK)
    else:
        rows_of(y, FIRST, other, BLOCK)


def test_kernels_that_share_a_launch_move_what_they_move_apart() -> None:
    """As Inductor's combo kernels do: the second one's places count from where the first ends."""
    x, y, out, other = normal(2 * 24 * 512), normal(2 * 24 * 512, seed=1), zeros(24 * 512), zeros(
        24 * 512)
    with gcu.trace() as trace:
        rows_of[(24,)](x, 0, out, BLOCK=512)
        two_in_one[(48,)](x, y, out, other, 24, BLOCK=512)
    for made, given in ((out, x), (other, y)):
        np.testing.assert_array_equal(made.numpy(), given.values.reshape(-1, 128)[:, :64].ravel())
    alone, both = (record.counts for record in trace.records)
    assert both[3] == 2 * alone[3] == 2 * out.values.nbytes and both[4] == 2 * alone[4]


# ---------------------------------------------------------------- autotuning
def _tuned() -> Any:
    configs = [triton.Config({"BLOCK": block}, num_warps=warps)
               for block in (32, 256, 2048, 1 << 19) for warps in (1, 4)]
    return triton.autotune(configs, key=["n"])(add)


def test_autotuning_picks_the_same_in_ten_runs() -> None:
    n = 100_000
    x, y, out = normal(n), normal(n, seed=1), zeros(n)
    chosen, times = [], []
    for _ in range(10):
        tuned = _tuned()
        tuned[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, out, n)
        chosen.append(str(tuned.best_config))
        times.append({str(c): t for c, t in tuned.configs_timings.items()})
    assert len(set(chosen)) == 1
    assert all(t == times[0] for t in times)
    assert len({t[0] for t in times[0].values()}) > 2  # they were told apart
    assert np.array_equal(out.numpy(), x.values + y.values)


@triton.jit
def _sorted_rows(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tile = tl.load(x + i)
    tl.store(out + i, tl.sort(tile) + tl.cumsum(tile, 0))


def test_configurations_that_do_not_fit_are_skipped() -> None:
    n = 64
    x, out = normal(1 << 20), zeros(1 << 20)
    tuned = triton.autotune([triton.Config({"N": 1 << 20}), triton.Config({"N": n})], key=[])(
        _sorted_rows)
    tuned[(1,)](x, out)
    assert tuned.best_config.kwargs == {"N": n}
    np.testing.assert_allclose(out.numpy()[:n], np.sort(x.values[:n]) + np.cumsum(x.values[:n]),
                               rtol=1e-5, atol=1e-5)


def test_benchmarks_tell_modelled_time() -> None:
    n = 48 * 1024
    x, out = normal(n), zeros(n)
    run = lambda: add[(48,)](x, x, out, n, BLOCK=1024)  # noqa: E731
    begin = stream_cycles()
    run()
    exact = (stream_cycles() - begin) / description().clock_khz
    assert modelled_bench(run) == exact
    assert modelled_bench(run, quantiles=(0.5, 0.2, 0.8)) == [exact] * 3
    # Where torch has used the device, this is by its events, which tell float32.
    assert triton.testing.do_bench(run, warmup=0, rep=0.01) == pytest.approx(exact, rel=1e-7)


@triton.jit
def turned(x, out, n, A: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + (i // A) % B + B * (i % A) + A * B * (i // (A * B)), i < n),
             i < n)


@pytest.mark.parametrize("a", [32, 33, 3])
def test_rows_and_columns_of_a_number_are_no_gathers(a: int) -> None:
    n = a * 64 * 48
    x, out = normal(n), zeros(n)
    with gcu.trace() as trace:
        turned[(triton.cdiv(n, 1024),)](x, out, n, a, 64, BLOCK=1024)
    (record,) = trace.records
    expected = x.values.reshape(48, a, 64).transpose(0, 2, 1).ravel()
    assert np.array_equal(out.numpy(), expected)
    assert record.counts[3] + record.counts[4] == 8 * n


@triton.jit
def sums_of_columns(x, y, total, other, XBLOCK: tl.constexpr, ROWS: tl.constexpr):
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    at = i % 128 + 128 * tl.arange(0, ROWS)[None, :] + 128 * ROWS * (i // 128)
    first = tl.load(x + at)
    tl.store(total + i, tl.sum(first * tl.load(y + at), 1)[:, None])
    tl.store(other + i, tl.sum(first, 1)[:, None])


@pytest.mark.parametrize("block", [64, 256])
def test_what_needs_a_quotient_twice_computes_it_twice(block: int) -> None:
    x, y, total, other = normal(2048 * 32), normal(2048 * 32, seed=1), zeros(2048), zeros(2048)
    with gcu.trace() as trace:
        sums_of_columns[(2048 // block,)](x, y, total, other, XBLOCK=block, ROWS=32)
    first, second = (v.values.reshape(16, 32, 128).astype(np.float64) for v in (x, y))
    np.testing.assert_allclose(total.numpy(), (first * second).sum(1).ravel(), atol=1e-4)
    np.testing.assert_allclose(other.numpy(), first.sum(1).ravel(), atol=1e-4)
    assert trace.records[0].counts[3] == 2 * x.values.nbytes
