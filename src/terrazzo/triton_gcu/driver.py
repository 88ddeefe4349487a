"""Triton's side of running: the devices of a virtual chip, their streams, and modelled time.

Triton finds this module through the entry point group `triton.backends`; it must hold exactly one
concrete subclass of `DriverBase`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from triton.backends import compiler as triton_compiler
from triton.backends import driver as triton_driver

from terrazzo.chips.gcu.library import check
from terrazzo.knobs import knobs
from terrazzo.triton_gcu.chip import description, runtime
from terrazzo.triton_gcu.streams import current_device, current_stream

if TYPE_CHECKING:
    from terrazzo.triton_gcu.launch import LoadedKernel

# What is added to the number of a device under the sanitizer, for Triton keeps compiled kernels by
# that number.
SANITIZED = 500
# And what is added where the driver of another backend was active before, or may be again.
BESIDE_ANOTHER = 1000


class Event:
    """A point in a stream's modelled time."""

    def __init__(self, enable_timing: bool = True):
        handle = ctypes.c_void_p()
        check(runtime().gcuEventCreate(ctypes.byref(handle)))
        self.handle = handle.value

    def record(self, *_: Any) -> None:
        check(runtime().gcuEventRecord(self.handle, current_stream()))

    def synchronize(self) -> None:
        check(runtime().gcuEventSynchronize(self.handle))

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds of the chip, from here to there."""
        cycles = ctypes.c_int64()
        check(runtime().gcuEventElapsedCycles(ctypes.byref(cycles), self.handle, end.handle))
        return cycles.value / description().clock_khz

    def __del__(self) -> None:
        runtime().gcuEventDestroy(self.handle)


class DeviceInterface:
    """As much of `torch.gcu` as Triton's benchmarks ask for, where there is no torch."""

    Event = Event

    @staticmethod
    def synchronize(*_: Any) -> None:
        check(runtime().gcuDeviceSynchronize())

    @staticmethod
    def current_device() -> int:
        return current_device()


def stream_cycles() -> int:
    """The modelled clock of the current stream, when all that it was given has run."""
    cycles = ctypes.c_int64()
    check(runtime().gcuStreamGetCycles(ctypes.byref(cycles), current_stream()))
    return cycles.value


def modelled_bench(call: Callable[[], Any], *, quantiles: Sequence[float] | None = None,
                   return_mode: str = "mean", **_: Any) -> Any:
    """Milliseconds that a call takes on the chip: one run tells, for all are the same."""
    begin = stream_cycles()
    call()
    taken = (stream_cycles() - begin) / description().clock_khz
    if quantiles is not None:
        return [taken] * len(quantiles)
    return [taken] if return_mode == "all" else taken


class _Utils:
    def get_device_properties(self, device: Any) -> dict[str, int]:
        chip = description()
        return {"max_shared_mem": chip.scratchpad_bytes, "multiprocessor_count": chip.units,
                "max_num_regs": 1 << 16, "warpSize": 1, "sm_clock_rate": chip.clock_khz,
                "mem_clock_rate": chip.clock_khz, "mem_bus_width": 8 * chip.memory_bytes_per_cycle}

    def load_binary(self, name: str, code: bytes, shared: int, device: Any
                    ) -> tuple[LoadedKernel, LoadedKernel, int, int, int]:
        """Module, function, registers, spills, threads at most: Triton wants all five."""
        from terrazzo.triton_gcu.launch import LoadedKernel

        kernel = LoadedKernel.load(code, name)
        return kernel, kernel, 1, 0, description().warps

    def unload_module(self, module: Any) -> None:
        """Code goes away with its last reference."""


def _launcher(src: Any, metadata: Any) -> Callable[..., None]:
    from terrazzo.triton_gcu.launch import make_launcher

    return make_launcher(src, metadata)


class GCUDriver(triton_driver.DriverBase):
    """The virtual chip as Triton's active device; its devices are numbered from `first` on."""

    wanted = False  # whether this process has chosen it (activate.py)

    def __init__(self) -> None:
        self.first = BESIDE_ANOTHER if self.wanted else 0
        self.utils = _Utils()
        self.launcher_cls = _launcher
        self.get_current_stream = lambda device=None: current_stream()
        self.get_device_capability = lambda device=None: description().capability

    def get_current_device(self) -> int:
        return self.first + current_device() + (SANITIZED if knobs.sanitize else 0)

    def set_current_device(self, device: int) -> None:
        check(runtime().gcuSetDevice((device - self.first) % SANITIZED))

    @classmethod
    def is_active(cls) -> bool:
        """Only when asked for: it is for nobody who has a real one."""
        return cls.wanted or os.environ.get("TRITON_DEFAULT_BACKEND") == "gcu"

    def map_python_to_cpp_type(self, kind: str) -> str:
        return "void*" if kind.startswith("*") else kind

    def get_current_target(self) -> Any:
        chip = description()
        return triton_compiler.GPUTarget("gcu", f"{chip.name}-{chip.fingerprint[:16]}", 1)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device(description().name, current_device())

    def get_device_interface(self) -> Any:
        """What torch has for the chip, once it has used it; else what benchmarks need of that."""
        module = getattr(sys.modules.get("torch"), description().name, None)
        return module if module is not None and module.is_initialized() else DeviceInterface

    def get_benchmarker(self) -> Any:
        return modelled_bench

    def get_empty_cache_for_benchmark(self) -> Any:
        """There are no caches that a benchmark would have to empty."""

    def clear_cache(self, cache: Any) -> None:
        """There is none."""
