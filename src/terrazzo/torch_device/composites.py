"""Operators that torch asks of a device as wholes, made of simpler ones: norms, recurrent cells."""

from __future__ import annotations

from typing import Any

import torch


def batch_norm(x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any,
               training: bool, momentum: float, eps: float) -> Any:
    """By operators whose schemas say what this one's does not: the running figures change."""
    aten = torch.ops.aten
    if running_mean is None:
        return aten._native_batch_norm_legit.no_stats(x, weight, bias, training, momentum, eps)
    if not training:
        return aten._native_batch_norm_legit_no_training(x, weight, bias, running_mean,
                                                         running_var, momentum, eps)
    return aten._native_batch_norm_legit(x, weight, bias, running_mean, running_var, training,
                                         momentum, eps)


def lstm_cell(input_gates: Any, hidden_gates: Any, cx: Any, input_bias: Any = None,
              hidden_bias: Any = None) -> Any:
    """The next hidden and cell state, and the gates for the gradient."""
    gates = _biased(input_gates, input_bias) + _biased(hidden_gates, hidden_bias)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(grad_hy: Any, grad_cy: Any, cx: Any, cy: Any, workspace: Any,
                       has_bias: bool) -> Any:
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, g, o = workspace.chunk(4, 1)
    t = cy.tanh()
    hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    c = hy * o * (1 - t * t)
    if grad_cy is not None:
        c = c + grad_cy
    gates = torch.cat([c * g * i * (1 - i), c * cx * f * (1 - f), c * i * (1 - g * g),
                       hy * t * o * (1 - o)], 1)
    return gates, c * f, gates.sum(0) if has_bias else None


def gru_cell(input_gates: Any, hidden_gates: Any, hx: Any, input_bias: Any = None,
             hidden_bias: Any = None) -> Any:
    """The next hidden state, and what the gradient needs."""
    ir, ii, i_new = _biased(input_gates, input_bias).chunk(3, 1)
    hr, hi, h_new = _biased(hidden_gates, hidden_bias).chunk(3, 1)
    reset, keep = (ir + hr).sigmoid(), (ii + hi).sigmoid()
    new = (i_new + reset * h_new).tanh()
    return new + keep * (hx - new), torch.cat([reset, keep, new, hx, h_new], 1)


def gru_cell_backward(grad_hy: Any, workspace: Any, has_bias: bool) -> Any:
    reset, keep, new, hx, h_new = workspace.chunk(5, 1)
    grad_new = grad_hy * (1 - keep) * (1 - new * new)
    grad_keep = grad_hy * (hx - new) * keep * (1 - keep)
    grad_reset = grad_new * h_new * reset * (1 - reset)
    inputs = torch.cat([grad_reset, grad_keep, grad_new], 1)
    hidden = torch.cat([grad_reset, grad_keep, grad_new * reset], 1)
    biases = (inputs.sum(0), hidden.sum(0)) if has_bias else (None, None)
    return inputs, hidden, grad_hy * keep, *biases


def _biased(gates: Any, bias: Any) -> Any:
    return gates if bias is None else gates + bias


COMPOSITES = {
    "native_batch_norm": batch_norm,
    "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
    "_thnn_fused_gru_cell": gru_cell,
    "_thnn_fused_gru_cell_backward": gru_cell_backward,
}
