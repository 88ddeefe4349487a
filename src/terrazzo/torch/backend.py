"""`torch.compile(model, backend="terrazzo")`: the function that dynamo calls.

AOTAutograd makes graphs of ATen operators without mutation, forward and backward; each becomes a
`Program` (`program.py`): segments that our compiler makes (`segment.py`), and calls of torch in
between for what has no converter (`aten/`, which says how to add one). All of that is imported when
a graph is not found among those that were kept (`cached.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import (
    SerializableAOTDispatchCompiler,
    aot_module_simplified,
)
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule

from terrazzo.base.collection import without_collection
from terrazzo.torch.cached import kept, key_tag, serializable
from terrazzo.torch.devices import HOST, device_of
from terrazzo.torch.options import BackendOptions
from terrazzo.torch.scalars import read_from_rank_0

if TYPE_CHECKING:
    from terrazzo.torch.program import Program

INFERENCE = "graph"  # the name of graphs that no gradient is asked of
FORWARD = "forward"  # of those whose backward pass may come
BACKWARD = "backward"
WATCHERS: list[Callable[[Program], None]] = []  # told of every program that is made (`explain.py`)


def terrazzo(gm: GraphModule, example_inputs: Sequence[Any], *, options: Any = None,
             mode: str | None = None) -> Any:
    """Compile a graph that dynamo captured."""
    given = BackendOptions.of(options, mode)
    read_from_rank_0(gm)
    # Whoever watches wants to see programs made; what is kept is code of the host.
    on_host = device_of(example_inputs) == HOST
    tag = "" if WATCHERS or not on_host else key_tag(gm, given)

    def compiler(name: str) -> Any:
        if tag:
            return serializable(partial(_program, name=name, options=given))
        return partial(_compile, name=name, options=given)

    parts = {"fw_compiler": compiler(FORWARD), "bw_compiler": compiler(BACKWARD),
             "inference_compiler": compiler(INFERENCE), "decompositions": _WhenTraced(on_host),
             "partition_fn": min_cut_rematerialization_partition,
             # A copy into an argument is a kernel of its own there: code writes the argument.
             "keep_inference_input_mutations": not on_host}
    with without_collection(), kept(tag) if tag else nullcontext():
        return _traced(gm, example_inputs, parts)


def _traced(gm: GraphModule, example_inputs: Sequence[Any], parts: dict[str, Any]) -> Any:
    """What AOTAutograd makes of a graph with our compilers.

    Torch's own `aot_autograd` imports Inductor's scheduler, which it logs with when asked to.
    """
    nested = any(isinstance(x, (list, tuple, dict)) for x in example_inputs)
    if nested or os.environ.get("TORCH_COMPILE_DEBUG", "0") == "1":
        return aot_autograd(**parts)(gm, example_inputs)
    backward = parts["bw_compiler"]
    if tagged := isinstance(backward, SerializableAOTDispatchCompiler):
        backward.compiler_fn = _untraced(backward.compiler_fn)
    counters["aot_autograd"]["total"] += 1
    made = aot_module_simplified(
        gm, example_inputs, **parts if tagged else {**parts, "bw_compiler": _untraced(backward)})
    counters["aot_autograd"]["ok"] += 1
    return torch._dynamo.disable(made, reason="compiled by terrazzo")


def _untraced(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """A compiler of backward passes that dynamo looks into as little as into what it makes."""
    compile = torch._dynamo.disable(compiler, reason="terrazzo's compiler")

    def compiled(*args: Any, **kwargs: Any) -> Any:
        return torch._dynamo.disable(compile(*args, **kwargs), reason="compiled by terrazzo")

    return compiled


class _WhenTraced(Mapping[Any, Callable[..., Any]]):
    """The table of decompositions, which is made when torch looks into it."""

    def __init__(self, on_host: bool):
        self.on_host = on_host

    @cached_property
    def table(self) -> Mapping[Any, Callable[..., Any]]:
        from terrazzo.torch.decompositions import decompositions

        return decompositions(self.on_host)

    def __getitem__(self, key: Any) -> Callable[..., Any]:
        return self.table[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)


def _compile(gm: GraphModule, example_inputs: Sequence[Any], *, name: str,
             options: BackendOptions) -> Any:
    from terrazzo.torch.freezing import Frozen

    if options.freeze and name == INFERENCE:
        with torch.utils._python_dispatch._disable_current_modes():
            return Frozen(gm, name, options, _told)
    return _boxed(_program(gm, example_inputs, name=name, options=options).run)


def _program(gm: GraphModule, example_inputs: Sequence[Any], *, name: str,
             options: BackendOptions) -> Program:
    from terrazzo.torch.program import compiled
    from terrazzo.torch.saved import lay_saved, saved_inputs

    with without_collection(), torch.utils._python_dispatch._disable_current_modes():
        if name == FORWARD:
            lay_saved(gm)
        back = name == BACKWARD  # whose indices are those of the forward pass
        program = compiled(gm, name, options, saved=saved_inputs(gm, example_inputs)
                           if back else (), looks=not back)
    if name == FORWARD:
        _donate_nothing()
    _told(program)
    return program


def _donate_nothing() -> None:
    """Tell torch that what is saved for a backward pass is there after it, for `retain_graph`."""
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def _told(program: Program) -> None:
    for watcher in WATCHERS:
        watcher(program)


def _boxed(run: Callable[..., Any]) -> Callable[..., Any]:
    setattr(run, "_boxed_call", True)  # noqa: B010  it empties the list of its arguments
    return run
