"""The first pass of fusion: what is composed into its readers, and what becomes a stage.

A value is composed into its consumers when nothing else needs it in memory and computing it again
costs little. Contractions take their epilogue along so; a reshape of something in memory is that
memory; attention and operators with loops of their own stand alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from terrazzo.base.scalar import Const, Reduce, Scalar, cost, loads, walk
from terrazzo.expr.direction import reduces_columns
from terrazzo.expr.ir import Tensor, inline
from terrazzo.expr.limits import FusionLimits
from terrazzo.graph.fusion.groups import Group
from terrazzo.graph.fusion.reading import (
    contracts,
    grows,
    has_reduce,
    is_view,
    keeps_axes,
    keeps_channels_apart,
    moves,
    reduces,
    row_prefix,
    strided_view,
    taken_by_rows,
    turns,
)
from terrazzo.graph.fusion.stages import Placed, Stage, Staged, Uses
from terrazzo.graph.fusion.whole import stored_by, whole_kernel
from terrazzo.graph.ir import Graph, Node, Value
from terrazzo.index import Index

CONVOLUTIONS = ("convolve", "integer_convolve")
WINDOWS = ("window_max", "window_argmax", "window_sum")  # read channels as neighbours, many times


def compose(graph: Graph, limits: FusionLimits, strides: Mapping[Value, tuple[Index, ...]]
            ) -> Staged:
    """The stages and whole kernels of a graph; `strides` says which inputs are not row major."""
    return _Composer(Uses(graph), limits, Placed(strides)).run()


class _Composer:
    def __init__(self, uses: Uses, limits: FusionLimits, placed: Placed):
        self.uses, self.limits, self.placed = uses, limits, placed
        self.parts: list[Stage | Group] = []
        self.inlined: dict[Tensor, Scalar | None] = {}
        self.rows: dict[Tensor, tuple[Index, ...]] = {}  # the rows that a stage is made of
        self.in_rows: set[Value] = set()  # stored by the kernel of their rows, then seen reshaped
        self.epilogue: set[Value] = set()  # between a reduction and where its uses join again

    # ------------------------------------------------------------ walking the graph
    def run(self) -> Staged:
        for i, value in enumerate(self.uses.graph.inputs):
            self.placed.place(value, value.name or f"x{i}")
        for node in self.uses.graph.nodes:
            self.visit(node)
        return Staged(self.uses, self.placed, tuple(self.parts))

    def visit(self, node: Node) -> None:
        if node.op.name == "constant" and node.attrs["value"].size != 1:
            self.placed.constants[node.outputs[0]] = node.attrs["value"]
            self.placed.place(node.outputs[0], "constant")
        elif stored_by(node, self.uses) is not None:
            pass  # the kernel before it stores by this permutation
        elif node.op.expr is None:
            self.parts.append(whole_kernel(node, self.uses, self.placed, self.inlined))
        elif node.op.name != "reshape" or not self.becomes_alias(node):
            self.visit_expression(node)

    def visit_expression(self, node: Node) -> None:
        assert node.op.expr is not None
        inputs = [None if v is None else self.placed.tensors[v] for v in node.inputs]
        out = node.types if len(node.types) > 1 else node.types[0]
        made = node.op.expr(*inputs, out=out, **node.attrs)
        tensors = made if isinstance(made, tuple) else (made,)
        for value, tensor in zip(node.outputs, tensors, strict=True):
            if value not in self.uses.outputs and value not in self.uses.consumers:
                continue
            body = inline(tensor.body, self.inlined)
            tensor = replace(tensor, name=self.placed.names.fresh(node.op.name), body=body,
                             shape=value.shape, dtype=value.dtype,
                             origin=self.origin(tensor.origin or node.op.name, tensor.body))
            self.placed.see(value, tensor)
            if self.should_inline(value, node, body):
                self.inlined[tensor] = body
            else:
                self.add_stage(tensor, node)

    def origin(self, own: str, body: Scalar | None) -> str:
        """The operators composed into a stage, in order, for people to read."""
        inner = [load.source.origin for load in loads(body)
                 if load.source in self.inlined] if body is not None else []
        parts = [p for text in inner for p in text.split(", ") if p and p != "constant"]
        return ", ".join(dict.fromkeys([*parts, own]))

    def add_stage(self, tensor: Tensor, node: Node) -> None:
        stage = Stage(tensor, node, contracts(tensor))
        self.parts.append(stage)
        if has_reduce(tensor):
            if not stage.contracts and not reduces_columns(tensor):
                self.rows[tensor] = row_prefix(tensor.shape)
            return
        assert tensor.body is not None
        for load in loads(tensor.body):
            rows = self.rows.get(load.source)
            if rows and tensor.shape[:len(rows)] == rows:
                self.rows[tensor] = rows

    # ------------------------------------------------------------ memory that is seen reshaped
    def becomes_alias(self, node: Node) -> bool:
        """A reshape of something in memory is that memory, when its consumers want memory."""
        value, source = node.outputs[0], node.inputs[0]
        assert source is not None
        if (value in self.uses.outputs and source not in self.in_rows) or (
                source in self.placed.strides or self.placed.tensors[source] in self.inlined):
            return False
        if not self.wants_memory(node):
            return False
        self.placed.aliases[value] = source
        self.placed.place(value, "reshape")
        return True

    def wants_memory(self, node: Node) -> bool:
        """Whether a node is a reshape of what is to lie in memory afterwards."""
        return node.op.name == "reshape" and (node.outputs[0] in self.uses.outputs or any(
            c.op.expr is None or c.op.kind in ("contract", "attention")
            for c in self.uses.consumers.get(node.outputs[0], ())))

    def shares_rows(self, value: Value, body: Scalar) -> bool:
        """Whether a value is made of rows that a kernel reduces, which can go on with it."""
        found = (self.rows.get(load.source) for load in loads(body))
        return any(rows and value.shape[:len(rows)] == rows for rows in found)

    # ------------------------------------------------------------ the decision
    def should_inline(self, value: Value, node: Node, body: Scalar) -> bool:
        if value in self.uses.outputs or sum(1 for _ in walk(body)) > self.limits.operations:
            return False
        consumers = self.uses.consumers[value]
        if all(self.wants_memory(c) for c in consumers) and self.shares_rows(value, body):
            self.in_rows.add(value)
            return False
        if self.must_be_stored(value, node, body):
            return False
        if isinstance(body, Const) or is_view(body) or value in self.epilogue:
            return True
        reductions = sum(isinstance(n, Reduce) for n in walk(body))
        if reductions:
            return reductions == 1 and self.joins(value) and not self.widens_in_vain(value)
        price = cost(body)
        for consumer in consumers:
            if consumer.op.kind == "contract" or (price > self.limits.broadcast and (
                    grows(value, consumer) or turns(consumer))):
                return False
        return len(consumers) == 1 or price <= self.limits.recomputed

    def must_be_stored(self, value: Value, node: Node, body: Scalar) -> bool:
        """Whether a consumer reads memory, in an order in which the value does not lie."""
        consumers, tensor = self.uses.consumers[value], self.placed.tensors[value]
        whole = [c for c in consumers if c.op.expr is None]
        if whole and not (all(c.op.kind == "attention" for c in whole)
                          and strided_view(tensor, body) is not None):
            return True
        if turns(node) and (taken_by_rows(value, consumers) or any(
                c.op.name in (*WINDOWS, "place", "reshape") or (
                    keeps_channels_apart(c) and c.inputs[0] is value) for c in consumers)):
            return True
        return is_view(body) and any(c.op.name in CONVOLUTIONS for c in consumers) and (
            not keeps_axes(tensor, body))

    # ------------------------------------------------------------ epilogues
    def joins(self, value: Value) -> bool:
        """Whether all uses of a reduction's result are one epilogue of the same elements.

        Every path from the value leads through pointwise operators of its shape to one of them,
        which then holds the whole computation, each element of the reduction used where it is
        made. What lies between is marked to be inlined.
        """
        between: dict[Value, None] = {}
        frontier = {n: None for n in self.uses.consumers[value]}
        for left in range(self.limits.epilogue, 0, -1):
            if len(frontier) > left:
                return False  # each of them is a step at least
            node = min(frontier, key=self.uses.order.__getitem__)
            if node.op.kind != "pointwise" or node.op.expr is None or len(
                    node.types) > 1 or node.types[0].shape != value.shape or moves(node):
                return False
            if any(v is not None and v is not value and v not in between
                   and self.holds_reduction(v) for v in node.inputs):
                return False  # one reduction an epilogue
            if len(frontier) == 1:
                self.epilogue |= set(between)
                return True
            result = node.outputs[0]
            if result in self.uses.outputs or result not in self.uses.consumers:
                return False
            del frontier[node]
            frontier |= {n: None for n in self.uses.consumers[result]}
            between[result] = None
        return False

    def holds_reduction(self, value: Value) -> bool:
        """Whether a value is composed into its readers, a reduction with it."""
        tensor = self.placed.tensors.get(value)
        body = None if tensor is None else self.inlined.get(tensor)
        return body is not None and reduces(body)

    def widens_in_vain(self, value: Value) -> bool:
        """Whether a value would only be stored wider than it is, for others to read.

        Bytes that are about to become floats are better stored as bytes, if whoever reads the
        floats can widen the bytes as it reads.
        """
        (consumer, *others) = self.uses.consumers[value]
        result = consumer.outputs[0]
        if others or result.dtype.itemsize <= value.dtype.itemsize or (
                result in self.uses.outputs):
            return False
        readers = self.uses.consumers.get(result, [])
        return all(r.op.kind == "pointwise" and r.op.expr is not None for r in readers) and (
            not self.joins(result))
