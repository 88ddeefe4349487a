"""`torch.gcu`: what a program asks of the device by name, in the terms of torch.cuda.

The functions that torch has for any accelerator do the work; this module makes sure that the
device is there before (`start.py`). Torch itself calls `_lazy_init` when a tensor is first made.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from typing import Any

import torch

from terrazzo.errors import TerrazzoError
from terrazzo.torch_device import memory
from terrazzo.torch_device.build import is_whole as _is_whole
from terrazzo.torch_device.inductor import announce
from terrazzo.torch_device.memory import (
    _dump_snapshot,
    _record_memory_history,
    _snapshot,
    empty_cache,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_snapshot,
    memory_stats,
    memory_summary,
    reset_accumulated_memory_stats,
    reset_peak_memory_stats,
)
from terrazzo.torch_device.random import (
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from terrazzo.torch_device.start import is_in_bad_fork as _is_in_bad_fork
from terrazzo.torch_device.start import is_ready as is_initialized
from terrazzo.torch_device.start import name as _name
from terrazzo.torch_device.start import runtime, start
from terrazzo.torch_device.streams import (
    Event,
    Stream,
    StreamContext,
    current_stream,
    current_stream_handle,
    default_stream,
    index_of,
    set_stream,
    stream,
)


def init() -> None:
    """Build and load what the device needs; otherwise its first use does."""
    start()


def _lazy_init() -> None:
    start()


# ---------------------------------------------------------------- devices
def is_available() -> bool:
    """Whether there is a device: it is all software, so wherever there is a compiler for it."""
    announce()
    guards = sys.modules.get("torch._guards")
    if not is_initialized() and guards is not None and (
            guards.CompileContext.current_compile_id() is not None):
        return False  # dynamo asks for each graph's stream: compiling for the CPU is no first use
    try:
        if not is_initialized() and "GCU_VISIBLE_DEVICES" not in os.environ:
            return _could_be_had(_name())  # optimizers ask in each step: that is no first use
        return device_count() > 0
    except TerrazzoError:
        return False


@cache
def _could_be_had(chip: str) -> bool:
    """Whether a chip has devices, and this machine its library or a compiler for it."""
    from terrazzo.chips.gcu.build import is_there_or_can_be
    from terrazzo.chips.gcu.description import find

    return is_there_or_can_be() and find(chip).devices > 0


def device_count() -> int:
    """How many devices there are: as described, or those that GCU_VISIBLE_DEVICES names."""
    from terrazzo.chips.gcu.library import check

    count = ctypes.c_int()
    check(runtime()[1].gcuGetDeviceCount(count))
    return count.value


def current_device() -> int:
    """The number of the device that work of this thread is given to."""
    start()
    return torch.accelerator.current_device_index()


def set_device(device: Any) -> None:
    """Give work of this thread to another device."""
    torch.accelerator.set_device_index(index_of(device))


def synchronize(device: Any = None) -> None:
    """Wait for all work of a device."""
    torch.accelerator.synchronize(index_of(device))


class device:
    """The current device for the length of a `with`; of None and negative ones nothing changes."""

    def __init__(self, device: Any):
        self.index = -1 if device is None else index_of(device)
        self.before = -1

    def __enter__(self) -> None:
        if self.index >= 0:
            self.before = current_device()
            set_device(self.index)

    def __exit__(self, *_: Any) -> None:
        if self.before >= 0:
            set_device(self.before)


class device_of(device):
    """The device of a tensor as the current one; of tensors elsewhere nothing changes."""

    def __init__(self, tensor: Any):
        here = tensor.device.type == _name()
        super().__init__(tensor.get_device() if here else None)


def get_device_properties(device: Any = None) -> Any:
    """What is known of a device: name, memory, units, clock, launch rule."""
    from terrazzo.torch_device.properties import properties_of

    return properties_of(_name(), index_of(device))


def get_device_name(device: Any = None) -> str:
    """The name of a device, for people."""
    return str(get_device_properties(device).name)


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """The capability of a device, two numbers."""
    found = get_device_properties(device)
    return found.major, found.minor


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The types that autocast may choose."""
    return [torch.float16, torch.bfloat16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Whether there are bfloat16 numbers: always."""
    return True


# ---------------------------------------------------------------- torch.compile
def __getattr__(asked: str) -> Any:
    """What Inductor asks for when it is about to generate code: loaded then."""
    if asked in ("Scheduling", "PythonWrapperCodegen") and _is_whole():
        from terrazzo.torch_device.inductor import backend

        return getattr(backend, asked)
    raise AttributeError(f"module {__name__!r} has no attribute {asked!r}")


# ---------------------------------------------------------------- what runs on the CPU
def fallbacks() -> dict[str, int]:
    """Operators that had no code for the device and so ran on the CPU, with how often."""
    if not is_initialized():
        return {}
    return dict(sorted(start().fallbacks().items(), key=lambda found: -found[1]))


def reset_fallbacks() -> None:
    """Count from zero."""
    if is_initialized():
        start().reset_fallbacks()


__all__ = [
    "init", "is_initialized", "is_available", "device_count", "current_device", "set_device",
    "synchronize", "device", "device_of", "get_device_properties", "get_device_name",
    "get_device_capability", "get_amp_supported_dtype", "is_bf16_supported",
    "Event", "Stream", "StreamContext", "current_stream", "current_stream_handle",
    "default_stream", "set_stream", "stream",
    "empty_cache", "max_memory_allocated", "max_memory_reserved", "mem_get_info",
    "memory", "memory_allocated", "memory_reserved", "memory_snapshot", "memory_stats",
    "memory_summary",
    "reset_accumulated_memory_stats", "reset_peak_memory_stats",
    "get_rng_state", "get_rng_state_all", "initial_seed", "manual_seed", "manual_seed_all", "seed",
    "seed_all", "set_rng_state", "set_rng_state_all", "fallbacks", "reset_fallbacks",
    "_dump_snapshot", "_is_in_bad_fork", "_lazy_init", "_record_memory_history", "_snapshot",
]
