"""The way from a Python call to native code in a few microseconds."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from terrazzo.codegen.llvm.program import NUMPY_DATA
from terrazzo.errors import DeviceError
from terrazzo.graph.trace import pack
from terrazzo.knobs import knobs, thread_count
from terrazzo.runtime import pool

_ndarray = np.ndarray
_tensor_types: set[type] = set()  # torch's, as they come along: torch is never imported for this


def is_array(x: Any) -> bool:
    """Whether something is a numpy array or scalar, or a torch tensor."""
    return isinstance(x, (_ndarray, np.generic)) or hasattr(x, "data_ptr")


def key_of(args: Sequence[Any]) -> Hashable:
    """What an entry depends on: the layout and type of every argument."""
    parts: list[Any] = []
    for a in args:
        kind = type(a)
        if kind is _ndarray:
            parts += (a.shape, a.strides, a.dtype)
        elif kind in _tensor_types:
            parts += (a.shape, a.stride(), a.dtype, a.requires_grad and _grad_enabled())
        elif hasattr(a, "data_ptr"):
            _tensor_types.add(kind)
            return key_of(args)
        else:
            return None
    return tuple(parts)


def _grad_enabled() -> bool:
    import torch

    return torch.is_grad_enabled()


def check_devices(arrays: Sequence[Any], name: str) -> None:
    """Torch tensors must be on the CPU."""
    for a in arrays:
        device = getattr(a, "device", None)
        if hasattr(a, "data_ptr") and str(device) != "cpu":
            raise DeviceError(f"{name} got a tensor on {device}", hint="move it with .cpu()")


def _numpy_layout_known() -> bool:
    """Whether array objects hold their address where we think they do."""
    probe = np.empty(3, np.float32)
    found = ctypes.c_void_p.from_address(id(probe) + NUMPY_DATA).value
    return found == probe.ctypes.data


_NUMPY_DIRECT = _numpy_layout_known()


def entry(executable: Any, structure: Any, arrays: Sequence[Any]) -> Callable[..., Any]:
    """A function from a tuple of arguments like `arrays` to the results."""
    single = structure == 0
    direct = getattr(executable, "call_numpy", None) is not None and executable.artifact.arena == 0
    plain_numpy = all(type(a) is _ndarray and a.flags.c_contiguous for a in arrays)
    if direct and plain_numpy and _NUMPY_DIRECT and single:
        return _numpy_entry(executable)
    plain_torch = bool(arrays) and all(
        hasattr(a, "data_ptr") and a.is_contiguous() for a in arrays)
    if direct and plain_torch and single:
        return _torch_entry(executable)

    def run(args: Sequence[Any]) -> Any:
        return pack(structure, executable.run(args))

    return run


def _threads() -> int:
    pool.sync()
    return thread_count()


def _numpy_entry(executable: Any) -> Callable[..., Any]:
    """One output, no arena, everything contiguous: nothing but an allocation and the call."""
    native, slow = executable.call_numpy, executable.run
    dtype, shape = executable.output_types[0][0].np, executable.output_types[0][1]
    empty = np.empty
    state = [knobs.threads, _threads()]

    def run(args: Sequence[Any]) -> Any:
        if knobs.threads != state[0]:
            state[:] = knobs.threads, _threads()
        if knobs.profile:
            return slow(args)[0]
        out = empty(shape, dtype)
        native(*args, out, state[1])
        return out

    return run


def _torch_entry(executable: Any) -> Callable[..., Any]:
    native, slow = executable.call_pointers, executable.run
    empty, shape, strides, kind = _torch_allocator(*executable.output_types[0])
    state = [knobs.threads, _threads()]

    def run(args: Sequence[Any]) -> Any:
        if knobs.threads != state[0]:
            state[:] = knobs.threads, _threads()
        if knobs.profile:
            return slow(args)[0]
        out = empty(shape, strides, kind)
        native(*[a.data_ptr() for a in args], out.data_ptr(), state[1])
        return out

    return run


def _torch_allocator(dtype: Any, shape: tuple[int, ...]) -> tuple[Callable[..., Any], Any, Any, Any]:
    """A function that makes uninitialised tensors, and its arguments for one shape and type."""
    import torch

    kind = getattr(torch, dtype.name)
    strides = torch.empty(shape, dtype=kind, device="meta").stride()
    try:
        # What the code of torch.compile calls: half the time of torch.empty's general way.
        from torch._C._dynamo.guards import _empty_strided_cpu
    except ImportError:
        def _empty_strided_cpu(shape: Any, strides: Any, kind: Any) -> Any:
            return torch.empty_strided(shape, strides, dtype=kind)
    return _empty_strided_cpu, shape, strides, kind
