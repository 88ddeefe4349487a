"""A backend of torch.distributed under the name of the device: gloo with copies there and back.

    torch.distributed.init_process_group("gcu", ...)        # or without a name: CPU tensors as well
    torch.gcu.set_device(rank)

Each rank is a process with chips of its own, so ranks meet on the host. The copies are the native
part's (`native/distributed.cpp`).

Torch asks for the backend of the accelerator where a program names none, and as soon as the native
part is loaded that is ours, in programs of the CPU too. So that choice is a group for tensors of
both (`gcu_gloo`).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from terrazzo.torch_device.build import is_whole, native
from terrazzo.torch_device.start import name, start


def register(device: str) -> None:
    """Make the backend known to torch.distributed, where torch has one that can be staged."""
    if torch.distributed.is_available() and is_whole():
        # The first that is there for a device is what torch takes where none is named.
        for kind, made, devices in ((f"{device}_gloo", _both, [device, "cpu"]),
                                    (device, _staged, [device])):
            torch.distributed.Backend.register_backend(kind, made, devices=devices)


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    made = torch.distributed.ProcessGroupGloo(store, rank, size, timeout)
    made._set_sequence_number_for_group()
    return made


def _staged(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """The backend for tensors of the device."""
    return start().staged_backend(_gloo(store, rank, size, timeout), name())


def _both(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A group, which torch takes in place of its own, with a backend for each kind of tensors."""
    kinds, gloo = torch.distributed.ProcessGroup.BackendType, _gloo(store, rank, size, timeout)
    staged = native().staged_backend(gloo, name())
    made = torch.distributed.ProcessGroup(store, rank, size)
    made._set_default_backend(kinds.GLOO)
    made._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    made._register_backend(torch.device(name()), kinds.CUSTOM, staged)
    return made


__all__ = ["register"]
