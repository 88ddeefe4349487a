"""Programs that differ in names alone are found equal, and share a kernel; all others are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.chips.cpu.chip import Cpu
from terrazzo.compiler.lowering import Lowering
from terrazzo.dtypes import DType, float32, float64
from terrazzo.expr.structure import structure
from terrazzo.graph.ir import TensorType
from terrazzo.graph.trace import trace
from terrazzo.runtime.executable import Executable


def lowering(function: Any, *shapes: Any, dtype: DType = float32) -> Lowering:
    types = [TensorType(tuple(s), dtype) for s in shapes]
    return Lowering(trace(function, types, name="f")[0], Cpu())


def key(function: Any, *shapes: Any, dtype: DType = float32) -> Any:
    (group,) = lowering(function, *shapes, dtype=dtype).fused.groups
    return structure(group.program)


@pytest.mark.parametrize("function", [
    lambda x: tz.exp(x) + 0.5,
    lambda x: tz.softmax(x),
    lambda x: tz.matmul(x, tz.transpose(x)),
    lambda x: tz.where(x > 0.0, x, tz.flip(x, axis=1)),
], ids=["pointwise", "rows", "product", "index"])
def test_a_program_equals_itself_made_again(function: Any) -> None:
    assert key(function, (5, 6)) == key(function, (5, 6))
    assert hash(key(function, (5, 6))) == hash(key(function, (5, 6)))
    assert key(function, (5, 6)) != key(function, (5, 7))
    assert key(function, (5, 6)) != key(function, (5, 6), dtype=float64)


@pytest.mark.parametrize("one, other", [
    (lambda x, y: x - y, lambda x, y: x + y),
    (lambda x, y: x - y * y, lambda x, y: y * y - x),
    (lambda x, y: x * y + 0.1, lambda x, y: x * y + 0.10000001),
    (lambda x, y: x * y + 0.0, lambda x, y: x * y - 0.0),
    (lambda x, y: tz.sum(x * y, axis=0), lambda x, y: tz.sum(x * y, axis=1)),
    (lambda x, y: tz.max(x * y, axis=0), lambda x, y: tz.min(x * y, axis=0)),
    (lambda x, y: tz.flip(x, axis=0) + y, lambda x, y: tz.flip(x, axis=1) + y),
])
def test_what_differs_is_told_apart(one: Any, other: Any) -> None:
    assert key(one, (6, 6), (6, 6)) != key(other, (6, 6), (6, 6))


def weights(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) / 8


def test_equal_layers_share_their_kernels(rng: np.random.Generator) -> None:
    layers = [(weights(32, 48, seed=i), weights(48, 32, seed=i + 50), weights(32, seed=i + 90))
              for i in range(6)]

    def model(x: Any) -> Any:
        for first, second, scale in layers:
            x = tz.layer_norm(x + tz.matmul(tz.gelu(tz.matmul(x, first)), second), scale, scale)
        return x

    lowered = lowering(model, (7, 32))
    assert len(lowered.functions) == 18 and len(set(lowered.functions)) == 3
    assert len({c.name for c in lowered.calls}) == 18  # the profiler tells calls apart
    x = rng.normal(size=(7, 32)).astype(np.float32)
    expected = x.astype(np.float64)
    from math import erf

    for first, second, scale in layers:
        hidden = expected @ first
        hidden = hidden * 0.5 * (1 + np.vectorize(erf)(hidden / np.sqrt(2)))
        expected = expected + hidden @ second
        centred = expected - expected.mean(-1, keepdims=True)
        expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale + scale
    np.testing.assert_allclose(Executable(lowered.artifact())(x), expected, rtol=1e-3, atol=1e-4)


def test_a_product_with_a_constant_and_one_with_a_value_are_two_kernels() -> None:
    table = weights(32, 32)
    lowered = lowering(lambda x, y: tz.matmul(tz.matmul(x, table), y), (8, 32), (32, 32))
    packed = [bool(f.packed) for f in lowered.functions]
    assert sorted(packed) == [False, True] and len(set(lowered.functions)) == 2


def test_attributes_of_whole_operators_count() -> None:
    lowered = lowering(lambda x: tz.sort(tz.sort(tz.cumsum(tz.sort(x), axis=0), descending=True)),
                       (8, 8))
    assert len(lowered.functions) == 4 and len(set(lowered.functions)) == 3
    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    np.testing.assert_allclose(Executable(lowered.artifact())(x),
                               np.sort(np.cumsum(np.sort(x), 0)), rtol=1e-5, atol=1e-6)
