"""Gradients of compiled functions inside PyTorch's autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from terrazzo.graph.autodiff import vjp_function


def differentiable(name: str, function: Callable[[Sequence[Any]], Any],
                   forward: Callable[[Sequence[Any]], Any], count: int) -> Callable[..., Any]:
    """`forward` with a backward pass: the compiled vector-Jacobian product of `function`.

    The backward pass is itself a compiled function of tensors, so it can be differentiated again.
    """
    import torch

    from terrazzo.api import Compiled

    backward_of: dict[tuple[int, ...], Compiled] = {}

    def backward_for(wanted: tuple[int, ...]) -> Compiled:
        if wanted not in backward_of:
            traced = vjp_function(lambda *xs: function(xs), wanted)
            backward_of[wanted] = Compiled(traced, f"{name}_backward")
        return backward_of[wanted]

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Any) -> Any:
            ctx.save_for_backward(*tensors)
            result = forward([t.detach() for t in tensors])
            ctx.several = isinstance(result, (tuple, list))
            return tuple(result) if ctx.several else result

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            tensors = ctx.saved_tensors
            wanted = tuple(i for i in range(count)
                           if ctx.needs_input_grad[i] and tensors[i].is_floating_point())
            if not wanted:
                return (None,) * count
            cotangents = tuple(g.contiguous() for g in grads)
            found = backward_for(wanted)(*tensors, cotangents if ctx.several else cotangents[0])
            found = found if isinstance(found, (tuple, list)) else (found,)
            table = dict(zip(wanted, found, strict=True))
            return tuple(table.get(i) for i in range(count))

    return lambda args: Differentiable.apply(*args)
