"""Which elements an expression reads, and whether all of them exist.

A load may stand under `where`: then only what the conditions let through counts. Indices are shown
to be inside by intervals, and where those are too coarse by trying all of them out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from terrazzo.base.scalar import (
    Axis,
    Call,
    Const,
    FromIndex,
    Load,
    Reduce,
    Scalar,
    as_scalar,
    call,
    cast,
    children,
    rewrite,
)
from terrazzo.expr.ir import Tensor
from terrazzo.index import (
    Index,
    Max,
    Var,
    evaluate,
    free_vars,
    maximum,
    minimum,
    proves_le,
    substitute,
)
from terrazzo.loop.bounds import Interval, interval_of

_MOST_TRIED = 1 << 20  # indices that are tried out one by one: a tenth of a second


@dataclass(frozen=True)
class Access:
    """One index of a load, the loops around it, and what holds where it is made."""

    tensor: Tensor
    dimension: int
    index: Index
    axes: tuple[Axis, ...]
    facts: tuple[Index, ...]  # these are not negative there

    def __str__(self) -> str:
        loops = ", ".join(map(str, self.axes))
        return (f"index {self.index} of dimension {self.dimension} of {self.tensor.name}, which "
                f"has {self.tensor.shape[self.dimension]} elements, for {loops or 'all'}")


def accesses(tensor: Tensor) -> Iterator[Access]:
    """Every access of a tensor's body; a computed index counts as the first element."""
    assert tensor.body is not None
    stack: list[tuple[Scalar, tuple[Axis, ...], tuple[Index, ...]]] = [
        (tensor.body, tensor.axes, ())]
    seen = set()
    while stack:
        node, axes, facts = stack.pop()
        if (node, axes, facts) in seen:
            continue
        seen.add((node, axes, facts))
        if isinstance(node, Load) and isinstance(node.source, Tensor):
            for d, index in enumerate(node.indices):
                yield Access(node.source, d, 0 if isinstance(index, Scalar) else index, axes, facts)
        if isinstance(node, Reduce):
            stack.append((node.value, (*axes, *node.axes), facts))
        elif isinstance(node, Call) and node.op == "where":
            condition, yes, no = node.args
            stack += [(condition, axes, facts), (yes, axes, (*facts, *_facts(condition, True))),
                      (no, axes, (*facts, *_facts(condition, False)))]
        else:
            stack += [(child, axes, facts) for child in children(node)]


def _facts(condition: Scalar, holds: bool) -> Iterator[Index]:
    """Index expressions that are not negative where a condition holds, or does not."""
    if not isinstance(condition, Call):
        return
    if condition.op == "not":
        yield from _facts(condition.args[0], not holds)
    elif condition.op == ("and" if holds else "or"):
        for part in condition.args:
            yield from _facts(part, holds)
    elif condition.op == ("or" if holds else "and"):
        sides = [list(_facts(part, holds)) for part in condition.args]
        if all(sides):  # one of them holds: the greatest of what tells them is not negative
            yield reduce(maximum, (reduce(minimum, side) for side in sides))
    elif condition.op in _COMPARED:
        a, b = map(_as_index, condition.args)
        if a is not None and b is not None:
            yield from _COMPARED[condition.op if holds else _OPPOSITE[condition.op]](a, b)


_COMPARED: dict[str, Callable[[Index, Index], list[Index]]] = {
    "lt": lambda a, b: [b - a - 1], "le": lambda a, b: [b - a], "gt": lambda a, b: [a - b - 1],
    "ge": lambda a, b: [a - b], "eq": lambda a, b: [a - b, b - a],
    "ne": lambda a, b: [maximum(a - b - 1, b - a - 1)],
}
_OPPOSITE = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}


def _as_index(node: Scalar) -> Index | None:
    if isinstance(node, Call) and node.op == "cast" and node.dtype.is_integer:
        return _as_index(node.args[0])
    if isinstance(node, FromIndex):
        return node.index
    return int(node.value) if isinstance(node, Const) and node.dtype.is_integer else None


# ---------------------------------------------------------------- proofs
def inside(access: Access, sizes: Mapping[Var, int]) -> bool | None:
    """Whether all that is read exists, for the given sizes; None where others matter too."""
    axes = [Axis(a.var, substitute(a.lo, sizes), substitute(a.hi, sizes)) for a in access.axes]
    size = substitute(access.tensor.shape[access.dimension], sizes)
    index = substitute(access.index, sizes)
    facts = [substitute(fact, sizes) for fact in access.facts]
    ranges: dict[Var, Interval] = {}
    for axis in axes:
        first, last = interval_of(axis.lo, ranges).lo, interval_of(axis.hi - 1, ranges).hi
        if first is not None and last is not None and proves_le(last, first - 1):
            return True  # a loop of no steps
        ranges[axis.var] = Interval(first, last)

    facts = [_narrowed(fact, ranges) for fact in facts]

    def nonnegative(e: Index) -> bool:
        lows = (interval_of(part, ranges).lo for part in (e, *(e - fact for fact in facts)))
        return any(low is not None and proves_le(0, low) for low in lows)

    if nonnegative(index) and nonnegative(size - 1 - index):
        return True
    if any(nonnegative(-fact - 1) for fact in facts):
        return True  # a condition that never holds
    return _tried(index, size, axes, ranges, facts)


def _narrowed(fact: Index, ranges: Mapping[Var, Interval]) -> Index:
    """What is left of "one of these is not negative": `i != 0` from 0 on is `i >= 1`."""
    if not isinstance(fact, Max):
        return fact
    possible = []
    for arg in fact.args:
        high = interval_of(arg, ranges).hi
        if high is None or not proves_le(high, -1):
            possible.append(arg)
    return reduce(maximum, possible) if possible else -1


def _tried(index: Index, size: Index, axes: Sequence[Axis], ranges: Mapping[Var, Interval],
           facts: Sequence[Index]) -> bool | None:
    """The same by trying all values of the loops out; None where sizes are symbolic."""
    needed = {v for e in (index, *facts) for v in free_vars(e)}
    for axis in reversed(axes):
        if axis.var in needed:
            needed |= free_vars(axis.lo) | free_vars(axis.hi)
    if not isinstance(size, int) or not needed <= ranges.keys():
        return None
    names = [a.var for a in axes if a.var in needed]
    ends: list[tuple[int, int]] = []
    for name in names:
        first, last = ranges[name]
        if not isinstance(first, int) or not isinstance(last, int):
            return None
        ends.append((first, last + 1))
    counts = [end - first for first, end in ends]
    if math.prod(counts) > _MOST_TRIED:
        return False
    grids = np.meshgrid(*(np.arange(*pair) for pair in ends), indexing="ij", sparse=True)
    values = dict(zip(names, grids, strict=True))
    made: Any = np.ones(counts, bool)
    for axis in axes:
        if axis.var in values:
            made &= values[axis.var] >= evaluate(axis.lo, values)
            made &= values[axis.var] < evaluate(axis.hi, values)
    for fact in facts:
        made &= evaluate(fact, values) >= 0
    at = np.broadcast_to(evaluate(index, values), made.shape)[made]
    return bool(np.all((at >= 0) & (at < size)))


def clipped(body: Scalar) -> Scalar:
    """A body whose computed indices are brought into their dimensions."""

    def visit(node: Scalar) -> Scalar | None:
        if not isinstance(node, Load) or not isinstance(node.source, Tensor):
            return None
        return Load(node.dtype, node.source, tuple(
            call("max", call("min", cast(i, "int64"), as_scalar(n - 1)), 0)
            if isinstance(i, Scalar) else i
            for i, n in zip(node.indices, node.source.shape, strict=True)))

    return rewrite(body, visit)
