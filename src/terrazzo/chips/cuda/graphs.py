"""CUDA graphs: all launches of an executable recorded once, and repeated in one call.

A recording holds addresses. Arrays that all lie where those of an earlier call did are used in
place, with a recording of their own. Else those that have never moved (weights) are used in place,
and all others copied into memory that is kept for this, and results out of it. So every call but
the first few is one call of the driver, whatever it is given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from terrazzo.chips.cuda import native
from terrazzo.chips.cuda.launch import Launched, Recording
from terrazzo.chips.cuda.plan import ALIGN
from terrazzo.index import evaluate
from terrazzo.knobs import knobs
from terrazzo.runtime.executable import Executable
from terrazzo.runtime.hosted import to_numpy
from terrazzo.runtime.layout import is_row_major
from terrazzo.runtime.profile import Profile
from terrazzo.runtime.targets import addresses_of, check_apart, check_layouts, claim, copy

_MOST_IN_PLACE = 16  # recordings for addresses of callers', for some sizes
_MOST_SEEN = 256  # calls whose addresses are remembered
_MOST_SIZES = 32  # combinations of sizes that memory is kept for

Addresses = tuple[int, ...]


def recorded(executable: Executable) -> Executable | Recorded:
    """An executable that repeats recordings; itself where it does more than launch."""
    code = executable.code
    if not isinstance(code, Launched) or code.call_pointers is None or any(
            s is not None for s in executable.strides):
        return executable
    return Recorded(executable, code)


class Recorded:
    """Runs an executable by recordings of its launches."""

    def __init__(self, executable: Executable, code: Launched):
        self.executable, self.code = executable, code
        self._kept: dict[Addresses, Kept] = {}  # by sizes
        self._lock = threading.Lock()  # calls share memory that is kept

    def run(self, arrays: Sequence[Any], *, threads: int = 0, into: Sequence[Any] = (),
            profiles: list[Profile] | None = None) -> list[Any]:
        """As `Executable.run` does."""
        executable = self.executable
        if profiles is not None or knobs.profile:  # which take the time of each kernel
            return executable.run(arrays, threads=threads, into=into, profiles=profiles)
        inputs = executable.checked(arrays)
        sizes = tuple(executable.bind(inputs))
        targets = list(into) or [None] * len(executable.output_types)
        given = [t for t in targets if t is not None]
        if given:
            check_layouts(targets, executable.output_shapes(sizes), executable.name)
            check_apart(given, executable.name)
            claim(given, executable.name)
        with self._lock:
            kept = self._kept.get(sizes) or self._keep(sizes)
            return kept.run(inputs, targets)

    def again(self, arrays: Sequence[Any], into: Sequence[Any], threads: int = 0
              ) -> Callable[[], None] | None:
        """As `Executable.again` does: by the recording for these addresses, once there is one."""
        kept = self._kept.get(tuple(self.executable.bind(arrays)))
        places = (*addresses_of(arrays), *addresses_of(into))
        if kept is None or places not in kept.recordings:
            return None

        def run() -> None:
            claim(into, self.executable.name)
            with self._lock:
                kept.play(places)

        return run

    def _keep(self, sizes: Addresses) -> Kept:
        if len(self._kept) >= _MOST_SIZES:
            self._kept.pop(next(iter(self._kept)))
        self._kept[sizes] = Kept(self.executable, self.code, sizes)
        return self._kept[sizes]


class Kept:
    """What calls of the same sizes share: memory, and recordings by addresses."""

    def __init__(self, executable: Executable, code: Launched, sizes: Addresses):
        self.executable, self.sizes, self.device = executable, sizes, code.device
        self.memory = executable.chip.memory
        self.prepared = code.prepared(sizes)
        self.inputs: dict[int, Any] = {}  # copies of those that move from call to call
        self.outputs = executable.allocate(sizes)
        self.last: list[int] | None = None  # where the inputs of the last call lay
        self.arena = executable.take_arena(executable.arena_size(sizes))
        self.room = self.device.room(self.prepared.room)
        self.recordings: dict[Addresses, Recording] = {}
        self.seen: dict[Addresses, None] = {}
        self.stream: int | None = None  # where the last call was queued

    def run(self, inputs: Sequence[Any], targets: Sequence[Any]) -> list[Any]:
        written = [own if t is None else t for t, own in zip(targets, self.outputs, strict=True)]
        if self._in_place(inputs, written):
            places = (*addresses_of(inputs), *addresses_of(written))
            # Not for ever more addresses: to record takes longer than to copy.
            if places in self.recordings or (
                    places in self.seen and len(self.recordings) < _MOST_IN_PLACE):
                self.play(places)
                return self._results(inputs, targets, written)
            if len(self.seen) >= _MOST_SEEN:
                self.seen.pop(next(iter(self.seen)))
            self.seen[places] = None
        self._order()
        read, comes_first = self._read(inputs), self.last is None
        self.last = addresses_of(inputs)
        places = (*addresses_of(read), *addresses_of(self.outputs))
        if comes_first and not self.inputs:  # which of them will stay shows next time
            self.device.require(self._launch(places)(self.device.stream(self.device.number)))
        else:
            self.play(places)
        return self._results(inputs, targets, self.outputs)

    def _read(self, inputs: Sequence[Any]) -> list[Any]:
        """What kernels read: inputs where they lie, as long as they stay there, or copies."""
        begins = addresses_of(inputs)
        before = begins if self.last is None else self.last
        read = []
        for i, (array, now, then) in enumerate(zip(inputs, begins, before, strict=True)):
            if i not in self.inputs and now == then and now and now % ALIGN == 0 and (
                    self.memory.holds(array) and is_row_major(array)):
                read.append(array)
                continue
            if i not in self.inputs:
                self.inputs[i] = self._empty(i)
            copy(array, self.inputs[i])
            read.append(self.inputs[i])
        return read

    def _empty(self, number: int) -> Any:
        """Memory for copies of an input."""
        executable = self.executable
        values = {d.name: n for d, n in zip(executable.dims, self.sizes, strict=True)}
        _, dtype, shape = executable.input_types[number]
        return self.memory.empty(tuple(int(evaluate(n, values)) for n in shape), dtype.np)

    def _in_place(self, inputs: Sequence[Any], targets: Sequence[Any]) -> bool:
        """Whether kernels may read and write all of these where they lie."""
        arrays = [*inputs, *targets]
        if not all(self.memory.holds(a) and is_row_major(a) for a in arrays):
            return False
        begins = addresses_of(arrays)
        if any(b % ALIGN or not b for b in begins):
            return False
        ends = [b + a.nbytes for b, a in zip(begins, arrays, strict=True)]
        count = len(inputs)
        return not any(begins[i] < ends[o] and begins[o] < ends[i] for i in range(count)
                       for o in range(count, len(arrays)))

    def play(self, places: Addresses) -> None:
        """Repeat what was recorded for these addresses; the first time, launch and record."""
        self._order()
        known = self.recordings.get(places)
        if known is not None:
            known.play(self.device.stream(self.device.number))
            return
        launch = self._launch(places)
        # Launched once before: what a driver loads late it cannot load while it records.
        self.device.require(launch(self.device.stream(self.device.number)))
        if len(self.recordings) > _MOST_IN_PLACE:
            self.recordings.pop(next(iter(self.recordings)))
        self.recordings[places] = self.device.record(launch)

    def _launch(self, places: Addresses) -> Callable[[int], int]:
        table, arena, room = self.prepared.table.address, self.arena.address, self.room[1]
        return lambda stream: native.launch()(table, *places, arena, room, stream)

    def _order(self) -> None:
        """Calls queue in one order, also where they come from different streams."""
        now = self.device.stream(self.device.number)
        if self.stream is not None and now != self.stream:
            self.device.after(self.stream)
        self.stream = now

    def _results(self, inputs: Sequence[Any], targets: Sequence[Any], written: Sequence[Any]
                 ) -> list[Any]:
        """What was written, in arrays of the caller's own."""
        if all(a is b for a, b in zip(targets, written, strict=True)):
            return list(targets)
        here = not inputs or any(map(self.memory.holds, inputs))
        like = next((a for a in inputs if hasattr(a, "data_ptr") and (
            not here or self.memory.holds(a))), None)
        if not here and all(t is None for t in targets):
            back = [self.memory.to_host(o) for o in self.outputs]  # copies
            return back if like is not None else [to_numpy(o) for o in back]
        fresh = self.executable.allocate(self.sizes, like)
        results = [f if t is None else t for f, t in zip(fresh, targets, strict=True)]
        for made, result in zip(written, results, strict=True):
            if made is not result:
                copy(made, result)
        return results
