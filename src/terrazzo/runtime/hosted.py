"""Graphs with control flow, or with operators of LAPACK: compiled pieces, the host between them.

The host decides which branch runs and how often a body does; branches and bodies are compiled like
any other graph, once, and called the direct way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np

from terrazzo.base.shapes import Shape
from terrazzo.dtypes import DType, as_dtype
from terrazzo.errors import ArtifactError
from terrazzo.graph.evaluate import bind_dims, concrete, run_node
from terrazzo.graph.ir import Graph, Node, TensorType, Value
from terrazzo.graph.rebuild import computed_from
from terrazzo.index import IndexExpr, Var, free_vars
from terrazzo.runtime import fastcall
from terrazzo.runtime.executable import fault_of
from terrazzo.runtime.layout import literal

Compile = Callable[[Graph], Any]
Dims = Mapping[Var, int]


def on_host(node: Node) -> bool:
    """Whether a node has neither expression nor loops, so that Python has to run it."""
    op = node.op
    return op.expr is None and op.loops is None and op.body is None and op.kind != "attention"


def needs_host(graph: Graph) -> bool:
    """Whether any operator of a graph runs on the host."""
    return any(on_host(node) for node in graph.nodes)


class HostedExecutable:
    """A graph cut at the operators that the host runs; everything between is compiled."""

    def __init__(self, graph: Graph, compile_graph: Compile, declared: Graph | None = None,
                 reaches: Sequence[Any] = ()):
        self.graph, self.name = graph, graph.name
        self.reaches = reaches  # of indices; the last output says whether they kept to them
        self.declared = declared or graph  # the same, with complex values at its edge as such
        # what runs, the values it takes, the values it gives
        self.steps: list[tuple[_Step, tuple[Value, ...], tuple[Value, ...]]] = [
            (_Piece(part, compile_graph) if isinstance(part, Graph)
             else _host_step(part, compile_graph), inputs, outputs)
            for part, inputs, outputs in pieces(graph)]
        self.made = {v for step, _, outputs in self.steps if isinstance(step, _Piece)
                     for v in outputs}

    def run(self, arrays: Sequence[Any]) -> list[Any]:
        """The outputs for the given inputs, as torch tensors when any input is one."""
        host = [_in_pairs(to_numpy(a), v) for a, v in zip(arrays, self.graph.inputs, strict=True)]
        dims = bind_dims(self.graph, host)
        memory: dict[Value, np.ndarray] = dict(zip(self.graph.inputs, host, strict=True))
        for step, inputs, outputs in self.steps:
            memory.update(zip(outputs, step([memory[v] for v in inputs], dims), strict=True))
        word = int(memory[self.graph.outputs[-1]]) if self.reaches else 0
        if word > 0:
            raise fault_of(word, self.reaches, {d.name: n for d, n in dims.items()})
        # Compiled pieces make their results; loops and what Python runs may hand on what they got.
        results: list[np.ndarray] = []
        for i, v in enumerate(self.graph.outputs[:len(self.declared.outputs)]):
            fresh = v in self.made and all(v is not other for other in self.graph.outputs[:i])
            results.append(memory[v] if fresh else copied(memory[v]))
        results = [_out_of_pairs(r, v) for r, v in zip(results, self.declared.outputs, strict=True)]
        tensor = next(filter(_is_torch, arrays), None)
        return results if tensor is None else [to_torch(r).to(tensor.device) for r in results]

    @property
    def kind(self) -> str:
        """What the host does: decide, or call LAPACK."""
        names = {n.op.name for n in self.graph.nodes if on_host(n)}
        return "control flow" if names & _CONTROL.keys() else ", ".join(sorted(names))

    @property
    def output_types(self) -> list[tuple[DType, Shape]]:
        """The type and shape of every output."""
        return [(v.dtype, v.shape) for v in self.declared.outputs]

    def __call__(self, *arrays: Any) -> Any:
        results = self.run(arrays)
        return results[0] if len(results) == 1 else tuple(results)

    def save(self, path: str | PathLike[str]) -> None:
        """Refused: a file holds machine code only, and here the host decides between kernels."""
        raise ArtifactError(f"{self.name} has {self.kind}, which runs on the host and cannot be "
                            "saved", where=str(path),
                            hint="save the executables of what is inside, or use tz.where")

    def __repr__(self) -> str:
        return f"<executable {self.name} with {self.kind}, {len(self.steps)} steps>"


# ---------------------------------------------------------------- compiled pieces
class _Piece:
    """A graph that is compiled when first run, and for each new layout entered directly."""

    def __init__(self, graph: Graph, compile_graph: Compile):
        self.graph, self.compile = graph, compile_graph
        # A size that no input shows cannot be found at run time: such a graph is compiled for
        # every value of its sizes.
        shown = {n for v in graph.inputs for n in v.shape if isinstance(n, Var)}
        self.hidden = sorted(sizes_in(graph) - shown, key=lambda d: d.name)
        self.executables: dict[tuple[int, ...], Any] = {}
        self.entries: dict[Any, Callable[..., Any]] = {}

    def __call__(self, arrays: Sequence[np.ndarray], dims: Dims) -> list[np.ndarray]:
        sizes = tuple(dims[d] for d in self.hidden)
        key = (sizes, fastcall.key_of(arrays))
        entry = self.entries.get(key)
        if entry is None:
            if sizes not in self.executables:
                graph = self.graph if not sizes else _with_sizes(self.graph, dims)
                self.executables[sizes] = self.compile(graph)
            structure = list(range(len(self.graph.outputs)))
            entry = fastcall.entry(self.executables[sizes], structure, arrays)
            self.entries[key] = entry
        result: list[np.ndarray] = entry(arrays)
        return result


def graphs_in(node: Node) -> list[Graph]:
    """The branches or bodies that a node holds."""
    return [v for v in node.attrs.values() if isinstance(v, Graph)]


def sizes_in(graph: Graph) -> set[Var]:
    """Every symbolic size that a graph mentions."""
    found: set[Var] = set()
    for value in (*graph.inputs, *graph.outputs, *(v for n in graph.nodes for v in n.outputs)):
        found |= {d for n in value.shape for d in free_vars(n)}
    for node in graph.nodes:
        for index in _indices(tuple(node.attrs.values())):
            found |= free_vars(index)
        for inner in graphs_in(node):
            found |= sizes_in(inner)
    return found


def _indices(value: Any) -> Iterator[IndexExpr]:
    if isinstance(value, IndexExpr):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _indices(item)


def _with_sizes(graph: Graph, dims: Dims) -> Graph:
    """A graph with its symbolic sizes made known."""
    table = {v: Value(_sized(v.type, dims), name=v.name) for v in graph.inputs}
    for node in graph.nodes:
        attrs = {k: _with_sizes(v, dims) if isinstance(v, Graph) else concrete(v, dims)
                 for k, v in node.attrs.items()}
        fresh = Node(node.op, tuple(None if v is None else table[v] for v in node.inputs), attrs,
                     tuple(_sized(t, dims) for t in node.types), node.where)
        table.update(zip(node.outputs, fresh.outputs, strict=True))
    return Graph(graph.name, tuple(table[v] for v in graph.inputs),
                 tuple(table[v] for v in graph.outputs))


def _sized(type: TensorType, dims: Dims) -> TensorType:
    return TensorType(concrete(type.shape, dims), type.dtype)


# ---------------------------------------------------------------- what the host decides
_Step = Callable[[Sequence[np.ndarray], Dims], Sequence[np.ndarray]]


def _host_step(node: Node, compile_graph: Compile) -> _Step:
    make = _CONTROL.get(node.op.name)
    if make is not None:
        return make(node, compile_graph)

    def by_reference(arrays: Sequence[np.ndarray], dims: Dims) -> Sequence[np.ndarray]:
        given = iter(arrays)
        return run_node(node, [None if v is None else next(given) for v in node.inputs], dims)

    return by_reference


def _cond(node: Node, compile_graph: Compile) -> _Step:
    branches = [_Piece(node.attrs[k], compile_graph) for k in ("else_graph", "then_graph")]
    return lambda arrays, dims: branches[bool(arrays[0])](arrays[1:], dims)


def _while_loop(node: Node, compile_graph: Compile) -> _Step:
    test = _Piece(node.attrs["cond_graph"], compile_graph)
    body = _Piece(node.attrs["body_graph"], compile_graph)
    carries = node.attrs["carries"]

    def run(arrays: Sequence[np.ndarray], dims: Dims) -> Sequence[np.ndarray]:
        state, rest = list(arrays[:carries]), list(arrays[carries:])
        while bool(test(state + rest, dims)[0]):
            state = body(state + rest, dims)
        return state

    return run


def _scan(node: Node, compile_graph: Compile) -> _Step:
    body = _Piece(node.attrs["body"], compile_graph)
    carries, sequences = node.attrs["carries"], node.attrs["sequences"]

    def run(arrays: Sequence[np.ndarray], dims: Dims) -> Sequence[np.ndarray]:
        state, xs = list(arrays[:carries]), arrays[carries:carries + sequences]
        rest = arrays[carries + sequences:]
        length = concrete(node.attrs["length"], dims)
        stacked = [np.empty(concrete(t.shape, dims), t.dtype.np) for t in node.types[carries:]]
        for k in range(length)[::-1 if node.attrs["reverse"] else 1]:
            # x[k, ...] stays an array where x[k] would become a number.
            results = body([*state, *(x[k, ...] for x in xs), *rest], dims)
            state = list(results[:carries])
            for all_rows, row in zip(stacked, results[carries:], strict=True):
                all_rows[k] = row
        return [*state, *stacked]

    return run


_CONTROL: dict[str, Callable[[Node, Compile], _Step]] = {
    "cond": _cond, "while_loop": _while_loop, "scan": _scan,
}


# ---------------------------------------------------------------- cutting
def pieces(graph: Graph) -> list[tuple[Graph | Node, tuple[Value, ...], tuple[Value, ...]]]:
    """A graph cut at the nodes that no kernel computes.

    Such nodes and the graphs between them in the order they run, each with the values of the whole
    graph that it takes and those that it gives.
    """
    found: list[tuple[Graph | Node, tuple[Value, ...], tuple[Value, ...]]] = []
    known: set[Value] = set(graph.inputs)

    def segment(wanted: Sequence[Value]) -> None:
        """What is needed for some values from those already known."""
        missing = tuple(dict.fromkeys(v for v in wanted if v not in known))
        if not missing:
            return
        leaves = _leaves(missing, known)
        fresh = {v: Value(v.type, name=v.name or f"v{i}") for i, v in enumerate(leaves)}
        piece = Graph(f"{graph.name}_{len(found)}", tuple(fresh.values()),
                      computed_from(missing, fresh))
        found.append((piece, tuple(leaves), missing))
        known.update(missing)

    for node in graph.nodes:
        if on_host(node):
            inputs = tuple(v for v in node.inputs if v is not None)
            segment(inputs)
            found.append((node, inputs, node.outputs))
            known.update(node.outputs)
    segment(graph.outputs)
    return found


def compiled_parts(graph: Graph) -> list[Graph]:
    """The graphs of kernels alone that a graph with control flow is made of, in order."""
    found: list[Graph] = []
    for part, _, _ in pieces(graph):
        if isinstance(part, Graph):
            found.append(part)
        else:
            found += [inner for g in graphs_in(part) for inner in compiled_parts(g)]
    return found


def _leaves(wanted: Sequence[Value], known: set[Value]) -> list[Value]:
    found: dict[Value, None] = {}
    seen: set[Value] = set()
    stack = list(wanted)
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        if value in known or value.node is None:
            found.setdefault(value)
        else:
            stack.extend(v for v in value.node.inputs if v is not None)
    return list(found)


# ---------------------------------------------------------------- numpy and torch
def _is_torch(x: Any) -> bool:
    return hasattr(x, "data_ptr")


def to_numpy(x: Any) -> np.ndarray:
    """The same memory as a numpy array, also for types that only ml_dtypes has."""
    if not _is_torch(x):
        return np.asarray(x)
    import torch

    x = literal(x.detach()).cpu()
    kind = as_dtype(x.dtype).np
    try:
        return x.numpy()
    except TypeError:
        bits = {1: torch.uint8, 2: torch.int16}[kind.itemsize]
        return x.view(bits).numpy().view(kind)


def _in_pairs(x: np.ndarray, value: Value) -> np.ndarray:
    """Complex numbers as the pairs of real ones that a graph takes in their place."""
    if x.dtype.kind != "c" or value.dtype.is_complex:
        return x
    return np.ascontiguousarray(x).reshape(x.shape)[..., None].view(value.dtype.np)


def _out_of_pairs(x: np.ndarray, value: Value) -> np.ndarray:
    if not value.dtype.is_complex or x.dtype.kind == "c":
        return x
    return np.ascontiguousarray(x).view(value.dtype.np)[..., 0]


def to_torch(x: np.ndarray) -> Any:
    """The same memory as a torch tensor, also for types that numpy itself has not."""
    x = np.ascontiguousarray(x).reshape(x.shape)
    if not x.flags.writeable:  # a constant; torch has no such tensors, and would warn
        with warnings.catch_warnings(action="ignore"):
            return _from_numpy(x)
    return _from_numpy(x)


def _from_numpy(x: np.ndarray) -> Any:
    import torch

    try:
        return torch.from_numpy(x)
    except TypeError:
        bits = {1: np.uint8, 2: np.int16}[x.dtype.itemsize]
        return torch.from_numpy(x.view(bits)).view(getattr(torch, as_dtype(x.dtype).name))


def copied(x: Any) -> Any:
    """The same in memory of its own: arrays and tensors, and lists, tuples and dicts of them."""
    if isinstance(x, np.ndarray):
        return x.copy()
    if isinstance(x, (list, tuple)):
        return type(x)(map(copied, x))
    if isinstance(x, dict):
        return {k: copied(v) for k, v in x.items()}
    return x.clone() if _is_torch(x) else x


__all__ = ["HostedExecutable", "compiled_parts", "copied", "graphs_in", "needs_host", "on_host",
           "pieces", "sizes_in", "to_numpy", "to_torch"]
