"""The device and the stream that a launch goes to."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from terrazzo.chips.gcu.library import check
from terrazzo.triton_gcu.chip import description, runtime

_thread = threading.local()


def torch_module() -> Any:
    """What torch has for the chip (`torch.gcu`), if both are loaded in this process."""
    return getattr(sys.modules.get("torch"), description().name, None)


def in_use_by_torch() -> bool:
    """Whether torch has used the device in this process: then it says what stream is current."""
    torch = torch_module()
    return torch is not None and bool(torch.is_initialized())


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
    return int(torch_module().current_stream().stream_id) if in_use_by_torch() else 0


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
