"""The binary module under its other name."""

from terrazzo.ort.capi.onnxruntime_pybind11_state import *  # noqa: F403
