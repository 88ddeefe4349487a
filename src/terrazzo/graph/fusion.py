"""The way from L1 to L2: which operators become one kernel, and the tensor expressions of each.

Two decisions, in this order:
1. Inlining. A value is composed into its consumers when nothing else needs it in memory and
   computing it again costs little. What is left are *stages*.
2. Clustering. Stages over the same elements share a loop (a pointwise cluster); stages over the
   same rows share a loop over rows, and the row stays in the cache (a rows cluster).
Contractions take their epilogue along by inlining; attention and opaque operators stand alone.
A kernel ends where it has grown long enough, so that compiling stays linear in the length of a
program: what comes after a kernel, down to LLVM, has steps that are not linear in one kernel.
Nothing here knows a chip: sizes at which sharing stops paying are arguments.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from terrazzo.base.scalar import Const, Load, Reduce, Scalar, cost, loads, walk
from terrazzo.base.shapes import contiguous_strides, num_elements
from terrazzo.errors import UnsupportedOperator
from terrazzo.expr.direction import reduces_columns
from terrazzo.expr.ir import Program, Tensor, inline, reads
from terrazzo.graph.ir import Graph, Node, Value, constant
from terrazzo.index import Index, coefficient, free_vars, substitute

CHEAP = 6  # additions: recomputing this for every consumer is better than a trip through memory
LARGEST = 128  # operations of one element: code for more takes long to compile, and spills
# A kernel ends after so many stages, or where its code would get that long (in additions for one
# element of each stage). From half as many stages on, it ends where a single value goes on: such
# places cost least, and come back in each turn of a loop, so that all turns share their kernels.
MOST_STAGES, LONGEST = 48, 2048
BROADCAST_CHEAP = 2  # the same, once for every element it is broadcast to
SMALL = 1 << 14  # elements: below this, one thread does it all and everything may share a loop
LARGE = 1 << 18  # elements of a tensor that no core has in its own cache for long
MOST_SIBLINGS = 8  # stages of kernels that share nothing but what they read
FEW_ROWS = 8  # fewer rows than this leave cores idle
CONVOLUTIONS = ("convolve", "integer_convolve")
WINDOWS = ("window_max", "window_argmax", "window_sum")  # read channels as neighbours, many times
LARGEST_EPILOGUE = 64  # operators between a reduction and where its uses join again


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
class _Unit:
    """A kernel in the making: a cluster of stages that share their loops, or a whole kernel.

    Sets of units are integers with a bit for each: sets of what a unit depends on grow with the
    program, and so they cost a thousandth of what sets of objects cost.
    """

    bits: int  # the unit itself, and those that were merged into it
    stages: list[Tensor] = field(default_factory=list)
    whole: Group | None = None
    prefix: tuple[Index, ...] | None = None  # rows; None while it is pointwise
    contracts: bool = False
    columns: bool = False  # reduces down columns, in vectors of columns: no row is done at once
    length: int = 0  # additions for one element of each stage
    largest: int = -1  # elements of the largest tensor of known size that it reads or makes
    reads: dict[Tensor, None] = field(default_factory=dict)
    depends: int = 0  # the units that have to run before it
    readers: list[_Unit] = field(default_factory=list)  # those that read it directly

    @property
    def has_reduce(self) -> bool:
        return self.prefix is not None

    def follow(self, others: int) -> None:
        """Depend on more units; so do all that depend on this one."""
        todo = [(self, others)]
        while todo:
            unit, more = todo.pop()
            more &= ~(unit.depends | unit.bits)
            if more:
                unit.depends |= more
                todo += [(reader, more) for reader in unit.readers]


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


def readers_first(fused: Fused, over: Mapping[Value, Value]) -> Fused:
    """The same kernels, those that write outputs over inputs after all others that read these.

    `over` has the outputs that are to be written so. Stages inside of a kernel are ordered in the
    same way. Where that order would be a circle, they stay as they are.
    """
    if not over:
        return fused
    replaced = {fused.root(output): source for output, source in over.items()}
    groups = [_stages_readers_first(group, replaced) for group in fused.groups]
    maker = {value: i for i, group in enumerate(groups) for value in group.outputs}
    read = [{fused.root(v) for v in group.inputs} for group in groups]
    before = [{maker[v] for v in roots if v in maker} for roots in read]
    for output, source in replaced.items():
        if output in maker:
            before[maker[output]] |= {i for i, roots in enumerate(read) if source in roots}
    return replace(fused, groups=tuple(groups[i] for i in _in_order(before)))


def _stages_readers_first(group: Group, over: Mapping[Value, Value]) -> Group:
    program = group.program
    if program.kind not in ("pointwise", "rows") or not any(v in over for v in group.outputs):
        return group
    place = {stage: i for i, stage in enumerate(program.stages)}
    input_of = dict(zip(group.inputs, program.inputs, strict=True))
    before = [{place[t] for t in reads(stage) if t in place} for stage in program.stages]
    for value, stage in zip(group.outputs, program.outputs, strict=True):
        if value in over and over[value] in input_of:
            source = input_of[over[value]]
            before[place[stage]] |= {i for s, i in place.items() if source in reads(s)}
    stages = tuple(program.stages[i] for i in _in_order(before))
    return replace(group, program=replace(program, stages=stages))


def _in_order(before: Sequence[set[int]]) -> list[int]:
    """Numbers, each after those before it and else as they come; all as they come in a circle."""
    waits = [set(others) - {i} for i, others in enumerate(before)]
    order: list[int] = []
    ready = [i for i, others in enumerate(waits) if not others]  # a heap
    while ready:
        order.append(heapq.heappop(ready))
        for i, others in enumerate(waits):
            if order[-1] in others:
                others.discard(order[-1])
                if not others:
                    heapq.heappush(ready, i)
    return order if len(order) == len(before) else list(range(len(before)))


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
        self.maker: dict[Tensor, _Unit] = {}  # of stages and of what whole kernels make
        self.units: dict[_Unit, None] = {}
        self.unit_count = 0
        self.aliases: dict[Value, Value] = {}
        self.in_rows: set[Value] = set()  # stored by the kernel of their rows, then seen reshaped
        self.stored: set[Node] = set()  # permutations that the kernel before them stores by
        self.constants: dict[Value, Any] = {}
        self.names: dict[str, int] = {}
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.epilogue: set[Value] = set()  # between a reduction and where its uses join again
        self.readers: dict[Tensor, list[_Unit]] = {}  # all clusters in the end, by what they read
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
        self.merge_siblings()
        for unit in self.units:
            for source in unit.reads:
                self.readers.setdefault(source, []).append(unit)
        wanted = {v for u in self.units if u.whole is not None for v in u.whole.inputs}
        self.roots |= {self.root(v) for v in (*wanted, *self.outputs, *self.aliases)}
        groups = (u.whole or self.group(u) for u in self.ordered())
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
        if (value in self.outputs and source not in self.in_rows) or source in self.strides or (
                self.tensors[source] in self.inlined):
            return False
        if not self.wants_memory(node):
            return False
        self.aliases[value] = source
        self.place(value, self.name("reshape"))
        return True

    def wants_memory(self, node: Node) -> bool:
        """Whether a node is a reshape of what is to lie in memory afterwards."""
        return node.op.name == "reshape" and (node.outputs[0] in self.outputs or any(
            c.op.expr is None or c.op.kind in ("contract", "attention")
            for c in self.consumers.get(node.outputs[0], ())))

    def shares_rows(self, value: Value, body: Scalar) -> bool:
        """Whether a value is made of rows that a kernel reduces, which can go on with it."""
        units = [self.maker[load.source] for load in loads(body) if load.source in self.maker]
        return any(u.prefix and value.shape[:len(u.prefix)] == u.prefix and not u.columns
                   and not u.contracts for u in units)

    # ------------------------------------------------------------ inlining
    def should_inline(self, value: Value, node: Node, body: Scalar) -> bool:
        if value in self.outputs or sum(1 for _ in walk(body)) > LARGEST:
            return False
        consumers = self.consumers[value]
        if all(self.wants_memory(c) for c in consumers) and self.shares_rows(value, body):
            self.in_rows.add(value)
            return False
        whole = [c for c in consumers if c.op.expr is None]
        if whole and not (all(c.op.kind == "attention" for c in whole)
                          and strided_view(self.tensors[value], body) is not None):
            return False
        if _turns(node) and any(c.op.name in (*WINDOWS, "place", "reshape") or (
                _keeps_channels_apart(c) and c.inputs[0] is value) for c in consumers):
            return False
        if is_view(body) and any(c.op.name in CONVOLUTIONS for c in consumers) and (
                not _keeps_axes(self.tensors[value], body)):
            return False
        if isinstance(body, Const) or is_view(body) or value in self.epilogue:
            return True
        reductions = sum(isinstance(n, Reduce) for n in walk(body))
        if reductions:
            return reductions == 1 and self.joins(value) and not self.widens_in_vain(value)
        price = cost(body)
        for consumer in consumers:
            if consumer.op.kind == "contract" or (price > BROADCAST_CHEAP and (
                    _grows(value, consumer) or _turns(consumer))):
                return False
        return len(consumers) == 1 or price <= CHEAP

    def joins(self, value: Value) -> bool:
        """Whether all uses of a reduction's result are one epilogue of the same elements.

        Every path from the value leads through pointwise operators of its shape to one of them,
        which then holds the whole computation, each element of the reduction used where it is
        made. What lies between is marked to be inlined.
        """
        between: dict[Value, None] = {}
        frontier = {n: None for n in self.consumers[value]}
        for left in range(LARGEST_EPILOGUE, 0, -1):
            if len(frontier) > left:
                return False  # each of them is a step at least
            node = min(frontier, key=self.order.__getitem__)
            if node.op.kind != "pointwise" or node.op.expr is None or len(
                    node.types) > 1 or node.types[0].shape != value.shape or _moves(node):
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
    def new_unit(self, reads: Sequence[Tensor], **fields: Any) -> _Unit:
        """A unit after those that make what it reads."""
        unit = _Unit(1 << self.unit_count, reads=dict.fromkeys(reads), **fields)
        self.unit_count += 1
        self.units[unit] = None
        for maker in self.makers(unit):
            maker.readers.append(unit)
            unit.follow(maker.bits | maker.depends)
        return unit

    def add_stage(self, stage: Tensor, node: Node) -> None:
        reduces = has_reduce(stage)
        sources = reads(stage)
        sizes = [num_elements(t.shape) for t in (stage, *sources)]
        unit = self.new_unit(
            sources, stages=[stage], prefix=_row_prefix(stage.shape) if reduces else None,
            contracts=_is_contraction(stage), columns=reduces and reduces_columns(stage),
            length=_length(stage),
            largest=max((n for n in sizes if isinstance(n, int)), default=-1))
        self.maker[stage] = unit
        if node.op.kind == "contract" or unit.contracts:
            return
        producers = [self.maker[s] for s in sources if s in self.maker]
        for other in dict.fromkeys(reversed(producers)):
            if other is not unit and self.can_merge(other, unit):
                unit = self.merge(other, unit)

    def makers(self, unit: _Unit) -> list[_Unit]:
        """The units that make what a unit reads."""
        found: dict[_Unit, None] = {}
        for tensor in unit.reads:
            if tensor in self.value_of:
                tensor = self.tensors[self.root(self.value_of[tensor])]
            if tensor in self.maker:
                found[self.maker[tensor]] = None
        return list(found)

    def can_merge(self, first: _Unit, second: _Unit) -> bool:
        """Whether `second`, which reads `first`, may share its loop."""
        if first.whole is not None or first.contracts or second.contracts:
            return False
        if first.columns or second.columns:
            return False
        if _long_enough(first, second):
            return False
        if any(d.depends & first.bits for d in self.makers(second) if d not in (first, second)):
            return False  # something of its own runs between the two
        one, other = first.stages[0].shape, second.stages[0].shape
        if not first.has_reduce and not second.has_reduce:
            rows = other
        else:
            prefixes = {u.prefix for u in (first, second) if u.prefix is not None}
            if not self.row_fusion or len(prefixes) != 1:
                return False
            (rows,) = prefixes
            if not _rows_pay(rows, max(first.largest, second.largest)):
                return False
        # Inside of each, all stages have the same rows, and read each other in place.
        rank = len(rows)
        return one[:rank] == rows == other[:rank] and (
            first.has_reduce or second.has_reduce or one == other) and all(
            _reads_in_place(s, rank, unit.stages)
            for reader, unit in ((first, second), (second, first))
            if not reader.reads.keys().isdisjoint(unit.stages) for s in reader.stages)

    def merge(self, first: _Unit, second: _Unit) -> _Unit:
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
            self.maker[stage] = first
        del self.units[second]
        first.readers += [r for r in second.readers if r is not first]
        for reader in second.readers:
            reader.follow(first.bits | first.depends)
        return first

    def merge_siblings(self) -> None:
        """Kernels of the same elements or rows that read the same large tensor read it once.

        Only those whose results go to the caller, or are small: others would have to be kept for
        as long as the last of them is needed.
        """
        by_source: dict[Tensor, list[_Unit]] = {}
        for unit in self.units:
            for source in unit.reads if self.may_have_siblings(unit) else ():
                if _is_large(source):
                    by_source.setdefault(source, []).append(unit)
        for units in by_source.values():
            for i, first in enumerate(units):
                # Those that come next, so that many readers of one tensor take no square of time.
                for second in units[i + 1:i + MOST_SIBLINGS]:
                    if first in self.units and second in self.units and (
                            self.are_siblings(first, second)):
                        self.merge(first, second)

    def may_have_siblings(self, unit: _Unit) -> bool:
        if unit.whole is not None or unit.contracts or unit.columns or not self.row_fusion:
            return False
        return all(not _is_large(s) or (self.value_of[s] in self.outputs) for s in unit.stages)

    def are_siblings(self, first: _Unit, second: _Unit) -> bool:
        if first.has_reduce != second.has_reduce or first.prefix != second.prefix or (
                first.depends & second.bits or second.depends & first.bits):
            return False
        if _long_enough(first, second) or len(first.stages) + len(second.stages) > MOST_SIBLINGS:
            return False
        if first.prefix is not None:
            return _rows_pay(first.prefix, max(first.largest, second.largest))
        return first.stages[0].shape == second.stages[0].shape

    # ------------------------------------------------------------ results
    def ordered(self) -> list[_Unit]:
        """Units in an order in which every one follows those it reads."""
        order: dict[_Unit, None] = {}
        stack = [(u, False) for u in reversed(self.units)]
        while stack:
            unit, expanded = stack.pop()
            if unit in order:
                continue
            if expanded:
                order[unit] = None
                continue
            stack.append((unit, True))
            stack += [(maker, False) for maker in self.makers(unit)
                      if maker is not unit and maker not in order]
        return list(order)

    def root(self, value: Value) -> Value:
        while value in self.aliases:
            value = self.aliases[value]
        return value

    def group(self, cluster: _Unit) -> Group:
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
            if node.op.starts_from_first and value is node.inputs[0]:
                value = self.as_number(value)
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
        kind = "attention" if node.op.kind == "attention" else (
            "opaque" if node.op.loops is not None else "host")
        program = Program(self.name(f"k_{_identifier(node.op.name)}"), tuple(inputs),
                          tuple(outputs), tuple(outputs), kind, {"node": node})
        unit = self.new_unit([self.tensors[v] for v in values],
                             whole=Group(program, tuple(values), results, (node,)))
        for value in results:
            self.maker[self.tensors[value]] = unit

    def as_number(self, value: Value) -> Value:
        """The number that a value is full of, in memory; the value itself where it is not."""
        node = value.node
        if node is None or node.op.name != "full":
            return value
        number = constant(node.attrs["value"], value.dtype)
        assert number.node is not None
        self.constants[number] = number.node.attrs["value"]
        self.place(number, self.name("number"))
        return number

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
    if consumer.op.kind == "reduce" or consumer.op.name == "pairs":
        return False  # of a pair, each half is evaluated once
    mine, theirs = num_elements(value.shape), num_elements(consumer.types[0].shape)
    if isinstance(mine, int) and isinstance(theirs, int):
        return theirs > mine
    return value.shape != consumer.types[0].shape


def _moves(node: Node) -> bool:
    """Whether an operator of one result reads elements of its shape from other places."""
    assert node.op.expr is not None
    given = [None if v is None else Tensor("x", v.shape, v.dtype) for v in node.inputs]
    made = node.op.expr(*given, out=node.types[0], **node.attrs)
    return any(load.source.shape == made.shape and any(
        index is not a.var and a.extent != 1 for index, a in zip(load.indices, made.axes))
        for load in loads(made.body))


def _turns(node: Node) -> bool:
    """Whether a node transposes: moving elements has code of its own, which computes nothing."""
    if node.op.name != "permute_dims" or node.inputs[0] is None:
        return False
    last = node.attrs["axes"][-1] % node.inputs[0].ndim
    return last != node.inputs[0].ndim - 1 and num_elements(node.types[0].shape) != (
        node.inputs[0].shape[last])


def _keeps_channels_apart(node: Node) -> bool:
    """Whether a node is a depthwise convolution: it reads channels as neighbours, many times."""
    x, *rest = node.inputs
    return node.op.name == "convolve" and x is not None and rest[0] is not None and (
        1 < node.attrs["groups"] == x.shape[-1] == rest[0].shape[-1])


def _is_contraction(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.body is not None and any(
        isinstance(n, Reduce) and n.contraction is not None for n in walk(tensor.body))


def _topological(stages: Sequence[Tensor]) -> list[Tensor]:
    """Stages in their order, but for those that have to wait for a later one."""
    inside = set(stages)
    waits = {s: {r for r in reads(s) if r in inside and r is not s} for s in stages}
    waiting: dict[Tensor, list[Tensor]] = {}
    for stage, sources in waits.items():
        for source in sources:
            waiting.setdefault(source, []).append(stage)
    place = {s: i for i, s in enumerate(stages)}
    ready = [place[s] for s in stages if not waits[s]]  # a heap: the earliest comes first
    order: list[Tensor] = []
    while ready:
        stage = stages[heapq.heappop(ready)]
        order.append(stage)
        for reader in waiting.get(stage, ()):
            waits[reader].discard(stage)
            if not waits[reader]:
                heapq.heappush(ready, place[reader])
    return order


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


def _is_large(tensor: Tensor) -> bool:
    """Whether reading a tensor once more costs as much as a kernel."""
    size = num_elements(tensor.shape)
    return not isinstance(size, int) or size >= LARGE


def _length(stage: Tensor) -> int:
    assert stage.body is not None
    return cost(stage.body) + len(loads(stage.body))


def _long_enough(first: _Unit, second: _Unit) -> bool:
    """Whether a kernel had better end here, and `second` begin another."""
    stages = len(first.stages) + len(second.stages)
    return stages > MOST_STAGES or first.length + second.length > LONGEST or (
        stages > MOST_STAGES // 2 and len(second.reads) == 1)


def _rows_pay(prefix: tuple[Index, ...], largest: int) -> bool:
    """Whether there are rows for all cores, or so little to do that one core does it all."""
    rows = num_elements(prefix)
    return 0 <= largest <= SMALL or not isinstance(rows, int) or rows >= FEW_ROWS


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
    from terrazzo.base.scalar import rewrite

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

