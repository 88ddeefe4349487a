"""Reductions against numpy, on every level, with odd, empty and symbolic shapes."""

from __future__ import annotations

import numpy as np
import pytest
from checking import (
    HALVES,
    check_gradient,
    check_primitive,
    close,
    draw,
    evaluate,
    from_torch,
    infer,
    op,
    symbolic_shapes,
    to_torch,
)

from terrazzo.base.shapes import dims, normalize_axes
from terrazzo.dtypes import as_dtype, float32, int64
from terrazzo.errors import ArgumentError, AxisError, DTypeError, ShapeError
from terrazzo.graph import derivatives
from terrazzo.graph.ir import TensorType

CASES = [
    ((), None), ((5,), None), ((5,), 0), ((3, 4), -1), ((3, 4), 0), ((2, 3, 4), (0, 2)),
    ((2, 3, 4), None), ((2, 3, 4), ()), ((1, 7, 1), (-2,)), ((3, 5, 2, 3), (-1, 1)),
]
FOLDS = {"sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min, "any": np.any, "all": np.all}


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize(("shape", "axis"), CASES)
@pytest.mark.parametrize("name", FOLDS)
def test_shapes(rng, name, shape, axis, keepdims):
    x = draw(rng, shape)
    got = check_primitive(name, x, axis=axis, keepdims=keepdims)
    close(got, FOLDS[name](x, axis=axis, keepdims=keepdims), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "int8", "uint8", "int32",
                                   "uint64", "int64", "bool"])
@pytest.mark.parametrize("name", FOLDS)
def test_types(rng, name, dtype):
    x = draw(rng, (3, 5), dtype)
    got = check_primitive(name, x, axis=1)
    wide = x.astype(as_dtype(dtype).compute.np)
    expected = FOLDS[name](wide, axis=1)
    if dtype in HALVES and name not in ("any", "all"):
        expected = expected.astype(as_dtype(dtype).np)
    assert got.dtype == expected.dtype
    close(got, expected)


@pytest.mark.parametrize("dtype", ["int8", "float16"])
@pytest.mark.parametrize("name", ["sum", "prod"])
def test_asked_type(rng, name, dtype):
    x = draw(rng, (4, 3), dtype)
    got = check_primitive(name, x, axis=0, dtype="float32")
    close(got, FOLDS[name](x.astype(np.float32), axis=0))


def test_half_sums_do_not_stall():
    x = np.ones(4096, np.float16)
    assert check_primitive("sum", x) == 4096  # adding 1 to 2048 in float16 gives 2048


@pytest.mark.parametrize("name", ["max", "min"])
def test_nan_wins(name):
    x = np.array([[1, np.nan, 3], [np.inf, -np.inf, 0], [-np.inf] * 3], np.float32)
    close(check_primitive(name, x, axis=1), FOLDS[name](x, axis=1))


@pytest.mark.parametrize(("name", "neutral"), [("sum", 0), ("prod", 1), ("any", False),
                                               ("all", True)])
def test_nothing_gives_the_neutral_element(name, neutral):
    assert check_primitive(name, np.zeros((0,), np.float32)) == neutral
    assert (check_primitive(name, np.zeros((3, 0), np.float32), axis=1) == neutral).all()
    assert check_primitive(name, np.zeros((3, 0), np.float32), axis=0).shape == (0,)


@pytest.mark.parametrize("name", ["max", "min", "argmax", "argmin"])
def test_no_extremum_of_nothing(name):
    with pytest.raises(ShapeError, match=rf"{name} over axis 1 .*\[3, 0\] has no elements"):
        infer(op(name), TensorType((3, 0), float32), axis=1)
    assert evaluate(op(name), np.zeros((0, 3), np.float32), axis=1).shape == (0,)


def test_complex_numbers_have_no_order():
    with pytest.raises(DTypeError, match="no max of complex numbers"):
        infer(op("max"), TensorType((3,), as_dtype("complex64")))


def test_axis_that_is_not_there():
    with pytest.raises(AxisError, match="axis 2 does not exist"):
        infer(op("sum"), TensorType((3, 4), float32), axis=2)


# ---------------------------------------------------------------- composites
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize(("shape", "axis"), CASES)
@pytest.mark.parametrize("name", ["mean", "var", "std"])
def test_moments(rng, name, shape, axis, keepdims):
    x = draw(rng, shape, low=100, high=101)
    got = evaluate(op(name), x, axis=axis, keepdims=keepdims)
    close(got, getattr(np, name)(x.astype(np.float64), axis=axis, keepdims=keepdims), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float64", *HALVES, "int32", "bool"])
@pytest.mark.parametrize("name", ["mean", "var", "std"])
def test_moments_of_types(rng, name, dtype):
    x = draw(rng, (5, 7), dtype)
    got = evaluate(op(name), x, axis=0)
    assert got.dtype == (as_dtype(dtype) if as_dtype(dtype).is_float else float32).np
    close(got, getattr(np, name)(x.astype(np.float64), axis=0))


@pytest.mark.parametrize(("dtype", "start"), [("int64", 1_700_000_000_000_000_000),
                                              ("int64", -(2**63)), ("uint64", 2**64 - 8)])
def test_means_of_large_integers_do_not_wrap(dtype, start):
    x = np.array([start + i for i in range(8)], dtype)
    got = evaluate(op("mean"), x)
    assert got.dtype == np.float32
    close(got, np.float32(float(start) + 3.5))
    close(evaluate(op("mean"), x.reshape(2, 4), axis=0, keepdims=True),
          x.reshape(2, 4).astype(np.float64).mean(0, keepdims=True).astype(np.float32))


@pytest.mark.parametrize("correction", [0, 1, 2.5, 5, 6])
def test_corrected_variance(rng, correction):
    x = draw(rng, (5, 3))
    with np.errstate(all="ignore"):
        wanted = ((x - x.mean(0)) ** 2).sum(0) / max(5 - correction, 0)
    got = evaluate(op("var"), x, axis=0, correction=correction)
    close(got, wanted)
    n, m = dims("n m")
    close(evaluate(op("var"), x, axis=0, correction=correction, shapes=[(n, m)]), got)


@pytest.mark.parametrize("name", ["mean", "var"])
def test_moments_of_nothing_are_nan(name):
    assert np.isnan(evaluate(op(name), np.zeros((0,), np.float32)))


@pytest.mark.parametrize("name", ["mean", "var", "std", "logsumexp", "vector_norm", "argmax"])
def test_symbolic_sizes(rng, name):
    x = draw(rng, (3, 5, 2))
    expected = evaluate(op(name), x, axis=1)
    close(evaluate(op(name), x, axis=1, shapes=symbolic_shapes([x])[0]), expected)


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", [None, 0, 1, -1])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "uint8", "bool"])
@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_places(rng, name, dtype, axis, keepdims):
    x = draw(rng, (4, 3, 5), dtype, -1, 1)  # ties are likely: the first counts
    got = evaluate(op(name), x, axis=axis, keepdims=keepdims)
    assert got.dtype == np.int64
    close(got, getattr(np, name)(x, axis=axis, keepdims=keepdims))


@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_places_of_nan_and_infinities(name):
    x = np.array([[1, np.nan, np.nan], [np.inf, 0, np.inf], [-np.inf, -np.inf, -np.inf]],
                 np.float32)
    close(evaluate(op(name), x, axis=1), getattr(np, name)(x, axis=1))
    close(evaluate(op(name), np.float32(3.0)), 0)


def test_count_nonzero(rng):
    x = draw(rng, (4, 6), "int8", -1, 1)
    close(evaluate(op("count_nonzero"), x, axis=1), np.count_nonzero(x, axis=1))
    assert infer(op("count_nonzero"), TensorType((2,), float32)) == TensorType((), int64)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float64", "float32", *HALVES])
def test_logsumexp(rng, dtype):
    import torch

    x = draw(rng, (6, 5), dtype, -80, 80)
    x[1], x[2, 0], x[3] = -np.inf, np.inf, [np.inf, -np.inf, 0, 1, 2]
    for axis in (0, 1, (0, 1)):
        expected = from_torch(torch.logsumexp(to_torch(x), axis))
        close(evaluate(op("logsumexp"), x, axis=axis), expected)
    assert evaluate(op("logsumexp"), x[:0], axis=0).tolist() == [-np.inf] * 5


@pytest.mark.parametrize("ord", [0, 1, 2, 3, 0.5, np.inf, -np.inf])
def test_vector_norm(rng, ord):
    x = draw(rng, (4, 5))
    expected = np.linalg.vector_norm(x.astype(np.float64), axis=1, ord=ord)
    close(evaluate(op("vector_norm"), x, axis=1, ord=ord), expected)
    half = x.astype(np.float16)
    close(evaluate(op("vector_norm"), half, ord=ord),
          np.linalg.vector_norm(half.astype(np.float64), ord=ord))


def test_vector_norm_has_no_names():
    with pytest.raises(ArgumentError, match="'fro'"):
        infer(op("vector_norm"), TensorType((3,), float32), ord="fro")


# ---------------------------------------------------------------- gradients
@pytest.mark.parametrize("axis", [None, 1, (0, 2)])
@pytest.mark.parametrize("name", ["sum", "prod", "max", "min", "mean", "var", "std", "logsumexp",
                                  "vector_norm"])
def test_gradients(rng, name, axis):
    check_gradient(op(name), draw(rng, (2, 3, 2)), axis=axis)


@pytest.mark.parametrize("zeros", [1, 2])
def test_gradient_of_a_product_with_zeros(rng, zeros):
    x = draw(rng, (3, 4))
    x[1, :zeros] = 0
    check_gradient(op("prod"), x, axis=1)


def sloped(x, w, axis):
    """How the gradient of products changes: that of its sum by weights."""
    return gradient(lambda v: w * derivatives.grad(lambda u: op("sum")(op("prod")(u, axis=axis)))(
        v), x)


@pytest.mark.torch
@pytest.mark.parametrize("zeros", [0, 1, 2, 3])
@pytest.mark.parametrize("axis", [None, 0, -1, (0, 2)])
def test_second_derivative_of_a_product_with_zeros(rng, axis, zeros):
    import torch

    x, w = draw(rng, (2, 3, 3), "float64"), draw(rng, (2, 3, 3), "float64")
    x[:, 1, :zeros] = 0
    close(gradient(op("prod"), x, axis=axis), slopes_of_products(torch, x, axis))
    close(sloped(x, w, axis), slopes_of_products(torch, x, axis, w))


def slopes_of_products(torch, x, axis, *weights):
    """The gradient of the sum of products along axes, then those of its weighted sums."""
    t = made = to_torch(x).requires_grad_()
    for d in sorted(normalize_axes(axis, x.ndim), reverse=True):
        made = made.prod(d)
    (found,) = torch.autograd.grad(made.sum(), t, create_graph=True)
    for w in weights:
        (found,) = torch.autograd.grad((found * to_torch(w)).sum(), t)
    return from_torch(found)


def test_derivatives_of_a_product_of_any_order():
    x, w = np.array([0.0, 2, 3]), np.array([1.0, 10, 100])
    close(sloped(x, w, None), [230, 3, 2])
    third = gradient(lambda t: w * derivatives.grad(
        lambda v: op("sum")(derivatives.grad(op("prod"))(v) * w))(t), x)
    close(third, [2000, 200, 20])
    assert (sloped(x, w, ()) == 0).all()
    (n,) = dims("n")
    close(evaluate(lambda t: derivatives.grad(lambda v: op("sum")(derivatives.grad(op("prod"))(v)))(
        t), x, shapes=[(n,)]), [5, 3, 2])


@pytest.mark.torch
@pytest.mark.parametrize("name", ["amax", "amin"])
def test_ties_share_the_gradient(name):
    import torch

    x = np.array([[1.0, 3, 3], [2, 2, 2], [1, 0, 1]])
    t = to_torch(x).requires_grad_()
    getattr(torch, name)(t, 1).sum().backward()
    close(gradient(op(name[1:]), x, axis=1), from_torch(t.grad))


def gradient(function, x, **attrs):
    return evaluate(lambda v: derivatives.grad(lambda u: op("sum")(function(u, **attrs)))(v), x)


def test_gradient_where_the_root_is_zero():
    flat = np.full((2, 3), 1.5)
    assert (gradient(op("std"), flat, axis=1) == 0).all()
    assert (gradient(op("vector_norm"), 0 * flat, axis=1) == 0).all()


@pytest.mark.torch
@pytest.mark.parametrize("ord", [3, 4, 1.5, 2.5, 0.5, -1, -2.5])
def test_gradients_of_norms_at_zeros(rng, ord):
    import torch

    x = draw(rng, (5, 3), "float64")
    x[1], x[2, 0], x[3, 1:] = 0, 0, 0
    t = to_torch(x).requires_grad_()
    torch.linalg.vector_norm(t, ord, dim=1).sum().backward()
    close(gradient(op("vector_norm"), x, axis=1, ord=ord), from_torch(t.grad))
    for dtype in ("float32", *HALVES):
        got = gradient(op("vector_norm"), x.astype(as_dtype(dtype).np), axis=1, ord=ord)
        wide = to_torch(x.astype(as_dtype(dtype).np).astype(np.float64)).requires_grad_()
        torch.linalg.vector_norm(wide, ord, dim=1).sum().backward()
        close(got, from_torch(wide.grad), rtol={"float32": 1e-5}.get(dtype))


@pytest.mark.parametrize(("x", "ord", "expected"), [
    ([0.0, 0, 0], 3, [0, 0, 0]), ([0.0, 2, 3], -1, [0, 0, 0]),
    ([0.0, 2, 3], 0.5, [0, 1 + 1.5**0.5, 1 + (2 / 3)**0.5]), ([np.inf, 2, 0], 3, [np.nan, 0, 0]),
    ([np.inf, 2], -1, [0, 1])])
def test_gradients_of_norms_by_hand(x, ord, expected):
    close(gradient(op("vector_norm"), np.array(x), ord=ord), np.array(expected, np.float64))


@pytest.mark.parametrize("ord", [3, 4, 0.5, -1])
def test_second_derivative_of_a_norm(rng, ord):
    x, w = draw(rng, (2, 3), "float64"), draw(rng, (2, 3), "float64")
    check_gradient(lambda v: w * derivatives.grad(
        lambda u: op("sum")(op("vector_norm")(u, axis=1, ord=ord)))(v), x, rtol=2e-6)
    x[0] = 0
    if ord > 2:  # below, the slope has no end at zeros
        assert np.isfinite(gradient(lambda v: w * derivatives.grad(
            lambda u: op("sum")(op("vector_norm")(u, axis=1, ord=ord)))(v), x)).all()


@pytest.mark.parametrize("ord", [3, 0.5, -1, -2.5])
def test_norms_of_infinities_nan_and_zeros(ord):
    x = np.array([[np.inf, 1, 0], [np.nan, 1, 0], [0, 0, 0], [-np.inf, np.inf, -np.inf],
                  [1, -2, 3]])
    with np.errstate(all="ignore"):
        expected = (np.abs(x) ** ord).sum(1) ** (1 / ord)
    close(evaluate(op("vector_norm"), x, axis=1, ord=ord), expected)


def test_gradient_of_logsumexp_in_the_tails():
    x = np.array([[-np.inf, -np.inf], [1000.0, 0.0], [-np.inf, 3.0]])
    close(gradient(op("logsumexp"), x, axis=1), [[0, 0], [1, 0], [0, 1]])
