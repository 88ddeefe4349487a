"""Attention and rotary embeddings, and what the operators of com.microsoft share with them.

All that says which keys a query sees (masks, causality, windows, padding) is gathered in a
`Visibility`, in the layout [batch, heads, queries, keys].
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from terrazzo.dtypes import int64
from terrazzo.frontends.onnx.registry import Call, Result, converts
from terrazzo.graph.applying import as_value
from terrazzo.graph.ir import Value
from terrazzo.index import Index, proves_eq
from terrazzo.ops import elementwise as e
from terrazzo.ops.arrange import pad
from terrazzo.ops.attention import scaled_dot_product_attention
from terrazzo.ops.contract import batch_matmul
from terrazzo.ops.creation import arange
from terrazzo.ops.joining import concat, stack
from terrazzo.ops.lookups import take
from terrazzo.ops.norm import safe_softmax
from terrazzo.ops.reduce import in_shape, in_type, max_, sum_, widened
from terrazzo.ops.shape import broadcast_to, permute_dims, span


# ---------------------------------------------------------------- heads
def split_heads(x: Value, heads: int) -> Value:
    """[batch, places, heads * size] as [batch, heads, places, size]."""
    batch, places, hidden = x.shape
    return permute_dims(in_shape(x, (batch, places, heads, hidden // heads)), axes=(0, 2, 1, 3))


def join_heads(x: Value) -> Value:
    """[batch, heads, places, size] as [batch, places, heads * size]."""
    batch, heads, places, size = x.shape
    return in_shape(permute_dims(x, axes=(0, 2, 1, 3)), (batch, places, heads * size))


def _repeated_heads(x: Value, heads: Index) -> Value:
    """Every head of keys or values as often as heads of queries share it."""
    batch, own, places, size = x.shape
    if proves_eq(own, heads):
        return x
    wide = broadcast_to(in_shape(x, (batch, own, 1, places, size)),
                        shape=(batch, own, heads // own, places, size))
    return in_shape(wide, (batch, heads, places, size))


# ---------------------------------------------------------------- who sees what
@dataclass(frozen=True, eq=False)
class Visibility:
    """Which keys queries see: all of `seen`, with `bias` added to scores; `causal` from place 0."""

    seen: tuple[Value, ...] = ()  # truth values that broadcast to [batch, heads, queries, keys]
    bias: Value | None = None
    causal: bool = False

    def also(self, seen: Value) -> Visibility:
        """Narrowed down further."""
        return replace(self, seen=(*self.seen, seen))

    def with_bias(self, bias: Value | None) -> Visibility:
        """With something more added to the scores."""
        if bias is None:
            return self
        return replace(self, bias=bias if self.bias is None else self.bias + bias)

    def mask(self) -> Value | None:
        """One mask for everything but `causal`: truth values, or numbers to add."""
        seen = reduce(e.bitwise_and, self.seen) if self.seen else None
        if self.bias is None:
            return seen
        return self.bias if seen is None else e.where(seen, self.bias, -math.inf)

    def explicit(self, queries: Index, keys: Index) -> Visibility:
        """The same with causality as truth values."""
        if not self.causal:
            return self
        return replace(self, causal=False).also(not_after(key_places(keys), query_places(queries)))


def query_places(queries: Index) -> Value:
    """0, 1, ... along the axis of queries."""
    return in_shape(arange(start=queries, dtype=int64), (queries, 1))


def key_places(keys: Index) -> Value:
    """0, 1, ... along the axis of keys."""
    return arange(start=keys, dtype=int64)


def not_after(keys: Value, queries: Value) -> Value:
    """Which keys do not lie behind which queries."""
    return e.less_equal(keys, queries)


def per_batch(x: Value) -> Value:
    """One number a batch, in the layout of scores."""
    return in_shape(in_type(x, int64), (x.shape[0], 1, 1, 1))


def attended(q: Value, k: Value, v: Value, visibility: Visibility, scale: float | None = None,
             softcap: float = 0.0) -> Value:
    """Attention of [batch, heads, places, size]; kept whole, so that chips can run it so."""
    if softcap:
        return _in_steps(q, k, v, visibility, scale, softcap)[0]
    mask = visibility.mask()
    return scaled_dot_product_attention(q, k, v, mask, causal=visibility.causal, scale=scale)


def _in_steps(q: Value, k: Value, v: Value, visibility: Visibility, scale: float | None,
              softcap: float, sinks: Any = None) -> tuple[Value, tuple[Value, Value, Value, Value]]:
    """Attention step by step: the result, and scores as they are after each step."""
    heads = q.shape[1]
    wide_q, wide_k, wide_v = (widened(x) for x in (q, k, v))
    raw = batch_matmul(wide_q, _repeated_heads(wide_k, heads), transpose_y=True)
    raw = raw * (scale if scale is not None else _default_scale(q))
    capped = softcap * e.tanh(raw / softcap) if softcap else raw
    mask = visibility.explicit(*raw.shape[-2:]).mask()
    if mask is None:
        biased = capped
    elif mask.dtype.is_bool:
        biased = e.where(mask, capped, -math.inf)
    else:  # what is hidden stays so, whatever the scores are
        biased = e.where(e.equal(mask, -math.inf), -math.inf,
                         capped + in_type(mask, capped.dtype))
    weights = safe_softmax(biased, axis=-1) if sinks is None else _drained(biased, sinks)
    y = batch_matmul(weights, _repeated_heads(wide_v, heads))
    return in_type(y, q.dtype), (raw, capped, biased, weights)


def _drained(scores: Value, sinks: Any) -> Value:
    """A softmax with one more score, which takes its share and gives nothing."""
    sink = sinks if not isinstance(sinks, Value) else in_type(sinks, scores.dtype)
    most = e.maximum(max_(scores, axis=-1, keepdims=True), sink)
    parts = e.exp(scores - most)
    return parts / (sum_(parts, axis=-1, keepdims=True) + e.exp(sink - most))


def attended_with_sinks(q: Value, k: Value, v: Value, visibility: Visibility, scale: float | None,
                        softcap: float, sinks: Any) -> Value:
    """Attention with a score for each head that takes its share and gives nothing."""
    return _in_steps(q, k, v, visibility, scale, softcap, sinks)[0]


def _default_scale(q: Value) -> Any:
    size = q.shape[-1]
    if isinstance(size, int):
        return 1 / math.sqrt(size) if size else 1.0
    return e.rsqrt(in_type(as_value(size), q.dtype.compute))


# ---------------------------------------------------------------- the operator of ai.onnx
@converts("Attention")
def attention(call: Call) -> Result:
    q, k, v = (call.value(i) for i in range(3))
    flat = q.ndim == 3
    if flat:
        heads, kv_heads = call.attr("q_num_heads"), call.attr("kv_num_heads")
        if not heads or not kv_heads:
            call.unsupported("has inputs of 3 axes but no number of heads")
        q, k, v = split_heads(q, heads), split_heads(k, kv_heads), split_heads(v, kv_heads)
    past = call.optional(4)
    if past is not None:
        k, v = concat(past, k, axis=2), concat(call.value(5), v, axis=2)
    visibility = _visibility(call, q, k, past)
    scale, softcap = call.attr("scale"), call.attr("softcap", 0.0)
    scores = None
    if call.wants(3):
        y, stages = _in_steps(q, k, v, visibility, scale, softcap)
        scores = in_type(stages[call.attr("qk_matmul_output_mode", 0)], q.dtype)
    else:
        y = attended(q, k, v, visibility, scale, softcap)
    return join_heads(y) if flat else y, k, v, scores


def _visibility(call: Call, q: Value, k: Value, past: Value | None) -> Visibility:
    queries, keys = q.shape[2], k.shape[2]
    lengths = call.optional(6)
    visibility = _masked(call.optional(3), keys)
    offset: Any = 0  # how many keys precede the first query
    if past is not None:
        offset = past.shape[2]
    elif lengths is not None:
        offset = per_batch(lengths) - queries
    left, right = call.attr("left_window_size", -1), call.attr("right_window_size", -1)
    at = query_places(queries) + offset
    if call.attr("is_causal", 0):
        if isinstance(offset, int) and offset == 0:
            visibility = replace(visibility, causal=True)
        elif lengths is not None or not proves_eq(offset + 1, keys):  # else one query sees all
            visibility = visibility.also(not_after(key_places(keys), at))
    if left >= 0:
        visibility = visibility.also(e.less_equal(at - left, key_places(keys)))
    if right >= 0:
        visibility = visibility.also(not_after(key_places(keys), at + right))
    if lengths is not None:
        visibility = visibility.also(e.less(key_places(keys), per_batch(lengths)))
    return visibility


def _masked(mask: Value | None, keys: Index) -> Visibility:
    """A mask that may have fewer axes, or end before the last keys, which are then hidden."""
    if mask is None:
        return Visibility()
    mask = in_shape(mask, (1,) * (2 - mask.ndim) + mask.shape)
    if mask.shape[-1] != 1 and not proves_eq(mask.shape[-1], keys):
        border = [*[(0, 0)] * (mask.ndim - 1), (0, keys - mask.shape[-1])]
        mask = pad(mask, pad_width=border, value=False if mask.dtype.is_bool else -math.inf)
    return Visibility(seen=(mask,)) if mask.dtype.is_bool else Visibility(bias=mask)


# ---------------------------------------------------------------- rotary embeddings
def rotated(x: Value, cos: Value, sin: Value, interleaved: bool) -> Value:
    """[batch, heads, places, size], pairs of numbers turned by angles of cos, sin [..., half].

    A pair lies side by side (interleaved), or half a vector apart; behind twice the angles the
    vector is left as it is.
    """
    half, size = cos.shape[-1], x.shape[-1]
    whole = proves_eq(2 * half, size)
    turned = widened(x if whole else span(x, 3, 0, 2 * half))
    cos, sin = widened(cos), widened(sin)
    if interleaved:
        pairs = in_shape(turned, (*x.shape[:3], half, 2))
        a, b = (in_shape(span(pairs, 4, n, n + 1), (*x.shape[:3], half)) for n in (0, 1))
        both = stack(a * cos - b * sin, a * sin + b * cos, axis=-1)
        result = in_shape(both, turned.shape)
    else:
        a, b = span(turned, 3, 0, half), span(turned, 3, half, 2 * half)
        result = concat(a * cos - b * sin, a * sin + b * cos, axis=3)
    result = in_type(result, x.dtype)
    return result if whole else concat(result, span(x, 3, 2 * half, size), axis=3)


def angles_at(cache: Value, positions: Value) -> Value:
    """Rows of a cache [places, half] for positions [batch, places], for all heads."""
    batch, places = positions.shape
    return in_shape(take(cache, positions, axis=0), (batch, 1, places, cache.shape[-1]))


@converts("RotaryEmbedding")
def rotary_embedding(call: Call) -> Value:
    x, cos, sin = (call.value(i) for i in range(3))
    flat = x.ndim == 3
    if flat:
        heads = call.attr("num_heads", 0)
        if not heads:
            call.unsupported("has an input of 3 axes but no number of heads")
        x = split_heads(x, heads)
    if call.has(3):
        cos, sin = (angles_at(cache, call.value(3)) for cache in (cos, sin))
    else:
        cos, sin = (in_shape(c, (c.shape[0], 1, *c.shape[1:])) for c in (cos, sin))
    y = rotated(x, cos, sin, bool(call.attr("interleaved", 0)))
    return join_heads(y) if flat else y
