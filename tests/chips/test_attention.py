"""The attention kernel against the operator's meaning in float64, at every shape and option."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import terrazzo as tz
import terrazzo.ops
from terrazzo.base.shapes import dims
from terrazzo.chips.cpu.attention import lower_attention
from terrazzo.chips.cpu.chip import Cpu
from terrazzo.chips.cpu.description import host
from terrazzo.compiler.driver import compile_graph
from terrazzo.compiler.lowering import Lowering
from terrazzo.dtypes import as_dtype
from terrazzo.graph import evaluate
from terrazzo.graph.ir import TensorType, operator_named
from terrazzo.graph.trace import trace
from terrazzo.knobs import knobs
from terrazzo.loop import interpret
from terrazzo.loop.ir import Alloc, For, walk

attention = operator_named("scaled_dot_product_attention")

# Relative to the largest value: scores are sums of products, so a few units in the last place.
TOLERANCE = {"float64": 1e-14, "float32": 3e-6, "float16": 1e-3, "bfloat16": 8e-3}
MANY, FEW = (37, 70), (2, 70)  # queries and keys: taken in panels, and as in decoding


def draw(rng, shape, dtype="float32"):
    if dtype == "bool":
        return rng.random(shape) > 0.4
    return rng.standard_normal(shape).astype(getattr(ml_dtypes, dtype, dtype))


def qkv(rng, q, k, size=16, value_size=None, dtype="float32"):
    return [draw(rng, (*q, size), dtype), draw(rng, (*k, size), dtype),
            draw(rng, (*k, value_size or size), dtype)]


def graph_of(arrays, shapes=None, **attrs):
    types = [TensorType(shape, as_dtype(a.dtype))
             for a, shape in zip(arrays, shapes or [a.shape for a in arrays], strict=True)]
    return trace(attention, types, name="test", **attrs)[0]


def check(arrays, shapes=None, **attrs):
    graph = graph_of(arrays, shapes, **attrs)
    assert [g.program.kind for g in Lowering(graph, Cpu()).fused.groups] == ["attention"]
    return compare(compile_graph(graph), graph, arrays)


def compare(executable, graph, arrays):
    got = np.asarray(executable(*arrays))
    assert_close(got, evaluate.run(graph, arrays, wide=True)[0])
    return got


def assert_close(got, want):
    assert got.shape == want.shape
    scale = max(1.0, np.abs(want).max(initial=0))
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=0,
                               atol=scale * TOLERANCE[got.dtype.name])


@pytest.mark.parametrize(("queries", "keys", "size", "value_size"), [
    (64, 64, 64, 64), (128, 200, 64, 64), (197, 197, 32, 32), (65, 130, 17, 5), (33, 7, 1, 1),
    (40, 1, 16, 24), (9, 300, 128, 100), (16, 50, 256, 256), (150, 67, 40, 40),
    (1, 600, 64, 64), (1, 513, 80, 33), (1, 3, 5, 2), (7, 1100, 16, 16),
])
def test_sizes(rng, queries, keys, size, value_size):
    check(qkv(rng, (2, queries), (2, keys), size, value_size))


@pytest.mark.parametrize(("q", "k"), [
    ((37,), (70,)), ((2,), (70,)), ((2, 3, 4), (2, 3, 9)), ((2, 1, 3, 17), (1, 2, 3, 9)),
    ((2, 3, 17), (3, 9)), ((3, 2), (2, 3, 9)),
])
def test_batches_stretch(rng, q, k):
    check(qkv(rng, q, k))


@pytest.mark.parametrize("queries", [1, 2, 37])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_heads_share_keys(rng, queries, kv_heads):
    check(qkv(rng, (2, 4, queries), (2, kv_heads, 70)))


@pytest.mark.parametrize(("queries", "keys"), [
    (150, 150), (40, 200), (200, 40), (3, 70), (5, 2), (1, 9), (130, 64),
])
def test_causal(rng, queries, keys):
    check(qkv(rng, (2, queries), (2, keys)), causal=True)


@pytest.mark.parametrize("shape", ["qk", "1k", "q1", "hqk", "h1k", "b1qk"])
@pytest.mark.parametrize("dtype", ["bool", "float32"])
@pytest.mark.parametrize("sizes", [MANY, FEW])
def test_masks(rng, sizes, dtype, shape):
    queries, keys = sizes
    letters = {"q": queries, "k": keys, "h": 3, "b": 2, "1": 1}
    arrays = qkv(rng, (2, 3, queries), (2, 3, keys))
    check([*arrays, draw(rng, tuple(letters[c] for c in shape), dtype)])


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_mask_of_another_type(rng, dtype):
    check([*qkv(rng, (2, 37), (2, 70)), draw(rng, (37, 70), dtype)])


@pytest.mark.parametrize("sizes", [MANY, FEW])
def test_mask_causal_and_groups_together(rng, sizes):
    queries, keys = sizes
    check([*qkv(rng, (4, queries), (2, keys)), draw(rng, (4, queries, keys), "bool")], causal=True)


def test_mask_may_stretch_the_queries(rng):
    check([*qkv(rng, (2, 1), (2, 9)), draw(rng, (20, 9))])


@pytest.mark.parametrize("dtype", ["bool", "float32"])
@pytest.mark.parametrize("sizes", [MANY, FEW])
def test_query_that_sees_no_key_gives_zeros(rng, sizes, dtype):
    queries, keys = sizes
    seen = np.ones((queries, keys), bool)
    seen[1] = False
    seen[0, :66] = False  # nothing in a whole block of keys, then something
    mask = seen if dtype == "bool" else np.where(seen, np.float32(0), np.float32(-np.inf))
    got = check([*qkv(rng, (2, queries), (2, keys)), mask])
    assert (got[:, 1] == 0).all() and (got[:, 0] != 0).any()


@pytest.mark.parametrize("sizes", [MANY, FEW])
def test_mask_of_lowest_numbers_is_not_infinite(rng, sizes):
    """All scores then are equally low, and the mean of the values comes out."""
    arrays = qkv(rng, (1, sizes[0]), (1, sizes[1]))
    mask = np.full((1, sizes[1]), np.finfo(np.float32).min)
    assert_close(check([*arrays, mask]), np.repeat(arrays[2].mean(1, keepdims=True), sizes[0], 1))


@pytest.mark.parametrize("queries", [0, 2, 37])
def test_no_keys_or_no_queries(rng, queries):
    got = check(qkv(rng, (2, queries), (2, 0)))
    assert got.shape == (2, queries, 16) and (got == 0).all()


@pytest.mark.parametrize("sizes", [MANY, FEW])
def test_nan_spoils_only_its_query(rng, sizes):
    arrays = qkv(rng, (1, sizes[0]), (1, sizes[1]))
    arrays[0][0, 1, 3] = np.nan
    got = np.asarray(compile_graph(graph_of(arrays))(*arrays))
    assert np.isnan(got[0, 1]).all() and not np.isnan(np.delete(got, 1, axis=1)).any()


@pytest.mark.parametrize("sizes", [MANY, FEW])
def test_large_scores_do_not_overflow(rng, sizes):
    """The weight of all but the best key underflows; float32's own rounding is left aside."""
    arrays = [np.round(a * 4) for a in qkv(rng, (1, sizes[0]), (1, sizes[1]))]
    check(arrays, scale=64.0)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
@pytest.mark.parametrize("sizes", [MANY, FEW])
def test_types(rng, sizes, dtype):
    check(qkv(rng, (2, sizes[0]), (2, sizes[1]), 24, dtype=dtype))


def test_scale(rng):
    check(qkv(rng, (2, 37), (2, 70)), scale=-0.5)


@pytest.mark.parametrize("causal", [False, True])
def test_one_kernel_serves_all_sizes(rng, causal):
    n, m, d, e = dims("n m d e")
    shapes = [(2, 4, n, d), (2, 2, m, d), (2, 2, m, e), (n, m)]
    arrays = [*qkv(rng, (2, 4, 2), (2, 2, 2)), draw(rng, (2, 2), "bool")]
    graph = graph_of(arrays, shapes, causal=causal)
    executable = compile_graph(graph)
    for queries, keys, size, value_size in [(2, 3, 4, 5), (150, 70, 64, 33), (40, 300, 17, 80),
                                            (1, 1, 1, 1), (33, 0, 8, 8), (64, 64, 32, 64)]:
        compare(executable, graph, [
            *qkv(rng, (2, 4, queries), (2, 2, keys), size, value_size),
            draw(rng, (queries, keys), "bool")])


@pytest.mark.parametrize("bits", [128, 256])
@pytest.mark.parametrize("sizes", [MANY, FEW])
def test_narrower_vectors(rng, sizes, bits):
    if bits > host().vector_bits:
        pytest.skip(f"the processor has no vectors of {bits} bits")
    with knobs.override(vector_bits=bits):
        check([*qkv(rng, (4, sizes[0]), (2, sizes[1]), 40), draw(rng, sizes)], causal=True)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("queries", [1, 150])
def test_threads_change_nothing(rng, queries, threads):
    arrays = qkv(rng, (5, queries), (5, 1100))
    executable = compile_graph(graph_of(arrays))
    with knobs.override(threads=1):
        alone = executable(*arrays)
    with knobs.override(threads=threads):
        assert (executable(*arrays) == alone).all()


@pytest.mark.parametrize(("q", "k", "mask", "causal"), [
    ((2, 5), (1, 7), None, False), ((2, 9), (2, 9), (9, 9), True), ((10,), (4,), (1, 4), False),
    ((2, 2), (1, 3), (2, 3), True), ((1, 1), (1, 2), (1, 1, 2), False), ((17,), (0,), None, False),
])
def test_loops_mean_the_same(rng, q, k, mask, causal):
    """The interpreter runs tiles as the loops they stand for."""
    arrays = qkv(rng, q, k, size=3, value_size=2)
    if mask is not None:
        arrays.append(draw(rng, mask, "bool"))
    graph = graph_of(arrays, causal=causal)
    want = evaluate.run(graph, arrays, wide=True)[0]
    (function,) = Lowering(graph, Cpu()).functions
    out = np.full(want.size, np.nan, np.float32)
    interpret.run(function, [*(np.ascontiguousarray(a).reshape(-1) for a in arrays), out], {})
    assert_close(out.reshape(want.shape), want)


def test_operands_may_have_strides(rng):
    """Heads next to sizes, as projections leave them: [queries, heads, size] in memory."""
    arrays = qkv(rng, (2, 9), (2, 12), size=3)
    graph = graph_of(arrays)
    program = Lowering(graph, Cpu()).fused.groups[0].program

    def turned(tensor):
        heads, _, size = tensor.shape
        return replace(tensor, strides=(size, heads * size, 1))

    outputs = tuple(map(turned, program.outputs))
    program = replace(program, inputs=tuple(map(turned, program.inputs)), stages=outputs,
                      outputs=outputs)
    function = lower_attention(program, host())
    out = np.zeros(arrays[0].size, np.float32)
    interpret.run(function, [*(a.swapaxes(0, 1).reshape(-1) for a in arrays), out], {})
    want = evaluate.run(graph, arrays, wide=True)[0]
    assert_close(out.reshape(9, 2, 3).swapaxes(0, 1), want)


def test_memory_does_not_grow_with_the_sequence():
    n, m = dims("n m")
    types = [TensorType(s, as_dtype("float32")) for s in ((4, n, 64), (4, m, 64), (4, m, 64))]
    graph = trace(attention, types, name="test")[0]
    (function,) = Lowering(graph, Cpu()).functions
    sizes = [s.buffer.size for s in walk(function.body) if isinstance(s, Alloc)]
    assert sizes and all(isinstance(size, int) for size in sizes)
    assert 4 * sum(sizes) < 256 << 10


def test_causal_attention_skips_keys_that_nobody_sees():
    types = [TensorType((1, 1024, 64), as_dtype("float32"))] * 3
    graph = trace(attention, types, name="test", causal=True)[0]
    (function,) = Lowering(graph, Cpu()).functions
    (blocks,) = {s.hi for s in walk(function.body) if isinstance(s, For)
                 and s.var.name == "key_block"}
    assert not isinstance(blocks, int)  # it depends on the task: on its last query


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_gradient_compiles(rng, kv_heads):
    def loss(q, k, v):
        y = attention(q, k, v, causal=True)
        return (y * y).sum()

    arrays = qkv(rng, (2, 9), (kv_heads, 9))
    types = [TensorType(a.shape, as_dtype(a.dtype)) for a in arrays]
    graph = trace(tz.grad(loss, (0, 1, 2)), types, name="test")[0]
    want = evaluate.run(graph, arrays, wide=True)
    for got, expected in zip(tz.grad(loss, (0, 1, 2))(*arrays), want, strict=True):
        assert_close(np.asarray(got), expected)
