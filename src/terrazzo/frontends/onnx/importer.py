"""Nodes of an ONNX graph into one Graph, as many of them as can be converted.

A node that has no converter, or whose converter needs to know what a tensor holds, is put off with
the reason, and with it all that depends on it; the rest goes into the graph. Whoever runs the
model runs the graph, finds another way for what was put off, and imports again from there, with
more known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from terrazzo.base.shapes import Shape
from terrazzo.dtypes import as_dtype
from terrazzo.errors import OutOfMemory, TerrazzoError, UnsupportedOperator, located
from terrazzo.frontends.onnx import shape_values
from terrazzo.frontends.onnx.functions import (
    function_body,
    has_function,
    opset_table,
    steps_of,
    type_proto,
)
from terrazzo.frontends.onnx.model import needed_names, node_text, tensor_array
from terrazzo.frontends.onnx.reasons import InputMissing, NeedsValue, NotConverted, Reason
from terrazzo.frontends.onnx.registry import Call, Result, attribute_value, find
from terrazzo.frontends.onnx.shape_values import Sizes
from terrazzo.frontends.onnx.sizes import Assumed
from terrazzo.graph import evaluate
from terrazzo.graph.applying import as_value
from terrazzo.graph.ir import Graph, Node, TensorType, Value, operator_named
from terrazzo.graph.patterns import constant_array
from terrazzo.graph.reach import Reach, collecting, fault, outside
from terrazzo.graph.scopes import trace_scope
from terrazzo.index import IndexExpr, Var, free_vars
from terrazzo.index.guards import Guard, asking

# What a converter may raise over inputs or attributes that its operator does not allow.
MISFITS = (ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError,
           RecursionError, TypeError, ValueError)
_MOST_ELEMENTS = 1 << 44  # of a tensor between nodes: more than the memory of any machine
_FOLD = 1 << 16  # bytes; small results of constants are computed at once, as sizes may hang on them


@dataclass(frozen=True, eq=False)
class Imported:
    """What became of some nodes: a graph of the convertible ones, and the others with reasons."""

    graph: Graph
    inputs: tuple[str, ...]  # names of the graph's inputs
    outputs: tuple[str, ...]
    put_off: dict[int, Reason]  # number of the node: why
    needed: frozenset[str]  # tensors that converters would have to know the contents of
    constants: dict[str, np.ndarray] = field(default_factory=dict)  # outputs that are constant
    guards: tuple[Guard, ...] = ()  # of symbolic sizes as given, which the graph relies on
    types: dict[str, TensorType] = field(default_factory=dict)  # as given, by sizes that remain
    sizes: dict[str, Sizes] = field(default_factory=dict)  # outputs that are made of sizes
    reaches: tuple[Reach, ...] = ()  # how far indices that data tells may go


class Importer:
    """One import in progress: the values of names so far."""

    def __init__(self, opsets: Mapping[str, int], where: str = ""):
        self.opsets, self.where = opsets, where
        self.values: dict[str, Value] = {}
        self.sizes: dict[str, Sizes] = {}  # integers that are known, some symbolic
        self.variable: set[Value] = set()  # values found to depend on more than constants

    # ------------------------------------------------------------ names
    def define(self, name: str, value: Value) -> None:
        """Enter the value of a name."""
        self.values[name] = value

    def define_sizes(self, name: str, sizes: Sizes) -> None:
        """Enter known integers: a constant, unless some are symbolic."""
        if any(isinstance(n, IndexExpr) for n in sizes.items.reshape(-1)):
            self.sizes[name] = sizes
        else:
            self.values[name] = literal(np.asarray(sizes.items.astype(sizes.dtype.np)))

    def has(self, name: str) -> bool:
        """Whether a name has a value here."""
        return name in self.values or name in self.sizes

    def value(self, name: str) -> Value:
        """The value of a name; symbolic sizes become a tensor when asked for as one."""
        if name not in self.values:
            sizes, dtype = self.sizes[name].items, self.sizes[name].dtype
            with trace_scope():
                items = [astype(as_value(n), dtype=dtype) for n in sizes.reshape(-1)]
                self.values[name] = items[0] if sizes.ndim == 0 else operator_named("reshape")(
                    operator_named("stack")(items, axis=0), shape=sizes.shape)
        return self.values[name]

    def known(self, name: str) -> np.ndarray | None:
        """What a name holds, if that is known."""
        if name in self.sizes:
            return self.sizes[name].items
        return constant_array(self.values[name])

    def attribute(self, attribute: Any) -> Any:
        """An AttributeProto as Python data."""
        return attribute_value(attribute, self.where)

    # ------------------------------------------------------------ nodes
    def convert(self, node: Any) -> None:
        """Define the outputs of a node; raises NeedsValue or a TerrazzoError."""
        domain = "" if node.domain == "ai.onnx" else node.domain
        version = self.opsets.get(domain, 1)
        call = Call(node, version, self)
        try:
            if not domain and self._size_arithmetic(call):
                return
            converter = find(domain, node.op_type, version)
            if converter is not None:
                with located(node_text(node)), trace_scope():
                    result = converter.function(call)
                self._finish(node, result)
                return
            body = None
            if has_function(node, self.opsets):
                types = {n: type_proto(self.value(n).type) for n in node.input if n}
                body = function_body(node, self.opsets, types)
            if body is None:
                raise UnsupportedOperator(f"{node_text(node)}: there is no code for this operator")
            self.expand(node, body)
        except (NeedsValue, TerrazzoError):
            raise
        except MISFITS as error:
            raise UnsupportedOperator(
                f"{node_text(node)} makes no sense: {type(error).__name__}: {error}") from error

    def _finish(self, node: Any, result: Result) -> None:
        values = [result] if isinstance(result, Value) else list(result)
        for name, value in zip(node.output, values, strict=False):
            if name and value is not None:
                if math.prod(n for n in value.shape if isinstance(n, int)) > _MOST_ELEMENTS:
                    raise OutOfMemory(f"{node_text(node)} makes a tensor of shape {value.shape}",
                                      where=self.where or None)
                self.define(name, folded(value, self.variable))
        missing = [o for o in node.output if o and not self.has(o)]
        if missing:
            raise UnsupportedOperator(f"{node_text(node)}: its output {missing[0]!r} is not made")

    def _size_arithmetic(self, call: Call) -> bool:
        node = call.node
        if node.op_type in ("Shape", "Size") and call.has(0):
            shape = call.value(0).shape
            if node.op_type == "Shape":
                shape = shape[slice(call.attr("start", 0), call.attr("end"))]
                sizes = np.array(shape + (None,), object)[:-1]  # a tuple of Index stays 1-D
            else:
                total: Any = 1
                for n in shape:
                    total = total * n
                sizes = np.array(total, object)
            self.define_sizes(node.output[0], Sizes(sizes))
            return True
        if not any(name in self.sizes for name in node.input):
            return False
        known: list[Sizes | None] = []
        for i, name in enumerate(node.input):
            items = call.known(i)
            if items is None and name:
                return False
            known.append(None if items is None else self.sizes.get(name) or Sizes(
                items, self.values[name].dtype))
        found = shape_values.compute(node.op_type, known, call.attr, len(node.output))
        if found is None:
            return False
        for name, result in zip(node.output, found, strict=False):
            self.define_sizes(name, result)
        return True

    def expand(self, node: Any, body: Any) -> None:
        """Convert the nodes that define an operator's meaning, in a scope of their own."""
        inner = Importer({**self.opsets, **opset_table(body.opset_import)}, self.where)
        for formal, actual in zip(body.input, node.input, strict=False):
            if actual:
                inner.values.update({formal: self.values[actual]} if actual in self.values else {})
                inner.sizes.update({formal: self.sizes[actual]} if actual in self.sizes else {})
        for step in steps_of(node, body):
            inner.convert(step)
        for formal, actual in zip(body.output, node.output, strict=False):
            if actual:
                self.define(actual, inner.value(formal))

    def inline(self, graph: Any, given: Mapping[str, Value] | None = None) -> list[Value]:
        """The outputs of a subgraph for given inputs; it may read names of this scope."""
        given = given or {}
        inner = Importer(self.opsets, self.where)
        inner.values = {**self.values, **given}
        inner.sizes = {n: s for n, s in self.sizes.items() if n not in given}
        for tensor in graph.initializer:
            inner.define(tensor.name, literal(tensor_array(tensor, None, self.where)))
        for node in graph.node:
            inner.convert(node)
        return [inner.value(o.name) for o in graph.output]


# ---------------------------------------------------------------- values
def astype(value: Value, *, dtype: Any) -> Value:
    """A conversion, where one is needed."""
    return value if value.dtype is dtype else operator_named("astype")(value, dtype=dtype)


def literal(array: np.ndarray) -> Value:
    """A constant that uses the array's own memory."""
    array = np.ascontiguousarray(array).reshape(array.shape)
    return Node(operator_named("constant"), (), {"value": array},
                (TensorType(array.shape, as_dtype(array.dtype)),)).outputs[0]


def folded(value: Value, variable: set[Value]) -> Value:
    """The value as a constant, if it is small and depends on constants only.

    `variable` holds values found not to, so that no import looks at a chain more than once.
    """
    node = value.node
    if node is None or node.op.name == "constant" or node.op.effects:
        return value
    if node.op.name == "dequantize_linear":
        return value  # weights stay bytes, which integer kernels multiply
    if any(isinstance(n, IndexExpr) for t in node.types for n in t.shape):
        return value
    shape = tuple(n for n in value.shape if isinstance(n, int))
    if math.prod(shape) * value.dtype.itemsize > _FOLD:
        return value
    if not _depends_on_constants(value, variable):
        variable.add(value)
        return value
    graph = Graph("fold", (), (value,))
    if _sizes_in([n.attrs for n in graph.nodes]):
        return value
    with np.errstate(all="ignore"):
        (array,) = evaluate.run(graph, [])
    return literal(np.asarray(array).astype(value.dtype.np, copy=False).reshape(shape))


def _depends_on_constants(value: Value, variable: set[Value]) -> bool:
    seen: set[Node] = set()
    waiting = [value]
    while waiting:
        found = waiting.pop()
        node = found.node
        if node is None or found in variable or node.op.effects:
            return False
        if node in seen:
            continue
        seen.add(node)
        if node.op.name == "dimension" or (node.op.name == "constant" and node.types[0].shape and (
                node.attrs["value"].nbytes > 16 * _FOLD)):
            return False
        waiting += [v for v in node.inputs if v is not None]
    return True


# ---------------------------------------------------------------- importing many nodes
def import_nodes(nodes: Sequence[tuple[int, Any]], opsets: Mapping[str, int],
                 types: Mapping[str, TensorType], known: Mapping[str, np.ndarray],
                 wanted: Iterable[str], name: str = "model", where: str = "", *,
                 contents: Mapping[str, Sizes] | None = None,
                 sizes: Mapping[str, int] | None = None) -> Imported:
    """A graph of all the nodes that can be converted.

    `types` are the tensors that will be given at run time, `known` those whose contents are known
    now (weights), `wanted` the names to answer with; beyond these, the graph's outputs are what
    nodes that were put off still need. Of tensors in `contents` the elements are sizes; `sizes`
    are those of the call at hand, if there is one.
    """
    assumed = Assumed(sizes)
    wanted = list(wanted)
    while True:
        assumed.start()
        with asking(assumed):
            imported = _import_once(nodes, opsets, types, known, wanted, name, where,
                                    contents or {}, assumed)
        if not assumed.learned:
            return imported


def _import_once(nodes: Sequence[tuple[int, Any]], opsets: Mapping[str, int],
                 types: Mapping[str, TensorType], known: Mapping[str, np.ndarray],
                 wanted: Sequence[str], name: str, where: str, contents: Mapping[str, Sizes],
                 assumed: Assumed) -> Imported:
    importer = Importer(opsets, where)
    inputs = {n: Value(assumed.type(t), name=n) for n, t in types.items()}
    importer.values.update(inputs)
    for held, content in contents.items():
        items = np.frompyfunc(assumed.now, 1, 1)(content.items)
        importer.define_sizes(held, Sizes(np.asarray(items, object), content.dtype))
    reads = {n for _, node in nodes for n in needed_names(node)}
    for weight in reads.union(wanted) & known.keys():
        array = known[weight]
        if array.dtype.kind not in "OUS":
            importer.define(weight, literal(array))
    put_off: dict[int, Reason] = {}
    needed: set[str] = set()
    with collecting() as heard:
        for number, node in nodes:
            missing = next((n for n in needed_names(node) if not importer.has(n)), None)
            if missing is not None:
                put_off[number] = InputMissing(missing)
                continue
            try:
                importer.convert(node)
            except NeedsValue as error:
                needed.add(error.reason.name)
                put_off[number] = error.reason
            except OutOfMemory:
                raise
            except TerrazzoError as error:
                put_off[number] = NotConverted(error.message)
    later = {n for number, node in nodes if number in put_off for n in needed_names(node)}
    made = {o for number, node in nodes if number not in put_off for o in node.output if o}
    results = [n for n in dict.fromkeys([*wanted, *sorted(later & made)]) if importer.has(n)]
    values = {n: importer.value(n) for n in results}
    constants = {n: a for n, v in values.items() if (a := constant_array(v)) is not None}
    results = [n for n in results if n not in constants]
    reaches = heard.reaches if results else ()
    if not results:
        _look_now(heard.reaches)
    graph = Graph(name, (), (*(values[n] for n in results), *(r.places for r in reaches)))
    used = {v for node in graph.nodes for v in node.inputs} | set(graph.outputs)
    guards = assumed.all
    read = {n for n, v in inputs.items() if v in used}
    mentioned = _sizes_in([[n.attrs for n in graph.nodes], [r.size for r in reaches],
                           [t.shape for n in graph.nodes for t in n.types]])
    names = _showing(mentioned, read, {n: v.shape for n, v in inputs.items()})
    names = _showing(_sizes_in([[g.left, g.right] for g in guards]), names,
                     {n: t.shape for n, t in types.items()})
    names = _showing(set(), names, {n: v.shape for n, v in inputs.items()})
    graph = Graph(name, tuple(v for n, v in inputs.items() if n in names),
                  graph.outputs[:len(results)])
    return Imported(graph, tuple(n for n in inputs if n in names), tuple(results), put_off,
                    frozenset(needed), constants, guards,
                    {n: v.type for n, v in inputs.items()},
                    {n: importer.sizes[n] for n in results if n in importer.sizes}, reaches)


def _look_now(reaches: Sequence[Reach]) -> None:
    """Refuse constant indices that point outside, where no code is made that could look."""
    known = [r for r in reaches if _depends_on_constants(r.places, set())
             and not _sizes_in([r.low, r.size])]
    if known:
        (word,) = evaluate.run(Graph("outside", (), (outside(known),)), [])
        if word:
            raise fault(int(word), [(r.low, r.size, r.where) for r in known], {})


def _showing(sizes: set[Var], names: set[str], shapes: Mapping[str, Shape]) -> set[str]:
    """The names, and those of further tensors whose shapes show the sizes, and all that those say.

    A call finds out what a symbol stands for by the shape of some tensor.
    """
    names = set(names)
    while True:
        unsaid = sizes.union(*(free_vars(n) for name in names for n in shapes[name]))
        unsaid -= {n for name in names for n in shapes[name] if isinstance(n, Var)}
        more = next((n for n, shape in shapes.items() if not unsaid.isdisjoint(shape)), None)
        if more is None:
            return names
        names.add(more)


def _sizes_in(data: Any) -> set[Any]:
    """The symbolic sizes that are mentioned anywhere in nested data."""
    if isinstance(data, IndexExpr):
        return set(free_vars(data))
    if isinstance(data, Mapping):
        data = list(data.values())
    if isinstance(data, (list, tuple)):
        return set().union(*map(_sizes_in, data))
    return set()
