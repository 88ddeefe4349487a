"""Kernels that are built whole for CPUs instead of scheduled: products, attention, transposes."""

from __future__ import annotations

from terrazzo.chips.spec import ChipSpec
from terrazzo.expr.ir import Program
from terrazzo.loop.ir import Function


def has_kernel(operator: str) -> bool:
    """Whether a composite operator is better kept whole on this chip."""
    return False


def lower(program: Program, chip: ChipSpec) -> Function | None:
    """A template's Loop IR for this program, or None when none applies."""
    return None
