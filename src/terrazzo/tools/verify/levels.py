"""Holds every level of one graph's compilation against the one above.

A graph is taken apart into the kernels it compiles to. Every level of a kernel gets the same
inputs (what the graph level computes there), and its results are held against float64 with the
bounds of `error_bounds`. So the first level that is out of bounds is the one to blame, however
many lower levels inherit the mistake. Of control flow, the graphs inside (branches, bodies of
loops, what lies between) are checked in the same way as the host runs them, then the machine code
of it all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np

from terrazzo.chips.chip import Code
from terrazzo.compiler.control_flow import ControlLowering, is_native
from terrazzo.compiler.lowering import Lowering
from terrazzo.compiler.options import Options
from terrazzo.compiler.rewriting import inlined
from terrazzo.dtypes import as_dtype
from terrazzo.errors import TerrazzoError
from terrazzo.expr import evaluate as expr_evaluate
from terrazzo.graph import evaluate as graph_evaluate
from terrazzo.graph.fusion import Group
from terrazzo.graph.ir import Graph, Node, Value
from terrazzo.graph.passes import inline_composites
from terrazzo.graph.rewrite import describe
from terrazzo.index import Var
from terrazzo.knobs import thread_count
from terrazzo.loop.ir import Function
from terrazzo.runtime import fastcall
from terrazzo.runtime.artifact import Over, Strides
from terrazzo.runtime.executable import Executable
from terrazzo.runtime.hosted import HostedExecutable, needs_host, to_numpy
from terrazzo.runtime.layout import strides_of
from terrazzo.runtime.targets import Way, addresses_of
from terrazzo.tools.verify import error_bounds
from terrazzo.tools.verify.blame import apart, culprit
from terrazzo.tools.verify.bounded import Bounded, exactly
from terrazzo.tools.verify.comparison import Difference, compare
from terrazzo.tools.verify.kernels import GARBAGE, fenced, in_memory_of, interpreted, statements
from terrazzo.tools.verify.stages import stage_of_code, stage_of_loops, stage_of_program

LEVELS = ("graph", "expr", "loop", "code", "gradient")
KERNEL = "kernel"  # one more for operators that have kernels written by hand
LOOP_LIMIT = 20_000  # statements that the interpreter of Loop IR may run for one kernel
_LOOKS = 3  # how often a graph inside control flow is checked: later turns are like the first


class Notes:
    """Whom a check tells what it compared and what it left out; this one forgets it."""

    def compared(self, level: str, difference: Difference) -> None:
        """Take another comparison into account."""

    def skipped(self, level: str, what: str, why: str) -> None:
        """Note that a part was not checked."""


NOBODY = Notes()


class Subject:
    """One graph with everything it compiles to, made when first needed."""

    def __init__(self, graph: Graph, over: Over = ()):
        self.source, self.over = graph, over
        self.inlined = inlined(graph)
        self.hosted = needs_host(self.inlined)
        self.in_place: dict[Strides, Executable] = {}
        self.pieces: list[_CheckedPiece] = []
        self.watch: list[Any] = []  # levels and notes, while pieces are to be checked
        self.options = Options.now()
        self.lowering = Lowering(self.inlined, self.options.chip)

    @cached_property
    def primitive(self) -> Graph:
        """The graph in primitive operators only, as its author wrote it."""
        return inline_composites(self.source, whole=lambda node: False)

    @cached_property
    def executable(self) -> Any:
        """Compiled afresh: the cache on disk may hold code of a compiler that was sound."""
        if self.hosted:
            return HostedExecutable(self.inlined, self._piece)
        return Executable(self.lowering.artifact())

    @cached_property
    def native(self) -> Executable | None:
        """Control flow as machine code, where nothing needs the host."""
        if not self.hosted or not is_native(self.inlined):
            return None
        return Executable(ControlLowering(self.inlined, self.options.chip, self.options).artifact())

    def _piece(self, graph: Graph) -> _CheckedPiece:
        self.pieces.append(_CheckedPiece(Subject(graph), self.watch))
        return self.pieces[-1]

    @cached_property
    def kernels(self) -> dict[Function, Code]:
        """Each kernel by itself, to be run on values of our choice."""
        return {f: self.options.chip.alone(f) for f in dict.fromkeys(self.lowering.functions)}

    def check(self, arrays: Sequence[np.ndarray], levels: Sequence[str] = LEVELS,
              notes: Notes = NOBODY) -> None:
        """Hold every level against the one above for some inputs; raises `Wrong`."""
        dense = [np.ascontiguousarray(a).reshape(a.shape) for a in arrays]
        expected = error_bounds.run(self.primitive, dense)
        outputs = [expected[v] for v in self.primitive.outputs]
        if "graph" in levels:
            self._check_operators(dense, notes)
            self._check_rewrites(dense, outputs)
        if not {"expr", "loop", "code"} & set(levels):
            return
        if not self.hosted:
            self._check_groups(dense, levels, notes)
        if self.hosted or "code" in levels:
            with self._watched(levels, notes):
                self._check_executable(arrays, dense, outputs, levels, notes)

    # ------------------------------------------------------------ graph
    def _check_operators(self, arrays: Sequence[np.ndarray], notes: Notes) -> None:
        """Each operator's reference in its own types against its meaning in float64."""
        for node, inputs, results, dims in _walk(self.source, arrays):
            alone = Graph(node.op.name, *_standing_in(node))
            bounded = error_bounds.follow(
                alone, [exactly(a) for a in inputs if a is not None], dims)
            for value, own, result in zip(node.outputs, alone.outputs, results, strict=True):
                wanted = graph_evaluate.concrete(value.shape, dims)
                if result.shape != wanted or as_dtype(result.dtype) is not value.dtype:
                    raise Wrong("graph", describe(node), Difference(), node.where, reason=(
                        f"it is {as_dtype(result.dtype).short}{list(result.shape)}, and "
                        f"inference says {value.dtype.short}{list(wanted)}"))
                difference = compare(result, bounded[own], value.dtype)
                if node.inputs or not self.source.inputs:  # literals are what they are
                    notes.compared("graph", difference)
                if difference.index is not None:
                    raise Wrong("graph", describe(node), difference, node.where)

    def _check_rewrites(self, arrays: Sequence[np.ndarray], outputs: Sequence[Bounded]) -> None:
        # Inside control flow, graphs are rewritten by themselves, and checked by themselves.
        difference = apart(self.inlined if self.hosted else self.lowering.graph, arrays, outputs)
        if difference is not None:
            rule, where = culprit(self.source, arrays, outputs)
            raise Wrong("graph", rule, difference, where)

    # ------------------------------------------------------------ expr, loop, kernels
    def _check_groups(self, arrays: Sequence[np.ndarray], levels: Sequence[str],
                      notes: Notes) -> None:
        graph = self.lowering.graph
        dims = graph_evaluate.bind_dims(graph, arrays)
        with _blaming("expr", graph.name):
            groups = self.lowering.fused.groups
        memory: dict[Value, np.ndarray] = dict(zip(graph.inputs, arrays, strict=True))
        for node, _, results, _ in _walk(graph, arrays):
            memory.update(zip(node.outputs, results, strict=True))
        for level in ("expr", "loop") if not groups else ():
            notes.skipped(level, graph.name,
                          "no kernel computes it: a constant, or memory seen otherwise")
        for i, group in enumerate(groups):
            inputs = _held(group.inputs, memory)
            expected = _group_bounds(group, graph, memory, dims)
            what = f"{group.program.name} ({', '.join(n.op.name for n in group.nodes)})"
            for level, run in self._runs(i, group, inputs, dims, levels, notes):
                with _blaming(level, what):
                    results = run()
                for difference in _differences(group, expected, results):
                    notes.compared(level, difference)
                    if difference.index is not None:
                        stage = self._stage(level, i, memory, dims, expected)
                        raise Wrong(level, f"{what}: {stage}", difference, group.nodes[-1].where)

    def _stage(self, level: str, i: int, memory: Mapping[Value, np.ndarray],
               dims: Mapping[Var, int], expected: Sequence[Bounded]) -> str:
        """What within a level is to blame."""
        group, chip = self.lowering.fused.groups[i], self.options.chip

        def is_right(results: Sequence[np.ndarray]) -> bool:
            return all(d.index is None for d in _differences(group, expected, results))

        def comes_out_right(other: Group) -> bool:
            return not _has_expression(other) or all(d.index is None for d in _differences(
                other, _group_bounds(other, self.lowering.graph, memory, dims),
                expr_evaluate.run(other.program, _held(other.inputs, memory), dims)))

        if level == "expr":
            return stage_of_program(group, self.lowering.graph, chip, comes_out_right)
        if level == "code":
            return stage_of_code(self.lowering.functions[i], chip)
        return stage_of_loops(group, chip, self.lowering.constants_of(group),
                              _held(group.inputs, memory), dims, is_right)

    def _runs(self, i: int, group: Group, inputs: Sequence[np.ndarray], dims: Mapping[Var, int],
              levels: Sequence[str], notes: Notes
              ) -> Iterator[tuple[str, Callable[[], list[np.ndarray]]]]:
        """The ways to compute a group, from the highest level down."""
        if "expr" in levels and _has_expression(group):
            yield "expr", lambda: expr_evaluate.run(group.program, inputs, dims)
        elif "expr" in levels:
            notes.skipped("expr", group.program.name, "its kernel is made of loops directly")
        with _blaming("loop", group.program.name):
            function = self.lowering.functions[i]
        steps = statements(function.body, dict(dims)) if "loop" in levels else 0
        if steps > LOOP_LIMIT:
            notes.skipped("loop", group.program.name,
                          f"the interpreter runs at most {LOOP_LIMIT:,} statements")
        elif steps:
            yield "loop", lambda: interpreted(function, group, inputs, dims)
        if "code" in levels:
            yield "code", lambda: self._run_native(i, group, inputs, dims)

    def _run_native(self, i: int, group: Group, inputs: Sequence[np.ndarray],
                    dims: Mapping[Var, int]) -> list[np.ndarray]:
        """One kernel on given values, its outputs between fences."""
        inputs = self.lowering.functions[i].arranged(inputs)
        given = [np.ascontiguousarray(a).reshape(a.shape).copy() for a in inputs]
        rooms = [fenced(v, dims) for v in group.outputs]
        outputs = [inner for inner, _ in rooms]
        with in_memory_of(self.options.chip, [*given, *outputs]) as pointers:
            self._invoke(i, pointers, dims)
        for value, (_, sides) in zip(group.outputs, rooms, strict=True):
            if any((side != GARBAGE).any() for side in sides):
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
        function = self.lowering.functions[i]
        self.kernels[function].run([*pointers, *(dims[d] for d in function.dims)], 0,
                                   thread_count())

    # ------------------------------------------------------------ code
    def _check_executable(self, arrays: Sequence[np.ndarray], dense: Sequence[np.ndarray],
                          outputs: Sequence[Bounded], levels: Sequence[str],
                          notes: Notes) -> None:
        """The whole executable, by every way in."""
        with _blaming("code", "the executable"):
            ways = {"run": self.executable.run(arrays)}
            strides = tuple(strides_of(a) for a in arrays)
            if any(s is not None for s in strides) and not (self.hosted or self.lowering.dims):
                ways["run in place"] = self._compiled_for(strides).run(arrays)
            if any(i is not None for i in self.over):
                ways["run over its inputs"] = self._run_over(dense)
            if self.native is not None:
                ways["run without the host"] = self.native.run(arrays)
        if not self.hosted:
            self._spoil_arena(dense)
            ways["run again"] = self.executable.run(dense)
            if len(outputs) == 1:
                ways["direct call"] = [fastcall.entry(self.executable, 0, dense)(dense)]
        for way, results in ways.items() if "code" in levels else ():
            for value, bounded, got in zip(self.source.outputs, outputs, results, strict=True):
                difference = compare(got, bounded, value.dtype)
                notes.compared("code", difference)
                if difference.index is not None:
                    self._check_rewrites(dense, outputs)  # they are to blame, if they are wrong
                    raise Wrong("code", f"the executable ({way})", difference)

    def _compiled_for(self, strides: Strides) -> Executable:
        """The executable that reads inputs by their strides instead of copying them."""
        if strides not in self.in_place:
            lowering = Lowering(inlined(self.source), self.options.chip, strides)
            self.in_place[strides] = Executable(lowering.artifact())
        return self.in_place[strides]

    def _run_over(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """What is written over inputs, which are copies; other results lie where they like."""
        memory = self.options.chip.memory
        given = [memory.brought(a.copy()) for a in arrays]
        types = [(v.type, given[i]) if i is not None else (v.type, None)
                 for v, i in zip(self.source.outputs, self.over, strict=True)]
        dims = graph_evaluate.bind_dims(self.source, arrays)
        targets = [a if a is not None and a.shape == graph_evaluate.concrete(t.shape, dims)
                   and as_dtype(a.dtype) is t.dtype else None for t, a in types]
        if self.hosted:
            executable: Any = self.native or self.executable
        else:
            executable = self._overwriting
        way = Way(executable, given, targets)
        results = way(given, targets, addresses_of(given), addresses_of(targets))
        return [to_numpy(memory.to_host(r)) for r in results]

    @cached_property
    def _overwriting(self) -> Executable:
        """The executable that writes over its inputs where that is right."""
        return Executable(Lowering(self.inlined, self.options.chip, over=self.over).artifact())

    def _spoil_arena(self, arrays: Sequence[np.ndarray]) -> None:
        """What lies between kernels must not depend on what was there before."""
        size = self.executable.arena_size(self.executable.bind(arrays))
        arena = self.executable.take_arena(size)
        if isinstance(arena.owner, np.ndarray):
            arena.owner.fill(GARBAGE)
        else:
            arena.owner.fill_(GARBAGE)  # which torch's allocator hands out again
        self.executable.give_arena(arena)


    @contextmanager
    def _watched(self, levels: Sequence[str], notes: Notes) -> Iterator[None]:
        """While open, graphs inside control flow are checked as they run."""
        watch, self.watch[:] = list(self.watch), [levels, notes]
        for piece in self.pieces:
            piece.looks = _LOOKS
        try:
            yield
        finally:
            self.watch[:] = watch


class _CheckedPiece:
    """A graph inside control flow, which is checked on what it is first run with."""

    def __init__(self, subject: Subject, watch: list[Any]):
        self.subject, self.watch, self.looks = subject, watch, _LOOKS

    def run(self, arrays: Sequence[np.ndarray]) -> Any:
        if self.watch and self.looks:
            self.looks -= 1
            self.subject.check(arrays, *self.watch)
        return self.subject.executable.run(arrays)


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


def cut(outputs: Sequence[Value], leaves: Sequence[Value]) -> Graph:
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


def _has_expression(group: Group) -> bool:
    """Whether a kernel is made of tensor expressions."""
    return group.program.kind in ("pointwise", "rows", "contraction")


def _held(values: Sequence[Value], memory: Mapping[Value, np.ndarray]) -> list[np.ndarray]:
    # Numbers that fusion made are in no graph.
    return [v.node.attrs["value"] if v not in memory and v.node is not None else memory[v]
            for v in values]


def _differences(group: Group, expected: Sequence[Bounded], results: Sequence[np.ndarray]
                 ) -> Iterator[Difference]:
    """How far each result of a group is from what it should be."""
    for value, bounded, got in zip(group.outputs, expected, results, strict=True):
        yield compare(got.reshape(bounded.value.shape), bounded, value.dtype)


def _group_bounds(group: Group, graph: Graph, memory: Mapping[Value, np.ndarray],
                  dims: Mapping[Var, int]) -> list[Bounded]:
    # A program does not list inputs that no element of it reads, such as those of empty tensors.
    leaves = list(dict.fromkeys((*group.inputs, *graph.inputs)))
    part = cut(group.outputs, leaves)
    found = error_bounds.follow(part, [exactly(a) for a in _held(leaves, memory)], dims)
    return [found[v] for v in part.outputs]


