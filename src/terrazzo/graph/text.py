"""The text of a graph, for people."""

from __future__ import annotations

from typing import Any

import numpy as np

from terrazzo.base.shapes import dims_text
from terrazzo.dtypes import as_dtype
from terrazzo.graph.ir import Graph, Value


def format_graph(graph: Graph) -> str:
    """The text form of a graph."""
    names: dict[Value, str] = {}
    for i, value in enumerate(graph.inputs):
        names[value] = value.name or f"x{i}"
    params = ", ".join(f"{names[v]}: {v.type}" for v in graph.inputs)
    lines = [f"graph {graph.name}({params}):"]
    for node in graph.nodes:
        if node.op.name == "constant" and node.types[0].shape == ():
            names[node.outputs[0]] = _literal(node.attrs["value"])
            continue
        for value in node.outputs:
            names[value] = f"%{len(names)}"
        args = ["none" if v is None else names[v] for v in node.inputs]
        args += [f"{k}={attr_text(v)}" for k, v in node.attrs.items() if v is not None]
        results = ", ".join(f"{names[v]}: {v.type}" for v in node.outputs)
        lines.append(f"    {results} = {node.op.name}({', '.join(args)})")
    lines.append("    return " + ", ".join(names[v] for v in graph.outputs))
    for inner in (a for node in graph.nodes for a in node.attrs.values() if isinstance(a, Graph)):
        lines += [f"    {line}" for line in format_graph(inner).splitlines()]
    return "\n".join(lines)


def _literal(array: np.ndarray) -> str:
    from terrazzo.base.scalar_text import format_literal

    return format_literal(array.item() if array.dtype.kind in "biufc" else float(array))


def attr_text(value: Any) -> str:
    """An attribute of a node on one line."""
    if isinstance(value, np.ndarray):
        return f"<{as_dtype(value.dtype).short}{dims_text(value.shape)}>"
    if isinstance(value, Graph):
        return f"<graph {value.name}>"
    return str(value)
