"""Control flow: decided while importing, compiled as it stands, or left to the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from models import model, node
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from symbolic import imported

from terrazzo.frontends.onnx.session import Session

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


def test_an_unknown_condition_keeps_both_branches() -> None:
    model = either()
    result = imported(model, {"x": ("n",), "condition": ()}, {})
    assert "cond" in [n.op.name for n in result.graph.nodes]


def info(name: str, shape: Any, kind: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def body(nodes: list[Any], inputs: list[Any], outputs: list[Any]) -> Any:
    return helper.make_graph(nodes, "body", inputs, outputs)


LOOP_INPUTS = [info("i", [], TensorProto.INT64), info("go", [], TensorProto.BOOL)]


def counting(stacks: bool) -> Any:
    """v becomes tanh(v W) + i; every v may be stacked."""
    nodes = [node("MatMul", "v W", "p"), node("Tanh", "p", "t"), node("Cast", "i", "f", to=1),
             node("Add", "t f", "v2"), node("Identity", "go", "go2"), node("Neg", "v2", "y")]
    return body(nodes, [*LOOP_INPUTS, info("v", [2, 3])],
                [info("go2", [], TensorProto.BOOL), info("v2", [2, 3]),
                 *([info("y", [2, 3])] if stacks else [])])


def check(model: ModelProto, feeds: dict[str, np.ndarray], compiled: bool = True) -> Session:
    """A session's results against those of onnx's reference.

    Which takes a condition that is left out for false, where the standard says true: such loops
    are given one here.
    """
    session = Session(model)
    assert (session.whole is not None) is compiled
    for got, want in zip(session.run(feeds), ReferenceEvaluator(model).run(None, feeds),
                         strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    return session


YES = {"yes": np.array(True)}
WEIGHTS = {**YES, "W": np.random.default_rng(3).normal(size=(3, 3)).astype(np.float32)}
X = np.random.default_rng(4).normal(size=(2, 3)).astype(np.float32)


@pytest.mark.parametrize("trips", [0, 1, 6])
def test_a_loop_of_a_known_number_of_turns(trips: int) -> None:
    made = model([node("Loop", "trips _ x", "z ys", body=counting(True))], {"x": (2, 3)},
                 ["z", "ys"], {**WEIGHTS, "trips": np.array(trips)})
    session = Session(made)
    assert session.whole is not None
    z, ys = session.run({"x": X})
    assert ys.shape == (trips, 2, 3)
    v = X
    for i in range(trips):
        v = np.tanh(v @ WEIGHTS["W"]) + i
        np.testing.assert_allclose(ys[i], -v, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(z, v, rtol=1e-5, atol=1e-6)


def test_a_number_of_turns_that_comes_with_the_call() -> None:
    made = model([node("Loop", "trips yes x", "z", body=counting(False))],
                 {"x": (2, 3), "trips": ()}, ["z"], WEIGHTS, kinds={"trips": TensorProto.INT64})
    for trips in (0, 3, 1):
        check(made, {"x": X, "trips": np.array(trips)})


@pytest.mark.parametrize("start", [True, False])
def test_a_loop_that_ends_by_its_condition(start: bool) -> None:
    nodes = [node("Mul", "v two", "v2"), node("ReduceMax", "v2", "m", keepdims=0),
             node("Less", "m limit", "go2")]
    inner = body(nodes, [*LOOP_INPUTS, info("v", [2, 3])],
                 [info("go2", [], TensorProto.BOOL), info("v2", [2, 3])])
    made = model([node("Loop", "_ start x", "z", body=inner)], {"x": (2, 3), "start": ()}, ["z"],
                 {"two": np.float32(2), "limit": np.float32(100)},
                 kinds={"start": TensorProto.BOOL})
    check(made, {"x": np.abs(X), "start": np.array(start)})


def test_a_loop_that_stacks_until_its_condition_is_the_hosts() -> None:
    nodes = [node("Mul", "v two", "v2"), node("ReduceMax", "v2", "m", keepdims=0),
             node("Less", "m limit", "go2"), node("Identity", "v2", "y")]
    inner = body(nodes, [*LOOP_INPUTS, info("v", [2, 3])],
                 [info("go2", [], TensorProto.BOOL), info("v2", [2, 3]), info("y", [2, 3])])
    made = model([node("Loop", "_ yes x", "z ys", body=inner)], {"x": (2, 3)}, ["z", "ys"],
                 {**YES, "two": np.float32(2), "limit": np.float32(100)})
    session = Session(made)
    assert session.whole is None
    z, ys = session.run({"x": np.abs(X)})
    expected = [np.abs(X) * 2]
    while expected[-1].max() < 100:
        expected.append(expected[-1] * 2)
    np.testing.assert_array_equal(ys, expected)
    np.testing.assert_array_equal(z, expected[-1])


def test_a_loop_whose_state_grows_is_the_hosts() -> None:
    nodes = [node("Concat", "v v", "v2", axis=0), node("Identity", "go", "go2")]
    inner = body(nodes, [*LOOP_INPUTS, info("v", None)],
                 [info("go2", [], TensorProto.BOOL), info("v2", None)])
    made = model([node("Loop", "trips yes x", "z", body=inner)], {"x": (2, 3)}, ["z"],
                 {**YES, "trips": np.array(3)})
    check(made, {"x": X}, compiled=False)


@pytest.mark.parametrize("back_in, back_out", [(0, 0), (1, 0), (0, 1)])
@pytest.mark.parametrize("axis_in, axis_out", [(0, 0), (1, 1)])
def test_scan(back_in: int, back_out: int, axis_in: int, axis_out: int) -> None:
    nodes = [node("Add", "h row", "s"), node("Tanh", "s", "h2"), node("Mul", "h2 x_outer", "y")]
    inner = body(nodes, [info("h", [3]), info("row", [3])], [info("h2", [3]), info("y", [3])])
    made = model([node("Scan", "h0 xs", "last ys", body=inner, num_scan_inputs=1,
                       scan_input_directions=[back_in], scan_output_directions=[back_out],
                       scan_input_axes=[axis_in], scan_output_axes=[axis_out])],
                 {"h0": (3,), "xs": (3, 3), "x_outer": (3,)}, ["last", "ys"])
    rng = np.random.default_rng(5)
    feeds = {n: rng.normal(size=s).astype(np.float32)
             for n, s in (("h0", 3), ("xs", (3, 3)), ("x_outer", 3))}
    session = Session(made)
    assert session.whole is not None
    h, ys = feeds["h0"], []
    rows = np.moveaxis(feeds["xs"], axis_in, 0)[::-1 if back_in else 1]
    for row in rows:
        h = np.tanh(h + row)
        ys.append(h * feeds["x_outer"])
    stacked = np.moveaxis(np.stack(ys[::-1] if back_out else ys), 0, axis_out)
    for got, want in zip(session.run(feeds), (h, stacked), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("flag", [True, False])
def test_an_if_by_an_input_is_compiled(flag: bool) -> None:
    check(either(), {"x": X[0], "condition": np.array(flag)})
