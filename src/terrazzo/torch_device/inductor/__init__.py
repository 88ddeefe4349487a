"""The device for `torch.compile`: Inductor writes Triton, the Triton backend `gcu` compiles it.

Everything goes through what torch has for devices that it does not know; nothing of it is replaced.
Importing dynamo and Inductor takes seconds, so that they are told only when a program has imported
them, by what torch asks of `torch.gcu` while it compiles:

| torch asks | we register |
|---|---|
| `is_available()`, whenever it makes fake tensors | the interface (`interface.py`), the name |
| `Scheduling`, when Inductor is about to lower | the rest (`backend.py`) |

| file | what it does |
|---|---|
| `interface` | the device as dynamo sees it: streams, properties, guards |
| `backend` | kernels, wrappers and benchmarks: what Inductor generates for the device |
| `heuristics` | block sizes, for generated kernels |
| `operators` | operators that only our graphs have |
| `products` | matrix products: a template, with blocks for the matrix unit |
| `convolutions`, `convolution_templates` | convolutions and their gradients: implicit products |
| `pooling` | gradients of max pools, without additions at places that data decides |
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from terrazzo.torch_device.build import is_whole
from terrazzo.torch_device.start import name

_told: set[str] = set()


def announce() -> None:
    """Tell dynamo and Inductor that the device is there, if a program has imported them."""
    if len(_told) == 2:
        return
    dynamo = sys.modules.get("torch._dynamo.device_interface")
    if "interface" not in _told and hasattr(dynamo, "init_device_reg"):  # the last that it defines
        _told.add("interface")
        from terrazzo.torch_device.inductor import interface

        interface.register()
    kinds = getattr(sys.modules.get("torch._inductor.utils"), "GPU_TYPES", None)
    if kinds is not None:  # without it, a number times a tensor may become a kernel of the CPU
        _told.add("kind")
        if name() not in kinds and is_whole() and not _others(kinds):
            kinds.append(name())


def _others(kinds: Sequence[str]) -> bool:
    """Whether there is another accelerator: Inductor compiles for one in a process."""
    return any(getattr(torch, kind).is_available() for kind in kinds if hasattr(torch, kind))


__all__ = ["announce"]
