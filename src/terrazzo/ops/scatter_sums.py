"""Sums of scattered updates in half types: each is made in float32 and rounded once.

A tensor of float32 as large as the result would take four times the memory of a bfloat16 table
whose gradient is wanted, most of it for rows that nothing is added to. So updates of the same
place are chained instead, and each chain is added up by itself, in a few hundred bytes.
"""

from __future__ import annotations

from collections.abc import Callable

from terrazzo.base.scalar import Const, Scalar, as_scalar, call, cast
from terrazzo.dtypes import DType, int64
from terrazzo.expr.ir import fresh_axis
from terrazzo.index import Index, Var, ceildiv, maximum, minimum
from terrazzo.loop.ir import Alloc, Buffer, For, If, Let, Stmt, Store, While, block

_BLOCK = 256  # neighbouring elements that are added up at a time
_TASK_ELEMENTS = 4096  # worth a task of their own
_NONE = Const(int64, -1)


def is_rounded(dtype: DType, reduce: str) -> bool:
    """Whether applying updates one by one would round after each."""
    return dtype.is_float and dtype.compute is not dtype and reduce in ("add", "mul")


def chained_updates(first: Scalar | None, out: Buffer, updates: Buffer, reduce: str,
                    sizes: tuple[Index, Index, Index], places: Index,
                    place_of: Callable[[Index], Scalar],
                    address: Callable[[Index, Index, Index], Index | Scalar]) -> Stmt:
    """Apply updates (before, steps, after) to `out`, which holds what they are applied to.

    A step updates the place `place_of(step)`, a number below `places`, in all rows (`before`) and
    columns (`after`): `address(row, step, column)`. The places of `out` hold `first`, if that is
    given.
    """
    before, steps, after = sizes
    last = Buffer("last", int64, places)  # the last update of each place
    earlier = Buffer("earlier", int64, steps)  # the one before of the same place, or -1
    part, piece = fresh_axis("part", ceildiv(places, _TASK_ELEMENTS)), fresh_axis("place", places)
    start = part.var * _TASK_ELEMENTS
    clear = For(part.var, 0, part.hi, For(
        piece.var, start, minimum(places, start + _TASK_ELEMENTS),
        Store(last, piece.var, _NONE), "vector"), "parallel")
    step, here = fresh_axis("step", steps), Var("here", 0)
    link = For(step.var, 0, steps, Let(here, place_of(step.var), block(
        Store(earlier, step.var, last[here]), Store(last, here, as_scalar(step.var)))))
    task = fresh_axis("task", before * steps)
    row, end = task.var // maximum(steps, 1), task.var % maximum(steps, 1)
    follow = For(task.var, 0, task.hi, If(
        call("eq", last[place_of(end)], as_scalar(end)),
        _chain(first, out, updates, reduce, sizes, earlier, row, end, address)),
        "parallel", ceildiv(_TASK_ELEMENTS, maximum(after, 1)))
    return Alloc(last, Alloc(earlier, block(clear, link, follow)))


def _chain(first: Scalar | None, out: Buffer, updates: Buffer, reduce: str,
           sizes: tuple[Index, Index, Index], earlier: Buffer, row: Index, end: Index,
           address: Callable[[Index, Index, Index], Index | Scalar]) -> Stmt:
    """All updates of a place, from the last to the first, a block of columns at a time."""
    _, steps, after = sizes
    wide = out.dtype.compute
    total, at = Buffer("total", wide, _BLOCK), Buffer("at", int64, 1)
    number, step = fresh_axis("block", ceildiv(after, _BLOCK)), Var("update", 0)
    begin = number.var * _BLOCK
    count = minimum(after - begin, _BLOCK)

    def columns(store: Callable[[Index], Stmt]) -> Stmt:
        column = Var("column", 0, _BLOCK - 1)
        return For(column, 0, count, store(column), "vector")

    def element(column: Index) -> Index | Scalar:
        return address(row, end, begin + column)

    fetch = columns(lambda c: Store(total, c, cast(
        out[element(c)] if first is None else first, wide)))
    add = columns(lambda c: Store(total, c, cast(
        updates[(row * steps + step) * after + begin + c], wide), reduce))
    follow = block(Store(at, 0, as_scalar(end)), While(call("ge", at[0], 0), Let(
        step, at[0], block(add, Store(at, 0, earlier[step])))))
    keep = columns(lambda c: Store(out, element(c), cast(total[c], out.dtype)))
    return Alloc(total, Alloc(at, For(number.var, 0, number.hi, block(fetch, follow, keep))))
