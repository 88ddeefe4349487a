"""Rewrites of quantised graphs: each fires on its example, and stays within one quantum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import terrazzo.ops  # noqa: F401  (registers every operator)
from terrazzo.chips.cpu.chip import Cpu
from terrazzo.compiler.driver import compile_graph
from terrazzo.compiler.lowering import Lowering
from terrazzo.dtypes import as_dtype
from terrazzo.graph.evaluate import run
from terrazzo.graph.ir import OPERATORS, Graph, TensorType
from terrazzo.graph.passes import Guide, canonicalize, quantized
from terrazzo.graph.passes.quantized import REWRITES
from terrazzo.graph.rewrite import Applied
from terrazzo.graph.trace import trace
from terrazzo.knobs import knobs


class Ops:
    """Operators by name: `op.add(x, y)`."""

    def __getattr__(self, name: str) -> Any:
        return OPERATORS[name]


op = Ops()
SCALE, ZERO = np.float32(0.02), np.uint8(120)
RESULT, RESULT_ZERO = np.float32(0.11), np.uint8(90)


def codes(shape: Sequence[int], dtype: Any = np.uint8, seed: int = 0) -> np.ndarray:
    info = np.iinfo(dtype)
    return np.random.default_rng(seed).integers(info.min, info.max + 1, shape).astype(dtype)


def real(q: Any, scale: Any = SCALE, zero: Any = ZERO, **attrs: Any) -> Any:
    return op.dequantize_linear(q, scale, zero, **attrs)


def weights(shape: Sequence[int], axis: int | None = 0) -> Any:
    """Dequantised weights, with a scale for each index of an axis."""
    bytes_ = codes(shape, np.int8, 1)
    if axis is None:
        return op.dequantize_linear(bytes_, np.float32(0.01), np.int8(0))
    scales = np.linspace(0.001, 0.01, shape[axis], dtype=np.float32)
    return op.dequantize_linear(bytes_, scales, np.zeros(shape[axis], np.int8), axis=axis)


def traced(function: Callable[..., Any], *arrays: np.ndarray) -> Graph:
    types = [TensorType(a.shape, as_dtype(a.dtype)) for a in arrays]
    return trace(function, types, name="test")[0]


def rewritten(function: Callable[..., Any], *arrays: np.ndarray) -> tuple[Graph, list[str]]:
    graph, log = canonicalize(traced(function, *arrays))
    return graph, [a.rule for a in log]


def names(graph: Graph) -> set[str]:
    return {node.op.name for node in graph.nodes}


def conv(x: Any, w: Any, bias: Any = None, **attrs: Any) -> Any:
    return op.conv(x, w, bias, **attrs)


def layer(x: Any) -> Any:
    bias = op.dequantize_linear(codes((16,), np.int8, 2).astype(np.int32) * 100, np.float32(2e-4))
    y = op.relu(conv(real(x), weights((16, 8, 3, 3)), bias, padding=1))
    return op.quantize_linear(y, RESULT, RESULT_ZERO)


def residual(x: Any) -> Any:
    y = op.quantize_linear(conv(real(x), weights((8, 8, 1, 1))), RESULT, RESULT_ZERO)
    return op.quantize_linear(real(y, RESULT, RESULT_ZERO) + real(x), RESULT, np.uint8(3))


def two_layers_of_signed_bytes(x: Any) -> Any:
    y = real(x, zero=np.int8(-8))
    for seed in range(2):
        y = op.relu(conv(y, weights((8, 8, 3, 3)), padding=1)) * np.float32(0.5 + seed)
        y = op.quantize_linear(y, RESULT, np.int8(-60))
        y = op.dequantize_linear(y, RESULT, np.int8(-60))
    return op.quantize_linear(y, RESULT, np.int8(-60))


def product(x: Any) -> Any:
    y = op.matmul(real(x), weights((8, 24), 1)) + np.linspace(-1, 1, 24, dtype=np.float32)
    return op.quantize_linear(y, RESULT, RESULT_ZERO)


IMAGES = (codes((1, 8, 9, 10)),)
# What each rewrite is for: a function, its inputs, the operators that are there and not there
# afterwards. Functions end in a quantised tensor, so that quanta are steps of 1.
EXAMPLES: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...], set[str], set[str]]] = {
    "convolve bytes": (layer, IMAGES, {"integer_convolve"}, {"convolve", "dequantize_linear"}),
    "multiply matrices of bytes": (product, (codes((5, 8)),), {"integer_matmul"}, {
        "batch_matmul", "dequantize_linear"}),
    "quantise what was dequantised": (
        lambda x: op.quantize_linear(op.permute_dims(real(x), axes=(0, 2, 3, 1)), SCALE, ZERO),
        IMAGES, {"permute_dims"}, {"quantize_linear", "dequantize_linear"}),
    "largest byte": (
        lambda x: op.quantize_linear(op.max_pool(real(x), window=2), SCALE, ZERO), IMAGES,
        {"window_max"}, {"quantize_linear", "dequantize_linear"}),
    "join bytes": (
        lambda x, y: op.quantize_linear(op.concat(real(x), real(y), axis=1), SCALE, ZERO),
        (codes((2, 3)), codes((2, 4))), {"concat"}, {"quantize_linear", "dequantize_linear"}),
    "quantise to unsigned bytes": (two_layers_of_signed_bytes, (codes((1, 8, 9, 10), np.int8),),
                                   {"integer_convolve"}, {"convolve"}),
    "correct sums after scaling": (layer, IMAGES, {"integer_convolve"}, {"subtract"}),
    "add constants once": (layer, IMAGES, {"integer_convolve"}, {"subtract"}),
    "scale before quantising": (residual, IMAGES, {"integer_convolve"}, {"divide"}),
}


def test_every_rewrite_has_an_example() -> None:
    assert EXAMPLES.keys() == {r.name for r in REWRITES}


@pytest.mark.parametrize("rule", EXAMPLES)
def test_it_fires_and_stays_within_a_quantum(rule: str) -> None:
    function, arrays, there, gone = EXAMPLES[rule]
    graph, fired = rewritten(function, *arrays)
    assert rule in fired
    assert there <= names(graph)
    assert not gone & names(graph)
    (meant,) = run(traced(function, *arrays), arrays)
    for got in (run(graph, arrays)[0], compile_graph(traced(function, *arrays))(*arrays)):
        assert got.dtype == meant.dtype
        assert np.abs(np.asarray(got).astype(int) - meant.astype(int)).max() <= 1


def test_a_layer_is_one_kernel_behind_its_border() -> None:
    from terrazzo.chips.cpu.chip import Cpu
    from terrazzo.graph.fusion import fuse

    graph, _ = rewritten(layer, *IMAGES)
    (contraction,) = [g for g in fuse(graph, Cpu.fusion_limits).groups
                      if g.program.kind == "contraction"]
    assert contraction.outputs[0].dtype.name == "uint8"


def test_bytes_between_two_products_stay_bytes() -> None:
    def branches(x: Any) -> Any:
        a = op.quantize_linear(conv(real(x), weights((8, 8, 1, 1))), RESULT, RESULT_ZERO)
        b = op.quantize_linear(conv(real(x), weights((8, 8, 3, 3)), padding=1), RESULT, ZERO)
        return op.quantize_linear(real(a, RESULT, RESULT_ZERO) + real(b, RESULT, ZERO), SCALE, ZERO)

    from terrazzo.chips.cpu.chip import Cpu
    from terrazzo.graph.fusion import fuse

    graph, _ = rewritten(branches, *IMAGES)
    stored = [v.dtype.name for g in fuse(graph, Cpu.fusion_limits).groups for v in g.outputs]
    assert "float32" not in stored and "int32" not in stored


def test_what_is_only_half_quantised_stays_float() -> None:
    def function(x: Any, w: Any) -> Any:
        return conv(real(x), w)

    graph, fired = rewritten(function, IMAGES[0], np.ones((4, 8, 1, 1), np.float32))
    assert "convolve" in names(graph) and "convolve bytes" not in fired


def test_scales_of_blocks_and_of_inner_channels_stay_float() -> None:
    inner = op.dequantize_linear
    w = codes((4, 8, 1, 1), np.int8, 1)
    scales = np.linspace(0.001, 0.01, 8, dtype=np.float32)

    def function(x: Any) -> Any:
        return conv(real(x), inner(w, scales, np.zeros(8, np.int8), axis=1))

    assert "integer_convolve" not in names(rewritten(function, *IMAGES)[0])


def test_a_scale_that_is_not_known_stays_float() -> None:
    def function(x: Any, scale: Any) -> Any:
        return op.matmul(op.dequantize_linear(x, scale, ZERO), weights((8, 6), 1))

    graph, _ = rewritten(function, codes((3, 8)), np.array(0.1, np.float32))
    assert "integer_matmul" not in names(graph)


def test_different_parameters_do_not_cancel() -> None:
    graph, fired = rewritten(lambda x: op.quantize_linear(real(x), SCALE, np.uint8(5)),
                             codes((4, 5)))
    assert "quantise what was dequantised" not in fired
    assert "quantize_linear" in names(graph)


def test_a_value_that_others_read_is_not_scaled_twice() -> None:
    def function(x: Any) -> Any:
        y = conv(real(x), weights((8, 8, 1, 1)))
        return op.quantize_linear(y, RESULT, RESULT_ZERO), y

    graph, _ = rewritten(function, *IMAGES)
    assert sum(n.op.name == "integer_convolve" for n in graph.nodes) == 1
    meant = run(traced(function, *IMAGES), IMAGES)
    got = compile_graph(traced(function, *IMAGES))(*IMAGES)
    assert np.abs(got[0].astype(int) - meant[0].astype(int)).max() <= 1
    np.testing.assert_allclose(got[1], meant[1], rtol=1e-4, atol=1e-4)


def test_the_level_decides() -> None:
    log: list[Applied] = []
    graph = traced(layer, *IMAGES)
    assert quantized(graph, log, "basic") is graph and not log
    with knobs.override(opt_level="basic"):
        assert "convolve" in names(canonicalize(graph, Guide("basic"))[0])


def test_groups_and_depthwise_layers() -> None:
    for groups, inner in ((2, 4), (8, 1)):
        def function(x: Any, groups: int = groups, inner: int = inner) -> Any:
            y = conv(real(x), weights((16, inner, 3, 3)), padding=1, groups=groups)
            return op.quantize_linear(y, RESULT, RESULT_ZERO)

        (meant,) = run(traced(function, *IMAGES), IMAGES)
        got = compile_graph(traced(function, *IMAGES))(*IMAGES)
        assert np.abs(np.asarray(got).astype(int) - meant.astype(int)).max() <= 1


def test_an_image_is_quantised_in_the_order_it_lies_in_before_it_is_turned() -> None:
    def function(x: Any) -> Any:
        q = op.quantize_linear(x, SCALE, ZERO)
        return op.quantize_linear(conv(real(q), weights((16, 3, 3, 3)), padding=1), RESULT, ZERO)

    image = np.zeros((1, 3, 224, 224), np.float32)
    first, second, *_ = Lowering(traced(function, image), Cpu()).functions
    assert "%" not in str(first), "one stretch of numbers"
    assert "transposed_copy" in str(second)
