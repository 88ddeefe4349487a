"""Contractions: `batch_matmul` and what is made of it, up to `einsum`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from terrazzo.base.contraction import Contraction
from terrazzo.base.scalar import Scalar
from terrazzo.base.scalar import cast as cast_scalar
from terrazzo.base.scalar import reduce as reduce_scalar
from terrazzo.base.shapes import (
    Shape,
    broadcast_shapes,
    dims_text,
    normalize_axes,
    normalize_axis,
    num_elements,
)
from terrazzo.dtypes import DType, float8_e4m3fn, float8_e5m2, float32, int32, promote
from terrazzo.errors import ArgumentError, DTypeError, RankError, ShapeError, user_location
from terrazzo.expr.ir import Tensor, compute, reduce_axis
from terrazzo.graph.ir import Node, TensorType, Value
from terrazzo.index import Index
from terrazzo.index.guards import granted
from terrazzo.ops.arrange import diagonal
from terrazzo.ops.define import operator, primitive
from terrazzo.ops.elementwise import multiply, not_equal
from terrazzo.ops.reduce import in_shape, in_type, sum_
from terrazzo.ops.shape import permute_dims


def _permuted(x: Value, axes: Sequence[int]) -> Value:
    axes = tuple(axes)
    if axes == tuple(range(x.ndim)):
        return x
    return permute_dims(x, axes=axes)


def _require_equal(name: str, left: Index, right: Index, x: Shape, y: Shape) -> None:
    if not granted("==", left, right):
        raise ShapeError(
            f"{name} of {dims_text(x)} and {dims_text(y)} multiplies along sizes {left} and "
            f"{right}, which are not equal", where=user_location(),
            hint="transpose or reshape an operand; symbolic sizes are equal only by name")


# ---------------------------------------------------------------- the primitive
def _batch_matmul_type(x: TensorType, y: TensorType, *, transpose_x: bool,
                       transpose_y: bool) -> TensorType:
    for operand in (x, y):
        if len(operand.shape) < 2:
            raise RankError(f"batch_matmul needs matrices, got {operand}", where=user_location(),
                            hint="tz.matmul takes vectors too")
    m, k = x.shape[:-3:-1] if transpose_x else x.shape[-2:]
    k2, n = y.shape[:-3:-1] if transpose_y else y.shape[-2:]
    _require_equal("matmul", k, k2, x.shape, y.shape)
    dtype = promote(x.dtype, y.dtype)
    if dtype.is_bool:
        raise DTypeError("batch_matmul multiplies numbers, not booleans", where=user_location(),
                         hint="tz.matmul takes booleans too")
    return TensorType((*broadcast_shapes(x.shape[:-2], y.shape[:-2]), m, n), dtype)


def _batch_matmul_numpy(x: np.ndarray, y: np.ndarray, out: TensorType, *, transpose_x: bool,
                        transpose_y: bool) -> np.ndarray:
    wide = out.dtype.compute.np
    x, y = x.astype(wide), y.astype(wide)
    return np.matmul(np.swapaxes(x, -1, -2) if transpose_x else x,
                     np.swapaxes(y, -1, -2) if transpose_y else y).astype(out.dtype.np)


def _batch_matmul_grad(node: Node, g: Value) -> list[Value | None]:
    x, y = node.inputs
    assert x is not None and y is not None
    tx, ty = node.attrs["transpose_x"], node.attrs["transpose_y"]
    dx = (batch_matmul(y, g, transpose_x=ty, transpose_y=True) if tx else
          batch_matmul(g, y, transpose_y=not ty))
    # A matrix shared by a whole batch gets its gradient from one long contraction, instead of
    # one product for every member of the batch and a sum of those.
    rows, grows = x, g
    if y.ndim == 2 and x.ndim > 2 and not tx:
        rows = in_shape(x, (num_elements(x.shape[:-1]), x.shape[-1]))
        grows = in_shape(g, (num_elements(g.shape[:-1]), g.shape[-1]))
    dy = (batch_matmul(grows, rows, transpose_x=True, transpose_y=tx) if ty else
          batch_matmul(rows, grows, transpose_x=not tx))
    return [dx, dy]


@primitive(family="contract", kind="contract", infer=_batch_matmul_type,
           reference=_batch_matmul_numpy, grad=_batch_matmul_grad)
def batch_matmul(x: Any, y: Any, *, transpose_x: bool = False, transpose_y: bool = False,
                 out: TensorType) -> Tensor:
    """matrix products over broadcast leading axes; half floats accumulate in float32"""
    return _products(x, y, transpose_x, transpose_y, out, "batch_matmul")


def _products(x: Any, y: Any, transpose_x: bool, transpose_y: bool, out: TensorType, origin: str
              ) -> Tensor:
    k = reduce_axis(x.shape[-2 if transpose_x else -1])
    wide: DType = out.dtype.compute

    def load(operand: Tensor, batch: list[Index], row: Index, column: Index) -> Scalar:
        leading = operand.shape[:-2]
        own = batch[len(batch) - len(leading):]
        at = [0 if n == 1 and isinstance(n, int) else b for n, b in zip(leading, own, strict=True)]
        return cast_scalar(operand[(*at, row, column)], wide)

    def element(*indices: Index) -> Scalar:
        *batch, i, j = indices
        left = load(x, batch, *((k.var, i) if transpose_x else (i, k.var)))
        right = load(y, batch, *((j, k.var) if transpose_y else (k.var, j)))
        roles = Contraction((*batch, i), j, k.var)
        return cast_scalar(reduce_scalar("add", left * right, (k,), roles), out.dtype)

    return compute(out.shape, element, origin=origin)


# ---------------------------------------------------------------- 8-bit floats
FLOAT8 = (float8_e4m3fn, float8_e5m2)


def _float8_matmul_type(x: TensorType, y: TensorType, *, transpose_x: bool,
                        transpose_y: bool) -> TensorType:
    for operand in (x, y):
        if operand.dtype not in FLOAT8:
            raise DTypeError(f"float8_matmul multiplies 8-bit floats, not {operand.dtype.name}",
                             where=user_location(), hint="tz.matmul takes all other types")
    wide = (replace(operand, dtype=float32) for operand in (x, y))
    return _batch_matmul_type(*wide, transpose_x=transpose_x, transpose_y=transpose_y)


@primitive(family="contract", kind="contract", infer=_float8_matmul_type,
           reference=_batch_matmul_numpy, differentiable=False)
def float8_matmul(x: Any, y: Any, *, transpose_x: bool = False, transpose_y: bool = False,
                  out: TensorType) -> Tensor:
    """matrix products of 8-bit floats, whose float32 sums are the result, for scales to follow

    Products of operands that were widened, and scaled before that, become this by themselves.
    """
    return _products(x, y, transpose_x, transpose_y, out, "float8_matmul")


# ---------------------------------------------------------------- products of the array API
@operator(family="contract")
def matmul(x: Any, y: Any) -> Any:
    """x @ y by numpy's rules: vectors count as a row on the left and as a column on the right"""
    for operand in (x, y):
        if operand.ndim == 0:
            raise RankError("matmul needs vectors or matrices, got a scalar",
                            where=user_location(), hint="multiply by a scalar with *")
    if x.dtype.is_bool and y.dtype.is_bool:
        return not_equal(matmul(in_type(x, int32), in_type(y, int32)), 0)
    left = in_shape(x, (1, *x.shape)) if x.ndim == 1 else x
    right = in_shape(y, (*y.shape, 1)) if y.ndim == 1 else y
    result = batch_matmul(left, right)
    shape = list(result.shape)
    if y.ndim == 1:
        del shape[-1]
    if x.ndim == 1:
        del shape[-1 if y.ndim == 1 else -2]
    return in_shape(result, tuple(shape))


@operator(family="contract")
def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """x @ weight.T + bias: a layer whose weight is [outputs, inputs]"""
    if weight.ndim != 2 or x.ndim == 0:
        raise RankError(f"linear needs x of rank 1 or more and a weight [outputs, inputs], got "
                        f"{x.type} and {weight.type}", where=user_location())
    rows = in_shape(x, (1, *x.shape)) if x.ndim == 1 else x
    result = batch_matmul(rows, weight, transpose_y=True)
    if bias is not None:
        result = result + bias
    return in_shape(result, result.shape[1:]) if x.ndim == 1 else result


@operator(family="contract", unify=True)
def vecdot(x: Any, y: Any, *, axis: int = -1) -> Any:
    """the sum of x * y along an axis"""
    dtype = promote(x.dtype, y.dtype)
    if dtype.is_complex:
        raise DTypeError("vecdot takes real numbers", where=user_location())
    wide = dtype.compute
    return sum_(in_type(x, wide) * in_type(y, wide), axis=axis, dtype=dtype)


@operator(family="contract", unify=True)
def outer(x: Any, y: Any) -> Any:
    """all products of an element of the vector x and one of the vector y"""
    if x.ndim != 1 or y.ndim != 1:
        raise RankError(f"outer needs two vectors, got {x.type} and {y.type}",
                        where=user_location(), hint="reshape to one axis first")
    return in_shape(x, (*x.shape, 1)) * y


@operator(family="contract", unify=True)
def dot(x: Any, y: Any) -> Any:
    """numpy's dot: the last axis of x with the last but one of y"""
    if x.ndim == 0 or y.ndim == 0:
        return multiply(x, y)
    return tensordot(x, y, axes=((-1,), (-1 if y.ndim == 1 else -2,)))


Pairs = int | tuple[int | Sequence[int], int | Sequence[int]]


@operator(family="contract")
def tensordot(x: Any, y: Any, *, axes: Pairs = 2) -> Any:
    """sums of products over pairs of axes: the last n of x with the first n of y, or as listed"""
    if isinstance(axes, int):
        if not 0 <= axes <= min(x.ndim, y.ndim):
            raise ArgumentError(f"tensordot cannot pair {axes} axes of {x.type} and {y.type}",
                                where=user_location())
        axes = (tuple(range(x.ndim - axes, x.ndim)), tuple(range(axes)))
    xs, ys = ([normalize_axis(a, operand.ndim) for a in ([listed] if isinstance(listed, int)
                                                         else listed)]
              for listed, operand in zip(axes, (x, y), strict=True))
    if len(xs) != len(ys):
        raise ArgumentError(f"tensordot pairs {len(xs)} axes of x with {len(ys)} of y",
                            where=user_location(), hint="list as many axes of one as of the other")
    normalize_axes(xs, x.ndim), normalize_axes(ys, y.ndim)
    for a, b in zip(xs, ys, strict=True):
        _require_equal("tensordot", x.shape[a], y.shape[b], x.shape, y.shape)
    left: list[Any] = [("x", d) for d in range(x.ndim)]
    right: list[Any] = [("y", d) for d in range(y.ndim)]
    for b, a in zip(ys, xs, strict=True):
        right[b] = left[a]
    result = [label for label in left + right if (label in left) != (label in right)]
    return _contract([(x, left), (y, right)], result)


# ---------------------------------------------------------------- einsum
def einsum(equation: str, *operands: Any) -> Any:
    """sums of products named by letters, one an axis; those missing on the right are summed over

    `...` stands for any axes, which broadcast. Without an arrow, letters that occur once are kept,
    in the order of the alphabet. A letter that one operand has twice takes a diagonal.

    >>> import numpy as np, terrazzo as tz
    >>> x, y = np.ones((2, 3)), np.ones((4, 3))
    >>> tz.einsum("ij,kj->ik", x, y).shape
    (2, 4)
    >>> float(tz.einsum("ij,ij->", x, x))
    6.0
    """
    return einsum_operator(*operands, equation=equation)


@operator(family="contract", name="einsum")
def einsum_operator(*operands: Any, equation: str) -> Any:
    """sums of products named by letters, one an axis; those missing on the right are summed over"""
    terms, result = _parse(equation, [operand.ndim for operand in operands])
    return _contract(list(zip(operands, terms, strict=True)), result)


Labels = list[Any]


def _parse(equation: str, ranks: Sequence[int]) -> tuple[list[Labels], Labels]:
    """The labels of each operand and of the result; an ellipsis becomes the labels 0, 1, ...

    Axes under an ellipsis are counted from the right, as broadcasting does.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    texts = left.split(",")
    if len(texts) != len(ranks):
        raise ArgumentError(f"einsum {equation!r} names {len(texts)} operands, got {len(ranks)}",
                            where=user_location())

    def labels(text: str, covered: int) -> Labels:
        before, dots, after = text.partition("...")
        for letter in before + after:
            if not letter.isalpha():
                raise ArgumentError(f"einsum {equation!r} has {letter!r} where a letter should be",
                                    where=user_location(),
                                    hint="write it like 'bij,bjk->bik', or with '...'")
        return [*before, *(range(covered - 1, -1, -1) if dots else ()), *after]

    terms, most = [], 0
    for text, rank in zip(texts, ranks, strict=True):
        covered = rank - len(text.replace("...", ""))
        if covered < 0 or (covered > 0 and "..." not in text):
            raise RankError(f"einsum {equation!r} gives {text!r} to a tensor of rank {rank}",
                            where=user_location(), hint="use one letter an axis, or '...'")
        terms.append(labels(text, covered))
        most = max(most, covered if "..." in text else 0)
    everything = [label for term in terms for label in term]
    if not arrow:  # by convention: broadcast axes, then letters that occur once, in order
        once = sorted(c for c in set(everything) if isinstance(c, str) and everything.count(c) == 1)
        return terms, [*range(most - 1, -1, -1), *once]
    result = labels(right, most)
    for label in result:
        if label not in everything or result.count(label) > 1:
            raise ArgumentError(f"einsum {equation!r} cannot give the result an axis {label!r}",
                                where=user_location(), hint="name each axis of the result once, "
                                                            "after one of an operand")
    return terms, result


def _contract(operands: Sequence[tuple[Value, Labels]], result: Labels) -> Value:
    """Combine operands from left to right; labels nobody needs any more are summed over."""
    dtype = promote(*(x.dtype for x, _ in operands))
    (value, labels), *rest = [_without_repeats(in_type(x, dtype), ls) for x, ls in operands]
    for n, (other, others) in enumerate(rest):
        later = {label for _, ls in rest[n + 1:] for label in ls}
        value, labels = _pair(value, labels, other, others, later.union(result))
    value, labels = _summed(value, labels, set(result))
    return _permuted(value, [labels.index(label) for label in result])


def _without_repeats(x: Value, labels: Labels) -> tuple[Value, Labels]:
    """The diagonal of axes that carry the same label."""
    while len(set(labels)) < len(labels):
        second = next(d for d, label in enumerate(labels) if label in labels[:d])
        first = labels.index(labels[second])
        _require_equal("a diagonal", x.shape[first], x.shape[second], x.shape, x.shape)
        x = diagonal(x, axis1=first, axis2=second)
        labels = [c for d, c in enumerate(labels) if d not in (first, second)] + [labels[first]]
    return x, labels


def _summed(x: Value, labels: Labels, wanted: set[Any]) -> tuple[Value, Labels]:
    """Sum over the axes that nobody wants."""
    axes = tuple(d for d, label in enumerate(labels) if label not in wanted)
    if not axes:
        return x, labels
    return sum_(x, axis=axes, dtype=x.dtype), [c for c in labels if c in wanted]


def _pair(x: Value, xs: Labels, y: Value, ys: Labels, wanted: set[Any]) -> tuple[Value, Labels]:
    """The contraction of two operands: one matrix product over permuted and merged axes."""
    size: dict[Any, Index] = dict(zip(xs, x.shape, strict=True))
    for label, n in zip(ys, y.shape, strict=True):
        if label in size and 1 not in (n, size[label]):
            _require_equal("a contraction", size[label], n, x.shape, y.shape)
        size[label] = n if size.get(label, 1) == 1 else size[label]
    x, xs = _without_stretched(x, xs, size)
    y, ys = _without_stretched(y, ys, size)
    x, xs = _summed(x, xs, wanted.union(ys))
    y, ys = _summed(y, ys, wanted.union(xs))
    batch = [c for c in xs if c in ys and c in wanted]
    inner = [c for c in xs if c in ys and c not in wanted]
    rows, columns = [c for c in xs if c not in ys], [c for c in ys if c not in xs]
    if not inner or not (rows or columns):
        wide = x.dtype.compute if inner else x.dtype
        left = in_shape(_permuted(x, _places(xs, batch + rows + inner)),
                        tuple(size[c] for c in batch + rows) + (1,) * len(columns)
                        + tuple(size[c] for c in inner))
        right = in_shape(_permuted(y, _places(ys, batch + columns + inner)),
                         tuple(size[c] for c in batch) + (1,) * len(rows)
                         + tuple(size[c] for c in columns + inner))
        product = in_type(left, wide) * in_type(right, wide)
        value, labels = _summed(product, batch + rows + columns + inner, wanted)
        return in_type(value, x.dtype), labels
    left, transpose_x = _as_matrices(x, xs, batch, rows, inner, size)
    right, transpose_y = _as_matrices(y, ys, batch, columns, inner, size)
    product = batch_matmul(left, right, transpose_x=transpose_x, transpose_y=not transpose_y)
    labels = batch + rows + columns
    return in_shape(product, tuple(size[c] for c in labels)), labels


def _without_stretched(x: Value, labels: Labels, size: dict[Any, Index]) -> tuple[Value, Labels]:
    """Drop axes of size 1 that broadcast against the other operand: only that one varies there."""
    kept = [d for d, label in enumerate(labels) if x.shape[d] != 1 or size[label] == 1]
    return in_shape(x, tuple(x.shape[d] for d in kept)), [labels[d] for d in kept]


def _places(labels: Labels, order: Labels) -> list[int]:
    return [labels.index(label) for label in order]


def _as_matrices(x: Value, labels: Labels, batch: Labels, free: Labels, inner: Labels,
                 size: dict[Any, Index]) -> tuple[Value, bool]:
    """x as [*batch, free, inner], or the other way round (and True) if it lies so in memory."""
    turned = labels == batch + inner + free
    first, second = (inner, free) if turned else (free, inner)
    shape = (*(size[c] for c in batch), num_elements(size[c] for c in first),
             num_elements(size[c] for c in second))
    return in_shape(_permuted(x, _places(labels, batch + first + second)), shape), turned
