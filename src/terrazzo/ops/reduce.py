"""Operators that combine the elements along axes: sums, extrema, truth, means and norms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from terrazzo.base.scalar import REDUCTIONS, Scalar, call
from terrazzo.base.scalar import cast as cast_scalar
from terrazzo.base.scalar import reduce as reduce_scalar
from terrazzo.base.shapes import Shape, dims_text, normalize_axes, num_elements
from terrazzo.dtypes import DType, as_dtype, bool_, default_float, float64, int64, uint64
from terrazzo.errors import ArgumentError, DTypeError, ShapeError, user_location
from terrazzo.expr.ir import Tensor, compute, reduce_axis
from terrazzo.graph.applying import as_value
from terrazzo.graph.ir import Node, TensorType, Value, operator_named
from terrazzo.index import Index
from terrazzo.ops.creation import arange, full
from terrazzo.ops.define import operator, primitive
from terrazzo.ops.elementwise import (
    absolute,
    astype,
    bitwise_and,
    bitwise_or,
    equal,
    exp,
    greater,
    isfinite,
    isnan,
    log,
    maximum,
    not_equal,
    power,
    sign,
    sqrt,
    where,
)
from terrazzo.ops.shape import permute_dims, reshape

Axes = int | tuple[int, ...] | None


# A gradient rule may answer in a wider type and in a shape with 1 for stretched axes: whoever asks
# brings it to the type of the input.


# ---------------------------------------------------------------- what all of them share
def kept_shape(shape: Shape, axes: Axes) -> Shape:
    """The shape with 1 in place of the reduced axes."""
    reduced = normalize_axes(axes, len(shape))
    return tuple(1 if d in reduced else n for d, n in enumerate(shape))


def reduced_shape(shape: Shape, axes: Axes, keepdims: bool) -> Shape:
    """The shape of a reduction's result."""
    reduced = normalize_axes(axes, len(shape))
    if keepdims:
        return kept_shape(shape, axes)
    return tuple(n for d, n in enumerate(shape) if d not in reduced)


def reduced_size(shape: Shape, axes: Axes) -> Index:
    """How many elements are combined into one."""
    return num_elements(shape[d] for d in normalize_axes(axes, len(shape)))


def widened(x: Value) -> Value:
    """x in the type that float arithmetic happens in: at least float32."""
    dtype = x.dtype if x.dtype.is_float or x.dtype.is_complex else default_float
    return in_type(x, dtype.compute)


def in_type(x: Value, dtype: DType) -> Value:
    """x converted to a type, without a node when it has that type already."""
    return x if x.dtype is dtype else astype(x, dtype=dtype)


def float_type(dtype: DType) -> DType:
    """The type of a result that is a float whatever the input is."""
    return dtype if dtype.is_float or dtype.is_complex else default_float


def in_shape(x: Value, shape: Shape) -> Value:
    """x reshaped, without a node when it has that shape already."""
    return x if x.shape == tuple(shape) else reshape(x, shape=tuple(shape))


def spread(g: Value, x: Value, axis: Axes) -> Value:
    """A reduction's result (or its gradient) in a shape that broadcasts against its input."""
    return in_shape(g, kept_shape(x.shape, axis))


def require_elements(name: str, shape: Shape, axis: Axes) -> None:
    """Refuse to look for an extremum among no elements, if that is certain."""
    for d in normalize_axes(axis, len(shape)):
        if shape[d] == 0:
            raise ShapeError(
                f"{name} over axis {d} of a tensor of shape {dims_text(shape)} has no elements "
                "to choose from", where=user_location(),
                hint="leave empty tensors out, or join them with a neutral element first")


def reduce_expr(x: Tensor, out: TensorType, axis: Axes, keepdims: bool, name: str, op: str,
                element: Callable[[Scalar], Scalar]) -> Tensor:
    """The tensor expression of a reduction with `op` of `element(x)`."""
    reduced = normalize_axes(axis, len(x.shape))
    axes = {d: reduce_axis(x.shape[d], "k" if len(reduced) == 1 else f"k{n}")
            for n, d in enumerate(reduced)}

    def at(*indices: Index) -> Scalar:
        rest = iter([i for d, i in enumerate(indices) if not (keepdims and d in axes)])
        place = tuple(axes[d].var if d in axes else next(rest) for d in range(len(x.shape)))
        value = element(x[place])
        return cast_scalar(reduce_scalar(op, value, tuple(axes.values())) if axes else value,
                           out.dtype)

    return compute(out.shape, at, origin=name)


def reduce_numpy(values: np.ndarray, op: str, axis: Axes, keepdims: bool) -> np.ndarray:
    """The same in numpy; an empty range gives the identity."""
    row = REDUCTIONS[op]
    identity = row.identity(as_dtype(values.dtype))
    return row.numpy(values, axis=normalize_axes(axis, values.ndim), keepdims=keepdims,
                     initial=np.asarray(identity).astype(values.dtype))


# ---------------------------------------------------------------- sum and product
def _accumulated(dtype: DType) -> DType:
    """Small integers are added up in 64 bits, as numpy and the array API do."""
    if dtype.is_bool or (dtype.is_integer and dtype.is_signed):
        return int64
    return uint64 if dtype.is_integer else dtype


def _sum_type(x: TensorType, *, axis: Axes, keepdims: bool, dtype: Any) -> TensorType:
    return TensorType(reduced_shape(x.shape, axis, keepdims),
                      _accumulated(x.dtype) if dtype is None else as_dtype(dtype))


def _fold_numpy(op: str) -> Callable[..., np.ndarray]:
    def reference(x: np.ndarray, out: TensorType, *, axis: Axes, keepdims: bool,
                  dtype: Any) -> np.ndarray:
        values = reduce_numpy(x.astype(out.dtype.compute.np), op, axis, keepdims)
        return np.asarray(values).astype(out.dtype.np)

    return reference


def _sum_grad(node: Node, g: Value) -> list[Value | None]:
    x = node.inputs[0]
    assert x is not None
    return [spread(g, x, node.attrs["axis"])]


def _prod_grad(node: Node, g: Value) -> list[Value | None]:
    x, axis = node.inputs[0], node.attrs["axis"]
    assert x is not None
    return [widened(spread(g, x, axis)) * product_of_others(widened(x), axis=axis)]


def _product_of_others_grad(node: Node, g: Value) -> list[Value | None]:
    """What comes before an element times what comes after it: unlike the body, smooth at zeros."""
    from terrazzo.graph.autodiff import gradients

    x, cumulative = node.inputs[0], operator_named("cumulative")
    assert x is not None
    axes = normalize_axes(node.attrs["axis"], x.ndim)
    order = (*(d for d in range(x.ndim) if d not in axes), *axes)
    line = reshape(permute_dims(x, axes=order), shape=(
        *(x.shape[d] for d in order if d not in axes), reduced_size(x.shape, axes)))
    before, after = (cumulative(line, op="mul", axis=-1, exclusive=True, reverse=reverse)
                     for reverse in (False, True))
    others = reshape(before * after, shape=tuple(x.shape[d] for d in order))
    back = permute_dims(others, axes=tuple(order.index(d) for d in range(x.ndim)))
    return gradients([back], [g], [x])


@operator(family="", grad=_product_of_others_grad)
def product_of_others(x: Any, *, axis: Axes) -> Any:
    """for each element the product of the others: all over x, unless x is the only zero"""
    is_zero = equal(x, 0)
    zeros = sum_(is_zero, axis=axis, keepdims=True)
    rest = prod(where(is_zero, 1, x), axis=axis, keepdims=True)
    return where(equal(zeros, 0), rest / where(is_zero, 1, x),
                 where(bitwise_and(is_zero, equal(zeros, 1)), rest, 0))


@primitive(family="reduce", kind="reduce", infer=_sum_type, reference=_fold_numpy("add"),
           grad=_sum_grad)
def sum_(x: Any, *, axis: Axes = None, keepdims: bool = False, dtype: Any = None,
         out: TensorType) -> Tensor:
    """the sum along axes; integers are added up in 64 bits, half floats in float32"""
    return reduce_expr(x, out, axis, keepdims, "sum", "add",
                       lambda value: cast_scalar(value, out.dtype.compute))


@primitive(family="reduce", kind="reduce", infer=_sum_type, reference=_fold_numpy("mul"),
           grad=_prod_grad)
def prod(x: Any, *, axis: Axes = None, keepdims: bool = False, dtype: Any = None,
         out: TensorType) -> Tensor:
    """the product along axes; types as in sum"""
    return reduce_expr(x, out, axis, keepdims, "prod", "mul",
                       lambda value: cast_scalar(value, out.dtype.compute))


# ---------------------------------------------------------------- extrema
def _extremum_type(name: str) -> Callable[..., TensorType]:
    def infer(x: TensorType, *, axis: Axes, keepdims: bool) -> TensorType:
        if x.dtype.is_complex:
            raise DTypeError(f"{name} needs ordered numbers, not {x.dtype.name}",
                             where=user_location(), hint="compare absolute values instead")
        require_elements(name, x.shape, axis)
        return TensorType(reduced_shape(x.shape, axis, keepdims), x.dtype)

    return infer


# Truth values have no machine maximum: the larger of two is their or.
_BOOL_EXTREMUM = {"max": "or", "min": "and"}


def _extremum_numpy(op: str) -> Callable[..., np.ndarray]:
    def reference(x: np.ndarray, out: TensorType, *, axis: Axes, keepdims: bool) -> np.ndarray:
        wide = x.astype(out.dtype.compute.np)
        values = reduce_numpy(wide, _BOOL_EXTREMUM[op] if out.dtype.is_bool else op, axis, keepdims)
        return np.asarray(values).astype(out.dtype.np)

    return reference


def _extremum_expr(x: Tensor, out: TensorType, axis: Axes, keepdims: bool, op: str) -> Tensor:
    combine = _BOOL_EXTREMUM[op] if out.dtype.is_bool else op
    return reduce_expr(x, out, axis, keepdims, op, combine, lambda value: value)


def _extremum_grad(node: Node, g: Value) -> list[Value | None]:
    """Elements that share the extremum share its gradient evenly."""
    x, axis = node.inputs[0], node.attrs["axis"]
    assert x is not None
    hit = equal(x, spread(node.outputs[0], x, axis))
    ties = sum_(hit, axis=axis, keepdims=True)
    share = widened(spread(g, x, axis)) / maximum(ties, 1)
    return [where(hit, share, 0)]


@primitive(family="reduce", kind="reduce", infer=_extremum_type("max"),
           reference=_extremum_numpy("max"), grad=_extremum_grad)
def max_(x: Any, *, axis: Axes = None, keepdims: bool = False, out: TensorType) -> Tensor:
    """the largest element along axes; nan wins"""
    return _extremum_expr(x, out, axis, keepdims, "max")


@primitive(family="reduce", kind="reduce", infer=_extremum_type("min"),
           reference=_extremum_numpy("min"), grad=_extremum_grad)
def min_(x: Any, *, axis: Axes = None, keepdims: bool = False, out: TensorType) -> Tensor:
    """the smallest element along axes; nan wins"""
    return _extremum_expr(x, out, axis, keepdims, "min")


# ---------------------------------------------------------------- truth
def _truth_type(x: TensorType, *, axis: Axes, keepdims: bool) -> TensorType:
    return TensorType(reduced_shape(x.shape, axis, keepdims), bool_)


def _truth_numpy(op: str) -> Callable[..., np.ndarray]:
    def reference(x: np.ndarray, out: TensorType, *, axis: Axes, keepdims: bool) -> np.ndarray:
        return reduce_numpy(x.astype(bool), op, axis, keepdims)

    return reference


def _is_true(value: Scalar) -> Scalar:
    return value if value.dtype.is_bool else call("ne", value, 0)


@primitive(family="reduce", kind="reduce", infer=_truth_type, reference=_truth_numpy("or"),
           differentiable=False)
def any_(x: Any, *, axis: Axes = None, keepdims: bool = False, out: TensorType) -> Tensor:
    """whether some element along axes is not zero"""
    return reduce_expr(x, out, axis, keepdims, "any", "or", _is_true)


@primitive(family="reduce", kind="reduce", infer=_truth_type, reference=_truth_numpy("and"),
           differentiable=False)
def all_(x: Any, *, axis: Axes = None, keepdims: bool = False, out: TensorType) -> Tensor:
    """whether every element along axes is not zero"""
    return reduce_expr(x, out, axis, keepdims, "all", "and", _is_true)


@operator(family="reduce", differentiable=False)
def count_nonzero(x: Any, *, axis: Axes = None, keepdims: bool = False) -> Any:
    """how many elements along axes are not zero"""
    return sum_(not_equal(x, 0), axis=axis, keepdims=keepdims)


# ---------------------------------------------------------------- moments
def wide_mean(x: Value, axis: Axes, keepdims: bool = True) -> Value:
    """The mean of a tensor that is in its arithmetic type already."""
    return sum_(x, axis=axis, keepdims=keepdims) / as_value(reduced_size(x.shape, axis))


@operator(family="reduce")
def mean(x: Any, *, axis: Axes = None, keepdims: bool = False) -> Any:
    """the mean along axes; integers give floats"""
    exact = x if x.dtype.is_integer or x.dtype.is_bool else widened(x)
    if x.dtype in (int64, uint64):
        exact = astype(x, dtype=float64)  # nothing wider could hold a sum of large ones
    return in_type(wide_mean(exact, axis, keepdims), float_type(x.dtype))


@operator(family="reduce")
def var(x: Any, *, axis: Axes = None, correction: float = 0, keepdims: bool = False) -> Any:
    """the variance along axes, divided by the number of elements less `correction`"""
    return in_type(_wide_var(x, axis, correction, keepdims), float_type(x.dtype))


def _wide_var(x: Value, axis: Axes, correction: float, keepdims: bool) -> Value:
    """Two passes: squares of centred elements do not cancel, whatever the mean is."""
    wide = widened(x)
    centred = wide - wide_mean(wide, axis)
    squares = sum_(centred * centred, axis=axis, keepdims=keepdims)
    size = reduced_size(x.shape, axis)
    if isinstance(size, int):
        return squares / float(max(size - correction, 0))
    return squares / maximum(astype(as_value(size), dtype=squares.dtype) - correction, 0)


@operator(family="reduce")
def std(x: Any, *, axis: Axes = None, correction: float = 0, keepdims: bool = False) -> Any:
    """the square root of the variance"""
    return in_type(_safe_sqrt(_wide_var(x, axis, correction, keepdims)), float_type(x.dtype))


def _safe_sqrt(x: Value) -> Value:
    """The square root, with a finite gradient at 0: there, what lies below decides alone."""
    positive = greater(x, 0)
    return where(positive, sqrt(where(positive, x, 1)), x)


# ---------------------------------------------------------------- places
def _first_place(x: Value, axis: int | None, keepdims: bool, name: str,
                 extremum: Callable[..., Any]) -> Value:
    """The first index at which the extremum lies; a nan is one."""
    kept: Shape = (1,) * x.ndim
    if axis is None:
        x, axis = in_shape(x, (num_elements(x.shape),)), 0
    else:
        (axis,) = normalize_axes(axis, x.ndim)
        kept = kept_shape(x.shape, axis)
    require_elements(name, x.shape, axis)
    hit = equal(x, extremum(x, axis=axis, keepdims=True))
    if x.dtype.is_float:
        hit = bitwise_or(hit, isnan(x))
    size = x.shape[axis]
    places = in_shape(arange(start=size, dtype=int64),
                      tuple(size if d == axis else 1 for d in range(x.ndim)))
    found = min_(where(hit, places, as_value(size)), axis=axis)
    return in_shape(found, kept) if keepdims else found


@operator(family="reduce", differentiable=False)
def argmax(x: Any, *, axis: int | None = None, keepdims: bool = False) -> Any:
    """the index of the first largest element along an axis, or among all; nan is the largest"""
    return _first_place(x, axis, keepdims, "argmax", max_)


@operator(family="reduce", differentiable=False)
def argmin(x: Any, *, axis: int | None = None, keepdims: bool = False) -> Any:
    """the index of the first smallest element along an axis, or among all; nan is the smallest"""
    return _first_place(x, axis, keepdims, "argmin", min_)


# ---------------------------------------------------------------- norms
def row_max(x: Value, axis: Axes) -> Value:
    """The maximum with kept axes, -inf of nothing: what exponentials are shifted by."""
    if reduced_size(x.shape, axis) == 0:
        return full(shape=kept_shape(x.shape, axis), value=-math.inf, dtype=x.dtype)
    return max_(x, axis=axis, keepdims=True)


def _logsumexp_grad(node: Node, g: Value) -> list[Value | None]:
    x, axis = node.inputs[0], node.attrs["axis"]
    assert x is not None
    total = widened(spread(node.outputs[0], x, axis))
    shift = where(equal(total, -math.inf), 0, total)
    return [widened(spread(g, x, axis)) * exp(widened(x) - shift)]


@operator(family="reduce", grad=_logsumexp_grad)
def logsumexp(x: Any, *, axis: Axes = None, keepdims: bool = False) -> Any:
    """log(sum(exp(x))) along axes, without overflow"""
    wide = widened(x)
    top = row_max(wide, axis)
    shift = where(isfinite(top), top, 0)
    total = log(sum_(exp(wide - shift), axis=axis, keepdims=True)) + shift
    return in_type(in_shape(total, reduced_shape(x.shape, axis, keepdims)), float_type(x.dtype))


def _power_norm_grad(node: Node, g: Value) -> list[Value | None]:
    """(size / norm) ** (ord - 1) in the direction of x; a zero has no direction, so 0 there."""
    x, axis, ord = node.inputs[0], node.attrs["axis"], node.attrs["ord"]
    assert x is not None
    norm = spread(node.outputs[0], x, axis)
    some = not_equal(norm, 0)
    moves = bitwise_and(not_equal(x, 0), some)
    scale = power(where(some, norm, 1), 1 - ord)  # one a row
    share = scale * power(absolute(where(moves, x, 1)), ord - 1)
    return [spread(g, x, axis) * sign(x) * where(moves, share, 0)]


@operator(family="", grad=_power_norm_grad)
def power_norm(x: Any, *, axis: Axes, keepdims: bool, ord: float) -> Any:
    """the norm of an order that is neither 0 nor infinite, in the type of the arithmetic"""
    return power(sum_(power(absolute(x), ord), axis=axis, keepdims=keepdims), 1.0 / ord)


@operator(family="reduce")
def vector_norm(x: Any, *, axis: Axes = None, keepdims: bool = False, ord: float = 2) -> Any:
    """the norm of all elements along axes taken as one vector; ord is 1, 2, inf or any other"""
    if isinstance(ord, (str, bool)):
        raise ArgumentError(f"vector_norm has no order {ord!r}", where=user_location(),
                            hint="use a number such as 1, 2 or float('inf')")
    wide = widened(x)
    if ord == 0:
        norm = in_type(sum_(not_equal(wide, 0), axis=axis, keepdims=keepdims), wide.dtype)
    elif ord == math.inf:
        norm = max_(absolute(wide), axis=axis, keepdims=keepdims)
    elif ord == -math.inf:
        norm = min_(absolute(wide), axis=axis, keepdims=keepdims)
    elif ord == 1:
        norm = sum_(absolute(wide), axis=axis, keepdims=keepdims)
    elif ord == 2:
        norm = _safe_sqrt(sum_(wide * wide, axis=axis, keepdims=keepdims))
    else:
        norm = power_norm(wide, axis=axis, keepdims=keepdims, ord=ord)
    return in_type(norm, float_type(x.dtype))
