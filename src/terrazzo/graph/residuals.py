"""What a backward pass keeps of the forward pass, and what it rather computes again.

Every value that the backward pass wants is kept, which costs moving its bytes twice, or computed
again, which costs its arithmetic and wants the values that it is computed from. The cheapest choice
for all together is a minimum cut. So results of products are kept, and chains of cheap arithmetic
are not; of a reduction, which is small and was long to compute, the result is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from terrazzo.base.scalar import OPS
from terrazzo.base.shapes import Shape, num_elements
from terrazzo.graph.ir import Graph, Node, Value
from terrazzo.graph.min_cut import Network
from terrazzo.graph.passes.inline import inline_composites
from terrazzo.index import evaluate, free_vars

# All costs are in additions of float32. Zen 4 does 83 a ns on two cores and moves 36 bytes.
_BYTE = 5.0  # for a byte to memory or from it: fresh memory is dearer than what is in the caches
_UNKNOWN = 64  # what a symbolic size is taken for
_OPAQUE = 200.0  # for an element of a sort, a scatter, a loop
_WINDOW = 9.0  # for an element of a pooling
# The names of scalar arithmetic where an operator has another one.
_SCALAR_NAMES = {"divide": "div", "power": "pow", "floor_divide": "floordiv", "remainder": "mod"}


def worth_keeping(forward: Graph, backward: Graph, handing_on: float = 0.0,
                  largest: float = math.inf, stored: Sequence[Value] = ()) -> list[Value]:
    """Values of `forward` to hand to `backward`, which is made of values of `forward` too.

    `handing_on` is what each costs beside its bytes; none may have more than `largest` bytes; those
    in `stored` are in memory anyway.
    """
    own = set(forward.nodes)
    network = Network()
    makers: dict[Node, int] = {}  # on the sink's side: computed again
    results: dict[Value, int] = {}  # on the sink's side: wanted
    given, final = set(forward.inputs), set(stored)
    for node in backward.nodes:
        for value in node.inputs:
            if value is None or value.node not in own or value in given:
                continue
            end = _number(makers, node, network) if node in own else 1
            network.edge(_number(results, value, network), end, math.inf)
    for value in backward.outputs:
        if value.node in own and value not in given:
            network.edge(_number(results, value, network), 1, math.inf)
    for value, number in results.items():
        assert value.node is not None
        size = likely_count(value.shape) * value.dtype.itemsize
        price = handing_on + _BYTE * size * (1 if value in final else 2)
        network.edge(_number(makers, value.node, network), number,
                     price if size <= largest else math.inf)
    for node, number in makers.items():
        network.edge(0, number, recomputing(node))
    again = network.sink_side()
    return [v for v, number in results.items()
            if number in again and v.node is not None and makers[v.node] not in again]


_Key = TypeVar("_Key", Node, Value)


def _number(table: dict[_Key, int], key: _Key, network: Network) -> int:
    if key not in table:
        table[key] = network.node()
    return table[key]


# ---------------------------------------------------------------- what arithmetic costs
def recomputing(node: Node) -> float:
    """What it costs to compute a node's results once more."""
    if node.op.body is not None:
        fresh = [None if v is None else Value(v.type) for v in node.inputs]
        alone = Node(node.op, tuple(fresh), node.attrs, node.types)
        inside = inline_composites(Graph(node.op.name, tuple(v for v in fresh if v is not None),
                                         alone.outputs), whole=lambda n: n.op.kind == "attention")
        if not any(n.op is node.op for n in inside.nodes):
            return sum(map(recomputing, inside.nodes))
    values = [v for v in node.inputs if v is not None]
    if not values:
        return 0.0
    made = sum(likely_count(t.shape) for t in node.types)
    scale = max(max(t.dtype.itemsize for t in node.types) / 4, 1.0)
    match node.op.kind:
        case "pointwise":
            name = _SCALAR_NAMES.get(node.op.name, node.op.name)
            return made * scale * (OPS[name].cost if name in OPS else 1)
        case "reduce":
            return sum(likely_count(v.shape) * (scale + _BYTE * v.dtype.itemsize) for v in values)
        case "contract":
            return made * scale * _depth(node)
        case "attention":
            return made * scale * 2 * likely_count(values[1].shape[-2:-1])
        case _:
            return _OPAQUE * (made + sum(likely_count(v.shape) for v in values))


def _depth(node: Node) -> float:
    """Multiplications for one element of a contraction."""
    x, *others = (v for v in node.inputs if v is not None)
    if node.op.name in ("batch_matmul", "float8_matmul", "integer_matmul"):
        return likely_count(x.shape[-2:-1] if node.attrs.get("transpose_x") else x.shape[-1:])
    if not others:
        return _WINDOW
    return likely_count(others[0].shape) / max(likely_count(node.types[0].shape[-1:]), 1)


def likely_count(shape: Shape) -> float:
    size = num_elements(shape)
    return float(size) if isinstance(size, int) else float(
        evaluate(size, {v.name: _UNKNOWN for v in free_vars(size)}))
