"""onnxruntime's Python API on terrazzo's sessions: `import terrazzo.ort as ort` is the one change.

What a program written for onnxruntime calls is here under the same names, with the same meaning.
Options that steer what terrazzo does not have (memory arenas, logging ids) are accepted and kept.
Errors are those of `terrazzo.errors`, under onnxruntime's names where programs catch them.
"""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from terrazzo.dtypes import as_dtype
from terrazzo.errors import ArgumentError, ModelError, TerrazzoError, UnsupportedOperator
from terrazzo.frontends.onnx.types import code_of, dtype_of, type_text
from terrazzo.runtime.profile import Recording
from terrazzo.session import Session
from terrazzo.session.ports import Port
from terrazzo.version import __version__

Fail = TerrazzoError
InvalidArgument = InvalidGraph = InvalidProtobuf = NoSuchFile = ModelError
NotImplemented = UnsupportedOperator
RuntimeException = TerrazzoError

CPU, REFERENCE = "CPUExecutionProvider", "ReferenceExecutionProvider"
_PROVIDERS = (CPU, REFERENCE)


class GraphOptimizationLevel(enum.IntEnum):
    """Which rewrites run, as onnxruntime counts them."""

    ORT_DISABLE_ALL = 0
    ORT_ENABLE_BASIC = 1
    ORT_ENABLE_EXTENDED = 2
    ORT_ENABLE_LAYOUT = 3
    ORT_ENABLE_ALL = 99


_LEVELS = {0: "none", 1: "basic", 2: "extended", 3: "layout", 99: "all"}


class ExecutionMode(enum.IntEnum):
    """Accepted for compatibility: a compiled model is one sequence of kernels."""

    ORT_SEQUENTIAL = 0
    ORT_PARALLEL = 1


class SessionOptions:
    """How a session is made; every attribute of onnxruntime's may be set."""

    def __init__(self) -> None:
        self.graph_optimization_level = GraphOptimizationLevel.ORT_ENABLE_ALL
        self.optimized_model_filepath = ""
        self.enable_profiling = False
        self.profile_file_prefix = "terrazzo_profile"
        self.intra_op_num_threads = 0
        self.inter_op_num_threads = 0
        self.execution_mode = ExecutionMode.ORT_SEQUENTIAL
        self.enable_mem_pattern = self.enable_cpu_mem_arena = self.enable_mem_reuse = True
        self.log_severity_level = self.log_verbosity_level = -1
        self.logid = ""
        self.use_deterministic_compute = False
        self._entries: dict[str, str] = {}
        self._sizes: dict[str, int] = {}

    def add_session_config_entry(self, key: str, value: str) -> None:
        """Remember a setting by name."""
        self._entries[key] = value

    def get_session_config_entry(self, key: str) -> str:
        """A setting that was remembered."""
        if key not in self._entries:
            raise ArgumentError(f"there is no session option {key!r}")
        return self._entries[key]

    def add_free_dimension_override_by_name(self, name: str, size: int) -> None:
        """Compile for one size of a symbolic dimension."""
        self._sizes[name] = int(size)

    def register_custom_ops_library(self, path: str) -> None:
        """Refused: such libraries hold onnxruntime's own binary interface."""
        raise UnsupportedOperator(
            f"{path} holds operators for onnxruntime's binary interface",
            hint='write the operator once with @tz.op(domain="...") instead')


class RunOptions:
    """Accepted for compatibility."""

    def __init__(self) -> None:
        self.log_severity_level = self.log_verbosity_level = -1
        self.logid = ""
        self.only_execute_path_to_fetches = False
        self.terminate = False

    def add_run_config_entry(self, key: str, value: str) -> None:
        """Accepted and ignored: nothing here depends on it."""


class NodeArg:
    """An input or output as a program sees it."""

    def __init__(self, port: Port):
        self.name = port.name
        self.shape = [] if port.shape is None else list(port.shape)
        self.type = (type_text("string") if port.kind == "string" else
                     type_text(port.dtype) if port.dtype is not None else
                     f"{port.kind}(tensor(float))")

    def __repr__(self) -> str:
        return f"NodeArg(name={self.name!r}, type={self.type!r}, shape={self.shape})"


class ModelMetadata:
    """What a model says of itself."""

    def __init__(self, proto: Any):
        self.producer_name = proto.producer_name
        self.graph_name = proto.graph.name
        self.domain = proto.domain
        self.description = proto.doc_string
        self.graph_description = proto.graph.doc_string
        self.version = proto.model_version
        self.custom_metadata_map = {e.key: e.value for e in proto.metadata_props}


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


class InferenceSession:
    """A model, loaded and compiled, with onnxruntime's methods."""

    def __init__(self, path_or_bytes: Any, sess_options: SessionOptions | None = None,
                 providers: Sequence[Any] | None = None,
                 provider_options: Sequence[Mapping[str, Any]] | None = None, **_: Any):
        self._options = sess_options or SessionOptions()
        self._providers = _provider_names(providers)
        options = self._options
        self._session = Session(
            path_or_bytes, reference=REFERENCE in self._providers,
            threads=options.intra_op_num_threads,
            level=_LEVELS[int(options.graph_optimization_level)], sizes=options._sizes,
            profile=options.enable_profiling)
        self._started = time.time_ns()
        if options.optimized_model_filepath:
            self._session.export(options.optimized_model_filepath)

    # ------------------------------------------------------------ what the model is
    def get_inputs(self) -> list[NodeArg]:
        return [NodeArg(p) for p in self._session.inputs]

    def get_outputs(self) -> list[NodeArg]:
        return [NodeArg(p) for p in self._session.outputs]

    def get_overridable_initializers(self) -> list[NodeArg]:
        return [NodeArg(p) for p in self._session.overridable]

    def get_modelmeta(self) -> ModelMetadata:
        return ModelMetadata(self._session.model.proto)

    def get_providers(self) -> list[str]:
        return list(self._providers)

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        return {p: {} for p in self._providers}

    def get_session_options(self) -> SessionOptions:
        return self._options

    # ------------------------------------------------------------ running
    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any],
            run_options: RunOptions | None = None) -> list[Any]:
        """The outputs, all or those named."""
        for value in input_feed.values():
            if isinstance(value, OrtValue):
                input_feed = {n: v.numpy() if isinstance(v, OrtValue) else v
                              for n, v in input_feed.items()}
                break
        return self._session.run(input_feed, output_names)

    def run_with_ort_values(self, output_names: Sequence[str] | None,
                            input_dict_ort_values: Mapping[str, OrtValue],
                            run_options: RunOptions | None = None) -> list[OrtValue]:
        """The same from and to OrtValues."""
        return [OrtValue(r) for r in self.run(output_names, input_dict_ort_values)]

    def io_binding(self) -> IOBinding:
        """A fresh binding of inputs and outputs to memory."""
        return IOBinding(self)

    def run_with_iobinding(self, iobinding: IOBinding, run_options: RunOptions | None = None
                           ) -> None:
        """Run on what is bound."""
        iobinding._run()

    # ------------------------------------------------------------ profiling
    def get_profiling_start_time_ns(self) -> int:
        return self._started

    def end_profiling(self) -> str:
        """Write what was recorded as a Chrome trace (it opens in Perfetto); answers its path."""
        profiles = self._session.profiles
        if profiles is None:
            return ""
        name = f"{self._options.profile_file_prefix}_{time.strftime('%Y-%m-%d_%H-%M-%S')}.json"
        path = Path(os.getcwd()) / name
        Recording(list(profiles)).chrome_trace(path)
        profiles.clear()
        return str(path)


def _provider_names(given: Sequence[Any] | None) -> tuple[str, ...]:
    """Providers by name; those we do not have are passed over, as onnxruntime does."""
    if given is None:
        return _PROVIDERS
    names = [p if isinstance(p, str) else p[0] for p in given]
    known = tuple(n for n in names if n in _PROVIDERS)
    if not known:
        raise ArgumentError(f"none of the providers {', '.join(names) or '()'} is here",
                            hint=f"available are {', '.join(_PROVIDERS)}")
    return known if CPU in known else (*known, CPU)


def get_available_providers() -> list[str]:
    """The providers of this installation."""
    return list(_PROVIDERS)


def get_all_providers() -> list[str]:
    """The same: nothing needs another build."""
    return list(_PROVIDERS)


def get_device() -> str:
    """The device models run on."""
    return "CPU"


def set_default_logger_severity(level: int) -> None:
    """Map onnxruntime's severities (0 verbose ... 4 fatal) onto Python's logging."""
    import logging

    levels = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
    logging.getLogger("terrazzo").setLevel(levels[max(0, min(level, 4))])


__all__ = [
    "ExecutionMode", "Fail", "GraphOptimizationLevel", "IOBinding", "InferenceSession",
    "InvalidArgument", "InvalidGraph", "InvalidProtobuf", "ModelMetadata", "NoSuchFile", "NodeArg",
    "NotImplemented", "OrtValue", "RunOptions", "RuntimeException", "SessionOptions",
    "__version__", "get_all_providers", "get_available_providers", "get_device",
    "set_default_logger_severity",
]
