"""How types, numbers and operations are written in Triton: the tables of this generator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from terrazzo.base.scalar import Call, Const
from terrazzo.dtypes import (
    DType,
    bfloat16,
    bool_,
    float8_e4m3fn,
    float8_e5m2,
    float16,
    float32,
    float64,
    int8,
    int16,
    int32,
    int64,
    uint8,
    uint16,
    uint32,
    uint64,
)
from terrazzo.errors import UnsupportedDType, UnsupportedOperator

TYPES: dict[DType, str] = {
    float64: "tl.float64", float32: "tl.float32", float16: "tl.float16",
    bfloat16: "tl.bfloat16", float8_e4m3fn: "tl.float8e4nv", float8_e5m2: "tl.float8e5",
    int64: "tl.int64", int32: "tl.int32", int16: "tl.int16", int8: "tl.int8",
    uint64: "tl.uint64", uint32: "tl.uint32", uint16: "tl.uint16", uint8: "tl.uint8",
    bool_: "tl.int1",
}


def type_text(dtype: DType) -> str:
    """Triton's name of a type."""
    if dtype not in TYPES:
        raise UnsupportedDType(f"Triton has no type for {dtype.name}",
                               hint="cast to one of " + ", ".join(t.name for t in TYPES))
    return TYPES[dtype]


def literal_text(value: Any, dtype: DType) -> str:
    """A number as Triton reads it, wrapped or rounded to its type."""
    number = np.asarray(value).astype(dtype.np)
    if dtype.is_float:
        if not np.isfinite(number.astype(np.float64)):
            return f'float("{float(number)}")'
        # The shortest text that gives this very number back; half types are read as float32.
        wide = number.astype(np.float64 if dtype is float64 else np.float32)
        return str(wide)
    return str(bool(number)) if dtype.is_bool else str(int(number))


def keeps_type(text: str, dtype: DType) -> bool:
    """Whether a bare literal, as an argument of a function, behaves as a value of that type."""
    if dtype is float64:
        return "float(" in text or float(np.float32(text)) == float(text)
    return dtype in (float32, int32, int64)


# How tightly Python's operators bind; comparisons chain, so both their sides are kept apart.
COMPARE, OR, XOR, AND, SHIFT, SUM, PRODUCT, UNARY, ATOM = range(9)


@dataclass(frozen=True)
class Spelling:
    """An operation's text with `{0}`, `{1}` for its arguments."""

    text: str
    level: int = ATOM
    literals: bool = False  # bare numbers are safe as arguments


_INFIX: dict[str, tuple[str, int]] = {
    "add": ("+", SUM), "sub": ("-", SUM), "mul": ("*", PRODUCT), "div": ("/", PRODUCT),
    "fmod": ("%", PRODUCT), "and": ("&", AND), "or": ("|", OR), "xor": ("^", XOR),
    "eq": ("==", COMPARE), "ne": ("!=", COMPARE), "lt": ("<", COMPARE), "le": ("<=", COMPARE),
    "gt": (">", COMPARE), "ge": (">=", COMPARE),
}

_ANY: dict[str, Spelling] = {
    op: Spelling(f"{{0}} {sign} {{1}}", level, literals=True) for op, (sign, level) in
    _INFIX.items()
} | {
    "where": Spelling("tl.where({0}, {1}, {2})", literals=True),
    "neg": Spelling("-{0}", UNARY),
    "not": Spelling("~{0}", UNARY),
    "bitcast": Spelling("{0}.to({type}, bitcast=True)"),
    "isnan": Spelling("{0} != {0}", COMPARE),
}

_FLOAT: dict[str, Spelling] = {
    "floordiv": Spelling("_floor_div_float({0}, {1})"),
    "mod": Spelling("_floor_mod({0}, {1})"),
    "min": Spelling("_min({0}, {1})", literals=True),
    "max": Spelling("_max({0}, {1})", literals=True),
    "isinf": Spelling('tl.abs({0}) == float("inf")', COMPARE),
    "isfinite": Spelling('tl.abs({0}) < float("inf")', COMPARE),
    "copysign": Spelling("tl.where(_negative({1}), -tl.abs({0}), tl.abs({0}))"),
    "fma": Spelling("tl.fma({0}, {1}, {2})"),
} | {
    op: Spelling(f"tl.{op}({{0}})") for op in (
        "abs", "floor", "ceil", "sqrt", "rsqrt", "exp", "exp2", "log", "log2", "sin", "cos",
        "erf", "sigmoid")
} | {
    op: Spelling(f"_{op}({{0}})") for op in (
        "sign", "trunc", "round", "expm1", "log1p", "tan", "asin", "acos", "atan", "sinh",
        "cosh", "tanh", "asinh", "acosh", "atanh", "cbrt", "erfc", "lgamma", "digamma", "erfinv")
} | {
    op: Spelling(f"_{op}({{0}}, {{1}})") for op in ("pow", "atan2", "hypot", "fmod")
} | {
    "log10": Spelling("tl.log2({0}) * 0.3010299956639812", PRODUCT),
}

_SAME = Spelling("{0}", literals=True)
_NEVER, _ALWAYS = Spelling("{0} != {0}", COMPARE), Spelling("{0} == {0}", COMPARE)

_UNSIGNED: dict[str, Spelling] = {
    "div": Spelling("({0}.to(tl.float64) / {1}.to(tl.float64)).to({type})"),
    "floordiv": Spelling("{0} // {1}", PRODUCT, literals=True),
    "mod": Spelling("{0} % {1}", PRODUCT, literals=True),
    "min": Spelling("tl.minimum({0}, {1})", literals=True),
    "max": Spelling("tl.maximum({0}, {1})", literals=True),
    "pow": Spelling("_pow_int({0}, {1}, {bits})"),
    "shl": Spelling("_shift_left({0}, {1}, {bits})"),
    "shr": Spelling("_shift_right_unsigned({0}, {1}, {bits})"),
    "sign": Spelling("({0} > 0).to({type})"),
    "abs": _SAME, "floor": _SAME, "ceil": _SAME, "trunc": _SAME, "round": _SAME,
    "isinf": _NEVER, "isfinite": _ALWAYS,
}

_SIGNED: dict[str, Spelling] = _UNSIGNED | {
    "floordiv": Spelling("_floor_div({0}, {1})"),
    "mod": Spelling("_floor_mod({0}, {1})"),
    "shr": Spelling("_shift_right({0}, {1}, {bits})"),
    "sign": Spelling("({0} > 0).to({type}) - ({0} < 0).to({type})", SUM),
    "abs": Spelling("tl.abs({0})"),
}

_BOOL: dict[str, Spelling] = {
    "add": _ANY["or"], "max": _ANY["or"], "mul": _ANY["and"], "min": _ANY["and"],
    "abs": _SAME, "isinf": _NEVER, "isfinite": _ALWAYS,
}

_BY_KIND: dict[str, dict[str, Spelling]] = {
    "f": _ANY | _FLOAT, "i": _ANY | _SIGNED, "u": _ANY | _UNSIGNED, "b": _ANY | _BOOL}

# NVIDIA's device library: better than a few ulp, and one call each.
_LIBDEVICE: dict[str, Spelling] = {
    op: Spelling(f"libdevice.{name or op}({{0}})") for op, name in {
        "expm1": "", "log10": "", "log1p": "", "tan": "", "asin": "", "acos": "", "atan": "",
        "sinh": "", "cosh": "", "tanh": "", "asinh": "", "acosh": "", "atanh": "", "cbrt": "",
        "erfc": "", "erfinv": "", "lgamma": "", "trunc": "", "round": "rint", "j0": "", "j1": "",
        "y0": "", "y1": "", "tgamma": ""}.items()
} | {
    op: Spelling(f"libdevice.{op}({{0}}, {{1}})") for op in (
        "pow", "atan2", "hypot", "fmod", "copysign", "remainder")
}


def spelling(node: Call, libdevice: bool) -> Spelling:
    """How an operation is written for the types of its arguments."""
    dtype = node.args[-1].dtype
    if node.op in ("shl", "shr") and _shifts_within(node):
        return Spelling(f"{{0}} {'<<' if node.op == 'shl' else '>>'} {{1}}", SHIFT, literals=True)
    if libdevice and dtype.is_float and node.op in _LIBDEVICE:
        return _LIBDEVICE[node.op]
    row = _BY_KIND.get(dtype.kind, {}).get(node.op)
    if row is None:
        raise UnsupportedOperator(
            f"Triton source has no spelling for scalar operation {node.op!r} on {dtype.name}",
            hint="cast to float32 first, or compile this operator for another chip")
    return row


def _shifts_within(node: Call) -> bool:
    by = node.args[1]
    return isinstance(by, Const) and 0 <= int(by.value) < node.dtype.bits
