"""Triton's side of running: the device that the CPU pretends to be.

Triton finds this module through the entry point group `triton.backends`; it must hold exactly one
concrete subclass of `DriverBase`.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

from triton.backends import compiler as triton_compiler
from triton.backends import driver as triton_driver

from terrazzo.chips.cpu.description import host, usable_cores
from terrazzo.knobs import knobs

if TYPE_CHECKING:
    from terrazzo.triton_cpu.launch.launcher import LoadedKernel


class _Event:
    """A point in time: kernels are done when their launch returns."""

    def __init__(self, enable_timing: bool = True):
        self.time = 0.0

    def record(self, *_: Any) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        """Nothing is ever under way."""

    def elapsed_time(self, end: _Event) -> float:
        return max((end.time - self.time) * 1e3, 1e-6)


class DeviceInterface:
    """As much of `torch.cuda` as Triton's benchmarks ask for."""

    Event = _Event

    @staticmethod
    def synchronize(*_: Any) -> None:
        """Nothing is ever under way."""

    @staticmethod
    def current_device() -> int:
        return 0


class _Utils:
    def get_device_properties(self, device: Any) -> dict[str, int]:
        return {"max_shared_mem": 1 << 30, "multiprocessor_count": usable_cores(),
                "max_num_regs": 1 << 16, "warpSize": 1, "sm_clock_rate": 0, "mem_clock_rate": 0,
                "mem_bus_width": 0}

    def load_binary(self, name: str, code: bytes, shared: int, device: Any
                    ) -> tuple[LoadedKernel, LoadedKernel, int, int, int]:
        """Module, function, registers, spills, threads at most: Triton wants all five."""
        from terrazzo.triton_cpu.launch.launcher import LoadedKernel

        kernel = LoadedKernel(code)
        return kernel, kernel, 1, 0, 1 << 30  # kernels that size their grid divide by it

    def unload_module(self, module: Any) -> None:
        """Code goes away with its last reference."""


def _gpu_is_there() -> bool:
    torch = sys.modules.get("torch")
    if torch is not None:
        xpu = getattr(torch, "xpu", None)
        return bool(torch.cuda.is_available() or (xpu is not None and xpu.is_available()))
    return any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))


if knobs.sanitize:  # as early as can be: outputs are made before the first launch
    from terrazzo.triton_cpu.launch import shadows

    shadows.watch()


def _launcher(src: Any, metadata: Any) -> Any:
    from terrazzo.triton_cpu.launch.launcher import CPULauncher
    from terrazzo.triton_cpu.launch.reporting import reporting

    return reporting(CPULauncher(src, metadata))


class CPUDriver(triton_driver.DriverBase):
    """The CPU as Triton's active device: one device, one stream, launches that wait."""

    def __init__(self) -> None:
        self.utils = _Utils()
        self.launcher_cls = _launcher
        self.get_current_stream = lambda device=None: 0
        self.get_device_capability = lambda device=None: (0, 0)

    def get_current_device(self) -> int:
        """Another number under the sanitizer: Triton keeps compiled kernels by their device."""
        return int(knobs.sanitize)

    def set_current_device(self, device: Any) -> None:
        """There is only one."""

    @classmethod
    def is_active(cls) -> bool:
        """Only when asked for, or when there is no GPU: exactly one driver may be active."""
        chosen = os.environ.get("TRITON_DEFAULT_BACKEND")
        return chosen == "cpu" if chosen else not _gpu_is_there()

    def map_python_to_cpp_type(self, kind: str) -> str:
        return "void*" if kind.startswith("*") else kind

    def get_current_target(self) -> Any:
        return triton_compiler.GPUTarget("cpu", host().name, 1)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_device_interface(self) -> type[DeviceInterface]:
        return DeviceInterface

    def get_benchmarker(self) -> Any:
        from triton.testing import do_bench

        return do_bench

    def get_empty_cache_for_benchmark(self) -> Any:
        import torch

        return torch.empty(host().l3_bytes or 1 << 25, dtype=torch.int8)

    def clear_cache(self, cache: Any) -> None:
        cache.zero_()
