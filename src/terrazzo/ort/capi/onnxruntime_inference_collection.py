"""Where onnxruntime keeps its Python classes."""

from terrazzo.ort.session import InferenceSession
from terrazzo.ort.session import InferenceSession as Session
from terrazzo.ort.values import IOBinding, OrtDevice, OrtValue

__all__ = ["IOBinding", "InferenceSession", "OrtDevice", "OrtValue", "Session"]
