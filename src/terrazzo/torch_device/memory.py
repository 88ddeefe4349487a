"""Memory of the device by the names of torch.cuda: figures, the cache, snapshots."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any

import torch

from terrazzo.torch_device.start import is_ready, start
from terrazzo.torch_device.streams import index_of


def empty_cache() -> None:
    """Give back to the device what no tensor uses."""
    if is_ready():
        torch.accelerator.empty_cache()


def memory_stats(device: Any = None) -> OrderedDict[str, Any]:
    """All figures of the allocator, by the names of torch.cuda.memory_stats."""
    if not is_ready():
        return OrderedDict()
    return torch.accelerator.memory_stats(index_of(device))


def _figure(name: str, device: Any) -> int:
    return int(memory_stats(device).get(name, 0))


def memory_allocated(device: Any = None) -> int:
    """Bytes that tensors use now."""
    return _figure("allocated_bytes.all.current", device)


def max_memory_allocated(device: Any = None) -> int:
    """The most bytes that tensors used at a time."""
    return _figure("allocated_bytes.all.peak", device)


def memory_reserved(device: Any = None) -> int:
    """Bytes taken from the device, those kept for later among them."""
    return _figure("reserved_bytes.all.current", device)


def max_memory_reserved(device: Any = None) -> int:
    """The most bytes taken from the device at a time."""
    return _figure("reserved_bytes.all.peak", device)


def reset_peak_memory_stats(device: Any = None) -> None:
    """Let peaks begin anew."""
    if is_ready():
        torch.accelerator.reset_peak_memory_stats(index_of(device))


def reset_accumulated_memory_stats(device: Any = None) -> None:
    """Let what is counted over time begin anew."""
    if is_ready():
        torch.accelerator.reset_accumulated_memory_stats(index_of(device))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and all bytes of a device."""
    return torch.accelerator.get_memory_info(index_of(device))


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """The figures of the allocator as a table."""
    stats = memory_stats(device)
    rows = [("allocated", "allocated_bytes"), ("active", "active_bytes"),
            ("requested", "requested_bytes"), ("reserved", "reserved_bytes"),
            ("allocations", "allocation"), ("segments", "segment")]
    head = f"{f'device {index_of(device)}':<14}" + "".join(
        f"{title:>16}" for title in ("now", "peak", "in all", "freed"))
    lines = [head, "-" * len(head)]
    for title, key in rows[:4] if abbreviated else rows:
        figures = (stats.get(f"{key}.all.{what}", 0)
                   for what in ("current", "peak", "allocated", "freed"))
        lines.append(f"{title:<14}" + "".join(f"{n:>16,}" for n in figures))
    return "\n".join(lines)


def _record_memory_history(enabled: str | None = "all", context: str | None = "all",
                           stacks: str = "python", max_entries: int = 1_000_000,
                           device: Any = None, clear_history: bool = False, **_: Any) -> None:
    """Keep what is allocated and freed from now on, with the lines of Python; None: no more.

    "state" keeps the lines of what is allocated only, and context=None no lines. Further arguments
    of torch.cuda's have no meaning here.
    """
    if enabled not in (None, "state", "all"):
        raise ValueError(f"expected enabled to be 'state', 'all' or None, got {enabled!r}")
    entries = min(int(max_entries), 1 << 40) if enabled == "all" else 0
    start().record_history(entries, bool(enabled) and context is not None,
                           clear_history or enabled is None)


def _snapshot(device: Any = None) -> dict[str, Any]:
    """All blocks and what is known of their past, as torch.cuda.memory._snapshot has it."""
    made: dict[str, Any] = start().snapshot()
    return made


def memory_snapshot() -> list[dict[str, Any]]:
    """The blocks that were taken from the device."""
    return list(_snapshot()["segments"])


def _dump_snapshot(filename: str = "dump_snapshot.pickle") -> None:
    """Write a snapshot that pytorch.org/memory_viz opens."""
    with open(filename, "wb") as file:
        pickle.dump(_snapshot(), file)
