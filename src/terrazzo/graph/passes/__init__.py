"""Rewrites of whole graphs, one a file; `canonicalize` runs them until nothing changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from terrazzo.graph.ir import Graph, Node, Value
from terrazzo.graph.passes.algebra import RULES, algebra
from terrazzo.graph.passes.cse import common_subexpressions
from terrazzo.graph.passes.fold import fold_constants
from terrazzo.graph.passes.inline import inline_composites
from terrazzo.graph.passes.layout import layout, permuted_elements
from terrazzo.graph.passes.quantized import quantized
from terrazzo.graph.rewrite import Applied, Pass, RuleTable, sweep, user_rules

__all__ = ["RULES", "algebra", "canonicalize", "common_subexpressions", "fold_constants",
           "inline_composites", "layout", "quantized"]


def canonicalize(graph: Graph, level: str = "all", added: RuleTable | None = None,
                 trail: list[Pass] | None = None) -> tuple[Graph, list[Applied]]:
    """The graph in primitive operators, constants folded, each thing once, algebra applied.

    `added` are rules of the user's, by default all that there are now. Graphs inside
    nodes (branches, bodies of loops) are brought to the same form. What each step made is added
    to `trail`.
    """
    added = user_rules() if added is None else added
    log: list[Applied] = []
    moved: float = math.inf  # elements that permutes move since layouts were last chosen
    while True:
        before = len(log)
        for name, step, countable in _steps(level, added):
            applied: list[Applied] = []
            made = step(graph, applied)
            if trail is not None:
                trail.append(Pass(name, graph, made, applied, partial(
                    _partly, step, graph) if countable else None))
            graph = made
            log += applied
        applied = []
        chosen = layout(graph, applied, level)
        if applied and (now := permuted_elements(chosen)) < moved:
            if trail is not None:
                trail.append(Pass("choice of layouts", graph, chosen, applied))
            graph, moved = chosen, now
            log += applied
        if len(log) == before:
            return _canonicalize_inside(graph, level, added, log), log


_Step = Callable[..., Graph]


def _steps(level: str, added: RuleTable) -> tuple[tuple[str, _Step, bool], ...]:
    """What is done in turn, and whether it can be stopped after some of its rewrites."""
    return (
        ("inlining of operators", inline_composites, False),
        # Before weights are folded back into floats.
        ("quantised rewrites", partial(quantized, level=level), True),
        ("folding of constants", fold_constants, False),
        ("common subexpressions", common_subexpressions, False),
        ("algebra", partial(algebra, level=level, added=added), True),
    )


def _partly(step: _Step, graph: Graph, most: int) -> Graph:
    return step(graph, most=most)


def _canonicalize_inside(graph: Graph, level: str, added: RuleTable, log: list[Applied]
                         ) -> Graph:
    done: dict[Graph, Graph] = {}

    def visit(node: Node) -> tuple[Value, ...] | None:
        held = {k: v for k, v in node.attrs.items() if isinstance(v, Graph)}
        if all(g in done.values() for g in held.values()):
            return None
        for g in held.values():
            if g not in done:
                done[g], applied = canonicalize(g, level, added)
                log.extend(applied)
        attrs = {**node.attrs, **{k: done[g] for k, g in held.items()}}
        return Node(node.op, node.inputs, attrs, node.types, node.where).outputs

    return sweep(graph, visit)
