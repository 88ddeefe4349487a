"""The device and the stream that a launch goes to."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from terrazzo.chips.gcu.library import check
from terrazzo.triton_gcu.chip import chip_devices, runtime

_thread = threading.local()


def current_device() -> int:
    """The device that this thread works with."""
    number = ctypes.c_int()
    check(runtime().gcuGetDevice(ctypes.byref(number)))
    return number.value


def current_stream() -> int:
    """The handle of the stream that this thread works with; 0 is the device's default one."""
    aside: int | None = getattr(_thread, "aside", None)
    if aside is not None:
        return aside
    return chip_devices().stream() or 0


@contextmanager
def another_stream() -> Iterator[None]:
    """Launches go to a stream of their own: where one has failed, nothing runs in it any more."""
    handle = ctypes.c_void_p()
    check(runtime().gcuStreamCreate(ctypes.byref(handle)))
    _thread.aside = handle.value
    try:
        yield
    finally:
        _thread.aside = None
        runtime().gcuStreamDestroy(handle)
