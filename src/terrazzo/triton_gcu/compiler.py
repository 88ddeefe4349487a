"""Triton's side of compiling for a virtual chip: the stages from TTIR to an image.

Loops are written for the chip as it is described, whatever processor runs them, so that what they
count is the same everywhere. LLVM alone looks at the processor.

Triton finds this module through the entry point group `triton.backends`; it must hold exactly one
concrete subclass of `BaseBackend`.
"""

from __future__ import annotations

import warnings
from typing import Any

from terrazzo.knobs import knobs
from terrazzo.runtime.cache import make_key, source_stamp
from terrazzo.triton_cpu.backend import LoopBackend, Options, host_key
from terrazzo.triton_gcu.chip import description


class GCUBackend(LoopBackend):
    """Compiles kernels for the chip that is described."""

    backend_name = "gcu"
    binary_ext = "gcuimg"

    @classmethod
    def supports_target(cls, target: Any) -> bool:
        """Its own, and the chip by the name that torch calls it, which Inductor asks for."""
        return target.backend in (cls.backend_name, description().name)

    def hash(self) -> str:
        return "terrazzo-" + make_key("triton_gcu", source_stamp(), str(knobs.code_key),
                                      host_key(), chip=description().spec())

    def parse_options(self, opts: dict[str, Any]) -> Options:
        """As for the CPU. Kernels that ask (`tl.extra.cuda.num_threads`) hear what was asked for,
        as their grid was made for it; how many warps there are is in the metadata."""
        options = super().parse_options(opts)
        if opts.get("num_warps") not in (None, description().warps):
            _warn_of_warps(options.num_warps)
        return options

    def add_stages(self, stages: dict[str, Any], options: Options, language: Any = None) -> None:
        from terrazzo.triton_gcu import gcu_stages

        chip = description()
        stages["ttir"] = lambda src, metadata: gcu_stages.make_ttir(src)
        stages["loop"] = lambda src, metadata: gcu_stages.make_loops(src, metadata, chip)
        stages["llir"] = lambda src, metadata: gcu_stages.make_llvm(src, metadata, chip)
        stages["gcuimg"] = lambda src, metadata: gcu_stages.make_image(src, metadata, chip)


_warned: set[str] = set()


def _warn_of_warps(asked: int) -> None:
    chip = description()
    if chip.name not in _warned:
        _warned.add(chip.name)
        warnings.warn(f"a program has {chip.warps} warp on {chip.name}: num_warps={asked} or any "
                      "other number changes nothing (said once)", stacklevel=2)
