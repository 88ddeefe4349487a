"""Where every value of a fused graph lives: one arena, offsets by lifetime, sizes any Index."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from terrazzo.graph.fusion import Fused
from terrazzo.graph.ir import Value
from terrazzo.index import Index, ceildiv, proves_le
from terrazzo.shapes import num_elements

ALIGN = 64  # a cache line, and the widest vector


@dataclass(frozen=True)
class Place:
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
    return ceildiv(num_elements(value.shape) * value.dtype.itemsize, ALIGN) * ALIGN


def plan_memory(fused: Fused) -> MemoryPlan:
    """First fit over freed slots; a slot is reused only by what provably fits."""
    graph = fused.graph
    places: dict[Value, Place] = {}
    for i, value in enumerate(graph.inputs):
        places[value] = Place("input", i)
    for i, value in enumerate(fused.constants):
        places[value] = Place("constant", i)

    def root(value: Value) -> Value:
        while value in fused.aliases:
            value = fused.aliases[value]
        return value

    last_use: dict[Value, int] = {}
    for step, group in enumerate(fused.groups):
        for value in (*group.inputs, *group.outputs):
            last_use[root(value)] = step
    for i, value in enumerate(graph.outputs):
        if value not in places:
            places[value] = Place("output", i)

    slots: list[Index] = []  # sizes
    holds: dict[int, Value] = {}
    slot_of: dict[Value, int] = {}
    for step, group in enumerate(fused.groups):
        for value in group.outputs:
            if value in places:
                continue
            size = byte_size(value)
            fitting = [i for i, room in enumerate(slots) if i not in holds
                       and proves_le(size, room)]
            exact = [i for i in fitting if slots[i] == size]
            free = [i for i in range(len(slots)) if i not in holds]
            if fitting:
                slot = (exact or fitting)[0]
            elif free and isinstance(size, int) and isinstance(slots[free[-1]], int):
                slot = free[-1]  # an earlier occupant was smaller: let the slot grow
                slots[slot] = size
            else:
                slot = len(slots)
                slots.append(size)
            holds[slot], slot_of[value] = value, slot
        for slot, value in list(holds.items()):
            if last_use[value] <= step:
                del holds[slot]
    offsets: list[Index] = []
    total: Index = 0
    for size in slots:
        offsets.append(total)
        total = total + size
    for value, slot in slot_of.items():
        places[value] = Place("arena", slot, offsets[slot])
    for value in fused.aliases:
        places[value] = places[root(value)]
    return MemoryPlan(places, total)
