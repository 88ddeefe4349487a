"""What a call is given: tensors in nests, and all else, which is a part of the program.

An argument is read in one of five modes: `any` (of a function), `tensor` or `tensors` (a parameter
of an operator, or the rest of them), `attribute`, and `keyword` (a tensor or an attribute).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np

from terrazzo.calls import captures
from terrazzo.dtypes import DType, as_dtype, result_type
from terrazzo.errors import ArgumentError
from terrazzo.graph.ir import Graph, TensorType, Value
from terrazzo.runtime import fastcall

NUMBERS = (bool, int, float, complex)


def dtype_of(x: Any) -> DType:
    """The element type of an array or tensor."""
    return as_dtype(x.dtype)


def type_of(x: Any) -> TensorType:
    """The type of a value that stands for an array."""
    return TensorType(tuple(int(n) for n in x.shape), dtype_of(x))


def as_arrays(leaves: Sequence[Any]) -> list[Any]:
    """Arrays stay; Python numbers become 0-d arrays, wide enough for what they meet."""
    types = [dtype_of(a) for a in leaves if fastcall.is_array(a) or isinstance(a, Value)]
    result = []
    for leaf in leaves:
        if isinstance(leaf, np.ma.MaskedArray):
            raise ArgumentError("a masked array has elements without a value",
                                hint="fill them in: x.filled(0)")
        if isinstance(leaf, np.generic) or (
                isinstance(leaf, np.ndarray) and type(leaf) is not np.ndarray):
            result.append(np.asarray(leaf))
        elif fastcall.is_array(leaf) or isinstance(leaf, Value):
            result.append(leaf)
        elif isinstance(leaf, NUMBERS):
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


def with_numbers(entry: Callable[..., Any], arrays: Sequence[Any], given: Sequence[Any]
                  ) -> Callable[..., Any]:
    """The entry for leaves among which are numbers, which go in as arrays of these types."""
    numbers = [(i, dtype_of(a)) for i, (leaf, a) in enumerate(zip(given, arrays, strict=True))
               if leaf is not a]
    if not numbers:
        return entry

    def run(leaves: Sequence[Any]) -> Any:
        leaves = list(leaves)
        for i, dtype in numbers:
            leaves[i] = _number(leaves[i], dtype)
        return entry(leaves)

    return run


def key_of_out(out: Any, targets: Sequence[Any], args: Sequence[Any]) -> Hashable:
    """What an entry with arrays for results depends on; None where they are a deeper nest."""
    key = fastcall.key_of(args)
    if key is None:
        return None
    own = [id(a) for a in args]
    # Of what is an argument as well, that tells all.
    places = tuple([own.index(id(t)) if id(t) in own else -1 for t in targets])
    others = fastcall.key_of([t for t, i in zip(targets, places, strict=True) if i < 0])
    return None if others is None else ("out", out is targets, places, key, others)


class NoKey(Exception):
    """These arguments have no key that a later call could have again."""


def key_part(x: Any, mode: str, leaves: list[Any]) -> Any:
    """What a compiled entry depends on of one argument; its leaves are collected."""
    kind = type(x)
    layout = fastcall.layout_of(x)
    if layout is not None and mode != "attribute":
        leaves.append(x)
        return layout
    if mode != "attribute" and isinstance(x, np.ndarray):  # of a class of its own: a mapped file
        leaves.append(x)
        return kind, x.shape, x.strides, x.dtype
    if kind is float or kind is complex or kind is int or kind is bool:
        if mode in ("tensor", "tensors") or (mode == "any" and kind in (float, complex)):
            leaves.append(x)
            return kind
        # Zeros of either sign are equal, and a NaN is not even equal to itself.
        return (kind, repr(x)) if kind is float or kind is complex else (kind, x)
    if (kind is tuple or kind is list) and mode != "tensor":
        inner = "attribute" if mode == "keyword" else mode
        return (kind, *[key_part(item, inner, leaves) for item in x])
    if kind is dict and mode == "any":
        return (kind, *[(k, key_part(v, mode, leaves)) for k, v in x.items()])
    if x is None or kind is str:
        return x
    # Traced values are no arguments of a run, and graphs are made anew for every call.
    if isinstance(x, (Value, Graph)) or (
            isinstance(x, (tuple, list, dict)) and mode != "attribute"):
        raise NoKey
    if mode in ("tensor", "tensors"):  # what numpy makes an array of: a range, a memory view
        raise NoKey
    return captures.content_of(x)


def flatten(x: Any, mode: str, leaves: list[Any]) -> Any:
    """The nesting of an argument, with its leaves collected and all else in place."""
    if mode == "tensor":
        leaf = x is not None
    else:
        leaf = mode != "attribute" and (
            fastcall.is_array(x) or isinstance(x, Value)
            or (mode != "keyword" and isinstance(x, (float, complex)))
            or (mode == "tensors" and isinstance(x, NUMBERS)))
    if leaf:
        leaves.append(x)
        number = isinstance(x, NUMBERS) and not isinstance(x, np.generic)
        return ("number" if number else "leaf", None)
    if isinstance(x, (tuple, list)) and mode != "keyword":
        return (type(x), tuple(flatten(item, mode, leaves) for item in x))
    if isinstance(x, dict) and mode == "any":
        return (dict, tuple((k, flatten(v, mode, leaves)) for k, v in x.items()))
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


class Rebuild:
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
