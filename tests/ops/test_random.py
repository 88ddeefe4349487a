"""Philox against its published test vectors, and the distributions made from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from checking import check, evaluate, op

from terrazzo.base.shapes import dims
from terrazzo.dtypes import float32
from terrazzo.errors import ArgumentError, DTypeError
from terrazzo.graph.ir import TensorType, Value
from terrazzo.ops.random import philox_numpy

SEED = np.uint64(0x243F6A8885A308D3)

# Known answers of Random123 (kat_vectors, philox4x32 10): counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], words: str) -> None:
    assert " ".join(f"{int(w):08x}" for w in philox_numpy(counter, key)) == words


def test_bits_are_words_of_counters() -> None:
    got = evaluate(op("random_bits"), np.uint64(0), shape=(4,))
    assert [f"{w:08x}" for w in got] == KNOWN[0][2].split()
    many = evaluate(op("random_bits"), SEED, shape=(3, 5))
    key = int(SEED) & 0xFFFFFFFF, int(SEED) >> 32
    expected = [philox_numpy((i // 4, 0, 0, 0), key)[i % 4] for i in range(15)]
    np.testing.assert_array_equal(many.reshape(-1), np.array(expected, np.uint32))


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (0, 2), 6])
def test_expression_equals_reference(shape: Any) -> None:
    check(op("random_bits"), SEED, shape=shape)
    check(op("normal"), SEED, shape=shape)
    check(op("uniform"), SEED, shape=shape, dtype="float64")


def test_symbolic_shapes(rng: np.random.Generator) -> None:
    (n,) = dims("n7")
    x = np.zeros((7, 2), np.float32)
    for name in ("random_bits", "normal", "uniform"):
        expected = evaluate(op(name), SEED, shape=(7, 2))
        check(lambda x, key, name=name: op(name)(key, shape=(n, 2)), x, SEED, symbolic=True,
              expected=expected)


def test_keys() -> None:
    key = evaluate(lambda: op("random_key")(seed=-5))
    assert key.dtype == np.uint64 and int(key) == 2**64 - 5
    children = check(op("split_key"), SEED, num=100)
    assert children.dtype == np.uint64 and len(set(children.tolist())) == 100
    folded = {int(evaluate(op("fold_in"), SEED, np.int64(step))) for step in range(50)}
    assert len(folded) == 50 and not folded & {int(SEED), *children.tolist()}
    again = evaluate(op("random_bits"), np.int64(7), shape=(3,))
    np.testing.assert_array_equal(again, evaluate(op("random_bits"), np.uint64(7), shape=(3,)))


N = 1 << 16


def chi_square(counts: np.ndarray) -> float:
    """How many standard deviations the spread of counts is off from that of equal chances."""
    expected = counts.sum() / len(counts)
    freedom = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_uniform(dtype: str) -> None:
    x = evaluate(op("uniform"), SEED, shape=(N,), dtype=dtype)
    assert x.dtype.name == dtype
    wide = x.astype(np.float64)
    assert wide.min() >= 0 and wide.max() < 1
    assert abs(wide.mean() - 0.5) < 5 / math.sqrt(12 * N) + 2e-3 * (dtype == "bfloat16")
    assert abs(chi_square(np.histogram(wide, 128, (0, 1))[0])) < 5
    y = evaluate(op("uniform"), SEED, shape=(N,), dtype=dtype, low=1.0, high=2.0)
    assert y.min() >= 1 and y.max() < 2


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_normal(dtype: str) -> None:
    x = evaluate(op("normal"), SEED, shape=(N,), mean=2.0, std=3.0, dtype=dtype)
    z = (x.astype(np.float64) - 2) / 3
    assert x.dtype == dtype and np.isfinite(z).all()
    for power, moment, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        assert abs((z**power).mean() - moment) < 5 * math.sqrt(variance / N)
    quantiles = np.array([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in z])
    assert abs(chi_square(np.histogram(quantiles, 64, (0, 1))[0])) < 5
    assert abs(np.corrcoef(z[::2], z[1::2])[0, 1]) < 5 / math.sqrt(N / 2)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_bernoulli(p: float) -> None:
    x = evaluate(op("bernoulli"), SEED, shape=(N,), p=p)
    assert x.dtype == bool
    assert abs(x.mean() - p) <= 5 * math.sqrt(p * (1 - p) / N)


def test_randint() -> None:
    x = evaluate(op("randint"), SEED, low=-3, high=97, shape=(N,), dtype="int32")
    assert x.dtype == np.int32 and (x.min(), x.max()) == (-3, 96)
    assert abs(chi_square(np.bincount(x + 3, minlength=100))) < 5
    wide = check(op("randint"), SEED, low=0, high=2**32, shape=(50,))
    assert wide.max() > 2**31
    assert (evaluate(op("randint"), SEED, low=4, high=5, shape=(9,)) == 4).all()


def test_permutation() -> None:
    x = check(op("permutation"), SEED, n=23)
    assert sorted(x.tolist()) == list(range(23)) and x.tolist() != sorted(x.tolist())


def test_dropout() -> None:
    x = np.ones((N,), np.float32)
    y = evaluate(op("dropout"), x, SEED, p=0.25)
    assert set(np.unique(y).tolist()) == {0.0, float(np.float32(1 / 0.75))}
    assert abs(y.mean() - 1) < 5 * math.sqrt(0.25 / 0.75 / N)
    check(op("dropout"), np.ones((3, 5), np.float16), SEED, p=0.5)
    assert not evaluate(op("dropout"), x, SEED, p=1.0).any()
    np.testing.assert_array_equal(evaluate(op("dropout"), x, SEED, p=0.0), x)


X = Value(TensorType((3,), float32))
ERRORS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: op("random_bits")(X, shape=(2,)), DTypeError, "random key"),
    (lambda: op("bernoulli")(Value(TensorType((), float32)), p=1.5), ArgumentError, "probability"),
    (lambda: op("randint")(X[0], low=5, high=5), ArgumentError, "choose from"),
    (lambda: op("uniform")(X[0], dtype="int32"), DTypeError, "not supported"),
]


@pytest.mark.parametrize(("function", "error", "text"), ERRORS, ids=[row[2] for row in ERRORS])
def test_errors(function: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        function()
