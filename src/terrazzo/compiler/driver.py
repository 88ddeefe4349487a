"""The way down, level by level, on the chip that is handed in: from a graph to an Executable."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from terrazzo.base import progress
from terrazzo.base.shapes import num_elements
from terrazzo.chips.chip import LEVELS, Chip
from terrazzo.chips.registry import chip_for
from terrazzo.errors import ArtifactError, CompileError
from terrazzo.expr.ir import Program, Tensor
from terrazzo.expr.schedule import Schedule
from terrazzo.expr.structure import structure
from terrazzo.expr.work import work
from terrazzo.graph.fusion import Fused, Group, fuse, readers_first, takes_strides
from terrazzo.graph.ir import Graph, Node, Value
from terrazzo.graph.passes import Guide, canonicalize, prepared
from terrazzo.graph.passes.cse import frozen
from terrazzo.graph.rewrite import Applied, Pass, RuleTable, user_rules
from terrazzo.index import Index, Var
from terrazzo.knobs import Settings, knobs
from terrazzo.loop.ir import Buffer, Function
from terrazzo.loop.packing import Packing
from terrazzo.loop.simplify import simplify
from terrazzo.loop.steps import Argument, Call, Recipe
from terrazzo.runtime import artifact as artifacts
from terrazzo.runtime.artifact import Artifact, Constant, Over, Strides
from terrazzo.runtime.cache import default_cache, make_key, source_stamp
from terrazzo.runtime.content import Unknowable, graph_text
from terrazzo.runtime.executable import Executable
from terrazzo.runtime.plan import MemoryPlan, may_share, plan_memory


@dataclass(frozen=True, eq=False)
class Options:
    """All that a compilation goes by beside graph and chip, fixed when it begins.

    Settings and users' rules may change at any time, in other threads too; nothing below asks for
    them again.
    """

    settings: Settings
    rules: RuleTable = field(default_factory=user_rules)

    @staticmethod
    def now(level: str = "") -> Options:
        """What is in force in this thread, with a level of rewrites of one's own if given."""
        settings = knobs.now
        return Options(replace(settings, opt_level=level) if level else settings)

    @property
    def level(self) -> str:
        """Which rewrites run."""
        return self.settings.opt_level

    @property
    def guide(self) -> Guide:
        """What rewrites go by."""
        keeps = self.chip.keeps
        return Guide(self.level, self.rules, lambda node: keeps(node.op.name))

    @cached_property
    def chip(self) -> Chip:
        """The chip that code is made for."""
        return chip_for(self.settings)


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
        fused = fuse(self.graph, strides={v: s for v, s in zip(
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
        return plan_memory(self.fused, self.functions)

    @cached_property
    def dims(self) -> list[Var]:
        """The symbolic sizes, by name."""
        from terrazzo.index import free_vars

        shapes = [value.shape for value in self.source.inputs]
        found = {v for sizes in (*shapes, *self.input_strides) for n in sizes or ()
                 for v in free_vars(n)}
        return sorted(found, key=lambda v: v.name)

    @cached_property
    def recipe(self) -> Recipe:
        """What the chip makes code of."""
        return Recipe(self.graph.name, tuple(self.calls),
                      len(self.graph.inputs) + len(self.graph.outputs), len(self._stored),
                      tuple(self.dims))

    @cached_property
    def calls(self) -> list[Call]:
        """The kernels in order with where their arguments lie."""
        calls = []
        for group, function in zip(self.fused.groups, self.functions, strict=True):
            arguments = [self._argument(v, function.packed.get(i))
                         for i, v in enumerate((*group.inputs, *group.outputs))]
            calls.append(Call(function, tuple(arguments), group.program.name))
        for i, value in enumerate(self.graph.outputs):
            place = self.plan.places[value]
            if place.kind != "output" or place.number != i:
                calls.append(_copy_call(self._argument(value), i, len(self.graph.inputs), value))
        return calls

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

    def _argument(self, value: Any, packing: Packing | None = None) -> Argument:
        place = self.plan.places[value]
        if place.kind == "input":
            return Argument("slot", place.number if packing is None else (
                len(self.graph.inputs) + len(self.graph.outputs)
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
            tuple((v.dtype.name, v.shape) for v in graph.outputs),
            self.plan.arena,
            tuple({"name": c.name, "origin": c.function.origin, "flops": c.function.flops,
                   "bytes": c.function.bytes} for c in self.calls),
            self.chip.name, self.chip.assemble(recipe), self.constants(), self.input_strides,
            self.written_over)

    def constants(self) -> tuple[Constant, ...]:
        """The constants as kernels want them, in the order of their numbers."""
        sources = list(self.fused.constants.values())
        return tuple(Constant(sources[number], packing) for number, packing in self._stored)


def _copy_call(source: Argument, output: int, inputs: int, value: Any) -> Call:
    """An output that is an input, a constant or another output: copied at the end."""
    function = copy_function(f"k_copy_{output}", value)
    return Call(function, (source, Argument("slot", inputs + output)), function.name)


def copy_function(name: str, value: Any) -> Function:
    """A kernel that copies a value."""
    from terrazzo.loop.ir import For, Store

    size = num_elements(value.shape)
    x, y = Buffer("x", value.dtype, size), Buffer("y", value.dtype, size)
    i = Var("i", 0, max(size - 1, 0) if isinstance(size, int) else None)
    dims = tuple(sorted({v for n in value.shape for v in _free(n)}, key=lambda v: v.name))
    return Function(name, (x, y), dims, For(i, 0, size, Store(y, i, x[i]), "vector"), "copy",
                    bytes=2 * size * value.dtype.itemsize)


def _free(index: Index) -> set[Var]:
    from terrazzo.index import free_vars

    return free_vars(index)


def inlined(graph: Graph, log: list[Applied] | None = None, options: Options | None = None,
            trail: list[Pass] | None = None) -> Graph:
    """A graph of primitives and of those composite operators that have a kernel of their own."""
    guide = (options or Options.now()).guide
    return prepared(graph, guide, [] if log is None else log, trail)


def rewriting(graph: Graph, options: Options | None = None) -> list[Pass]:
    """The steps by which a graph is rewritten when it is compiled."""
    options = options or Options.now()
    trail: list[Pass] = []
    for _ in range(2):  # once for the cache key, and once more when it is lowered
        graph = inlined(graph, None, options, trail)
    canonicalize(graph, options.guide, trail)
    return trail


# ---------------------------------------------------------------- groups
SCHEDULED = ("pointwise", "rows", "contraction")  # kinds of programs that have a schedule


def group_key(group: Group, constants: frozenset[Tensor]) -> Hashable:
    """Equal for groups that one kernel serves; valid while their nodes are alive."""
    program = group.program
    return (structure(program), tuple(t in constants for t in program.inputs), tuple(
        (k, _node_key(v) if isinstance(v, Node) else frozen(v))
        for k, v in sorted(program.attrs.items())))


def _node_key(node: Node) -> Hashable:
    attrs = tuple((k, frozen(v)) for k, v in sorted(node.attrs.items()))
    return node.op, attrs, node.types, tuple(v is None for v in node.inputs)


def lower_group(group: Group, chip: Chip, constants: frozenset[Tensor] = frozenset(),
                revisits: Sequence[bool] = ()) -> Function:
    """The Loop IR of one group, which may ask for its constants in another layout."""
    program = group.program
    function = simplify(chip.adapt(_opaque(program)) if program.kind == "opaque" else
                        chip.lower(program, constants, revisits))
    flops, size = work(program)
    return replace(function, flops=flops, bytes=size)


def _opaque(program: Program) -> Function:
    node: Node = program.attrs["node"]
    assert node.op.loops is not None
    by_value = iter(program.inputs)
    inputs = [None if v is None else next(by_value) for v in node.inputs]
    out = node.types if len(node.types) > 1 else node.types[0]
    build = node.op.loops(*inputs, out=out, **node.attrs)
    buffers = [Buffer(t.name, t.dtype, num_elements(t.shape))
               for t in (*program.inputs, *program.outputs)]
    count = len(program.inputs)
    body = build(buffers[:count], buffers[count:])
    return Function(program.name, tuple(buffers), program.dims, body, node.op.name)


# ---------------------------------------------------------------- compiling, with the cache
def graph_key(lowering: Lowering, notes: Mapping[str, Any] | None = None) -> str:
    """What a compiled graph depends on, as a cache key; empty where that cannot be told.

    What users' rules do is told best by the graph that they made.
    """
    rewritten = bool(lowering.options.rules)
    if not lowering.chip.keeps_code:
        return ""
    try:
        text = graph_text(lowering.graph if rewritten else lowering.source)
    except Unknowable:
        return ""
    return make_key(source_stamp(), str(lowering.options.settings.code_key),
                    "rewritten" if rewritten else "", text, str(lowering.strides),
                    str(lowering.over) if lowering.over else "",
                    str(sorted((notes or {}).items())), chip=lowering.chip.spec)


def model_key(options: Options, *parts: str) -> str:
    """A cache key for a model by its digest and what it is compiled with.

    Empty where there are rules of the user's: a digest does not tell what they make of a model.
    """
    if options.rules or not options.chip.keeps_code:
        return ""
    return make_key(source_stamp(), str(options.settings.code_key), "model", *parts,
                    chip=options.chip.spec)


def compile_graph(graph: Graph, chip: Chip | None = None, strides: Strides = (),
                  over: Over = (), *, key: str = "", notes: Mapping[str, Any] | None = None,
                  options: Options | None = None) -> Any:
    """An executable for a graph, from the disk cache when it was compiled before.

    `strides` are those of inputs that are not row major, in elements, None for the others. Which
    of them the executable takes is for it to say; the rest must be made row major. In the same way
    `over` asks for outputs to be written over inputs, by their numbers. `key` names
    the graph for `load_compiled`, by default by its contents; `notes` are kept with the code. A
    compilation that takes long shows a bar on the terminal.
    """
    with progress.shown(graph.name):
        return _compiled(graph, chip, strides, over, key, notes, options)


def _compiled(graph: Graph, chip: Chip | None, strides: Strides, over: Over, key: str,
              notes: Mapping[str, Any] | None, options: Options | None) -> Any:
    from terrazzo.runtime.hosted import HostedExecutable, needs_host

    options = options or Options.now()
    chip = chip or options.chip
    progress.doing("rewriting")
    declared = graph
    strides = tuple(_real_strides(s, v) for s, v in zip(strides, graph.inputs))
    graph = inlined(graph, options=options)  # a composite operator's name does not tell its body
    controlled = needs_host(graph)
    if controlled:  # what is compiled without it is compiled sooner
        from terrazzo.compiler.control_flow import ControlLowering, is_native

        for level in _dumped(options):
            if is_native(graph) or level in _WHOLE:  # parts that the host calls show themselves
                print(graph_level(graph, level, options, chip))
        if not is_native(graph):
            return HostedExecutable(graph, partial(compile_graph, chip=chip, options=options),
                                    declared)
    lowering = Lowering(graph, chip, strides, options, is_inlined=True, over=over)
    if not controlled:
        for level in _dumped(options):
            print(level_text(lowering, level))
    key = key or graph_key(lowering, {**(notes or {}), **_complex_note(declared)})
    known = load_compiled(key, options)
    if known is not None:
        return known
    made = ControlLowering(graph, chip, options) if controlled else lowering
    with _enough_files(graph.name):
        artifact = replace(_as_declared(made.artifact(), declared), notes=dict(notes or {}))
    stored = default_cache(options.settings).store(key, partial(artifacts.write, artifact)) if (
        key) else None
    if stored is not None and artifact.constants:
        # What is mapped from the file need not be packed into memory once more.
        with contextlib.suppress(OSError, ArtifactError):
            artifact = artifacts.load(stored, remember=True)
    return Executable(artifact)


# Complex numbers lie in memory as pairs of real ones, which is how kernels see them; who calls an
# executable sees the types of the graph.
def _real_strides(strides: tuple[Index, ...] | None, value: Value) -> tuple[Index, ...] | None:
    if strides is None or not value.dtype.is_complex:
        return strides
    return (*(2 * s for s in strides), 1)


def _complex_note(graph: Graph) -> dict[str, str]:
    """Tells graphs apart that differ in the types at their edge alone."""
    types = [v.dtype for v in (*graph.inputs, *graph.outputs)]
    return {"types": " ".join(t.name for t in types)} if any(t.is_complex for t in types) else {}


def _as_declared(artifact: Artifact, graph: Graph) -> Artifact:
    strides = artifact.strides and tuple(
        s if s is None or not v.dtype.is_complex else tuple(n // 2 for n in s[:-1])
        for s, v in zip(artifact.strides, graph.inputs, strict=True))
    return replace(
        artifact, strides=strides,
        inputs=tuple((name, v.dtype.name, v.shape) for (name, _, _), v in zip(
            artifact.inputs, graph.inputs, strict=True)),
        outputs=tuple((v.dtype.name, v.shape) for v in graph.outputs))


@contextlib.contextmanager
def _enough_files(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # importing a module of ours may be what fails
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise CompileError(f"compiling {name} opens files, and there are too many open files",
                           hint="close some, or raise the limit (ulimit -n)") from error


def compiling_elsewhere() -> AbstractContextManager[None]:
    """Inside, compilers that take much memory stay out of this process, where the chip can."""
    return chip_for(knobs.now).compiling_elsewhere()


def load_compiled(key: str, options: Options) -> Executable | None:
    """What was compiled under a key, if it has one and the cache still has that."""
    cache = default_cache(options.settings)
    stored = cache.find(key) if key else None
    if stored is None:
        return None
    try:
        return Executable(artifacts.load(stored, remember=True))
    except ArtifactError as error:
        cache.discard(key, str(error))
    except OSError as error:  # no damage: it is gone, or this process has too many files open
        cache.note_unreadable(error)
    return None


def _dumped(options: Options) -> Iterator[str]:
    """The levels that are to be printed, whether what is compiled is in the cache or not."""
    return filter(None, options.settings.dump.split(","))


_WHOLE = ("graph", "canonical")  # levels that hold control flow as it is


def graph_level(graph: Graph, level: str, options: Options | None = None,
                chip: Chip | None = None, over: Over = ()) -> str:
    """One level of a graph's compilation as text; below control flow, of each part by itself."""
    from terrazzo.compiler.control_flow import ControlLowering, is_native
    from terrazzo.runtime.hosted import compiled_parts, needs_host

    options = options or Options.now()
    chip = chip or options.chip
    if level not in chip.levels:
        raise chip.no_level(level)
    flat = inlined(graph, options=options)
    if level in _WHOLE or not needs_host(flat):
        return level_text(Lowering(graph, chip, options=options, over=over), level)
    if level not in (*LEVELS, *chip.program_levels) and is_native(flat):
        return chip.text(level, ControlLowering(flat, chip, options).recipe)
    parts = [f"# {g.name}: a part of {graph.name}, inside or between control flow\n"
             + level_text(Lowering(g, chip, options=options), level) for g in compiled_parts(flat)]
    return "\n\n".join(parts)


def level_text(lowering: Lowering, level: str) -> str:
    """One level of a compilation as text."""
    if level == "graph":
        return str(lowering.source)
    if level == "canonical":
        return str(lowering.graph)
    if level == "expr":
        return str(lowering.fused)
    if level == "schedule":
        return "\n\n".join(f"{p.name}:\n{s}" for p, s in lowering.scheduled)
    if level == "loop":
        return "\n\n".join(map(str, lowering.functions))
    if level in lowering.chip.program_levels:
        return "\n\n".join(lowering.chip.source(level, g.program) for g in lowering.fused.groups)
    return lowering.chip.text(level, lowering.recipe)
