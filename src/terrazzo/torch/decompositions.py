"""Which ATen operators torch takes apart before we see them: those that have no converter."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions

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
    mask = torch.ops.terrazzo.random_mask(x.shape, 1 - p, next(_serial), device=x.device)
    return x * mask * (1 / (1 - p)), mask


def _attention_backward(grad: Any, q: Any, k: Any, v: Any, out: Any, logsumexp: Any,
                        dropout_p: float, is_causal: bool, *, attn_mask: Any = None,
                        scale: float | None = None) -> Any:
    """Without what the forward pass would have to keep for it: `ours.py` says why."""
    if dropout_p:
        return NotImplemented
    return torch.ops.terrazzo.attention_backward(grad, q, k, v, attn_mask, is_causal, scale)


_OWN: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    aten.native_dropout.default: _dropout,
}
