"""Operators of com.microsoft against onnxruntime, or by hand where it has them on GPUs only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from one_node import by_onnxruntime, check, one_node, run
from several_nodes import check_symbolic

from terrazzo.base.shapes import dims

pytestmark = pytest.mark.onnx
ort = pytest.importorskip("onnxruntime")
MS = "com.microsoft"


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def compare(operator: str, inputs: Sequence[np.ndarray | None], *, rtol: float = 1e-4,
            atol: float = 1e-5, domain: str = MS, **options: Any) -> None:
    expected = by_onnxruntime(operator, inputs, domain=domain, **options)
    check(operator, inputs, expected=expected, rtol=rtol, atol=atol, domain=domain, **options)


# ---------------------------------------------------------------- activations and products
def test_gelus(rng: np.random.Generator) -> None:
    x, bias = floats(rng, 3, 5, 8), floats(rng, 8)
    compare("Gelu", [x])
    compare("BiasGelu", [x, bias])
    compare("FastGelu", [x])
    compare("FastGelu", [x, bias])
    compare("QuickGelu", [x], alpha=1.3)


def test_operators_of_gpus_by_hand(rng: np.random.Generator) -> None:
    from math import erf

    x, bias, skip = floats(rng, 2, 3, 8), floats(rng, 8), floats(rng, 2, 3, 8)
    left, right = np.split((x + bias).astype(np.float64), 2, axis=-1)
    gelu = 0.5 * right * (1 + np.vectorize(erf)(right / np.sqrt(2)))
    np.testing.assert_allclose(run("BiasSplitGelu", [x, bias], domain=MS)[0], left * gelu,
                               rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(run("BiasAdd", [x, bias, skip], domain=MS)[0], x + bias + skip,
                               rtol=1e-6)


@pytest.mark.parametrize("options", [
    {}, {"transB": 1, "alpha": 2.0}, {"transA": 1, "transB": 1}, {"transBatchA": 1},
    {"transBatchA": 1, "transA": 1}, {"transBatchB": 1, "transB": 1},
], ids=str)
def test_fused_matmul(rng: np.random.Generator, options: dict[str, Any]) -> None:
    def operand(side: str, rows: int, columns: int) -> np.ndarray:
        matrix = (columns, rows) if options.get(f"trans{side}") else (rows, columns)
        return floats(rng, matrix[0], 4, matrix[1]) if options.get(f"transBatch{side}") else (
            floats(rng, 4, *matrix))

    compare("FusedMatMul", [operand("A", 3, 5), operand("B", 5, 6)], **options)


@pytest.mark.parametrize("options", [
    {"activation": "Relu"}, {"activation": "LeakyRelu", "activation_alpha": 0.2, "transB": 1},
    {"activation": "Tanh", "alpha": 0.5, "beta": 0.3}, {"activation": "Sigmoid"},
], ids=str)
def test_fused_gemm(rng: np.random.Generator, options: dict[str, Any]) -> None:
    b = floats(rng, 7, 5) if options.get("transB") else floats(rng, 5, 7)
    compare("FusedGemm", [floats(rng, 3, 5), b, floats(rng, 7)], **options)


@pytest.mark.parametrize("options", [
    {"activation": "Relu"}, {"activation": "Clip", "activation_params": [-0.5, 0.5]},
    {"activation": "LeakyRelu", "activation_params": [0.1], "pads": [1, 1, 1, 1]},
    {"activation": "HardSigmoid", "activation_params": [0.3, 0.4], "strides": [2, 2]},
], ids=str)
def test_fused_conv(rng: np.random.Generator, options: dict[str, Any]) -> None:
    inputs = [floats(rng, 2, 4, 8, 7), floats(rng, 6, 4, 3, 3), floats(rng, 6)]
    compare("FusedConv", inputs, **options)


def test_fused_conv_adds_before_it_ends(rng: np.random.Generator) -> None:
    x, w, b = floats(rng, 1, 4, 8, 8), floats(rng, 4, 4, 3, 3), floats(rng, 4)
    compare("FusedConv", [x, w, b, floats(rng, 1, 4, 6, 6)], activation="Relu")


# ---------------------------------------------------------------- norms
def test_simplified_layer_normalization(rng: np.random.Generator) -> None:
    x, scale = floats(rng, 2, 3, 16), floats(rng, 16)
    compare("SimplifiedLayerNormalization", [x, scale], domain="", epsilon=1e-3)


@pytest.mark.parametrize("bias", [False, True])
def test_skip_layer_normalization(rng: np.random.Generator, bias: bool) -> None:
    x, skip, gamma, beta = (floats(rng, 2, 3, 16), floats(rng, 2, 3, 16), floats(rng, 16),
                            floats(rng, 16))
    extra = floats(rng, 16) if bias else None
    compare("SkipSimplifiedLayerNormalization", [x, skip, gamma, extra], epsilon=1e-5)
    compare("SkipLayerNormalization", [x, skip, gamma, beta, extra], epsilon=1e-5)
    compare("SkipLayerNormalization", [x, skip, gamma], epsilon=1e-5)


def test_skip_layer_normalization_hands_on_the_sum(rng: np.random.Generator) -> None:
    x, skip, gamma = floats(rng, 2, 3, 16), floats(rng, 2, 3, 16), floats(rng, 16)
    expected = (x + skip).astype(np.float64)
    y, mean, inverse, total = run("SkipLayerNormalization", [x, skip, gamma], domain=MS,
                                  outputs=4, epsilon=1e-5)
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    np.testing.assert_allclose(mean[..., 0], expected.mean(-1), atol=1e-6)
    np.testing.assert_allclose(inverse[..., 0], 1 / np.sqrt(expected.var(-1) + 1e-5), rtol=1e-5)
    assert y.shape == x.shape


@pytest.mark.parametrize("segments", [False, True])
def test_embed_layer_normalization(rng: np.random.Generator, segments: bool) -> None:
    ids = rng.integers(0, 11, (2, 5)).astype(np.int32)
    kinds = rng.integers(0, 2, (2, 5)).astype(np.int32) if segments else None
    mask = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)
    compare("EmbedLayerNormalization", [
        ids, kinds, floats(rng, 11, 16), floats(rng, 7, 16),
        floats(rng, 2, 16) if segments else None, floats(rng, 16), floats(rng, 16), mask],
        outputs=2, epsilon=1e-12)


@pytest.mark.parametrize("last", [0, 1])
def test_group_norm(rng: np.random.Generator, last: int) -> None:
    x = floats(rng, 2, 8, 3, 5)
    gamma, beta = floats(rng, 8), floats(rng, 8)
    wide = x.astype(np.float64).reshape(2, 4, 2, 15)
    unit = (wide - wide.mean((2, 3), keepdims=True)) / np.sqrt(
        wide.var((2, 3), keepdims=True) + 1e-5)
    y = unit.reshape(x.shape) * gamma[:, None, None] + beta[:, None, None]
    expected = y / (1 + np.exp(-y))
    given = np.ascontiguousarray(np.moveaxis(x, 1, -1)) if last else x
    (got,) = run("GroupNorm", [given, gamma, beta], domain=MS, groups=4, activation=1,
                 channels_last=last)
    np.testing.assert_allclose(np.moveaxis(got, -1, 1) if last else got, expected, rtol=1e-4,
                               atol=1e-5)


# ---------------------------------------------------------------- attention over one input
BATCH, PLACES, HEADS, SIZE = 2, 5, 2, 8
HIDDEN = HEADS * SIZE


def projection(rng: np.random.Generator, total: int = 3 * HIDDEN) -> list[np.ndarray]:
    return [floats(rng, BATCH, PLACES, 12), floats(rng, 12, total) / 3, floats(rng, total)]


MASKS = {
    "none": None,
    "lengths": np.array([3, 5], np.int32),
    "ends and starts": np.array([4, 5, 1, 0], np.int32),
    "of keys": np.array([[1, 1, 1, 0, 0], [1, 0, 1, 1, 1]], np.int32),
    "of queries and keys": np.tril(np.ones((2, 5, 5), np.int32)),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("one_way", [0, 1])
def test_attention_masks(rng: np.random.Generator, mask: str, one_way: int) -> None:
    compare("Attention", [*projection(rng), MASKS[mask]], num_heads=HEADS, unidirectional=one_way)


@pytest.mark.parametrize("one_way", [0, 1])
def test_attention_with_a_past(rng: np.random.Generator, one_way: int) -> None:
    past = floats(rng, 2, BATCH, HEADS, 4, SIZE)
    mask = np.ones((BATCH, PLACES + 4), np.int32)
    mask[0, :2] = 0
    compare("Attention", [*projection(rng), mask, past], num_heads=HEADS, outputs=2,
            unidirectional=one_way)


def test_attention_with_bias_and_sizes(rng: np.random.Generator) -> None:
    bias = floats(rng, BATCH, HEADS, PLACES, PLACES)
    compare("Attention", [*projection(rng), None, None, bias], num_heads=HEADS, scale=0.5)
    compare("Attention", projection(rng, 2 * HIDDEN + 8), num_heads=HEADS,
            qkv_hidden_sizes=[HIDDEN, HIDDEN, 8])


# ---------------------------------------------------------------- attention over three inputs
def three(rng: np.random.Generator, keys: int = 6) -> list[np.ndarray]:
    return [floats(rng, BATCH, PLACES, HIDDEN), floats(rng, BATCH, keys, HIDDEN),
            floats(rng, BATCH, keys, HIDDEN)]


def test_multi_head_attention(rng: np.random.Generator) -> None:
    bias = floats(rng, 3 * HIDDEN)
    compare("MultiHeadAttention", three(rng), num_heads=HEADS)
    compare("MultiHeadAttention", [*three(rng), bias], num_heads=HEADS, scale=0.3)
    mask = np.array([[1, 1, 1, 1, 0, 0], [1] * 6], np.int32)
    extra = floats(rng, 1, HEADS, PLACES, 6)
    compare("MultiHeadAttention", [*three(rng), bias, mask, extra], num_heads=HEADS)
    compare("MultiHeadAttention", three(rng, PLACES), num_heads=HEADS, unidirectional=1)


def test_multi_head_attention_of_symbolic_sizes(rng: np.random.Generator) -> None:
    b, s, t = dims("b s t")
    mask = np.array([[1, 1, 1, 1, 0, 0], [1] * 6], np.int32)
    shapes = [(b, s, HIDDEN), (b, t, HIDDEN), (b, t, HIDDEN), None, (b, t)]
    check_symbolic("MultiHeadAttention", [*three(rng), floats(rng, 3 * HIDDEN), mask], shapes,
                   domain=MS, num_heads=HEADS)


def test_multi_head_attention_packed(rng: np.random.Generator) -> None:
    q, k, v = three(rng)
    packed = np.stack([k.reshape(BATCH, 6, HEADS, SIZE), v.reshape(BATCH, 6, HEADS, SIZE)], 3)
    expected = run("MultiHeadAttention", [q, k, v], domain=MS, num_heads=HEADS)
    check("MultiHeadAttention", [q, packed], expected=expected, domain=MS, num_heads=HEADS)
    x = floats(rng, BATCH, PLACES, HEADS, 3, SIZE)
    parts = [np.ascontiguousarray(x[:, :, :, n].reshape(BATCH, PLACES, HIDDEN)) for n in range(3)]
    expected = run("MultiHeadAttention", parts, domain=MS, num_heads=HEADS)
    check("MultiHeadAttention", [x], expected=expected, domain=MS, num_heads=HEADS)


def test_multi_head_attention_with_caches(rng: np.random.Generator) -> None:
    past = [floats(rng, BATCH, HEADS, 4, SIZE) for _ in range(2)]
    compare("MultiHeadAttention", [*three(rng, PLACES), None, None, None, *past], outputs=3,
            num_heads=HEADS)
    ready = [floats(rng, BATCH, HEADS, 6, SIZE) for _ in range(2)]
    compare("MultiHeadAttention", [floats(rng, BATCH, PLACES, HIDDEN), *ready], num_heads=HEADS)


# ---------------------------------------------------------------- grouped queries
WIDE = 16  # onnxruntime turns multiples of 16 only


def grouped(rng: np.random.Generator, batch: int, queries: int, past: int, total: Sequence[int],
            packed: bool = False) -> list[np.ndarray | None]:
    """4 heads of queries for 2 of keys; `total` keys count in each batch."""
    q, k, v = (floats(rng, batch, queries, n * WIDE) for n in (4, 2, 2))
    caches = [floats(rng, batch, 2, past, WIDE) for _ in range(2)]
    first = [np.concatenate([q, k, v], -1), None, None] if packed else [q, k, v]
    return [*first, *caches, np.array(total, np.int32) - 1, np.array(max(total), np.int32)]


GROUPED = {"num_heads": 4, "kv_num_heads": 2, "domain": MS, "outputs": 3}


def same_where_it_counts(inputs: Sequence[np.ndarray | None], total: Sequence[int],
                         **options: Any) -> None:
    """Beyond the keys that count, the caches hold anything."""
    got, expected = (f("GroupQueryAttention", inputs, **GROUPED, **options)
                     for f in (run, by_onnxruntime))
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(got[1:], expected[1:], strict=True):
        assert mine.shape == theirs.shape
        for b, n in enumerate(total):
            np.testing.assert_allclose(mine[b, :, :n], theirs[b, :, :n], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("batch", "queries", "past", "total", "packed"), [
    (2, 6, 0, (6, 6), False),  # a prompt
    (2, 6, 0, (6, 6), True),
    (1, 1, 5, (6,), False),  # one more
    (2, 1, 5, (6, 4), True),  # one more each, behind different lengths
    (1, 1, 9, (4,), False),  # a cache with room for more
    (1, 4, 9, (4,), True),  # a prompt into such a cache
    (1, 3, 5, (8,), False),  # several more
], ids=str)
def test_group_query_attention(rng: np.random.Generator, batch: int, queries: int, past: int,
                               total: Sequence[int], packed: bool) -> None:
    same_where_it_counts(grouped(rng, batch, queries, past, total, packed), total)


@pytest.mark.parametrize("options", [
    {"local_window_size": 3}, {"softcap": 2.0}, {"scale": 0.2}], ids=str)
def test_group_query_attention_options(rng: np.random.Generator, options: dict[str, Any]) -> None:
    same_where_it_counts(grouped(rng, 2, 6, 0, (6, 6)), (6, 6), **options)
    same_where_it_counts(grouped(rng, 2, 1, 7, (8, 6)), (8, 6), **options)


@pytest.mark.parametrize("interleaved", [0, 1])
def test_group_query_attention_turns_by_place(rng: np.random.Generator, interleaved: int) -> None:
    angles = np.outer(np.arange(16), 0.3 ** np.arange(WIDE // 2)).astype(np.float32)
    caches = [np.cos(angles), np.sin(angles)]
    for batch, queries, past, total in [(2, 6, 0, (6, 6)), (2, 1, 5, (6, 4)), (1, 1, 5, (6,))]:
        inputs = [*grouped(rng, batch, queries, past, total), *caches]
        same_where_it_counts(inputs, total, do_rotary=1, rotary_interleaved=interleaved)


# ---------------------------------------------------------------- rotary embedding
@pytest.mark.parametrize("interleaved", [0, 1])
def test_rotary_embedding(rng: np.random.Generator, interleaved: int) -> None:
    angles = rng.uniform(0, 6, (20, SIZE // 2)).astype(np.float32)
    caches = [np.cos(angles), np.sin(angles)]
    x = floats(rng, BATCH, PLACES, HIDDEN)
    places = rng.integers(0, 20, (BATCH, PLACES))
    compare("RotaryEmbedding", [x, places, *caches], interleaved=interleaved)
    compare("RotaryEmbedding", [x, np.array([3]), *caches], interleaved=interleaved)
    heads = floats(rng, BATCH, HEADS, PLACES, SIZE)
    compare("RotaryEmbedding", [heads, places, *caches], interleaved=interleaved)


def test_rotary_embedding_of_a_part(rng: np.random.Generator) -> None:
    angles = rng.uniform(0, 6, (20, 2)).astype(np.float32)
    x, places = floats(rng, BATCH, PLACES, HIDDEN), rng.integers(0, 20, (BATCH, PLACES))
    compare("RotaryEmbedding", [x, places, np.cos(angles), np.sin(angles)],
            rotary_embedding_dim=4, num_heads=HEADS)


def test_what_is_not_supported_says_so(rng: np.random.Generator) -> None:
    from one_node import imported

    inputs = grouped(rng, 1, 1, 5, (6,))
    model = one_node("GroupQueryAttention", inputs, qk_output=1, **GROUPED)
    put_off = imported(model, {f"x{i}": x for i, x in enumerate(inputs) if x is not None}).put_off
    assert "qk_output" in str(put_off[0])
