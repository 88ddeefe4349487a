"""Operators that exporters took apart, put together again, so that chips can run them whole."""

from __future__ import annotations

from terrazzo.graph.ir import Graph
from terrazzo.graph.passes.attention import ATTENTION
from terrazzo.graph.passes.inline import inline_composites
from terrazzo.graph.rewrite import Applied, RuleTable, rewrite

PATTERNS: RuleTable = ATTENTION


def recognize(graph: Graph, log: list[Applied] | None = None, level: str = "all") -> Graph:
    """The graph with known patterns replaced by the operators they stand for.

    Users' operators are opened first; ours stay whole, as the patterns are made of them.
    """
    graph = inline_composites(graph, log, whole=lambda node: node.op.family != "user")
    graph, applied = rewrite(graph, PATTERNS, level)
    if log is not None:
        log.extend(applied)
    return graph
