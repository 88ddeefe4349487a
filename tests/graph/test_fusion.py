"""Which operators share a kernel, and that sharing changes no value."""

from dataclasses import replace

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.chips.cpu.chip import Cpu
from terrazzo.expr import evaluate as expr_evaluate
from terrazzo.expr.convolution import match_convolution
from terrazzo.expr.ir import reads
from terrazzo.expr.limits import FusionLimits
from terrazzo.graph import evaluate
from terrazzo.graph.fusion import DOING_NOTHING, fuse
from terrazzo.graph.fusion.composing import compose
from terrazzo.graph.fusion.sharing import share_loops
from terrazzo.graph.fusion.siblings import merge_siblings
from terrazzo.graph.ir import TensorType
from terrazzo.graph.passes import canonicalize, inline_composites
from terrazzo.graph.trace import trace


def fused(function, *shapes, dtype=tz.float32):
    graph, _ = trace(function, [TensorType(s, dtype) for s in shapes])
    graph = inline_composites(graph, whole=lambda node: False)
    return fuse(canonicalize(graph)[0], Cpu.fusion_limits)


def kinds(result):
    return [(g.program.kind, len(g.program.stages)) for g in result.groups]


def run(result, arrays):
    """A fused graph evaluated program by program."""
    memory = dict(zip(result.graph.inputs, arrays, strict=True)) | dict(result.constants)

    def value(v):
        if v in result.aliases:
            return value(result.aliases[v]).reshape(v.shape)
        return memory[v]

    for group in result.groups:
        outputs = expr_evaluate.run(group.program, [value(v) for v in group.inputs], {})
        memory.update(zip(group.outputs, outputs, strict=True))
    return [value(v) for v in result.graph.outputs]


def _pool_and_relu(x, b):
    pooled = tz.permute_dims(tz.max_pool(tz.permute_dims(x, axes=(0, 3, 1, 2)), window=3,
                                         strides=2, padding=1), axes=(0, 2, 3, 1))
    return pooled, tz.relu(pooled + b)


CASES = {
    "chain": (lambda x: tz.exp(x) * 2 + 1, [(7, 5)], [("pointwise", 1)]),
    "three outputs": (lambda x: (tz.sin(x), tz.cos(x), tz.sin(x) * tz.cos(x)), [(7, 5)],
                      [("pointwise", 3)]),
    "broadcast of something dear": (lambda x, b: x + tz.exp(b), [(64, 5), (5,)],
                                    [("pointwise", 1), ("pointwise", 1)]),
    "softmax": (lambda x: tz.softmax(x), [(16, 33)], [("rows", 4)]),
    "layer norm": (lambda x, w, b: tz.layer_norm(x, w, b), [(16, 33), (33,), (33,)],
                   [("rows", 3)]),
    "row and its sum": (lambda x: (tz.exp(x), tz.sum(tz.exp(x), axis=-1)), [(16, 33)],
                        [("rows", 2)]),
    "bias and gelu in a product's epilogue": (
        lambda x, w, b: tz.gelu(x @ w + b), [(6, 7), (7, 5), (5,)], [("contraction", 1)]),
    "two products": (lambda x, w: (x @ w) @ w, [(6, 5), (5, 5)],
                     [("contraction", 1), ("contraction", 1)]),
    "product of products": (lambda x, w: (x @ w) * (w @ x), [(5, 5), (5, 5)],
                            [("contraction", 1), ("contraction", 1)]),
    "head split is a view": (
        lambda x, w: tz.permute_dims(x.reshape((2, 3, 4)), axes=(1, 0, 2)) @ w,
        [(2, 12), (4, 5)], [("contraction", 1)]),
    "column sum stays alone": (lambda x: x - tz.mean(x, axis=0), [(600, 40)],
                               [("rows", 1), ("pointwise", 1)]),
    "column sums and what is made of them": (
        lambda x: (tz.sum(x, axis=0), tz.relu(tz.sum(x, axis=0) * 2 - 1)), [(60, 40)],
        [("rows", 1), ("pointwise", 1)]),
    "a pool and what is made of it": (_pool_and_relu, [(2, 9, 9, 8), (8,)],
                                      [("rows", 1), ("pointwise", 1)]),
    "a pool reads channels that lie side by side": (
        lambda x: tz.max_pool(x, window=3, strides=2, padding=1), [(2, 8, 9, 9)],
        [("pointwise", 1), ("rows", 1), ("pointwise", 1)]),
    "a depthwise convolution does so too": (
        lambda x, w: tz.conv(x, w, padding=1, groups=8), [(2, 8, 9, 9), (8, 1, 3, 3)],
        [("pointwise", 1), ("contraction", 1), ("pointwise", 1)]),
    "an epilogue stays in its place: no square transpose": (
        lambda x, w: tz.conv(x, w, padding=1), [(2, 3, 8, 8), (8, 3, 3, 3)],
        [("contraction", 1), ("pointwise", 1)]),
    "nor one turned around": (
        lambda x, w: tz.flip(x @ w, axis=0) + x, [(8, 8), (8, 8)],
        [("contraction", 1), ("pointwise", 1)]),
    "few long rows are not fused": (lambda x: tz.softmax(x), [(2, 40000)],
                                    [("rows", 1), ("pointwise", 1), ("rows", 1),
                                     ("pointwise", 1)]),
}


@pytest.mark.parametrize("name", CASES)
def test_groups_and_values(name):
    function, shapes, expected = CASES[name]
    result = fused(function, *shapes)
    assert kinds(result) == expected
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    wanted = evaluate.run(result.graph, arrays)
    for got, want in zip(run(result, arrays), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def test_no_cycle_between_kernels():
    # The sum needs the whole product, the difference needs both: row fusion of the first and
    # the last would have to wait for itself.
    def function(x, w):
        e = tz.exp(x)
        return e - (e @ w)

    result = fused(function, (64, 64), (64, 64))
    made: set = set(result.graph.inputs)
    for group in result.groups:
        assert all(v in made for v in group.inputs)
        made |= set(group.outputs)


def test_half_types_are_not_rounded_inside_a_kernel():
    result = fused(lambda x: (x * 3) / 3, (8,), dtype=tz.bfloat16)
    (group,) = result.groups
    text = str(group.program)
    assert text.count("bf16(") == 1, text


def test_large_constants_become_buffers():
    table = np.arange(12, dtype=np.float32)
    result = fused(lambda x: x + table, (12,))
    assert len(result.constants) == 1
    assert len(result.groups[0].inputs) == 2


def test_attention_reads_heads_where_they_lie_and_stores_them_side_by_side():
    def heads(x):
        return tz.permute_dims(tz.reshape(x, shape=(2, 5, 3, 4)), axes=(0, 2, 1, 3))

    def layer(x, w):
        qkv = x @ w
        q, k, v = (heads(qkv[:, :, 12 * i:12 * i + 12]) for i in range(3))
        y = tz.permute_dims(tz.scaled_dot_product_attention(q, k, v), axes=(0, 2, 1, 3))
        return tz.reshape(y, shape=(2, 5, 12)) @ w

    types = [TensorType(shape, tz.float32) for shape in ((2, 5, 12), (12, 36))]
    graph = canonicalize(inline_composites(
        trace(layer, types)[0], whole=lambda node: node.op.keep_whole))[0]
    groups = fuse(graph, Cpu.fusion_limits).groups
    assert [g.program.kind for g in groups] == ["contraction", "attention", "contraction"]
    assert [t.offset for t in groups[1].program.inputs] == [0, 12, 24]


def test_a_computed_index_is_not_taken_for_another_axis():
    # Both tensors call their axes i, j, ...; the taken row must not become the column as well.
    x, row = np.arange(4, dtype=np.float32).reshape(2, 2), np.array(1, np.int32)
    np.testing.assert_array_equal(
        tz.jit(lambda x, i: tz.take(tz.exp(-x), i, axis=0))(x, row), np.exp(-x)[1])
    y = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    np.testing.assert_allclose(
        tz.jit(lambda y, i: tz.take(tz.sum(y * 2, axis=2), i, axis=1))(y, np.array(2)),
        (y * 2).sum(2)[:, 2])


def test_results_of_whole_kernels_have_names_of_their_own():
    result = fused(lambda x: (tz.argsort(x), tz.sort(x), tz.argsort(-x)), (4, 5))
    names = [t.name for g in result.groups for t in g.program.outputs]
    assert len(set(names)) == len(names)


def test_stages_that_nothing_reads_leave_the_others_where_they_are():
    # The places along an axis of one element are known, so what computes them is for nobody.
    x = np.ones((1, 2, 1), np.float32)

    def sampled(x):
        return tz.grid_sample(x, tz.hardswish(x))

    result = fused(sampled, x.shape)
    for group in result.groups:
        read = {r for s in group.program.stages for r in reads(s)}
        assert all(s in read or s in group.program.outputs for s in group.program.stages)
    np.testing.assert_allclose(tz.jit(sampled)(x), np.full((1, 2, 2), 2 / 3), rtol=1e-6)


def test_a_kernel_whose_reduction_nobody_reads_is_pointwise():
    x = np.ones((5, 9, 0), np.float32)
    assert tz.jit(lambda x: tz.nonzero_padded(x)[0])(x).shape == (3, 0)


@pytest.mark.parametrize(("taken", "columns", "stored"), [
    ([64], 128, True), ([3], 128, False), ([20, 20], 128, True),
    ([64], tz.dim("n"), False), ([3, 3], tz.dim("n"), True)])
def test_rows_are_taken_of_a_turned_tensor_that_is_stored(taken, columns, stored):
    """Where as much is read as there is, or where it is read again; a few rows where they lie."""
    def program(x):
        turned = tz.permute_dims(x, axes=(1, 0))
        found = [tz.sum(tz.take(turned, np.arange(i, i + n) ** 2 % 32, axis=0), axis=0)
                 for i, n in enumerate(taken)]
        return found[0] if len(found) == 1 else found[0] * found[1]

    result = fused(program, (columns, 32))
    made = [g for g in result.groups if g.program.stages[-1].origin == "permute_dims"]
    assert len(made) == stored, result


@pytest.mark.parametrize("turned", [False, True])
def test_convolutions_read_views_that_keep_their_axes(turned):
    """A view that cuts axes in pieces is stored first, or the kernel for windows does not fit."""
    def program(x, w):
        if turned:
            x = tz.permute_dims(tz.reshape(x, shape=(1, 2, 4, 2, 4, 8)), axes=(0, 2, 1, 4, 3, 5))
        return tz.conv(tz.permute_dims(tz.reshape(x, shape=(1, 8, 8, 8)), axes=(0, 3, 1, 2)), w,
                       padding=1)

    result = fused(program, (1, 8, 8, 8), (4, 8, 3, 3))
    found = [g for g in result.groups if "convolve" in g.program.stages[-1].origin]
    assert len(found) == 1
    assert match_convolution(found[0].program) is not None


def test_what_scatters_into_a_number_all_over_needs_no_tensor_of_it():
    """Unless the tensor is wanted for itself."""
    def function(x, places, updates):
        ones, zeros = tz.ones_like(x), tz.zeros_like(x)
        added = tz.scatter_at(ones, updates, places, axes=(0,), reduce="add")
        return added * x, tz.scatter_at(zeros, updates, places, axes=(0,)), zeros

    types = [TensorType((6, 40), tz.float32), TensorType((4,), tz.int64),
             TensorType((4, 40), tz.float32)]
    graph = inline_composites(trace(function, types)[0])
    names = [g.program.name for g in fuse(graph, Cpu.fusion_limits).groups]
    assert sum("full" in name for name in names) == 1 and sum("scatter" in n for n in names) == 2
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(6, 40)).astype(np.float32), np.array([5, 0, 5, -1]),
              rng.normal(size=(4, 40)).astype(np.float32)]
    for got, want in zip(tz.jit(function)(*arrays), evaluate.run(graph, arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def pieces(graph, limits):
    """How many pieces a graph is in: as it comes, and after each of the three passes."""
    staged = compose(graph, limits, {})
    clusters = share_loops(staged, limits)
    apart = len(list(clusters))
    merge_siblings(clusters, limits)
    return [len(graph.nodes), len(staged.parts), apart, len(list(clusters))]


@pytest.mark.parametrize("limits", [FusionLimits(), Cpu.fusion_limits])
def test_every_pass_makes_fewer_pieces_and_can_be_left_out(limits):
    def function(x):
        return tz.softmax(x * 2), tz.exp(x), x + 1

    limits = replace(limits, shared=64)
    graph = fused(function, (64, 64)).graph
    counts = pieces(graph, limits)
    assert counts == sorted(set(counts), reverse=True)
    for i, (name, nothing) in enumerate(DOING_NOTHING):
        counts = pieces(graph, replace(limits, **nothing))
        assert counts[i] == counts[i + 1], name
