"""The CPU as a chip: what its folder holds, by the names that the compiler asks for.

What makes code is imported when code is made: to load it from a file takes none of that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from terrazzo.chips.chip import LEVELS, Assembled, Chip
from terrazzo.chips.cpu.code import NativeCode
from terrazzo.chips.cpu.description import avx2_spec, host, neon_spec
from terrazzo.chips.cpu.llvm import jit, worker
from terrazzo.chips.spec import ChipSpec, Roofline
from terrazzo.expr.limits import FusionLimits
from terrazzo.knobs import Settings, thread_count

if TYPE_CHECKING:
    from terrazzo.chips.by_hand import Kernel, Run
    from terrazzo.expr.ir import Program, Tensor
    from terrazzo.expr.schedule import Schedule
    from terrazzo.loop.ir import Function
    from terrazzo.loop.steps import Recipe


class Cpu(Chip):
    """A processor that LLVM makes code for: this machine's, or another one that is described."""

    levels = (*LEVELS, "llvm", "asm", "triton")
    program_levels = ("triton",)
    languages = ("c++",)
    # A core's own cache holds less than `shared` elements for long, and one thread does up to
    # `alone` of them before others could help.
    fusion_limits = FusionLimits(
        recomputed=6, broadcast=2, operations=128, epilogue=64, stages=48, length=2048,
        siblings=8, shared=1 << 18, rows=8, alone=1 << 14)

    def __init__(self, spec: ChipSpec | None = None):
        self.spec = spec or host()

    def under(self, settings: Settings) -> Cpu:
        return Cpu(host(settings.vector_bits))

    def simulating(self, spec: ChipSpec) -> Cpu:
        # Nothing of this machine but its architecture: whoever lowers elsewhere gets these loops.
        plain = (avx2_spec if self.spec.llvm_triple.startswith("x86_64") else neon_spec)(spec.cores)
        return Cpu(replace(plain, l2_bytes=spec.l1_bytes, l3_bytes=0))

    def keeps(self, operator: str, inputs: Sequence[Any] = ()) -> bool:
        from terrazzo.chips.cpu import templates

        return templates.has_kernel(operator)

    def schedule(self, program: Program, revisits: Sequence[bool] = ()
                 ) -> tuple[Program, Schedule]:
        from terrazzo.chips.cpu import schedule

        return schedule.schedule(program, self.spec, revisits)

    def template(self, program: Program, constants: frozenset[Tensor]) -> Function | None:
        from terrazzo.chips.cpu import templates

        return templates.lower(program, self.spec, constants)

    def lower(self, program: Program, constants: frozenset[Tensor] = frozenset(),
              revisits: Sequence[bool] = ()) -> Function:
        from terrazzo.chips.cpu import schedule

        return schedule.with_gathers_through_caches(super().lower(program, constants, revisits))

    def adapt(self, function: Function) -> Function:
        from terrazzo.chips.cpu import schedule

        return schedule.with_streaming_fills(function, self.spec)

    def assemble(self, recipe: Recipe) -> Assembled:
        from terrazzo.chips.cpu.llvm.program import is_direct, module_of

        module = module_of(recipe, self.spec)
        code = jit.compile_object(module.text(), self.spec)
        return Assembled(code, {
            "triple": self.spec.llvm_triple, "features": sorted(self.spec.features),
            "slots": recipe.slots, "dims": len(recipe.dims), "direct": is_direct(recipe),
            "allocates": module.declares("aligned_alloc")})

    def load(self, name: str, made: Assembled, constants: Sequence[int]) -> NativeCode:
        # Code to call other code, and the threads, may be missing in the cache; LLVM would stay in
        # the memory of a process that only loads what is compiled.
        with worker.elsewhere(likely=False):
            return NativeCode(name, made, constants)

    def text(self, level: str, recipe: Recipe) -> str:
        from terrazzo.chips.cpu.llvm.program import module_of

        if level not in ("llvm", "asm"):
            raise self.no_level(level)
        text = module_of(recipe, self.spec).text()
        return text if level == "llvm" else jit.assembly(text, self.spec)

    def source(self, level: str, program: Program) -> str:
        from terrazzo.codegen.triton.source import triton_source

        return triton_source(program)

    def build(self, language: str, kernel: Kernel) -> Run:
        if language not in self.languages:
            return super().build(language, kernel)
        from terrazzo.chips.cpu import cplusplus

        return cplusplus.build(kernel, self.spec)

    def native(self, text: str, name: str) -> Callable[..., Any]:
        from terrazzo.chips.cpu import trampoline

        return trampoline.native(text, name)

    def roofline(self) -> Roofline:
        from terrazzo.chips.cpu.peaks import measured

        return measured(thread_count())

    def compiling_elsewhere(self) -> AbstractContextManager[None]:
        return worker.elsewhere()
