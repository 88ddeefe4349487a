"""Work counts arithmetic on data, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

import terrazzo as tz
from terrazzo.expr.limits import FusionLimits
from terrazzo.expr.work import work
from terrazzo.graph.fusion import fuse
from terrazzo.graph.ir import TensorType
from terrazzo.graph.passes import canonicalize
from terrazzo.graph.trace import trace


@pytest.mark.parametrize(("function", "shapes", "flops"), [
    (lambda x, w: x @ w, [(4, 5), (5, 6)], 2 * 4 * 5 * 6),
    (lambda x, w: tz.conv(x, w, padding=1), [(1, 8, 10, 10), (16, 8, 3, 3)], 2 * 16 * 8 * 9 * 100),
    (lambda x: tz.pad(x, ((1, 1),)) * 2.0, [(8,)], 10),
])
def test_flops(function: Any, shapes: list[tuple[int, ...]], flops: int) -> None:
    graph, _ = trace(function, [TensorType(s, tz.float32) for s in shapes])
    groups = fuse(canonicalize(graph)[0], FusionLimits()).groups
    assert sum(int(work(g.program)[0]) for g in groups) == flops
