"""topk, in loops: a selection of k candidates in one pass over the axis, then a sort of those.

Elements are compared through the integer keys of `base/keys.py`. Candidates lie in the order of the
axis, so that of equal elements the first stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from terrazzo.base.keys import key_type, sort_key
from terrazzo.base.scalar import Const, Scalar, as_scalar, call, where
from terrazzo.base.scalar import cast as cast_scalar
from terrazzo.base.shapes import dims_text, normalize_axis, num_elements
from terrazzo.dtypes import DType, int32, int64
from terrazzo.errors import ShapeError, user_location
from terrazzo.expr.ir import fresh_axis
from terrazzo.graph.ir import TensorType
from terrazzo.index import Index, Var, ceildiv, maximum, minimum
from terrazzo.index.guards import ask
from terrazzo.loop.ir import Block, Buffer, For, If, Let, Stmt, Store, While, block
from terrazzo.ops.define import operator, primitive
from terrazzo.ops.sorting import (
    allocate,
    by_index_grad,
    check_order,
    radix_sort,
    rank_sort,
    stable_order,
)

# Candidates are held back until there are this many (or twice k): then the k best of them stay.
_ROOM = 32
# As many elements are compared with the worst candidate at once, and skipped if none is better;
# else as many of them are looked at again, one vector of most processors.
_STRIDE, _GROUP = 64, 16
# Up to this many, going from one key to the next finds the k-th before halving does.
_STEPS = 8
# Up to this many, counting each candidate's rank beats the histograms of a radix sort.
_FEW = 64


def _top_type(x: TensorType, *, k: Index, axis: int, largest: bool
              ) -> tuple[TensorType, TensorType]:
    check_order("topk", x)
    axis = normalize_axis(axis, len(x.shape))
    n = x.shape[axis]
    if ask("<", k, 0) or ask("<", n, k):
        raise ShapeError(f"topk of {k} elements along axis {axis} of {dims_text(x.shape)}, which "
                         f"has {n}", where=user_location())
    shape = tuple(k if d == axis else m for d, m in enumerate(x.shape))
    return TensorType(shape, x.dtype), TensorType(shape, int64)


def _top_numpy(x: np.ndarray, *, k: int, axis: int, largest: bool,
               out: tuple[TensorType, TensorType]) -> tuple[np.ndarray, np.ndarray]:
    order = np.take(stable_order(x, axis, largest), range(k), axis=axis).astype(np.int64)
    return np.take_along_axis(x, order, axis), order


@primitive(family="sorting", infer=_top_type, reference=_top_numpy, grad=by_index_grad,
           loops=True)
def top_pairs(x: Any, *, k: Index, axis: int = -1, largest: bool = True,
              out: tuple[TensorType, TensorType]) -> Any:
    """the k largest (or smallest) elements along an axis in order, and where each came from"""
    axis = normalize_axis(axis, len(x.shape))
    n, inner = x.shape[axis], num_elements(x.shape[axis + 1:])
    rows = num_elements(x.shape[:axis]) * inner

    def build(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> Stmt:
        if k == 0 or rows == 0:
            return Block(())
        row = fresh_axis("row", rows).var
        base, to = (row // inner * (size * inner) + row % inner for size in (n, k))
        held = _Candidates(n, k, key_type(x.dtype))

        def write(target: Index | Scalar, origin: Scalar) -> Stmt:
            """Element number `target` of the result is candidate number `origin`."""
            element = cast_scalar(held.order[origin], int64)
            place, source = (call("add", as_scalar(start), call("mul", as_scalar(v), inner))
                             for start, v in ((to, target), (base, element)))
            return block(Store(outputs[0], place, inputs[0][source]),
                         Store(outputs[1], place, element))

        select = held.select(lambda i: sort_key(inputs[0][base + i * inner], largest))
        body = block(select, _sort(k, x.dtype, lambda i: held.keys[i], write))
        return For(row, 0, rows, allocate(held.buffers, body), "parallel")

    return build


def _sort(k: Index, dtype: DType, key: Callable[[Index], Scalar],
          write: Callable[[Index | Scalar, Scalar], Stmt]) -> Stmt:
    if isinstance(k, int):
        return (rank_sort if k <= _FEW else radix_sort)(k, dtype, key, write)
    return If(call("le", as_scalar(k), _FEW), rank_sort(k, dtype, key, write),
              radix_sort(k, dtype, key, write))


@dataclass(frozen=True, eq=False)
class _Counts:
    """How many candidates come before a key, how many stay, and how many of equal ones may."""

    count: Buffer
    kept: Buffer
    ties: Buffer


class _Candidates:
    """The elements of one row that may be among its first k, and the statements that find them."""

    def __init__(self, n: Index, k: Index, key: DType) -> None:
        self.n, self.k = n, k
        index = int32 if isinstance(n, int) and n < 2**31 else int64
        size = self.room if self.room == n else self.room + _STRIDE
        self.keys, self.order = Buffer("keys", key, size), Buffer("order", index, size)
        self.fresh = Buffer("fresh", key, _STRIDE)
        self.low, self.high, self.best = (Buffer(s, key, 1) for s in ("low", "high", "best"))
        self.counts = _Counts(*(Buffer(s, index, 1) for s in ("count", "kept", "ties")))
        self.held, self.next = Buffer("held", int64, 1), Buffer("next", int64, 1)

    @property
    def room(self) -> Index:
        """How many candidates are held at once."""
        return minimum(self.n, maximum(self.k * 2, _ROOM))

    @property
    def buffers(self) -> list[Buffer]:
        counts = self.counts
        return [self.keys, self.order, self.fresh, self.low, self.high, self.best, counts.count,
                counts.kept, counts.ties, self.held, self.next]

    def select(self, key: Callable[[Index], Scalar]) -> Stmt:
        """The first k of a row, in the order in which they lie there."""
        i = fresh_axis("i", self.room).var
        fill = For(i, 0, self.room, block(
            Store(self.keys, i, key(i)),
            Store(self.order, i, cast_scalar(as_scalar(i), self.order.dtype))), "vector")
        if self.k == self.n:
            return fill
        start = block(fill, Store(self.held, 0, as_scalar(self.room)))
        if self.room == self.n:
            return block(start, self._keep_best())
        going = Buffer("going", int64, 1)
        more = call("lt", self.next[0], as_scalar(self.n))
        fits = call("le", self.held[0], as_scalar(self.room))
        turn = block(If(call("gt", self.held[0], as_scalar(self.k)), self._keep_best()),
                     Store(going, 0, cast_scalar(more, int64)),
                     While(call("and", more, fits), self._look(key)))
        return allocate([going], block(
            start, Store(self.next, 0, as_scalar(self.room)), Store(going, 0, as_scalar(1)),
            While(call("ne", going[0], 0), turn)))

    def _look(self, key: Callable[[Index], Scalar]) -> Stmt:
        """The next elements become candidates, if they come before the last one that stayed."""
        at = Var("at")
        stop = minimum(_STRIDE, self.n - at)
        i = fresh_axis("i", _STRIDE).var
        last = self.high[0]
        compare = For(i, 0, stop, block(
            Store(self.fresh, i, key(at + i)), Store(self.best, 0, key(at + i), "min")), "vector")
        group = fresh_axis("group", _STRIDE // _GROUP).var
        first = group * _GROUP
        end = minimum(first + _GROUP, stop)
        again = For(i, first, end, Store(self.best, 0, self.fresh[i], "min"), "vector")
        append = For(i, first, end, block(
            Store(self.keys, self.held[0], self.fresh[i]),
            Store(self.order, self.held[0], cast_scalar(as_scalar(at + i), self.order.dtype)),
            Store(self.held, 0, cast_scalar(call("lt", self.fresh[i], last), int64), "add")))
        better = call("lt", self.best[0], last)
        closer = For(group, 0, ceildiv(stop, _GROUP), block(
            Store(self.best, 0, last), again, If(better, append)))
        return Let(at, self.next[0], block(
            Store(self.best, 0, last), compare,
            If(better, closer),
            Store(self.next, 0, as_scalar(_STRIDE), "add")))

    def _keep_best(self) -> Stmt:
        """The first k of the candidates stay; the key of the last of them is in `high`."""
        held, counts, dtype = Var("held"), self.counts, self.order.dtype
        i = fresh_axis("i", held).var
        high, keys = self.high[0], self.keys

        def count(name: str, limit: Scalar) -> Stmt:
            one = cast_scalar(call(name, keys[i], limit), dtype)
            return block(Store(counts.count, 0, Const(dtype, 0)),
                         For(i, 0, held, Store(counts.count, 0, one, "add"), "vector"))

        k = cast_scalar(as_scalar(self.k), dtype)
        found = counts.count[0]
        equal = call("eq", keys[i], high)
        may_tie = call("and", equal, call("gt", counts.ties[0], 0))
        stays = call("or", call("lt", keys[i], high), may_tie)
        here = Buffer("stays", dtype, 1)
        move = For(i, 0, held, block(
            Store(here, 0, cast_scalar(stays, dtype)),
            Store(counts.ties, 0, call("sub", counts.ties[0], cast_scalar(equal, dtype))),
            Store(keys, cast_scalar(counts.kept[0], int64), keys[i]),
            Store(self.order, cast_scalar(counts.kept[0], int64), self.order[i]),
            Store(counts.kept, 0, here[0], "add")))
        search = self._climb if isinstance(self.k, int) and self.k <= _STEPS else self._halve
        return Let(held, self.held[0], allocate([here], block(
            search(held, k), count("lt", high),
            Store(counts.ties, 0, call("sub", k, found)), Store(counts.kept, 0, Const(dtype, 0)),
            move, Store(self.held, 0, as_scalar(self.k)))))

    def _halve(self, held: Var, k: Scalar) -> Stmt:
        """Halve the interval of keys until the k-th is found: counting is what vectors do best."""
        i = fresh_axis("i", held).var
        low, high, keys = self.low[0], self.high[0], self.keys
        middle = call("add", call("and", low, high), call("shr", call("xor", low, high), 1))
        mid = Buffer("mid", keys.dtype, 1)
        count = For(i, 0, held, Store(self.counts.count, 0, cast_scalar(
            call("le", keys[i], mid[0]), self.order.dtype), "add"), "vector")
        found = self.counts.count[0]
        halve = block(
            Store(mid, 0, middle), Store(self.counts.count, 0, Const(self.order.dtype, 0)), count,
            If(call("ge", found, k), Store(self.high, 0, mid[0]),
               Store(self.low, 0, call("add", mid[0], 1))),
            If(call("eq", found, k), Store(self.low, 0, mid[0])))
        return allocate([mid], block(
            Store(self.low, 0, keys[0]), Store(self.high, 0, keys[0]),
            For(i, 0, held, block(Store(self.low, 0, keys[i], "min"),
                                  Store(self.high, 0, keys[i], "max")), "vector"),
            While(call("lt", low, high), halve)))

    def _climb(self, held: Var, k: Scalar) -> Stmt:
        """Go from the first key to the next until k of them are behind."""
        i = fresh_axis("i", held).var
        high, keys = self.high[0], self.keys
        last = Const(keys.dtype, 2 ** (keys.dtype.bits - 1) - 1)
        further = Buffer("further", int64, 1)
        count, dtype = self.counts.count, self.order.dtype
        look = For(i, 0, held, block(
            Store(count, 0, cast_scalar(call("le", keys[i], high), dtype), "add"),
            Store(self.best, 0, where(call("gt", keys[i], high), keys[i], last), "min")), "vector")
        turn = block(
            Store(count, 0, Const(dtype, 0)), Store(self.best, 0, last), look,
            If(call("lt", count[0], k), Store(self.high, 0, self.best[0]),
               Store(further, 0, as_scalar(0))))
        return allocate([further], block(
            Store(self.high, 0, keys[0]), Store(further, 0, as_scalar(1)),
            For(i, 0, held, Store(self.high, 0, keys[i], "min"), "vector"),
            While(call("ne", further[0], 0), turn)))


@operator(family="sorting")
def topk(x: Any, *, k: Index, axis: int = -1, largest: bool = True) -> Any:
    """the k largest (or smallest) elements along an axis in order, and their indices

    Of equal elements the first come first; nan counts as the largest.
    """
    k = int(k) if isinstance(k, np.integer) else k
    return top_pairs(x, k=k, axis=normalize_axis(axis, x.ndim), largest=largest)
