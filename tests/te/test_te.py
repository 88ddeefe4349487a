"""The public way to write expressions and schedules by hand."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from terrazzo import te
from terrazzo.errors import (
    ArgumentError,
    DTypeError,
    IndexOutOfRange,
    NotContiguous,
    ScheduleError,
    ShapeError,
)
from terrazzo.index import Index
from terrazzo.loop.ir import For, Stmt, Store
from terrazzo.te import Tensor

n = te.dim("n")


def matmul(m: Index, p: Index, size: Index) -> tuple[Tensor, Tensor, Tensor, te.ReduceAxis]:
    a, b = te.placeholder((m, size), name="A"), te.placeholder((size, p), name="B")
    k = te.reduce_axis(size, name="k")
    c = te.compute((m, p), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="C")
    return a, b, c, k


def arrays(rng: np.random.Generator, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("target", ["interpreter", "cpu"])
def test_matmul_by_hand(target: str, rng: np.random.Generator) -> None:
    a, b, c, k = matmul(n, 21, 10)
    s = te.schedule(c)
    i, j = s[c].axis
    packed = s.cache_read(b, "local", [c])
    io, jo, ii, ji = s[c].tile(i, j, 4, 8)
    ko, ki = s[c].split(k, 4)
    s[c].reorder(io, jo, ko, ki, ii, ji)
    s[c].unroll(ii)
    s[c].vectorize(ji)
    s[c].parallel(io)
    packed.compute_at(c, ko)
    assert s[c].axes == ("i.o", "j.o", "k.o", "k.i", "i.i", "j.i")
    assert s[c].reduce_axis == ("k",)
    function = te.build(s, [a, b, c], target)
    for rows in (1, 7, 8):
        x, y = arrays(rng, (rows, 10), (10, 21))
        out = np.zeros((rows, 21), np.float32)
        function(x, y, out)
        np.testing.assert_allclose(out, x @ y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target", ["interpreter", "cpu"])
def test_softmax_in_one_pass_a_row(target: str, rng: np.random.Generator) -> None:
    x, k = te.placeholder((n, 17), name="x"), te.reduce_axis(17, name="k")
    top = te.compute((n,), lambda i: te.max(x[i, k], axis=k), name="top")
    e = te.compute((n, 17), lambda i, j: te.exp(x[i, j] - top[i]), name="e")
    total = te.compute((n,), lambda i: te.sum(e[i, k], axis=k), name="total")
    y = te.compute((n, 17), lambda i, j: e[i, j] / total[i], name="y")
    s = te.schedule(y)
    for stage in (top, e, total):
        s[stage].compute_at(y, "i")
    s[y].vectorize("j")
    (data,) = arrays(rng, (5, 17))
    out = np.zeros_like(data)
    te.build(s, [x, y], target)(data, out)
    want = np.exp(data - data.max(axis=1, keepdims=True))
    np.testing.assert_allclose(out, want / want.sum(axis=1, keepdims=True), rtol=1e-5)


def test_reduction_axes_stand_in_index_arithmetic(rng: np.random.Generator) -> None:
    x, w = te.placeholder((12,), name="x"), te.placeholder((3,), name="w")
    k = te.reduce_axis(3)
    y = te.compute((5,), lambda i: te.sum(x[i * 2 + k] * w[2 - k] * 1.0, axis=(k,)), name="y")
    data, weights = arrays(rng, (12,), (3,))
    out = np.zeros(5, np.float32)
    te.build(te.schedule(y), [x, w, y], "interpreter")(data, weights, out)
    want = [sum(data[i * 2 + t] * weights[2 - t] for t in range(3)) for i in range(5)]
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)


def test_reduction_over_part_of_a_range() -> None:
    x, k = te.placeholder((9,), name="x"), te.reduce_axis((2, 6))
    y = te.compute((), lambda: te.prod(x[k], axis=k), name="y")
    z = te.compute((), lambda: te.min(x[k], axis=k), name="z")
    out, least = np.zeros((), np.float32), np.zeros((), np.float32)
    te.build(te.schedule(y, z), [x, y, z], "interpreter")(np.arange(9, dtype="f"), out, least)
    assert (out, least) == (120, 2)


def test_axes_without_names_are_different_axes() -> None:
    assert te.reduce_axis(4).var is not te.reduce_axis(4).var


def test_element_functions_come_from_the_table() -> None:
    x = te.placeholder((4,), name="x")
    y = te.compute((4,), lambda i: te.maximum(te.sqrt(te.abs(x[i])), te.minimum(x[i], 2.0)),
                   name="y")
    assert str(y).endswith("y[i] = max(sqrt(abs(x[i])), min(x[i], 2.0))")
    with pytest.raises(AttributeError, match="no 'frobnicate'"):
        te.frobnicate  # noqa: B018


def test_cache_write_and_pack(rng: np.random.Generator) -> None:
    a, b, c, _ = matmul(7, 13, 5)
    s = te.schedule(c)
    local = s.cache_write(c)
    panels = s.cache_read(b, "local", [local])
    panels.split("j", 4)
    panels.pack("j.o", "i", "j.i")
    s[c].tile("i", "j", 3, 4)
    s[local].compute_at(c, "j.o")
    s[local].reorder("k", "i", "j")
    function = te.build(s, [c, a, b], "interpreter")
    x, y = arrays(rng, (7, 5), (5, 13))
    out = np.zeros((7, 13), np.float32)
    function(out, x, y)
    np.testing.assert_allclose(out, x @ y, rtol=1e-5, atol=1e-5)
    assert [p.name for p in function.function.params] == ["C", "A", "B"]


def test_inline_fuse_bind_and_streaming() -> None:
    x = te.placeholder((3, 4), name="x")
    a = te.compute((3, 4), lambda i, j: x[i, j] * 2.0, name="a")
    y = te.compute((3, 4), lambda i, j: a[i, j] + 1.0, name="y")
    s = te.schedule(y)
    s[a].compute_inline()
    s[y].bind(s[y].fuse("i", "j"))
    s[y].streaming()
    assert str(te.lower(s, [x, y], name="twice")) == """\
kernel twice(x: f32[12], y: f32[12]):
    # y
    program for i_j in 0..12:
        y[i_j] = x[i_j] * 2.0 + 1.0  # streaming"""


def test_tensorize_by_hand() -> None:
    def meaning(places: tuple, sizes: tuple) -> Stmt:
        (out, at), (left, at_left), (right, at_right) = places
        r = te.dim("r")
        return For(r, 0, sizes[0], Store(
            out, at, left[at_left + r * sizes[2]] * right[at_right + r * sizes[3]], "add"))

    dot = te.register_intrinsic(te.Intrinsic(te.TileIntrinsic("te_test_dot", meaning)))
    a, b, c, k = matmul(2, 3, 4)
    s = te.schedule(c)
    s[c].tensorize(k, dot)
    assert "te_test_dot(&C.acc[0], &A[i*4], &B[j], 4, 0, 1, 3)" in str(te.lower(s, [a, b, c]))


def test_schedule_is_data_beside_the_builder() -> None:
    _, _, c, _ = matmul(4, 4, 4)
    s = te.schedule(c)
    s[c].split("i", 2)
    with pytest.raises(ScheduleError, match="has no axis 'q'"):
        s[c].vectorize("q")
    assert str(s) == "C.split(i, 2 -> i.o, i.i)"  # what failed has left no trace


def test_axis_that_names_two_things() -> None:
    x, i = te.placeholder((4, 4), name="x"), te.reduce_axis(3, name="i")
    y = te.compute((4,), lambda j: te.sum(x[j, i], axis=i), name="y")
    s = te.schedule(y)
    assert s[y].axes == ("i1", "i")
    s[y].vectorize(i)
    assert "vector for i in 0..3" in str(te.lower(s, [x, y]))


def test_axis_of_the_name_and_range_of_a_dimension(rng: np.random.Generator) -> None:
    """Indices are interned: without other names these two would be one."""
    x, i = te.placeholder((4, 4), name="x"), te.reduce_axis(4, name="i")
    y = te.compute((4,), lambda j: te.sum(x[j, i], axis=i), name="y")
    (data,) = arrays(rng, (4, 4))
    out = np.zeros(4, np.float32)
    te.build(te.schedule(y), [x, y])(data, out)
    np.testing.assert_allclose(out, data.sum(1), rtol=1e-5)
    one, two = te.reduce_axis(4, name="k"), te.reduce_axis(4, name="k")
    with pytest.raises(ArgumentError, match="two reduction axes of one formula are named 'k'"):
        te.compute((), lambda: te.sum(x[one, two], axis=(one, two)))


def test_an_inlined_reduction_that_has_a_dimensions_name() -> None:
    x, i = te.placeholder((4,), name="x"), te.reduce_axis(4, name="i")
    a = te.compute((), lambda: te.sum(x[i], axis=i), name="a")
    y = te.compute((4,), lambda j: a[()] + x[j], name="y")
    s = te.schedule(y)
    s[a].compute_inline()
    with pytest.raises(ScheduleError, match="names both a dimension of y and a reduction"):
        s[y].vectorize(i)


def test_mistakes_in_calls() -> None:
    a, b, c, _ = matmul(n, 3, 4)
    s = te.schedule(c)
    with pytest.raises(ArgumentError, match="takes A, B, C, got A, C"):
        te.lower(s, [a, c])
    with pytest.raises(ArgumentError, match="no target 'tpu'"):
        te.build(s, [a, b, c], target="tpu")
    with pytest.raises(ArgumentError, match="cannot reduce over 3"):
        te.sum(a[0, 0], axis=[3])  # type: ignore[list-item]
    f = te.build(s, [a, b, c], "interpreter")
    x, y, out = np.zeros((2, 4), "f"), np.zeros((4, 3), "f"), np.zeros((2, 3), "f")
    with pytest.raises(ArgumentError, match="takes 3 arrays, got 2"):
        f(x, y)
    with pytest.raises(DTypeError, match="A is float32, got an array of float64"):
        f(x.astype("d"), y, out)
    with pytest.raises(ShapeError, match=r"C has shape \[3, 3\], but \[n, 3\] is \[2, 3\] here"):
        f(x, y, np.zeros((3, 3), "f"))
    with pytest.raises(ShapeError, match="A has 2 dimensions"):
        f(x[0], y, out)
    with pytest.raises(NotContiguous, match="B got an array with gaps"):
        f(x, np.zeros((3, 4), "f").T, out)


def test_a_register_tile_of_the_cpu_by_name():
    A, B = te.placeholder((24, 16), name="A"), te.placeholder((16, 40), name="B")
    k = te.reduce_axis(16, name="k")
    C = te.compute((24, 40), lambda i, j: te.sum(A[i, k] * B[k, j], axis=k), name="C")
    s = te.schedule(C)
    io, jo, ii, ji = s[C].tile(*s[C].axis, 4, 16)
    s[C].reorder(io, jo, k, ii, ji)
    s[C].tensorize(k, "fma_tile")
    f = te.build(s, [A, B, C])
    assert "fma_tile(" in str(f)
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((24, 16), "f"), rng.standard_normal((16, 40), "f")
    c = np.empty((24, 40), "f")
    f(a, b, c)
    np.testing.assert_allclose(c, a @ b, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- what is read has to exist
X = te.placeholder((8,), name="X")
Y = te.placeholder((n,), name="Y")
K = te.reduce_axis(3, name="k")


@pytest.mark.parametrize(("element", "index"), [
    (lambda i: X[i + 4], "i + 4"),
    (lambda i: X[i + 1_000_000], "i + 1000000"),
    (lambda i: X[i - 1], "i - 1"),
    (lambda i: X[i * 2], "i*2"),
    (lambda i: te.where(te.lt(i, 7), X[i + 2], 0.0), "i + 2"),
    (lambda i: te.where(te.ge(X[i], 0.0), X[i + 1], 0.0), "i + 1"),
    (lambda i: te.sum(X[i + K], axis=K), "i + k"),
])
def test_reading_outside_is_refused(element: Any, index: str) -> None:
    with pytest.raises(IndexOutOfRange, match=rf"outside.*{re.escape(index)} of.* of X"):
        te.compute((8,), element)


@pytest.mark.parametrize(("element", "reference"), [
    (lambda i: te.where(te.lt(i, 4), X[i + 4], 0.0), lambda x: np.r_[x[4:], np.zeros(4)]),
    (lambda i: te.where(te.lt(i, 4), 0.0, X[i - 4]), lambda x: np.r_[np.zeros(4), x[:4]]),
    (lambda i: X[7 - i], lambda x: x[::-1]),
    (lambda i: X[i % 2 * 4 + i // 2], lambda x: x.reshape(2, 4).T.ravel()),
    (lambda i: X[i * i % 8], lambda x: x[np.arange(8) ** 2 % 8]),
    (lambda i: te.sum(te.where(te.lt(i + K.var, 8), X[i + K], 0.0), axis=K),
     lambda x: x + np.r_[x[1:], 0] + np.r_[x[2:], 0, 0]),
    (lambda i: X[te.cast(X[i] * 100.0, "int64")], lambda x: x[np.where(x > 0, 7, 0)]),
])
@pytest.mark.parametrize("target", ["interpreter", "cpu"])
def test_reading_inside(element: Any, reference: Any, target: str) -> None:
    y = te.compute((8,), element, name="y")
    kernel = te.build(te.schedule(y), [X, y], target)
    x = np.array([-3, 1, 4, -1, 5, 9, -2, 6], np.float32)
    out = np.zeros(8, np.float32)
    kernel(x, out)
    np.testing.assert_allclose(out, reference(x).astype(np.float32), rtol=1e-6)


@pytest.mark.parametrize("target", ["interpreter", "cpu"])
def test_symbolic_sizes_are_checked_at_the_call(target: str) -> None:
    y = te.compute((4,), lambda i: Y[i + 3], name="y")
    kernel = te.build(te.schedule(y), [Y, y], target)
    out = np.zeros(4, np.float32)
    for size in (7, 9, 7):
        kernel(np.arange(size, dtype=np.float32), out)
        np.testing.assert_array_equal(out, [3, 4, 5, 6])
    for size in (6, 2, 0):
        with pytest.raises(IndexOutOfRange, match=rf"i \+ 3 .* of Y.*n = {size}"):
            kernel(np.arange(size, dtype=np.float32), out)


def test_a_read_only_array_is_not_written() -> None:
    y = te.compute((8,), lambda i: X[i] + 1.0, name="y")
    kernel = te.build(te.schedule(y), [X, y])
    out = np.zeros(8, np.float32)
    out.flags.writeable = False
    given = np.ones(8, np.float32)
    given.flags.writeable = False  # what is only read may be
    with pytest.raises(ArgumentError, match=r"y is written.*read-only"):
        kernel(given, out)
    assert not out.any()


def test_an_unknown_intrinsic_is_refused() -> None:
    y = te.compute((8,), lambda i: X[i] + 1.0, name="y")
    s = te.schedule(y)
    with pytest.raises(ScheduleError, match="no tile intrinsic 'no_such'"):
        s[y].tensorize("i", "no_such")


def test_unrolling_without_end_is_refused() -> None:
    large = te.placeholder((1000, 1000), name="large")
    y = te.compute((1000, 1000), lambda i, j: large[i, j] + 1.0, name="y")
    s = te.schedule(y)
    s[y].unroll("i")
    s[y].unroll("j")
    with pytest.raises(ScheduleError, match="repeats its body 1000000 times"):
        te.build(s, [large, y])
