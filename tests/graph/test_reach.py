"""Indices that data tells: which are inside for sure, and what is said of those that are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.compiler.driver import compile_graph
from terrazzo.errors import IndexFault
from terrazzo.graph import evaluate
from terrazzo.graph.applying import constant
from terrazzo.graph.ir import Graph, TensorType, Value, operator_named
from terrazzo.graph.reach import Reach, collecting, fault, must_reach, outside
from terrazzo.graph.scopes import trace_scope
from terrazzo.graph.trace import trace
from terrazzo.index import Var

N = Var("n", 1)
X = Value(TensorType((N, 5), tz.float32), name="x")
I64 = Value(TensorType((7,), tz.int64), name="i")
U8 = Value(TensorType((7,), tz.uint8), name="b")

INSIDE: dict[str, tuple[Callable[[], Any], Any]] = {
    "arange": (lambda: tz.arange(start=N), N),
    "arange, turned over and cut": (lambda: tz.flip(tz.arange(start=N), axis=0)[1:], N),
    "the largest of a row": (lambda: tz.argmax(X, axis=1), 5),
    "the largest of a column": (lambda: tz.argmin(X, axis=0), N),
    "the largest of all": (lambda: tz.argmax(X), N * 5),
    "clipped": (lambda: tz.clip(I64, min=0, max=4), 5),
    "of two": (lambda: tz.where(I64 > 0, np.int64(3), np.int64(-5)), 5),
    "side by side": (lambda: tz.concat(tz.argmax(X, axis=1), np.array([0, 4])), 5),
    "of fewer bits": (lambda: tz.astype(tz.argmax(X, axis=1), dtype="int32"), 5),
    "bytes": (lambda: U8, 256),
    "windows": (lambda: tz.arange(start=N)[:, None] * 2 + tz.arange(start=3), N * 2 + 1),
    "from the end": (lambda: N - 1 - tz.arange(start=N), N),
}
OUTSIDE: dict[str, tuple[Callable[[], Any], Any]] = {
    "anything": (lambda: I64, 5),
    "bytes": (lambda: U8, 255),
    "arange": (lambda: tz.arange(start=N), 5),
    "one too many": (lambda: tz.arange(start=N), N - 1),
    "the largest of another row": (lambda: tz.argmax(X, axis=1), 4),
    "clipped too late": (lambda: tz.clip(I64, min=0, max=5), 5),
    "clipped at one end": (lambda: tz.minimum(I64, 4), 5),
    "one of two": (lambda: tz.where(I64 > 0, np.int64(3), I64), 5),
    "computed": (lambda: tz.argmax(X, axis=1) + 1, 5),
    "windows": (lambda: tz.arange(start=N)[:, None] * 2 + tz.arange(start=3), N * 2),
    "a product of what may be negative": (lambda: (tz.arange(start=5) - 2) * -2, 4),
    "a sum beyond its type": (lambda: U8 + U8, 255),
    "a sum of anything": (lambda: I64 + I64, 5),
}


def heard(made: Callable[[], Any], size: Any, **kwargs: Any) -> int:
    with trace_scope(), collecting() as listener:
        must_reach(made(), size, **kwargs)
        return len(listener.reaches)


@pytest.mark.parametrize("name", INSIDE)
def test_what_is_inside_for_sure_is_not_looked_at(name: str) -> None:
    assert heard(*INSIDE[name]) == 0


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_may_be_outside_is(name: str) -> None:
    assert heard(*OUTSIDE[name]) == 1


def test_constants() -> None:
    for items, size, wraps, found in [((4, -5, 0), 5, True, 0), ((4, -5), 5, False, 1),
                                      ((5,), 5, True, 1), ((-6,), 5, True, 1), ((), 5, True, 0)]:
        assert heard(lambda items=items: constant(np.array(items, np.int64)), size,
                     wraps=wraps) == found


def test_each_is_heard_once_and_of_its_own_trace() -> None:
    with trace_scope(), collecting() as listener:
        must_reach(I64, 5)
        must_reach(I64, 5)
        must_reach(I64, 5, wraps=False)
        must_reach(I64, 6)
        trace(lambda i: must_reach(i, 3) or i, [TensorType((7,), tz.int64)])
        assert len(listener.reaches) == 3
    must_reach(I64, 5)  # nobody listens
    assert len(listener.reaches) == 3


@pytest.mark.parametrize("index", [5, -6, 1000, -1000, 2**31, -2**31])
@pytest.mark.parametrize("at", [0, 3, 6])
def test_the_error_tells_which_and_where(index: int, at: int) -> None:
    reaches = [Reach(U8, 0, 256, "first"), Reach(I64, -5, 5, "second")]
    graph = Graph("g", (I64, U8), (outside(reaches),))
    places, fine = np.zeros(7, np.int64), np.zeros(7, np.uint8)
    (word,) = evaluate.run(graph, [places, fine])
    assert int(word) == 0
    places[at] = index
    (word,) = evaluate.run(graph, [places, fine])
    error = fault(int(word), [r[1:] for r in reaches], {})
    assert error.message == f"index {index} is out of bounds: it must be from -5 to 4"
    assert error.where == "second"


@pytest.mark.parametrize("index", [2**62, -2**62, 2**63 - 1, -2**63])
def test_an_index_far_away_is_outside(index: int) -> None:
    graph = Graph("g", (I64,), (outside([Reach(I64, -5, 5, "")]),))
    places = np.zeros(7, np.int64)
    places[2] = index
    (word,) = evaluate.run(graph, [places])
    assert int(word) > 0
    text = fault(int(word), [(-5, 5, "")], {}).message
    assert text.startswith("index -" if index < 0 else "index 2")


def test_an_executable_raises_and_goes_on() -> None:
    graph = Graph("g", (X, I64), (operator_named("take")(X, I64, axis=0),))
    run = compile_graph(graph, reaches=[Reach(I64, -N, N, "here")])
    x = np.arange(15, dtype=np.float32).reshape(3, 5)
    assert [s for _, s in run.output_types] == [(7, 5)]
    for _ in range(2):
        good = np.array([0, 1, 2, -1, -2, -3, 0])
        np.testing.assert_array_equal(run(x, good), x[good])
        for bad in (3, -4):
            with pytest.raises(IndexFault, match=rf"index {bad} .* from -3 to 2") as caught:
                run(x, np.array([0, 1, 2, -1, -2, -3, bad]))
            assert caught.value.where == "here"
            assert isinstance(caught.value, IndexError) and isinstance(caught.value, RuntimeError)


def test_a_file_of_it_raises_too(tmp_path: Any) -> None:
    graph = Graph("g", (X, I64), (operator_named("take")(X, I64, axis=0),))
    compile_graph(graph, reaches=[Reach(I64, -N, N, "here")]).save(tmp_path / "g.tzx")
    run = tz.load(tmp_path / "g.tzx")
    x = np.ones((3, 5), np.float32)
    np.testing.assert_array_equal(run(x, np.zeros(7, np.int64)), np.ones((7, 5)))
    with pytest.raises(IndexFault, match="index 9 "):
        run(x, np.full(7, 9))


def test_beside_what_the_host_runs() -> None:
    square = Value(TensorType((4, 4), tz.float32), name="x")
    with trace_scope():
        made = operator_named("inv")(operator_named("take")(square, I64[:4], axis=0))
    run = compile_graph(Graph("g", (square, I64), (made,)), reaches=[Reach(I64, -4, 4, "here")])
    x = np.eye(4, dtype=np.float32) * 2
    places = np.array([1, 0, 3, 2, 0, 0, 0])
    (result,) = run.run([x, places])
    np.testing.assert_allclose(result, np.linalg.inv(x[places[:4]]), rtol=1e-6)
    with pytest.raises(IndexFault, match="index 4 "):
        run.run([x, np.array([1, 0, 3, 2, 0, 0, 4])])


def test_beside_control_flow() -> None:
    def body(x: Any, i: Any) -> Any:
        rows = operator_named("take")(x, i, axis=0)
        return tz.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * 2),
                             (np.int64(0), rows))[1]

    graph = trace(body, [TensorType((3, 5), tz.float32), TensorType((7,), tz.int64)],
                  names=["x", "i"])[0]
    run = compile_graph(graph, reaches=[Reach(graph.inputs[1], -3, 3, "here")])
    x = np.ones((3, 5), np.float32)
    np.testing.assert_array_equal(run(x, np.zeros(7, np.int64)), np.full((7, 5), 8))
    with pytest.raises(IndexFault, match="index -4 "):
        run(x, np.full(7, -4))
