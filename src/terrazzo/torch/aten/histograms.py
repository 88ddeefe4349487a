"""How many elements, or what sum of weights, lie in each bin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from terrazzo.graph.ir import TensorType, Value
from terrazzo.index import Index
from terrazzo.ops import elementwise as e
from terrazzo.ops import indexing, lookups, reduce
from terrazzo.ops.creation import arange, full, ones, zeros
from terrazzo.ops.getitem import getitem
from terrazzo.ops.shape import reshape
from terrazzo.torch.aten.ordering import counted_before
from terrazzo.torch.aten.registry import aten


def _counted(places: Value, inside: Value, weight: Value, count: Index) -> Value:
    """The weights of what is inside, added up by places."""
    return indexing.scatter_at(zeros(shape=(count,), dtype=weight.dtype),
                               e.where(inside, weight, 0), e.where(inside, places, 0), axes=(0,),
                               reduce="add")


def _inside(x: Value, least: Value, most: Value) -> Value:
    return e.logical_and(e.greater_equal(x, least), e.less_equal(x, most))


@aten("histc", typed=True)
def histc(x: Any, bins: int = 100, min: Any = 0, max: Any = 0, *, out: TensorType) -> Any:
    if x.size == 0:
        return zeros(shape=(bins,), dtype=out.dtype)
    flat = reshape(x, shape=(-1,))
    least, most = _ends(flat, None if float(min) == float(max) else (float(min), float(max)), 1.0)
    place = e.astype((flat - least) * bins / (most - least), dtype="int64")
    weight = ones(shape=flat.shape, dtype=out.dtype)
    return _counted(e.minimum(place, bins - 1), _inside(flat, least, most), weight, bins)


def _ends(x: Value, given: Sequence[float] | None, margin: float) -> tuple[Value, Value]:
    """Where the first bin starts and the last one ends: what was said, or what there is."""
    if given is None and x.size == 0:
        given = (0.0, 1.0)
    if given is not None:
        least, most = (full(shape=(), value=float(v), dtype=x.dtype) for v in given)
    else:
        least, most = reduce.min_(x), reduce.max_(x)
    same = e.equal(least, most)
    return e.where(same, least - margin, least), e.where(same, most + margin, most)


# ---------------------------------------------------------------- with edges
def _edges(x: Value, bins: int, given: Sequence[float] | None) -> Value:
    """Evenly spaced, from both ends, as `linspace` has it."""
    least, most = _ends(x, given, 0.5)
    place = arange(start=bins + 1, dtype="int64")
    step = (most - least) / bins
    rising = least + e.astype(place, dtype=x.dtype) * step
    falling = most - e.astype(bins - place, dtype=x.dtype) * step
    return e.where(e.less(place, (bins + 1) // 2), rising, falling)


def _found(x: Value, edges: Value, even: bool) -> tuple[Value, Value]:
    """The bin of each element, and whether it is in one: bins are open above, but for the last."""
    count = edges.shape[0] - 1
    least, most = getitem(edges, 0), getitem(edges, count)
    inside = _inside(x, least, most)
    if even:  # by what evenness says, and beside it, where rounding says otherwise
        guess = e.where(inside, (x - least) * (count / (most - least)), 0.0)
        guess = e.minimum(e.astype(guess, dtype="int64"), count - 1)
        below = e.less(x, lookups.take(edges, guess, axis=0))
        above = e.greater_equal(x, lookups.take(edges, guess + 1, axis=0))
        place = guess - e.astype(below, dtype="int64") + e.astype(above, dtype="int64")
    else:
        place = counted_before(edges, x, right=True) - 1
    return e.minimum(e.maximum(place, 0), count - 1), inside


def _histogram(x: Value, edges: Sequence[Value], even: bool, weight: Value | None, density: bool
               ) -> Value:
    """The histogram of rows of x, an axis for each column."""
    counts = [v.shape[0] - 1 for v in edges]
    rows = x.shape[0]
    weights = ones(shape=(rows,), dtype=x.dtype) if weight is None else reshape(
        e.astype(weight, dtype=x.dtype), shape=(rows,))
    total = math.prod(counts)
    if rows == 0:
        made = zeros(shape=(total,), dtype=x.dtype)
    else:
        place, inside = _found(getitem(x, (slice(None), 0)), edges[0], even)
        for d, each in enumerate(edges[1:], 1):
            at, also = _found(getitem(x, (slice(None), d)), each, even)
            place, inside = place * counts[d] + at, e.logical_and(inside, also)
        made = _counted(place, inside, weights, total)
    made = reshape(made, shape=tuple(counts))
    if density:
        made = made / reduce.sum_(made)
        for d, each in enumerate(edges):
            n = counts[d]
            width = getitem(each, slice(1, n + 1)) - getitem(each, slice(0, n))
            made = made / reshape(width, shape=tuple(n if d == k else 1 for k in range(made.ndim)))
    return made


@aten("histogram.bin_ct")
def histogram(x: Any, bins: int = 100, range: Any = None, weight: Any = None,
              density: bool = False) -> Any:
    column = reshape(x, shape=(x.size, 1))
    edges = _edges(column, bins, range)
    return _histogram(column, [edges], True, weight, density), edges


@aten("histogram.bins_tensor")
def histogram_between(x: Any, bins: Any, weight: Any = None, density: bool = False) -> Any:
    column = reshape(x, shape=(x.size, 1))
    return _histogram(column, [bins], False, weight, density), bins


def _rows(x: Value) -> Value:
    return reshape(x, shape=(math.prod(x.shape[:-1]), x.shape[-1]))


def _all_edges(x: Value, bins: Sequence[int], given: Any) -> list[Value]:
    return [_edges(getitem(x, (slice(None), d)), n,
                   None if given is None else given[2 * d:2 * d + 2])
            for d, n in enumerate(bins)]


@aten("_histogramdd_bin_edges")
def histogramdd_edges(x: Any, bins: Sequence[int], range: Any = None, weight: Any = None,
                      density: bool = False) -> Any:
    return tuple(_all_edges(_rows(x), bins, range))


@aten("_histogramdd_from_bin_cts")
def histogramdd(x: Any, bins: Sequence[int], range: Any = None, weight: Any = None,
                density: bool = False) -> Any:
    rows = _rows(x)
    return _histogram(rows, _all_edges(rows, bins, range), True, weight, density)


@aten("_histogramdd_from_bin_tensors")
def histogramdd_between(x: Any, bins: Sequence[Any], weight: Any = None, density: bool = False
                        ) -> Any:
    return _histogram(_rows(x), bins, False, weight, density)
