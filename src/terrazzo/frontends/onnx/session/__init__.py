"""Running whole models: compiled parts, what the host does between them, and who runs what."""

from terrazzo.frontends.onnx.session.compiled import CompiledModel
from terrazzo.frontends.onnx.session.session import Session

__all__ = ["CompiledModel", "Session"]
