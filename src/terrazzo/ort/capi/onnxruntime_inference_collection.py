"""Where onnxruntime keeps its Python classes."""

from terrazzo.ort.devices import OrtDevice
from terrazzo.ort.session import InferenceSession
from terrazzo.ort.session import InferenceSession as Session
from terrazzo.ort.values import IOBinding, OrtValue

__all__ = ["IOBinding", "InferenceSession", "OrtDevice", "OrtValue", "Session"]
