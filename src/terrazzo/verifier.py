"""Checks every level of a compilation against the one above, and says which level is to blame.

A graph is taken apart into the kernels it compiles to. Every level of a kernel gets the same
inputs (what the graph level computes there), and its results are held against float64 with the
bounds of `error_bounds`. So the first level that is out of bounds is the one to blame, however
many lower levels inherit the mistake:

    graph   an operator's reference disagrees with its meaning in float64, or a rewrite rule
            changed the value of the graph
    expr    fusion made a program that computes something else
    loop    schedule, lowering or simplification did
    code    the machine code of a kernel does, or the executable puts kernels together wrongly
    gradient  the derivative is not what central differences say
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from terrazzo import error_bounds
from terrazzo.api import Compiled, compiled
from terrazzo.chips.cpu import host
from terrazzo.codegen.llvm import jit
from terrazzo.codegen.llvm.kernel import Kernel, llvm_text
from terrazzo.compiler import Lowering, inlined
from terrazzo.dtypes import as_dtype
from terrazzo.error_bounds import Bounded, Difference
from terrazzo.errors import ArgumentError, TerrazzoError, VerifyError
from terrazzo.expr import evaluate as expr_evaluate
from terrazzo.graph import autodiff
from terrazzo.graph import evaluate as graph_evaluate
from terrazzo.graph.fusion import Group
from terrazzo.graph.ir import Graph, Node, Operator, TensorType, Value
from terrazzo.graph.passes import (
    RULES,
    common_subexpressions,
    fold_constants,
    inline_composites,
    layout,
)
from terrazzo.graph.rewrite import RuleTable, describe, rewrite, user_rules
from terrazzo.graph.trace import trace
from terrazzo.index import Var, evaluate
from terrazzo.knobs import knobs, thread_count
from terrazzo.loop import interpret
from terrazzo.loop.ir import Block, For, Function, Stmt, Store, Tile, children
from terrazzo.runtime import fastcall, pool
from terrazzo.runtime.artifact import Strides
from terrazzo.runtime.executable import Executable, address_of
from terrazzo.runtime.hosted import HostedExecutable, needs_host
from terrazzo.runtime.layout import strides_of
from terrazzo.samples import KINDS, Sample, default_shapes, samples
from terrazzo.torch_eager import to_numpy

LEVELS = ("graph", "expr", "loop", "code", "gradient")
FLOATS = ("float64", "float32", "float16", "bfloat16")
OTHERS = ("int64", "int32", "int8", "uint8", "bool")
# What is particular about memory and sizes shows with floats already.
_OTHER_KINDS = ("given", "random", "special", "odd")
LOOP_LIMIT = 20_000  # statements that the interpreter of Loop IR may run for one kernel


# ---------------------------------------------------------------- one graph
class Subject:
    """One graph with everything it compiles to, made when first needed."""

    def __init__(self, graph: Graph):
        self.source = graph
        self.hosted = needs_host(graph)
        self.in_place: dict[Strides, Executable] = {}
        self.lowering = Lowering(inlined(graph), host())

    @cached_property
    def primitive(self) -> Graph:
        """The graph in primitive operators only, as its author wrote it."""
        return inline_composites(self.source, whole=lambda node: False)

    @cached_property
    def executable(self) -> Any:
        """Compiled afresh: the cache on disk may hold code of a compiler that was sound."""
        if self.hosted:
            return HostedExecutable(self.source, lambda g: Executable(
                Lowering(inlined(g), host()).artifact()))
        return Executable(self.lowering.artifact())

    @cached_property
    def kernels(self) -> list[Kernel]:
        """Each kernel by itself, to be run on values of our choice."""
        functions = self.lowering.functions
        distinct = list(dict.fromkeys(functions))
        obj = jit.compile_object(llvm_text(distinct, host()), host())
        library = jit.load_object(obj, pool.symbols(), [f.name for f in distinct])
        return [Kernel(f, library) for f in functions]

    def check(self, arrays: Sequence[np.ndarray], levels: Sequence[str] = LEVELS,
              note: Callable[[str, Difference], None] = lambda level, difference: None) -> None:
        """Hold every level against the one above for some inputs; raises `Wrong`."""
        dense = [np.ascontiguousarray(a).reshape(a.shape) for a in arrays]
        expected = error_bounds.run(self.primitive, dense)
        outputs = [expected[v] for v in self.primitive.outputs]
        if "graph" in levels:
            self._check_operators(dense, note)
            self._check_rewrites(dense, outputs)
        if not self.hosted and {"expr", "loop", "code"} & set(levels):
            self._check_groups(dense, levels, note)
        if "code" in levels:
            self._check_executable(arrays, dense, outputs, note)

    # ------------------------------------------------------------ graph
    def _check_operators(self, arrays: Sequence[np.ndarray],
                         note: Callable[[str, Difference], None]) -> None:
        """Each operator's reference in its own types against its meaning in float64."""
        for node, inputs, results, dims in _walk(self.source, arrays):
            alone = Graph(node.op.name, *_standing_in(node))
            bounded = error_bounds.follow(
                alone, [error_bounds.exactly(a) for a in inputs if a is not None], dims)
            for value, own, result in zip(node.outputs, alone.outputs, results, strict=True):
                wanted = graph_evaluate.concrete(value.shape, dims)
                if result.shape != wanted or as_dtype(result.dtype) is not value.dtype:
                    raise Wrong("graph", describe(node), Difference(), node.where, reason=(
                        f"it is {as_dtype(result.dtype).short}{list(result.shape)}, and "
                        f"inference says {value.dtype.short}{list(wanted)}"))
                difference = error_bounds.compare(result, bounded[own], value.dtype)
                note("graph", difference)
                if difference.index is not None:
                    raise Wrong("graph", describe(node), difference, node.where)

    def _check_rewrites(self, arrays: Sequence[np.ndarray], outputs: Sequence[Bounded]) -> None:
        if self.hosted:
            return
        apart = _apart(self.lowering.graph, arrays, outputs)
        if apart is not None:
            rule, where = _culprit(inlined(self.source), arrays, outputs)
            raise Wrong("graph", rule, apart, where)

    # ------------------------------------------------------------ expr, loop, kernels
    def _check_groups(self, arrays: Sequence[np.ndarray], levels: Sequence[str],
                      note: Callable[[str, Difference], None]) -> None:
        graph = self.lowering.graph
        dims = graph_evaluate.bind_dims(graph, arrays)
        with _blaming("expr", graph.name):
            groups = self.lowering.fused.groups
        memory: dict[Value, np.ndarray] = dict(zip(graph.inputs, arrays, strict=True))
        for node, _, results, _ in _walk(graph, arrays):
            memory.update(zip(node.outputs, results, strict=True))
        for i, group in enumerate(groups):
            inputs = [memory[v] for v in group.inputs]
            expected = _group_bounds(group, graph, memory, dims)
            what = f"{group.program.name} ({', '.join(n.op.name for n in group.nodes)})"
            for level, run in self._runs(i, group, inputs, dims, levels):
                with _blaming(level, what):
                    results = run()
                for value, bounded, got in zip(group.outputs, expected, results, strict=True):
                    difference = error_bounds.compare(
                        got.reshape(bounded.value.shape), bounded, value.dtype)
                    note(level, difference)
                    if difference.index is not None:
                        raise Wrong(level, what, difference, group.nodes[-1].where)

    def _runs(self, i: int, group: Group, inputs: Sequence[np.ndarray], dims: Mapping[Var, int],
              levels: Sequence[str]) -> Iterator[tuple[str, Callable[[], list[np.ndarray]]]]:
        """The ways to compute a group, from the highest level down."""
        expression = group.program.kind in ("pointwise", "rows", "contraction")
        if "expr" in levels and expression:
            yield "expr", lambda: expr_evaluate.run(group.program, inputs, dims)
        with _blaming("loop", group.program.name):
            function = self.lowering.functions[i]
        if "loop" in levels and _statements(function.body, dict(dims)) <= LOOP_LIMIT:
            yield "loop", lambda: _interpret(function, group, inputs, dims)
        if "code" in levels:
            yield "code", lambda: self._run_native(i, group, inputs, dims)

    def _run_native(self, i: int, group: Group, inputs: Sequence[np.ndarray],
                    dims: Mapping[Var, int]) -> list[np.ndarray]:
        """One kernel on given values, its outputs between fences."""
        inputs = self.lowering.functions[i].arranged(inputs)
        given = [np.ascontiguousarray(a).reshape(a.shape).copy() for a in inputs]
        rooms = [_fenced(v, dims) for v in group.outputs]
        outputs = [inner for inner, _ in rooms]
        self._invoke(i, [address_of(a) for a in (*given, *outputs)], dims)
        for value, (_, sides) in zip(group.outputs, rooms, strict=True):
            if any((side != _GARBAGE).any() for side in sides):
                raise Wrong("code", group.program.name, Difference(), reason=(
                    f"it writes outside its output of type {value.type}"))
        for before, after in zip(inputs, given, strict=True):
            if before.tobytes() != after.tobytes():
                raise Wrong("code", group.program.name, Difference(),
                            reason="it changes one of its inputs")
        return outputs

    def _invoke(self, i: int, pointers: Sequence[int], dims: Mapping[Var, int]) -> None:
        """Run one kernel; the executable itself where it is nothing but that kernel."""
        calls = self.lowering.calls
        if len(calls) == 1 and all(a.kind == "slot" for a in calls[0].arguments):
            slots = [0] * (len(self.source.inputs) + len(self.source.outputs))
            for argument, pointer in zip(calls[0].arguments, pointers, strict=True):
                slots[argument.number] = pointer
            self.executable.run_into(slots, [dims[d] for d in self.executable.dims])
            return
        pool.sync()
        kernel = self.kernels[i]
        kernel(pointers, [dims[d] for d in kernel.function.dims], thread_count())

    # ------------------------------------------------------------ code
    def _check_executable(self, arrays: Sequence[np.ndarray], dense: Sequence[np.ndarray],
                          outputs: Sequence[Bounded],
                          note: Callable[[str, Difference], None]) -> None:
        """The whole executable, by every way in."""
        with _blaming("code", "the executable"):
            ways = {"run": self.executable.run(arrays)}
            strides = tuple(strides_of(a) for a in arrays)
            if any(s is not None for s in strides) and not (self.hosted or self.lowering.dims):
                ways["run in place"] = self._compiled_for(strides).run(arrays)
        if not self.hosted:
            self._spoil_arena(dense)
            ways["run again"] = self.executable.run(dense)
            if len(outputs) == 1:
                ways["direct call"] = [fastcall.entry(self.executable, 0, dense)(dense)]
        for way, results in ways.items():
            for value, bounded, got in zip(self.source.outputs, outputs, results, strict=True):
                difference = error_bounds.compare(got, bounded, value.dtype)
                note("code", difference)
                if difference.index is not None:
                    raise Wrong("code", f"the executable ({way})", difference)

    def _compiled_for(self, strides: Strides) -> Executable:
        """The executable that reads inputs by their strides instead of copying them."""
        if strides not in self.in_place:
            lowering = Lowering(inlined(self.source), host(), strides)
            self.in_place[strides] = Executable(lowering.artifact())
        return self.in_place[strides]

    def _spoil_arena(self, arrays: Sequence[np.ndarray]) -> None:
        """What lies between kernels must not depend on what was there before."""
        size = self.executable.arena_size(self.executable.bind(arrays))
        arena = self.executable.take_arena(size)
        arena.memory.fill(_GARBAGE)
        self.executable.give_arena(arena)


class Wrong(Exception):
    """A level that is out of bounds; becomes a VerifyError where the circumstances are known."""

    def __init__(self, level: str, what: str, difference: Difference, where: str = "",
                 reason: str = ""):
        super().__init__(level, what)
        self.level, self.what, self.difference = level, what, difference
        self.where, self.reason = where, reason

    def describe(self) -> str:
        """What is wrong, in words."""
        if self.reason:
            return self.reason
        d = self.difference
        place = f"element [{', '.join(map(str, d.index or ()))}]" if d.index else "the result"
        return f"{place} is {d.got}, expected {d.expected}"


@contextmanager
def _blaming(level: str, what: str) -> Iterator[None]:
    """Errors of the compiler itself count against the level that raises them."""
    try:
        yield
    except Wrong:
        raise
    except Exception as error:
        where = getattr(error, "where", None) or ""
        text = error.message if isinstance(error, TerrazzoError) else str(error)
        raise Wrong(level, what, Difference(), where,
                    reason=f"{type(error).__name__}: {text}") from error


def _walk(graph: Graph, arrays: Sequence[np.ndarray]) -> Iterator[
        tuple[Node, list[Any], list[np.ndarray], dict[Var, int]]]:
    """Every node with its inputs and results at the graph level."""
    dims = graph_evaluate.bind_dims(graph, arrays)
    memory: dict[Value, np.ndarray] = dict(zip(graph.inputs, arrays, strict=True))
    with np.errstate(all="ignore"):
        for node in graph.nodes:
            inputs = [None if v is None else memory[v] for v in node.inputs]
            results = graph_evaluate.run_node(node, inputs, dims)
            memory.update(zip(node.outputs, results, strict=True))
            yield node, inputs, results, dims


def _standing_in(node: Node) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
    """A node by itself: fresh inputs, and its outputs from them."""
    fresh = tuple(None if v is None else Value(v.type) for v in node.inputs)
    copy = Node(node.op, fresh, node.attrs, node.types, node.where)
    return tuple(v for v in fresh if v is not None), copy.outputs


def _cut(outputs: Sequence[Value], leaves: Sequence[Value]) -> Graph:
    """The part of a graph between some values and others, as a graph of its own."""
    table = {v: Value(v.type) for v in leaves}
    inputs = tuple(table.values())
    whole = Graph("part", (), tuple(outputs))
    for node in whole.nodes:
        if all(v in table for v in node.outputs):
            continue
        if all(v is None or v in table for v in node.inputs):
            fresh = Node(node.op, tuple(None if v is None else table[v] for v in node.inputs),
                         node.attrs, node.types, node.where)
            for old, new in zip(node.outputs, fresh.outputs, strict=True):
                table.setdefault(old, new)
    return Graph("part", inputs, tuple(table[v] for v in outputs))


def _group_bounds(group: Group, graph: Graph, memory: Mapping[Value, np.ndarray],
                  dims: Mapping[Var, int]) -> list[Bounded]:
    # A program does not list inputs that no element of it reads, such as those of empty tensors.
    leaves = list(dict.fromkeys((*group.inputs, *graph.inputs)))
    part = _cut(group.outputs, leaves)
    found = error_bounds.follow(part, [error_bounds.exactly(memory[v]) for v in leaves], dims)
    return [found[v] for v in part.outputs]


# ---------------------------------------------------------------- blame for a rewrite
def _apart(graph: Graph, arrays: Sequence[np.ndarray], outputs: Sequence[Bounded]
           ) -> Difference | None:
    """Where a rewritten graph computes something else than the graph it came from."""
    memory = error_bounds.run(graph, arrays)
    with np.errstate(all="ignore"):
        return _first_apart(graph, memory, outputs)


def _first_apart(graph: Graph, memory: Mapping[Value, Bounded], outputs: Sequence[Bounded]
                 ) -> Difference | None:
    for value, before in zip(graph.outputs, outputs, strict=True):
        after = memory[value]
        both = Bounded(before.value, before.error + after.error)
        difference = error_bounds.compare(after.value.astype(value.dtype.np), both, value.dtype)
        if difference.index is not None:
            return difference
    return None


def _culprit(graph: Graph, arrays: Sequence[np.ndarray], outputs: Sequence[Bounded]
             ) -> tuple[str, str]:
    """The first rewrite that changes the value of a graph, found by applying them one by one."""
    steps: list[tuple[str, Callable[[Graph], tuple[Graph, list[Any]]]]] = [
        ("constant folding", lambda g: _logged(fold_constants, g)),
        ("common subexpressions", lambda g: _logged(common_subexpressions, g)),
        ("choice of layouts", lambda g: _logged(partial(layout, level=knobs.opt_level), g)),
    ]
    steps += [(f"rewrite rule {rule.name!r}", lambda g, rule=rule: rewrite(  # type: ignore[misc]
        g, RuleTable((rule,)), knobs.opt_level)) for rule in RULES + user_rules()]
    changed = True
    while changed:
        changed = False
        for name, step in steps:
            after, applied = step(graph)
            if not applied:
                continue
            if _apart(after, arrays, outputs) is not None:
                first = applied[0]
                return f"{name} on {getattr(first, 'node', graph.name)}", getattr(
                    first, "where", "")
            graph, changed = after, True
    return "the rewrites together", ""


def _logged(step: Callable[..., Graph], graph: Graph) -> tuple[Graph, list[Any]]:
    log: list[Any] = []
    return step(graph, log), log


# ---------------------------------------------------------------- running kernels
def _statements(stmt: Stmt, env: dict[Var, Any]) -> int:
    """About how many statements the interpreter will run."""
    if isinstance(stmt, For):
        lo, hi = (int(np.max(evaluate(n, env))) for n in (stmt.lo, stmt.hi))
        stores = stmt.body.stmts if isinstance(stmt.body, Block) else (stmt.body,)
        if stmt.kind == "vector" and all(isinstance(s, Store) for s in stores):
            return len(stores)
        if hi <= lo:  # nothing inside need make sense then
            return 1
        return 1 + (hi - lo) * _statements(stmt.body, {**env, stmt.var: lo})
    if isinstance(stmt, Tile):
        return _statements(stmt.expand(), env)
    return 1 + sum(_statements(s, env) for s in children(stmt))


def _interpret(function: Function, group: Group, inputs: Sequence[np.ndarray],
               dims: Mapping[Var, int]) -> list[np.ndarray]:
    outputs = [_garbage(v, dims) for v in group.outputs]
    flat = [np.ravel(a).copy() for a in function.arranged(inputs)]
    interpret.run(function, flat + [y.reshape(-1) for y in outputs], dims)
    return outputs


_GARBAGE = 0xA5
_FENCE = 64  # bytes before and after an output that nobody may write to


def _garbage(value: Value, dims: Mapping[Var, int]) -> np.ndarray:
    shape = graph_evaluate.concrete(value.shape, dims)
    fresh = np.empty(shape, value.dtype.np)
    fresh.reshape(-1).view(np.uint8).fill(1 if value.dtype.is_bool else _GARBAGE)
    return fresh


def _fenced(value: Value, dims: Mapping[Var, int]) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Garbage for an output, and the bytes before and after it."""
    like = _garbage(value, dims)
    room = np.full(like.nbytes + 2 * _FENCE, _GARBAGE, np.uint8)
    inner = room[_FENCE:_FENCE + like.nbytes]
    inner[:] = like.reshape(-1).view(np.uint8)
    return inner.view(like.dtype).reshape(like.shape), (room[:_FENCE],
                                                        room[_FENCE + like.nbytes:])


# ---------------------------------------------------------------- gradients
_STAIRS = ("floor", "ceil", "trunc", "round", "remainder", "fmod", "floor_divide")
_SMALLEST_STAIR = 1e-3
_PATIENCE = 3.0  # seconds for the differences of one input
_STEP = 1e-6  # near the cube root of float64's eps, where a central difference is most exact


def check_gradient(graph: Graph, arrays: Sequence[np.ndarray], rng: np.random.Generator
                   ) -> Difference | None:
    """Hold the derivative of a graph against central differences in float64.

    The difference quotient is taken at three steps; how far they are apart says how much of it
    can be trusted (Richardson). A kink shows in the slopes to the right and to the left: smooth
    functions let them meet as the step shrinks, and points where they do not meet drop out.
    None when the graph has no gradient.
    """
    try:
        backward = autodiff.vjp_graph(graph)
    except TerrazzoError:
        return None
    places = [i for i, v in enumerate(graph.inputs) if v.dtype.is_float]
    wide = list(arrays)
    carriers = [i for i, v in enumerate(graph.outputs) if v.dtype.is_float]
    if not places or not carriers or any(
            n.op.name == "bitcast" and n.inputs[0] is not None
            and n.inputs[0].dtype.is_float for n in graph.nodes):
        return None  # the bits of a float are integers, which carry no gradient but do change
    # Over many stairs of a rounding the differences see a slope that is nowhere.
    stairs = any(n.op.name in _STAIRS for n in inlined(graph).nodes)
    started = time.perf_counter()
    base = graph_evaluate.run(graph, wide, wide=True)
    # Six runs for each index: of a graph whose reference is slow, few are looked at.
    patience = 1 + int(_PATIENCE / (6 * max(time.perf_counter() - started, 1e-6)))
    weights = [rng.uniform(0.5, 1.5, base[i].shape) for i in carriers]
    found = graph_evaluate.run(backward, [*wide, *weights], wide=True)

    def loss(place: int, index: tuple[int, ...], by: float) -> tuple[float, float]:
        moved = list(wide)
        moved[place] = wide[place].copy()
        moved[place][index] += by
        results = graph_evaluate.run(graph, moved, wide=True)
        terms = [results[i] * w for i, w in zip(carriers, weights, strict=True)]
        return float(sum(t.sum() for t in terms)), float(sum(np.abs(t).sum() for t in terms))

    centre = float(sum((base[i] * w).sum() for i, w in zip(carriers, weights, strict=True)))
    worst = Difference()
    for place, gradient in zip(places, found, strict=True):
        for index in _some_indices(gradient.shape, rng)[:patience]:
            step = _STEP * max(1.0, abs(float(wide[place][index])))
            if step > _SMALLEST_STAIR and stairs:
                continue
            quotients, bends, size = [], [], 0.0
            for h in (step, 2 * step, 4 * step):
                (up, a), (down, b) = loss(place, index, h), loss(place, index, -h)
                quotients.append((up - down) / (2 * h))
                bends.append((up - 2 * centre + down) / h)
                size = max(a, b)
            kink = abs(2 * bends[0] - bends[1])
            doubt = (4 * (max(quotients) - min(quotients)) + kink
                     + 64 * np.finfo(float).eps * size / step)
            got, want = float(gradient[index]), quotients[0]
            room = doubt + 1e-6 * abs(want)
            if want == 0 and not np.isfinite(got):
                continue  # by the chain rule 0 times what is infinite or undefined, as in PyTorch
            if not np.isfinite(want + doubt) or doubt > 1e-2 * (1.0 + abs(want)):
                continue
            worst = replace(worst, share=max(worst.share, abs(got - want) / room),
                            checked=worst.checked + 1)
            if not abs(got - want) <= room:
                return replace(worst, index=index, expected=want, got=got)
    return worst


def _as_float64(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64) if as_dtype(array.dtype).is_float else array


def _some_indices(shape: tuple[int, ...], rng: np.random.Generator, most: int = 6
                  ) -> list[tuple[int, ...]]:
    count = int(np.prod(shape))
    chosen = rng.permutation(count)[:most]
    return [tuple(int(i) for i in np.unravel_index(c, shape)) for c in chosen]


# ---------------------------------------------------------------- the report
@dataclass
class Row:
    """What was tried for one data type, and the worst error at every level."""

    dtype: str
    kinds: list[str] = field(default_factory=list)
    ulps: dict[str, float] = field(default_factory=dict)
    share: dict[str, float] = field(default_factory=dict)
    checked: int = 0

    def note(self, level: str, difference: Difference) -> None:
        """Take another comparison into account."""
        if level != "gradient":
            self.ulps[level] = max(self.ulps.get(level, 0.0), difference.ulps)
        self.share[level] = max(self.share.get(level, 0.0), difference.share)
        self.checked += difference.checked


@dataclass
class Report:
    """What `verify` tried; prints as a table."""

    name: str
    rows: list[Row] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __rich__(self) -> Any:
        from rich.table import Table

        kinds = ", ".join(dict.fromkeys(k for row in self.rows for k in row.kinds))
        table = Table(title=f"{self.name}: every level agrees", title_justify="left",
                      caption_justify="left", caption=(
                          "worst errors in units of the last place (where the result is well "
                          "conditioned), and as a part of what rounding allows\n"
                          f"inputs: {kinds}; {self.seconds:.1f} s"))
        table.add_column("type")
        table.add_column("kinds", justify="right")
        table.add_column("elements", justify="right")
        for level in LEVELS:
            table.add_column(level, justify="right")
        for row in self.rows:
            table.add_row(row.dtype, str(len(set(row.kinds))), str(row.checked),
                          *(_cell(row, level) for level in LEVELS))
        return table

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=120, force_terminal=False)
        with console.capture() as text:
            console.print(self)
            for line in self.skipped:
                console.print(f"left out: {line}", soft_wrap=True)
        return text.get()


def _cell(row: Row, level: str) -> str:
    if level not in row.share:
        return "-"
    share = f"{row.share[level]:.0%}"
    return share if level not in row.ulps else f"{row.ulps[level]:.3g} ({share})"


# ---------------------------------------------------------------- verify
def verify(function: Any, *args: Any, levels: Sequence[str] = LEVELS,
           dtypes: Sequence[Any] | None = None, kinds: Sequence[str] = KINDS, seed: int = 0,
           **attrs: Any) -> Report:
    """Check a function or operator at every level; raises VerifyError with the level to blame.

    Arguments are examples: their shapes are taken over, float values are drawn anew for every
    kind of input (the given ones are tried as well), integers keep their values because they may
    be indices. Without arguments shapes are found by trying. `attrs` go to the function.
    """
    target = _Target(function, attrs)
    _known("level", levels, LEVELS)
    _known("kind of input", kinds, (*KINDS, "given"))
    started = time.perf_counter()
    report = Report(target.name)
    examples = target.examples(args)
    wanted = _dtypes(examples, dtypes)
    if args and "given" not in kinds and tuple(kinds) == KINDS:
        kinds = ("given", *KINDS)
    with _progress(target.name, len(wanted) * len(kinds)) as advance:
        for name in wanted:
            row = Row(name)
            subjects: dict[Any, Subject] = {}
            for kind in kinds:
                rng = np.random.default_rng([seed, *map(ord, name + kind)])
                if dtypes is not None or name not in OTHERS or kind in _OTHER_KINDS:
                    _verify_kind(target, examples, name, kind, levels, rng, row, report, subjects)
                advance()
            if row.kinds:
                report.rows.append(row)
    if not report.rows:
        raise ArgumentError(f"{target.name} could not be verified: no type of input suits it",
                            where=None, hint="; ".join(report.skipped[:3]) or "pass examples")
    report.seconds = time.perf_counter() - started
    return report


def check_call(graph: Graph, leaves: Sequence[Any]) -> None:
    """Check the levels of a graph for the arguments of one call: what `knobs.check` asks for."""
    arrays = [_as_array(a) for a in leaves]
    try:
        Subject(graph).check(arrays, [level for level in LEVELS if level != "gradient"])
    except Wrong as wrong:
        types = ", ".join(str(TensorType(a.shape, as_dtype(a.dtype))) for a in arrays)
        raise _as_error(graph.name, wrong, f"a call with {types}", (
            f"call it again with TZ_CHECK=1, and read {graph.name}.lower(..., "
            f"{_TEXT.get(wrong.level, wrong.level)!r})")) from None


def _as_array(x: Any) -> np.ndarray:
    if not hasattr(x, "detach"):
        return np.asarray(x)
    return np.asarray(to_numpy(x, as_dtype(x.dtype)))


def _known(what: str, given: Sequence[str], allowed: Sequence[str]) -> None:
    for name in given:
        if name not in allowed:
            raise ArgumentError(f"there is no {what} {name!r}", hint=f"one of {', '.join(allowed)}")


def _dtypes(examples: Sequence[np.ndarray], asked: Sequence[Any] | None) -> list[str]:
    if asked is not None:
        return [as_dtype(d).name for d in asked]
    kinds = [as_dtype(a.dtype) for a in examples]
    if any(t.is_float for t in kinds):
        # Where integers stand beside floats they are indices or labels and stay as they are.
        return list(FLOATS if any(t.is_integer for t in kinds) else (*FLOATS, *OTHERS))
    return list(dict.fromkeys(t.name for t in kinds))[:1] or ["float32"]


class _Target:
    """What is verified: an operator, a compiled function or a plain function."""

    def __init__(self, function: Any, attrs: dict[str, Any]):
        self.attrs = attrs
        if isinstance(function, Operator):
            self.compiled, self.name = compiled(function), function.name
            self.count = sum(p.default is p.empty for p in function.tensor_params)
        elif isinstance(function, Compiled):
            self.compiled, self.name = function, function.name
            self.count = _parameters(function.function)
        elif callable(function):
            self.name = getattr(function, "__name__", "function")
            self.compiled, self.count = Compiled(function, self.name), _parameters(function)
        else:
            raise ArgumentError(f"cannot verify {function!r}",
                                hint="pass an operator or a function of tensors")

    def examples(self, args: Sequence[Any]) -> list[Any]:
        if args:
            leaves, self.rebuild = self.compiled.arguments(args, self.attrs)
            return [_as_array(a) for a in leaves]
        error: Exception | None = None
        for dtype, shapes in itertools.product((np.float32, np.int32),
                                               default_shapes(self.count)):
            arrays = [np.ones(s, dtype) for s in shapes]
            try:
                self.compiled.graph(arrays, self.attrs)
            except (TerrazzoError, TypeError, ValueError) as e:
                error = error or e
                continue
            self.rebuild = self.compiled.arguments(arrays, self.attrs)[1]
            return arrays
        raise ArgumentError(f"no inputs could be found that suit {self.name}: "
                            f"{str(error).splitlines()[0]}",
                            hint=f"pass examples: {self.name}.verify(x, ...)") from error

    def graph(self, types: Sequence[TensorType]) -> Graph:
        return trace(lambda *values: self.rebuild.call(values), types, name=self.name)[0]


def _parameters(function: Callable[..., Any]) -> int:
    import inspect

    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
               for p in inspect.signature(function).parameters.values())


def _verify_kind(target: _Target, examples: Sequence[np.ndarray], dtype: str, kind: str,
                 levels: Sequence[str], rng: np.random.Generator, row: Row, report: Report,
                 subjects: dict[Any, Subject]) -> None:
    reason = None
    for sample in samples(examples, as_dtype(dtype), kind, rng):
        key = tuple(sample.types)
        try:
            if key not in subjects:
                subjects[key] = Subject(target.graph(sample.types))
        except (TerrazzoError, TypeError, ValueError, ZeroDivisionError, IndexError) as error:
            reason = f"{dtype}, {kind}: {str(error).splitlines()[0]}"
            continue
        subject = subjects[key]
        if not _has_meaning(subject, sample):
            reason = f"{dtype}, {kind}: the reference does not accept such inputs"
            continue
        try:
            subject.check(sample.arrays, levels, row.note)
            if "gradient" in levels and kind in ("random", "given"):
                _verify_gradient(target, subject, sample, levels, rng, row)
        except Wrong as wrong:
            types = ", ".join(str(TensorType(a.shape, as_dtype(a.dtype))) for a in sample.arrays)
            again = f"tz.verify({target.name}, ..., dtypes=[{dtype!r}], kinds=[{kind!r}])"
            raise _as_error(target.name, wrong, f"{dtype}, {kind} inputs {types}", (
                f"reproduce with {again}, and read {target.name}.lower(..., "
                f"{_TEXT.get(wrong.level, wrong.level)!r})")) from None
        row.kinds.append(kind)
    if reason is not None and kind not in row.kinds:
        report.skipped.append(reason)


def _has_meaning(subject: Subject, sample: Sample) -> bool:
    """Whether numpy accepts the inputs: it refuses, for instance, the maximum of nothing."""
    try:
        graph_evaluate.run(subject.source, sample.arrays)
    except (ValueError, IndexError):
        return False
    return True


def _verify_gradient(target: _Target, subject: Subject, sample: Sample, levels: Sequence[str],
                     rng: np.random.Generator, row: Row) -> None:
    """The derivative against differences, then the derivative's own compilation."""
    # Traced in float64, so that constants in the function are not rounded to a narrow type.
    wide = [_as_float64(a) for a in sample.arrays]
    types = [TensorType(a.shape, as_dtype(a.dtype)) for a in wide]
    difference = check_gradient(target.graph(types), wide, rng)
    if difference is None:
        return
    row.note("gradient", difference)
    if difference.index is not None:
        raise Wrong("gradient", f"the gradient of {subject.source.name}", difference)
    backward = autodiff.vjp_graph(subject.source)
    dims = graph_evaluate.bind_dims(subject.source, sample.arrays)
    weights = [rng.uniform(0.5, 1.5, graph_evaluate.concrete(v.shape, dims)).astype(v.dtype.np)
               for v in backward.inputs[len(subject.source.inputs):]]
    Subject(backward).check([*sample.arrays, *weights], levels, row.note)


def _as_error(name: str, wrong: Wrong, circumstances: str, hint: str) -> VerifyError:
    return VerifyError(
        f"{name} is wrong at level {wrong.level}, in {wrong.what}: {wrong.describe()} "
        f"({circumstances})",
        level=wrong.level, operator=wrong.what, index=wrong.difference.index,
        expected=wrong.difference.expected, got=wrong.difference.got, where=wrong.where or None,
        hint=hint)


_TEXT = {"graph": "canonical", "code": "llvm", "gradient": "graph"}


# ---------------------------------------------------------------- progress
@contextmanager
def _progress(name: str, steps: int) -> Iterator[Callable[[], None]]:
    """A progress bar on the terminal, once the work has taken a second."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    started = time.perf_counter()
    bar = Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task(f"verifying {name}", total=steps)

    def advance() -> None:
        bar.advance(task)
        if not bar.live.is_started and time.perf_counter() - started > 1.0:
            bar.start()

    try:
        yield advance
    finally:
        bar.stop()


__all__ = ["KINDS", "LEVELS", "Report", "Subject", "VerifyError", "Wrong", "check_gradient",
           "verify"]
