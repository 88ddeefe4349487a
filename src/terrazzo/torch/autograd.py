"""Gradients of compiled functions inside PyTorch's autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from terrazzo.base.nests import leaves, pack
from terrazzo.graph.derivatives import jvp_function, vjp_function
from terrazzo.graph.ir import Graph, Value
from terrazzo.graph.rebuild import replace_inputs

if TYPE_CHECKING:
    from terrazzo.compiler.residuals import Parts


class Keeping:
    """A function of fixed sizes whose forward pass keeps some values for the backward pass."""

    def __init__(self, name: str, parts: Parts, structure: Any):
        self.name, self.parts, self.structure = name, parts, structure
        self.forward = _compiled(parts.forward, name)
        self.backward_of: dict[tuple[int, ...], Callable[..., Any]] = {}

    def backward(self, wanted: tuple[int, ...]) -> Callable[..., Any]:
        """The gradients by the inputs `wanted`, given inputs, kept values and weights."""
        if wanted not in self.backward_of:
            self.backward_of[wanted] = _compiled(self.parts.gradients(wanted),
                                                 f"{self.name}_backward")
        return self.backward_of[wanted]


def _compiled(graph: Graph, name: str) -> Callable[..., Any]:
    from terrazzo.calls.compiled import Compiled

    return Compiled(lambda *values: replace_inputs(graph, values), name)


class Differentiable:
    """A function with a backward pass: the compiled vector-Jacobian product of the function.

    The backward pass is itself a compiled function of tensors, so it can be differentiated again;
    so is forward mode, which pushes tangents. Both start from the inputs. Where the sizes are known
    the forward pass may keep values (`residuals.py`), which a backward pass that is not itself
    differentiated takes.
    """

    def __init__(self, name: str, function: Callable[[Sequence[Any]], Any]):
        self.name, self.function = name, function
        self.backward_of: dict[tuple[int, ...], Callable[..., Any]] = {}
        self.forward_of: dict[tuple[int, ...], Callable[..., Any]] = {}
        self.apply = _autograd_function(self)

    def entry(self, forward: Callable[[Sequence[Any]], Any], structure: Any,
              keeping: Keeping | None = None) -> Callable[[Sequence[Any]], Any]:
        """`forward`, which answers a flat list, in torch's graph and with its results packed."""
        from terrazzo.runtime.hosted import to_torch

        apply = self.apply

        def run(leaves: Sequence[Any]) -> Any:
            tensors = [a if hasattr(a, "data_ptr") else to_torch(a) for a in leaves]
            # Numbers go where the data is.
            place = next((t.device for t in tensors if not t.is_cpu), None)
            if place is not None:
                tensors = [t.to(place) for t in tensors]
            results = apply(forward, keeping, *tensors)
            return results[0] if structure == 0 else pack(structure, results)

        return run

    def backward(self, wanted: tuple[int, ...]) -> Callable[..., Any]:
        """The compiled gradients by the inputs `wanted`, given weights of the float results."""
        if wanted not in self.backward_of:
            from terrazzo.calls.compiled import Compiled

            self.backward_of[wanted] = Compiled(vjp_function(self.floats, wanted),
                                                f"{self.name}_backward")
        return self.backward_of[wanted]

    def forward_mode(self, wanted: tuple[int, ...]) -> Callable[..., Any]:
        """How the float results change when the inputs `wanted` do, given their tangents."""
        if wanted not in self.forward_of:
            from terrazzo.calls.compiled import Compiled

            push = jvp_function(self.floats)

            def tangents(values: Sequence[Value], along: Sequence[Value]) -> tuple[Value, ...]:
                table = dict(zip(wanted, along, strict=True))
                _, found = push(values, [table.get(i) for i in range(len(values))])
                return tuple(found)

            self.forward_of[wanted] = Compiled(tangents, f"{self.name}_forward")
        return self.forward_of[wanted]

    def floats(self, *values: Value) -> tuple[Value, ...]:
        """The results that small changes make sense for."""
        return tuple(v for v in leaves(self.function(values))
                     if v.dtype.is_float or v.dtype.is_complex)


def _is_smooth(tensor: Any) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())


def _autograd_function(owner: Differentiable) -> Callable[..., Any]:
    import torch

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(forward: Callable[..., Any], keeping: Keeping | None, *tensors: Any) -> Any:
            return tuple(forward(tensors))

        @staticmethod
        def setup_context(ctx: Any, inputs: Sequence[Any], output: Sequence[Any]) -> None:
            _, ctx.keeping, *tensors = inputs
            ctx.results = len(output) if ctx.keeping is None else ctx.keeping.parts.results
            results, kept = output[:ctx.results], output[ctx.results:]
            ctx.given = len(tensors)
            ctx.save_for_backward(*tensors, *kept)
            ctx.save_for_forward(*tensors)
            ctx.whole = [i for i, r in enumerate(results) if not _is_smooth(r)]
            still = (*(output[i] for i in ctx.whole), *kept)
            if still:
                ctx.mark_non_differentiable(*still)
            ctx.set_materialize_grads(False)  # no zeros for what is kept
            ctx.like = [(r.shape, r.dtype, r.device) for r in results]

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            saved = ctx.saved_tensors
            tensors, kept = saved[:ctx.given], saved[ctx.given:]
            wanted = tuple(i for i, t in enumerate(tensors)
                           if ctx.needs_input_grad[i + 2] and _is_smooth(t))
            weights = tuple(
                torch.zeros(shape, dtype=dtype, device=device) if g is None else g
                for i, (g, (shape, dtype, device)) in enumerate(zip(grads, ctx.like))
                if i not in ctx.whole)
            if kept and not torch.is_grad_enabled():
                answer = ctx.keeping.backward(wanted)(*tensors, *kept, *weights)
            else:
                answer = owner.backward(wanted)(*tensors, weights)
            found = dict(zip(wanted, answer, strict=True))
            return None, None, *(found.get(i) for i in range(len(tensors)))

        @staticmethod
        def jvp(ctx: Any, _: None, __: None, *tangents: Any) -> Any:
            tensors = ctx.saved_tensors[:ctx.given]
            count = len(ctx.saved_tensors) - ctx.given
            wanted = tuple(i for i, t in enumerate(tangents) if t is not None)
            if not wanted:
                return (None,) * (ctx.results + count)
            found = iter(owner.forward_mode(wanted)(tensors, tuple(tangents[i] for i in wanted)))
            return (*(None if i in ctx.whole else next(found) for i in range(ctx.results)),
                    *(None,) * count)

    apply: Callable[..., Any] = Function.apply
    return apply
