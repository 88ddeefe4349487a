"""What is known of a device, by the names that torch and Inductor ask for."""

from __future__ import annotations

from dataclasses import dataclass, field

from terrazzo.chips.gcu.description import Description, find


@dataclass(frozen=True)
class DeviceProperties:
    """One device of a described chip."""

    name: str
    major: int
    minor: int
    total_memory: int  # bytes
    multi_processor_count: int  # programs that run at the same time
    warp_size: int
    clock_rate: int  # kHz
    shared_memory_per_block: int  # the scratchpad of a unit
    free_grid: int
    grid_multiple: int
    description: Description = field(repr=False)


def properties_of(chip: str, index: int) -> DeviceProperties:
    """The properties of a device by its number."""
    d = find(chip)
    return DeviceProperties(
        name=f"{d.name} (virtual, {d.units} units)", major=d.capability[0], minor=d.capability[1],
        total_memory=d.memory_bytes, multi_processor_count=d.units, warp_size=1,
        clock_rate=d.clock_khz, shared_memory_per_block=d.scratchpad_bytes,
        free_grid=d.free_grid, grid_multiple=d.grid_multiple, description=d)
