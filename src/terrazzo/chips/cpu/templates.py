"""Kernels that are built whole for CPUs instead of scheduled: products, attention, transposes."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from terrazzo.chips.spec import ChipSpec
from terrazzo.dtypes import bfloat16
from terrazzo.expr.ir import Program, Tensor
from terrazzo.loop.ir import Function

_WHOLE = frozenset({"scaled_dot_product_attention"})


class _Template(NamedTuple):
    """A function that answers with a kernel, or with None for a program that is something else.

    Its module is imported for programs that may be its own: a model of products alone is compiled
    a good deal sooner without the others.
    """

    module: str
    function: str
    may_apply: Callable[[Program], bool] = lambda program: True

    def lower(self, program: Program, *rest: Any) -> Function | None:
        if not self.may_apply(program):
            return None
        module = import_module(f"terrazzo.chips.cpu.{self.module}")
        function: Function | None = getattr(module, self.function)(program, *rest)
        return function


def _has_axes(least: int) -> Callable[[Program], bool]:
    return lambda program: any(len(stage.axes) >= least for stage in program.stages)


def _reads_integers(program: Program) -> bool:
    return any(t.dtype.is_integer for t in program.inputs)


def _reads_bfloat16(program: Program) -> bool:
    return any(t.dtype is bfloat16 for t in program.inputs)


_BY_KIND: dict[str, tuple[_Template, ...]] = {  # the first that applies
    "attention": (_Template("attention", "lower_attention"),),
    "contraction": (
        _Template("conv", "lower_convolution", _has_axes(3)),
        _Template("quant", "lower_integer_product", _reads_integers),
        _Template("quant_depthwise", "lower_depthwise", _reads_integers),
        _Template("bfloat", "lower_bfloat_product", _reads_bfloat16),
        _Template("gemm", "lower_contraction")),
    "pointwise": (_Template("transpose", "lower_transpose", _has_axes(2)),),
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
        function = template.lower(program, chip, constants)
        if function is not None:
            return function
    return None
