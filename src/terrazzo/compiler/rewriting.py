"""What is done to a graph before it is divided into kernels."""

from __future__ import annotations

from terrazzo.compiler.options import Options
from terrazzo.graph.ir import Graph
from terrazzo.graph.passes import canonicalize, prepared
from terrazzo.graph.rewrite import Applied, Pass


def inlined(graph: Graph, log: list[Applied] | None = None, options: Options | None = None,
            trail: list[Pass] | None = None) -> Graph:
    """A graph of primitives and of those composite operators that have a kernel of their own."""
    guide = (options or Options.now()).guide
    return prepared(graph, guide, [] if log is None else log, trail)


def rewriting(graph: Graph, options: Options | None = None) -> list[Pass]:
    """The steps by which a graph is rewritten when it is compiled."""
    options = options or Options.now()
    trail: list[Pass] = []
    for _ in range(2):  # once for the cache key, and once more when it is lowered
        graph = inlined(graph, None, options, trail)
    canonicalize(graph, options.guide, trail)
    return trail
