"""The attention operators of com.microsoft, and its rotary embedding.

Keys that a mask hides get a large negative number added (`mask_filter_value`), not minus
infinity: a query that sees nothing then gives what it would without the mask.
"""

from __future__ import annotations

from typing import Any

from terrazzo.dtypes import int64
from terrazzo.frontends.onnx.convert.attention import (
    Visibility,
    angles_at,
    attended,
    attended_with_sinks,
    join_heads,
    key_places,
    not_after,
    per_batch,
    query_places,
    rotated,
    split_heads,
)
from terrazzo.frontends.onnx.registry import MICROSOFT, Call, Result, converts
from terrazzo.graph.ir import Value
from terrazzo.index import Index, IndexExpr, proves_eq, proves_le
from terrazzo.ops import elementwise as e
from terrazzo.ops.activation import clip
from terrazzo.ops.contract import matmul
from terrazzo.ops.creation import arange
from terrazzo.ops.joining import concat, split, stack
from terrazzo.ops.lookups import take_along_axis
from terrazzo.ops.reduce import in_shape, in_type
from terrazzo.ops.shape import broadcast_to, permute_dims, span


# ---------------------------------------------------------------- masks
def _key_mask(call: Call, mask: Value | None, batch: Index, queries: Index, keys: Index
              ) -> Value | None:
    """Masks of all ranks as numbers to add: lengths, [batch, keys], [batch, queries, keys], ..."""
    if mask is None:
        return None
    if mask.ndim == 1:
        seen = _within_lengths(call, mask, batch, keys)
    elif mask.ndim == 2:
        seen = e.greater(in_shape(mask, (mask.shape[0], 1, 1, mask.shape[1])), 0)
    elif mask.ndim == 3:
        seen = e.greater(in_shape(mask, (mask.shape[0], 1, *mask.shape[1:])), 0)
    else:  # [batch, 1, longest, longest]: the rows of these queries
        rows = span(mask, 2, keys - queries, keys)
        seen = e.greater(span(rows, 3, 0, keys), 0)
    return e.where(seen, 0.0, call.attr("mask_filter_value", -10000.0))


def _within_lengths(call: Call, mask: Value, batch: Index, keys: Index) -> Value:
    """One length a batch, or the ends of all keys and then their starts."""
    if proves_eq(mask.shape[0], batch):
        return e.less(key_places(keys), per_batch(mask))
    if not proves_eq(mask.shape[0], 2 * batch):
        call.unsupported(f"has a mask of shape {mask.shape} for a batch of {batch}")
    ends, starts = span(mask, 0, 0, batch), span(mask, 0, batch, 2 * batch)
    return e.bitwise_and(e.less(key_places(keys), per_batch(ends)),
                         e.less_equal(per_batch(starts), key_places(keys)))


def _one_way(call: Call, queries: Index, keys: Index, past: Index) -> Visibility:
    """Queries see no later keys, if the node says so."""
    if not call.attr("unidirectional", 0):
        return Visibility()
    if proves_eq(past, 0):
        return Visibility(causal=True)
    return Visibility().also(not_after(key_places(keys), query_places(queries) + past))


def _scale(call: Call) -> float | None:
    return call.attr("scale", 0.0) or None  # 0 stands for the default


def refuse(call: Call, inputs: dict[int, str], attributes: dict[str, Any]) -> None:
    for i, what in inputs.items():
        if call.has(i):
            call.unsupported(f"has {what}, which is not supported")
    for name, usual in attributes.items():
        if call.attr(name, usual) != usual:
            call.unsupported(f"has {name}={call.attr(name)}, which is not supported")


# ---------------------------------------------------------------- one input for q, k and v
@converts("Attention", domain=MICROSOFT)
def attention(call: Call) -> Result:
    refuse(call, {6: "a shared cache"}, {"do_rotary": 0, "past_present_share_buffer": 0})
    projected = matmul(call.value(0), call.value(1))
    if call.has(2):
        projected = projected + call.value(2)
    return attended_projection(call, projected, mask=3, past=4, bias=5)


def attended_projection(call: Call, projected: Value, *, mask: int, past: int, bias: int = -1
                        ) -> Result:
    """Attention of queries, keys and values side by side; its other inputs by their numbers."""
    heads = call.attr("num_heads")
    sizes = call.attr("qkv_hidden_sizes") or [projected.shape[-1] // 3] * 3
    q, k, v = (split_heads(part, heads) for part in split(
        projected, indices_or_sections=(sizes[0], sizes[0] + sizes[1]), axis=-1))
    before_them: Index = 0
    if call.has(past):
        cache = call.value(past)
        before_them = cache.shape[3]
        before = [in_shape(span(cache, 0, n, n + 1), cache.shape[1:]) for n in (0, 1)]
        k, v = concat(before[0], k, axis=2), concat(before[1], v, axis=2)
    queries, keys = q.shape[2], k.shape[2]
    visibility = _one_way(call, queries, keys, before_them).with_bias(
        _key_mask(call, call.optional(mask), q.shape[0], queries, keys)).with_bias(
        call.optional(bias) if bias >= 0 else None)
    y = join_heads(attended(q, k, v, visibility, _scale(call)))
    return y, stack(k, v, axis=0) if call.wants(1) else None


# ---------------------------------------------------------------- inputs by themselves, or packed
@converts("MultiHeadAttention", domain=MICROSOFT)
def multi_head_attention(call: Call) -> Result:
    refuse(call, {8: "a shared cache", 9: "a cache for beam search"}, {})
    if call.wants(3):
        call.unsupported("is asked for its scores")
    heads = call.attr("num_heads")
    q, k, v = _three_inputs(call, heads)
    past: Index = 0
    if call.has(6) and call.has(1) and call.value(1).ndim != 4:
        past = call.value(6).shape[2]
        k, v = concat(call.value(6), k, axis=2), concat(call.value(7), v, axis=2)
    queries, keys = q.shape[2], k.shape[2]
    visibility = _one_way(call, queries, keys, past).with_bias(
        _key_mask(call, call.optional(4), q.shape[0], queries, keys)).with_bias(call.optional(5))
    return join_heads(attended(q, k, v, visibility, _scale(call))), k, v


def _three_inputs(call: Call, heads: int) -> tuple[Value, Value, Value]:
    """Queries, keys and values as [batch, heads, places, size], their bias added."""
    query, key, value = call.value(0), call.optional(1), call.optional(2)
    biases: list[Any] = [None, None, None]
    if query.ndim == 5:
        if call.has(3):
            call.unsupported("has a bias for queries, keys and values in one tensor")
        q, k, v = (_part(query, n) for n in range(3))
        return q, k, v
    if call.has(3):
        biases = _cut_bias(call, query, value)
    q = split_heads(_plus(query, biases[0]), heads)
    if key is None:
        call.unsupported("has neither keys nor a packed tensor of three")
    if key.ndim == 5:
        return q, _part(key, 0), _part(key, 1)
    if value is None:
        call.unsupported("has keys but no values")
    if key.ndim == 4:
        return q, key, value
    return q, split_heads(_plus(key, biases[1]), heads), split_heads(_plus(value, biases[2]), heads)


def _part(packed: Value, number: int) -> Value:
    """One of several tensors in [batch, places, heads, several, size]."""
    one = span(packed, 3, number, number + 1)
    return permute_dims(in_shape(one, (*packed.shape[:3], packed.shape[4])), axes=(0, 2, 1, 3))


def _cut_bias(call: Call, query: Value, value: Value | None) -> list[Any]:
    bias, hidden = call.value(3), query.shape[2]
    if value is not None and value.ndim == 4:
        return [span(bias, 0, 0, hidden), None, None]
    return list(split(bias, indices_or_sections=(hidden, 2 * hidden), axis=0))


def _plus(x: Value, bias: Value | None) -> Value:
    return x if bias is None else x + bias


@converts("DecoderMaskedMultiHeadAttention", domain=MICROSOFT)
def decoder_masked_attention(call: Call) -> Result:
    """One query a batch, whose key and value go into a cache that has room for them."""
    refuse(call, {9: "a cache for beam search"}, {"output_qk": 0})
    if call.wants(3):
        call.unsupported("is asked for its scores")
    heads, query = call.attr("num_heads"), call.value(0)
    biases: list[Any] = [None, None, None]
    if call.has(10):
        biases = list(split(call.value(10), indices_or_sections=3, axis=0))
    q = split_heads(_plus(query, biases[0]), heads)
    if call.value(1).ndim == 4:  # keys and values of an encoder, as they are
        k, v = call.value(1), call.value(2)
        visibility = Visibility()
    else:
        k, v = (split_heads(_plus(call.value(i), biases[i]), heads) for i in (1, 2))
        visibility = Visibility()
        if call.has(5):
            k, v, visibility = _cached(call, k, v)
    visibility = visibility.with_bias(_key_mask(
        call, call.optional(3), q.shape[0], 1, k.shape[2])).with_bias(call.optional(4))
    return join_heads(attended(q, k, v, visibility, _scale(call))), k, v


def _cached(call: Call, k: Value, v: Value) -> tuple[Value, Value, Visibility]:
    """A key and a value behind those of a cache, and what of it counts."""
    old = call.value(5), call.value(6)
    if not call.attr("past_present_share_buffer", 0):
        return concat(old[0], k, axis=2), concat(old[1], v, axis=2), Visibility()
    if not call.has(7):
        call.unsupported("shares its cache and does not say how much of it is filled")
    filled = in_shape(in_type(call.value(7), int64), (1, 1, 1, 1))
    room = old[0].shape[2]
    here = e.equal(in_shape(arange(start=room, dtype=int64), (1, 1, room, 1)), filled)
    keys, values = (e.where(here, new, before) for new, before in ((k, old[0]), (v, old[1])))
    seen = not_after(key_places(room), in_shape(filled, (1, 1)))
    return keys, values, Visibility().also(seen)


# ---------------------------------------------------------------- grouped queries with a cache
@converts("GroupQueryAttention", domain=MICROSOFT)
def group_query_attention(call: Call) -> Result:
    refuse(call, {12: "a quantised cache", 13: "a quantised cache",
                   14: "norms of queries", 15: "norms of keys"},
            {"qk_output": 0, "sliding_window_cache": 0, "causal": 1})
    q, k, v = _grouped_inputs(call)
    batch, _, queries, _ = q.shape
    past, lengths = call.optional(3), call.value(5)
    before: Index = 0 if past is None else past.shape[2]
    total = call.sizes(6)[0]
    # How many keys of each batch precede its queries: a number where that is certain.
    preceding: Any = 0
    if not proves_eq(before, 0) and not proves_eq(total, queries):
        grows = not (isinstance(total, int) and isinstance(before, int) and total <= before)
        if grows and proves_eq(batch, 1):
            preceding = before
        else:
            preceding = per_batch(in_shape(lengths, (batch,))) + 1 - queries
    if call.attr("do_rotary", 0):
        q, k = _turned_by_place(call, q, k, preceding)
    if past is not None:
        k, v = (_extended(old, new, preceding, total)
                for old, new in ((past, k), (call.value(4), v)))
    visibility = _windowed(call, queries, k.shape[2], preceding).with_bias(call.optional(10))
    softcap, sinks = call.attr("softcap", 0.0), _sinks(call)
    y = attended(q, k, v, visibility, _scale(call), softcap) if sinks is None else (
        attended_with_sinks(q, k, v, visibility, _scale(call), softcap, sinks))
    return join_heads(y), k, v


def _sinks(call: Call) -> Any:
    """A score that draws attention to nothing, one a head: given, or 0 (smooth_softmax)."""
    if call.has(11):
        return in_shape(call.value(11), (1, call.attr("num_heads"), 1, 1))
    return 0.0 if call.attr("smooth_softmax", 0) > 0 else None


def _grouped_inputs(call: Call) -> tuple[Value, Value, Value]:
    heads, kv_heads = call.attr("num_heads"), call.attr("kv_num_heads")
    query = call.value(0)
    if call.has(1):
        return (split_heads(query, heads), split_heads(call.value(1), kv_heads),
                split_heads(call.value(2), kv_heads))
    size = query.shape[2] // (heads + 2 * kv_heads)
    q, k, v = split(query, indices_or_sections=(heads * size, (heads + kv_heads) * size), axis=2)
    return split_heads(q, heads), split_heads(k, kv_heads), split_heads(v, kv_heads)


def _turned_by_place(call: Call, q: Value, k: Value, preceding: Any) -> tuple[Value, Value]:
    batch, _, queries, _ = q.shape
    if call.has(9):
        positions = call.value(9)
    else:
        place = in_shape(arange(start=queries, dtype=int64), (1, queries))
        offset = in_shape(preceding, (batch, 1)) if isinstance(preceding, Value) else preceding
        positions = place + offset
    cos, sin = (angles_at(call.value(i), positions) for i in (7, 8))
    interleaved = bool(call.attr("rotary_interleaved", 0))
    return rotated(q, cos, sin, interleaved), rotated(k, cos, sin, interleaved)


def _extended(old: Value, new: Value, preceding: Any, total: Index) -> Value:
    """A cache with new entries behind those that count; what lay there is overwritten."""
    before, added = old.shape[2], new.shape[2]
    if not isinstance(preceding, Value):
        if proves_eq(preceding, before):
            return concat(old, new, axis=2)
        rest = span(old, 2, preceding + added, before)
        return new if proves_eq(rest.shape[2], 0) else concat(new, rest, axis=2)
    fixed = isinstance(total, int) and isinstance(before, int) and total <= before
    size = before if fixed else before + added
    places = in_shape(arange(start=size, dtype=int64), (1, 1, size, 1))
    at = places - preceding
    inside = e.bitwise_and(e.less_equal(0, at), e.less(at, added))
    shape = (*new.shape[:2], size, new.shape[3])
    if added == 1:
        fresh = broadcast_to(new, shape=shape)
    else:
        fresh = take_along_axis(new, broadcast_to(clip(at, 0, added - 1), shape=shape), axis=2)
    kept = old if fixed else concat(old, new, axis=2)  # what is added behind is never seen
    return e.where(inside, fresh, kept)


def _windowed(call: Call, queries: Index, keys: Index, preceding: Any) -> Visibility:
    at = query_places(queries) + preceding
    window = call.attr("local_window_size", -1)
    if not isinstance(preceding, Value) and proves_eq(preceding, 0) and proves_le(keys, queries):
        visibility = Visibility(causal=True)
    elif not isinstance(preceding, Value) and proves_eq(queries, 1):
        visibility = Visibility()  # the only query is the last one
    else:
        visibility = Visibility().also(not_after(key_places(keys), at))
    if window > 0:
        visibility = visibility.also(e.less(at - window, key_places(keys)))
    return visibility


# ---------------------------------------------------------------- rotary embedding
@converts("RotaryEmbedding", domain=MICROSOFT)
def rotary_embedding(call: Call) -> Value:
    refuse(call, {}, {"is_packed_batching": 0})
    x, positions = call.value(0), call.value(1)
    cos, sin = call.value(2), call.value(3)
    flat = x.ndim == 3
    if flat:
        # Without a number of heads, the cache says how long a head is.
        heads = call.attr("num_heads", 0) or x.shape[2] // (2 * cos.shape[1])
        if isinstance(heads, IndexExpr):
            call.unsupported("needs to know its number of heads")
        x = split_heads(x, heads)
    if positions.ndim == 1:  # the place of the first, in every batch
        places = arange(start=x.shape[2], dtype=int64)
        positions = in_shape(in_type(positions, int64) + places, (1, x.shape[2]))
    y = rotated(x, angles_at(cos, positions), angles_at(sin, positions),
                bool(call.attr("interleaved", 0)))
    return join_heads(y) if flat else y
