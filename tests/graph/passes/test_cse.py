"""Common subexpressions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from terrazzo.dtypes import float32
from terrazzo.graph.applying import apply, constant
from terrazzo.graph.ir import OPERATORS, Graph, TensorType, Value
from terrazzo.graph.passes import common_subexpressions
from terrazzo.graph.rewrite import Applied
from terrazzo.graph.trace import trace
from terrazzo.ops.elementwise import exp, maximum, subtract, tanh

X = TensorType((4,), float32)


def merged(function: object, count: int = 1) -> Graph:
    return common_subexpressions(trace(function, [X] * count)[0])  # type: ignore[arg-type]


def names(graph: Graph) -> list[str]:
    return [node.op.name for node in graph.nodes]


def test_equal_nodes_become_one_all_the_way_up() -> None:
    log: list[Applied] = []
    graph = common_subexpressions(
        trace(lambda x: tanh(exp(x)) * tanh(exp(x)), [X])[0], log)
    assert names(graph) == ["exp", "tanh", "multiply"]
    assert [a.rule for a in log] == ["common subexpressions"] * 2


def test_operands_of_symmetric_operators_may_be_swapped() -> None:
    assert names(merged(lambda x, y: (x + y) * (y + x), 2)) == ["add", "multiply"]
    assert names(merged(lambda x, y: (subtract(x, y), subtract(y, x)), 2)) == ["subtract"] * 2
    assert names(merged(lambda x, y: (maximum(x, y), maximum(y, x)), 2)) == ["maximum"] * 2


def test_attributes_tell_nodes_apart() -> None:
    def sums(x: Value) -> object:
        return tuple(OPERATORS["sum"](x, axis=0, keepdims=k) for k in (True, False, True))

    graph = merged(sums)
    assert names(graph) == ["sum", "sum"] and graph.outputs[0] is graph.outputs[2]


def test_constants_compare_by_their_bits() -> None:
    table = np.arange(4, dtype=np.float32)
    assert names(merged(lambda x: (x + table) * (x + table.copy()))) == [
        "constant", "add", "multiply"]
    signs = merged(lambda x: (x + constant(0.0), x + constant(-0.0), x + constant(0.0)))
    assert names(signs).count("add") == 2, "0.0 and -0.0 differ"


def test_several_results_merge_together() -> None:
    graph = merged(lambda x: (*OPERATORS["split"](x, indices_or_sections=2),
                              *OPERATORS["split"](x, indices_or_sections=2)))
    assert names(graph) == ["split"] and graph.outputs[:2] == graph.outputs[2:]


def test_operators_with_effects_stay_apart() -> None:
    noisy = replace(exp, name="noisy", effects={"prints": True})
    graph = merged(lambda x: (apply(noisy, [x], {}), apply(noisy, [x], {})))
    assert names(graph) == ["noisy", "noisy"]


def test_axes_of_a_reduction_may_be_written_in_any_way() -> None:
    x = Value(TensorType((3, 4, 5), float32), name="x")
    total = OPERATORS["sum"]
    values = [total(x, axis=axis) for axis in (-1, 2, (2,), (-1,), None, (0, 1, 2), (2, 0, -2), 1)]
    found = common_subexpressions(Graph("g", (x,), tuple(values))).outputs
    assert len(set(found[:4])) == len(set(found[4:7])) == 1
    assert len(set(found)) == 3
