"""Linear systems and factorisations of matrices, through LAPACK in numpy between compiled pieces.

Matrices are in the last two axes, and there may be any number of them. A matrix that has no result
(singular, or not positive) raises numpy's LinAlgError, as torch raises its own. Gradients are the
well-known ones (Giles, "Collected matrix derivative results for forward and reverse mode
algorithmic differentiation", 2008; Seeger et al., "Auto-differentiating linear algebra", 2017).
Cofactors are there for singular matrices too: they are how a determinant changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from terrazzo.base.shapes import Shape, broadcast_shapes, dims_text
from terrazzo.dtypes import promote
from terrazzo.errors import DTypeError, ShapeError, user_location
from terrazzo.graph.ir import Node, TensorType, Value, operator_named
from terrazzo.index import Index
from terrazzo.index.guards import ask, granted
from terrazzo.loop.interpret import convert
from terrazzo.ops.arrange import eye, tril
from terrazzo.ops.contract import matmul
from terrazzo.ops.define import operator, primitive
from terrazzo.ops.elementwise import equal, where
from terrazzo.ops.joining import concat
from terrazzo.ops.reduce import in_type
from terrazzo.ops.shape import permute_dims, reshape, span


# ---------------------------------------------------------------- what all of them share
def _floats(name: str, *types: TensorType) -> None:
    for type in types:
        if not type.dtype.is_float:
            raise DTypeError(f"{name} works on floats, not on {type.dtype.name}",
                             where=user_location(), hint="cast with tz.astype(x, 'float32') first")
        if len(type.shape) < 2:
            raise ShapeError(f"{name} needs matrices in the last two axes, not "
                             f"{dims_text(type.shape)}", where=user_location())


def _square(name: str, x: TensorType) -> None:
    _floats(name, x)
    if not granted("==", x.shape[-1], x.shape[-2]):
        raise ShapeError(f"{name} needs square matrices in the last two axes, not "
                         f"{dims_text(x.shape)}", where=user_location())


def _is_tall(name: str, shape: Shape) -> bool:
    """Whether matrices have no more columns than rows."""
    *_, m, n = shape
    answer = ask("<=", n, m)
    if answer is None:
        raise ShapeError(f"{name} of {dims_text(shape)}: whether there are more columns than rows "
                         "has to be known", where=user_location())
    return answer


def _by_numpy(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reference that calls numpy in the type of the arithmetic, and answers in the result's."""

    def reference(*arrays: np.ndarray, out: Any, **attrs: Any) -> Any:
        types = out if isinstance(out, tuple) else (out,)
        wide = types[0].dtype.compute
        made = function(*(convert(a, wide) for a in arrays), **attrs)
        results = made if isinstance(made, tuple) else (made,)
        answers = [convert(np.asarray(r), t.dtype) for r, t in zip(results, types, strict=True)]
        return tuple(answers) if isinstance(out, tuple) else answers[0]

    return reference


def _t(x: Any) -> Any:
    """Every matrix transposed."""
    return permute_dims(x, axes=(*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))


def _identity(n: Index, like: Any) -> Any:
    return eye(n_rows=n, dtype=like.dtype)


def _on_diagonal(x: Any) -> Any:
    """Matrices with the last axis of x on their diagonals."""
    n = x.shape[-1]
    return reshape(x, shape=(*x.shape[:-1], n, 1)) * _identity(n, x)


def _in_lower(s: Any) -> Any:
    """The gradient by the lower triangle of a symmetric matrix, which stands for both."""
    both = s + _t(s)
    return tril(both) - s * _identity(s.shape[-1], s)


def _present(node: Node, *cotangents: Any) -> list[Any]:
    """Cotangents of all outputs, zeros where one does not matter."""
    return [v * 0 if g is None else g for v, g in zip(node.outputs, cotangents, strict=True)]


# ---------------------------------------------------------------- systems
def _solve_type(a: TensorType, b: TensorType) -> TensorType:
    _square("solve", a)
    _floats("solve", b)
    if not granted("==", a.shape[-1], b.shape[-2]):
        raise ShapeError(f"solve of {dims_text(a.shape)} and {dims_text(b.shape)}: the matrix has "
                         "another number of rows than the right side", where=user_location())
    outer = broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return TensorType((*outer, *b.shape[-2:]), promote(a.dtype, b.dtype))


def _solve_grad(node: Node, g: Value) -> list[Value | None]:
    a, x = node.inputs[0], node.outputs[0]
    assert a is not None
    by_right = solve_matrices(_t(a), g)
    return [-matmul(by_right, _t(x)), by_right]


@primitive(family="linalg", infer=_solve_type, reference=_by_numpy(np.linalg.solve),
           grad=_solve_grad, host=True)
def solve_matrices(a: Any, b: Any, *, out: TensorType) -> Any:
    """x of a @ x = b, for square a [..., n, n] and b [..., n, k]"""


@operator(family="linalg")
def solve(a: Any, b: Any) -> Any:
    """x of a @ x = b, for square a [..., n, n] and b [n] or [..., n, k]"""
    if b.ndim != 1:
        return solve_matrices(a, b)
    made = solve_matrices(a, reshape(b, shape=(*b.shape, 1)))
    return reshape(made, shape=made.shape[:-1])


def _inverse_type(x: TensorType) -> TensorType:
    _square("inv", x)
    return x


def _inverse_grad(node: Node, g: Value) -> list[Value | None]:
    turned = _t(node.outputs[0])
    return [-matmul(matmul(turned, g), turned)]


@primitive(family="linalg", infer=_inverse_type, reference=_by_numpy(np.linalg.inv),
           grad=_inverse_grad, host=True)
def inv(x: Any, *, out: TensorType) -> Any:
    """the inverses of square matrices"""


def _slogdet_type(x: TensorType) -> tuple[TensorType, TensorType]:
    _square("slogdet", x)
    return TensorType(x.shape[:-2], x.dtype), TensorType(x.shape[:-2], x.dtype)


def _slogdet_grad(node: Node, sign: Value | None, size: Value | None) -> list[Value | None]:
    (x,) = node.inputs
    assert x is not None
    if size is None:
        return [None]
    return [reshape(size, shape=(*size.shape, 1, 1)) * _t(inv(x))]


@primitive(family="linalg", infer=_slogdet_type, grad=_slogdet_grad, host=True,
           reference=_by_numpy(lambda x: tuple(np.linalg.slogdet(x))))
def slogdet(x: Any, *, out: TensorType) -> Any:
    """the sign of each determinant, and the logarithm of its size"""


# ---------------------------------------------------------------- cofactors
def _but_one(s: np.ndarray) -> np.ndarray:
    """For each element of the last axis the product of the others."""
    ones = np.ones_like(s[..., :1])
    before = np.concatenate([ones, s[..., :-1]], -1)
    after = np.concatenate([s[..., 1:], ones], -1)
    return np.cumprod(before, -1) * np.flip(np.cumprod(np.flip(after, -1), -1), -1)


def _but_two(s: np.ndarray) -> np.ndarray:
    """For each pair of elements of the last axis the product of the others, 0 for equal ones."""
    pairs = np.zeros((*s.shape, s.shape[-1]), s.dtype)
    for i in range(s.shape[-1]):
        rest = s.copy()
        rest[..., i] = 1
        pairs[..., i, :] = _but_one(rest)
        pairs[..., i, i] = 0
    return pairs


def _turned(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """u, s, vh of x, and what turning by u and vh multiplies a determinant with: 1 or -1."""
    u, s, vh = np.linalg.svd(x)
    return u, s, vh, np.round(np.linalg.det(u) * np.linalg.det(vh))[..., None, None]


def _cofactors_numpy(x: np.ndarray) -> np.ndarray:
    """det(x) * inv(x).T by one elimination; of singular matrices from their singular values."""
    with np.errstate(all="ignore"):
        size = np.asarray(np.linalg.det(x))
        singular = np.abs(size) < np.finfo(x.dtype).tiny
        if not singular.any():
            return np.asarray(size[..., None, None] * np.linalg.inv(x).swapaxes(-1, -2))
        made = np.full_like(x, np.nan)
        made[~singular] = _cofactors_numpy(x[~singular])
        singular &= np.isfinite(x).all((-2, -1))
        u, s, vh, sign = _turned(x[singular])
        made[singular] = sign * (u * _but_one(s)[..., None, :]) @ vh
    return made


def _cofactors_along_numpy(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Of a diagonal matrix s, the cofactor at i, i grows by w[j, j] times all but s[i] and s[j],
    that at i, j by -w[j, i] times those; other matrices are turned to be diagonal."""
    made = np.full_like(x, np.nan)
    finite = np.isfinite(x).all((-2, -1))
    with np.errstate(all="ignore"):
        u, s, vh, sign = _turned(x[finite])
        inner = u.swapaxes(-1, -2) @ w[finite] @ vh.swapaxes(-1, -2)
        pairs = _but_two(s)
        grown = (pairs @ np.diagonal(inner, axis1=-2, axis2=-1)[..., None])[..., 0]
        change = -pairs * inner.swapaxes(-1, -2)
        change += grown[..., None, :] * np.eye(x.shape[-1], dtype=x.dtype)
        made[finite] = sign * u @ change @ vh
    return made


def _cofactors_grad(node: Node, g: Value) -> list[Value | None]:
    return [cofactors_along(node.inputs[0], g)]


@primitive(family="", infer=lambda x: x, reference=_by_numpy(_cofactors_numpy),
           grad=_cofactors_grad, host=True)
def cofactors(x: Any, *, out: TensorType) -> Any:
    """the gradients of determinants: det(x) * inv(x).T, and its limit for singular x"""


def _cofactors_along_grad(node: Node, g: Value) -> list[Value | None]:
    """By x, det(x) times products with inv(x).T: for regular matrices."""
    x, w = node.inputs
    assert x is not None and w is not None
    a = _t(inv(x))
    by_w, by_g = matmul(matmul(a, _t(w)), a), matmul(matmul(a, _t(g)), a)
    along_w, along_g, both = (operator_named("sum")(v, axis=(-2, -1), keepdims=True)
                              for v in (w * a, g * a, by_w * g))
    size = operator_named("det")(x)
    by_x = (along_w * along_g - both) * a - along_g * by_w - along_w * by_g + matmul(
        matmul(by_w, _t(g)), a) + matmul(matmul(by_g, _t(w)), a)
    return [reshape(size, shape=(*size.shape, 1, 1)) * by_x, cofactors_along(x, g)]


@primitive(family="", infer=lambda x, w: x, reference=_by_numpy(_cofactors_along_numpy),
           grad=_cofactors_along_grad, host=True)
def cofactors_along(x: Any, w: Any, *, out: TensorType) -> Any:
    """how cofactors of x change along w, and how their sum by weights w changes: it is symmetric"""


# ---------------------------------------------------------------- symmetric matrices
def _cholesky_type(x: TensorType) -> TensorType:
    _square("cholesky", x)
    return x


def _cholesky_grad(node: Node, g: Value) -> list[Value | None]:
    lower = node.outputs[0]
    n = lower.shape[-1]
    inner = tril(matmul(_t(lower), g)) * (1 - 0.5 * _identity(n, lower))
    s = _t(solve_matrices(_t(lower), _t(solve_matrices(_t(lower), inner))))
    return [_in_lower(0.5 * (s + _t(s)))]


@primitive(family="linalg", infer=_cholesky_type, reference=_by_numpy(np.linalg.cholesky),
           grad=_cholesky_grad, host=True)
def cholesky_lower(x: Any, *, out: TensorType) -> Any:
    """lower l of l @ l.T = x, of positive x that is known by its lower triangle"""


@operator(family="linalg")
def cholesky(x: Any) -> Any:
    """lower l of l @ l.T = x, for positive x, of which the symmetric part is taken"""
    _square("cholesky", x.type)
    return cholesky_lower(0.5 * (x + _t(x)))


def _eigh_type(x: TensorType) -> tuple[TensorType, TensorType]:
    _square("eigh", x)
    return TensorType(x.shape[:-1], x.dtype), x


def _eigh_grad(node: Node, *given: Value | None) -> list[Value | None]:
    values, vectors = node.outputs
    by_values, by_vectors = _present(node, *given)
    n = values.shape[-1]
    gaps = reshape(values, shape=(*values.shape[:-1], 1, n)) - reshape(
        values, shape=(*values.shape, 1))
    # Vectors of equal values turn freely: what they do tells nothing.
    turns = where(equal(gaps, 0), 0, matmul(_t(vectors), by_vectors) / where(
        equal(gaps, 0), 1, gaps))
    s = matmul(matmul(vectors, _on_diagonal(by_values) + turns), _t(vectors))
    return [_in_lower(0.5 * (s + _t(s)))]


@primitive(family="linalg", infer=_eigh_type, grad=_eigh_grad, host=True,
           reference=_by_numpy(lambda x: tuple(np.linalg.eigh(x))))
def eigh_lower(x: Any, *, out: TensorType) -> Any:
    """eigenvalues and eigenvectors of symmetric matrices that are known by their lower triangle"""


@operator(family="linalg")
def eigh(x: Any) -> Any:
    """eigenvalues in ascending order and eigenvectors (columns) of the symmetric part of x"""
    _square("eigh", x.type)
    return eigh_lower(0.5 * (x + _t(x)))


# ---------------------------------------------------------------- any matrices
def _tall_type(x: TensorType) -> tuple[TensorType, TensorType]:
    _floats("qr", x)
    *outer, _, n = x.shape
    if not _is_tall("qr", x.shape):
        raise ShapeError(f"qr_tall of {dims_text(x.shape)}, which has more columns than rows",
                         where=user_location(), hint="call tz.qr")
    return x, TensorType((*outer, n, n), x.dtype)


def _tall_grad(node: Node, *given: Value | None) -> list[Value | None]:
    q, r = node.outputs
    by_q, by_r = _present(node, *given)
    m = matmul(r, _t(by_r)) - matmul(_t(by_q), q)
    low = tril(m)
    mirrored = low + _t(low) - m * _identity(m.shape[-1], m)
    return [_t(solve_matrices(r, _t(by_q + matmul(q, mirrored))))]


@primitive(family="linalg", infer=_tall_type, grad=_tall_grad, host=True,
           reference=_by_numpy(lambda x: tuple(np.linalg.qr(x))))
def qr_tall(x: Any, *, out: TensorType) -> Any:
    """orthogonal columns q and upper r of q @ r = x, for no more columns than rows"""


@operator(family="linalg")
def qr(x: Any) -> Any:
    """orthogonal columns q and upper r of q @ r = x, with as many columns as x has at least"""
    _floats("qr", x.type)
    *_, m, n = x.shape
    if _is_tall("qr", x.shape):
        return qr_tall(x)
    q, r = qr_tall(span(x, -1, 0, m))
    return q, concat(r, matmul(_t(q), span(x, -1, m, n)), axis=-1)


def _svd_type(x: TensorType) -> tuple[TensorType, TensorType, TensorType]:
    _floats("svd", x)
    *outer, m, n = x.shape
    k = n if _is_tall("svd", x.shape) else m
    shapes: list[Shape] = [(*outer, m, k), (*outer, k), (*outer, k, n)]
    u, s, v = (TensorType(shape, x.dtype) for shape in shapes)
    return u, s, v


def _svd_grad(node: Node, *given: Value | None) -> list[Value | None]:
    u, s, vh = node.outputs
    by_u, by_s, by_vh = _present(node, *given)
    v, by_v = _t(vh), _t(by_vh)
    k = s.shape[-1]
    squares = s * s
    gaps = reshape(squares, shape=(*s.shape[:-1], 1, k)) - reshape(squares, shape=(*s.shape, 1))
    same = equal(gaps, 0)
    row, inverse = reshape(s, shape=(*s.shape[:-1], 1, k)), _on_diagonal(1.0 / s)

    def turned(a: Any, by_a: Any) -> Any:
        product = matmul(_t(a), by_a)
        return where(same, 0, (product - _t(product)) / where(same, 1, gaps))

    inner = turned(u, by_u) * row + reshape(s, shape=(*s.shape, 1)) * turned(
        v, by_v) + _on_diagonal(by_s)
    left = matmul(by_u - matmul(u, matmul(_t(u), by_u)), inverse)
    right = matmul(inverse, _t(by_v - matmul(v, matmul(_t(v), by_v))))
    return [matmul(matmul(u, inner) + left, vh) + matmul(u, right)]


@primitive(family="linalg", infer=_svd_type, grad=_svd_grad, host=True,
           reference=_by_numpy(lambda x: tuple(np.linalg.svd(x, full_matrices=False))))
def svd(x: Any, *, out: TensorType) -> Any:
    """u, s and vh of u @ diag(s) @ vh = x, with s in descending order and no more of them than
    rows and columns"""


@operator(family="linalg")
def lstsq(a: Any, b: Any) -> Any:
    """x that brings a @ x nearest to b, the shortest of them, for a [..., m, n] of full rank"""
    _floats("lstsq", a.type)
    right = reshape(b, shape=(*b.shape, 1)) if b.ndim == 1 else b
    dtype = promote(a.dtype, right.dtype)
    a, right = in_type(a, dtype), in_type(right, dtype)
    if _is_tall("lstsq", a.shape):
        q, r = qr_tall(a)
        made = solve_matrices(r, matmul(_t(q), right))
    else:
        q, r = qr_tall(_t(a))
        made = matmul(q, solve_matrices(_t(r), right))
    return reshape(made, shape=made.shape[:-1]) if b.ndim == 1 else made
