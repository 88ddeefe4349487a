"""Norms of groups: one kernel reads a group once, and stores it in the shape asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.chips.cpu.chip import Cpu
from terrazzo.compiler.driver import compile_graph
from terrazzo.compiler.lowering import Lowering
from terrazzo.compiler.rewriting import inlined
from terrazzo.graph.autodiff import vjp_graph
from terrazzo.graph.evaluate import run
from terrazzo.graph.ir import Graph, TensorType
from terrazzo.graph.trace import trace

SHAPE, GROUPS = (4, 24, 7, 6), 8
TYPES = [TensorType(SHAPE, tz.float32), TensorType((24,), tz.float32),
         TensorType((24,), tz.float32)]


def normed(x: Any) -> Any:
    rows = x.reshape(SHAPE[0], GROUPS, SHAPE[1] // GROUPS, *SHAPE[2:])
    centred = rows - tz.mean(rows, axis=(2, 3, 4), keepdims=True)
    spread = tz.mean(centred * centred, axis=(2, 3, 4), keepdims=True)
    return (centred * tz.rsqrt(spread + 1e-5)).reshape(SHAPE)


def scaled(x: Any, w: Any, b: Any) -> Any:
    return normed(x) * w[None, :, None, None] + b[None, :, None, None]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "scaled": scaled,
    "activated": lambda x, w, b: tz.silu(scaled(x, w, b)),
    "plain": lambda x, w, b: normed(x),
    "beside its input": lambda x, w, b: scaled(x, w, b) + x,
    "the operator": lambda x, w, b: tz.group_norm(x, w, b, groups=GROUPS),
}


def lowered(graph: Graph) -> Lowering:
    return Lowering(inlined(graph), Cpu())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_kernel_without_copies(name: str) -> None:
    lowering = lowered(trace(FUNCTIONS[name], TYPES, "norm")[0])
    assert len(lowering.calls) == 1, "\n".join(str(c.function) for c in lowering.calls)


def test_the_gradient_by_x_is_one_kernel() -> None:
    graph = vjp_graph(trace(lambda x: normed(x), TYPES[:1], "norm")[0])
    assert len(lowered(graph).calls) == 1


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("backward", [False, True])
def test_values(name: str, backward: bool, rng: np.random.Generator) -> None:
    graph = trace(FUNCTIONS[name], TYPES, "norm")[0]
    graph = vjp_graph(graph) if backward else graph
    arrays = [rng.normal(size=v.shape).astype(np.float32) for v in graph.inputs]
    for got, want in zip(compile_graph(graph).run(arrays), run(graph, arrays), strict=True):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, atol=3e-5 * np.abs(want).max())


def test_what_is_computed_elsewhere_stays_in_its_shape() -> None:
    """A sum with what another kernel makes in the other shape: nothing is stored twice."""
    def function(x: Any, w: Any, b: Any) -> Any:
        return tz.softmax(x, axis=1) + normed(x)

    graph = trace(function, TYPES, "norm")[0]
    x = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    w = np.ones(24, np.float32)
    (got,), (want,) = compile_graph(graph).run([x, w, w]), run(graph, [x, w, w])
    np.testing.assert_allclose(got, want, atol=3e-5)


def test_results_that_are_one_value_in_two_shapes(rng: np.random.Generator) -> None:
    def function(x: Any) -> Any:
        rows = x.reshape(4, 6, 5)
        rows = rows - tz.max(rows, axis=2, keepdims=True)
        return rows.reshape(24, 5), rows.reshape(4, 30), rows

    x = rng.normal(size=(24, 5)).astype(np.float32)
    graph = trace(function, [TensorType((24, 5), tz.float32)], "rows")[0]
    for got, want in zip(compile_graph(graph).run([x]), run(graph, [x]), strict=True):
        np.testing.assert_array_equal(got, want)
