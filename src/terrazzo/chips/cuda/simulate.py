"""Kernels of a GPU on this machine's CPU, by terrazzo's backend of Triton (TZ_CUDA_SIMULATE=1)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from terrazzo.base.upcalls import UPCALLS
from terrazzo.chips.chip import Assembled
from terrazzo.chips.cuda.binaries import jit_function
from terrazzo.chips.memory import HOST


class Pointer:
    """An address as Triton takes it: with the type of what lies there."""

    __slots__ = ("dtype", "place")

    def __init__(self, place: int, dtype: Any):
        self.place, self.dtype = place, dtype

    def data_ptr(self) -> int:
        return self.place


class Simulator:
    """Launches the very text that a GPU's code is compiled from."""

    def __init__(self, made: Assembled):
        self.kernels = made.facts["kernels"]

    def launch(self, kernel: int, version: int, grid: int, pointers: Sequence[int],
               sizes: Sequence[int]) -> None:
        import torch

        UPCALLS["triton_on_cpu"]()
        facts = self.kernels[kernel]
        chosen = facts["versions"][version]
        given = [Pointer(p, getattr(torch, t)) for p, t in zip(pointers, facts["types"],
                                                               strict=True)]
        jit_function(chosen["text"], facts["name"])[(grid,)](
            *given, *sizes, **chosen["constants"], num_warps=chosen["warps"])

    def room(self, size: int) -> tuple[Any, int]:
        return HOST.allocate(size)

    def to_host(self, target: int, source: int, size: int) -> None:
        ctypes.memmove(target, source, size)

    to_device = on_device = to_host

    def wait(self) -> None:
        """Launches wait for their kernels."""
