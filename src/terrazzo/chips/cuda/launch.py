"""Launches kernels on a GPU through its driver: all of a plan that only launches in one call.

For each combination of sizes a table is made of the kernels with their grids and of where their
arguments lie (`native.py`); a run hands native code the table and the addresses of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from terrazzo.chips.chip import Assembled
from terrazzo.chips.cuda import driver, native
from terrazzo.chips.cuda.follow import Followed, Machine, Sizes, size_of
from terrazzo.chips.cuda.native import Loaded, line
from terrazzo.errors import DeviceError

_MOST_KNOWN = 4096  # combinations of sizes whose tables are remembered
_ROOM_ALIGN = 256  # bytes; descriptors and kernels want less


class Recording(Protocol):
    """Launches that are ready to be repeated."""

    def play(self, stream: int) -> None: ...


class Launcher(Machine, Protocol):
    """A machine whose kernels native code launches."""

    number: int
    launcher: int  # the address of what takes cuLaunchKernel's arguments
    loaded: Sequence[Sequence[Loaded]]  # the versions of each kernel

    @property
    def stream(self) -> Callable[[int], int]: ...  # of a device by its number

    def require(self, status: int) -> None:
        """Raise where a launch did not go well."""

    def record(self, launch: Callable[[int], int]) -> Recording:
        """What is launched on a stream, ready to be repeated."""

    def after(self, stream: int) -> None:
        """Let the current stream go on after what another one was given."""


class Device:
    """The GPU that code was loaded for."""

    def __init__(self, made: Assembled):
        import torch

        self.number: int = torch.cuda.current_device()
        self.stream = driver.current_stream()
        self.launcher = driver.launcher()
        self.modules: list[driver.Module] = []
        self.loaded: Sequence[Sequence[Loaded]] = [
            [self.load(v, made.code) for v in k["versions"]] for k in made.facts["kernels"]]

    def load(self, version: Mapping[str, Any], code: bytes) -> Loaded:
        start, length = version["code"]
        self.modules.append(driver.Module(code[start:start + length]))
        return Loaded(self.modules[-1].function(version["symbol"], version["shared"]),
                      32 * version["warps"], version["shared"], version["scratch"],
                      version["extra"])

    def launch(self, kernel: int, version: int, grid: int, pointers: Sequence[int],
               sizes: Sequence[int]) -> None:
        found = self.loaded[kernel][version]
        _owner, scratch = self.room(grid * found.scratch) if found.scratch else (None, 0)
        given = [(0, n) for n in (*pointers, *sizes)]
        table = native.Table(self.launcher, 0, [line(found, grid, given, (0, scratch))])
        driver.check(driver.with_context(
            lambda: native.launch()(table.address, self.stream(self.number))),
            "to launch a kernel")

    def require(self, status: int) -> None:
        driver.check(status, "to launch a kernel")

    def record(self, launch: Callable[[int], int]) -> driver.Graph:
        import torch

        # Nothing can be recorded on the stream that is there without asking.
        aside = torch.cuda.Stream(self.number)
        return driver.Graph(aside.cuda_stream, lambda: launch(aside.cuda_stream))

    def after(self, stream: int) -> None:
        import torch

        # Without an address torch would make a new stream.
        other = torch.cuda.ExternalStream(stream) if stream else torch.cuda.default_stream()
        torch.cuda.current_stream().wait_stream(other)

    def room(self, size: int) -> tuple[Any, int]:
        import torch

        owner = torch.empty(max(size, 1), dtype=torch.uint8, device=f"cuda:{self.number}")
        return owner, owner.data_ptr()

    def to_host(self, target: int, source: int, size: int) -> None:
        driver.to_host(target, source, size, self.stream(self.number))

    def to_device(self, target: int, source: int, size: int) -> None:
        driver.to_device(target, source, size, self.stream(self.number))

    def on_device(self, target: int, source: int, size: int) -> None:
        driver.on_device(target, source, size, self.stream(self.number))

    def wait(self) -> None:
        driver.wait(self.stream(self.number))


@dataclass(frozen=True, eq=False)
class Prepared:
    """All launches of a plan for some sizes, and how much room one call of them needs."""

    table: native.Table
    room: int


class Launched(Followed):
    """Code of one executable on a GPU, or on what stands in for one."""

    def __init__(self, made: Assembled, constants: Sequence[int], device: Launcher):
        super().__init__(made, constants, device)
        self.device = device
        if all(step[0] == "launch" for step in self.steps):
            self.call_pointers = self.written_out()

    def written_out(self) -> Callable[..., Any]:
        """A function of addresses, sizes, arena and threads that does nothing but launch.

        It is written for the number of its arguments: to take a list of them apart takes longer.
        """
        slots = [f"s{i}" for i in range(len(self.slot_sizes))]
        sizes = [f"d{i}" for i in range(len(self.dims))]
        parameters = ", ".join([*slots, *sizes, "arena", "threads"])
        scope: dict[str, Any] = {"launch": native.launch(), "stream_of": self.device.stream,
                                 "room_of": self.device.room, "careful": self.careful}
        lines = [f"def run({parameters}):"]
        if sizes:
            key = f"({', '.join(sizes)},)"
            scope |= {"known": {}, "prepared": self.remembered}
            lines += [f"    table, size, kept = known.get({key}) or prepared(known, {key})"]
        else:
            made = self.prepared(())
            scope |= {"kept": made, "size": made.room}
            lines += [f"    table = {made.table.address}"]
        if sizes or made.room:
            lines += ["    owner, room = room_of(size) if size else (None, 0)"]
        else:
            lines += ["    room = 0"]
        bases = ", ".join([*slots, "arena", "room"])
        lines += [f"    if launch(table, {bases}, stream_of({self.device.number})):",
                  f"        careful({parameters})"]
        exec("\n".join(lines), scope)
        run: Callable[..., Any] = scope["run"]
        return run

    def remembered(self, known: dict[tuple[int, ...], tuple[Any, ...]], sizes: tuple[int, ...]
                   ) -> tuple[Any, ...]:
        """The table for sizes that are new: where it is, the room that it needs, and itself."""
        if len(known) >= _MOST_KNOWN:
            known.clear()
        made = self.prepared(sizes)
        known[sizes] = made.table.address, made.room, made
        return known[sizes]

    def prepared(self, values: Sequence[int]) -> Prepared:
        """All launches for some sizes."""
        sizes = dict(zip(self.dims, values, strict=True))
        slots = len(self.slot_sizes)
        first = {"slot": 1, "arena": slots + 1, "room": slots + 2}
        begins, room = [], 0
        for size in self.rooms:
            begins.append(room)
            room += _rounded(size(sizes))
        lines = []
        for _, number, places in self.steps:
            kernel = self.kernels[number]
            dims = [d(sizes) for d in kernel.dims]
            version = kernel.choice(sizes, dims)
            grid = kernel.programs[version](sizes)
            if grid <= 0:
                continue
            given = [_based(p, first, begins, self.constants, sizes) for p in places]
            given += [(0, n) for n in dims]
            found = self.device.loaded[number][version]
            lines.append(line(found, grid, given, (first["room"], room)))
            room += _rounded(grid * found.scratch)
        return Prepared(native.Table(self.device.launcher, slots, lines), room)

    def careful(self, *given: int) -> None:
        """The same step by step: addresses that kernels cannot load from, and what fails."""
        *slots, arena, threads = given
        super().run(slots, arena, threads)

    def run(self, slots: Sequence[int], arena: int, threads: int, clock: int = 0) -> None:
        if self.call_pointers is None or clock:
            super().run(slots, arena, threads, clock)
        else:
            self.call_pointers(*slots, arena, threads)


def _based(place: Sequence[Any], first: Mapping[str, int], rooms: Sequence[int],
           constants: Sequence[int], sizes: Sizes) -> tuple[int, int]:
    """A place as a base, and what is added to it; all rooms are one base."""
    kind, number, offset = place
    added = size_of(offset)(sizes)
    if kind == "constant":
        return 0, constants[number] + added
    if kind == "room":
        return first[kind], rooms[number] + added
    return first[kind] + number, added


def _rounded(size: int) -> int:
    return -(-size // _ROOM_ALIGN) * _ROOM_ALIGN


def check_made_for(name: str, facts: Mapping[str, Any], here: frozenset[str], chip: str) -> None:
    """Refuse code of another kind of GPU."""
    wanted = {f for f in facts["features"] if f.startswith("sm_")}
    if facts["simulated"] or not wanted <= here:
        raise DeviceError(f"{name} was compiled for {', '.join(sorted(wanted))} and this is {chip}",
                          hint="compile it on this machine")
