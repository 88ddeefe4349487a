"""Where tensors lie, by onnxruntime's names of devices, and moving them from one to another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from terrazzo.chips.memory import HOST, HostMemory
from terrazzo.dtypes import as_dtype
from terrazzo.errors import ArgumentError
from terrazzo.frontends.onnx.types import dtype_of
from terrazzo.ort.providers import gpu
from terrazzo.runtime.hosted import to_numpy

CPU, CUDA = "cpu", "cuda"
KINDS = {CPU: 0, CUDA: 1, "gpu": 1}  # as OrtDevice counts them


class OrtDevice:
    """Where memory lies: on the CPU, or on a GPU."""

    def __init__(self, device_type: Any = CPU, memory_type: Any = 0, device_id: int = 0,
                 *more: Any):
        self._name = device_named(device_type, device_id)
        self._id = device_id

    @staticmethod
    def make(name: str, device_id: int = 0, *more: Any) -> OrtDevice:
        """The device of a name."""
        return OrtDevice(name, 0, device_id)

    @staticmethod
    def cpu() -> int:
        """The number of the CPU among kinds of devices."""
        return KINDS[CPU]

    @staticmethod
    def cuda() -> int:
        """The number of NVIDIA's GPUs among kinds of devices."""
        return KINDS[CUDA]

    @staticmethod
    def default_memory() -> int:
        """The number of ordinary memory."""
        return 0

    def device_type(self) -> int:
        return KINDS[self._name]

    def device_id(self) -> int:
        return self._id

    def device_mem_type(self) -> int:
        return 0


def device_named(given: Any, number: int = 0) -> str:
    """The device of a name or number of onnxruntime's; refused where it is not here."""
    name = next((n for n, kind in KINDS.items() if kind == given), str(given).lower())
    if name in (CPU, "cuda_pinned"):  # which is memory of the host's
        return CPU
    if KINDS.get(name) != KINDS[CUDA]:
        raise ArgumentError(f"there is no device {given!r}", hint="use 'cpu' or 'cuda'")
    if number != 0:
        raise ArgumentError(f"memory is on GPU 0, not on {number}",
                            hint="choose the GPU of the process with CUDA_VISIBLE_DEVICES")
    gpu().demand()
    return CUDA


def memory_of(device: str) -> HostMemory:
    """The memory of a device; that of a simulated GPU is the host's."""
    return HOST if device == CPU else gpu().memory


def element_type(given: Any) -> np.dtype[Any]:
    """A type of numpy's from one of ONNX's or numpy's."""
    return dtype_of(given).np if isinstance(given, int) else as_dtype(np.dtype(given)).np


def empty(shape: Sequence[int], kind: Any, device: str) -> Any:
    """Fresh memory on a device."""
    return memory_of(device).empty(tuple(shape), element_type(kind))


def at(pointer: int, kind: Any, shape: Sequence[int], device: str) -> Any:
    """What lies at an address of a device."""
    return memory_of(device).at(pointer, tuple(shape), element_type(kind))


def on_device(array: Any, device: str) -> Any:
    """An array or tensor where a device reads it: itself if it lies there."""
    return memory_of(device).brought(array) if device != CPU else on_host(array)


def on_host(array: Any) -> Any:
    """An array or tensor as numpy's array; what is neither stays what it is."""
    return to_numpy(array) if hasattr(array, "data_ptr") else array


def copy(source: Any, target: Any) -> None:
    """Copy contents, between devices as well."""
    if hasattr(target, "data_ptr"):
        target.copy_(memory_of(CUDA).brought(source))
    else:
        target[...] = on_host(source)
