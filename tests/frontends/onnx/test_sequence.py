"""Converters of layers with a state and of n-gram counts against ONNX's evaluator."""

from __future__ import annotations

import numpy as np
import pytest
from one_node import check, run

pytestmark = pytest.mark.onnx


def rows(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("activation", ["none", "silu"])
def test_causal_convolution(rng: np.random.Generator, activation: str) -> None:
    x, w, b = rows(rng, 2, 3, 7), rows(rng, 3, 1, 4), rows(rng, 3)
    y, state = run("CausalConvWithState", [x, w, b], opset=27, outputs=2, activation=activation)
    padded = np.pad(x, ((0, 0), (0, 0), (3, 0)))
    (plain,) = run("Conv", [padded, w, b], group=3)
    expected = plain / (1 + np.exp(-plain)) if activation == "silu" else plain
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(state, x[..., -3:])
    # In two pieces, the state in between, it is the same.
    first, middle = run("CausalConvWithState", [x[..., :2], w, b], opset=27, outputs=2,
                        activation=activation)
    second, _ = run("CausalConvWithState", [x[..., 2:], w, b, middle], opset=27, outputs=2,
                    activation=activation)
    np.testing.assert_allclose(np.concatenate([first, second], 2), y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
def test_linear_attention(rng: np.random.Generator, rule: str) -> None:
    q, k, v = rows(rng, 1, 5, 8), rows(rng, 1, 5, 4) * 0.3, rows(rng, 1, 5, 6)
    decay = -np.abs(rows(rng, 1, 5, 2)) if "gated" in rule else None
    beta = np.abs(rows(rng, 1, 5, 2)) * 0.3 if "delta" in rule else None
    y, state = run("LinearAttention", [q, k, v, None, decay, beta], opset=27, outputs=2,
                   q_num_heads=4, kv_num_heads=2, update_rule=rule)
    memory = np.zeros((2, 2, 3), np.float32)
    for t in range(5):
        for head in range(2):
            key, value = k[0, t, 2 * head:2 * head + 2], v[0, t, 3 * head:3 * head + 3]
            if decay is not None:
                memory[head] *= np.exp(decay[0, t, head])
            if beta is not None:
                value = beta[0, t, head] * (value - memory[head].T @ key)
            memory[head] += np.outer(key, value)
            for near in range(2):
                at = 2 * head + near
                expected = q[0, t, 2 * at:2 * at + 2] @ memory[head] / np.sqrt(2)
                np.testing.assert_allclose(y[0, t, 3 * at:3 * at + 3], expected, rtol=1e-4,
                                           atol=1e-5)
    np.testing.assert_allclose(state[0], memory, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["TF", "IDF", "TFIDF"])
def test_ngrams(mode: str) -> None:
    x = np.array([[1, 1, 3, 3, 3, 7], [8, 6, 7, 5, 6, 8]], np.int32)
    check("TfIdfVectorizer", [x], opset=9, mode=mode, min_gram_length=1, max_gram_length=2,
          max_skip_count=3, ngram_counts=[0, 4], ngram_indexes=[0, 1, 2, 3, 4, 5, 6],
          pool_int64s=[2, 3, 5, 4, 5, 6, 7, 8, 6, 7], weights=[1.0, 2, 3, 4, 5, 6, 7])
