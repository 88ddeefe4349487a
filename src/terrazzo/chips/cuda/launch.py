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
from terrazzo.index import compile_python, free_vars
from terrazzo.runtime.artifact import index_from

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
    launches: int


class Launched(Followed):
    """Code of one executable on a GPU, or on what stands in for one."""

    def __init__(self, made: Assembled, constants: Sequence[int], device: Launcher):
        super().__init__(made, constants, device)
        self.device, self.facts = device, made.facts["kernels"]
        # Of launches in a row, what tells their numbers apart; and tables by those numbers.
        self.segments: dict[tuple[int, int], Callable[[Sizes], tuple[int, ...]]] = {}
        self.tables: dict[tuple[int, ...], Prepared] = {}
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
        rooms, room = [], 0
        for size in self.rooms:
            rooms.append((slots + 2, room))
            room += _rounded(size(sizes))
        return self.table(self.steps, sizes, rooms, (slots + 2, room), slots)

    def table(self, steps: Sequence[Any], sizes: Sizes, rooms: Sequence[tuple[int, int]],
              scratch: tuple[int, int], checked: int) -> Prepared:
        """Launches for some sizes: bases of rooms, and of what kernels need besides.

        So many slots are checked when they are launched.
        """
        slots, (base, room), lines = len(self.slot_sizes), scratch, []
        for _, number, places in steps:
            kernel = self.kernels[number]
            dims = [d(sizes) for d in kernel.dims]
            version = kernel.choice(sizes, dims)
            grid = kernel.programs[version](sizes)
            if grid <= 0:
                continue
            given = [_based(p, slots, rooms, self.constants, sizes) for p in places]
            given += [(0, n) for n in dims]
            found = self.device.loaded[number][version]
            lines.append(line(found, grid, given, (base, room)))
            room += _rounded(grid * found.scratch)
        return Prepared(native.Table(self.device.launcher, checked, lines), room, len(lines))

    def all_of(self, steps: Sequence[Any], bases: Mapping[str, Sequence[int]], sizes: Sizes
               ) -> None:
        at = 0
        while at < len(steps):
            end = at
            while end < len(steps) and steps[end][0] == "launch":
                end += 1
            if end > at:
                self.launch_some(steps[at:end], bases, sizes)
            else:
                self.step(steps[at], bases, sizes)
            at = max(end, at + 1)

    def launch_some(self, steps: Sequence[Any], bases: Mapping[str, Sequence[int]], sizes: Sizes
                    ) -> None:
        """Launches between what the host does: one call as well, by a table that is kept."""
        place = id(steps[0]), len(steps)  # steps live as long as this
        numbers = self.segments.get(place)
        if numbers is None:
            numbers = self.segments[place] = _numbers(
                [n for _, number, places in steps for n in _sizes(self.facts[number], places)])
        key = (*place, *numbers(sizes))
        made = self.tables.get(key)
        if made is None:
            if len(self.tables) >= _MOST_KNOWN:
                self.tables.clear()
            first, count = len(self.slot_sizes) + 2, len(self.rooms)
            made = self.tables[key] = self.table(
                steps, sizes, [(first + i, 0) for i in range(count)], (first + count, 0), 0)
        _owner, scratch = self.device.room(made.room) if made.room else (None, 0)
        if native.launch()(made.table.address, *bases["slot"], *bases["arena"], *bases["room"],
                           scratch, self.device.stream(self.device.number)):
            for step in steps:  # one by one they tell what is wrong
                self.step(step, bases, sizes)

    def careful(self, *given: int) -> None:
        """The same step by step: addresses that kernels cannot load from, and what fails."""
        *slots, arena, threads = given
        super().run(slots, arena, threads)

    def run(self, slots: Sequence[int], arena: int, threads: int, clock: int = 0) -> None:
        if self.call_pointers is None or clock:
            super().run(slots, arena, threads, clock)
        else:
            self.call_pointers(*slots, arena, threads)


def _based(place: Sequence[Any], slots: int, rooms: Sequence[tuple[int, int]],
           constants: Sequence[int], sizes: Sizes) -> tuple[int, int]:
    """A place as a base, and what is added to it: first come slots, then the arena."""
    kind, number, offset = place
    added = size_of(offset)(sizes)
    if kind == "constant":
        return 0, constants[number] + added
    if kind == "room":
        base, begin = rooms[number]
        return base, begin + added
    return 1 + number + slots * (kind == "arena"), added


def _sizes(kernel: Mapping[str, Any], places: Sequence[Any]) -> list[Any]:
    """All sizes that a launch depends on."""
    return [*kernel["dims"], *kernel["blocks"], *kernel["elements"],
            *(v["programs"] for v in kernel["versions"]), *(offset for _, _, offset in places)]


def _numbers(sizes: Sequence[Any]) -> Callable[[Sizes], tuple[int, ...]]:
    """A function to the numbers of those that vary: turns of a loop may well be the same."""
    vary = [n for n in dict.fromkeys(map(index_from, sizes)) if not isinstance(n, int)]
    names = {v.name: f"sizes[{v.name!r}]" for n in vary for v in free_vars(n)}
    texts = "".join(f"{compile_python(n, names)}, " for n in vary)
    found: Callable[[Sizes], tuple[int, ...]] = eval(f"lambda sizes: ({texts})",
                                                     {"min": min, "max": max})
    return found


def _rounded(size: int) -> int:
    return -(-size // _ROOM_ALIGN) * _ROOM_ALIGN


def check_made_for(name: str, facts: Mapping[str, Any], here: frozenset[str], chip: str) -> None:
    """Refuse code of another kind of GPU."""
    wanted = {f for f in facts["features"] if f.startswith("sm_")}
    if facts["simulated"] or not wanted <= here:
        raise DeviceError(f"{name} was compiled for {', '.join(sorted(wanted))} and this is {chip}",
                          hint="compile it on this machine")
