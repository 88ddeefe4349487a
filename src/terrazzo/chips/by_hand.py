"""Kernels that users write by hand, as a chip is asked to make them callable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Run = Callable[[Sequence[Any]], None]
"""Runs on arrays of the chip's memory, inputs and then results; None is one that is not given."""


@dataclass(frozen=True)
class Launch:
    """A kernel that runs many times side by side, and how often.

    `source` is text, or a function of Triton's. Without `blocks`, a kernel in CUDA C++ has a thread
    for each element of its first result. `constants` are Triton's: sizes of blocks, `num_warps`.
    """

    source: Any
    blocks: int | tuple[int, ...] | None = None
    threads: int = 256  # of a block, in CUDA C++
    shared_bytes: int = 0  # of a block, beside what the text declares, in CUDA C++
    constants: Mapping[str, Any] = field(default_factory=dict)

    def grid(self, elements: int) -> tuple[int, int, int]:
        """Blocks along three axes, for a first result of so many elements."""
        asked = self.blocks
        if asked is None:
            asked = -(-elements // self.threads)
        axes = (asked,) if isinstance(asked, int) else tuple(asked)
        x, y, z = (*axes, 1, 1)[:3]
        return x, y, z


@dataclass(frozen=True)
class Kernel:
    """One kernel for tensors of certain types and sizes."""

    launch: Launch
    entry: str  # its function that is `extern "C"`, where the source is text
    sizes: tuple[int, ...]  # of all tensors, one after the other; the entry reads them
    tensors: int
    elements: int  # of the first result


__all__ = ["Kernel", "Launch", "Run"]
