"""Attention written out is found again, however it is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.graph import evaluate
from terrazzo.graph.ir import Graph, TensorType
from terrazzo.graph.passes.attention import ATTENTION
from terrazzo.graph.rewrite import rewrite
from terrazzo.graph.trace import trace

SHAPE = (2, 3, 5, 4)  # batch, heads, places, size
CAUSAL = np.triu(np.full((5, 5), -3.4028235e38, np.float32), 1)


def swap(x: Any) -> Any:
    return tz.permute_dims(x, axes=(0, 1, 3, 2))


def swap_merged(x: Any) -> Any:
    flat = tz.reshape(x, shape=(6, 5, 4))
    return tz.reshape(tz.permute_dims(flat, axes=(0, 2, 1)), shape=(2, 3, 4, 5))


def guarded(scores: Any) -> Any:
    soft = tz.softmax(scores, axis=-1)
    return tz.where(tz.isnan(soft), 0.0, soft)


def one_by_one(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    """As torch takes it apart for a device: each product of all heads of all batches."""
    def merged(x: Any) -> Any:
        return tz.reshape(x, shape=(6, *x.shape[-2:]))

    scores = tz.reshape(merged(q * 0.7) @ merged(swap(k) * 0.7), shape=(2, 3, 5, 5))
    weights = tz.safe_softmax(scores if mask is None else scores + mask, axis=-1)
    return tz.reshape(merged(weights) @ merged(v), shape=SHAPE)


FORMS: dict[str, Callable[..., Any]] = {
    "plain": lambda q, k, v, m: tz.softmax(q @ swap(k), axis=3) @ v,
    "scale on scores": lambda q, k, v, m: tz.softmax((q @ swap(k)) * 0.5) @ v,
    "divided": lambda q, k, v, m: tz.softmax((q @ swap(k)) / 2.0) @ v,
    "scale on both": lambda q, k, v, m: tz.softmax((q * 0.7) @ (swap_merged(k) * 0.7)) @ v,
    "guard": lambda q, k, v, m: guarded((q * 0.7) @ (swap(k) * 0.7)) @ v,
    "added mask": lambda q, k, v, m: tz.softmax(q @ swap(k) * 0.5 + m) @ v,
    "boolean mask": lambda q, k, v, m: tz.softmax(
        tz.where(m > 0, q @ swap(k) * 0.5, -3.4028235e38)) @ v,
    "causal": lambda q, k, v, m: guarded((q * 0.7) @ (swap(k) * 0.7) + CAUSAL) @ v,
    "merged axes": lambda q, k, v, m: one_by_one(q, k, v),
    "merged axes and a mask": one_by_one,
    "causal with merged axes": lambda q, k, v, m: one_by_one(q, k, v, CAUSAL),
    "causal for each of a batch": lambda q, k, v, m: tz.softmax(
        q @ swap(k) + np.stack([CAUSAL[None]] * 2)) @ v,
}


def graph_of(function: Callable[..., Any], *arrays: np.ndarray) -> Graph:
    return trace(function, [TensorType(a.shape, tz.dtypes.as_dtype(a.dtype)) for a in arrays])[0]


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str, rng: np.random.Generator) -> None:
    q, k, v = (rng.standard_normal(SHAPE, np.float32) for _ in range(3))
    mask = rng.standard_normal((2, 1, 5, 5), np.float32)
    graph = graph_of(FORMS[name], q, k, v, mask)
    after, applied = rewrite(graph, ATTENTION)
    assert "attention" in {a.rule for a in applied}
    (found,) = [n for n in after.nodes if n.op.name == "scaled_dot_product_attention"]
    assert found.attrs["causal"] == name.startswith("causal")
    assert not any(n.op.name in ("softmax", "safe_softmax") for n in after.nodes)
    (before,), (now,) = (evaluate.run(g, [q, k, v, mask]) for g in (graph, after))
    np.testing.assert_allclose(now, before, rtol=2e-5, atol=1e-6)


def test_rows_that_see_nothing_stay_zeros(rng: np.random.Generator) -> None:
    q, k, v = (rng.standard_normal(SHAPE, np.float32) for _ in range(3))
    mask = np.where(np.arange(5)[:, None] == 2, -np.inf, np.zeros((5, 5))).astype(np.float32)
    graph = graph_of(one_by_one, q, k, v, mask)
    after, _ = rewrite(graph, ATTENTION)
    assert "scaled_dot_product_attention" in {n.op.name for n in after.nodes}
    (before,), (now,) = (evaluate.run(g, [q, k, v, mask]) for g in (graph, after))
    np.testing.assert_allclose(now, before, rtol=2e-5, atol=1e-6)
    assert not now[:, :, 2].any()


def test_grouped_heads_are_not_repeated(rng: np.random.Generator) -> None:
    q = rng.standard_normal((2, 6, 5, 4), np.float32)
    k, v = (rng.standard_normal((2, 2, 5, 4), np.float32) for _ in range(2))

    def repeated(x: Any) -> Any:
        spread = tz.broadcast_to(tz.reshape(x, shape=(2, 2, 1, 5, 4)), shape=(2, 2, 3, 5, 4))
        return tz.reshape(spread, shape=(2, 6, 5, 4))

    graph = graph_of(lambda q, k, v: tz.softmax(q @ swap(repeated(k))) @ repeated(v), q, k, v)
    after, _ = rewrite(graph, ATTENTION)
    (found,) = [n for n in after.nodes if n.op.name == "scaled_dot_product_attention"]
    assert [i.shape for i in found.inputs[:3]] == [(2, 6, 5, 4), (2, 2, 5, 4), (2, 2, 5, 4)]
    (before,), (now,) = (evaluate.run(g, [q, k, v]) for g in (graph, after))
    np.testing.assert_allclose(now, before, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("merged", [False, True])
def test_repeated_keys_that_are_transposed_through_merged_axes(merged: bool,
                                                               rng: np.random.Generator) -> None:
    """Exporters join the reshape that ends repetition with the one that begins the transpose."""
    q = rng.standard_normal((2, 6, 5, 4), np.float32)
    k, v = (rng.standard_normal((2, 2, 5, 4), np.float32) for _ in range(2))

    def spread(x: Any) -> Any:
        return tz.broadcast_to(tz.reshape(x, shape=(2, 2, 1, 5, 4)), shape=(2, 2, 3, 5, 4))

    def form(q: Any, k: Any, v: Any) -> Any:
        shape = (12, 5, 4) if merged else (3, 4, 5, 4)
        keys = tz.reshape(spread(k), shape=shape)
        axes = (0, 2, 1) if merged else (0, 1, 3, 2)
        keys = tz.reshape(tz.permute_dims(keys, axes=axes), shape=(2, 6, 4, 5))
        return tz.softmax(q @ keys) @ tz.reshape(spread(v), shape=(2, 6, 5, 4))

    graph = graph_of(form, q, k, v)
    after, _ = rewrite(graph, ATTENTION)
    (found,) = [n for n in after.nodes if n.op.name == "scaled_dot_product_attention"]
    heads = {i.shape[1] for i in found.inputs[1:3]}
    assert heads == ({2} if merged else {6}), "both without repetition, or none"
    (before,), (now,) = (evaluate.run(g, [q, k, v]) for g in (graph, after))
    np.testing.assert_allclose(now, before, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("function", [
    lambda q, k, v: tz.softmax(q @ swap(k), axis=2) @ v,  # another axis
    lambda q, k, v: (q @ swap(k)) @ v,
    lambda q, k, v: tz.softmax(tz.exp(q @ swap(k))) @ v,
])
def test_what_is_something_else_stays(function: Callable[..., Any],
                                      rng: np.random.Generator) -> None:
    graph = graph_of(function, *(rng.standard_normal(SHAPE, np.float32) for _ in range(3)))
    assert not any(a.rule == "attention" for a in rewrite(graph, ATTENTION)[1])
