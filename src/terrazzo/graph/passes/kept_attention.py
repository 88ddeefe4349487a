"""Attention whose gradient is asked for too: the forward pass keeps what the gradient starts from.

The gradient's rule asks for attention with the log-sum-exp of each row. Where the same attention is
in the graph without it, one kernel answers both.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from terrazzo.graph.ir import Graph, Node, Value
from terrazzo.graph.passes.cse import frozen
from terrazzo.graph.rebuild import rebuild
from terrazzo.graph.rewrite import Applied, describe

PLAIN, LONGER = "scaled_dot_product_attention", "attention_with_logsumexp"


def attention_kept(graph: Graph, keeps: Callable[[Node], bool], log: list[Applied] | None = None
                   ) -> Graph:
    """Attention is computed once, for a chip that has kernels for the nodes that `keeps` names."""
    longer = {_key(n): n for n in graph.nodes if n.op.name == LONGER and keeps(n)}
    both = {_key(n) for n in graph.nodes if n.op.name == PLAIN} & longer.keys()
    made: dict[Hashable, tuple[Value, ...]] = {}

    def visit(node: Node, inputs: tuple[Value | None, ...]) -> tuple[Value, ...] | None:
        if node.op.name not in (PLAIN, LONGER) or _key(node) not in both:
            return None
        twin = longer[_key(node)]
        if _key(node) not in made:  # where the first of the two stands
            padded = (*inputs, *[None] * (len(twin.inputs) - len(inputs)))
            made[_key(node)] = Node(twin.op, padded, twin.attrs, twin.types, node.where).outputs
        if node.op.name == LONGER:
            return made[_key(node)]
        if log is not None:
            log.append(Applied("attention kept for its gradient", describe(node), node.where))
        return made[_key(node)][:1]

    return rebuild(graph, visit) if both else graph


def _key(node: Node) -> Hashable:
    mask = node.inputs[3] if len(node.inputs) > 3 else None
    return (*map(id, node.inputs[:3]), id(mask)), tuple(
        (name, frozen(node.attrs[name])) for name in sorted(node.attrs))
