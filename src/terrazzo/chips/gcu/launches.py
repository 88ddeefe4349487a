"""Which kernels of a plan share a launch: those that wait for nothing of each other.

A launch takes microseconds, and small kernels less: the update of a bias, the gradient of a norm.
Kernels that follow each other without touching what another one writes are tasks of one grid, and
units go through those of all of them. A kernel is in the first launch after all whose results it
needs, or whose inputs it overwrites. The host runs kernels one after the other in their old order,
so results are as they were; what is decided here is what counts as one launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from terrazzo.index import Index
from terrazzo.loop.accesses import accesses
from terrazzo.loop.ir import Atomic, Buffer, For, Function, Pause, children, walk
from terrazzo.loop.steps import Argument, Call


class Member(NamedTuple):
    """A kernel in a launch."""

    launch: int
    first: int  # the unit that takes its first task
    is_head: bool  # the first of its launch


class _Touched(NamedTuple):
    """Memory that a kernel touches; without an end, all from its start on."""

    start: Index
    end: Index | None
    writes: bool
    level: int


def members(calls: Sequence[Call], units: int, over: Mapping[int, int]) -> list[Member]:
    """For each of some calls in a row the launch that it belongs to.

    `over` has slots that are the same memory as another one.
    """
    levels = _levels(calls, over)
    made: list[Member] = []
    taken: dict[int, int] = {}  # tasks of each launch so far
    launches = {level: number for number, level in enumerate(sorted(set(levels)))}
    for call, level in zip(calls, levels):
        tasks = tasks_of(call.function) or 0
        first = 0 if tasks % units == 0 else taken.get(level, 0) % units
        made.append(Member(launches[level], first, level not in taken))
        taken[level] = taken.get(level, 0) + tasks
    return made


def tasks_of(function: Function) -> int | None:
    """How many tasks a kernel has, one where nothing is divided; None: only a run tells."""
    loops = _outermost(function)
    counts = [loop.hi - loop.lo for loop in loops]
    numbers = [n for n in counts if isinstance(n, int)]
    if len(numbers) < len(counts):
        return None
    return max(max(numbers, default=1), 1)


def _outermost(function: Function) -> list[For]:
    found: list[For] = []
    todo = [function.body]
    while todo:
        stmt = todo.pop()
        if isinstance(stmt, For) and stmt.kind in ("parallel", "program"):
            found.append(stmt)
        else:
            todo += children(stmt)
    return found


def _levels(calls: Sequence[Call], over: Mapping[int, int]) -> list[int]:
    """After how many launches each call may run; no two that meet have the same number."""
    seen: dict[tuple[str, int], list[_Touched]] = {}
    written: dict[Function, frozenset[Buffer]] = {}
    levels: list[int] = []
    alone = 0  # what comes later is after what has a launch to itself
    for call in calls:
        function = call.function
        if function not in written:
            written[function] = _written(function)
        touched = [(_memory(argument, over), *_range(param, argument), param in written[function])
                   for param, argument in zip(function.params, call.arguments, strict=True)
                   if argument.kind != "constant"]
        after = [other.level for memory, start, end, writes in touched
                 for other in seen.get(memory, ()) if (writes or other.writes)
                 and _meet(start, end, other)]
        level = max([alone, *(n + 1 for n in after)])
        if tasks_of(function) is None:
            level = max([level, *(n + 1 for n in levels)])
            alone = level + 1
        levels.append(level)
        for memory, start, end, writes in touched:
            seen.setdefault(memory, []).append(_Touched(start, end, writes, level))
    return levels


def _memory(argument: Argument, over: Mapping[int, int]) -> tuple[str, int]:
    number = argument.number
    return argument.kind, over.get(number, number) if argument.kind == "slot" else number


def _range(param: Buffer, argument: Argument) -> tuple[Index, Index | None]:
    end = argument.offset + param.size * param.dtype.itemsize if param.bounded else None
    return argument.offset, end


def _meet(start: Index, end: Index | None, other: _Touched) -> bool:
    """Whether two pieces of the same memory may overlap."""
    for last, first in ((end, other.start), (other.end, start)):
        if last is not None:
            distance = first - last
            if isinstance(distance, int) and distance >= 0:
                return False
    return True


def _written(function: Function) -> frozenset[Buffer]:
    found = {access.buffer for access in accesses(function.body) if access.writes}
    for stmt in walk(function.body):
        if isinstance(stmt, Atomic):
            found |= {stmt.buffer, *([] if stmt.old is None else [stmt.old[0]])}
        elif isinstance(stmt, Pause) and stmt.clock is not None:
            found.add(stmt.clock[0])
    return frozenset(found)
