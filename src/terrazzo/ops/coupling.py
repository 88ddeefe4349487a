"""Probabilities of classes from those of pairs of classes, in loops.

The second method of Wu, Lin and Weng, "Probability estimates for multi-class classification by
pairwise coupling" (2004), with the limits of LIBSVM, which every engine of support vectors follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from terrazzo.base.scalar import Const, Scalar, as_scalar, call
from terrazzo.base.scalar import cast as cast_scalar
from terrazzo.dtypes import int64
from terrazzo.errors import RankError, user_location
from terrazzo.expr.ir import fresh_axis
from terrazzo.graph.ir import TensorType
from terrazzo.index import Index
from terrazzo.loop.ir import Alloc, Block, Buffer, For, If, Stmt, Store, While, block
from terrazzo.ops.define import primitive

_MOST_ROUNDS = 100
_ACCURACY = 0.005  # divided by the number of classes


def _coupled_type(pairs: TensorType) -> TensorType:
    if len(pairs.shape) != 3 or pairs.shape[1] != pairs.shape[2] or not pairs.dtype.is_float:
        raise RankError(f"pairwise_coupling takes [rows, classes, classes] of floats, not {pairs}",
                        where=user_location())
    return TensorType(pairs.shape[:2], pairs.dtype)


def _coupled_numpy(pairs: np.ndarray, *, out: TensorType) -> np.ndarray:
    return np.array([_coupled_row(r) for r in pairs], pairs.dtype).reshape(pairs.shape[:2])


def _coupled_row(r: np.ndarray) -> np.ndarray:
    k = len(r)
    q = -r.T * r
    np.fill_diagonal(q, (np.where(np.eye(k, dtype=bool), 0, r) ** 2).sum(axis=0))
    p = np.full(k, 1 / k, r.dtype)
    for _ in range(max(_MOST_ROUNDS, k)):
        slope = q @ p
        level = p @ slope
        if np.abs(slope - level).max() < _ACCURACY / k:
            break
        for t in range(k):
            change = (level - slope[t]) / q[t, t]
            p[t] += change
            level = (level + change * (change * q[t, t] + 2 * slope[t])) / (1 + change) ** 2
            slope = (slope + change * q[t]) / (1 + change)
            p /= 1 + change
    return p


@primitive(family="classical", infer=_coupled_type, reference=_coupled_numpy, loops=True,
           differentiable=False)
def pairwise_coupling(pairs: Any, *, out: TensorType) -> Any:
    """the probabilities of classes, of pairs[..., i, j], the probability of i where it is i or j"""
    rows, k = pairs.shape[0], pairs.shape[1]
    dtype = pairs.dtype

    def build(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> Stmt:
        if rows == 0 or k == 0:
            return Block(())
        row = fresh_axis("row", rows).var
        i, j, t, u = (fresh_axis(name, k).var for name in "ijtu")
        q, slope = Buffer("q", dtype, k * k), Buffer("slope", dtype, k)
        one = {name: Buffer(name, dtype, 1) for name in ("level", "worst", "change")}
        level, worst, change = one.values()
        left = Buffer("left", int64, 1)
        p = outputs[0]

        def number(value: float) -> Scalar:
            return Const(dtype, value)

        def r(a: Index, b: Index) -> Scalar:
            return inputs[0][row * k * k + a * k + b]

        def at(a: Index) -> Index:
            return row * k + a

        form = For(i, 0, k, block(
            For(j, 0, k, Store(q, i * k + j, -(r(j, i) * r(i, j)))),
            Store(q, i * k + i, number(0)),
            For(j, 0, k, If(call("ne", as_scalar(j), as_scalar(i)),
                            Store(q, i * k + i, r(j, i) * r(j, i), "add"))),
            Store(p, at(i), number(1) / _as_number(k, dtype))))
        look = block(
            Store(level, 0, number(0)), Store(worst, 0, number(0)),
            For(i, 0, k, block(
                Store(slope, i, number(0)),
                For(j, 0, k, Store(slope, i, q[i * k + j] * p[at(j)], "add")),
                Store(level, 0, p[at(i)] * slope[i], "add"))),
            For(i, 0, k, Store(worst, 0, call("abs", slope[i] - level[0]), "max")))
        grown = change[0] + number(1)
        here = q[t * k + t]
        improve = For(t, 0, k, block(
            Store(change, 0, (level[0] - slope[t]) / here),
            Store(p, at(t), change[0], "add"),
            Store(level, 0, (level[0] + change[0] * (change[0] * here + number(2) * slope[t]))
                  / (grown * grown)),
            For(u, 0, k, block(
                Store(slope, u, (slope[u] + change[0] * q[t * k + u]) / grown),
                Store(p, at(u), p[at(u)] / grown)))))
        enough = number(_ACCURACY) / _as_number(k, dtype)
        body: Stmt = block(
            form, Store(left, 0, as_scalar(max(_MOST_ROUNDS, k) if isinstance(k, int) else
                                           _MOST_ROUNDS)),
            look, While(call("and", call("gt", left[0], 0), call("not", call(
                "lt", worst[0], enough))), block(
                Store(left, 0, call("sub", left[0], 1)), improve, look)))
        for buffer in (q, slope, level, worst, change, left):
            body = Alloc(buffer, body)
        return For(row, 0, rows, body, "parallel")

    return build


def _as_number(k: Index, dtype: Any) -> Scalar:
    """A size as a number of a type."""
    return Const(dtype, float(k)) if isinstance(k, int) else cast_scalar(as_scalar(k), dtype)
