"""Arithmetic, comparison and logic: operators that go element by element."""

from __future__ import annotations

from terrazzo.frontends.onnx.registry import converts_each
from terrazzo.ops import elementwise as e

converts_each({"Exp": e.exp, "Log": e.log, "Sqrt": e.sqrt, "Add": e.add, "Sub": e.subtract,
               "Mul": e.multiply})
