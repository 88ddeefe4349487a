"""Triton's side of compiling for the CPU: the stages from TTIR to object code.

Triton finds this module through the entry point group `triton.backends`; it must hold exactly one
concrete subclass of `BaseBackend`.
"""

from __future__ import annotations

from typing import Any

from terrazzo.chips.cpu.description import host
from terrazzo.chips.cpu.schedule import streaming_sizes
from terrazzo.knobs import knobs
from terrazzo.runtime.cache import make_key, source_stamp
from terrazzo.triton_cpu.backend import (
    LoopBackend,
    LoopText,
    Options,
    make_llvm,
    make_loops,
    make_object,
    make_ttir,
)
from terrazzo.triton_cpu.frontend.state import Target
from terrazzo.triton_cpu.launch.entry import kernel_text


class CPUBackend(LoopBackend):
    """Compiles kernels for the CPU that this process runs on."""

    backend_name = "cpu"
    binary_ext = "o"

    def hash(self) -> str:
        return "terrazzo-" + make_key("triton_cpu", source_stamp(), str(knobs.code_key),
                                        chip=host())

    def add_stages(self, stages: dict[str, Any], options: Options, language: Any = None) -> None:
        stages["ttir"] = lambda src, metadata: make_ttir(src)
        stages["loop"] = lambda src, metadata: _make_loops(src, metadata)
        stages["llir"] = lambda src, metadata: _make_llvm(src)
        stages["o"] = lambda src, metadata: _make_object(src, metadata)


def _make_loops(module: Any, metadata: dict[str, Any]) -> LoopText:
    chip = host()
    text = make_loops(module, metadata, Target(chip, streaming_sizes(chip)))
    metadata["shared"] = 1  # kernels that size their grid divide by what they take of it
    return text


def _make_llvm(text: str) -> str:
    return make_llvm(text, kernel_text)


def _make_object(text: str, metadata: dict[str, Any]) -> bytes:
    return make_object(text)
