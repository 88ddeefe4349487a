"""Matrix products as exporters surround them, and several of one input merged into a wider one.

A layer of more than two axes comes as a product of merged rows between two reshapes, which part the
product from what follows it; without them it is computed as the product is stored.

Projections to queries, keys and values read the same rows. As one product they are one kernel with
work for all threads; attention reads its parts of the result by strides. Constant biases are joined
too, so that they are still added where the product is stored. (Four layers of BERT's size took 3 to
8 % less processor time with two threads for 1 to 384 rows, on a busy machine with two cores; with
one thread the difference was within the noise.)
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from terrazzo.dtypes import as_dtype
from terrazzo.graph.applying import constant
from terrazzo.graph.ir import Graph, Node, Value
from terrazzo.graph.passes.parts import op, operands
from terrazzo.graph.patterns import P, constant_array, same_shape, wildcards
from terrazzo.graph.rebuild import rebuild
from terrazzo.graph.rewrite import LEVELS, Applied, Rule, RuleTable, describe
from terrazzo.graph.scopes import trace_scope
from terrazzo.index import proves_eq
from terrazzo.ops.shape import span

x, w, y = wildcards("x w y")

LEVEL = "extended"
NAME = "parallel products merged"
# What may read a part of a wider product. Arithmetic is better off with a product of its own, which
# then computes it as it stores.
_VIEWS = frozenset({"reshape", "permute_dims", "slice", "scaled_dot_product_attention",
                    "attention_with_logsumexp", "attention_gradients"})


# ---------------------------------------------------------------- rows between reshapes
def _rows_as_they_were(x: Value, w: Value, bias: Value | None, product: Value, node: Node
                       ) -> Value | None:
    """reshape(reshape(x) @ w + bias) that only takes rows apart is x @ w + bias of such rows."""
    made, shape = product.node, node.types[0].shape
    assert made is not None and made.inputs[0] is not None
    size = made.inputs[0].shape[-1]
    if w.ndim != 2 or made.attrs.get("transpose_x") or (
            bias is not None and bias.ndim > 1) or len(shape) < 2 or (
            not proves_eq(shape[-1], product.shape[-1])):
        return None
    rows = (*shape[:-1], size)
    if x.ndim and proves_eq(x.shape[-1], size) and not same_shape(x.shape, rows):
        return None  # this reshape is needed, and is better off behind the product
    fresh = op(made.op.name, op("reshape", x, shape=rows), w, **made.attrs)
    return fresh if bias is None else op("add", fresh, bias)


_flat = P.one_of("matmul", "batch_matmul")(P.reshape(x), w).named("product").once()

PRODUCTS = RuleTable((
    Rule("rows of a product as they were", P.reshape(_flat),
         lambda x, w, product, node: _rows_as_they_were(x, w, None, product, node), LEVEL),
    Rule("rows of a product with a bias as they were", P.reshape(P.add(_flat, y).once()),
         lambda x, w, y, product, node: _rows_as_they_were(x, w, y, product, node), LEVEL),
))


# ---------------------------------------------------------------- products of one input
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
    """Products that gain by being merged, in the order of the graph."""
    readers: dict[Value, list[Node]] = {v: [] for v in graph.inputs}
    for node in graph.nodes:
        readers.update((v, []) for v in node.outputs)
        for value in operands(node):
            readers[value].append(node)
    wanted = set(graph.outputs)
    found = (_product(node, readers) for node in graph.nodes)
    return [p for p in found if p is not None and p.result not in wanted and all(
        reader.op.name in _VIEWS for reader in readers[p.result])]


def _product(node: Node, readers: Mapping[Value, Sequence[Node]]) -> _Product | None:
    """A product with weights that nothing else reads: others would have them in memory twice."""
    if node.op.name not in ("matmul", "batch_matmul") or node.attrs.get("transpose_x"):
        return None
    x, w = operands(node)
    weight, result = constant_array(w), node.outputs[0]
    if weight is None or weight.ndim != 2 or x.ndim < 2 or len(readers[w]) > 1 or (
            x.dtype is not w.dtype or not x.dtype.is_float):
        return None
    weight = weight.T if node.attrs.get("transpose_y") else weight
    for added in readers[result] if len(readers[result]) == 1 else ():
        for bias in map(constant_array, operands(added) if added.op.name == "add" else ()):
            if bias is not None and bias.shape == weight.shape[1:]:
                return _Product(node, weight, bias, added.outputs[0])
    return _Product(node, weight, None, result)


def _merged(group: Sequence[_Product], x: Value) -> Mapping[Value, Value]:
    """What replaces the results of a group: slices of one product."""
    with trace_scope():
        whole = op("batch_matmul", x, _joined([p.weight for p in group]))
        if group[0].bias is not None:
            whole = op("add", whole, _joined([p.bias for p in group if p.bias is not None]))
        cuts = pairwise(accumulate((p.weight.shape[1] for p in group), initial=0))
        return {p.result: span(whole, -1, a, b) for p, (a, b) in zip(group, cuts, strict=True)}


def _joined(arrays: Sequence[np.ndarray]) -> Value:
    joined = np.concatenate(arrays, axis=-1)
    joined.flags.writeable = False  # so that the graph need not copy it
    return constant(joined, as_dtype(joined.dtype))
