"""What the tests of patterns share: tracing, and comparing a graph before and after rewrites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from terrazzo.dtypes import as_dtype
from terrazzo.graph import evaluate
from terrazzo.graph.ir import Graph, TensorType
from terrazzo.graph.passes.recognize import opened
from terrazzo.graph.rewrite import RuleTable, rewrite
from terrazzo.graph.trace import trace


def graph_of(function: Callable[..., Any], *arrays: np.ndarray) -> Graph:
    """A function of arrays like these, as the graph that rules meet."""
    return opened(trace(function, [TensorType(a.shape, as_dtype(a.dtype)) for a in arrays])[0])


def operators(graph: Graph) -> list[str]:
    """The operators of a graph in order, without literals."""
    return [n.op.name for n in graph.nodes if n.op.name != "constant"]


def agree(before: Graph, after: Graph, arrays: list[np.ndarray], *, roundings: float = 4) -> None:
    """Both graphs are about as near to the true result; `after` may be off by some roundings.

    A rounding is a unit in the last place of the largest number in the result.
    """
    (exact,) = evaluate.run(before, arrays, wide=True)
    (old,), (new,) = evaluate.run(before, arrays), evaluate.run(after, arrays)
    assert new.dtype == old.dtype and new.shape == old.shape
    unit = float(as_dtype(new.dtype).eps) * np.abs(exact).max(initial=1.0)
    error = np.abs(new.astype(np.float64) - exact).max(initial=0.0)
    allowed = np.abs(old.astype(np.float64) - exact).max(initial=0.0) + roundings * unit
    assert error <= allowed, f"off by {error / unit:.1f} roundings, before {allowed / unit:.1f}"


def rewritten(rules: RuleTable, function: Callable[..., Any], *arrays: np.ndarray,
              roundings: float = 4) -> tuple[Graph, set[str]]:
    """The graph after its rewrites, which agrees with the one before, and the rules that fired."""
    before = graph_of(function, *arrays)
    after, applied = rewrite(before, rules)
    agree(before, after, list(arrays), roundings=roundings)
    return after, {a.rule for a in applied}
