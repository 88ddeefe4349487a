"""Terrazzo: write an operator once, run it fast on every chip."""

from terrazzo import ops as _ops
from terrazzo.api import bench, compile, jit, load, op, verify
from terrazzo.dtypes import (
    bfloat16,
    bool_,
    complex64,
    complex128,
    float8_e4m3fn,
    float8_e5m2,
    float16,
    float32,
    float64,
    int4,
    int8,
    int16,
    int32,
    int64,
    uint4,
    uint8,
    uint16,
    uint32,
    uint64,
)
from terrazzo.graph.autodiff import grad, jvp, value_and_grad, vjp
from terrazzo.graph.ir import OPERATORS as _OPERATORS
from terrazzo.knobs import knobs
from terrazzo.runtime.profile import profile
from terrazzo.shapes import dim, dims
from terrazzo.version import __version__

_PRIVATE = {"constant", "dimension"}
globals().update({name: value for name, value in _OPERATORS.items() if name not in _PRIVATE})
globals().update(_ops.PUBLIC)
__all__ = sorted(name for name, value in globals().items()
                 if not name.startswith("_") and type(value).__name__ != "module")
