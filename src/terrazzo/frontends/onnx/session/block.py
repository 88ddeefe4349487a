"""A block of nodes that runs: the largest parts that compile, and host steps between them.

Which nodes compile may depend on the shapes a call brings, and on the contents of tensors that
shapes hang on (the target of a Reshape, say). So a block plans as it runs: it imports what it can
with what it knows, compiles and runs that, lets the host do the nodes that cannot be compiled,
and goes on with the rest, now with more known. A plan serves all calls that fit it (`forms.py`);
a call that needs another plan finds those for the rest again, if no more or less is known there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from terrazzo.errors import ModelError, TerrazzoError, UnsupportedOperator
from terrazzo.frontends.onnx.importer import Imported, import_nodes
from terrazzo.frontends.onnx.model import needed_names, node_text
from terrazzo.frontends.onnx.reasons import ContentsUnknown, NotConverted, Reason
from terrazzo.frontends.onnx.session.forms import Form, Forms
from terrazzo.frontends.onnx.session.host import HostStep, host_step, type_of
from terrazzo.frontends.onnx.session.host_ops import counted_axes
from terrazzo.graph.ir import TensorType
from terrazzo.runtime.hosted import copied

log = logging.getLogger("terrazzo")

Numbered = tuple[int, Any]
_LARGEST_KEY = 1 << 16  # bytes of a tensor whose contents may decide a plan
_MOST_PLANS = 128  # remembered at one position; the oldest goes first


@dataclass(frozen=True, eq=False)
class Setting:
    """What all blocks of a session share."""

    opsets: Mapping[str, int]
    compile: Callable[[Imported], Any]
    reference: bool  # whether onnx's reference may run what nothing else can
    where: str
    caller: Callable[[Any], Callable[[Sequence[Any]], list[Any]]]  # how an executable is run
    announced: set[str] = field(default_factory=set)

    def announce(self, node: Any, why: Reason) -> None:
        """Say once that a node is left to the reference."""
        text = node_text(node)
        if text not in self.announced:
            self.announced.add(text)
            log.warning("%s runs in onnx's reference, which is slow: %s", text, why)


@dataclass(eq=False)
class Part:
    """One compiled step: its executable, and what is left afterwards."""

    form: Form  # the calls that it serves
    imported: Imported
    call: Callable[[Sequence[Any]], list[Any]] | None  # runs it; None: nothing was compiled
    host: list[tuple[Any, HostStep]]  # run after it, in order
    rest: Position | None


@dataclass(eq=False)
class Position:
    """Some nodes still to run, and the plans made for them so far."""

    nodes: tuple[Numbered, ...]
    reads: tuple[str, ...]
    varying: tuple[str, ...]  # of those, what is neither a weight nor known
    forms: Forms
    known: Mapping[str, np.ndarray]  # what parts before it found to be constant
    contents: set[str] = field(default_factory=set)  # tensors whose contents decide the plan
    parts: list[Part] = field(default_factory=list)  # the last used first
    plans: dict[Any, Part] = field(default_factory=dict)  # by exact types and contents


@dataclass(frozen=True, eq=False)
class Visit:
    """A part that a run went through, what its compiled code was given, and what it made."""

    position: Position
    part: Part
    arrays: Sequence[Any]
    other: frozenset[str]  # results of the host that are strings, sequences or maps
    told: Mapping[str, Any]  # those that layouts alone decide


def position_of(nodes: Sequence[Numbered], wanted: Iterable[str], forms: Forms,
                known: Mapping[str, np.ndarray], weights: Mapping[str, np.ndarray]) -> Position:
    """The place before some nodes."""
    names = [n for _, node in nodes for n in needed_names(node)]
    made = {n for _, node in nodes for n in node.output}
    reads = tuple(n for n in dict.fromkeys([*names, *wanted]) if n not in made)
    varying = tuple(n for n in reads if n not in weights and n not in known)
    forms.arithmetic = {n: s for n, s in forms.arithmetic.items() if n in reads}
    return Position(tuple(nodes), reads, varying, forms,
                    {n: a for n, a in known.items() if n in reads})


def _same_knowledge(a: Position, b: Position) -> bool:
    """Whether as much is known before the same nodes: then plans of the one serve the other."""
    return a.known.keys() == b.known.keys() and all(
        _layout(x) == _layout(b.known[n]) and _bytes(x) == _bytes(b.known[n])
        for n, x in a.known.items()) and _items(a.forms) == _items(b.forms)


def _items(forms: Forms) -> dict[str, Any]:
    return {n: (s.dtype, s.items.shape, *s.items.reshape(-1)) for n, s in forms.arithmetic.items()}


class Block:
    """The nodes of a graph or subgraph, ready to run on an environment of named values."""

    def __init__(self, nodes: Sequence[Any], weights: Mapping[str, np.ndarray],
                 wanted: Sequence[str], setting: Setting, name: str = "model",
                 types: Mapping[str, TensorType] | None = None):
        self.weights, self.wanted, self.setting, self.name = weights, tuple(wanted), setting, name
        self.start = position_of(list(enumerate(nodes)), wanted, Forms(types or {}), {},
                                 weights)
        self._positions: dict[tuple[int, ...], list[Position]] = {}
        self._steps: dict[tuple[int, Reason], HostStep] = {}  # by node, and why it is put off

    def run(self, env: Mapping[str, Any], wanted: Sequence[str] | None = None, *,
            own: bool = False, trail: list[Visit] | None = None) -> list[Any]:
        """The wanted values, from an environment that holds all that the nodes read.

        With `own`, no two of them share memory with each other or with anything that stays. A
        `trail` gets the parts that were run.
        """
        values: dict[str, Any] = {**self.weights, **env}
        weights = self.weights if env.keys().isdisjoint(self.weights) else {
            n: w for n, w in self.weights.items() if n not in env}
        fresh: set[str] = set()  # what was made in this run
        self.run_from(self.start, values, fresh, weights, trail)
        results = self.wanted if wanted is None else wanted
        return owned(values, results, fresh) if own else [values[n] for n in results]

    def run_from(self, position: Position | None, values: dict[str, Any], fresh: set[str],
                 weights: Mapping[str, np.ndarray], trail: list[Visit] | None = None) -> None:
        """Run what follows a position: values and what is new among them are added."""
        while position is not None and position.nodes:
            part = self._part(position, values, weights)
            arrays = part.form.arrays(part.imported.inputs, values)
            if part.call is not None:
                values.update(zip(part.imported.outputs, part.call(arrays), strict=True))
                fresh.update(part.imported.outputs)
            values.update(part.imported.constants)
            for node, step in part.host:
                made, names = step.run(values), step.outputs
                if len(made) < len(names) and any(names[len(made):]):
                    raise ModelError(f"{node_text(node)} makes {len(made)} outputs, the model "
                                     f"reads {len(names)}", where=self.setting.where or None)
                for name, result in zip(names, made, strict=False):
                    if name:
                        values[name] = result
                        if step.makes:
                            fresh.add(name)
            if trail is not None:
                trail.append(Visit(position, part, arrays, frozenset(
                    n for _, step in part.host for n in step.outputs
                    if n and _layout(values[n]) is None and values[n] is not None), {
                    n: values[n] for _, step in part.host if step.tells
                    for n in step.outputs if n}))
            position = part.rest

    # ------------------------------------------------------------ planning
    def _part(self, position: Position, values: Mapping[str, Any],
              weights: Mapping[str, np.ndarray]) -> Part:
        names = position.varying if weights is self.weights else tuple(
            n for n in position.reads if n not in weights and n not in position.known)
        key = (names, *[_layout(values.get(n)) for n in names],
               *[_bytes(values.get(n)) for n in position.contents])
        part = position.plans.get(key)
        if part is not None:
            return part
        weights = {**weights, **position.known}
        found = {n: type_of(values.get(n)) for n in names}
        types = {n: t for n, t in found.items() if t is not None}
        contents = set(position.contents)
        part = next((p for p in position.parts if p.form.serves(types, values)), None)
        if part is None:
            part = self._planned(position, types, values, weights)
        else:
            position.parts.remove(part)
        position.parts.insert(0, part)
        del position.parts[_MOST_PLANS:]
        if position.contents == contents:
            while len(position.plans) >= _MOST_PLANS:
                position.plans.pop(next(iter(position.plans)), None)
            position.plans[key] = part
        return part

    def _planned(self, position: Position, types: Mapping[str, TensorType],
                 values: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> Part:
        """A plan for sizes that vary where that is possible, else for those at hand."""
        forms = position.forms
        varying, exact = (partial(make, types, values, position.contents)
                          for make in (forms.meet, forms.exact))
        form, imported = self._imported(position, varying, values, weights)
        if form.symbolic and imported.put_off:
            alone, known = self._imported(position, exact, values, weights)
            if _for_good(known) < _for_good(imported):
                form, imported = alone, known
        try:
            return self._plan(position, form, imported, values)
        except TerrazzoError as error:
            if not form.symbolic:
                raise
            log.warning("a part of %s is compiled for each size it meets: %s", self.name,
                        error.message)
        form, imported = self._imported(position, exact, values, weights)
        return self._plan(position, form, imported, values)

    def _imported(self, position: Position, make: Callable[[], Form], values: Mapping[str, Any],
                  weights: Mapping[str, np.ndarray]) -> tuple[Form, Imported]:
        """What becomes of the nodes, with the contents of tensors known that converters ask for."""
        while True:
            form = make()
            known = {**weights, **form.numbers}
            imported = import_nodes(
                position.nodes, self.setting.opsets,
                {n: t for n, t in form.types.items() if n not in known}, known, self.wanted,
                self.name, self.setting.where, contents=form.contents, sizes=form.sizes)
            asked = imported.needed & form.given.keys() - form.numbers.keys()
            more = {n for n in asked if values[n].nbytes <= _LARGEST_KEY}
            if not more:
                return form.guarded(imported.guards), imported
            position.contents |= more
            position.forms.numbers_only |= more & form.contents.keys()

    def _plan(self, position: Position, form: Form, imported: Imported,
              values: Mapping[str, Any]) -> Part:
        call = self.setting.caller(self.setting.compile(imported)) if (
            imported.outputs) else None
        available = {*values, *imported.outputs, *imported.constants}
        host: list[tuple[Any, HostStep]] = []
        left: list[Numbered] = []
        stuck = ""
        for number, node in position.nodes:
            reason = imported.put_off.get(number)
            if reason is None:
                continue
            if isinstance(reason, ContentsUnknown) and _contents_appear(
                    imported.needed, values, {*imported.outputs, *imported.constants}) and (
                    all(n in available for n in needed_names(node))):
                left.append((number, node))  # compiles once those contents are there
                continue
            if all(n in available for n in needed_names(node)):
                # What reads its outputs is left: once they are there, it may well compile.
                if (number, reason) not in self._steps:
                    self._steps[number, reason] = host_step(node, reason, self)
                host.append((node, self._steps[number, reason]))
            else:
                stuck = stuck or f"{node_text(node)} {reason}"
                left.append((number, node))
        if left and not host and call is None and not imported.constants:
            raise UnsupportedOperator(f"the model cannot go on: {stuck}", where=self.setting.where)
        rest = None
        if left:
            types = {n: t for n, t in imported.types.items() if n not in form.carriers}
            types.update({n: v.type for n, v in zip(imported.outputs, imported.graph.outputs)})
            counted = {n: axes for node, _ in host for n, axes in counted_axes(node).items()}
            made = {*imported.outputs, *(n for node, _ in host for n in node.output)}
            forms = Forms(types, counted, position.forms.computed | made, imported.sizes)
            known = {**position.known, **imported.constants}
            rest = self._shared(position_of(left, self.wanted, forms, known, self.weights))
        return Part(form, imported, call, host, rest)

    def _shared(self, position: Position) -> Position:
        """A position that was met before, after another plan, with the plans made there."""
        met = self._positions.setdefault(tuple(number for number, _ in position.nodes), [])
        same = next((p for p in met if _same_knowledge(p, position)), None)
        if same is not None:
            return same
        met.append(position)
        del met[:-_MOST_PLANS]
        return position


def owned(values: Mapping[str, Any], names: Sequence[str], fresh: set[str]) -> list[Any]:
    """Values that share no memory: a host step may hand on what it was given, or what it keeps."""
    return [values[n] if n in fresh and n not in names[:i] else copied(values[n])
            for i, n in enumerate(names)]


def _for_good(imported: Imported) -> set[int]:
    """Nodes that do not compile even once the numbers are there that others wait for."""
    return {number for number, why in imported.put_off.items()
            if isinstance(why, NotConverted)}


def _layout(value: Any) -> Any:
    """What a plan may depend on of any tensor."""
    if type(value) is np.ndarray:
        return None if value.dtype.kind in "OUS" else (value.dtype, value.shape)
    return type_of(value)


def _bytes(value: Any) -> bytes | None:
    """What a plan may depend on beyond that."""
    if type(value) is np.ndarray:
        return None if value.dtype.kind in "OUS" else value.tobytes()
    return None if type_of(value) is None else np.asarray(value).tobytes()


def _contents_appear(needed: Iterable[str], values: Mapping[str, Any], made: set[str]) -> bool:
    return any(n in made and n not in values for n in needed)
