"""Machine code in this process: loaded, with its constants in place, and ready to be called."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from terrazzo.chips.chip import Assembled
from terrazzo.chips.cpu import pool
from terrazzo.chips.cpu.description import host
from terrazzo.chips.cpu.llvm import jit
from terrazzo.chips.cpu.trampoline import python_function
from terrazzo.errors import CpuFeatureError

_EXPORTS = ("tz_run", "tz_constants", "tz_status")
_DIRECT = ("tz_call_pointers", "tz_call_numpy")


class NativeCode:
    """The functions that a module of `llvm/program.py` exports."""

    models_time = False

    def __init__(self, name: str, made: Assembled, constants: Sequence[int]):
        _check_features(name, made)
        facts = made.facts
        direct: bool = facts["direct"]
        self.allocates: bool = facts["allocates"]
        self._library = jit.load_object(made.code, pool.symbols(),
                                        _EXPORTS + (_DIRECT if direct else ()))
        # Kernels that take memory from the heap may fail to get it, and say so here.
        self._status = ctypes.c_int64.from_address(self._library.address("tz_status"))
        table = (ctypes.c_void_p * max(len(constants), 1)).from_address(
            self._library.address("tz_constants"))
        for i, address in enumerate(constants):
            table[i] = address
        pointer, i64 = ctypes.c_void_p, ctypes.c_int64
        self._run = ctypes.CFUNCTYPE(None, pointer, pointer, i64, pointer)(
            self._library.address("tz_run"))
        self.call_slots: Callable[..., Any] | None = python_function(
            self._library.address("tz_run"), 0, 4)
        self.call_pointers: Callable[..., Any] | None = None
        self.call_numpy: Callable[..., Any] | None = None
        if direct:
            slots, extra = facts["slots"], facts["dims"] + 2  # the arena and the number of threads
            self.call_pointers = python_function(
                self._library.address("tz_call_pointers"), 0, slots + extra)
            self.call_numpy = python_function(self._library.address("tz_call_numpy"), slots, extra)

    def run(self, slots: Sequence[int], arena: int, threads: int, clock: int = 0) -> None:
        """Run on addresses of inputs and outputs and then the sizes."""
        pool.sync()
        self._run((ctypes.c_int64 * len(slots))(*slots), arena, threads, clock)

    def prepare(self) -> None:
        """Let the threads know the settings."""
        pool.sync()

    def failed(self) -> bool:
        """Whether a kernel found no memory since this was last asked."""
        if not self._status.value:
            return False
        self._status.value = 0
        return True


def _check_features(name: str, made: Assembled) -> None:
    here, triple = host(), made.facts["triple"]
    if triple.split("-")[0] != here.llvm_triple.split("-")[0]:
        raise CpuFeatureError(f"{name} was compiled for {triple}, this machine is "
                              f"{here.llvm_triple}", hint="compile it on this kind of machine")
    missing = sorted(set(made.facts["features"]) - set(here.features))
    if missing:
        raise CpuFeatureError(f"{name} needs CPU features that this machine lacks: "
                              f"{', '.join(missing)}",
                              hint="compile it here, or with TZ_VECTOR_BITS set lower")
