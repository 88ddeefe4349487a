"""Kernels of well-chosen tiles come within a quarter of what the chip does at best."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

triton = pytest.importorskip("triton")

from device_arrays import normal, zeros  # noqa: E402
from kernels import add, attention, layer_norm, matmul, softmax_of_rows  # noqa: E402

from terrazzo.triton_gcu.chip import description  # noqa: E402
from terrazzo.triton_gcu.driver import modelled_bench  # noqa: E402

pytestmark = pytest.mark.triton
ENOUGH = 0.75


def share(run: Callable[[], Any], flops: float, size: float) -> float:
    """The least time that so much arithmetic on so much memory takes, by the time it took."""
    spec = description().spec()
    best = max(flops / spec.peak("f32"), size / (spec.memory_gbps * 1e9))
    return best * 1e3 / modelled_bench(run)


def test_addition() -> None:
    n = 1 << 21
    x, y, out = normal(n), normal(n, seed=1), zeros(n)
    assert ENOUGH < share(lambda: add[(n // 8192,)](x, y, out, n, BLOCK=8192), n, 12 * n) <= 1
    assert np.array_equal(out.numpy(), x.values + y.values)


def test_rows() -> None:
    rows, columns = 48 * 32, 1024
    x, out = normal(rows, columns), zeros(rows, columns)
    size = 8 * rows * columns
    assert ENOUGH < share(lambda: softmax_of_rows[(48,)](
        x, out, rows, columns, ROWS=32, BLOCK=columns), 0, size) <= 1
    e = np.exp(x.values.astype(np.float64))
    np.testing.assert_allclose(out.numpy(), e / e.sum(1, keepdims=True), rtol=2e-6)
    weight, bias = normal(columns, seed=1), normal(columns, seed=2)
    assert ENOUGH < share(lambda: layer_norm[(48,)](
        x, weight, bias, out, rows, columns, ROWS=32, BLOCK=columns), 0, size) <= 1
    exact = x.values.astype(np.float64)
    exact = (exact - exact.mean(1, keepdims=True)) / np.sqrt(exact.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(out.numpy(), exact * weight.values + bias.values, atol=1e-5)


def test_products() -> None:
    m, n, k = 1536, 2048, 1024
    a, b, c = normal(m, k), normal(k, n, seed=1), zeros(m, n)
    assert ENOUGH < share(lambda: matmul[(48,)](a, b, c, m, n, k, 256, 256, 128),
                          2 * m * n * k, 4 * (m * k + k * n + m * n)) <= 1
    np.testing.assert_allclose(c.numpy(), a.values.astype(np.float64) @ b.values, atol=2e-4)


def test_attention() -> None:
    heads, n, depth = 6, 1024, 64
    q, k, v = (normal(heads, n, depth, seed=s) for s in range(3))
    out = zeros(heads, n, depth)
    assert ENOUGH < share(lambda: attention[(8, heads)](q, k, v, out, n, D=depth, BM=128, BN=256),
                          4 * heads * n * n * depth, 16 * heads * n * depth) <= 1
    scores = np.exp(q.values.astype(np.float64) @ k.values.swapaxes(1, 2) / 8)
    exact = scores / scores.sum(-1, keepdims=True) @ v.values
    np.testing.assert_allclose(out.numpy(), exact, atol=2e-6)
