"""The stages of the backend `gcu`: those that all share, for the chip as it is described."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from terrazzo.chips.gcu.counting import counted
from terrazzo.chips.gcu.description import Description
from terrazzo.chips.gcu.image import ImageFunction, write_image
from terrazzo.knobs import knobs
from terrazzo.triton_cpu import stages
from terrazzo.triton_cpu.frontend.lower import Lowered
from terrazzo.triton_cpu.frontend.state import Target
from terrazzo.triton_cpu.launch.entry import ENTRY, image_text

make_ttir = stages.make_ttir


def make_loops(module: Any, metadata: dict[str, Any], chip: Description) -> stages.LoopText:
    """The loops of a kernel, as they are for the chip."""
    target = Target(chip.spec(), None, (chip.matrix_rows, chip.matrix_columns), scratchpad=True)
    text = stages.make_loops(module, metadata, target)
    scratchpad = text.lowered.local_bytes
    if knobs.sanitize:  # what the sanitizer keeps for itself must not make a kernel too large
        scratchpad = min(scratchpad, chip.scratchpad_bytes)
    metadata["shared"], metadata["kinds"] = scratchpad, text.lowered.kinds
    metadata["num_warps"] = chip.warps
    return text


def make_llvm(text: str, metadata: dict[str, Any], chip: Description) -> str:
    """Their LLVM IR, which counts what the chip would do."""
    def write(lowered: Lowered) -> str:
        function = counted(lowered.function, chip, per="program")
        return image_text(replace(lowered, function=function), metadata["waits"])

    return stages.make_llvm(text, write)


def make_image(text: str, metadata: dict[str, Any], chip: Description) -> bytes:
    """Code for this machine's processor, as the runtime library loads it."""
    function = ImageFunction(metadata["name"], ENTRY, metadata["kinds"],
                             scratchpad=metadata["shared"])
    return write_image(stages.make_object(text), [function], chip.fingerprint)
