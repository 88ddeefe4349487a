"""`tz.torch.export`: a model as one file that runs without torch.

    tz.torch.export(model, (x,), "model.tzx")
    tz.load("model.tzx")(x.numpy())

torch.export makes one graph of the model, the converters of `aten/` make it ours, and weights are
constants of it. The file has the names of inputs and outputs, and the options it was made with.
"""

from __future__ import annotations

import inspect
import operator
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from terrazzo.compiler.driver import compile_graph
from terrazzo.compiler.options import Options
from terrazzo.errors import ArgumentError, TerrazzoError, UnsupportedOperator
from terrazzo.graph.ir import Graph, Value
from terrazzo.graph.reach import Reach, collecting
from terrazzo.graph.scopes import trace_scope
from terrazzo.index import Var
from terrazzo.index.guards import Guard
from terrazzo.knobs import knobs
from terrazzo.runtime.artifact import model_notes
from terrazzo.runtime.executable import Executable
from terrazzo.torch.convert import (
    Conversion,
    call_text,
    constant_value,
    converted,
    fresh,
    location,
)
from terrazzo.torch.decompositions import decompositions
from terrazzo.torch.placement import sizes_of, tensors_in
from terrazzo.torch.symbols import Names, symbols_in
from terrazzo.torch.unify import for_all_sizes


def export(model: Any, args: Sequence[Any], path: str | os.PathLike[str], *,
           kwargs: Mapping[str, Any] | None = None, dynamic_shapes: Any = None,
           input_names: Sequence[str] = (), output_names: Sequence[str] = (), threads: int = 0
           ) -> Executable:
    """Compile a model for such arguments into a file; answers what `tz.load` would.

    `dynamic_shapes` says which sizes may vary, as for torch.export: `{"x": {0: Dim("batch")}}`.
    Inputs are called as the parameters of `forward` are, and outputs `output_0` and so on, unless
    names are given. A model that changes its own state, or that holds what there is no code for,
    is refused: nothing falls back to torch in the file.
    """
    module = model if isinstance(model, torch.nn.Module) else _Function(model)
    if module.training:
        raise ArgumentError("the model is in training mode", hint="call model.eval() before")
    with torch.no_grad():
        program = torch.export.export(module, tuple(args), dict(kwargs or {}),
                                      dynamic_shapes=dynamic_shapes, strict=False)
        program = program.run_decompositions(decompositions())
        source = _source(program, input_names, output_names,
                         list(_dims(module, args, kwargs or {}, dynamic_shapes)))
        settings = replace(knobs.now, threads=threads) if threads else knobs.now
        executable = _compiled(source, Options(settings), {
            "torch": torch.__version__, "threads": threads})
    executable.save(path)
    return executable


class _Function(torch.nn.Module):
    """A function where a module is asked for."""

    def __init__(self, function: Any):
        super().__init__()
        self.forward: Any = partial(function)  # whose parameters name the inputs
        try:
            inspect.signature(function)
        except ValueError:  # written in C, some of which tell no parameters
            self.forward = lambda *args: function(*args)
        self.eval()


@dataclass(frozen=True, eq=False)
class _Source:
    """What torch.export answered, by roles."""

    name: str
    module: Any
    inputs: Mapping[Node, str]  # and how they are called
    weights: Mapping[Node, Any]
    calls: tuple[Node, ...]
    outputs: Mapping[str, Node]
    numbers: Mapping[str, int]  # what sizes that vary are in the arguments that were given
    shown: Mapping[str, str]  # what the user calls torch's symbols
    bounds: tuple[Guard, ...]  # of sizes that vary

    def named(self, names: Names) -> Names:
        """What torch's symbols stand for, given that for the user's names."""
        return {symbol: names[shown] for symbol, shown in self.shown.items()}


def _dims(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: Any
          ) -> Iterator[Mapping[int, Any]]:
    """What `dynamic_shapes` says of each tensor among the arguments, in order."""
    values: Any = tuple(args)
    if isinstance(given, Mapping) or kwargs:
        values = inspect.signature(module.forward).bind(*args, **kwargs).arguments

    def walk(value: Any, spec: Any) -> Iterator[Mapping[int, Any]]:
        if isinstance(value, torch.Tensor):
            yield dict(enumerate(spec)) if isinstance(spec, (list, tuple)) else spec or {}
        elif isinstance(value, Mapping):
            for key, inner in value.items():
                yield from walk(inner, (spec or {}).get(key))
        elif isinstance(value, (list, tuple)):
            for i, inner in enumerate(value):
                yield from walk(inner, spec[i] if spec else None)

    return walk(values, given)


def _shown(inputs: Sequence[Node], dims: Sequence[Mapping[int, Any]], symbols: Iterable[str]
           ) -> dict[str, str]:
    """Names for torch's symbols: the user's where there is one."""
    shown = {s: s for s in symbols}
    for node, spec in zip(inputs, dims):
        for axis, dim in spec.items():
            size, name = node.meta["val"].shape[axis], getattr(dim, "__name__", None)
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and name:
                shown[size.node.expr.name] = name
    return shown


def _bounds(dims: Sequence[Mapping[int, Any]], names: Iterable[str]) -> Iterator[Guard]:
    """What the user says of sizes, and that they are at least 1."""
    given = {dim.__name__: dim for spec in dims for dim in spec.values()
             if hasattr(dim, "__name__")}
    for name in dict.fromkeys(names):
        dim, size = given.get(name), Var(name, 1)
        yield Guard("<=", max(1, int(getattr(dim, "min", 1))), size)
        most = getattr(dim, "max", None)
        if isinstance(most, int) and most < sys.maxsize - 1:
            yield Guard("<=", size, most)


def _source(program: Any, input_names: Sequence[str], output_names: Sequence[str],
            dims: Sequence[Mapping[int, Any]]) -> _Source:
    graph = program.graph_module.graph
    nodes = {n.name: n for n in graph.nodes}
    kinds = {s.arg.name: s for s in program.graph_signature.input_specs}
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    inputs = [n for n in placeholders if kinds[n.name].kind is InputKind.USER_INPUT
              and isinstance(n.meta.get("val"), torch.Tensor)]
    effect = next((n for n in graph.nodes if n.target is torch.ops.higher_order.with_effects), None)
    if effect is not None:
        raise UnsupportedOperator(f"{effect.args[1]} may raise an error of its own while it runs",
                                  where=location(effect) or None, hint="such models run in torch")
    weights = {n: _weight(program, kinds[n.name]) for n in placeholders
               if kinds[n.name].kind is not InputKind.USER_INPUT}
    changed = [s.target for s in program.graph_signature.output_specs
               if s.kind is not OutputKind.USER_OUTPUT]
    if changed:
        raise UnsupportedOperator(f"the model changes {changed[0]} when it runs",
                                  hint="hand state in and out as arguments and results")
    results = [s.arg for s in program.graph_signature.output_specs]
    found = [nodes[r.name] for r in results if getattr(r, "name", None) in nodes
             and isinstance(nodes[r.name].meta.get("val"), torch.Tensor)]
    if len(found) != len(results):
        raise UnsupportedOperator("a result of the model is no tensor")
    numbers, unbacked = sizes_of(program.graph_module)
    if unbacked:
        raise UnsupportedOperator("a size in the model hangs on the contents of its inputs",
                                  where=_where(graph, unbacked) or None)
    whole = {n.node.expr.name for i in inputs for n in i.meta["val"].shape
             if isinstance(n, torch.SymInt) and n.node.expr.is_Symbol}
    shown = _shown(inputs, dims, numbers)
    for symbol in numbers.keys() - whole:
        raise UnsupportedOperator(f"the size {shown[symbol]} is not itself a dimension of an input",
                                  hint="let whole dimensions vary, or fix this one")
    return _Source(
        getattr(program.graph_module, "_name", "") or "model", program.graph_module,
        dict(zip(inputs, _names(input_names, [n.name for n in inputs], "inputs"), strict=True)),
        weights, tuple(n for n in graph.nodes if n.op == "call_function"),
        dict(zip(_names(output_names, [f"output_{i}" for i in range(len(found))], "outputs"),
                 found, strict=True)), {shown[s]: n for s, n in numbers.items()}, shown,
        tuple(_bounds(dims, shown.values())))


def _weight(program: Any, spec: Any) -> Any:
    table = program.constants if spec.kind in (
        InputKind.CONSTANT_TENSOR, InputKind.CUSTOM_OBJ) or spec.target in program.constants else (
        program.state_dict)
    return table[spec.target]


def _names(given: Sequence[str], found: Sequence[str], word: str) -> list[str]:
    if given and len(given) != len(found):
        raise ArgumentError(f"{len(given)} names for {len(found)} {word}")
    return list(given or found)


def _where(graph: Any, names: frozenset[str]) -> str:
    """The line that first has one of these sizes."""
    for node in graph.nodes:
        for tensor in tensors_in(node.meta.get("val")):
            if any(symbols_in(n) & names for n in tensor.shape):
                return location(node)
    return ""


# ---------------------------------------------------------------- compiling
def _compiled(source: _Source, options: Options, made_with: Mapping[str, Any]) -> Executable:
    def code(made: tuple[Graph, tuple[Reach, ...]], guards: Sequence[Guard] = ()) -> Executable:
        graph, reaches = made
        notes = model_notes(list(source.outputs), [v.type.shape for v in graph.inputs], guards)
        found = compile_graph(graph, notes={**notes, "made with": dict(made_with)},
                              options=options, reaches=reaches)
        if not isinstance(found, Executable):
            raise UnsupportedOperator("the model needs Python while it runs",
                                      hint="such models run by torch.compile")
        return found

    if source.numbers:
        found = for_all_sizes(source.numbers, lambda names: _traced(source, names),
                              lambda made, _: code(made), one=True)
        if found is None:
            _traced(source, source.numbers)  # says what is wrong, if it is wrong for these sizes
            raise UnsupportedOperator("the model cannot be compiled for all sizes",
                                      hint="fix some sizes, or all of them")
        made, _, guards = found
        # Found again in the cache; the file tells what must hold.
        return code(made, [*source.bounds, *guards])
    return code(_traced(source, {}))


def _traced(source: _Source, given: Names) -> tuple[Graph, tuple[Reach, ...]]:
    """The graph of a model, and how far its indices may go."""
    names = source.named(given)
    into = Conversion({}, names, lambda path: operator.attrgetter(path)(source.module))
    inputs = [fresh(node, names, name) for node, name in source.inputs.items()]
    with trace_scope(), collecting() as heard:
        into.values.update(zip(source.inputs, inputs))
        into.values.update((n, constant_value(t)) for n, t in source.weights.items() if n.users)
        for node in source.calls:
            if node.target is operator.getitem:
                into.values[node] = into.values[node.args[0]][node.args[1]]
            elif any(True for _ in tensors_in(node.meta.get("val"))):
                heard.where = partial(call_text, node)
                into.values[node] = _converted(node, into)
        outputs: tuple[Value, ...] = tuple(into.values[n] for n in source.outputs.values())
    return Graph(source.name, tuple(inputs), outputs), heard.reaches


def _converted(node: Node, into: Conversion) -> Any:
    try:
        return converted(node, into)
    except TerrazzoError as error:
        raise UnsupportedOperator(f"{node.target} cannot be exported: {error.message}",
                                  where=location(node) or None) from error

