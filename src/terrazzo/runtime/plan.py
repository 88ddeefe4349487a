"""Where every value of a fused graph lives: one arena, offsets by lifetime, sizes any Index."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from terrazzo.base.shapes import num_elements
from terrazzo.graph.fusion import Fused, Group
from terrazzo.graph.ir import Value
from terrazzo.index import Index, Sum, ceildiv
from terrazzo.loop.in_place import may_overwrite
from terrazzo.loop.ir import Buffer, Function
from terrazzo.loop.steps import Call

ALIGN = 64  # a cache line, and the widest vector
STRETCH = 32  # steps that are looked at together for values that live at the same time


class Place(NamedTuple):
    """A value's memory: a caller's buffer (input, output, constant number n) or arena bytes."""

    kind: str  # input | output | constant | arena
    number: int = 0
    offset: Index = 0


@dataclass(frozen=True, eq=False)
class MemoryPlan:
    """Places of all values that lie in memory, and how many bytes of arena they need."""

    places: Mapping[Value, Place]
    arena: Index

    def __str__(self) -> str:
        lines = [f"arena {self.arena} bytes"]
        for value, place in self.places.items():
            if place.kind == "arena":
                lines.append(f"  {value.type} at {place.offset}")
        return "\n".join(lines)


def byte_size(value: Value) -> Index:
    """The bytes of a value, rounded up so that the next one is aligned."""
    return aligned(num_elements(value.shape) * value.dtype.itemsize)


def aligned(size: Index) -> Index:
    """A number of bytes rounded up so that what comes next is aligned."""
    return size if _content(size) % ALIGN == 0 else ceildiv(size, ALIGN) * ALIGN


def plan_memory(fused: Fused, functions: Sequence[Function] = (), slack: int = 0,
                keeps_last: bool = False) -> MemoryPlan:
    """Give every value a place; `functions` are the kernels of the groups.

    For `slack` more steps than a value is needed its place is given to no other. With `keeps_last`
    the last output is not the caller's: it lies at the beginning of the arena.

    Sizes are multiples of units, which are 1 or symbolic. Values of one unit share a region of the
    arena, where each has an offset; regions lie one after the other.
    """
    graph = fused.graph
    places: dict[Value, Place] = {}
    for i, value in enumerate(graph.inputs):
        places[value] = Place("input", i)
    for i, value in enumerate(fused.constants):
        places[value] = Place("constant", i)
    for i, value in enumerate(map(fused.root, graph.outputs)):
        if value not in places:
            is_kept = keeps_last and i == len(graph.outputs) - 1
            places[value] = Place("arena") if is_kept else Place("output", i)
    spans = _spans(fused)
    owner: dict[Value, Value] = {}  # of values that overwrite another one: the first in its place
    for step, (group, function) in enumerate(zip(fused.groups, functions, strict=False)):
        dying = [(buffer, source) for buffer, source in _read_once(fused, group, function)
                 if source not in places and spans[source].last == step]
        for result, value in zip(function.params[len(group.inputs):], group.outputs, strict=True):
            taken = next((source for buffer, source in dying if value not in places
                          and byte_size(value) == byte_size(source)
                          and may_overwrite(function, result, buffer)), None)
            if taken is not None:
                first = owner.get(taken, taken)
                owner[value] = first
                spans[first] = spans[first]._replace(last=spans[value].last)
                dying = [(buffer, source) for buffer, source in dying if source is not taken]
    regions: dict[Index, dict[Value, _Span]] = {}
    for group in fused.groups:
        for value in group.outputs:
            if value in places or value in owner:
                continue
            size = byte_size(value)
            factor = _content(size)
            unit = size // factor if factor else 1
            span = spans[value]
            regions.setdefault(unit, {})[value] = _Span(span.first, span.last + slack, factor)
    total: Index = ALIGN if keeps_last else 0
    for unit, members in regions.items():
        offsets, size = _offsets(members)
        for value, offset in offsets.items():
            places[value] = Place("arena", 0, total + unit * offset)
        total = total + unit * size
    for value, first in owner.items():
        places[value] = places[first]
    for value in fused.aliases:
        places[value] = places[fused.root(value)]
    return MemoryPlan(places, total)


class _Span(NamedTuple):
    """The steps during which a value is needed, and its size in units."""

    first: int
    last: int
    size: int = 0


def _spans(fused: Fused) -> dict[Value, _Span]:
    spans: dict[Value, _Span] = {}
    for step, group in enumerate(fused.groups):
        for value in map(fused.root, (*group.inputs, *group.outputs)):
            spans[value] = _Span(spans[value].first if value in spans else step, step)
    return spans


def _content(size: Index) -> int:
    """The largest number that a size is a multiple of, whatever its symbols are."""
    if isinstance(size, int):
        return size
    return math.gcd(*(n for _, n in size.terms), size.constant) if isinstance(size, Sum) else 1


def _offsets(spans: Mapping[Value, _Span]) -> tuple[dict[Value, int], int]:
    """Offsets at which no two values that live together overlap, and where the last one ends.

    Greedy by size: the largest first, each into the smallest gap that it fits into.
    """
    offsets: dict[Value, int] = {}
    alive: dict[int, list[Value]] = {}  # by stretches of steps: most values live for a few only
    for value, span in sorted(spans.items(), key=lambda item: (-item[1].size, item[1].first)):
        stretches = range(span.first // STRETCH, span.last // STRETCH + 1)
        near = dict.fromkeys(v for s in stretches for v in alive.get(s, ()))
        for s in stretches:
            alive.setdefault(s, []).append(value)
        taken = sorted((offsets[v], offsets[v] + spans[v].size) for v in near
                       if spans[v].first <= span.last and span.first <= spans[v].last)
        end, gaps = 0, []
        for start, stop in taken:
            if start - end >= span.size:
                gaps.append((start - end, end))
            end = max(end, stop)
        offsets[value] = min(gaps)[1] if gaps else end
    return offsets, max((offset + spans[v].size for v, offset in offsets.items()), default=0)


def _read_once(fused: Fused, group: Group, function: Function) -> list[tuple[Buffer, Value]]:
    """The inputs of a kernel that it knows by one parameter alone."""
    roots = [fused.root(v) for v in group.inputs]
    count = Counter(roots)
    return [(buffer, v) for buffer, v in zip(function.params, roots, strict=False)
            if count[v] == 1]


def may_share(calls: Sequence[Call], read: int, written: int) -> bool:
    """Whether one slot may be another one's memory, for kernels that are called in this order.

    The first kernel that writes there must be the last to read, each element before it writes it.
    """
    using = [[(p, a.number) for p, a in zip(call.function.params, call.arguments, strict=False)
              if a.kind == "slot"] for call in calls]
    writing = next((i for i, slots in enumerate(using) if written in {n for _, n in slots}), None)
    if writing is None:
        return True
    if any(n == read for slots in using[writing + 1:] for _, n in slots):
        return False
    (result,) = (p for p, n in using[writing] if n == written)
    return all(may_overwrite(calls[writing].function, result, p)
               for p, n in using[writing] if n == read)
