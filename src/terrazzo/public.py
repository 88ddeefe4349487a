"""The names of the package `terrazzo` itself: operators, types, and what is done with them."""

from typing import Any

from terrazzo import ops
from terrazzo.base.shapes import dim, dims
from terrazzo.calls.api import compile, load, op
from terrazzo.calls.compiled import jit
from terrazzo.chips.by_hand import Launch
from terrazzo.chips.chip import Chip
from terrazzo.chips.registry import chip
from terrazzo.chips.spec import ChipSpec, LaunchRules
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
from terrazzo.graph.batching import vmap
from terrazzo.graph.derivatives import grad, jvp, value_and_grad, vjp
from terrazzo.graph.described import Array
from terrazzo.graph.ir import OPERATORS
from terrazzo.tools.api import bench, profile, verify

_HELPERS = {"Any", "OPERATORS", "ops"}
_PRIVATE = {"constant", "dimension"}
NAMES: dict[str, Any] = {
    **{name: value for name, value in globals().items()
       if not name.startswith("_") and name not in _HELPERS},
    **{name: value for name, value in OPERATORS.items()
       if value.family and name not in _PRIVATE},  # those without a family are a chip's own
    **ops.PUBLIC,
}
