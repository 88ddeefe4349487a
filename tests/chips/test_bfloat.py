"""Products of bfloat16, with the processor's instruction where there is one, against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from terrazzo.chips.cpu import pool
from terrazzo.chips.cpu import templates as cpu_templates
from terrazzo.chips.cpu.bfloat import adds_pairs, lower_bfloat_product
from terrazzo.chips.cpu.chip import Cpu
from terrazzo.chips.cpu.description import avx2_spec, cpu_spec, host
from terrazzo.chips.cpu.llvm import jit
from terrazzo.chips.cpu.llvm.kernel import Kernel, compile_function, llvm_text
from terrazzo.chips.spec import ChipSpec
from terrazzo.dtypes import DType, bfloat16, float32
from terrazzo.expr.ir import Program
from terrazzo.graph import fusion
from terrazzo.graph.ir import TensorType
from terrazzo.graph.passes import canonicalize
from terrazzo.graph.trace import trace
from terrazzo.index import Var
from terrazzo.knobs import knobs
from terrazzo.loop import interpret
from terrazzo.loop.ir import Function
from terrazzo.ops.activation import relu
from terrazzo.ops.contract import batch_matmul, linear, matmul
from terrazzo.ops.reduce import in_shape
from terrazzo.ops.shape import permute_dims
from terrazzo.tools.verify import error_bounds

M, N, K = Var("M"), Var("N"), Var("K")
FEATURES = ["sse2", "avx", "avx2", "fma", "bmi", "bmi2", "f16c", "avx512f", "avx512bw", "avx512dq",
            "avx512vl", "avx512bf16"]
SHAPES = [(1, 1, 2), (1, 70, 33), (2, 3, 5), (3, 17, 64), (7, 64, 65), (12, 31, 70), (70, 69, 67),
          (300, 20, 97), (280, 5, 64), (5, 1, 30)]
LONG = [(270, 1101, 130), (20, 1100, 65)]


def with_pairs(vector_bits: int = 512) -> ChipSpec:
    """A processor that has the instruction, whatever this one has."""
    return cpu_spec("cooperlake", "x86_64-unknown-linux-gnu", FEATURES, cores=4,
                    vector_bits=vector_bits)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    with knobs.override(threads=request.param):
        pool.sync()
        yield request.param
    pool.sync()


def contraction(function: Callable[..., Any], shapes: Sequence[Sequence[Any]],
                dtype: DType = bfloat16) -> Program:
    graph, _ = trace(function, [TensorType(tuple(s), dtype) for s in shapes])
    graph, _ = canonicalize(graph)
    (found,) = [g.program for g in fusion.fuse(graph, Cpu.fusion_limits).groups
                if g.program.kind == "contraction"]
    return found


def lowered(function: Callable[..., Any], shapes: Sequence[Sequence[Any]],
            chip: ChipSpec, constant: bool = False) -> Function:
    program = contraction(function, shapes)
    made = cpu_templates.lower(program, chip, frozenset(program.inputs[1:2] if constant else ()))
    assert made is not None
    assert adds_pairs(chip) == (lower_bfloat_product(program, chip) is not None)
    return made


def make(function: Callable[..., Any], shapes: Sequence[Sequence[Any]],
         constant: bool = False, vector_bits: int = 0) -> Kernel:
    chip = host(vector_bits)
    return compile_function(lowered(function, shapes, chip, constant), chip, dict(pool.symbols()))


def numbers(shape: Sequence[int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(bfloat16.np)


def run(kernel: Kernel, inputs: Sequence[np.ndarray], shape: Sequence[int], threads: int = 1,
        sizes: dict[str, int] | None = None) -> np.ndarray:
    out = np.full(shape, np.nan, kernel.function.params[-1].dtype.np)
    dims = [(sizes or {})[d.name] for d in kernel.function.dims]
    given = kernel.function.arranged(inputs)
    kernel([a.ctypes.data for a in given] + [out.ctypes.data], dims, threads)
    return out


def check(got: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
    """Sums in float32, then rounded once."""
    left, right = x.astype(np.float64), y.astype(np.float64)
    want = left @ right
    bound = (8 + np.sqrt(x.shape[-1])) * 2.0**-24 * (np.abs(left) @ np.abs(right)) + (
        0 if got.dtype == np.float32 else 2.0**-8 * np.abs(want)) + 1e-30
    assert got.shape == want.shape
    assert np.all(np.abs(got.astype(np.float64) - want) <= bound)


@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False)], ids=str)
@pytest.mark.parametrize("shape", SHAPES + LONG, ids=str)
def test_shapes_and_transposes(shape: tuple[int, int, int], transposed: tuple[bool, bool]) -> None:
    m, k, n = shape
    x, y = numbers((m, k)), numbers((k, n), seed=1)
    given = [np.ascontiguousarray(a.T) if turn else a
             for a, turn in zip((x, y), transposed, strict=True)]

    kernel = make(lambda a, b: batch_matmul(a, b, transpose_x=transposed[0],
                                            transpose_y=transposed[1]), [a.shape for a in given])
    check(run(kernel, given, (m, n), 2), x, y)


@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False)], ids=str)
@pytest.mark.parametrize("shape", [(1, 70, 33), (4, 64, 65), (9, 31, 70), (70, 69, 67),
                                   (300, 400, 97)], ids=str)
def test_vectors_of_256_bits(shape: tuple[int, int, int], transposed: tuple[bool, bool]) -> None:
    if host().vector_bits < 256:
        pytest.skip("this processor has no vectors of 256 bits")
    m, k, n = shape
    x, y = numbers((m, k)), numbers((k, n), seed=1)
    given = [np.ascontiguousarray(a.T) if turn else a
             for a, turn in zip((x, y), transposed, strict=True)]
    kernel = make(lambda a, b: batch_matmul(a, b, transpose_x=transposed[0],
                                            transpose_y=transposed[1]), [a.shape for a in given],
                  vector_bits=256)
    check(run(kernel, given, (m, n), 2), x, y)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [s for s in SHAPES if s[2] > 1] + LONG, ids=str)
def test_a_constant_is_read_from_panels_of_pairs(shape: tuple[int, int, int], transposed: bool
                                                 ) -> None:
    m, k, n = shape
    x, y = numbers((m, k)), numbers((k, n), seed=1)
    given = [x, np.ascontiguousarray(y.T) if transposed else y]
    kernel = make(lambda a, b: batch_matmul(a, b, transpose_y=transposed),
                  [a.shape for a in given], constant=True)
    if adds_pairs(host()):
        assert kernel.function.packed[1].together == 2
    check(run(kernel, given, (m, n), 2), x, y)


@pytest.fixture(scope="module", params=[(False, False), (False, True), (True, False)], ids=str)
def symbolic(request: pytest.FixtureRequest) -> tuple[Kernel, tuple[bool, bool]]:
    tx, ty = request.param
    return make(lambda a, b: batch_matmul(a, b, transpose_x=tx, transpose_y=ty),
                [(K, M) if tx else (M, K), (N, K) if ty else (K, N)]), (tx, ty)


@pytest.mark.parametrize("shape", [*SHAPES, *LONG, (0, 5, 7), (5, 0, 7), (5, 7, 0), (300, 0, 10),
                                   (257, 600, 70)], ids=str)
def test_one_kernel_for_all_sizes(symbolic: tuple[Kernel, tuple[bool, bool]],
                                  shape: tuple[int, int, int]) -> None:
    kernel, transposed = symbolic
    m, k, n = shape
    x, y = numbers((m, k)), numbers((k, n), seed=1)
    given = [np.ascontiguousarray(a.T) if turn else a
             for a, turn in zip((x, y), transposed, strict=True)]
    check(run(kernel, given, (m, n), 1, {"M": m, "N": n, "K": k}), x, y)


def test_symbolic_rows_of_a_constant(threads: int) -> None:
    w = numbers((3, 701, 70), seed=1)
    kernel = make(matmul, [(3, M, 701), w.shape], constant=True)
    for m in (0, 1, 2, 7, 64, 255, 257, 500):
        x = numbers((3, m, 701), seed=m)
        check(run(kernel, [x, w], (3, m, 70), threads, {"M": m}), x, w)


@pytest.mark.parametrize("m", [3, 20, 300])
def test_epilogues(m: int, threads: int) -> None:
    x, w, bias = (numbers(s, i) for i, s in enumerate([(m, 601), (90, 601), (90,)]))
    kernel = make(lambda x, w, b: relu(linear(x, w, b)), [x.shape, w.shape, bias.shape])
    got = run(kernel, [x, w, bias], (m, 90), threads).astype(np.float64)
    want = np.maximum(x.astype(np.float64) @ w.T.astype(np.float64) + bias.astype(np.float64), 0)
    np.testing.assert_allclose(got, want, rtol=2.0**-8, atol=1e-3)


@pytest.mark.parametrize(("left", "right"), [
    ((3, 20, 30), (3, 30, 40)), ((2, 3, 20, 31), (3, 31, 40)), ((2, 3, 20, 30), (2, 1, 30, 40)),
    ((20, 33), (5, 33, 40)), ((4, 1, 30), (4, 30, 7)), ((2, 300, 20), (20, 30)),
    ((2, 300, 21), (2, 21, 30)), ((3, 0, 4), (3, 4, 5)), ((0, 3, 4), (0, 4, 5))], ids=str)
def test_batches_and_broadcasting(threads: int, left: tuple[int, ...], right: tuple[int, ...]
                                  ) -> None:
    program = contraction(matmul, [left, right])
    if 0 in (*left, *right):
        assert cpu_templates.lower(program, host()) is None
        return
    x, y = numbers(left), numbers(right, seed=1)
    shape = (x.astype(np.float32) @ y.astype(np.float32)).shape
    check(run(make(matmul, [left, right]), [x, y], shape, threads), x, y)


def test_a_factor_that_is_not_affine_is_packed() -> None:
    heads, weight = numbers((2, 3, 10, 17)), numbers((51, 20), seed=1)
    kernel = make(lambda x, w: matmul(in_shape(permute_dims(x, axes=(0, 2, 1, 3)), (2, 10, 51)), w),
                  [heads.shape, weight.shape])
    rows = heads.transpose(0, 2, 1, 3).reshape(2, 10, 51)
    check(run(kernel, [heads, weight], (2, 10, 20)), rows, weight)


@pytest.mark.parametrize("m", [1, 7, 40, 300])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("constant", [False, True])
def test_nan_and_infinity_stay_in_their_rows_and_columns(m: int, transposed: bool, constant: bool
                                                         ) -> None:
    x, y = numbers((m, 21)), numbers((21, 37), seed=1)
    y[3, 4], y[20, 36], x[m - 1, 20] = np.nan, np.inf, np.nan
    given = [x, np.ascontiguousarray(y.T) if transposed else y]
    kernel = make(lambda a, b: batch_matmul(a, b, transpose_y=transposed),
                  [a.shape for a in given], constant)
    got = run(kernel, given, (m, 37)).astype(np.float32)
    with np.errstate(invalid="ignore"):
        want = x.astype(np.float32) @ y.astype(np.float32)
    assert np.array_equal(np.isnan(got), np.isnan(want))
    assert np.array_equal(np.isinf(got), np.isinf(want))


def test_denormal_numbers_may_count_as_zero() -> None:
    """By no more than `verify` allows for."""
    x = numbers((20, 40)) * bfloat16.np.type(2.0**-127)
    y = numbers((40, 33), seed=1) * bfloat16.np.type(2.0**20)
    graph, _ = trace(batch_matmul, [TensorType(a.shape, bfloat16) for a in (x, y)])
    bounded = error_bounds.run(graph, [x, y])[graph.outputs[0]]
    got = run(make(batch_matmul, [x.shape, y.shape]), [x, y], (20, 33)).astype(np.float64)
    assert np.all(np.abs(got - bounded.value) <= bounded.error)
    assert bounded.error.max() < 2.0**-100


@pytest.mark.parametrize("shape", [(1, 3, 4), (3, 5, 9), (14, 6, 5), (270, 3, 4)], ids=str)
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False)], ids=str)
def test_loop_ir_means_the_same(shape: tuple[int, int, int], transposed: tuple[bool, bool]
                                ) -> None:
    m, k, n = shape
    x, y = numbers((m, k)), numbers((k, n), seed=1)
    given = [np.ascontiguousarray(a.T) if turn else a
             for a, turn in zip((x, y), transposed, strict=True)]
    function = lowered(lambda a, b: batch_matmul(
        a, b, transpose_x=transposed[0], transpose_y=transposed[1]),
        [a.shape for a in given], with_pairs())
    out = np.full(m * n, np.nan, bfloat16.np)
    interpret.run(function, [*(a.ravel() for a in given), out], {})
    check(out.reshape(m, n), x, y)


@pytest.mark.parametrize("bits", [256, 512])
@pytest.mark.parametrize("shapes", [[(M, 96), (100, 96)], [(300, 96), (100, 96)],
                                    [(1, 96), (100, 96)]], ids=str)
def test_the_instruction(shapes: list[tuple[Any, ...]], bits: int) -> None:
    chip = with_pairs(bits)
    text = jit.assembly(llvm_text([lowered(linear, shapes, chip)], chip), chip)
    products = [line for line in text.splitlines() if "vdpbf16ps" in line]
    assert products and all(("zmm" in line) == (bits == 512) for line in products)
    assert "vfmadd" not in text and (bits == 512 or "zmm" not in text)


def test_other_types_and_processors_are_left_to_others() -> None:
    shapes = [(8, 8), (8, 8)]
    assert lower_bfloat_product(contraction(linear, shapes, float32), with_pairs()) is None
    assert lower_bfloat_product(contraction(linear, shapes), with_pairs()) is not None
    assert lower_bfloat_product(contraction(linear, shapes), avx2_spec()) is None
