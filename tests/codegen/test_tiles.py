"""Each tile's template computes what the tile means, on every vector width of this machine."""

from __future__ import annotations

import numpy as np
import pytest

from terrazzo.chips.cpu import pool
from terrazzo.chips.cpu.description import avx2_spec, host, neon_spec
from terrazzo.chips.cpu.llvm import jit
from terrazzo.chips.cpu.llvm.kernel import compile_function, llvm_text
from terrazzo.chips.spec import ChipSpec
from terrazzo.dtypes import DType, bfloat16, float16, float32, float64
from terrazzo.index import Index, Var
from terrazzo.knobs import knobs
from terrazzo.loop import interpret
from terrazzo.loop.ir import Buffer, Function, Stmt
from terrazzo.loop.pair_tile import pair_panel, pair_rows, pair_tile
from terrazzo.loop.tiles import Soon, dot_tile, fma_rows, fma_tile, transpose_tile

WIDTHS = [bits for bits in (128, 256, 512) if bits <= host().vector_bits]
SIZES = Var("k"), Var("columns")


@pytest.fixture(params=WIDTHS)
def chip(request: pytest.FixtureRequest) -> ChipSpec:
    with knobs.override(vector_bits=request.param):
        return host()


def numbers(size: int, dtype: DType, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(dtype.np)


def check(body: Stmt, buffers: tuple[Buffer, ...], dims: dict[Var, int], chip: ChipSpec) -> None:
    """Run the tile as code and as loops, on the same numbers."""
    function = Function("tile", buffers, tuple(dims), body)
    arrays = [numbers(int(b.size), b.dtype, seed) for seed, b in enumerate(buffers)]
    expected = [a.copy() for a in arrays]
    interpret.run(function, expected, dims)
    kernel = compile_function(function, chip, dict(pool.symbols()))
    assert "tile.main" in llvm_text([function], chip)
    kernel([a.ctypes.data for a in arrays], list(dims.values()), 1)
    wide = buffers[0].dtype
    scale = 64 * max(1, *dims.values()) * wide.eps
    for got, want in zip(arrays, expected):
        np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=0,
                                   atol=scale)


def fma(mr: int, nr: int, accumulate: bool, left: DType = float32, right: DType = float32,
        wide: DType = float32, columns: Index | None = None, a_strides: tuple[int, int] = (40, 1)
        ) -> tuple[Stmt, tuple[Buffer, ...]]:
    c, a, b = (Buffer("C", wide, 4096), Buffer("A", left, 4096), Buffer("B", right, 8192))
    return fma_tile(c, 5, a, 3, b, 7, SIZES[0], *a_strides, nr + 3, nr + 9, mr, nr, accumulate,
                    columns), (c, a, b)


@pytest.mark.parametrize("mr", [1, 2, 5, 6, 13])
@pytest.mark.parametrize("nr", [1, 3, 8, 16, 20, 64])
def test_fma_tile_of_any_shape(chip: ChipSpec, mr: int, nr: int) -> None:
    body, buffers = fma(mr, nr, accumulate=(mr + nr) % 2 == 0)
    check(body, buffers, {SIZES[0]: 37}, chip)


@pytest.mark.parametrize("k", [0, 1, 2, 39])
@pytest.mark.parametrize("accumulate", [False, True])
def test_fma_tile_of_any_depth(chip: ChipSpec, k: int, accumulate: bool) -> None:
    body, buffers = fma(6, 32, accumulate)
    check(body, buffers, {SIZES[0]: k}, chip)


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 32])
def test_fma_tile_with_some_columns_missing(chip: ChipSpec, columns: int) -> None:
    body, buffers = fma(5, 32, True, columns=SIZES[1])
    check(body, buffers, {SIZES[0]: 11, SIZES[1]: columns}, chip)


@pytest.mark.parametrize(("left", "right", "wide"), [
    (float32, bfloat16, float32), (bfloat16, bfloat16, float32), (float16, float32, float32),
    (float16, float16, float32), (float64, float64, float64)])
def test_fma_tile_of_other_types(chip: ChipSpec, left: DType, right: DType, wide: DType) -> None:
    if float16 in (left, right) and chip.vector_bits == 128 and not chip.has("fullfp16"):
        pytest.skip("plain SSE has no conversions of float16")
    body, buffers = fma(4, 24, False, left, right, wide)
    check(body, buffers, {SIZES[0]: 20}, chip)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 7, 11, 12, 13, 23, 24, 31])
@pytest.mark.parametrize("accumulate", [False, True])
def test_rows_are_tiles_and_what_is_left(chip: ChipSpec, rows: int, accumulate: bool) -> None:
    count = Var("rows")
    for mr, nr in ((12, 32), (6, 16), (1, 8)):
        tile, buffers = fma(mr, nr, accumulate)
        check(fma_rows(tile, count), buffers, {SIZES[0]: 19, count: rows}, chip)


@pytest.mark.parametrize("columns", [1, 7, 16, 17, 31, 32])
def test_rows_with_some_columns_missing(chip: ChipSpec, columns: int) -> None:
    count = Var("rows")
    for given, dims in ((SIZES[1], {SIZES[1]: columns}), (columns, {})):  # known late, and now
        tile, buffers = fma(4, 32, True, columns=given)
        check(fma_rows(tile, count), buffers, {SIZES[0]: 11, count: 11, **dims}, chip)


def test_rows_that_ask_for_what_comes_soon(chip: ChipSpec) -> None:
    c, a, b = Buffer("C", float32, 4096), Buffer("A", float32, 4096), Buffer("B", float32, 8192)
    count = Var("rows")
    tile = fma_tile(c, 0, a, 0, b, 0, SIZES[0], 40, 1, 16, 16, 4, 16, False, None,
                    Soon(b, 512, 8))
    check(fma_rows(tile, count), (c, a, b), {SIZES[0]: 32, count: 15}, chip)


def test_fma_tile_of_a_transposed_operand(chip: ChipSpec) -> None:
    body, buffers = fma(6, 16, False, a_strides=(1, 50))
    check(body, buffers, {SIZES[0]: 33}, chip)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("k", [0, 1, 2, 7, 39])
@pytest.mark.parametrize(("mr", "nr"), [(1, 16), (6, 64), (5, 32)])
def test_pair_tile(chip: ChipSpec, mr: int, nr: int, k: int, paired: bool) -> None:
    """Of pairs, with missing columns and without, one tile and rows of them."""
    c, a, b = (Buffer("C", float32, 4096), Buffer("A", bfloat16, 4096), Buffer("B", bfloat16, 8192))
    count = Var("rows")
    for columns, dims in ((None, {}), (SIZES[1], {SIZES[1]: nr - 3})):
        tile = pair_tile(c, 5, a, 3, b, 7, SIZES[0], 40, 2, 2 * nr, nr + 9, mr, nr, k % 2 == 0,
                         paired, False, columns)
        check(tile, (c, a, b), {SIZES[0]: k, **dims}, chip)
        check(pair_rows(tile, count), (c, a, b), {SIZES[0]: k, count: 2 * mr + 3, **dims}, chip)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("k", [0, 1, 2, 39])
def test_pair_tile_that_rounds(chip: ChipSpec, k: int, paired: bool) -> None:
    c, a, b = (Buffer("C", bfloat16, 4096), Buffer("A", bfloat16, 4096),
               Buffer("B", bfloat16, 8192))
    for columns, dims in ((None, {}), (SIZES[1], {SIZES[1]: 27})):
        tile = pair_tile(c, 5, a, 3, b, 7, SIZES[0], 40, 2, 64, 50, 6, 32, False, paired, False,
                         columns)
        function = Function("tile", (c, a, b), (SIZES[0], *dims), tile)
        arrays = [numbers(int(x.size), x.dtype, seed) for seed, x in enumerate((c, a, b))]
        expected = [x.copy() for x in arrays]
        interpret.run(function, expected, {SIZES[0]: k, **dims})
        kernel = compile_function(function, chip, dict(pool.symbols()))
        kernel([x.ctypes.data for x in arrays], [k, *dims.values()], 1)
        got, want = (x[0].astype(np.float64) for x in (arrays, expected))
        # Sums that differ in their last bits round the same way, or to the number next to it.
        np.testing.assert_allclose(got, want, rtol=2.0**-7, atol=1e-6)
        assert np.mean(got == want) > 0.99


@pytest.mark.parametrize("k", [0, 1, 2, 3, 8, 9, 21])
@pytest.mark.parametrize("columns", [1, 30, 32])
def test_pair_panel(chip: ChipSpec, k: int, columns: int) -> None:
    d, s = Buffer("D", bfloat16, 1024), Buffer("S", bfloat16, 1024)
    check(pair_panel(d, 0, s, 3, SIZES[0], 64, 23, 32, SIZES[1]), (d, s),
          {SIZES[0]: k, SIZES[1]: columns}, chip)


@pytest.mark.parametrize("k", [0, 1, 31, 45, 80])
def test_dot_tile_of_bfloat(chip: ChipSpec, k: int) -> None:
    c, a, b = (Buffer("C", float32, 512), Buffer("A", bfloat16, 512), Buffer("B", bfloat16, 512))
    check(dot_tile(c, 1, a, 2, b, 3, SIZES[0], 90, 91, 11, 3, 4, True), (c, a, b), {SIZES[0]: k},
          chip)


@pytest.mark.parametrize(("mr", "nr"), [(1, 8), (2, 4), (3, 4), (4, 4), (1, 1), (3, 2)])
@pytest.mark.parametrize("k", [0, 1, 16, 45])
def test_dot_tile(chip: ChipSpec, mr: int, nr: int, k: int) -> None:
    c, a, b = (Buffer("C", float32, 512), Buffer("A", float32, 512), Buffer("B", bfloat16, 512))
    body = dot_tile(c, 3, a, 1, b, 2, SIZES[0], 50, 47, 20, mr, nr, k % 2 == 0)
    check(body, (c, a, b), {SIZES[0]: k}, chip)


@pytest.mark.parametrize("columns", [1, 3, 4])
def test_dot_tile_with_some_columns_missing(chip: ChipSpec, columns: int) -> None:
    c, a, b = (Buffer("C", float64, 512), Buffer("A", float64, 512), Buffer("B", float64, 512))
    body = dot_tile(c, 0, a, 0, b, 0, SIZES[0], 40, 40, 9, 2, 4, True, SIZES[1])
    check(body, (c, a, b), {SIZES[0]: 21, SIZES[1]: columns}, chip)


@pytest.mark.parametrize("k", [0, 1, 7, 16, 40, 48])
@pytest.mark.parametrize("columns", [1, 8, 15, 32])
def test_transpose_tile(chip: ChipSpec, k: int, columns: int) -> None:
    d, s = Buffer("D", float32, 2048), Buffer("S", float32 if k % 2 else bfloat16, 2048)
    body = transpose_tile(d, 2, s, 1, SIZES[0], 33, 50, 32, SIZES[1])
    check(body, (d, s), {SIZES[0]: k, SIZES[1]: columns}, chip)


@pytest.mark.parametrize("chip", [avx2_spec(), neon_spec()], ids=lambda c: c.name)
def test_templates_compile_for_other_processors(chip: ChipSpec) -> None:
    body, buffers = fma(6, 16, True, columns=SIZES[1])
    text = jit.assembly(llvm_text([Function("tile", buffers, SIZES, body)], chip), chip)
    assert ("fmla" if chip.llvm_triple.startswith("aarch64") else "vfmadd") in text


def test_a_tile_of_integers_runs_as_loops(chip: ChipSpec) -> None:
    from terrazzo.dtypes import int32

    buffers = tuple(Buffer(name, int32, 256) for name in "CAB")
    body = fma_tile(buffers[0], 0, buffers[1], 0, buffers[2], 0, 4, 4, 1, 8, 8, 3, 8, False)
    arrays = [np.arange(256, dtype=np.int32) for _ in buffers]
    expected = [a.copy() for a in arrays]
    function = Function("tile", buffers, (), body)
    interpret.run(function, expected, {})
    compile_function(function, chip, dict(pool.symbols()))([a.ctypes.data for a in arrays])
    assert np.array_equal(arrays[0], expected[0])
