"""Kernels by hand on an NVIDIA GPU: CUDA C++ through NVRTC, and functions of Triton's."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from terrazzo.base.upcalls import UPCALLS
from terrazzo.chips.by_hand import Kernel, Run
from terrazzo.chips.cuda import driver
from terrazzo.chips.cuda.binaries import arch_of, import_triton
from terrazzo.chips.memory import HostMemory
from terrazzo.chips.spec import ChipSpec
from terrazzo.errors import ArgumentError, CompileError, MissingDependency
from terrazzo.runtime.cache import default_cache, make_key
from terrazzo.runtime.hosted import to_torch
from terrazzo.runtime.layout import address_of

_NAMES = ("libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2")
# cuLaunchKernel: function, grid, block, shared memory, stream, where arguments are, nothing.
_START = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p,
                           ctypes.c_void_p, ctypes.c_void_p)
_OPTIONS = ("--std=c++17", "--device-as-default-execution-space")


# ---------------------------------------------------------------- Triton
def triton(kernel: Kernel, simulated: bool) -> Run:
    """A function of Triton's on tensors; in a simulation, on the CPU by terrazzo's backend."""
    import_triton()
    launch = kernel.launch
    if not hasattr(launch.source, "arg_names") or launch.blocks is None:
        raise ArgumentError("a kernel in Triton is a function of triton.jit and a number of blocks",
                            hint="answer with tz.Launch(function, blocks, constants={...})")
    if simulated:
        UPCALLS["triton_on_cpu"]()
    started = launch.source[launch.grid(kernel.elements)]

    def run(arrays: Sequence[Any]) -> None:
        if kernel.elements:
            started(*(to_torch(a) if isinstance(a, np.ndarray) else a for a in arrays),
                    **launch.constants)

    return run


# ---------------------------------------------------------------- CUDA C++
def cuda(kernel: Kernel, spec: ChipSpec, memory: HostMemory) -> Run:
    """A kernel in CUDA C++, on the stream of the caller."""
    launch = kernel.launch
    library = nvrtc()
    key = make_key("cuda", launch.source, " ".join(_OPTIONS), str(_version(library)), chip=spec)
    store = default_cache()
    code = store.get(key)
    if code is None:
        code = _compiled(library, launch.source, arch_of(spec))
        store.put(key, code)
    module = driver.Module(code)
    function = module.function(kernel.entry, launch.shared_bytes)
    sizes = memory.copy_in(np.array(kernel.sizes or (0,), np.int64))
    values = (ctypes.c_uint64 * (1 + kernel.tensors))(sizes.address)
    places = (ctypes.c_void_p * len(values))(*(
        ctypes.addressof(values) + i * ctypes.sizeof(ctypes.c_uint64) for i in range(len(values))))
    start_kernel, stream_of = _START(driver.launcher()), driver.current_stream()
    grid = launch.grid(kernel.elements)

    def run(arrays: Sequence[Any]) -> None:
        assert module and sizes  # which live as long as this does
        if not kernel.elements:
            return
        import torch

        values[1:] = [0 if a is None else address_of(a) for a in arrays]

        def start() -> int:
            return int(start_kernel(
                function, *grid, launch.threads, 1, 1, launch.shared_bytes,
                stream_of(torch.cuda.current_device()), ctypes.addressof(places), None))

        driver.check(driver.with_context(start), "to launch a kernel by hand")

    return run


@cache
def nvrtc() -> Any:
    """NVIDIA's compiler as a library: the system's, or the one that torch was installed with."""
    packaged = _packaged("*/lib/libnvrtc.so*")
    for name in (*(p for p in packaged if "builtins" not in p), *_NAMES):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise MissingDependency("no compiler for CUDA C++ was found (libnvrtc.so)",
                            hint="install it with: pip install nvidia-cuda-nvrtc-cu12")


def _version(library: Any) -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def _compiled(library: Any, source: str, arch: int) -> bytes:
    """Machine code of a source text."""
    program = ctypes.c_void_p()
    _check(library, library.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None))
    options = [f"--gpu-architecture=sm_{arch}", *_OPTIONS, *(
        f"--include-path={folder}" for folder in _headers())]
    try:
        status = library.nvrtcCompileProgram(program, len(options), (
            ctypes.c_char_p * len(options))(*(o.encode() for o in options)))
        if status:
            log = _answer(library, program, "ProgramLog").rstrip(b"\0").decode()
            raise CompileError(f"NVRTC does not compile the kernel:\n{log.strip()}")
        return _answer(library, program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _answer(library: Any, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    held = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, held))
    return held.raw


def _headers() -> list[str]:
    """Where cuda_fp16.h and its like are, if they are."""
    usual = Path("/usr/local/cuda/include")
    return [*_packaged("*/include"), *([str(usual)] if usual.is_dir() else [])]


def _packaged(pattern: str) -> list[str]:
    """What torch was installed with, of NVIDIA's packages."""
    spec = importlib.util.find_spec("nvidia")
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    return [str(path) for folder in folders for path in sorted(Path(folder).glob(pattern))]


def _check(library: Any, status: int) -> None:
    if status:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CompileError(f"NVRTC failed: {library.nvrtcGetErrorString(status).decode()}")


__all__ = ["cuda", "nvrtc", "triton"]
