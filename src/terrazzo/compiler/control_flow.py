"""Graphs with control flow as one executable: loops and branches around calls of kernels.

A graph is cut at its `cond`, `while_loop` and `scan`. What lies between is lowered as any graph;
branches and bodies are graphs themselves, cut the same way; and the native code that calls the
kernels gets the branches and loops. What one part hands to the next lies in the arena. What a loop
carries lies there twice: a turn reads one copy and writes the other, by the number of the turn.
What a scan does not change (weights) is packed once before it, as constants are when compiling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from terrazzo.base.shapes import num_elements
from terrazzo.chips.chip import Chip
from terrazzo.compiler.kernels import copy_function
from terrazzo.compiler.lowering import Lowering, kernel_row
from terrazzo.compiler.options import Options
from terrazzo.graph.ir import Graph, Node, Value
from terrazzo.index import Index, Var, free_vars, maximum
from terrazzo.loop.ir import Function
from terrazzo.loop.packing import Packing
from terrazzo.loop.packing_kernel import packing_function
from terrazzo.loop.simplify import simplify
from terrazzo.loop.steps import Argument, Branch, Call, Flag, Recipe, Repeat, Step, calls_in
from terrazzo.runtime.artifact import Artifact, Constant
from terrazzo.runtime.hosted import graphs_in, on_host, pieces, sizes_in
from terrazzo.runtime.plan import ALIGN, aligned, byte_size

_Place = Mapping[Value, Argument]
_TURNS_WORTH_PACKING = 4  # packing takes about as long as two products of few rows


def is_native(graph: Graph) -> bool:
    """Whether nothing but control flow stands between a graph and machine code."""
    shown = {n for v in graph.inputs for n in v.shape if isinstance(n, Var)}
    return _only_control(graph) and sizes_in(graph) <= shown


def _only_control(graph: Graph) -> bool:
    return all((not on_host(node) or node.op.name in _CONTROL)
               and all(map(_only_control, graphs_in(node))) for node in graph.nodes)


@dataclass(frozen=True, eq=False)
class ControlLowering:
    """The way down of a graph with control flow."""

    source: Graph
    chip: Chip
    options: Options
    keeps_last: bool = False  # whether the last output stays in the arena, at its beginning

    @property
    def outputs(self) -> tuple[Value, ...]:
        """What the caller gets."""
        return self.source.outputs[:len(self.source.outputs) - self.keeps_last]

    @cached_property
    def _composed(self) -> tuple[tuple[Step, ...], Index, list[Constant]]:
        graph, composer = self.source, _Composer(self.chip, self.options)
        inputs = {v: Argument("slot", i) for i, v in enumerate(graph.inputs)}
        outputs = [Argument("slot", len(inputs) + i) for i in range(len(self.outputs))]
        kept = [Argument("arena")] if self.keeps_last else []
        steps, arena = composer.graph(graph, inputs, [*outputs, *kept], ALIGN * len(kept))
        return steps, arena, composer.constants

    @property
    def steps(self) -> tuple[Step, ...]:
        """Calls of kernels, and loops and branches around them."""
        return self._composed[0]

    @cached_property
    def recipe(self) -> Recipe:
        """What the chip makes code of."""
        graph = self.source
        dims = sorted({d for v in graph.inputs for n in v.shape for d in free_vars(n)},
                      key=lambda d: d.name)
        return Recipe(graph.name, self.steps, len(graph.inputs) + len(self.outputs),
                      len(self._composed[2]), tuple(dims))

    def artifact(self) -> Artifact:
        """Compile to code of the chip."""
        graph = self.source
        return Artifact(
            graph.name,
            tuple((v.name or f"x{i}", v.dtype.name, v.shape) for i, v in enumerate(graph.inputs)),
            tuple((v.dtype.name, v.shape) for v in self.outputs),
            self._composed[1], 
            tuple(_step_row(step, self.chip) for step in self.steps),
            self.chip.name, self.chip.assemble(self.recipe), tuple(self._composed[2]), ())


def _step_row(step: Step, chip: Chip) -> dict[str, str | Index]:
    """What an artifact says of a step; the work of loops and branches is not known ahead."""
    if isinstance(step, Call):
        return kernel_row(step, chip)
    calls = list(calls_in([step]))
    inside = " ".join(dict.fromkeys(c.function.origin for c in calls))
    why = "; ".join(dict.fromkeys(filter(None, (chip.elsewhere(c.function) for c in calls))))
    return {"name": step.name, "origin": f"{step.name}: {inside}", "flops": 0, "bytes": 0,
            **({"elsewhere": why} if why else {})}


@dataclass(eq=False)
class _Composer:
    """Collects the steps of a graph, with constants and names of kernels that all share."""

    chip: Chip
    options: Options
    constants: list[Constant] = field(default_factory=list)
    kernels: int = 0
    loops: int = 0

    def next_turn(self) -> Var:
        """The number of a loop's turn, which no other loop counts by."""
        self.loops += 1
        return Var(f"turn{self.loops}")

    def graph(self, graph: Graph, inputs: _Place, outputs: Sequence[Argument], top: Index
              ) -> tuple[tuple[Step, ...], Index]:
        """The steps of a graph whose inputs and outputs have places, and the end of its arena."""
        _, steps, end = self.turn(graph, inputs, outputs, top, frozenset())
        return steps, end

    def turn(self, graph: Graph, inputs: _Place, outputs: Sequence[Argument], top: Index,
             steady: frozenset[Value]) -> tuple[tuple[Step, ...], tuple[Step, ...], Index]:
        """The same for a turn of a loop, with steps before the loop first.

        The arena is free from `top` on. What parts hand on lies there, and `steady` inputs in the
        form that kernels want them in, which is made once; what a part needs for itself comes
        behind, at the same place for all.
        """
        cut = pieces(graph)
        places, top = self._places([v for _, _, made in cut for v in made], graph, outputs, top)
        places = {**inputs, **places}
        lowered = {part: Lowering(part, self.chip, options=self.options, steady=frozenset(
            i for i, v in enumerate(reads) if v in steady))
            for part, reads, _ in cut if isinstance(part, Graph)}
        packed: dict[tuple[Value, Packing], Argument] = {}
        before: list[Step] = []
        for part, reads, _ in cut:
            for number, packing in lowered[part].packed_inputs if part in lowered else ():
                key = (reads[number], packing)
                if key not in packed:
                    packed[key] = Argument("arena", 0, top)
                    top = top + aligned(packing.size * packing.dtype.itemsize)
                    before.append(self.pack(*key, places[reads[number]], packed[key]))
        steps: list[Step] = []
        end = top
        for part, reads, made in cut:
            given, targets = [places[v] for v in reads], [places[v] for v in made]
            if isinstance(part, Node):
                added, high = _CONTROL[part.op.name](self, part, given, targets, top)
            else:
                given += targets
                given += [packed[reads[i], p] for i, p in lowered[part].packed_inputs]
                added, high = self._piece(lowered[part], given, top)
            steps += added
            end = maximum(end, high)
        for value, target in zip(graph.outputs, outputs, strict=True):
            if places[value] != target:
                steps.append(self.copy(value, places[value], target))
        return tuple(before), tuple(steps), end

    def _places(self, values: Sequence[Value], graph: Graph, outputs: Sequence[Argument],
                top: Index) -> tuple[dict[Value, Argument], Index]:
        """Where parts write: an output at its place, anything else in the arena."""
        places: dict[Value, Argument] = {}
        for value, target in zip(graph.outputs, outputs, strict=True):
            places.setdefault(value, target)
        found = {}
        for value in values:
            if value in places:
                found[value] = places[value]
            else:
                found[value] = Argument("arena", 0, top)
                top = top + byte_size(value)
        return found, top

    def _piece(self, lowering: Lowering, slots: Sequence[Argument], top: Index
               ) -> tuple[list[Step], Index]:
        """The calls of a graph without control flow, and the end of its arena."""
        first = len(self.constants)
        self.constants += lowering.constants()

        def moved(argument: Argument) -> Argument:
            if argument.kind == "slot":
                return slots[argument.number].at(argument.offset)
            if argument.kind == "constant":
                return argument._replace(number=argument.number + first)
            return argument.at(top)

        named: dict[Function, Function] = {}
        for call in lowering.calls:
            named.setdefault(call.function, self.named(call))
        return [Call(named[c.function], tuple(map(moved, c.arguments)), c.name)
                for c in lowering.calls], top + lowering.plan.arena

    def named(self, call: Call) -> Function:
        """The kernel of a call under a name that no other part uses."""
        self.kernels += 1
        return replace(call.function, name=f"{call.function.name}_{self.kernels}")

    def copy(self, value: Value, source: Argument, target: Argument) -> Call:
        """A step that copies a value."""
        self.kernels += 1
        function = copy_function(f"k_copy_{self.kernels}", value)
        return Call(function, (source, target), function.name)

    def pack(self, value: Value, packing: Packing, source: Argument, target: Argument) -> Call:
        """A step that brings a value into the layout of a kernel."""
        self.kernels += 1
        size = num_elements(value.shape)
        assert isinstance(size, int)
        function = simplify(packing_function(f"k_pack_{self.kernels}", packing, value.dtype, size))
        return Call(function, (source, target), function.name)


_Steps = tuple[Sequence[Step], Index]


def _cond(composer: _Composer, node: Node, given: Sequence[Argument],
          targets: Sequence[Argument], top: Index) -> _Steps:
    (then, high), (orelse, end) = (
        composer.graph(graph, dict(zip(graph.inputs, given[1:], strict=True)), targets, top)
        for graph in (node.attrs["then_graph"], node.attrs["else_graph"]))
    return [Branch(_flag(node.inputs[0], given[0]), then, orelse, "cond")], maximum(high, end)


def _flag(value: Value | None, place: Argument) -> Flag:
    assert value is not None
    return Flag(place, value.dtype.itemsize)


@dataclass(frozen=True)
class _Carried:
    """A value that a loop carries: two places, of which a turn reads one and writes the other."""

    value: Value
    place: Argument
    turn: Index

    def read(self) -> Argument:
        return self.place.at(self.turn % 2 * byte_size(self.value))

    def written(self) -> Argument:
        return self.place.at((self.turn + 1) % 2 * byte_size(self.value))


def _carried(composer: _Composer, values: Sequence[Value], given: Sequence[Argument], turn: Var,
             top: Index) -> tuple[list[_Carried], list[Step], Index]:
    """Places for what a loop carries, and the steps that put the first ones there."""
    carried: list[_Carried] = []
    steps: list[Step] = []
    for value, source in zip(values, given):
        place = Argument("arena", 0, top)
        carried.append(_Carried(value, place, turn))
        steps.append(composer.copy(value, source, place))
        top = top + byte_size(value) * 2
    return carried, steps, top


def _while_loop(composer: _Composer, node: Node, given: Sequence[Argument],
                targets: Sequence[Argument], top: Index) -> _Steps:
    test, body, count = (node.attrs[k] for k in ("cond_graph", "body_graph", "carries"))
    turn = composer.next_turn()
    carried, first, top = _carried(composer, body.inputs[:count], given, turn, top)
    now = [*(c.read() for c in carried), *given[count:]]
    flag = Argument("arena", 0, top)
    top = top + byte_size(test.outputs[0])
    tests, test_end = composer.graph(test, dict(zip(test.inputs, now, strict=True)), [flag], top)
    turns, end = composer.graph(body, dict(zip(body.inputs, now, strict=True)),
                                [c.written() for c in carried], top)
    after = [composer.copy(c.value, c.read(), t) for c, t in zip(carried, targets, strict=True)]
    loop = Repeat(turn, turns, "while_loop", test=tests, flag=_flag(test.outputs[0], flag),
                  after=tuple(after))
    return [*first, loop], maximum(end, test_end)


def _scan(composer: _Composer, node: Node, given: Sequence[Argument],
          targets: Sequence[Argument], top: Index) -> _Steps:
    body, count, rows, length = (node.attrs[k] for k in (
        "body", "carries", "sequences", "length"))
    turn = composer.next_turn()
    row: Index = length - 1 - turn if node.attrs["reverse"] else turn
    carried, first, top = _carried(composer, body.inputs[:count], given, turn, top)
    xs = [place.at(row * _row_bytes(v)) for v, place in zip(
        body.inputs[count:count + rows], given[count:])]
    ys = [place.at(row * _row_bytes(v)) for v, place in zip(
        body.outputs[count:], targets[count:], strict=True)]
    now = [*(c.read() for c in carried), *xs, *given[count + rows:]]
    # A symbolic length is taken for a long one.
    pays = not isinstance(length, int) or length >= _TURNS_WORTH_PACKING
    steady = frozenset(body.inputs[count + rows:] if pays else ())
    before, turns, end = composer.turn(body, dict(zip(body.inputs, now, strict=True)),
                                       [*(c.written() for c in carried), *ys], top, steady)
    after = [composer.copy(c.value, c.read(), t) for c, t in zip(carried, targets)]
    return [*first, *before, Repeat(turn, turns, "scan", length, after=tuple(after))], end


def _row_bytes(value: Value) -> Index:
    return num_elements(value.shape) * value.dtype.itemsize


_CONTROL: dict[str, Callable[[_Composer, Node, Sequence[Argument], Sequence[Argument], Index],
                             _Steps]] = {
    "cond": _cond, "while_loop": _while_loop, "scan": _scan,
}
