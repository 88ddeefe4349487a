"""Nodes are put off for reasons that are told apart by their type, whatever they say."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from one_node import imported, one_node
from onnx import TensorProto, helper

from terrazzo.dtypes import float32, int64
from terrazzo.errors import UnsupportedOperator
from terrazzo.frontends.onnx import registry
from terrazzo.frontends.onnx.importer import import_nodes
from terrazzo.frontends.onnx.model import load_model
from terrazzo.frontends.onnx.reasons import ContentsUnknown, InputMissing, NotConverted
from terrazzo.frontends.onnx.registry import Call, converts
from terrazzo.frontends.onnx.session import Session
from terrazzo.frontends.onnx.session.report import placement
from terrazzo.graph.ir import TensorType

X = np.ones((2, 3), np.float32)
DOMAIN = "tests.reasons"


def chain() -> onnx.ModelProto:
    """A Reshape whose target is an input, and a Relu of its result."""
    nodes = [helper.make_node("Reshape", ["x", "target"], ["r"]),
             helper.make_node("Relu", ["r"], ["y"])]
    graph = helper.make_graph(
        nodes, "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3]),
         helper.make_tensor_value_info("target", TensorProto.INT64, [2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["a", "b"])])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)


def test_what_waits_and_for_what_is_data() -> None:
    model = load_model(chain())
    found = import_nodes(list(enumerate(model.graph.node)), model.opsets,
                         {"x": TensorType((2, 3), float32), "target": TensorType((2,), int64)},
                         {}, ["y"])
    assert found.put_off == {0: ContentsUnknown("target"), 1: InputMissing("r")}
    assert found.needed == {"target"}
    assert [str(r) for r in found.put_off.values()] == [
        "needs the value of 'target'", "waits for 'r'"]


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], onnx.ModelProto]:
    """A model of one node whose converter refuses it with a given text."""
    monkeypatch.setattr(registry, "_CONVERTERS", dict(registry._CONVERTERS))

    def make(text: str) -> onnx.ModelProto:
        @converts("Odd", domain=DOMAIN)
        def odd(call: Call) -> registry.Result:
            raise UnsupportedOperator(text)

        return one_node("Odd", [X], domain=DOMAIN)

    return make


@pytest.mark.parametrize("text", ["needs the value of the moon", "waits for better days",
                                  "has no code"])
def test_no_text_makes_a_refusal_anything_else(
        refusing: Callable[[str], onnx.ModelProto], text: str) -> None:
    model = refusing(text)
    assert imported(model, {"x0": X}).put_off == {0: NotConverted(text)}
    (placed,) = placement(Session(model))
    assert (placed.where, placed.why) == ("reference", text)
    with pytest.raises(UnsupportedOperator, match=f"cannot be compiled: {text}"):
        Session(model, reference=False).run({"x0": X})
