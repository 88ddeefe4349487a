"""Normalisations against torch in every float type, with gradients by finite differences."""

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
    symbolic_shapes,
    to_torch,
)

from terrazzo.base.shapes import dims
from terrazzo.dtypes import as_dtype, float32
from terrazzo.errors import RankError, ShapeError
from terrazzo.graph.ir import TensorType

FLOATS = ["float64", "float32", *HALVES]
torch = pytest.importorskip("torch")
functional = torch.nn.functional
pytestmark = pytest.mark.torch


# ---------------------------------------------------------------- softmax
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax(rng, name, dtype, axis):
    x = draw(rng, (3, 7, 5), dtype, -30, 30)
    x[0, 0], x[1, 2, 3], x[2, 1, 1] = -np.inf, np.inf, -np.inf
    x[2, 2, 0] = np.nan
    expected = getattr(torch, name)(to_torch(x), axis)
    close(evaluate(op(name), x, axis=axis), from_torch(expected))


@pytest.mark.parametrize("shape", [(), (1,), (3, 0), (0, 3), (4, 1)])
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "safe_softmax"])
def test_softmax_of_odd_shapes(rng, name, shape):
    x = draw(rng, shape)
    axis = -1 if shape else ()
    expected = getattr(torch, name.removeprefix("safe_"))(to_torch(x), -1)
    if shape:
        close(evaluate(op(name), x, axis=axis), from_torch(expected))
    else:
        close(evaluate(op(name), x, axis=axis), x * 0 + (name != "log_softmax"))


def test_softmax_over_two_axes(rng):
    x = draw(rng, (2, 3, 4))
    flat = from_torch(torch.softmax(to_torch(x).reshape(2, 12), 1)).reshape(2, 3, 4)
    close(evaluate(op("softmax"), x, axis=(1, 2)), flat)


def test_softmax_of_integers_is_a_float():
    assert infer(op("softmax"), TensorType((3,), as_dtype("int8"))).dtype is float32


def test_safe_softmax_of_nothing_but_minus_infinity(rng):
    x = draw(rng, (3, 4))
    expected = from_torch(torch.softmax(to_torch(x), 1))
    x[1], expected[1] = -np.inf, 0
    close(evaluate(op("safe_softmax"), x), expected)


# ---------------------------------------------------------------- layer and rms norms
@pytest.mark.parametrize("affine", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("shape", "count"), [((3, 8), 1), ((7,), 1), ((2, 3, 5), 2), ((2, 1), 1),
                                              ((0, 4), 1)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_layer_norm(rng, dtype, shape, count, affine):
    x, over = draw(rng, shape, dtype), shape[-count:]
    weight, bias = (draw(rng, over, dtype) if given else None for given in affine)
    axis = -1 if count == 1 else tuple(range(-count, 0))
    expected = functional.layer_norm(*map(to_torch, (x, over, weight, bias)))
    close(evaluate(op("layer_norm"), x, weight, bias, axis=axis), from_torch(expected))


def test_layer_norm_far_from_zero(rng):
    x = draw(rng, (4, 64), low=1e4, high=1e4 + 1)  # one-pass variances are negative here
    wide = x.astype(np.float64)
    expected = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5)
    close(evaluate(op("layer_norm"), x), expected, rtol=5e-3)  # eps * 1e4 is the input's own error


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_rms_norm(rng, dtype, affine):
    x = draw(rng, (3, 5, 8), dtype)
    weight = draw(rng, (8,), dtype) if affine else None
    expected = functional.rms_norm(to_torch(x), (8,), to_torch(weight), eps=1e-6)
    close(evaluate(op("rms_norm"), x, weight), from_torch(expected))


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_norms_refuse(name):
    x = TensorType((2, 3, 4), float32)
    with pytest.raises(ShapeError, match="last axes"):
        infer(op(name), x, axis=1)
    with pytest.raises(ShapeError, match=r"over \[4\] got a weight"):
        infer(op(name), x, TensorType((3,), float32))


def test_float32_weights_leave_half_results(rng):
    x, weight = draw(rng, (2, 4), "bfloat16"), draw(rng, (4,), "float32")
    assert evaluate(op("layer_norm"), x, weight, weight).dtype == x.dtype


# ---------------------------------------------------------------- norms of channels
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize(("shape", "groups"), [((2, 6, 4, 3), 3), ((2, 4), 2), ((1, 4, 5), 1),
                                               ((2, 4, 3), 4)])
@pytest.mark.parametrize("dtype", ["float32", *HALVES])
def test_group_norm(rng, dtype, shape, groups, affine):
    x = draw(rng, shape, dtype)
    weight, bias = ((draw(rng, shape[1:2], dtype) for _ in range(2)) if affine else (None, None))
    expected = functional.group_norm(to_torch(x), groups, to_torch(weight), to_torch(bias))
    close(evaluate(op("group_norm"), x, weight, bias, groups=groups), from_torch(expected))


def test_group_norm_refuses():
    x = TensorType((2, 6, 4), float32)
    with pytest.raises(ShapeError, match="6 channels into 4 groups"):
        infer(op("group_norm"), x, groups=4)
    with pytest.raises(RankError, match="channels"):
        infer(op("group_norm"), TensorType((6,), float32), groups=2)
    with pytest.raises(ShapeError, match="each of its 6 channels"):
        infer(op("group_norm"), x, TensorType((3,), float32), groups=2)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("dtype", ["float32", *HALVES])
def test_instance_norm(rng, dtype, affine):
    x = draw(rng, (2, 3, 4, 5), dtype)
    weight, bias = ((draw(rng, (3,), dtype) for _ in range(2)) if affine else (None, None))
    expected = functional.instance_norm(to_torch(x), weight=to_torch(weight), bias=to_torch(bias))
    close(evaluate(op("instance_norm"), x, weight, bias), from_torch(expected))


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (4, 3), (1, 3, 7)])
@pytest.mark.parametrize("dtype", ["float32", *HALVES])
def test_batch_norm(rng, dtype, shape, affine):
    x, mean, var = draw(rng, shape, dtype), draw(rng, (3,), dtype), draw(rng, (3,), dtype, 0.5, 2)
    weight, bias = ((draw(rng, (3,), dtype) for _ in range(2)) if affine else (None, None))
    expected = from_torch(functional.batch_norm(*map(to_torch, (x, mean, var, weight, bias))))
    close(evaluate(op("batch_norm"), x, mean, var, weight, bias), expected)
    last = np.ascontiguousarray(np.moveaxis(x, 1, -1))
    close(evaluate(op("batch_norm"), last, mean, var, weight, bias, axis=-1),
          np.moveaxis(expected, 1, -1))


@pytest.mark.parametrize("dtype", ["float32", *HALVES])
def test_batch_norm_train(rng, dtype):
    x, weight, bias = draw(rng, (4, 3, 5), dtype), draw(rng, (3,), dtype), draw(rng, (3,), dtype)
    y, mean, var = evaluate(op("batch_norm_train"), x, weight, bias)
    expected = functional.batch_norm(to_torch(x), None, None, to_torch(weight), to_torch(bias),
                                     training=True)
    close(y, from_torch(expected))
    assert mean.dtype == var.dtype == np.float32
    close(mean, x.astype(np.float64).mean((0, 2)))
    close(var, x.astype(np.float64).var((0, 2)))


# ---------------------------------------------------------------- symbolic sizes, gradients
SYMBOLIC = {
    "softmax": ((3, 5, 7), {}), "log_softmax": ((3, 5, 7), {"axis": 1}),
    "safe_softmax": ((3, 5, 7), {}), "layer_norm": ((3, 5, 7), {"axis": (-2, -1)}),
    "rms_norm": ((3, 5, 7), {}), "instance_norm": ((3, 5, 7), {}),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbolic_sizes(rng, name):
    shape, attrs = SYMBOLIC[name]
    x = draw(rng, shape)
    got = evaluate(op(name), x, shapes=symbolic_shapes([x])[0], **attrs)
    close(got, evaluate(op(name), x, **attrs))


def test_group_norm_with_a_symbolic_batch(rng):
    x = draw(rng, (3, 4, 5))
    n, m = dims("n m")
    close(evaluate(op("group_norm"), x, groups=2, shapes=[(n, 4, m)]),
          evaluate(op("group_norm"), x, groups=2))


@pytest.mark.parametrize("name", SYMBOLIC)
def test_gradients(rng, name):
    check_gradient(op(name), draw(rng, (2, 3, 4)), **SYMBOLIC[name][1])


@pytest.mark.parametrize(("name", "shapes", "attrs"), [
    ("layer_norm", [(2, 3, 4), (4,), (4,)], {}),
    ("layer_norm", [(2, 3, 4), (3, 4), (3, 4)], {"axis": (1, 2)}),
    ("rms_norm", [(2, 3, 4), (4,)], {}),
    ("group_norm", [(2, 4, 3), (4,), (4,)], {"groups": 2}),
    ("instance_norm", [(2, 3, 4), (3,), (3,)], {}),
    ("batch_norm", [(2, 3, 2), (3,), (3,), (3,), (3,)], {}),
])
def test_gradients_of_parameters(rng, name, shapes, attrs):
    arrays = [draw(rng, s, low=0.5, high=2) for s in shapes]
    check_gradient(op(name), *arrays, wrt=tuple(range(len(arrays))), **attrs)


def test_gradient_of_batch_norm_train(rng):
    arrays = draw(rng, (3, 2, 2)), draw(rng, (2,)), draw(rng, (2,))
    check_gradient(lambda *v: op("batch_norm_train")(*v)[0], *arrays, wrt=(0, 1, 2))


def test_weights_gradient_is_summed_wide(rng):
    """4096 products of 1 would stall at 2048 if they were added up in float16."""
    from terrazzo.graph import derivatives

    x, weight = np.tile(np.array([1, -1], np.float16), (4096, 1)), np.ones(2, np.float16)
    got = evaluate(lambda a, w: derivatives.grad(
        lambda v: op("sum")(op("layer_norm")(a, v), dtype="float32"))(w), x, weight)
    close(got, [4096, -4096])


@pytest.mark.parametrize("name", ["softmax", "layer_norm"])
def test_yardstick_is_in_float64(rng, name):
    x = draw(rng, (3, 8), "float16")
    wide = to_torch(x.astype(np.float64))
    expected = torch.softmax(wide, 1) if name == "softmax" else functional.layer_norm(wide, (8,))
    close(evaluate(op(name), x, wide=True), from_torch(expected))
