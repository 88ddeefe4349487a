"""Attention for GPUs: numbers through our Triton backend, code for sm_90, and what stays whole."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import terrazzo as tz
from terrazzo.knobs import knobs

pytest.importorskip("triton")
torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.triton, pytest.mark.torch]

sys.path[:0] = [str(Path(__file__).parent)]

from cuda_simulated import random, simulated  # noqa: E402

SLACK = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3, "float64": 1e-12}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    with simulated(monkeypatch, dynamic="never") as names:
        yield names


def exactly(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False,
            unseen: str = "zeros") -> Any:
    """The definition, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    if q.dim() > 2 and q.shape[-3] != k.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if causal:
        seen = torch.arange(q.shape[-2])[:, None] >= torch.arange(k.shape[-2])
        scores = scores.masked_fill(~seen, -torch.inf)
    if mask is not None:
        scores = (scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool
                  else scores + mask.double())
    weights = scores.softmax(-1)
    return (weights.nan_to_num(0) if mask is not None and unseen == "zeros" else weights) @ v


def check(q: Any, k: Any, v: Any, mask: Any = None, **options: Any) -> None:
    given = [q, k, v] + ([] if mask is None else [mask])
    got = tz.jit(lambda *args: tz.scaled_dot_product_attention(*args, **options))(*given)
    slack = SLACK[str(q.dtype).removeprefix("torch.")]
    torch.testing.assert_close(got.double(), exactly(q, k, v, mask, **options), rtol=slack,
                               atol=slack, equal_nan=True)


# q, then k and v: exact tiles, ragged ones, other sizes of values, shared heads, no heads, one
# query and few, whose keys are cut into parts.
SHAPES = [((1, 2, 256, 32), (1, 2, 256, 32), 32), ((2, 4, 130, 64), (2, 4, 130, 64), 64),
          ((4, 70, 24), (4, 150, 24), 40), ((1, 4, 150, 16), (1, 2, 70, 16), 16),
          ((90, 16), (70, 16), 16), ((2, 8, 1, 64), (2, 2, 1100, 64), 64),
          ((2, 2, 9, 64), (2, 2, 1100, 64), 64), ((2, 8, 5, 64), (2, 2, 1100, 64), 64),
          ((1, 2, 70, 128), (1, 1, 70, 128), 128), ((1, 1, 70, 200), (1, 1, 70, 200), 200)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys", "size"), SHAPES)
def test_numbers(launched: list[str], dtype: str, causal: bool, queries: tuple[int, ...],
                 keys: tuple[int, ...], size: int) -> None:
    check(random(*queries, dtype=dtype), random(*keys, dtype=dtype, seed=1),
          random(*keys[:-1], size, dtype=dtype, seed=2), causal=causal)
    assert all("attention" in name for name in launched) and len(launched) <= 2
    few = queries[-2] <= 16 and keys[-2] >= 256 and not causal
    assert (len(launched) == 2) == few


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("unseen", ["zeros", "nan"])
@pytest.mark.parametrize("queries", [130, 1])
def test_masks(launched: list[str], dtype: str, unseen: str, queries: int) -> None:
    keys = 130 if queries > 1 else 1030
    q, k, v = (random(2, 4, n, 64, dtype=dtype, seed=n) for n in (queries, keys, keys))
    seen = torch.rand(queries, keys, generator=torch.Generator().manual_seed(3)) > 0.5
    seen[0] = queries == 1
    check(q, k, v, seen, unseen=unseen)
    check(q, k, v, random(2, 1, 1, keys, dtype=dtype), unseen=unseen)
    assert all("attention" in name for name in launched)


def test_views_are_read_where_they_lie(launched: list[str]) -> None:
    x = random(2, 130, 4, 64, dtype="bfloat16").transpose(1, 2)
    check(x, x, x)
    assert len(launched) == 1


def test_infinite_scores(launched: list[str]) -> None:
    q, k, v = (random(1, 2, 80, 32, seed=s) for s in range(3))
    q[..., 0], k[..., 0] = 1e30, 0
    k[:, :, :64, 0] = -1e30  # the scores of the first keys are all -inf
    check(q, k, v)
    assert launched


def test_sizes_that_vary(launched: list[str]) -> None:
    with knobs.override(dynamic="auto"):
        function = tz.jit(lambda q, k, v: tz.scaled_dot_product_attention(q, k, v, causal=True))
        for n in (5, 70, 130, 256):
            q, k, v = (random(1, 2, n, 32, dtype="bfloat16", seed=s) for s in range(3))
            torch.testing.assert_close(function(q, k, v).double(), exactly(
                q, k, v, causal=True), rtol=2e-2, atol=2e-2)
    assert launched


def test_what_has_no_kernel_is_products_and_softmax(launched: list[str]) -> None:
    for dtype, size in (("float64", 16), ("float32", 300)):
        q, k, v = (random(2, 20, size, dtype=dtype, seed=s) for s in range(3))
        check(q, k, v, causal=True)
    assert launched and not any("attention" in name for name in launched)


def test_gradients(launched: list[str]) -> None:
    q, k, v = (random(1, 2, 20, 16, seed=s).requires_grad_() for s in range(3))
    tz.scaled_dot_product_attention(q, k, v, causal=True).square().sum().backward()
    got = [x.grad.clone() for x in (q, k, v)]
    for x in (q, k, v):
        x.grad = None
    torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True).square().sum().backward()
    for mine, x in zip(got, (q, k, v)):
        torch.testing.assert_close(mine, x.grad, rtol=1e-4, atol=1e-5)
    assert launched


@pytest.mark.parametrize("causal", [False, True])
def test_large_heads_fit_into_shared_memory(causal: bool) -> None:
    q = random(1, 1, 256, 256)
    with knobs.override(dynamic="never"):
        ptx = tz.scaled_dot_product_attention.lower(q, q, q, "ptx", chip="cuda", causal=causal)
    assert ptx.count(".entry") == 1


@pytest.mark.parametrize(("size", "queries"), [(64, 256), (128, 256), (128, 1)])
def test_code_for_hopper(size: int, queries: int) -> None:
    q, k = (random(1, 2, n, size, dtype="bfloat16") for n in (queries, 1024))
    with knobs.override(dynamic="never"):
        ptx = tz.scaled_dot_product_attention.lower(q, k, k, "ptx", chip="cuda")
    assert ".target sm_90" in ptx and "mma" in ptx
    assert ptx.count(".entry") == (1 if queries > 1 else 2)
