"""A function of tensors that compiles when it is called, and what becomes of a call.

The first call with new types traces, compiles and remembers; later calls find their entry by the
arguments' shapes, strides and types, and go straight to native code. When a size changes between
calls it becomes symbolic, so a function is compiled twice, not once for every size.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import terrazzo.ops  # noqa: F401 - functions that are traced may use any operator
from terrazzo.base.tables import Listing
from terrazzo.calls import captures
from terrazzo.calls.arguments import (
    NoKey,
    Rebuild,
    as_arrays,
    flatten,
    key_of_out,
    key_part,
    type_of,
    with_numbers,
)
from terrazzo.calls.family import Family, Table, traced
from terrazzo.chips.registry import names as chip_names
from terrazzo.errors import ArgumentError
from terrazzo.graph.applying import apply
from terrazzo.graph.bound import is_method, name_of, reference
from terrazzo.graph.ir import Graph, Operator, Value
from terrazzo.graph.rewrite import user_rules
from terrazzo.knobs import Settings, knobs
from terrazzo.runtime import fastcall

if TYPE_CHECKING:
    from terrazzo.calls.placed import Placed
    from terrazzo.runtime.artifact import Over

_lock = threading.RLock()


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
        self.tables: dict[Hashable, Table] = {}
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

    def table_for(self, settings: Settings) -> Table:
        """What was compiled under some settings and the rules that there are now."""
        with _lock:
            rules = user_rules()
            table = self.tables.setdefault((settings.code_key, rules.rules),
                                           Table(settings, rules))
            # Settings that do not shape code are those of now, whatever the first ones were.
            self.table = replace(table, settings=settings)
            return self.table

    def table_where(self, leaves: Sequence[Any], table: Table) -> Table:
        """The table for a call: where no chip is named, it is the one whose memory holds the data.
        """
        device = "" if table.settings.chip else fastcall.device_of(leaves)
        if not device:
            return table
        if device not in chip_names():
            fastcall.check_devices(leaves, self.name)
        settings = replace(table.settings, chip=device)
        with _lock:
            return self.tables.setdefault((settings.code_key, table.rules.rules),
                                          Table(settings, table.rules))

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

    def call_into(self, out: Any, args: Sequence[Any], kwargs: dict[str, Any], table: Table
                  ) -> Any:
        """A call whose results go into given arrays: to its entry they are the first arguments."""
        targets = out if type(out) is tuple else (out,)
        plain = None if kwargs else key_of_out(out, targets, args)
        entry = None if plain is None else table.entries.get(plain)
        if entry is not None:
            return entry((*targets, *args))
        from terrazzo.calls import into  # with the first call that has targets

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
        where = self.table_where(given, table)
        made = self.family(arrays, rebuild, where).entry(given, where, form, len(found))
        for form_of_call in (plain, known):
            if form_of_call is not None:
                table.keep(form_of_call, with_numbers(made, given, leaves))
        return made(given)

    def forget(self) -> Table:
        """Start anew: a variable that the function names is bound to something else."""
        with _lock:
            self.tables.clear()
            self.around = captures.surroundings(self.written)
        return self.table_for(knobs.now)

    def key(self, args: Sequence[Any], kwargs: dict[str, Any], leaves: list[Any]) -> Hashable:
        """What an entry for any arguments depends on, and the leaves; None: do not keep one."""
        try:
            return (tuple([key_part(a, mode, leaves) for a, mode in self.modes(args)]),
                    tuple([(k, key_part(v, self.mode(k), leaves)) for k, v in kwargs.items()]))
        except NoKey:
            return None

    # ------------------------------------------------------------ first call
    def slow(self, args: Sequence[Any], kwargs: dict[str, Any], key: Hashable,
             table: Table) -> Any:
        """Find out what the arguments are, compile if need be, run."""
        leaves, rebuild = self.arguments(args, kwargs)
        if any(isinstance(leaf, Value) for leaf in leaves):
            return self.function(*args, **kwargs)
        where = self.table_where(leaves, table)
        entry = self.family(leaves, rebuild, where).entry(leaves, where)
        given: list[Any] = []
        self.key(args, kwargs, given)
        # Where every argument is one leaf, the key is quicker to make.
        plain = not kwargs and len(given) == len(args) and all(
            a is b for a, b in zip(given, args, strict=True))
        flat = fastcall.key_of(args) if plain else None
        if flat is not None or key is not None:
            table.keep(flat if flat is not None else key, with_numbers(entry, leaves, given))
        return entry(leaves)

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any]
                  ) -> tuple[list[Any], Rebuild]:
        """Tensors among the arguments, and how to call the function with others in their place."""
        if self.operator is not None:
            self.operator.bind(args, kwargs)  # says what is wrong with the arguments, if anything
        leaves: list[Any] = []
        structure = (tuple(flatten(a, mode, leaves) for a, mode in self.modes(args)),
                     tuple((k, flatten(v, self.mode(k), leaves)) for k, v in kwargs.items()))
        return as_arrays(leaves), Rebuild(self.function, structure)

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

    def family(self, leaves: Sequence[Any], rebuild: Rebuild, table: Table) -> Family:
        key = (rebuild.key(), tuple((len(a.shape), str(a.dtype)) for a in leaves))
        with _lock:
            if key not in table.families:
                table.families[key] = Family(self.name, rebuild, self.operator)
            return table.families[key]

    def on(self, chip: str) -> Placed:
        """This function on a chip by its name, wherever the data is."""
        from terrazzo.calls.placed import Placed

        return Placed(self, chip)

    def tune(self, /, *args: Any, **kwargs: Any) -> str:
        """Measure how kernels run best for arguments like these, and remember it on disk.

        Answers what was chosen, a line for each program of fixed sizes that there is a choice for.
        """
        from terrazzo.runtime.tuned import measuring_again

        with measuring_again() as found:
            Compiled(self.function, self.name, self.operator)(*args, **kwargs)
        self.forget()  # what was compiled by rule
        return Listing("\n".join(map(str, found.values())))

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
            return getattr, (self.operator, "compiled")
        return reference(self, self.function, jit)

    # ------------------------------------------------------------ looking inside
    def graph(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Graph:
        """The traced graph for arguments like these."""
        return self.graph_over(args, kwargs)[0]

    def graph_over(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Graph, Over]:
        """The same, and the inputs that `out=` asks for results to be written over."""
        kwargs, out = self.without_out(kwargs)
        leaves, rebuild = self.arguments(args, kwargs)
        graph, structure = traced(rebuild.call, self.name, [type_of(a) for a in leaves])
        if out is None:
            return graph, ()
        from terrazzo.calls import into

        form, targets = into.Form.of(out, self.name)
        return graph, into.aim(form, targets, leaves).over(structure, self.name)

    def executable(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The executable for arguments like these, in contiguous memory."""
        graph, over = self.graph_over(args, kwargs)
        leaves, rebuild = self.arguments(args, self.without_out(kwargs)[0])
        table = self.table_where(leaves, self.table_for(knobs.now))
        # By itself, so that what the function mentions is a part of it: it may be saved.
        return Family(self.name, rebuild).compiled(graph, [None] * len(leaves), leaves, table,
                                                    over)


def of_operator(op: Operator) -> Compiled:
    """What `op.compiled` is: made when first asked for, once, whichever threads ask."""
    with _lock:
        if "compiled" not in vars(op):
            vars(op)["compiled"] = Compiled(
                lambda *args, **kwargs: apply(op, *op.bind(args, kwargs)), op.name, op)
        return vars(op)["compiled"]


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
