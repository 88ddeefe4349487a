"""Operators of our own that stand in graphs for torch's, where torch's ask for too much.

`random_mask`: what dropout draws, from a shape alone, so that it is drawn before our code runs.
Its number tells draws apart: torch's passes take equal calls of what they do not know for one. Its
device tells checkpointing whose random state to keep for drawing the same mask again.

`attention_backward`: torch's takes the result and the row sums of the forward pass, which would
then be kept for it. Our gradient starts from q, k and v, so nothing else is held.

`attention_forward` and `attention_gradients`: on GPUs torch has several operators for attention,
with seeds and sizes for their own gradients. These two stand for all of them; there the result and
the row sums are kept, because kernels start from them.
"""

from __future__ import annotations

from typing import Any

import torch

_library = torch.library.Library("terrazzo", "FRAGMENT")
_library.define("attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? mask, "
                "bool is_causal, float? scale) -> (Tensor, Tensor, Tensor)")
_library.define("attention_forward(Tensor q, Tensor k, Tensor v, Tensor? mask, bool is_causal, "
                "float? scale) -> (Tensor, Tensor)")
_library.define("attention_gradients(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, "
                "Tensor logsumexp, Tensor? mask, bool is_causal, float? scale) -> "
                "(Tensor, Tensor, Tensor)")
_library.define("random_mask(SymInt[] size, float p, int serial, *, Device? device=None) -> Tensor",
                tags=(torch.Tag.nondeterministic_seeded,))


def _mask(size: Any, p: float, serial: int, *, device: Any = None) -> Any:
    return torch.empty(size, dtype=torch.bool, device=device).bernoulli_(p)


def _shape_of_mask(size: Any, p: float, serial: int, *, device: Any = None) -> Any:
    return torch.empty(size, dtype=torch.bool, device=device)


_library.impl("random_mask", _mask, "CompositeExplicitAutograd")
torch.library.register_fake("terrazzo::random_mask", _shape_of_mask, lib=_library)


def _in_torch(grad: Any, q: Any, k: Any, v: Any, mask: Any, is_causal: bool, scale: float | None
              ) -> Any:
    aten = torch.ops.aten
    y, sums = aten._scaled_dot_product_flash_attention_for_cpu.default(
        q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        grad, q, k, v, y, sums, 0.0, is_causal, attn_mask=mask, scale=scale)


def _types(grad: Any, q: Any, k: Any, v: Any, mask: Any, is_causal: bool, scale: float | None
           ) -> Any:
    return tuple(torch.empty_permuted(x.shape, (0, 2, 1, 3), dtype=x.dtype, device=x.device)
                 for x in (q, k, v))


_library.impl("attention_backward", _in_torch, "CPU")
torch.library.register_fake("terrazzo::attention_backward", _types, lib=_library)


# ---------------------------------------------------------------- attention on GPUs
def _forward(q: Any, k: Any, v: Any, mask: Any, is_causal: bool, scale: float | None) -> Any:
    shared = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(shared, 1) if shared != 1 else x for x in (k, v))
    scores = q.float() @ k.float().mT * (scale if scale is not None else q.shape[-1] ** -0.5)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else (
            scores + mask)
    sums = scores.logsumexp(-1)
    sums = sums.masked_fill(sums == -torch.inf, torch.inf)
    return ((scores - sums[..., None]).exp() @ v.float()).to(q.dtype), sums


def _gradients(grad: Any, q: Any, k: Any, v: Any, out: Any, logsumexp: Any, mask: Any,
               is_causal: bool, scale: float | None) -> Any:
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        y, _ = _forward(q, k, v, mask, is_causal, scale)
    return torch.autograd.grad(y, (q, k, v), grad)


def _forward_types(q: Any, k: Any, v: Any, mask: Any, is_causal: bool, scale: float | None) -> Any:
    return (q.new_empty((*q.shape[:-1], v.shape[-1])),
            q.new_empty(q.shape[:-1], dtype=torch.float32))


def _gradient_types(grad: Any, q: Any, k: Any, v: Any, out: Any, logsumexp: Any, mask: Any,
                    is_causal: bool, scale: float | None) -> Any:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


_library.impl("attention_forward", _forward, "CompositeExplicitAutograd")
_library.impl("attention_gradients", _gradients, "CompositeExplicitAutograd")
torch.library.register_fake("terrazzo::attention_forward", _forward_types, lib=_library)
torch.library.register_fake("terrazzo::attention_gradients", _gradient_types, lib=_library)
