"""Arrays that end or begin where memory does: whatever reads past them ends the process."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np

ROOM = 1 << 20  # bytes of one place; larger arrays stay where they are


class PageEdges:
    """Places in memory, each with a page before and behind it that nobody may touch."""

    def __init__(self) -> None:
        self.places: list[mmap.mmap] = []  # kept, because arrays are made of them

    def copy(self, number: int, array: Any, *, begin: bool = False) -> Any:
        """A copy of an array up to the very end of a place, until the place is used again.

        Or from its very beginning on.
        """
        if not 0 < array.nbytes <= ROOM:
            return array
        while len(self.places) <= number:
            self.places.append(self.new())
        start = mmap.PAGESIZE + (0 if begin else ROOM - array.nbytes)
        copied = np.frombuffer(self.places[number], array.dtype, array.size, start).reshape(
            array.shape)
        copied[...] = array
        return copied

    @staticmethod
    def new() -> mmap.mmap:
        memory = mmap.mmap(-1, ROOM + 2 * mmap.PAGESIZE)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for edge in (begin, begin + mmap.PAGESIZE + ROOM):
            if protect(edge, mmap.PAGESIZE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        return memory
