"""The native part of the device: built by the system's C++ compiler once, and loaded.

It is kept in the cache by its source, torch's version, Python's and the compiler; without one, what
some compiler built last is found. Several processes may want it at the same time: one builds, the
others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from terrazzo.chips.gcu.build import SOURCES as HEADERS
from terrazzo.chips.gcu.build import newest, stamp
from terrazzo.errors import CompileError, MissingDependency
from terrazzo.knobs import knobs

NAME = "_gcu.so"
SOURCES = Path(__file__).parent / "native"
OLDEST = (2, 11)  # of torch: what the native part is compiled with and tried
WHOLE = (2, 13)  # of torch: what Inductor and torch.distributed must have for such a device
# Compiled side by side, the longest first.
UNITS = ("operators", "plans", "distributed", "profiler", "device", "memory")
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-DTORCH_EXTENSION_NAME=_gcu")
_state: dict[str, ModuleType] = {}


def native() -> ModuleType:
    """The native part, built if it has to be."""
    if "native" not in _state:
        file = _file()
        if not file.exists():
            file = _built(file)
        _state["native"] = _loaded(file)
    return _state["native"]


def is_loaded() -> bool:
    return "native" in _state


def load_if_built() -> None:
    """Load the native part where that takes no compiler."""
    if not is_loaded() and _file().exists():
        native()


@cache
def _file() -> Path:
    """Where the built library is, or will be."""
    whole = hashlib.sha256()
    for part in (Path(__file__), *(SOURCES / f"{unit}.cpp" for unit in UNITS),
                 SOURCES / "runtime.h", HEADERS / "gcu_runtime.h"):
        whole.update(part.read_bytes())
    whole.update(repr((torch.__version__, sys.version_info[:3], FLAGS)).encode())
    folder = Path(knobs.cache_dir).expanduser() if knobs.cache else Path(tempfile.mkdtemp())
    kept = folder / "torch_device" / whole.hexdigest()[:32]
    if command := _compiler():
        return kept / stamp(command) / NAME
    # A compiler that has gone (as in an image without one) left behind what it built.
    return newest(kept, NAME) or kept / "none" / NAME


def _compiler() -> list[str]:
    asked = shlex.split(os.environ.get("CXX", ""))
    for command in ([asked] if asked else [["c++"], ["g++"], ["clang++"]]):
        if shutil.which(command[0]):
            return command
    return []


def is_whole(version: str = torch.__version__) -> bool:
    """Whether Inductor and torch.distributed know the device; beside them, an older torch does."""
    return _numbers(version) >= WHOLE


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def check_version(version: str) -> None:
    """Refuse a torch that the native part is not written for: a compiler's message says little."""
    if _numbers(version) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise MissingDependency(
            f"the device in PyTorch needs torch {oldest} or newer, not {version}",
            hint=f"pip install 'torch>={oldest}'")


def _built(file: Path) -> Path:
    check_version(torch.__version__)
    command = _compiler()
    if not command:
        raise MissingDependency(
            "the device in PyTorch is built by a C++ compiler, and there is none "
            f"({os.environ.get('CXX') or 'c++, g++ or clang++'})",
            hint="install one (Debian: apt install g++), or set CXX to its command")
    for header in (Path(torch.__file__).parent / "include" / "torch" / "library.h",
                   Path(sysconfig.get_paths()["include"]) / "Python.h"):
        if not header.exists():
            raise MissingDependency(
                f"the device in PyTorch is built with {header}, which is not there",
                hint="install torch from its wheel, and Python's headers (Debian: python3-dev)")
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():  # another process may have been quicker
            _compile(command, file)
    return file


def _compile(command: list[str], file: Path) -> None:
    print(f"terrazzo: building the device for PyTorch {torch.__version__} with {command[0]}, once "
          "(a minute on two cores) ...", end="", file=sys.stderr, flush=True)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        compilers = [subprocess.Popen(
            [*command, *FLAGS, *_includes(), "-c", str(SOURCES / f"{unit}.cpp"), "-o",
             f"{folder}/{unit}.o"], stderr=subprocess.PIPE, text=True) for unit in UNITS]
        wrong = [errors for process in compilers
                 for errors in [process.communicate()[1]] if process.returncode]
        if not wrong:
            wrong = _linked(command, folder)
        if wrong:
            print(" failed", file=sys.stderr)
            raise CompileError(
                f"{command[0]} does not build the device for PyTorch {torch.__version__}:\n"
                f"{wrong[0].strip()[:4000]}",
                hint="what it names is what this torch, or this compiler, lacks")
        os.replace(f"{folder}/{NAME}", file)
    print(f" {time.perf_counter() - start:.0f} s", file=sys.stderr)


def _linked(command: list[str], folder: str) -> list[str]:
    libraries = Path(torch.__file__).parent / "lib"
    ran = subprocess.run(
        [*command, "-shared", *(f"{folder}/{unit}.o" for unit in UNITS), f"-L{libraries}",
         "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10", *_standard_library(), "-ldl",
         "-o", f"{folder}/{NAME}"], capture_output=True, text=True)
    return [ran.stderr] if ran.returncode else []


def _standard_library() -> set[str]:
    """The C++ library that torch runs with. Some compilers bring one of their own that is linked in
    whole, and a number printed to a stream that knows both ends the process."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    return {line.split()[-1] for line in lines if "/libstdc++.so" in line}


def _includes() -> list[str]:
    include = Path(torch.__file__).parent / "include"
    folders = (include, include / "torch" / "csrc" / "api" / "include", include / "kineto", HEADERS,
               Path(sysconfig.get_paths()["include"]))
    return [f"-I{folder}" for folder in folders]


def _loaded(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("terrazzo.torch_device._gcu", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


__all__ = ["is_loaded", "load_if_built", "native"]
