"""Blocks of matrix products: which one a described chip is done with first.

A program makes one block of results, and brings the rows and columns of the factors for it to the
scratchpad piece by piece. Large blocks bring less in all; small ones keep all units busy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from itertools import product

from terrazzo.chips.gcu.description import Description
from terrazzo.dtypes import DType, bfloat16, float16

POWERS = (16, 32, 64, 128, 256)  # sides of blocks in Triton
SIDES = (*range(16, 257, 16), *range(288, 513, 32))  # and where nothing asks for powers of two
DEPTHS = (16, 32, 64, 128)
Block = tuple[int, int, int]  # rows, columns, steps of a piece
_OTHER_WORK = 200  # cycles, about, of a program beside its products and transfers


def common_half(chip: Description, types: Iterable[DType]) -> DType | None:
    """The half type that all factors have, if the matrix unit takes them as they are then."""
    found = set(types)
    if len(found) > 1 or not found <= {bfloat16, float16}:
        return None
    (half,) = found
    return None if chip.depth(half.short) is None else half


@lru_cache(maxsize=1024)
def ranked_blocks(chip: Description, sizes: Block, many: int, size: int, depth: int,
                  sides: tuple[int, ...] = SIDES, sums: int = 2, result: int = 4) -> list[Block]:
    """Blocks for products of m x k and k x n (`sizes` are m, n, k), the quickest first.

    There are `many` of them; elements have `size` bytes, and the matrix unit takes `depth` steps
    of their type at once. A block of sums is there `sums` times (what Triton makes of them is a
    value of its own), and a result has `result` bytes.
    """
    fitting = [block for block in product(sides, sides, DEPTHS)
               if _fits(chip, block, sizes, size, sums)]
    return sorted(fitting, key=lambda block: _cycles(chip, sizes, block, many, size, depth, result))


def _fits(chip: Description, block: Block, sizes: Block, size: int, sums: int) -> bool:
    rows, columns, length = block
    held = 4 * sums * rows * columns + 2 * size * length * (rows + columns)
    return held <= chip.scratchpad_bytes and all(
        side <= max(1 << (whole - 1).bit_length(), 16) for side, whole in zip(block, sizes))


def _cycles(chip: Description, sizes: Block, block: Block, many: int, size: int, depth: int,
            result: int) -> tuple[float, int]:
    """Cycles, about, of the unit that has most to do; of equal ones the longer block is better."""
    (m, n, k), (rows, columns, length) = sizes, block
    programs = many * math.ceil(m / rows) * math.ceil(n / columns)
    steps = math.ceil(k / length)
    worked = rows * columns * length * steps / (chip.matrix_rows * chip.matrix_columns * depth)
    shared = min(chip.memory_bytes_per_cycle / min(programs, chip.units),
                 chip.unit_bytes_per_cycle)
    moved = (size * steps * length * (rows + columns) + result * rows * columns) / shared
    waited = chip.dma_latency / chip.dma_in_flight * steps
    return math.ceil(programs / chip.units) * (max(worked, moved, waited) + _OTHER_WORK), -length
