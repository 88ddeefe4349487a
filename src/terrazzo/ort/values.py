"""Tensors in memory, and binding them to inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from terrazzo.dtypes import as_dtype
from terrazzo.errors import ArgumentError
from terrazzo.frontends.onnx.types import code_of, dtype_of, type_text

if TYPE_CHECKING:
    from terrazzo.ort.session import InferenceSession


class OrtDevice:
    """Where memory lies: on the CPU."""

    def __init__(self, device_type: Any = "cpu", memory_type: Any = 0, device_id: int = 0,
                 *more: Any):
        _require_cpu("cpu" if device_type in (0, "cpu") else device_type)
        self._id = device_id

    @staticmethod
    def make(name: str, device_id: int = 0, *more: Any) -> OrtDevice:
        """The device of a name."""
        return OrtDevice(name, 0, device_id)

    @staticmethod
    def cpu() -> int:
        """The number of the CPU among kinds of devices."""
        return 0

    @staticmethod
    def default_memory() -> int:
        """The number of ordinary memory."""
        return 0

    def device_type(self) -> int:
        return 0

    def device_id(self) -> int:
        return self._id

    def device_mem_type(self) -> int:
        return 0


class OrtValue:
    """A tensor in memory that is handed over without a copy."""

    def __init__(self, array: Any):
        self._array = array

    @staticmethod
    def ortvalue_from_numpy(array: np.ndarray, device_type: str = "cpu", device_id: int = 0
                            ) -> OrtValue:
        """Share an array's memory."""
        _require_cpu(device_type)
        return OrtValue(np.ascontiguousarray(array).reshape(array.shape))

    @staticmethod
    def ortvalue_from_numpy_with_onnx_type(array: np.ndarray, onnx_type: int) -> OrtValue:
        """Share the memory of raw bytes as elements of an ONNX type that numpy lacks."""
        dtype = dtype_of(onnx_type).np
        if dtype.itemsize != array.dtype.itemsize:
            raise ArgumentError(f"elements of {array.dtype} cannot stand for {dtype}")
        return OrtValue(array.view(dtype))

    @staticmethod
    def ortvalue_from_shape_and_type(shape: Sequence[int], element_type: Any,
                                     device_type: str = "cpu", device_id: int = 0) -> OrtValue:
        """Fresh memory."""
        _require_cpu(device_type)
        kind = dtype_of(element_type).np if isinstance(element_type, int) else (
            as_dtype(np.dtype(element_type)).np)
        return OrtValue(np.empty(tuple(shape), kind))

    @staticmethod
    def from_dlpack(data: Any, *more: Any) -> OrtValue:
        """Share the memory of a tensor of another library."""
        return OrtValue(np.from_dlpack(data))

    def numpy(self) -> np.ndarray:
        """The memory as an array, not copied."""
        return self._array

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def data_type(self) -> str:
        return type_text(self._array.dtype)

    def element_type(self) -> int:
        return code_of(as_dtype(self._array.dtype))

    def data_ptr(self) -> int:
        return self._array.ctypes.data

    def device_name(self) -> str:
        return "cpu"

    def tensor_size_in_bytes(self) -> int:
        return self._array.nbytes

    def is_tensor_sequence(self) -> bool:
        return isinstance(self._array, list)

    def is_sparse_tensor(self) -> bool:
        return False

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()

    def is_tensor(self) -> bool:
        return isinstance(self._array, np.ndarray)

    def has_value(self) -> bool:
        return self._array is not None

    def update_inplace(self, array: np.ndarray) -> None:
        """Copy new contents into the same memory."""
        if array.shape != self._array.shape or array.dtype != self._array.dtype:
            raise ArgumentError(f"an OrtValue of {self._array.dtype}{list(self._array.shape)} "
                                f"cannot take {array.dtype}{list(array.shape)}")
        self._array[...] = array


def _require_cpu(device: str) -> None:
    if str(device).lower() != "cpu":
        raise ArgumentError(f"there is no device {device!r}", hint="use 'cpu'")


class IOBinding:
    """Inputs and outputs bound to memory once, for runs without copies."""

    def __init__(self, session: InferenceSession):
        self._session = session
        self._inputs: dict[str, Any] = {}
        self._outputs: dict[str, np.ndarray | None] = {}
        self._results: list[OrtValue] = []

    def bind_cpu_input(self, name: str, array: np.ndarray) -> None:
        """Use an array's memory as an input."""
        self._inputs[name] = array

    def bind_ortvalue_input(self, name: str, value: OrtValue) -> None:
        """Use a value as an input."""
        self._inputs[name] = value.numpy()

    def bind_input(self, name: str, device_type: str, device_id: int, element_type: Any,
                   shape: Sequence[int], buffer_ptr: int) -> None:
        """Use memory at an address as an input."""
        _require_cpu(device_type)
        self._inputs[name] = _at(buffer_ptr, element_type, shape)

    def bind_output(self, name: str, device_type: str = "cpu", device_id: int = 0,
                    element_type: Any = None, shape: Sequence[int] | None = None,
                    buffer_ptr: int | None = None) -> None:
        """Ask for an output, in memory at an address or in fresh memory."""
        _require_cpu(device_type)
        self._outputs[name] = None if buffer_ptr is None else _at(
            buffer_ptr, element_type, shape or ())

    def bind_ortvalue_output(self, name: str, value: OrtValue) -> None:
        """Write an output into a value's memory."""
        self._outputs[name] = value.numpy()

    def clear_binding_inputs(self) -> None:
        self._inputs.clear()

    def clear_binding_outputs(self) -> None:
        self._outputs.clear()

    def synchronize_inputs(self) -> None:
        """Nothing to wait for on a CPU."""

    def synchronize_outputs(self) -> None:
        """Nothing to wait for on a CPU."""

    def get_outputs(self) -> list[OrtValue]:
        """The outputs of the last run."""
        return self._results

    def copy_outputs_to_cpu(self) -> list[np.ndarray]:
        """The outputs of the last run as arrays."""
        return [r.numpy() for r in self._results]

    def _run(self) -> None:
        names = list(self._outputs)
        into = {n: a for n, a in self._outputs.items() if a is not None}
        results = self._session._session.run(self._inputs, names, into=into)
        self._results = [OrtValue(r) for r in results]


def _at(pointer: int, element_type: Any, shape: Sequence[int]) -> np.ndarray:
    import ctypes

    kind = (dtype_of(element_type) if isinstance(element_type, int) else
            as_dtype(np.dtype(element_type))).np
    count = int(np.prod(shape, dtype=np.int64))
    raw = (ctypes.c_uint8 * (count * kind.itemsize)).from_address(pointer)
    return np.ctypeslib.as_array(raw).view(kind).reshape(tuple(shape))


