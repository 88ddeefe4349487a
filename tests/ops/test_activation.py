"""Activations and formulas against torch in float64: values, tails, corners and gradients."""

from __future__ import annotations

import math

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

from terrazzo.dtypes import as_dtype, float32
from terrazzo.errors import ArgumentError, ShapeError
from terrazzo.graph.ir import TensorType

torch = pytest.importorskip("torch")
F = torch.nn.functional
pytestmark = pytest.mark.torch

# Each operator with its attributes and torch's spelling of it.
UNARY = [
    ("relu", {}, F.relu), ("relu6", {}, F.relu6), ("hardtanh", {}, F.hardtanh),
    ("hardtanh", {"min": -0.5, "max": 2.0}, lambda x: F.hardtanh(x, -0.5, 2.0)),
    ("leaky_relu", {}, F.leaky_relu), ("leaky_relu", {"negative_slope": 0.3},
                                       lambda x: F.leaky_relu(x, 0.3)),
    ("elu", {}, F.elu), ("elu", {"alpha": 0.7}, lambda x: F.elu(x, 0.7)),
    ("celu", {}, F.celu), ("celu", {"alpha": 0.7}, lambda x: F.celu(x, 0.7)),
    ("selu", {}, F.selu), ("gelu", {}, F.gelu),
    ("gelu", {"approximate": "tanh"}, lambda x: F.gelu(x, approximate="tanh")),
    ("quick_gelu", {}, lambda x: x * torch.sigmoid(1.702 * x)),
    ("silu", {}, F.silu), ("mish", {}, F.mish), ("softplus", {}, F.softplus),
    ("softplus", {"beta": 2.0, "threshold": 5.0}, lambda x: F.softplus(x, 2.0, 5.0)),
    ("softsign", {}, F.softsign), ("hardsigmoid", {}, F.hardsigmoid),
    ("hardsigmoid", {"alpha": 0.2}, lambda x: torch.clamp(0.2 * x + 0.5, 0, 1)),
    ("hardswish", {}, F.hardswish), ("logsigmoid", {}, F.logsigmoid),
    ("tanhshrink", {}, F.tanhshrink), ("softshrink", {}, F.softshrink),
    ("softshrink", {"lambd": 1.0}, lambda x: F.softshrink(x, 1.0)),
    ("hardshrink", {}, F.hardshrink),
    ("threshold", {"threshold": 0.5, "value": -3.0}, lambda x: F.threshold(x, 0.5, -3.0)),
    ("square", {}, torch.square), ("reciprocal", {}, torch.reciprocal), ("sinc", {}, torch.sinc),
    ("clip", {}, lambda x: x),
]
TORCH_CONSTANTS = 1e-7  # torch keeps alpha = 0.7 and 1 / 6 in float32, also for float64 tensors
names = [f"{name}{i}" for i, (name, _, _) in enumerate(UNARY)]
table = pytest.mark.parametrize(("name", "attrs", "rival"), UNARY, ids=names)


def in_float64(function, *arrays):
    return from_torch(function(*(to_torch(a.astype(np.float64)) for a in arrays)))


def gradient(function, *arrays, wrt=0, **attrs):
    from terrazzo.graph import derivatives

    def total(*xs):
        return op("sum")(function(*xs, **attrs))

    return evaluate(lambda *xs: derivatives.grad(total, wrt)(*xs), *arrays)


def torch_gradient(function, x):
    t = to_torch(x).requires_grad_()
    function(t).sum().backward()
    return from_torch(t.grad)


@table
@pytest.mark.parametrize("dtype", ["float64", "float32", *HALVES])
def test_values(rng, name, attrs, rival, dtype):
    x = draw(rng, (5, 7), dtype, -8, 8)
    got = evaluate(op(name), x, **attrs)
    assert got.dtype == x.dtype
    # Differences near 0 (in torch's gelu too) have an absolute error, all else a relative one.
    absolute = name in ("tanhshrink", "sinc", "gelu")
    close(got, in_float64(rival, x), atol=None if absolute else as_dtype(dtype).eps / 4)


@table
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,)])
def test_odd_shapes(rng, name, attrs, rival, shape):
    x = draw(rng, shape)
    close(evaluate(op(name), x, **attrs), in_float64(rival, x))


@table
def test_tails(name, attrs, rival):
    """Large arguments give what the formula tends to, never an overflow on the way."""
    x = np.array([-1e4, -700, -104, -88, -40, -20, 20, 40, 88, 104, 700, 1e4], np.float32)
    got = evaluate(op(name), x, **attrs)
    if name in ("tanhshrink", "sinc"):
        close(got, in_float64(rival, x))
    elif attrs.get("approximate") == "tanh":
        close(got, in_float64(rival, x), atol=1e-30)
    else:
        close(got, in_float64(rival, x), rtol=5e-6, atol=1e-37)  # relative, down to float32's end
    slopes = gradient(op(name), x, **attrs)
    assert np.isfinite(slopes).all()
    close(slopes, torch_gradient(rival, x.astype(np.float64)))


@table
def test_nan_stays(name, attrs, rival):
    assert np.isnan(evaluate(op(name), np.array([np.nan], np.float32), **attrs)).all()


@table
def test_slopes(rng, name, attrs, rival):
    x = draw(rng, (4, 5), "float64", -4, 4)
    close(gradient(op(name), x, **attrs), torch_gradient(rival, x), rtol=TORCH_CONSTANTS)
    check_gradient(op(name), x, rtol=1e-6, **attrs)


@table
def test_slopes_at_corners(name, attrs, rival):
    if name == "reciprocal":
        pytest.skip("has a pole at 0")
    x = np.array([0.0, -0.0, 6.0, 3.0, -3.0, 1.0, -1.0, 0.5, -0.5, 2.0])
    if name in ("hardsigmoid", "hardswish"):
        x = x[np.abs(x) != 3]  # x / 6 + 1 / 2 meets its limits up to rounding only
    close(gradient(op(name), x, **attrs), torch_gradient(rival, x), rtol=TORCH_CONSTANTS)


@table
def test_symbolic_sizes(rng, name, attrs, rival):
    x = draw(rng, (3, 5))
    close(evaluate(op(name), x, shapes=symbolic_shapes([x])[0], **attrs),
          evaluate(op(name), x, **attrs))


@pytest.mark.parametrize("name", ["relu", "relu6", "square"])
def test_integers_stay(rng, name):
    x = draw(rng, (7,), "int8", -8, 8)
    got = evaluate(op(name), x)
    assert got.dtype == np.int8
    close(got, {"relu": np.maximum(x, 0), "relu6": np.clip(x, 0, 6), "square": x * x}[name])


@pytest.mark.parametrize("name", ["gelu", "silu", "softplus", "reciprocal"])
def test_integers_become_floats(name):
    assert infer(op(name), TensorType((3,), as_dtype("int32"))).dtype is float32


def test_relu_keeps_its_sign_of_life():
    x = np.array([np.nan, np.inf, -np.inf], np.float32)
    close(evaluate(op("relu"), x), [np.nan, np.inf, 0])


def test_gelu_in_the_negative_tail():
    x = np.array([-13.0, -10.0, -8.0, -6.0, -4.0], np.float32)
    wanted = [0.5 * v * math.erfc(-v / math.sqrt(2)) for v in map(float, x)]
    # 1 + erf cancels: accurate to the rounding of x / 2, as in other frameworks.
    close(evaluate(op("gelu"), x), wanted, rtol=0, atol=5e-7)


def test_gelu_refuses():
    with pytest.raises(ArgumentError, match="no approximation 'erf'"):
        infer(op("gelu"), TensorType((3,), float32), approximate="erf")


# ---------------------------------------------------------------- clip
@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (None, 0.5), (0, None), (None, None),
                                           (1.0, -1.0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_clip(rng, dtype, low, high):
    x = draw(rng, (9,), dtype)
    x[0], x[1] = np.nan, -1
    got = evaluate(lambda v: op("clip")(v, low, high), x)
    assert got.dtype == x.dtype
    if low is None and high is None:
        close(got, x)
        return
    close(got, in_float64(lambda t: torch.clamp(t, low, high), x))
    close(gradient(lambda v: op("clip")(v, low, high), x[1:]),
          torch_gradient(lambda t: torch.clamp(t, low, high), x[1:]))


def test_clip_of_integers_and_by_tensors(rng):
    x = draw(rng, (4, 5), "int8")
    close(evaluate(lambda v: op("clip")(v, min=-1, max=2), x), np.clip(x, -1, 2))
    x, low, high = draw(rng, (4, 5)), draw(rng, (5,), low=-2, high=0), draw(rng, (4, 1), low=0)
    close(evaluate(op("clip"), x, low, high), np.clip(x, low, high))
    check_gradient(op("clip"), x, low, high, wrt=(0, 1, 2))


# ---------------------------------------------------------------- several tensors
@pytest.mark.parametrize("name", ["glu", "swiglu"])
@pytest.mark.parametrize(("shape", "axis"), [((3, 6), -1), ((4, 3), 0), ((2, 6, 3), 1),
                                             ((0, 2), 1)])
def test_gates(rng, name, shape, axis):
    x = draw(rng, shape)
    a, b = np.split(x.astype(np.float64), 2, axis)
    sigmoid = 1 / (1 + np.exp(-(b if name == "glu" else a)))
    close(evaluate(op(name), x, axis=axis), a * b * sigmoid if name == "swiglu" else a * sigmoid)
    check_gradient(op(name), x, axis=axis)


def test_gates_need_halves():
    with pytest.raises(ShapeError, match="into halves"):
        infer(op("glu"), TensorType((3, 5), float32))


@pytest.mark.parametrize(("shape", "weights"), [((2, 3, 4), 3), ((2, 3), 3), ((5,), 1),
                                                ((2, 3), 1)])
def test_prelu(rng, shape, weights):
    x, w = draw(rng, shape), draw(rng, (weights,))
    close(evaluate(op("prelu"), x, w), in_float64(F.prelu, x, w))
    check_gradient(op("prelu"), x, w, wrt=(0, 1))


def test_prelu_with_any_weight_that_broadcasts(rng):
    x, w = draw(rng, (2, 3, 4)), draw(rng, (3, 1))
    close(evaluate(op("prelu"), x, w), np.where(x > 0, x, w * x))
    with pytest.raises(ShapeError, match="each of its 3 channels"):
        infer(op("prelu"), TensorType((2, 3, 4), float32), TensorType((4,), float32))


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy warns about nan
def test_logaddexp(rng):
    x = np.array([0, 1000, -1000, np.inf, -np.inf, -np.inf, np.inf, np.nan, 3], np.float32)
    y = np.array([0, 999, -1001, np.inf, -np.inf, 2.0, -np.inf, 1.0, -np.inf], np.float32)
    close(evaluate(op("logaddexp"), x, y), np.logaddexp(x.astype(np.float64), y))
    slopes = gradient(op("logaddexp"), x[:7], y[:7], wrt=(0, 1))
    assert all(np.isfinite(s).all() for s in slopes)
    close(slopes[0] + slopes[1], np.ones(7))
    check_gradient(op("logaddexp"), draw(rng, (3, 4)), draw(rng, (4,)), wrt=(0, 1))


def test_xlogy(rng):
    x = np.array([0, 0, 0, 1, 2, 0, np.nan], np.float32)
    y = np.array([0, 2, -1, 3, 0, np.nan, 1], np.float32)
    close(evaluate(op("xlogy"), x, y), in_float64(torch.xlogy, x, y))
    close(gradient(op("xlogy"), x[:4], y[:4], wrt=(0, 1)),
          [[0, math.log(2), 0, math.log(3)], [0, 0, 0, 1 / 3]])
    check_gradient(op("xlogy"), draw(rng, (3, 4)), draw(rng, (4,), low=0.5), wrt=(0, 1))


@pytest.mark.parametrize("dtype", ["float32", *HALVES])
def test_lerp(rng, dtype):
    x, y, w = (draw(rng, (4, 5), dtype) for _ in range(3))
    w[0], w[1] = 0, 1
    got = evaluate(op("lerp"), x, y, w)
    close(got, in_float64(torch.lerp, x, y, w), atol=8 * as_dtype(dtype).eps)
    assert (got[0] == x[0]).all() and (got[1] == y[1]).all()
    check_gradient(op("lerp"), x[:2], y[:2], w[2:4], wrt=(0, 1, 2))


def test_lerp_by_a_number(rng):
    x, y = draw(rng, (4,), "float16"), draw(rng, (4,), "float16")
    assert evaluate(lambda a, b: op("lerp")(a, b, 0.25), x, y).dtype == np.float16


def test_addcmul(rng):
    x, y, z = draw(rng, (4, 1)), draw(rng, (5,)), draw(rng, (4, 5))
    for value in (1, -0.5):
        close(evaluate(op("addcmul"), x, y, z, value=value), x + value * y * z)
    check_gradient(op("addcmul"), x, y, z, wrt=(0, 1, 2), value=0.5)


@pytest.mark.parametrize("attrs", [{}, {"nan": 7.0, "posinf": 1.0, "neginf": -2.0}])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_nan_to_num(dtype, attrs):
    x = np.array([np.nan, np.inf, -np.inf, 1.5], dtype)
    close(evaluate(op("nan_to_num"), x, **attrs), np.nan_to_num(x, **attrs))
    close(gradient(op("nan_to_num"), x, **attrs), [0, 0, 0, 1])
    ints = np.array([1, 2], np.int8)
    close(evaluate(op("nan_to_num"), ints), ints)
