"""Running combinations on a GPU: which kernels there are for them, by rules with reasons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from terrazzo.chips.cuda.parts import Maker, Parts
from terrazzo.chips.cuda.split import ENOUGH, WANTED
from terrazzo.chips.spec import ChipSpec
from terrazzo.codegen.triton.module import Written
from terrazzo.codegen.triton.scan import Cut, Scan, ScanInParts, scan_kernel, sums_kernel
from terrazzo.expr.ir import Program
from terrazzo.index import Index

# Bytes that a program carries at once: a row up to this length is one block.
TILE_BYTES = 16 << 10
ANY_TILE_BYTES = 4 << 10  # of rows of unknown length, which may be short
SHORT_ROW = 64  # rows up to this length share a program
SHORT_TILE, COLUMN_TILE = 1024, 2048  # elements of a tile of short rows, and of columns
COLUMNS = 32  # lines side by side in memory that one program has: what a load of a warp takes
# Tiles of a line from which on two more launches take less time, and those of a part at least.
LONG, LEAST = 8, 2


def kernels(program: Program, spec: ChipSpec) -> Parts:
    """The programs of a scan in order, each with what writes its kernel."""
    scan = Scan.of(program)
    cut = cut_of(scan, spec)
    if not cut.span:
        return [(program, _maker(scan_kernel, program, scan, cut, spec))]
    parts = ScanInParts.of(program, scan, cut)
    few = cut_of(parts.before, spec, whole=True)
    return [(parts.sums, _maker(sums_kernel, parts.sums, scan, cut, spec)),
            (parts.before_program, _maker(scan_kernel, parts.before_program, parts.before, few,
                                          spec)),
            (parts.final, _maker(scan_kernel, parts.final, scan, cut, spec))]


def _maker(kernel: Callable[..., Written], program: Program, scan: Scan, cut: Cut, spec: ChipSpec
           ) -> Maker:
    return partial(kernel, program, scan, cut, spec)


def cut_of(scan: Scan, spec: ChipSpec, whole: bool = False) -> Cut:
    """How a scan is cut; `whole` lines have no parts."""
    length, lines = scan.length, scan.lines
    if scan.inner != 1:
        across = min(COLUMNS, _power_of_two(lines))
        cut = Cut(min(COLUMN_TILE // across, _power_of_two(length)), across)
    elif isinstance(length, int) and length <= SHORT_ROW:
        down = _power_of_two(length)
        return Cut(down, min(SHORT_TILE // down, _power_of_two(lines)))
    else:
        most = TILE_BYTES if isinstance(length, int) else ANY_TILE_BYTES
        cut = Cut(min(most // scan.carried.itemsize, _power_of_two(length)), 1)
    return cut if whole else _in_parts(scan, cut, spec)


def _in_parts(scan: Scan, cut: Cut, spec: ChipSpec) -> Cut:
    """Few long lines in parts, so that all multiprocessors have some."""
    length, lines = scan.length, scan.lines
    if not isinstance(length, int) or not isinstance(lines, int) or (
            length < LONG * cut.positions):
        return cut
    programs = -(-lines // cut.lines)
    if programs >= ENOUGH * spec.cores:
        return cut
    parts = min(-(-WANTED[False] * spec.cores // programs), length // (LEAST * cut.positions))
    return replace(cut, span=-(-length // (parts * cut.positions)) * cut.positions)


def _power_of_two(n: Index) -> int:
    return 1 << max(n - 1, 0).bit_length() if isinstance(n, int) else 1 << 62
