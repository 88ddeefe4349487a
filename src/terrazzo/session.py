"""Sessions on ONNX models by their own names; `terrazzo.ort` has them by onnxruntime's."""

from terrazzo.frontends.onnx.session import CompiledModel, Session

__all__ = ["CompiledModel", "Session"]
