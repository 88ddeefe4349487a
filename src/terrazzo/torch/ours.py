"""Operators of our own that stand in graphs for torch's, where torch's ask for too much.

`random_mask`: what dropout draws, from a shape alone, so that it is drawn before our code runs.
Its number tells draws apart: torch's passes take equal calls of what they do not know for one. Its
device tells checkpointing whose random state to keep for drawing the same mask again.

`attention_backward`: torch's takes the result and the row sums of the forward pass, which would
then be kept for it. Our gradient starts from q, k and v, so nothing else is held.
"""

from __future__ import annotations

from typing import Any

import torch

_library = torch.library.Library("terrazzo", "FRAGMENT")
_library.define("attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? mask, "
                "bool is_causal, float? scale) -> (Tensor, Tensor, Tensor)")
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
