"""The device as dynamo and Inductor ask for it: its number, streams, properties."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo import trace_rules
from torch._dynamo.device_interface import DeviceInterface, register_interface_for_device

from terrazzo.chips.gcu.description import find
from terrazzo.torch_device import module
from terrazzo.torch_device.start import name


def set_device(device: Any) -> None:
    """Give work of this thread to another device; of negative numbers nothing changes."""
    if not isinstance(device, int) or device >= 0:
        module.set_device(device)


def exchange_device(device: int) -> int:
    """Go to another device; gives the number of the one before, -1 where nothing changes."""
    if device < 0:
        return -1
    before = module.current_device()
    if before != device:
        module.set_device(device)
    return before


def raw_stream(device: Any = None) -> int:
    """The handle of the current stream of a device; 0 is its default one."""
    return torch.accelerator.current_stream(device).stream_id


def triton_target(device: Any = None) -> str:
    """What Triton's target is named by, so that compilers in other processes make the same."""
    from terrazzo.triton_gcu.driver import GCUDriver

    return str(GCUDriver().get_current_target().arch)


@dataclass(frozen=True)
class Properties:
    """What Inductor decides by. It knows GPUs: the last two are not of the chip (a program has one
    warp of one thread) but say how it is to split reductions, which it computes from them: into
    pieces of at least 32 elements, and into as many as there are units where these are larger.
    Of warps of one it would make pieces of four, and then fail for their smallness.
    """

    name: str
    major: int
    minor: int
    multi_processor_count: int
    warp_size: int = 8
    max_threads_per_multi_processor: int = 128


def properties(device: Any = None) -> Properties:
    """The properties of a device for Inductor's decisions."""
    found = module.get_device_properties(device)
    return Properties(found.name, found.major, found.minor, found.multi_processor_count)


class Worker:
    """What processes that compile kernels ask: they must not touch the device."""

    set_device = staticmethod(set_device)
    current_device = staticmethod(module.current_device)
    get_device_properties = staticmethod(properties)


class Interface(DeviceInterface):
    """The functions of `torch.gcu`, by the names that dynamo has for them."""

    device = module.device
    Event = module.Event
    Stream = module.Stream
    Worker = Worker

    current_device = staticmethod(module.current_device)
    set_device = staticmethod(set_device)
    exchange_device = staticmethod(exchange_device)
    maybe_exchange_device = staticmethod(exchange_device)
    device_count = staticmethod(module.device_count)
    is_available = staticmethod(module.is_available)
    stream = staticmethod(module.stream)
    current_stream = staticmethod(module.current_stream)
    set_stream = staticmethod(module.set_stream)
    get_raw_stream = staticmethod(raw_stream)
    synchronize = staticmethod(module.synchronize)
    get_device_properties = staticmethod(properties)
    get_compute_capability = staticmethod(triton_target)
    memory_allocated = staticmethod(module.memory_allocated)

    @staticmethod
    def _set_stream_by_id(stream_id: int, device_index: int, device_type: int) -> None:
        module.set_stream(module.Stream(stream_id=stream_id, device_index=device_index,
                                        device_type=device_type))

    @staticmethod
    def is_bf16_supported(including_emulation: bool = False) -> bool:
        return True

    @staticmethod
    def is_triton_capable(device: Any = None) -> bool:
        return True

    @staticmethod
    def raise_if_triton_unavailable(device: Any = None) -> None:
        """The backend is part of us: where it cannot be imported, that tells why."""
        import terrazzo.triton_gcu.compiler  # noqa: F401


def register() -> None:
    """Tell dynamo of the device, and of each by its number; our own code it need not trace.

    Numbers are those that are described, seen or not: counting takes the runtime library, which a
    process that compiles for the CPU has no use for and may have to build.
    """
    trace_rules.add("terrazzo.torch_device")
    # Inductor writes cuda for hip before it asks, also in the middle of a name such as mychip.
    for known in {name(), name().replace("hip", "cuda")}:
        register_interface_for_device(known, Interface)
        for index in range(find(name()).devices):
            register_interface_for_device(f"{known}:{index}", Interface)
