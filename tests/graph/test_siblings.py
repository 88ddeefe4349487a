"""Kernels that read the same large tensor and nothing of each other: one kernel, one reading."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.chips.cpu.chip import Cpu
from terrazzo.compiler.driver import compile_graph
from terrazzo.compiler.lowering import Lowering
from terrazzo.compiler.rewriting import inlined
from terrazzo.graph.evaluate import run
from terrazzo.graph.ir import TensorType
from terrazzo.graph.trace import trace

LARGE, SMALL = (600, 512), (6, 512)

FUNCTIONS = {
    "pointwise": lambda x, y: (tz.exp(x) + y, x * y),
    "sums of rows": lambda x, y: (tz.sum(x, axis=1), tz.sum(x * y, axis=1)),
    "three": lambda x, y: (x + y, x - y, tz.maximum(x, y)),
}


def kernels(function: Any, shape: tuple[int, ...]) -> int:
    graph = trace(function, [TensorType(shape, tz.float32)] * 2, "siblings")[0]
    return len(Lowering(inlined(graph), Cpu()).fused.groups)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_kernel(name: str, rng: np.random.Generator) -> None:
    function = FUNCTIONS[name]
    assert kernels(function, LARGE) == 1
    graph = trace(function, [TensorType(LARGE, tz.float32)] * 2, "siblings")[0]
    arrays = [rng.normal(size=LARGE).astype(np.float32) for _ in range(2)]
    for got, want in zip(compile_graph(graph).run(arrays), run(graph, arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("function", [
    lambda x, y: (x * 2, tz.sum(y, axis=1)),  # share nothing
    lambda x, y: (tz.exp(x), tz.sum(x, axis=0)),  # one by elements, one down columns
    lambda x, y: (tz.exp(x), x[:, ::2] * 2),  # other elements
])
def test_others_stay_apart(function: Any) -> None:
    assert kernels(function, LARGE) == 2


def test_what_is_small_is_left_alone() -> None:
    assert kernels(FUNCTIONS["pointwise"], SMALL) == 2


def test_a_sibling_that_waits_for_the_other(rng: np.random.Generator) -> None:
    """The second kernel reads x as the first does, and what another made of the first's result."""
    def function(x: Any) -> Any:
        first = tz.exp(x)
        return first, x * tz.sum(tz.sort(first, axis=1), axis=0)

    graph = trace(function, [TensorType(LARGE, tz.float32)], "waits")[0]
    x = rng.uniform(-1, 1, LARGE).astype(np.float32)
    for got, want in zip(compile_graph(graph).run([x]), run(graph, [x]), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-2)


def test_many_readers_of_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work grows with the number of readers, not with its square."""
    from terrazzo.graph.fusion import siblings

    asked = 0
    ask = siblings.are_siblings

    def counting(*args: Any) -> bool:
        nonlocal asked
        asked += 1
        return ask(*args)

    monkeypatch.setattr(siblings, "are_siblings", counting)
    assert kernels(lambda x, y: tuple(tz.sum(x + i, axis=1) for i in range(60)), LARGE) < 20
    assert asked < 60 * Cpu.fusion_limits.siblings
