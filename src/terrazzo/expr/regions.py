"""Which part of a tensor is read: intervals of its indices, one a dimension."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from terrazzo.base.scalar import Axis, Load, Reduce, Scalar, walk
from terrazzo.expr.ir import Tensor
from terrazzo.index import Index, IndexExpr, Var, bounds, maximum, minimum, proves_le
from terrazzo.loop.bounds import Interval, clip, hull, interval_of


@dataclass(frozen=True)
class Ranges:
    """Where axes lie at some loop: exactly, in whole pieces, and anywhere in the program."""

    exact: dict[Var, Interval]
    whole: dict[Var, Interval]
    full: dict[Var, Interval]

    def copy(self) -> Ranges:
        return Ranges(dict(self.exact), dict(self.whole), dict(self.full))


# For each tensor and dimension, what is read of it: exactly, and in whole pieces.
Reads = dict[Tensor, list[tuple[Interval, Interval]]]


def collect_reads(expr: Scalar, ranges: Ranges, found: Reads) -> None:
    """Add the ranges of all loads of an expression to what was found so far."""
    ranges = ranges.copy()
    nodes = list(walk(expr))
    for node in reversed(nodes):
        if isinstance(node, Reduce):
            for axis in node.axes:
                if axis.var not in ranges.exact:
                    for table in (ranges.exact, ranges.whole, ranges.full):
                        table[axis.var] = axis_range(axis, table)
    for node in nodes:
        if isinstance(node, Load) and isinstance(node.source, Tensor):
            add_read(node.source, node.indices, ranges, found)


def axis_range(axis: Axis, ranges: dict[Var, Interval]) -> Interval:
    return Interval(interval_of(axis.lo, ranges).lo, interval_of(axis.hi - 1, ranges).hi)


def add_read(tensor: Tensor, indices: Sequence[Index | Scalar], ranges: Ranges,
              found: Reads) -> None:
    places = []
    for size, index in zip(tensor.shape, indices, strict=True):
        limits = Interval(0, size - 1)
        if isinstance(index, Scalar):  # a computed index may point anywhere
            places.append((limits, limits))
            continue
        exact = interval_of(index, ranges.exact)
        anywhere = interval_of(index, ranges.full)
        if (anywhere.lo is None or anywhere.hi is None or not proves_le(0, anywhere.lo)
                or not proves_le(anywhere.hi, size - 1)):
            exact = clip(exact, limits)  # a guarded read past the edge needs nothing there
        places.append((exact, interval_of(index, ranges.whole)))
    if tensor in found:
        places = hull_of([found[tensor], places])
    found[tensor] = places


def hull_of(reads: Sequence[list[tuple[Interval, Interval]]],
            ) -> list[tuple[Interval, Interval]]:
    """What is read of tensors of one shape, all together."""
    return reduce(lambda one, two: [(hull(a, b), hull(c, d)) for (a, c), (b, d) in zip(one, two)],
                  reads)


def storage_range(size: Index, loose: Interval) -> tuple[Index, Index]:
    """Where the storage of one dimension begins and how long it is; a number where possible."""
    if loose.lo is None or loose.hi is None:
        return 0, size
    room = loose.hi - loose.lo + 1
    if isinstance(room, IndexExpr):
        most = bounds(room)[1]
        if most is not None:
            room = most
    if not proves_le(0, room):
        room = maximum(room, 0)  # where sizes are 0 there may be nothing to read
    if proves_le(size, room):
        return 0, size
    return loose.lo, room


def in_storage(tight: Interval, start: Index, room: Index) -> tuple[Index, Index]:
    """The ends of what is read, inside of the storage for it.

    They may lie outside where an end is less well known than the piece it belongs to: `e % 4` for
    e from e0 to `min(e0, n - 1)` may be anything, and is one number for the piece from e0 to e0.
    """
    lo, hi = tight
    assert lo is not None and hi is not None
    if not proves_le(start, lo):
        lo = maximum(lo, start)
    if not proves_le(hi, start + room - 1):
        hi = minimum(hi, start + room - 1)
    return lo, hi
