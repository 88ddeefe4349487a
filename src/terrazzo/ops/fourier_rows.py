"""Short transforms of many lines of real numbers: a vector holds the same place of many lines.

One line of 64 to 256 numbers is too short for vectors of its columns. So a task takes as many lines
as a vector has lanes, turns them around, and does to each vector what would be done to one number:
2 n real numbers are n complex ones, whose transform is taken apart into that of the real ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from terrazzo.base.scalar import Const
from terrazzo.base.scalar import cast as cast_scalar
from terrazzo.base.shapes import num_elements
from terrazzo.expr.ir import fresh_axis
from terrazzo.graph.applying import constant
from terrazzo.graph.ir import TensorType
from terrazzo.index import Index, minimum
from terrazzo.loop.interpret import convert
from terrazzo.loop.ir import Block, Buffer, For, Stmt, Store, block
from terrazzo.loop.tile_transpose import transposed_copy
from terrazzo.ops.define import primitive
from terrazzo.ops.fourier_loops import (
    allocated,
    checked,
    column_roots,
    columns_of,
    half_roots,
    halves_of_pair,
    lanes_of,
    smooth,
)
from terrazzo.ops.fourier_plans import Complex, is_smooth

LONGEST = 128  # complex numbers of a line: as many vectors fit in the caches next to the core
NUMBERS_A_LINE = 32  # so many numbers want another line next to theirs, to fill vectors


def row_roots(n: int, inverse: bool) -> np.ndarray:
    """The table for `real_rows` of 2 n numbers."""
    sign = 1 if inverse else -1
    return np.concatenate([column_roots(n, sign), half_roots(n, sign)])


def _rows_type(x: TensorType, table: TensorType, *, inverse: bool, scale: float) -> TensorType:
    given = checked("real_rows", x, table, -2, lambda n: len(row_roots(n - inverse, inverse)))
    n = given - inverse
    smooth("real_rows", n)
    return TensorType((*x.shape[:-2], n + (not inverse), 2), x.dtype)


def _rows_numpy(x: np.ndarray, table: np.ndarray, *, inverse: bool, scale: float, out: TensorType
                ) -> np.ndarray:
    wide = x.astype(np.float64)
    with np.errstate(all="ignore"):
        if inverse:
            size = 2 * (wide.shape[-2] - 1)
            made = np.fft.irfft(wide[..., 0] + 1j * wide[..., 1], size, axis=-1) * (size * scale)
            return convert(made.reshape(out.shape), out.dtype)
        spectrum = np.fft.rfft(wide.reshape(*wide.shape[:-2], -1), axis=-1) * scale
    return convert(np.stack([spectrum.real, spectrum.imag], -1), out.dtype)


@primitive(family="signal", infer=_rows_type, reference=_rows_numpy, loops=True,
           differentiable=False)
def real_rows(x: Any, table: Any, *, inverse: bool, scale: float, out: TensorType) -> Any:
    """the transforms [..., n + 1, 2] of 2 n real numbers x [..., n, 2], or the way back, in vectors
    of lines"""
    n, lines, dtype = x.shape[-2] - inverse, num_elements(x.shape[:-2]), x.dtype.compute
    lanes, roots_at = lanes_of(dtype), len(column_roots(n, 1))
    given_size, made_size = (2 * n + 2, 2 * n) if inverse else (2 * n, 2 * n + 2)

    def build(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> Stmt:
        if lines == 0:
            return Block(())
        source, roots = inputs
        task = fresh_axis("task", (lines + lanes - 1) // lanes)
        first = task.var * lanes
        live = minimum(lanes, lines - first)
        given = Buffer("given", x.dtype, given_size * lanes)
        made = Buffer("made", x.dtype, made_size * lanes)
        apart = Buffer("apart", dtype, 2 * n * lanes)  # the numbers between the two steps

        def at(buffer: Buffer, row: Index, lane: Index) -> Complex:
            re, im = buffer[2 * row * lanes + lane], buffer[(2 * row + 1) * lanes + lane]
            return cast_scalar(re, dtype), cast_scalar(im, dtype)

        def put(buffer: Buffer, row: Index, lane: Index, z: Complex) -> list[Stmt]:
            return [Store(buffer, (2 * row + part) * lanes + lane, cast_scalar(value, buffer.dtype))
                    for part, value in enumerate(z)]

        def halves(before: Buffer, after: Buffer) -> Stmt:
            """The transform of real numbers from that of complex ones, or the way back."""
            k, lane, end = fresh_axis("k", n), fresh_axis("lane", lanes), fresh_axis("end", lanes)
            at_root = roots_at + 2 * k.var
            root = cast_scalar(roots[at_root], dtype), cast_scalar(roots[at_root + 1], dtype)
            pair = halves_of_pair(at(before, k.var, lane.var), at(before, n - k.var, lane.var),
                                  root, dtype)
            start = at(before, 0, end.var)
            half, zero = Const(dtype, 0.5), Const(dtype, 0.0)
            if inverse:  # the imaginary parts at both ends count for nothing
                last, _ = at(before, n, end.var)
                ends = put(after, 0, end.var, ((start[0] + last) * half, (start[0] - last) * half))
            else:
                ends = [*put(after, 0, end.var, (start[0] + start[1], zero)),
                        *put(after, n, end.var, (start[0] - start[1], zero))]
            return block(
                For(end.var, 0, lanes, block(*ends), "vector"),
                For(k.var, 1, n, For(lane.var, 0, lanes, block(
                    *put(after, k.var, lane.var, pair)), "vector")))

        factor = Const(dtype, 2 * scale if inverse else scale)
        transform, local = columns_of(
            n, 1 if inverse else -1, roots, lanes, dtype,
            lambda row, lane: at(apart if inverse else given, row, lane),
            lambda row, lane, z: put(made if inverse else apart, row, lane,
                                     (z[0] * factor, z[1] * factor)))
        steps = [halves(given, apart), transform] if inverse else [transform, halves(apart, made)]
        body = block(
            transposed_copy(given, 0, source, first * given_size, given_size, live, lanes,
                            given_size),
            *steps,
            transposed_copy(outputs[0], first * made_size, made, 0, live, made_size, made_size,
                            lanes))
        return For(task.var, 0, task.hi, allocated(body, [given, made, apart, *local]), "parallel",
                   grain=max(128 // n, 1))

    return build


def transformed_rows(x: Any, inverse: bool, scale: float = 1.0) -> Any | None:
    """`real_rows` of x, or None where lines are too long or too few, or of a half type."""
    n, lines = x.shape[-2] - inverse, num_elements(x.shape[:-2])
    if not (is_smooth(n) and 1 < n <= LONGEST and x.dtype is x.dtype.compute) or (
            isinstance(lines, int) and NUMBERS_A_LINE * lines < n):
        return None
    table = constant(row_roots(n, inverse), x.dtype)
    return real_rows(x, table, inverse=inverse, scale=scale)
