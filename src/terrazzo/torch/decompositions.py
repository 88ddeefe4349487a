"""Which ATen operators torch takes apart before we see them: those that have no converter."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._prims_common import compute_elementwise_output_logical_to_physical_perm

import terrazzo.torch.ours  # noqa: F401  operators that stand in graphs for torch's
from terrazzo.torch.aten.registry import CONVERTERS, converter_of
from terrazzo.torch.foreach import foreach_rules

aten = torch.ops.aten

# Beside core ATen's: what graphs of models hold, and torch can write with simpler operators.
_MORE = (aten.native_dropout_backward, aten.native_layer_norm_backward, aten.addmv,
         aten._softmax_backward_data, aten._log_softmax_backward_data, aten.gelu_backward,
         aten.ldexp, aten.dist, aten._addmm_activation, aten.native_batch_norm,
         aten._native_batch_norm_legit, aten._batch_norm_with_update_functional,
         aten._batch_norm_no_update, aten.batch_norm_backward, aten.narrow_copy,
         aten.linalg_vector_norm, aten.tril_indices, aten.triu_indices,
         aten.rrelu_with_noise_backward, aten.linalg_cross)


@cache
def decompositions(host_too: bool = True) -> dict[Any, Callable[..., Any]]:
    """The table that AOTAutograd is given; `host_too` as in `foreach.py`."""
    import terrazzo.torch.aten  # noqa: F401  the converters register themselves

    table = {**get_decompositions(_MORE), **core_aten_decompositions()}
    kept = {op: rule for op, rule in table.items()
            if converter_of(op) is None and not _has_overload_converter(op)}
    return {**kept, **foreach_rules(host_too), **_OWN}


def _has_overload_converter(op: Any) -> bool:
    return not isinstance(op, torch._ops.OpOverload) and any(
        name.startswith(f"{op}.") for name in CONVERTERS)


_serial = itertools.count()  # so that no two draws look alike, and none is left out as known


def _dropout(x: Any, p: float, train: bool | None) -> Any:
    """The mask by itself, so that random numbers are drawn before our code runs.

    These are the numbers that torch draws in eager mode (native_dropout_cpu of ATen).
    """
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    order = list(range(x.ndim))
    if not x.is_contiguous():  # eager mode draws in the order in which elements lie
        order = list(compute_elementwise_output_logical_to_physical_perm(x)[0])
    mask = torch.ops.terrazzo.random_mask([x.shape[d] for d in order], 1 - p, next(_serial),
                                          device=x.device)
    mask = mask.permute([order.index(d) for d in range(x.ndim)])
    return x * mask * (1 / (1 - p)), mask


def _mixed_batch_norm(x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any,
                      training: bool, momentum: float, eps: float) -> Any:
    """Half numbers with statistics in float32, which torch's kernel keeps so for the gradient.

    Its fake kernel says that they are halves, and so would be what the backward pass starts from.
    """
    if not training or running_mean is None or running_mean.dtype is x.dtype:
        return NotImplemented
    y, *rest = aten._native_batch_norm_legit_functional(
        x.to(running_mean.dtype), weight, bias, running_mean, running_var, training, momentum, eps)
    return y.to(x.dtype), *rest


def _attention_backward(grad: Any, q: Any, k: Any, v: Any, out: Any, logsumexp: Any,
                        dropout_p: float, is_causal: bool, *, attn_mask: Any = None,
                        scale: float | None = None) -> Any:
    """Without what the forward pass would have to keep for it: `ours.py` says why."""
    if dropout_p:
        return NotImplemented
    return torch.ops.terrazzo.attention_backward(grad, q, k, v, attn_mask, is_causal, scale)


# Of attention on GPUs: torch chooses one of three by types and sizes. What they answer beside the
# result and the row sums is for their own gradients, and so is nothing.
def _flash(q: Any, k: Any, v: Any, dropout_p: float = 0.0, is_causal: bool = False,
           return_debug_mask: bool = False, *, scale: float | None = None) -> Any:
    if dropout_p or return_debug_mask:
        return NotImplemented
    y, sums = torch.ops.terrazzo.attention_forward(q, k, v, None, is_causal, scale)
    seed = q.new_zeros(2, dtype=torch.uint64)
    return (y, sums, None, None, q.shape[2], k.shape[2], seed, seed.new_zeros(()),
            q.new_empty(0))


def _flash_backward(grad: Any, q: Any, k: Any, v: Any, out: Any, logsumexp: Any, cum_seq_q: Any,
                    cum_seq_k: Any, max_q: Any, max_k: Any, dropout_p: float, is_causal: bool,
                    seed: Any, offset: Any, *, scale: float | None = None) -> Any:
    if dropout_p:
        return NotImplemented
    return torch.ops.terrazzo.attention_gradients(grad, q, k, v, out, logsumexp, None, is_causal,
                                                  scale)


def _efficient(q: Any, k: Any, v: Any, bias: Any, compute_log_sumexp: bool,
               dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None
               ) -> Any:
    if dropout_p:
        return NotImplemented
    y, sums = torch.ops.terrazzo.attention_forward(q, k, v, bias, is_causal, scale)
    seed = q.new_zeros((), dtype=torch.long)
    return y, sums, seed, seed.clone()


def _efficient_backward(grad: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, logsumexp: Any,
                        seed: Any, offset: Any, dropout_p: float, wanted: Any,
                        is_causal: bool = False, *, scale: float | None = None) -> Any:
    if dropout_p:
        return NotImplemented
    found = torch.ops.terrazzo.attention_gradients(grad, q, k, v, out, logsumexp, bias, is_causal,
                                                   scale)
    if bias is None or not wanted[3]:
        return *found, None
    # By the bias: that by the scores, of which it is a part.
    scores = q.float() @ k.float().mT * (scale if scale is not None else q.shape[-1] ** -0.5)
    weights = (scores + bias - logsumexp[..., None]).exp()
    if is_causal:
        weights = weights.tril()
    delta = (grad.float() * out.float()).sum(-1, keepdim=True)
    by_scores = weights * (grad.float() @ v.float().mT - delta)
    return *found, by_scores.sum_to_size(bias.shape).to(bias.dtype)


def _cudnn(q: Any, k: Any, v: Any, bias: Any, compute_log_sumexp: bool, dropout_p: float = 0.0,
           is_causal: bool = False, return_debug_mask: bool = False, *,
           scale: float | None = None) -> Any:
    if dropout_p or return_debug_mask:
        return NotImplemented
    y, sums = torch.ops.terrazzo.attention_forward(q, k, v, bias, is_causal, scale)
    seed = q.new_zeros((), dtype=torch.long)
    return y, sums, None, None, q.shape[2], k.shape[2], seed, seed.clone(), None


def _cudnn_backward(grad: Any, q: Any, k: Any, v: Any, out: Any, logsumexp: Any, seed: Any,
                    offset: Any, bias: Any, cum_seq_q: Any, cum_seq_k: Any, max_q: Any,
                    max_k: Any, dropout_p: float, is_causal: bool, *, scale: float | None = None
                    ) -> Any:
    if dropout_p:
        return NotImplemented
    return torch.ops.terrazzo.attention_gradients(grad, q, k, v, out, logsumexp, bias, is_causal,
                                                  scale)


_OWN: dict[Any, Callable[..., Any]] = {
    aten._native_batch_norm_legit_functional.default: _mixed_batch_norm,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    aten.native_dropout.default: _dropout,
    aten._scaled_dot_product_flash_attention.default: _flash,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._scaled_dot_product_cudnn_attention.default: _cudnn,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
}
