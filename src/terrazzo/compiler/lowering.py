"""Every level of one compilation, from a graph to what an artifact holds."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property

from terrazzo.base import progress
from terrazzo.chips.chip import Chip
from terrazzo.compiler.kernels import SCHEDULED, copy_function, group_key, lower_group
from terrazzo.compiler.options import Options
from terrazzo.compiler.rewriting import inlined
from terrazzo.expr.ir import Program, Tensor
from terrazzo.expr.schedule import Schedule
from terrazzo.graph.fusion import Fused, Group, fuse, readers_first, takes_strides
from terrazzo.graph.ir import Graph, Value
from terrazzo.graph.passes import canonicalize
from terrazzo.graph.rewrite import Applied
from terrazzo.index import Index, Var, free_vars
from terrazzo.loop.ir import Function
from terrazzo.loop.packing import Packing
from terrazzo.loop.steps import Argument, Call, Recipe
from terrazzo.runtime.artifact import Artifact, Constant, Over, Strides
from terrazzo.runtime.plan import MemoryPlan, may_share, plan_memory


@dataclass(frozen=True, eq=False)
class Lowering:
    """Every level of one compilation, each made from the one above when first asked for."""

    source: Graph
    chip: Chip
    strides: Strides = ()  # of inputs that are not row major, in elements
    options: Options = field(default_factory=Options.now)
    is_inlined: bool = False  # whether that was done to the source already
    steady: frozenset[int] = frozenset()  # inputs that may come packed: a loop does not change them
    over: Over = ()  # the inputs that outputs are to be written over
    keeps_last: bool = False  # whether the last output stays in the arena, at its beginning

    @cached_property
    def _canonical(self) -> tuple[Graph, list[Applied]]:
        log: list[Applied] = []
        graph = self.source if self.is_inlined else inlined(self.source, log, self.options)
        graph, more = canonicalize(graph, self.options.guide)
        return graph, log + more

    @property
    def graph(self) -> Graph:
        """L1 after all rewrites."""
        return self._canonical[0]

    @property
    def rewrites(self) -> list[Applied]:
        """The rewrites that were applied, in order."""
        return self._canonical[1]

    @cached_property
    def fused(self) -> Fused:
        """L2: the graph divided into programs."""
        fused = fuse(self.graph, self.chip.fusion_limits, strides={v: s for v, s in zip(
            self.graph.inputs, self.input_strides, strict=True) if s is not None})
        return readers_first(fused, self._overwriting)

    @cached_property
    def _overwriting(self) -> dict[Value, Value]:
        """The outputs that are to be written over inputs, with those."""
        return {o: self.graph.inputs[i] for o, i in zip(self.graph.outputs, self.over)
                if i is not None}

    @cached_property
    def input_strides(self) -> Strides:
        """Strides of the inputs that may keep them; the others have to come row major."""
        given = self.strides or (None,) * len(self.graph.inputs)
        return tuple(s if s is not None and takes_strides(self.graph, v) else None
                     for v, s in zip(self.graph.inputs, given, strict=True))

    @cached_property
    def scheduled(self) -> list[tuple[Program, Schedule | None]]:
        """L2 as it will run: programs in their final form, with schedules where one applies."""
        return [self.chip.schedule(g.program, self._revisits(g)) if g.program.kind in SCHEDULED
                else (g.program, None) for g in self.fused.groups]

    def _revisits(self, group: Group) -> tuple[bool, ...]:
        """Of each output of a group, whether it is written where the caches hold an input."""
        over = {self.fused.root(v) for v in self._overwriting}
        return tuple(self.fused.root(v) in over for v in group.outputs)

    @cached_property
    def functions(self) -> list[Function]:
        """L3: the kernel of each group; groups that differ in names alone share one."""
        made: dict[Hashable, Function] = {}
        result = []
        for i, group in enumerate(self.fused.groups):
            progress.doing("kernels", i, len(self.fused.groups))
            constants = self.constants_of(group)
            key = group_key(group, constants), self._revisits(group)
            if key not in made:
                made[key] = lower_group(group, self.chip, constants, self._revisits(group))
            result.append(made[key])
        return result

    def constants_of(self, group: Group) -> frozenset[Tensor]:
        """The inputs of a group's program that are constants of the graph, or as good as that."""
        known = {*self.fused.constants, *(self.graph.inputs[i] for i in self.steady)}
        return frozenset(t for t, v in zip(group.program.inputs, group.inputs, strict=True)
                         if self.fused.root(v) in known)

    @cached_property
    def plan(self) -> MemoryPlan:
        """Where values live between kernels."""
        return plan_memory(self.fused, self.functions, self.chip.slack, self.keeps_last)

    @property
    def outputs(self) -> tuple[Value, ...]:
        """What the caller gets."""
        return self.graph.outputs[:len(self.graph.outputs) - self.keeps_last]

    @cached_property
    def dims(self) -> list[Var]:
        """The symbolic sizes, by name."""
        shapes = [value.shape for value in self.source.inputs]
        found = {v for sizes in (*shapes, *self.input_strides) for n in sizes or ()
                 for v in free_vars(n)}
        return sorted(found, key=lambda v: v.name)

    @cached_property
    def recipe(self) -> Recipe:
        """What the chip makes code of."""
        count = len(self.graph.inputs)
        return Recipe(self.graph.name, tuple(self.calls), count + len(self.outputs),
                      len(self._stored), tuple(self.dims),
                      tuple((count + o, i) for o, i in enumerate(self.written_over)
                            if i is not None))

    @cached_property
    def calls(self) -> list[Call]:
        """The kernels in order with where their arguments lie."""
        calls = []
        for group, function in zip(self.fused.groups, self.functions, strict=True):
            arguments = [self._argument(v, function.packed.get(i))
                         for i, v in enumerate((*group.inputs, *group.outputs))]
            calls.append(Call(function, tuple(arguments), group.program.name))
        for i, value in enumerate(self.graph.outputs):
            source, target = self._argument(value), self._target(i)
            if source != target:  # it is an input, a constant or another output
                function = copy_function(f"k_copy_{i}", value)
                calls.append(Call(function, (source, target), function.name))
        return calls

    def _target(self, i: int) -> Argument:
        """Where an output is wanted."""
        return Argument("slot", len(self.graph.inputs) + i) if i < len(self.outputs) else (
            Argument("arena"))

    @cached_property
    def written_over(self) -> Over:
        """For each output the input that it may be written over: of those wanted, the proven."""
        count = len(self.graph.inputs)
        return tuple(i if i is not None and may_share(self.calls, i, count + o) else None
                     for o, i in enumerate(self.over))

    @cached_property
    def _stored(self) -> dict[tuple[int, Packing | None], int]:
        """Numbers of the constants that are stored: once for each layout that somebody reads."""
        numbers: dict[tuple[int, Packing | None], int] = {}
        for group, function in zip(self.fused.groups, self.functions, strict=True):
            for i, value in enumerate(group.inputs):
                place = self.plan.places[value]
                if place.kind == "constant":
                    numbers.setdefault((place.number, function.packed.get(i)), len(numbers))
        for value in self.graph.outputs:
            place = self.plan.places[value]
            if place.kind == "constant":
                numbers.setdefault((place.number, None), len(numbers))
        return numbers

    @cached_property
    def packed_inputs(self) -> list[tuple[int, Packing]]:
        """Steady inputs that kernels want packed: slots of their own, after those of outputs."""
        found = ((self.plan.places[value], function.packed.get(i))
                 for group, function in zip(self.fused.groups, self.functions, strict=True)
                 for i, value in enumerate(group.inputs))
        return list(dict.fromkeys((place.number, packing) for place, packing in found
                                  if place.kind == "input" and packing is not None))

    def _argument(self, value: Value, packing: Packing | None = None) -> Argument:
        place = self.plan.places[value]
        if place.kind == "input":
            return Argument("slot", place.number if packing is None else (
                len(self.graph.inputs) + len(self.outputs)
                + self.packed_inputs.index((place.number, packing))))
        if place.kind == "output":
            return Argument("slot", len(self.graph.inputs) + place.number)
        if place.kind == "constant":
            return Argument("constant", self._stored[place.number, packing])
        return Argument("arena", 0, place.offset)

    def artifact(self) -> Artifact:
        """Compile to code of the chip."""
        graph, recipe = self.graph, self.recipe
        progress.doing("machine code")
        return Artifact(
            graph.name,
            tuple((v.name or f"x{i}", v.dtype.name, v.shape) for i, v in enumerate(graph.inputs)),
            tuple((v.dtype.name, v.shape) for v in self.outputs),
            self.plan.arena,
            tuple(kernel_row(c, self.chip) for c in self.calls),
            self.chip.name, self.chip.assemble(recipe), self.constants(), self.input_strides,
            self.written_over)

    def constants(self) -> tuple[Constant, ...]:
        """The constants as kernels want them, in the order of their numbers."""
        sources = list(self.fused.constants.values())
        return tuple(Constant(sources[number], packing) for number, packing in self._stored)


def kernel_row(call: Call, chip: Chip) -> dict[str, str | Index]:
    """What an artifact says of a kernel: its work, and why another chip runs it if one does."""
    f = call.function
    why = chip.elsewhere(f)
    return {"name": call.name, "origin": f.origin, "flops": f.flops, "bytes": f.bytes,
            **({"elsewhere": why} if why else {})}
