"""What the backward pass keeps of the forward pass: by bytes and arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import terrazzo as tz
from terrazzo.dtypes import float32
from terrazzo.graph.autodiff import vjp_graph
from terrazzo.graph.ir import Graph, TensorType
from terrazzo.graph.residuals import recomputing, worth_keeping
from terrazzo.graph.trace import trace


def graph_of(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Graph:
    return trace(function, [TensorType(s, float32) for s in shapes])[0]


def kept(function: Callable[..., Any], *shapes: tuple[int, ...], **limits: float) -> list[str]:
    graph = graph_of(function, *shapes)
    found = worth_keeping(graph, vjp_graph(graph), **limits, stored=graph.outputs)
    return sorted(v.node.op.name for v in found if v.node is not None)


MATRIX = (256, 256)


@pytest.mark.parametrize(("function", "shapes", "wanted"), [
    (lambda x: tz.exp(x) * x + x * x, [MATRIX], []),  # cheap arithmetic
    (lambda x, w: tz.square(x @ w), [MATRIX, MATRIX], ["matmul"]),
    (lambda x, w: tz.tanh(x @ w + x), [MATRIX, MATRIX], ["tanh"]),  # the last of what is wanted
    (lambda x, w: tz.tanh(x @ w), [(256, 8), (8, 256)], ["tanh"]),  # stored anyway
    (lambda x, w: tz.square(x @ w), [(256, 8), (8, 256)], []),  # eight multiplications each
    (lambda x: x * tz.sum(x, axis=1, keepdims=True), [MATRIX], ["sum"]),  # small, long to compute
    (lambda x, w: x @ w, [MATRIX, MATRIX], []),  # the gradient is made of the inputs
])
def test_what_is_kept(function: Callable[..., Any], shapes: list[tuple[int, ...]],
                      wanted: list[str]) -> None:
    assert kept(function, *shapes) == wanted


def test_limits() -> None:
    def function(x: Any, w: Any) -> Any:
        return tz.square(x @ w)

    size = 256 * 256 * 4
    assert kept(function, MATRIX, MATRIX, largest=size) == ["matmul"]
    assert kept(function, MATRIX, MATRIX, largest=size - 1) == []
    assert kept(function, MATRIX, MATRIX, handing_on=1e9) == []


def test_costs_of_composites_are_those_of_their_bodies() -> None:
    plain = graph_of(lambda x: tz.softmax(x), MATRIX).nodes[0]
    assert plain.op.name == "softmax"
    assert recomputing(plain) > 256 * 256 * 15
    product = graph_of(lambda x, w: x @ w, (10, 20), (20, 30)).nodes[0]
    assert recomputing(product) == pytest.approx(10 * 20 * 30, rel=0.2)
