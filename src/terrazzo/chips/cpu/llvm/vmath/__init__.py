"""Vector maths of our own, written inline into the function being built.

Every function is generic in lanes and bundle size. On `float` (f32) the results are within 2 ulp
for all inputs, denormals included, with numpy's results for nan, infinities and signed zeros
(lgamma, digamma and erfinv: within 4 ulp, see `special`). On `double` (f64) they are within 2 ulp
(sigmoid and tanh: 2.5); erfc, cbrt and lgamma call libm lane by lane. Half types never come here:
callers compute in f32 (see `convert`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from terrazzo.base.scalar_table import INSTRUCTIONS, OPS
from terrazzo.chips.cpu.llvm.builder import Builder, Val
from terrazzo.chips.cpu.llvm.vmath import (
    double,
    double_inverse,
    double_power,
    single,
    special,
    wide,
)

__all__ = ["FUNCTIONS", "OF_THE_LIBRARY", "Function", "emit", "routine"]

Emitter = Callable[..., Val]


class Function(NamedTuple):
    """How one function is written for each element type."""

    arity: int
    single: Emitter
    double: Emitter


_MODULES: dict[str, Any] = {
    "single": single, "double": double, "wide": wide, "special": special,
    "double_inverse": double_inverse, "double_power": double_power}


def routine(name: str) -> Emitter:
    """What a name of the column `cpu` stands for."""
    module, function = name.split(".")
    if module == "libm":
        return double.libm(function)
    return double.intrinsic(function) if module == "llvm" else getattr(_MODULES[module], function)


def _on_floats(of_the_library: bool) -> dict[str, Function]:
    return {row.name: Function(row.arity, *map(routine, row.cpu)) for row in OPS.values()
            if row.cpu[0] != INSTRUCTIONS and row.cpu[0].startswith("libm.") == of_the_library}


FUNCTIONS = _on_floats(of_the_library=False)
OF_THE_LIBRARY = _on_floats(of_the_library=True)  # whose accuracy is that of the C library


def emit(b: Builder, name: str, args: Sequence[Val]) -> Val:
    """Writes the call of a function on vectors (or scalars) of f32 or f64."""
    function = FUNCTIONS.get(name) or OF_THE_LIBRARY[name]
    if len(args) != function.arity:
        raise TypeError(f"{name} takes {function.arity} operands, got {len(args)}")
    elem = args[0].elem
    if elem not in ("float", "double") or any(arg.ty != args[0].ty for arg in args):
        raise TypeError(f"{name} works on f32 or f64, got {', '.join(arg.ty for arg in args)}")
    emitter = function.single if elem == "float" else function.double
    return emitter(b, *args)
