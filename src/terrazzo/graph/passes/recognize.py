"""Operators that exporters took apart, put together again, so that chips can run them whole."""

from __future__ import annotations

from terrazzo.graph.ir import Graph
from terrazzo.graph.passes.attention import ATTENTION
from terrazzo.graph.passes.convolution import CONVOLUTION
from terrazzo.graph.passes.cse import common_subexpressions
from terrazzo.graph.passes.gelu import GELU
from terrazzo.graph.passes.inline import inline_composites
from terrazzo.graph.passes.norms import NORMS
from terrazzo.graph.passes.products import merge_products
from terrazzo.graph.passes.rotary import ROTARY
from terrazzo.graph.rewrite import Applied, RuleTable, rewrite

PATTERNS: RuleTable = NORMS + GELU + ROTARY + CONVOLUTION + ATTENTION


def recognize(graph: Graph, log: list[Applied] | None = None, level: str = "all") -> Graph:
    """The graph with known patterns replaced by the operators they stand for.

    Users' operators are opened first; ours stay whole, as the patterns are made of them. Exporters
    write the same thing twice here and there (a mean, a slice), and patterns name it once.
    """
    graph = inline_composites(graph, log, whole=lambda node: node.op.family != "user")
    graph = common_subexpressions(graph, log)
    graph, applied = rewrite(graph, PATTERNS, level)
    if log is not None:
        log.extend(applied)
    return merge_products(graph, log, level)
