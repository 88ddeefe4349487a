"""The chip that kernels are compiled for and run on: its description, and its devices."""

from __future__ import annotations

from functools import cache
from typing import Any

from terrazzo.chips.gcu.description import Description, find
from terrazzo.chips.gcu.device import Devices, devices
from terrazzo.knobs import described_chip


@cache
def description() -> Description:
    """The chip as it is described: one in a process, torch's where that has been named."""
    return find(described_chip())


@cache
def chip_devices() -> Devices:
    """The devices of the chip."""
    return devices(description())


@cache
def runtime() -> Any:
    """The runtime library, told of the chip."""
    return chip_devices().library
