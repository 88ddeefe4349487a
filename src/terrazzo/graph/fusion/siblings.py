"""The third pass of fusion: kernels that read the same large tensor read it once.

Only those whose results go to the caller, or are small: others would have to be kept for as long as
the last of them is needed.
"""

from __future__ import annotations

from terrazzo.base.shapes import num_elements
from terrazzo.expr.ir import Tensor
from terrazzo.expr.limits import FusionLimits
from terrazzo.graph.fusion.sharing import Cluster, Clusters, long_enough, rows_pay


def merge_siblings(clusters: Clusters, limits: FusionLimits) -> None:
    """Merge kernels of the same elements or rows that share nothing but what they read."""
    by_source: dict[Tensor, list[Cluster]] = {}
    for cluster in clusters:
        for source in cluster.reads if _may_have_siblings(cluster, clusters, limits) else ():
            if _is_large(source, limits):
                by_source.setdefault(source, []).append(cluster)
    for readers in by_source.values():
        for i, first in enumerate(readers):
            # Those that come next, so that many readers of one tensor take no square of time.
            for second in readers[i + 1:i + limits.siblings]:
                if first in clusters and second in clusters and (
                        are_siblings(first, second, limits)):
                    clusters.merge(first, second)


def _may_have_siblings(cluster: Cluster, clusters: Clusters, limits: FusionLimits) -> bool:
    if cluster.whole is not None or cluster.contracts or cluster.columns:
        return False
    staged = clusters.staged
    return all(not _is_large(s, limits) or staged.placed.values[s] in staged.uses.outputs
               for s in cluster.stages)


def are_siblings(first: Cluster, second: Cluster, limits: FusionLimits) -> bool:
    """Whether two kernels that wait for nothing of each other may share a loop."""
    if first.has_reduce != second.has_reduce or first.prefix != second.prefix or (
            first.depends & second.bits or second.depends & first.bits):
        return False
    if long_enough(first, second, limits) or (
            len(first.stages) + len(second.stages) > limits.siblings):
        return False
    if first.prefix is not None:
        return rows_pay(first.prefix, max(first.largest, second.largest), limits)
    return first.stages[0].shape == second.stages[0].shape


def _is_large(tensor: Tensor, limits: FusionLimits) -> bool:
    """Whether reading a tensor once more costs as much as a kernel."""
    size = num_elements(tensor.shape)
    return not isinstance(size, int) or size >= limits.shared
