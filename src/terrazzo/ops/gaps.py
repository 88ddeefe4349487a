"""Writing into memory with gaps: of a piece of memory only the places that a view has are written.

Not among the operators for users: what lies in the gaps of a result is whatever was there. It is
for runtimes that hand in the memory of a tensor as the place of the result (`x[:, ::2] = y`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from terrazzo.base.shapes import num_elements
from terrazzo.expr.ir import fresh_axis
from terrazzo.graph.ir import TensorType
from terrazzo.index import Index, ceildiv, minimum
from terrazzo.loop.ir import Buffer, For, Stmt, Store
from terrazzo.ops.define import primitive
from terrazzo.ops.shape import unravel

_PIECE = 4096  # elements of a row that one task writes


def span(shape: Sequence[Any], strides: Sequence[int]) -> Any:
    """Elements of memory from the first to the last one of a view."""
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides))


def _type(x: TensorType, *, strides: Sequence[int]) -> TensorType:
    return TensorType((span(x.shape, strides),), x.dtype)


def _numpy(x: np.ndarray, *, strides: Sequence[int], out: Any) -> np.ndarray:
    made = np.zeros(span(x.shape, strides), x.dtype)
    bytes_apart = tuple(s * made.itemsize for s in strides)
    np.lib.stride_tricks.as_strided(made, x.shape, bytes_apart)[...] = x
    return made


@primitive(family="", infer=_type, reference=_numpy, loops=True, differentiable=False)
def written_with_gaps(x: Any, *, strides: Any, out: TensorType) -> Callable[..., Stmt]:
    """memory in which x lies by strides; what lies between is not touched"""
    *outer, columns = x.shape or (1,)
    *steps, last = tuple(strides) or (1,)
    blocks = ceildiv(columns, _PIECE)

    def build(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> Stmt:
        task, column = fresh_axis("task", num_elements(outer) * blocks), fresh_axis("i", columns)
        row, start = task.var // blocks, task.var % blocks * _PIECE
        at: Index = column.var * last
        for i, step in zip(unravel(row, tuple(outer)), steps):
            at = at + i * step
        copied = Store(outputs[0], at, inputs[0][row * columns + column.var])
        inner = For(column.var, start, minimum(columns, start + _PIECE), copied, "vector")
        return For(task.var, 0, task.hi, inner, "parallel")

    return build
