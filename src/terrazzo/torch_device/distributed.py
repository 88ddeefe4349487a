"""A backend of torch.distributed under the name of the device: gloo with copies there and back.

    torch.distributed.init_process_group("gcu", ...)        # or without a name: CPU tensors by gloo
    torch.gcu.set_device(rank)

Each rank is a process with chips of its own, so ranks meet on the host. The copies are the native
part's (`native/distributed.cpp`).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from terrazzo.torch_device.build import is_whole
from terrazzo.torch_device.start import name, start


def register(device: str) -> None:
    """Make the backend known to torch.distributed, where torch has one that can be staged."""
    if torch.distributed.is_available() and is_whole():
        torch.distributed.Backend.register_backend(device, _group, devices=[device])


def _group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    made = torch.distributed.ProcessGroupGloo(store, rank, size, timeout)
    made._set_sequence_number_for_group()
    return start().staged_backend(made, name())


__all__ = ["register"]
