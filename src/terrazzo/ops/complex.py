"""Complex numbers as pairs of real ones, and the operators that are about them.

A complex value is a real one whose last axis holds two parts, which is how it lies in memory:
`view_as_real` and `view_as_complex` say which of the two is meant. `complex_rules.py` has what all
other operators do with them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from terrazzo.base.scalar import Call, as_scalar, call
from terrazzo.base.shapes import broadcast_shapes, dims_text
from terrazzo.dtypes import DType, as_dtype, promote
from terrazzo.errors import DTypeError, ShapeError, user_location
from terrazzo.expr.ir import Tensor, compute
from terrazzo.graph.applying import constant
from terrazzo.graph.ir import Node, TensorType, Value
from terrazzo.index import Index
from terrazzo.loop.interpret import convert
from terrazzo.ops import elementwise as ew
from terrazzo.ops.complex_arithmetic import Parts
from terrazzo.ops.creation import zeros_like
from terrazzo.ops.define import operator, primitive
from terrazzo.ops.reduce import in_type
from terrazzo.ops.shape import broadcast_to, reshape, span


# ---------------------------------------------------------------- views
def _as_real_type(x: TensorType) -> TensorType:
    if not x.dtype.is_complex:
        raise DTypeError(f"view_as_real of {x.dtype.name}, which is not complex",
                         where=user_location())
    return TensorType((*x.shape, 2), x.dtype.real)


def _as_real_numpy(x: np.ndarray, *, out: TensorType) -> np.ndarray:
    return np.stack([x.real, x.imag], -1)


def _as_complex_type(x: TensorType) -> TensorType:
    if not x.shape or x.shape[-1] != 2:
        raise ShapeError(f"view_as_complex needs a last axis of two parts, not "
                         f"{dims_text(x.shape)}", where=user_location())
    return TensorType(x.shape[:-1], complex_of(x.dtype))


def _as_complex_numpy(x: np.ndarray, *, out: TensorType) -> np.ndarray:
    made = np.empty(x.shape[:-1], np.result_type(x.dtype, np.complex64))
    made.real, made.imag = x[..., 0], x[..., 1]
    return made


def _as_real_grad(node: Node, g: Value) -> list[Value | None]:
    return [view_as_complex(g)]


@primitive(family="complex", infer=_as_real_type, reference=_as_real_numpy, kind="view",
           grad=_as_real_grad)
def view_as_real(x: Any, *, out: TensorType) -> Any:
    """complex x as real numbers, with one more axis of real and imaginary parts"""
    raise AssertionError("views of complex values are gone before kernels are made")


@primitive(family="complex", infer=_as_complex_type, reference=_as_complex_numpy, kind="view",
           grad=lambda node, g: [view_as_real(g)])
def view_as_complex(x: Any, *, out: TensorType) -> Any:
    """real numbers whose last axis holds real and imaginary parts, as complex ones"""
    raise AssertionError("views of complex values are gone before kernels are made")


def complex_of(dtype: DType) -> DType:
    """The complex type made of a real one."""
    return promote(dtype, as_dtype("complex64"))


def _pairs_type(re: TensorType, im: TensorType) -> TensorType:
    return TensorType((*broadcast_shapes(re.shape, im.shape), 2), promote(re.dtype, im.dtype))


def _pairs_numpy(re: np.ndarray, im: np.ndarray, *, out: TensorType) -> np.ndarray:
    return convert(np.stack(np.broadcast_arrays(re, im), -1), out.dtype)


@primitive(family="complex", infer=_pairs_type, reference=_pairs_numpy, unify=True,
           grad=lambda node, g: [part(g, 0), part(g, 1)])
def pairs(re: Any, im: Any, *, out: TensorType) -> Tensor:
    """two tensors side by side along a new last axis"""
    from terrazzo.base.scalar import cast
    from terrazzo.ops.define import broadcast_load

    def element(*i: Index) -> Any:
        *outer, part = i
        return Call(out.dtype, "where", (
            call("lt", as_scalar(part), 1), cast(broadcast_load(re, outer), out.dtype),
            cast(broadcast_load(im, outer), out.dtype)))

    return compute(out.shape, element, origin="pairs")


def part(whole: Value, which: int) -> Value:
    """One part of all pairs."""
    return reshape(span(whole, -1, which, which + 1), shape=whole.shape[:-1])


def whole(z: Value) -> Value:
    """The pairs of a complex value."""
    node = z.node
    if node is not None and node.op.name == "view_as_complex":
        (seen,) = node.inputs
        assert seen is not None
        return seen
    if node is not None and node.op.name == "constant":
        value = node.attrs["value"]
        return constant(np.stack([value.real, value.imag], -1), z.dtype.real)
    return view_as_real(z)


def parts(z: Value) -> Parts:
    """Real and imaginary part; a real number has no second one."""
    if not z.dtype.is_complex:
        return z, None
    seen = whole(z)
    if seen.node is not None and seen.node.op.name == "pairs":
        re, im = (v for v in seen.node.inputs if v is not None)
        shape = z.shape
        return tuple(v if v.ndim == len(shape) and v.shape == shape else broadcast_to(
            v, shape=shape) for v in (re, im))  # type: ignore[return-value]
    return part(seen, 0), part(seen, 1)


def joined(re: Any, im: Any) -> Value:
    """A complex value of its parts."""
    return view_as_complex(pairs(re, im))


# ---------------------------------------------------------------- what users call
@operator(family="complex")
def real(x: Any) -> Any:
    """the real part"""
    return parts(x)[0]


@operator(family="complex")
def imag(x: Any) -> Any:
    """the imaginary part"""
    return parts(x)[1] if x.dtype.is_complex else zeros_like(x)


@operator(family="complex")
def conj(x: Any) -> Any:
    """x with its imaginary part negated"""
    re, im = parts(x)
    return re if im is None else joined(re, -im)


@operator(family="complex")
def angle(x: Any) -> Any:
    """the angle of a complex number, in radians from -pi to pi"""
    re, im = parts(x)
    return ew.atan2(0.0 if im is None else im, re)


@operator(family="complex", name="complex", unify=True)
def complex_(re: Any, im: Any) -> Any:
    """complex numbers of real and imaginary parts"""
    if re.dtype.is_complex or im.dtype.is_complex:
        raise DTypeError("the parts of a complex number are real", where=user_location())
    dtype = complex_of(promote(re.dtype, im.dtype)).real
    return joined(in_type(re, dtype), in_type(im, dtype))


@operator(family="complex", unify=True)
def polar(size: Any, angle: Any) -> Any:
    """complex numbers of sizes and angles"""
    return joined(size * ew.cos(angle), size * ew.sin(angle))
