"""Graphs back into ONNX: what a session made of a model, as a file that others can look at.

Operators with a counterpart in ai.onnx become that, so other runtimes read the result; the few
that have none become nodes of the domain "terrazzo" under their own name, which we read back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from terrazzo.base.scalar_table import ScalarOp, by_operator
from terrazzo.base.shapes import normalize_axes
from terrazzo.dtypes import DType, as_dtype
from terrazzo.errors import UnsupportedOperator
from terrazzo.frontends.onnx.registry import OWN, Call, Result, converts_domain
from terrazzo.frontends.onnx.types import code_of
from terrazzo.graph.ir import Graph, Node, Value, operator_named
from terrazzo.index import Algebra, IndexExpr, Var, interpret

OPSET = 18
_REDUCTION = {"sum": "ReduceSum", "max": "ReduceMax", "min": "ReduceMin", "prod": "ReduceProd"}


class _Exporter:
    """One export in progress."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.names: dict[Value, str] = {}
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self.sizes: dict[Any, str] = {}  # what symbolic sizes are called
        self.own = False  # whether nodes of our own domain are needed

    # ------------------------------------------------------------ making nodes
    def fresh(self, hint: str) -> str:
        return f"{hint}_{len(self.names) + len(self.nodes) + len(self.weights)}"

    def emit(self, operator: str, inputs: Sequence[str], output: str = "", **attrs: Any) -> str:
        from onnx import helper

        output = output or self.fresh(operator.lower())
        self.nodes.append(helper.make_node(operator, list(inputs), [output],
                                           name=f"{operator}_{len(self.nodes)}", **attrs))
        return output

    def weight(self, array: np.ndarray, hint: str = "constant") -> str:
        from onnx import numpy_helper

        name = self.fresh(hint)
        self.weights.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def ints(self, numbers: Sequence[Any]) -> str:
        """A list of integers, computed from the shapes of inputs where they are symbolic."""
        if not any(isinstance(n, IndexExpr) for n in numbers):
            return self.weight(np.array(numbers, np.int64), "sizes")
        return self.emit("Concat", [self.size(n) for n in numbers], axis=0)

    def size(self, number: Any) -> str:
        """One integer, known or symbolic, as a list of one."""

        def pair(operator: str) -> Callable[[str, str], str]:
            return lambda a, b: self.emit(operator, [a, b])

        def floordiv(a: str, b: str) -> str:  # ONNX divides towards zero
            return self.emit("Div", [self.emit("Sub", [a, self.emit("Mod", [a, b])]), b])

        if number not in self.sizes:
            self.sizes[number] = interpret(number, Algebra(
                lambda n: self.weight(np.array([n]), "size"), self.dimension, pair("Add"),
                pair("Mul"), floordiv, pair("Mod"), pair("Min"), pair("Max")))
        return self.sizes[number]

    def dimension(self, var: Var) -> str:
        """A symbolic size, taken from an input that has it."""
        for value in self.graph.inputs:
            for axis, n in enumerate(value.shape):
                if n is var:
                    return self.emit("Shape", [self.names[value]], start=axis, end=axis + 1)
        raise UnsupportedOperator(f"no input has the size {var}, so it cannot be written as ONNX",
                                  hint="fix it with add_free_dimension_override_by_name")

    def cast(self, value: Value, dtype: DType) -> str:
        name = self.names[value]
        return name if value.dtype is dtype else self.emit("Cast", [name], to=code_of(dtype))

    # ------------------------------------------------------------ the model
    def model(self, names: Sequence[str]) -> Any:
        from onnx import helper

        inputs = []
        for i, value in enumerate(self.graph.inputs):
            self.names[value] = value.name or f"x{i}"
            inputs.append(self._info(self.names[value], value))
        for node in self.graph.nodes:
            self.visit(node)
        outputs = []
        for name, value in zip(names, self.graph.outputs, strict=True):
            self.emit("Identity", [self.names[value]], name)
            outputs.append(self._info(name, value))
        graph = helper.make_graph(self.nodes, self.graph.name, inputs, outputs, self.weights)
        imports = [helper.make_opsetid("", OPSET)]
        if self.own:
            imports.append(helper.make_opsetid(OWN, 1))
        return helper.make_model(graph, opset_imports=imports, producer_name="terrazzo",
                                 ir_version=9)

    def _info(self, name: str, value: Value) -> Any:
        from onnx import helper

        shape = [str(n) if isinstance(n, IndexExpr) else n for n in value.shape]
        return helper.make_tensor_value_info(name, code_of(value.dtype), shape)

    def visit(self, node: Node) -> None:
        rule = _RULES.get(node.op.name)
        made = rule(self, node) if rule is not None else None
        if made is None:
            self._own(node)
        else:
            self.names[node.outputs[0]] = made

    def _own(self, node: Node) -> None:
        """A node of our own domain, with its attributes as JSON."""
        from onnx import helper

        self.own = True
        outputs = [self.fresh(node.op.name) for _ in node.outputs]
        self.nodes.append(helper.make_node(
            node.op.name, ["" if v is None else self.names[v] for v in node.inputs], outputs,
            name=f"{node.op.name}_{len(self.nodes)}", domain=OWN,
            attrs=json.dumps({k: _plain(v) for k, v in node.attrs.items()})))
        self.names.update(zip(node.outputs, outputs, strict=True))


def _plain(value: Any) -> Any:
    if isinstance(value, DType):
        return {"dtype": value.name}
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    if isinstance(value, (np.integer, np.floating, np.bool_)):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UnsupportedOperator(f"an attribute of type {type(value).__name__} cannot be written as "
                              "ONNX")


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        return as_dtype(value["dtype"])
    return tuple(map(_restored, value)) if isinstance(value, list) else value


@converts_domain(OWN)
def own_operator(call: Call) -> Result:
    """A node that `export` wrote: any operator of ours by its name."""
    attrs = {k: _restored(v) for k, v in json.loads(call.attr("attrs", "{}")).items()}
    op = operator_named(call.node.op_type)
    inputs = [call.optional(i) for i in range(len(call))]
    return op(inputs, **attrs) if op.variadic else op(*inputs, **attrs)


# ---------------------------------------------------------------- operators with a counterpart
def _scalar(row: ScalarOp) -> Callable[[_Exporter, Node], str | None]:
    """A scalar operation, where ONNX has a name for it on arguments of their type."""

    def rule(x: _Exporter, node: Node) -> str | None:
        given = [v for v in node.inputs if v is not None]
        types = {v.dtype for v in given}
        dtype = given[0].dtype if row.result == "bool" else node.types[0].dtype
        operator = row.text(row.onnx, dtype.kind)
        if operator is None or (row.result == "bool" and len(types) > 1):
            return None
        return x.emit(operator, [x.cast(v, dtype) for v in given])

    return rule


def _where(x: _Exporter, node: Node) -> str:
    test, a, b = (v for v in node.inputs if v is not None)
    dtype = node.types[0].dtype
    return x.emit("Where", [x.names[test], x.cast(a, dtype), x.cast(b, dtype)])


def _reduction(x: _Exporter, node: Node) -> str | None:
    (value,) = node.inputs
    assert value is not None
    if node.types[0].dtype.is_bool:
        return None
    axes = normalize_axes(node.attrs["axis"], value.ndim)
    return x.emit(_REDUCTION[node.op.name], [x.cast(value, node.types[0].dtype), x.ints(axes)],
                  keepdims=int(node.attrs["keepdims"]))


def _matmul(x: _Exporter, node: Node) -> str:
    names = []
    for value, swap in zip(node.inputs, ("transpose_x", "transpose_y"), strict=True):
        assert value is not None
        name = x.cast(value, node.types[0].dtype)
        if node.attrs[swap]:
            rank = value.ndim
            name = x.emit("Transpose", [name], perm=[*range(rank - 2), rank - 1, rank - 2])
        names.append(name)
    return x.emit("MatMul", names)


def _convolve(x: _Exporter, node: Node) -> str:
    """Ours has the channels last, ONNX's has them first."""
    value, weight = node.inputs
    assert value is not None and weight is not None
    rank, attrs = value.ndim, node.attrs
    first = [0, rank - 1, *range(1, rank - 1)]
    turned = x.emit("Transpose", [x.names[value]], perm=first)
    kernel = x.emit("Transpose", [x.names[weight]],
                    perm=[rank - 1, rank - 2, *range(rank - 2)])
    pads = [lo for lo, _ in attrs["padding"]] + [hi for _, hi in attrs["padding"]]
    made = x.emit("Conv", [turned, kernel], strides=list(attrs["strides"]), pads=pads,
                  dilations=list(attrs["dilation"]), group=attrs["groups"])
    return x.emit("Transpose", [made], perm=[0, *range(2, rank), 1])


def _slice(x: _Exporter, node: Node) -> str:
    (value,) = node.inputs
    assert value is not None
    attrs = node.attrs
    stops = [-(1 << 62) if step < 0 and stop < 0 else stop
             for stop, step in zip(attrs["stops"], attrs["steps"], strict=True)]
    return x.emit("Slice", [x.names[value], x.ints(attrs["starts"]), x.ints(stops),
                            x.ints(range(value.ndim)), x.ints(attrs["steps"])])


def _full(x: _Exporter, node: Node) -> str:
    number = np.full((1,), node.attrs["value"], node.types[0].dtype.np)
    return x.emit("Expand", [x.weight(number), x.ints(node.types[0].shape)])


def _shaped(operator: str) -> Callable[[_Exporter, Node], str]:
    return lambda x, node: x.emit(operator, [_first(x, node), x.ints(node.types[0].shape)])


def _first(x: _Exporter, node: Node) -> str:
    value = node.inputs[0]
    assert value is not None
    return x.names[value]


def _constant(x: _Exporter, node: Node) -> str:
    return x.weight(node.attrs["value"])


_RULES: dict[str, Callable[[_Exporter, Node], str | None]] = {
    **{name: _scalar(row) for name, row in by_operator().items()},
    **dict.fromkeys(_REDUCTION, _reduction),
    "constant": _constant, "where": _where, "batch_matmul": _matmul, "convolve": _convolve,
    "slice": _slice, "full": _full, "reshape": _shaped("Reshape"),
    "broadcast_to": _shaped("Expand"),
    "rsqrt": lambda x, node: x.emit("Reciprocal", [x.emit("Sqrt", [_first(x, node)])]),
    "astype": lambda x, node: x.emit("Cast", [_first(x, node)], to=code_of(node.types[0].dtype)),
    "permute_dims": lambda x, node: x.emit("Transpose", [_first(x, node)], perm=[
        a % len(node.types[0].shape) for a in node.attrs["axes"]]),
    "concat": lambda x, node: x.emit("Concat", [
        x.cast(v, node.types[0].dtype) for v in node.inputs if v is not None],
        axis=node.attrs["axis"]),
}


def export(graph: Graph, outputs: Sequence[str]) -> Any:
    """A ModelProto that computes what the graph does; `outputs` are the names to give."""
    return _Exporter(graph).model(outputs)


