"""Kernels of integer products and convolutions: exact on every vector width, packed or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from terrazzo.base.scalar import Call, Const, Scalar, cast
from terrazzo.chips.cpu import pool
from terrazzo.chips.cpu.chip import Cpu
from terrazzo.chips.cpu.description import avx2_spec, host, neon_spec
from terrazzo.chips.cpu.llvm import jit
from terrazzo.chips.cpu.llvm.kernel import compile_function, llvm_text
from terrazzo.chips.cpu.quant import lower_integer_product
from terrazzo.chips.cpu.quant_bytes import without_bytes
from terrazzo.chips.spec import ChipSpec
from terrazzo.compiler.levels import level_text
from terrazzo.compiler.lowering import Lowering
from terrazzo.dtypes import DType, as_dtype, float32, int8, int16, int32, int64, uint8
from terrazzo.expr.ir import Program
from terrazzo.graph import fusion
from terrazzo.graph.ir import TensorType
from terrazzo.graph.passes import canonicalize
from terrazzo.graph.trace import trace
from terrazzo.index import Var
from terrazzo.knobs import knobs
from terrazzo.loop import interpret
from terrazzo.loop.int8_tile import integer_tile
from terrazzo.loop.ir import Buffer, Function, Tile, walk
from terrazzo.ops.contract import matmul
from terrazzo.ops.elementwise import astype
from terrazzo.ops.quant import (
    dequantize_linear,
    integer_convolve,
    integer_matmul,
    quantize_linear,
    saturated,
)
from terrazzo.ops.shape import permute_dims
from terrazzo.runtime.executable import Executable

WIDTHS = [bits for bits in (256, 512) if bits <= host().vector_bits]


@pytest.fixture(params=WIDTHS)
def chip(request: pytest.FixtureRequest) -> ChipSpec:
    """With 512 bits the host's own instructions; with 256 it has none for bytes, only for words."""
    with knobs.override(vector_bits=request.param):
        return host()


def codes(shape: Sequence[int], dtype: DType, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(dtype.min, dtype.max + 1, shape).astype(dtype.np)


def lowering(function: Callable[..., Any], arrays: Sequence[np.ndarray], chip: ChipSpec,
             shapes: Sequence[Any] | None = None) -> Lowering:
    types = [TensorType(tuple(a.shape if shapes is None else shapes[i]), as_dtype(a.dtype))
             for i, a in enumerate(arrays)]
    return Lowering(trace(function, types, name="test")[0], Cpu(chip))


def run(function: Callable[..., Any], arrays: Sequence[np.ndarray], chip: ChipSpec) -> np.ndarray:
    made = lowering(function, arrays, chip)
    assert any("integer_tile" in str(f) for f in made.functions), "the template did not apply"
    return np.asarray(Executable(made.artifact())(*arrays))


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a.astype(np.float64) @ b.astype(np.float64)).astype(np.int64)


# ---------------------------------------------------------------- the tile
def tile_function(mr: int, nr: int, together: int, segments: int, groups: int, columns: int,
                  accumulate: bool, scattered: bool) -> Function:
    narrow = together == 4
    lda, ldc = segments * groups * together + 5, nr + 3
    c = Buffer("c", int32, mr * ldc)
    a = Buffer("a", uint8 if narrow else int16, mr * lda + 64)
    b = Buffer("b", int8 if narrow else int16, segments * groups * together * nr)
    table = Buffer("rows", int64, mr)
    jump = groups * together + 2
    return Function("tile", (c, a, b, table), (), integer_tile(
        c, 0, a, 0, b, 0, groups, lda, ldc, mr, nr, together, accumulate, columns, segments, jump,
        (table, 0) if scattered else None, (0, 8)))


@pytest.mark.parametrize("together", [4, 2])
@pytest.mark.parametrize(("mr", "vectors", "segments", "groups", "missing", "accumulate"), [
    (6, 4, 1, 7, 0, False), (3, 2, 3, 2, 5, True), (17, 2, 2, 3, 0, True), (1, 1, 1, 1, 9, False),
    (2, 1, 1, 0, 0, False)])
@pytest.mark.parametrize("scattered", [False, True])
def test_the_tile_is_what_it_means(chip: ChipSpec, together: int, mr: int, vectors: int,
                                   segments: int, groups: int, missing: int, accumulate: bool,
                                   scattered: bool) -> None:
    nr = vectors * chip.lanes(32)
    columns = max(nr - missing, 1)
    function = tile_function(mr, nr, together, segments, groups, columns, accumulate, scattered)
    given = [codes((int(p.size),), p.dtype, i) for i, p in enumerate(function.params)]
    given[0] %= 1000
    given[3] = np.random.default_rng(3).permutation(mr).astype(np.int64) * (
        segments * groups * together + 5)
    want = [a.copy() for a in given]
    interpret.run(function, want, {})
    kernel = compile_function(function, chip, dict(pool.symbols()))
    kernel([a.ctypes.data for a in given], [], 1)
    np.testing.assert_array_equal(given[0], want[0])


# ---------------------------------------------------------------- products
SHAPES = [(1, 4, 2), (1, 300, 200), (3, 5, 7), (6, 64, 64), (13, 37, 70), (100, 128, 130),
          (49, 512, 96)]


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(chip: ChipSpec, shape: tuple[int, int, int], constant: bool) -> None:
    m, k, n = shape
    a, b = codes((m, k), uint8), codes((k, n), int8, 1)
    if constant:
        got = run(lambda x: integer_matmul(x, b), [a], chip)
    else:
        got = run(lambda x, y: integer_matmul(x, y), [a, b], chip)
    np.testing.assert_array_equal(got, product(a, b))


@pytest.mark.parametrize("types", [(int8, int8), (uint8, uint8), (int8, uint8)], ids=str)
def test_other_bytes_are_multiplied_as_words(types: tuple[DType, DType]) -> None:
    a, b = codes((7, 33), types[0]), codes((33, 40), types[1], 1)
    got = run(lambda x, y: integer_matmul(x, y), [a, b], host())
    np.testing.assert_array_equal(got, product(a, b))


def test_extremes_do_not_saturate(chip: ChipSpec) -> None:
    a = np.full((8, 512), 255, np.uint8)
    for number in (-128, 127):
        b = np.full((512, 48), number, np.int8)
        got = run(lambda x, w=b: integer_matmul(x, w), [a], chip)
        assert (got == 255 * number * 512).all()


@pytest.mark.parametrize("shapes", [((3, 5, 8), (3, 8, 20)), ((2, 3, 5, 8), (3, 8, 20)),
                                    ((2, 9, 12), (12, 33)), ((1, 4, 6), (5, 6, 16))], ids=str)
def test_batches(chip: ChipSpec, shapes: Any) -> None:
    a, b = codes(shapes[0], uint8), codes(shapes[1], int8, 1)
    np.testing.assert_array_equal(run(lambda x: integer_matmul(x, b), [a], chip), product(a, b))
    got = run(lambda x, y: integer_matmul(x, y), [a, b], chip)
    np.testing.assert_array_equal(got, product(a, b))


def test_rows_of_a_symbolic_number(chip: ChipSpec) -> None:
    b = codes((40, 72), int8, 1)
    first = codes((5, 40), uint8)
    made = lowering(lambda x: integer_matmul(x, b), [first], chip, [(Var("n", 0), 40)])
    run_it = Executable(made.artifact())
    for rows in (0, 1, 5, 6, 64, 501):
        a = codes((rows, 40), uint8, rows)
        np.testing.assert_array_equal(run_it(a), product(a, b))


def test_several_threads_and_tasks() -> None:
    a, b = codes((700, 1030), uint8), codes((1030, 500), int8, 1)
    for threads in (1, 2, 3):
        with knobs.override(threads=threads):
            pool.sync()
            got = run(lambda x: integer_matmul(x, b), [a], host())
        np.testing.assert_array_equal(got, product(a, b))
    pool.sync()


# ---------------------------------------------------------------- what is made of the sums
def test_requantising_with_a_residual(chip: ChipSpec) -> None:
    a, b, rest = codes((50, 64), uint8), codes((64, 130), int8, 1), codes((50, 130), uint8, 2)
    scale = np.random.default_rng(3).uniform(1e-4, 2e-4, 130).astype(np.float32)

    def function(x: Any, r: Any) -> Any:
        total = astype(integer_matmul(x, b), dtype=float32)
        y = quantize_linear(total * scale, None, np.uint8(113))
        real = dequantize_linear(y, np.float32(0.3), np.uint8(113))
        return quantize_linear(real + dequantize_linear(r, np.float32(0.2), np.uint8(5)),
                               np.float32(0.35), np.uint8(7))

    y = np.clip(np.rint(product(a, b).astype(np.float32) * scale) + 113, 0, 255)
    real = (y - 113) * np.float32(0.3) + (rest.astype(np.float32) - 5) * np.float32(0.2)
    want = np.clip(np.rint(real / np.float32(0.35)) + 7, 0, 255)
    got = run(function, [a, rest], chip)
    assert got.dtype == np.uint8
    assert np.abs(got.astype(int) - want).max() <= 1


def there_and_back(x: Scalar, zero: int = 3, taken: int = 3) -> Scalar:
    byte = saturated(x, Const(int32, zero), uint8)
    return cast(Call(int32, "sub", (cast(byte, int32), Const(int32, taken))), float32)


def test_floats_that_become_bytes_and_floats_again_stay_floats() -> None:
    source = Buffer("x", float32, 4)
    memory = {source: np.array([300.2, 2.5, -9.0, 7.5], np.float32)}
    for i in range(4):
        long = there_and_back(source[i])
        short = without_bytes(long)
        assert "bitcast" in str(long) and "bitcast" not in str(short)
        assert interpret.evaluate_scalar(short, {}, memory) == interpret.evaluate_scalar(
            long, {}, memory)
    assert "bitcast" in str(without_bytes(there_and_back(source[0], 3, 4)))
    loose = Call(int32, "bitcast", (source[0] + 1.5 * 2**23,))
    wrapped = cast(cast(cast(loose, uint8), int32), float32)
    assert without_bytes(wrapped) is wrapped, "what is not clamped wraps around"


# ---------------------------------------------------------------- convolutions
# (x, w, strides, dilation): channels last, unpadded
WINDOWS: list[tuple[Any, ...]] = [
    ((1, 9, 9, 8), (3, 3, 8, 16), (1, 1), (1, 1)),
    ((2, 11, 10, 4), (3, 2, 4, 70), (2, 1), (1, 1)),
    ((1, 12, 12, 8), (3, 3, 8, 20), (1, 1), (2, 2)),
    ((1, 15, 15, 3), (7, 7, 3, 64), (2, 2), (1, 1)),
    ((1, 14, 14, 16), (1, 1, 16, 40), (2, 2), (1, 1)),
    ((1, 20, 6), (5, 6, 24), (3,), (1,)),
    ((1, 5, 6, 7, 4), (2, 3, 2, 4, 17), (1, 1, 1), (1, 2, 1)),
    ((3, 7, 7, 12), (1, 1, 12, 96), (1, 1), (1, 1))]


@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_convolutions(chip: ChipSpec, case: Any) -> None:
    x, w = codes(case[0], uint8), codes(case[1], int8, 1)
    attrs = {"strides": case[2], "dilation": case[3]}
    got = run(lambda v: integer_convolve(v, w, **attrs), [x], chip)
    assert integer_convolve.reference is not None
    want = integer_convolve.reference(x, w, TensorType(got.shape, int32), groups=1, **attrs)
    np.testing.assert_array_equal(got, want)


def test_convolution_with_weights_that_are_computed() -> None:
    x, w = codes((1, 9, 9, 8), uint8), codes((3, 3, 8, 40), int8, 1)
    attrs = {"strides": (1, 1), "dilation": (1, 1)}
    got = run(lambda v, u: integer_convolve(v, u, **attrs), [x, w], host())
    assert integer_convolve.reference is not None
    want = integer_convolve.reference(x, w, TensorType(got.shape, int32), groups=1, **attrs)
    np.testing.assert_array_equal(got, want)


# (x, strides, dilation, window): each channel by itself
DEPTHWISE: list[tuple[Any, ...]] = [
    ((1, 9, 9, 70), (1, 1), (1, 1), (3, 3)), ((2, 12, 11, 16), (2, 2), (1, 1), (3, 3)),
    ((1, 9, 7, 5), (1, 1), (2, 1), (2, 3)), ((3, 30, 33), (2,), (1,), (5,)),
    ((1, 3, 3, 40), (1, 1), (1, 1), (3, 3))]


@pytest.mark.parametrize("lying", ["by channel", "by tap"])
@pytest.mark.parametrize("case", DEPTHWISE, ids=str)
def test_channels_apart(chip: ChipSpec, case: Any, lying: str) -> None:
    shape, strides, dilation, window = case
    x, channels = codes(shape, uint8), shape[-1]
    w = codes((*window, 1, channels), int8, 1)
    attrs = {"strides": strides, "dilation": dilation, "groups": channels}
    order = (w.ndim - 1, *range(w.ndim - 1)) if lying == "by channel" else tuple(range(w.ndim))
    stored = np.ascontiguousarray(w.transpose(order))

    def function(v: Any) -> Any:
        weights = permute_dims(stored, axes=tuple(np.argsort(order).tolist()))
        return quantize_linear(astype(integer_convolve(v, weights, **attrs), dtype=float32),
                               np.float32(700), np.uint8(100))

    made = lowering(function, [x], chip)
    assert not any(isinstance(s, Tile) for f in made.functions for s in walk(f.body))
    assert "gather" not in level_text(made, "llvm"), "bytes lie side by side"
    got = np.asarray(Executable(made.artifact())(x))
    assert integer_convolve.reference is not None
    sums = integer_convolve.reference(x, w, TensorType(got.shape, int32), **attrs)
    want = np.clip(np.rint(sums.astype(np.float32) / 700) + 100, 0, 255)
    np.testing.assert_array_equal(got, want)


# ---------------------------------------------------------------- which code comes out
def contraction(function: Callable[..., Any], arrays: Sequence[np.ndarray]) -> Program:
    graph, _ = trace(function, [TensorType(a.shape, as_dtype(a.dtype)) for a in arrays])
    (found,) = [g.program for g in fusion.fuse(canonicalize(graph)[0], Cpu.fusion_limits).groups
                if g.program.kind == "contraction"]
    return found


def test_instructions() -> None:
    arrays = [np.zeros((8, 16), np.uint8), np.zeros((16, 64), np.int8)]
    program = contraction(lambda x, y: integer_matmul(x, y), arrays)
    for chip, wanted in ((avx2_spec(), "vpmaddwd"), (host(), "vpdpbusd")):
        if wanted == "vpdpbusd" and not chip.has("avx512vnni"):
            continue
        function = lower_integer_product(program, chip)
        assert function is not None
        assert wanted in jit.assembly(llvm_text([function], chip), chip)
    assert lower_integer_product(program, neon_spec()) is None


def test_constants_come_packed() -> None:
    b = codes((16, 64), int8)
    made = lowering(lambda x: integer_matmul(x, b), [codes((8, 16), uint8)], host())
    (function,) = made.functions
    assert len(function.packed) == 1
    assert "b_packed" not in str(function)


def test_what_is_no_product_of_bytes_is_left_to_others() -> None:
    arrays = [np.zeros((8, 16), np.int32), np.zeros((16, 4), np.int32)]
    assert lower_integer_product(contraction(matmul, arrays), host()) is None
