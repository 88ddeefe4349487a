"""Runs like an earlier one go straight to compiled code, and only those."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from terrazzo.errors import ModelError
from terrazzo.frontends.onnx.session import Session
from terrazzo.frontends.onnx.session.block import Block
from terrazzo.knobs import knobs
from terrazzo.runtime import fastcall
from terrazzo.runtime.executable import Executable

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper  # noqa: E402

pytestmark = pytest.mark.onnx


def session_of(shape: Any = (2, 3), **options: Any) -> Session:
    """y = exp(a) + b, z = a - b."""
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in "abyz"]
    nodes = [helper.make_node("Exp", ["a"], ["e"]), helper.make_node("Add", ["e", "b"], ["y"]),
             helper.make_node("Sub", ["a", "b"], ["z"])]
    return Session(helper.make_model(
        helper.make_graph(nodes, "g", infos[:2], infos[2:]),
        opset_imports=[helper.make_opsetid("", 17)], ir_version=8), **options)


def feeds_of(rng: np.random.Generator, *shape: int) -> dict[str, np.ndarray]:
    return {n: rng.normal(size=shape or (2, 3)).astype(np.float32) for n in "ab"}


def check(session: Session, feeds: dict[str, Any]) -> None:
    y, z = session.run(feeds)
    a, b = (np.asarray(feeds[n], np.float32) for n in "ab")
    # Of a sum that cancels, what is left is the rounding of its terms.
    np.testing.assert_allclose(y, np.exp(a) + b, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(z, a - b)


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the runs that go the general way."""
    runs: list[int] = []
    original = Executable.run

    def run(self: Executable, *args: Any, **kwargs: Any) -> Any:
        runs.append(1)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Executable, "run", run)
    return runs


@pytest.mark.parametrize("shape", [(2, 3), ("n", 3), ("n", "m")])
def test_the_second_run_is_direct(shape: Any, rng: np.random.Generator, slowly: list[int]) -> None:
    session = session_of(shape)
    for _ in range(3):
        check(session, feeds_of(rng))
    assert len(slowly) == 1
    if shape != (2, 3):
        check(session, feeds_of(rng, 5, 3))
        check(session, feeds_of(rng, 5, 3))
        assert len(slowly) == 2


def test_a_direct_run_is_a_dozen_calls(rng: np.random.Generator) -> None:
    """What a run costs beside arithmetic, counted so that no clock decides."""
    import terrazzo.ort as ort

    session = ort.InferenceSession(session_of().model.proto.SerializeToString())
    feeds = feeds_of(rng)
    session.run(None, feeds)
    calls: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            calls.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        session.run(None, feeds)
    finally:
        sys.setprofile(None)
    assert 3 <= len(calls) <= 30, calls


def test_layouts_of_every_kind(rng: np.random.Generator) -> None:
    session = session_of()
    wide = rng.normal(size=(4, 6)).astype(np.float32)
    views: list[Callable[[np.ndarray], np.ndarray]] = [
        lambda w: w[:2, :3].copy(), lambda w: w[::2, ::2], lambda w: w[:3, :2].T,
        lambda w: w[1::-1, 2::-1], lambda w: np.broadcast_to(w[0, :3], (2, 3)),
        lambda w: w[1:3, 2:5]]
    for _ in range(2):
        for left in views:
            for right in views:
                check(session, {"a": left(wide), "b": right(wide)})
    frozen = wide[:2, :3].copy()
    frozen.flags.writeable = False
    check(session, {"a": frozen, "b": frozen})


def test_what_does_not_fit_is_refused_after_a_direct_run_too(rng: np.random.Generator) -> None:
    session = session_of()
    feeds = feeds_of(rng)
    check(session, feeds)
    check(session, feeds)
    wrong = [{"a": feeds["a"]}, {**feeds, "c": feeds["a"]}, {"a": feeds["a"], "c": feeds["b"]},
             {**feeds, "a": feeds["a"].astype(np.float64)}, {**feeds, "a": feeds["a"][:1]},
             {**feeds, "b": feeds["b"].reshape(3, 2)}, {**feeds, "a": None}]
    for case in wrong:
        with pytest.raises(ModelError):
            session.run(case)
    with pytest.raises(ModelError, match="no output"):
        session.run(feeds, ["nothing"])
    check(session, {n: a.tolist() for n, a in feeds.items()})


def test_outputs_by_name(rng: np.random.Generator) -> None:
    session, feeds = session_of(), feeds_of(rng)
    y, z = session.run(feeds)
    for _ in range(2):
        for names in (["z"], ["y"], ["z", "y"], ["y", "y"], [], None):
            for name, got in zip(names or "yz", session.run(feeds, names), strict=True):
                np.testing.assert_array_equal(got, {"y": y, "z": z}[name])


def test_a_session_that_records_always_does(rng: np.random.Generator) -> None:
    session = session_of(profile=True)
    for _ in range(3):
        check(session, feeds_of(rng))
    assert session.profiles is not None and len(session.profiles) == 3


def test_threads_of_a_session_and_of_the_knob(rng: np.random.Generator) -> None:
    feeds = feeds_of(rng)
    for session in (session_of(threads=2), session_of(threads=0)):
        for threads in (1, 2, 1):
            with knobs.override(threads=threads):
                check(session, feeds)
                check(session, feeds)


def test_runs_side_by_side(rng: np.random.Generator) -> None:
    session = session_of(("n", 3))
    problems: list[BaseException] = []

    def work(rows: int) -> None:
        try:
            own = np.random.default_rng(rows)
            for _ in range(100):
                check(session, feeds_of(own, rows, 3))
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(rows,)) for rows in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert problems == []


def test_what_is_remembered_has_an_end(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
                                       ) -> None:
    monkeypatch.setattr(fastcall, "MOST_ENTRIES", 5)
    session = session_of(("n", 3))
    for rows in range(1, 20):
        check(session, feeds_of(rng, rows, 3))
    assert 0 < len(session._entries) <= 5


def test_a_model_without_inputs() -> None:
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, (2,)) for n in "yz"]
    values = [helper.make_tensor("v", TensorProto.FLOAT, (2,), v) for v in ([1, 2], [3, 4])]
    nodes = [helper.make_node("Constant", [], [n], value=v) for n, v in zip("yz", values)]
    session = Session(helper.make_model(
        helper.make_graph(nodes, "g", [], infos),
        opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    for _ in range(2):
        np.testing.assert_array_equal(session.run({}), [[1, 2], [3, 4]])
        np.testing.assert_array_equal(session.run({}, ["z"]), [[3, 4]])


# ---------------------------------------------------------------- models in parts
def top_session(**options: Any) -> Session:
    """The first min(k, limit) of x: how many results there are is a number of a call."""
    info = helper.make_tensor_value_info
    nodes = [helper.make_node("Min", ["limit", "k"], ["m"]),
             helper.make_node("TopK", ["x", "m"], ["v", "i"])]
    limit = helper.make_tensor("limit", TensorProto.INT64, (1,), [6])
    inputs = [info("x", TensorProto.FLOAT, [2, "n"]), info("k", TensorProto.INT64, [1]),
              info("limit", TensorProto.INT64, [1])]
    return Session(helper.make_model(
        helper.make_graph(nodes, "g", inputs, [info("v", TensorProto.FLOAT, [2, "m"]),
                                               info("i", TensorProto.INT64, [2, "m"])], [limit]),
        opset_imports=[helper.make_opsetid("", 17)], ir_version=8), **options)


def check_top(session: Session, x: np.ndarray, k: int, **more: np.ndarray) -> None:
    values, indices = session.run({"x": x, "k": np.array([k]), **more})
    count = min(k, int(more["limit"][0]) if more else 6)
    order = np.argsort(-x, -1, kind="stable")[:, :count]
    np.testing.assert_array_equal(indices, order)
    np.testing.assert_array_equal(values, np.take_along_axis(x, order, -1))


def test_parts_are_called_directly(rng: np.random.Generator, slowly: list[int]) -> None:
    session = top_session()
    x = [rng.normal(size=(2, n)).astype(np.float32) for n in (9, 9, 12)]
    for k in (5, 3, 4, 9):  # the second makes a symbol of k
        check_top(session, x[0], k)
    made, known = session.compilations, len(slowly)
    for k in (3, 4, 9, 3):
        check_top(session, x[1], k)
    assert len(slowly) == known, "the general way was taken again"
    for k in (4, 8):
        check_top(session, x[2], k)
        check_top(session, x[0][:, ::-1], k)
    check_top(session, x[1], 0)
    check_top(session, x[1], 3)
    assert session.compilations <= made + 4


def test_parts_see_overridden_weights(rng: np.random.Generator) -> None:
    session = top_session()
    x = rng.normal(size=(2, 9)).astype(np.float32)
    for k, limit in ((5, 4), (5, 3), (7, 4)):
        check_top(session, x, k)
        check_top(session, x, k, limit=np.array([limit]))
        check_top(session, x, k)


def test_parts_are_profiled(rng: np.random.Generator) -> None:
    session = top_session(profile=True)
    x = rng.normal(size=(2, 9)).astype(np.float32)
    for _ in range(3):
        check_top(session, x, 5)
    assert session.profiles is not None and len(session.profiles) == 6


def mapped_session() -> Session:
    """A label as a word and a map of scores for each row: two steps of the host after code."""
    info, ml = helper.make_tensor_value_info, "ai.onnx.ml"
    nodes = [helper.make_node("LinearClassifier", ["x"], ["label", "scores"], domain=ml,
                              coefficients=[1.0, 0.0, 0.0, 1.0], intercepts=[0.0, 0.0],
                              classlabels_strings=["left", "right"], multi_class=1),
             helper.make_node("ZipMap", ["scores"], ["map"], domain=ml,
                              classlabels_strings=["left", "right"])]
    kind = helper.make_sequence_type_proto(helper.make_map_type_proto(
        TensorProto.STRING, helper.make_tensor_type_proto(TensorProto.FLOAT, [])))
    return Session(helper.make_model(
        helper.make_graph(nodes, "g", [info("x", TensorProto.FLOAT, ["n", 2])],
                          [info("label", TensorProto.STRING, ["n"]),
                           helper.make_value_info("map", kind)]),
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid(ml, 3)], ir_version=8))


def check_mapped(session: Session, x: Any, names: Any = None) -> None:
    x = np.asarray(x, np.float32)
    want = {"label": np.where(x[:, 1] > x[:, 0], "right", "left").tolist(),
            "map": [{"left": a, "right": b} for a, b in x.tolist()]}
    got = session.run({"x": x}, names)
    for name, result in zip(names or ["label", "map"], got, strict=True):
        assert (result if name == "map" else result.tolist()) == want[name]


def test_a_known_way_is_not_looked_up_again(rng: np.random.Generator,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    session = mapped_session()
    looked: list[int] = []
    original = Block._part

    def part(self: Block, *args: Any) -> Any:
        looked.append(1)
        return original(self, *args)

    monkeypatch.setattr(Block, "_part", part)
    for rows in (1, 7):
        check_mapped(session, rng.normal(size=(rows, 2)))
        found = len(looked)
        for _ in range(3):
            check_mapped(session, rng.normal(size=(rows, 2)))
        assert len(looked) == found > 0
    for names in (["map"], ["map", "label"], ["label", "label"]) * 2:
        check_mapped(session, rng.normal(size=(3, 2)), names)
    kept = session.run({"x": np.ones((1, 2), np.float32)})
    kept[0][0], kept[1][0]["left"] = "mine", 77.0
    check_mapped(session, np.ones((1, 2)))


def test_what_contents_decide_is_looked_up(rng: np.random.Generator) -> None:
    """Some of what follows NonZero is compiled; how much there is differs from call to call."""
    info = helper.make_tensor_value_info
    nodes = [helper.make_node("NonZero", ["x"], ["at"]), helper.make_node("Neg", ["at"], ["y"]),
             helper.make_node("Shape", ["at"], ["z"])]
    session = Session(helper.make_model(
        helper.make_graph(nodes, "g", [info("x", TensorProto.FLOAT, [8])],
                          [info("y", TensorProto.INT64, None), info("z", TensorProto.INT64, [2]),
                           info("at", TensorProto.INT64, None)]),
        opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    for count in (3, 3, 5, 0, 1, 8, 3):
        x = np.zeros(8, np.float32)
        x[:count] = 1
        y, z, at = session.run({"x": x})
        np.testing.assert_array_equal(y, -np.arange(count)[None])
        np.testing.assert_array_equal(z, [1, count])
        np.testing.assert_array_equal(at, -y)


def test_inputs_that_had_to_be_converted_are_each_time() -> None:
    session = mapped_session()
    for x in ([[1.0, 2.0]], [[2.0, 1.0]], [[0.5, 2.0]]):
        label, _ = session.run({"x": x})
        assert label.tolist() == ["right" if x[0][1] > x[0][0] else "left"]


@pytest.mark.parametrize("unread", ["a", "b", "c"])
def test_an_input_that_nothing_reads(rng: np.random.Generator, slowly: list[int], unread: str
                                     ) -> None:
    one, two = (n for n in "abc" if n != unread)
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, (2, 3)) for n in "abcy"]
    session = Session(helper.make_model(
        helper.make_graph([helper.make_node("Sub", [one, two], ["y"])], "g", infos[:3], infos[3:]),
        opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    for _ in range(3):
        feeds = {n: rng.normal(size=(2, 3)).astype(np.float32) for n in "abc"}
        (y,) = session.run(feeds)
        np.testing.assert_array_equal(y, feeds[one] - feeds[two])
    assert len(slowly) == 1
