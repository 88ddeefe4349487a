"""What ran on a described chip, by its modelled clock: a table, and events for Perfetto."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from terrazzo.chips.gcu.description import Description

_KINDS = ("kernel", "copy", "fill")
# Names of gcuRecord.counts, as gcu_runtime.h numbers them.
COUNTS = ("vector cycles", "matrix cycles", "scalar cycles", "bytes loaded", "bytes stored",
          "scratchpad bytes", "transfers", "launches")


@dataclass(frozen=True)
class Row:
    """All runs of one kernel, or all copies, together."""

    name: str
    calls: int
    cycles: int
    bytes: int
    """Of main memory, or of the link."""


@dataclass(repr=False)
class Trace:
    """Records of the runtime library (`gcuRecord`), in the order in which they ended."""

    chip: Description
    records: list[Any] = field(default_factory=list)

    @property
    def cycles(self) -> int:
        """Of all kernels, copies and fills, one after the other."""
        return sum(record.cycles for record in self.records)

    def rows(self) -> list[Row]:
        """By name, what took longest first."""
        found: dict[str, Row] = {}
        for record in self.records:
            name = record.name.decode("utf-8", "replace") or _KINDS[record.kind]
            old = found.get(name, Row(name, 0, 0, 0))
            moved = record.bytes or record.counts[3] + record.counts[4]
            found[name] = Row(name, old.calls + 1, old.cycles + record.cycles, old.bytes + moved)
        return sorted(found.values(), key=lambda row: -row.cycles)

    def microseconds(self, cycles: int) -> float:
        """Cycles as time on the chip."""
        return cycles * 1e3 / self.chip.clock_khz

    def __str__(self) -> str:
        total = max(self.cycles, 1)
        lines = [f"{'us':>12} {'share':>6} {'calls':>6} {'GB/s':>8}  kernel"]
        lines += [f"{self.microseconds(row.cycles):12.1f} {row.cycles / total:6.1%} {row.calls:6d} "
                  f"{row.bytes / max(self.microseconds(row.cycles), 1e-9) / 1e3:8.1f}  {row.name}"
                  for row in self.rows()]
        return "\n".join([*lines, f"{self.microseconds(self.cycles):12.1f} us on "
                                  f"{self.chip.name}, modelled"])

    def chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write Chrome trace events, which Perfetto opens."""
        Path(path).write_text(json.dumps({"traceEvents": self.events(), "displayTimeUnit": "ns"}))

    def events(self) -> list[dict[str, Any]]:
        """A process a device, a thread a stream, and how full units and memory were."""
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": device,
             "args": {"name": f"{self.chip.name}:{device}"}}
            for device in sorted({record.device for record in self.records})]
        for record in self.records:
            start, duration = (self.microseconds(n) for n in (record.start, record.cycles))
            place = {"pid": record.device, "tid": record.stream}
            facts = {"cycles": record.cycles, "programs": record.programs, "units": record.units,
                     "bytes": record.bytes}
            facts |= dict(zip(COUNTS, record.counts, strict=True))
            events.append({**place, "ph": "X", "cat": _KINDS[record.kind], "ts": start,
                           "dur": duration, "name": record.name.decode("utf-8", "replace")
                           or _KINDS[record.kind], "args": facts})
            if record.kind == 0:
                moved = record.counts[3] + record.counts[4]
                for name, value in (("units", record.units),
                                    ("memory, bytes a cycle", moved // max(record.cycles, 1))):
                    events += [{**place, "ph": "C", "name": name, "ts": at, "args": {name: number}}
                               for at, number in ((start, value), (start + duration, 0))]
        return events
