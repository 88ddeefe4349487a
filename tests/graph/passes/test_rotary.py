"""Rotary embeddings written out are found again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.chips.cpu.chip import Cpu
from terrazzo.graph.passes.rotary import ROTARY
from terrazzo.ops.shape import span

sys.path.insert(0, str(Path(__file__).parent))
from patterns import operators, rewritten

SIZE = 8


def half_turn(x: Any) -> Any:
    return tz.concat(-span(x, -1, SIZE // 2, SIZE), span(x, -1, 0, SIZE // 2), axis=-1)


def neighbours_turned(x: Any) -> Any:
    pair = -span(x, -1, 1, SIZE, 2), span(x, -1, 0, SIZE, 2)
    return tz.reshape(tz.concat(*(tz.expand_dims(p, axis=-1) for p in pair), axis=-1),
                      shape=x.shape)


def half_turn_by_a_factor(x: Any) -> Any:
    return tz.concat(span(x, 3, SIZE // 2, SIZE) * -1.0, span(x, 3, 0, SIZE // 2), axis=3)


FORMS: dict[str, Callable[..., Any]] = {
    "halves": lambda x, c, s: x * c + half_turn(x) * s,
    "halves, turned first": lambda x, c, s: s * half_turn(x) + c * x,
    "negated by a factor": lambda x, c, s: x * c + half_turn_by_a_factor(x) * s,
    "interleaved": lambda x, c, s: x * c + neighbours_turned(x) * s,
}


@pytest.fixture
def arrays(rng: np.random.Generator) -> list[np.ndarray]:
    x, angles = rng.standard_normal((2, 3, 5, SIZE)), rng.standard_normal((5, SIZE))
    return [a.astype(np.float32) for a in (x, np.cos(angles), np.sin(angles))]


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str, arrays: list[np.ndarray]) -> None:
    after, fired = rewritten(ROTARY, FORMS[name], *arrays)
    assert fired == {"rotary embedding"} and operators(after) == ["rotary_embedding"]
    assert after.nodes[-1].attrs["interleaved"] == (name == "interleaved")


def test_half_types(arrays: list[np.ndarray]) -> None:
    for name in ("halves", "interleaved"):
        fired = rewritten(ROTARY, FORMS[name], *(a.astype(np.float16) for a in arrays))[1]
        assert fired == {"rotary embedding"}


@pytest.mark.parametrize("turned", [
    lambda x: tz.concat(span(x, -1, 4, 8), span(x, -1, 0, 4), axis=-1),  # nothing negated
    lambda x: tz.concat(span(x, -1, 4, 8), -span(x, -1, 0, 4), axis=-1),
    lambda x: tz.concat(-span(x, -1, 0, 4), span(x, -1, 4, 8), axis=-1),
    lambda x: tz.concat(-span(x, -1, 2, 8), span(x, -1, 0, 2), axis=-1),  # no halves
    lambda x: half_turn(x * 2.0),  # of something else
    lambda x: tz.reshape(tz.concat(*(tz.expand_dims(p, axis=-1) for p in (
        -span(x, -1, 0, 8, 2), span(x, -1, 1, 8, 2))), axis=-1), shape=x.shape),
])
def test_what_is_something_else_stays(turned: Callable[..., Any], arrays: list[np.ndarray]
                                      ) -> None:
    assert rewritten(ROTARY, lambda x, c, s: x * c + turned(x) * s, *arrays)[1] == set()


@pytest.mark.parametrize("name", ["halves", "interleaved"])
def test_is_one_kernel(name: str, arrays: list[np.ndarray]) -> None:
    from patterns import graph_of

    from terrazzo.compiler.driver import compile_graph
    from terrazzo.compiler.lowering import Lowering

    graph = graph_of(FORMS[name], *arrays)
    assert len(Lowering(graph, Cpu()).fused.groups) == 1
    x, c, s = (a.astype(np.float64) for a in arrays)
    turned = np.empty_like(x)
    if name == "halves":
        turned[..., :4], turned[..., 4:] = -x[..., 4:], x[..., :4]
    else:
        turned[..., 0::2], turned[..., 1::2] = -x[..., 1::2], x[..., 0::2]
    np.testing.assert_allclose(compile_graph(graph).run(arrays)[0], x * c + turned * s,
                               rtol=1e-6, atol=1e-6)
