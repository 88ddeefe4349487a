"""Control flow that is decided while importing."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, helper, numpy_helper
from symbolic import imported

pytestmark = pytest.mark.onnx


def either() -> ModelProto:
    """x * 2 where the condition holds, x + outer otherwise; the second reads an outer name."""
    branches = {}
    for key, operator, other in (("then_branch", "Mul", "two"), ("else_branch", "Add", "outer")):
        branches[key] = helper.make_graph(
            [helper.make_node(operator, ["x", other], ["y_" + key])], key, [],
            [helper.make_tensor_value_info("y_" + key, 1, None)],
            [numpy_helper.from_array(np.float32(2), "two")] if other == "two" else [])
    nodes = [helper.make_node("Identity", ["x"], ["outer"]),
             helper.make_node("If", ["condition"], ["y"], **branches)]
    graph = helper.make_graph(
        nodes, "either", [helper.make_tensor_value_info("x", 1, ["n"]),
                          helper.make_tensor_value_info("condition", 9, [])],
        [helper.make_tensor_value_info("y", 1, None)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


@pytest.mark.parametrize("condition, operator", [(True, "multiply"), (False, "add")])
def test_a_known_condition_leaves_one_branch(condition: bool, operator: str) -> None:
    result = imported(either(), {"x": ("n",)}, {"condition": np.array(condition)})
    assert [n.op.name for n in result.graph.nodes if n.op.name != "constant"] == [operator]


def test_an_unknown_condition_is_asked_for() -> None:
    with pytest.raises(AssertionError, match="needs the value of 'condition'"):
        imported(either(), {"x": ("n",), "condition": ()}, {})
