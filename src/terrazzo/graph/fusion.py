"""The way from L1 to L2: which operators become one kernel, and the tensor expressions of each.

Two decisions, in this order:
1. Inlining. A value is composed into its consumers when nothing else needs it in memory and
   computing it again costs little. What is left are *stages*.
2. Clustering. Stages over the same elements share a loop (a pointwise cluster); stages over the
   same rows share a loop over rows, and the row stays in the cache (a rows cluster).
Contractions take their epilogue along by inlining; attention and opaque operators stand alone.
Nothing here knows a chip: sizes at which sharing stops paying are arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from terrazzo.errors import UnsupportedOperator
from terrazzo.expr.ir import Program, Tensor, inline, reads
from terrazzo.graph.ir import Graph, Node, Value
from terrazzo.index import Index, coefficient, free_vars, substitute
from terrazzo.scalar import Const, Load, Reduce, Scalar, cost, loads, walk
from terrazzo.shapes import contiguous_strides, num_elements

CHEAP = 6  # additions: recomputing this for every consumer is better than a trip through memory
LARGEST = 128  # operations of one element: code for more takes long to compile, and spills
BROADCAST_CHEAP = 2  # the same, once for every element it is broadcast to
SMALL = 1 << 14  # elements: below this, one thread does it all and everything may share a loop
FEW_ROWS = 8  # fewer rows than this leave cores idle
CONVOLUTIONS = ("convolve", "integer_convolve")
CONTRACTIONS = ("matmul", "convolve")  # operators that get a kernel with their epilogue


@dataclass(frozen=True, eq=False)
class Group:
    """One kernel: its program and the graph values its inputs and outputs stand for."""

    program: Program
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    nodes: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Fused:
    """A fused graph: groups in the order they run, and values that are others reshaped."""

    graph: Graph
    groups: tuple[Group, ...]
    aliases: Mapping[Value, Value]  # a reshaped value -> the value whose memory it is
    constants: Mapping[Value, Any]

    def root(self, value: Value) -> Value:
        """The value whose memory a value is."""
        while value in self.aliases:
            value = self.aliases[value]
        return value

    def __str__(self) -> str:
        return "\n\n".join(str(g.program) for g in self.groups)


@dataclass(eq=False)
class _Cluster:
    stages: list[Tensor]
    prefix: tuple[Index, ...] | None = None  # rows; None while it is pointwise
    depends: set[_Cluster] = field(default_factory=set)

    @property
    def has_reduce(self) -> bool:
        return any(has_reduce(s) for s in self.stages)


def has_reduce(tensor: Tensor) -> bool:
    """Whether a stage reduces over anything."""
    return tensor.body is not None and any(isinstance(n, Reduce) for n in walk(tensor.body))


def is_view(body: Scalar) -> bool:
    """Whether an element is just an element of another tensor."""
    return isinstance(body, Load) and not any(isinstance(i, Scalar) for i in body.indices)


def fuse(graph: Graph, *, row_fusion: bool = True,
         strides: Mapping[Value, tuple[Index, ...]] | None = None) -> Fused:
    """Divide a graph into kernels; `strides` says which inputs are not row major."""
    return _Fuser(graph, row_fusion, strides or {}).run()


def takes_strides(graph: Graph, value: Value) -> bool:
    """Whether all that reads an input computes addresses: whole kernels and copies do not."""
    return all(value is not v for v in graph.outputs) and all(
        node.op.expr is not None and node.op.kind in ("pointwise", "reduce")
        for node in graph.nodes if any(value is v for v in node.inputs))


class _Fuser:
    def __init__(self, graph: Graph, row_fusion: bool,
                 strides: Mapping[Value, tuple[Index, ...]]):
        self.graph, self.row_fusion, self.strides = graph, row_fusion, strides
        self.outputs = set(graph.outputs)
        self.consumers: dict[Value, list[Node]] = {}
        for node in graph.nodes:
            for value in dict.fromkeys(v for v in node.inputs if v is not None):
                self.consumers.setdefault(value, []).append(node)
        self.tensors: dict[Value, Tensor] = {}  # a value as others see it
        self.inlined: dict[Tensor, Scalar | None] = {}
        self.value_of: dict[Tensor, Value] = {}
        self.node_of: dict[Tensor, Node] = {}
        self.clusters: dict[Tensor, _Cluster] = {}
        self.behind: dict[Tensor, set[_Cluster]] = {}  # what a standalone kernel's result needs
        self.units: list[_Cluster | Group] = []
        self.aliases: dict[Value, Value] = {}
        self.stored: set[Node] = set()  # permutations that the kernel before them stores by
        self.constants: dict[Value, Any] = {}
        self.names: dict[str, int] = {}
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.epilogue: set[Value] = set()  # between a reduction and where its uses join again
        self.readers: dict[Tensor, list[_Cluster]] = {}  # all stages in the end, by what they read
        self.roots: set[Value] = set()  # what whole kernels, aliases and the caller want in memory

    def name(self, base: str) -> str:
        count = self.names.get(base, 0)
        self.names[base] = count + 1
        return base if count == 0 else f"{base}_{count}"

    # ------------------------------------------------------------ walking the graph
    def run(self) -> Fused:
        for i, value in enumerate(self.graph.inputs):
            self.place(value, self.name(_identifier(value.name) or f"x{i}"))
        for node in self.graph.nodes:
            self.visit(node)
        for cluster in (u for u in self.units if isinstance(u, _Cluster)):
            for source in (r for s in cluster.stages for r in reads(s)):
                self.readers.setdefault(source, []).append(cluster)
        wanted = {v for u in self.units if isinstance(u, Group) for v in u.inputs}
        self.roots |= {self.root(v) for v in (*wanted, *self.outputs, *self.aliases)}
        groups = (u if isinstance(u, Group) else self.group(u) for u in self.ordered())
        # What is read only by tensors without elements is read by nobody.
        return Fused(self.graph, tuple(g for g in groups if g.outputs), self.aliases,
                     self.constants)

    def place(self, value: Value, name: str) -> Tensor:
        """A value that lies in memory when its consumers run."""
        tensor = Tensor(name, value.shape, value.dtype, strides=self.strides.get(value))
        self.tensors[value], self.value_of[tensor] = tensor, value
        return tensor

    def visit(self, node: Node) -> None:
        if node.op.name == "constant" and node.attrs["value"].size != 1:
            self.constants[node.outputs[0]] = node.attrs["value"]
            self.place(node.outputs[0], self.name("constant"))
            return
        if node in self.stored:
            return
        if node.op.expr is None:
            self.standalone(node)
            return
        if node.op.name == "reshape" and self.becomes_alias(node):
            return
        inputs = [None if v is None else self.tensors[v] for v in node.inputs]
        out = node.types if len(node.types) > 1 else node.types[0]
        made = node.op.expr(*inputs, out=out, **node.attrs)
        tensors = made if isinstance(made, tuple) else (made,)
        for value, tensor in zip(node.outputs, tensors, strict=True):
            if value not in self.outputs and value not in self.consumers:
                continue
            body = inline(tensor.body, self.inlined)
            tensor = replace(tensor, name=self.name(_identifier(node.op.name)), body=body,
                             shape=value.shape, dtype=value.dtype,
                             origin=self.origin(tensor.origin or node.op.name, tensor.body))
            self.tensors[value], self.value_of[tensor] = tensor, value
            self.node_of[tensor] = node
            if self.should_inline(value, node, body):
                self.inlined[tensor] = body
            else:
                self.add_stage(tensor, node)

    def origin(self, own: str, body: Scalar | None) -> str:
        """The operators composed into a stage, in order."""
        inner = [load.source.origin for load in loads(body)
                 if load.source in self.inlined] if body is not None else []
        parts = [p for text in inner for p in text.split(", ") if p and p != "constant"]
        return ", ".join(dict.fromkeys([*parts, own]))

    def becomes_alias(self, node: Node) -> bool:
        """A reshape of something in memory is that memory, when its consumers want memory."""
        value, source = node.outputs[0], node.inputs[0]
        assert source is not None
        if value in self.outputs or source in self.strides or (
                self.tensors[source] in self.inlined):
            return False
        wants_memory = any(c.op.expr is None or c.op.kind in ("contract", "attention")
                           for c in self.consumers.get(value, ()))
        if not wants_memory:
            return False
        self.aliases[value] = source
        self.place(value, self.name("reshape"))
        return True

    # ------------------------------------------------------------ inlining
    def should_inline(self, value: Value, node: Node, body: Scalar) -> bool:
        if value in self.outputs or sum(1 for _ in walk(body)) > LARGEST:
            return False
        consumers = self.consumers[value]
        whole = [c for c in consumers if c.op.expr is None]
        if whole and not (all(c.op.kind == "attention" for c in whole)
                          and strided_view(self.tensors[value], body) is not None):
            return False
        if _turns(node) and any(c.op.name in ("place", "reshape") for c in consumers):
            return False
        if is_view(body) and any(c.op.name in CONVOLUTIONS for c in consumers) and (
                not _keeps_axes(self.tensors[value], body)):
            return False
        if isinstance(body, Const) or is_view(body) or value in self.epilogue:
            return True
        reductions = sum(isinstance(n, Reduce) for n in walk(body))
        if reductions:
            return reductions == 1 and self.joins(value) and not self.widens_in_vain(value)
        for consumer in consumers:
            if consumer.op.kind == "contract" or (cost(body) > BROADCAST_CHEAP and (
                    _grows(value, consumer) or _turns(consumer))):
                return False
        uses = len(consumers)
        return uses == 1 or cost(body) <= CHEAP

    def joins(self, value: Value) -> bool:
        """Whether all uses of a reduction's result are one epilogue of the same elements.

        Every path from the value leads through pointwise operators of its shape to one of them,
        which then holds the whole computation, each element of the reduction used where it is
        made. What lies between is marked to be inlined.
        """
        between: dict[Value, None] = {}
        frontier = {n: None for n in self.consumers[value]}
        for _ in range(64):
            node = min(frontier, key=self.order.__getitem__)
            if node.op.kind != "pointwise" or node.op.expr is None or len(
                    node.types) > 1 or node.types[0].shape != value.shape:
                return False
            if any(v is not None and v is not value and v not in between and _has_reduction(
                    self.tensors.get(v), self.inlined) for v in node.inputs):
                return False  # one reduction an epilogue
            if len(frontier) == 1:
                self.epilogue |= set(between)
                return True
            result = node.outputs[0]
            if result in self.outputs or result not in self.consumers:
                return False
            del frontier[node]
            frontier |= {n: None for n in self.consumers[result]}
            between[result] = None
        return False

    def widens_in_vain(self, value: Value) -> bool:
        """Whether a value would only be stored wider than it is, for others to read.

        Bytes that are about to become floats are better stored as bytes, if whoever reads the
        floats can widen the bytes as it reads.
        """
        (consumer, *others) = self.consumers[value]
        result = consumer.outputs[0]
        if others or result.dtype.itemsize <= value.dtype.itemsize or result in self.outputs:
            return False
        readers = self.consumers.get(result, [])
        return all(r.op.kind == "pointwise" and r.op.expr is not None for r in readers) and (
            not self.joins(result))

    # ------------------------------------------------------------ clustering
    def add_stage(self, stage: Tensor, node: Node) -> None:
        cluster = _Cluster([stage])
        if has_reduce(stage):
            cluster.prefix = _row_prefix(stage.shape)
        for source in reads(stage):
            cluster.depends |= self.needs(source)
        self.clusters[stage] = cluster
        self.units.append(cluster)
        if node.op.kind == "contract" or _is_contraction(stage):
            return
        producers = [self.clusters[s] for s in reads(stage) if s in self.clusters]
        for other in dict.fromkeys(reversed(producers)):
            if other is not cluster and self.can_merge(other, cluster):
                cluster = self.merge(other, cluster)

    def needs(self, tensor: Tensor) -> set[_Cluster]:
        """The clusters that have to run before a tensor can be read."""
        if tensor in self.value_of:
            tensor = self.tensors[self.root(self.value_of[tensor])]
        if tensor in self.clusters:
            return {self.clusters[tensor]} | self.clusters[tensor].depends
        return self.behind.get(tensor, set())

    def can_merge(self, first: _Cluster, second: _Cluster) -> bool:
        """Whether `second`, which reads `first`, may share its loop."""
        stages = [*first.stages, *second.stages]
        if any(_is_contraction(s) for s in stages):
            return False
        between = {d for s in second.stages for r in reads(s) if r in self.clusters
                   for d in (self.clusters[r],) if d not in (first, second)}
        if any(first in d.depends for d in between) or any(
                first in self.needs(r) for s in second.stages for r in reads(s)
                if r not in self.clusters):
            return False  # something of its own runs between the two
        if not first.has_reduce and not second.has_reduce:
            shape = second.stages[0].shape
            return all(s.shape == shape for s in stages) and all(
                self.reads_in_place(s, len(shape), set(stages)) for s in stages)
        if not self.row_fusion:
            return False
        prefixes = {c.prefix for c in (first, second) if c.prefix is not None}
        if len(prefixes) != 1:
            return False
        (prefix,) = prefixes
        if not self.rows_pay(prefix, stages):
            return False
        rank = len(prefix)
        return all(s.shape[:rank] == prefix for s in stages) and all(
            self.reads_in_place(s, rank, set(stages)) for s in stages)

    def reads_in_place(self, stage: Tensor, rank: int, inside: set[Tensor]) -> bool:
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

    def rows_pay(self, prefix: tuple[Index, ...], stages: Sequence[Tensor]) -> bool:
        rows = num_elements(prefix)
        sizes = [num_elements(s.shape) for s in stages]
        sizes += [num_elements(r.shape) for s in stages for r in reads(s)]
        known = [n for n in sizes if isinstance(n, int)]
        if known and max(known) <= SMALL:
            return True
        return not isinstance(rows, int) or rows >= FEW_ROWS

    def merge(self, first: _Cluster, second: _Cluster) -> _Cluster:
        first.stages += second.stages
        first.prefix = first.prefix if first.prefix is not None else second.prefix
        first.depends |= second.depends
        first.depends.discard(first)
        for stage in second.stages:
            self.clusters[stage] = first
        self.units.remove(second)
        for needs in self.behind.values():
            if second in needs:
                needs.discard(second)
                needs |= {first} | first.depends
        for unit in self.units:
            if isinstance(unit, _Cluster) and second in unit.depends:
                unit.depends.discard(second)
                unit.depends |= {first} | first.depends
        return first

    # ------------------------------------------------------------ results
    def ordered(self) -> list[_Cluster | Group]:
        """Units in an order in which every one follows those it reads."""
        made_by: dict[Value, _Cluster | Group] = {}
        for unit in self.units:
            for value in self.produced(unit):
                made_by[value] = unit
        order: list[_Cluster | Group] = []
        done: set[int] = set()
        stack: list[tuple[_Cluster | Group, bool]] = [(u, False) for u in reversed(self.units)]
        while stack:
            unit, expanded = stack.pop()
            if id(unit) in done:
                continue
            if expanded:
                done.add(id(unit))
                order.append(unit)
                continue
            stack.append((unit, True))
            for value in self.needed(unit):
                maker = made_by.get(self.root(value))
                if maker is not None and maker is not unit and id(maker) not in done:
                    stack.append((maker, False))
        return order

    def root(self, value: Value) -> Value:
        while value in self.aliases:
            value = self.aliases[value]
        return value

    def produced(self, unit: _Cluster | Group) -> list[Value]:
        if isinstance(unit, Group):
            return list(unit.outputs)
        return [self.value_of[s] for s in unit.stages]

    def needed(self, unit: _Cluster | Group) -> list[Value]:
        if isinstance(unit, Group):
            return list(unit.inputs)
        inside = set(unit.stages)
        return list(dict.fromkeys(self.value_of[r] for s in unit.stages for r in reads(s)
                                  if r not in inside))

    def group(self, cluster: _Cluster) -> Group:
        stages = _topological(cluster.stages)
        results = [s for s in stages if self.value_of[s] in self.roots
                   or any(c is not cluster for c in self.readers.get(s, ()))]
        inside = _needed_for(results, stages)
        stages = [s for s in stages if s in inside]
        inputs = list(dict.fromkeys(r for s in stages for r in reads(s) if r not in inside))
        # Inside the program, tensors of other kernels are inputs without a body.
        table = {t: Tensor(t.name, t.shape, t.dtype, strides=t.strides) for t in inputs}
        stages, table = _rebind(stages, table)
        reduces = any(has_reduce(s) for s in stages)
        kind = "contraction" if any(_is_contraction(s) for s in stages) else (
            "rows" if reduces else "pointwise")
        attrs = {"rows": len(cluster.prefix)} if reduces and cluster.prefix is not None else {}
        nodes = tuple(dict.fromkeys(self.node_of[s] for s in cluster.stages))
        name = _identifier("_".join(dict.fromkeys(n.op.name for n in nodes)))[:48]
        program = Program(self.name(f"k_{name}"), tuple(table[t] for t in inputs), tuple(stages),
                          tuple(table[s] for s in results), kind, attrs)
        return Group(program, tuple(self.value_of[t] for t in inputs),
                     tuple(self.value_of[s] for s in results), nodes)

    def standalone(self, node: Node) -> None:
        """An operator with loops or a kernel of its own."""
        if node.op.loops is None and node.op.kind != "attention" and (
                node.op.reference is None):
            raise UnsupportedOperator(f"operator {node.op.name!r} has no code for any chip",
                                      where=node.where)
        values, inputs = [], []
        for value in (v for v in node.inputs if v is not None):
            tensor = self.tensors[value]
            body = self.inlined.get(tensor)
            view = None if body is None else strided_view(tensor, body)
            if view is None:
                inputs.append(Tensor(tensor.name, value.shape, value.dtype))
            else:
                assert isinstance(body, Load)
                inputs.append(view)
                value = self.value_of[body.source]
            values.append(value)
        results, outputs = self.results_of(node)
        needs: set[_Cluster] = set()
        for value in values:
            needs |= self.needs(self.tensors[value])
        for value in results:
            self.behind[self.tensors[value]] = set(needs)
        kind = "attention" if node.op.kind == "attention" else (
            "opaque" if node.op.loops is not None else "host")
        program = Program(self.name(f"k_{_identifier(node.op.name)}"), tuple(inputs),
                          tuple(outputs), tuple(outputs), kind, {"node": node})
        self.units.append(Group(program, tuple(values), results, (node,)))

    def results_of(self, node: Node) -> tuple[tuple[Value, ...], list[Tensor]]:
        """The values a whole kernel writes, and how: attention exchanges axes as it stores."""
        base = _identifier(node.op.name)
        users = self.consumers.get(node.outputs[0], [])
        turn = users[0] if len(users) == 1 and users[0].op.name == "permute_dims" else None
        if node.op.kind != "attention" or turn is None or node.outputs[0] in self.outputs:
            return node.outputs, [self.place(v, self.name(base)) for v in node.outputs]
        rank = node.outputs[0].ndim
        axes = [a % rank for a in turn.attrs["axes"]]
        if axes[-1] != rank - 1:
            return node.outputs, [self.place(node.outputs[0], self.name(base))]
        turned = turn.outputs[0]
        placed = self.place(turned, self.name(base))
        dense = contiguous_strides(turned.shape)
        strides = tuple(dense[axes.index(d)] for d in range(rank))
        self.stored.add(turn)
        self.tensors[node.outputs[0]] = placed
        return (turned,), [replace(placed, shape=node.outputs[0].shape, strides=strides)]


# ---------------------------------------------------------------- helpers
def _keeps_axes(tensor: Tensor, body: Scalar) -> bool:
    """Whether a view reads along each axis of what lies in memory by at most one axis of its own.

    Windows of convolutions move along axes; a view that cuts them in pieces is stored first.
    """
    assert isinstance(body, Load)
    own = {a.var for a in tensor.axes}
    moved = [free_vars(i) & own for i in body.indices if not isinstance(i, Scalar)]
    return all(len(vars) <= 1 for vars in moved) and (
        sum(map(len, moved)) == len(set().union(*moved))) and all(
        coefficient(i, var) is not None for i, vars in zip(body.indices, moved)
        if not isinstance(i, Scalar) for var in vars)


def strided_view(tensor: Tensor, body: Scalar) -> Tensor | None:
    """A tensor that only picks elements of one in memory, by strides, the last ones neighbours."""
    if not is_view(body):
        return None
    assert isinstance(body, Load)
    address = body.source.flat(body.indices)
    strides = [coefficient(address, a.var) for a in tensor.axes]
    if any(s is None for s in strides) or not strides or strides[-1] != 1:
        return None
    offset = substitute(address, {a.var: 0 for a in tensor.axes})
    return Tensor(tensor.name, tensor.shape, tensor.dtype, offset=offset,
                  strides=tuple(s for s in strides if s is not None))


def _identifier(text: str) -> str:
    return "".join(c if c.isalnum() or c == "_" else "_" for c in text)


def _row_prefix(shape: Sequence[Index]) -> tuple[Index, ...]:
    end = len(shape)
    while end and isinstance(shape[end - 1], int) and shape[end - 1] == 1:
        end -= 1
    return tuple(shape[:end])


def _has_reduction(tensor: Tensor | None, inlined: Mapping[Tensor, Scalar | None]) -> bool:
    body = None if tensor is None else inlined.get(tensor)
    return body is not None and any(isinstance(n, Reduce) for n in walk(body))


def _grows(value: Value, consumer: Node) -> bool:
    """Whether the consumer evaluates each element several times (broadcasting)."""
    if consumer.op.kind == "reduce":
        return False
    mine, theirs = num_elements(value.shape), num_elements(consumer.types[0].shape)
    if isinstance(mine, int) and isinstance(theirs, int):
        return theirs > mine
    return value.shape != consumer.types[0].shape


def _turns(node: Node) -> bool:
    """Whether a node transposes: moving elements has code of its own, which computes nothing."""
    if node.op.name != "permute_dims" or node.inputs[0] is None:
        return False
    last = node.attrs["axes"][-1] % node.inputs[0].ndim
    return last != node.inputs[0].ndim - 1 and num_elements(node.types[0].shape) != (
        node.inputs[0].shape[last])


def _is_contraction(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.body is not None and any(
        name in tensor.origin for name in CONTRACTIONS) and any(
        isinstance(n, Reduce) for n in walk(tensor.body))


def _topological(stages: Sequence[Tensor]) -> list[Tensor]:
    order: list[Tensor] = []
    todo = list(stages)
    while todo:
        for stage in todo:
            if not any(r in todo and r is not stage for r in reads(stage)):
                order.append(stage)
                todo.remove(stage)
                break
    return order


def _needed_for(results: Sequence[Tensor], stages: Sequence[Tensor]) -> set[Tensor]:
    """The stages that results are made of: places along an axis of one element read nothing."""
    known, needed = set(stages), set(results)
    for stage in reversed(stages):
        if stage in needed:
            needed.update(known.intersection(reads(stage)))
    return needed


def _rebind(stages: Sequence[Tensor], table: dict[Tensor, Tensor]
            ) -> tuple[list[Tensor], dict[Tensor, Tensor]]:
    """Stages whose loads go to the tensors of `table`, which grows by the new stages."""
    from terrazzo.scalar import rewrite

    def visit(node: Scalar) -> Scalar | None:
        if isinstance(node, Load) and node.source in table:
            return Load(node.dtype, table[node.source], node.indices)
        return None

    fresh = []
    for stage in stages:
        assert stage.body is not None
        table[stage] = replace(stage, body=rewrite(stage.body, visit))
        fresh.append(table[stage])
    return fresh, table

