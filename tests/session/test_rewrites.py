"""Every model at every level of rewrites: the same results; and which rewrites fire where."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from terrazzo.frontends.onnx.session import Session
from terrazzo.frontends.onnx.session.report import report
from terrazzo.graph.rewrite import LEVELS

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "frontends" / "onnx")]
from models import model, node  # noqa: E402
from rewrite_models import BY_HAND, EXPORTED, exported  # noqa: E402

# Units in the last place of a result's largest number: sums of some tens of terms, in another
# order, of weights that were rounded once more.
ROUNDINGS = 16


def off_by(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference, in roundings."""
    assert got.dtype == want.dtype == np.float32 and got.shape == want.shape
    return float(np.abs(got - want).max() / (np.finfo(np.float32).eps * np.abs(want).max()))


@cache
def by_hand(name: str) -> tuple[onnx.ModelProto, dict[str, np.ndarray], np.ndarray]:
    proto = BY_HAND[name]()
    rng = np.random.default_rng(5)
    feeds = {i.name: rng.standard_normal([d.dim_value for d in i.type.tensor_type.shape.dim],
                                         np.float32) for i in proto.graph.input}
    return proto, feeds, ReferenceEvaluator(proto).run(None, feeds)[0]


def fired(session: Session) -> set[str]:
    return {r.rule for r in report(session).rewrites}


# ---------------------------------------------------------------- results
@pytest.mark.parametrize("name", BY_HAND)
def test_every_level_gives_the_same(name: str) -> None:
    proto, feeds, reference = by_hand(name)
    results = [Session(proto, level=level, reference=False).run(feeds)[0] for level in LEVELS]
    for result in results:
        assert off_by(result, reference) < ROUNDINGS
        assert off_by(result, results[0]) < ROUNDINGS


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("name", EXPORTED)
def test_every_level_gives_the_same_for_exported_models(name: str) -> None:
    for package in ("torch", "onnxscript", "transformers"):
        pytest.importorskip(package)
    proto, inputs, by_torch = exported(name)
    for level in LEVELS:
        session = Session(proto, level=level, reference=False)
        (result,) = session.run({p.name: a for p, a in zip(session.inputs, inputs, strict=True)})
        assert off_by(result, by_torch) < ROUNDINGS
    assert fired(session) >= EXPECTED_OF_EXPORTED[name]


# ---------------------------------------------------------------- which rules fire
EXPECTED = {
    "residual_block": {"batch norm into the layer before"},
    "inverted_residual": {"batch norm into the layer before", "border into the convolution after"},
    "norm_before_convolution": {
        "batch norm into the convolution after", "factor into the layer before",
        "offset into the convolution before"},
    "encoder": {"layer norm", "weight of a norm", "bias of a norm", "attention",
                "gelu by the error function", "parallel products merged"},
    "causal_decoder": {"layer norm", "attention", "gelu by tanh",
                       "rows of a product with a bias as they were"},
    "rotary_decoder": {"rms norm", "weight of a norm", "rotary embedding", "attention",
                       "parallel products merged"},
    "interleaved_rotary_decoder": {"rms norm", "rotary embedding", "attention"},
    "patches": {"gelu by a sigmoid", "layer norm", "channels last past a regrouping of places"},
    "shapes_computed": {"reshape twice", "permute twice"},
    "normed_perceptron": {"batch norm into the layer before"},
}
EXPECTED_OF_EXPORTED = {  # this exporter folds batch norms, and keeps layer norms and GELU whole
    "resnet": set(),
    "mobilenet": set(),
    "bert": {"attention", "parallel products merged"},
    "gpt2": {"attention", "gelu by tanh", "rows of a product with a bias as they were"},
    "llama": {"rms norm", "weight of a norm", "rotary embedding", "attention",
              "parallel products merged"},
    "vit": {"attention", "parallel products merged"},
}


@pytest.mark.parametrize("name", BY_HAND)
def test_expected_rules_fire(name: str) -> None:
    found = fired(Session(by_hand(name)[0], compile_now=False))
    assert found >= EXPECTED[name], f"only {sorted(found)}"


def test_a_level_without_rewrites_has_none() -> None:
    named = set().union(*EXPECTED.values())
    for name in BY_HAND:
        session = Session(by_hand(name)[0], level="none", compile_now=False)
        assert not named & fired(session)


# ---------------------------------------------------------------- what becomes one kernel
def kernels(proto: onnx.ModelProto) -> int:
    return report(Session(proto, compile_now=False)).kernels


def weights(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


ACTIVATIONS: dict[str, list[Any]] = {
    "none": [node("Identity", "s", "y")],
    "Relu": [node("Relu", "s", "y")],
    "Gelu": [node("Gelu", "s", "y")],
    "gelu by hand": [node("Div", "s root", "u"), node("Erf", "u", "e"), node("Add", "e one", "p"),
                     node("Mul", "s p", "g"), node("Mul", "g half", "y")],
    "Swish by hand": [node("Sigmoid", "s", "g"), node("Mul", "s g", "y")],
    "residual": [node("Add", "s r", "y")],
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_product_bias_and_activation_are_one_kernel(activation: str) -> None:
    numbers = {n: np.float32(v) for n, v in {"root": 2**0.5, "one": 1.0, "half": 0.5}.items()}
    proto = model(
        [node("MatMul", "x w", "p0"), node("Add", "p0 b", "s"), *ACTIVATIONS[activation]],
        {"x": (3, 17, 24), "r": (3, 17, 40)}, ["y"],
        {**weights(w=(24, 40), b=(40,)), **{n: np.asarray(v) for n, v in numbers.items()}})
    assert kernels(proto) == 1


def test_a_norm_and_an_activation_cost_a_convolution_no_kernel() -> None:
    values = {**weights(w=(16, 9, 3, 3), s=(16,), b=(16,), m=(16,)), "v": np.ones(16, np.float32)}
    conv = node("Conv", "x w", "c", pads=[1, 1, 1, 1])
    alone = model([conv], {"x": (1, 9, 7, 8)}, ["c"], {"w": values["w"]})
    followed = model([conv, node("BatchNormalization", "c s b m v", "n"), node("Relu", "n", "y")],
                     {"x": (1, 9, 7, 8)}, ["y"], values)
    assert kernels(followed) == kernels(alone)
