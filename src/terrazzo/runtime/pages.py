"""Large pages for the largest results.

From 32 MB on glibc maps every allocation anew, and the kernel clears it page by page as it is first
written: 16,000 faults for 64 MB, which take eight times as long as writing does. In pages of 2 MB
they take as long as writing. Numpy asks for such pages itself, torch does not.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from functools import cache

FRESH = 32 << 20  # bytes; glibc's largest threshold for mapping blocks of memory by themselves
_PAGE = 1 << 21


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux") or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    call = ctypes.CDLL(None).madvise
    call.argtypes, call.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return call


def ask_for_large_pages(address: int, size: int) -> None:
    """Say that fresh memory is about to be written from end to end; a kernel may refuse."""
    madvise = _madvise()
    start, end = -(-address // _PAGE) * _PAGE, (address + size) // _PAGE * _PAGE
    if madvise is not None and start < end:
        madvise(start, end - start, mmap.MADV_HUGEPAGE)
