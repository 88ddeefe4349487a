"""Runs like earlier ones go ways that were written down, with the results of any other run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from terrazzo.errors import ModelError
from terrazzo.frontends.onnx.session import Session
from terrazzo.frontends.onnx.session.block import Block

onnx = pytest.importorskip("onnx")
from onnx import parser  # noqa: E402

pytestmark = pytest.mark.onnx


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The blocks that ran by plans, part after part."""
    blocks: list[str] = []
    original = Block.run_from

    def run_from(self: Block, *args: Any) -> None:
        blocks.append(self.name)
        original(self, *args)

    monkeypatch.setattr(Block, "run_from", run_from)
    return blocks


def session_of(text: str) -> Session:
    return Session(parser.parse_model('<ir_version: 8, opset_import: ["" : 17]>\n' + text))


def test_contents_that_decide_a_plan(planned: list[str]) -> None:
    """Data says what it is reshaped to: equal numbers go the same way, others their own."""
    session = session_of("""g (float[n] x, int64[k] at) => (float[a, b] y) {
        found = NonZero(x)
        rows = Gather <axis=1> (found, at)
        shape = Add(rows, rows)
        flat = Squeeze(shape)
        y = Reshape(x, flat)
    }""")
    for _ in range(6):
        for places, shape in (((2, 1), (4, 2)), ((1, 2), (2, 4)), ((3, 1), (6, 2))):
            given = np.zeros(shape[0] * shape[1], np.float32)
            given[[1, 2, 3]] = 1 + np.arange(3)
            y, = session.run({"x": given, "at": np.array([p - 1 for p in places])})
            np.testing.assert_array_equal(y, given.reshape(shape))
    before = len(planned)
    for _ in range(3):
        y, = session.run({"x": given, "at": np.array([2, 0])})
        np.testing.assert_array_equal(y, given.reshape(6, 2))
    assert len(planned) == before


@pytest.mark.parametrize("kind", ["If", "Loop"])
def test_branches_and_bodies(kind: str, planned: list[str]) -> None:
    """They hold what the host does, and meet other sizes."""
    inside = {"If": """kept = If (more) <
            then_branch = a () => (float[m] p) { f = NonZero(x) r = Squeeze(f, zero)
                                                 p = Gather(x, r) },
            else_branch = b () => (float[m] q) { q = Identity(x) }>""",
              "Loop": """kept = Loop (two, more, x) <
            body = l (int64 i, bool c, float[m] s) => (bool d, float[m] t) {
                d = Identity(c) f = NonZero(s) r = Squeeze(f, zero) u = Gather(s, r)
                t = Sub(u, one) }>"""}[kind]
    session = session_of(f"""g (float[n] x, bool more) => (float[m] y)
        <int64[1] zero = {{0}}, int64 two = {{2}}, float[1] one = {{1.0}}> {{
        {inside}
        y = Identity(kept)
    }}""")

    def expected(x: np.ndarray, more: bool) -> np.ndarray:
        for _ in range(2 if kind == "Loop" else 1):
            x = x[x != 0] if more else x
            x = x - 1 if kind == "Loop" and more else x
        return x

    cases = [(np.array(x, np.float32), more) for x in ([1, 0, 2, 3], [0, 5, 0, 1, 2], [0, 1, 0, 4])
             for more in (True, False)]
    for _ in range(6):
        for x, more in cases:
            y, = session.run({"x": x, "more": np.array(more)})
            np.testing.assert_array_equal(y, expected(x, more))
            y += 7  # the caller's own
    before = len(planned)
    for x, more in cases:
        np.testing.assert_array_equal(session.run({"x": x, "more": np.array(more)})[0],
                                      expected(x, more))
    assert len(planned) == before


def test_a_step_that_fails_on_its_way_tells_what_it_is() -> None:
    session = session_of("""g (string[n] x, int64[k] at) => (string[k] y) {
        y = Gather(x, at)
    }""")
    words = np.array(["a", "b", "c"], object)
    for at in ([0, 2], [1, 1]):
        y, = session.run({"x": words, "at": np.array(at)})
        assert y.tolist() == [words[i] for i in at]
    with pytest.raises(ModelError, match="Gather cannot work with what it is given"):
        session.run({"x": words, "at": np.array([0, 3])})
    assert session.run({"x": words, "at": np.array([2, 0])})[0].tolist() == ["c", "a"]


def test_shapes_of_strings_are_known_beforehand(planned: list[str]) -> None:
    session = session_of("""g (string[n, m] x) => (float[a] y, string[b] z) <int64[1] all = {-1}> {
        shape = Shape(x)
        numbers = Cast <to=1> (shape)
        y = Exp(numbers)
        z = Reshape(x, all)
    }""")
    for _ in range(3):
        for rows, columns in ((1, 3), (2, 2)):
            x = np.full((rows, columns), "word", object)
            y, z = session.run({"x": x})
            np.testing.assert_allclose(y, np.exp([rows, columns]), rtol=1e-6)
            assert z.tolist() == ["word"] * (rows * columns)
    assert len(planned) == 2
