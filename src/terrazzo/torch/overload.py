"""One overload of a torch operator, with a kernel for everything that torch does to operators.

All of them follow from what the operator means as a function of traced values: the kernel of the
CPU is its compiled form, sizes and types for tracing come of tracing it, and what autograd, forward
mode and vmap need are operators in turn (`f_vjp`, `f_jvp`, `f_vmap`), whose meaning is derived by
our own rules. So what torch's compilers see of them are calls of operators, and gradients can be
differentiated and batched again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch._C import DispatchKey
from torch.autograd import forward_ad

from terrazzo.base.nests import leaves
from terrazzo.calls.captures import content_of
from terrazzo.calls.compiled import Compiled
from terrazzo.errors import ArgumentError
from terrazzo.graph.applying import as_value
from terrazzo.graph.batching import vmap
from terrazzo.graph.derivatives import jvp_function, vjp_function
from terrazzo.graph.ir import Value
from terrazzo.runtime.fastcall import below_autograd
from terrazzo.torch.schema import Parameter, Schema
from terrazzo.torch.sizes import result_types

Meaning = Callable[[list[Any]], Any]  # arguments with values for tensors -> values, in a nest
AUTOCAST = ("lower", "float32", "widest")

# The keys of a call with nothing but tensors of the CPU: no mode, transform or subclass.
_PLAIN = (torch._C.DispatchKeySet(DispatchKey.CPU)
          | torch._C.DispatchKeySet(DispatchKey.AutogradCPU)).raw_repr()
_BATCHED = torch._C._dispatch_key_parse("Batched")  # of the older vmap
_libraries: dict[str, torch.library.Library] = {}  # torch forgets what they hold when they go
_any_requires_grad = torch._C._any_requires_grad
_is_fwd_grad_enabled = torch._C._is_fwd_grad_enabled
_single_level_allowed = torch._C._functorch.get_single_level_autograd_function_allowed
_allow_single_level = torch._C._functorch.set_single_level_autograd_function_allowed
_transforms = torch._C._functorch.peek_interpreter_stack
_after_autograd = torch._C._after_autograd_keyset
_is_grad_enabled, _set_grad_enabled = torch.is_grad_enabled, torch._C._set_grad_enabled


_of_torch: dict[Any, Overload] = {}


def overload_of(target: Any) -> Overload | None:
    """Ours behind an overload of torch's, which a compiler of graphs may open (`values`)."""
    return _of_torch.get(target)


def library(namespace: str) -> torch.library.Library:
    """Where operators of a namespace are kept."""
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
    return _libraries[namespace]


class _Place(Enum):
    """Stands for an argument that is not a part of the program."""

    TENSOR = 0
    NUMBER = 1


_TENSOR, _NUMBER = _Place.TENSOR, _Place.NUMBER


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call: tensors and floats by themselves, and where they belong."""

    tensors: list[Any]
    numbers: list[float]
    nest: list[Any]  # with `_TENSOR`, `_NUMBER` or a list of them in place of those

    @staticmethod
    def of(schema: Schema, given: Sequence[Any]) -> Arguments:
        made = Arguments([], [], [])
        for parameter, value in zip(schema.parameters, given, strict=True):
            if isinstance(value, (list, tuple)) and parameter.takes_tensors:
                made.tensors.extend(value)
                made.nest.append([_TENSOR] * len(value))
            elif value is not None and parameter.takes_tensors:
                made.tensors.append(value)
                made.nest.append(_TENSOR)
            elif parameter.type == "Scalar" and isinstance(value, (float, torch.SymFloat)):
                made.numbers.append(value)
                made.nest.append(_NUMBER)
            else:
                made.nest.append(value)
        return made

    def key(self) -> Hashable:
        """What compiled code depends on besides tensors and floats."""
        return content_of(self.nest)

    def filled(self, tensors: Sequence[Any], numbers: Sequence[Any],
               size: Callable[[Any], Any] = int) -> list[Any]:
        """The arguments with other tensors and numbers; `size` is what becomes of a SymInt."""
        tensors_left, numbers_left = iter(tensors), iter(numbers)

        def fill(item: Any) -> Any:
            if item is _TENSOR:
                return next(tensors_left)
            if item is _NUMBER:
                return next(numbers_left)
            if isinstance(item, list):
                return [fill(i) for i in item]
            if isinstance(item, torch.SymInt):
                return size(item)
            return float(item) if isinstance(item, torch.SymFloat) else item

        return [fill(item) for item in self.nest]


class Overload:
    """One overload of an operator, registered with torch."""

    def __init__(self, schema: Schema, meaning: Meaning, autocast: str | torch.dtype | None = None,
                 quick: Callable[..., Any] | None = None, has_gradient_operator: bool = True):
        self.schema, self.meaning, self.autocast = schema, meaning, autocast
        self.listed = schema.returns == "Tensor[]"
        self.single = schema.returns == "Tensor"
        self.programs: dict[Hashable, Compiled] = {}
        self.quick = quick or self.run
        self.torch = self._register()
        _of_torch[self.torch] = self
        self.apply = _autograd_function(self)
        if has_gradient_operator:
            # Compiled code that torch finds in its cache calls it before any gradient is asked for.
            _ = self.vjp

    def _register(self) -> Any:
        namespace, _, name = self.schema.name.partition("::")
        lib, qualified = library(namespace), self.schema.qualified
        lib.define(str(self.schema), tags=(torch.Tag.pt2_compliant_tag,
                                           torch.Tag.flexible_layout))
        found = getattr(getattr(getattr(torch.ops, namespace), name),
                        self.schema.overload or "default")
        lib.impl(qualified, self.cpu, "CPU")
        lib.impl(qualified, self.autograd, "Autograd", with_keyset=True)
        torch.library.register_fake(qualified, self.fake, lib=lib)
        torch.library.register_vmap(qualified, self.batch, lib=lib)
        lib.impl(qualified, self.batch_gradients, "Batched")
        if self.autocast is not None:
            lib.impl(qualified, self.cast, "AutocastCPU")
        return found

    # ------------------------------------------------------------ kernels
    def cpu(self, *args: Any, **kwargs: Any) -> Any:
        """The kernel of the CPU: our compiled form. Whether there is a gradient is decided."""
        if forward_ad._current_level >= 0:
            with below_autograd():
                return self._without_graph(*args, **kwargs)
        return self._without_graph(*args, **kwargs)

    def _without_graph(self, *args: Any, **kwargs: Any) -> Any:
        if not _is_grad_enabled():
            return self.quick(*args, **kwargs)
        _set_grad_enabled(False)
        try:
            return self.quick(*args, **kwargs)
        finally:
            _set_grad_enabled(True)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The results for tensors in memory."""
        given = Arguments.of(self.schema, self.schema.arguments(args, kwargs))
        key = given.key()
        program = self.programs.get(key)
        if program is None:
            program = self.programs[key] = self._program(given)
        return self.packed(program(*given.tensors, *given.numbers))

    def _program(self, given: Arguments) -> Compiled:
        count = len(given.tensors)

        def function(*values: Value) -> list[Value]:
            return self.values(given.filled(values[:count], values[count:]))

        return Compiled(function, self.schema.name.partition("::")[2])

    def values(self, arguments: list[Any]) -> list[Value]:
        """The results for traced values."""
        return [as_value(v) for v in leaves(self.meaning(arguments))]

    def packed(self, results: Sequence[Any]) -> Any:
        if self.single:
            return results[0]
        return list(results) if self.listed else tuple(results)

    def fake(self, *args: Any, **kwargs: Any) -> Any:
        """Tensors like the results, without values: torch's sizes may be symbolic."""
        given = Arguments.of(self.schema, self.schema.arguments(args, kwargs))
        types = result_types(lambda values, numbers, size: self.values(
            given.filled(values, numbers, size)), given.tensors, given.numbers)
        like = given.tensors[0] if given.tensors else torch.empty(())
        return self.packed([like.new_empty(shape, dtype=getattr(torch, dtype.name))
                            for shape, dtype in types])

    def autograd(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """Makes a node of torch's graph where a gradient or a tangent may be asked for."""
        wanted = _is_grad_enabled() and _any_requires_grad(*args, **kwargs)
        if not wanted and forward_ad._current_level < 0:
            if keyset.raw_repr() == _PLAIN:  # nobody else is to see the call
                return self.cpu(*args, **kwargs)
            return self.below(keyset & _after_autograd, args, kwargs)
        if not wanted and not _is_fwd_grad_enabled():
            return self.below(keyset & _after_autograd, args, kwargs)
        given = Arguments.of(self.schema, self.schema.arguments(args, kwargs))
        return self.packed(self.apply(given, keyset & _after_autograd, *given.tensors))

    def below(self, keyset: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The same call for what comes after autograd."""
        with torch._C._AutoDispatchBelowAutograd():
            return self.torch.redispatch(keyset, *args, **kwargs)

    def call(self, given: Arguments, tensors: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        return self.schema.call(given.filled(tensors, given.numbers, lambda n: n))

    def cast(self, *args: Any, **kwargs: Any) -> Any:
        """Inside torch.autocast: the floats among the tensors in another type."""
        given = Arguments.of(self.schema, self.schema.arguments(args, kwargs))
        floats = [t for t in given.tensors if t.is_floating_point() and t.dtype != torch.float64]
        wanted = self._type_in_autocast(floats)
        tensors = [t.to(wanted) if any(t is f for f in floats) else t for t in given.tensors]
        own, keywords = self.call(given, tensors)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(DispatchKey.AutocastCPU)):
            return self.torch(*own, **keywords)

    def _type_in_autocast(self, floats: Sequence[Any]) -> torch.dtype:
        if isinstance(self.autocast, torch.dtype):
            return self.autocast
        if self.autocast == "lower":
            return torch.get_autocast_dtype("cpu")
        if self.autocast == "widest" and all(t.dtype != torch.float32 for t in floats):
            return torch.get_autocast_dtype("cpu")
        return torch.float32

    # ------------------------------------------------------------ operators that follow from it
    @cached_property
    def vjp(self) -> Overload:
        """Gradients by the tensors that are wanted, given those of all smooth results."""
        schema = self.schema.extended("vjp", Parameter("cotangents", "Tensor[]"),
                                      Parameter("wanted", "bool[]", keyword=True))

        def meaning(arguments: list[Any]) -> Any:
            own, (cotangents, wanted) = self._own(schema, arguments, 2)
            given = Arguments.of(self.schema, own)
            function = vjp_function(self._smooth_results(given), _places(wanted))
            return function(*given.tensors, tuple(cotangents))

        return Overload(schema, meaning, has_gradient_operator=False)

    @cached_property
    def jvp(self) -> Overload:
        """How the smooth results change along tangents of the tensors that have one."""
        schema = self.schema.extended("jvp", Parameter("tangents", "Tensor[]"),
                                      Parameter("moved", "bool[]", keyword=True))

        def meaning(arguments: list[Any]) -> Any:
            own, (tangents, moved) = self._own(schema, arguments, 2)
            given = Arguments.of(self.schema, own)
            along = dict(zip(_places(moved), tangents, strict=True))
            push = jvp_function(self._smooth_results(given))
            return push(given.tensors, [along.get(i) for i in range(len(given.tensors))])[1]

        return Overload(schema, meaning)

    @cached_property
    def vmap(self) -> Overload:
        """The operator for all rows of the tensors that are batched, along axis 0."""
        schema = self.schema.extended("vmap", Parameter("batched", "bool[]", keyword=True))

        def meaning(arguments: list[Any]) -> Any:
            own, (batched,) = self._own(schema, arguments, 1)
            given = Arguments.of(self.schema, own)
            axes = tuple(0 if flag else None for flag in batched)
            function = vmap(lambda *rows: self.values(given.filled(rows, given.numbers)), axes)
            return function(*given.tensors)

        return Overload(schema, meaning)

    def _own(self, schema: Schema, arguments: list[Any], count: int
             ) -> tuple[list[Any], list[Any]]:
        """Arguments of a derived operator: those of this one, and the rest."""
        named = {p.name: a for p, a in zip(schema.parameters, arguments, strict=True)}
        own = [named.pop(p.name) for p in self.schema.parameters]
        assert len(named) == count
        return own, list(named.values())

    def _smooth_results(self, given: Arguments) -> Callable[..., Any]:
        def function(*tensors: Value) -> tuple[Value, ...]:
            found = self.values(given.filled(tensors, given.numbers))
            return tuple(v for v in found if v.dtype.is_float or v.dtype.is_complex)

        return function

    def batch(self, info: Any, in_dims: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """What torch.vmap does: the batched operator, with the batch in front."""
        arguments = self.schema.arguments(args, kwargs)
        given = Arguments.of(self.schema, arguments)
        dims = leaves([d for d, p in zip(in_dims, self.schema.parameters) if p.takes_tensors
                       and arguments[self.schema.parameters.index(p)] is not None], none=True)
        dims += [None] * (len(given.tensors) - len(dims))
        front = [t if d is None else t.movedim(d, 0)
                 for t, d in zip(given.tensors, dims, strict=True)]
        own, keywords = self.call(given, front)
        found = self.vmap.torch(*own, **keywords, **{
            self.vmap.schema.parameters[-1].name: [d is not None for d in dims]})
        if self.single:
            return found[0], 0
        return self.packed(found), self.packed([0] * len(found))

    def batch_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """What torch.autograd does with `is_grads_batched`, by an older vmap of its own."""
        given = Arguments.of(self.schema, self.schema.arguments(args, kwargs))
        flags = [torch._C._dispatch_keys(t).has(_BATCHED) for t in given.tensors]
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()
        front = [torch._remove_batch_dim(t, level, 0, 0) if flag else t
                 for t, flag in zip(given.tensors, flags, strict=True)]
        own, keywords = self.call(given, front)
        found = self.vmap.torch(*own, **keywords, **{self.vmap.schema.parameters[-1].name: flags})
        return self.packed([torch._add_batch_dim(t, 0, level) for t in found])




def _places(flags: Sequence[bool]) -> tuple[int, ...]:
    return tuple(i for i, flag in enumerate(flags) if flag)


def _is_smooth(tensor: Any) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())


def _autograd_function(owner: Overload) -> Callable[..., Any]:
    """A node of torch's graph; of one level, as torch.func brings the levels in."""

    class Function(torch.autograd.function._SingleLevelFunction):
        @staticmethod
        def forward(given: Arguments, keyset: Any, *tensors: Any) -> Any:
            call = owner.call(given, tensors)
            if _transforms() is None:
                return tuple(leaves(owner.below(keyset, *call)))
            # Torch turns gradients off for this level; those outside have to see the call.
            with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                return tuple(leaves(owner.below(keyset, *call)))

        @staticmethod
        def setup_context(ctx: Any, inputs: Sequence[Any], output: Sequence[Any]) -> None:
            ctx.arguments, _, *tensors = inputs
            ctx.arguments = Arguments([], ctx.arguments.numbers, ctx.arguments.nest)
            ctx.save_for_backward(*tensors)
            ctx.save_for_forward(*tensors)
            ctx.smooth = [_is_smooth(r) for r in output]
            ctx.mark_non_differentiable(*(r for r in output if not _is_smooth(r)))

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            tensors = ctx.saved_tensors
            wanted = [ctx.needs_input_grad[i + 2] and _is_smooth(t)
                      for i, t in enumerate(tensors)]
            cotangents = [g for g, smooth in zip(grads, ctx.smooth, strict=True) if smooth]
            found = iter(_derived(owner.vjp, owner.call(ctx.arguments, tensors), cotangents,
                                  wanted))
            return None, None, *(next(found) if want else None for want in wanted)

        @staticmethod
        def jvp(ctx: Any, _: None, __: None, *tangents: Any) -> Any:
            tensors = ctx.saved_tensors
            moved = [t is not None for t in tangents]
            if not any(moved):
                return (None,) * len(ctx.smooth)
            along = [t for t in tangents if t is not None]
            if _transforms() is None:
                found = _derived(owner.jvp, owner.call(ctx.arguments, tensors), along, moved)
            else:  # levels outside push tangents of these; this one must not see its own
                with forward_ad._set_fwd_grad_enabled(True):
                    bare = [forward_ad.unpack_dual(t).primal for t in tensors]
                    found = _derived(owner.jvp, owner.call(ctx.arguments, bare), along, moved)
            left = iter(found)
            return tuple(next(left) if smooth else None for smooth in ctx.smooth)

    apply: Callable[..., Any] = Function.apply

    def at_this_level(*arguments: Any) -> Any:
        before = _single_level_allowed()
        _allow_single_level(True)
        try:
            return apply(*arguments)
        finally:
            _allow_single_level(before)

    return at_this_level


def _derived(derived: Overload, call: tuple[list[Any], dict[str, Any]], tensors: list[Any],
             flags: list[bool]) -> list[Any]:
    """A call of a gradient's operator, which has two more arguments than its own."""
    own, keywords = call
    positional = [p for p in derived.schema.parameters if not p.keyword]
    assert len(positional) == len(own) + 1
    found: list[Any] = derived.torch(*own, tensors, **keywords, **{
        derived.schema.parameters[-1].name: flags})
    return found


def check_autocast(policy: Any) -> None:
    """Whether a policy is one of those there are."""
    if policy is not None and policy not in AUTOCAST and not isinstance(policy, torch.dtype):
        raise ArgumentError(f"autocast={policy!r} is no policy",
                            hint=f"give one of {', '.join(AUTOCAST)}, a torch.dtype, or None for "
                            "the types that come")


__all__ = ["Arguments", "Overload", "check_autocast", "library", "overload_of"]
