"""What the tests of the runtime library share: the chip, memory, kernels, launches."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from terrazzo.chips.gcu import build, description
from terrazzo.chips.gcu.image import ImageFunction, write_image
from terrazzo.chips.gcu.library import (
    DEVICE_TO_HOST,
    ERRORS,
    HOST_TO_DEVICE,
    Record,
    bind,
    check,
    library,
)

HERE = Path(__file__).parent
HAS_COMPILER = bool(shutil.which("cc") or shutil.which("gcc") or shutil.which("clang"))

FUNCTIONS = (
    ImageFunction("mark", "mark", "p"),
    ImageFunction("saxpy", "saxpy", "ppfi"),
    ImageFunction("poke", "poke", "i"),
    ImageFunction("divide", "divide", "pii"),
    ImageFunction("overflow", "overflow", "i"),
    ImageFunction("late", "late", "pii"),
    ImageFunction("append", "append", "pi"),
    ImageFunction("await", "await", "hp"),
    ImageFunction("nested", "nested", "p"),
    ImageFunction("sine", "sine", "p"),
    ImageFunction("count_up", "count_up", "p"),
    ImageFunction("greedy", "mark", "p", scratchpad=1 << 40),
    ImageFunction("threads", "threads", "p", ("all",), is_plan=True),
    ImageFunction("plan", "plan", "pci", ("twice", "once", "never"), is_plan=True),
)


@cache
def object_code() -> bytes:
    """kernels.c, compiled as LLVM would: position-independent, without tables for exceptions."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "kernels.o")
        subprocess.run(
            [build.compiler()[0], "-c", "-O1", "-fPIC", "-fno-asynchronous-unwind-tables",
             "-fno-stack-protector", str(HERE / "kernels.c"), "-o", str(target)], check=True)
        return target.read_bytes()


class Kit:
    """The library in this process, configured as gcu."""

    def __init__(self, path: Path | None = None, **changes: Any) -> None:
        self.chip = description.find("gcu")
        self.lib = library() if path is None else bind(path)
        self.struct = self.chip.c_struct()
        for name, value in changes.items():
            setattr(self.struct, name, value)
        check(self.lib.gcuConfigure(self.struct))
        self.fingerprint = self.chip.fingerprint
        self._module: ctypes.c_void_p | None = None

    def fails(self, name: str, code: int) -> str:
        """The message of a call that gave that error."""
        assert ERRORS[code] == name, (ERRORS[code], self.message())
        return self.message()

    def message(self) -> str:
        return str(self.lib.gcuGetLastErrorMessage().decode("utf-8", "replace"))

    def made(self, call: Callable[..., int], *arguments: Any) -> int:
        """What a call puts behind its first argument."""
        found = ctypes.c_void_p()
        check(call(ctypes.byref(found), *arguments))
        return found.value or 0

    # ------------------------------------------------------------ memory
    def malloc(self, size: int) -> int:
        return self.made(self.lib.gcuMalloc, size)

    def put(self, array: np.ndarray) -> int:
        address = self.malloc(array.nbytes)
        check(self.lib.gcuMemcpy(address, array.ctypes.data, array.nbytes, HOST_TO_DEVICE))
        return address

    def get(self, address: int, dtype: Any, count: int = 1) -> np.ndarray:
        array = np.empty(count, dtype)
        check(self.lib.gcuMemcpy(array.ctypes.data, address, array.nbytes, DEVICE_TO_HOST))
        return array

    def zeros(self, count: int) -> int:
        return self.put(np.zeros(count, np.int64))

    # ------------------------------------------------------------ modules and launches
    def image(self, *functions: ImageFunction) -> bytes:
        return write_image(object_code(), functions or FUNCTIONS, self.fingerprint)

    def load(self, image: bytes) -> int:
        return self.made(self.lib.gcuModuleLoadData, image, len(image))

    def function(self, name: str, module: int | None = None) -> int:
        if module is None:
            if self._module is None:
                self._module = ctypes.c_void_p(self.load(self.image()))
            module = self._module.value
        return self.made(self.lib.gcuModuleGetFunction, module, name.encode())

    def launch(self, name: str, grid: int | tuple[int, int, int], *arguments: int | float,
               stream: int | None = None, how: str = "gcuLaunchKernel") -> int:
        """The code that a launch gives; floats are passed as the bits of float32."""
        x, y, z = grid if isinstance(grid, tuple) else (grid, 1, 1)
        return int(getattr(self.lib, how)(
            self.function(name), x, y, z, words(*arguments), len(arguments), stream))

    def stream(self) -> int:
        return self.made(self.lib.gcuStreamCreate)

    def event(self) -> int:
        return self.made(self.lib.gcuEventCreate)

    def cycles(self, stream: int | None = None) -> int:
        found = ctypes.c_int64()
        check(self.lib.gcuStreamGetCycles(found, stream))
        return found.value

    def model(self, counts: np.ndarray, at_once: int) -> int:
        """What the model says of programs that counted so."""
        flat = np.ascontiguousarray(counts, np.int64)
        return int(self.lib.gcuModelCycles(
            self.struct, flat.ctypes.data_as(ctypes.POINTER(ctypes.c_int64)), len(flat), at_once))

    def records(self) -> list[Record]:
        held, count = (Record * 64)(), ctypes.c_int()
        check(self.lib.gcuTraceRead(held, 64, count))
        return list(held[:count.value])


def words(*arguments: int | float) -> Any:
    values = [struct.unpack("<I", struct.pack("<f", a))[0] if isinstance(a, float) else a
              for a in arguments]
    return (ctypes.c_int64 * max(len(values), 1))(*values)
