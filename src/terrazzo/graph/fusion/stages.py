"""What the first pass of fusion makes of a graph: stages, whole kernels, and where values lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from terrazzo.expr.ir import Tensor
from terrazzo.graph.fusion.groups import Group
from terrazzo.graph.ir import Graph, Node, Value
from terrazzo.index import Index


class Names:
    """Gives out names, each once."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def fresh(self, base: str) -> str:
        """The base itself, or with a number after it."""
        base = "".join(c if c.isalnum() or c == "_" else "_" for c in base)
        count = self._counts.get(base, 0)
        self._counts[base] = count + 1
        return base if count == 0 else f"{base}_{count}"


@dataclass(frozen=True, eq=False)
class Uses:
    """Who reads what in a graph."""

    graph: Graph

    @cached_property
    def outputs(self) -> frozenset[Value]:
        """What the caller wants."""
        return frozenset(self.graph.outputs)

    @cached_property
    def consumers(self) -> Mapping[Value, list[Node]]:
        """The nodes that read a value, in order; nothing where none does."""
        found: dict[Value, list[Node]] = {}
        for node in self.graph.nodes:
            for value in dict.fromkeys(v for v in node.inputs if v is not None):
                found.setdefault(value, []).append(node)
        return found

    @cached_property
    def order(self) -> Mapping[Node, int]:
        """The place of each node."""
        return {node: i for i, node in enumerate(self.graph.nodes)}


@dataclass(frozen=True, eq=False)
class Placed:
    """Values as kernels see them: under which names, by which strides, in whose memory."""

    strides: Mapping[Value, tuple[Index, ...]]  # of inputs that are not row major
    names: Names = field(default_factory=Names)
    tensors: dict[Value, Tensor] = field(default_factory=dict)
    values: dict[Tensor, Value] = field(default_factory=dict)
    aliases: dict[Value, Value] = field(default_factory=dict)  # reshaped -> as it was stored
    constants: dict[Value, Any] = field(default_factory=dict)

    def see(self, value: Value, tensor: Tensor) -> None:
        """From here on, a value is this tensor."""
        self.tensors[value], self.values[tensor] = tensor, value

    def place(self, value: Value, base: str) -> Tensor:
        """A value that lies in memory when its consumers run."""
        tensor = Tensor(self.names.fresh(base), value.shape, value.dtype,
                        strides=self.strides.get(value))
        self.see(value, tensor)
        return tensor


class Stage(NamedTuple):
    """A value that is stored, or kept in a loop, with all that was composed into it."""

    tensor: Tensor
    node: Node
    contracts: bool  # whether it is a product or a convolution, which has a kernel of its own


@dataclass(frozen=True, eq=False)
class Staged:
    """A graph as stages and whole kernels, each after those it reads."""

    uses: Uses
    placed: Placed
    parts: tuple[Stage | Group, ...]

    @cached_property
    def node_of(self) -> Mapping[Tensor, Node]:
        """The operator that a stage ends with."""
        return {p.tensor: p.node for p in self.parts if isinstance(p, Stage)}
