"""The devices of a described chip, as our own code uses them: memory, images, traces, time."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from terrazzo.chips.gcu.description import Description
from terrazzo.chips.gcu.library import BY_POINTERS, Record, check, library

_RECORDS = 1024  # read at a time


class Image:
    """An image that is loaded for as long as this object lives."""

    def __init__(self, code: bytes):
        self.handle = ctypes.c_void_p()
        check(library().gcuModuleLoadData(ctypes.byref(self.handle), code, len(code)))

    def function(self, name: str) -> int:
        """The handle of a function."""
        found = ctypes.c_void_p()
        check(library().gcuModuleGetFunction(ctypes.byref(found), self.handle, name.encode()))
        return found.value or 0

    def variable(self, name: str) -> int:
        """The address of a variable."""
        found = ctypes.c_void_p()
        check(library().gcuModuleGetGlobal(ctypes.byref(found), self.handle, name.encode()))
        return found.value or 0

    def __del__(self) -> None:
        if sys is not None and not sys.is_finalizing() and self.handle:
            library().gcuModuleUnload(self.handle)  # what is queued of it still runs


class Devices:
    """The runtime library, told what the chip is."""

    def __init__(self, chip: Description):
        self.chip = chip
        self.library = library()
        check(self.library.gcuConfigure(ctypes.byref(chip.c_struct())))

    def stream(self) -> int | None:
        """The current stream: torch's, once it has used this chip; None is the default one."""
        module = getattr(sys.modules.get("torch"), self.chip.name, None)
        if module is None or not module.is_initialized():
            return None
        return module.current_stream_handle()

    def allocate(self, size: int) -> int:
        """Fresh memory of the current device."""
        found = ctypes.c_void_p()
        check(self.library.gcuMalloc(ctypes.byref(found), size))
        return found.value or 0

    def free(self, address: int) -> None:
        """Give memory back, when the device is done with it."""
        if not sys.is_finalizing():
            self.library.gcuFree(address)

    def holds(self, address: int) -> bool:
        """Whether an address is memory of a device."""
        found = ctypes.c_int()
        check(self.library.gcuPointerGetDevice(ctypes.byref(found), address))
        return found.value >= 0

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy between memories, after what came before in the default stream."""
        if size:
            check(self.library.gcuMemcpy(target, source, size, BY_POINTERS))

    def cycles(self) -> int:
        """The modelled clock of the current stream, when all in it is done."""
        found = ctypes.c_int64()
        check(self.library.gcuStreamGetCycles(ctypes.byref(found), self.stream()))
        return found.value

    @contextmanager
    def traced(self) -> Iterator[list[Any]]:
        """A list that has a record of everything that ran inside, at the end.

        One may begin inside another, or inside a profile: what runs in both is in both.
        """
        records: list[Any] = []
        check(self.library.gcuDeviceSynchronize())  # what was queued before is no part of it
        check(self.library.gcuTraceStart())
        try:
            yield records
            check(self.library.gcuDeviceSynchronize())
        finally:
            check(self.library.gcuTraceStop())
            records += self._records()

    def _records(self) -> Iterator[Any]:
        room, count = (Record * _RECORDS)(), ctypes.c_int()
        while True:
            check(self.library.gcuTraceRead(room, _RECORDS, ctypes.byref(count)))
            if not count.value:
                return
            yield from (Record.from_buffer_copy(room[i]) for i in range(count.value))


@lru_cache(maxsize=1)
def devices(chip: Description) -> Devices:
    """The devices of a chip; a process has those of one chip."""
    return Devices(chip)
