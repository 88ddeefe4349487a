"""Indices that data tells: one that points outside is an error of the run, as in onnxruntime."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from terrazzo.errors import IndexFault, ModelError
from terrazzo.frontends.onnx.session import CompiledModel, Session

sys.path.insert(0, str(Path(__file__).parents[1] / "frontends" / "onnx"))
from models import model, node

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
X = np.arange(12, dtype=np.float32).reshape(3, 4)

# A node, its inputs beside x of 3 x 4, and what puts one index outside; all with sizes that vary.
NODES: dict[str, tuple[Any, dict[str, np.ndarray], list[int]]] = {
    "Gather": (node("Gather", "x i", "y", axis=1), {"i": np.array([[0, -4], [3, 1]])}, [4, -5]),
    "GatherElements": (node("GatherElements", "x i", "y", axis=0),
                       {"i": np.array([[0, 1, 2, -3]])}, [3, -4]),
    "GatherND": (node("GatherND", "x i", "y"), {"i": np.array([[1, 3], [-1, 0]])}, [4, -5]),
    "ScatterElements": (node("ScatterElements", "x i u", "y", axis=1),
                        {"i": np.array([[0, -1]]), "u": np.ones((1, 2), np.float32)}, [4, -5]),
    "ScatterND": (node("ScatterND", "x i u", "y"),
                  {"i": np.array([[0, 3], [-3, 2]]), "u": np.ones(2, np.float32)}, [4, -5]),
}


def of(name: str, sizes: bool) -> onnx.ModelProto:
    step, feeds, _ = NODES[name]
    given = {n: tuple(f"{n}{d}" for d in range(a.ndim)) if sizes else a.shape
             for n, a in (("x", X), *feeds.items())}
    return model([step], given, ["y"], kinds={"i": INT64})


@pytest.mark.parametrize("sizes", [False, True], ids=["fixed", "varying"])
@pytest.mark.parametrize("name", NODES)
def test_outside(name: str, sizes: bool) -> None:
    proto = of(name, sizes)
    session, reference = Session(proto), ReferenceEvaluator(proto)
    _, feeds, bad = NODES[name]
    for _ in range(2):  # the way that checks, and the direct one
        given = {"x": X, **feeds}
        np.testing.assert_array_equal(session.run(given)[0], reference.run(None, given)[0])
        for index in bad:
            wrong = {n: a.copy() for n, a in given.items()}
            wrong["i"].reshape(-1)[-1] = index
            with pytest.raises(IndexFault, match=f"index {index} is out of bounds") as caught:
                session.run(wrong)
            assert name in str(caught.value) and isinstance(caught.value, ModelError)
    assert session.compilations == 1


def test_sizes_named_like_axes_of_ours() -> None:
    """The check sums over the indices, whose number the model may call anything."""
    for name in "kmn":
        step = node("Gather", "x i", "y")
        session = Session(model([step], {"x": ("r", 4), "i": (name,)}, ["y"], kinds={"i": INT64}))
        for count in (3, 5, 40000):
            places = np.arange(count) % 3
            np.testing.assert_array_equal(session.run({"x": X, "i": places})[0], X[places])
            places[count // 2] = 3
            with pytest.raises(IndexFault, match="index 3 "):
                session.run({"x": X, "i": places})
        assert session.compilations == 1


def test_reductions_over_sizes_named_like_axes_of_ours() -> None:
    for name in "kijmn":
        session = Session(model([node("ReduceMax", "i", "y", keepdims=0)], {"i": (name,)}, ["y"],
                                kinds={"i": INT64, "y": INT64}))
        for count in (3, 40000):
            assert session.run({"i": np.arange(count)})[0] == count - 1
        assert session.compilations == 1


def test_a_branch_that_is_not_taken_may_hold_an_index_outside() -> None:
    def branch(op: Any, out: str) -> onnx.GraphProto:
        return helper.make_graph([op], out, [], [helper.make_tensor_value_info(out, FLOAT, None)])

    step = helper.make_node(
        "If", ["c"], ["y"], then_branch=branch(node("Gather", "x i", "t"), "t"),
        else_branch=branch(node("Identity", "x", "e"), "e"))
    session = Session(model([step], {"c": (), "x": (3, 4), "i": (3,)}, ["y"],
                            kinds={"c": BOOL, "i": INT64}))
    given = {"x": X, "i": np.array([0, 1, 9])}
    np.testing.assert_array_equal(session.run({"c": np.array(False), **given})[0], X)


def test_constants() -> None:
    """What is known when a model is loaded is refused then, where nothing is left to run."""
    weights = {"x": X, "i": np.array([1, 5])}
    for step, given in [(node("Gather", "x i", "y"), {}),
                        (node("Gather", "s i", "y"), {"z": (3, 4)})]:
        proto = model([*[node("Shape", "z", "s")] * bool(given), step], given, ["y"], weights,
                      kinds={"y": INT64} if given else {})
        with pytest.raises(IndexFault, match=r"index 5 is out of bounds[^(]*\(Gather"):
            Session(proto)
    weights["i"] = np.array([1, -3])
    (found,) = Session(model([node("Gather", "x i", "y")], {}, ["y"], weights)).run({})
    np.testing.assert_array_equal(found, X[[1, 0]])


@pytest.mark.parametrize("outside", ["Identity", "NonZero"])
def test_constants_in_a_branch_that_is_not_taken(outside: str) -> None:
    """Branches that are compiled with the rest, and those that the host chooses from."""
    def branch(steps: list[Any], out: str) -> onnx.GraphProto:
        return helper.make_graph(steps, out, [], [helper.make_tensor_value_info(out, INT64, None)])

    step = helper.make_node(
        "If", ["c"], ["y"],
        then_branch=branch([node("Gather", "k i", "g"), node(outside, "g", "t")], "t"),
        else_branch=branch([node("Identity", "k", "e")], "e"))
    session = Session(model([step], {"c": ()}, ["y"], {"k": np.arange(3), "i": np.array([1, 7])},
                            kinds={"c": BOOL, "y": INT64}))
    for _ in range(2):
        np.testing.assert_array_equal(session.run({"c": np.array(False)})[0], [0, 1, 2])
    if outside == "NonZero":  # the branch is a block of its own, which looks when it is run
        with pytest.raises(IndexFault, match="index 7 "):
            session.run({"c": np.array(True)})


def test_between_steps_of_the_host() -> None:
    """Blocks with the host between them look as well."""
    steps = [node("NonZero", "x", "at"), node("Shape", "at", "s"),
             node("Gather", "s i", "n"), node("Gather", "x j", "y")]
    session = Session(model(steps, {"x": (3, 4), "i": (1,), "j": (2,)}, ["n", "y"],
                            kinds=dict.fromkeys("ijn", INT64)))
    count, rows = session.run({"x": X, "i": np.array([1]), "j": np.array([2, 0])})
    assert count == [11]
    np.testing.assert_array_equal(rows, X[[2, 0]])
    with pytest.raises(IndexFault, match="index 3 "):
        session.run({"x": X, "i": np.array([1]), "j": np.array([2, 3])})
    with pytest.raises((IndexFault, IndexError, ModelError)):
        session.run({"x": X, "i": np.array([2]), "j": np.array([2, 0])})


def test_a_saved_model_looks_too(tmp_path: Path) -> None:
    session = Session(of("Gather", True))
    assert session.whole is not None
    session.whole.executable.save(tmp_path / "m.tzx")
    loaded = CompiledModel.load(tmp_path / "m.tzx")
    feeds = NODES["Gather"][1]
    np.testing.assert_array_equal(loaded.run({"x": X, **feeds})[0], X[:, feeds["i"]])
    with pytest.raises(IndexFault, match="index 7 "):
        loaded.run({"x": X, "i": np.array([[7]])})


def test_words_that_a_table_does_not_have() -> None:
    step = helper.make_node(
        "EmbedLayerNormalization", ["ids", "", "words", "places", "", "gamma", "beta"], ["y", ""],
        domain="com.microsoft")
    session = Session(model(
        [step], {"ids": ("b", "l")}, ["y"],
        {"words": X, "places": X, "gamma": np.ones(4, np.float32), "beta": np.zeros(4, np.float32)},
        kinds={"ids": TensorProto.INT32}, domains={"com.microsoft": 1}))
    assert session.run({"ids": np.array([[0, 2]], np.int32)})[0].shape == (1, 2, 4)
    for bad in ([[3]], [[-1]]):
        with pytest.raises(IndexFault, match="out of bounds"):
            session.run({"ids": np.array(bad, np.int32)})
    with pytest.raises(IndexFault, match="index 3 "):  # more words than there are places
        session.run({"ids": np.zeros((1, 4), np.int32)})
