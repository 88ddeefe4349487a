"""Kernels that are built whole for CPUs instead of scheduled: products, attention, transposes."""

from __future__ import annotations

from collections.abc import Callable

from terrazzo.chips.cpu_attention import lower_attention
from terrazzo.chips.cpu_gemm import lower_contraction
from terrazzo.chips.cpu_transpose import lower_transpose
from terrazzo.chips.spec import ChipSpec
from terrazzo.expr.ir import Program
from terrazzo.loop.ir import Function

_WHOLE = frozenset({"scaled_dot_product_attention"})
_BY_KIND: dict[str, Callable[[Program, ChipSpec], Function | None]] = {
    "attention": lower_attention,
    "contraction": lower_contraction,
    "pointwise": lower_transpose,
}


def has_kernel(operator: str) -> bool:
    """Whether a composite operator is better kept whole on this chip."""
    return operator in _WHOLE


def lower(program: Program, chip: ChipSpec) -> Function | None:
    """A template's Loop IR for this program, or None when none applies."""
    empty = any(n == 0 for t in (*program.inputs, *program.outputs) for n in t.shape)
    if empty and program.kind != "attention":
        return None  # plain loops that never run
    template = _BY_KIND.get(program.kind)
    return None if template is None else template(program, chip)
