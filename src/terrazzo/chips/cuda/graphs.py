"""CUDA graphs: all launches of an executable recorded once, and repeated in one call.

A recording holds addresses. Arrays that all lie where those of an earlier call did are used in
place, with a recording of their own. Else those that have never moved (weights) are used in place,
and all others copied into memory that is kept for this, and results out of it; where that takes
longer than to launch, kernels are launched. So most calls are a look into a table and one call of
the driver.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from operator import itemgetter
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
_OFTEN = 32  # calls at some addresses that are worth a recording in the place of another
_MOST_SEEN = 256  # calls whose addresses are remembered
_MOST_SIZES = 32  # combinations of sizes that memory is kept for
_COPIED = 8 << 20  # bytes that a GPU copies (at 4 TB/s) while the host launches a kernel (5 us)

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
        self._lock = threading.Lock()  # arrays of the host go through memory that is kept

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
            return self._of(sizes).on_arrays(inputs, targets)

    def on_addresses(self, sizes: Sequence[int]) -> Callable[[Addresses], None]:
        """What runs on row major memory of the chip's, by the addresses of inputs and outputs.

        Outputs are apart from inputs, or lie where the executable may write over one.
        """
        with self._lock:
            return self._of(tuple(sizes)).run

    def again(self, arrays: Sequence[Any], into: Sequence[Any], threads: int = 0
              ) -> Callable[[], None] | None:
        """As `Executable.again` does: by the recording for these addresses, once there is one."""
        kept = self._kept.get(tuple(self.executable.bind(arrays)))
        places = (*addresses_of(arrays), *addresses_of(into))
        if kept is None or places not in kept.recordings:
            return None

        def run() -> None:
            claim(into, self.executable.name)
            kept.run(places)

        return run

    def _of(self, sizes: Addresses) -> Kept:
        if sizes not in self._kept:
            if len(self._kept) >= _MOST_SIZES:
                self._kept.pop(next(iter(self._kept)))
            self._kept[sizes] = Kept(self.executable, self.code, sizes)
        return self._kept[sizes]


class Kept:
    """What calls of the same sizes share: memory, and recordings by addresses."""

    def __init__(self, executable: Executable, code: Launched, sizes: Addresses):
        self.executable, self.code, self.sizes = executable, code, sizes
        self.device, self.stream_of = code.device, code.device.stream
        self.memory = executable.chip.memory
        self.prepared = code.prepared(sizes)
        self.arena = executable.take_arena(executable.arena_size(sizes))
        self.room = self.device.room(self.prepared.room)
        self.lock = threading.Lock()  # calls share memory that is kept
        self.stream: int | None = None  # where the last call was queued
        self.recordings: dict[Addresses, Recording] = {}
        self.seen: dict[Addresses, int] = {}  # how often
        self.last: Addresses | None = None  # those of the last call that was not repeated
        self.copied: dict[int, tuple[Any, int]] = {}  # memory for what moves from call to call
        self.still: Callable[[Addresses], Any] = tuple  # the addresses that do not
        self.base: Addresses | None = None  # those with copies in the place of what moves
        self.arrays: dict[int, Any] = {}  # for those of the host

    # ------------------------------------------------------------ by addresses
    def run(self, places: Addresses) -> None:
        """Everything, reading and writing at these addresses."""
        found = self.recordings.get(places)
        with self.lock:
            stream = self.stream_of(self.device.number)
            if stream != self.stream:
                self._come_after(stream)
            if found is not None:
                found.play(stream)
            else:
                self._run_anew(places, stream)

    def _come_after(self, stream: int) -> None:
        """Calls queue in one order, also where they come from different streams."""
        if self.stream is not None:
            self.device.after(self.stream)
        self.stream = stream

    def _run_anew(self, places: Addresses, stream: int) -> None:
        if self._comes_again(places):
            self._record(places)
        elif self._stays(places) and self._pays():
            self._run_on_copies(places, stream)
        else:
            self._launch(places)

    def _comes_again(self, places: Addresses) -> bool:
        """Whether to record for these addresses: not for ever more, that takes longer than copies.
        """
        if any(place % ALIGN for place in places):
            return False
        times = self.seen.pop(places, 0)
        full = len(self.recordings) - (self.base in self.recordings) >= _MOST_IN_PLACE
        if times >= (_OFTEN if full else 1):
            if full:
                self.recordings.pop(next(p for p in self.recordings if p != self.base))
            return True
        if len(self.seen) >= _MOST_SEEN:
            self.seen.pop(next(iter(self.seen)))
        self.seen[places] = times + 1
        return False

    def _stays(self, places: Addresses) -> bool:
        """Whether nothing lies elsewhere than in the last call but what is copied anyway."""
        if self.base is not None and self.still(places) == self.still(self.base):
            return True
        before, self.last = self.last, places
        if before is None:
            return False
        moved = [i for i, (now, then) in enumerate(zip(places, before, strict=True))
                 if i not in self.copied and (now != then or now % ALIGN)]
        for i in moved:
            self.copied[i] = self.device.room(self.bytes[i])
        if self.base is not None:
            self.recordings.pop(self.base, None)
        self.base = tuple(self.copied[i][1] if i in self.copied else n
                          for i, n in enumerate(places))
        others = [i for i in range(len(places)) if i not in self.copied]
        self.still = itemgetter(*others) if others else _nothing
        return True

    def _pays(self) -> bool:
        """Whether to copy what moves takes less than to launch all kernels."""
        return len(self.copied) + sum(map(self.bytes.__getitem__, self.copied)) // _COPIED <= (
            self.prepared.launches)

    @cached_property
    def bytes(self) -> list[int]:
        """How large inputs and outputs are."""
        values = {d.name: n for d, n in zip(self.executable.dims, self.sizes, strict=True)}
        found = []
        for dtype, shape in (*(i[1:] for i in self.executable.input_types),
                             *self.executable.output_types):
            size = dtype.itemsize
            for n in shape:
                size *= int(evaluate(n, values))
            found.append(size)
        return found

    def _run_on_copies(self, places: Addresses, stream: int) -> None:
        inputs, base = len(self.executable.input_types), self.base
        assert base is not None
        for i, (_, own) in self.copied.items():
            if i < inputs:
                self.device.on_device(own, places[i], self.bytes[i])
        if base in self.recordings:
            self.recordings[base].play(stream)
        else:
            self._record(base)
        for i, (_, own) in self.copied.items():
            if i >= inputs:
                self.device.on_device(places[i], own, self.bytes[i])

    def _launch(self, places: Addresses) -> None:
        assert self.code.call_pointers is not None
        self.code.call_pointers(*places, *self.sizes, self.arena.address, 1)

    def _record(self, places: Addresses) -> None:
        """Launch, and record it for the next time."""
        # In this order: what a driver loads late it cannot load while it records.
        self._launch(places)
        table, arena, room = self.prepared.table.address, self.arena.address, self.room[1]
        self.recordings[places] = self.device.record(
            lambda stream: native.launch()(table, *places, arena, room, stream))

    # ------------------------------------------------------------ on arrays
    def on_arrays(self, inputs: Sequence[Any], targets: Sequence[Any]) -> list[Any]:
        """The results in targets, or in arrays of the caller's own; inputs are row major."""
        here = not inputs or any(map(self.memory.holds, inputs))
        stream = self.stream_of(self.device.number)
        if stream != self.stream:
            with self.lock:
                self._come_after(stream)
        read = [a if self.memory.holds(a) else self._brought(i, a) for i, a in enumerate(inputs)]
        like = next((a for a in inputs if hasattr(a, "data_ptr") and (
            not here or self.memory.holds(a))), None)
        to_host = not here and all(t is None for t in targets)
        fresh = [None] * len(targets) if to_host else self.executable.allocate(self.sizes, like)
        results = [f if t is None else t for f, t in zip(fresh, targets, strict=True)]
        written = [r if self._is_direct(r, () if r is f else read) else self._array(len(inputs) + i)
                   for i, (r, f) in enumerate(zip(results, fresh, strict=True))]
        self.run((*addresses_of(read), *addresses_of(written)))
        if to_host:
            back = [self.memory.to_host(o) for o in written]
            return back if like is not None else [to_numpy(o) for o in back]
        for made, result in zip(written, results, strict=True):
            if made is not result:
                copy(made, result)
        return results

    def _brought(self, number: int, array: Any) -> Any:
        """A copy of an input of the host's, always in the same memory."""
        target = self._array(number)
        copy(array, target)
        return target

    def _array(self, number: int) -> Any:
        """Memory for an input or output that lies elsewhere."""
        if number not in self.arrays:
            executable = self.executable
            values = {d.name: n for d, n in zip(executable.dims, self.sizes, strict=True)}
            types = [*(i[1:] for i in executable.input_types), *executable.output_types]
            dtype, shape = types[number]
            self.arrays[number] = self.memory.empty(
                tuple(int(evaluate(n, values)) for n in shape), dtype.np)
        return self.arrays[number]

    def _is_direct(self, target: Any, inputs: Sequence[Any]) -> bool:
        """Whether kernels may write where a target lies."""
        if target is None or not self.memory.holds(target) or not is_row_major(target):
            return False
        (begin, *begins) = addresses_of([target, *inputs])
        return not begin % ALIGN and not any(
            at < begin + target.nbytes and begin < at + a.nbytes
            for at, a in zip(begins, inputs, strict=True))


def _nothing(places: Addresses) -> Addresses:
    return ()
