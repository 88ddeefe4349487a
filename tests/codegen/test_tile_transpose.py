"""The transposed copy writes exactly its region, whatever the type, the width and the edges."""

from __future__ import annotations

import numpy as np
import pytest

from terrazzo.chips.cpu import pool
from terrazzo.chips.cpu.description import host
from terrazzo.chips.cpu.llvm.kernel import compile_function
from terrazzo.chips.spec import ChipSpec
from terrazzo.dtypes import DType, bfloat16, bool_, float32, float64, int8
from terrazzo.index import Var
from terrazzo.knobs import knobs
from terrazzo.loop import interpret
from terrazzo.loop.ir import Buffer, Function
from terrazzo.loop.tile_transpose import transposed_copy

WIDTHS = [bits for bits in (128, 256, 512) if bits <= host().vector_bits]
LDD, LDS = 80, 72


@pytest.fixture(params=WIDTHS)
def chip(request: pytest.FixtureRequest) -> ChipSpec:
    with knobs.override(vector_bits=request.param):
        return host()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("dtype", [float32, bfloat16, float64, int8, bool_], ids=lambda d: d.name)
def test_copies_the_region_and_nothing_else(chip: ChipSpec, dtype: DType, streaming: bool,
                                            rng: np.random.Generator) -> None:
    d, s = Buffer("D", dtype, 70 * LDD), Buffer("S", dtype, 80 * LDS)
    rows, columns = Var("rows", 0), Var("columns", 0)
    body = transposed_copy(d, 3, s, 5, rows, columns, LDD, LDS, streaming)
    function = Function("turn", (d, s), (rows, columns), body)
    kernel = compile_function(function, chip, dict(pool.symbols()))
    for m, n in ((0, 4), (1, 1), (16, 16), (33, 7), (5, 64), (64, 64), (61, 70)):
        target = rng.integers(0, 2, 70 * LDD).astype(dtype.np)
        source = rng.integers(0, 2, 80 * LDS).astype(dtype.np)
        expected = target.copy()
        interpret.run(function, [expected, source], {rows: m, columns: n})
        kernel([target.ctypes.data, source.ctypes.data], [m, n], 1)
        np.testing.assert_array_equal(target, expected, err_msg=f"{m} x {n}")


def test_streams_only_where_rows_are_aligned(chip: ChipSpec) -> None:
    size = 64 * 64
    d, s = Buffer("D", float32, size), Buffer("S", float32, size)
    function = Function("turn", (d, s), (), transposed_copy(d, 0, s, 0, 64, 64, 64, 64, True))
    kernel = compile_function(function, chip, dict(pool.symbols()))
    source = np.arange(size, dtype=np.float32)
    room = np.zeros(size + 32, np.float32)
    first = -room.ctypes.data % 64 // 4
    for shift in (0, 1, 4):
        target = room[first + shift:first + shift + size]
        target[:] = 0
        kernel([target.ctypes.data, source.ctypes.data], [], 1)
        np.testing.assert_array_equal(target.reshape(64, 64), source.reshape(64, 64).T)


@pytest.mark.parametrize("few", [2, 3, 4])
@pytest.mark.parametrize("dtype", [float32, int8], ids=lambda d: d.name)
@pytest.mark.parametrize("apart", [False, True])
def test_few_dense_columns(chip: ChipSpec, few: int, dtype: DType, apart: bool,
                           rng: np.random.Generator) -> None:
    count = Var("count", 0)
    d, s = Buffer("D", dtype, 400), Buffer("S", dtype, 400)
    body = (transposed_copy(d, 0, s, 0, few, count, 100, few) if apart else
            transposed_copy(d, 0, s, 0, count, few, few, 100))
    kernel = compile_function(Function("turn", (d, s), (count,), body), chip,
                              dict(pool.symbols()))
    for n in (0, 1, 16, 17, 99):
        source = rng.integers(-99, 99, 400).astype(dtype.np)
        target = np.zeros(400, dtype.np)
        kernel([target.ctypes.data, source.ctypes.data], [n], 1)
        if apart:
            got, want = target.reshape(-1, 100)[:few, :n], source[:n * few].reshape(n, few).T
        else:
            got, want = target[:n * few].reshape(n, few), source.reshape(-1, 100)[:few, :n].T
        np.testing.assert_array_equal(got, want)
        assert np.count_nonzero(target) == np.count_nonzero(want)
