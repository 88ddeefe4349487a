"""Sessions: whole models, parts with host steps between, symbolic sizes, and mistakes."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import terrazzo as tz
from terrazzo.errors import ModelError, UnsupportedOperator
from terrazzo.frontends.onnx.session import Session

sys.path.insert(0, str(Path(__file__).parents[1] / "frontends" / "onnx"))
from models import model, node

INT64, BOOL = TensorProto.INT64, TensorProto.BOOL


def expect(proto: onnx.ModelProto, feeds: dict[str, Any], **options: Any) -> Session:
    """A session answers what onnx's reference does."""
    session = Session(proto, **options)
    wanted = ReferenceEvaluator(proto).run(None, feeds)
    for got, want in zip(session.run(feeds), wanted, strict=True):
        assert np.asarray(got).dtype == np.asarray(want).dtype
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    return session


def mlp(batch: Any = 4) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    return model(
        [node("Gemm", "x w b", "h"), node("Relu", "h", "r"), node("MatMul", "r v", "y")],
        {"x": (batch, 8)}, ["y"],
        {"w": rng.standard_normal((8, 16), np.float32), "b": np.ones(16, np.float32),
         "v": rng.standard_normal((16, 3), np.float32)})


def test_a_static_model_is_one_executable(rng: np.random.Generator) -> None:
    session = expect(mlp(), {"x": rng.standard_normal((4, 8), np.float32)})
    assert session.whole is not None
    assert [(p.name, p.shape) for p in session.inputs] == [("x", (4, 8))]


def test_symbolic_sizes_need_one_compilation(rng: np.random.Generator) -> None:
    session = Session(mlp("batch"))
    reference = ReferenceEvaluator(mlp("batch"))
    for n in (1, 3, 17):
        x = rng.standard_normal((n, 8), np.float32)
        np.testing.assert_allclose(session.run({"x": x})[0], reference.run(None, {"x": x})[0],
                                   rtol=1e-5, atol=1e-5)
    assert session.whole is not None and session.whole.executable.dims


def test_a_model_is_found_in_the_cache(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch,
                                       tmp_path: Path) -> None:
    x = rng.standard_normal((4, 8), np.float32)
    with tz.knobs.override(cache_dir=str(tmp_path), cache=True):
        before = Session(mlp()).run({"x": x})[0]
        monkeypatch.setattr(Session, "imported", property(lambda self: pytest.fail("imported")))
        assert np.array_equal(Session(mlp()).run({"x": x})[0], before)


def test_shapes_may_hang_on_the_contents_of_inputs(rng: np.random.Generator) -> None:
    proto = model([node("Reshape", "x shape", "y"), node("Relu", "y", "z")],
                  {"x": (2, 6), "shape": ("n",)}, ["z"], kinds={"shape": INT64})
    x = rng.standard_normal((2, 6), np.float32)
    session = Session(proto)
    for shape in ([3, 4], [12], [2, 2, 3], [3, 4]):
        (y,) = session.run({"x": x, "shape": np.array(shape)})
        assert np.array_equal(y, np.maximum(x, 0).reshape(shape))


def test_shapes_may_hang_on_what_was_computed(rng: np.random.Generator) -> None:
    proto = model(
        [node("Exp", "x", "e"), node("NonZero", "x", "places"), node("Shape", "places", "s"),
         node("Expand", "one s", "ones"), node("Mul", "ones k", "y"), node("Add", "e e", "z")],
        {"x": (2, 3)}, ["y", "z"], {"one": np.float32([1]), "k": np.float32([2])})
    x = np.float32([[1, 0, 2], [0, 0, 3]])
    expect(proto, {"x": x}, reference=False)
    expect(proto, {"x": np.zeros((2, 3), np.float32)}, reference=False)


# ---------------------------------------------------------------- control flow
def branch(value: float) -> Any:
    return helper.make_graph([node("Mul", "x k", "r", name=f"times{value}")], "branch", [],
                             [helper.make_tensor_value_info("r", TensorProto.FLOAT, None)],
                             [helper.make_tensor("k", TensorProto.FLOAT, (), [value])])


def test_if() -> None:
    proto = model([node("If", "c", "y", then_branch=branch(2), else_branch=branch(3))],
                  {"c": (), "x": (2,)}, ["y"], kinds={"c": BOOL})
    for c in (True, False):
        expect(proto, {"c": np.array(c), "x": np.float32([1, 2])}, reference=False)


def test_loop() -> None:
    body = helper.make_graph(
        [node("Add", "a x", "b"), node("Identity", "c", "d"), node("Mul", "b b", "square")], "body",
        [helper.make_tensor_value_info("i", INT64, ()),
         helper.make_tensor_value_info("c", BOOL, ()),
         helper.make_tensor_value_info("a", TensorProto.FLOAT, (2,))],
        [helper.make_tensor_value_info("d", BOOL, ()),
         helper.make_tensor_value_info("b", TensorProto.FLOAT, (2,)),
         helper.make_tensor_value_info("square", TensorProto.FLOAT, (2,))])
    proto = model([node("Loop", "n _ start", "last all", body=body)],
                  {"n": (), "start": (2,), "x": (2,)}, ["last", "all"], kinds={"n": INT64})
    for n in (0, 1, 5):
        session = Session(proto, reference=False)
        last, every = session.run({"n": np.array(n), "start": np.float32([1, 2]),
                                   "x": np.float32([1, 1])})
        assert last.tolist() == [1 + n, 2 + n] and every.shape == (n, 2)


# ---------------------------------------------------------------- the reference provider
def test_the_reference_is_used_and_said(caplog: pytest.LogCaptureFixture) -> None:
    proto = model([node("Exp", "x", "e"), node("StringNormalizer", "s", "t")],
                  {"x": (2,), "s": (2,)}, ["e", "t"],
                  kinds={"s": TensorProto.STRING, "t": TensorProto.STRING})
    proto.graph.node[1].attribute.append(helper.make_attribute("case_change_action", "UPPER"))
    feeds = {"x": np.float32([0, 1]), "s": np.array(["a", "b"], object)}
    with caplog.at_level(logging.WARNING, "terrazzo"):
        e, t = Session(proto).run(feeds)
    assert list(t) == ["A", "B"] and e[0] == 1


def test_without_the_reference_the_error_names_the_node() -> None:
    proto = model([node("NoSuchOperator", "x", "y", name="odd one", domain="some.where")],
                  {"x": (2,)}, ["y"], domains={"some.where": 1})
    with pytest.raises(UnsupportedOperator, match="odd one"):
        Session(proto, reference=False).run({"x": np.zeros(2, np.float32)})


# ---------------------------------------------------------------- mistakes
@pytest.mark.parametrize(("feeds", "message"), [
    ({}, "needs its input 'x'"),
    ({"x": np.zeros((4, 8), np.float32), "q": 1}, "no input 'q'"),
    ({"x": np.zeros((4, 8), np.float64)}, "is float64"),
    ({"x": np.zeros((4, 9), np.float32)}, r"shape \(4, 9\)"),
    ({"x": np.zeros((4, 8, 1), np.float32)}, "3 dimensions"),
])
def test_wrong_inputs(feeds: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Session(mlp()).run(feeds)


def test_an_unknown_output() -> None:
    with pytest.raises(ModelError, match="no output 'q'"):
        Session(mlp()).run({"x": np.zeros((4, 8), np.float32)}, ["q"])


# ---------------------------------------------------------------- running
def test_many_threads_one_session(rng: np.random.Generator) -> None:
    session = Session(mlp())
    inputs = [rng.standard_normal((4, 8), np.float32) for _ in range(8)]
    wanted = [session.run({"x": x})[0].tobytes() for x in inputs]
    wrong: list[int] = []

    def work(k: int) -> None:
        for i in range(50):
            n = (k + i) % len(inputs)
            if session.run({"x": inputs[n]})[0].tobytes() != wanted[n]:
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_outputs_go_where_they_are_wanted(rng: np.random.Generator) -> None:
    session, x = Session(mlp()), rng.standard_normal((4, 8), np.float32)
    target = np.zeros((4, 3), np.float32)
    (y,) = session.run({"x": x}, into={"y": target})
    assert y is target and np.array_equal(target, session.run({"x": x})[0])


def test_initialisers_may_be_overridden(rng: np.random.Generator) -> None:
    proto = model([node("Mul", "x w", "y")], {"x": (3,), "w": (3,)}, ["y"],
                  {"w": np.full(3, 2, np.float32)})
    session, x = Session(proto), np.float32([1, 2, 3])
    assert [p.name for p in session.overridable] == ["w"]
    assert session.run({"x": x})[0].tolist() == [2, 4, 6]
    assert session.run({"x": x, "w": x})[0].tolist() == [1, 4, 9]


def test_local_functions_are_inlined() -> None:
    function = helper.make_function(
        "mine", "Twice", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])],
        [helper.make_opsetid("", 20)])
    proto = model([node("Twice", "x", "y", domain="mine")], {"x": (2,)}, ["y"],
                  functions=[function], domains={"mine": 1})
    assert Session(proto).run({"x": np.float32([1, 2])})[0].tolist() == [2, 4]


def test_an_operator_of_the_users_in_a_model(rng: np.random.Generator) -> None:
    @tz.op(domain="my.domain")
    def shifted_square(x: Any, *, by: float = 0.0) -> Any:
        return (x + by) * (x + by)

    proto = model([node("shifted_square", "x", "y", domain="my.domain", by=2.0)], {"x": (3,)},
                  ["y"], domains={"my.domain": 1})
    x = rng.standard_normal(3, np.float32)
    np.testing.assert_allclose(Session(proto, reference=False).run({"x": x})[0], (x + 2) ** 2,
                               rtol=1e-6)
    proto.graph.node[0].attribute[0].name = "wrong"
    with pytest.raises(UnsupportedOperator, match="'wrong'"):
        Session(proto, reference=False).run({"x": x})
