"""A block of nodes that runs: the largest parts that compile, and host steps between them.

Which nodes compile may depend on the shapes a call brings, and on the contents of tensors that
shapes hang on (the target of a Reshape, say). So a block plans as it runs: it imports what it can
with what it knows, compiles and runs that, lets the host do the nodes that cannot be compiled,
and goes on with the rest, now with more known. Every plan is remembered by types, and by the
contents that it was specialised on; the next call with the same ones finds its executables ready.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from terrazzo.errors import ModelError, UnsupportedOperator
from terrazzo.frontends.onnx.importer import Imported, import_nodes, needed_names
from terrazzo.frontends.onnx.model import node_text
from terrazzo.graph.ir import Graph, TensorType
from terrazzo.session.host import HostStep, host_step, type_of

log = logging.getLogger("terrazzo")

Numbered = tuple[int, Any]
_LARGEST_KEY = 1 << 16  # bytes of a tensor whose contents may decide a plan
_MOST_PLANS = 128  # remembered at one position; the oldest goes first


@dataclass(frozen=True, eq=False)
class Setting:
    """What all blocks of a session share."""

    opsets: Mapping[str, int]
    compile: Callable[[Graph], Any]
    reference: bool  # whether onnx's reference may run what nothing else can
    where: str
    call: Callable[[Any, Sequence[Any]], list[Any]]  # runs an executable on arrays
    announced: set[str] = field(default_factory=set)

    def announce(self, node: Any, why: str) -> None:
        """Say once that a node is left to the reference."""
        text = node_text(node)
        if text not in self.announced:
            self.announced.add(text)
            log.warning("%s runs in onnx's reference, which is slow: %s", text, why)


@dataclass(eq=False)
class Part:
    """One compiled step: its executable, and what is left afterwards."""

    imported: Imported
    executable: Any | None
    host: list[tuple[Any, HostStep]]  # run after it, in order
    rest: Position | None


@dataclass(eq=False)
class Position:
    """Some nodes still to run, and the plans made for them so far."""

    nodes: tuple[Numbered, ...]
    reads: tuple[str, ...]
    contents: set[str] = field(default_factory=set)  # tensors whose contents decide the plan
    plans: dict[Any, Part] = field(default_factory=dict)


def position_of(nodes: Sequence[Numbered], wanted: Iterable[str]) -> Position:
    """The place before some nodes."""
    names = [n for _, node in nodes for n in needed_names(node)]
    return Position(tuple(nodes), tuple(dict.fromkeys([*names, *wanted])))


class Block:
    """The nodes of a graph or subgraph, ready to run on an environment of named values."""

    def __init__(self, nodes: Sequence[Any], weights: Mapping[str, np.ndarray],
                 wanted: Sequence[str], setting: Setting, name: str = "model"):
        self.weights, self.wanted, self.setting, self.name = weights, tuple(wanted), setting, name
        self.start = position_of(list(enumerate(nodes)), wanted)

    def run(self, env: Mapping[str, Any], wanted: Sequence[str] | None = None) -> list[Any]:
        """The wanted values, from an environment that holds all that the nodes read."""
        values: dict[str, Any] = {**self.weights, **env}
        weights = self.weights if env.keys().isdisjoint(self.weights) else {
            n: w for n, w in self.weights.items() if n not in env}
        position: Position | None = self.start
        while position is not None and position.nodes:
            part = self._part(position, values, weights)
            if part.executable is not None:
                results = self.setting.call(
                    part.executable, [values[n] for n in part.imported.inputs])
                values.update(zip(part.imported.outputs, results, strict=True))
            values.update(part.imported.constants)
            for node, step in part.host:
                made = step.run(values)
                if any(node.output[len(made):]):
                    raise ModelError(f"{node_text(node)} makes {len(made)} outputs, the model "
                                     f"reads {len(node.output)}", where=self.setting.where or None)
                for name, result in zip(node.output, made, strict=False):
                    if name:
                        values[name] = result
            position = part.rest
        return [values[n] for n in (self.wanted if wanted is None else wanted)]

    # ------------------------------------------------------------ planning
    def _part(self, position: Position, values: Mapping[str, Any],
              weights: Mapping[str, np.ndarray]) -> Part:
        types: dict[str, TensorType] = {}
        for name in position.reads:
            type = type_of(values.get(name)) if name not in weights else None
            if type is not None:
                types[name] = type
        while True:
            contents = position.contents & types.keys()
            key = (tuple(types.items()), tuple((n, values[n].tobytes()) for n in sorted(contents)))
            part = position.plans.get(key)
            if part is not None:
                return part
            imported = self._import(position, types, values, contents, weights)
            more = {n for n in imported.needed & types.keys() - contents
                    if values[n].nbytes <= _LARGEST_KEY}
            if not more:
                break
            position.contents |= more
        part = self._plan(position, imported, values)
        while len(position.plans) >= _MOST_PLANS:
            position.plans.pop(next(iter(position.plans)), None)
        position.plans[key] = part
        return part

    def _import(self, position: Position, types: Mapping[str, TensorType],
                values: Mapping[str, Any], contents: Iterable[str],
                weights: Mapping[str, np.ndarray]) -> Imported:
        known = {**weights, **{n: np.asarray(values[n]) for n in contents}}
        return import_nodes(position.nodes, self.setting.opsets,
                            {n: t for n, t in types.items() if n not in known}, known,
                            self.wanted, self.name, self.setting.where)

    def _plan(self, position: Position, imported: Imported, values: Mapping[str, Any]) -> Part:
        executable = None
        if imported.outputs:
            executable = self.setting.compile(imported.graph)
        available = {*values, *imported.outputs, *imported.constants}
        host: list[tuple[Any, HostStep]] = []
        left: list[Numbered] = []
        stuck = ""
        for number, node in position.nodes:
            reason = imported.put_off.get(number)
            if reason is None:
                continue
            if reason.startswith("needs the value") and _contents_appear(
                    imported.needed, values, {*imported.outputs, *imported.constants}) and (
                    all(n in available for n in needed_names(node))):
                left.append((number, node))  # compiles once those contents are there
                continue
            if all(n in available for n in needed_names(node)):
                # What reads its outputs is left: once they are there, it may well compile.
                host.append((node, host_step(node, reason, self)))
            else:
                stuck = stuck or f"{node_text(node)} {reason}"
                left.append((number, node))
        if left and not host and executable is None and not imported.constants:
            raise UnsupportedOperator(f"the model cannot go on: {stuck}", where=self.setting.where)
        return Part(imported, executable, host,
                    position_of(left, self.wanted) if left else None)


def _contents_appear(needed: Iterable[str], values: Mapping[str, Any], made: set[str]) -> bool:
    return any(n in made and n not in values for n in needed)
