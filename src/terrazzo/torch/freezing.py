"""Parameters as constants of a graph: packed once, and again when they change.

A parameter is taken to be what it was while it is the same memory in the same version, as torch
counts versions: every operator that writes to it makes a new one. What writes past torch
(`p.data`, numpy, another process) is not noticed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from terrazzo.torch.convert import refusal
from terrazzo.torch.options import BackendOptions
from terrazzo.torch.program import Program, compiled

log = logging.getLogger("terrazzo.torch")
MOST_RENEWALS = 4  # then the parameters are inputs like any other: somebody trains


def static_inputs(gm: GraphModule) -> list[int]:
    """Which arguments of a graph are parameters and buffers of modules, by AOTAutograd."""
    context = torch._guards.TracingContext.try_get()
    known = None if context is None or context.fw_metadata is None else (
        context.fw_metadata.static_input_indices)
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    return [i for i in known or () if i < len(placeholders)
            and isinstance(placeholders[i].meta.get("val"), torch.Tensor)
            and refusal(placeholders[i].meta["val"]) is None]


class Frozen:
    """A graph whose parameters are constants, compiled when they are first seen."""

    def __init__(self, gm: GraphModule, name: str, options: BackendOptions,
                 made: Callable[[Program], None]):
        self.gm, self.name, self.options, self.made = gm, name, options, made
        self.static = static_inputs(gm)
        self.versions: list[int] | None = None
        self.addresses: list[int] = []
        self.renewals = 0
        self.run: Callable[[list[Any]], Sequence[Any]] = self.renewed
        self._boxed_call = True

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        if self.versions is not None:
            held = [args[i] for i in self.static]
            if [t._version for t in held] != self.versions or (
                    [t.data_ptr() for t in held] != self.addresses):
                return self.renewed(args)
        return self.run(args)

    def renewed(self, args: list[Any]) -> Sequence[Any]:
        """Compile for the parameters as they are now, and run."""
        placeholders = [n for n in self.gm.graph.nodes if n.op == "placeholder"]
        self.renewals += 1
        held = {placeholders[i]: args[i] for i in self.static}
        if self.renewals > MOST_RENEWALS:
            log.info("%s: parameters changed %d times, and are no longer frozen", self.name,
                     MOST_RENEWALS)
            held, self.versions = {}, None
        else:
            self.versions = [t._version for t in held.values()]
            self.addresses = [t.data_ptr() for t in held.values()]
        program = compiled(self.gm, self.name, self.options, held)
        self.made(program)
        self.run = program.run
        return program.run(args)
