"""What onnxruntime's binary module has: its classes, and errors to catch."""

from __future__ import annotations

from terrazzo.ort.devices import OrtDevice
from terrazzo.ort.errors import *  # noqa: F403
from terrazzo.ort.metadata import ModelMetadata, NodeArg
from terrazzo.ort.options import (
    ExecutionMode,
    ExecutionOrder,
    GraphOptimizationLevel,
    RunOptions,
    SessionOptions,
)
from terrazzo.ort.session import InferenceSession
from terrazzo.ort.system import (
    get_all_providers,
    get_available_providers,
    get_build_info,
    get_device,
    get_version_string,
    set_default_logger_severity,
    set_default_logger_verbosity,
    set_seed,
)
from terrazzo.ort.values import IOBinding, OrtValue

SessionIOBinding = IOBinding

__all__ = [  # noqa: F405
    "DeviceReset", "EPFail", "EngineError", "ExecutionMode", "ExecutionOrder", "Fail",
    "GraphOptimizationLevel", "InferenceSession", "InvalidArgument", "InvalidGraph",
    "InvalidProtobuf", "ModelLoadCanceled", "ModelLoaded", "ModelMetadata",
    "ModelRequiresCompilation", "NoModel", "NoSuchFile", "NodeArg", "NotFound", "NotImplemented",
    "OrtDevice", "OrtValue", "RunOptions", "RuntimeException", "SessionIOBinding",
    "SessionOptions", "get_all_providers", "get_available_providers", "get_build_info",
    "get_device", "get_version_string", "set_default_logger_severity",
    "set_default_logger_verbosity", "set_seed",
]
