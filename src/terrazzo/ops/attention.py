"""Scaled dot-product attention, whole so that chips may run it without the score matrix; rotations.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from terrazzo.base.shapes import dims_text
from terrazzo.dtypes import int64, promote
from terrazzo.errors import ArgumentError, RankError, ShapeError, user_location
from terrazzo.graph.applying import as_value
from terrazzo.graph.ir import Value
from terrazzo.index import Index
from terrazzo.index.guards import ask, granted, known, multiple
from terrazzo.ops.contract import batch_matmul
from terrazzo.ops.creation import arange
from terrazzo.ops.define import operator
from terrazzo.ops.elementwise import astype, equal, greater_equal, remainder, rsqrt, where
from terrazzo.ops.joining import concat
from terrazzo.ops.norm import safe_softmax, softmax
from terrazzo.ops.reduce import in_shape, in_type, widened
from terrazzo.ops.shape import place, span


@operator(family="attention", keep_whole=True)
def scaled_dot_product_attention(q: Any, k: Any, v: Any, mask: Any = None, *,
                                 causal: bool = False, scale: float | None = None,
                                 unseen: str = "zeros") -> Any:
    """softmax(q k^T * scale + mask) v, for q [..., heads, queries, size] and k, v [..., kv heads,
    keys, size]; several heads of q may share one of k and v, as in grouped-query attention.

    A boolean mask says which keys take part; any other is added to the scores. `causal` lets a
    query see keys up to its own place, counted from the first. A query that sees no key gives
    zeros, or nan (`unseen`), as a softmax does. The scale is 1 / sqrt(size) unless given; scores
    are kept in float32.
    """
    if unseen not in ("zeros", "nan"):
        raise ArgumentError(f"unseen={unseen!r} is neither 'zeros' nor 'nan'",
                            where=user_location())
    shared = _shared_heads(q, k, v)
    if shared != 1:
        kv_heads = k.shape[-3]
        q_group = in_shape(q, (*q.shape[:-3], kv_heads, shared, *q.shape[-2:]))
        k_group, v_group = (in_shape(x, (*x.shape[:-2], 1, *x.shape[-2:])) for x in (k, v))
        if mask is not None:
            mask = _grouped_mask(mask, kv_heads, shared)
        y = _attend(q_group, k_group, v_group, mask, causal, scale, unseen)
        return in_type(in_shape(y, (*y.shape[:-4], q.shape[-3], *y.shape[-2:])), q.dtype)
    return in_type(_attend(q, k, v, mask, causal, scale, unseen), q.dtype)


def _shared_heads(q: Value, k: Value, v: Value) -> Index:
    """How many heads of q share one of k and v; refuses what does not fit."""
    if min(q.ndim, k.ndim, v.ndim) < 2:
        raise RankError(f"attention needs q, k and v of [..., places, size], got {q.type}, "
                        f"{k.type} and {v.type}", where=user_location())
    if not granted("==", k.shape[-2], v.shape[-2]) or not granted("==", q.shape[-1], k.shape[-1]):
        raise ShapeError(
            f"attention with q {dims_text(q.shape)}, k {dims_text(k.shape)} and v "
            f"{dims_text(v.shape)}: q and k must agree in the last size, k and v in the number "
            "of keys", where=user_location(), hint="the layout is [..., heads, places, size]")
    if min(q.ndim, k.ndim, v.ndim) < 3:
        return 1
    heads, kv_heads = q.shape[-3], k.shape[-3]
    if ask("==", heads, kv_heads) or kv_heads == 1:
        return 1  # broadcasting covers it
    shareable = isinstance(known(kv_heads), int) and kv_heads != 0 and multiple(heads, kv_heads)
    if not shareable or not granted("==", kv_heads, v.shape[-3]):
        raise ShapeError(f"attention cannot share {kv_heads} heads of k and {v.shape[-3]} of v "
                         f"among {heads} heads of q", where=user_location(),
                         hint="the heads of q must be a multiple of those of k and v")
    return heads // kv_heads


def _grouped_mask(mask: Value, kv_heads: Index, shared: Index) -> Value:
    """A mask's axis of heads, if it has one, split like that of q."""
    if mask.ndim < 3:
        return mask
    split = (1, 1) if mask.shape[-3] == 1 else (kv_heads, shared)
    return in_shape(mask, (*mask.shape[:-3], *split, *mask.shape[-2:]))


def _attend(q: Value, k: Value, v: Value, mask: Value | None, causal: bool,
            scale: float | None, unseen: str) -> Value:
    wide_q, wide_k, wide_v = widened(q), widened(k), widened(v)
    scores = batch_matmul(wide_q, wide_k, transpose_y=True)
    scores = scores * _scale(q.shape[-1], scale, scores)
    if causal:
        queries, keys = scores.shape[-2:]
        seen = greater_equal(in_shape(arange(start=queries, dtype=int64), (queries, 1)),
                             arange(start=keys, dtype=int64))
        scores = where(seen, scores, -math.inf)
    if mask is None:
        return batch_matmul(softmax(scores, axis=-1), wide_v)
    if mask.dtype.is_bool:
        scores = where(mask, scores, -math.inf)
    else:
        scores = scores + in_type(mask, scores.dtype)
    soft = softmax if unseen == "nan" else safe_softmax
    return batch_matmul(soft(scores, axis=-1), wide_v)


def _scale(size: Index, given: float | None, like: Value) -> Any:
    if given is not None:
        return given
    if isinstance(size, int):
        return 1 / math.sqrt(size) if size else 1.0
    return rsqrt(astype(as_value(size), dtype=like.dtype))


# ---------------------------------------------------------------- rotary embeddings
@operator(family="attention")
def rotary_embedding(x: Any, cos: Any, sin: Any, *, interleaved: bool = False) -> Any:
    """pairs of numbers turned by angles, given by cosine and sine for each element of x

    x is [..., places, size]; cos and sin broadcast against it. A pair lies half a vector apart, or
    side by side if interleaved.
    """
    size = x.shape[-1] if x.ndim else 1
    if not multiple(size, 2):
        raise ShapeError(f"rotary_embedding turns pairs of numbers, and {x.type} has an odd "
                         "number of them along its last axis", where=user_location())
    dtype = promote(x.dtype, cos.dtype, sin.dtype)
    wide = widened(x)
    turned = _quarter_turn_of_neighbours(wide) if interleaved else concat(
        -span(wide, -1, size // 2, size), span(wide, -1, 0, size // 2), axis=-1)
    return in_type(wide * widened(cos) + turned * widened(sin), dtype)


def _quarter_turn_of_neighbours(x: Value) -> Value:
    """(-b, a) for each pair (a, b) of neighbours, read as runs: every element from both sides."""
    size, rank = x.shape[-1], x.ndim
    if size == 0:
        return x
    even = as_value(np.arange(size) % 2 == 0) if isinstance(size, int) else (
        equal(remainder(arange(start=size, dtype=int64), 2), 0))
    after = place(span(x, -1, 1, size), shape=x.shape, starts=(0,) * rank, steps=(1,) * rank)
    before = place(span(x, -1, 0, size - 1), shape=x.shape, starts=(*(0,) * (rank - 1), 1),
                   steps=(1,) * rank)
    return where(even, -after, before)
