"""What depends on constants only is computed at compile time, by the operators' references."""

from __future__ import annotations

import math

import numpy as np

from terrazzo.graph.applying import constant
from terrazzo.graph.evaluate import run_node
from terrazzo.graph.ir import Graph, Node, TensorType, Value
from terrazzo.graph.patterns import constant_array
from terrazzo.graph.rewrite import Applied, describe, sweep
from terrazzo.index import IndexExpr

SMALL = 4096  # bytes; a result up to this size may be larger than what it is computed from
LARGEST_TABLE = 4 << 20  # bytes of what would take a kernel of its own; 0.1 ms from memory


def fold_constants(graph: Graph, log: list[Applied] | None = None, *,
                   limit: int = 1 << 28) -> Graph:
    """Replace nodes whose inputs are all constants by constants of at most `limit` bytes.

    A constant never grows by folding, unless it stays small: weights stay as narrow as they were
    stored, and what is spread out or counted up is cheaper computed than read from memory. Not so
    what takes a kernel of its own, such as a scatter or a product: its result goes through memory
    anyway. A large matrix that only products read stays as it lies: they take any order of its
    axes.
    """
    others = {v for node in graph.nodes if node.op.kind != "contract" for v in node.inputs}
    others.update(graph.outputs)
    known = _Known(limit)

    def visit(node: Node) -> tuple[Value, ...] | None:
        if not known.add(node) or (
                node.op.name == "permute_dims" and _bytes(node.types[0]) > SMALL
                and node.outputs[0] not in others):
            return None
        if not (known.is_table(node) or _worthwhile(node, limit)):
            return None
        with np.errstate(all="ignore"):
            values = known.evaluate(node)
        if log is not None:
            log.append(Applied("fold constants", describe(node), node.where))
        return tuple(constant(v.reshape(t.shape), t.dtype) for v, t in zip(values, node.types))

    return sweep(graph, visit)


class _Known:
    """The values that depend on constants only, and what they are."""

    def __init__(self, limit: int):
        self.limit = min(limit, LARGEST_TABLE)
        self.values: set[Value] = set()
        self.done: dict[Node, list[np.ndarray]] = {}  # so that a long chain is walked once

    def add(self, node: Node) -> bool:
        """Whether a node could be evaluated now; its inputs were asked about before."""
        if node.op.effects or _is_symbolic(node):
            return False
        if not all(v is None or constant_array(v) is not None or v in self.values
                   for v in node.inputs):
            return False
        if all(_bytes(t) <= self.limit for t in node.types):
            self.values.update(node.outputs)
        return node.op.name != "constant"

    def is_table(self, node: Node) -> bool:
        """Whether a node takes a kernel of its own, and its result may be kept instead."""
        return (node.op.kind != "pointwise" or node.op.expr is None) and (
            node.op.reference is not None) and all(v in self.values for v in node.outputs)

    def evaluate(self, node: Node) -> list[np.ndarray]:
        """The outputs of a node, from constants on."""
        if sum(a.nbytes for made in self.done.values() for a in made) > 16 * LARGEST_TABLE:
            self.done.clear()
        todo = [node]
        while todo:
            last = todo[-1]
            missing = [v.node for v in last.inputs if v is not None and v.node is not None
                       and constant_array(v) is None and v.node not in self.done]
            if missing:
                todo += missing
                continue
            self.done[todo.pop()] = run_node(last, [self._array(v) for v in last.inputs], {})
        return self.done.pop(node)

    def _array(self, value: Value | None) -> np.ndarray | None:
        if value is None or value.node is None:
            return None
        array = constant_array(value)
        return self.done[value.node][value.index] if array is None else array


def _worthwhile(node: Node, limit: int) -> bool:
    inputs = [constant_array(v) for v in node.inputs if v is not None]
    arrays = [a for a in inputs if a is not None]
    if len(arrays) < len(inputs):
        return False
    size = sum(map(_bytes, node.types))
    if not inputs:  # a range or a filled tensor is code, not data; a number is a number
        return all(t.shape == () for t in node.types)
    return size <= SMALL or size <= min(limit, sum(a.nbytes for a in arrays))


def _is_symbolic(node: Node) -> bool:
    def symbolic(value: object) -> bool:
        if isinstance(value, (tuple, list)):
            return any(map(symbolic, value))
        return isinstance(value, (IndexExpr, Graph))

    return any(map(symbolic, node.attrs.values())) or any(symbolic(t.shape) for t in node.types)


def _bytes(type: TensorType) -> int:
    return math.prod(n for n in type.shape if isinstance(n, int)) * type.dtype.itemsize
