"""Memory of a described chip: torch's tensors of the device, or numpy arrays over its addresses.

What the library allocates lies in this process, in a range of its own, so an array can show it;
the library alone may be asked to move it.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from typing import Any

import numpy as np

from terrazzo.chips.gcu.description import Description
from terrazzo.chips.memory import Block, HostMemory


class DeviceMemory(HostMemory):
    """Memory of the current device."""

    def __init__(self, chip: Description):
        self.chip, self.device = chip, chip.name

    @property
    def keeps_blocks(self) -> bool:  # type: ignore[override]
        return self._torch() is None  # whose allocator keeps them, and knows streams

    def _torch(self) -> Any:
        """torch, where this chip is its device."""
        torch = sys.modules.get("torch")
        return torch if torch is not None and hasattr(torch, self.device) else None

    def allocate(self, size: int) -> Block:
        owner = self.empty((size,), np.dtype(np.uint8))
        return Block(owner, self.address(owner))

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A fresh array: a tensor of torch's where this chip is its device."""
        from terrazzo.chips.gcu.device import devices

        torch = self._torch()
        if torch is not None:
            from terrazzo.dtypes import as_dtype

            return torch.empty(shape, dtype=getattr(torch, as_dtype(dtype).name),
                               device=self.device)
        size = int(np.prod(shape)) * dtype.itemsize
        address = devices(self.chip).allocate(max(size, 1))
        room = (ctypes.c_char * size).from_address(address)
        weakref.finalize(room, devices(self.chip).free, address)
        return np.frombuffer(room, dtype).reshape(shape)

    def copy_in(self, array: np.ndarray) -> Block:
        owner = self.brought(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        return Block(owner, self.address(owner))

    def copy_out(self, block: Block, array: np.ndarray) -> None:
        array.reshape(-1).view(np.uint8)[:] = self.to_host(block.owner[:array.nbytes])

    def holds(self, array: Any) -> bool:
        if hasattr(array, "data_ptr"):
            return str(array.device.type) == self.device
        from terrazzo.chips.gcu.device import devices

        return bool(array.nbytes) and devices(self.chip).holds(array.ctypes.data)

    def brought(self, array: Any) -> Any:
        from terrazzo.chips.gcu.device import devices

        if self.holds(array):
            return array
        torch = self._torch()
        if torch is not None:
            from terrazzo.runtime.hosted import to_torch

            tensor = array.detach() if hasattr(array, "data_ptr") else to_torch(np.asarray(array))
            return tensor.to(self.device)
        array = np.ascontiguousarray(array).reshape(np.shape(array))
        made = self.empty(array.shape, array.dtype)
        devices(self.chip).copy(made.ctypes.data, array.ctypes.data, array.nbytes)
        return made

    def to_host(self, array: Any) -> Any:
        """The values of one of this memory's arrays in an array or tensor of the host's."""
        from terrazzo.chips.gcu.device import devices

        if hasattr(array, "data_ptr"):
            return array.cpu()
        made = np.empty(array.shape, array.dtype)
        devices(self.chip).copy(made.ctypes.data, array.ctypes.data, made.nbytes)
        return made
