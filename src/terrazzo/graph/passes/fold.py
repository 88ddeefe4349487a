"""What depends on constants only is computed at compile time, by the operators' references."""

from __future__ import annotations

import math

import numpy as np

from terrazzo.graph.evaluate import run_node
from terrazzo.graph.ir import Graph, Node, TensorType, Value, constant
from terrazzo.graph.rewrite import Applied, constant_array, describe, sweep
from terrazzo.index import IndexExpr

SMALL = 4096  # bytes; a result up to this size may be larger than what it is computed from


def fold_constants(graph: Graph, log: list[Applied] | None = None, *,
                   limit: int = 1 << 28) -> Graph:
    """Replace nodes whose inputs are all constants by constants of at most `limit` bytes.

    A constant never grows by folding, unless it stays small: weights stay as narrow as they were
    stored, and what is spread out or counted up is cheaper computed than read from memory. A
    large matrix that only products read stays as it lies: they take any order of its axes.
    """
    others = {v for node in graph.nodes if node.op.kind != "contract" for v in node.inputs}
    others.update(graph.outputs)

    def visit(node: Node) -> tuple[Value, ...] | None:
        if node.op.name == "permute_dims" and _bytes(node.types[0]) > SMALL and (
                node.outputs[0] not in others):
            return None
        arrays = [constant_array(v) for v in node.inputs if v is not None]
        inputs = [a for a in arrays if a is not None]
        if len(inputs) < len(arrays) or not _worthwhile(node, inputs, limit):
            return None
        results = iter(inputs)
        given = [None if v is None else next(results) for v in node.inputs]
        with np.errstate(all="ignore"):
            values = run_node(node, given, {})
        if log is not None:
            log.append(Applied("fold constants", describe(node), node.where))
        return tuple(constant(v.reshape(t.shape), t.dtype) for v, t in zip(values, node.types))

    return sweep(graph, visit)


def _worthwhile(node: Node, inputs: list[np.ndarray], limit: int) -> bool:
    if node.op.name == "constant" or node.op.effects or _is_symbolic(node):
        return False
    size = sum(map(_bytes, node.types))
    if not inputs:  # a range or a filled tensor is code, not data; a number is a number
        return all(t.shape == () for t in node.types)
    return size <= SMALL or size <= min(limit, sum(a.nbytes for a in inputs))


def _is_symbolic(node: Node) -> bool:
    def symbolic(value: object) -> bool:
        if isinstance(value, (tuple, list)):
            return any(map(symbolic, value))
        return isinstance(value, (IndexExpr, Graph))

    return any(map(symbolic, node.attrs.values())) or any(symbolic(t.shape) for t in node.types)


def _bytes(type: TensorType) -> int:
    return math.prod(n for n in type.shape if isinstance(n, int)) * type.dtype.itemsize
