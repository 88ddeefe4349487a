"""Templates for tile intrinsics: hand-shaped code where plain loops would leave speed behind.

A template gets the emitter, the tile and the scope, and answers whether it wrote code; when it
declines, the intrinsic's meaning is written as loops. Each shape of a tile becomes one internal
function, however often the kernel uses it: that keeps machine code and compile time small, and a
call costs little against the loop over k inside.
"""

from __future__ import annotations

from collections.abc import Callable

from terrazzo.chips.cpu.llvm.dot_tile import emit_dot_tile
from terrazzo.chips.cpu.llvm.fma_tile import emit_fma_rows, emit_fma_tile
from terrazzo.chips.cpu.llvm.int8_tile import emit_integer_tile
from terrazzo.chips.cpu.llvm.pair_tile import emit_pair_panel, emit_pair_rows, emit_pair_tile
from terrazzo.chips.cpu.llvm.tile_transpose import emit_transposed_copy
from terrazzo.chips.cpu.llvm.transpose_tile import emit_transpose_tile
from terrazzo.chips.cpu.llvm.window_tile import emit_window_tile

TEMPLATES: dict[str, Callable[..., bool]] = {
    "fma_tile": emit_fma_tile,
    "fma_rows": emit_fma_rows,
    "dot_tile": emit_dot_tile,
    "transpose_tile": emit_transpose_tile,
    "transposed_copy": emit_transposed_copy,
    "integer_tile": emit_integer_tile,
    "pair_tile": emit_pair_tile,
    "pair_rows": emit_pair_rows,
    "pair_panel": emit_pair_panel,
    "window_tile": emit_window_tile,
}
