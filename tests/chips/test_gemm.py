"""Packed matrix products against numpy in float64: shapes, strides, types, epilogues, threads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from terrazzo.chips.cpu import gemm, pool
from terrazzo.chips.cpu.chip import Cpu
from terrazzo.chips.cpu.description import avx2_spec, host, neon_spec
from terrazzo.chips.cpu.gemm import lower_contraction
from terrazzo.chips.cpu.llvm import jit
from terrazzo.chips.cpu.llvm.kernel import Kernel, compile_function, llvm_text
from terrazzo.chips.spec import ChipSpec
from terrazzo.dtypes import DType, bfloat16, float16, float32, float64, int32
from terrazzo.expr.ir import Program
from terrazzo.expr.matmul import match_product
from terrazzo.graph import fusion
from terrazzo.graph.ir import TensorType
from terrazzo.graph.passes import canonicalize
from terrazzo.graph.trace import trace
from terrazzo.index import Var
from terrazzo.knobs import knobs
from terrazzo.loop import interpret
from terrazzo.ops.activation import gelu, relu
from terrazzo.ops.contract import batch_matmul, linear, matmul
from terrazzo.ops.reduce import in_shape
from terrazzo.ops.shape import permute_dims

sys.path.insert(0, str(Path(__file__).parent.parent))

from page_edges import PageEdges

WIDTHS = [bits for bits in (256, 512) if bits <= host().vector_bits]
M, N, K = Var("M"), Var("N"), Var("K")


@pytest.fixture(params=WIDTHS)
def chip(request: pytest.FixtureRequest) -> ChipSpec:
    with knobs.override(vector_bits=request.param):
        return host()


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    with knobs.override(threads=request.param):
        pool.sync()
        yield request.param
    pool.sync()


def contraction(function: Callable[..., Any], shapes: Sequence[Sequence[Any]],
                dtype: DType = float32) -> Program:
    graph, _ = trace(function, [TensorType(tuple(s), dtype) for s in shapes])
    graph, _ = canonicalize(graph)
    programs = [g.program for g in fusion.fuse(graph, Cpu.fusion_limits).groups]
    (found,) = [p for p in programs if p.kind == "contraction"]
    return found


def make(function: Callable[..., Any], shapes: Sequence[Sequence[Any]], chip: ChipSpec,
         dtype: DType = float32) -> Kernel:
    lowered = lower_contraction(contraction(function, shapes, dtype), chip)
    assert lowered is not None
    return compile_function(lowered, chip, dict(pool.symbols()))


def numbers(shape: Sequence[int], dtype: DType = float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype.np)


def run(kernel: Kernel, inputs: Sequence[np.ndarray], shape: Sequence[int], threads: int = 1,
        sizes: dict[str, int] | None = None) -> np.ndarray:
    out = np.full(shape, np.nan, kernel.function.params[-1].dtype.np)
    dims = [(sizes or {})[d.name] for d in kernel.function.dims]
    kernel([a.ctypes.data for a in inputs] + [out.ctypes.data], dims, threads)
    return out


def check(got: np.ndarray, left: np.ndarray, right: np.ndarray, want: np.ndarray,
          unit: float = 2.0**-24) -> None:
    """Within the error bound of a sum of products, taken generously below its worst case."""
    size = np.abs(left.astype(np.float64)) @ np.abs(right.astype(np.float64))
    bound = (8 + np.sqrt(left.shape[-1])) * unit * size + 1e-30
    assert got.shape == want.shape
    assert np.all(np.abs(got.astype(np.float64) - want) <= bound)


def product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) @ y.astype(np.float64)


SHAPES = [(1, 1, 2), (1, 70, 33), (2, 3, 5), (3, 17, 64), (5, 9, 1), (6, 16, 16), (7, 64, 65),
          (12, 31, 70), (13, 70, 48), (29, 8, 100), (64, 64, 64), (70, 69, 67), (300, 20, 97)]


@pytest.mark.parametrize("transpose_x", [False, True])
@pytest.mark.parametrize("transpose_y", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_and_transposes(chip: ChipSpec, shape: tuple[int, int, int], transpose_x: bool,
                               transpose_y: bool) -> None:
    m, k, n = shape
    x, y = numbers((m, k)), numbers((k, n), seed=1)
    given = [np.ascontiguousarray(x.T) if transpose_x else x,
             np.ascontiguousarray(y.T) if transpose_y else y]
    kernel = make(lambda a, b: batch_matmul(a, b, transpose_x=transpose_x,
                                            transpose_y=transpose_y),
                  [a.shape for a in given], chip)
    check(run(kernel, given, (m, n)), x, y, product(x, y))


@pytest.mark.parametrize("transpose_y", [False, True])
@pytest.mark.parametrize("m", [1, 3, 8, 12, 40, 300])
def test_asking_for_what_comes_next_changes_nothing(chip: ChipSpec, m: int, transpose_y: bool
                                                    ) -> None:
    """What tiles read ahead may lie behind the end of memory."""
    x, y = numbers((m, 80)), numbers((80, 35), seed=1)
    given = [x, np.ascontiguousarray(y.T) if transpose_y else y]
    kernel = make(lambda a, b: batch_matmul(a, b, transpose_y=transpose_y),
                  [a.shape for a in given], chip)
    places = PageEdges()
    at_edges = [places.copy(number, array) for number, array in enumerate(given)]
    got = run(kernel, at_edges, (m, 35))
    check(got, x, y, product(x, y))
    assert np.array_equal(got, run(kernel, given, (m, 35)))


@pytest.mark.parametrize("count", [1, 2, 4, 16])
def test_blocks_have_rows_enough_to_hide_the_last_cache(
        chip: ChipSpec, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 512 rows blocks of two tiles, which came out even, took a third longer."""
    monkeypatch.setattr(gemm, "by_threads", lambda chip, plan: plan(count))
    small = replace(chip, l2_bytes=1 << 20)
    for m in range(260, 1040, 12):
        program = contraction(batch_matmul, [(m, 1024), (1024, 2048)])
        product = match_product(program)
        assert product is not None
        kernel = gemm.Gemm(program, product, small, frozenset())
        blocks, _ = kernel.blocks_and_groups(192, 1024 // kernel.nr)
        assert isinstance(blocks, int) and -(-m // (blocks * kernel.mr)) * kernel.mr >= 16, m


@pytest.mark.parametrize("transpose_y", [False, True])
@pytest.mark.parametrize("shape", [(270, 1100, 130), (700, 530, 1100)], ids=str)
def test_several_pieces_and_tasks(threads: int, shape: tuple[int, int, int], transpose_y: bool
                                  ) -> None:
    m, k, n = shape
    x, y = numbers((m, k)), numbers((k, n), seed=1)
    given = [x, np.ascontiguousarray(y.T) if transpose_y else y]
    kernel = make(lambda a, b: batch_matmul(a, b, transpose_y=transpose_y),
                  [a.shape for a in given], host())
    check(run(kernel, given, (m, n), threads), x, y, product(x, y))


@pytest.fixture(scope="module", params=[False, True], ids=["rows", "transposed"])
def symbolic(request: pytest.FixtureRequest) -> tuple[Kernel, bool]:
    transposed: bool = request.param
    return make(lambda a, b: batch_matmul(a, b, transpose_y=transposed),
                [(M, K), (N, K) if transposed else (K, N)], host()), transposed


@pytest.mark.parametrize("shape", [*SHAPES, (0, 5, 7), (5, 0, 7), (5, 7, 0), (1, 0, 9), (0, 0, 0),
                                   (300, 0, 10), (257, 600, 70), (300, 1100, 130)], ids=str)
def test_one_kernel_for_all_sizes(symbolic: tuple[Kernel, bool], threads: int,
                                  shape: tuple[int, int, int]) -> None:
    kernel, transposed = symbolic
    m, k, n = shape
    x, y = numbers((m, k)), numbers((k, n), seed=1)
    given = [x, np.ascontiguousarray(y.T) if transposed else y]
    got = run(kernel, given, (m, n), threads, {"M": m, "N": n, "K": k})
    check(got, x, y, product(x, y))


@pytest.mark.parametrize("sizes", [(0, 4, 5), (4, 0, 5), (4, 5, 0), (300, 0, 3)], ids=str)
def test_nothing_to_sum_up(sizes: tuple[int, int, int]) -> None:
    m, k, n = sizes
    kernel = make(lambda a, b, c: relu(matmul(a, b) + c), [(m, k), (k, n), (n,)], host())
    bias = numbers((n,))
    got = run(kernel, [numbers((m, k)), numbers((k, n)), bias], (m, n))
    assert np.array_equal(got, np.broadcast_to(np.maximum(bias, 0), (m, n)))


@pytest.mark.parametrize("m", [1, 5, 70, 300])
@pytest.mark.parametrize("dtype", [bfloat16, float16, float64], ids=lambda d: d.name)
@pytest.mark.parametrize("transpose", [(False, False), (False, True), (True, False)], ids=str)
def test_types(chip: ChipSpec, dtype: DType, m: int, transpose: tuple[bool, bool]) -> None:
    tx, ty = transpose
    x, y = numbers((m, 67), dtype), numbers((67, 45), dtype, 1)
    given = [np.ascontiguousarray(x.T) if tx else x, np.ascontiguousarray(y.T) if ty else y]
    kernel = make(lambda a, b: batch_matmul(a, b, transpose_x=tx, transpose_y=ty),
                  [a.shape for a in given], chip, dtype)
    got = run(kernel, given, (m, 45))
    check(got, x, y, product(x, y), float(dtype.eps))


def test_half_sums_are_rounded_once(threads: int) -> None:
    x, y = numbers((300, 700), bfloat16), numbers((1100, 700), bfloat16, 1)
    kernel = make(linear, [x.shape, y.shape], host(), bfloat16)
    got = run(kernel, [x, y], (300, 1100), threads)
    exact = product(x, y.T)
    assert np.max(np.abs(got.astype(np.float64) - exact) / np.abs(exact).max()) < 2.0**-8


@pytest.mark.parametrize("m", [1, 4, 20, 130, 300])
@pytest.mark.parametrize("transposed", [False, True])
def test_epilogues(chip: ChipSpec, m: int, transposed: bool) -> None:
    x, w = numbers((m, 40)), numbers((40, 70), seed=1)
    bias, residual = numbers((70,), seed=2), numbers((m, 70), seed=3)
    weight = np.ascontiguousarray(w.T) if transposed else w

    def layer(x: Any, w: Any, bias: Any, residual: Any) -> Any:
        return gelu(batch_matmul(x, w, transpose_y=transposed) + bias) * 2.0 + residual

    kernel = make(layer, [x.shape, weight.shape, bias.shape, residual.shape], chip)
    assert len(kernel.function.params) == 5, "the whole layer is one kernel"
    got = run(kernel, [x, weight, bias, residual], (m, 70))
    from math import erf

    before = product(x, w) + bias
    want = before * 0.5 * (1 + np.vectorize(erf)(before / np.sqrt(2))) * 2 + residual
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=4e-5)


@pytest.mark.parametrize("m", [3, 70, 300])
def test_epilogue_of_half_types(m: int) -> None:
    x, w, bias = (numbers(s, bfloat16, i) for i, s in enumerate([(m, 600), (90, 600), (90,)]))
    kernel = make(lambda x, w, b: relu(linear(x, w, b)), [x.shape, w.shape, bias.shape], host(),
                  bfloat16)
    got = run(kernel, [x, w, bias], (m, 90)).astype(np.float64)
    want = np.maximum(product(x, w.T) + bias.astype(np.float64), 0)
    np.testing.assert_allclose(got, want, rtol=2.0**-8, atol=1e-3)


@pytest.mark.parametrize(("left", "right"), [
    ((3, 20, 30), (3, 30, 40)), ((2, 3, 20, 30), (3, 30, 40)), ((2, 3, 20, 30), (2, 1, 30, 40)),
    ((20, 30), (5, 30, 40)), ((4, 1, 30), (4, 30, 7)), ((2, 300, 20), (20, 30)),
    ((2, 300, 20), (2, 20, 30)), ((3, 0, 4), (3, 4, 5)), ((0, 3, 4), (0, 4, 5))], ids=str)
def test_batches_and_broadcasting(threads: int, left: tuple[int, ...], right: tuple[int, ...]
                                  ) -> None:
    x, y = numbers(left), numbers(right, seed=1)
    want = product(x, y)
    got = run(make(matmul, [left, right], host()), [x, y], want.shape, threads)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


def test_rows_of_a_batch_are_one_matrix() -> None:
    lowered = lower_contraction(contraction(linear, [(4, 96, 64), (128, 64)]), host())
    assert lowered is not None
    assert "b_packed" in str(lowered), "384 rows share one packed weight"


@pytest.mark.parametrize("length", [5, 40])
def test_heads_where_they_lie(length: int, chip: ChipSpec) -> None:
    """Queries and keys as (batch, length, heads, size): strided views, no copies."""
    q, k = numbers((2, length, 3, 16)), numbers((2, length, 3, 16), seed=1)
    kernel = make(lambda q, k: matmul(permute_dims(q, axes=(0, 2, 1, 3)),
                                      permute_dims(k, axes=(0, 2, 3, 1))), [q.shape] * 2, chip)
    want = np.einsum("blhd,bmhd->bhlm", q.astype(np.float64), k.astype(np.float64))
    np.testing.assert_allclose(run(kernel, [q, k], want.shape), want, rtol=1e-5, atol=1e-5)


def test_a_factor_that_is_not_affine_is_packed(chip: ChipSpec) -> None:
    heads, weight = numbers((2, 3, 10, 16)), numbers((48, 20), seed=1)
    kernel = make(lambda x, w: matmul(in_shape(permute_dims(x, axes=(0, 2, 1, 3)), (2, 10, 48)), w),
                  [heads.shape, weight.shape], chip)
    rows = heads.transpose(0, 2, 1, 3).reshape(2, 10, 48)
    want = product(rows, weight)
    np.testing.assert_allclose(run(kernel, [heads, weight], want.shape), want, rtol=1e-5,
                               atol=1e-5)


def test_matrix_times_vector(chip: ChipSpec) -> None:
    x, v = numbers((37, 50)), numbers((50, 1), seed=1)
    got = run(make(batch_matmul, [x.shape, v.shape], chip), [x, v], (37, 1))
    check(got, x, v, product(x, v))


def test_symbolic_rows_with_an_epilogue() -> None:
    kernel = make(lambda x, w, b: gelu(linear(x, w, b)), [(M, 96), (130, 96), (130,)], host())
    w, b = numbers((130, 96), seed=1), numbers((130,), seed=2)
    for m in (1, 2, 7, 13, 100, 260):
        x = numbers((m, 96), seed=m)
        from math import erf

        before = product(x, w.T) + b
        want = before * 0.5 * (1 + np.vectorize(erf)(before / np.sqrt(2)))
        got = run(kernel, [x, w, b], (m, 130), 1, {"M": m})
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=4e-5)


@pytest.mark.parametrize("shape", [(1, 3, 4), (3, 5, 9), (14, 6, 5), (270, 3, 4)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_loop_ir_means_the_same(shape: tuple[int, int, int], transposed: bool) -> None:
    m, k, n = shape
    x, y, b = numbers((m, k)), numbers((k, n), seed=1), numbers((n,), seed=2)
    given = [x, np.ascontiguousarray(y.T) if transposed else y, b]
    lowered = lower_contraction(contraction(
        lambda x, y, b: batch_matmul(x, y, transpose_y=transposed) + b,
        [a.shape for a in given]), host())
    assert lowered is not None
    out = np.full(m * n, np.nan, np.float32)
    interpret.run(lowered, [*(a.ravel() for a in given), out], {})
    np.testing.assert_allclose(out.reshape(m, n), product(x, y) + b, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- constant B
def make_packed(function: Callable[..., Any], shapes: Sequence[Sequence[Any]], chip: ChipSpec,
                dtype: DType = float32) -> Kernel:
    """A kernel whose second input is a constant."""
    program = contraction(function, shapes, dtype)
    lowered = lower_contraction(program, chip, frozenset(program.inputs[1:2]))
    assert lowered is not None and list(lowered.packed) == [1]
    return compile_function(lowered, chip, dict(pool.symbols()))


PACKED_SHAPES = [s for s in SHAPES if s[2] > 1] + [(130, 1100, 65), (270, 600, 130)]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", PACKED_SHAPES, ids=str)
def test_a_constant_is_read_from_panels(chip: ChipSpec, shape: tuple[int, int, int],
                                        transposed: bool) -> None:
    m, k, n = shape
    x, y = numbers((m, k)), numbers((k, n), seed=1)
    given = [x, np.ascontiguousarray(y.T) if transposed else y]
    kernel = make_packed(lambda a, b: batch_matmul(a, b, transpose_y=transposed),
                         [a.shape for a in given], chip)
    check(run(kernel, kernel.function.arranged(given), (m, n), 2), x, y, product(x, y))


@pytest.mark.parametrize("n", [3, 7, 15, 17])
def test_sums_of_rows_that_fill_no_vector_have_a_place_of_their_own(chip: ChipSpec, n: int
                                                                    ) -> None:
    """Stored by masks and loaded again for what follows, they took up to three times as long."""
    for m in (1, 20, 1000):
        x, y, b = numbers((m, 10)), numbers((10, n), seed=1), numbers((n,), seed=2)
        kernel = make_packed(lambda x, y, b: relu(batch_matmul(x, y) + b),
                             [a.shape for a in (x, y, b)], chip)
        assert ("alloc sums" in str(kernel.function)) == (n < chip.lanes(32))
        got = run(kernel, kernel.function.arranged([x, y, b]), (m, n))
        np.testing.assert_allclose(got, np.maximum(product(x, y) + b, 0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype, unit", [(float16, 2.0**-11), (bfloat16, 2.0**-8),
                                         (float64, 2.0**-53)], ids=str)
@pytest.mark.parametrize("m", [1, 20, 50, 300, None])
def test_constants_of_other_types(m: int | None, dtype: DType, unit: float) -> None:
    kernel = make_packed(batch_matmul, [(M if m is None else m, 70), (70, 90)], host(), dtype)
    packing = kernel.function.packed[1]
    half = dtype in (float16, bfloat16)
    assert packing.dtype is (float32 if half and m is not None and m > 32 else dtype)
    y = numbers((70, 90), dtype, seed=1)
    for rows in (1, 5, 300) if m is None else (m,):
        x = numbers((rows, 70), dtype)
        got = run(kernel, kernel.function.arranged([x, y]), (rows, 90), 1, {"M": rows})
        check(got, x, y, product(x, y), unit)


def test_a_batch_of_constants_and_symbolic_rows(threads: int) -> None:
    w, b = numbers((3, 700, 70), seed=1), numbers((70,), seed=2)
    kernel = make_packed(lambda x, w, b: relu(matmul(x, w) + b),
                         [(3, M, 700), w.shape, b.shape], host())
    for m in (0, 1, 2, 7, 64, 255, 256, 257, 500):
        x = numbers((3, m, 700), seed=m)
        got = run(kernel, kernel.function.arranged([x, w, b]), (3, m, 70), threads, {"M": m})
        np.testing.assert_allclose(got, np.maximum(product(x, w) + b, 0), rtol=1e-4, atol=1e-4)


def test_nan_and_infinity_do_not_reach_other_columns() -> None:
    x, y = numbers((7, 20)), numbers((20, 21), seed=1)
    y[3, 4], y[5, 20] = np.nan, np.inf
    kernel = make_packed(batch_matmul, [x.shape, y.shape], host())
    got = run(kernel, kernel.function.arranged([x, y]), (7, 21))
    assert np.isnan(got[:, 4]).all() and np.isinf(got[:, 20]).all()
    assert np.isfinite(np.delete(got, [4, 20], axis=1)).all()


def test_packed_loop_ir_means_the_same() -> None:
    x, y, b = numbers((9, 6)), numbers((6, 5), seed=1), numbers((5,), seed=2)
    program = contraction(lambda x, y, b: batch_matmul(x, y) + b, [x.shape, y.shape, b.shape])
    lowered = lower_contraction(program, host(), frozenset(program.inputs[1:2]))
    assert lowered is not None and "x1 packed: columns 5:1, k 6:5" in str(lowered)
    out = np.full(45, np.nan, np.float32)
    interpret.run(lowered, [*(a.ravel() for a in lowered.arranged([x, y, b])), out], {})
    np.testing.assert_allclose(out.reshape(9, 5), product(x, y) + b, rtol=1e-5, atol=1e-5)


def test_a_constant_that_is_read_twice_stays() -> None:
    program = contraction(lambda x, y: matmul(x, y) + y, [(6, 6), (6, 6)])
    lowered = lower_contraction(program, host(), frozenset(program.inputs))
    assert lowered is not None and not lowered.packed


def test_integers_are_left_to_the_schedule() -> None:
    assert lower_contraction(contraction(matmul, [(4, 5), (5, 6)], int32), host()) is None


@pytest.mark.parametrize("chip", [avx2_spec(4), neon_spec(4)], ids=lambda c: c.name)
def test_code_for_other_processors(chip: ChipSpec) -> None:
    lowered = lower_contraction(contraction(linear, [(M, 96), (100, 96)]), chip)
    assert lowered is not None
    text = jit.assembly(llvm_text([lowered], chip), chip)
    assert ("fmla" if chip.llvm_triple.startswith("aarch64") else "vfmadd") in text
