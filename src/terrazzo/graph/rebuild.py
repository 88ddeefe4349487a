"""Graphs made of graphs: rebuilt node by node, applied to other values, cut at leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from terrazzo.graph.ir import Graph, Node, Value


def rebuild(graph: Graph, visit: Callable[[Node, tuple[Value | None, ...]],
                                          Sequence[Value] | None]) -> Graph:
    """Copy a graph node by node; `visit` may answer with other values for a node's outputs."""
    table: dict[Value, Value] = {}
    for node in graph.nodes:
        inputs = tuple(None if v is None else table.get(v, v) for v in node.inputs)
        answer = visit(node, inputs)
        if answer is None:
            if all(a is b for a, b in zip(inputs, node.inputs, strict=True)):
                continue
            answer = Node(node.op, inputs, node.attrs, node.types, node.where).outputs
        table.update(zip(node.outputs, answer, strict=True))
    outputs = tuple(table.get(v, v) for v in graph.outputs)
    return Graph(graph.name, graph.inputs, outputs)


def replace_inputs(graph: Graph, values: Sequence[Value]) -> tuple[Value, ...]:
    """The outputs of a graph applied to other values: inlining."""
    table = dict(zip(graph.inputs, values, strict=True))
    for node in graph.nodes:
        inputs = tuple(None if v is None else table.get(v, v) for v in node.inputs)
        if all(a is b for a, b in zip(inputs, node.inputs, strict=True)):
            continue
        fresh = Node(node.op, inputs, node.attrs, node.types, node.where).outputs
        table.update(zip(node.outputs, fresh, strict=True))
    return tuple(table.get(v, v) for v in graph.outputs)


def computed_from(outputs: Sequence[Value], leaves: Mapping[Value, Value]) -> tuple[Value, ...]:
    """Values computed from other leaves; what lies behind the leaves is cut off."""
    nodes: dict[Node, None] = {}
    stack = [(v.node, False) for v in outputs if v not in leaves and v.node is not None]
    while stack:
        node, ready = stack.pop()
        if node in nodes:
            continue
        if ready:
            nodes.setdefault(node)
            continue
        stack.append((node, True))
        stack.extend((v.node, False) for v in node.inputs
                     if v is not None and v not in leaves and v.node is not None)
    table = dict(leaves)
    for node in nodes:
        inputs = tuple(None if v is None else table[v] for v in node.inputs)
        fresh = Node(node.op, inputs, node.attrs, node.types, node.where)
        table.update(zip(node.outputs, fresh.outputs, strict=True))
    return tuple(table[v] for v in outputs)
