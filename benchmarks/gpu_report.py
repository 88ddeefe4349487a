"""What benchmarks of a GPU found: a line for each row, what is kept of it, and how targets stand.

A row that fails is told and the next one is measured; so is a row that no time is left for. What
was measured can be kept in a file, from which the next command goes on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Figure:
    """A number of a row, and what it should be."""

    item: str  # which of the things to be shown it belongs to
    what: str
    value: float
    target: float | None = None
    most: bool = False  # whether the target is the most that is right, and not the least

    @property
    def reached(self) -> bool:
        if self.target is None:
            return True
        return self.value <= self.target if self.most else self.value >= self.target

    def __str__(self) -> str:
        bound = "" if self.target is None else (
            f" ({'at most' if self.most else 'of'} {_number(self.target)})")
        return f"{self.what} {_number(self.value)}{bound}{'' if self.reached else ' SHORT'}"


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


_SHOWN = 8  # rows that are short, the worst first, in a line

Measured = tuple[str, Sequence[Figure]]  # a line for people, and what it comes to


class Report:
    """The rows of a run."""

    def __init__(self, seconds: float, kept: Path | None = None, only: str = ""):
        self.end = time.monotonic() + seconds
        self.kept, self.only = kept, only
        self.figures: dict[str, list[Figure]] = {}
        self.failed: list[str] = []
        self.left: list[str] = []
        if kept is not None and kept.exists():
            for line in kept.read_text().splitlines():
                row = json.loads(line)
                self.figures[row["row"]] = [Figure(**f) for f in row["figures"]]
            say(f"{len(self.figures)} rows are in {kept} already")

    def measure(self, row: str, run: Callable[[], Measured]) -> None:
        """One row: measured now, unless it was before or there is no time left."""
        if row in self.figures or self.only not in row:
            return
        if time.monotonic() > self.end:
            self.left.append(row)
            return
        try:
            text, figures = run()
        except Exception as error:
            self.failed.append(row)
            say(f"{row}: FAILED, {type(error).__name__}: {str(error)[:2000]}")
            traceback.print_exc(limit=-4)
            return
        self.figures[row] = list(figures)
        say("  ".join([f"{row}:", text, *map(str, figures)]))
        if self.kept is not None:
            with self.kept.open("a") as file:
                file.write(json.dumps({"row": row, "figures": [asdict(f) for f in figures]}) + "\n")

    def derive(self, row: str, run: Callable[[], Measured]) -> None:
        """A row that is computed from others, which is not kept."""
        text, figures = run()
        if figures and self.only in row:
            self.figures[row] = list(figures)
            say("  ".join([f"{row}:", text, *map(str, figures)]))

    def mean(self, item: str, what: str, target: float) -> None:
        """The geometric mean of one figure over all rows of an item, as a row of its own."""
        values = [f.value for row, figures in self.figures.items() for f in figures
                  if (f.item, f.what) == (item, what) and not row.startswith("mean")]
        if values:
            figure = Figure(item, what, statistics.geometric_mean(values), target)
            self.derive(f"mean of {len(values)} rows, {item}, {what}", lambda: ("", [figure]))

    def conclude(self) -> int:
        """How each item stands; what the process answers with: 1 if something was wrong."""
        say("")
        for item in sorted({f.item for figures in self.figures.values() for f in figures
                            if f.target is not None}):
            say(self._standing(item))
        for what, rows in (("failed", self.failed), ("not measured, no time left", self.left)):
            if rows:
                say(f"{what}: {len(rows)}: {'; '.join(rows)}")
        if not self.figures:
            say("nothing was measured")
        return 1 if self.failed or not self.figures else 0

    def _standing(self, item: str) -> str:
        held = [(row, f) for row, figures in self.figures.items() for f in figures
                if f.item == item and f.target is not None]
        short = [(row, f) for row, f in held if not f.reached]
        if not short:
            return f"{item}: reached, {len(held)} targets"
        short.sort(key=lambda found: found[1].value / (found[1].target or 1) * (
            -1 if found[1].most else 1))
        worst = "; ".join(f"{row}: {f.what} {_number(f.value)}, short by "
                          f"{_number(abs(f.value - (f.target or 0)))}" for row, f in short[:_SHOWN])
        more = f"; and {len(short) - _SHOWN} more" if len(short) > _SHOWN else ""
        return f"{item}: {len(held) - len(short)} of {len(held)} targets reached; {worst}{more}"


def say(text: str) -> None:
    print(text, flush=True)


def options(parser: argparse.ArgumentParser) -> None:
    """What all benchmarks of a GPU are told."""
    parser.add_argument("--simulate", action="store_true",
                        help="small sizes on the CPU, to try every line; times mean nothing")
    parser.add_argument("--seconds", type=float, default=540,
                        help="after so many no other row is begun")
    parser.add_argument("--kept", type=Path, help="a file of rows: those in it are not run again")
    parser.add_argument("--only", default="", help="rows whose names contain this")
