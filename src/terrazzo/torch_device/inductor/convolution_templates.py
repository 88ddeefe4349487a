"""Convolutions as matrix products of windows that are never written out: templates and blocks.

An implicit product (im2col without the matrix). Its rows are output channels and its columns places
of the output; a step is one element of a window, of one channel. The numbers of places and steps
are taken apart by `//` and `%`, which the chip's transfers foresee, so that a program brings what
its windows cover once, however often they overlap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from torch._inductor.select_algorithm import SymbolicGridFn

from terrazzo.chips.gcu.description import Description
from terrazzo.torch_device.inductor.products import ProductTemplate

WINDOWS = """
        channels = steps // (KERNEL_H * KERNEL_W)
        down = steps // KERNEL_W % KERNEL_H
        along = steps % KERNEL_W
"""
PLACES = """
    idx_n = (places // (ROWS * COLUMNS))FOR_EACH
    idx_h = (places // COLUMNS % ROWS)FOR_EACH
    idx_w = (places % COLUMNS)FOR_EACH
"""
# A bias is there before the products, so that numbers of few bits are rounded once, as in operators
# of the device.
# Of rows and columns of the input, which are inside is asked only where some are not.
INSIDE = """{% if PADDING_H or PADDING_W %}
        inside &= (row >= 0) & (row < HEIGHT) & (column >= 0) & (column < WIDTH)
{% endif %}"""
FORWARD = """
{{def_kernel("X", "W", "B") if BIASED else def_kernel("X", "W")}}
    blocks = tl.cdiv(RESULTS, BLOCK_M)
    results = (tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)).to(INDEX_DTYPE)
    places = (tl.program_id(0) // blocks * BLOCK_N + tl.arange(0, BLOCK_N)).to(INDEX_DTYPE)
    group = tl.program_id(1).to(INDEX_DTYPE)
    idx_c = (group * RESULTS + results)[:, None]
PLACES
    X += group * CHANNELS * {{stride("X", 1)}}
{% if FLIPPED %}
    W += group * CHANNELS * {{stride("W", 0)}}
{% else %}
    W += group * RESULTS * {{stride("W", 0)}}
{% endif %}
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
{% if BIASED %}
    acc += tl.load(B + idx_c, mask=(results < RESULTS)[:, None], other=0.0).to(tl.float32)
{% endif %}
    for start in range(0, CHANNELS * KERNEL_H * KERNEL_W, BLOCK_K):
        steps = start + tl.arange(0, BLOCK_K).to(INDEX_DTYPE)
WINDOWS
{% if FLIPPED %}
        a = tl.load(W + results[:, None] * {{stride("W", 1)}}
                    + (channels * {{stride("W", 0)}} + (KERNEL_H - 1 - down) * {{stride("W", 2)}}
                       + (KERNEL_W - 1 - along) * {{stride("W", 3)}})[None, :],
                    mask=(results < RESULTS)[:, None] & (channels < CHANNELS)[None, :], other=0.0)
{% else %}
        a = tl.load(W + results[:, None] * {{stride("W", 0)}}
                    + (channels * {{stride("W", 1)}} + down * {{stride("W", 2)}}
                       + along * {{stride("W", 3)}})[None, :],
                    mask=(results < RESULTS)[:, None] & (channels < CHANNELS)[None, :], other=0.0)
{% endif %}
        row = idx_h * STRIDE_H - PADDING_H + (down * DILATION_H)[:, None]
        column = idx_w * STRIDE_W - PADDING_W + (along * DILATION_W)[:, None]
        inside = (idx_n < IMAGES) & (channels < CHANNELS)[:, None]
INSIDE
        b = tl.load(X + idx_n * {{stride("X", 0)}} + (channels * {{stride("X", 1)}})[:, None]
                    + row * {{stride("X", 2)}} + column * {{stride("X", 3)}},
                    mask=inside, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    mask = (results < RESULTS)[:, None] & (idx_n < IMAGES)
    {{store_output(("idx_n", "idx_c", "idx_h", "idx_w"), "acc", "mask",
                   val_shape=("BLOCK_M", "BLOCK_N"))}}
"""
# Its sums are of parts of all places, so that there is work for all units; what follows adds them.
WEIGHT_GRADIENT = """
{{def_kernel("G", "X")}}
    across = tl.cdiv(CHANNELS * KERNEL_H * KERNEL_W, BLOCK_N)
    blocks = tl.cdiv(RESULTS, BLOCK_M) * across
    idx_p = (tl.program_id(0) // blocks).to(INDEX_DTYPE)
    results = (tl.program_id(0) % blocks // across * BLOCK_M + tl.arange(0, BLOCK_M)
               ).to(INDEX_DTYPE)
    steps = (tl.program_id(0) % across * BLOCK_N + tl.arange(0, BLOCK_N)).to(INDEX_DTYPE)
    group = tl.program_id(1).to(INDEX_DTYPE)
    idx_c = (group * RESULTS + results)[:, None]
WINDOWS
    X += group * CHANNELS * {{stride("X", 1)}}
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for piece in range(PIECES):
        places = ((idx_p * PIECES + piece) * BLOCK_K + tl.arange(0, BLOCK_K)).to(INDEX_DTYPE)
PLACES
        a = tl.load(G + idx_c * {{stride("G", 1)}}
                    + (idx_n * {{stride("G", 0)}} + idx_h * {{stride("G", 2)}}
                       + idx_w * {{stride("G", 3)}})[None, :],
                    mask=(results < RESULTS)[:, None] & (idx_n < IMAGES)[None, :], other=0.0)
        row = (idx_h * STRIDE_H - PADDING_H)[:, None] + (down * DILATION_H)[None, :]
        column = (idx_w * STRIDE_W - PADDING_W)[:, None] + (along * DILATION_W)[None, :]
        inside = (idx_n < IMAGES)[:, None] & (channels < CHANNELS)[None, :]
INSIDE
        b = tl.load(X + (idx_n * {{stride("X", 0)}})[:, None]
                    + (channels * {{stride("X", 1)}})[None, :]
                    + row * {{stride("X", 2)}} + column * {{stride("X", 3)}},
                    mask=inside, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    idx_k = steps[None, :]
    mask = (results < RESULTS)[:, None] & (idx_k < CHANNELS * KERNEL_H * KERNEL_W)
    {{store_output(("idx_p", "idx_c", "idx_k"), "acc", "mask",
                   val_shape=("BLOCK_M", "BLOCK_N"))}}
"""


def _indented(text: str, by: int) -> str:
    return "\n".join(" " * by + line.strip() if line.strip() else "" for line in text.split("\n"))


@SymbolicGridFn
def _forward_grid(images: Any, results: Any, rows: Any, columns: Any, meta: Any, *, cdiv: Any
                  ) -> tuple[Any, Any, int]:
    groups = meta["GROUPS"]
    return (cdiv(results // groups, meta["BLOCK_M"])
            * cdiv(images * rows * columns, meta["BLOCK_N"]), groups, 1)


@SymbolicGridFn
def _gradient_grid(parts: Any, results: Any, steps: Any, meta: Any, *, cdiv: Any
                   ) -> tuple[Any, Any, int]:
    groups = meta["GROUPS"]
    return (parts * cdiv(results // groups, meta["BLOCK_M"]) * cdiv(steps, meta["BLOCK_N"]),
            groups, 1)


forward_template = ProductTemplate(
    name="gcu_convolution", grid=_forward_grid, source=FORWARD
    .replace("PLACES", PLACES.replace("FOR_EACH", "[None, :]")).replace("WINDOWS", WINDOWS)
    .replace("INSIDE", INSIDE))
weight_gradient_template = ProductTemplate(
    name="gcu_convolution_weight_gradient", grid=_gradient_grid, source=WEIGHT_GRADIENT
    .replace("PLACES", _indented(PLACES.replace("FOR_EACH", ""), 8))
    .replace("WINDOWS", _indented(WINDOWS, 4)).replace("INSIDE", INSIDE))


# ---------------------------------------------------------------- blocks
@dataclass(frozen=True)
class Shape:
    """Sizes of a convolution, of one group of channels where there are several."""

    images: int
    channels: int
    height: int
    width: int
    results: int  # channels of the output
    rows: int  # of the output
    columns: int
    kernel_h: int
    kernel_w: int
    stride_h: int
    stride_w: int
    padding_h: int
    padding_w: int
    dilation_h: int
    dilation_w: int
    groups: int
    flipped: bool = False  # the weight is that of the convolution whose input's gradient this is

    @property
    def places(self) -> int:
        return self.images * self.rows * self.columns

    @property
    def steps(self) -> int:
        return self.channels * self.kernel_h * self.kernel_w

    def constants(self) -> dict[str, int]:
        """What the templates know of it."""
        return {key.upper(): int(value) for key, value in asdict(self).items()}

    def window_cycles(self, chip: Description) -> float:
        """Cycles of all units together, about, that take its windows apart."""
        windows = self.groups * self.steps * self.places
        return _WINDOW_WORK * windows / (chip.vector_bits // 32) / chip.units

    def covered(self, places: int) -> int:
        """Elements of a channel, about, that the windows of so many neighbouring places cover."""
        rows = min(math.ceil(places / self.columns) * self.stride_h
                   + (self.kernel_h - 1) * self.dilation_h, self.height)
        images = math.ceil(places / (self.rows * self.columns))
        return min(rows * images, self.height * images) * self.width


@dataclass(frozen=True)
class Blocks:
    """Sides of a product's block; its places are in so many pieces, for the weight's gradient."""

    rows: int
    columns: int
    length: int
    pieces: int = 1

    def constants(self) -> dict[str, int]:
        return {"BLOCK_M": self.rows, "BLOCK_N": self.columns, "BLOCK_K": self.length}


CHANNELS = (16, 32, 64, 128)
PLACES_AT_ONCE = (32, 64, 128, 256, 512, 1024)
LENGTHS = (16, 32, 64, 128)
_WINDOW_WORK = 8  # vector operations, about, for an element of a window: its place, whether inside
_OTHER_WORK = 200  # cycles, about, of a program beside that


@lru_cache(maxsize=1024)
def ranked_forward(chip: Description, shape: Shape, size: int, depth: int) -> list[Blocks]:
    """Blocks of a convolution, the quickest first; elements have `size` bytes."""
    found = [Blocks(*sides) for sides in product(
        _up_to(CHANNELS, shape.results), _up_to(PLACES_AT_ONCE, shape.places),
        _up_to(LENGTHS, shape.steps)) if _fits(chip, sides, size)]
    return sorted(found, key=lambda blocks: _forward_cycles(chip, shape, blocks, size, depth))


@lru_cache(maxsize=1024)
def ranked_gradient(chip: Description, shape: Shape, size: int, depth: int) -> list[Blocks]:
    """Blocks of the gradient of a weight, the quickest first."""
    found = (Blocks(rows, columns, length, pieces) for rows, columns, length in product(
        _up_to(CHANNELS, shape.results), _up_to(PLACES_AT_ONCE, shape.steps),
        _up_to(LENGTHS, shape.places)) if _fits(chip, (rows, columns, length), size)
        for pieces in _pieces(chip, shape, rows, columns, length))
    return sorted(found, key=lambda blocks: _gradient_cycles(chip, shape, blocks, size, depth))


def parts_of(shape: Shape, blocks: Blocks) -> int:
    """How many programs share the places of a gradient's block."""
    return math.ceil(shape.places / (blocks.length * blocks.pieces))


def _fits(chip: Description, sides: tuple[int, int, int], size: int) -> bool:
    """Whether sums, what follows them and two pieces of both factors lie in the scratchpad."""
    rows, columns, length = sides
    return (4 * 2 * rows * columns + 2 * size * length * (rows + columns)
            <= chip.scratchpad_bytes)


def _up_to(sides: tuple[int, ...], size: int) -> list[int]:
    return [side for side in sides if side < 2 * size] or [sides[0]]


def _pieces(chip: Description, shape: Shape, rows: int, columns: int, length: int
            ) -> Iterator[int]:
    """Such that there is a program for each unit, or for half of them."""
    blocks = (math.ceil(shape.results / rows) * math.ceil(shape.steps / columns) * shape.groups)
    whole = math.ceil(shape.places / length)
    yield from {math.ceil(whole / max(many // blocks, 1)) for many in (chip.units // 2, chip.units)}


def _forward_cycles(chip: Description, shape: Shape, blocks: Blocks, size: int, depth: int
                    ) -> float:
    programs = (shape.groups * math.ceil(shape.results / blocks.rows)
                * math.ceil(shape.places / blocks.columns))
    steps = math.ceil(shape.steps / blocks.length) * blocks.length
    brought = size * (blocks.rows * steps + shape.channels * shape.covered(blocks.columns))
    made = 4 * blocks.rows * blocks.columns
    if 2 * (brought + made) > chip.scratchpad_bytes:
        brought *= steps // blocks.length
    return _cycles(chip, programs, blocks.rows * blocks.columns * steps / depth,
                   steps * blocks.columns, brought + made, 3)


def _gradient_cycles(chip: Description, shape: Shape, blocks: Blocks, size: int, depth: int
                     ) -> float:
    parts, places = parts_of(shape, blocks), blocks.length * blocks.pieces
    programs = (shape.groups * math.ceil(shape.results / blocks.rows)
                * math.ceil(shape.steps / blocks.columns) * parts)
    rows, columns = min(blocks.rows, shape.results), min(blocks.columns, shape.steps)
    channels = min(columns // (shape.kernel_h * shape.kernel_w) + 1, shape.channels)
    moved = size * (rows * places + channels * shape.covered(places)) + 4 * rows * columns
    added = 4 * parts * shape.groups * shape.results * shape.steps / chip.memory_bytes_per_cycle
    return added + _cycles(chip, programs, blocks.rows * blocks.columns * places / depth,
                           places * columns, moved, 2 * blocks.pieces + 1)


def _cycles(chip: Description, programs: int, products: float, windows: int, moved: float,
            transfers: int) -> float:
    """Cycles, about, of the unit that has most to do."""
    matrix = products / (chip.matrix_rows * chip.matrix_columns)
    vector = _WINDOW_WORK * windows / (chip.vector_bits // 32)
    shared = min(chip.memory_bytes_per_cycle / min(programs, chip.units),
                 chip.unit_bytes_per_cycle)
    data = moved / shared
    waits = max(transfers, math.ceil(moved / chip.transfer_bytes))
    stream = max(data, ((waits - 1) * chip.dma_latency + data) / chip.dma_in_flight)
    compute = max(matrix, vector)
    each = max(compute, stream) + min(compute, stream) / waits + chip.dma_latency + _OTHER_WORK
    return math.ceil(programs / chip.units) * each
