"""Attention as torch keeps it whole, and its gradient (`ours.py` says how they are called)."""

from __future__ import annotations

from typing import Any

from terrazzo.graph.ir import Value
from terrazzo.ops.attention import (
    attention_gradients,
    attention_with_logsumexp,
    scaled_dot_product_attention,
)
from terrazzo.torch.aten.registry import aten, converts, unsupported


def _attend(q: Any, k: Any, v: Any, dropout_p: float, is_causal: bool, mask: Any, scale: Any
            ) -> Value:
    if dropout_p:
        unsupported("attention with dropout inside")
    return scaled_dot_product_attention(q, k, v, mask, causal=is_causal, scale=scale)


@aten("_scaled_dot_product_flash_attention_for_cpu")
def flash_attention(q: Any, k: Any, v: Any, dropout_p: float = 0.0, is_causal: bool = False,
                    attn_mask: Any = None, scale: Any = None) -> Any:
    # The sums of rows are for torch's gradient, which ours does without (`ours.py`).
    return _attend(q, k, v, dropout_p, is_causal, attn_mask, scale), None


@converts("terrazzo.attention_backward.default")
def attention_backward(grad: Any, q: Any, k: Any, v: Any, mask: Any, is_causal: bool, scale: Any
                       ) -> Any:
    y, sums = attention_with_logsumexp(q, k, v, mask, causal=is_causal, scale=scale)
    # Of each apart, where one tensor is two of them.
    return attention_gradients(grad, q, k, v, y, sums, mask, causal=is_causal, scale=scale)


@converts("terrazzo.attention_forward.default")
def attention_forward(q: Any, k: Any, v: Any, mask: Any, is_causal: bool, scale: Any) -> Any:
    return attention_with_logsumexp(q, k, v, mask, causal=is_causal, scale=scale)


@converts("terrazzo.attention_gradients.default")
def gradients_of_attention(grad: Any, q: Any, k: Any, v: Any, out: Any, logsumexp: Any, mask: Any,
                           is_causal: bool, scale: Any) -> Any:
    return attention_gradients(grad, q, k, v, out, logsumexp, mask, causal=is_causal, scale=scale)


@aten("scaled_dot_product_attention")
def attention(q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0,
              is_causal: bool = False, scale: Any = None, enable_gqa: bool = False) -> Any:
    return _attend(q, k, v, dropout_p, is_causal, attn_mask, scale)
