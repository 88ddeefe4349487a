"""Kernels in C++: the system's compiler makes a library of one function, kept in the cache."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from terrazzo.chips.by_hand import Kernel, Run
from terrazzo.chips.spec import ChipSpec
from terrazzo.errors import CompileError, MissingDependency
from terrazzo.runtime.cache import default_cache, make_key
from terrazzo.runtime.layout import address_of

FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-x", "c++")
SECONDS = 300  # no compiler takes longer over one kernel


def compiler() -> list[str]:
    """The command of the system's C++ compiler: CXX, or what is usually there."""
    asked = shlex.split(os.environ.get("CXX", ""))
    for command in ([asked] if asked else [["c++"], ["g++"], ["clang++"]]):
        if shutil.which(command[0]):
            return command
    raise MissingDependency(
        f"no C++ compiler was found ({asked[0] if asked else 'c++, g++ or clang++'})",
        hint="install one, or set CXX to its command")


@lru_cache
def _version(command: tuple[str, ...]) -> str:
    ran = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=SECONDS)
    return ran.stdout


def build(kernel: Kernel, spec: ChipSpec) -> Run:
    """A kernel by hand, compiled and loaded."""
    native: Any = _entry(kernel.launch.source, kernel.entry, spec)
    native.argtypes = [ctypes.c_void_p] * (1 + kernel.tensors)
    sizes = (ctypes.c_int64 * max(len(kernel.sizes), 1))(*kernel.sizes)

    def run(arrays: Sequence[Any]) -> None:
        native(ctypes.addressof(sizes), *(0 if a is None else address_of(a) for a in arrays))

    return run


def _entry(source: str, name: str, spec: ChipSpec) -> Callable[..., None]:
    """The function `name` of a source text; its arguments are addresses."""
    command = compiler()
    key = make_key("c++", source, " ".join([*command, *FLAGS]), _version(tuple(command)),
                   chip=spec)
    cache = default_cache()
    library = cache.get(key)
    if library is None:
        library = _compiled(command, source)
        cache.put(key, library)
    return _loaded(library, name)


def _compiled(command: list[str], source: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        text, library = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
        text.write_text(source)
        ran = subprocess.run([*command, *FLAGS, str(text), "-o", str(library)], text=True,
                             capture_output=True, timeout=SECONDS)
        if ran.returncode:
            raise CompileError(f"{command[0]} does not compile the kernel:\n{ran.stderr.strip()}",
                               hint="lines are those of the file that the kernel is written in")
        return library.read_bytes()


def _loaded(library: bytes, name: str) -> Callable[..., None]:
    """A library that was read, in memory: a file is needed only until it is mapped."""
    handle, path = tempfile.mkstemp(suffix=".so")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(library)
        function: Callable[..., None] = getattr(ctypes.CDLL(path), name)
    finally:
        os.unlink(path)
    function.restype = None  # type: ignore[attr-defined]
    return function


__all__ = ["build", "compiler"]
