"""What a GPU's memory bounds: pointwise operators, rows, sums and transposes, beside `copy_`.

Rates are bytes read and written. `copy_` of the same bytes is the limit, of a sum too: that moves
bytes no slower than it reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from gpu_machine import Machine
from gpu_report import Figure, Measured, Report

import terrazzo as tz

Pair = tuple[Callable[..., Any], Callable[..., Any]]  # ours, torch's
KINDS = (torch.float32, torch.bfloat16)
SHAPES = ((8192, 4096), (4096, 16384), (65536, 1024), (2048, 32768), (262144, 64))
SMALL_SHAPES = ((16, 96), (4, 1024), (3, 5000))
ROWS: dict[str, Pair] = {
    "gelu": (tz.gelu, F.gelu),
    "softmax": (tz.softmax, lambda x: F.softmax(x, -1)),
    "layer_norm": (tz.layer_norm, lambda x: F.layer_norm(x, x.shape[-1:])),
    "rms_norm": (tz.rms_norm, lambda x: F.rms_norm(x, x.shape[-1:])),
}
# Shapes, and the axes of each that are summed over; None: all.
SUMS = (((1 << 26,), (None,)), ((8192, 4096), (None, 0, 1)), ((64, 1 << 20), (0, 1)),
        ((256, 512, 512), (0, 1, 2)))
SMALL_SUMS = (((5000,), (None,)), ((24, 72), (None, 0, 1)), ((4, 6, 40), (0, 1, 2)))
TRANSPOSES = (((8192, 8192), (1, 0)), ((4096, 16384), (1, 0)), ((64, 1024, 1024), (0, 2, 1)),
              ((32, 256, 56, 56), (0, 2, 3, 1)), ((32, 56, 56, 256), (0, 3, 1, 2)))
SMALL_TRANSPOSES = (((40, 72), (1, 0)), ((3, 16, 40), (0, 2, 1)), ((2, 16, 5, 6), (0, 2, 3, 1)))


@dataclass(frozen=True, eq=False)
class Shown:
    """One row of a table: what is run on what, and which part of the limit it shall come to."""

    name: str
    item: str
    pair: Pair
    shape: tuple[int, ...]
    kind: torch.dtype
    target: float
    moved: float = 2.0  # how often the bytes of x are, about
    inductor: float | None = None  # times Inductor's rate that it shall come to


def part_of_copies(name: str, kind: torch.dtype, columns: int) -> float:
    """What rows so long shall come to: longer ones do not stay in registers."""
    if name == "gelu" or columns <= 8192:
        return 0.95
    if columns > 16384:
        return 0.85
    return 0.9 if kind is torch.bfloat16 else 0.95


def shown(row: Shown, machine: Machine) -> Measured:
    """Ours, eager and Inductor, each as a part of the limit."""
    ours, eager = row.pair
    x = machine.random(*row.shape, dtype=row.kind)
    want = eager(x.double())
    got = ours(x).double()
    # Each has its own order of sums; half types are rounded once more.
    slack = 2e-5 if row.kind is torch.float32 else 1e-2
    torch.testing.assert_close(got, want, rtol=slack, atol=slack * max(
        1.0, float(want.abs().max())))
    del want, got
    y, compiled = torch.empty_like(x), machine.compiled(eager)
    times = machine.in_turns(lambda: y.copy_(x), lambda: ours(x), lambda: eager(x),
                             lambda: compiled(x))
    limit, *rates = (size / t / 1e9 for size, t in zip(
        (2.0 * x.nbytes, *[row.moved * x.nbytes] * 3), times, strict=True))
    text = f"copy_ {limit:.2f} TB/s, ours {rates[0]:.2f}, eager {rates[1]:.2f}, " \
           f"Inductor {rates[2]:.2f}"
    return text, [Figure(row.item, "of copy_", rates[0] / limit, row.target),
                  Figure(row.item, "Inductor", times[3] / times[1], row.inductor),
                  Figure(row.item, "eager", times[2] / times[1])]


def measured(rows: list[Shown], machine: Machine, report: Report) -> None:
    for row in rows:
        sizes = "x".join(map(str, row.shape))
        report.measure(f"{row.name} {sizes} {str(row.kind)[6:]}",
                       lambda: shown(row, machine))  # noqa: B023


def rows(machine: Machine, report: Report) -> None:
    """Pointwise operators and rows: 40 of them."""
    measured([Shown(name, "a rows", pair, shape, kind, part_of_copies(name, kind, shape[-1]),
                    inductor=1.0)
              for kind in KINDS for shape in (SMALL_SHAPES if machine.simulated else SHAPES)
              for name, pair in ROWS.items()], machine, report)
    report.mean("a rows", "Inductor", 1.2)
    report.mean("a rows", "eager", 1.6)


def _sum(axis: int | None) -> Pair:
    if axis is None:
        return tz.sum, torch.sum
    return tz.jit(lambda x: tz.sum(x, axis=axis)), lambda x: x.sum(axis)


def sums(machine: Machine, report: Report) -> None:
    """Sums over everything and along each axis."""
    measured([Shown("sum" if axis is None else f"sum along axis {axis}", "a sums", _sum(axis),
                    shape, kind, 0.9, 1.0 + (0 if axis is None else 1 / shape[axis]))
              for kind in KINDS for shape, axes in (SMALL_SUMS if machine.simulated else SUMS)
              for axis in axes], machine, report)


def transposes(machine: Machine, report: Report) -> None:
    """Axes in another order, copied."""
    def pair(axes: tuple[int, ...]) -> Pair:
        return tz.jit(lambda x: tz.permute_dims(x, axes=axes)), lambda x: x.permute(
            axes).contiguous()

    measured([Shown(f"permute {' '.join(map(str, axes))}", "a transposes", pair(axes), shape, kind,
                    0.85)
              for kind in KINDS
              for shape, axes in (SMALL_TRANSPOSES if machine.simulated else TRANSPOSES)],
             machine, report)


assert math.prod((len(KINDS), len(SHAPES), len(ROWS))) == 40
