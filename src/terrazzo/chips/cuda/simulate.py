"""Kernels of a GPU on this machine's CPU, by terrazzo's backend of Triton (TZ_CUDA_SIMULATE=1)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from terrazzo.base.upcalls import UPCALLS
from terrazzo.chips.chip import Assembled
from terrazzo.chips.cuda.binaries import jit_function
from terrazzo.chips.cuda.native import Loaded
from terrazzo.chips.memory import HOST
from terrazzo.errors import DeviceError

_LAUNCHER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p,
                             ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)
_FAILED = 999  # the driver's "unknown error"
_SCRATCH = 64  # bytes a program that are asked for and never used


class Pointer:
    """An address as Triton takes it: with the type of what lies there."""

    __slots__ = ("dtype", "place")

    def __init__(self, place: int, dtype: Any):
        self.place, self.dtype = place, dtype

    def data_ptr(self) -> int:
        return self.place


class Repeated:
    """Launches with the addresses that they had."""

    def __init__(self, simulator: Simulator, launch: Callable[[int], int]):
        self.simulator, self.launch = simulator, launch

    def play(self, stream: int) -> None:
        self.simulator.require(self.launch(stream))


class Simulator:
    """Launches the very text that a GPU's code is compiled from."""

    number = 0

    def __init__(self, made: Assembled):
        self.kernels = made.facts["kernels"]
        # A version is known to native code by its place in this list, and stands for one that
        # Triton gives two pointers of its own, as it does on GPUs.
        self.versions = [(k, v) for k, facts in enumerate(self.kernels)
                         for v in range(len(facts["versions"]))]
        self.loaded: Sequence[Sequence[Loaded]] = [
            [Loaded(self.versions.index((k, v)), 32 * version["warps"], 0, _SCRATCH, 2)
             for v, version in enumerate(facts["versions"])]
            for k, facts in enumerate(self.kernels)]
        self._entry = _LAUNCHER(self.launch_as_the_driver)
        self.launcher: int = ctypes.cast(self._entry, ctypes.c_void_p).value or 0

    def stream(self, number: int, /) -> int:
        """Nothing is queued."""
        return 0

    def launch_as_the_driver(self, function: int | None, grid: int, *rest: Any) -> int:
        """What native code calls in the place of cuLaunchKernel."""
        kernel, version = self.versions[function or 0]
        facts = self.kernels[kernel]
        pointers, sizes = len(facts["types"]), len(facts["dims"])
        values = [ctypes.c_int64.from_address(rest[-2][i]).value
                  for i in range(pointers + sizes + 2)]
        if values[-2] % _SCRATCH or values[-1]:
            return _FAILED
        try:
            self.launch(kernel, version, grid, values[:pointers], values[pointers:-2])
        except Exception:  # an error cannot pass native code; step by step it shows again
            return _FAILED
        return 0

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

    def require(self, status: int) -> None:
        if status:
            raise DeviceError(f"a simulated launch failed ({status})")

    def record(self, launch: Callable[[int], int]) -> Repeated:
        return Repeated(self, launch)

    def after(self, stream: int) -> None:
        """There is one stream."""

    def room(self, size: int) -> tuple[Any, int]:
        return HOST.allocate(size)

    def to_host(self, target: int, source: int, size: int) -> None:
        ctypes.memmove(target, source, size)

    to_device = on_device = to_host

    def wait(self) -> None:
        """Launches wait for their kernels."""
