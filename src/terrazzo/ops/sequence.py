"""Sequences: causal convolutions with a state, counts of n-grams."""

from __future__ import annotations

from typing import Any

import numpy as np

from terrazzo.base.shapes import dims_text
from terrazzo.errors import ArgumentError, RankError, ShapeError, user_location
from terrazzo.graph.ir import constant
from terrazzo.index.guards import known
from terrazzo.ops.activation import silu
from terrazzo.ops.creation import full
from terrazzo.ops.define import operator
from terrazzo.ops.elementwise import (
    astype,
    bitwise_and,
    equal,
    less,
)
from terrazzo.ops.indexing import index_update
from terrazzo.ops.reduce import sum_
from terrazzo.ops.shape import concat, reshape, span


@operator(family="sequence")
def causal_conv_with_state(x: Any, weight: Any, bias: Any = None, past_state: Any = None, *,
                           activation: str = "none") -> Any:
    """each channel of x [batch, channels, length] convolved with its own past; the new state

    The weight is [channels, 1, k]; the state holds the k - 1 steps before x.
    """
    if x.ndim != 3 or weight.ndim != 3 or not isinstance(
            k := known(weight.shape[2]), int):
        raise ShapeError(f"causal_conv_with_state needs x [batch, channels, length] and a weight "
                         f"[channels, 1, k], not {dims_text(x.shape)} and "
                         f"{dims_text(weight.shape)}", where=user_location())
    if activation not in ("none", "silu", "swish"):
        raise ArgumentError(f"causal_conv_with_state has no activation {activation!r}",
                            where=user_location(), hint="use none, silu or swish")
    batch, channels, length = x.shape
    state = past_state if past_state is not None else full(shape=(batch, channels, k - 1), value=0,
                                                           dtype=x.dtype)
    wide = x.dtype.compute
    whole = concat(state, x, axis=2)
    total: Any = None
    for tap in range(k):
        part = astype(span(whole, 2, tap, tap + length), dtype=wide)
        factor = reshape(astype(span(weight, 2, tap, tap + 1), dtype=wide), shape=(1, channels, 1))
        total = part * factor if total is None else total + part * factor
    if bias is not None:
        total = total + reshape(astype(bias, dtype=wide), shape=(1, channels, 1))
    if activation != "none":
        total = silu(total)
    return astype(total, dtype=x.dtype), span(whole, 2, length, length + k - 1)


@operator(family="sequence", differentiable=False)
def tfidf_vectorizer(x: Any, *, mode: str, min_gram_length: int, max_gram_length: int,
                     max_skip_count: int, ngram_counts: Any, ngram_indexes: Any, pool_int64s: Any,
                     weights: Any = None) -> Any:
    """how often each n-gram of a pool occurs in rows of integers, maybe weighted; as ONNX's

    An n-gram's elements may lie 1 to max_skip_count + 1 apart, evenly.
    """
    if x.ndim not in (1, 2) or not isinstance(known(x.shape[-1]), int):
        raise RankError(f"tfidf_vectorizer needs a row or rows of known length, not "
                        f"{dims_text(x.shape)}", where=user_location())
    if mode not in ("TF", "IDF", "TFIDF"):
        raise ArgumentError(f"tfidf_vectorizer has no mode {mode!r}", where=user_location(),
                            hint="use TF, IDF or TFIDF")
    rows = astype(x, dtype="int64") if x.ndim == 2 else astype(
        reshape(x, shape=(1, x.shape[0])), dtype="int64")
    size = max(ngram_indexes, default=-1) + 1
    totals = full(shape=(rows.shape[0], size), value=0, dtype="int64")
    first = 0
    starts = [*ngram_counts, len(pool_int64s)]
    for n in range(1, len(ngram_counts) + 1):
        pool = np.asarray(pool_int64s[starts[n - 1]:starts[n]], np.int64).reshape(-1, n)
        places = np.asarray(ngram_indexes[first:first + len(pool)], np.int64)
        first += len(pool)
        if min_gram_length <= n <= max_gram_length and len(pool):
            counts = _occurrences(rows, pool, max_skip_count if n > 1 else 0)
            if counts is not None:
                totals = index_update(totals, constant(places), counts, axis=1, reduce="add")
    result = astype(totals, dtype="float32")
    if mode == "IDF":
        result = astype(less(0, totals), dtype="float32")
    if mode != "TF" and weights:
        result = result * constant(np.asarray(weights[:size], np.float32))
    return result if x.ndim == 2 else reshape(result, shape=(size,))


def _occurrences(rows: Any, pool: np.ndarray, max_skip: int) -> Any:
    """How often each n-gram of a pool [m, n] occurs in rows; None if none fits into them"""
    batch, length = rows.shape
    n = pool.shape[1]
    total: Any = None
    for distance in range(1, max_skip + 2):
        count = length - (n - 1) * distance
        if count < 1:
            break
        same: Any = None
        for k in range(n):
            items = reshape(span(rows, 1, k * distance, k * distance + count),
                            shape=(batch, count, 1))
            hit = equal(items, constant(pool[:, k]))
            same = hit if same is None else bitwise_and(same, hit)
        found = sum_(astype(same, dtype="int64"), axis=1)
        total = found if total is None else total + found
    return total
