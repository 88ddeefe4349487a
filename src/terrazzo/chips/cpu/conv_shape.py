"""The register tile of a convolution: chosen by what a step of k costs, for all pixels at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from terrazzo.chips.spec import ChipSpec
from terrazzo.index import Index

_MOST_VECTORS = 6  # of a tile with all outputs: each pixel is then written at once
_OF_SEVERAL = 4  # of one of several panels
_VISIT_CYCLES = 8
_PANEL_SHARE = 0.25  # of the second-level cache, for a panel of weights that stays there
_CHUNK_SHARE = 0.75  # of the first-level cache, for a chunk of a panel
_DEEP = 512  # steps of k from which on chunks may pay


@dataclass(frozen=True)
class TileShape:
    """A register tile: so many rows of so many pixels, by vectors of channels."""

    down: int
    across: int  # of the larger tiles; the others have one pixel less
    vectors: int
    chunk: int = 0  # steps of k at a time, for all pixels; 0 is all steps, for one tile


def _cycles(pixels: int, vectors: int, depth: int, chunk: int, near: bool) -> float:
    """Cycles that one step of k takes: multiplications, loads, or waiting for the last sum.

    Measured on AVX-512: loads and requests for memory take a cycle each; tiles of two vectors or
    less have to ask ahead; a line of weights comes from the second-level cache in 2.5 cycles; and
    to visit a pixel of the output takes some cycles, however few of its channels are written.
    Weights in chunks lie in the first-level cache, but sums come and go with each.
    """
    products, loads = pixels * vectors / 2, pixels + vectors
    if chunk:
        return max(products, loads, 4.0) + (3.5 * products + 20) / chunk
    ahead = vectors if vectors <= 2 else 0
    far = 0 if near else 2.5 * vectors
    return max(products, loads + ahead, far, 4.0) + _VISIT_CYCLES * pixels / depth


def choose_tile(width: Index, height: Index, outputs: int, depth: int, run: int, chip: ChipSpec,
                item: int) -> TileShape:
    """The tile that takes the fewest cycles for all pixels of an image and all outputs.

    `depth` is the number of steps of k, `run` of those whose numbers are neighbours in memory, and
    `item` the size of an element.
    """
    best: tuple[float, TileShape] | None = None
    lanes, registers = chip.lanes(8 * item), 32 if chip.vector_registers >= 32 else 16
    whole = math.ceil(outputs / lanes)
    tall = height if isinstance(height, int) else 1
    widths = [v for v in range(1, min(_MOST_VECTORS, whole) + 1) if v <= _OF_SEVERAL or v == whole]
    for vectors in widths:
        most = (registers - vectors - 1) // vectors
        full, rest = divmod(whole, vectors)
        line = vectors * lanes * item
        fits = depth * line <= max(_PANEL_SHARE * chip.l2_bytes, 1 << 16)
        near = depth * line <= _CHUNK_SHARE * chip.l1_bytes
        steps = max(16, int(_CHUNK_SHARE * chip.l1_bytes) // line)
        even = math.ceil(run / math.ceil(run / steps))
        for chunk in (0, even) if depth >= _DEEP and fits else (0,) if depth < _DEEP else (even,):
            def cycles(pixels: int, vectors: int = vectors, full: int = full, rest: int = rest,
                       chunk: int = chunk, near: bool = near) -> float:
                left = _cycles(pixels, rest, depth, chunk, near) if rest else 0
                return full * _cycles(pixels, vectors, depth, chunk, near) + left

            options: list[tuple[float, int, int]] = []  # cycles a row, rows and pixels of a tile
            if isinstance(width, int):
                tiles = math.ceil(width / most)
                small, extra = divmod(width, tiles)
                each = extra * cycles(small + 1) + (tiles - extra) * cycles(small)
                options.append((each, 1, math.ceil(width / tiles)))
                for down in range(2, min(most // width, tall) + 1):
                    total = tall // down * cycles(down * width) + tall % down * cycles(width)
                    options.append((total / tall, down, width))
            else:
                options.append((cycles(most) / most, 1, most))
            for price, down, across in options:
                if best is None or price < best[0] * 0.999:
                    best = price, TileShape(down, across, vectors, chunk)
    assert best is not None
    return best[1]
