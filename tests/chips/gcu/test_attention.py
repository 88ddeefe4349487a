"""Attention of our own compiler on the chip: what it gives, and near the least time."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import terrazzo as tz
from terrazzo.chips.gcu import description
from terrazzo.chips.gcu.attention_blocks import Sizes, best_block
from terrazzo.chips.gcu.build import compiler
from terrazzo.errors import MissingDependency

try:
    compiler()
except MissingDependency as missing:  # the runtime library is built by one
    pytest.skip(str(missing), allow_module_level=True)

GCU = description.find("gcu")
bf16 = ml_dtypes.bfloat16
# The largest error, as a part of the largest value: half types round the result.
TOLERANCE = {np.float32: 2e-6, np.float16: 5e-4, bf16: 4e-3}


class Case(NamedTuple):
    """Shapes and options of one attention."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    causal: bool = False
    scale: float | None = None
    mask: tuple[int, ...] | None = None
    additive: bool = False


CASES = {
    "plain": Case((2, 3, 33, 16), (2, 3, 47, 16), (2, 3, 47, 16)),
    "values of another size": Case((1, 2, 20, 24), (1, 2, 50, 24), (1, 2, 50, 37)),
    "odd sizes": Case((3, 101, 13), (3, 67, 13), (3, 67, 5)),
    "several pieces": Case((1, 1, 40, 64), (1, 1, 700, 64), (1, 1, 700, 64)),
    "several blocks": Case((1, 1, 1200, 8), (1, 1, 30, 8), (1, 1, 30, 8)),
    "causal": Case((2, 3, 65, 16), (2, 3, 65, 16), (2, 3, 65, 16), causal=True),
    "causal, many blocks": Case((1, 2, 517, 32), (1, 2, 517, 32), (1, 2, 517, 32), causal=True),
    "causal, more queries": Case((1, 2, 130, 16), (1, 2, 70, 16), (1, 2, 70, 16), causal=True),
    "causal, more keys": Case((1, 2, 70, 16), (1, 2, 130, 16), (1, 2, 130, 16), causal=True),
    "grouped heads": Case((2, 6, 34, 16), (2, 2, 50, 16), (2, 2, 50, 16)),
    "grouped heads, causal": Case((1, 8, 50, 16), (1, 2, 50, 16), (1, 2, 50, 16), causal=True),
    "one head for all": Case((2, 4, 30, 16), (2, 1, 40, 16), (2, 1, 40, 16)),
    "a scale": Case((2, 40, 16), (2, 40, 16), (2, 40, 16), scale=0.7),
    "a large scale": Case((2, 40, 16), (2, 40, 16), (2, 40, 16), scale=3.0),
    "a negative scale": Case((2, 40, 16), (2, 40, 16), (2, 40, 16), True, scale=-0.5),
    "mask": Case((2, 2, 40, 16), (2, 2, 50, 16), (2, 2, 50, 16), mask=(2, 2, 40, 50)),
    "mask for all heads": Case((2, 2, 40, 16), (2, 2, 50, 16), (2, 2, 50, 16), mask=(40, 50)),
    "mask of keys": Case((2, 2, 40, 16), (2, 2, 50, 16), (2, 2, 50, 16), mask=(2, 1, 1, 50)),
    "additive mask": Case((1, 2, 140, 16), (1, 2, 300, 16), (1, 2, 300, 16),
                          mask=(2, 140, 300), additive=True),
    "mask and causal": Case((1, 2, 140, 16), (1, 2, 140, 16), (1, 2, 140, 16), True,
                            mask=(140, 140)),
}


def exact(case: Case, q: Any, k: Any, v: Any, mask: Any = None) -> np.ndarray:
    """Attention in float64, with zeros for a query that sees no key."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    if q.ndim > 3:
        k, v = (np.repeat(x, q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = q @ k.swapaxes(-1, -2) * (
        1 / math.sqrt(q.shape[-1]) if case.scale is None else case.scale)
    if case.causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    if mask is not None:
        scores = scores + mask.astype(np.float64) if case.additive else np.where(
            mask, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isinf(top), 0, top))
    total = weights.sum(-1, keepdims=True)
    return weights / np.where(total == 0, 1, total) @ v


def attended(case: Case, *arrays: Any) -> np.ndarray:
    """The same on the chip."""
    given = {"causal": case.causal, "scale": case.scale}
    with tz.chip("gcu"):
        return np.asarray(tz.jit(lambda *x: tz.scaled_dot_product_attention(*x, **given))(*arrays))


def checked(name: str, dtype: Any, rng: np.random.Generator) -> None:
    """A case on the chip, compared with float64."""
    case = CASES[name]
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in case[:3]]
    if case.mask is not None:
        mask = rng.standard_normal(case.mask)
        arrays.append(mask.astype(dtype) if case.additive else mask > -0.5)
        arrays[-1][..., :1, 1:] = -np.inf if case.additive else False  # a query with one key
    found = attended(case, *arrays).astype(np.float64)
    best = exact(case, *arrays)
    assert found.shape == best.shape
    np.testing.assert_allclose(found, best, rtol=0, atol=np.abs(best).max() * TOLERANCE[dtype])


@pytest.mark.parametrize("name", CASES)
def test_results(name: str, rng: np.random.Generator) -> None:
    checked(name, np.float32, rng)


@pytest.mark.parametrize("name", ["odd sizes", "causal", "grouped heads", "additive mask"])
@pytest.mark.parametrize("dtype", [np.float16, bf16], ids=["f16", "bf16"])
def test_results_of_half_types(name: str, dtype: Any, rng: np.random.Generator) -> None:
    checked(name, dtype, rng)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [np.float16, bf16], ids=["f16", "bf16"])
def test_all_results_of_half_types(name: str, dtype: Any, rng: np.random.Generator) -> None:
    checked(name, dtype, rng)


def test_weights_of_half_types_lose_nothing_that_shows(rng: np.random.Generator) -> None:
    """What is left is the rounding of the result, half of its last place, and 2^-17 of weights."""
    case = Case((2, 200, 64), (2, 300, 64), (2, 300, 64))
    for dtype, digits in ((np.float16, 11), (bf16, 8)):
        arrays = [rng.standard_normal(shape).astype(dtype) for shape in case[:3]]
        best = exact(case, *arrays)
        apart = np.abs(attended(case, *arrays).astype(np.float64) - best)
        assert (apart < 2.0 ** (np.floor(np.log2(np.abs(best))) - digits) + 2.0 ** -17).all()


def test_types_may_differ(rng: np.random.Generator) -> None:
    case = Case((2, 20, 16), (2, 30, 16), (2, 30, 16))
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in case[:3])
    narrow = k.astype(bf16)
    found = attended(case, q, narrow, v)
    np.testing.assert_allclose(found, exact(case, q, narrow, v), atol=2e-6)


def test_heads_of_one_tensor_are_read_where_they_lie(rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 50, 3, 4, 16)).astype(np.float32)

    def heads(x: Any) -> Any:
        q, k, v = (tz.permute_dims(x[:, :, n], axes=(0, 2, 1, 3)) for n in range(3))
        return tz.permute_dims(tz.scaled_dot_product_attention(q, k, v, causal=True),
                               axes=(0, 2, 1, 3))

    with tz.chip("gcu"):
        found = np.asarray(tz.jit(heads)(x))
    q, k, v = (x[:, :, n].swapaxes(1, 2) for n in range(3))
    best = exact(Case(q.shape, k.shape, v.shape, True), q, k, v).swapaxes(1, 2)
    np.testing.assert_allclose(found, best, atol=5e-6)


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_a_query_that_sees_nothing(additive: bool, causal: bool, rng: np.random.Generator) -> None:
    shape = (2, 40, 16)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for _ in range(3))
    mask: Any = np.ones((40, 40), bool)
    mask[[3, 17]] = False
    mask[5, :6] = False
    if additive:
        mask = np.where(mask, 0, -np.inf).astype(np.float32)
    best = exact(Case(shape, shape, shape, causal, additive=additive), q, k, v, mask)
    unseen = [3, 5, 17] if causal else [3, 17]
    assert not best[:, unseen].any()
    for rule, value in (("zeros", 0), ("nan", np.nan)):
        with tz.chip("gcu"):
            found = np.asarray(tz.jit(lambda *x, rule=rule: tz.scaled_dot_product_attention(
                *x, causal=causal, unseen=rule))(q, k, v, mask))
        wanted = best.copy()
        wanted[:, unseen] = value
        np.testing.assert_allclose(found, wanted, atol=2e-6)


# ---------------------------------------------------------------- time
def traced(heads: int, n: int, size: int, causal: bool, dtype: Any, rng: np.random.Generator
           ) -> Any:
    """The record of one attention of the chip."""
    q, k, v = (rng.standard_normal((heads, n, size)).astype(dtype) for _ in range(3))
    call = tz.jit(lambda q, k, v: tz.scaled_dot_product_attention(q, k, v, causal=causal))
    with tz.chip("gcu"):
        call(q, k, v)
        with tz.gcu.trace() as trace:
            call(q, k, v)
    (record,) = (r for r in trace.records if r.kind == 0)
    return record


def times_the_least(heads: int, n: int, size: int, causal: bool, dtype: Any,
                    rng: np.random.Generator) -> float:
    """How often the least time fits into what attention takes, its launch included.

    The least is that of products or of memory; for half types, whose products take a quarter, that
    of an exponential and a difference for each score as well.
    """
    spec, width = GCU.spec(), np.dtype(dtype).itemsize
    scores = heads * (n * (n + 1) // 2 if causal else n * n)
    products = 4 * scores * size / spec.peak("f32" if width == 4 else "bf16")
    memory = 4 * width * heads * n * size / (spec.memory_gbps * 1e9)
    hertz = GCU.clock_khz * 1e3
    vectors = 16 * scores / (GCU.lanes(32) * GCU.units * hertz)
    best = max(products, memory, vectors if width < 4 else 0)
    return float(traced(heads, n, size, causal, dtype, rng).cycles / hertz / best)


@pytest.mark.parametrize("heads, n, size, causal", [
    (12, 1024, 64, False), (12, 1024, 64, True), (24, 512, 128, False), (24, 512, 128, True)])
def test_attention_is_near_the_least_time(heads: int, n: int, size: int, causal: bool,
                                          rng: np.random.Generator) -> None:
    assert 1 <= times_the_least(heads, n, size, causal, np.float32, rng) <= 1.15


@pytest.mark.slow
@pytest.mark.parametrize("heads, n", [(32, 512), (16, 1024), (8, 2048), (4, 4096)])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_larger_attention_is_near_the_least_time(heads: int, n: int, size: int, causal: bool,
                                                 rng: np.random.Generator) -> None:
    assert 1 <= times_the_least(heads, n, size, causal, np.float32, rng) <= 1.25


@pytest.mark.parametrize("size, causal, most", [(64, False, 1.35), (128, True, 1.7)])
def test_attention_of_half_types(size: int, causal: bool, most: float, rng: np.random.Generator
                                 ) -> None:
    assert 1 <= times_the_least(24, 1024, size, causal, bf16, rng) <= most


def test_keys_are_brought_once_a_task_and_products_end_at_the_diagonal(rng: np.random.Generator
                                                                       ) -> None:
    """Two blocks of 64 queries a task: the later one of a pair sees 9 to 16 of 16 blocks."""
    _, matrix, _, loaded, stored, *_ = traced(6, 1024, 64, True, np.float32, rng).counts
    chosen = best_block(GCU, Sizes(6, 1024, 1024, 64, 64, True, 4, 1, 0))
    assert chosen is not None and chosen.blocks == 16
    keys = sum(64 * blocks for blocks in range(9, 17))
    assert loaded == 6 * 4 * 64 * (1024 + 2 * keys)
    assert stored == 6 * 4 * 64 * 1024
    groups = sum(16 * (16 * group) for group in range(1, 65))  # of queries, and what they see
    assert matrix == 6 * groups * 2 * 64 // 256


def test_blocks_fit_and_share_the_work() -> None:
    for heads, n, size, causal, width in ((1, 16, 8, False, 4), (7, 333, 80, True, 4),
                                          (4, 4096, 256, True, 2), (64, 4096, 128, False, 2)):
        sizes = Sizes(heads, n, n, size, size, causal, width, 4 // width, 0)
        chosen = best_block(GCU, sizes)
        assert chosen is not None
        lanes = sizes.rows(chosen.blocks) * sizes.parts(chosen.blocks)
        sums, scores = 4 * lanes * size, 4 * lanes * chosen.keys
        assert sums + scores + width * size * (lanes + 4 * chosen.keys) <= GCU.scratchpad_bytes
        assert chosen.blocks % sizes.parts(chosen.blocks) == 0
        assert sizes.rows(chosen.blocks) * chosen.blocks >= n
    small = replace(GCU, units=7, scratchpad_bytes=96 << 10, vector_bits=512, dma_in_flight=1)
    assert best_block(small, Sizes(3, 500, 500, 64, 64, True, 4, 1, 0)) is not None
    huge = Sizes(1, 4096, 4096, 20000, 20000, False, 4, 1, 0)
    assert best_block(GCU, huge) is None


def test_what_no_block_holds_runs_as_the_host_does(rng: np.random.Generator) -> None:
    shape = (1, 20, 20000)
    case = Case(shape, shape, shape, scale=1e-3)
    arrays = [rng.standard_normal(shape).astype(np.float32) for _ in range(3)]
    np.testing.assert_allclose(attended(case, *arrays), exact(case, *arrays), atol=1e-5)
