"""Operators that put tensors together and cut them apart: concat and stack, split and unstack."""

from __future__ import annotations

import operator as python
from itertools import pairwise
from typing import Any

import numpy as np

from terrazzo.base.scalar import Const, FromIndex, Scalar, as_scalar, call
from terrazzo.base.scalar import cast as cast_scalar
from terrazzo.base.scalar import where as where_scalar
from terrazzo.base.shapes import (
    dims_text,
    normalize_axis,
)
from terrazzo.dtypes import int64, promote
from terrazzo.errors import (
    ArgumentError,
    ShapeError,
    user_location,
)
from terrazzo.expr.ir import Tensor, compute
from terrazzo.graph.ir import (
    Node,
    TensorType,
    Value,
)
from terrazzo.index import Index, maximum, minimum
from terrazzo.index.guards import all_equal, ask, granted, known, multiple
from terrazzo.loop.interpret import convert
from terrazzo.ops.define import operator, primitive
from terrazzo.ops.shape import (
    expand_dims,
    span,
    squeeze,
)


# ---------------------------------------------------------------- joining
def _concat_type(*xs: TensorType, axis: int) -> TensorType:
    if not xs:
        raise ArgumentError("concat needs at least one tensor", where=user_location())
    rank = len(xs[0].shape)
    axis = normalize_axis(axis, rank)
    for x in xs[1:]:
        if len(x.shape) != rank or not all(
                granted("==", m, n) for d, (m, n) in enumerate(zip(x.shape, xs[0].shape))
                if d != axis):
            raise ShapeError(f"cannot concat {dims_text(xs[0].shape)} and {dims_text(x.shape)} "
                             f"along axis {axis}: every other axis must agree",
                             where=user_location())
    total: Index = 0
    for x in xs:
        total = total + x.shape[axis]
    shape = tuple(total if d == axis else n for d, n in enumerate(xs[0].shape))
    return TensorType(shape, promote(*(x.dtype for x in xs)))


def _concat_numpy(*xs: np.ndarray, axis: int, out: TensorType) -> np.ndarray:
    return np.concatenate([convert(x, out.dtype) for x in xs], axis=axis)


def _concat_grad(node: Node, g: Value) -> list[Value | None]:
    axis = normalize_axis(node.attrs["axis"], g.ndim)
    start: Index = 0
    found: list[Value | None] = []
    for x in node.inputs:
        assert x is not None
        found.append(span(g, axis, start, start + x.shape[axis]))
        start = start + x.shape[axis]
    return found


@primitive(family="shape", infer=_concat_type, reference=_concat_numpy, grad=_concat_grad)
def concat(*xs: Any, axis: int = 0, out: TensorType) -> Tensor:
    """tensors one after the other along an axis"""
    axis = normalize_axis(axis, len(out.shape))
    pieces: list[tuple[Tensor, Index, Index]] = []
    start: Index = 0
    for x in xs:
        if x.shape[axis] != 0:
            pieces.append((x, start, start + x.shape[axis]))
            start = start + x.shape[axis]

    def element(*i: Index) -> Scalar:
        if not pieces:
            return Const(out.dtype, 0)
        value: Scalar | None = None
        for x, first, end in reversed(pieces):
            place = tuple(n - first if d == axis else n for d, n in enumerate(i))
            loaded = cast_scalar(x[place], out.dtype)
            inside = call("lt", FromIndex(int64, i[axis]), as_scalar(end))
            value = loaded if value is None else where_scalar(inside, loaded, value)
        assert value is not None
        return value

    return compute(out.shape, element, origin="concat")


@operator(family="shape")
def stack(*xs: Any, axis: int = 0) -> Any:
    """tensors of one shape side by side along a new axis"""
    if not xs:
        raise ArgumentError("stack needs at least one tensor", where=user_location())
    for x in xs:
        if not all_equal(x.shape, xs[0].shape):
            raise ShapeError(f"cannot stack {dims_text(xs[0].shape)} and {dims_text(x.shape)}: the "
                             "shapes must be equal", where=user_location())
    return concat(*(expand_dims(x, axis=axis) for x in xs), axis=axis)


# ---------------------------------------------------------------- splitting
def _cuts(x: Any, indices_or_sections: Any, axis: int) -> list[Index]:
    n = x.shape[axis]
    if isinstance(indices_or_sections, (list, tuple)):
        cuts: list[Any] = [0, *indices_or_sections, n]
        counted = [c + n if ask("<", c, 0) else c for c in cuts]
        return [minimum(maximum(c, 0), n) for c in counted]
    sections = python.index(indices_or_sections)
    if sections < 1 or not multiple(n, sections):
        raise ShapeError(f"axis {axis} of {dims_text(x.shape)} does not split into {sections} "
                         "equal parts", where=user_location(),
                         hint="give the places to cut at instead, as a tuple")
    return [n // sections * k for k in range(sections + 1)]


@operator(family="shape")
def split(x: Any, *, indices_or_sections: Any, axis: int = 0) -> Any:
    """x cut along an axis into equal parts (a number) or at places (a tuple); a tuple of parts"""
    axis = normalize_axis(axis, x.ndim)
    cuts = _cuts(x, indices_or_sections, axis)
    return tuple(span(x, axis, a, b) for a, b in pairwise(cuts))


@operator(family="shape")
def unstack(x: Any, *, axis: int = 0) -> Any:
    """the slices of x along an axis, without that axis, as a tuple"""
    axis = normalize_axis(axis, x.ndim)
    n = known(x.shape[axis])
    if not isinstance(n, int):
        raise ShapeError(f"cannot unstack axis {axis} of {dims_text(x.shape)}: its size must be "
                         "known", where=user_location(), hint="use tz.scan to walk over it")
    return tuple(squeeze(span(x, axis, k, k + 1), axis=axis) for k in range(n))
