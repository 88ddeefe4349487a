"""What happens when an operator or a compiled function is called with arrays.

The first call with new types traces, compiles and remembers; later calls find their entry by the
arguments' shapes, strides and types, and go straight to native code. When a size changes between
calls it becomes symbolic, so a function is compiled twice, not once for every size.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from terrazzo.base.nests import pack
from terrazzo.base.tables import Listing
from terrazzo.calls import captures, into
from terrazzo.chips.registry import chip_named
from terrazzo.dtypes import DType, as_dtype, result_type
from terrazzo.errors import (
    ArgumentError,
    CompileError,
    ShapeError,
    TerrazzoError,
    VerifyError,
)
from terrazzo.graph import autodiff
from terrazzo.graph.bound import is_method, name_of, reference
from terrazzo.graph.ir import HOOKS, Graph, Operator, TensorType, Value, apply
from terrazzo.graph.rewrite import RuleTable, user_rules
from terrazzo.graph.trace import trace
from terrazzo.index import Index, Var, substitute
from terrazzo.index.guards import CallQuestions, Guard, asking
from terrazzo.knobs import Settings, knobs
from terrazzo.ops.define import operator
from terrazzo.runtime import fastcall
from terrazzo.runtime.artifact import Over
from terrazzo.runtime.layout import strides_of

if TYPE_CHECKING:
    from terrazzo.runtime.executable import Executable
    from terrazzo.tools.benchmark import BenchReport
    from terrazzo.tools.verify.report import Report

_lock = threading.RLock()
MOST_ENTRIES = 4096  # of one function: sizes may vary without end, and entries are quick to make
MOST_VARIANTS = 32  # of one pattern of sizes, by what it asks of them; further sizes are fixed


class Compiled:
    """A function of tensors, compiled for whatever types it is called with.

    Arrays, tensors and floats, in any nest of tuples, lists and dicts, are what it computes with;
    everything else (integers, strings, None) is a part of the program. Of an operator, all that is
    passed for a tensor is computed with, and all attributes are a part of the program. `out=` takes
    arrays that the results go into, which may be arguments.
    """

    def __init__(self, function: Callable[..., Any], name: str,
                 operator: Operator | None = None):
        self.function, self.name, self.operator = function, name, operator
        self.tensors = {} if operator is None else {
            p.name: "tensor" for p in operator.tensor_params}
        self.tables: dict[Hashable, _Table] = {}
        self.table = self.table_for(knobs.now)
        self.written = function if operator is None or operator.body is None else operator.body
        self.around = captures.surroundings(self.written)
        functools.update_wrapper(self, function, updated=())

    @functools.cached_property
    def has_own_out(self) -> bool:
        """Whether the function itself has a parameter called `out`."""
        if self.operator is not None:
            return "out" in self.operator.signature.parameters
        try:
            return "out" in inspect.signature(self.function).parameters
        except (TypeError, ValueError):  # something that tells nothing of its parameters
            return False

    def without_out(self, kwargs: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """Keyword arguments of the function, and what was given for its results."""
        if "out" not in kwargs or self.has_own_out:
            return kwargs, None
        return {k: v for k, v in kwargs.items() if k != "out"}, kwargs["out"]

    def table_for(self, settings: Settings) -> _Table:
        """What was compiled under some settings and the rules that there are now."""
        with _lock:
            rules = user_rules()
            table = self.tables.setdefault((settings.code_key, rules.rules),
                                           _Table(settings, rules))
            # Settings that do not shape code are those of now, whatever the first ones were.
            self.table = replace(table, settings=settings)
            return self.table

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        table = self.table
        # Another object at every change, so one comparison notices them all.
        now = knobs.undisturbed or knobs.now
        if table.settings is not now:
            table = self.table_for(now)
        if self.around is not None and self.around.changed():
            table = self.forget()
        if not kwargs:
            entry = table.entries.get(fastcall.key_of(args))
            if entry is not None:
                return entry(args)
        elif "out" in kwargs and not self.has_own_out:
            out = kwargs.pop("out")
            if out is not None:
                return self.call_into(out, args, kwargs, table)
        leaves: list[Any] = []
        key = self.key(args, kwargs, leaves)
        entry = None if key is None else table.entries.get(key)
        return self.slow(args, kwargs, key, table) if entry is None else entry(leaves)

    def call_into(self, out: Any, args: Sequence[Any], kwargs: dict[str, Any], table: _Table
                  ) -> Any:
        """A call whose results go into given arrays: to its entry they are the first arguments."""
        targets = out if type(out) is tuple else (out,)
        plain = None if kwargs else _key_of_out(out, targets, args)
        entry = None if plain is None else table.entries.get(plain)
        if entry is not None:
            return entry((*targets, *args))
        form, found = into.Form.of(out, self.name)
        leaves = list(found)
        key = self.key(args, kwargs, leaves)
        known = key and ("out", form, tuple(map(fastcall.layout_of, found)), key)
        entry = None if known is None else table.entries.get(known)
        if entry is not None:
            return entry(leaves)
        arrays, rebuild = self.arguments(args, kwargs)
        if any(isinstance(leaf, Value) for leaf in arrays):
            raise ArgumentError(f"{self.name} got out= inside another function, where values never "
                                "change", hint="return the result")
        given = [*found, *arrays]
        made = self.family(arrays, rebuild, table).entry(given, table, form, len(found))
        for form_of_call in (plain, known):
            if form_of_call is not None:
                table.keep(form_of_call, _with_numbers(made, given, leaves))
        return made(given)

    def forget(self) -> _Table:
        """Start anew: a variable that the function names is bound to something else."""
        with _lock:
            self.tables.clear()
            self.around = captures.surroundings(self.written)
        return self.table_for(knobs.now)

    def key(self, args: Sequence[Any], kwargs: dict[str, Any], leaves: list[Any]) -> Hashable:
        """What an entry for any arguments depends on, and the leaves; None: do not keep one."""
        try:
            return (tuple([_key(a, mode, leaves) for a, mode in self.modes(args)]),
                    tuple([(k, _key(v, self.mode(k), leaves)) for k, v in kwargs.items()]))
        except _NoKey:
            return None

    # ------------------------------------------------------------ first call
    def slow(self, args: Sequence[Any], kwargs: dict[str, Any], key: Hashable,
             table: _Table) -> Any:
        """Find out what the arguments are, compile if need be, run."""
        leaves, rebuild = self.arguments(args, kwargs)
        if any(isinstance(leaf, Value) for leaf in leaves):
            return self.function(*args, **kwargs)
        entry = self.family(leaves, rebuild, table).entry(leaves, table)
        given: list[Any] = []
        self.key(args, kwargs, given)
        # Where every argument is one leaf, the key is quicker to make.
        plain = not kwargs and len(given) == len(args) and all(
            a is b for a, b in zip(given, args, strict=True))
        flat = fastcall.key_of(args) if plain else None
        if flat is not None or key is not None:
            table.keep(flat if flat is not None else key, _with_numbers(entry, leaves, given))
        return entry(leaves)

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any]
                  ) -> tuple[list[Any], _Rebuild]:
        """Tensors among the arguments, and how to call the function with others in their place."""
        if self.operator is not None:
            self.operator.bind(args, kwargs)  # says what is wrong with the arguments, if anything
        leaves: list[Any] = []
        structure = (tuple(_flatten(a, mode, leaves) for a, mode in self.modes(args)),
                     tuple((k, _flatten(v, self.mode(k), leaves)) for k, v in kwargs.items()))
        return _as_arrays(leaves), _Rebuild(self.function, structure)

    def modes(self, args: Sequence[Any]) -> Iterable[tuple[Any, str]]:
        """Every positional argument with what it may hold: anything, tensors, or an attribute."""
        if self.operator is None:
            return zip(args, itertools.repeat("any"))
        if not self.operator.variadic:
            return zip(args, itertools.chain(self.tensors.values(),
                                             itertools.repeat("attribute")))
        listed = bool(args) and isinstance(args[0], (list, tuple))
        return zip(args, itertools.chain(["tensors"], itertools.repeat(
            "attribute" if listed else "tensors")))

    def mode(self, keyword: str) -> str:
        """The same for a keyword argument."""
        if self.operator is None:
            return "any"
        known = self.operator.signature.parameters
        return self.tensors.get(keyword, "attribute" if keyword in known or not
                                self.operator.takes_keywords else "keyword")

    def family(self, leaves: Sequence[Any], rebuild: _Rebuild, table: _Table) -> _Family:
        key = (rebuild.key(), tuple((len(a.shape), str(a.dtype)) for a in leaves))
        with _lock:
            if key not in table.families:
                table.families[key] = _Family(self.name, rebuild)
            return table.families[key]

    def on(self, chip: str) -> Placed:
        """This function on a chip by its name, wherever the data is."""
        return Placed(self, chip)

    # ------------------------------------------------------------ as a Python object
    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        """A function that was written in the body of a class is a method of its objects."""
        if owner is None or not is_method(self.function):
            return self
        return functools.partial(self, owner)

    def __copy__(self) -> Compiled:
        return self

    def __deepcopy__(self, memo: Any) -> Compiled:
        return self

    def __reduce__(self) -> Any:
        if self.operator is not None:
            return compiled, (self.operator,)
        return reference(self, self.function, jit)

    # ------------------------------------------------------------ looking inside
    def graph(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Graph:
        """The traced graph for arguments like these."""
        return self.graph_over(args, kwargs)[0]

    def graph_over(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Graph, Over]:
        """The same, and the inputs that `out=` asks for results to be written over."""
        kwargs, out = self.without_out(kwargs)
        leaves, rebuild = self.arguments(args, kwargs)
        graph, structure = _trace(rebuild.call, self.name, [_type_of(a) for a in leaves])
        if out is None:
            return graph, ()
        form, targets = into.Form.of(out, self.name)
        return graph, into.aim(form, targets, leaves).over(structure, self.name)

    def executable(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The executable for arguments like these, in contiguous memory."""
        graph, over = self.graph_over(args, kwargs)
        leaves, rebuild = self.arguments(args, self.without_out(kwargs)[0])
        table = self.table_for(knobs.now)
        # By itself, so that what the function mentions is a part of it: it may be saved.
        return _Family(self.name, rebuild).compiled(graph, [None] * len(leaves), leaves, table,
                                                    over)


@dataclass(frozen=True, eq=False)
class _Table:
    """What was compiled under one choice of settings and rules."""

    settings: Settings
    rules: RuleTable
    entries: dict[Hashable, Callable[..., Any]] = field(default_factory=dict)
    families: dict[Hashable, _Family] = field(default_factory=dict)

    def keep(self, key: Hashable, entry: Callable[..., Any]) -> None:
        """Remember what calls of one kind run."""
        if len(self.entries) >= MOST_ENTRIES:
            self.entries.clear()
        self.entries[key] = entry


class _Rebuild:
    """How to call a traced function with values in place of its tensor arguments."""

    def __init__(self, function: Callable[..., Any], structure: Any):
        self.function, self.structure = function, structure

    def key(self) -> Hashable:
        args, kwargs = self.structure
        return (tuple(map(_frozen, args)), tuple((k, _frozen(v)) for k, v in kwargs))

    def call(self, values: Sequence[Any]) -> Any:
        args, kwargs = self.structure
        given = iter(values)
        return self.function(*[_unflatten(a, given) for a in args],
                             **{k: _unflatten(v, given) for k, v in kwargs})


# Guards, and what is compiled for sizes that keep to them: an executable with the structure of its
# results, or None where such sizes have to be fixed.
_Variant: TypeAlias = "tuple[tuple[Guard, ...], tuple[Any, Any] | None]"


class _Family:
    """All entries of one function for one combination of ranks, types and attributes."""

    def __init__(self, name: str, rebuild: _Rebuild):
        self.name, self.rebuild = name, rebuild
        self.lock = threading.RLock()
        self.captured = captures.Captured()
        self.executables: dict[Hashable, tuple[Any, Any]] = {}
        self.kept: dict[Hashable, Any] = {}
        self.variants: dict[Hashable, list[_Variant]] = {}
        self.first: tuple[tuple[int, ...], ...] | None = None
        self.varying: set[tuple[int, int]] = set()
        self.classes: dict[tuple[int, int], int] = {}  # sizes equal in every call share a number

    def entry(self, leaves: Sequence[Any], table: _Table, form: into.Form | None = None,
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
                self.first, self.classes = None, {}

    def entry_for(self, leaves: Sequence[Any], table: _Table) -> Callable[..., Any]:
        fastcall.check_devices(leaves, self.name)
        wanted = tuple(i for i, leaf in enumerate(leaves) if fastcall.wants_gradient(leaf))
        with self.lock:  # two threads that need the same code wait for one of them
            keeping = self.keeping(leaves, wanted, table)
            if keeping is not None:
                return self.differentiable.entry(lambda given: keeping.forward(*given),
                                                 keeping.structure, keeping)
            executable, structure = self.find(leaves, table)
        if wanted:
            flat = fastcall.entry(executable, list(range(len(executable.output_types))), leaves)
            return self.differentiable.entry(flat, structure)
        return fastcall.entry(executable, structure, leaves)

    def entry_into(self, leaves: Sequence[Any], form: into.Form, count: int, table: _Table
                   ) -> Callable[..., Any]:
        fastcall.check_devices(leaves, self.name)
        into.refuse_gradients(leaves, self.name)

        def find(inputs: Sequence[Any], aim: into.Aim) -> tuple[Any, Any]:
            with self.lock:
                return self.find(inputs, table, aim)

        # Now, and not when it is first run: it may find more that the function mentions.
        inputs = leaves[count:]
        find(inputs, into.aim(form, leaves[:count], inputs))
        return into.entry(find, form, count, self.name)

    def keeping(self, leaves: Sequence[Any], wrt: tuple[int, ...], table: _Table) -> Any:
        """The function in parts that hand values on, if that pays and its sizes do not vary."""
        shapes = tuple(tuple(a.shape) for a in leaves)
        wrt = tuple(i for i in wrt if _dtype(leaves[i]).is_float)
        varies = table.settings.dynamic != "never" and (
            table.settings.dynamic == "always" or self.first not in (None, shapes))
        if not wrt or varies or fastcall.pushes_tangents():
            return None
        if (shapes, wrt) not in self.kept:
            from terrazzo.compiler.driver import Options
            from terrazzo.compiler.residuals import training_parts
            from terrazzo.torch.autograd import Keeping

            graph, structure = _trace(self.call, self.name, [_type_of(a) for a in leaves])
            try:
                parts = training_parts(graph, wrt, Options(table.settings, table.rules))
            except TerrazzoError:  # such as a gradient that nobody may ever ask for
                parts = None
            self.kept[shapes, wrt] = parts and Keeping(self.name, parts, structure)
        if self.kept[shapes, wrt] is not None:
            self.note(shapes, table.settings.dynamic)
        return self.kept[shapes, wrt]

    @functools.cached_property
    def differentiable(self) -> Any:
        from terrazzo.torch.autograd import Differentiable

        return Differentiable(self.name, self.call)

    def call(self, values: Sequence[Any]) -> Any:
        """The function on values for its arguments and for what it mentions."""
        return self.captured.trace(self.rebuild.call, values)

    def find(self, leaves: Sequence[Any], table: _Table, aim: into.Aim | None = None
             ) -> tuple[Any, Any]:
        shapes = tuple(tuple(a.shape) for a in leaves)
        when = table.settings.dynamic
        if when != "never":
            self.note(shapes, when)
            if self.varying and (shapes != self.first or when == "always"):
                found = self.dynamic(leaves, shapes, table, aim)
                if found is not None:
                    return found
        return self.static(leaves, table, aim)

    def compiled(self, graph: Graph, strides: Sequence[Any], leaves: Sequence[Any], table: _Table,
                 over: Over = ()) -> Any:
        """Compile a graph under the settings that its call began with."""
        if table.settings.check:
            _check_levels(graph, leaves)
        # The way down is not needed to import terrazzo, and takes a quarter of that time.
        from terrazzo.compiler import driver as compiler

        return compiler.compile_graph(graph, strides=tuple(strides), over=over,
                                      options=compiler.Options(table.settings, table.rules))

    def note(self, shapes: tuple[tuple[int, ...], ...], when: str) -> None:
        """Which sizes differ from call to call, and which were always equal to each other."""
        places = {(i, d): n for i, shape in enumerate(shapes) for d, n in enumerate(shape)}
        if self.first is None:
            self.first = shapes
        if when == "always":
            self.varying = set(places)
        self.varying |= {(i, d) for (i, d), n in places.items() if self.first[i][d] != n}
        numbers: dict[tuple[int, int], int] = {}
        self.classes = {place: numbers.setdefault((self.classes.get(place, 0), n), len(numbers))
                        for place, n in places.items()}

    def static(self, leaves: Sequence[Any], table: _Table, aim: into.Aim | None = None
               ) -> tuple[Any, Any]:
        """Compiled for exactly these sizes, and for their strides where those may stay."""
        strides = tuple(strides_of(a) for a in leaves)
        key = (tuple(tuple(a.shape) for a in leaves), strides, aim)
        with self.lock:
            if key not in self.executables:
                graph, structure = _trace(self.call, self.name, [_type_of(a) for a in leaves])
                over = () if aim is None else aim.over(structure, self.name)
                self.executables[key] = (self.compiled(graph, strides, leaves, table, over),
                                         structure)
            return self.executables[key]

    def dynamic(self, leaves: Sequence[Any], shapes: tuple[tuple[int, ...], ...], table: _Table,
                aim: into.Aim | None = None) -> tuple[Any, Any] | None:
        """Compiled once for all sizes that vary and that answer alike what tracing asked of them.

        None where these sizes have to be fixed.
        """
        strides = tuple(_symbolic_strides(i, a) for i, a in enumerate(leaves))
        pattern, sizes = self.pattern(shapes)
        variants = self.variants.setdefault((pattern, strides, aim), [])
        for guards, found in variants:
            if all(guard.holds(sizes) for guard in guards):
                return found
        if len(variants) >= MOST_VARIANTS or not sizes:
            return None
        variants.append(self.symbolic(leaves, pattern, strides, sizes, table, aim))
        return variants[-1][1]

    def pattern(self, shapes: tuple[tuple[int, ...], ...]
                ) -> tuple[tuple[tuple[Index, ...], ...], dict[Var, int]]:
        """Shapes with a variable for every size that varies, and what those are in this call."""
        pattern: list[tuple[Index, ...]] = []
        names: dict[Hashable, Var] = {}
        sizes: dict[Var, int] = {}
        for i, shape in enumerate(shapes):
            dims: list[Index] = []
            for d, n in enumerate(shape):
                if (i, d) not in self.varying or n < 2:  # 0 and 1 mean something of their own
                    dims.append(n)
                    continue
                var = names.setdefault(self.classes[i, d], Var(f"n{len(names)}", 2))
                sizes[var] = n
                dims.append(var)
            pattern.append(tuple(dims))
        return tuple(pattern), sizes

    def symbolic(self, leaves: Sequence[Any], pattern: tuple[tuple[Index, ...], ...],
                 strides: tuple[Any, ...], sizes: dict[Var, int], table: _Table,
                 aim: into.Aim | None = None) -> _Variant:
        """Compiled for a pattern of sizes, and the guards under which that is right.

        Sizes that the trace finds equal, or fixes, are replaced and the trace made again: what is
        compiled is then made for them, and no shape is known by two names.
        """
        fixed: dict[Guard, None] = {}
        while True:
            types = [TensorType(p, _dtype(a)) for p, a in zip(pattern, leaves, strict=True)]
            asked = CallQuestions(sizes)
            made = None
            with asking(asked):
                try:
                    graph, structure = _trace(self.call, self.name, types)
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


def _check_levels(graph: Graph, leaves: Sequence[Any]) -> None:
    from terrazzo.tools.verify.verifier import check_call

    check_call(graph, leaves)


def _trace(call: Callable[[Sequence[Any]], Any], name: str, types: Sequence[TensorType]
           ) -> tuple[Graph, Any]:
    return trace(lambda *values: call(values), types, name=name)


# ---------------------------------------------------------------- arguments
_NUMBERS = (bool, int, float, complex)


def _dtype(x: Any) -> DType:
    return as_dtype(x.dtype)


def _type_of(x: Any) -> TensorType:
    return TensorType(tuple(int(n) for n in x.shape), _dtype(x))


def _as_arrays(leaves: Sequence[Any]) -> list[Any]:
    """Arrays stay; Python numbers become 0-d arrays, wide enough for what they meet."""
    types = [_dtype(a) for a in leaves if fastcall.is_array(a) or isinstance(a, Value)]
    result = []
    for leaf in leaves:
        if isinstance(leaf, np.generic):
            result.append(np.asarray(leaf))
        elif fastcall.is_array(leaf) or isinstance(leaf, Value):
            result.append(leaf)
        elif isinstance(leaf, _NUMBERS):
            kind = result_type(leaf, *types)
            result.append(_number(leaf, kind.compute if kind.is_float else kind))
        else:
            try:
                array = np.asarray(leaf)
            except ValueError as error:  # lists of unequal lengths
                raise ArgumentError(f"cannot make a tensor of a {type(leaf).__name__}: {error}",
                                    hint="all rows must have the same length") from None
            if array.dtype == object:
                raise ArgumentError(f"cannot make a tensor of {type(leaf).__name__}",
                                    hint="pass numpy arrays, torch tensors or numbers")
            if array.dtype == np.float64 and not isinstance(leaf, np.generic):
                array = array.astype(np.float32)  # lists of Python floats
            result.append(array)
    return result


def _number(number: Any, dtype: DType) -> np.ndarray:
    try:
        return np.asarray(number, dtype.np)
    except OverflowError:
        raise ArgumentError(f"the number {number} does not fit into {dtype.name}",
                            hint=f"pass it as an array of a wider type than {dtype.name}"
                            ) from None


def _with_numbers(entry: Callable[..., Any], arrays: Sequence[Any], given: Sequence[Any]
                  ) -> Callable[..., Any]:
    """The entry for leaves among which are numbers, which go in as arrays of these types."""
    numbers = [(i, _dtype(a)) for i, (leaf, a) in enumerate(zip(given, arrays, strict=True))
               if leaf is not a]
    if not numbers:
        return entry

    def run(leaves: Sequence[Any]) -> Any:
        leaves = list(leaves)
        for i, dtype in numbers:
            leaves[i] = _number(leaves[i], dtype)
        return entry(leaves)

    return run


def _key_of_out(out: Any, targets: Sequence[Any], args: Sequence[Any]) -> Hashable:
    """What an entry with arrays for results depends on; None where they are a deeper nest."""
    key = fastcall.key_of(args)
    if key is None:
        return None
    own = [id(a) for a in args]
    # Of what is an argument as well, that tells all.
    places = tuple([own.index(id(t)) if id(t) in own else -1 for t in targets])
    others = fastcall.key_of([t for t, i in zip(targets, places, strict=True) if i < 0])
    return None if others is None else ("out", out is targets, places, key, others)


class _NoKey(Exception):
    """These arguments have no key that a later call could have again."""


def _key(x: Any, mode: str, leaves: list[Any]) -> Any:
    """What a compiled entry depends on of one argument; its leaves are collected."""
    kind = type(x)
    layout = fastcall.layout_of(x)
    if layout is not None and mode != "attribute":
        leaves.append(x)
        return layout
    if kind is float or kind is complex or kind is int or kind is bool:
        if mode in ("tensor", "tensors") or (mode == "any" and kind in (float, complex)):
            leaves.append(x)
            return kind
        # Zeros of either sign are equal, and a NaN is not even equal to itself.
        return (kind, repr(x)) if kind is float or kind is complex else (kind, x)
    if (kind is tuple or kind is list) and mode != "tensor":
        inner = "attribute" if mode == "keyword" else mode
        return (kind, *[_key(item, inner, leaves) for item in x])
    if kind is dict and mode == "any":
        return (kind, *[(k, _key(v, mode, leaves)) for k, v in x.items()])
    if x is None or kind is str:
        return x
    # Traced values are no arguments of a run, and graphs are made anew for every call.
    if isinstance(x, (Value, Graph)) or (
            isinstance(x, (tuple, list, dict)) and mode != "attribute"):
        raise _NoKey
    return captures.content_of(x)


def _flatten(x: Any, mode: str, leaves: list[Any]) -> Any:
    """The nesting of an argument, with its leaves collected and all else in place."""
    if mode == "tensor":
        leaf = x is not None
    else:
        leaf = mode != "attribute" and (
            fastcall.is_array(x) or isinstance(x, Value)
            or (mode != "keyword" and isinstance(x, (float, complex)))
            or (mode == "tensors" and isinstance(x, _NUMBERS)))
    if leaf:
        leaves.append(x)
        number = isinstance(x, _NUMBERS) and not isinstance(x, np.generic)
        return ("number" if number else "leaf", None)
    if isinstance(x, (tuple, list)) and mode != "keyword":
        return (type(x), tuple(_flatten(item, mode, leaves) for item in x))
    if isinstance(x, dict) and mode == "any":
        return (dict, tuple((k, _flatten(v, mode, leaves)) for k, v in x.items()))
    return ("static", x)


def _unflatten(structure: Any, leaves: Iterator[Any]) -> Any:
    kind, content = structure
    if kind == "leaf":
        return next(leaves)
    if kind == "number":
        value = next(leaves)
        if isinstance(value, Value):
            value.is_number = True
        return value
    if kind == "static":
        return content
    if kind is dict:
        return {k: _unflatten(v, leaves) for k, v in content}
    items = [_unflatten(c, leaves) for c in content]
    return kind(*items) if hasattr(kind, "_fields") else kind(items)


def _frozen(structure: Any) -> Hashable:
    """A structure that can be a key: plain data by value, graphs and arrays by their content."""
    kind, content = structure
    if kind == "leaf" or kind == "number":
        return kind
    if kind is dict:
        return (kind, *((k, _frozen(v)) for k, v in content))
    if kind != "static":
        return (kind, *map(_frozen, content))
    if isinstance(content, Graph):
        from terrazzo.runtime.content import Unknowable, graph_text

        with contextlib.suppress(Unknowable):
            return graph_text(content)
    return captures.content_of(content)


# ---------------------------------------------------------------- the public functions
_compiled: dict[Operator, Compiled] = {}


def compiled(op: Operator) -> Compiled:
    """The compiled form of an operator, made when first called."""
    found = _compiled.get(op)
    if found is None:
        with _lock:
            found = _compiled.setdefault(op, Compiled(
                lambda *args, **kwargs: apply(op, *op.bind(args, kwargs)), op.name, op))
    return found


def _call(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return compiled(op)(*args, **kwargs)


def _lower(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """`op.lower(x, "loop")`: the last positional string is the level."""
    chip = kwargs.pop("chip", "") or kwargs.pop("target", "")  # its older name
    if not args or not isinstance(args[-1], str):
        raise ArgumentError(f"{op.name}.lower needs a level as its last argument",
                            hint=f'for example {op.name}.lower(x, "loop")')
    *tensors, level = args
    graph, over = compiled(op).graph_over(tensors, kwargs)
    return lower(graph, level, chip, over)


def lower(graph: Graph, level: str, chip: str = "", over: Over = ()) -> str:
    """One level of a graph's compilation as text, for a chip by its name."""
    from terrazzo.compiler.driver import Options, graph_level

    with knobs.override(chip=chip or knobs.chip):
        return Listing(graph_level(graph, level, Options.now(), over=over))


@dataclass(frozen=True)
class Placed:
    """A function that is compiled for a chip and runs there."""

    function: Any  # an operator, or a compiled function
    chip: str

    def __post_init__(self) -> None:
        chip_named(self.chip).demand()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        with knobs.override(chip=self.chip):
            return self.function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """`verify`, `bench`, `compile` and `lower` of the function, on the chip."""
        found = getattr(self.function, name)

        def there(*args: Any, **kwargs: Any) -> Any:
            with knobs.override(chip=self.chip):
                return found(*args, **kwargs)

        return there if callable(found) else found


def _compile(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return compiled(op).executable(args, kwargs)


def _verify(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return verify(op, *args, **kwargs)


def _bench(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return bench(op, *args, **kwargs)


def _op(function: Callable[..., Any], name: str, grad: Callable[..., Any] | None) -> Any:
    return op(function, name=name, grad=grad)


HOOKS.update(op=_op, call=_call, lower=_lower, compile=_compile, verify=_verify, bench=_bench,
             on=Placed)


def verify(function: Callable[..., Any], *args: Any, levels: Sequence[str] | None = None,
           dtypes: Sequence[Any] | None = None, kinds: Sequence[str] | None = None, seed: int = 0,
           **attrs: Any) -> Report:
    """Check every level of a function or operator against the one above, and its gradient.

    Arguments are examples: their shapes are taken over, and floats are drawn anew for every kind
    of input. Without any, shapes are found by trying. `attrs` go to the function. Raises
    VerifyError, which names the level, the operator and the element that is wrong.

    levels  of graph, expr, loop, code and gradient; all by default
    dtypes  such as ["float32"]; all that the function takes by default
    kinds   of random, special, extreme, one, odd, empty, strided, symbolic; all by default
    seed    of the random inputs

    >>> import terrazzo as tz
    >>> print(tz.verify(tz.relu, dtypes=["float32"], levels=["expr"], kinds=["odd"]).name)
    relu
    """
    from terrazzo.tools.verify import verifier

    chosen = verifier.KINDS if kinds is None else kinds
    return verifier.verify(function, *args, levels=levels, dtypes=dtypes, kinds=chosen, seed=seed,
                           **attrs)


def bench(function: Callable[..., Any], *args: Any, rounds: int | None = None, torch: bool = True,
          **attrs: Any) -> BenchReport:
    """Time a function or operator on some arguments beside numpy and torch, and the roofline.

    rounds  how often each is timed, in turns
    torch   whether torch is timed too, if it is installed

    `attrs` go to the function. What it answers prints as a table, and shows as one in notebooks.

    >>> import numpy as np, terrazzo as tz
    >>> report = tz.bench(tz.relu, np.ones((8, 8), np.float32), rounds=1, torch=False)
    >>> report.name, report.lines[0].name
    ('relu', 'terrazzo')
    """
    from terrazzo.tools import benchmark

    return benchmark.bench(function, *args, rounds=rounds or benchmark.ROUNDS, torch=torch,
                           **attrs)


def op(function: Callable[..., Any] | None = None, *, name: str | None = None,
       grad: Callable[..., Any] | None = None, domain: str = "") -> Any:
    """Make a function of tensors an operator: compiled, differentiable, like the built-in ones.

    Parameters before `*` are tensors, those after it are attributes, which are a part of the
    program. As a decorator it is `@tz.op` or `@tz.op(name=..., grad=...)`.

    name    what graphs and messages call it; that of the function by default
    grad    its own gradient rule, `rule(node, *cotangents)`, which answers with a list of one
            gradient for each tensor: docs/language.md
    domain  ONNX models may use it too, as a node of this domain with the operator's name

    >>> import numpy as np, terrazzo as tz
    >>> @tz.op
    ... def scaled(x, weight, *, power=2):
    ...     "x times a power of weight"
    ...     return x * weight ** power
    >>> scaled(np.array([1.0, 2.0]), 3.0, power=1)
    array([3., 6.])
    """
    if function is None:
        return functools.partial(op, name=name, grad=grad, domain=domain)
    made = operator(function, family="user", name=name, grad=grad)
    if domain:
        from terrazzo.frontends.onnx.registry import converts_operator

        converts_operator(made, domain)
    return made


def jit(function: Callable[..., Any]) -> Compiled:
    """Compile a function of tensors (or of nests of tensors) without making it an operator.

    Arrays, tensors and floats among its arguments, in any nest, are computed with; all else is a
    part of the program.

    >>> import numpy as np, terrazzo as tz
    >>> @tz.jit
    ... def step(state, x):
    ...     return {"mean": 0.9 * state["mean"] + 0.1 * x}
    >>> step({"mean": np.array([0.0])}, np.array([1.0]))
    {'mean': array([0.1])}
    """
    return Compiled(function, name_of(function).strip("<>") or "function")


def load(path: str | os.PathLike[str]) -> Executable:
    """An executable from the file that `Executable.save` wrote.

    >>> import numpy as np, terrazzo as tz
    >>> x = np.array([-1.0, 2.0])
    >>> tz.relu.compile(x).save("relu.tzx")
    >>> tz.load("relu.tzx")(x)
    array([0., 2.])
    """
    from terrazzo.runtime.executable import Executable

    return Executable.load(path)


def compile(model: Any) -> Executable:
    """An ONNX model (a path, bytes or a ModelProto) as one executable, which can be saved.

    What has to run in parts is refused; `terrazzo.ort.InferenceSession` runs every model.

        tz.compile("model.onnx").save("model.tzx")
        tz.load("model.tzx")(x)
    """
    from terrazzo.frontends.onnx.session import Session

    session = Session(model, reference=False)
    if session.whole is None:
        from terrazzo.frontends.onnx.session.report import placement

        left = next((p for p in placement(session) if p.where != "compiled"), None)
        raise CompileError("the model is not one executable: " + (
            f"{left.node} runs {left.where}: {left.why}" if left is not None else
            "its inputs are not tensors of known rank"),
            hint="run it in a session (terrazzo.ort), which compiles the rest")
    return session.whole.executable


autodiff.install_compiler(jit)
__all__ = ["Compiled", "ShapeError", "bench", "compile", "compiled", "jit", "load", "lower", "op",
           "pack", "verify"]
