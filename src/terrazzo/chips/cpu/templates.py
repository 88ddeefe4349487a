"""Kernels that are built whole for CPUs instead of scheduled: products, attention, transposes."""

from __future__ import annotations

from collections.abc import Callable

from terrazzo.chips.cpu.attention import lower_attention
from terrazzo.chips.cpu.bfloat import lower_bfloat_product
from terrazzo.chips.cpu.conv import lower_convolution
from terrazzo.chips.cpu.gemm import lower_contraction
from terrazzo.chips.cpu.quant import lower_integer_product
from terrazzo.chips.cpu.quant_depthwise import lower_depthwise
from terrazzo.chips.cpu.transpose import lower_transpose
from terrazzo.chips.spec import ChipSpec
from terrazzo.expr.ir import Program, Tensor
from terrazzo.loop.ir import Function

_WHOLE = frozenset({"scaled_dot_product_attention"})
_Template = Callable[[Program, ChipSpec, frozenset[Tensor]], Function | None]
_BY_KIND: dict[str, tuple[_Template, ...]] = {  # the first that applies
    "attention": (lambda program, chip, _: lower_attention(program, chip),),
    "contraction": (lower_convolution, lower_integer_product, lower_depthwise,
                    lower_bfloat_product, lower_contraction),
    "pointwise": (lambda program, chip, _: lower_transpose(program, chip),),
}


def has_kernel(operator: str) -> bool:
    """Whether a composite operator is better kept whole on this chip."""
    return operator in _WHOLE


def lower(program: Program, chip: ChipSpec, constants: frozenset[Tensor] = frozenset()
          ) -> Function | None:
    """A template's Loop IR for this program, or None when none applies.

    `constants` are inputs that the graph holds: a template may ask for them in another layout
    (`Function.packed`), and is then called with them in that layout.
    """
    empty = any(n == 0 for t in (*program.inputs, *program.outputs) for n in t.shape)
    if empty and program.kind != "attention":
        return None  # plain loops that never run
    for template in _BY_KIND.get(program.kind, ()):
        function = template(program, chip, constants)
        if function is not None:
            return function
    return None
