"""An NVIDIA GPU as a chip that can be asked for source, and not yet for results."""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.chips.chip import Assembled, Chip, Code
from terrazzo.chips.cuda.description import h200
from terrazzo.chips.spec import ChipSpec
from terrazzo.codegen.triton.source import triton_source
from terrazzo.expr.ir import Program
from terrazzo.loop.steps import Recipe


class Cuda(Chip):
    """An NVIDIA GPU, for which Triton source is written; Triton's own compiler takes it on."""

    levels = ("graph", "canonical", "expr", "triton")
    program_levels = ("triton",)
    absence = "kernels are printed as Triton source, but not launched"

    def __init__(self, spec: ChipSpec | None = None):
        self.spec = spec or h200()

    def source(self, level: str, program: Program) -> str:
        return triton_source(program)

    def assemble(self, recipe: Recipe) -> Assembled:
        raise self.absent()

    def load(self, name: str, made: Assembled, constants: Sequence[int]) -> Code:
        raise self.absent()
