"""The pictures of docs/new-chip.md: modelled time over grids and blocks, written as SVG.

    python docs/gcu_pictures.py          # writes docs/pictures/gcu-*.svg, or into another folder

Times are modelled, so every machine draws the same.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl

from terrazzo.torch_device import register
from terrazzo.triton_gcu.activate import activate
from terrazzo.triton_gcu.driver import modelled_bench

FOLDER = Path(__file__).parent / "pictures"
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 300, 56, 34, 150, 44
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37")
TOTAL = 48 * 64 * 1024  # elements, where the work is the same for every grid
EACH = 16 * 1024  # elements of a program, where each does the same


@dataclass(frozen=True)
class Line:
    """What is drawn in one colour."""

    name: str
    points: Sequence[tuple[float, float]]


def drawn(title: str, across: str, up: str, lines: Sequence[Line], marks: Sequence[int]) -> str:
    """A picture of lines over numbers, with upright marks, that reads on light and dark pages."""
    least_x = min(min(marks) - 1, *(x for line in lines for x, _ in line.points))
    most_x = max(x for line in lines for x, _ in line.points)
    top = max(y for line in lines for _, y in line.points)
    step = next(s for n in range(6) for s in (10 ** n, 2 * 10 ** n, 5 * 10 ** n) if 6 * s >= top)
    most_y = 1.06 * top

    def place(x: float, y: float) -> tuple[float, float]:
        return (LEFT + (x - least_x) / (most_x - least_x) * (WIDTH - LEFT - RIGHT),
                HEIGHT - BOTTOM - y / most_y * (HEIGHT - TOP - BOTTOM))

    right, floor = place(most_x, 0)
    made = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            'font-family="sans-serif" font-size="12" fill="#57606a">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
            f'<text x="{LEFT}" y="20" font-size="14" fill="#1f2328">{title}</text>',
            f'<text x="{(LEFT + right) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{across}'
            "</text>", f'<text x="{LEFT - 6}" y="{TOP + 2}" text-anchor="end">{up}</text>']
    for mark in marks:
        x, _ = place(mark, 0)
        made.append(f'<path d="M{x:.1f} {TOP}V{floor:.1f}" stroke="#d0d7de"/>'
                    f'<text x="{x:.1f}" y="{floor + 16:.1f}" text-anchor="middle">{mark}</text>')
    for value in range(step, int(top) + 1, step):
        _, y = place(least_x, value)
        made.append(f'<path d="M{LEFT} {y:.1f}H{right:.1f}" stroke="#eaeef2"/><text '
                    f'x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value}</text>')
    made.append(f'<path d="M{LEFT} {TOP}V{floor:.1f}H{right:.1f}" fill="none" stroke="#57606a"/>')
    for number, (line, colour) in enumerate(zip(lines, COLOURS)):
        path = "L".join("{:.1f} {:.1f}".format(*place(*point)) for point in line.points)
        made.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        made.append(f'<text x="{right + 8:.1f}" y="{TOP + 14 + 18 * number}" fill="{colour}">'
                    f"{line.name}</text>")
    return "\n".join([*made, "</svg>"]) + "\n"


@triton.jit
def strided(x, out, n, share, BLOCK: tl.constexpr):
    first = tl.program_id(0) * share
    last = tl.minimum(first + share, n)
    for start in range(first, last, BLOCK):
        i = start + tl.arange(0, BLOCK)
        value = tl.load(x + i, mask=i < last)
        tl.store(out + i, tl.exp(tl.exp(value)) * tl.exp(-value), mask=i < last)


def pictures() -> dict[str, str]:
    """All of them, by the names of their files."""
    register()
    activate()

    size = max(TOTAL, 200 * EACH)
    x, out = (torch.zeros(size, device="gcu") for _ in range(2))

    def microseconds(programs: int, n: int, share: int, block: int) -> float:
        return float(modelled_bench(
            lambda: strided[(programs,)](x, out, n, share, BLOCK=block))) * 1e3

    grids = range(1, 201)
    whole = [(g, microseconds(g, TOTAL, -(-TOTAL // g), 1024)) for g in grids if g >= 8]
    each = [(g, microseconds(g, g * EACH, EACH, 1024)) for g in grids]
    blocks = [2 ** n for n in range(6, 16)]
    return {
        "gcu-grid-same-total.svg": drawn(
            "The same work in all, on 8 to 200 programs", "programs", "us",
            [Line("3 million elements", whole)], (48, 96, 144, 192)),
        "gcu-grid-same-each.svg": drawn(
            "The same work for each of 1 to 200 programs", "programs", "us",
            [Line("16384 elements each", each)], (48, 96, 144, 192)),
        "gcu-blocks.svg": _blocks(microseconds, blocks)}


def _blocks(microseconds: Callable[[int, int, int, int], float], blocks: Sequence[int]) -> str:
    lines = [Line(name, [(math.log2(b), microseconds(*grid(b), b)) for b in blocks])
             for name, grid in (
                 ("a block a program", lambda b: (-(-TOTAL // b), TOTAL, b)),
                 ("48 programs", lambda b: (48, TOTAL, TOTAL // 48)))]
    return drawn("The same work by blocks of 64 to 32768 elements",
                 "elements of a block, as a power of two", "us", lines, range(6, 16))


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(exist_ok=True)
    for name, text in pictures().items():
        (folder / name).write_text(text)
        print(folder / name)


if __name__ == "__main__":
    main()
