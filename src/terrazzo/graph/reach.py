"""Indices that data tells, where a program that steps outside of a tensor is to be told so.

Compiled code never reads or writes outside: an index beyond an end stands for the element there
(`base/places.py`). That is what our own language means. ONNX and torch mean an error, so whoever
traces for them collects how far indices may reach, and `outside` is one number beside the results:
0, or what the last of them that steps outside is, and how far. Functions that are traced on the way
(branches and bodies of control flow) collect for themselves: they may never run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from terrazzo.errors import IndexFault, user_location
from terrazzo.graph.ir import Value, operator_named
from terrazzo.graph.patterns import constant_array
from terrazzo.graph.scopes import STATE, trace_scope
from terrazzo.index import Index, evaluate, maximum, minimum, proves_le, proves_lt

_FAR = 40  # bits of how far an index steps outside; what is further is said to be as far
_DEEP = 24  # operators that are looked through for how far an index can reach


class Reach(NamedTuple):
    """An index tensor, and the places that it may name: from `low` to below `size`."""

    places: Value
    low: Index
    size: Index
    where: str


class collecting:
    """While open, `must_reach` is heard, and `found` grows."""

    def __init__(self, where: Callable[[], str | None] = user_location):
        self.found: dict[tuple[Value, Index, Index], Reach] = {}
        self.where = where

    def __enter__(self) -> collecting:
        self._before = getattr(STATE, "reaches", None)
        STATE.reaches = self
        return self

    def __exit__(self, *_: object) -> None:
        STATE.reaches = self._before

    @property
    def reaches(self) -> tuple[Reach, ...]:
        """What was heard, each once."""
        return tuple(self.found.values())


def must_reach(places: Any, size: Index, *, wraps: bool = True) -> None:
    """An index outside of so many places is an error; negative ones count from the end if wrapped.

    Heard only while somebody collects, and of what cannot be seen to be inside.
    """
    listener: collecting | None = getattr(STATE, "reaches", None)
    if listener is None or not isinstance(places, Value) or 0 in places.shape:
        return
    low = -size if wraps and places.dtype.is_signed else 0
    key = places, low, size
    if key not in listener.found and not _is_inside(places, low, size):
        listener.found[key] = Reach(*key, listener.where() or "")


# ---------------------------------------------------------------- what is inside for sure
def _is_inside(places: Value, low: Index, size: Index) -> bool:
    first, last = _span(places, _DEEP)
    return proves_le(low, first) and proves_lt(last, size)


_Span = tuple[Index, Index]  # the least and the greatest value
# Every element of the result is one of the first input's, or of some input's.
_MOVES = {"reshape", "permute_dims", "broadcast_to", "expand_dims", "squeeze", "slice", "getitem",
          "flatten", "transpose", "moveaxis", "swapaxes", "flip", "take_at", "take", "gather"}
_COMPUTES = {"add", "subtract", "multiply"}
_KNOWN = _MOVES | _COMPUTES | {"concat", "stack", "where", "minimum", "maximum", "clip", "astype"}


def _span(value: Value, deep: int) -> _Span:
    """How small and large the elements of an integer tensor can be, as its operators tell."""
    whole: _Span = (0, 1) if value.dtype.is_bool else (value.dtype.min, value.dtype.max)
    node, array = value.node, constant_array(value)
    if array is not None:
        return (int(array.min()), int(array.max())) if array.size else whole
    if node is None or not deep:
        return whole
    name, attrs = node.op.name, node.attrs
    if name in ("argmax", "argmin"):
        (source,), axis = node.inputs, attrs["axis"]
        assert source is not None
        return 0, (math.prod(source.shape) if axis is None else source.shape[axis]) - 1
    if name == "dimension":
        return attrs["size"], attrs["size"]
    if name == "arange":
        first, end = (0, attrs["start"]) if attrs["stop"] is None else (
            attrs["start"], attrs["stop"])
        whole_numbers = not isinstance(first, float) and not isinstance(end, float)
        return (first, end - 1) if whole_numbers and attrs["step"] == 1 else whole
    inputs = node.inputs[name == "where":]  # but not of its condition
    if name not in _KNOWN or not all(
            v is None or v.dtype.is_integer or v.dtype.is_bool for v in inputs):
        return whole
    spans = [None if v is None else _span(v, deep - 1) for v in inputs]
    low, high = spans[0] or whole
    if name in _COMPUTES:
        low, high = _computed(name, (low, high), spans[1] or whole) or whole
    if name in _COMPUTES or name == "astype":
        # What is made of sizes has no more bits than those.
        known = [n for n in (low, high) if isinstance(n, int) or value.dtype.itemsize < 8]
        fits = all(proves_le(whole[0], n) and proves_le(n, whole[1]) for n in known)
        return (low, high) if fits else whole
    for at, span in enumerate(spans[1:] if name not in _MOVES else (), 1):
        a, b = span or (low, high)
        if name == "minimum" or (name == "clip" and at == 2):
            low, high = minimum(low, a), minimum(high, b)
        elif name == "maximum" or name == "clip":
            low, high = maximum(low, a), maximum(high, b)
        else:
            low, high = minimum(low, a), maximum(high, b)
    return low, high


def _computed(name: str, a: _Span, b: _Span) -> _Span | None:
    """Of a sum, a difference, or a product of what is not negative."""
    if name == "add":
        return a[0] + b[0], a[1] + b[1]
    if name == "subtract":
        return a[0] - b[1], a[1] - b[0]
    if proves_le(0, a[0]) and proves_le(0, b[0]):
        return a[0] * b[0], a[1] * b[1]
    return None


# ---------------------------------------------------------------- one number for all
def outside(reaches: Sequence[Reach]) -> Value:
    """0 where all indices are inside; else the number of a reach, and how far one steps outside."""
    op = operator_named
    int64 = "int64"
    word: Value | None = None
    with trace_scope():
        for number, (places, low, size, _) in enumerate(reaches, 1):
            place = op("astype")(places, dtype=int64)
            beyond = op("logical_or")(op("less")(place, low), op("greater_equal")(place, size))
            most = np.int64(1 << _FAR - 2)
            near = op("clip")(place, min=-most, max=most)
            told = op("where")(op("less")(near, 0), -2 * near - 1, 2 * near)
            told = told + np.int64(number << _FAR)
            one = op("max")(op("where")(beyond, told, np.int64(0)))
            word = one if word is None else op("maximum")(word, one)
    assert word is not None
    return word


def fault(word: int, reaches: Sequence[tuple[Index, Index, str]], sizes: Mapping[str, int]
          ) -> IndexFault:
    """What a number from `outside` says; of each reach its ends and where it is, in order."""
    low, size, where = reaches[(word >> _FAR) - 1]
    zigzag = word & (1 << _FAR) - 1
    index = -(zigzag + 1 >> 1) if zigzag & 1 else zigzag >> 1
    first, count = evaluate(low, sizes), evaluate(size, sizes)
    return IndexFault(f"index {index} is out of bounds: it must be from {first} to {count - 1}",
                      where=where or None)
