"""What `verify` tried, what it found and what it left out, as a table."""

from __future__ import annotations

from dataclasses import dataclass, field

from terrazzo.base.tables import ShownAsTable, Table
from terrazzo.tools.verify.comparison import Difference
from terrazzo.tools.verify.levels import KERNEL, LEVELS, Notes


@dataclass
class Row(Notes):
    """What was tried for one data type, and the worst error at every level."""

    dtype: str
    kinds: list[str] = field(default_factory=list)
    ulps: dict[str, float] = field(default_factory=dict)
    share: dict[str, float] = field(default_factory=dict)
    elements: dict[str, int] = field(default_factory=dict)  # compared, by level
    open: dict[str, int] = field(default_factory=dict)  # without a bound to compare with
    left_out: dict[tuple[str, str, str], None] = field(default_factory=dict)

    @property
    def checked(self) -> int:
        """Elements compared at all levels together."""
        return sum(self.elements.values())

    def compared(self, level: str, difference: Difference) -> None:
        if level != "gradient":
            self.ulps[level] = max(self.ulps.get(level, 0.0), difference.ulps)
        self.share[level] = max(self.share.get(level, 0.0), difference.share)
        self.elements[level] = self.elements.get(level, 0) + difference.checked
        self.open[level] = self.open.get(level, 0) + difference.open

    def skipped(self, level: str, what: str, why: str) -> None:
        self.left_out.setdefault((level, what, why))


@dataclass(repr=False)
class Report(ShownAsTable):
    """What `verify` tried; prints as a table."""

    name: str
    rows: list[Row] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # inputs that could not be tried, and why
    seconds: float = 0.0

    def elements(self, level: str) -> int:
        """Elements that were compared at a level."""
        return sum(row.elements.get(level, 0) for row in self.rows)

    def open(self, level: str) -> int:
        """Elements of a level that no bound says anything of."""
        return sum(row.open.get(level, 0) for row in self.rows)

    @property
    def skipped(self) -> list[str]:
        """What was not checked, and why, one line each."""
        lines = list(self.refused)
        parts: dict[tuple[str, str, str], list[str]] = {}
        for row in self.rows:
            for part in row.left_out:
                parts.setdefault(part, []).append(row.dtype)
        for (level, what, why), dtypes in parts.items():
            lines.append(f"level {level} of {what}: {why} ({', '.join(dtypes)})")
        for level in LEVELS:
            empty = [row.dtype for row in self.rows
                     if row.open.get(level) and not row.elements.get(level)]
            if empty:
                lines.append(f"level {level}, {', '.join(empty)}: no element has a bound that it "
                             "could be held to")
        return lines

    @property
    def levels(self) -> tuple[str, ...]:
        """Those that tables show: one for kernels by hand only where there are any."""
        return (*LEVELS, *((KERNEL,) if any(KERNEL in row.elements for row in self.rows) else ()))

    def shown(self) -> Table:
        kinds = ", ".join(dict.fromkeys(k for row in self.rows for k in row.kinds))
        rows = tuple((row.dtype, str(len(set(row.kinds))), str(row.checked),
                      str(sum(row.open.values())), *(_cell(row, level) for level in self.levels))
                     for row in self.rows)
        caption = ("worst errors in units of the last place (where the result is well "
                   "conditioned), and as a part of what rounding allows",
                   "open: elements that no bound says anything of",
                   f"inputs: {kinds}; {self.seconds:.1f} s")
        return Table(f"{self.name}: every level agrees",
                     ("type", "kinds", "elements", "open", *self.levels), rows, caption,
                     tuple(f"left out: {line}" for line in self.skipped))


def _cell(row: Row, level: str) -> str:
    if not row.elements.get(level):
        return "-"
    share = f"{row.share[level]:.0%}"
    return share if level not in row.ulps else f"{row.ulps[level]:.3g} ({share})"
