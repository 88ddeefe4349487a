"""Operators that exporters took apart, put together again, so that chips can run them whole."""

from __future__ import annotations

from terrazzo.graph.ir import Graph
from terrazzo.graph.passes.attention import ATTENTION
from terrazzo.graph.passes.convolution import CONVOLUTION
from terrazzo.graph.passes.cse import common_subexpressions
from terrazzo.graph.passes.gelu import GELU
from terrazzo.graph.passes.inline import inline_composites
from terrazzo.graph.passes.movement import UNCHANGED
from terrazzo.graph.passes.norms import NORMS
from terrazzo.graph.passes.products import PRODUCTS
from terrazzo.graph.passes.rotary import ROTARY
from terrazzo.graph.rewrite import Applied, RuleTable, rewrite

PATTERNS: RuleTable = UNCHANGED + NORMS + GELU + ROTARY + CONVOLUTION + PRODUCTS + ATTENTION
_OPENED = frozenset({"user", "shape", "elementwise"})


def opened(graph: Graph, log: list[Applied] | None = None) -> Graph:
    """A graph in the words that patterns are written in.

    Users' operators are opened, and those that only move data or abbreviate arithmetic; the others
    stay whole. What exporters write twice (a mean, a slice) becomes one value.
    """
    graph = inline_composites(graph, log, whole=lambda node: node.op.family not in _OPENED)
    return common_subexpressions(graph, log)


def recognized(graph: Graph, log: list[Applied] | None = None, level: str = "all",
               most: int | None = None) -> Graph:
    """The graph, once opened, with known patterns replaced by the operators they stand for."""
    graph, applied = rewrite(graph, PATTERNS, level, most=most)
    if log is not None:
        log += applied
    return graph
