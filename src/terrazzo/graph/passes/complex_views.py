"""Complex tensors become real ones with one more axis of two parts, as they lie in memory.

Operators on complex values are put together from real ones when they are traced (`ops/complex`).
What is complex in a graph is therefore seen in two ways only: `view_as_real` takes it apart, and
`view_as_complex` makes it. Here both go away, and inputs, outputs and what control flow carries
are real from now on.
"""

from __future__ import annotations

from terrazzo.errors import UnsupportedDType
from terrazzo.graph.ir import Graph, Node, TensorType, Value


def real_type(type: TensorType) -> TensorType:
    """How a complex type lies in memory; any other type is as it is."""
    return TensorType((*type.shape, 2), type.dtype.real) if type.dtype.is_complex else type


def in_parts(graph: Graph) -> Graph:
    """The graph without complex values."""
    if not _is_complex(graph):
        return graph
    table: dict[Value, Value] = {
        v: Value(real_type(v.type), name=v.name) if v.dtype.is_complex else v
        for v in graph.inputs}
    for node in graph.nodes:
        inputs = tuple(None if v is None else table.get(v, v) for v in node.inputs)
        table.update(zip(node.outputs, _outputs(node, inputs), strict=True))
    return Graph(graph.name, tuple(table[v] for v in graph.inputs),
                 tuple(table.get(v, v) for v in graph.outputs))


def _is_complex(graph: Graph) -> bool:
    return any(v.dtype.is_complex for v in graph.inputs) or any(
        t.dtype.is_complex for n in graph.nodes for t in n.types) or any(
        _is_complex(g) for n in graph.nodes for g in n.attrs.values() if isinstance(g, Graph))


def _outputs(node: Node, inputs: tuple[Value | None, ...]) -> tuple[Value, ...]:
    if node.op.name in ("view_as_real", "view_as_complex"):
        (seen,) = inputs
        assert seen is not None
        return (seen,)
    types = tuple(map(real_type, node.types))
    if types != node.types and node.op.family != "control":
        raise UnsupportedDType(f"{node.op.name} of {node.types[0]} is not a view of real numbers",
                               where=node.where or None,
                               hint="apply operators to complex values while tracing")
    attrs = {k: in_parts(v) if isinstance(v, Graph) else v for k, v in node.attrs.items()}
    unchanged = types == node.types and all(attrs[k] is v for k, v in node.attrs.items())
    if unchanged and all(a is b for a, b in zip(inputs, node.inputs, strict=True)):
        return node.outputs
    return Node(node.op, inputs, attrs, types, node.where).outputs
