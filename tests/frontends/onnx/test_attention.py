"""Converters of attention and rotary embeddings against ONNX's evaluator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from one_node import check, imported, one_node
from several_nodes import check_symbolic

from terrazzo.base.shapes import dims

pytestmark = pytest.mark.onnx
BATCH, HEADS, SIZE = 2, 4, 8


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def qkv(rng: np.random.Generator, queries: int = 5, keys: int = 6, kv_heads: int = HEADS,
        value_size: int = SIZE) -> list[np.ndarray]:
    return [floats(rng, BATCH, HEADS, queries, SIZE), floats(rng, BATCH, kv_heads, keys, SIZE),
            floats(rng, BATCH, kv_heads, keys, value_size)]


def compare(inputs: list[Any], *, opset: int = 23, outputs: int = 1, **options: Any) -> None:
    check("Attention", inputs, opset=opset, outputs=outputs, rtol=1e-4, atol=1e-5, **options)


@pytest.mark.parametrize(("kv_heads", "options"), [
    (HEADS, {}), (2, {}), (HEADS, {"scale": 0.1}), (HEADS, {"is_causal": 1}), (1, {"softcap": 1.5}),
    (2, {"is_causal": 1, "softcap": 1.5}), (1, {"is_causal": 1}),
], ids=str)
def test_heads_and_options(rng: np.random.Generator, kv_heads: int,
                           options: dict[str, Any]) -> None:
    compare(qkv(rng, kv_heads=kv_heads, value_size=6), **options)


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
def test_three_axes(rng: np.random.Generator, kv_heads: int) -> None:
    inputs = [floats(rng, BATCH, 5, HEADS * SIZE), floats(rng, BATCH, 6, kv_heads * SIZE),
              floats(rng, BATCH, 6, kv_heads * 6)]
    compare(inputs, q_num_heads=HEADS, kv_num_heads=kv_heads)


def masks(rng: np.random.Generator) -> dict[str, np.ndarray]:
    whole = rng.random((BATCH, HEADS, 5, 6)) < 0.7
    whole[..., 0] = True
    return {"2-D": whole[0, 0], "3-D": whole[0], "4-D": whole, "a batch": whole[:, :1],
            "short": whole[0, 0, :, :4], "blind": np.zeros((5, 6), bool)}


@pytest.mark.parametrize(("name", "causal"), [
    ("2-D", 0), ("2-D", 1), ("3-D", 1), ("4-D", 0), ("a batch", 1), ("short", 1), ("blind", 0)])
def test_masks(rng: np.random.Generator, name: str, causal: int) -> None:
    seen = masks(rng)[name]
    inputs = qkv(rng, kv_heads=2)
    compare([*inputs, seen], is_causal=causal)
    added = np.where(seen, floats(rng, *seen.shape), -np.inf).astype(np.float32)
    compare([*inputs, added], is_causal=causal)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("causal", [0, 1])
def test_caches(rng: np.random.Generator, queries: int, causal: int) -> None:
    q, k, v = qkv(rng, queries, queries, 2)
    past = [floats(rng, BATCH, 2, 4, SIZE) for _ in range(2)]
    compare([q, k, v, None, *past], is_causal=causal, outputs=3)


@pytest.mark.parametrize("causal", [0, 1])
def test_lengths_of_an_outer_cache(rng: np.random.Generator, causal: int) -> None:
    lengths = np.array([3, 6])
    compare([*qkv(rng, 2, 6, 2), None, None, None, lengths], opset=24, is_causal=causal)
    compare([*qkv(rng, 5, 6), None, None, None, lengths], opset=24, is_causal=causal)


@pytest.mark.parametrize("window", [(2, -1), (-1, 1), (1, 2)], ids=str)
def test_windows(rng: np.random.Generator, window: tuple[int, int]) -> None:
    compare(qkv(rng, 6, 6), opset=25, left_window_size=window[0], right_window_size=window[1])


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_scores(rng: np.random.Generator, mode: int) -> None:
    seen = np.tril(np.ones((5, 6), bool))
    softcap = {"softcap": 2.0} if mode else {}  # the evaluator caps what mode 0 should not
    compare([*qkv(rng, kv_heads=2), seen], outputs=4, qk_matmul_output_mode=mode, **softcap)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_types(rng: np.random.Generator, dtype: str) -> None:
    inputs = [x.astype(dtype) for x in qkv(rng)]
    check("Attention", inputs, opset=23, is_causal=1, rtol=5e-3 if dtype == "float16" else 1e-6,
          atol=5e-3 if dtype == "float16" else 1e-7)


@pytest.mark.parametrize("queries", [1, 3])
def test_symbolic_sizes(rng: np.random.Generator, queries: int) -> None:
    b, s, p = dims("b s p")
    new: Any = 1 if queries == 1 else s
    q, k, v = qkv(rng, queries, queries, 2)
    past = [floats(rng, BATCH, 2, 4, SIZE) for _ in range(2)]
    shapes = [(b, HEADS, new, SIZE), (b, 2, new, SIZE), (b, 2, new, SIZE), None, (b, 2, p, SIZE),
              (b, 2, p, SIZE)]
    check_symbolic("Attention", [q, k, v, None, *past], shapes, opset=23, is_causal=1, outputs=3)


def test_three_axes_without_heads_are_refused(rng: np.random.Generator) -> None:
    x = floats(rng, BATCH, 5, HEADS * SIZE)
    model = one_node("Attention", [x, x, x], opset=23)
    put_off = imported(model, {f"x{i}": x for i in range(3)}).put_off
    assert "number of heads" in str(put_off[0])


# ---------------------------------------------------------------- rotary embeddings
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("part", [SIZE, 4])
def test_rotary_embedding(rng: np.random.Generator, interleaved: int, part: int) -> None:
    angles = floats(rng, 20, part // 2)
    places = rng.integers(0, 20, (BATCH, 5))
    options = {"interleaved": interleaved, "rotary_embedding_dim": part}
    x = floats(rng, BATCH, HEADS, 5, SIZE)
    check("RotaryEmbedding", [x, np.cos(angles), np.sin(angles), places], opset=23, **options)
    flat = floats(rng, BATCH, 5, HEADS * SIZE)
    own = angles[places]
    check("RotaryEmbedding", [flat, np.cos(own), np.sin(own)], opset=23, num_heads=HEADS,
          **options)
