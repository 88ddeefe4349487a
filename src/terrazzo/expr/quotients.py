"""Quotients by a constant without a division: x / c as x * high + x * low, rounded once.

`high` and `low` are 1 / c in twice the digits (Brisebarre, Muller and Raina, "Accelerating
correctly rounded floating-point division when the divisor is known in advance", 2004). `high` is
cut off, not rounded, so that both have the sign of c and infinities stay what they are. A division
takes four times as long as the two products on CPUs of today.

The result is that of the division, bit by bit: a divisor for which some x would be rounded
otherwise keeps its division. Only quotients so small that x * low loses digits (below 2^-102 in
float32) may be off by one unit in the last place.
"""

from __future__ import annotations

import math
from dataclasses import replace

from terrazzo.base.scalar import Call, Const, Load, Scalar, call, rewrite, walk
from terrazzo.expr.ir import Program, Tensor

_EXACT = ("float32", "float64")  # types whose reciprocals are known in twice the digits


def multiply_by_reciprocals(program: Program) -> Program:
    """The same program with products in place of divisions by constants."""
    if not any(_divisor(n) is not None for s in program.stages if s.body is not None
               for n in walk(s.body)):
        return program
    from terrazzo.expr.reciprocals import reciprocal

    fresh: dict[Tensor, Tensor] = {}

    def visit(node: Scalar) -> Scalar | None:
        if isinstance(node, Load) and node.source in fresh:
            return Load(node.dtype, fresh[node.source], node.indices)
        c = _divisor(node)
        parts = None if c is None else reciprocal(c, node.dtype.name)
        if parts is None:
            return None
        assert isinstance(node, Call)
        high, low = (Const(node.dtype, p) for p in parts)
        return call("fma", node.args[0], high, call("mul", node.args[0], low))

    for stage in program.stages:
        if stage.body is not None:
            fresh[stage] = replace(stage, body=rewrite(stage.body, visit))
    return replace(program, stages=tuple(fresh.get(s, s) for s in program.stages),
                   outputs=tuple(fresh.get(s, s) for s in program.outputs))


def _divisor(node: Scalar) -> float | None:
    """What a node divides by; None for powers of two, by which LLVM multiplies."""
    if isinstance(node, Call) and node.op == "div" and node.dtype.name in _EXACT and isinstance(
            node.args[1], Const) and not isinstance(node.args[0], Const):
        c = float(node.args[1].value)
        return None if abs(math.frexp(c)[0]) == 0.5 else c
    return None
