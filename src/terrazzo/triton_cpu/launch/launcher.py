"""From a compiled kernel to a running grid: the function that Triton calls for a launch."""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from terrazzo.chips.cpu import pool
from terrazzo.chips.cpu.llvm import jit
from terrazzo.chips.cpu.llvm.loops import STATUS
from terrazzo.chips.cpu.trampoline import python_function
from terrazzo.errors import ArgumentError, KernelFault
from terrazzo.knobs import knobs, thread_count
from terrazzo.triton_cpu.launch import arguments
from terrazzo.triton_cpu.launch.entry import ENTRY, MOST_WAITING
from terrazzo.triton_cpu.launch.faults import Fault, guard

SHORT = 0.1  # seconds: such a launch can be run again under the sanitizer


class LoadedKernel:
    """Machine code in this process; it stays callable for as long as this object lives."""

    def __init__(self, code: bytes):
        self.guard = guard()
        self.library = jit.load_object(
            code, pool.symbols() if self.guard is None else self.guard.symbols, (ENTRY, STATUS))
        self.span = None if self.guard is None else self.guard.watch(self.library)
        self.status = ctypes.c_int64.from_address(self.library.address(STATUS))
        self.functions: dict[int, Callable[..., Any]] = {}

    def fault(self) -> Fault | None:
        """The bad access that the last launch of this kernel made."""
        watch = self.guard
        if watch is None or self.span is None or not (
                watch.count.value != watch.taken or watch.pending):
            return None
        return watch.found(self.span)

    def function(self, arguments: int) -> Callable[..., Any]:
        """A Python function of so many integers that runs the kernel."""
        if arguments not in self.functions:
            self.functions[arguments] = python_function(
                self.library.address(ENTRY), 0, arguments)
        return self.functions[arguments]


class Launcher(ABC):
    """What Triton calls to launch a kernel; one for each compiled kernel."""

    sanitizable = True  # not under the sanitizer already, nor with more arguments than given

    def __init__(self, src: Any, metadata: Any):
        self.reports: dict[str, Any] | None = getattr(metadata, "reports", None)
        self.waits = bool(getattr(metadata, "waits", False))
        self.kernel = str(getattr(metadata, "name", ""))
        self.source = getattr(src, "fn", None)  # a kernel may come from a file of TTIR
        self.signature = dict(src.signature)

    def __call__(self, gx: int, gy: int, gz: int, stream: Any, function: Any, packed: Any,
                 launch_metadata: Any, enter: Any, leave: Any, *args: Any) -> None:
        if enter is not None:
            enter(launch_metadata)
        if gx > 0 and gy > 0 and gz > 0:
            self.launch(function, gx, gy, gz, stream, args)
        elif min(gx, gy, gz) < 0:
            raise ArgumentError(f"a kernel was launched on a grid of ({gx}, {gy}, {gz}) programs",
                                hint="sizes of a grid are zero (nothing runs) or more; "
                                     "triton.cdiv(n, BLOCK) rounds up")
        if leave is not None:
            leave(launch_metadata)

    @abstractmethod
    def launch(self, function: Any, gx: int, gy: int, gz: int, stream: Any,
               args: Sequence[Any]) -> None:
        """Run the programs of a grid that has some."""

    @abstractmethod
    def finish(self, stream: Any) -> None:
        """Wait until what was launched has run."""

    def found_again(self, grid: tuple[int, int, int], args: Sequence[Any]) -> KernelFault | None:
        """What the sanitizer says of a launch that touched memory that is not there."""
        if self.waits or not self.sanitizable or self.source is None:
            return None
        with knobs.override(sanitize=True):
            try:
                self.source.run(*args, grid=grid, warmup=False)
            except KernelFault as found:
                return found
        return None


class CPULauncher(Launcher):
    """Launches on the threads of the pool, which return when all programs have run."""

    def __init__(self, src: Any, metadata: Any):
        super().__init__(src, metadata)
        self.run, words = arguments.caller(
            list(self.signature.values()), arguments.CPU, bool(self.reports),
            "native, gx, gy, gz, threads", "native({}gx, gy, gz, threads)")
        self.count = words + 4
        self.native: Callable[..., Any] | None = None
        self.setting: int | None = None  # of knobs.threads, when the threads were last counted
        self.threads = 1

    def launch(self, function: LoadedKernel, gx: int, gy: int, gz: int, stream: Any,
               args: Sequence[Any]) -> None:
        if self.native is None:  # later ones come from the same place
            arguments.CPU.check_all(args, self.signature)
            self.native = function.function(self.count)
        if self.setting != knobs.threads:
            self.setting, self.threads = knobs.threads, thread_count()
        begin = time.perf_counter()
        programs = gx * gy * gz if self.waits else 0
        if 1 < programs <= max(MOST_WAITING, self.threads):
            with pool.crowd(programs):
                self.run(self.native, gx, gy, gz, programs, *args)
        else:
            pool.sync()
            self.run(self.native, gx, gy, gz, self.threads, *args)
        if function.status.value:
            function.status.value = 0
            raise MemoryError("a Triton kernel ran out of memory for its tiles")
        fault = function.fault()
        if fault is not None:
            raise self.explained(fault, (gx, gy, gz), args, time.perf_counter() - begin)

    def finish(self, stream: Any) -> None:
        """It has: launches wait."""

    def explained(self, fault: Fault, grid: tuple[int, int, int], args: Sequence[Any],
                  seconds: float) -> KernelFault:
        """The error for a bad access; of short launches the sanitizer finds the line."""
        found = self.found_again(grid, args) if seconds < SHORT else None
        if found is not None:
            return found
        x, y, z = grid
        programs = fault.programs(x * y * z)
        first, last = (f"({n % x}, {n // x % y}, {n // (x * y)})"
                       for n in (programs[0], programs[-1]))
        where = f"program {first}" if len(programs) == 1 else f"one of programs {first} to {last}"
        # Of addresses that no memory can have, the processor does not say which it was.
        place = f"the address {fault.address:#x}," if fault.address else "an address"
        return KernelFault(
            f"`{self.kernel}` touched {place} where there is no memory ({fault.signal}), in "
            f"{where}; what it has written is undefined",
            hint="TZ_SANITIZE=1 names the line and the index")
