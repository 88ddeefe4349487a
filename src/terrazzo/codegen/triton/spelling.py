"""How types, numbers and operations are written in Triton."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from terrazzo.base.scalar import Call, Const
from terrazzo.base.scalar_table import OPS
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


_LEVELS: dict[type[ast.AST], int] = {
    ast.Compare: COMPARE, ast.BitOr: OR, ast.BitXor: XOR, ast.BitAnd: AND, ast.LShift: SHIFT,
    ast.RShift: SHIFT, ast.Add: SUM, ast.Sub: SUM, ast.Mult: PRODUCT, ast.Div: PRODUCT,
    ast.FloorDiv: PRODUCT, ast.Mod: PRODUCT, ast.UnaryOp: UNARY}
# Functions whose arguments may be bare numbers: they take the type of the others.
_OF_NUMBERS = ("tl.where", "tl.minimum", "tl.maximum", "_min", "_max")


def _parsed(text: str) -> ast.expr:
    """A text with a0, a1, ... for its arguments, as Python reads it."""
    return ast.parse(re.sub(r"{(\w+)}", r"a\1", text), mode="eval").body


@cache
def spelled(text: str) -> Spelling:
    """A text of the table with how tightly it binds, which Python's grammar says."""
    root = _parsed(text)
    if isinstance(root, ast.Call):
        return Spelling(text, ATOM, literals=ast.unparse(root.func) in _OF_NUMBERS)
    sides: list[ast.expr] = []
    if isinstance(root, ast.BinOp):
        sides = [root.left, root.right]
    elif isinstance(root, ast.Compare):
        sides = [root.left, *root.comparators]
    bare = text == "{0}" or [ast.unparse(side) for side in sides] == ["a0", "a1"]
    level = _LEVELS.get(type(root.op if isinstance(root, ast.BinOp) else root), ATOM)
    return Spelling(text, level, literals=bare)


def _has_own_word(text: str) -> bool:
    """Whether Triton has a function for an operation: a call of `tl` with nothing around."""
    root = _parsed(text)
    return isinstance(root, ast.Call) and ast.unparse(root.func).startswith("tl.") and all(
        isinstance(argument, ast.Name) for argument in root.args)


@cache
def _text(op: str, kind: str, libdevice: bool) -> str | None:
    row = OPS[op]
    text = row.text(row.triton, kind)
    if libdevice and kind == "f" and isinstance(row.libdevice, str) and (
            text is None or not _has_own_word(text)):
        places = ", ".join(f"{{{i}}}" for i in range(row.arity))
        return f"libdevice.{row.libdevice}({places})"
    return text


def spelling(node: Call, libdevice: bool) -> Spelling:
    """How an operation is written for the types of its arguments."""
    dtype = node.args[-1].dtype
    if node.op in ("shl", "shr") and _shifts_within(node):
        return spelled("{0} << {1}" if node.op == "shl" else "{0} >> {1}")
    text = _text(node.op, dtype.kind, libdevice)
    if text is None:
        raise UnsupportedOperator(
            f"Triton source has no spelling for scalar operation {node.op!r} on {dtype.name}",
            hint="cast to float32 first, or compile this operator for another chip")
    return spelled(text)


def _shifts_within(node: Call) -> bool:
    by = node.args[1]
    return isinstance(by, Const) and 0 <= int(by.value) < node.dtype.bits
