"""The way of a call through a block, written down for calls like it.

Inputs that lie like those of an earlier call reach the same parts, as long as only their layouts
decide which part is next. So far nothing needs to be looked up again: the calls of those parts are
lines of one Python function. At a place whose layouts hang on contents (the number of tokens, say)
it ends, and the layouts found there choose between functions for what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

from terrazzo.frontends.onnx.model import needed_names
from terrazzo.frontends.onnx.session.block import Block, Position, Visit, owned
from terrazzo.runtime.fastcall import MOST_ENTRIES, Remembering, key_of
from terrazzo.runtime.hosted import copied

Way = Callable[[Sequence[Any]], list[Any]]


def way_of(block: Block, inputs: Sequence[str], wanted: Sequence[str], trail: Sequence[Visit],
           fresh: Iterable[str] = ()) -> Way:
    """A function from inputs in order to the wanted values, for inputs like those of a trail.

    Some of the inputs may be `fresh`: made in the same run, and so the caller's own.
    """
    if trail and trail[0].position.contents:
        return lambda args: block.run(dict(zip(inputs, args, strict=True)), wanted, own=True)
    lines = _Lines(block, inputs, fresh)
    settled = set(inputs)  # what lies as it lay
    for i, visit in enumerate(trail):
        if i and (visit.position.contents or not settled.issuperset(visit.position.varying)):
            return lines.function(wanted, visit.position)
        lines.add(visit, settled)
    return lines.function(wanted, None)


class _Onward:
    """What follows a place in a block, by the layouts of what is there."""

    def __init__(self, block: Block, position: Position, wanted: Sequence[str], fresh: set[str]):
        self.block, self.position, self.wanted, self.fresh = block, position, wanted, fresh
        self.ways: dict[Any, Way] = {}

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        key = key_of(args)
        way = self.ways.get(key)
        if way is not None:
            return way(args)
        position = self.position
        values = {n: w for n, w in self.block.weights.items() if n in position.reads}
        values.update(position.known)
        values.update(zip(position.varying, args, strict=True))
        trail: list[Visit] = []
        fresh = set(self.fresh)
        self.block.run_from(position, values, fresh, self.block.weights, trail)
        if key is not None and not position.contents:
            if len(self.ways) >= MOST_ENTRIES:
                self.ways.clear()
            self.ways[key] = way_of(self.block, position.varying, self.wanted, trail, self.fresh)
        return owned(values, self.wanted, fresh)


class _Lines:
    """The function as it is written: variables by the names of values, and what it mentions."""

    def __init__(self, block: Block, inputs: Sequence[str], fresh: Iterable[str]):
        self.block = block
        self.mentioned: dict[str, Any] = {"copied": copied}
        self.variables: dict[str, str] = {}
        self.counter = count()
        self.constants: dict[str, Any] = dict(block.weights)
        self.fresh = set(fresh)
        names = "".join(f"{self.variable(n)}, " for n in inputs)
        self.lines = [f"{names}= args"] if names else []

    def variable(self, name: str) -> str:
        """The variable that a value is kept in from here on."""
        self.variables[name] = f"v{next(self.counter)}"
        return self.variables[name]

    def mention(self, thing: Any) -> str:
        """The name under which the function knows a thing."""
        name = f"k{len(self.mentioned)}"
        self.mentioned[name] = thing
        return name

    def read(self, name: str) -> str:
        """A value: one that the run has made or was given, or a constant."""
        if name not in self.variables:
            self.variables[name] = self.mention(self.constants[name])
        return self.variables[name]

    def table(self, names: Iterable[str]) -> str:
        """A dictionary of those values that there are."""
        return "{" + ", ".join(f"{n!r}: {self.read(n)}" for n in dict.fromkeys(names)
                               if n in self.variables or n in self.constants) + "}"

    def add(self, visit: Visit, settled: set[str]) -> None:
        """The calls of one part."""
        part, imported = visit.part, visit.part.imported
        self.constants.update(visit.position.known)
        if part.call is not None:
            call = part.call
            if isinstance(call, Remembering):
                call = call.direct(visit.arrays)
            given = "".join(f"{self.read(n)}, " for n in imported.inputs)
            results = "".join(f"{self.variable(n)}, " for n in imported.outputs)
            self.lines.append(f"{results}= {self.mention(call)}(({given}))")
            settled.update(imported.outputs)
            self.fresh.update(imported.outputs)
        self.constants.update(imported.constants)
        for node, step in part.host:
            reads = needed_names(node)
            if step.steady and all(n in self.constants and n not in settled for n in reads):
                made = step.run({n: self.constants[n] for n in reads})
                self.constants.update(zip(step.outputs, made, strict=False))
                continue
            self.lines.append(f"made = {self.mention(step.run)}({self.table(reads)})")
            steady = step.steady and all(n in settled or n in self.constants for n in reads)
            settled.update(visit.other.intersection(step.outputs))  # no plan hangs on those
            for i, name in enumerate(step.outputs):
                if name:
                    self.lines.append(f"{self.variable(name)} = made[{i}]")
                    if steady:
                        settled.add(name)
                    if step.makes:
                        self.fresh.add(name)

    def function(self, wanted: Sequence[str], rest: Position | None) -> Way:
        """The function, which goes on at another place, if there is one."""
        if rest is None:
            results = ", ".join(
                self.read(n) if n in self.fresh and n not in wanted[:i] else
                f"copied({self.read(n)})" for i, n in enumerate(wanted))
            self.lines.append(f"return [{results}]")
        else:
            onward = self.mention(_Onward(self.block, rest, wanted, self.fresh))
            given = "".join(f"{self.read(n)}, " for n in rest.varying)
            self.lines.append(f"return {onward}(({given}))")
        exec("\n    ".join(["def way(args):", *self.lines]), self.mentioned)
        way: Way = self.mentioned["way"]
        return way
