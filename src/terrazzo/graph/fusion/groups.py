"""What fusion makes: kernels with the values they read and write, in the order they run."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from terrazzo.expr.ir import Program, reads
from terrazzo.graph.ir import Graph, Node, Value


@dataclass(frozen=True, eq=False)
class Group:
    """One kernel: its program and the graph values its inputs and outputs stand for."""

    program: Program
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    nodes: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Fused:
    """A fused graph: groups in the order they run, and values that are others reshaped."""

    graph: Graph
    groups: tuple[Group, ...]
    aliases: Mapping[Value, Value]  # a reshaped value -> the value whose memory it is
    constants: Mapping[Value, Any]

    def root(self, value: Value) -> Value:
        """The value whose memory a value is."""
        return root_of(value, self.aliases)

    def __str__(self) -> str:
        return "\n\n".join(str(g.program) for g in self.groups)


def root_of(value: Value, aliases: Mapping[Value, Value]) -> Value:
    """The value whose memory a value is."""
    while value in aliases:
        value = aliases[value]
    return value


def readers_first(fused: Fused, over: Mapping[Value, Value]) -> Fused:
    """The same kernels, those that write outputs over inputs after all others that read these.

    `over` has the outputs that are to be written so. Stages inside of a kernel are ordered in the
    same way. Where that order would be a circle, they stay as they are.
    """
    if not over:
        return fused
    replaced = {fused.root(output): source for output, source in over.items()}
    groups = [_stages_readers_first(group, replaced) for group in fused.groups]
    maker = {value: i for i, group in enumerate(groups) for value in group.outputs}
    read = [{fused.root(v) for v in group.inputs} for group in groups]
    before = [{maker[v] for v in roots if v in maker} for roots in read]
    for output, source in replaced.items():
        if output in maker:
            before[maker[output]] |= {i for i, roots in enumerate(read) if source in roots}
    return replace(fused, groups=tuple(groups[i] for i in _in_order(before)))


def _stages_readers_first(group: Group, over: Mapping[Value, Value]) -> Group:
    program = group.program
    if program.kind not in ("pointwise", "rows") or not any(v in over for v in group.outputs):
        return group
    place = {stage: i for i, stage in enumerate(program.stages)}
    input_of = dict(zip(group.inputs, program.inputs, strict=True))
    before = [{place[t] for t in reads(stage) if t in place} for stage in program.stages]
    for value, stage in zip(group.outputs, program.outputs, strict=True):
        if value in over and over[value] in input_of:
            source = input_of[over[value]]
            before[place[stage]] |= {i for s, i in place.items() if source in reads(s)}
    stages = tuple(program.stages[i] for i in _in_order(before))
    return replace(group, program=replace(program, stages=stages))


def _in_order(before: Sequence[set[int]]) -> list[int]:
    """Numbers, each after those before it and else as they come; all as they come in a circle."""
    order = ordered(before)
    return order if len(order) == len(before) else list(range(len(before)))


def ordered(before: Sequence[set[int]]) -> list[int]:
    """Numbers, each after those before it and else as they come; without those in a circle."""
    waits = [set(others) - {i} for i, others in enumerate(before)]
    waiting: dict[int, list[int]] = {}
    for i, others in enumerate(waits):
        for other in others:
            waiting.setdefault(other, []).append(i)
    ready = [i for i, others in enumerate(waits) if not others]  # a heap: the earliest comes first
    order: list[int] = []
    while ready:
        done = heapq.heappop(ready)
        order.append(done)
        for i in waiting.get(done, ()):
            waits[i].discard(done)
            if not waits[i]:
                heapq.heappush(ready, i)
    return order
