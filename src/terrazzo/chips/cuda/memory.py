"""The GPU's memory, which is torch's: its allocator knows streams, and tensors are the arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from terrazzo.chips.memory import Block, HostMemory
from terrazzo.dtypes import as_dtype


class _Raw:
    """Bytes at an address, by the protocol that torch reads memory of other libraries with."""

    def __init__(self, address: int, size: int):
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "strides": None,
                                         "data": (address, False), "version": 3}


class DeviceMemory(HostMemory):
    """Memory of the current GPU."""

    device = "cuda"
    keeps_blocks = False  # torch's allocator does, and knows which stream a block belongs to

    def allocate(self, size: int) -> Block:
        import torch

        try:
            owner = torch.empty(size, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from None
        return Block(owner, owner.data_ptr())

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        from terrazzo.runtime.executable import empty

        return empty(shape, as_dtype(dtype), self)

    def to_host(self, array: Any) -> Any:
        return array.cpu()

    def at(self, address: int, shape: tuple[int, ...], dtype: Any) -> Any:
        import torch

        kind = as_dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        if size == 0:
            return self.empty(shape, dtype)
        owner = torch.as_tensor(_Raw(address, size), device=self.device)
        return owner.view(getattr(torch, kind.name)).view(shape)

    def wait(self) -> None:
        import torch

        torch.cuda.current_stream().synchronize()

    def copy_in(self, array: np.ndarray) -> Block:
        import torch

        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        owner = torch.empty(max(data.size, 1), dtype=torch.uint8, device=self.device)
        owner[:data.size].copy_(torch.from_numpy(data.copy()))
        return Block(owner, owner.data_ptr())

    def copy_out(self, block: Block, array: np.ndarray) -> None:
        array.reshape(-1).view(np.uint8)[:] = block.owner[:array.nbytes].cpu().numpy()

    def holds(self, array: Any) -> bool:
        return getattr(getattr(array, "device", None), "type", "") == self.device

    def brought(self, array: Any) -> Any:
        from terrazzo.runtime.hosted import to_torch

        if self.holds(array):
            return array
        tensor = array.detach() if hasattr(array, "data_ptr") else to_torch(np.asarray(array))
        return tensor.to(self.device)
