"""The chip that kernels are compiled for and run on: its description, and its library."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from terrazzo.chips.gcu import library
from terrazzo.chips.gcu.description import Description, find


@cache
def description() -> Description:
    """The chip as it is described: one in a process, as the library is told of one."""
    return find()


@cache
def runtime() -> Any:
    """The runtime library, told of the chip."""
    loaded = library.library()
    library.check(loaded.gcuConfigure(ctypes.byref(description().c_struct())))
    return loaded
