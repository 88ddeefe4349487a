"""Errors under the names that onnxruntime's have, and those that programs catch."""

from __future__ import annotations

from terrazzo.errors import ModelError, TerrazzoError, UnsupportedOperator

Fail = EPFail = EngineError = RuntimeException = TerrazzoError
InvalidArgument = InvalidGraph = InvalidProtobuf = ModelError
NoSuchFile = NotFound = NoModel = ModelLoaded = ModelRequiresCompilation = ModelError
ModelLoadCanceled = DeviceReset = TerrazzoError
NotImplemented = UnsupportedOperator

__all__ = ["DeviceReset", "EPFail", "EngineError", "Fail", "InvalidArgument", "InvalidGraph",
           "InvalidProtobuf", "ModelLoadCanceled", "ModelLoaded", "ModelRequiresCompilation",
           "NoModel", "NoSuchFile", "NotFound", "NotImplemented", "RuntimeException"]
