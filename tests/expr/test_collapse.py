"""Merging axes leaves fewer loops and the same values."""

import numpy as np
import pytest

from terrazzo.base.scalar import FromIndex, call, cast, reduce
from terrazzo.dtypes import float32, int64
from terrazzo.expr import evaluate
from terrazzo.expr.collapse import collapse
from terrazzo.expr.ir import Program, compute, placeholder, reduce_axis


def program(output, inputs, kind="pointwise", stages=None, **attrs):
    return Program("p", tuple(inputs), tuple(stages or [output]), (output,), kind, attrs)


def check(p, rank):
    fresh = collapse(p)
    assert len(fresh.stages[-1].axes) == rank
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(t.shape).astype("f") for t in p.inputs]
    for got, want in zip(evaluate.run(fresh, arrays, {}), evaluate.run(p, arrays, {}),
                         strict=True):
        np.testing.assert_allclose(got.reshape(-1), want.reshape(-1), rtol=1e-6)
    return fresh


X = placeholder((3, 4, 5), name="x")


def test_contiguous_axes_become_one():
    y = compute((3, 4, 5), lambda i, j, l: X[i, j, l] + 1.0)
    check(program(y, [X]), 1)


def test_bias_keeps_its_axis():
    b = placeholder((5,), name="b")
    y = compute((3, 4, 5), lambda i, j, l: X[i, j, l] + b[l])
    check(program(y, [X, b]), 2)


def test_row_broadcast_keeps_the_outer_axes_together():
    r = placeholder((3, 4, 1), name="r")
    y = compute((3, 4, 5), lambda i, j, l: X[i, j, l] + r[i, j, 0])
    check(program(y, [X, r]), 2)


def test_transposition_forbids_merging():
    y = compute((5, 4, 3), lambda i, j, l: X[l, j, i])
    check(program(y, [X]), 3)


def test_transposing_blocks_merges_inside_them():
    y = compute((5, 3, 4), lambda i, j, l: X[j, l, i])
    check(program(y, [X]), 2)


def test_masks_on_an_index_forbid_merging():
    y = compute((3, 4, 5), lambda i, j, l: call(
        "where", FromIndex(int64, l) < FromIndex(int64, j), X[i, j, l], 0.0))
    check(program(y, [X]), 3)


def test_an_index_that_counts_elements_may_merge():
    y = compute((3, 20), lambda i, j: cast(FromIndex(int64, i * 20 + j), float32))
    check(program(y, []), 1)


def test_unit_axes_disappear():
    x = placeholder((1, 6, 1), name="x1")
    y = compute((1, 6, 1), lambda i, j, l: x[0, j, 0] * 3.0)
    check(program(y, [x]), 1)


def test_reduction_axes_merge():
    a, b = reduce_axis(4, "ka"), reduce_axis(5, "kb")
    y = compute((3,), lambda i: reduce("add", X[i, a.var, b.var], [a, b]))
    fresh = check(program(y, [X], "rows", rows=1), 1)
    assert "kakb" in str(fresh)


def test_rows_merge_with_rows_and_columns_with_columns():
    k = reduce_axis(5, "k")
    m = compute((3, 4), lambda i, j: reduce("max", X[i, j, k.var], [k]), name="m")
    y = compute((3, 4, 5), lambda i, j, l: X[i, j, l] - m[i, j], name="y")
    fresh = check(program(y, [X], "rows", [m, y], rows=2), 2)
    assert fresh.attrs["rows"] == 1


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
def test_empty_axes(shape):
    x = placeholder(shape, name="x0")
    y = compute(shape, lambda i, j: x[i, j] + 1.0)
    p = program(y, [x])
    assert evaluate.run(collapse(p), [np.zeros(shape, "f")], {})[0].size == 0
