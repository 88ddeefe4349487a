"""GELU written out is found again, in every order of its factors."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import terrazzo as tz
from terrazzo.graph.passes.gelu import GELU

sys.path.insert(0, str(Path(__file__).parent))
from patterns import operators, rewritten

ROOT, SLOPE = math.sqrt(2), math.sqrt(2 / math.pi)


def gate(x: Any) -> Any:
    return tz.erf(x / ROOT) + 1.0


def cubic(x: Any) -> Any:
    return tz.tanh(SLOPE * (x + 0.044715 * tz.power(x, 3.0)))


FORMS: dict[str, list[Callable[[Any], Any]]] = {
    "gelu by the error function": [
        lambda x: (x * gate(x)) * 0.5,  # TorchScript
        lambda x: (x * 0.5) * (tz.erf(x * 0.70710678) + 1.0),  # dynamo, decomposed
        lambda x: 0.5 * (x * (1.0 + tz.erf(x * math.sqrt(0.5)))),
        lambda x: x * (0.5 * gate(x)),
        lambda x: x * gate(x) / 2.0,
        lambda x: x * (0.5 + 0.5 * tz.erf(x / ROOT)),
        lambda x: 0.5 * x + 0.5 * x * tz.erf(x / ROOT),
    ],
    "gelu by tanh": [
        lambda x: 0.5 * x * (1.0 + cubic(x)),
        lambda x: 0.5 * (x * (1.0 + tz.tanh(SLOPE * (x + 0.044715 * (x * (x * x)))))),
        lambda x: x * 0.5 * (tz.tanh(x * SLOPE * (1.0 + 0.044715 * x * x)) + 1.0),
        lambda x: x * (0.5 + 0.5 * cubic(x)),
    ],
    "gelu by a sigmoid": [
        lambda x: x * tz.sigmoid(x * 1.702),
        lambda x: tz.sigmoid(1.702 * x) * x,
    ],
}
CASES = [(name, i) for name, forms in FORMS.items() for i in range(len(forms))]
RESULTS = {"gelu by the error function": ("gelu", "none"), "gelu by tanh": ("gelu", "tanh"),
           "gelu by a sigmoid": ("quick_gelu", None)}


def samples(dtype: Any = np.float32) -> np.ndarray:
    return np.concatenate([np.linspace(-9, 9, 401), [0.0, -0.0, 30.0, -30.0]]).astype(dtype)


@pytest.mark.parametrize(("name", "form"), CASES)
def test_forms(name: str, form: int) -> None:
    after, fired = rewritten(GELU, FORMS[name][form], samples())
    assert fired == {name}
    assert operators(after) == [RESULTS[name][0]]
    assert after.nodes[-1].attrs.get("approximate") == RESULTS[name][1]


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", FORMS)
def test_other_types(name: str, dtype: Any) -> None:
    after, fired = rewritten(GELU, FORMS[name][0], samples(dtype))
    assert fired == {name}
    assert operators(after) == [RESULTS[name][0]]


def test_the_input_may_be_a_product_itself() -> None:
    def form(x: Any) -> Any:
        y = 2.0 * x
        return y * gate(y) * 0.5

    after, fired = rewritten(GELU, form, samples())
    assert fired == {"gelu by the error function"}
    assert operators(after) == ["multiply", "gelu"]


@pytest.mark.parametrize("form", [
    lambda x: x * gate(x),  # twice as large
    lambda x: 0.5 * x * (tz.erf(x / 1.4) + 1.0),
    lambda x: 0.5 * x * (tz.erf(x / ROOT) - 1.0),
    lambda x: 0.5 * (x + 1.0) * gate(x),
    lambda x: 0.5 * x * x * gate(x),
    lambda x: 0.5 * x * (1.0 + tz.tanh(SLOPE * (x + 0.05 * tz.power(x, 3.0)))),
    lambda x: 0.5 * x * (1.0 + tz.tanh(SLOPE * (x + 0.044715 * tz.power(x, 2.0)))),
    lambda x: x * tz.sigmoid(x),
    lambda x: x * tz.sigmoid(1.7 * x),
    lambda x: x * tz.sigmoid(1.702 * tz.abs(x)),
])
def test_what_is_something_else_stays(form: Callable[[Any], Any]) -> None:
    assert rewritten(GELU, form, samples())[1] == set()


def test_two_inputs_are_no_gelu(rng: np.random.Generator) -> None:
    x, y = rng.standard_normal((2, 9), np.float32)
    assert rewritten(GELU, lambda x, y: 0.5 * y * gate(x), x, y)[1] == set()


def test_only_from_the_extended_level_on() -> None:
    assert not len(GELU.up_to("basic")) and len(GELU.up_to("extended")) == len(GELU)
