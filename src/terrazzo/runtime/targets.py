"""Arrays that a caller gives for the results of a call: `out=`.

They are checked first. Native code writes straight into those that are row major and apart from all
inputs, or exactly where an input lies that the executable may write over; the other results are
made elsewhere and copied. So what a call computes never depends on where its results go.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from terrazzo.dtypes import DType, as_dtype
from terrazzo.errors import ArgumentError, DTypeError, ShapeError
from terrazzo.knobs import knobs, thread_count
from terrazzo.runtime import fastcall
from terrazzo.runtime.layout import (
    NUMPY_DATA,
    address_of,
    extent_of,
    is_literal,
    is_row_major,
    row_major,
)

if TYPE_CHECKING:
    from terrazzo.runtime.profile import Profile

Types = Sequence[tuple[DType, tuple[int, ...]]]


def addresses_of(arrays: Sequence[Any]) -> list[int]:
    """Where arrays and tensors begin; 0 for None."""
    return [quick(a) if type(a) is np.ndarray else 0 if a is None else address_of(a)
            for quick in (_address_of_array(),) for a in arrays]


@cache
def _address_of_array() -> Callable[[np.ndarray], int]:
    at = ctypes.c_int64.from_address
    if not fastcall.numpy_layout_known():
        return address_of
    return lambda array: at(id(array) + NUMPY_DATA).value


# ---------------------------------------------------------------- what may be a target
def check_layouts(targets: Sequence[Any], types: Types, name: str) -> None:
    """What is wrong with targets (None: no target) that their type, shape and strides tell."""
    for i, (target, (dtype, shape)) in enumerate(zip(targets, types, strict=True)):
        if target is None:
            continue
        what = f"result {i} of {name}" if len(types) > 1 else f"the result of {name}"
        require_array(target, name)
        if as_dtype(target.dtype) is not dtype:
            raise DTypeError(f"{what} is {dtype.name}, and out= has {as_dtype(target.dtype).name}",
                             hint="results are not converted on their way: pass an array of that "
                             "type, or convert inside the operator")
        if tuple(target.shape) != tuple(shape):
            raise ShapeError(f"{what} has shape {tuple(shape)}, and out= has "
                             f"{tuple(target.shape)}", hint="pass an array of that shape")
        if _repeats(target):
            raise ArgumentError(f"{what} cannot go into out=: elements of it share memory",
                                hint="pass an array with memory for each element")
        if hasattr(target, "data_ptr") and not is_literal(target):
            raise ArgumentError(f"{what} cannot go into out=: that is a view which is negated or "
                                "conjugated when read", hint="pass an ordinary tensor")


def require_array(target: Any, name: str) -> None:
    """Refuse what has no memory of its own that could be written to."""
    if not isinstance(target, np.ndarray) and not hasattr(target, "data_ptr"):
        raise ArgumentError(f"out= of {name} has a {type(target).__name__} in it",
                            hint="pass arrays or tensors, None where one is to be made")
    fastcall.check_devices([target], name, fastcall.device_of([target]))


def _repeats(array: Any) -> bool:
    """Whether two elements may be one place in memory; views by slices and permutes never are."""
    strides = array.stride() if hasattr(array, "data_ptr") else array.strides
    size = 1 if hasattr(array, "data_ptr") else array.dtype.itemsize
    reach = size
    for step, n in sorted((abs(s), n) for s, n in zip(strides, array.shape, strict=True)):
        if n > 1:
            if step < reach:
                return 0 not in array.shape
            reach += step * (n - 1)
    return False


def claim(targets: Sequence[Any], name: str) -> None:
    """Make sure that all targets may be written to now; torch is told that they were."""
    tensors = []
    for target in targets:
        if not isinstance(target, np.ndarray):
            tensors.append(target)
        elif not target.flags.writeable:
            raise ArgumentError(f"{name} got an array for out= that is read only",
                                hint="pass a copy, or set its flags.writeable")
    if tensors:
        _tell_torch(tensors, name)


def _tell_torch(tensors: Sequence[Any], name: str) -> None:
    import torch

    if any(t.is_inference() for t in tensors) and not torch.is_inference_mode_enabled():
        raise ArgumentError(f"{name} got a tensor for out= that was made in inference mode",
                            hint="call it inside torch.inference_mode(), or pass a clone")
    torch.autograd.graph.increment_version(tensors)


def check_apart(targets: Sequence[Any], name: str) -> None:
    """No two targets may share memory: whichever were written last would be in both."""
    ends = [(at + low, at + high) for at, (low, high) in zip(
        addresses_of(targets), map(extent_of, targets), strict=True)]
    order = sorted(range(len(targets)), key=lambda i: ends[i])
    for k, i in enumerate(order):
        for j in order[k + 1:]:
            if ends[j][0] >= ends[i][1]:
                break
            if ends[j][0] < ends[j][1] and _shared(targets[i], targets[j]):
                raise ArgumentError(f"{name} got arrays for out= that share memory",
                                    hint="pass an array of its own for each result")


def _shared(a: Any, b: Any) -> bool:
    from terrazzo.runtime.hosted import to_numpy

    try:
        most: Any = 1 << 16  # steps that the search may take; numpy's types know two values only
        return bool(np.shares_memory(to_numpy(a), to_numpy(b), max_work=most))
    except np.exceptions.TooHardError:
        return True


# ---------------------------------------------------------------- writing there
@dataclass(frozen=True)
class _Room:
    """What is known of memory by its layout."""

    low: int
    high: int
    plain: bool  # row major

    @staticmethod
    def of(array: Any) -> _Room:
        return _Room(*extent_of(array), is_row_major(array))


_NOWHERE = _Room(0, 0, True)


@dataclass(frozen=True)
class Repeated:
    """All that a call does whose arrays lie where those of an earlier one did."""

    native: Callable[..., Any]
    arguments: tuple[int, ...]
    threads: Any  # the setting that it was made under


class Way:
    """How results of an executable go into targets like these (None: make one).

    A call is given inputs and targets of the same types, shapes and strides, with their addresses.
    """

    def __init__(self, executable: Any, arrays: Sequence[Any], targets: Sequence[Any],
                 threads: int = 0, profiles: list[Profile] | None = None):
        self.executable, self.name = executable, executable.name
        self.threads, self.profiles = threads, profiles
        self.given = [i for i, t in enumerate(targets) if t is not None]
        self.on_host = not hasattr(executable, "run_into")  # in part
        if self.on_host:
            return
        self.sizes = executable.bind(arrays)
        types = executable.output_shapes(self.sizes)
        check_layouts(targets, types, self.name)
        self.inputs = [_Room.of(a) for a in arrays]
        self.rooms = [_NOWHERE if t is None else _Room.of(t) for t in targets]
        # What is not read where it lies is copied first, and may be overwritten then.
        self.crooked = [executable.strides[i] is None and not a.plain
                        for i, a in enumerate(self.inputs)]
        like = next((a for a in (*targets, *arrays) if hasattr(a, "data_ptr")), None)
        self.makers = [_maker(dtype, shape, like if a is None or hasattr(a, "data_ptr") else None)
                       for (dtype, shape), a in zip(types, targets, strict=True)]

    def __call__(self, args: Sequence[Any], targets: Sequence[Any], places: Sequence[int],
                 pointers: Sequence[int]) -> list[Any]:
        given = [targets[i] for i in self.given]
        if self.on_host or 0 in places:  # an input is empty, or zero without being in memory
            return self._copied(args, targets)
        self._require_apart(given, pointers)
        claim(given, self.name)
        results = [t if self._is_direct(i, places, pointers) else self.makers[i]()
                   for i, t in enumerate(targets)]
        args = [row_major(a) if c else a for a, c in zip(args, self.crooked, strict=True)]
        self.executable.run_into(addresses_of([*args, *results]), self.sizes, self.threads,
                                 self.profiles)
        return _settled(results, targets)

    def repeated(self, places: Sequence[int], pointers: Sequence[int]) -> Repeated | None:
        """What calls with these addresses come down to; None where that is more than one call.

        Such a call has been made: nothing was wrong with it but what may change meanwhile.
        """
        if self.profiles is not None or not self.all_direct(places, pointers):
            return None
        code = self.executable.code
        if code.call_pointers is None or code.allocates or self.executable.arena_size(self.sizes):
            return None
        code.prepare()
        return Repeated(code.call_pointers, (
            *places, *pointers, *self.sizes, 0, self.threads or thread_count()), knobs.threads)

    def all_direct(self, places: Sequence[int], pointers: Sequence[int]) -> bool:
        """Whether native code reads and writes all of such memory where it is."""
        return not (self.on_host or 0 in (*places, *pointers) or any(self.crooked)) and all(
            self._is_direct(i, places, pointers) for i in range(len(self.rooms)))

    def _is_direct(self, i: int, places: Sequence[int], pointers: Sequence[int]) -> bool:
        """Whether native code may write a result where its target is."""
        if i not in self.given or not self.rooms[i].plain:
            return False
        low, high = pointers[i] + self.rooms[i].low, pointers[i] + self.rooms[i].high
        for j, (place, read) in enumerate(zip(places, self.inputs, strict=True)):
            proven = self.executable.over[i] == j and place == pointers[i] and read.plain
            if place + read.low < high and low < place + read.high and not (
                    self.crooked[j] or proven):
                return False
        return True

    def _require_apart(self, targets: Sequence[Any], pointers: Sequence[int]) -> None:
        spans = sorted((pointers[i] + self.rooms[i].low, pointers[i] + self.rooms[i].high)
                       for i in self.given)
        if any(a[1] > b[0] for a, b in pairwise(spans)):
            check_apart(targets, self.name)

    def _copied(self, args: Sequence[Any], targets: Sequence[Any]) -> list[Any]:
        """Results that were made elsewhere, copied into the targets."""
        options = {"threads": self.threads} if self.threads else {}
        results = self.executable.run(args, **options)
        check_layouts(targets, [(as_dtype(r.dtype), tuple(r.shape)) for r in results], self.name)
        given = [targets[i] for i in self.given]
        check_apart(given, self.name)
        claim(given, self.name)
        return _settled(results, targets)


def _settled(results: list[Any], targets: Sequence[Any]) -> list[Any]:
    """The targets, with what was made elsewhere copied into them."""
    for i, (result, target) in enumerate(zip(results, targets, strict=True)):
        if target is not None and target is not result:
            copy(result, target)
            results[i] = target
    return results


def copy(source: Any, target: Any) -> None:
    """Copy values of the same type, between numpy and torch as well."""
    from terrazzo.runtime.hosted import to_numpy, to_torch

    if hasattr(target, "data_ptr"):
        target.copy_(source if hasattr(source, "data_ptr") else to_torch(source))
    else:
        target[...] = to_numpy(source)


def _maker(dtype: DType, shape: tuple[int, ...], like: Any) -> Callable[[], Any]:
    from terrazzo.runtime.executable import empty

    # Not the tensor itself, which would live for as long as this.
    return partial(empty, shape, dtype, None if like is None else like.new_empty(0))


__all__ = ["Repeated", "Way", "addresses_of", "check_apart", "check_layouts", "claim", "copy",
           "require_array"]
