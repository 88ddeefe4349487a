"""Error bounds through control flow: the graphs inside are followed as they would run.

A decision on a value that may be off leaves all results open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from terrazzo.graph.evaluate import concrete
from terrazzo.graph.ir import Graph, Node
from terrazzo.index import Var

Follow = Callable[[Graph, Sequence[Any], Mapping[Var, int]], Mapping[Any, Any]]


class _Undecided(Exception):
    """A decision that two faithful computations may take differently."""


def bounds(node: Node, inputs: Sequence[Any], dims: Mapping[Var, int], follow: Follow,
           bounded: Callable[[np.ndarray, np.ndarray], Any]) -> list[Any] | None:
    """The results of a control-flow node with their bounds; None where they are open."""

    def run(graph: Graph, given: Sequence[Any]) -> list[Any]:
        memory = follow(graph, given, dims)
        return [memory[v] for v in graph.outputs]

    def decide(truth: Any) -> bool:
        if truth.error.any():
            raise _Undecided
        return bool(truth.value)

    try:
        if node.op.name == "cond":
            chosen = "then_graph" if decide(inputs[0]) else "else_graph"
            return run(node.attrs[chosen], inputs[1:])
        if node.op.name == "while_loop":
            count = node.attrs["carries"]
            state, rest = list(inputs[:count]), list(inputs[count:])
            while decide(run(node.attrs["cond_graph"], state + rest)[0]):
                state = run(node.attrs["body_graph"], state + rest)
            return state
        return _scan(node, inputs, dims, run, bounded)
    except _Undecided:
        return None


def _scan(node: Node, inputs: Sequence[Any], dims: Mapping[Var, int],
          run: Callable[[Graph, Sequence[Any]], list[Any]],
          bounded: Callable[[np.ndarray, np.ndarray], Any]) -> list[Any]:
    carries, sequences = node.attrs["carries"], node.attrs["sequences"]
    state, xs = list(inputs[:carries]), inputs[carries:carries + sequences]
    length = int(concrete(node.attrs["length"], dims))
    rows: list[list[Any]] = [[None] * length for _ in node.types[carries:]]
    for k in range(length)[::-1 if node.attrs["reverse"] else 1]:
        now = [bounded(np.asarray(x.value[k]), np.asarray(x.error[k])) for x in xs]
        results = run(node.attrs["body"], [*state, *now, *inputs[carries + sequences:]])
        state = results[:carries]
        for row, result in zip(rows, results[carries:], strict=True):
            row[k] = result
    stacked = []
    for row, type in zip(rows, node.types[carries:], strict=True):
        if not row:
            shape = concrete(type.shape, dims)
            kind = np.dtype(np.float64) if type.dtype.is_float else type.dtype.np
            stacked.append(bounded(np.zeros(shape, kind), np.zeros(shape)))
        else:
            stacked.append(bounded(np.stack([r.value for r in row]),
                                   np.stack([r.error for r in row])))
    return [*state, *stacked]
