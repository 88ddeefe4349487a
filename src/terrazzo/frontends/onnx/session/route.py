"""The way of a call through a block, written down for calls like it.

Inputs that lie like those of an earlier call reach the same parts, as long as only their layouts
decide which part is next. So far nothing needs to be looked up again: the calls of those parts are
lines of one Python function. At a place whose layouts hang on contents (the number of tokens, say)
it ends, and the layouts found there choose between functions for what follows; so do numbers that
plans hang on. Branches and bodies of loops have ways of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import numpy as np

from terrazzo.frontends.onnx.importer import MISFITS
from terrazzo.frontends.onnx.model import needed_names
from terrazzo.frontends.onnx.session.block import Block, Position, Visit, owned
from terrazzo.frontends.onnx.session.host import HostStep
from terrazzo.runtime.fastcall import MOST_ENTRIES, Remembering, key_of
from terrazzo.runtime.hosted import copied

Way = Callable[[Sequence[Any]], list[Any]]


def entry_of(block: Block, inputs: Sequence[str], wanted: Sequence[str], trail: Sequence[Visit]
             ) -> Way:
    """A function from the inputs of a whole model to the wanted values."""
    if not block.start.contents:
        return way_of(block, inputs, wanted, trail)
    onward = Onward(block, block.start, wanted)
    places = list(map(inputs.index, block.start.varying))
    return lambda args: onward([args[i] for i in places])


def way_of(block: Block, inputs: Sequence[str], wanted: Sequence[str], trail: Sequence[Visit],
           fresh: Iterable[str] = (), equal: Iterable[str] = (), *, again: Way | None = None,
           own: bool = True) -> Way:
    """A function from inputs in order to the wanted values, for inputs like those of a trail.

    Some of the inputs may be `fresh`: made in the same run, and so the caller's own. Others are
    `equal` to those of the trail. Where a step fails, `again` tells the error with what it is
    about. Without `own` results may share memory.
    """
    if again is None:
        def again(args: Sequence[Any]) -> list[Any]:
            return block.run(dict(zip(inputs, args, strict=True)), wanted, own=own)

    lines = _Lines(block, inputs, fresh, own)
    settled = set(inputs)  # what lies as it lay
    for i, visit in enumerate(trail):
        place, constants = visit.position, lines.constants.keys()
        if not place.contents <= constants | {*equal} or not settled | constants >= {
                *place.varying}:
            if not i:
                return again
            unknown = [n not in settled and n not in constants for n in place.varying]
            return lines.function(wanted, again, Onward(
                block, place, wanted, lines.fresh, own, [k for k, u in enumerate(unknown) if u]))
        lines.add(visit, settled)
    return lines.function(wanted, again)


class Onward:
    """What follows a place in a block, by the layouts of what is there."""

    def __init__(self, block: Block, position: Position, wanted: Sequence[str],
                 fresh: Iterable[str] = (), own: bool = True, unknown: Sequence[int] | None = None):
        self.block, self.position, self.wanted, self.fresh = block, position, wanted, set(fresh)
        self.own = own
        self.unknown = unknown  # the arguments that may lie otherwise than ever; None: all
        self.ways: dict[Any, Way | None] = {}  # None: came by once
        self._decisive: tuple[int, list[int]] = (0, [])  # how many contents decide, and where

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        key = self.key(args)
        way = self.ways.get(key)
        if way is not None:
            return way(args)
        trail: list[Visit] = []
        results = self.run(args, trail)
        if key is not None and key == self.key(args):
            if len(self.ways) >= MOST_ENTRIES:
                self.ways.clear()
            contents = self.position.contents
            # A function costs more than the run: numbers should come again before it is written.
            self.ways[key] = None if contents and key not in self.ways else way_of(
                self.block, self.position.varying, self.wanted, trail, self.fresh, contents,
                again=self.run, own=self.own)
        return results

    def key(self, args: Sequence[Any]) -> Any:
        """What decides the way: layouts, and the contents that plans hang on. None: do not ask."""
        layouts = key_of(args if self.unknown is None else [args[i] for i in self.unknown])
        contents = self.position.contents
        if not contents or layouts is None:
            return layouts
        if len(contents) != self._decisive[0]:
            self._decisive = len(contents), [
                i for i, n in enumerate(self.position.varying) if n in contents]
        return layouts, *[np.asarray(args[i]).tobytes() for i in self._decisive[1]]

    def run(self, args: Sequence[Any], trail: list[Visit] | None = None) -> list[Any]:
        """The results by plans, part after part."""
        position, block = self.position, self.block
        values = {n: w for n, w in block.weights.items() if n in position.reads}
        values.update(position.known)
        values.update(zip(position.varying, args, strict=True))
        fresh = set(self.fresh)
        block.run_from(position, values, fresh, block.weights, trail)
        return owned(values, self.wanted, fresh) if self.own else [values[n] for n in self.wanted]


class _Lines:
    """The function as it is written: variables by the names of values, and what it mentions."""

    def __init__(self, block: Block, inputs: Sequence[str], fresh: Iterable[str], own: bool):
        self.own = own
        self.mentioned: dict[str, Any] = {"copied": copied, "MISFITS": MISFITS}
        self.variables: dict[str, str] = {}
        self.counter = count()
        self.constants = {n: w for n, w in block.weights.items() if n not in inputs}
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

    def call(self, step: HostStep, reads: Iterable[str]) -> None:
        """The call of one step of the host."""
        if step.direct is None:
            self.lines.append(f"made = {self.mention(step.run)}({self.table(reads)})")
            return
        function, attrs, version, names = step.direct
        inputs = ", ".join(self.read(n) if n else "None" for n in names)
        self.lines += [
            "try:",
            f"    made = {self.mention(function)}({self.mention(attrs)}, {version}, [{inputs}])",
            "except MISFITS:", "    return again(args)"]

    def add(self, visit: Visit, settled: set[str]) -> None:
        """The calls of one part."""
        part, imported = visit.part, visit.part.imported
        self.constants.update(visit.position.known)
        if part.call is not None:
            call = part.call
            if isinstance(call, Remembering):
                call = call.direct(visit.arrays)
            given = "".join(f"{self.mention(a) if n in part.form.carriers else self.read(n)}, "
                            for n, a in zip(imported.inputs, visit.arrays, strict=True))
            results = "".join(f"{self.variable(n)}, " for n in imported.outputs)
            self.lines.append(f"{results}= {self.mention(call)}(({given}))")
            settled.update(imported.outputs)
            self.fresh.update(imported.outputs)
        self.constants.update(imported.constants)
        for node, step in part.host:
            reads = needed_names(node)
            if step.steady and all(n in self.constants for n in reads):
                made = step.run({n: self.constants[n] for n in reads})
                self.constants.update(zip(step.outputs, made, strict=False))
                continue
            if step.tells and all(n in self.constants or n in settled for n in reads):
                self.constants.update((n, visit.told[n]) for n in step.outputs if n)
                continue
            self.call(step, reads)
            steady = step.steady and all(n in settled or n in self.constants for n in reads)
            settled.update(visit.other.intersection(step.outputs))  # no plan hangs on those
            for i, name in enumerate(step.outputs):
                if name:
                    self.lines.append(f"{self.variable(name)} = made[{i}]")
                    if steady:
                        settled.add(name)
                    if step.makes:
                        self.fresh.add(name)

    def function(self, wanted: Sequence[str], again: Way, rest: Onward | None = None) -> Way:
        """The function, which goes on at another place, if there is one."""
        if rest is None:
            results = ", ".join(
                self.read(n) if not self.own or (n in self.fresh and n not in wanted[:i]) else
                f"copied({self.read(n)})" for i, n in enumerate(wanted))
            self.lines.append(f"return [{results}]")
        else:
            given = "".join(f"{self.read(n)}, " for n in rest.position.varying)
            self.lines.append(f"return {self.mention(rest)}(({given}))")
        self.mentioned["again"] = again
        exec("\n    ".join(["def way(args):", *self.lines]), self.mentioned)
        way: Way = self.mentioned["way"]
        return way
