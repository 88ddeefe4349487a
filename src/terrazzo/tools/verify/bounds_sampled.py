"""Bounds of operators that no rule is for: errors are tried out."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from terrazzo.graph.ir import Node
from terrazzo.index import Var
from terrazzo.tools.verify.bounded import Bounded, accumulated, deviation, finite, growth, run_wide

_SAMPLES = 4


def sampled(node: Node, inputs: list[Bounded | None], values: list[np.ndarray],
            dims: Mapping[Var, int]) -> list[np.ndarray]:
    """Any other operator: errors of random sign are tried (Monte Carlo arithmetic, Parker).

    Integers made from inexact numbers are decisions, of which samples miss some: all stay open.
    """
    errors = [np.zeros(v.shape) for v in values]
    given = [b for b in inputs if b is not None]
    if not all(b.exact for b in given):
        if any(not np.isfinite(b.error).all() for b in given) or any(
                b.value.dtype.kind != "f" and not b.exact for b in given) or not all(
                t.dtype.is_float for t in node.types):
            return [np.full(v.shape, np.inf) for v in values]
        rng = np.random.default_rng(len(given))
        for _ in range(_SAMPLES):
            moved = [b if b is None or b.exact else
                     b.value + b.error * rng.choice([-1.0, 1.0], b.value.shape) for b in inputs]
            other = run_wide(node, [m.value if isinstance(m, Bounded) else m for m in moved], dims)
            errors = [np.maximum(e, deviation(o, v)) for e, o, v in zip(errors, other, values)]
        errors = [_SAMPLES * e for e in errors]
    if any(t.dtype.is_float for t in node.types) and node.op.kind in ("opaque", "reduce",
                                                                      "contract"):
        sizes = [None if b is None else finite(b.value) if b.value.dtype.kind == "f" else b.value
                 for b in inputs]
        count = max((b.value.size for b in given), default=1)
        for i, (magnitude, type) in enumerate(zip(run_wide(node, sizes, dims), node.types)):
            if type.dtype.is_float:
                # Such operators may keep partial results in memory, in the type of the result.
                size = finite(magnitude)
                errors[i] = errors[i] + accumulated(size, np.zeros(()), count, type.dtype) + (
                    growth(count) * type.dtype.eps * size)
    return errors
