"""The sanitizer's shadows of tensors: who wrote an element, and whether anybody has.

While the sanitizer is on, the functions of torch that give memory as it is are watched. An
in-place operation of torch counts up the version of a tensor; from then on the tensor counts as
initialised, and so does everything that other code may have written to.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from terrazzo.triton_cpu.frontend.reports import GRANULE, HIGH, LOW, WRITERS, WRITTEN, Area

FAR = 1 << 60


def prepare(area: Area, tensors: list[Any]) -> list[np.ndarray]:
    """Tell the kernel what is known of its tensors; the shadows must live until it is done."""
    extents = [_extent(tensor) for tensor in tensors]
    granules: dict[int, int] = {}  # the smallest element stored to each storage
    for n, size in area.launch.table["stores"].items():
        extent = extents[int(n)]
        if extent is not None:
            granules[extent[0]] = min(size, granules.get(extent[0], size))
    writers: dict[int, np.ndarray] = {}
    if area.launch.table["anywhere"]:  # it may write to any of them
        _known.clear()
    held: list[np.ndarray] = []
    for n, (tensor, extent) in enumerate(zip(tensors, extents, strict=True)):
        row = area.rows[n]
        row[LOW], row[HIGH], row[GRANULE] = -FAR, FAR, 0
        if extent is None:
            continue
        begin, end, address = extent
        row[LOW], row[HIGH] = begin - address, end - address
        if begin in granules:
            row[GRANULE] = granules[begin].bit_length() - 1
            if begin not in writers:
                writers[begin] = np.zeros((end - begin) // granules[begin] + 1, np.int64)
            row[WRITERS] = writers[begin].ctypes.data
        written = _written_shadow(tensor, begin)
        if written is not None:
            row[WRITTEN] = written.ctypes.data
            held.append(written)
    return [*held, *writers.values()]


def _extent(tensor: Any) -> tuple[int, int, int] | None:
    """Where a tensor's storage begins and ends, and the tensor begins; None if nobody knows."""
    if tensor is None:
        return 0, 0, 0
    tensor = getattr(tensor, "base", tensor)  # of a tensor that Triton reads as another type
    storage = getattr(tensor, "untyped_storage", None)
    if storage is None:
        return None
    memory_ = storage()
    begin = int(memory_.data_ptr())
    return begin, begin + int(memory_.nbytes()), int(tensor.data_ptr())


# ---------------------------------------------------------------- memory nobody has written
_MAKERS = ("empty", "empty_like", "empty_strided")
_METHODS = ("new_empty", "new_empty_strided")
_EXPORTS = ("numpy", "__dlpack__", "data")  # after these, writes are no more seen


@dataclass
class _Memory:
    storage: Any  # weak: it must not live longer because of us
    size: int
    written: np.ndarray | None = None  # a byte for each byte, made when a kernel first sees it


_known: dict[int, _Memory] = {}  # by address
_watching = False


def watch() -> None:
    """Notice from now on what torch gives out uninitialised; nothing happens without torch."""
    global _watching
    torch = sys.modules.get("torch")
    if _watching or not hasattr(torch, "compile"):  # the last thing that torch defines
        return
    assert torch is not None
    _watching = True
    for owner, names in ((torch, _MAKERS), (torch.Tensor, _METHODS)):
        for name in names:
            setattr(owner, name, _after(getattr(owner, name), _remember))
    for name in _EXPORTS:
        found = getattr(torch.Tensor, name)
        setattr(torch.Tensor, name, _before(found, _forget) if callable(found) else property(
            _before(found.__get__, _forget), found.__set__))


def _after(function: Callable[..., Any], note: Callable[[Any], None]) -> Callable[..., Any]:
    import torch

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        tensor = function(*args, **kwargs)
        if not torch.compiler.is_compiling():
            note(tensor)
        return tensor

    return wrapper


def _before(function: Callable[..., Any], note: Callable[[Any], None]) -> Callable[..., Any]:
    import torch

    @functools.wraps(function)
    def wrapper(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            note(tensor)
        return function(tensor, *args, **kwargs)

    return wrapper


def _remember(tensor: Any) -> None:
    from torch.multiprocessing.reductions import StorageWeakRef

    storage = _storage(tensor)
    if storage is not None and storage.nbytes():
        _known[storage.data_ptr()] = _Memory(StorageWeakRef(storage), storage.nbytes())
    for address in [a for a, memory in _known.items() if memory.storage.expired()]:
        del _known[address]


def _forget(tensor: Any) -> None:
    storage = _storage(tensor)
    if storage is not None:
        _known.pop(storage.data_ptr(), None)


def _storage(tensor: Any) -> Any:
    """The memory of an ordinary tensor on the CPU."""
    from torch import Tensor
    from torch.nn import Parameter

    if type(tensor) not in (Tensor, Parameter) or tensor.device.type != "cpu":
        return None
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):  # sparse, or inside a transformation
        return None


def _written_shadow(tensor: Any, begin: int) -> np.ndarray | None:
    """A byte for each byte of a tensor's storage, not zero where it was written; None: it all was.

    Kernels write to it as they write to the tensor.
    """
    memory = _known.get(begin)
    if memory is None:
        return None
    if memory.storage.expired() or _version(tensor) != 0 or (
            tensor.untyped_storage().nbytes() != memory.size) or (
            memory.written is not None and memory.written.all()):
        del _known[begin]
        return None
    if memory.written is None:
        memory.written = np.zeros(memory.size, np.uint8)
    return memory.written


def _version(tensor: Any) -> int:
    try:
        return int(tensor._version)
    except (AttributeError, RuntimeError):  # inference tensors have none
        return -1
