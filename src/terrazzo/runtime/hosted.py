"""Runs graphs with control flow: compiled pieces, and the host between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from terrazzo.graph.evaluate import bind_dims, run_node
from terrazzo.graph.ir import Graph, Node, TensorType, Value


def on_host(node: Node) -> bool:
    """Whether a node has neither expression nor loops, so that Python has to run it."""
    op = node.op
    return op.expr is None and op.loops is None and op.body is None and op.kind != "attention"


def needs_host(graph: Graph) -> bool:
    """Whether any operator of a graph runs on the host."""
    return any(on_host(node) for node in graph.nodes)


class HostedExecutable:
    """A graph cut at the operators that the host runs; everything between is compiled."""

    def __init__(self, graph: Graph, compile_graph: Callable[[Graph], Any]):
        self.graph, self.name = graph, graph.name
        self.steps: list[tuple[Any, tuple[Value, ...], tuple[Value, ...]]] = []
        self.compile = compile_graph
        self._cut()

    def _cut(self) -> None:
        known: set[Value] = set(self.graph.inputs)
        pending: list[Value] = []
        for node in self.graph.nodes:
            if on_host(node):
                self._segment([v for v in node.inputs if v is not None], known)
                self.steps.append((node, tuple(v for v in node.inputs if v is not None),
                                   node.outputs))
                known |= set(node.outputs)
        self._segment([*pending, *self.graph.outputs], known)

    def _segment(self, wanted: Sequence[Value], known: set[Value]) -> None:
        """Compile what is needed for some values from those already known."""
        missing = tuple(dict.fromkeys(v for v in wanted if v not in known))
        if not missing:
            return
        leaves = _leaves(missing, known)
        stand_ins = {v: Value(v.type, name=v.name or f"v{i}") for i, v in enumerate(leaves)}
        graph = Graph(f"{self.name}_{len(self.steps)}", tuple(leaves), missing)
        outputs = _copy(graph, stand_ins)
        piece = Graph(graph.name, tuple(stand_ins.values()), outputs)
        self.steps.append((self.compile(piece), tuple(leaves), missing))
        known |= set(missing)

    def run(self, arrays: Sequence[Any]) -> list[Any]:
        """The outputs for the given inputs."""
        torch_like = next((a for a in arrays if hasattr(a, "data_ptr")), None)
        host = [a.detach().cpu().numpy() if hasattr(a, "data_ptr") else np.asarray(a)
                for a in arrays]
        dims = bind_dims(self.graph, host)
        memory: dict[Value, Any] = dict(zip(self.graph.inputs, host, strict=True))
        for step, inputs, outputs in self.steps:
            values = [memory[v] for v in inputs]
            results = (run_node(step, values, dims) if isinstance(step, Node)
                       else step.run(values))
            memory.update(zip(outputs, results, strict=True))
        results = [memory[v] for v in self.graph.outputs]
        if torch_like is not None:
            import torch

            return [torch.from_numpy(np.ascontiguousarray(r)) for r in results]
        return results

    def __call__(self, *arrays: Any) -> Any:
        results = self.run(arrays)
        return results[0] if len(results) == 1 else tuple(results)


def _leaves(wanted: Sequence[Value], known: set[Value]) -> list[Value]:
    found: dict[Value, None] = {}
    seen: set[Value] = set()
    stack = list(wanted)
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        if value in known or value.node is None:
            found.setdefault(value)
        else:
            stack.extend(v for v in value.node.inputs if v is not None)
    return list(found)


def _copy(graph: Graph, table: dict[Value, Value]) -> tuple[Value, ...]:
    """The outputs of a graph whose leaves are replaced."""
    values = dict(table)
    stack = list(graph.outputs)
    while stack:
        value = stack[-1]
        if value in values:
            stack.pop()
            continue
        node = value.node
        assert node is not None
        missing = [v for v in node.inputs if v is not None and v not in values]
        if missing:
            stack.extend(missing)
            continue
        inputs = tuple(None if v is None else values[v] for v in node.inputs)
        fresh = Node(node.op, inputs, node.attrs, node.types, node.where)
        values.update(zip(node.outputs, fresh.outputs, strict=True))
    return tuple(values[v] for v in graph.outputs)


__all__ = ["HostedExecutable", "TensorType", "needs_host"]
