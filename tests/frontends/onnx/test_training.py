"""Converters of the steps of gradient descent against their formulas and torch."""

from __future__ import annotations

import numpy as np
import pytest
from one_node import run

pytestmark = pytest.mark.onnx
TRAINING = "ai.onnx.preview.training"


def rows(rng: np.random.Generator, count: int) -> list[np.ndarray]:
    return [rng.standard_normal(4).astype(np.float32) for _ in range(count)]


def test_momentum(rng: np.random.Generator) -> None:
    x, y, g, h, v, w = rows(rng, 6)
    rate, step = np.float32(0.1).reshape(()), np.array(1)
    for mode in ("standard", "nesterov"):
        found = run("Momentum", [rate, step, x, y, g, h, v, w], outputs=4, domain=TRAINING,
                    alpha=0.9, beta=0.5, norm_coefficient=0.01, mode=mode)
        for k, (tensor, gradient, state) in enumerate(((x, g, v), (y, h, w))):
            gradient = gradient + 0.01 * tensor
            state = 0.9 * state + 0.5 * gradient
            way = gradient + 0.9 * state if mode == "nesterov" else state
            np.testing.assert_allclose(found[k], tensor - 0.1 * way, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(found[2 + k], state, rtol=1e-5, atol=1e-6)


def test_adagrad(rng: np.random.Generator) -> None:
    x, g, h = rows(rng, 3)
    h = np.abs(h)
    new, state = run("Adagrad", [np.array(0.1, np.float32), np.array(3), x, g, h], outputs=2,
                     domain=TRAINING, decay_factor=0.5, epsilon=1e-3)
    np.testing.assert_allclose(state, h + g * g, rtol=1e-6)
    expected = x - 0.1 / 2.5 * g / (np.sqrt(h + g * g) + 1e-3)
    np.testing.assert_allclose(new, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.torch
def test_adam(rng: np.random.Generator) -> None:
    import torch

    x, *gradients = rows(rng, 4)
    tensor = torch.nn.Parameter(torch.from_numpy(x.copy()))
    optimizer = torch.optim.Adam([tensor], lr=0.1, betas=(0.9, 0.999), eps=0.0)
    v = h = np.zeros(4, np.float32)
    for step, g in enumerate(gradients, 1):
        x, v, h = run("Adam", [np.array(0.1, np.float32), np.array(step), x, g, v, h], outputs=3,
                      domain=TRAINING, alpha=0.9, beta=0.999, epsilon=0.0)
        tensor.grad = torch.from_numpy(g)
        optimizer.step()
        np.testing.assert_allclose(x, tensor.detach().numpy(), rtol=1e-4, atol=1e-5)
