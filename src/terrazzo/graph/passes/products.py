"""Parallel matrix products of one input with constant weights, merged into one wider product.

Projections to queries, keys and values read the same rows. As one product they are packed once and
make larger tiles; what follows reads its part of the result by strides. Constant biases are joined
too, so that they are still added where the product is stored.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from terrazzo.graph.ir import Graph, Node, Value, constant, rebuild, trace_scope
from terrazzo.graph.passes.parts import made_by, op, operands
from terrazzo.graph.rewrite import LEVELS, Applied, constant_array, describe, use_counts
from terrazzo.ops.shape import span

LEVEL = "extended"
NAME = "parallel products merged"


@dataclass(frozen=True, eq=False)
class _Product:
    """A product with constant weights, and the constant bias that is added to it, if any."""

    node: Node
    weight: np.ndarray  # [inputs, outputs]
    bias: np.ndarray | None
    result: Value  # with the bias

    @property
    def joins(self) -> Hashable:
        """Equal for products that may be merged."""
        return id(operands(self.node)[0]), self.weight.dtype.str, self.bias is None


def merge_products(graph: Graph, log: list[Applied] | None = None, level: str = "all") -> Graph:
    """The graph with products of one input and constant weights merged."""
    if LEVELS.index(level) < LEVELS.index(LEVEL):
        return graph
    groups: dict[Hashable, list[_Product]] = {}
    for product in _products(graph):
        groups.setdefault(product.joins, []).append(product)
    groups = {key: group for key, group in groups.items() if len(group) > 1}
    together = {p.result: p.joins for group in groups.values() for p in group}
    products = {p.node: p.joins for group in groups.values() for p in group}
    parts: dict[Value, Value] = {}
    rebuilt: dict[Hashable, Value | None] = {}  # the input of each group in the new graph

    def visit(node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value] | None:
        if node in products:
            rebuilt[products[node]] = inputs[0]
        result = node.outputs[0]
        if result not in together:
            return None
        key = together[result]
        x = rebuilt[key]
        if result not in parts and x is not None:
            parts.update(_merged(groups[key], x))
            if log is not None:
                log.extend(Applied(NAME, describe(p.node), p.node.where) for p in groups[key])
        return (parts[result],)

    return rebuild(graph, visit) if groups else graph


def _products(graph: Graph) -> list[_Product]:
    """Products with weights that nothing else reads, in the order of the graph."""
    uses = use_counts(graph)
    readers = {v: node for node in graph.nodes for v in node.inputs if v is not None}
    found = []
    for node in graph.nodes:
        if node.op.name not in ("matmul", "batch_matmul") or node.attrs.get("transpose_x"):
            continue
        x, w = operands(node)
        weight, result = constant_array(w), node.outputs[0]
        if weight is None or weight.ndim != 2 or x.ndim < 2 or uses[w] > 1 or (
                x.dtype is not w.dtype or not x.dtype.is_float):
            continue
        weight = weight.T if node.attrs.get("transpose_y") else weight
        added = made_by(readers[result].outputs[0], "add") if uses.get(result) == 1 and (
            result in readers) else None
        bias = None if added is None else next((a for a in map(constant_array, operands(added))
                                                if a is not None), None)
        if added is not None and bias is not None and bias.shape == weight.shape[1:]:
            result = added.outputs[0]
        else:
            bias = None
        found.append(_Product(node, weight, bias, result))
    return found


def _merged(group: Sequence[_Product], x: Value) -> Mapping[Value, Value]:
    """What replaces the results of a group: slices of one product."""
    first = group[0].node.types[0].dtype
    with trace_scope():
        whole = op("batch_matmul", x, constant(
            np.concatenate([p.weight for p in group], axis=1), first))
        if group[0].bias is not None:
            whole = op("add", whole, constant(
                np.concatenate([p.bias for p in group if p.bias is not None]), first))
        cuts = pairwise(accumulate((p.weight.shape[1] for p in group), initial=0))
        return {p.result: span(whole, -1, a, b) for p, (a, b) in zip(group, cuts, strict=True)}
