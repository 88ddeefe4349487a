"""Runs the steps of a plan one by one, on a GPU or simulated: what every plan can be run by."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from terrazzo.chips.chip import Assembled, Code
from terrazzo.chips.cuda.plan import ALIGN
from terrazzo.chips.registry import DEFAULT, chip_named
from terrazzo.index import evaluate
from terrazzo.runtime.artifact import index_from

Sizes = Mapping[str, int]
Size = Callable[[Sizes], int]


class Machine(Protocol):
    """What launches kernels, and whose memory their arguments lie in."""

    def launch(self, kernel: int, version: int, grid: int, pointers: Sequence[int],
               sizes: Sequence[int]) -> None: ...
    def room(self, size: int) -> tuple[Any, int]: ...
    def to_host(self, target: int, source: int, size: int) -> None: ...
    def to_device(self, target: int, source: int, size: int) -> None: ...
    def on_device(self, target: int, source: int, size: int) -> None: ...
    def wait(self) -> None: ...


def size_of(data: Any) -> Size:
    """A size as a function of the values of its names."""
    index = index_from(data)
    if isinstance(index, int):
        return lambda _: index
    return lambda sizes: int(evaluate(index, sizes))


class Kernel:
    """When a kernel runs, as which version, and with how many programs."""

    def __init__(self, facts: Mapping[str, Any]):
        self.name: str = facts["name"]
        self.dims = [size_of(d) for d in facts["dims"]]
        self.programs = [size_of(v["programs"]) for v in facts["versions"]]
        self.blocks = [size_of(b) for b in facts["blocks"]]
        self.elements = [size_of(n) for n in facts["elements"]]
        self.versions = facts["versions"]

    def choice(self, sizes: Sizes, dims: Sequence[int]) -> int:
        """The first version that serves these sizes."""
        if len(self.versions) == 1:
            return 0
        wide = any(n(sizes) >= 1 << 31 for n in self.elements)
        sixteen = all(n % 16 == 0 for n in dims)
        longest = max((b(sizes) for b in self.blocks), default=0)
        return next(i for i, v in enumerate(self.versions) if (v["wide"] or not wide) and (
            sixteen or not v["sixteen"]) and (longest <= v["most"] or not v["most"]))


class Followed:
    """Code of one executable that is followed step by step."""

    allocates = False
    models_time = False
    call_pointers: Callable[..., Any] | None = None
    call_numpy: Callable[..., Any] | None = None
    call_slots: Callable[..., Any] | None = None

    def __init__(self, made: Assembled, constants: Sequence[int], machine: Machine):
        facts = made.facts
        self.machine, self.constants = machine, constants
        self.kernels = [Kernel(k) for k in facts["kernels"]]
        self.hosts = [HostPart(h, made.code) for h in facts["hosts"]]
        self.steps, self.dims, self.begins = facts["steps"], facts["dims"], facts["begins"]
        self.slot_sizes = [size_of(n) for n in facts["slots"]]
        self.rooms = [size_of(n) for n in facts["rooms"]]

    def prepare(self) -> None:
        """There are no threads to tell anything."""

    def failed(self) -> bool:
        return False

    def run(self, slots: Sequence[int], arena: int, threads: int, clock: int = 0) -> None:
        """Run on addresses of inputs and outputs and then the sizes."""
        count = len(self.slot_sizes)
        sizes = dict(zip(self.dims, slots[count:], strict=True))
        given, moved = self.aligned(slots[:count], sizes)
        rooms = [self.machine.room(n(sizes)) for n in self.rooms]
        bases = {"slot": given, "constant": self.constants, "arena": [arena],
                 "room": [address for _, address in rooms]}
        parts = pairwise([*self.begins, len(self.steps)] if clock else [0, len(self.steps)])
        for i, (first, end) in enumerate(parts):
            self.stamp(clock, i)
            self.all_of(self.steps[first:end], bases, sizes)
        self.stamp(clock, len(self.begins))
        for _, there, here, size in moved:
            self.machine.on_device(here, there, size)

    def aligned(self, slots: Sequence[int], sizes: Sizes
                ) -> tuple[list[int], list[tuple[Any, int, int, int]]]:
        """Slots that begin where kernels load, with copies of those that do not.

        Copied back at the end, all of them: an input is then what it was.
        """
        given, moved = list(slots), []
        for i, address in enumerate(slots):
            if address % ALIGN:
                size = self.slot_sizes[i](sizes)
                owner, given[i] = self.machine.room(size)
                self.machine.on_device(given[i], address, size)
                moved.append((owner, given[i], address, size))
        return given, moved

    def stamp(self, clock: int, i: int) -> None:
        if clock:
            self.machine.wait()
            ctypes.c_int64.from_address(clock + 8 * i).value = time.perf_counter_ns()

    def step(self, step: Sequence[Any], bases: Mapping[str, Sequence[int]], sizes: Sizes) -> None:
        kind, *rest = step
        if kind == "launch":
            number, places = rest
            kernel = self.kernels[number]
            dims = [d(sizes) for d in kernel.dims]
            version = kernel.choice(sizes, dims)
            programs = kernel.programs[version](sizes)
            if programs > 0:
                self.machine.launch(number, version, programs, [
                    address(p, bases, sizes) for p in places], dims)
        elif kind == "host":
            number, places = rest
            self.hosts[number].run([address(p, bases, sizes) for p in places], sizes,
                                   self.machine)
        elif kind == "branch":
            place, size, then, orelse = rest
            self.all_of(then if self.holds(place, size, bases, sizes) else orelse, bases, sizes)
        else:
            self.repeat(rest, bases, sizes)

    def all_of(self, steps: Sequence[Any], bases: Mapping[str, Sequence[int]], sizes: Sizes
               ) -> None:
        for step in steps:
            self.step(step, bases, sizes)

    def holds(self, place: Any, size: int, bases: Mapping[str, Sequence[int]], sizes: Sizes
              ) -> bool:
        found = ctypes.create_string_buffer(size)
        self.machine.to_host(ctypes.addressof(found), address(place, bases, sizes), size)
        return any(found.raw)

    def repeat(self, step: Sequence[Any], bases: Mapping[str, Sequence[int]], sizes: Sizes
               ) -> None:
        counter, count, test, place, size, body, after = step
        turns, turn = size_of(count)(sizes), 0
        while True:
            inside = {**sizes, counter: turn}
            self.all_of(test, bases, inside)
            if not (turn < turns if place is None else self.holds(place, size, bases, inside)):
                break
            self.all_of(body, bases, inside)
            turn += 1
        self.all_of(after, bases, inside)


def address(place: Sequence[Any], bases: Mapping[str, Sequence[int]], sizes: Sizes) -> int:
    """Where a place lies in a call."""
    kind, number, offset = place
    return bases[kind][number] + (offset if isinstance(offset, int) else size_of(offset)(sizes))


class HostPart:
    """A kernel without a form for GPUs, which the CPU runs on copies."""

    def __init__(self, facts: Mapping[str, Any], code: bytes):
        start, length = facts["code"]
        self.code: Code = chip_named(DEFAULT).load(
            facts["name"], Assembled(code[start:start + length], facts["facts"]), [])
        self.sizes = [size_of(n) for n in facts["bytes"]]
        self.dims = [size_of(d) for d in facts["dims"]]

    def run(self, pointers: Sequence[int], sizes: Sizes, machine: Machine) -> None:
        from terrazzo.knobs import thread_count

        arrays = [np.empty(max(n(sizes), 1) + 64, np.uint8) for n in self.sizes]
        here = [a.ctypes.data + -a.ctypes.data % 64 for a in arrays]
        for n, there, pointer in zip(self.sizes, here, pointers, strict=True):
            machine.to_host(there, pointer, n(sizes))
        self.code.run([*here, *(d(sizes) for d in self.dims)], 0, thread_count())
        if self.code.failed():
            raise MemoryError
        for n, there, pointer in zip(self.sizes, here, pointers, strict=True):
            machine.to_device(pointer, there, n(sizes))
