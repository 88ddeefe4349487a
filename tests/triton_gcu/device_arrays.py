"""Memory of a virtual device that Triton takes for a tensor: no torch is needed."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from terrazzo.chips.gcu.library import DEVICE_TO_HOST, HOST_TO_DEVICE, check
from terrazzo.triton_gcu.chip import runtime


class DeviceArray:
    """An array on the current device; freed with this object."""

    def __init__(self, values: np.ndarray):
        self.values = np.ascontiguousarray(values)  # type and shape; what was copied there
        self.dtype = self.values.dtype
        pointer = ctypes.c_void_p()
        check(runtime().gcuMalloc(ctypes.byref(pointer), max(self.values.nbytes, 1)))
        self.address = int(pointer.value or 0)
        check(runtime().gcuMemcpy(self.address, self.values.ctypes.data, self.values.nbytes,
                                  HOST_TO_DEVICE))

    def data_ptr(self) -> int:
        return self.address

    def numpy(self) -> np.ndarray:
        """What lies there now, when all kernels have run."""
        check(runtime().gcuDeviceSynchronize())
        out = np.empty_like(self.values)
        check(runtime().gcuMemcpy(out.ctypes.data, self.address, out.nbytes, DEVICE_TO_HOST))
        return out

    def __del__(self) -> None:
        runtime().gcuFree(self.address)


def zeros(*shape: int, dtype: Any = np.float32) -> DeviceArray:
    """An array of zeros."""
    return DeviceArray(np.zeros(shape, dtype))


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> DeviceArray:
    """An array of random numbers."""
    return DeviceArray(np.random.default_rng(seed).standard_normal(shape).astype(dtype))
