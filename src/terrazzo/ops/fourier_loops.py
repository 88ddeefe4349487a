"""Fast Fourier transforms as loops: butterflies on vectors of independent columns.

A transform of length n = n1 * n2 goes over its numbers twice (Bailey's four steps): the columns of
the matrix [n1, n2] are transformed, multiplied by roots of unity and stored transposed; then the
columns of that matrix [n2, n1] are transformed into the result. Columns are transformed by stages
of small radices that leave everything in order (Stockham), a vector of columns at a time, between
two local buffers. So no stage ever moves numbers across the lanes of a vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from terrazzo.base.scalar import Const, as_scalar, call
from terrazzo.base.scalar import cast as cast_scalar
from terrazzo.base.shapes import dims_text, num_elements
from terrazzo.dtypes import DType
from terrazzo.errors import DTypeError, ShapeError, user_location
from terrazzo.expr.ir import fresh_axis
from terrazzo.graph.applying import constant
from terrazzo.graph.ir import Node, TensorType, Value
from terrazzo.index import Index, maximum, minimum
from terrazzo.loop.interpret import convert
from terrazzo.loop.ir import Alloc, Block, Buffer, For, If, Stmt, Store, block
from terrazzo.loop.tile_transpose import transposed_copy
from terrazzo.ops.define import primitive
from terrazzo.ops.fourier_plans import (
    LARGEST_PRIME,
    Complex,
    Stage,
    butterfly,
    halves,
    is_smooth,
    minus,
    plus,
    roots_of,
    stages_of,
    stages_of_halves,
    table_size,
    times,
)

LONGEST_COLUMN = 512  # rows of a vector of columns that two local buffers hold in a second cache
_LINE_PER_TASK = 8192  # numbers: longer lines are shared by all threads, shorter ones are not
_TASK = 2048  # numbers that are worth a task of their own


# ---------------------------------------------------------------- loops
@dataclass(frozen=True, eq=False)
class _Columns:
    """How a vector of columns is transformed: stages between two local buffers."""

    stages: Sequence[Stage]
    sign: int
    table: Buffer
    lanes: int  # of a buffer's row
    count: Index  # columns that there are, at most `lanes`
    buffers: tuple[tuple[Buffer, Buffer], tuple[Buffer, Buffer]]

    def transform(self, read: Callable[[Index, Index], Complex],
                  write: Callable[[Index, Index, Complex], Sequence[Stmt]]) -> Stmt:
        """All stages; the first reads (row, lane), the last writes them."""
        stmts = []
        for number, stage in enumerate(self.stages):
            source, target = self.buffers[number % 2 - 1], self.buffers[number % 2]
            stmts.append(self.stage(
                stage, read if number == 0 else self.reader(source),
                write if number == len(self.stages) - 1 else self.writer(target)))
        return block(*stmts)

    def root(self, re: Index, im: Index) -> Complex:
        """A root of unity, by the places of its parts in the table."""
        dtype = self.buffers[0][0].dtype
        return cast_scalar(self.table[re], dtype), cast_scalar(self.table[im], dtype)

    def reader(self, buffers: tuple[Buffer, Buffer]) -> Callable[[Index, Index], Complex]:
        re, im = buffers
        return lambda row, lane: (re[row * self.lanes + lane], im[row * self.lanes + lane])

    def writer(self, buffers: tuple[Buffer, Buffer]
               ) -> Callable[[Index, Index, Complex], Sequence[Stmt]]:
        return lambda row, lane, z: [Store(b, row * self.lanes + lane, part)
                                     for b, part in zip(buffers, z, strict=True)]

    def stage(self, stage: Stage, read: Callable[[Index, Index], Complex],
              write: Callable[[Index, Index, Complex], Sequence[Stmt]]) -> Stmt:
        r, m, s = stage.r, stage.m, stage.s
        p, q = fresh_axis("p", m), fresh_axis("q", s)
        lane = fresh_axis("lane", self.lanes)
        given = [read((j * m + p.var) * s + q.var, lane.var) for j in range(r)]
        made = butterfly(given, self.sign)
        stmts: list[Stmt] = []
        for k, z in enumerate(made):
            if k and m > 1:
                at = stage.at + (p.var * (r - 1) + (k - 1)) * 2
                z = times(z, self.root(at, at + 1))
            stmts += write((p.var * r + k) * s + q.var, lane.var, z)
        body = For(lane.var, 0, self.count, block(*stmts), "vector")
        return For(p.var, 0, m, For(q.var, 0, s, body))


def _locals(rows: int, lanes: int, dtype: DType) -> tuple[tuple[Buffer, Buffer],
                                                          tuple[Buffer, Buffer]]:
    made = [Buffer(name, dtype, rows * lanes) for name in ("re0", "im0", "re1", "im1")]
    return (made[0], made[1]), (made[2], made[3])


def columns_of(n: int, sign: int, table: Buffer, lanes: int, dtype: DType,
               read: Callable[[Index, Index], Complex],
               write: Callable[[Index, Index, Complex], Sequence[Stmt]]
               ) -> tuple[Stmt, list[Buffer]]:
    """The transform of one whole vector of columns, and the local buffers that it needs."""
    own = _Columns(stages_of(n, 0), sign, table, lanes, lanes, _locals(n, lanes, dtype))
    return own.transform(read, write), [b for pair in own.buffers for b in pair]


def allocated(body: Stmt, buffers: Sequence[Buffer]) -> Stmt:
    """A statement with local buffers around it."""
    for buffer in buffers:
        body = Alloc(buffer, body)
    return body


def lanes_of(dtype: DType) -> int:
    """Columns side by side: a line of the cache."""
    return 64 // dtype.itemsize


def _pair(buffer: Buffer, at: Index, dtype: DType) -> Complex:
    """The complex number at a place of interleaved parts."""
    return cast_scalar(buffer[2 * at], dtype), cast_scalar(buffer[2 * at + 1], dtype)


def _put(buffer: Buffer, at: Index, z: Complex) -> list[Stmt]:
    return [Store(buffer, 2 * at + part, cast_scalar(value, buffer.dtype))
            for part, value in enumerate(z)]


def checked(name: str, x: TensorType, table: TensorType, axis: int, roots: Callable[[int], int]
             ) -> int:
    """The length of a transform, once it is known to be one of ours with a table that fits."""
    n = x.shape[axis] if len(x.shape) >= -axis else None
    if x.shape[-1] != 2 or not isinstance(n, int):
        raise ShapeError(f"{name} needs a known length in axis {axis} and two parts in the last, "
                         f"not {dims_text(x.shape)}", where=user_location())
    if not x.dtype.is_float or not table.dtype.is_float:
        raise DTypeError(f"{name} works on floats, not on {x.dtype.name} and {table.dtype.name}",
                         where=user_location())
    if n < 1 or table.shape != (roots(n),):
        raise ShapeError(f"{name} of length {n} does not go with a table {dims_text(table.shape)}",
                         where=user_location(), hint="call tz.fft")
    return n


def smooth(name: str, n: int) -> None:
    if not is_smooth(n):
        raise ShapeError(f"{name} of length {n}, which has a prime factor over {LARGEST_PRIME}",
                         where=user_location(), hint="call tz.fft")


def _lines_type(x: TensorType, table: TensorType, *, sign: int, scale: float) -> TensorType:
    smooth("fft_lines", checked("fft_lines", x, table, -2, lambda n: table_size(*halves(n))))
    return x


def _columns_type(x: TensorType, table: TensorType, *, sign: int, scale: float) -> TensorType:
    smooth("fft_columns", checked("fft_columns", x, table, -3, lambda n: table_size(n, 1)))
    return x


def _by_numpy(x: np.ndarray, axis: int, sign: int, scale: float) -> np.ndarray:
    wide = x.astype(np.float64)
    line = wide[..., 0] + 1j * wide[..., 1]
    with np.errstate(all="ignore"):
        made = np.fft.fft(line, axis=axis) if sign < 0 else (
            np.fft.ifft(line, axis=axis, norm="forward"))
        made = made * scale
    return np.stack([made.real, made.imag], -1)


def _lines_numpy(x: np.ndarray, table: np.ndarray, *, sign: int, scale: float, out: TensorType
                 ) -> np.ndarray:
    return convert(_by_numpy(x, -1, sign, scale), out.dtype)


def _lines_grad(node: Node, g: Value) -> list[Value | None]:
    return [transformed_lines(g, -node.attrs["sign"], node.attrs["scale"]), None]


@primitive(family="signal", infer=_lines_type, reference=_lines_numpy, grad=_lines_grad, loops=True)
def fft_lines(x: Any, table: Any, *, sign: int, scale: float, out: TensorType) -> Any:
    """transforms of complex lines x [..., n, 2], times scale, given the roots of unity for them"""
    n, dtype = x.shape[-2], x.dtype.compute
    rows, columns = halves(n)
    count = num_elements(x.shape[:-2])
    first, second, between = stages_of_halves(rows, columns)
    lanes = lanes_of(dtype)

    def build(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> Stmt:
        if count == 0:
            return Block(())
        source, roots = inputs
        line = fresh_axis("line", count)
        middle = [Buffer(name, dtype, n) for name in ("middle_re", "middle_im")]

        def of(stages: Sequence[Stage], wide: int, start: Index) -> _Columns:
            rows = math.prod(s.r for s in stages)
            return _Columns(stages, sign, roots, lanes, minimum(lanes, wide - start),
                            _locals(rows, lanes, dtype))

        def forward(start: Index) -> Stmt:
            """A vector of columns of [rows, columns], from the input to the middle."""
            own = of(first, columns, start)
            rest = own.buffers[(len(first) - 1) % 2]  # where the last stage leaves them

            def write(row: Index, lane: Index, z: Complex) -> Sequence[Stmt]:
                at = between + row * columns + start + lane
                turned = times(z, own.root(at, at + n))
                return own.writer(rest)(row, lane, turned)

            stages = own.transform(
                lambda row, lane: _pair(source, line.var * n + row * columns + start + lane,
                                        dtype), write)
            copies = [transposed_copy(d, start * rows, s, 0, own.count, rows, rows, lanes)
                      for d, s in zip(middle, rest, strict=True)]
            return allocated(block(stages, *copies), [b for pair in own.buffers for b in pair])

        def onward(start: Index) -> Stmt:
            """A vector of columns of [columns, rows], from the middle to the output."""
            own = of(second, rows, start)
            re, im = middle
            stages = own.transform(
                lambda row, lane: (re[row * rows + start + lane], im[row * rows + start + lane]),
                lambda row, lane, z: _put(outputs[0], line.var * n + row * rows + start + lane, z))
            return allocated(stages, [b for pair in own.buffers for b in pair])

        def over(wide: int, body: Callable[[Index], Stmt], kind: str) -> Stmt:
            strip = fresh_axis("strip", -(-wide // lanes))
            return For(strip.var, 0, strip.hi, body(strip.var * lanes), kind)

        kind = "serial" if n < _LINE_PER_TASK else "parallel"
        both = block(over(columns, forward, kind), over(rows, onward, kind))
        if kind == "parallel":
            return allocated(For(line.var, 0, count, both), middle)
        return For(line.var, 0, count, allocated(both, middle), "parallel",
                   grain=max(_TASK // n, 1))

    return build


def _columns_numpy(x: np.ndarray, table: np.ndarray, *, sign: int, scale: float, out: TensorType
                   ) -> np.ndarray:
    return convert(_by_numpy(x, -2, sign, scale), out.dtype)


def _columns_grad(node: Node, g: Value) -> list[Value | None]:
    return [transformed_columns(g, -node.attrs["sign"], node.attrs["scale"]), None]


@primitive(family="signal", infer=_columns_type, reference=_columns_numpy, grad=_columns_grad,
           loops=True)
def fft_columns(x: Any, table: Any, *, sign: int, scale: float, out: TensorType) -> Any:
    """transforms of complex columns x [..., n, inner, 2], times scale, given roots of unity"""
    n, inner, dtype = x.shape[-3], x.shape[-2], x.dtype.compute
    count = num_elements(x.shape[:-3])
    lanes = lanes_of(dtype)

    def build(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> Stmt:
        if count == 0 or inner == 0:
            return Block(())
        source, roots = inputs
        strips = (inner + lanes - 1) // lanes
        task = fresh_axis("task", count * strips)
        start = task.var % strips * lanes
        first = task.var // strips * n * inner + start
        own = _Columns(stages_of(n, 0), sign, roots, lanes, minimum(lanes, inner - start),
                       _locals(n, lanes, dtype))
        factor = Const(dtype, scale)
        body = own.transform(
            lambda row, lane: _pair(source, first + row * inner + lane, dtype),
            lambda row, lane, z: _put(outputs[0], first + row * inner + lane,
                                      z if scale == 1 else (z[0] * factor, z[1] * factor)))
        body = allocated(body, [b for pair in own.buffers for b in pair])
        return For(task.var, 0, task.hi, body, "parallel", grain=max(_TASK // (n * lanes), 1))

    return build


# ---------------------------------------------------------------- real numbers
def _halves_type(x: TensorType, table: TensorType, *, inverse: bool) -> TensorType:
    n = checked("real_halves", x, table, -2, lambda n: 2 * (n - inverse))
    if inverse and n < 2:
        raise ShapeError(f"there is no way back from {n} numbers", where=user_location())
    return TensorType((*x.shape[:-2], n - 1 if inverse else n + 1, 2), x.dtype)


def _halves_numpy(x: np.ndarray, table: np.ndarray, *, inverse: bool, out: TensorType
                  ) -> np.ndarray:
    """By the whole transforms, there and back."""
    wide = x.astype(np.float64)
    z = wide[..., 0] + 1j * wide[..., 1]
    with np.errstate(all="ignore"):
        if inverse:
            real = np.fft.irfft(z, 2 * (z.shape[-1] - 1), axis=-1)
            made = np.fft.fft(real[..., ::2] + 1j * real[..., 1::2], axis=-1)
        else:
            line = np.fft.ifft(z, axis=-1)
            made = np.fft.rfft(np.stack([line.real, line.imag], -1).reshape(
                *z.shape[:-1], 2 * z.shape[-1]), axis=-1)
    return convert(np.stack([made.real, made.imag], -1), out.dtype)


def halves_of_pair(a: Complex, b: Complex, root: Complex, dtype: DType) -> Complex:
    """One number of a real transform, from two of the complex one that mirror each other."""
    mirrored, half = (b[0], -b[1]), Const(dtype, 0.5)
    both, turned = plus(a, mirrored), times(minus(a, mirrored), root)
    return both[0] * half + turned[0], both[1] * half + turned[1]


_CHUNK = 4096  # numbers of a line that are worth a task


@primitive(family="signal", infer=_halves_type, reference=_halves_numpy, loops=True,
           differentiable=False)
def real_halves(x: Any, table: Any, *, inverse: bool, out: TensorType) -> Any:
    """the transform of 2 n real numbers [..., n + 1, 2] from that of n complex ones [..., n, 2]
    made of every two of them, or the way back"""
    n, dtype = (x.shape[-2] - 1 if inverse else x.shape[-2]), x.dtype.compute
    count = num_elements(x.shape[:-2])

    def between(source: Buffer, roots: Buffer, target: Buffer, given: Index, made: Index,
                chunk: Index) -> Stmt:
        """All but the ends of a line, or a chunk of them."""
        k = fresh_axis("k", n, 1)
        a, b = _pair(source, given + k.var, dtype), _pair(source, given + n - k.var, dtype)
        z = halves_of_pair(a, b, _pair(roots, k.var, dtype), dtype)
        return For(k.var, maximum(chunk * _CHUNK, 1), minimum(chunk * _CHUNK + _CHUNK, n), block(
            *_put(target, made + k.var, z)), "vector")

    def build(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> Stmt:
        if count == 0:
            return Block(())
        source, roots = inputs
        (target,) = outputs
        chunks = -(-n // _CHUNK)
        task = fresh_axis("task", count * chunks)
        line, chunk = task.var // chunks, task.var % chunks
        given, made = line * (n + inverse), line * (n + (not inverse))
        first = _pair(source, given, dtype)
        half, zero = Const(dtype, 0.5), Const(dtype, 0.0)
        if inverse:  # the imaginary parts at both ends count for nothing
            last = cast_scalar(source[2 * (given + n)], dtype)
            ends = block(*_put(target, made, ((first[0] + last) * half, (first[0] - last) * half)))
        else:
            ends = block(*_put(target, made, (first[0] + first[1], zero)),
                         *_put(target, made + n, (first[0] - first[1], zero)))
        body: Stmt = If(call("eq", as_scalar(chunk), 0), ends)
        if n > 1:
            body = block(body, between(source, roots, target, given, made, chunk))
        return For(task.var, 0, task.hi, body, "parallel", grain=max(_CHUNK // n, 1))

    return build


def half_roots(n: int, sign: int) -> np.ndarray:
    """What `real_halves` of n numbers multiplies by: -1 for the way there, 1 for the way back."""
    roots = 0.5 * sign * 1j * np.exp(sign * 1j * math.pi / n * np.arange(n))
    return np.stack([roots.real, roots.imag], -1).ravel()


# ---------------------------------------------------------------- calling them
def line_roots(n: int, sign: int, scale: float = 1.0) -> np.ndarray:
    """The table for `fft_lines` of n."""
    return roots_of(*halves(n), sign, scale)


def column_roots(n: int, sign: int) -> np.ndarray:
    """The table for `fft_columns` of n."""
    return roots_of(n, 1, sign, 1.0)


def transformed_lines(x: Any, sign: int, scale: float = 1.0) -> Any:
    """The transforms of x [..., n, 2] along n, a product of small primes."""
    table = constant(line_roots(x.shape[-2], sign, scale), x.dtype)
    return fft_lines(x, table, sign=sign, scale=scale)


def transformed_columns(x: Any, sign: int, scale: float = 1.0) -> Any:
    """The transforms of x [..., n, inner, 2] along n, a product of small primes."""
    table = constant(column_roots(x.shape[-3], sign), x.dtype)
    return fft_columns(x, table, sign=sign, scale=scale)
