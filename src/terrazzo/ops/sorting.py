"""Sorting: sort and argsort, in loops.

Values are compared through integer keys that order as the values do, nan after every number
(`base/keys.py`), so one comparison of integers serves every type, and inverting a key's bits
reverses the order while equal values stay in their places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from terrazzo.base.keys import key_type, sort_key
from terrazzo.base.scalar import Const, Scalar, as_scalar, call
from terrazzo.base.scalar import cast as cast_scalar
from terrazzo.base.shapes import normalize_axis, num_elements
from terrazzo.dtypes import DType, as_dtype, int32, int64, uint64
from terrazzo.errors import DTypeError, user_location
from terrazzo.expr.ir import fresh_axis
from terrazzo.graph.ir import Node, TensorType, Value
from terrazzo.index import Index
from terrazzo.loop.ir import Alloc, Block, Buffer, For, Stmt, Store, block
from terrazzo.ops.creation import full
from terrazzo.ops.define import operator, primitive
from terrazzo.ops.indexing import scatter
from terrazzo.ops.shape import reshape

# Up to this many, counting each element's rank beats the histograms of a radix sort.
_FEW = 48


def check_order(name: str, x: TensorType) -> None:
    if x.dtype.is_complex:
        raise DTypeError(f"{name} needs ordered numbers, not {x.dtype.name}", where=user_location(),
                         hint="sort absolute values instead")


def _pairs_type(x: TensorType, *, axis: int, descending: bool) -> tuple[TensorType, TensorType]:
    check_order("sort", x)
    normalize_axis(axis, len(x.shape))
    return x, TensorType(x.shape, int64)


def stable_order(x: np.ndarray, axis: int, descending: bool) -> np.ndarray:
    """A stable order; numpy has no descending one, so it is taken from both ends."""
    wide = x.astype(as_dtype(x.dtype).compute.np)
    if not descending:
        return np.argsort(wide, axis=axis, kind="stable")
    order = np.flip(np.argsort(np.flip(wide, axis), axis=axis, kind="stable"), axis)
    return x.shape[axis] - 1 - order


def _pairs_numpy(x: np.ndarray, *, axis: int, descending: bool,
                 out: tuple[TensorType, TensorType]) -> tuple[np.ndarray, np.ndarray]:
    order = stable_order(x, axis, descending).astype(np.int64)
    return np.take_along_axis(x, order, axis), order


def by_index_grad(node: Node, g: Value, _: Value | None) -> list[Value | None]:
    """The gradient of values that were picked by index goes back to where they came from."""
    x, indices = node.inputs[0], node.outputs[1]
    assert x is not None
    return [scatter(full(shape=x.shape, value=0, dtype=x.dtype), indices, g,
                    axis=node.attrs["axis"])]


def allocate(buffers: Sequence[Buffer], body: Stmt) -> Stmt:
    """A statement with buffers of its own."""
    for buffer in reversed(buffers):
        body = Alloc(buffer, body)
    return body


@primitive(family="sorting", infer=_pairs_type, reference=_pairs_numpy, grad=by_index_grad,
           loops=True)
def sort_pairs(x: Any, *, axis: int = -1, descending: bool = False,
               out: tuple[TensorType, TensorType]) -> Any:
    """the elements in order along an axis, and where each came from; equal ones keep their order"""
    axis = normalize_axis(axis, len(x.shape))
    n, inner = x.shape[axis], num_elements(x.shape[axis + 1:])
    rows = num_elements(x.shape[:axis]) * inner

    def build(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> Stmt:
        if n == 0 or rows == 0:
            return Block(())
        row = fresh_axis("row", rows).var
        base = row // inner * (n * inner) + row % inner

        def key(k: Index) -> Scalar:
            return sort_key(inputs[0][base + k * inner], descending)

        def write(target: Index | Scalar, origin: Scalar) -> Stmt:
            """Element number `target` of the result is number `origin` of the input."""
            to, source = (call("add", as_scalar(base), call("mul", as_scalar(v), as_scalar(inner)))
                          for v in (target, origin))
            return block(Store(outputs[0], to, inputs[0][source]),
                         Store(outputs[1], to, cast_scalar(origin, int64)))

        method = rank_sort if isinstance(n, int) and n <= _FEW else radix_sort
        return For(row, 0, rows, method(n, x.dtype, key, write), "parallel")

    return build


def rank_sort(n: Index, dtype: DType, key: Callable[[Index], Scalar],
               write: Callable[[Index | Scalar, Scalar], Stmt]) -> Stmt:
    """Every element goes where the number of those before it says: n*n comparisons, no branch."""
    keys, rank = Buffer("keys", key_type(dtype), n), Buffer("rank", int64, n)
    i, j = fresh_axis("i", n).var, fresh_axis("j", n).var
    earlier = call("or", call("lt", keys[j], keys[i]), call(
        "and", call("eq", keys[j], keys[i]), call("lt", as_scalar(j), as_scalar(i))))
    count = For(j, 0, n, Store(rank, i, cast_scalar(earlier, int64), "add"), "vector")
    return allocate([keys, rank], block(
        For(i, 0, n, Store(keys, i, key(i))),
        For(i, 0, n, block(Store(rank, i, as_scalar(0)), count, write(rank[i], as_scalar(i))))))


def radix_sort(n: Index, dtype: DType, key: Callable[[Index], Scalar],
                write: Callable[[Index | Scalar, Scalar], Stmt]) -> Stmt:
    """Radix sort from the least significant byte: stable, and without a branch on data.

    Each pass moves keys and origins from one half of a buffer to the other. All histograms are
    made while the keys are.
    """
    passes = max(1, (dtype.bits if dtype.is_integer else key_type(dtype).bits
                     if dtype.is_float else 8) // 8)
    signed = dtype.is_float or dtype.kind == "i" or dtype is uint64
    index = int32 if isinstance(n, int) and n < 2**31 else int64
    keys = Buffer("keys", key_type(dtype), n * 2)
    order = Buffer("order", index, n * 2)
    counts = Buffer("counts", index, passes * 256)
    total = Buffer("total", index, 1)
    k, value = fresh_axis("k", n).var, fresh_axis("value", 256).var

    def slot(element: Scalar, number: int) -> Scalar:
        """Where the count of an element's byte lies."""
        byte = call("and", call("shr", element, 8 * number), 255)
        if signed and number == passes - 1:
            byte = call("xor", byte, 128)  # negative numbers come first
        return call("add", cast_scalar(byte, int64), 256 * number)

    clear = For(value, 0, passes * 256, Store(counts, value, Const(index, 0)), "vector")
    load = For(k, 0, n, block(
        Store(keys, k, key(k)), Store(order, k, cast_scalar(as_scalar(k), index)),
        *(Store(counts, slot(keys[k], p), Const(index, 1), "add") for p in range(passes))))
    steps: list[Stmt] = [clear, load]
    for p in range(passes):
        source, target = (n * (p % 2), n * ((p + 1) % 2))
        # counts become the places where each byte's elements start
        starts = For(value, 0, 256, block(
            Store(total, 0, counts[value + 256 * p], "add"),
            Store(counts, value + 256 * p, call("sub", total[0], counts[value + 256 * p]))))
        at = slot(keys[source + k], p)
        place = call("add", cast_scalar(counts[at], int64), as_scalar(target))
        move = For(k, 0, n, block(
            Store(order, place, order[source + k]), Store(keys, place, keys[source + k]),
            Store(counts, at, Const(index, 1), "add")))
        steps += [Store(total, 0, Const(index, 0)), starts, move]
    steps.append(For(k, 0, n, write(k, cast_scalar(order[n * (passes % 2) + k], int64))))
    return allocate([keys, order, counts, total], block(*steps))


# ---------------------------------------------------------------- what users call
def _along(x: Any, axis: int | None) -> tuple[Any, int]:
    return (reshape(x, shape=(-1,)), 0) if axis is None or x.ndim == 0 else (x, axis)


@operator(family="sorting")
def sort(x: Any, *, axis: int | None = -1, descending: bool = False, stable: bool = True) -> Any:
    """the elements in order along an axis (None: of the flattened tensor); nan is the largest"""
    flat, along = _along(x, axis)
    values = sort_pairs(flat, axis=along, descending=descending)[0]
    return reshape(values, shape=()) if x.ndim == 0 and axis is not None else values


@operator(family="sorting", differentiable=False)
def argsort(x: Any, *, axis: int | None = -1, descending: bool = False,
            stable: bool = True) -> Any:
    """where each element of the sorted tensor comes from; equal elements keep their order"""
    flat, along = _along(x, axis)
    indices = sort_pairs(flat, axis=along, descending=descending)[1]
    return reshape(indices, shape=()) if x.ndim == 0 and axis is not None else indices
