"""Losses against torch, values and gradients."""

from __future__ import annotations

import numpy as np
import pytest
from checking import (
    HALVES,
    check_gradient,
    close,
    draw,
    evaluate,
    from_torch,
    infer,
    op,
    to_torch,
)

from terrazzo.base.shapes import dims
from terrazzo.dtypes import as_dtype, float32
from terrazzo.errors import ArgumentError, DTypeError, ShapeError
from terrazzo.graph.ir import TensorType

torch = pytest.importorskip("torch")
functional = torch.nn.functional
pytestmark = pytest.mark.torch
REDUCTIONS = ["mean", "sum", "none"]


def check(name, *arrays, **attrs):
    """The value, and the gradients by the prediction (or both sides), equal torch's in float64."""
    from terrazzo.graph import derivatives

    given = [None if a is None else to_torch(a.astype(np.float64) if as_dtype(a.dtype).is_float
                                             else a) for a in arrays]
    floats = [i for i, a in enumerate(arrays) if a is not None and as_dtype(a.dtype).is_float]
    wanted = [i for i in floats if i < 1 or name in ("mse_loss", "l1_loss", "huber_loss")]
    for i in wanted:
        given[i].requires_grad_()
    keywords = dict(zip(("weight", "pos_weight"), given[2:]))
    result = getattr(functional, name)(*given[:2], **keywords, **attrs)
    close(evaluate(op(name), *arrays, **attrs), from_torch(result))
    result.sum().backward()

    def gradients(*xs):
        places = [sum(a is not None for a in arrays[:i]) for i in wanted]

        def total(*vs):
            rest = iter(vs)
            return op("sum")(op(name)(*(None if a is None else next(rest) for a in arrays),
                                      **attrs))

        return derivatives.grad(total, places)(*xs)

    found = evaluate(gradients, *(a for a in arrays if a is not None))
    for i, got in zip(wanted, found, strict=True):
        close(got, from_torch(given[i].grad))


# ---------------------------------------------------------------- classes
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(5, 4), (4,), (2, 4, 3), (2, 4, 3, 2)])
def test_cross_entropy(rng, shape, smoothing, weighted, reduction):
    axis = 1 if len(shape) > 1 else 0
    logits = draw(rng, shape)
    target = rng.integers(0, 4, shape[:axis] + shape[axis + 1:])
    if target.ndim:
        target.flat[0] = -100
    weight = draw(rng, (4,), low=0.5, high=2) if weighted else None
    check("cross_entropy", logits, np.asarray(target), weight, reduction=reduction,
          label_smoothing=smoothing)


@pytest.mark.parametrize("dtype", ["float64", *HALVES])
def test_cross_entropy_in_types(rng, dtype):
    logits, target = draw(rng, (6, 5), dtype, -20, 20), rng.integers(0, 5, 6)
    check("cross_entropy", logits, target)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_with_probabilities(rng, smoothing, weighted, reduction):
    logits, target = draw(rng, (3, 4, 2)), draw(rng, (3, 4, 2), low=0, high=1)
    weight = draw(rng, (4,), low=0.5, high=2) if weighted else None
    check("cross_entropy", logits, target, weight, reduction=reduction, label_smoothing=smoothing)


def test_classes_on_the_last_axis(rng):
    logits, target = draw(rng, (2, 3, 5)), rng.integers(0, 5, (2, 3))
    moved = np.ascontiguousarray(np.moveaxis(logits, -1, 1))
    close(evaluate(op("cross_entropy"), logits, target, axis=-1),
          from_torch(functional.cross_entropy(to_torch(moved), to_torch(target))))


def test_ignored_targets(rng):
    logits, target = draw(rng, (4, 3)), np.array([0, 2, 7, 1])
    check("cross_entropy", logits, target, ignore_index=7)
    assert np.isnan(evaluate(op("cross_entropy"), logits, np.full(4, -100)))


def test_impossible_classes(rng):
    logits, target = draw(rng, (3, 4)), np.array([0, 1, 2])
    logits[:, 3] = -np.inf
    check("cross_entropy", logits, target)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_nll_loss(rng, weighted, reduction):
    x, target = draw(rng, (2, 4, 3)), rng.integers(0, 4, (2, 3))
    target[0, 1] = -100
    weight = draw(rng, (4,), low=0.5, high=2) if weighted else None
    check("nll_loss", x, target, weight, reduction=reduction)


def test_cross_entropy_with_symbolic_sizes(rng):
    n, c = dims("n c")
    logits, target = draw(rng, (5, 4)), rng.integers(0, 4, 5)
    for attrs in ({}, {"label_smoothing": 0.1}):
        close(evaluate(op("cross_entropy"), logits, target, shapes=[(n, c), (n,)], **attrs),
              evaluate(op("cross_entropy"), logits, target, **attrs))


def test_class_losses_refuse():
    logits, numbers = TensorType((5, 4), float32), TensorType((5,), as_dtype("int64"))
    with pytest.raises(ShapeError, match=r"target of shape \[5\]"):
        infer(op("cross_entropy"), logits, TensorType((4,), as_dtype("int64")))
    with pytest.raises(ShapeError, match="probabilities of that shape"):
        infer(op("cross_entropy"), logits, TensorType((5,), float32))
    with pytest.raises(DTypeError, match="integer type"):
        infer(op("nll_loss"), logits, TensorType((5,), float32))
    with pytest.raises(ShapeError, match="each of the 4 classes"):
        infer(op("cross_entropy"), logits, numbers, TensorType((5,), float32))
    with pytest.raises(ArgumentError, match="no reduction 'avg'"):
        infer(op("cross_entropy"), logits, numbers, reduction="avg")


# ---------------------------------------------------------------- distances
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", ["float32", *HALVES])
@pytest.mark.parametrize(("name", "attrs"), [
    ("mse_loss", {}), ("l1_loss", {}), ("smooth_l1_loss", {}), ("smooth_l1_loss", {"beta": 0.3}),
    ("smooth_l1_loss", {"beta": 0.0}), ("huber_loss", {}), ("huber_loss", {"delta": 0.7}),
])
def test_distances(rng, name, attrs, dtype, reduction):
    x, y = draw(rng, (3, 5), dtype), draw(rng, (3, 5), dtype)
    x[0, 0] = y[0, 0]
    check(name, x, y, reduction=reduction, **attrs)


def test_mean_of_nothing_is_nan():
    nothing = np.zeros((0, 3), np.float32)
    assert np.isnan(evaluate(op("mse_loss"), nothing, nothing))


# ---------------------------------------------------------------- probabilities
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_binary_cross_entropy(rng, weighted, reduction):
    x, y = draw(rng, (3, 5), low=0, high=1), draw(rng, (3, 5), low=0, high=1)
    x[0, :2], y[0, :2], x[1, :2], y[1, :2] = 0, [0, 1], 1, [0, 1]
    weight = draw(rng, (5,), low=0.5, high=2) if weighted else None
    check("binary_cross_entropy", x, y, weight, reduction=reduction)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32", *HALVES])
def test_binary_cross_entropy_with_logits(rng, dtype, weighted, reduction):
    x, y = draw(rng, (3, 5), dtype, -10, 10), draw(rng, (3, 5), dtype, 0, 1)
    x[0, :4], y[0, :4] = [80, -80, 80, 0], [1, 0, 0, 1]
    weight, positive = ((draw(rng, (5,), dtype, 0.5, 2) for _ in range(2)) if weighted
                        else (None, None))
    check("binary_cross_entropy_with_logits", x, y, weight, positive, reduction=reduction)


def test_sure_and_right_costs_little():
    x, y = np.array([40.0, -40.0], np.float32), np.array([1.0, 0.0], np.float32)
    close(evaluate(op("binary_cross_entropy_with_logits"), x, y, reduction="none"),
          np.full(2, np.exp(-40.0)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("reduction", [*REDUCTIONS, "batchmean"])
@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.filterwarnings("ignore:reduction")  # torch may change what "mean" means
def test_kl_div(rng, log_target, reduction):
    x, y = draw(rng, (3, 5), low=-3, high=0), draw(rng, (3, 5), low=0, high=1)
    y[1, 2] = 0
    check("kl_div", x, y, log_target=log_target, reduction=reduction)


@pytest.mark.parametrize("name", ["binary_cross_entropy", "kl_div",
                                  "binary_cross_entropy_with_logits"])
def test_gradients_of_targets(rng, name):
    check_gradient(op(name), draw(rng, (2, 3), low=0.1, high=0.9),
                   draw(rng, (2, 3), low=0.1, high=0.9), wrt=(0, 1))
