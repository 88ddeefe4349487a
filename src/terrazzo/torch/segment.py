"""A piece of an FX graph as compiled code: traced, compiled for its sizes, and called.

Sizes that vary are symbols of one compilation. What tracing asks of them is kept as guards; sizes
that answer otherwise get a variant of their own. Sizes that only data tells, and those for which
compiling with symbols fails, are fixed: code is made for each of them.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._prims_common import is_contiguous_or_false
from torch.fx import GraphModule, Node

from terrazzo.compiler.driver import compile_graph
from terrazzo.compiler.options import Options
from terrazzo.dtypes import as_dtype
from terrazzo.graph.ir import Graph, TensorType, Value
from terrazzo.graph.reach import Reach, collecting
from terrazzo.graph.scopes import trace_scope
from terrazzo.index import Index, Var, free_vars
from terrazzo.index.guards import Guard
from terrazzo.knobs import knobs
from terrazzo.ops.shape import permute_dims
from terrazzo.torch.convert import Conversion, call_text, constant_value, converted, fresh
from terrazzo.torch.devices import HOST, current, device_of
from terrazzo.torch.entry import Result, Source, entry, rows
from terrazzo.torch.options import BackendOptions
from terrazzo.torch.symbols import SMALLEST, Names, index_of, symbols_in, variable
from terrazzo.torch.unify import for_all_sizes

INT8 = as_dtype("int8")
MOST_VARIANTS = 8  # of guards; further sizes are fixed

Run = Callable[..., Sequence[Any]]


@dataclass(frozen=True, eq=False)
class Piece:
    """What a segment computes: nodes of an FX graph from given ones to wanted ones."""

    name: str
    module: GraphModule
    nodes: tuple[Node, ...]  # in order, views of inputs among them
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    hints: Mapping[str, int] = field(default_factory=dict)  # of the symbols that it depends on
    unbacked: frozenset[str] = frozenset()
    over: Mapping[Node, Node] = field(default_factory=dict)  # outputs to be written over inputs
    looks: bool = True  # whether an index out of bounds is an error: a backward pass has had it

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbols that sizes are made of, in the order in which a call names them."""
        return tuple(sorted({*self.hints, *self.unbacked}))


def symbolic_sizes(nodes: Sequence[Node]) -> Iterator[torch.SymInt]:
    """Sizes that vary, of some nodes' tensors and in their arguments."""
    for node in nodes:
        for n in (node, *node.all_input_nodes):
            val = n.meta.get("val")
            for v in val if isinstance(val, (tuple, list)) else (val,):
                sizes = (*v.shape, *v.stride()) if isinstance(v, torch.Tensor) else (v,)
                yield from (size for size in sizes if isinstance(size, torch.SymInt))


def symbols_of(nodes: Sequence[Node]) -> set[str]:
    """The symbols that such sizes are made of."""
    return {name for size in symbolic_sizes(nodes) for name in symbols_in(size)}


# ---------------------------------------------------------------- tracing
class Traced(NamedTuple):
    """A piece as a graph of ours."""

    graph: Graph
    given: list[Node]  # what its inputs stand for
    reaches: tuple[Reach, ...]  # how far its indices may go


def traced(piece: Piece, names: Names, frozen: Mapping[Node, Any],
           numbers: Mapping[Node, Value] | None = None) -> Traced:
    """The graph of a piece; some of its inputs may be constants.

    Nodes may also stand for `numbers`, which are inputs that come last.
    """
    given = [n for n in piece.inputs if n not in frozen]
    module = piece.module
    into = Conversion({}, names, lambda path: operator.attrgetter(path)(module))
    inputs = [_stored(fresh(n, names, f"x{i}"), n) for i, n in enumerate(given)]
    with trace_scope(), collecting() as heard:
        into.values.update((n, _as_seen(v, n)) for n, v in zip(given, inputs))
        into.values.update(numbers or {})
        into.values.update((n, constant_value(t)) for n, t in frozen.items() if n in piece.inputs)
        for node in piece.nodes:
            if node.target is operator.getitem:
                into.values[node] = into.values[node.args[0]][node.args[1]]
            else:
                heard.where = partial(call_text, node)
                into.values[node] = converted(node, into)
        outputs = tuple(_as_stored(into.values[n], n) for n in piece.outputs)
    sizes = _sizes_without_input(inputs, names)
    return Traced(Graph(piece.name, (*inputs, *sizes, *(numbers or {}).values()), outputs), given,
                  heard.reaches if piece.looks else ())


def _stored(value: Value, node: Node) -> Value:
    """An input as it lies in memory."""
    order = order_of(node.meta["val"])
    if order is None:
        return value
    shape = tuple(value.type.shape[d] for d in order)
    return Value(TensorType(shape, value.dtype), name=value.name)


def _as_seen(value: Value, node: Node) -> Value:
    """What lies in memory in another order of axes, in the order that the graph knows."""
    order = order_of(node.meta["val"])
    if order is None:
        return value
    return permute_dims(value, axes=tuple(order.index(d) for d in range(len(order))))


def _as_stored(value: Value, node: Node) -> Value:
    """A result as it lies in memory: what torch has in another order of axes is stored so."""
    order = order_of(node.meta["val"])
    return value if order is None else permute_dims(value, axes=order)


def _sizes_without_input(inputs: Sequence[Value], names: Names) -> list[Value]:
    """Empty rows, for symbols that are not the size of an axis of any input."""
    shown = {n for v in inputs for n in v.type.shape if isinstance(n, Var)}
    missing = sorted({v for n in names.values() for v in free_vars(n)} - shown,
                     key=lambda v: v.name)
    return [Value(TensorType((v,), INT8), name=f"size_{v.name}") for v in missing]


def order_of(fake: Any) -> tuple[int, ...] | None:
    """The order of axes in which a dense tensor lies in memory; None: row major, or not dense."""
    shape, strides = [_hint(n) for n in fake.shape], [_hint(n) for n in fake.stride()]
    if 0 in shape:
        return None
    # Axes of one element lie anywhere; they keep their place.
    axes = sorted(range(len(shape)), key=lambda d: -strides[d])
    step = 1
    for d in reversed(axes):
        if shape[d] == 1:
            continue
        if strides[d] != step:
            return None
        step *= shape[d]
    moving = [d for d in axes if shape[d] != 1]
    return None if moving == sorted(moving) else tuple(axes)


def is_dense(fake: Any) -> bool:
    """Whether a tensor is known to fill its memory, in some order of axes."""
    return is_contiguous_or_false(fake) or order_of(fake) is not None


def _hint(n: Any) -> int:
    if isinstance(n, int):
        return n
    hint = n.node.hint if n.node.has_hint() else None
    return 7 if hint is None else int(hint)


# ---------------------------------------------------------------- compiling
@dataclass(frozen=True, eq=False)
class Variant:
    """An executable, and the sizes that it is for."""

    guards: tuple[Guard, ...]
    executable: Any
    given: tuple[Node, ...]
    extra: tuple[str, ...]  # sizes that come as empty rows, after the inputs


class Segment:
    """A piece with what was compiled for it. Call it with tensors and the values of symbols."""

    def __init__(self, piece: Piece, options: BackendOptions,
                 frozen: Mapping[Node, Any] | None = None):
        self.piece, self.options, self.frozen = piece, options, dict(frozen or {})
        self.threads = options.threads
        self.lock = threading.RLock()
        self.variants: list[Variant] = []
        self.runs: dict[tuple[int, ...], Run] = {}
        if not piece.unbacked:
            self.find(tuple(piece.hints[s] for s in piece.symbols))

    def __call__(self, sizes: tuple[int, ...], *tensors: Any) -> Sequence[Any]:
        run = self.runs.get(sizes)
        return (self.find(sizes) if run is None else run)(*tensors)

    def find(self, sizes: tuple[int, ...]) -> Run:
        """What calls with these sizes run."""
        with self.lock:
            if sizes not in self.runs:
                numbers = dict(zip(self.piece.symbols, sizes, strict=True))
                variant = self.variant(numbers)
                dims = getattr(variant.executable, "dims", [])
                self.runs[sizes] = entry(
                    variant.executable, results(self.piece, numbers),
                    [*self.sources(variant), *rows(variant.extra, numbers, self.device)],
                    [numbers[d.name] for d in dims], self.threads, self.device,
                    self.arguments_over(variant),
                    self.options.cuda_graphs and not self.piece.symbols)
            return self.runs[sizes]

    @property
    def device(self) -> torch.device:
        """Where its results are made."""
        return device_of(n.meta["val"] for n in self.piece.outputs)

    def sources(self, variant: Variant) -> list[Source]:
        """Which argument each input of the executable is; rows that tell sizes come after them."""
        at = {n: i for i, n in enumerate(self.piece.inputs)}
        return [Source(at[n], order=order_of(n.meta["val"]), has_gaps=not is_dense(n.meta["val"]),
                       is_elsewhere=n.meta["val"].device != self.device,
                       number=self.number(n.meta["val"])) for n in variant.given]

    def number(self, fake: Any) -> Any:
        """The type of a number that has to be brought here; None for others."""
        return fake.dtype if fake.device != self.device and not fake.dim() else None

    def arguments_over(self, variant: Variant) -> list[int | None]:
        """For each output the argument in whose memory it is written."""
        granted = getattr(variant.executable, "over", ())
        at = {n: i for i, n in enumerate(self.piece.inputs)}
        return [None if i is None else at[variant.given[i]] for i in granted]

    @property
    def written_over(self) -> dict[Node, Node]:
        """The outputs that are written over inputs, in code for the one size that there is."""
        granted = self.arguments_over(self.variants[0]) if not self.piece.symbols else []
        return {n: self.piece.inputs[i] for n, i in zip(self.piece.outputs, granted)
                if i is not None}

    def variant(self, numbers: Mapping[str, int]) -> Variant:
        """Code for these sizes: found among what there is, or made."""
        for known in self.variants:
            if all(guard.holds(numbers) for guard in known.guards):
                return known
        made = None
        if numbers and not self.piece.unbacked and len(self.variants) < MOST_VARIANTS and (
                min(numbers.values()) >= SMALLEST):
            made = self.symbolic(numbers)
        made = made or self.fixed(numbers)
        self.variants.append(made)
        return made

    def fixed(self, numbers: Mapping[str, int]) -> Variant:
        """Compiled for these sizes alone."""
        made = traced(self.piece, numbers, self.frozen)
        guards = tuple(Guard("==", variable(s), n) for s, n in numbers.items())
        return Variant(guards, self.compiled(made, numbers), tuple(made.given), ())

    def symbolic(self, numbers: Mapping[str, int]) -> Variant | None:
        """Compiled for all sizes that answer like these; None where that cannot be."""
        found = for_all_sizes(
            numbers, lambda names: traced(self.piece, names, self.frozen),
            self.compiled)
        if found is None:
            return None
        (graph, given, _), code, guards = found
        extra = tuple(v.name.removeprefix("size_") for v in graph.inputs[len(given):])
        # What is no size of a tensor may be any number.
        guards = (*guards, *(Guard("<=", SMALLEST, variable(s)) for s in extra))
        return Variant(guards, code, tuple(given), extra)

    def compiled(self, made: Traced, names: Names) -> Any:
        graph, given, reaches = made
        strides = [_strides(n.meta["val"], names) for n in given]
        strides += [None] * (len(graph.inputs) - len(given))
        settings = knobs.now
        if self.threads and settings.threads != self.threads:
            settings = replace(settings, threads=self.threads)
        if self.options.tune and not settings.tune:
            settings = replace(settings, tune=True)
        if self.device != HOST:
            settings = replace(settings, chip=self.device.type)
        over = tuple(given.index(self.piece.over[n]) if n in self.piece.over else None
                     for n in self.piece.outputs)
        with current(self.device):
            return compile_graph(graph, strides=tuple(strides), over=over if any(
                n is not None for n in over) else (), options=Options(settings), reaches=reaches)


def _strides(fake: Any, names: Names) -> tuple[Index, ...] | None:
    """The strides of an input that has gaps or repeats; None where it is read as it is, or copied.

    A copy costs less than gathering along the last axis.
    """
    if is_dense(fake) or 0 in fake.shape:
        return None
    steps = tuple(0 if n == 1 else index_of(s, names) for n, s in zip(fake.shape, fake.stride()))
    return steps if steps[-1] in (0, 1) else None


def results(piece: Piece, names: Names) -> list[Result]:
    """How the outputs are allocated: shape, strides and type of each, as torch said."""
    made = []
    for node in piece.outputs:
        fake = node.meta["val"]
        shape = tuple(index_of(n, names) for n in fake.shape)
        strides = tuple(index_of(n, names) for n in fake.stride())
        dense = strides if is_dense(fake) else _row_major(shape)
        made.append(Result(shape, dense, fake.dtype, None if is_dense(fake) else strides))
    return made


def _row_major(shape: tuple[Index, ...]) -> tuple[Index, ...]:
    strides: list[Index] = []
    step: Index = 1
    for n in reversed(shape):
        strides.append(step)
        step = step * (max(n, 1) if isinstance(n, int) else n)
    return tuple(reversed(strides))
