"""Tensors in memory, and binding them to inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from terrazzo.dtypes import as_dtype
from terrazzo.errors import ArgumentError
from terrazzo.frontends.onnx.types import code_of, dtype_of, type_text
from terrazzo.ort import devices
from terrazzo.ort.devices import CPU, CUDA, device_named

if TYPE_CHECKING:
    from terrazzo.ort.session import InferenceSession


_DLPACK_CPU = 1  # kDLCPU


class OrtValue:
    """A tensor in memory, of the host's or of a GPU's, that is handed over without a copy."""

    def __init__(self, array: Any, device: str = ""):
        self._array = array
        self._device = device or (CUDA if getattr(array, "is_cuda", False) else CPU)

    @staticmethod
    def ortvalue_from_numpy(array: np.ndarray, device_type: str = CPU, device_id: int = 0
                            ) -> OrtValue:
        """Share an array's memory, or copy it to a GPU."""
        if not hasattr(array, "shape"):
            raise ArgumentError(f"an OrtValue is made of an array, not of a "
                                f"{type(array).__name__}", hint="give it numpy.asarray(...)")
        device = device_named(device_type, device_id)
        whole = np.ascontiguousarray(array).reshape(array.shape)
        if device == CPU:
            return OrtValue(whole)
        there = devices.on_device(whole, device)
        return OrtValue(whole.copy() if there is whole else there, device)

    @staticmethod
    def ortvalue_from_numpy_with_onnx_type(array: np.ndarray, onnx_type: int) -> OrtValue:
        """Share the memory of raw bytes as elements of an ONNX type that numpy lacks."""
        dtype = dtype_of(onnx_type).np
        if dtype.itemsize != array.dtype.itemsize:
            raise ArgumentError(f"elements of {array.dtype} cannot stand for {dtype}")
        return OrtValue(array.view(dtype))

    @staticmethod
    def ortvalue_from_shape_and_type(shape: Sequence[int], element_type: Any,
                                     device_type: str = CPU, device_id: int = 0) -> OrtValue:
        """Fresh memory."""
        device = device_named(device_type, device_id)
        return OrtValue(devices.empty(shape, element_type, device), device)

    @staticmethod
    def from_dlpack(data: Any, *more: Any) -> OrtValue:
        """Share the memory of a tensor of another library, on the CPU or a GPU."""
        if data.__dlpack_device__()[0] == _DLPACK_CPU:
            return OrtValue(np.from_dlpack(data))
        import torch

        return OrtValue(torch.from_dlpack(data))

    def numpy(self) -> np.ndarray:
        """The memory as an array, not copied; a copy of what lies on a GPU."""
        if self._device == CPU:
            return self._array
        return np.array(devices.on_host(self._array))

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def data_type(self) -> str:
        return type_text(as_dtype(self._array.dtype).np)

    def element_type(self) -> int:
        return code_of(as_dtype(self._array.dtype))

    def data_ptr(self) -> int:
        return devices.memory_of(self._device).address(self._array)

    def device_name(self) -> str:
        return self._device

    def tensor_size_in_bytes(self) -> int:
        return int(self._array.nbytes)

    def is_tensor_sequence(self) -> bool:
        return isinstance(self._array, list)

    def is_sparse_tensor(self) -> bool:
        return False

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()

    def is_tensor(self) -> bool:
        return isinstance(self._array, np.ndarray) or hasattr(self._array, "data_ptr")

    def has_value(self) -> bool:
        return self._array is not None

    def update_inplace(self, array: np.ndarray) -> None:
        """Copy new contents into the same memory."""
        own = as_dtype(self._array.dtype).np
        if array.shape != tuple(self._array.shape) or array.dtype != own:
            raise ArgumentError(f"an OrtValue of {own}{self.shape()} cannot take "
                                f"{array.dtype}{list(array.shape)}")
        devices.copy(array, self._array)


class IOBinding:
    """Inputs and outputs bound to memory once, for runs without copies."""

    def __init__(self, session: InferenceSession):
        self._session = session
        self._inputs: dict[str, Any] = {}
        self._outputs: dict[str, tuple[str, Any]] = {}  # where, and in which memory if it is given
        self._results: list[OrtValue] = []
        # What repeats the last run, and of which code, as long as nothing is bound anew.
        self._again: tuple[Any, Callable[[], None]] | None = None

    def bind_cpu_input(self, name: str, array: np.ndarray) -> None:
        """Use an array's memory as an input."""
        self._bind_input(name, array)

    def bind_ortvalue_input(self, name: str, value: OrtValue) -> None:
        """Use a value as an input."""
        self._bind_input(name, value._array)

    def bind_input(self, name: str, device_type: str, device_id: int, element_type: Any,
                   shape: Sequence[int], buffer_ptr: int) -> None:
        """Use memory at an address as an input."""
        self._bind_input(name, devices.at(buffer_ptr, element_type, shape,
                                          device_named(device_type, device_id)))

    def bind_output(self, name: str, device_type: str = CPU, device_id: int = 0,
                    element_type: Any = None, shape: Sequence[int] | None = None,
                    buffer_ptr: int | None = None) -> None:
        """Ask for an output, in memory at an address or in fresh memory."""
        device = device_named(device_type, device_id)
        self._bind_output(name, device, None if buffer_ptr is None else devices.at(
            buffer_ptr, element_type, shape or (), device))

    def bind_ortvalue_output(self, name: str, value: OrtValue) -> None:
        """Write an output into a value's memory."""
        self._bind_output(name, value.device_name(), value._array)

    def clear_binding_inputs(self) -> None:
        self._inputs.clear()
        self._again = None

    def clear_binding_outputs(self) -> None:
        self._outputs.clear()
        self._again = None

    def _bind_input(self, name: str, array: Any) -> None:
        self._inputs[name], self._again = array, None

    def _bind_output(self, name: str, device: str, array: Any) -> None:
        self._outputs[name], self._again = (device, array), None

    def synchronize_inputs(self) -> None:
        """Wait until what was queued for the inputs is done."""
        self._session._wait()

    def synchronize_outputs(self) -> None:
        """Wait until the outputs are there."""
        self._session._wait()

    def get_outputs(self) -> list[OrtValue]:
        """The outputs of the last run."""
        return self._results

    def copy_outputs_to_cpu(self) -> list[np.ndarray]:
        """The outputs of the last run as arrays."""
        return [r.numpy() for r in self._results]

    def _run(self, device: str) -> None:
        """Run where a device reads its inputs and leaves its outputs, and move what is elsewhere.

        Memory that outputs are bound to is written to directly if it is the device's.
        """
        if not self._outputs:
            raise ArgumentError("no output is bound",
                                hint="bind one: io_binding.bind_output(name)")
        whole = self._session._whole
        if self._again is not None and self._again[0] is whole:
            self._again[1]()
            return
        holds = devices.memory_of(device).holds
        feeds = {name: devices.on_device(a, device) for name, a in self._inputs.items()}
        into = {name: a for name, (_, a) in self._outputs.items() if a is not None and holds(a)}
        results = self._session._session.run(feeds, list(self._outputs), into=into)
        self._results = []
        for result, (where, target) in zip(results, self._outputs.values(), strict=True):
            if target is None:
                result = devices.on_device(result, where)
            elif result is not target:
                devices.copy(result, target)
                result = target
            self._results.append(OrtValue(result, where))
        if whole is not None and len(into) == len(self._outputs) and all(
                feeds[name] is a for name, a in self._inputs.items()) and not any(
                p.name in feeds for p in self._session._session.overridable):
            again = whole.again(feeds, into)
            self._again = None if again is None else (whole, again)
