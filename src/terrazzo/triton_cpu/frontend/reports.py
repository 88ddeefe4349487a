"""What a kernel tells its launcher: records in a piece of memory that both know.

A kernel that prints, asserts or is sanitized has one more argument, the address of an area of
64-bit words. It begins with a head (below), then a row of words for every argument of the kernel,
then counts for every site: an operation that may report something. Programs take a record each by
adding to the head's first word. What the sites are is kept in Triton's metadata, so kernels from
the disk cache know it as well; after the launch the records are read with that table.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from terrazzo.base.scalar import Const, FromIndex, Scalar, call
from terrazzo.dtypes import int64
from terrazzo.index import Index
from terrazzo.knobs import knobs
from terrazzo.loop.ir import Atomic, Buffer, For, If, Stmt, Store, block
from terrazzo.triton_cpu.frontend.values import Indices

if TYPE_CHECKING:
    from terrazzo.triton_cpu.frontend.lower import Lowering

# The words of the head, and how many. The first three are there twice: lines that are printed must
# not take the room of what was found wrong. LIMIT is how many nanoseconds a program may wait.
CLAIMED, CAPACITY, RECORDS = range(3)
PRINTED, FOUND, CLOCK, LAST, LIMIT, GIVEN_UP, HEAD = 0, 3, 6, 7, 8, 9, 10
# The words of an argument, for the sanitizer: where its storage begins and ends, counted in bytes
# from the argument; the addresses of its shadows; the bits of a byte's number that the first drops.
LOW, HIGH, WRITERS, GRANULE, WRITTEN, PER_ARGUMENT = range(6)
SITE, DETAIL, PROGRAM, LANE, VALUE, OTHER, PER_RECORD = range(7)  # of a record
DETAILS = 8  # kinds of reports that a site can make
MOST_PRINTED, MOST_FOUND = 1 << 18, 1 << 14  # pages of the area that nobody touches cost nothing
Table = dict[str, Any]  # of a kernel's sites, as it lies in Triton's metadata


# ---------------------------------------------------------------- in the kernel
class Reports:
    """The sites of a kernel while it is lowered, and the code that reports from them."""

    def __init__(self, lowering: Lowering):
        self.lowering = lowering
        self.arguments = len(lowering.module.entry.regions[0][0].args)
        self.area = Buffer("report", int64, 0, bounded=False)
        lowering.signature.params.append((self.area, self.arguments))
        self.sites: list[Table] = []
        self.seen: dict[tuple[int, int], Buffer] = {}  # by site and detail
        self.slot = lowering.local("slot", int64, 1)

    def site(self, kind: str, where: str, **facts: Any) -> int:
        """Make an operation known that may report; the number of its site."""
        self.sites.append({"kind": kind, "where": where, **facts})
        return len(self.sites) - 1

    def table(self) -> Table:
        """What is needed to read the records, in types that JSON has."""
        sanitizer = self.lowering.watch.sanitizer
        return {"kernel": self.lowering.module.entry.attrs["sym_name"], "sites": self.sites,
                "arguments": self.arguments, **({} if sanitizer is None else sanitizer.table())}

    def program(self) -> Scalar:
        """The number of the running program."""
        signature = self.lowering.signature
        (x, y, z), (count_x, count_y, _) = signature.program, signature.grid
        return FromIndex(int64, x + count_x * (y + count_y * z))

    def of_argument(self, argument: int, which: int) -> Scalar:
        """What the head says about an argument."""
        return self.area[HEAD + argument * PER_ARGUMENT + which]

    def every(self, site: int, detail: int, lane: Index, value: Scalar) -> Stmt:
        """A record each time this is reached."""
        return self._record(PRINTED, site, detail, lane, value, word(0))

    def first(self, site: int, detail: int, lane: Index, value: Scalar | None = None,
              other: Scalar | None = None) -> Stmt:
        """A record the first time that a program gets here; later ones are only counted."""
        seen = self.seen.get((site, detail))
        if seen is None:
            seen = self.seen[site, detail] = self.lowering.local("seen", int64, 1)
            self.lowering.watch.prologue.append(Store(seen, 0, word(0)))
        count = HEAD + self.arguments * PER_ARGUMENT + site * DETAILS + detail
        return block(
            Atomic("add", self.area, count, word(1)),
            If(call("eq", seen[0], word(0)), block(
                Store(seen, 0, word(1)),
                self._record(FOUND, site, detail, lane, word(0) if value is None else value,
                             word(0) if other is None else other))))

    def _record(self, part: int, site: int, detail: int, lane: Index, value: Scalar,
                other: Scalar) -> Stmt:
        begin = call("add", self.area[part + RECORDS],
                     call("mul", self.slot[0], word(PER_RECORD)))
        words = {SITE: word(site), DETAIL: word(detail), PROGRAM: self.program(),
                 LANE: FromIndex(int64, lane), VALUE: value, OTHER: other}
        return block(
            Atomic("add", self.area, part + CLAIMED, word(1), None, (self.slot, 0)),
            If(call("lt", self.slot[0], self.area[part + CAPACITY]), block(*(
                Store(self.area, call("add", begin, word(place)), what)
                for place, what in words.items()))))


def of(lowering: Lowering) -> Reports:
    """The reports of a kernel, which has them from now on."""
    if lowering.watch.reports is None:
        lowering.watch.reports = Reports(lowering)
    return lowering.watch.reports


def word(number: int) -> Scalar:
    """A number as an area holds it."""
    return Const(int64, number)


def each(lowering: Lowering, shape: Sequence[int], body: Callable[[Indices], Stmt]) -> Stmt:
    """A statement for each element of a tile, one after the other."""
    axes = [lowering.fresh(f"i{d}", 0, n - 1) if n > 1 else None for d, n in enumerate(shape)]
    stmt = body(tuple(0 if v is None else v for v in axes))
    for axis, n in reversed(list(zip(axes, shape, strict=True))):
        if axis is not None:
            stmt = For(axis, 0, n, stmt)
    return stmt


# ---------------------------------------------------------------- at the launch
@dataclass(frozen=True)
class Launch:
    """One launch: the kernel's table of sites, its grid, and its arguments by name."""

    table: Table
    grid: tuple[int, int, int]
    names: Sequence[str] = ()

    @property
    def programs(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    def program(self, number: int) -> str:
        """A program as its three numbers."""
        x, y, _ = self.grid
        return f"({number % x}, {number // x % y}, {number // (x * y)})"


@dataclass(frozen=True)
class Record:
    """One report of a kernel."""

    site: Table
    detail: int
    program: int
    lane: int
    value: int
    other: int
    count: int  # how often this site reported this in all programs


@dataclass
class Area:
    """The memory of one launch; `rows` has what is known of each argument."""

    launch: Launch
    rows: np.ndarray = field(init=False)
    words: np.ndarray = field(init=False)
    counts: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        table = self.launch.table
        arguments, sites = table["arguments"], len(table["sites"])
        head = HEAD + arguments * PER_ARGUMENT + sites * DETAILS
        begin = head + self.launch.programs
        found = begin + MOST_PRINTED * PER_RECORD
        self.words = np.empty(found + MOST_FOUND * PER_RECORD, np.int64)
        self.words[:begin] = 0
        self.words[PRINTED: FOUND] = 0, MOST_PRINTED, begin
        self.words[FOUND: CLOCK] = 0, MOST_FOUND, found
        self.words[LAST] = head
        self.words[LIMIT] = int(knobs.wait_limit * 1e9)
        self.rows = self.words[HEAD:][:arguments * PER_ARGUMENT].reshape(arguments, PER_ARGUMENT)
        self.counts = self.words[HEAD + arguments * PER_ARGUMENT: head].reshape(sites, DETAILS)

    @property
    def address(self) -> int:
        return int(self.words.ctypes.data)

    def lost(self, part: int) -> int:
        """For how many records there was no room."""
        return max(int(self.words[part + CLAIMED] - self.words[part + CAPACITY]), 0)

    def records(self, part: int) -> list[Record]:
        """What was printed or found, in order of programs, and of time in each."""
        held = int(min(self.words[part + CLAIMED], self.words[part + CAPACITY]))
        begin = int(self.words[part + RECORDS])
        lines = self.words[begin: begin + held * PER_RECORD].reshape(held, PER_RECORD)
        order = np.argsort(lines[:, PROGRAM], kind="stable")
        sites = self.launch.table["sites"]
        return [Record(sites[site], detail, program, lane, value, other,
                       int(self.counts[site, detail]))
                for site, detail, program, lane, value, other in lines[order].tolist()]


def shorter(where: str) -> str:
    """A place in a file as a user would name it from here."""
    return where.removeprefix(os.getcwd() + os.sep)


def lane_text(shape: Sequence[int], lane: int) -> str:
    """Which element of a tile."""
    if not shape:
        return ""
    if len(shape) == 1:
        return f", lane {lane}"
    indices = [int(i) for i in np.unravel_index(lane, tuple(shape))]
    return f", lane ({', '.join(map(str, indices))})"


def firsts(records: Sequence[Record]) -> list[Record]:
    """The first record of each site and kind."""
    found: dict[tuple[int, int], Record] = {}
    for record in records:
        found.setdefault((id(record.site), record.detail), record)
    return list(found.values())
