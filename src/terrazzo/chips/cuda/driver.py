"""NVIDIA's driver through ctypes: modules, launches on torch's stream, copies, and its errors."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from terrazzo.errors import DeviceError, MissingDependency, OutOfMemory

_LIBRARY = "libcuda.so.1"
_NO_CONTEXT, _NO_MEMORY, _NO_CODE = 201, 2, (209, 218)
_OF_THIS_THREAD = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: other threads may do as they like
_SHARED_BY_DEFAULT = 48 << 10  # bytes; a kernel that wants more has to say so
_MORE_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def absence() -> str:
    """Why nothing can run on a GPU here; empty where it can."""
    if "torch" not in sys.modules and not _has_driver():  # torch takes a second to import
        return f"there is no NVIDIA GPU: its driver ({_LIBRARY}) is not installed"
    try:
        import torch
    except ImportError:
        return "memory on a GPU comes from the package torch, which is not installed"
    if not torch.cuda.is_available():
        built = "" if torch.version.cuda else ", and this torch is built without CUDA"
        return f"torch finds no NVIDIA GPU{built}"
    return ""


@cache
def _has_driver() -> bool:
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return False
    return True


@cache
def library() -> Any:
    """The driver."""
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise MissingDependency(f"the driver of NVIDIA GPUs cannot be loaded: {error}",
                                hint="install the driver, or run with TZ_CUDA_SIMULATE=1") from None


@cache
def launcher() -> int:
    """Where cuLaunchKernel is: native code calls it."""
    return ctypes.cast(library().cuLaunchKernel, ctypes.c_void_p).value or 0


@cache
def graph_launcher() -> Callable[..., int]:
    """cuGraphLaunch, told what it takes: to wrap numbers in every call takes longer."""
    found = library().cuGraphLaunch
    found.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    launch: Callable[..., int] = found
    return launch


def current_stream() -> Callable[[int], int]:
    """What tells the stream of the caller on a device, by its number."""
    import torch

    found: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
    return found


def check(status: int, doing: str) -> None:
    """Raise what the driver says, if that is not that all is well."""
    if status == 0:
        return
    name, text = ctypes.c_char_p(), ctypes.c_char_p()
    library().cuGetErrorName(status, ctypes.byref(name))
    library().cuGetErrorString(status, ctypes.byref(text))
    message = (f"the GPU's driver failed {doing}: {(text.value or b'unknown error').decode()} "
               f"({(name.value or b'?').decode()}, {status})")
    if status == _NO_MEMORY:
        raise OutOfMemory(message, hint="use smaller inputs, or torch.cuda.empty_cache()")
    if status in _NO_CODE:
        raise DeviceError(message, hint="the code is for another kind of GPU: compile it again")
    raise DeviceError(message, hint="an error of an earlier kernel may show here: run with "
                      "CUDA_LAUNCH_BLOCKING=1")


def with_context(run: Callable[[], int]) -> int:
    """Run what needs a context of the driver in this thread; torch makes one."""
    status = run()
    if status == _NO_CONTEXT:
        import torch

        torch.cuda.synchronize()
        status = run()
    return status


class Module:
    """Code on a GPU; it stays there for as long as this object lives."""

    def __init__(self, code: bytes):
        self.handle = ctypes.c_void_p()
        check(with_context(lambda: library().cuModuleLoadData(ctypes.byref(self.handle), code)),
              "to load a kernel")

    def function(self, name: str, shared: int) -> int:
        """A kernel by its name, allowed to use so much shared memory."""
        found = ctypes.c_void_p()
        check(library().cuModuleGetFunction(ctypes.byref(found), self.handle, name.encode()),
              f"to find the kernel {name}")
        if shared > _SHARED_BY_DEFAULT:
            check(library().cuFuncSetAttribute(found, _MORE_SHARED, shared),
                  f"to give {name} {shared} bytes of shared memory")
        assert found.value is not None
        return found.value

    def __del__(self) -> None:
        if self.handle.value is not None and library is not None:
            library().cuModuleUnload(self.handle)


class Graph:
    """Launches that were recorded on a stream instead of run, to be repeated at once."""

    def __init__(self, stream: int, launch: Callable[[], int]):
        found, self.handle = ctypes.c_void_p(), ctypes.c_void_p()
        check(library().cuStreamBeginCapture_v2(ctypes.c_void_p(stream), _OF_THIS_THREAD),
              "to begin recording launches")
        status = launch()
        ended = library().cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(found))
        check(status or ended, "to record launches")
        try:
            check(library().cuGraphInstantiateWithFlags(
                ctypes.byref(self.handle), found, ctypes.c_ulonglong(0)),
                "to make a graph of launches")
        finally:
            library().cuGraphDestroy(found)

        self._launch, self._number = graph_launcher(), self.handle.value

    def play(self, stream: int) -> None:
        """Queue all of them in a stream."""
        status = self._launch(self._number, stream)
        if status:
            check(status, "to repeat a graph of launches")

    def __del__(self) -> None:
        if self.handle.value is not None and library is not None:
            library().cuGraphExecDestroy(self.handle)


def to_host(target: int, source: int, size: int, stream: int) -> None:
    """Copy bytes to this process and wait for them."""
    if size:
        check(library().cuMemcpyDtoHAsync_v2(ctypes.c_void_p(target), ctypes.c_uint64(source),
                                             ctypes.c_size_t(size), ctypes.c_void_p(stream)),
              "to copy from the GPU")
        wait(stream)


def to_device(target: int, source: int, size: int, stream: int) -> None:
    """Copy bytes from this process and wait until they may change here."""
    if size:
        check(library().cuMemcpyHtoDAsync_v2(ctypes.c_uint64(target), ctypes.c_void_p(source),
                                             ctypes.c_size_t(size), ctypes.c_void_p(stream)),
              "to copy to the GPU")
        wait(stream)


def on_device(target: int, source: int, size: int, stream: int) -> None:
    """Copy bytes inside the GPU, in the order of the stream."""
    if size:
        check(library().cuMemcpyDtoDAsync_v2(ctypes.c_uint64(target), ctypes.c_uint64(source),
                                             ctypes.c_size_t(size), ctypes.c_void_p(stream)),
              "to copy on the GPU")


def wait(stream: int) -> None:
    """Wait for all that a stream was given."""
    check(library().cuStreamSynchronize(ctypes.c_void_p(stream)), "to run what it was given")
