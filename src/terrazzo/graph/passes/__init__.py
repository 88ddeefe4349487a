"""Rewrites of whole graphs, one a file, and the two lists by which they are driven.

`PREPARING` brings a graph as it was written to the operators that a chip has kernels for;
`REPEATED` runs until nothing changes. The compiler, the log of rewrites and the blame of `verify`
all go by these lists: a new pass is a file and a line here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from terrazzo.graph.ir import Graph, Node
from terrazzo.graph.passes.algebra import RULES, algebra
from terrazzo.graph.passes.complex_views import in_parts
from terrazzo.graph.passes.cse import common_subexpressions
from terrazzo.graph.passes.float8 import float8_products
from terrazzo.graph.passes.fold import fold_constants
from terrazzo.graph.passes.inline import in_bodies, inline_composites
from terrazzo.graph.passes.kept_attention import attention_kept
from terrazzo.graph.passes.layout import layout, permuted_elements
from terrazzo.graph.passes.products import merge_products
from terrazzo.graph.passes.quantized import quantized
from terrazzo.graph.passes.recognize import opened, recognized
from terrazzo.graph.rewrite import Applied, Pass, RuleTable, user_rules

__all__ = ["PREPARING", "REPEATED", "RULES", "Guide", "Step", "algebra", "attention_kept",
           "canonicalize", "common_subexpressions", "fold_constants", "inline_composites",
           "layout", "prepared", "quantized"]


@dataclass(frozen=True, eq=False)
class Guide:
    """What passes go by."""

    level: str = "all"
    rules: RuleTable = field(default_factory=user_rules)  # those that users added
    keeps: Callable[[Node], bool] = lambda node: node.op.keep_whole
    """Which composite operators the chip runs whole."""


class Step(NamedTuple):
    """A pass in a list: its name for people, and what it does with a graph, a guide and a log."""

    name: str
    run: Callable[..., Graph]
    stops: bool = False  # whether it takes `most`, and ends after so many of its rewrites
    measure: Callable[[Graph], float] | None = None  # repeated only where this becomes less


PREPARING = (
    Step("opening of operators", lambda graph, guide, log: opened(graph, log)),
    Step("recognition of patterns", lambda graph, guide, log, **most: recognized(
        graph, log, guide.level, **most), stops=True),
    Step("merging of products", lambda graph, guide, log: merge_products(graph, log, guide.level)),
    Step("inlining of operators", lambda graph, guide, log: inline_composites(
        graph, log, whole=guide.keeps)),
    Step("graphs inside of operators", lambda graph, guide, log: in_bodies(
        graph, lambda body: prepared(body, guide, log))),
    Step("complex numbers in parts", lambda graph, guide, log: in_parts(graph)),
)
REPEATED = (
    Step("inlining of operators", lambda graph, guide, log: inline_composites(
        graph, log, whole=guide.keeps)),
    # Before weights are folded back into floats.
    Step("quantised rewrites", lambda graph, guide, log, **most: quantized(
        graph, log, guide.level, **most), stops=True),
    Step("products of 8-bit floats", lambda graph, guide, log: float8_products(
        graph, guide.keeps, log, guide.level)),
    Step("folding of constants", lambda graph, guide, log: fold_constants(graph, log)),
    Step("common subexpressions", lambda graph, guide, log: common_subexpressions(graph, log)),
    Step("attention with its gradient", lambda graph, guide, log: attention_kept(
        graph, guide.keeps, log)),
    Step("algebra", lambda graph, guide, log, **most: algebra(
        graph, log, guide.level, guide.rules, **most), stops=True),
    Step("choice of layouts", lambda graph, guide, log: layout(graph, log, guide.level),
         measure=permuted_elements),
)


def prepared(graph: Graph, guide: Guide, log: list[Applied], trail: list[Pass] | None = None
             ) -> Graph:
    """A graph of primitives and of those composite operators that the chip keeps whole."""
    for step in PREPARING:
        graph = _done(step, graph, guide, log, trail, {})
    return graph


def canonicalize(graph: Graph, guide: Guide | None = None, trail: list[Pass] | None = None
                 ) -> tuple[Graph, list[Applied]]:
    """The graph in primitive operators, constants folded, each thing once, algebra applied.

    Graphs inside nodes (branches, bodies of loops) are brought to the same form. What each step
    made is added to `trail`.
    """
    guide = guide or Guide()
    log: list[Applied] = []
    least: dict[str, float] = {}
    while True:
        before = len(log)
        for step in REPEATED:
            graph = _done(step, graph, guide, log, trail, least)
        if len(log) == before:
            return _inside_too(graph, guide, log), log


def _done(step: Step, graph: Graph, guide: Guide, log: list[Applied], trail: list[Pass] | None,
          least: dict[str, float]) -> Graph:
    applied: list[Applied] = []
    made = step.run(graph, guide, applied)
    if step.measure is not None:
        now = step.measure(made) if applied else math.inf
        if now >= least.get(step.name, math.inf):
            return graph
        least[step.name] = now
    if trail is not None:
        trail.append(Pass(step.name, graph, made, applied, partial(
            _partly, step, graph, guide) if step.stops else None))
    log += applied
    return made


def _partly(step: Step, graph: Graph, guide: Guide, most: int) -> Graph:
    return step.run(graph, guide, [], most=most)


def _inside_too(graph: Graph, guide: Guide, log: list[Applied]) -> Graph:
    done: dict[Graph, Graph] = {}  # what two nodes share stays shared

    def change(body: Graph) -> Graph:
        if body not in done:
            done[body], applied = canonicalize(body, guide)
            log.extend(applied)
        return done[body]

    return in_bodies(graph, change)
