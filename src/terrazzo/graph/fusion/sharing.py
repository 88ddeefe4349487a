"""The second pass of fusion: which stages share a loop, and so a kernel.

Stages over the same elements share a loop (a pointwise cluster); stages over the same rows share a
loop over rows, and the row stays in the cache (a cluster of rows). A cluster ends where it has
grown long enough, so that compiling stays linear in the length of a program: what comes after a
kernel, down to LLVM, has steps that are not linear in one kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from terrazzo.base.scalar import cost, loads
from terrazzo.base.shapes import num_elements
from terrazzo.expr.direction import reduces_columns
from terrazzo.expr.ir import Tensor, reads
from terrazzo.expr.limits import FusionLimits
from terrazzo.graph.fusion.groups import Group, root_of
from terrazzo.graph.fusion.reading import has_reduce, row_prefix
from terrazzo.graph.fusion.stages import Stage, Staged
from terrazzo.index import Index


@dataclass(eq=False)
class Cluster:
    """A kernel in the making: stages that share their loops, or a whole kernel.

    Sets of clusters are integers with a bit for each: sets of what a cluster depends on grow with
    the program, and so they cost a thousandth of what sets of objects cost.
    """

    bits: int  # the cluster itself, and those that were merged into it
    stages: list[Tensor] = field(default_factory=list)
    whole: Group | None = None
    prefix: tuple[Index, ...] | None = None  # rows; None while it is pointwise
    contracts: bool = False
    columns: bool = False  # reduces down columns, in vectors of columns: no row is done at once
    length: int = 0  # additions for one element of each stage
    largest: int = -1  # elements of the largest tensor of known size that it reads or makes
    reads: dict[Tensor, None] = field(default_factory=dict)
    depends: int = 0  # the clusters that have to run before it
    readers: list[Cluster] = field(default_factory=list)  # those that read it directly

    @property
    def has_reduce(self) -> bool:
        return self.prefix is not None

    def follow(self, others: int) -> None:
        """Depend on more clusters; so do all that depend on this one."""
        todo = [(self, others)]
        while todo:
            cluster, more = todo.pop()
            more &= ~(cluster.depends | cluster.bits)
            if more:
                cluster.depends |= more
                todo += [(reader, more) for reader in cluster.readers]


class Clusters:
    """All kernels in the making, each after those that make what it reads."""

    def __init__(self, staged: Staged):
        self.staged = staged
        self._maker: dict[Tensor, Cluster] = {}  # of stages and of what whole kernels make
        self._clusters: dict[Cluster, None] = {}
        self._count = 0

    def __iter__(self) -> Iterator[Cluster]:
        return iter(self._clusters)

    def __contains__(self, cluster: Cluster) -> bool:
        return cluster in self._clusters

    def add(self, reads: Sequence[Tensor], makes: Sequence[Tensor], **fields: Any) -> Cluster:
        """A new cluster after those that make what it reads."""
        cluster = Cluster(1 << self._count, reads=dict.fromkeys(reads), **fields)
        self._count += 1
        self._clusters[cluster] = None
        for maker in self.makers(cluster):
            maker.readers.append(cluster)
            cluster.follow(maker.bits | maker.depends)
        self._maker.update(dict.fromkeys(makes, cluster))
        return cluster

    def makers(self, cluster: Cluster) -> list[Cluster]:
        """The clusters that make what a cluster reads."""
        placed = self.staged.placed
        found: dict[Cluster, None] = {}
        for tensor in cluster.reads:
            if tensor in placed.values:
                tensor = placed.tensors[root_of(placed.values[tensor], placed.aliases)]
            if tensor in self._maker:
                found[self._maker[tensor]] = None
        return list(found)

    def producers(self, stage: Tensor) -> list[Cluster]:
        """The clusters that make what a stage reads as it lies, the last one first."""
        found = [self._maker[s] for s in reads(stage) if s in self._maker]
        return list(dict.fromkeys(reversed(found)))

    def merge(self, first: Cluster, second: Cluster) -> Cluster:
        """Make `second` a part of `first`."""
        for maker in self.makers(second):
            if maker is not first:
                maker.readers.append(first)
        first.bits |= second.bits
        first.stages += second.stages
        first.reads |= second.reads
        first.prefix = first.prefix if first.prefix is not None else second.prefix
        first.length += second.length
        first.largest = max(first.largest, second.largest)
        first.depends &= ~first.bits
        first.follow(second.depends)
        for stage in second.stages:
            self._maker[stage] = first
        del self._clusters[second]
        first.readers += [r for r in second.readers if r is not first]
        for reader in second.readers:
            reader.follow(first.bits | first.depends)
        return first

    def ordered(self) -> list[Cluster]:
        """Clusters in an order in which every one follows those it reads."""
        order: dict[Cluster, None] = {}
        stack = [(c, False) for c in reversed(self._clusters)]
        while stack:
            cluster, expanded = stack.pop()
            if cluster in order:
                continue
            if expanded:
                order[cluster] = None
                continue
            stack.append((cluster, True))
            stack += [(maker, False) for maker in self.makers(cluster)
                      if maker is not cluster and maker not in order]
        return list(order)


def share_loops(staged: Staged, limits: FusionLimits) -> Clusters:
    """Stages and whole kernels as clusters, those of the same elements or rows together."""
    clusters = Clusters(staged)
    for part in staged.parts:
        if isinstance(part, Group):
            tensors = staged.placed.tensors
            clusters.add([tensors[v] for v in part.inputs], [tensors[v] for v in part.outputs],
                         whole=part)
        else:
            _add_stage(part, clusters, limits)
    return clusters


def _add_stage(part: Stage, clusters: Clusters, limits: FusionLimits) -> None:
    stage = part.tensor
    assert stage.body is not None
    reduces, sources = has_reduce(stage), reads(stage)
    sizes = [num_elements(t.shape) for t in (stage, *sources)]
    cluster = clusters.add(
        sources, [stage], stages=[stage], prefix=row_prefix(stage.shape) if reduces else None,
        contracts=part.contracts, columns=reduces and reduces_columns(stage),
        length=cost(stage.body) + len(loads(stage.body)),
        largest=max((n for n in sizes if isinstance(n, int)), default=-1))
    if part.node.op.kind == "contract" or part.contracts:
        return
    for other in clusters.producers(stage):
        if other is not cluster and _can_merge(other, cluster, clusters, limits):
            cluster = clusters.merge(other, cluster)


def _can_merge(first: Cluster, second: Cluster, clusters: Clusters, limits: FusionLimits) -> bool:
    """Whether `second`, which reads `first`, may share its loop."""
    if first.whole is not None or first.contracts or second.contracts:
        return False
    if first.columns or second.columns:
        return False
    if long_enough(first, second, limits):
        return False
    if any(d.depends & first.bits for d in clusters.makers(second) if d not in (first, second)):
        return False  # something of its own runs between the two
    one, other = first.stages[0].shape, second.stages[0].shape
    if not first.has_reduce and not second.has_reduce:
        rows = other
    else:
        prefixes = {c.prefix for c in (first, second) if c.prefix is not None}
        if len(prefixes) != 1:
            return False
        (rows,) = prefixes
        if not rows_pay(rows, max(first.largest, second.largest), limits):
            return False
    # Inside of each, all stages have the same rows, and read each other in place.
    rank = len(rows)
    return one[:rank] == rows == other[:rank] and (
        first.has_reduce or second.has_reduce or one == other) and all(
        _reads_in_place(s, rank, cluster.stages)
        for reader, cluster in ((first, second), (second, first))
        if not reader.reads.keys().isdisjoint(cluster.stages) for s in reader.stages)


def _reads_in_place(stage: Tensor, rank: int, inside: Sequence[Tensor]) -> bool:
    """Whether a stage reads others of the cluster only at its own first `rank` indices."""
    assert stage.body is not None
    for load in loads(stage.body):
        if load.source not in inside:
            continue
        for d in range(rank):
            index = load.indices[d]
            if index is not stage.axes[d].var and not (
                    isinstance(index, int) and stage.shape[d] == 1):
                return False
    return True


def long_enough(first: Cluster, second: Cluster, limits: FusionLimits) -> bool:
    """Whether a kernel had better end here, and `second` begin another."""
    stages = len(first.stages) + len(second.stages)
    return stages > limits.stages or first.length + second.length > limits.length or (
        stages > limits.stages // 2 and len(second.reads) == 1)


def rows_pay(prefix: tuple[Index, ...], largest: int, limits: FusionLimits) -> bool:
    """Whether there are rows for all cores, or so little to do that one core does it all."""
    rows = num_elements(prefix)
    return 0 <= largest <= limits.alone or not isinstance(rows, int) or rows >= limits.rows
