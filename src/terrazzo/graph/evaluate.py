"""Runs a graph with numpy, operator by operator: the meaning every other level is held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from terrazzo.dtypes import complex128, float64
from terrazzo.graph.applying import expand
from terrazzo.graph.ir import Graph, Node, TensorType
from terrazzo.index import IndexExpr, Var, evaluate


def run(graph: Graph, arrays: Sequence[np.ndarray], *, wide: bool = False) -> list[np.ndarray]:
    """The outputs of a graph. With `wide`, every float is a float64: the yardstick."""
    dims = bind_dims(graph, arrays)
    memory: dict[Any, np.ndarray] = {}
    for value, array in zip(graph.inputs, arrays, strict=True):
        memory[value] = _widen(array) if wide else array
    with np.errstate(all="ignore"):
        for node in graph.nodes:
            inputs = [None if v is None else memory[v] for v in node.inputs]
            for value, result in zip(node.outputs, run_node(node, inputs, dims, wide),
                                     strict=True):
                memory[value] = result
    return [memory[v] for v in graph.outputs]


def bind_dims(graph: Graph, arrays: Sequence[np.ndarray]) -> dict[Var, int]:
    """The values of the symbolic sizes, read off the inputs."""
    dims: dict[Var, int] = {}
    for value, array in zip(graph.inputs, arrays, strict=True):
        for n, size in zip(value.shape, array.shape, strict=True):
            if isinstance(n, Var):
                dims.setdefault(n, int(size))
    return dims


def concrete(value: Any, dims: Mapping[Var, int]) -> Any:
    """Sizes in place of symbolic dimensions, in attributes and shapes."""
    if isinstance(value, tuple):
        return tuple(concrete(v, dims) for v in value)
    if isinstance(value, IndexExpr):
        return int(evaluate(value, dict(dims)))
    return value


def run_node(node: Node, inputs: Sequence[np.ndarray | None], dims: Mapping[Var, int],
             wide: bool = False) -> list[np.ndarray]:
    """One operator by its reference, or by the references of its body."""
    attrs = {k: concrete(v, dims) for k, v in node.attrs.items()} if dims else dict(node.attrs)
    types = tuple(TensorType(concrete(t.shape, dims), _wide_type(t.dtype) if wide else t.dtype)
                  for t in node.types)
    if node.op.reference is None:
        from terrazzo.dtypes import as_dtype
        from terrazzo.graph.ir import Value

        values = [None if a is None else Value(TensorType(a.shape, as_dtype(a.dtype)))
                  for a in inputs]
        outputs = expand(node.op, values, attrs)
        body = Graph(node.op.name, tuple(v for v in values if v is not None), outputs)
        return run(body, [a for a in inputs if a is not None], wide=wide)
    result = node.op.reference(*inputs, out=types if len(types) > 1 else types[0], **attrs)
    results = list(result) if isinstance(result, (tuple, list)) else [result]
    return [np.asarray(r) for r in results]


def _wide_type(dtype: Any) -> Any:
    return float64 if dtype.is_float else complex128 if dtype.is_complex else dtype


def _widen(array: np.ndarray) -> np.ndarray:
    from terrazzo.dtypes import as_dtype

    return array.astype(_wide_type(as_dtype(array.dtype)).np)
