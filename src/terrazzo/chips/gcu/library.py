"""The runtime library, called from Python: the names and types of gcu_runtime.h."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import (
    POINTER,
    Structure,
    c_char,
    c_char_p,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint,
    c_uint64,
    c_void_p,
)
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from terrazzo.chips.gcu.build import built_library
from terrazzo.chips.gcu.description import CDescription
from terrazzo.errors import DeviceError

COUNTERS = 8

ERRORS = (
    "gcuSuccess", "gcuErrorInvalidValue", "gcuErrorOutOfMemory", "gcuErrorInvalidDevice",
    "gcuErrorInvalidPointer", "gcuErrorInvalidDirection", "gcuErrorInvalidHandle",
    "gcuErrorInvalidImage", "gcuErrorNotFound", "gcuErrorInvalidGrid", "gcuErrorScratchpad",
    "gcuErrorNotReady", "gcuErrorIllegalAddress", "gcuErrorPeerAccess", "gcuErrorInitialization",
    "gcuErrorLaunchFailure",
)
NOT_READY = ERRORS.index("gcuErrorNotReady")

HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, BY_POINTERS = range(5)


class DeviceProperties(Structure):
    """gcuDeviceProperties."""

    _fields_ = [("description", CDescription), ("name", c_char * 64), ("device", c_int32)]


class MemoryInfo(Structure):
    """gcuMemoryInfo: bytes, and how many allocations there were."""

    _fields_ = [(name, c_int64) for name in ("allocated", "peak", "free", "total", "allocations")]


class FunctionInfo(Structure):
    """gcuFunctionInfo."""

    _fields_ = [("arguments", c_int32), ("is_plan", c_int32), ("calls", c_int32),
                ("scratchpad_bytes", c_int64)]


class Record(Structure):
    """gcuRecord: one thing that was run."""

    _fields_ = [("name", c_char * 128), ("kind", c_int32), ("device", c_int32),
                *[(name, c_int64) for name in ("stream", "start", "cycles", "programs", "units",
                                               "bytes", "correlation", "tag")],
                ("counts", c_int64 * COUNTERS)]


HOST_FUNCTION = ctypes.CFUNCTYPE(None, c_void_p)

_handle, _handles, _address = c_void_p, POINTER(c_void_p), c_void_p
_words = POINTER(c_int64)
_launch = (_handle, c_uint, c_uint, c_uint, _words, c_int, _handle)

# The arguments of each function that gives an error code.
SIGNATURES: Mapping[str, tuple[Any, ...]] = MappingProxyType({
    "gcuConfigure": (POINTER(CDescription),),
    "gcuGetLastError": (),
    "gcuPeekAtLastError": (),
    "gcuGetDeviceCount": (POINTER(c_int),),
    "gcuSetDevice": (c_int,),
    "gcuGetDevice": (POINTER(c_int),),
    "gcuGetDeviceCapability": (POINTER(c_int), POINTER(c_int), c_int),
    "gcuGetDeviceProperties": (POINTER(DeviceProperties), c_int),
    "gcuDeviceSynchronize": (),
    "gcuDeviceReset": (),
    "gcuSetHostThreads": (c_int,),
    "gcuMalloc": (_handles, c_size_t),
    "gcuFree": (_address,),
    "gcuMemcpy": (_address, _address, c_size_t, c_int),
    "gcuMemcpyAsync": (_address, _address, c_size_t, c_int, _handle),
    "gcuMemcpyPeer": (_address, c_int, _address, c_int, c_size_t),
    "gcuMemcpyPeerAsync": (_address, c_int, _address, c_int, c_size_t, _handle),
    "gcuMemset": (_address, c_int, c_size_t),
    "gcuMemsetAsync": (_address, c_int, c_size_t, _handle),
    "gcuMemGetInfo": (POINTER(MemoryInfo), c_int),
    "gcuPointerGetDevice": (POINTER(c_int), _address),
    "gcuHostAlloc": (_handles, c_size_t),
    "gcuHostFree": (_address,),
    "gcuHostIsPinned": (POINTER(c_int), _address),
    "gcuModuleLoadData": (_handles, _address, c_size_t),
    "gcuModuleUnload": (_handle,),
    "gcuModuleGetFunction": (_handles, _handle, c_char_p),
    "gcuModuleGetGlobal": (_handles, _handle, c_char_p),
    "gcuFunctionGetInfo": (POINTER(FunctionInfo), _handle),
    "gcuLaunchKernel": _launch,
    "gcuLaunchFolded": _launch,
    "gcuLaunchPlan": (_handle, _words, c_int, _address, _handle),
    "gcuLaunchHostFunction": (_handle, HOST_FUNCTION, c_void_p),
    "gcuStreamCreate": (_handles,),
    "gcuStreamCreateWithPriority": (_handles, c_int),
    "gcuStreamDestroy": (_handle,),
    "gcuStreamSynchronize": (_handle,),
    "gcuStreamQuery": (_handle,),
    "gcuStreamWaitEvent": (_handle, _handle),
    "gcuStreamGetCycles": (_words, _handle),
    "gcuEventCreate": (_handles,),
    "gcuEventDestroy": (_handle,),
    "gcuEventRecord": (_handle, _handle),
    "gcuEventQuery": (_handle,),
    "gcuEventSynchronize": (_handle,),
    "gcuEventElapsedTime": (POINTER(c_float), _handle, _handle),
    "gcuEventElapsedCycles": (_words, _handle, _handle),
    "gcuTraceStart": (),
    "gcuTraceStop": (),
    "gcuTraceTag": (c_int64,),
    "gcuTraceRead": (POINTER(Record), c_int, POINTER(c_int)),
})
# Those that give something else.
OTHERS: Mapping[str, tuple[Any, tuple[Any, ...]]] = MappingProxyType({
    "gcuGetErrorName": (c_char_p, (c_int,)),
    "gcuGetErrorString": (c_char_p, (c_int,)),
    "gcuGetLastErrorMessage": (c_char_p, ()),
    "gcuModelCycles": (c_int64, (POINTER(CDescription), _words, c_int64, c_int64)),
    "gcuImageChecksum": (c_uint64, (_address, c_size_t)),
})


class GcuError(DeviceError):
    """A call of the runtime library failed; `code` is what it gave."""

    def __init__(self, code: int, message: str) -> None:
        name = ERRORS[code] if 0 <= code < len(ERRORS) else str(code)
        super().__init__(f"{name}: {message}")
        self.code = code
        self.name = name


def library_path() -> Path:
    """Where libgcu_runtime.so lies, which is built when it is first asked for."""
    return built_library()


@lru_cache(maxsize=1)
def library() -> Any:
    """The library, loaded: its functions have the names of the header and give codes (`check`)."""
    path = library_path()
    try:
        return bind(path)
    except OSError:  # the file was damaged: it is ours, and is made again
        path.unlink(missing_ok=True)
        built_library.cache_clear()
        return bind(library_path())


def bind(path: Path) -> Any:
    """A library of that file, with the types of its functions."""
    loaded = ctypes.CDLL(str(path))
    for name, arguments in SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = c_int, arguments
    for name, (result, arguments) in OTHERS.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def check(code: int) -> None:
    """Raise what a call of the library in this thread has just failed with."""
    if code:
        raise GcuError(code, library().gcuGetLastErrorMessage().decode("utf-8", "replace"))


__all__ = [
    "BY_POINTERS", "COUNTERS", "DEVICE_TO_DEVICE", "DEVICE_TO_HOST",
    "DeviceProperties", "ERRORS", "FunctionInfo", "GcuError", "HOST_FUNCTION", "HOST_TO_DEVICE",
    "HOST_TO_HOST", "MemoryInfo", "NOT_READY", "Record", "bind", "check", "library",
    "library_path",
]
