"""Composite operators become their bodies, except those that a chip runs as a whole."""

from __future__ import annotations

from collections.abc import Callable

from terrazzo.graph.applying import expand
from terrazzo.graph.ir import Graph, Node, Value
from terrazzo.graph.rebuild import rebuild
from terrazzo.graph.rewrite import Applied, describe, sweep


def inline_composites(graph: Graph, log: list[Applied] | None = None, *,
                      whole: Callable[[Node], bool] | None = None) -> Graph:
    """Expand composite operators, and those in their bodies; nodes that `whole` names are kept.

    Without `whole`, operators that say `keep_whole` are.
    """
    keep = whole or (lambda node: node.op.keep_whole)

    def visit(node: Node) -> tuple[Value, ...] | None:
        if node.op.body is None or keep(node):
            return None
        if log is not None:
            log.append(Applied("inline composites", describe(node), node.where))
        return expand(node.op, node.inputs, node.attrs)

    return sweep(graph, visit)


def in_bodies(graph: Graph, change: Callable[[Graph], Graph]) -> Graph:
    """The graph with the branches and bodies that its nodes hold changed."""
    def visit(node: Node, inputs: tuple[Value | None, ...]) -> tuple[Value, ...] | None:
        if not any(isinstance(v, Graph) for v in node.attrs.values()):
            return None
        attrs = {k: _changed(v, change) if isinstance(v, Graph) else v
                 for k, v in node.attrs.items()}
        if all(attrs[k] is v for k, v in node.attrs.items()):
            return None
        return Node(node.op, inputs, attrs, node.types, node.where).outputs

    return rebuild(graph, visit)


def _changed(graph: Graph, change: Callable[[Graph], Graph]) -> Graph:
    """The graph itself where nothing changes, so that what was equal stays so."""
    new = change(graph)
    same = [*map(id, new.inputs), *map(id, new.outputs)] == [
        *map(id, graph.inputs), *map(id, graph.outputs)]
    return graph if same else new
