"""Inlining of composite operators."""

from __future__ import annotations

import numpy as np

from terrazzo.dtypes import float32
from terrazzo.graph.evaluate import run
from terrazzo.graph.ir import OPERATORS, Graph, TensorType, Value
from terrazzo.graph.passes import inline_composites
from terrazzo.graph.rewrite import Applied
from terrazzo.graph.trace import trace

X = TensorType((3, 4), float32)


def names(graph: Graph) -> set[str]:
    return {node.op.name for node in graph.nodes}


def attention(q: Value) -> Value:
    return OPERATORS["scaled_dot_product_attention"](q, q, q)


def test_bodies_replace_nodes_all_the_way_down(rng: np.random.Generator) -> None:
    graph, _ = trace(lambda x: OPERATORS["layer_norm"](OPERATORS["softmax"](x)), [X])
    flat = inline_composites(graph)
    assert not any(node.op.is_composite for node in flat.nodes)
    x = rng.normal(size=(3, 4)).astype(np.float32)
    np.testing.assert_array_equal(run(graph, [x])[0], run(flat, [x])[0])


def test_operators_with_fused_kernels_stay_whole() -> None:
    graph, _ = trace(attention, [X])
    assert names(inline_composites(graph)) == {"scaled_dot_product_attention"}


def test_nothing_is_whole_on_demand(rng: np.random.Generator) -> None:
    graph, _ = trace(attention, [X])
    flat = inline_composites(graph, whole=lambda node: False)
    assert "batch_matmul" in names(flat)
    assert not any(node.op.is_composite for node in flat.nodes)
    x = rng.normal(size=(3, 4)).astype(np.float32)
    np.testing.assert_array_equal(run(graph, [x])[0], run(flat, [x])[0])


def test_several_results() -> None:
    graph, _ = trace(lambda x: OPERATORS["split"](x, indices_or_sections=2, axis=1), [X])
    flat = inline_composites(graph)
    assert names(flat) == {"slice"} and [v.shape for v in flat.outputs] == [(3, 2), (3, 2)]


def test_what_was_inlined_is_recorded_with_its_line() -> None:
    graph, _ = trace(lambda x: OPERATORS["softmax"](x), [X])
    log: list[Applied] = []
    flat = inline_composites(graph, log)
    assert [(a.rule, a.node) for a in log] == [
        ("inline composites", "softmax(f32[3, 4]) -> f32[3, 4]")]
    assert {node.where for node in flat.nodes} == {graph.nodes[0].where} == {log[0].where}
