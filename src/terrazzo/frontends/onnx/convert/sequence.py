"""Sequences of steps or tokens: layers that carry a state along, counts of n-grams."""

from __future__ import annotations

from terrazzo.frontends.onnx.registry import Call, Result, converts
from terrazzo.ops.linear_attention import linear_attention
from terrazzo.ops.ngrams import tfidf_vectorizer
from terrazzo.ops.sequence import causal_conv_with_state


@converts("CausalConvWithState")
def causal_conv(call: Call) -> Result:
    return causal_conv_with_state(*(call.optional(i) for i in range(4)),
                                  activation=call.attr("activation", "none"))


@converts("LinearAttention")
def attention_with_state(call: Call) -> Result:
    rule = call.attr("update_rule", "gated_delta")
    return linear_attention(
        *(call.value(i) for i in range(3)), call.optional(3),
        call.optional(4) if "gated" in rule else None,
        call.optional(5) if "delta" in rule else None,
        q_num_heads=call.attr("q_num_heads"), kv_num_heads=call.attr("kv_num_heads"),
        update_rule=rule, scale=call.attr("scale", 0.0))


@converts("TfIdfVectorizer")
def tfidf(call: Call) -> Result:
    if call.attr("pool_strings"):
        call.unsupported("counts n-grams of strings, which cannot be compiled")
    names = ("ngram_counts", "ngram_indexes", "pool_int64s", "weights")
    return tfidf_vectorizer(
        call.value(0), mode=call.attr("mode"), min_gram_length=call.attr("min_gram_length"),
        max_gram_length=call.attr("max_gram_length"),
        max_skip_count=call.attr("max_skip_count"),
        **{name: tuple(call.attr(name) or ()) for name in names})
