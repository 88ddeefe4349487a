"""The way from L1 to L2: which operators become one kernel, and the tensor expressions of each.

Three passes, and the programs written down:

| `composing` | what is computed inside of its readers; what is left are *stages* |
| `sharing` | stages over the same elements, or the same rows, share a loop |
| `siblings` | kernels that read the same large tensor, and nothing of each other, read it once |
| `writing` | programs, in the order they run |

Nothing here knows a chip: sizes at which fusion stops paying are limits that a chip hands down.
"""

from __future__ import annotations

from collections.abc import Mapping

from terrazzo.expr.limits import FusionLimits
from terrazzo.graph.fusion.composing import compose
from terrazzo.graph.fusion.groups import Fused, Group, readers_first
from terrazzo.graph.fusion.reading import takes_strides
from terrazzo.graph.fusion.sharing import share_loops
from terrazzo.graph.fusion.siblings import merge_siblings
from terrazzo.graph.fusion.writing import written
from terrazzo.graph.ir import Graph, Value
from terrazzo.index import Index

__all__ = ["DOING_NOTHING", "Fused", "Group", "fuse", "readers_first", "takes_strides"]

# The passes by their names for people, and the limits under which each does nothing: the blame of
# `verify` leaves them out one by one, the last one first.
DOING_NOTHING: tuple[tuple[str, Mapping[str, int]], ...] = (
    ("composing of values into their readers", {"operations": 0}),
    ("sharing of loops", {"stages": 1}),
    ("merging of siblings", {"siblings": 0}),
)


def fuse(graph: Graph, limits: FusionLimits, *,
         strides: Mapping[Value, tuple[Index, ...]] | None = None) -> Fused:
    """Divide a graph into kernels; `strides` says which inputs are not row major."""
    clusters = share_loops(compose(graph, limits, strides or {}), limits)
    merge_siblings(clusters, limits)
    return written(clusters)
