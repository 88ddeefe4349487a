"""Gradients of compiled functions inside PyTorch's autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from terrazzo.graph.autodiff import jvp_function, vjp_function
from terrazzo.graph.ir import Value
from terrazzo.nests import leaves, pack


class Differentiable:
    """A function with a backward pass: the compiled vector-Jacobian product of the function.

    The backward pass is itself a compiled function of tensors, so it can be differentiated again;
    so is forward mode, which pushes tangents.
    """

    def __init__(self, name: str, function: Callable[[Sequence[Any]], Any]):
        self.name, self.function = name, function
        self.backward_of: dict[tuple[int, ...], Callable[..., Any]] = {}
        self.forward_of: dict[tuple[int, ...], Callable[..., Any]] = {}
        self.apply = _autograd_function(self)

    def entry(self, forward: Callable[[Sequence[Any]], Any], structure: Any
              ) -> Callable[[Sequence[Any]], Any]:
        """`forward`, which answers a flat list, in torch's graph and with its results packed."""
        from terrazzo.runtime.hosted import to_torch

        apply = self.apply

        def run(leaves: Sequence[Any]) -> Any:
            tensors = [a if hasattr(a, "data_ptr") else to_torch(a) for a in leaves]
            results = apply(forward, *tensors)
            return results[0] if structure == 0 else pack(structure, results)

        return run

    def backward(self, wanted: tuple[int, ...]) -> Callable[..., Any]:
        """The compiled gradients by the inputs `wanted`, given weights of the float results."""
        if wanted not in self.backward_of:
            from terrazzo.api import Compiled

            self.backward_of[wanted] = Compiled(vjp_function(self.floats, wanted),
                                                f"{self.name}_backward")
        return self.backward_of[wanted]

    def forward_mode(self, wanted: tuple[int, ...]) -> Callable[..., Any]:
        """How the float results change when the inputs `wanted` do, given their tangents."""
        if wanted not in self.forward_of:
            from terrazzo.api import Compiled

            push = jvp_function(self.floats)

            def tangents(values: Sequence[Value], along: Sequence[Value]) -> tuple[Value, ...]:
                table = dict(zip(wanted, along, strict=True))
                _, found = push(values, [table.get(i) for i in range(len(values))])
                return tuple(found)

            self.forward_of[wanted] = Compiled(tangents, f"{self.name}_forward")
        return self.forward_of[wanted]

    def floats(self, *values: Value) -> tuple[Value, ...]:
        """The results that small changes make sense for."""
        return tuple(v for v in leaves(self.function(values)) if v.dtype.is_float)


def _autograd_function(owner: Differentiable) -> Callable[..., Any]:
    import torch

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(forward: Callable[..., Any], *tensors: Any) -> Any:
            return tuple(forward(tensors))

        @staticmethod
        def setup_context(ctx: Any, inputs: Sequence[Any], output: Sequence[Any]) -> None:
            _, *tensors = inputs
            ctx.save_for_backward(*tensors)
            ctx.save_for_forward(*tensors)
            ctx.results = len(output)
            ctx.whole = [i for i, r in enumerate(output) if not r.is_floating_point()]
            if ctx.whole:
                ctx.mark_non_differentiable(*(output[i] for i in ctx.whole))

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            tensors = ctx.saved_tensors
            wanted = tuple(i for i, t in enumerate(tensors)
                           if ctx.needs_input_grad[i + 1] and t.is_floating_point())
            weights = tuple(g for i, g in enumerate(grads) if i not in ctx.whole)
            found = dict(zip(wanted, owner.backward(wanted)(*tensors, weights), strict=True))
            return None, *(found.get(i) for i in range(len(tensors)))

        @staticmethod
        def jvp(ctx: Any, _: None, *tangents: Any) -> Any:
            tensors = ctx.saved_tensors
            wanted = tuple(i for i, t in enumerate(tangents) if t is not None)
            if not wanted:
                return (None,) * ctx.results
            found = iter(owner.forward_mode(wanted)(tensors, tuple(tangents[i] for i in wanted)))
            return tuple(None if i in ctx.whole else next(found) for i in range(ctx.results))

    apply: Callable[..., Any] = Function.apply
    return apply
