"""Default schedules compute what the program means, and add up floats without losing them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.chips.cpu.chip import Cpu
from terrazzo.chips.cpu.description import avx2_spec, host
from terrazzo.compiler.levels import level_text
from terrazzo.compiler.lowering import Lowering
from terrazzo.knobs import knobs


def loop_text(function: object, *arrays: np.ndarray) -> str:
    """The loops for a chip with 512 KiB of second-level cache, whatever this machine has."""
    graph = tz.jit(function).graph(arrays, {})  # type: ignore[arg-type]
    return level_text(Lowering(graph, Cpu(avx2_spec(cores=2))), "loop")


SHAPES = [(7,), (300000,), (5, 200000), (3000, 40), (40, 3000), (200000, 3), (4099, 15),
          (9, 65, 33)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reductions_along_every_axis(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    x = rng.standard_normal(shape).astype(np.float32)
    for axis in (None, *range(len(shape))):
        np.testing.assert_array_equal(tz.max(x, axis=axis), x.max(axis))
        exact = (x.astype(np.float64) ** 2).sum(axis)
        np.testing.assert_allclose(tz.jit(lambda x, a=axis: tz.sum(x * x, axis=a))(x), exact,
                                   rtol=1e-6)


@pytest.mark.parametrize("shape", [(1 << 22,), (1 << 16, 48), (1 << 18, 3), (4, 1 << 20)], ids=str)
def test_long_sums_of_equal_terms_stay_exact_to_a_few_ulp(shape: tuple[int, ...]) -> None:
    # Added one after the other, 2^16 times 0.1 is off by 6e-4, and 2^18 times by 2e-3.
    x = np.full(shape, 0.1, np.float32)
    for axis in (None, *range(len(shape))):
        exact = x.sum(axis, dtype=np.float64)
        np.testing.assert_allclose(tz.jit(lambda x, a=axis: tz.sum(x, axis=a))(x), exact, rtol=3e-6)


@pytest.mark.parametrize("rows", [40, 64, 500, 2000])
def test_sums_down_columns_err_less_than_one_after_the_other(rows: int, rng: np.random.Generator
                                                             ) -> None:
    """By blocks, and sums of blocks by blocks again, as torch's cascade of sums."""
    x = (rng.standard_normal((rows, 256)) + 0.5).astype(np.float32)
    exact = x.sum(0, dtype=np.float64)
    plain = np.cumsum(x, axis=0)[-1]  # which has to add one row after the other
    ours = tz.jit(lambda x: tz.sum(x, axis=0))(x)
    assert np.abs(ours - exact).mean() < 0.75 * np.abs(plain - exact).mean()


def test_large_outputs_are_streamed_and_small_ones_are_not() -> None:
    large, small = np.zeros((1 << 21,), np.float32), np.zeros((1 << 12,), np.float32)
    assert "# streaming" in loop_text(lambda x: x + 1, large)
    assert "# streaming" not in loop_text(lambda x: x + 1, small)


def test_what_the_kernel_reads_again_is_not_streamed() -> None:
    x = np.zeros((2048, 1024), np.float32)

    def function(x: object) -> object:
        y = tz.exp(x)
        return y, y / tz.sum(y, axis=-1, keepdims=True)

    text = loop_text(function, x)
    assert text.count("# streaming") == 1


def channels_last_pool(x: object) -> object:
    pooled = tz.max_pool(tz.permute_dims(x, axes=(0, 3, 1, 2)), window=3, strides=2, padding=1)
    return tz.permute_dims(pooled, axes=(0, 2, 3, 1))


@pytest.mark.parametrize("bits", [bits for bits in (128, 256, 512) if bits <= host().vector_bits])
@pytest.mark.parametrize("channels", [1, 3, 15, 24, 40, 72, 96, 100, 144, 200, 672])
def test_columns_of_any_number(channels: int, bits: int, rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 9, 7, channels)).astype(np.float32)
    around = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(around, (3, 3), axis=(1, 2))[:, ::2, ::2]
    with knobs.override(vector_bits=bits):
        np.testing.assert_array_equal(tz.jit(channels_last_pool)(x), windows.max((-2, -1)))
        np.testing.assert_array_equal(tz.jit(lambda x: tz.max(x, axis=(1, 2)))(x), x.max((1, 2)))
        for axis in (0, (1, 2)):
            np.testing.assert_allclose(tz.jit(lambda x, a=axis: tz.sum(x * x, axis=a))(x),
                                       (x.astype(np.float64) ** 2).sum(axis), rtol=1e-6)


@pytest.mark.parametrize("channels", [24, 40, 96, 144])
def test_columns_leave_no_rest_in_memory(channels: int) -> None:
    """Tiles divide the columns; sums of a vector that is not full are in registers too."""
    x = np.zeros((1, 9, 7, channels), np.float32)
    graph = tz.jit(channels_last_pool).graph((x,), {})
    lowering = Lowering(graph, Cpu(replace(avx2_spec(cores=2), vector_bits=512)))
    assert "if " not in level_text(lowering, "loop")
    stores = level_text(lowering, "llvm").count("call void @llvm.masked.store")
    assert stores == (channels % 16 > 0)


@pytest.mark.parametrize(("columns", "tile"), [(1024, 64), (160, 32)])
def test_long_sums_of_wide_rows_read_longer_pieces(columns: int, tile: int) -> None:
    text = loop_text(lambda x: tz.sum(x, axis=0), np.ones((4096, columns), np.float32))
    assert f"in 0..{tile}:" in text


def test_sums_of_gathered_rows_run_along_the_rows(rng: np.random.Generator) -> None:
    """Though where a row begins is data, its neighbours are known: vectors of columns."""
    table = rng.standard_normal((1000, 192)).astype(np.float32)
    rows = rng.integers(-1000, 1000, (50, 6))

    def bags(table: object, rows: object) -> object:
        return tz.sum(tz.take(table, rows, axis=0), axis=1)

    text = loop_text(bags, table, rows)
    assert "in 0..6:" in text and "vector for" in text and "vector for k" not in text, text
    np.testing.assert_allclose(bags(table, rows), table[rows].sum(1), rtol=1e-5, atol=1e-5)


def squares(x: object, y: object) -> object:
    """Of the distances of all rows of x from all columns of y."""
    return tz.sum((x[:, :, None] - y) ** 2, axis=1)


def test_what_lies_side_by_side_along_results_is_computed_so(rng: np.random.Generator) -> None:
    """Though the larger operand is contiguous along the sum: from result to result it stays."""
    x, y = (rng.standard_normal(s).astype(np.float32) for s in ((1000, 10), (10, 70)))
    text = loop_text(squares, x, y)
    assert "for k in 0..10:" in text and "vector for k" not in text, text
    exact = squares(x.astype(np.float64), y.astype(np.float64))
    np.testing.assert_allclose(tz.jit(squares)(x, y), exact, rtol=1e-5)


@pytest.mark.parametrize("shape", [(70, 30, 10), (3, 70, 33, 7), (200, 40)], ids=str)
def test_results_of_short_sums_are_finished_in_vectors(shape: tuple[int, ...],
                                                       rng: np.random.Generator) -> None:
    def finished(x: object, y: object) -> object:
        return tz.exp(tz.sum(x * y, axis=-1) * -0.1) + tz.astype(y[..., 0], "float32")

    x = rng.standard_normal(shape).astype(np.float32)
    for y in (x, rng.standard_normal(shape).astype(np.float16)):
        text = loop_text(finished, x, y)
        assert "alloc" in text and "vector for" in text.split("= exp(")[0].splitlines()[-2], text
        wide = y.astype(np.float64)
        np.testing.assert_allclose(
            tz.jit(finished)(x, y), np.exp((x * wide).sum(-1) * -0.1) + wide[..., 0],
            rtol=2e-5, atol=2e-5)
    long = np.ones((4, 1000), np.float32)
    assert loop_text(finished, long, long).count("alloc") == 1, "a sum's own accumulators alone"


def test_gathered_rows_go_past_the_caches_by_one_thread_alone(rng: np.random.Generator) -> None:
    table = rng.standard_normal((8000, 512)).astype(np.float32)
    rows = rng.integers(0, 8000, 2048)

    def gathered(table: object, rows: object) -> object:
        return tz.take(table, rows, axis=0)

    text = loop_text(gathered, table, rows)
    assert "threads <= 1" in text, text
    for threads in (1, 2):
        with knobs.override(threads=threads):
            np.testing.assert_array_equal(gathered(table, rows), table[rows])
