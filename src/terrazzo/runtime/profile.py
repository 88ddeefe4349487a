"""What a run cost, kernel by kernel, and the Chrome trace that Perfetto opens."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class KernelTime:
    """One kernel in one run; times in nanoseconds from the start of the run."""

    name: str
    origin: str
    start_ns: float
    duration_ns: float
    flops: int
    bytes: int


@dataclass(frozen=True)
class Profile:
    """One run of an executable."""

    name: str
    start_ns: int
    duration_ns: int
    kernels: tuple[KernelTime, ...]

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.duration_ns / 1e3:.1f} us"]
        for k in self.kernels:
            rate = k.bytes / max(k.duration_ns, 1e-9)
            lines.append(f"  {k.duration_ns / 1e3:10.1f} us  {rate:8.1f} GB/s  "
                         f"{k.flops / max(k.duration_ns, 1e-9):8.1f} GFLOP/s  {k.name}  {k.origin}")
        return "\n".join(lines)


def chrome_trace(profiles: Sequence[Profile], path: str | Path) -> None:
    """Write runs as Chrome trace events, which Perfetto and chrome://tracing open."""
    events = []
    for run in profiles:
        common = {"ph": "X", "pid": os.getpid(), "tid": 0}
        events.append({**common, "name": run.name, "cat": "run", "ts": run.start_ns / 1e3,
                       "dur": run.duration_ns / 1e3})
        for k in run.kernels:
            events.append({**common, "name": k.name, "cat": "kernel",
                           "ts": (run.start_ns + k.start_ns) / 1e3, "dur": k.duration_ns / 1e3,
                           "args": {"operators": k.origin, "flops": k.flops, "bytes": k.bytes}})
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))
