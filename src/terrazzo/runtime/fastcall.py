"""The way from a Python call to native code in a few microseconds."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from terrazzo.base.nests import pack
from terrazzo.chips.memory import HOST
from terrazzo.errors import ArgumentError, DeviceError
from terrazzo.knobs import knobs, thread_count
from terrazzo.runtime import pages
from terrazzo.runtime.layout import NUMPY_DATA, is_row_major, literal, row_major

MOST_ENTRIES = 4096  # sizes may vary without end, and entries are quick to make
_ndarray = np.ndarray
_tensor_types: set[type] = set()  # torch's, as they come along: torch is never imported for this


class _NoLevel:
    """Stands for torch.autograd.forward_ad until torch comes along."""

    _current_level = -1


_forward_mode: Any = _NoLevel


def is_array(x: Any) -> bool:
    """Whether something is a numpy array or scalar, or a torch tensor."""
    return isinstance(x, (_ndarray, np.generic)) or hasattr(x, "data_ptr")


def key_of(args: Sequence[Any]) -> Hashable:
    """What an entry depends on: the layout and type of every argument; None for anything else.

    Of a Python float, only that it is one.
    """
    key: Hashable = ()
    try:
        for a in args:
            kind = type(a)
            if kind is _ndarray:
                key = (key, a.shape, a.strides, a.dtype)
            elif kind in _tensor_types:
                key = (key, a.shape, a.stride(), a.dtype, _is_seen_otherwise(a),
                       (a.requires_grad and _grad_enabled())
                       or (_forward_mode._current_level >= 0 and not _below.autograd))
            elif kind is float:
                key = (key, float)
            elif hasattr(a, "data_ptr"):
                _welcome(a)
                return key_of(args)
            else:
                return None
    except RuntimeError:  # from torch: this tensor has no strides
        _refuse_layout(a)
        raise
    return key


def _welcome(tensor: Any) -> None:
    """Learn of a class of tensors; one whose values are not simply in memory is refused."""
    import torch
    from torch.autograd import forward_ad

    global _forward_mode
    kind = type(tensor)
    _forward_mode = forward_ad
    if isinstance(tensor, torch.Tensor):
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise ArgumentError(f"a {kind.__name__} computes in its own way, and native code reads "
                                "memory", hint="pass an ordinary tensor")
        _refuse_layout(tensor)
    _tensor_types.add(kind)


def _refuse_layout(tensor: Any) -> None:
    """Of what torch calls a tensor, that which is more than numbers at strides in memory."""
    if str(getattr(tensor, "layout", "torch.strided")) != "torch.strided":
        raise ArgumentError(f"got a tensor with layout {tensor.layout}",
                            hint="make it an ordinary one with .to_dense()")
    if getattr(tensor, "is_nested", False):
        raise ArgumentError("got a nested tensor", hint="pad it with .to_padded_tensor(0)")
    if getattr(tensor, "is_quantized", False):
        raise ArgumentError("got a quantised tensor", hint="pass .int_repr() or .dequantize()")


def layout_of(a: Any) -> Any:
    """What an entry depends on of one array; None for anything else."""
    kind = type(a)
    if kind is _ndarray:
        return (a.shape, a.strides, a.dtype)
    if kind in _tensor_types:
        _refuse_layout(a)
        return (a.shape, a.stride(), a.dtype, _is_seen_otherwise(a),
                (a.requires_grad and _grad_enabled())
                or (_forward_mode._current_level >= 0 and not _below.autograd))
    if hasattr(a, "data_ptr"):
        _welcome(a)
        return layout_of(a)
    return kind if isinstance(a, np.generic) else None


def wants_gradient(a: Any) -> bool:
    """Whether torch is to remember what is computed from this, or pushes tangents through it."""
    return hasattr(a, "data_ptr") and (
        (a.requires_grad and _grad_enabled()) or pushes_tangents())


def pushes_tangents() -> bool:
    """Whether torch is in forward mode, and what is called is not the kernel of an operator."""
    return bool(_forward_mode._current_level >= 0 and not _below.autograd)


class _Below(threading.local):
    """Whether a thread runs the kernel of an operator of torch's, which sees no tangents."""

    autograd = False


_below = _Below()


@contextmanager
def below_autograd() -> Iterator[None]:
    """Inside, tensors are numbers in memory, whatever torch keeps beside them."""
    before, _below.autograd = _below.autograd, True
    try:
        yield
    finally:
        _below.autograd = before


def _is_seen_otherwise(tensor: Any) -> Any:
    """Whether a tensor is said to be negated or conjugated, without being so in memory.

    Of a tensor that is not in the host's memory, where it is.
    """
    return (tensor.is_neg() or tensor.is_conj()) if tensor.is_cpu else tensor.device


def _grad_enabled() -> bool:
    import torch

    return torch.is_grad_enabled()


def device_of(arrays: Sequence[Any]) -> str:
    """The kind of device that tensors are on, which is the name of its chip; empty: the host."""
    for a in arrays:
        if hasattr(a, "data_ptr") and not a.is_cpu:
            return str(a.device.type)
    return ""


def check_devices(arrays: Sequence[Any], name: str, chip: str = "") -> None:
    """Torch tensors must be on the CPU, or all on the device that the code is for.

    Numbers in tensors of the CPU go anywhere, as in torch.
    """
    devices: dict[Any, None] = {}
    for a in arrays:
        if hasattr(a, "data_ptr"):
            device = a.device
            if device.type not in ("cpu", chip):
                raise DeviceError(f"{name} got a tensor on {device}", hint=(
                    "it has no values" if device.type == "meta" else "move it with .cpu()"))
            if device.type != "cpu" or a.dim():
                devices[device] = None
            _refuse_layout(a)
    if len(devices) > 1:
        raise DeviceError(f"{name} got tensors on {' and '.join(map(str, devices))}",
                          hint="move them to one device")


@cache
def numpy_layout_known() -> bool:
    """Whether array objects hold their address where we think they do."""
    probe = np.empty(3, np.float32)
    found = ctypes.c_void_p.from_address(id(probe) + NUMPY_DATA).value
    return found == probe.ctypes.data


def entry(executable: Any, structure: Any, arrays: Sequence[Any], threads: int = 0
          ) -> Callable[..., Any]:
    """A function from a tuple of arguments like `arrays` to the results.

    It runs on so many threads, or on those of the knob.
    """
    code: Any = getattr(executable, "code", None)  # not where the host takes part
    direct = code is not None and (code.call_numpy or code.call_slots) is not None
    if direct and numpy_layout_known() and all(type(a) is _ndarray for a in arrays):
        return _direct(executable, structure, arrays, _numpy_ways(executable), threads)
    numbers = [i for i, a in enumerate(arrays) if type(a) is _ndarray and a.ndim == 0]
    if code is not None and code.call_pointers is not None and device_of(arrays):
        return _on_device(executable, structure, arrays, threads)
    if direct and len(numbers) < len(arrays) and (not numbers or numpy_layout_known()) and all(
            hasattr(a, "data_ptr") for i, a in enumerate(arrays) if i not in numbers):
        quick = _direct(executable, structure, arrays, _torch_ways(executable), threads)
        return _beside_tensors(quick, numbers) if numbers else quick
    options = {"threads": threads} if threads else {}

    def run(args: Sequence[Any]) -> Any:
        return pack(structure, executable.run(args, **options))

    return run


class Remembering:
    """Runs an executable on any arrays: the direct way for those like earlier ones."""

    def __init__(self, executable: Any, threads: int = 0):
        self._executable, self._threads = executable, threads
        self._structure = list(range(len(executable.output_types)))
        self._entries: dict[Hashable, Callable[[Sequence[Any]], list[Any]]] = {}

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        key = key_of(arrays)
        known = self._entries.get(key)
        if known is not None:
            return known(arrays)
        results: list[Any] = self._executable.run(arrays, threads=self._threads)
        if key is not None:
            if len(self._entries) >= MOST_ENTRIES:
                self._entries.clear()
            self._entries[key] = entry(self._executable, self._structure, arrays, self._threads)
        return results

    def direct(self, arrays: Sequence[Any]) -> Callable[[Sequence[Any]], list[Any]]:
        """The way for arrays that lie like these."""
        return self._entries.get(key_of(arrays), self)


class _InMemory:
    """A number in an array, handed over as a tensor is."""

    __slots__ = ("address", "array")

    def __init__(self, array: np.ndarray, address: int):
        self.array, self.address = array, address

    def data_ptr(self) -> int:
        return self.address

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.array


def _beside_tensors(quick: Callable[..., Any], numbers: Sequence[int]) -> Callable[..., Any]:
    """An entry for tensors that takes numbers in arrays as well, at these places."""
    at = ctypes.c_int64.from_address

    def run(args: Sequence[Any]) -> Any:
        args = list(args)
        for i in numbers:
            a = args[i]
            if type(a) is _ndarray:  # else a tensor already, on the way through autograd
                args[i] = _InMemory(a, at(id(a) + NUMPY_DATA).value)
        return quick(args)

    return run


class _Ways(NamedTuple):
    """How one kind of array is handled: what native code is given of it, how it is made."""

    native: Callable[..., Any]
    addresses: Callable[[Sequence[Any]], tuple[Sequence[Any], list[int]]] | None  # None: objects
    empty: Callable[..., Any]
    described: Callable[[Any, tuple[int, ...]], tuple[Any, ...]]  # arguments of `empty`


def _numpy_ways(executable: Any) -> _Ways:
    def described(dtype: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
        return shape, dtype.np

    code = executable.code
    if code.call_numpy is not None:
        return _Ways(code.call_numpy, None, np.empty, described)
    at = ctypes.c_int64.from_address

    def addresses(arrays: Sequence[Any]) -> tuple[Sequence[Any], list[int]]:
        return arrays, [at(id(a) + NUMPY_DATA).value for a in arrays]

    return _Ways(_in_slots(code.call_slots), addresses, np.empty, described)


def _in_slots(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call with many arguments: they go in an array."""
    def native(*given: int) -> None:
        *slots, arena, threads = given
        table = (ctypes.c_int64 * len(slots))(*slots)
        call(ctypes.addressof(table), arena, threads, 0)

    return native


def _on_device(executable: Any, structure: Any, arrays: Sequence[Any], threads: int
               ) -> Callable[..., Any]:
    """The direct way for tensors of a device; numbers are filled into tensors of it."""
    import torch

    brought = executable.chip.memory.brought
    here = [a if hasattr(a, "data_ptr") and not a.is_cpu else brought(a) for a in arrays]
    device = next(a.device for a in here)
    quick = _direct(executable, structure, here, _torch_ways(executable, device), threads)
    others = [(i, h.dtype) for i, (a, h) in enumerate(zip(arrays, here, strict=True)) if a is not h]
    if not others:
        return quick

    def run(args: Sequence[Any]) -> Any:
        args = list(args)
        for i, kind in others:
            a = args[i]
            if type(a) is _ndarray and a.ndim == 0 and kind is not torch.bfloat16:
                args[i] = torch.full((), a.item(), dtype=kind, device=device)
            elif not hasattr(a, "data_ptr") or a.is_cpu:
                args[i] = brought(a)
        return quick(args)

    return run


def _torch_ways(executable: Any, device: Any = None) -> _Ways:
    import torch

    device = device or torch.device("cpu")

    def described(dtype: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
        kind = getattr(torch, dtype.name)
        return shape, torch.empty(shape, dtype=kind, device="meta").stride(), kind

    def general(shape: Any, strides: Any, kind: Any) -> Any:
        return torch.empty_strided(shape, strides, dtype=kind, device=device)

    # What the code of torch.compile calls: half the time of torch.empty's general way.
    empty = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None) or general
    if device.index:  # the quick way is for the current device
        empty = general
    code = executable.code
    return _Ways(code.call_pointers or _in_slots(code.call_slots), _addresses, empty, described)


def _threads(executable: Any) -> int:
    executable.code.prepare()
    return thread_count()


def _addresses(tensors: Sequence[Any]) -> tuple[Sequence[Any], list[int]]:
    """Where tensors lie, and what must be kept for as long as they are read there."""
    try:
        pointers = [a.data_ptr() for a in tensors]
        if 0 in pointers:  # empty, or known to be zero without being in memory
            tensors = [literal(a) for a in tensors]
            pointers = [a.data_ptr() for a in tensors]
    except RuntimeError:
        for a in tensors:
            _refuse_layout(a)
        raise ArgumentError("a tensor inside a transform of torch.func has no memory of its own",
                            hint="use tz.grad, tz.vjp or tz.jvp, or torch.autograd") from None
    return tensors, pointers


def _in_large_pages(empty: Callable[..., Any]) -> Callable[..., Any]:
    """A way to make tensors, of which large ones are not written in small pages."""
    def make(*described: Any) -> Any:
        tensor = empty(*described)
        if tensor.nbytes >= pages.FRESH:
            pages.ask_for_large_pages(tensor.data_ptr(), tensor.nbytes)
        return tensor

    return make


def _direct(executable: Any, structure: Any, arrays: Sequence[Any], ways: _Ways, threads: int
            ) -> Callable[..., Any]:
    """Everything that layouts and types decide is decided here, once; a call does the rest."""
    native, addresses, empty = ways.native, ways.addresses, ways.empty
    slow = partial(executable.run, threads=threads)
    sizes = executable.bind(arrays)
    types = executable.output_shapes(sizes)
    outputs = [ways.described(dtype, shape) for dtype, shape in types]
    on_host = executable.chip.memory is HOST
    if addresses is _addresses and on_host and any(
            math.prod(shape) * dtype.itemsize >= pages.FRESH for dtype, shape in types):
        empty = _in_large_pages(empty)
    crooked = [i for i, a in enumerate(arrays)
               if executable.strides[i] is None and not is_row_major(a)]
    arena_size, allocates = executable.arena_size(sizes), executable.code.allocates
    reaches = bool(executable.reaches)
    state = [knobs.threads, threads or _threads(executable)]
    as_made = structure == list(range(len(outputs)))

    def run(args: Sequence[Any]) -> Any:
        if knobs.threads != state[0]:
            state[:] = knobs.threads, threads or _threads(executable)
        if knobs.profile:
            return pack(structure, slow(args))
        if crooked:
            args = [row_major(a) if i in crooked else a for i, a in enumerate(args)]
        try:
            results = [empty(*o) for o in outputs]
        except (MemoryError, RuntimeError, ValueError):
            return pack(structure, slow(args))  # which says what is too large
        if addresses is None:
            given: Sequence[Any] = (*args, *results)
        else:
            made = addresses(results)[1]
            args, pointers = addresses(args)
            given = [*pointers, *made]
        arena = executable.take_arena(arena_size)
        native(*given, *sizes, arena.address, state[1])
        word = executable.word(arena) if reaches else 0
        executable.give_arena(arena)
        if allocates:
            executable.check_memory()
        if word > 0:
            raise executable.fault(word, sizes)
        return results if as_made else pack(structure, results)

    if structure not in (0, [0]) or len(outputs) != 1 or crooked or arena_size or allocates or (
            addresses not in (None, _addresses)):
        return run
    (described,) = outputs
    listed = structure == [0]

    def run_plain(args: Sequence[Any]) -> Any:
        """The common case, with nothing that it does not need."""
        if knobs.threads != state[0]:
            state[:] = knobs.threads, threads or _threads(executable)
        if knobs.profile:
            return pack(structure, slow(args))
        try:
            out = empty(*described)
        except (MemoryError, RuntimeError, ValueError):
            return pack(structure, slow(args))  # which says what is too large
        if addresses is None:
            native(*args, out, *sizes, 0, state[1])
        else:
            try:
                pointers = [a.data_ptr() for a in args]
            except RuntimeError:
                pointers = [0]
            if 0 in pointers:
                args, pointers = _addresses(args)
            native(*pointers, out.data_ptr(), *sizes, 0, state[1])
        return [out] if listed else out

    if addresses is None or on_host or listed or sizes or len(arrays) not in (1, 2):
        return run_plain
    return _plain_on_device(native, empty, described, len(arrays), run_plain)


def _plain_on_device(native: Callable[..., Any], empty: Callable[..., Any],
                     described: Sequence[Any], count: int, general: Callable[..., Any]
                     ) -> Callable[..., Any]:
    """The same for one or two tensors of a device, where a launch takes no more than all of this.

    The general way is for whatever is not as usual.
    """
    shape, strides, kind = described

    def run_one(args: Sequence[Any]) -> Any:
        (x,) = args
        try:
            out = empty(shape, strides, kind)
            place = x.data_ptr()
        except (MemoryError, RuntimeError, ValueError):
            return general(args)
        if not place or knobs.profile:
            return general(args)
        native(place, out.data_ptr(), 0, 1)
        return out

    def run_two(args: Sequence[Any]) -> Any:
        x, y = args
        try:
            out = empty(shape, strides, kind)
            first, second = x.data_ptr(), y.data_ptr()
        except (MemoryError, RuntimeError, ValueError):
            return general(args)
        if not first or not second or knobs.profile:
            return general(args)
        native(first, second, out.data_ptr(), 0, 1)
        return out

    return run_one if count == 1 else run_two
