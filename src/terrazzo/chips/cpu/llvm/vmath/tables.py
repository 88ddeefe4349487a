"""Functions that saturate, as 16 polynomials whose coefficients fit in vector registers.

The pieces get wider as the function gets flatter: with v = 1 + x / scale, the top bits of v (two of
its exponent and two of its mantissa) number them, four to an octave. A piece is a polynomial around
an anchor chosen so that the function's value there is nearly exactly an f32 (Gal's accurate
tables), which leaves little but the last rounding as error. The first anchor is 0, where the
polynomial is that of f(x) - x; this keeps results near 0 relatively accurate. Coefficients are
computed when they are first needed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import NamedTuple

PIECES = 16
_DEGREE = 6
# The bits of v = 1 that the index is made of.
_FIRST_INDEX = (0x3F800000 >> 21) % PIECES


class Table(NamedTuple):
    """Anchors and coefficients, each a row of 16 entries in the order of the index bits."""

    scale: float
    anchors: tuple[float, ...]
    coefficients: tuple[tuple[float, ...], ...]


def saturating_table(f: Callable[[float], float], scale: float) -> Table:
    """Fits f, which is 0 at 0, on 0 <= x < 15 * scale."""
    rows = [(0.0,) * (_DEGREE + 2)] * PIECES
    for piece in range(PIECES):
        octave, quarter = divmod(piece, 4)
        low = scale * (2**octave * (1 + quarter / 4) - 1)
        high = scale * (2**octave * (1 + (quarter + 1) / 4) - 1)
        anchor = 0.0 if piece == 0 else _accurate_point(f, (low + high) / 2)
        rows[(_FIRST_INDEX + piece) % PIECES] = (anchor, *_fit(f, anchor, low, high))
    anchors, *coefficients = zip(*rows, strict=True)
    return Table(scale, anchors, tuple(coefficients))


_F32 = struct.Struct("<f")


def _single(x: float) -> float:
    return float(_F32.unpack(_F32.pack(x))[0])


def _accurate_point(f: Callable[[float], float], near: float) -> float:
    """An f32 close to `near` where f is closest to an f32."""
    start = struct.unpack("<i", struct.pack("<f", near))[0]
    step = 64  # spreads the candidates; their values are as good as random in the last bits
    points = [struct.unpack("<f", struct.pack("<i", start + step * i))[0] for i in range(-64, 65)]

    def miss(x: float) -> float:
        value = f(x)
        return abs(value - _single(value))

    return float(min(points, key=miss))


def _fit(f: Callable[[float], float], anchor: float, low: float, high: float) -> list[float]:
    """Coefficients in x - anchor of the polynomial through f at Chebyshev points."""
    value = _single(f(anchor))
    middle, half = (low + high) / 2, (high - low) / 2
    nodes = [
        middle - anchor + half * math.cos(math.pi * (2 * i + 1) / (2 * _DEGREE))
        for i in range(_DEGREE)
    ]
    # Newton's divided differences of (f(x) - f(anchor)) / (x - anchor), then expanded.
    differences = [(f(anchor + d) - value) / d for d in nodes]
    for order in range(1, _DEGREE):
        for i in range(_DEGREE - 1, order - 1, -1):
            rise = differences[i] - differences[i - 1]
            differences[i] = rise / (nodes[i] - nodes[i - order])
    expanded = [0.0] * _DEGREE
    for node, difference in zip(reversed(nodes), reversed(differences), strict=True):
        shifted = [0.0, *expanded[:-1]]
        expanded = [up - node * same for up, same in zip(shifted, expanded, strict=True)]
        expanded[0] += difference
    if anchor == 0.0:
        expanded[0] -= 1.0
    return [value, *(_single(coefficient) for coefficient in expanded)]
