"""Kernels of convolutions against numpy in float64: shapes, types, epilogues, plans, threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from terrazzo.base.shapes import dim
from terrazzo.chips.cpu import pool
from terrazzo.chips.cpu import templates as cpu_templates
from terrazzo.chips.cpu.chip import Cpu
from terrazzo.chips.cpu.conv import lower_convolution
from terrazzo.chips.cpu.conv_plan import PlannedConv
from terrazzo.chips.cpu.conv_shape import choose_tile
from terrazzo.chips.cpu.description import avx2_spec, host, neon_spec
from terrazzo.chips.cpu.llvm import jit
from terrazzo.chips.cpu.llvm.kernel import compile_function, llvm_text
from terrazzo.chips.spec import ChipSpec
from terrazzo.compiler.lowering import Lowering
from terrazzo.dtypes import DType, as_dtype, bfloat16, float16, float32, float64, int32
from terrazzo.expr.convolution import match_convolution
from terrazzo.expr.ir import Program
from terrazzo.graph import fusion
from terrazzo.graph.evaluate import run as evaluate
from terrazzo.graph.ir import TensorType, operator_named
from terrazzo.graph.passes import canonicalize
from terrazzo.graph.trace import trace
from terrazzo.knobs import knobs
from terrazzo.loop import interpret
from terrazzo.loop.ir import Function, Tile, walk
from terrazzo.loop.simplify import simplify
from terrazzo.ops.activation import clip, gelu, relu
from terrazzo.ops.conv import conv, convolve
from terrazzo.ops.shape import permute_dims
from terrazzo.runtime.executable import Executable

WIDTHS = [bits for bits in (128, 256, 512) if bits <= host().vector_bits]
Pads = tuple[tuple[int, int], ...]


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


def programs(function: Callable[..., Any], shapes: Sequence[Sequence[Any]],
             dtype: DType = float32) -> list[Program]:
    graph, _ = trace(function, [TensorType(tuple(s), dtype) for s in shapes])
    return [g.program for g in fusion.fuse(canonicalize(graph)[0], Cpu.fusion_limits).groups]


def convolution(function: Callable[..., Any], shapes: Sequence[Sequence[Any]],
                dtype: DType = float32) -> Program:
    (found,) = [p for p in programs(function, shapes, dtype) if p.kind == "contraction"]
    return found


def numbers(shape: Sequence[int], dtype: DType = float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype.np)


def run(function: Function, chip: ChipSpec, inputs: Sequence[np.ndarray], shape: Sequence[int],
        threads: int = 1, sizes: dict[str, int] | None = None) -> np.ndarray:
    function = simplify(function)
    kernel = compile_function(function, chip, dict(pool.symbols()))
    size = int(np.prod(shape))
    out = np.full(size + 16, np.nan, function.params[-1].dtype.np)
    given = [np.ascontiguousarray(a) for a in function.arranged(inputs)]
    dims = [(sizes or {})[d.name] for d in function.dims]
    kernel([a.ctypes.data for a in given] + [out.ctypes.data], dims, threads)
    assert np.isnan(out[size:].astype(np.float64)).all()  # nothing is written behind the result
    return out[:size].reshape(shape)


def expected(x: np.ndarray, w: np.ndarray, strides: Sequence[int], padding: Pads,
             dilation: Sequence[int], groups: int = 1) -> np.ndarray:
    """The operator's own reference in float64, which its tests hold against torch."""
    op = operator_named("convolve")
    attrs = {"strides": tuple(strides), "padding": padding, "dilation": tuple(dilation),
             "groups": groups}
    assert op.infer is not None and op.reference is not None
    out = op.infer(*(TensorType(a.shape, float64) for a in (x, w)), **attrs)
    return op.reference(x.astype(np.float64), w.astype(np.float64), out=out, **attrs)


def check(x_shape: Sequence[int], w_shape: Sequence[int], chip: ChipSpec, *,
          strides: Sequence[int] = (1, 1), padding: Pads = ((0, 0), (0, 0)),
          dilation: Sequence[int] = (1, 1), groups: int = 1, dtype: DType = float32,
          constant: bool = True, threads: int = 1) -> Function:
    """A convolution with bias and relu, its weights constant or not, is what it should be."""
    x, w = numbers(x_shape, dtype), numbers(w_shape, dtype, 1)
    b = numbers(w_shape[-1:], dtype, 2)
    attrs = {"strides": tuple(strides), "padding": padding, "dilation": tuple(dilation),
             "groups": groups}
    program = convolution(lambda x, w, b: relu(convolve(x, w, **attrs) + b),
                          [x_shape, w_shape, b.shape], dtype)
    match = match_convolution(program)
    assert match is not None
    constants = frozenset({match.w.source}) if constant else frozenset()
    function = lower_convolution(program, chip, constants)
    assert function is not None
    assert bool(function.packed) <= constant
    linear = expected(x, w, **attrs)
    want = np.maximum(linear + b.astype(np.float64), 0)
    got = run(function, chip, [x, w, b], want.shape, threads)
    size = expected(np.abs(x), np.abs(w), **attrs) + np.abs(b.astype(np.float64))
    unit = {float64: 2.0**-53, float32: 2.0**-24, float16: 2.0**-11, bfloat16: 2.0**-8}[dtype]
    terms = 8 + np.sqrt(np.prod(w_shape[:-1]))
    rounding = 2 * unit * np.abs(want) if dtype.bits == 16 else 0
    assert np.all(np.abs(got.astype(np.float64) - want) <= terms * min(
        unit, 2.0**-24) * size + rounding)
    return function


@pytest.mark.parametrize("constant", [True, False], ids=["packed", "packs"])
@pytest.mark.parametrize(("channels", "outputs"), [(1, 1), (3, 5), (5, 17), (17, 24), (24, 70)])
def test_channels_and_paddings(chip: ChipSpec, channels: int, outputs: int, constant: bool
                               ) -> None:
    for taps, attrs in [
            ((3, 3), {"padding": ((1, 1), (1, 1))}),
            ((3, 2), {"padding": ((2, 0), (0, 3)), "strides": (2, 1), "dilation": (1, 2)}),
            ((1, 1), {"strides": (2, 2)}), ((2, 3), {"padding": ((0, 0), (-1, 1))})]:
        check((2, 9, 11, channels), (*taps, channels, outputs), chip, constant=constant, **attrs)


@pytest.mark.parametrize("width", [1, 2, 4, 5, 6, 7, 8, 13, 14, 15, 29, 57])
def test_widths(width: int) -> None:
    check((1, 7, width, 8), (3, 3, 8, 40), host(), padding=((1, 1), (1, 1)))
    check((1, 3, width, 40), (1, 1, 40, 40), host())


@pytest.mark.parametrize(("shape", "taps", "attrs"), [
    ((2, 30), (3,), {"strides": (2,), "padding": ((1, 1),), "dilation": (1,)}),
    ((1, 700), (5,), {"strides": (1,), "padding": ((4, 0),), "dilation": (2,)}),
    ((1, 5, 6, 7), (3, 3, 3), {"strides": (1, 2, 1), "padding": ((1, 1), (0, 1), (1, 1)),
                               "dilation": (1, 1, 1)}),
    ((1, 5, 6, 7), (2, 1, 2), {"strides": (2, 1, 3), "padding": ((0, 1), (0, 0), (1, 1)),
                               "dilation": (2, 1, 2)}),
], ids=str)
def test_one_and_three_axes(shape: tuple[int, ...], taps: tuple[int, ...], attrs: dict[str, Any]
                            ) -> None:
    check((*shape, 8), (*taps, 8, 20), host(), **attrs)


@pytest.mark.parametrize("dtype", [float16, bfloat16, float64], ids=lambda d: d.name)
def test_types(chip: ChipSpec, dtype: DType) -> None:
    for groups in (1, 2, 8):
        check((1, 6, 7, 8), (3, 3, 8 // groups, 16 if groups < 8 else 8), chip, dtype=dtype,
              padding=((1, 1), (1, 1)), groups=groups)


@pytest.mark.parametrize(("channels", "groups", "outputs"), [
    (4, 4, 4), (17, 17, 17), (40, 40, 40), (70, 70, 70), (6, 6, 12), (12, 3, 24), (64, 2, 66)])
@pytest.mark.parametrize("stride", [1, 2])
def test_groups(chip: ChipSpec, channels: int, groups: int, outputs: int, stride: int) -> None:
    for constant in (True, False):
        check((2, 6, 12, channels), (3, 3, channels // groups, outputs), chip, groups=groups,
              strides=(stride, stride), padding=((1, 1), (1, 1)), constant=constant)
    check((1, 4, 3, channels), (5, 5, channels // groups, outputs), chip, groups=groups,
          padding=((2, 2), (2, 2)))


def test_deep_sums_are_made_in_chunks(threads: int) -> None:
    """Panels that do not fit in the cache, chunks that do not divide k, weights asked for ahead."""
    for shape, taps, attrs in [
            ((1, 7, 7, 520), (3, 3), {"padding": ((1, 1), (1, 1))}),
            ((1, 9, 5, 520), (3, 3), {"padding": ((1, 0), (1, 1)), "strides": (2, 2)}),
            ((1, 7, 7, 2050), (1, 1), {})]:
        chip = replace(host(), l1_bytes=48 << 10, l2_bytes=1 << 20)  # whatever this machine has
        function = check(shape, (*taps, shape[-1], 200), chip, threads=threads, **attrs)
        tiles = [s for s in walk(function.body) if isinstance(s, Tile)]
        assert tiles and all(t.constants["accumulate"] for t in tiles)


@pytest.mark.parametrize("shape", [(1, 40, 41, 16), (3, 30, 33, 8)], ids=str)
def test_several_tasks(threads: int, shape: tuple[int, ...]) -> None:
    check(shape, (3, 3, shape[-1], 96), host(), padding=((1, 1), (1, 1)), threads=threads)
    check(shape, (3, 3, 1, shape[-1]), host(), padding=((1, 1), (1, 1)), groups=shape[-1],
          threads=threads)


@pytest.mark.parametrize(("height", "width"), [(200, 304), (800, 32), (50, 76)])
def test_sums_in_chunks_stay_in_the_caches(height: int, width: int) -> None:
    """Each chunk of weights meets all pixels of a strip: those of a large image are no strip."""
    program = convolution(lambda x, w: convolve(x, w, strides=(1, 1), padding=((1, 1), (1, 1)),
                                                dilation=(1, 1), groups=1),
                          [(1, height, width, 256), (3, 3, 256, 256)])
    conv = match_convolution(program)
    assert conv is not None
    spec = replace(host(), cores=1, l2_bytes=1 << 20, l3_bytes=32 << 20)
    plan = PlannedConv(program, conv.merged(), spec, frozenset())
    assert plan.tiling.shape.chunk
    strip = plan.division.most_strip * width * 256 * 4
    assert strip <= 4 << 20 and (plan.division.most_strip < height or height == 50)


def test_symbolic_batch_and_image(chip: ChipSpec) -> None:
    n, h, w = dim("n"), dim("h"), dim("w")
    weights, b = numbers((3, 3, 8, 20), seed=1), numbers((20,), seed=2)
    attrs: dict[str, Any] = {"strides": (1, 2), "padding": ((1, 1), (1, 1)), "dilation": (1, 1)}
    program = convolution(lambda x, w, b: relu(convolve(x, w, **attrs) + b),
                          [(n, h, w, 8), weights.shape, b.shape])
    function = lower_convolution(program, chip, frozenset())
    assert function is not None
    for sizes in ((1, 5, 7), (2, 9, 64), (1, 1, 1), (0, 4, 4)):
        x = numbers((*sizes, 8))
        want = np.maximum(expected(x, weights, **attrs) + b, 0)
        got = run(function, chip, [x, weights, b], want.shape, 1,
                  dict(zip("nhw", sizes, strict=True)))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_channels_first_is_read_by_strides() -> None:
    x, w = numbers((1, 20, 9, 10)), numbers((40, 20, 3, 3), seed=1)
    found = programs(lambda x, w: conv(x, w, padding=1), [x.shape, w.shape])
    assert [p.kind for p in found] == ["contraction", "pointwise"]
    function = lower_convolution(found[0], host(), frozenset())
    assert function is not None
    want = expected(x.transpose(0, 2, 3, 1), w.transpose(2, 3, 1, 0), (1, 1), ((1, 1), (1, 1)),
                    (1, 1))
    got = run(function, host(), [x, w], want.shape)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


# Orders in memory of the axes of weights [taps, taps, channels, outputs].
LAYOUTS = {"outputs first": (3, 2, 0, 1), "channels last": (3, 0, 1, 2),
           "channels first": (2, 3, 0, 1), "outputs last": (0, 1, 2, 3), "odd": (0, 3, 2, 1)}


@pytest.mark.parametrize("dtype", [float32, bfloat16], ids=lambda d: d.name)
@pytest.mark.parametrize("order", LAYOUTS.values(), ids=LAYOUTS)
def test_weights_packed_at_each_call_give_the_bits_of_constant_ones(
        chip: ChipSpec, order: tuple[int, ...], dtype: DType) -> None:
    """Channels in several pieces, panels that are not full, groups, windows of one and of many."""
    back = tuple(int(n) for n in np.argsort(order))
    for taps, channels, outputs, groups, stride in [
            ((3, 3), 37, 70, 1, 1), ((1, 1), 300, 48, 1, 2), ((3, 2), 5, 34, 2, 1),
            ((1, 3), 1, 3, 3, 1)]:
        x = numbers((1, 9, 11, channels * groups), dtype)
        w = numbers((*taps, channels, outputs * groups), dtype, 1)
        lying = np.ascontiguousarray(w.transpose(order))
        attrs = {"strides": (stride, stride), "padding": ((1, 1), (0, 1)), "dilation": (1, 1),
                 "groups": groups}
        program = convolution(
            lambda x, w, attrs=attrs: convolve(x, permute_dims(w, axes=back), **attrs),
            [x.shape, lying.shape], dtype)
        want = expected(x, w, **attrs)
        match = match_convolution(program)
        assert match is not None
        results = []
        for constants in (frozenset({match.w.source}), frozenset()):
            function = lower_convolution(program, chip, constants)
            assert function is not None
            assert bool(function.packed) == bool(constants)
            results.append(run(function, chip, [x, lying], want.shape))
        np.testing.assert_array_equal(*results)
        unit = {float32: 2.0**-24, bfloat16: 2.0**-8}[dtype]
        size = expected(np.abs(x), np.abs(w), **attrs)
        assert np.all(np.abs(results[1].astype(np.float64) - want) <= (
            np.sqrt(w[..., 0].size) + 8) * unit * size)


@pytest.mark.parametrize("dtype", [float32, float16, bfloat16], ids=lambda d: d.name)
@pytest.mark.parametrize("groups", [1, 16])
@pytest.mark.parametrize("activation", [relu, gelu, lambda y: clip(y, 0.0, 6.0)],
                         ids=["relu", "gelu", "clip"])
def test_bias_residual_and_activation_are_one_kernel(dtype: DType, groups: int,
                                                     activation: Callable[..., Any]) -> None:
    attrs: dict[str, Any] = {"strides": (1, 1), "padding": ((1, 1), (1, 1)), "dilation": (1, 1),
                             "groups": groups}
    shapes = [(1, 9, 10, 16), (3, 3, 16 // groups, 16), (16,), (1, 9, 10, 16)]
    found = programs(lambda x, w, b, r: activation(convolve(x, w, **attrs) + b + r), shapes,
                     dtype)
    assert [p.kind for p in found] == ["contraction"]
    function = lower_convolution(found[0], host(), frozenset())
    assert function is not None
    arrays = [numbers(s, dtype, seed=i) for i, s in enumerate(shapes)]
    linear = expected(arrays[0], arrays[1], **attrs) + (
        arrays[2].astype(np.float64) + arrays[3].astype(np.float64))
    graph, _ = trace(activation, [TensorType(linear.shape, float64)])
    (want,) = evaluate(graph, [linear])
    by_input = {t.name: a for t, a in zip(found[0].inputs, arrays, strict=True)}
    got = run(function, host(), [by_input[t.name] for t in found[0].inputs], want.shape)
    # One rounding to the type of the result, none of what lies between.
    rtol = {float32: 1e-4, float16: 2.0**-11, bfloat16: 2.0**-8}[dtype]
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=1.01 * rtol, atol=1e-4)


@pytest.mark.parametrize("dtype", [float16, bfloat16], ids=lambda d: d.name)
@pytest.mark.parametrize("groups", [1, 16])
def test_half_types_are_stored_from_registers(groups: int, dtype: DType) -> None:
    attrs: dict[str, Any] = {"strides": (1, 1), "padding": ((1, 1), (1, 1)), "dilation": (1, 1),
                             "groups": groups}
    program = convolution(lambda x, w, b: relu(convolve(x, w, **attrs) + b),
                          [(1, 9, 10, 16), (3, 3, 16 // groups, 16), (16,)], dtype)
    function = lower_convolution(program, host(), frozenset())
    assert function is not None
    tiles = [s for s in walk(function.body) if isinstance(s, Tile)]
    assert tiles and all(t.places[0][0] is function.params[-1] for t in tiles)


@pytest.mark.parametrize("dtype", [float16, bfloat16], ids=lambda d: d.name)
def test_one_output_in_the_last_vector_is_all_that_is_stored_there(chip: ChipSpec, dtype: DType
                                                                   ) -> None:
    share = chip.lanes(32) + 1
    for channels, groups, outputs in [(2, 1, share), (2, 3, 3 * share), (1, share, share)]:
        check((1, 5, 6, channels * groups), (1, 3, channels, outputs), chip, groups=groups,
              dtype=dtype)


def test_a_residual_gives_its_memory_to_the_result() -> None:
    """Sums are added to it where it lies; not where the convolution itself reads it."""
    one = {"strides": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1)}
    x, w = numbers((1, 9, 10, 16)), numbers((1, 1, 16, 16), seed=1)

    def chain(x: Any, w: Any) -> Any:
        first = relu(convolve(x, w, **one))
        second = relu(convolve(first, w, **one))
        both = relu(convolve(second, w, **one) + first)  # may lie where `first` did
        return relu(convolve(both, w, **one) + both)  # may not: it is read as an image too

    graph, _ = trace(chain, [TensorType(x.shape, float32), TensorType(w.shape, float32)])
    lowering = Lowering(graph, Cpu())
    first, _, both, last = (g.outputs[0] for g in lowering.fused.groups)
    places = lowering.plan.places
    assert places[both] == places[first] != places[last]
    got = np.asarray(Executable(lowering.artifact())(x, w))
    image = x.astype(np.float64)
    layer = [np.maximum(image @ w[0, 0], 0)]
    layer.append(np.maximum(layer[0] @ w[0, 0], 0))
    layer.append(np.maximum(layer[1] @ w[0, 0] + layer[0], 0))
    np.testing.assert_allclose(got, np.maximum(layer[2] @ w[0, 0] + layer[2], 0), rtol=1e-4)


@pytest.mark.parametrize("dtype", [float32, float16], ids=lambda d: d.name)
def test_interpreter_runs_the_same_kernel(dtype: DType) -> None:
    attrs: dict[str, Any] = {"strides": (2, 1), "padding": ((1, 1), (0, 1)), "dilation": (1, 1)}
    for groups in (1, 3):
        shapes = [(1, 5, 6, 3), (3, 3, 3 // groups, 3 * groups), (3 * groups,)]
        program = convolution(lambda x, w, b, g=groups: relu(convolve(x, w, groups=g, **attrs) + b),
                              shapes, dtype)
        function = lower_convolution(program, avx2_spec(), frozenset())
        assert function is not None
        arrays = [numbers(s, dtype, seed=i) for i, s in enumerate(shapes)]
        want = np.maximum(expected(arrays[0], arrays[1], groups=groups, **attrs) + arrays[2], 0)
        out = np.full(want.size, np.nan, dtype.np)
        interpret.run(function, [a.ravel().copy() for a in arrays] + [out], {})
        rtol = 1e-4 if dtype is float32 else 2.0**-10
        np.testing.assert_allclose(out.reshape(want.shape), want, rtol=rtol, atol=1e-4)


def test_other_kinds_are_left_alone() -> None:
    integers = convolution(lambda x, w: convolve(x, w, strides=(1,), padding=((0, 0),),
                                                 dilation=(1,)), [(1, 9, 4), (3, 4, 5)], int32)
    assert lower_convolution(integers, host(), frozenset()) is None
    product = convolution(lambda x, y: x @ y, [(40, 30), (30, 20)])
    assert lower_convolution(product, host(), frozenset()) is None
    assert cpu_templates.lower(product, host()) is not None


@pytest.mark.parametrize("spec", [avx2_spec(), neon_spec()], ids=lambda s: s.name)
def test_other_chips(spec: ChipSpec) -> None:
    for groups in (1, 24):
        program = convolution(lambda x, w, g=groups: relu(convolve(
            x, w, strides=(1, 1), padding=((1, 1), (1, 1)), dilation=(1, 1), groups=g)),
            [(1, 14, 14, 24), (3, 3, 24 // groups, 24)])
        function = lower_convolution(program, spec, frozenset())
        assert function is not None
        assert jit.compile_object(llvm_text([simplify(function)], spec), spec)


@pytest.mark.parametrize("registers", [16, 32])
def test_tiles_fit_in_registers(registers: int) -> None:
    spec = avx2_spec() if registers == 16 else host()
    if spec.vector_registers < registers:
        pytest.skip("needs 32 vector registers")
    for width in (1, 3, 7, 14, 28, 56, 112, 3136):
        for outputs in (8, 24, 64, 256, 1000):
            for depth, run_ in ((27, 9), (576, 192), (4608, 1536)):
                shape = choose_tile(width, 7, outputs, depth, run_, spec, 4)
                sums = shape.down * shape.across * shape.vectors
                assert sums + shape.vectors + 1 <= registers
                assert shape.down == 1 or shape.across == width
                assert as_dtype("float32").itemsize * shape.chunk * shape.vectors * spec.lanes(
                    32) <= spec.l1_bytes
