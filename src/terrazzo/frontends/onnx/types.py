"""ONNX's names and numbers for element types, and ours."""

from __future__ import annotations

from typing import Any

import numpy as np

from terrazzo.dtypes import DType, as_dtype
from terrazzo.errors import UnsupportedDType

# TensorProto.DataType by number, with the names of `as_dtype`; strings have none.
_NAMES = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64",
    9: "bool", 10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 14: "complex64",
    15: "complex128", 16: "bfloat16", 17: "float8_e4m3fn", 18: "float8_e4m3fnuz",
    19: "float8_e5m2", 20: "float8_e5m2fnuz", 21: "uint4", 22: "int4", 23: "float4_e2m1fn",
    24: "float8_e8m0fnu", 25: "uint2", 26: "int2",
}
_SPELLED = {  # where ONNX's word is another
    "float32": "float", "float64": "double", "float8_e4m3fn": "float8e4m3fn",
    "float8_e4m3fnuz": "float8e4m3fnuz", "float8_e5m2": "float8e5m2",
    "float8_e5m2fnuz": "float8e5m2fnuz", "float4_e2m1fn": "float4e2m1",
    "float8_e8m0fnu": "float8e8m0",
}
STRING = 8


def dtype_of(code: int) -> DType:
    """Our type for a TensorProto.DataType; UnsupportedDType where we have none."""
    name = _NAMES.get(code)
    if name is None:
        what = "strings" if code == STRING else f"element type {code}"
        raise UnsupportedDType(f"{what} cannot be compiled")
    try:
        return as_dtype(name)
    except TypeError:
        raise UnsupportedDType(f"{name} cannot be compiled") from None


def code_of(dtype: DType) -> int:
    """The TensorProto.DataType of one of our types."""
    return next(code for code, name in _NAMES.items() if name == dtype.name)


def type_text(dtype: Any) -> str:
    """An element type as onnxruntime's sessions spell it: "tensor(float)"."""
    if dtype == "string" or (isinstance(dtype, np.dtype) and dtype.kind in "OUS"):
        return "tensor(string)"
    name = as_dtype(dtype).name
    return f"tensor({_SPELLED.get(name, name)})"


def dtype_named(text: str) -> DType:
    """Our type for one as onnxruntime's sessions spell it."""
    name = text.removeprefix("tensor(").removesuffix(")")
    return as_dtype({v: k for k, v in _SPELLED.items()}.get(name, name))
