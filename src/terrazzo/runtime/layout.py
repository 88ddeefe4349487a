"""How arrays lie in memory: which of them native code takes as they are, and copies of the rest."""

from __future__ import annotations

from typing import Any

import numpy as np

NUMPY_DATA = 16  # where a numpy array object holds the address of its data (PyArrayObject)


def is_literal(tensor: Any) -> bool:
    """Whether a torch tensor's memory holds its values.

    A view may be said to be negated or conjugated, or a tensor to be zero, without any of it being
    in memory.
    """
    return not (tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor())


def literal(tensor: Any) -> Any:
    """The same values, in memory: the tensor itself where that is so."""
    if is_literal(tensor):
        return tensor
    if tensor._is_zerotensor():
        return tensor.new_zeros(tensor.shape)
    return tensor.resolve_conj().resolve_neg()


def is_row_major(array: Any) -> bool:
    """Whether native code can use an array's memory as it is."""
    if hasattr(array, "data_ptr"):
        return bool(array.is_contiguous()) and is_literal(array)
    return bool(array.flags.c_contiguous and array.flags.aligned)


def row_major(array: Any) -> Any:
    """The same values in contiguous, aligned memory: the array itself where that is so."""
    if isinstance(array, np.generic):
        return np.asarray(array)
    if is_row_major(array):
        return array
    if hasattr(array, "data_ptr"):
        return literal(array).contiguous()
    return np.require(array, requirements=["C", "A"]).reshape(array.shape)


def strides_of(array: Any) -> tuple[int, ...] | None:
    """Strides in elements by which native code may read an array; None where a copy is better.

    That is so for row major arrays, which need none, and for those whose last axis is neither
    contiguous nor repeats one element: there a copy costs less than gathering.
    """
    shape = tuple(array.shape)
    if is_row_major(array) or 0 in shape:
        return None
    if hasattr(array, "data_ptr"):
        if not is_literal(array):
            return None
        steps = tuple(array.stride())
    else:
        size = array.dtype.itemsize
        if not array.flags.aligned or any(s % size for s in array.strides):
            return None
        steps = tuple(s // size for s in array.strides)
    steps = tuple(0 if n == 1 else s for n, s in zip(shape, steps, strict=True))
    return steps if min(steps) >= 0 and steps[-1] <= 1 else None


def address_of(array: Any) -> int:
    """The address of an array's or tensor's first element."""
    return int(array.data_ptr() if hasattr(array, "data_ptr") else array.ctypes.data)


def extent_of(array: Any) -> tuple[int, int]:
    """The bytes that an array lies in, counted from its address."""
    if 0 in array.shape:
        return 0, 0
    if hasattr(array, "data_ptr"):
        size = array.element_size()
        steps = [s * size for s in array.stride()]
    else:
        size, steps = array.dtype.itemsize, list(array.strides)
    reach = [s * (n - 1) for n, s in zip(array.shape, steps, strict=True)]
    return sum(r for r in reach if r < 0), sum(r for r in reach if r > 0) + size
