"""The stages of the backend `cpu`: those that all share, for the processor of this machine."""

from __future__ import annotations

from typing import Any

from terrazzo.chips.cpu.description import host
from terrazzo.chips.cpu.schedule import streaming_sizes
from terrazzo.triton_cpu import stages
from terrazzo.triton_cpu.frontend.state import Target
from terrazzo.triton_cpu.launch.entry import kernel_text

make_ttir = stages.make_ttir
make_object = stages.make_object


def make_loops(module: Any, metadata: dict[str, Any]) -> stages.LoopText:
    """The loops of a kernel."""
    chip = host()
    text = stages.make_loops(module, metadata, Target(chip, streaming_sizes(chip)))
    metadata["shared"] = 1  # kernels that size their grid divide by what they take of it
    return text


def make_llvm(text: str) -> str:
    """Their LLVM IR, with the function that a launch calls."""
    return stages.make_llvm(text, kernel_text)
