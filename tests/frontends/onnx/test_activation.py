"""Converters of activations and of softmax, old and new, against ONNX's evaluator and numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from one_node import check
from several_nodes import Case, check_all

pytestmark = pytest.mark.onnx

CASES: list[Case] = [
    ("Relu", [0], {}), ("HardSwish", [0], {}), ("Mish", [0], {}), ("Softsign", [0], {}),
    ("Softplus", [0], {}), ("LeakyRelu", [0], {}), ("LeakyRelu", [0], {"alpha": 0.3}),
    ("Elu", [0], {}), ("Elu", [0], {"alpha": 2.0}), ("Selu", [0], {}),
    ("Selu", [0], {"alpha": 2.0, "gamma": 3.0}), ("Celu", [0], {}), ("Celu", [0], {"alpha": 2.0}),
    ("HardSigmoid", [0], {}), ("HardSigmoid", [0], {"alpha": 0.5, "beta": 0.6}),
    ("ThresholdedRelu", [0], {}), ("ThresholdedRelu", [0], {"alpha": -0.5}),
    ("Shrink", [0], {}), ("Shrink", [0], {"lambd": 1.0, "bias": 0.5}), ("Gelu", [0], {}),
    ("Gelu", [0], {"approximate": "tanh"}), ("Swish", [0], {}), ("Swish", [0], {"alpha": 1.7}),
    ("PRelu", [0, 1], {}), ("PRelu", [0, 2], {}),
]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_formulas(rng: np.random.Generator, dtype: str) -> None:
    x = (3 * rng.standard_normal((4, 5, 6))).astype(dtype)
    slopes = [rng.random((5, 1)).astype(dtype), rng.random(6).astype(dtype)]
    rtol = {"float32": 1e-5, "float64": 1e-6, "float16": 4e-3}[dtype]
    check_all(CASES, [x, *slopes], opset=24, rtol=rtol, atol=rtol)


def test_softplus_far_out() -> None:
    x = np.array([-200, -20, 0, 20, 30, 200], np.float32)
    check("Softplus", [x], expected=[np.logaddexp(0, x.astype(float)).astype(np.float32)])


def test_swiglu(rng: np.random.Generator) -> None:
    gate, value = rng.standard_normal((2, 3, 8)).astype(np.float32)
    expected = gate / (1 + np.exp(-2.0 * gate)) * value
    check("SwiGLU", [gate, value], opset=28, alpha=2.0, expected=[expected])


# ---------------------------------------------------------------- softmax and its kin
def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def hardmax(x: np.ndarray) -> np.ndarray:
    return np.eye(x.shape[-1], dtype=x.dtype)[x.argmax(-1)]


ROWS = {"Softmax": softmax, "LogSoftmax": lambda x: np.log(softmax(x)), "Hardmax": hardmax}


@pytest.mark.parametrize("operator", ROWS)
@pytest.mark.parametrize(("opset", "axis"), [(7, None), (11, 2), (11, 0), (11, -2)])
def test_old_versions_take_all_axes_from_one_on(rng: np.random.Generator, operator: str,
                                               opset: int, axis: int | None) -> None:
    x = rng.standard_normal((2, 3, 4)).astype(np.float32)
    x[0, 0, 1] = x[0, 2, 3] = 9  # the first of equals wins
    first = (1 if axis is None else axis) % 3
    rows = x.reshape(int(np.prod(x.shape[:first])), -1)
    attributes: dict[str, Any] = {} if axis is None else {"axis": axis}
    check(operator, [x], opset=opset, expected=[ROWS[operator](rows).reshape(x.shape)],
          **attributes)


@pytest.mark.parametrize("operator", ROWS)
@pytest.mark.parametrize("axis", [None, 0, 1, -2])
def test_new_versions_take_one_axis(rng: np.random.Generator, operator: str,
                                    axis: int | None) -> None:
    x = 50 * rng.standard_normal((3, 4, 5))
    at = -1 if axis is None else axis
    expected = np.moveaxis(ROWS[operator](np.moveaxis(x, at, -1)), -1, at)
    attributes: dict[str, Any] = {} if axis is None else {"axis": axis}
    check(operator, [x], opset=13, expected=[expected], rtol=1e-6, **attributes)
