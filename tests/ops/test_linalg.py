"""Determinants, systems and factorisations against numpy in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from checking import check, close, draw, op

import terrazzo as tz
from terrazzo.dtypes import as_dtype, float32, int32
from terrazzo.errors import DTypeError, ShapeError
from terrazzo.graph.ir import TensorType, Value


@pytest.mark.parametrize("shape", [(1, 1), (3, 3), (2, 4, 4), (5, 1, 1), (2, 0, 0), (0, 3, 3),
                                   (2, 3, 7, 7), (40, 40)])
def test_det(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    x = draw(rng, shape, low=-1, high=1)
    expected = np.linalg.det(x.astype(np.float64))
    got = tz.det(x)
    assert got.shape == expected.shape
    # Each product of pivots is off by a few units in the last place of its largest terms.
    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=1e-5)


def test_loops(rng: np.random.Generator) -> None:
    check(op("det"), draw(rng, (2, 4, 4), "float64"))
    check(op("det"), draw(rng, (3, 3)), rtol=1e-5)
    check(op("det"), draw(rng, (3, 4, 4), "float64"), symbolic=True)


def test_singular_and_special() -> None:
    close(tz.det(np.zeros((4, 4), np.float32)), np.float32(0))
    close(tz.det(np.array([[0, 1], [1, 0]], np.float32)), np.float32(-1))
    close(tz.det(np.array([[0, 0, 1], [0, 2, 3], [0, 5, 7]], np.float32)), np.float32(0))
    assert np.isnan(tz.det(np.array([[np.nan, 1], [1, 0]], np.float32)))


RANKS = {
    "2": [[1.0, 2], [2, 4]], "none": [[0.0, 0], [0, 0]], "regular": [[1.0, 2], [3, 4]],
    "tenths": [[0.1, 0.2], [0.3, 0.6]], "one": [[0.0]],
    "of 3, 2": [[1.0, 2, 3], [4, 5, 6], [7, 8, 9]], "of 3, 1": [[1.0, 2, 3], [2, 4, 6], [3, 6, 9]],
    "of 4, 3": np.diag([1.0, 2, 0, 3])[::-1].tolist(),
    "batch": [[[1.0, 2], [2, 4]], [[1, 2], [3, 4]], [[0, 0], [0, 0]], [[0, 1], [0, 2]]],
}


def by_minors(x: np.ndarray) -> np.ndarray:
    """Cofactors as they are defined."""
    made = np.zeros_like(x)
    for *outer, i, j in np.ndindex(*x.shape):
        minor = np.delete(np.delete(x[tuple(outer)], i, 0), j, 1)
        made[(*outer, i, j)] = (-1) ** (i + j) * np.linalg.det(minor)
    return made


@pytest.mark.parametrize("name", RANKS)
def test_gradients_of_determinants_of_any_rank(name: str, rng: np.random.Generator) -> None:
    x = np.array(RANKS[name])
    weights = rng.standard_normal(x.shape[:-2])
    for dtype, room in (("float64", 1e-13), ("float32", 3e-6)):
        given = weights.astype(dtype)
        got = tz.grad(lambda x: tz.sum(tz.det(x) * given))(x.astype(dtype))  # noqa: B023
        assert got.dtype == dtype
        expected = weights[..., None, None] * by_minors(x)
        np.testing.assert_allclose(got, expected, atol=room * max(1, float(np.abs(expected).max())))


@pytest.mark.parametrize("name", RANKS)
def test_second_derivatives_of_determinants(name: str, rng: np.random.Generator) -> None:
    """Cofactors are polynomials of a low degree: central differences of minors have no error."""
    x = np.array(RANKS[name])
    w, step = rng.standard_normal(x.shape), 1e-3
    got = tz.grad(lambda x: tz.sum(w * tz.grad(lambda x: tz.sum(tz.det(x)))(x)))(x)
    expected = np.zeros_like(x)
    for place in np.ndindex(*x.shape):
        ends = [x.copy(), x.copy()]
        ends[0][place] += step
        ends[1][place] -= step
        expected[place] = np.sum(w * (by_minors(ends[0]) - by_minors(ends[1]))) / (2 * step)
    np.testing.assert_allclose(got, expected, atol=1e-10)


def test_third_derivatives_of_determinants(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    x, v, w = rng.standard_normal((3, 2, 4, 4))
    got = tz.grad(lambda x: tz.sum(v * tz.grad(lambda x: tz.sum(w * tz.grad(
        lambda x: tz.sum(tz.det(x)))(x)))(x)))(x)
    t = torch.tensor(x, requires_grad=True)
    (found,) = torch.autograd.grad(torch.det(t).sum(), t, create_graph=True)
    for weights in (w, v):
        (found,) = torch.autograd.grad((found * torch.tensor(weights)).sum(), t, create_graph=True)
    np.testing.assert_allclose(got, found.detach().numpy(), atol=1e-11)


def test_gradients_of_determinants_of_nothing_and_nan() -> None:
    def gradient(x: np.ndarray) -> np.ndarray:
        return tz.grad(lambda x: tz.sum(tz.det(x)))(x)

    for shape in ((2, 0, 0), (0, 3, 3)):
        assert gradient(np.zeros(shape)).shape == shape
    got = gradient(np.array([[[np.nan, 1], [1, 0]], [[1, 2], [2, 4]], [[np.inf, 1], [0, 0]]]))
    assert np.isnan(got[0]).all() and np.isnan(got[2]).all()
    np.testing.assert_allclose(got[1], [[4, -2], [-2, 1]], atol=1e-14)
    # The product of pivots is too small for the type, those of the cofactors are not.
    tiny = np.diag(np.array([1e-20, 1e-20, 1e-10], np.float32))
    np.testing.assert_allclose(np.diagonal(gradient(tiny)), [1e-30, 1e-30, 1e-40], rtol=1e-5,
                               atol=1e-44)


def test_errors() -> None:
    with pytest.raises(ShapeError, match="square"):
        tz.det(Value(TensorType((2, 3), float32)))
    with pytest.raises(DTypeError, match="floats"):
        tz.det(Value(TensorType((3, 3), int32)))


# ---------------------------------------------------------------- through LAPACK
def positive(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> np.ndarray:
    x = rng.standard_normal(shape)
    return (x @ x.swapaxes(-1, -2) + np.eye(shape[-1])).astype(dtype)


SHAPES = [(3, 3), (2, 4, 4), (2, 3, 1, 1), (0, 3, 3), (2, 0, 0), (20, 20)]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_square_matrices(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> None:
    """Each result put together again, inside one compiled program."""
    x = positive(rng, *shape, dtype="float64").astype(as_dtype(dtype).np)
    exact = x.astype(np.float64)
    right = draw(rng, (*shape[:-1], 2), dtype)

    def made(x: Any, right: Any) -> dict[str, Any]:
        lower, (values, vectors) = tz.cholesky(x), tz.eigh(x)
        return {"solve": x @ tz.solve(x, right) - right, "inv": tz.inv(x) @ x,
                "cholesky": lower @ lower.mT, "eigh": (vectors * values[..., None, :]) @ vectors.mT,
                "size": tz.slogdet(x)[1], "upper": tz.triu(lower, k=1)}

    got = {k: np.asarray(v, np.float64) for k, v in tz.jit(made)(x, right).items()}
    n = shape[-1]
    room = {"float32": 2e-4, "float64": 1e-11, "bfloat16": 1.5}[dtype]
    np.testing.assert_allclose(got["solve"], 0 * right.astype(np.float64), atol=room)
    np.testing.assert_allclose(got["inv"], np.broadcast_to(np.eye(n), shape), atol=room)
    for name in ("cholesky", "eigh"):
        np.testing.assert_allclose(got[name], exact, atol=room * max(1, n), rtol=room)
    np.testing.assert_array_equal(got["upper"], np.zeros(shape))
    np.testing.assert_allclose(got["size"], np.linalg.slogdet(exact)[1], rtol=room, atol=room)


@pytest.mark.parametrize("shape", [(4, 3), (3, 4), (2, 5, 2), (2, 2, 5), (3, 3), (0, 4, 3), (4, 0)])
def test_any_matrices(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    x = draw(rng, shape, "float64")
    q, r = tz.jit(lambda x: tz.qr(x))(x)
    k = min(shape[-2:])
    np.testing.assert_allclose(q @ r, x, atol=1e-12)
    np.testing.assert_allclose(np.triu(r), r)
    np.testing.assert_allclose(q.swapaxes(-1, -2) @ q, np.broadcast_to(
        np.eye(k), (*shape[:-2], k, k)), atol=1e-12)
    u, s, vh = tz.jit(lambda x: tz.svd(x))(x)
    np.testing.assert_allclose((u * s[..., None, :]) @ vh, x, atol=1e-12)
    assert (np.diff(s, axis=-1) <= 0).all()
    if x.size:
        b = draw(rng, (*shape[:-1], 2), "float64")
        np.testing.assert_allclose(tz.lstsq(x, b), np.linalg.pinv(x) @ b, atol=1e-9)


def test_in_the_middle_of_a_program(rng: np.random.Generator) -> None:
    """Sizes that vary, strides, a Gaussian process as one writes it."""
    def likelihood(x: Any, y: Any) -> Any:
        gaps = x[:, None] - x
        lower = tz.cholesky(tz.exp(-0.5 * gaps * gaps) + 0.1 * tz.eye(n_rows=x.shape[0]))
        alpha = tz.solve(lower.T, tz.solve(lower, y))
        return 0.5 * (y * alpha).sum() + tz.log(tz.diagonal(lower)).sum()

    function = tz.jit(likelihood)
    for n in (3, 5, 8, 4):
        x, y = rng.standard_normal((2, 2 * n)).astype(np.float32)[:, ::2]
        wide = np.exp(-0.5 * np.subtract.outer(x, x).astype(np.float64) ** 2) + 0.1 * np.eye(n)
        expected = 0.5 * y @ np.linalg.solve(wide, y) + 0.5 * np.linalg.slogdet(wide)[1]
        np.testing.assert_allclose(function(x, y), expected, rtol=1e-4, atol=1e-4)


GRADIENTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "solve": (lambda x: tz.solve(x, x[..., :2] ** 2), lambda m, x: m.solve(x, x[..., :2] ** 2)),
    "cholesky": (tz.cholesky, lambda m, x: m.cholesky(x)),
    "inv": (tz.inv, lambda m, x: m.inv(x)),
    "det": (tz.det, lambda m, x: m.det(x)),
    "eigh": (lambda x: tz.eigh(x)[1] ** 2, lambda m, x: m.eigh(x)[1] ** 2),
    "qr": (lambda x: tz.qr(x)[0], lambda m, x: m.qr(x)[0]),
    "svd": (lambda x: tz.svd(x[..., :2])[0] ** 2, lambda m, x: m.svd(
        x[..., :2], full_matrices=False)[0] ** 2),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_torch_s(name: str, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    ours, theirs = GRADIENTS[name]
    x = torch.tensor(positive(rng, 2, 4, 4, dtype="float64"), requires_grad=True)
    made = tz.jit(lambda x: ours(x))(x)
    assert isinstance(made, torch.Tensor)
    weights = torch.tensor(rng.standard_normal(tuple(made.shape)))
    (got,) = torch.autograd.grad((made * weights).sum(), x)
    (expected,) = torch.autograd.grad((theirs(torch.linalg, x) * weights).sum(), x)
    np.testing.assert_allclose(got, expected, atol=1e-9 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["cholesky", "solve", "svd", "qr", "slogdet", "eigh"])
def test_every_level(name: str, rng: np.random.Generator) -> None:
    given = [positive(rng, 2, 3, 3)] + [draw(rng, (2, 3, 2))] * (name == "solve")
    assert tz.verify(getattr(tz, name), *given, dtypes=["float32"], kinds=["given"])


def test_matrices_without_a_result() -> None:
    for name in ("inv", "cholesky"):
        with pytest.raises(np.linalg.LinAlgError):
            getattr(tz, name)(np.zeros((2, 2), np.float32))
    with pytest.raises(ShapeError, match="square"):
        tz.solve(np.zeros((2, 3), np.float32), np.zeros(2, np.float32))
    with pytest.raises(ShapeError, match="another number of rows"):
        tz.solve(np.eye(2, dtype=np.float32), np.zeros(3, np.float32))
    with pytest.raises(DTypeError, match="floats"):
        tz.svd(np.eye(2, dtype=np.int32))
    assert np.isnan(tz.solve(np.full((2, 2), np.nan, np.float32), np.ones(2, np.float32))).all()
