"""The way of a call through a block, written down for calls like it.

Inputs that lie like those of an earlier call reach the same parts, as long as only their layouts
decide which part is next. So far nothing needs to be looked up again: the calls of those parts are
lines of one Python function. From the first place on whose layouts hang on contents (the number of
tokens, say), the block finds its way as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from terrazzo.frontends.onnx.model import needed_names
from terrazzo.frontends.onnx.session.block import Block, Position, Visit, owned
from terrazzo.runtime.fastcall import Remembering
from terrazzo.runtime.hosted import copied

Way = Callable[[Sequence[Any]], list[Any]]


def way_of(block: Block, inputs: Sequence[str], wanted: Sequence[str], trail: Sequence[Visit]
           ) -> Way:
    """A function from inputs in order to the wanted values, for inputs like those of a trail."""
    lines = _Lines(block, inputs)
    settled = set(inputs)  # what lies as it lay
    rest: Position | None = block.start
    for visit in trail:
        if visit.position.contents or not settled.issuperset(visit.position.varying):
            break
        lines.add(visit, settled)
        rest = visit.part.rest
    return lines.function(wanted, rest if rest is not None and rest.nodes else None)


class _Lines:
    """The function as it is written: variables by the names of values, and what it mentions."""

    def __init__(self, block: Block, inputs: Sequence[str]):
        self.block = block
        self.mentioned: dict[str, Any] = {
            "copied": copied, "owned": owned, "weights": block.weights, "run_from": block.run_from}
        self.variables: dict[str, str] = {}
        self.constants: dict[str, Any] = dict(block.weights)
        self.fresh: set[str] = set()  # made in each run, and so the caller's own
        names = "".join(f"{self.variable(n)}, " for n in inputs)
        self.lines = [f"{names}= args"] if names else []

    def variable(self, name: str) -> str:
        """The variable that a value is kept in from here on."""
        made = self.variables[name] = f"v{len(self.variables)}"
        return made

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
            self.lines.append(f"made = {self.mention(step.run)}({self.table(reads)})")
            steady = step.steady and all(n in settled or n in self.constants for n in reads)
            for i, name in enumerate(step.outputs):
                if name:
                    self.lines.append(f"{self.variable(name)} = made[{i}]")
                    settled.update([name] if steady else [])
                    self.fresh.update([name] if step.makes else [])

    def function(self, wanted: Sequence[str], rest: Position | None) -> Way:
        """The function, which lets the block do the rest, if there is one."""
        if rest is None:
            results = ", ".join(
                self.read(n) if n in self.fresh and n not in wanted[:i] else
                f"copied({self.read(n)})" for i, n in enumerate(wanted))
            self.lines.append(f"return [{results}]")
        else:
            self.mentioned.update(rest=rest, wanted=list(wanted), made_before=self.fresh)
            self.lines += [f"values = {self.table([*rest.reads, *wanted])}",
                           "fresh = set(made_before)",
                           "run_from(rest, values, fresh, weights)",
                           "return owned(values, wanted, fresh)"]
        exec("\n    ".join(["def way(args):", *self.lines]), self.mentioned)
        way: Way = self.mentioned["way"]
        return way
