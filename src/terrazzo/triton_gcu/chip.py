"""The chip that kernels are compiled for and run on: its description, and its library."""

from __future__ import annotations

from functools import cache
from typing import Any

from terrazzo.chips.gcu.description import Description, find
from terrazzo.chips.gcu.device import devices


@cache
def description() -> Description:
    """The chip as it is described: one in a process, as the library is told of one."""
    return find()


@cache
def runtime() -> Any:
    """The runtime library, told of the chip."""
    return devices(description()).library
