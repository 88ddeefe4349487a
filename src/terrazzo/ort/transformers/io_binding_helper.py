"""Types by the names that sessions give them."""

from __future__ import annotations

from typing import Any

import numpy as np

from terrazzo.frontends.onnx.types import dtype_named
from terrazzo.ort.session import InferenceSession


class TypeHelper:
    """From the types that sessions name to those of numpy and PyTorch."""

    @staticmethod
    def ort_type_to_numpy_type(ort_type: str) -> Any:
        """The numpy type of "tensor(float)"; bfloat16 goes as its bits."""
        dtype = dtype_named(ort_type)
        return np.uint16 if dtype.name == "bfloat16" else dtype.np.type

    @staticmethod
    def ort_type_to_torch_type(ort_type: str) -> Any:
        """PyTorch's type of "tensor(float)"."""
        import torch

        return getattr(torch, dtype_named(ort_type).name)

    @staticmethod
    def numpy_type_to_torch_type(numpy_type: Any) -> Any:
        """PyTorch's type for one of numpy's."""
        import torch

        return getattr(torch, np.dtype(numpy_type).name)

    @staticmethod
    def torch_type_to_numpy_type(torch_type: Any) -> Any:
        """The numpy type for one of PyTorch's."""
        name = str(torch_type).removeprefix("torch.")
        return np.uint16 if name == "bfloat16" else np.dtype(name).type

    @staticmethod
    def get_input_type(session: InferenceSession, name: str) -> str:
        """What a session says of an input."""
        return next(i.type for i in session.get_inputs() if i.name == name)

    @staticmethod
    def get_output_type(session: InferenceSession, name: str) -> str:
        """What a session says of an output."""
        return next(o.type for o in session.get_outputs() if o.name == name)

    @staticmethod
    def get_io_numpy_type_map(session: InferenceSession) -> dict[str, Any]:
        """The numpy type of every input and output."""
        return {port.name: TypeHelper.ort_type_to_numpy_type(port.type)
                for port in (*session.get_inputs(), *session.get_outputs())}


__all__ = ["TypeHelper"]
