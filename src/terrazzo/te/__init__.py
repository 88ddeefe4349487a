"""Tensor expressions by hand, with a schedule apart from the algorithm, as in Halide and TVM.

    n = te.dim("n")
    A, B = te.placeholder((n, 64), name="A"), te.placeholder((64, 64), name="B")
    k = te.reduce_axis(64)
    C = te.compute((n, 64), lambda i, j: te.sum(A[i, k] * B[k, j], axis=k), name="C")

    s = te.schedule(C)
    i, j = s[C].axis
    io, ii = s[C].split(i, 4)
    s[C].reorder(io, k, ii, j)
    s[C].vectorize(j)
    s[C].parallel(io)
    matmul = te.build(s, [A, B, C])
    matmul(a, b, c)

Every element function of the table `scalar.OPS` is here by its name: `te.exp`, `te.sqrt`, ...
`te.max` and `te.min` reduce; of two elements take `te.maximum` and `te.minimum`. Reductions of a
user's own are made by `te.comm_reducer`, recurrences by `te.scan`; docs/te.md shows all of it.
"""

from __future__ import annotations

from collections.abc import Callable

from terrazzo.base.shapes import dim, dims
from terrazzo.expr.tensorize import Intrinsic, register_intrinsic
from terrazzo.loop.ir import TileIntrinsic
from terrazzo.te.algorithm import (
    Tensor,
    comm_reducer,
    compute,
    max,
    min,
    placeholder,
    prod,
    reduce_axis,
    sum,
)
from terrazzo.te.builder import ScheduleBuilder, StageHandle, schedule
from terrazzo.te.kernel import Kernel, build, lower
from terrazzo.te.recurrence import scan, state
from terrazzo.te.terms import (
    ReduceAxis,
    Term,
    all,
    any,
    cast,
    const,
    element_function,
    if_then_else,
    max_value,
    maximum,
    min_value,
    minimum,
    where,
)

__all__ = [
    "Intrinsic", "Kernel", "ReduceAxis", "ScheduleBuilder", "StageHandle", "Tensor", "Term",
    "TileIntrinsic", "all", "any", "build", "cast", "comm_reducer", "compute",
    "const", "dim", "dims", "if_then_else", "lower", "max", "max_value", "maximum", "min",
    "min_value", "minimum", "placeholder", "prod", "reduce_axis", "register_intrinsic",
    "scan", "schedule", "state", "sum", "where",
]  # fmt: skip


def __getattr__(name: str) -> Callable[..., Term]:
    """The element functions of the table OPS."""
    return element_function(name)
