"""Blocks of attention: how many queries and keys at a time a described chip is done with first.

A task makes a block of queries of one head, or two, and brings the keys and values that they see
piece by piece. Large blocks bring less in all; small ones keep all units busy. The estimate is the
model of time of docs/gcu.md for what the kernel counts, but for what is small; the unit that has
most to do decides.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from terrazzo.chips.gcu.description import Description

GROUP = 16  # queries whose products are one piece of work: a block is made of whole ones
MOST_ROWS = 512  # of a block
KEYS = (16, 32, 64, 128, 256)
# Vector operations of a score: an exponential of a difference, then maximum and sum, each with one
# query in a lane; where there is a mask, its part; and near the diagonal, hiding what is behind it.
_WEIGHT, _REDUCED, _MASK, _HIDDEN = 16, 2, 2, 2
_RESCALED = 24  # of a query, for a piece
_OTHER_WORK = 200  # cycles, about, of a task beside its products and transfers


class Sizes(NamedTuple):
    """What blocks are chosen by."""

    outer: int  # heads of all batches
    queries: int
    keys: int
    size: int  # of a query and a key
    value_size: int
    causal: bool
    bytes: int  # of an element
    depth: int  # of the matrix unit, for its type
    mask_bytes: int  # of an element of the mask; 0 without one

    @property
    def halves(self) -> bool:
        """Whether a weight is two numbers of a half type."""
        return self.bytes < 4

    @property
    def groups(self) -> int:
        """Groups of queries in a head."""
        return -(-self.queries // GROUP)

    def rows(self, blocks: int) -> int:
        """Queries of the longest of so many blocks."""
        return -(-self.groups // blocks) * GROUP

    def parts(self, blocks: int) -> int:
        """Blocks of a task: of a causal one, one that sees much and one that sees little."""
        return 2 if self.causal and blocks > 1 else 1


class AttentionBlock(NamedTuple):
    """How the work of a head is cut."""

    blocks: int  # of queries, which differ by a group at most
    keys: int  # of a piece


@lru_cache(maxsize=1024)
def best_block(chip: Description, sizes: Sizes) -> AttentionBlock | None:
    """The quickest block that the scratchpad holds, if there is one; of equal ones, long pieces."""
    fewest = -(-sizes.groups * GROUP // MOST_ROWS)
    numbers = range(fewest, min(max(2 * fewest, 4 * chip.units), sizes.groups) + 1)
    pieces = [keys for keys in KEYS if keys < sizes.keys + KEYS[0]]
    fitting = [AttentionBlock(blocks, keys) for blocks, keys in product(numbers, pieces)
               if blocks % sizes.parts(blocks) == 0
               and _held(sizes, blocks, keys) <= chip.scratchpad_bytes]
    return min(fitting, key=lambda block: (_cycles(chip, sizes, block), -block.keys),
               default=None)


def _held(sizes: Sizes, blocks: int, keys: int) -> int:
    """Bytes of the scratchpad, with pieces that are on their way."""
    lanes = sizes.rows(blocks) * sizes.parts(blocks)
    scores = lanes * keys * (4 + (2 * sizes.bytes if sizes.halves else 0) + sizes.mask_bytes)
    pieces = 2 * sizes.bytes * keys * (sizes.size + sizes.value_size)
    return scores + pieces + lanes * (4 * sizes.value_size + sizes.bytes * sizes.size + 4 * 4)


def _cycles(chip: Description, sizes: Sizes, block: AttentionBlock) -> float:
    """Cycles, about, of the unit that has most to do."""
    computed, moved = _tasks(chip, sizes, block)
    numbers = np.arange(sizes.outer * len(computed))
    busy, bytes_ = (np.bincount(numbers % chip.units, each[numbers % len(each)], chip.units)
                    for each in (computed, moved))
    data = np.maximum(bytes_ / chip.unit_bytes_per_cycle, np.minimum(
        bytes_ * min(len(numbers), chip.units), bytes_.sum()) / chip.memory_bytes_per_cycle)
    transfers = np.maximum(bytes_ / chip.transfer_bytes, 1)
    waited = np.maximum(data, (transfers * chip.dma_latency + data) / chip.dma_in_flight)
    return float((np.maximum(busy, waited) + np.minimum(busy, waited) / transfers).max())


def _tasks(chip: Description, sizes: Sizes, block: AttentionBlock
           ) -> tuple[np.ndarray, np.ndarray]:
    """Cycles of the units, and bytes that are moved, for each task of a head."""
    edges = np.arange(block.blocks + 1) * sizes.groups // block.blocks * GROUP
    first = edges[:-1]
    count = np.minimum(edges[1:], sizes.queries) - first
    seen = np.minimum(sizes.keys, first + count) if sizes.causal else np.full_like(
        first, sizes.keys)
    # What a query sees, if it looks at whole groups and whole pieces: a triangle less.
    triangle = np.minimum(count, seen) / 2 if sizes.causal else 0
    by_group = seen - np.maximum(triangle - GROUP / 2, 0)
    by_piece = seen - np.maximum(triangle - block.keys / 2, 0)
    lanes, groups, pieces = chip.lanes(32), -(-count // GROUP), -(-seen // block.keys)
    matrix = GROUP * groups * by_group * (sizes.size + (1 + sizes.halves) * sizes.value_size) / (
        chip.matrix_rows * chip.matrix_columns * sizes.depth)
    weight = _WEIGHT + sizes.halves + (_MASK if sizes.mask_bytes else 0)
    vector = (count / lanes * (by_piece * weight + 2 * triangle * _HIDDEN
                               + (pieces + 1) * sizes.value_size)
              + -(-count // lanes) * (by_piece * _REDUCED + pieces * _RESCALED))
    computed, row = np.maximum(vector, matrix), sizes.size + sizes.value_size
    moved = sizes.bytes * row * (count + seen) + sizes.mask_bytes * count * seen
    if sizes.parts(block.blocks) == 2:  # what the earlier one sees is there for the later one
        early, late = slice(len(first) // 2), slice(None, len(first) // 2 - 1, -1)
        computed = computed[early] + computed[late]
        moved = moved[early] + moved[late] - sizes.bytes * row * seen[early]
    return computed + _OTHER_WORK, moved
