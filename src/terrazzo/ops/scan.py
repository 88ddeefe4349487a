"""Running combinations along an axis: cumsum, cumprod, cummax, cummin and linear recurrences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from terrazzo.base.scalar import REDUCTIONS, Const, Scalar, call
from terrazzo.base.scalar import cast as cast_scalar
from terrazzo.base.shapes import Shape, dims_text, normalize_axis, num_elements
from terrazzo.dtypes import DType, as_dtype, int64, uint64
from terrazzo.errors import ArgumentError, DTypeError, ShapeError, user_location
from terrazzo.expr.ir import fresh_axis
from terrazzo.graph.ir import Node, TensorType, Value
from terrazzo.index import Index, ceildiv, minimum
from terrazzo.index.guards import all_equal
from terrazzo.loop.interpret import convert
from terrazzo.loop.ir import Alloc, Block, Buffer, For, Stmt, Store, block
from terrazzo.ops.arrange import flip
from terrazzo.ops.creation import arange, full
from terrazzo.ops.define import operator, primitive
from terrazzo.ops.elementwise import astype, equal, where
from terrazzo.ops.indexing import scatter
from terrazzo.ops.joining import concat
from terrazzo.ops.shape import reshape, span

_BLOCK = 64  # neighbouring columns that one task carries along together
Place = tuple[Buffer, Index]
_NUMPY = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def _along_axis(shape: Shape, axis: int, reverse: bool, dtype: DType, start: Any,
                step: Callable[[Index, Place], Stmt]) -> Stmt:
    """Loops that walk along an axis in order, carrying one element of `carry` a column.

    `step` writes one element, given its address and the carried place.
    """
    n, inner = shape[axis], num_elements(shape[axis + 1:])
    outer = num_elements(shape[:axis])
    if n == 0 or inner == 0 or outer == 0:
        return Block(())
    columns = min(inner, _BLOCK) if isinstance(inner, int) else _BLOCK
    blocks = ceildiv(inner, columns)
    task, j = fresh_axis("task", outer * blocks), fresh_axis("j", n)
    c = fresh_axis("c", columns)
    carry = Buffer("carry", dtype, columns)
    first = task.var % blocks * columns
    width = minimum(inner - first, columns)
    position = n - 1 - j.var if reverse else j.var
    address = (task.var // blocks * n + position) * inner + first

    def each_column(body: Callable[[Index], Stmt]) -> Stmt:
        return body(0) if columns == 1 else For(c.var, 0, width, body(c.var), "vector")

    walk = For(j.var, 0, n, each_column(lambda at: step(address + at, (carry, at))))
    prepare = each_column(lambda at: Store(carry, at, Const(dtype, start)))
    return For(task.var, 0, task.hi, Alloc(carry, block(prepare, walk)), "parallel")





# ---------------------------------------------------------------- one operation
def _cumulative_type(x: TensorType, *, op: str, axis: int, exclusive: bool,
                     reverse: bool) -> TensorType:
    if op not in _NUMPY:
        raise ArgumentError(f"cumulative has no operation {op!r}", where=user_location(),
                            hint="use " + ", ".join(_NUMPY))
    if x.dtype.is_bool or x.dtype.is_complex:
        raise DTypeError(f"a running {op} of {x.dtype.name} is not supported",
                         where=user_location(), hint="cast with tz.astype first")
    normalize_axis(axis, len(x.shape))
    return x


def _cumulative_numpy(x: np.ndarray, *, op: str, axis: int, exclusive: bool, reverse: bool,
                      out: TensorType) -> np.ndarray:
    wide = out.dtype.compute
    values = np.flip(x, axis) if reverse else x
    values = _NUMPY[op].accumulate(convert(values, wide), axis=axis)
    if exclusive and values.shape[axis]:
        identity = np.asarray(REDUCTIONS[op].identity(wide)).astype(wide.np)
        values = np.roll(values, 1, axis)
        values[(slice(None),) * normalize_axis(axis, x.ndim) + (0,)] = identity
    return convert(np.flip(values, axis) if reverse else values, out.dtype)


def _shifted(x: Value, axis: int, fill: float) -> Value:
    """Every element one place earlier along an axis, `fill` behind the last."""
    n = x.shape[axis]
    tail = full(shape=tuple(1 if d == axis else m for d, m in enumerate(x.shape)), value=fill,
                dtype=x.dtype)
    return span(concat(x, tail, axis=axis), axis, 1, n + 1)


def _product_grad(x: Value, g: Value, axis: int, exclusive: bool) -> Value:
    """What comes before an element times a recurrence of what comes after: exact at zeros too."""
    before = cumulative(x, op="mul", axis=axis, exclusive=True)
    later = _shifted(x, axis, 0.0)
    weights = _shifted(g, axis, 0.0) if exclusive else g
    return before * linear_recurrence(later, weights, axis=axis, reverse=True)


def _extremum_grad(x: Value, y: Value, g: Value, axis: int) -> Value:
    """Each result belongs to the last element so far that reached it."""
    n = x.shape[axis]
    place = reshape(arange(start=n), shape=tuple(n if d == axis else 1 for d in range(x.ndim)))
    origin = cumulative(where(equal(x, y), place, 0), op="max", axis=axis)
    wide = x.dtype.compute
    zeros = full(shape=x.shape, value=0, dtype=wide)
    return scatter(zeros, origin, astype(g, dtype=wide), axis=axis, reduce="add")


def _cumulative_grad(node: Node, g: Value) -> list[Value | None]:
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    op, exclusive, reverse = (node.attrs[k] for k in ("op", "exclusive", "reverse"))
    axis = normalize_axis(node.attrs["axis"], x.ndim)
    if op == "add":
        return [cumulative(g, op="add", axis=axis, exclusive=exclusive, reverse=not reverse)]
    if reverse:
        x, y, g = (flip(v, axis=axis) for v in (x, y, g))
    if op == "mul":
        dx = _product_grad(x, g, axis, exclusive)
    else:
        if exclusive:
            y, g = _shifted(y, axis, 0.0), _shifted(g, axis, 0.0)
        dx = _extremum_grad(x, y, g, axis)
    return [flip(dx, axis=axis) if reverse else dx]


@primitive(family="scan", infer=_cumulative_type, reference=_cumulative_numpy,
           grad=_cumulative_grad, loops=True)
def cumulative(x: Any, *, op: str, axis: int = -1, exclusive: bool = False, reverse: bool = False,
               out: TensorType) -> Any:
    """add, mul, max or min of all elements up to each one along an axis

    `exclusive` leaves out the element itself; `reverse` goes from the end. Half types are carried
    in float32.
    """
    axis = normalize_axis(axis, len(x.shape))
    wide = x.dtype.compute

    def build(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> Stmt:
        def step(address: Index, at: Place) -> Stmt:
            carry, column = at
            update = Store(carry, column, cast_scalar(inputs[0][address], wide), op)
            write = Store(outputs[0], address, cast_scalar(carry[column], out.dtype))
            return block(write, update) if exclusive else block(update, write)

        return _along_axis(x.shape, axis, reverse, wide, REDUCTIONS[op].identity(wide), step)

    return build


# ---------------------------------------------------------------- h = a*h + b
def _recurrence_type(a: TensorType, b: TensorType, *, axis: int, reverse: bool) -> TensorType:
    if not all_equal(a.shape, b.shape):
        raise ShapeError(f"linear_recurrence needs two tensors of one shape, not "
                         f"{dims_text(a.shape)} and {dims_text(b.shape)}", where=user_location(),
                         hint="stretch them with tz.broadcast_to")
    if a.dtype is not b.dtype or not a.dtype.is_float:
        raise DTypeError(f"linear_recurrence needs two tensors of one float type, not "
                         f"{a.dtype.name} and {b.dtype.name}", where=user_location())
    normalize_axis(axis, len(a.shape))
    return a


def _recurrence_numpy(a: np.ndarray, b: np.ndarray, *, axis: int, reverse: bool,
                      out: TensorType) -> np.ndarray:
    wide = out.dtype.compute
    factors, terms = (np.moveaxis(convert(v, wide), axis, 0) for v in (a, b))
    result = np.zeros_like(terms)
    carry = np.zeros(terms.shape[1:], wide.np)
    for k in range(len(terms))[::-1 if reverse else 1]:
        carry = result[k] = factors[k] * carry + terms[k]
    return convert(np.moveaxis(result, 0, axis), out.dtype)


def _recurrence_grad(node: Node, g: Value) -> list[Value | None]:
    a, h = node.inputs[0], node.outputs[0]
    assert a is not None
    axis, reverse = normalize_axis(node.attrs["axis"], a.ndim), node.attrs["reverse"]

    def against(v: Value) -> Any:
        return flip(v, axis=axis) if reverse else v

    later = _shifted(against(a), axis, 0.0)
    db = against(linear_recurrence(later, against(g), axis=axis, reverse=True))
    previous = against(flip(_shifted(flip(against(h), axis=axis), axis, 0.0), axis=axis))
    return [db * previous, db]


@primitive(family="scan", infer=_recurrence_type, reference=_recurrence_numpy,
           grad=_recurrence_grad, loops=True)
def linear_recurrence(a: Any, b: Any, *, axis: int = -1, reverse: bool = False,
                      out: TensorType) -> Any:
    """h[k] = a[k] * h[k-1] + b[k] along an axis, from h[-1] = 0

    State-space models are made of it.
    """
    axis = normalize_axis(axis, len(a.shape))
    wide = a.dtype.compute

    def build(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> Stmt:
        def step(address: Index, at: Place) -> Stmt:
            carry, column = at
            factor, term = (cast_scalar(v[address], wide) for v in inputs)
            value: Scalar = call("add", call("mul", factor, carry[column]), term)
            return block(Store(carry, column, value),
                         Store(outputs[0], address, cast_scalar(carry[column], out.dtype)))

        return _along_axis(a.shape, axis, reverse, wide, 0.0, step)

    return build


# ---------------------------------------------------------------- what users call
def _accumulated(x: Value, dtype: Any) -> Value:
    """Small integers are added up in 64 bits, as numpy does."""
    kind = as_dtype(dtype) if dtype is not None else x.dtype
    if dtype is None and (kind.is_bool or kind.is_integer):
        kind = int64 if kind.is_bool or kind.is_signed else uint64
    return x if kind is x.dtype else astype(x, dtype=kind)


def _running(x: Any, op: str, axis: int | None, exclusive: bool, reverse: bool) -> Any:
    if axis is None:
        x, axis = reshape(x, shape=(-1,)), 0
    return cumulative(x, op=op, axis=axis, exclusive=exclusive, reverse=reverse)


@operator(family="scan")
def cumsum(x: Any, *, axis: int | None = None, dtype: Any = None, exclusive: bool = False,
           reverse: bool = False) -> Any:
    """the sum of all elements up to each one; without an axis, of the flattened tensor"""
    return _running(_accumulated(x, dtype), "add", axis, exclusive, reverse)


@operator(family="scan")
def cumprod(x: Any, *, axis: int | None = None, dtype: Any = None, exclusive: bool = False,
            reverse: bool = False) -> Any:
    """the product of all elements up to each one; without an axis, of the flattened tensor"""
    return _running(_accumulated(x, dtype), "mul", axis, exclusive, reverse)


@operator(family="scan")
def cummax(x: Any, *, axis: int | None = None, reverse: bool = False) -> Any:
    """the largest element up to each one; nan wins"""
    return _running(x, "max", axis, False, reverse)


@operator(family="scan")
def cummin(x: Any, *, axis: int | None = None, reverse: bool = False) -> Any:
    """the smallest element up to each one; nan wins"""
    return _running(x, "min", axis, False, reverse)
