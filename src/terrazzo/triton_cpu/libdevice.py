"""The functions of `triton.language.extra.libdevice` on the CPU.

Triton's own are stubs that a backend replaces. Each of ours is an external function of a name that
lowering maps to an operation of `scalar.OPS`.
"""

from __future__ import annotations

import triton.language as tl
from triton.language import core

# By number of arguments: names that are operations of ours.
_UNARY = ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin",
          "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "cbrt", "erf", "erfc",
          "erfinv", "lgamma", "sqrt", "rsqrt", "floor", "ceil", "trunc")
_BINARY = ("pow", "fmod", "atan2", "hypot", "copysign")
_RENAMED = {"rint": "round", "nearbyint": "round", "fabs": "abs", "abs": "abs",
            "fast_expf": "exp", "fast_logf": "log", "fast_sinf": "sin", "fast_cosf": "cos",
            "fast_tanhf": "tanh"}
_TESTS = {"isnan": "isnan", "isinf": "isinf", "finitef": "isfinite", "isfinited": "isfinite"}
FLOATS = (tl.float32, tl.float64)
PREFIX = "tz_"


def _function(op: str, arity: int, truth: bool = False) -> core.builtin:
    rows = {(kind,) * arity: (PREFIX + op, core.dtype("int1") if truth else kind)
            for kind in FLOATS}

    @core.extern
    def one(arg0, _semantic=None):  # type: ignore[no-untyped-def]
        return core.extern_elementwise("", "", [arg0], rows, is_pure=True, _semantic=_semantic)

    @core.extern
    def two(arg0, arg1, _semantic=None):  # type: ignore[no-untyped-def]
        return core.extern_elementwise("", "", [arg0, arg1], rows, is_pure=True,
                                       _semantic=_semantic)

    return one if arity == 1 else two


for _name in _UNARY:
    globals()[_name] = _function(_name, 1)
for _name in _BINARY:
    globals()[_name] = _function(_name, 2)
for _name, _op in _RENAMED.items():
    globals()[_name] = _function(_op, 1)
for _name, _op in _TESTS.items():
    globals()[_name] = _function(_op, 1, truth=True)
