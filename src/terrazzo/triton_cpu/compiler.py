"""Triton's side of compiling for the CPU: the stages from TTIR to object code.

Triton finds this module through the entry point group `triton.backends`; it must hold exactly one
concrete subclass of `BaseBackend`.
"""

from __future__ import annotations

from typing import Any

from terrazzo.chips.cpu.description import host
from terrazzo.knobs import knobs
from terrazzo.runtime.cache import make_key, source_stamp
from terrazzo.triton_cpu.backend import LoopBackend, Options


class CPUBackend(LoopBackend):
    """Compiles kernels for the CPU that this process runs on."""

    backend_name = "cpu"
    binary_ext = "o"

    def hash(self) -> str:
        return "terrazzo-" + make_key("triton_cpu", source_stamp(), str(knobs.code_key),
                                        chip=host())

    def add_stages(self, stages: dict[str, Any], options: Options, language: Any = None) -> None:
        from terrazzo.triton_cpu import cpu_stages

        stages["ttir"] = lambda src, metadata: cpu_stages.make_ttir(src)
        stages["loop"] = lambda src, metadata: cpu_stages.make_loops(src, metadata)
        stages["llir"] = lambda src, metadata: cpu_stages.make_llvm(src)
        stages["o"] = lambda src, metadata: cpu_stages.make_object(src)
