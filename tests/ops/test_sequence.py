"""Convolutions with a state, linear attention, n-grams: against onnx.reference."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from by_onnx import by_onnx
from checking import check, close, draw, op

import terrazzo as tz
from terrazzo.dtypes import float32
from terrazzo.errors import ArgumentError, RankError, ShapeError
from terrazzo.graph.ir import TensorType, Value

pytestmark = pytest.mark.onnx


@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_causal_convolution(length: int, activation: str, rng: np.random.Generator) -> None:
    x, weight, bias, state = (draw(rng, s) for s in ((2, 3, length), (3, 1, 4), (3,), (2, 3, 3)))
    for given in ([x, weight, bias, state], [x, weight, None, None]):
        expected = by_onnx("CausalConvWithState", given, 2, opset=27, activation=activation)
        for got, want in zip(tz.causal_conv_with_state(*given, activation=activation), expected):
            close(got, want, rtol=1e-5)


def test_causal_convolution_in_two_pieces(rng: np.random.Generator) -> None:
    x, weight = draw(rng, (2, 3, 9)), draw(rng, (3, 1, 4))
    whole, last = tz.causal_conv_with_state(x, weight)
    first, state = tz.causal_conv_with_state(x[:, :, :2], weight)
    second, state = tz.causal_conv_with_state(x[:, :, 2:], weight, None, state)
    close(np.concatenate([first, second], 2), whole, rtol=1e-5)
    close(state, last)


RULES = ("linear", "gated", "delta", "gated_delta")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
def test_linear_attention(rule: str, heads: tuple[int, int], rng: np.random.Generator) -> None:
    asking, kept = heads
    q, k, v = (draw(rng, (2, 5, n), low=-1, high=1) for n in (asking * 8, kept * 8, kept * 6))
    attrs = {"q_num_heads": asking, "kv_num_heads": kept, "update_rule": rule}
    for wide in (False, True):  # one decay a head and one beta for all, or one a key and a head
        decay = -np.abs(draw(rng, (2, 5, kept * 8 if wide else kept))) if "gated" in rule else None
        beta = draw(rng, (2, 5, kept if wide else 1), low=0, high=1) if "delta" in rule else None
        state = draw(rng, (2, kept, 8, 6)) if wide else None
        given = [q, k, v, state, decay, beta]
        expected = by_onnx("LinearAttention", given, 2, opset=27, **attrs)
        for got, want in zip(tz.linear_attention(*given, **attrs), expected, strict=True):
            close(got, want, rtol=1e-5)


def test_linear_attention_by_loops(rng: np.random.Generator) -> None:
    q, k, v = (draw(rng, (1, 3, n), low=-1, high=1) for n in (8, 4, 6))
    check(lambda *a: op("linear_attention")(*a, q_num_heads=4, kv_num_heads=2, scale=0.5,
                                            update_rule="linear"), q, k, v, rtol=1e-5)
    half = [a.astype(np.float16) for a in (q, k, v)]
    got = tz.linear_attention(*half, q_num_heads=4, kv_num_heads=2, update_rule="linear")
    assert [a.dtype for a in got] == [np.float16] * 2


@pytest.mark.parametrize("mode", ["TF", "IDF", "TFIDF"])
@pytest.mark.parametrize("lengths", [(1, 1, 0), (1, 2, 1), (2, 2, 5), (2, 3, 2), (1, 3, 0)])
def test_ngrams(mode: str, lengths: tuple[int, int, int], rng: np.random.Generator) -> None:
    attrs = {
        "mode": mode, "min_gram_length": lengths[0], "max_gram_length": lengths[1],
        "max_skip_count": lengths[2], "ngram_counts": (0, 4, 12),
        "ngram_indexes": (0, 1, 2, 3, 9, 5, 6, 7, 8, 4),
        "pool_int64s": (0, 1, 2, 3, 0, 1, 1, 2, 2, 2, 3, 0, 0, 1, 2, 1, 1, 1),
        "weights": tuple(np.linspace(0.5, 2, 10).tolist()),
    }
    for shape in ((12,), (3, 9)):
        x = rng.integers(0, 4, shape).astype(np.int32)
        (expected,) = by_onnx("TfIdfVectorizer", [x], opset=9, **attrs)
        close(tz.tfidf_vectorizer(x, **attrs), expected)


def test_ngrams_of_large_pools(rng: np.random.Generator) -> None:
    """Numbers of all sizes, counted by hand; lengths of rows share one program."""
    words = np.unique(np.concatenate([rng.integers(-2**62, 2**62, 300), np.arange(-50, 50),
                                      np.arange(50) << 31, [2**63 - 1, -2**63]]))
    pairs = np.unique(rng.choice(words, (700, 2)), axis=0)
    places = rng.permutation(len(words) + len(pairs))
    attrs = {"mode": "TF", "min_gram_length": 1, "max_gram_length": 2, "max_skip_count": 1,
             "ngram_counts": (0, len(words)), "ngram_indexes": tuple(places.tolist()),
             "pool_int64s": (*words.tolist(), *pairs.reshape(-1).tolist())}
    grams = [*zip(words.tolist()), *map(tuple, pairs.tolist())]
    column = dict(zip(grams, places, strict=True))
    for length in (40, 64, 1, 0, 97):
        x = np.concatenate([rng.choice(words, (5, length)), rng.integers(0, 99, (1, length)),
                            np.resize(pairs, (1, length))])
        want = np.zeros((7, len(places)), np.float32)
        for row, numbers in enumerate(x.tolist()):
            for gram in (*zip(numbers), *pairwise(numbers), *zip(numbers, numbers[2:])):
                if gram in column:
                    want[row, column[gram]] += 1
        np.testing.assert_array_equal(tz.tfidf_vectorizer(x, **attrs), want)
    with pytest.raises(ArgumentError, match="twice in its pool"):
        tz.tfidf_vectorizer(np.zeros((1, 2), np.int64), **{
            **attrs, "pool_int64s": (*words.tolist()[:-1], words.tolist()[0],
                                     *pairs.reshape(-1).tolist())})


def test_errors() -> None:
    def tensor(*shape: int) -> Value:
        return Value(TensorType(shape, float32))

    with pytest.raises(ShapeError, match="channels, 1, k"):
        tz.causal_conv_with_state(tensor(2, 3), tensor(3, 1, 4))
    with pytest.raises(ArgumentError, match="no activation 'relu'"):
        tz.causal_conv_with_state(tensor(2, 3, 4), tensor(3, 1, 4), activation="relu")
    q = tensor(2, 5, 8)
    with pytest.raises(ArgumentError, match="no rule 'odd'"):
        tz.linear_attention(q, q, q, q_num_heads=2, kv_num_heads=2, update_rule="odd")
    with pytest.raises(ArgumentError, match="takes a decay and no beta"):
        tz.linear_attention(q, q, q, q_num_heads=2, kv_num_heads=2, update_rule="gated")
    with pytest.raises(ArgumentError, match="cannot share 3"):
        tz.linear_attention(q, q, q, q_num_heads=2, kv_num_heads=3, update_rule="linear")
    with pytest.raises(ShapeError, match="do not fit"):
        tz.linear_attention(q, tensor(2, 5, 6), q, q_num_heads=2, kv_num_heads=2,
                            update_rule="linear")
    with pytest.raises(ShapeError, match="needs a state"):
        tz.linear_attention(q, q, q, tensor(2, 2, 4, 5), q_num_heads=2, kv_num_heads=2,
                            update_rule="linear")
    with pytest.raises(RankError, match="needs a row or rows"):
        tz.tfidf_vectorizer(tensor(2, 3, 4), mode="TF", min_gram_length=1, max_gram_length=1,
                            max_skip_count=0, ngram_counts=(0,), ngram_indexes=(0,),
                            pool_int64s=(1,))
