"""Memory as kernels see it: blocks of bytes at addresses, and what is copied to and from them."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

ALIGN = 64  # bytes: a cache line, and the widest vector


class Block(NamedTuple):
    """Bytes at an address, for as long as their owner lives."""

    owner: Any
    address: int


class HostMemory:
    """The memory of this process: kernels read and write arrays where they lie.

    A chip with memory of its own gives the same answers for that memory.
    """

    device = "cpu"  # as torch calls it
    keeps_blocks = True  # whether a block may serve one call after another

    def allocate(self, size: int) -> Block:
        """So many fresh bytes; MemoryError where there are none."""
        owner = aligned_bytes(size)
        return Block(owner, owner.ctypes.data)

    def address(self, array: Any) -> int:
        """Where an array or tensor of this memory begins."""
        return array.data_ptr() if hasattr(array, "data_ptr") else array.ctypes.data

    def copy_in(self, array: np.ndarray) -> Block:
        """An array of the host's in this memory."""
        return Block(array, array.ctypes.data)

    def holds(self, array: Any) -> bool:
        """Whether an array or tensor lies in this memory."""
        return True

    def brought(self, array: Any) -> Any:
        """An array or tensor in this memory: itself where it lies there."""
        return array

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A fresh array or tensor of this memory, of a type of numpy's."""
        return np.empty(shape, dtype)

    def to_host(self, array: Any) -> Any:
        """An array or tensor of this memory in that of the host."""
        return array

    def at(self, address: int, shape: tuple[int, ...], dtype: Any) -> Any:
        """What lies at an address of this memory as an array or tensor, which does not own it."""
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        raw = (ctypes.c_uint8 * size).from_address(address)
        return np.ctypeslib.as_array(raw).view(dtype).reshape(shape)

    def wait(self) -> None:
        """Wait until all that was queued here is done."""

    def copy_out(self, block: Block, array: np.ndarray) -> None:
        """Fill an array of the host's from a block."""
        if block.owner is not array:
            array.reshape(-1).view(np.uint8)[:] = block.owner[:array.nbytes]


HOST = HostMemory()


def aligned_bytes(size: int) -> np.ndarray:
    """Fresh bytes of the host's that begin at a cache line."""
    raw = np.empty(size + ALIGN, np.uint8)
    start = -raw.ctypes.data % ALIGN
    return raw[start:start + size]
