"""Rewrites of whole graphs, one a file; `canonicalize` runs them until nothing changes."""

from terrazzo.graph.ir import Graph
from terrazzo.graph.passes.algebra import RULES, algebra
from terrazzo.graph.passes.cse import common_subexpressions
from terrazzo.graph.passes.fold import fold_constants
from terrazzo.graph.passes.inline import inline_composites
from terrazzo.graph.rewrite import Applied

__all__ = ["RULES", "algebra", "canonicalize", "common_subexpressions", "fold_constants",
           "inline_composites"]


def canonicalize(graph: Graph, level: str = "all") -> tuple[Graph, list[Applied]]:
    """The graph in primitive operators, constants folded, each thing once, algebra applied."""
    log: list[Applied] = []
    while True:
        before = len(log)
        graph = inline_composites(graph, log)
        graph = fold_constants(graph, log)
        graph = common_subexpressions(graph, log)
        graph = algebra(graph, log, level)
        if len(log) == before:
            return graph, log
