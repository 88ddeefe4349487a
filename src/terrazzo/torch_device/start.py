"""The first use of the device: the native part, the runtime library, and what waited for them."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from terrazzo.errors import DeviceError
from terrazzo.knobs import knobs
from terrazzo.torch_device import build

_lock = threading.RLock()
_waiting: list[Callable[[], None]] = []  # what was asked for before there was a device
_forked = False


def name() -> str:
    """What torch calls the device."""
    found: str = torch._C._get_privateuse1_backend_name()
    return found


@cache
def runtime() -> tuple[Path, Any]:
    """The runtime library for the chip of that name: its file, and itself as Python calls it."""
    from terrazzo.chips.gcu.description import find
    from terrazzo.chips.gcu.library import SIGNATURES, check, library, library_path

    described = ctypes.pointer(find(name()).c_struct())
    check(library().gcuConfigure(ctypes.cast(described, SIGNATURES["gcuConfigure"][0])))
    return library_path(), library()


def is_ready() -> bool:
    """Whether the device has been used."""
    return build.is_loaded() and build.native().is_ready()


def is_in_bad_fork() -> bool:
    """Whether this process was forked from one that had used the device."""
    return _forked


def start() -> ModuleType:
    """The native part with the device behind it; builds what has to be built."""
    if build.is_loaded() and build.native().is_ready() and not _forked:
        return build.native()
    with _lock:
        if _forked:
            raise DeviceError(  # in the words that torch has for it
                f"Cannot re-initialize {name()} in forked subprocess. To use {name()} with "
                "multiprocessing, you must use the 'spawn' start method")
        late = not build.is_loaded()
        native = build.native()
        if not native.is_ready():
            native.load(str(runtime()[0]))
            if late:
                native.start_autograd()
            native.forbid_fallbacks(knobs.gcu_fallback == "error")
            from terrazzo.torch_device import operators

            operators.register(native)
            os.register_at_fork(after_in_child=_after_fork)
            while _waiting:
                _waiting.pop(0)()
    return native


def when_ready(action: Callable[[], None]) -> None:
    """Do something now, or when the device is first used."""
    with _lock:
        if not is_ready():
            _waiting.append(action)
            return
    action()


def _after_fork() -> None:
    global _forked
    _forked = True


__all__ = ["is_in_bad_fork", "is_ready", "name", "start", "when_ready"]
