"""What a function was compiled to: entries for calls, and families of sizes behind them.

A family has one combination of ranks, types and attributes. Its first call is compiled for its
sizes; sizes that vary from call to call become symbolic, and what tracing asks of them is kept as
guards, by which later calls find their code.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from terrazzo.base.upcalls import UPCALLS
from terrazzo.calls import captures
from terrazzo.calls.arguments import Rebuild, dtype_of, type_of
from terrazzo.calls.sizes import Pattern, Shapes, SizesSeen
from terrazzo.errors import TerrazzoError, VerifyError
from terrazzo.graph.ir import Graph, Operator, TensorType
from terrazzo.graph.rewrite import RuleTable
from terrazzo.graph.trace import trace
from terrazzo.index import Index, Var, substitute
from terrazzo.index.guards import CallQuestions, Guard, asking
from terrazzo.knobs import Settings
from terrazzo.runtime import fastcall
from terrazzo.runtime.layout import strides_of

if TYPE_CHECKING:
    from terrazzo.calls import into
    from terrazzo.runtime.artifact import Over

MOST_ENTRIES = 4096  # of one function: sizes may vary without end, and entries are quick to make
MOST_VARIANTS = 32  # of one pattern of sizes, by what it asks of them; further sizes are fixed


@dataclass(frozen=True, eq=False)
class Table:
    """What was compiled under one choice of settings and rules."""

    settings: Settings
    rules: RuleTable
    entries: dict[Hashable, Callable[..., Any]] = field(default_factory=dict)
    families: dict[Hashable, Family] = field(default_factory=dict)

    def keep(self, key: Hashable, entry: Callable[..., Any]) -> None:
        """Remember what calls of one kind run."""
        if len(self.entries) >= MOST_ENTRIES:
            self.entries.clear()
        self.entries[key] = entry


# Guards, and what is compiled for sizes that keep to them: an executable with the structure of its
# results, or None where such sizes have to be fixed.
Variant: TypeAlias = "tuple[tuple[Guard, ...], tuple[Any, Any] | None]"


class Family:
    """All entries of one function for one combination of ranks, types and attributes."""

    def __init__(self, name: str, rebuild: Rebuild, operator: Operator | None = None):
        self.name, self.rebuild, self.operator = name, rebuild, operator
        self.lock = threading.RLock()
        self.captured = captures.Captured()
        self.executables: dict[Hashable, tuple[Any, Any]] = {}
        self.kept: dict[Hashable, Any] = {}
        self.variants: dict[Hashable, list[Variant]] = {}
        self.sizes = SizesSeen()

    def entry(self, leaves: Sequence[Any], table: Table, form: into.Form | None = None,
              count: int = 0) -> Callable[..., Any]:
        """What calls with arguments like these run, with what the function mentions besides.

        With a form, the first `count` are arrays for the results.
        """
        def make(all: Sequence[Any]) -> Callable[..., Any]:
            if form is None:
                return self.entry_for(all, table)
            return self.entry_into(all, form, count, table)

        while True:
            try:
                if not self.captured.objects:
                    return make(leaves)
                return captures.entry(make, self.captured, leaves)
            except captures.MoreCaptured:  # now they are inputs, like the arguments
                self.sizes.restart()

    def entry_for(self, leaves: Sequence[Any], table: Table) -> Callable[..., Any]:
        fastcall.check_devices(leaves, self.name, table.settings.chip)
        wanted = tuple(i for i, leaf in enumerate(leaves) if fastcall.wants_gradient(leaf))
        with self.lock:  # two threads that need the same code wait for one of them
            keeping = self.keeping(leaves, wanted, table)
            if keeping is not None:
                return self.differentiable.entry(lambda given: keeping.forward(*given),
                                                 keeping.structure, keeping)
            executable, structure = self.find(leaves, table)
        if wanted:
            flat = self.quickest(executable, list(range(len(executable.output_types))), leaves)
            return self.differentiable.entry(flat, structure)
        return self.quickest(executable, structure, leaves)

    def quickest(self, executable: Any, structure: Any, leaves: Sequence[Any]
                 ) -> Callable[..., Any]:
        """What was compiled, or a kernel of the operator's that is written by hand."""
        generated = fastcall.entry(executable, structure, leaves)
        if self.operator is None or "_kernels" not in vars(self.operator):
            return generated
        from terrazzo.calls import kernels

        return kernels.chosen(self.operator, self.rebuild, executable, structure, leaves,
                              generated)

    def entry_into(self, leaves: Sequence[Any], form: into.Form, count: int, table: Table
                   ) -> Callable[..., Any]:
        from terrazzo.calls import into  # with the first call that has targets

        fastcall.check_devices(leaves, self.name, table.settings.chip)
        into.refuse_gradients(leaves, self.name)

        def find(inputs: Sequence[Any], aim: into.Aim) -> tuple[Any, Any]:
            with self.lock:
                return self.find(inputs, table, aim)

        # Now, and not when it is first run: it may find more that the function mentions.
        inputs = leaves[count:]
        find(inputs, into.aim(form, leaves[:count], inputs))
        return into.entry(find, form, count, self.name)

    def keeping(self, leaves: Sequence[Any], wrt: tuple[int, ...], table: Table) -> Any:
        """The function in parts that hand values on, if that pays and its sizes do not vary."""
        shapes = tuple(tuple(a.shape) for a in leaves)
        wrt = tuple(i for i in wrt if dtype_of(leaves[i]).is_float)
        varies = table.settings.dynamic != "never" and (
            table.settings.dynamic == "always" or self.sizes.first not in (None, shapes))
        if not wrt or varies or fastcall.pushes_tangents():
            return None
        if (shapes, wrt) not in self.kept:
            from terrazzo.compiler.options import Options
            from terrazzo.compiler.residuals import training_parts

            graph, structure = traced(self.call, self.name, [type_of(a) for a in leaves])
            try:
                parts = training_parts(graph, wrt, Options(table.settings, table.rules))
            except TerrazzoError:  # such as a gradient that nobody may ever ask for
                parts = None
            self.kept[shapes, wrt] = parts and UPCALLS["keeping"](self.name, parts, structure)
        if self.kept[shapes, wrt] is not None:
            self.sizes.note(shapes, table.settings.dynamic)
        return self.kept[shapes, wrt]

    @functools.cached_property
    def differentiable(self) -> Any:
        return UPCALLS["differentiable"](self.name, self.call)

    def call(self, values: Sequence[Any]) -> Any:
        """The function on values for its arguments and for what it mentions."""
        return self.captured.trace(self.rebuild.call, values)

    def find(self, leaves: Sequence[Any], table: Table, aim: into.Aim | None = None
             ) -> tuple[Any, Any]:
        shapes = tuple(tuple(a.shape) for a in leaves)
        when = table.settings.dynamic
        if when != "never":
            self.sizes.note(shapes, when)
            if self.sizes.varying and (shapes != self.sizes.first or when == "always"):
                found = self.dynamic(leaves, shapes, table, aim)
                if found is not None:
                    return found
        return self.static(leaves, table, aim)

    def compiled(self, graph: Graph, strides: Sequence[Any], leaves: Sequence[Any], table: Table,
                 over: Over = ()) -> Any:
        """Compile a graph under the settings that its call began with."""
        if table.settings.check:
            UPCALLS["check"](graph, leaves)
        # The way down is not needed to import terrazzo, and takes a quarter of that time.
        from terrazzo.compiler.driver import compile_graph
        from terrazzo.compiler.options import Options

        return compile_graph(graph, strides=tuple(strides), over=over,
                             options=Options(table.settings, table.rules))

    def static(self, leaves: Sequence[Any], table: Table, aim: into.Aim | None = None
               ) -> tuple[Any, Any]:
        """Compiled for exactly these sizes, and for their strides where those may stay."""
        strides = tuple(strides_of(a) for a in leaves)
        key = (tuple(tuple(a.shape) for a in leaves), strides, aim)
        with self.lock:
            if key not in self.executables:
                graph, structure = traced(self.call, self.name, [type_of(a) for a in leaves])
                over = () if aim is None else aim.over(structure, self.name)
                self.executables[key] = (self.compiled(graph, strides, leaves, table, over),
                                         structure)
            return self.executables[key]

    def dynamic(self, leaves: Sequence[Any], shapes: Shapes, table: Table,
                aim: into.Aim | None = None) -> tuple[Any, Any] | None:
        """Compiled once for all sizes that vary and that answer alike what tracing asked of them.

        None where these sizes have to be fixed.
        """
        strides = tuple(_symbolic_strides(i, a) for i, a in enumerate(leaves))
        pattern, sizes = self.sizes.pattern(shapes)
        variants = self.variants.setdefault((pattern, strides, aim), [])
        for guards, found in variants:
            if all(guard.holds(sizes) for guard in guards):
                return found
        if len(variants) >= MOST_VARIANTS or not sizes:
            return None
        variants.append(self.symbolic(leaves, pattern, strides, sizes, table, aim))
        return variants[-1][1]

    def symbolic(self, leaves: Sequence[Any], pattern: Pattern,
                 strides: tuple[Any, ...], sizes: dict[Var, int], table: Table,
                 aim: into.Aim | None = None) -> Variant:
        """Compiled for a pattern of sizes, and the guards under which that is right.

        Sizes that the trace finds equal, or fixes, are replaced and the trace made again: what is
        compiled is then made for them, and no shape is known by two names.
        """
        fixed: dict[Guard, None] = {}
        while True:
            types = [TensorType(p, dtype_of(a)) for p, a in zip(pattern, leaves, strict=True)]
            asked = CallQuestions(sizes)
            made = None
            with asking(asked):
                try:
                    graph, structure = traced(self.call, self.name, types)
                    if not asked.equalities():
                        over = () if aim is None else aim.over(structure, self.name)
                        made = self.compiled(graph, strides, leaves, table, over), structure
                except (VerifyError, captures.MoreCaptured):
                    raise
                except Exception:  # whatever it is, fixed sizes work, or say what is wrong
                    made = None
            equal = asked.equalities()
            if not equal:
                return (*fixed, *asked.guards), made
            fixed.update((guard, None) for guard in asked.guards if guard.relation == "==")
            pattern = tuple(tuple(substitute(n, equal) for n in p) for p in pattern)
            if not any(isinstance(n, Var) for p in pattern for n in p):
                return tuple(fixed), None


def _symbolic_strides(i: int, array: Any) -> tuple[Index, ...] | None:
    """Strides that go with any size: names, but for an axis that repeats and for the last one."""
    strides = strides_of(array)
    return strides and tuple(s if s == 0 or axis == len(strides) - 1 else Var(f"s{i}_{axis}", 0)
                             for axis, s in enumerate(strides))


def traced(call: Callable[[Sequence[Any]], Any], name: str, types: Sequence[TensorType]
           ) -> tuple[Graph, Any]:
    """The graph of a function of values, and the structure of its results."""
    return trace(lambda *values: call(values), types, name=name)
