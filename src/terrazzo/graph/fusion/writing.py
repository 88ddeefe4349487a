"""The end of fusion: clusters as programs, in the order they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from terrazzo.base.scalar import Load, Scalar, rewrite
from terrazzo.expr.ir import Program, Tensor, reads
from terrazzo.graph.fusion.groups import Fused, Group, ordered, root_of
from terrazzo.graph.fusion.reading import has_reduce
from terrazzo.graph.fusion.sharing import Cluster, Clusters
from terrazzo.graph.fusion.stages import Staged
from terrazzo.graph.ir import Value


def written(clusters: Clusters) -> Fused:
    """The groups of a fused graph."""
    staged = clusters.staged
    readers: dict[Tensor, list[Cluster]] = {}
    for cluster in clusters:
        for source in cluster.reads:
            readers.setdefault(source, []).append(cluster)
    wanted = _wanted(clusters)
    groups = []
    for cluster in clusters.ordered():
        results = {s for s in cluster.stages if staged.placed.values[s] in wanted
                   or any(c is not cluster for c in readers.get(s, ()))}
        groups.append(cluster.whole or _group(cluster, results, staged))
    # What is read only by tensors without elements is read by nobody.
    return Fused(staged.uses.graph, tuple(g for g in groups if g.outputs), staged.placed.aliases,
                 staged.placed.constants)


def _wanted(clusters: Clusters) -> set[Value]:
    """What whole kernels, aliases and the caller want in memory."""
    aliases, outputs = clusters.staged.placed.aliases, clusters.staged.uses.outputs
    inputs = {v for c in clusters if c.whole is not None for v in c.whole.inputs}
    return {root_of(v, aliases) for v in (*inputs, *outputs, *aliases)}


def _group(cluster: Cluster, leaving: set[Tensor], staged: Staged) -> Group:
    placed = staged.placed
    stages = _topological(cluster.stages)
    results = [s for s in stages if s in leaving]
    inside = _needed_for(results, stages)
    stages = [s for s in stages if s in inside]
    inputs = list(dict.fromkeys(r for s in stages for r in reads(s) if r not in inside))
    # Inside the program, tensors of other kernels are inputs without a body.
    table = {t: Tensor(t.name, t.shape, t.dtype, strides=t.strides) for t in inputs}
    reduces = any(has_reduce(s) for s in stages)
    kind = "contraction" if cluster.contracts else "rows" if reduces else "pointwise"
    attrs = {"rows": len(cluster.prefix)} if reduces and cluster.prefix is not None else {}
    nodes = tuple(dict.fromkeys(staged.node_of[s] for s in cluster.stages))
    name = "_".join(dict.fromkeys(n.op.name for n in nodes))[:48]
    rebound = _rebound(stages, table)
    program = Program(placed.names.fresh(f"k_{name}"), tuple(table[t] for t in inputs),
                      tuple(rebound), tuple(table[s] for s in results), kind, attrs)
    return Group(program, tuple(placed.values[t] for t in inputs),
                 tuple(placed.values[s] for s in results), nodes)


def _topological(stages: Sequence[Tensor]) -> list[Tensor]:
    """Stages in their order, but for those that have to wait for a later one."""
    place = {s: i for i, s in enumerate(stages)}
    return [stages[i] for i in ordered([
        {place[r] for r in reads(s) if r in place} for s in stages])]


def _needed_for(results: Sequence[Tensor], stages: Sequence[Tensor]) -> set[Tensor]:
    """The stages that results are made of: places along an axis of one element read nothing."""
    known, needed = set(stages), set(results)
    for stage in reversed(stages):
        if stage in needed:
            needed.update(known.intersection(reads(stage)))
    return needed


def _rebound(stages: Sequence[Tensor], table: dict[Tensor, Tensor]) -> list[Tensor]:
    """Stages whose loads go to the tensors of `table`, which grows by the new stages."""

    def visit(node: Scalar) -> Scalar | None:
        if isinstance(node, Load) and node.source in table:
            return Load(node.dtype, table[node.source], node.indices)
        return None

    fresh = []
    for stage in stages:
        assert stage.body is not None
        table[stage] = replace(stage, body=rewrite(stage.body, visit))
        fresh.append(table[stage])
    return fresh
