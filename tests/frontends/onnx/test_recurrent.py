"""Converters of recurrent layers against ONNX's evaluator and torch."""

from __future__ import annotations

import numpy as np
import pytest
from one_node import check, run

pytestmark = pytest.mark.onnx
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def weights(rng: np.random.Generator, kind: str, directions: int = 1, inputs: int = 3,
            hidden: int = 5) -> list[np.ndarray]:
    gates = GATES[kind]
    shapes = [(directions, gates * hidden, inputs), (directions, gates * hidden, hidden),
              (directions, 2 * gates * hidden)]
    return [(rng.standard_normal(s) * 0.4).astype(np.float32) for s in shapes]


@pytest.mark.parametrize("opset", [7, 14, 22])
@pytest.mark.parametrize("kind", GATES)
def test_forward(rng: np.random.Generator, kind: str, opset: int) -> None:
    x = rng.standard_normal((6, 2, 3)).astype(np.float32)
    start = rng.standard_normal((1, 2, 5)).astype(np.float32)
    inputs = [x, *weights(rng, kind), None, start]
    outputs = 3 if kind == "LSTM" else 2
    if kind == "LSTM":
        inputs.append(start[:, ::-1].copy())
    check(kind, inputs, opset=opset, outputs=outputs, hidden_size=5, rtol=1e-4, atol=1e-5)


@pytest.mark.torch
@pytest.mark.parametrize("kind", GATES)
def test_both_directions(rng: np.random.Generator, kind: str) -> None:
    import torch

    x = rng.standard_normal((4, 2, 3)).astype(np.float32)
    w, r, b = weights(rng, kind, 2)
    layer = getattr(torch.nn, kind)(3, 5, bidirectional=True)
    # ONNX's gates are i o f c and z r h; torch's are i f g o and r z n.
    order = {"LSTM": [0, 2, 3, 1], "GRU": [1, 0, 2], "RNN": [0]}[kind]

    def rows(array: np.ndarray) -> torch.Tensor:
        parts = np.split(array, GATES[kind])
        return torch.from_numpy(np.concatenate([parts[k] for k in order]))

    with torch.no_grad():
        for d, tail in enumerate(("l0", "l0_reverse")):
            getattr(layer, f"weight_ih_{tail}").copy_(rows(w[d]))
            getattr(layer, f"weight_hh_{tail}").copy_(rows(r[d]))
            for name, half in zip(("bias_ih", "bias_hh"), np.split(b[d], 2)):
                getattr(layer, f"{name}_{tail}").copy_(rows(half))
        wanted, _ = layer(torch.from_numpy(x))
    extra = {"linear_before_reset": 1} if kind == "GRU" else {}
    (y,) = run(kind, [x, w, r, b], direction="bidirectional", hidden_size=5, **extra)
    np.testing.assert_allclose(y.swapaxes(1, 2).reshape(4, 2, 10), wanted.numpy(), rtol=1e-4,
                               atol=1e-5)


def test_lengths_end_sequences(rng: np.random.Generator) -> None:
    x = rng.standard_normal((5, 2, 3)).astype(np.float32)
    w, r, b = weights(rng, "GRU")
    y, last = run("GRU", [x, w, r, b, np.array([5, 2], np.int32)], outputs=2, hidden_size=5)
    short, end = run("GRU", [x[:2, 1:], w, r, b], outputs=2, hidden_size=5)
    np.testing.assert_allclose(y[:2, :, 1:], short, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(last[:, 1:], end, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(y[2:, :, 1], 0)


def test_other_activations(rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, 2, 3)).astype(np.float32)
    w, r, b = weights(rng, "RNN")
    y, _ = run("RNN", [x, w, r, b], outputs=2, hidden_size=5, activations=["LeakyRelu"],
               activation_alpha=[0.25])
    state = np.zeros((2, 5), np.float32)
    for t in range(3):
        z = x[t] @ w[0].T + state @ r[0].T + b[0, :5] + b[0, 5:]
        state = np.where(z > 0, z, 0.25 * z)
        np.testing.assert_allclose(y[t, 0], state, rtol=1e-4, atol=1e-5)
