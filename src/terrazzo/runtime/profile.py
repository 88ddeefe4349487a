"""What runs cost, kernel by kernel, as a table and as the Chrome trace that Perfetto opens.

    with tz.profile() as recorded:
        model(x)
    print(recorded.table())
    recorded.chrome_trace("run.json")
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from terrazzo.base.tables import ShownAsTable, Table
from terrazzo.knobs import knobs


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
    thread: int = field(default_factory=threading.get_ident)

    def __str__(self) -> str:
        return Recording([self]).table()


@dataclass(frozen=True)
class Row:
    """All runs of one kernel together."""

    name: str
    origin: str
    calls: int
    total_ns: float
    flops: int
    bytes: int


@dataclass(repr=False)
class Recording(ShownAsTable):
    """The runs of some stretch of time."""

    runs: list[Profile] = field(default_factory=list)

    def rows(self) -> list[Row]:
        """Kernels by the time they took in all, longest first."""
        found: dict[tuple[str, str], Row] = {}
        for run in self.runs:
            for k in run.kernels:
                name = f"{run.name}/{k.name}"
                old = found.get((name, k.origin), Row(name, k.origin, 0, 0.0, 0, 0))
                found[name, k.origin] = Row(name, k.origin, old.calls + 1,
                                            old.total_ns + k.duration_ns, old.flops + k.flops,
                                            old.bytes + k.bytes)
        return sorted(found.values(), key=lambda row: -row.total_ns)

    def table(self) -> str:
        """One line a kernel: its time, its share, and the rates it reached."""
        rows = self.rows()
        total = sum(row.total_ns for row in rows)
        lines = [f"{'us':>10} {'share':>6} {'calls':>6} {'GB/s':>8} {'GFLOP/s':>8}  kernel"]
        for row in rows:
            time = max(row.total_ns, 1e-9)
            lines.append(f"{row.total_ns / 1e3:10.1f} {row.total_ns / max(total, 1e-9):6.1%} "
                         f"{row.calls:6d} {row.bytes / time:8.1f} {row.flops / time:8.1f}  "
                         f"{row.name} ({row.origin})")
        whole = sum(run.duration_ns for run in self.runs)
        lines.append(f"{whole / 1e3:10.1f} us in {len(self.runs)} runs")
        return "\n".join(lines)

    def shown(self) -> Table:
        rows = self.rows()
        total = max(sum(row.total_ns for row in rows), 1e-9)
        whole = sum(run.duration_ns for run in self.runs)
        return Table(
            f"{whole / 1e3:.1f} us in {len(self.runs)} runs",
            ("kernel", "operators", "calls", "us", "share", "GB/s", "GFLOP/s"),
            tuple((row.name, row.origin, str(row.calls), f"{row.total_ns / 1e3:.1f}",
                   f"{row.total_ns / total:.1%}", f"{row.bytes / max(row.total_ns, 1e-9):.1f}",
                   f"{row.flops / max(row.total_ns, 1e-9):.1f}") for row in rows), left=2)

    def chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write Chrome trace events, which Perfetto and chrome://tracing open."""
        Path(path).write_text(json.dumps({"traceEvents": self.events(), "displayTimeUnit": "ns"}))

    def events(self) -> list[dict[str, Any]]:
        """Every run and every kernel as a Chrome trace event."""
        events: list[dict[str, Any]] = []
        for run in self.runs:
            common = {"ph": "X", "pid": os.getpid(), "tid": run.thread}
            events.append({**common, "name": run.name, "cat": "run", "ts": run.start_ns / 1e3,
                           "dur": run.duration_ns / 1e3})
            for k in run.kernels:
                events.append({**common, "name": k.name, "cat": "kernel",
                               "ts": (run.start_ns + k.start_ns) / 1e3,
                               "dur": k.duration_ns / 1e3,
                               "args": {"operators": k.origin, "flops": k.flops,
                                        "bytes": k.bytes}})
        return events


_open: list[Recording] = []  # list operations are atomic


@contextmanager
def profile() -> Iterator[Recording]:
    """Record every run for the length of a `with`: `tz.profile()`."""
    recording = Recording()
    _open.append(recording)
    try:
        with knobs.override(profile=True):
            yield recording
    finally:
        # By identity: two recordings that are both empty are equal.
        _open[:] = [other for other in _open if other is not recording]


def record(run: Profile) -> None:
    """Hand a run to everybody who records; with nobody there (TZ_PROFILE=1), print it."""
    recordings = list(_open)
    for recording in recordings:
        recording.runs.append(run)
    if not recordings:
        print(run)
