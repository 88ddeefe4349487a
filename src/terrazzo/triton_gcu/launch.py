"""Images in the runtime library, and launches of their kernels on a stream."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from triton.runtime.errors import OutOfResources

from terrazzo.chips.gcu.library import ERRORS, GcuError, check
from terrazzo.errors import KernelFault
from terrazzo.knobs import knobs
from terrazzo.triton_cpu.launch import arguments
from terrazzo.triton_cpu.launch.launcher import Launcher
from terrazzo.triton_cpu.launch.reporting import reporting
from terrazzo.triton_gcu.chip import description, runtime
from terrazzo.triton_gcu.streams import another_stream

ILLEGAL_ADDRESS = ERRORS.index("gcuErrorIllegalAddress")
INVALID_POINTER = ERRORS.index("gcuErrorInvalidPointer")


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel of an image that the library has loaded: its handles.

    It goes away with its last reference: Triton unloads by whichever driver is active then, which
    may be that of another chip. Launches that are under way still end.
    """

    module: int
    function: int

    @staticmethod
    def load(image: bytes, name: str) -> LoadedKernel:
        """The kernel of that name in an image."""
        library, module, function = runtime(), ctypes.c_void_p(), ctypes.c_void_p()
        check(library.gcuModuleLoadData(ctypes.byref(module), image, len(image)))
        check(library.gcuModuleGetFunction(ctypes.byref(function), module, name.encode()))
        assert module.value is not None and function.value is not None
        kernel = LoadedKernel(module.value, function.value)
        weakref.finalize(kernel, library.gcuModuleUnload, kernel.module).atexit = False
        return kernel


class GCULauncher(Launcher):
    """Launches that return at once; programs beyond what the chip accepts are folded."""

    def __init__(self, src: Any, metadata: Any):
        super().__init__(src, metadata)
        chip = description()
        if metadata.shared > chip.scratchpad_bytes:
            raise OutOfResources(metadata.shared, chip.scratchpad_bytes, "scratchpad memory")
        self.library = runtime()
        self.home = arguments.Home(chip.name, f"the chip {chip.name}",
                                   f'move it with .to("{chip.name}")')
        count = len(metadata.kinds)
        self.run: Callable[..., int]
        self.run, words = arguments.caller(
            list(self.signature.values()), self.home, bool(self.reports),
            "function, gx, gy, gz, stream",
            f"launch(function, gx, gy, gz, words({{}}), {count}, stream)",
            launch=self.library.gcuLaunchFolded, words=ctypes.c_int64 * count)
        assert words == count, f"`{self.kernel}` takes {count} words, not {words}"

    def launch(self, function: LoadedKernel, gx: int, gy: int, gz: int, stream: Any,
               args: Sequence[Any]) -> None:
        code = self.run(function.function, gx, gy, gz, stream, *args)
        if not code and knobs.launch_blocking:
            code = self.library.gcuStreamSynchronize(stream)
        if code:
            raise self.explained(code, (gx, gy, gz), args)

    def finish(self, stream: Any) -> None:
        check(self.library.gcuStreamSynchronize(stream))

    def explained(self, code: int, grid: tuple[int, int, int], args: Sequence[Any]) -> Exception:
        """The error for a launch that the library refused, or for what failed before it."""
        message = self.library.gcuGetLastErrorMessage().decode("utf-8", "replace")
        if code == INVALID_POINTER:
            self.home.check_all(args, self.signature)
        if code != ILLEGAL_ADDRESS:
            return GcuError(code, message)
        if knobs.launch_blocking:  # so it was this one
            with another_stream():
                found = self.found_again(grid, args)
            if found is not None:
                return found
        return KernelFault(message, hint=(
            "TZ_SANITIZE=1 names the line and the index; without TZ_LAUNCH_BLOCKING=1 it may have "
            "been an earlier kernel of the stream"))


def make_launcher(src: Any, metadata: Any) -> Callable[..., None]:
    """What Triton calls to launch a kernel."""
    return reporting(GCULauncher(src, metadata))
