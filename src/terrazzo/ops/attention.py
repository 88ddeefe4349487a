"""Scaled dot-product attention, whole so that chips may run it without the score matrix; rotations.

Its gradient is an operator too, which chips may have kernels for. It starts from the result and the
log-sum-exp of each row of scores, by which weights are found again without a pass over all keys.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from terrazzo.base.shapes import dims_text
from terrazzo.dtypes import int64, promote
from terrazzo.errors import ArgumentError, RankError, ShapeError, user_location
from terrazzo.graph.applying import as_value, expand
from terrazzo.graph.ir import Graph, Node, Value
from terrazzo.graph.rebuild import replace_inputs
from terrazzo.index import Index
from terrazzo.index.guards import ask, granted, known, multiple
from terrazzo.ops.contract import batch_matmul
from terrazzo.ops.creation import arange
from terrazzo.ops.define import operator
from terrazzo.ops.elementwise import astype, equal, greater_equal, remainder, rsqrt, where
from terrazzo.ops.joining import concat
from terrazzo.ops.norm import safe_softmax, softmax
from terrazzo.ops.reduce import in_shape, in_type, logsumexp, widened
from terrazzo.ops.shape import place, span


def _attention_grad(node: Node, g: Value) -> list[Value | None]:
    q, k, v, mask = (*node.inputs, None)[:4]
    assert q is not None and k is not None and v is not None
    attrs = node.attrs
    added = mask is not None and not mask.dtype.is_bool
    if mask is not None and attrs["unseen"] == "nan":  # each key has a part in what is not a number
        found = _gradients_by_definition(g, q, k, v, mask, **attrs)
        return [*found[:3], found[3] if added else None][:len(node.inputs)]
    y, sums = attention_with_logsumexp(q, k, v, mask, **attrs)
    found = attention_gradients(g, q, k, v, y, sums, mask, causal=attrs["causal"],
                                scale=attrs["scale"])
    by_mask = _gradients_by_definition(g, q, k, v, mask, **attrs)[3] if added else None
    return [*found, by_mask][:len(node.inputs)]


@operator(family="attention", keep_whole=True, grad=_attention_grad)
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
    heads, dtype = q.shape[-3:-2], q.dtype
    shared, q, k, v, mask = _in_groups(q, k, v, mask)
    soft = safe_softmax if mask is not None and unseen == "zeros" else softmax
    weights = soft(_scores(q, k, mask, causal, scale), axis=-1)
    y = batch_matmul(weights, widened(v))
    if shared != 1:
        y = in_shape(y, (*y.shape[:-4], *heads, *y.shape[-2:]))
    return in_type(y, dtype)


@operator(family="attention", keep_whole=True)
def attention_with_logsumexp(q: Any, k: Any, v: Any, mask: Any = None, *, causal: bool = False,
                             scale: float | None = None, unseen: str = "zeros") -> Any:
    """scaled_dot_product_attention, and log(sum(exp(scores))) of each query [..., heads, queries]

    The second is inf for a query that sees no key: its weights, found again by it, are zeros.
    """
    y = scaled_dot_product_attention(q, k, v, mask, causal=causal, scale=scale, unseen=unseen)
    heads = q.shape[-3:-2]
    shared, q, k, v, mask = _in_groups(q, k, v, mask)
    sums = logsumexp(_scores(q, k, mask, causal, scale), axis=-1)
    if shared != 1:
        sums = in_shape(sums, (*sums.shape[:-3], *heads, *sums.shape[-1:]))
    return y, where(equal(sums, -math.inf), math.inf, sums)


@operator(family="attention", keep_whole=True)
def attention_gradients(g: Any, q: Any, k: Any, v: Any, y: Any, logsumexp: Any, mask: Any = None,
                        *, causal: bool = False, scale: float | None = None) -> Any:
    """the gradients of scaled_dot_product_attention by q, k and v, for the gradient g of y

    y and logsumexp are what attention_with_logsumexp answers; only kernels that compute the scores
    anew block by block look at them.
    """
    return tuple(_gradients_by_definition(g, q, k, v, mask, causal=causal, scale=scale,
                                          unseen="zeros")[:3])


def _gradients_by_definition(g: Value, q: Value, k: Value, v: Value, mask: Value | None,
                             **attrs: Any) -> list[Value]:
    """By q, k, v and a mask that is added, through products and softmax of all scores."""
    from terrazzo.graph.autodiff import gradients, zeros

    given = [v for v in (g, q, k, v, mask) if v is not None]
    fresh = [Value(v.type) for v in given]  # apart, where one tensor is several of them
    (y,) = expand(scaled_dot_product_attention, fresh[1:], attrs)
    found = [zeros(v.type) if d is None else d for v, d in zip(
        fresh[1:], gradients([y], [fresh[0]], fresh[1:]))]
    return list(replace_inputs(Graph("attention_gradients", tuple(fresh), tuple(found)), given))


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


def _in_groups(q: Value, k: Value, v: Value, mask: Value | None
               ) -> tuple[Index, Value, Value, Value, Value | None]:
    """How many heads share keys, and tensors where those are an axis of their own."""
    shared = _shared_heads(q, k, v)
    if shared == 1:
        return 1, q, k, v, mask
    kv_heads = k.shape[-3]
    q = in_shape(q, (*q.shape[:-3], kv_heads, shared, *q.shape[-2:]))
    k, v = (in_shape(x, (*x.shape[:-2], 1, *x.shape[-2:])) for x in (k, v))
    if mask is not None and mask.ndim > 2:
        split = (1, 1) if mask.shape[-3] == 1 else (kv_heads, shared)
        mask = in_shape(mask, (*mask.shape[:-3], *split, *mask.shape[-2:]))
    return shared, q, k, v, mask


def _scores(q: Value, k: Value, mask: Value | None, causal: bool, scale: float | None) -> Value:
    scores = batch_matmul(widened(q), widened(k), transpose_y=True)
    scores = scores * _scale(q.shape[-1], scale, scores)
    if causal:
        queries, keys = scores.shape[-2:]
        seen = greater_equal(in_shape(arange(start=queries, dtype=int64), (queries, 1)),
                             arange(start=keys, dtype=int64))
        scores = where(seen, scores, -math.inf)
    if mask is None:
        return scores
    if mask.dtype.is_bool:
        return where(mask, scores, -math.inf)
    return scores + in_type(mask, scores.dtype)


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
