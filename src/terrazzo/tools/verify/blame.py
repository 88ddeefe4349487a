"""Finds the rewrite that changed the value of a graph.

The steps of rewriting are taken again and each graph in between is evaluated. The first step that
changes a value is to blame; where it is made of many rewrites, halving finds the one at which the
value goes wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from terrazzo.compiler.rewriting import rewriting
from terrazzo.graph.ir import Graph, Value
from terrazzo.graph.rewrite import Pass
from terrazzo.tools.verify import error_bounds
from terrazzo.tools.verify.bounded import Bounded
from terrazzo.tools.verify.comparison import Difference, compare


def apart(graph: Graph, arrays: Sequence[np.ndarray], outputs: Sequence[Bounded]
         ) -> Difference | None:
    """Where a rewritten graph computes something else than the graph it came from."""
    memory = error_bounds.run(graph, arrays)
    with np.errstate(all="ignore"):
        return _first_apart(graph, memory, outputs)


def _first_apart(graph: Graph, memory: Mapping[Value, Bounded], outputs: Sequence[Bounded]
                ) -> Difference | None:
    for value, before in zip(graph.outputs, outputs, strict=True):
        after = memory[value]
        both = Bounded(before.value, before.error + after.error)
        difference = compare(after.value.astype(value.dtype.np), both, value.dtype)
        if difference.index is not None:
            return difference
    return None


def culprit(graph: Graph, arrays: Sequence[np.ndarray], outputs: Sequence[Bounded]
           ) -> tuple[str, str]:
    """The rewrite that changes the value of a graph, and the line of the user's that it changed."""
    for step in rewriting(graph):
        if apart(step.after, arrays, outputs) is not None:
            return _within(step, arrays, outputs)
    return "the rewrites together", ""


def _within(step: Pass, arrays: Sequence[np.ndarray], outputs: Sequence[Bounded]
           ) -> tuple[str, str]:
    if not step.applied or step.partly is None:
        node = f" on {step.applied[0].node}" if len(step.applied) == 1 else ""
        return f"{step.name}{node}", step.applied[0].where if node else ""
    good, bad = 0, len(step.applied)
    while bad - good > 1:
        middle = (good + bad) // 2
        if apart(step.partly(middle), arrays, outputs) is None:
            good = middle
        else:
            bad = middle
    guilty = step.applied[bad - 1]
    return f"rewrite rule {guilty.rule!r} on {guilty.node} ({step.name})", guilty.where
