"""The model of time without the rest of the runtime library."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np

from terrazzo.chips.gcu import description
from terrazzo.chips.gcu.description import CDescription, Description

Model = Callable[..., int]


def build(folder: Path) -> Model:
    """`gcuModelCycles` of the C file, as a function of a table of counts."""
    source = Path(description.__file__).with_name("runtime") / "time.c"
    subprocess.run(["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC",
                    "-o", folder / "time.so", source], check=True)
    function = ctypes.CDLL(str(folder / "time.so")).gcuModelCycles
    function.restype = ctypes.c_int64
    function.argtypes = [ctypes.POINTER(CDescription), ctypes.c_void_p, ctypes.c_int64,
                         ctypes.c_int64]

    def call(table: np.ndarray, at_once: int | None, chip: Description) -> int:
        return int(function(chip.c_struct(), np.ascontiguousarray(table).ctypes.data, len(table),
                            len(table) if at_once is None else at_once))

    return call
