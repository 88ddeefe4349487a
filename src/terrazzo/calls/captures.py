"""Arrays and tensors that a function mentions without being given them.

What a function names of its surroundings (a weight in a closure, a parameter of a module) is an
input that is read at each call. Whether an array was there before or was made inside, only tracing
again tells: what is at the same place in memory in both traces, while the first one's arrays are
kept, was there before. The rest, and arrays that nobody may write to, are constants.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from terrazzo.errors import ArgumentError
from terrazzo.graph.ir import Operator, Value
from terrazzo.graph.scopes import capture_scope, place_of
from terrazzo.runtime.fastcall import key_of, wants_gradient
from terrazzo.runtime.hosted import to_numpy, to_torch


class MoreCaptured(Exception):
    """A trace found arrays that the function mentions, which were not known before."""


class Captured:
    """The arrays that one function mentions, in the order in which they were found."""

    def __init__(self) -> None:
        self.objects: list[Any] = []

    def trace(self, call: Callable[..., Any], values: Sequence[Value]) -> Any:
        """Run a function for tracing; the last values stand for what it mentions."""
        count = len(values) - len(self.objects)
        known = dict(zip(map(place_of, self.objects), values[count:], strict=True))
        with capture_scope(known) as seen:
            result = call(values[:count])
        if not seen:
            return result
        with capture_scope(known) as again:
            result = call(values[:count])
        found = [obj for place, obj in again.items() if place in seen]
        for place, obj in again.items():
            if place not in seen and wants_gradient(obj):
                raise ArgumentError(
                    "a tensor that requires a gradient was computed by torch while tracing, and "
                    "would be a constant", hint="compute it with tz's operators, or outside, and "
                    "pass it as an argument")
        if found:
            self.objects += found
            raise MoreCaptured
        return result

    def beside(self, leaves: Sequence[Any]) -> list[Any]:
        """What is mentioned as the same kind of arrays as the arguments, on the same memory."""
        if any(hasattr(a, "data_ptr") for a in leaves):
            return [_as_tensor(a) for a in self.objects]
        if any(map(wants_gradient, self.objects)):
            return list(self.objects)
        return [to_numpy(a) for a in self.objects]


def _as_tensor(array: Any) -> Any:
    if hasattr(array, "data_ptr") or not array.flags.c_contiguous:
        return array
    return to_torch(array)


def entry(make: Callable[[Sequence[Any]], Callable[..., Any]], captured: Captured,
          leaves: Sequence[Any]) -> Callable[..., Any]:
    """An entry that hands on what the function mentions besides its arguments.

    `make` gives the entry for all of them; it is asked again where something changed its layout.
    """
    held = captured.beside(leaves)
    state: list[Any] = [key_of(held), make([*leaves, *held])]

    def run(args: Sequence[Any]) -> Any:
        if key_of(held) != state[0]:
            state[:] = key_of(held), make([*args, *held])
        return state[1]([*args, *held])

    return run


# ---------------------------------------------------------------- names that may be bound anew
_CODE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, Operator)


class Surroundings:
    """The variables around a function that hold data, to notice when one is bound anew."""

    def __init__(self, function: Any):
        function, held = _code_and_objects(function)
        self.objects = [(obj, content_of(obj)) for obj in held]
        self.cells: list[tuple[Any, Any]] = []
        self.globals: list[tuple[str, Any]] = []
        self.names: dict[str, Any] = getattr(function, "__globals__", {})
        code = getattr(function, "__code__", None)
        if code is None:
            return
        for cell in function.__closure__ or ():
            try:
                self.cells.append((cell, cell.cell_contents))
            except ValueError:  # not bound yet: the function names itself
                continue
        self.cells = [(c, v) for c, v in self.cells if not isinstance(v, _CODE)]
        for name in _global_names(code):
            value = self.names.get(name, _CODE)
            if not isinstance(value, _CODE) and value is not _CODE:
                self.globals.append((name, value))

    def changed(self) -> bool:
        """Whether a variable holds another object than when this was made, or one of ours others.

        A function may come with objects: of a method, the arguments of a partial function.
        """
        for obj, content in self.objects:
            if content_of(obj) != content:
                return True
        for cell, value in self.cells:
            if cell.cell_contents is not value:
                return True
        names = self.names
        return any(names.get(name) is not value for name, value in self.globals)


def surroundings(function: Any) -> Surroundings | None:
    """What is to be watched around a function, if anything."""
    found = Surroundings(function)
    return found if found.cells or found.globals or found.objects else None


def _code_and_objects(function: Any) -> tuple[Any, list[Any]]:
    """The function that is written somewhere, and the objects that it is called with besides."""
    held: list[Any] = []
    while True:
        function = inspect.unwrap(function)
        if hasattr(function, "made_of"):  # a gradient, say: what it is made of names variables
            function = function.made_of
        elif isinstance(function, Operator) and function.body is not None:
            function = function.body
        elif isinstance(function, functools.partial):
            held += [*function.args, *function.keywords.values()]
            function = function.func
        elif inspect.ismethod(function):
            held.append(function.__self__)
            function = function.__func__
        elif inspect.isfunction(getattr(type(function), "__call__", None)):  # noqa: B004
            held.append(function)
            function = type(function).__call__
        else:
            return function, held


def _global_names(code: types.CodeType) -> set[str]:
    found = set(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found |= _global_names(inner)
    return found


# ---------------------------------------------------------------- attributes by their content
def content_of(x: Any, inside: tuple[int, ...] = ()) -> Hashable:
    """A key that is equal as long as a part of the program holds the same.

    Objects that say what they are equal to are taken at their word. Others are keyed by what they
    hold, as it is now: arrays inside by their place, for they are read at each call.
    """
    kind = type(x)
    if isinstance(x, (float, complex)):
        return kind, repr(x)  # zeros of either sign are equal, and a nan is not even to itself
    if isinstance(x, np.ndarray):
        if inside:
            return kind, place_of(x)
        return kind, x.shape, str(x.dtype), x.tobytes()
    if hasattr(x, "data_ptr"):
        return kind, place_of(x)
    if id(x) in inside:
        return kind, "itself"
    deeper = (*inside, id(x))
    if isinstance(x, (list, tuple)):
        return kind, tuple(content_of(item, deeper) for item in x)
    if isinstance(x, slice):
        return kind, content_of((x.start, x.stop, x.step), deeper)
    if isinstance(x, dict):
        return kind, tuple((k, content_of(v, deeper)) for k, v in x.items())
    if isinstance(x, (set, frozenset)):
        return kind, frozenset(content_of(item, deeper) for item in x)
    if kind.__hash__ is None:
        if not hasattr(x, "__dict__"):
            raise ArgumentError(f"a {kind.__name__} is a part of the program here, and nothing "
                                "tells whether it changed",
                                hint="pass numbers, strings, tuples and dicts of them")
        return kind, content_of(vars(x), deeper)
    if kind.__hash__ is object.__hash__ and hasattr(x, "__dict__") and not isinstance(x, _CODE):
        return kind, id(x), content_of(vars(x), deeper)  # what was compiled keeps it alive
    return kind, x


__all__ = ["Captured", "MoreCaptured", "content_of", "entry", "surroundings"]
