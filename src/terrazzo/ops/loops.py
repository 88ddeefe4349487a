"""Loops that are made of others: fori_loop by scan or while_loop, associative_scan by slices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from terrazzo.base.nests import flatten, leaves, mapped, pack
from terrazzo.base.shapes import dims_text, normalize_axis
from terrazzo.errors import ArgumentError, ShapeError, user_location
from terrazzo.graph.applying import as_value
from terrazzo.graph.ir import Value, is_tensor
from terrazzo.index.guards import all_equal, known
from terrazzo.ops.arrange import flip
from terrazzo.ops.control import scan, while_loop
from terrazzo.ops.creation import arange
from terrazzo.ops.joining import concat, stack
from terrazzo.ops.shape import reshape, span

State = TypeVar("State")


def fori_loop(lower: Any, upper: Any, body_fn: Callable[[Any, State], State], init: State
              ) -> State:
    """state = body_fn(i, state) for i from lower to upper - 1

    With bounds that are known when tracing it is a scan, which has gradients; with computed ones
    a while_loop. The state may be nested tuples, lists and dicts, and keeps its types.

    >>> import terrazzo as tz
    >>> float(tz.fori_loop(0, 5, lambda i, x: 2 * x + 1, 0.0))
    31.0
    """
    if not is_tensor(lower) and not is_tensor(upper):
        steps = arange(start=lower, stop=upper) if _several(lower, upper) else None
        if steps is None:
            return init
        return scan(lambda state, i: (body_fn(i, state), ()), init, steps)[0]
    first = as_value(lower) if isinstance(lower, Value) else lower
    return while_loop(lambda s: s[0] < upper, lambda s: (s[0] + 1, body_fn(s[0], s[1])),
                      (first, init))[1]


def _several(lower: Any, upper: Any) -> bool:
    return bool(lower < upper)


# ---------------------------------------------------------------- associative_scan
def associative_scan(fn: Callable[[State, State], State], elems: State, *,
                     reverse: bool = False, axis: int = 0) -> State:
    """all prefixes fn(fn(x0, x1), x2), ... along an axis, in a logarithmic number of steps

    `fn` takes and gives nests like `elems`, of slices of it along the axis, element by element;
    it must be associative. `reverse` starts at the last.

    >>> import numpy as np, terrazzo as tz
    >>> tz.associative_scan(lambda a, b: a * b, np.array([1.0, 2.0, 3.0, 4.0]))
    array([ 1.,  2.,  6., 24.])
    """
    made: State = _prefixes(fn, reverse, axis)(elems)
    return made


@functools.lru_cache(maxsize=64)
def _prefixes(fn: Callable[[Any, Any], Any], reverse: bool, axis: int) -> Callable[[Any], Any]:
    def traced(elems: Any) -> Any:
        found: list[Any] = []
        structure = flatten(elems, found)
        values = [as_value(leaf) for leaf in found]
        axes = [normalize_axis(axis, v.ndim) for v in values]
        _check_lengths(values, axes)
        if reverse:
            values = [flip(v, axis=a) for v, a in zip(values, axes)]

        def combine(a: list[Value], b: list[Value]) -> list[Value]:
            result = fn(pack(structure, a), pack(structure, b))
            if flatten(result, []) != structure:
                raise ArgumentError("the function of associative_scan gives another nesting than "
                                    "that of elems", where=user_location(),
                                    hint="return the same tuples, lists and dicts")
            return [as_value(leaf) for leaf in leaves(result)]

        results = _odd_even(combine, values, axes)
        if reverse:
            results = [flip(v, axis=a) for v, a in zip(results, axes)]
        answers = iter(results)
        return mapped(elems, lambda _: next(answers))

    traced.__name__ = "associative_scan"
    from terrazzo.graph.derivatives import dispatch

    return dispatch(traced, fn)


def _check_lengths(values: list[Value], axes: list[int]) -> None:
    if not values:
        raise ArgumentError("associative_scan has no elements", where=user_location())
    for value, axis in zip(values, axes):
        if not all_equal([values[0].type.shape[axes[0]]], [value.type.shape[axis]]):
            raise ShapeError(f"associative_scan walks over {values[0].type.shape[axes[0]]} "
                             f"elements of one tensor, and {dims_text(value.type.shape)} has "
                             f"{value.type.shape[axis]}", where=user_location())


def _odd_even(combine: Callable[[list[Value], list[Value]], list[Value]], values: list[Value],
              axes: list[int]) -> list[Value]:
    """Prefixes of neighbours' combinations are those at odd places; one more step gives the even.

    The work-efficient parallel prefix of Ladner and Fischer.
    """
    count = known(values[0].type.shape[axes[0]])
    if not isinstance(count, int):
        raise ShapeError("associative_scan over an axis whose size is not known",
                         where=user_location(), hint="use tz.scan, or a size that is known")
    if count < 2:
        return values

    def part(xs: list[Value], start: int, stop: int, step: int = 1) -> list[Value]:
        return [span(x, a, start, stop, step) for x, a in zip(xs, axes)]

    pairs = combine(part(values, 0, count - 1, 2), part(values, 1, count, 2))
    odd = _odd_even(combine, pairs, axes)
    even = part(values, 0, 1)
    if count > 2:
        rest = combine(part(odd, 0, (count - 1) // 2), part(values, 2, count, 2))
        even = [concat(e, r, axis=a) for e, r, a in zip(even, rest, axes)]
    return [_interleaved(e, o, a, count) for e, o, a in zip(even, odd, axes)]


def _interleaved(even: Value, odd: Value, axis: int, count: int) -> Value:
    half, shape = count // 2, odd.type.shape
    both = reshape(stack(span(even, axis, 0, half), odd, axis=axis + 1),
                   shape=(*shape[:axis], 2 * half, *shape[axis + 1:]))
    return both if count == 2 * half else concat(both, span(even, axis, half, half + 1), axis=axis)
