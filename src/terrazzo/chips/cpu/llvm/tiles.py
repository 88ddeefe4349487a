"""Templates for tile intrinsics: hand-shaped code where plain loops would leave speed behind.

A template gets the emitter, the tile and the scope, and answers whether it wrote code; when it
declines, the intrinsic's meaning is written as loops. Each shape of a tile becomes one internal
function, however often the kernel uses it: that keeps machine code and compile time small, and a
call costs little against the loop over k inside.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

# By the intrinsic: the module, imported when a kernel uses it, and the function in it.
_TEMPLATES = {
    "fma_tile": ("fma_tile", "emit_fma_tile"),
    "fma_rows": ("fma_tile", "emit_fma_rows"),
    "dot_tile": ("dot_tile", "emit_dot_tile"),
    "transpose_tile": ("transpose_tile", "emit_transpose_tile"),
    "transposed_copy": ("tile_transpose", "emit_transposed_copy"),
    "integer_tile": ("int8_tile", "emit_integer_tile"),
    "pair_tile": ("pair_tile", "emit_pair_tile"),
    "pair_rows": ("pair_tile", "emit_pair_rows"),
    "pair_panel": ("pair_tile", "emit_pair_panel"),
    "window_tile": ("window_tile", "emit_window_tile"),
}


def template_of(intrinsic: str) -> Callable[..., bool] | None:
    """The template of an intrinsic by its name; None where there is none."""
    if intrinsic not in _TEMPLATES:
        return None
    module, function = _TEMPLATES[intrinsic]
    found: Callable[..., bool] = getattr(
        import_module(f"terrazzo.chips.cpu.llvm.{module}"), function)
    return found
