"""Attention against torch: masks, causality, grouped heads, types and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from checking import (
    HALVES,
    check_gradient,
    close,
    draw,
    evaluate,
    from_torch,
    infer,
    op,
    to_torch,
)

import terrazzo as tz
from terrazzo.base.shapes import dims
from terrazzo.dtypes import float32
from terrazzo.errors import RankError, ShapeError
from terrazzo.graph.ir import TensorType

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
attention = op("scaled_dot_product_attention")


def by_torch(q, k, v, mask=None, **kwargs):
    function = torch.nn.functional.scaled_dot_product_attention
    return from_torch(function(*map(to_torch, (q, k, v)), to_torch(mask), **kwargs))


def qkv(rng, q, k, size=4, dtype="float32"):
    return (draw(rng, (*q, size), dtype), draw(rng, (*k, size), dtype),
            draw(rng, (*k, size + 1), dtype))


@pytest.mark.parametrize("dtype", ["float64", "float32", *HALVES])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("q", "k"), [((2, 3, 5), (2, 3, 5)), ((2, 3, 5), (2, 3, 7)),
                                      ((3, 7), (3, 2)), ((5,), (5,)), ((1, 2, 1), (1, 2, 1))])
def test_attention(rng, q, k, causal, dtype):
    arrays = qkv(rng, q, k, dtype=dtype)
    close(evaluate(attention, *arrays, causal=causal), by_torch(*arrays, is_causal=causal))


@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (2, 1, 5, 7), (2, 3, 5, 7), (3, 5, 7)])
@pytest.mark.parametrize("dtype", ["bool", "float32"])
def test_masks(rng, dtype, shape):
    arrays = qkv(rng, (2, 3, 5), (2, 3, 7))
    mask = draw(rng, shape, dtype)
    close(evaluate(attention, *arrays, mask), by_torch(*arrays, mask))


@pytest.mark.parametrize("dtype", ["bool", "float32"])
def test_query_that_sees_no_key_gives_zeros(rng, dtype):
    arrays = qkv(rng, (2, 5), (2, 7))
    mask = np.ones((5, 7), bool)
    mask[1] = False
    mask[2, 3:] = False
    if dtype == "float32":
        mask = np.where(mask, np.float32(0), np.float32(-np.inf))
    got = evaluate(attention, *arrays, mask)
    assert (got[:, 1] == 0).all()
    close(got, by_torch(*arrays, mask))


@pytest.mark.parametrize("mask", [None, (5, 7), (6, 5, 7), (2, 1, 5, 7)])
@pytest.mark.parametrize("kv_heads", [1, 2, 3])
def test_grouped_heads(rng, kv_heads, mask):
    arrays = qkv(rng, (2, 6, 5), (2, kv_heads, 7))
    given = None if mask is None else draw(rng, mask)
    got = evaluate(attention, *arrays, given)
    close(got, by_torch(*arrays, given, enable_gqa=True))


def test_causal_with_a_mask(rng):
    arrays, mask = qkv(rng, (2, 5), (2, 5)), draw(rng, (5, 5), "bool")
    both = mask & np.tri(5, dtype=bool)
    close(evaluate(attention, *arrays, mask, causal=True), by_torch(*arrays, both))


def test_scale(rng):
    arrays = qkv(rng, (2, 5), (2, 7))
    close(evaluate(attention, *arrays, scale=0.25), by_torch(*arrays, scale=0.25))


def test_no_keys_give_zeros(rng):
    got = evaluate(attention, *qkv(rng, (2, 5), (2, 0)))
    assert got.shape == (2, 5, 5) and (got == 0).all()


@pytest.mark.parametrize("causal", [False, True])
def test_symbolic_sizes(rng, causal):
    b, n, m, d = dims("b n m d")
    arrays = (draw(rng, (3, 4, 5, 2)), draw(rng, (3, 2, 7, 2)), draw(rng, (3, 2, 7, 2)))
    shapes = [(b, 4, n, d), (b, 2, m, d), (b, 2, m, d)]
    close(evaluate(attention, *arrays, causal=causal, shapes=shapes),
          evaluate(attention, *arrays, causal=causal))


def test_scores_stay_in_float32(rng):
    """Scores of some thousands differ by less than float16 can tell."""
    q, k = np.full((1, 64), 8, np.float16), np.full((2, 64), 8, np.float16)
    k[1, 0] += 0.0078125
    v = np.array([[0.0], [1.0]], np.float16)
    close(evaluate(attention, q, k, v, scale=1.0), [[1 / (1 + np.exp(-0.0625))]])


@pytest.mark.parametrize(("q", "k", "v", "error", "match"), [
    ((2, 5, 4), (2, 7, 3), (2, 7, 4), ShapeError, "last size"),
    ((2, 5, 4), (2, 7, 4), (2, 6, 4), ShapeError, "number of keys"),
    ((6, 5, 4), (4, 7, 4), (4, 7, 4), ShapeError, "4 heads of k"),
    ((4,), (7, 4), (7, 4), RankError, "places, size"),
])
def test_refuses(q, k, v, error, match):
    with pytest.raises(error, match=match):
        infer(attention, *(TensorType(s, float32) for s in (q, k, v)))


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients(rng, causal, kv_heads):
    arrays = qkv(rng, (2, 3), (kv_heads, 3), size=2)
    check_gradient(attention, *arrays, wrt=(0, 1, 2), causal=causal)


def test_gradient_of_an_added_mask(rng):
    check_gradient(attention, *qkv(rng, (2, 3), (2, 2), size=2), draw(rng, (3, 2)), wrt=(0, 3))


def test_gradient_past_masked_rows(rng):
    mask = np.array([[True, True], [False, False], [True, False]])
    check_gradient(attention, *qkv(rng, (1, 3), (1, 2), size=2), mask, wrt=(0, 1, 2))


# ---------------------------------------------------------------- rotary embeddings
def turned(x, cos, sin, interleaved):
    """By complex numbers, in float64."""
    half = x.shape[-1] // 2
    first, second = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (
        slice(0, half), slice(half, None))
    x, cos, sin = (np.asarray(a, np.float64) for a in (x, cos, sin))
    angle = np.broadcast_to(cos, x.shape)[..., first] + 1j * np.broadcast_to(sin, x.shape)[
        ..., first]
    pairs = (x[..., first] + 1j * x[..., second]) * angle
    result = np.empty_like(x)
    result[..., first], result[..., second] = pairs.real, pairs.imag
    return result


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (1, 2), (3, 0, 4), (4, 6)])
def test_rotary_embedding(rng, shape, interleaved):
    angle = rng.standard_normal((shape[-2], shape[-1] // 2))
    angle = np.repeat(angle, 2, -1) if interleaved else np.concatenate([angle, angle], -1)
    x, cos, sin = (a.astype(np.float32) for a in (
        rng.standard_normal(shape), np.cos(angle), np.sin(angle)))
    rotate = op("rotary_embedding")
    np.testing.assert_allclose(evaluate(rotate, x, cos, sin, interleaved=interleaved),
                               turned(x, cos, sin, interleaved), rtol=1e-6, atol=1e-6)


def test_rotary_embedding_of_an_odd_size_is_refused():
    with pytest.raises(ShapeError, match="pairs"):
        infer(op("rotary_embedding"), *(TensorType((3, 5), float32) for _ in range(3)))


def written(q: Any, k: Any) -> Any:
    return tz.matmul(q, tz.permute_dims(k, axes=(0, 1, 3, 2))) * 8 ** -0.5


def guarded(scores: Any, v: Any) -> Any:
    soft = tz.softmax(scores)
    return tz.where(tz.isnan(soft), 0.0, soft) @ v


LOWEST = float(np.finfo(np.float32).min)
# How attention is written, and what a query gives that sees no key.
FORMS: dict[str, tuple[Any, str]] = {
    "operator": (tz.scaled_dot_product_attention, "zeros"),
    "operator, by a number": (lambda q, k, v, m: tz.scaled_dot_product_attention(
        q, k, v, tz.where(m, 0.0, -np.inf)), "zeros"),
    "operator, as softmax": (lambda q, k, v, m: tz.scaled_dot_product_attention(
        q, k, v, m, unseen="nan"), "nan"),
    "added": (lambda q, k, v, m: tz.softmax(written(q, k) + tz.where(m, 0.0, -np.inf)) @ v, "nan"),
    "chosen": (lambda q, k, v, m: tz.softmax(tz.where(m, written(q, k), -np.inf)) @ v, "nan"),
    "guarded": (lambda q, k, v, m: guarded(tz.where(m, written(q, k), -np.inf), v), "zeros"),
    "added lowest": (lambda q, k, v, m: tz.softmax(
        written(q, k) + tz.where(m, 0.0, LOWEST)) @ v, "mean"),
    "chosen lowest": (lambda q, k, v, m: tz.softmax(
        tz.where(m, written(q, k), LOWEST)) @ v, "mean"),
}


@pytest.mark.parametrize("queries", [1, 4, 40])  # other kernels
@pytest.mark.parametrize("name", FORMS)
def test_a_query_that_sees_no_key(name: str, queries: int, rng: np.random.Generator) -> None:
    """Each form gives the same whether it is recognised or not."""
    q, k, v = (rng.normal(size=(1, 2, n, 8)).astype(np.float32) for n in (queries, 5, 5))
    seen = rng.random((queries, 5)) < 0.7
    seen[:, 0] = True
    seen[queries // 2] = False
    form, gives = FORMS[name]
    made = {}
    for level in ("none", "all"):
        with tz.knobs.override(opt_level=level):
            made[level] = tz.jit(lambda *xs: form(*xs))(q, k, v, seen)
            row = made[level][:, :, queries // 2]
            wanted = {"zeros": np.zeros_like(row), "nan": np.full_like(row, np.nan),
                      "mean": v.mean(2)}[gives]
            np.testing.assert_allclose(row, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(made["all"], made["none"], rtol=1e-5, atol=1e-6)
    with tz.knobs.override(opt_level="all"):
        shown = tz.op(lambda q, k, v, m: form(q, k, v, m), name="test_form").lower(
            q, k, v, seen, "canonical")
    assert "scaled_dot_product_attention(" in shown, "it is recognised"
