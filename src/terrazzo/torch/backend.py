"""`torch.compile(model, backend="terrazzo")`: the function that dynamo calls.

AOTAutograd makes graphs of ATen operators without mutation, forward and backward; each becomes a
`Program` (`program.py`): segments that our compiler makes (`segment.py`), and calls of torch in
between for what has no converter (`aten/`, which says how to add one).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule

from terrazzo.torch.cached import kept, key_tag, serializable
from terrazzo.torch.decompositions import decompositions
from terrazzo.torch.devices import HOST, device_of
from terrazzo.torch.freezing import Frozen
from terrazzo.torch.options import BackendOptions
from terrazzo.torch.program import Program, compiled
from terrazzo.torch.scalars import read_from_rank_0

INFERENCE = "graph"  # the name of graphs that no gradient is asked of
FORWARD = "forward"  # of those whose backward pass may come
WATCHERS: list[Callable[[Program], None]] = []  # told of every program that is made (`explain.py`)


def terrazzo(gm: GraphModule, example_inputs: Sequence[Any], *, options: Any = None) -> Any:
    """Compile a graph that dynamo captured."""
    given = BackendOptions.of(options)
    read_from_rank_0(gm)
    # Whoever watches wants to see programs made; what is kept is code of the host.
    tag = "" if WATCHERS or device_of(example_inputs) != HOST else key_tag(gm, given)

    def compiler(name: str) -> Any:
        if tag:
            return serializable(partial(_program, name=name, options=given))
        return partial(_compile, name=name, options=given)

    backend = aot_autograd(
        fw_compiler=compiler(FORWARD),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler(INFERENCE),
        decompositions=decompositions(),
        partition_fn=min_cut_rematerialization_partition,
    )
    with kept(tag) if tag else nullcontext():
        return backend(gm, example_inputs)


def _compile(gm: GraphModule, example_inputs: Sequence[Any], *, name: str,
             options: BackendOptions) -> Any:
    if options.freeze and name == INFERENCE:
        with torch.utils._python_dispatch._disable_current_modes():
            return Frozen(gm, name, options, _told)
    return _boxed(_program(gm, example_inputs, name=name, options=options).run)


def _program(gm: GraphModule, example_inputs: Sequence[Any], *, name: str,
             options: BackendOptions) -> Program:
    with torch.utils._python_dispatch._disable_current_modes():
        program = compiled(gm, name, options)
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
