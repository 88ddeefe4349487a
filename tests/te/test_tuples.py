"""Reductions of tuples by functions of a user's own, and several results of one compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from terrazzo import te
from terrazzo.errors import ArgumentError, DTypeError, IndexOutOfRange, ScheduleError

m, n = te.dim("m"), te.dim("n")


def better(x: Any, y: Any) -> Any:
    """Of equal values the first: so the order in which pairs are combined does not matter."""
    left = te.any(x[1] > y[1], te.all(x[1] == y[1], x[0] <= y[0]))
    return te.if_then_else(left, x[0], y[0]), te.if_then_else(left, x[1], y[1])


argmax = te.comm_reducer(better, lambda at, v: (te.max_value(at), te.min_value(v)), name="argmax")


def rows(shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    """Small whole numbers: there are ties."""
    return np.random.default_rng(seed).integers(-9, 9, shape).astype(np.float32)


def make(rows: Any, columns: Any, index: str = "int32") -> tuple[Any, ...]:
    x, k = te.placeholder((rows, columns), name="x"), te.reduce_axis(columns, name="k")
    at, top = te.compute((rows,), lambda i: argmax((te.cast(k, index), x[i, k]), axis=k), name="y")
    return x, at, top, k


def wanted(x: np.ndarray, index: str = "int32") -> tuple[np.ndarray, np.ndarray]:
    if x.shape[1] == 0:
        return (np.full(len(x), np.iinfo(index).max, index), np.full(len(x), -np.inf, x.dtype))
    return x.argmax(1).astype(index), x.max(1)


@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (8, 64), (5, 0), (0, 5), (33, 2)])
@pytest.mark.parametrize("symbolic", [False, True])
def test_argmax(shape: tuple[int, int], symbolic: bool, check: Any) -> None:
    x, at, top, _ = make(*((m, n) if symbolic else shape))
    data = rows(shape)
    check(te.schedule(at, top), [x, at, top], [data], *wanted(data))


@pytest.mark.parametrize("shape", [(9, 21), (32, 16), (1, 7), (70, 3)])
@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_argmax_of_columns_in_vectors(shape: tuple[int, int], symbolic: bool, index: str,
                                      check: Any) -> None:
    """Lanes are elements of the result; the reduction runs outside of them."""
    x, at, top, k = make(*((m, n) if symbolic else shape), index)
    s = te.schedule(at, top)
    io, ii = s[at].split("i", 16)
    s[top].reorder(io, k, ii)  # both names are the same stage
    s["y"].vectorize(ii)
    s["y"].parallel(io)
    assert s[at].axes == s[top].axes == ("i.o", "k", "i.i")
    data = rows(shape)
    check(s, [x, at, top], [data], *wanted(data, index))


def test_vector_loops_of_pairs_stay_vector_loops() -> None:
    """Values that wait for each other are kept for each lane, beside the loop."""
    x, at, top, k = make(32, 64)
    s = te.schedule(at, top)
    s[at].reorder(k, "i")
    s[at].vectorize("i")
    text = str(te.lower(s, [x, at, top]))
    loop = text[text.index("for k in"):]
    assert "vector for i in 0..32" in loop and "alloc" not in loop, text


def test_one_of_the_results(check: Any) -> None:
    x, at, _, _ = make(6, 13)
    data = rows((6, 13))
    check(te.schedule(at), [x, at], [data], wanted(data)[0])


@pytest.mark.parametrize("place", ["root", "at", "inline"])
def test_results_that_are_read_on(place: str, check: Any) -> None:
    x, at, top, _ = make(7, 19)
    y = te.compute((7, 19), lambda i, j: te.if_then_else(at[i] == te.cast(j, "int32"), 1.0,
                                                         x[i, j] - top[i]), name="marked")
    s = te.schedule(y)
    if place == "at":
        s[top].compute_at(y, "i")
    elif place == "inline":
        s["y"].compute_inline()
    data = rows((7, 19))
    first, best = wanted(data)
    want = np.where(np.arange(19) == first[:, None], 1, data - best[:, None])
    check(s, [x, y], [data], want.astype(np.float32))


def test_cache_write_of_pairs(check: Any) -> None:
    x, at, top, _ = make(7, 19)
    s = te.schedule(at, top)
    own = s.cache_write(at)
    io, _ = s[at].split("i", 4)
    own.compute_at(at, io)
    data = rows((7, 19))
    check(s, [x, at, top], [data], *wanted(data))


def test_reducer_of_single_values(check: Any) -> None:
    """log(sum(exp)), kept as one number: a reduction that is no operation of the table."""
    lse = te.comm_reducer(
        lambda a, b: te.maximum(a, b) + te.log1p(te.exp(-abs(a - b))), lambda t: -1e30, name="lse")
    x, k = te.placeholder((m, n), name="x"), te.reduce_axis(n, name="k")
    y = te.compute((m,), lambda i: lse(x[i, k], axis=k) * 2.0, name="y")
    data = np.random.default_rng(0).standard_normal((5, 31)).astype(np.float32)
    check(te.schedule(y), [x, y], [data], 2 * np.log(np.exp(data.astype("d")).sum(1)))


def test_three_values_that_wait_for_each_other(check: Any) -> None:
    """Welford: count, mean and squares, each of which the others' new values need."""

    def combine(a: Any, b: Any) -> Any:
        total = a[0] + b[0]
        step = b[1] - a[1]
        share = b[0] / te.maximum(total, 1.0)
        return total, a[1] + step * share, a[2] + b[2] + step * step * a[0] * share

    moments = te.comm_reducer(combine, lambda *types: (0.0, 0.0, 0.0), name="moments")
    x = te.placeholder((m, 6, n), name="x")
    j, k = te.reduce_axis(6, name="j"), te.reduce_axis(n, name="k")
    count, mean, square = te.compute(
        (m,), lambda i: moments((te.const(1.0), x[i, j, k], te.const(0.0)), axis=(j, k)), name="w")
    data = np.random.default_rng(0).standard_normal((3, 6, 11)).astype(np.float32) + 5
    flat = data.reshape(3, -1).astype("d")
    check(te.schedule(count, mean, square), [x, count, mean, square], [data],
          np.full(3, 66.0), flat.mean(1), flat.var(1) * 66, rtol=1e-4)


def test_values_that_change_places(check: Any) -> None:
    """(a, b) -> (b + y, a): a store before the other value was read would show."""
    swap = te.comm_reducer(lambda p, q: (p[1] + q[0], p[0]), lambda *t: (0, 0), name="swap")
    x, k = te.placeholder((7,), "int32", name="x"), te.reduce_axis(7, name="k")
    a, b = te.compute((), lambda: swap((x[k], te.const(0, "int32")), axis=k), name="y")
    data = np.arange(1, 8, dtype=np.int32)
    p = (0, 0)
    for value in data:
        p = (p[1] + value, p[0])
    check(te.schedule(a, b), [x, a, b], [data], *(np.array(v, np.int32) for v in p))


def test_half_types_are_accumulated_in_float32(check: Any) -> None:
    total = te.comm_reducer(lambda a, b: a + b, lambda t: te.const(0, t), name="total")
    x, k = te.placeholder((4096,), "float16", name="x"), te.reduce_axis(4096, name="k")
    y = te.compute((), lambda: total(x[k], axis=k), name="y")
    assert y.dtype.name == "float16"
    check(te.schedule(y), [x, y], [np.full(4096, 0.5, np.float16)], np.float16(2048))


@pytest.mark.parametrize("size", [0, 1, 5, 16, 37])
def test_several_results_of_one_compute(size: int, check: Any) -> None:
    x, k = te.placeholder((n, 4), name="x"), te.reduce_axis(4, name="k")
    double, positive, total = te.compute((n,), lambda i: (
        x[i, 0] * 2.0, x[i, 1] > 0.0, te.sum(x[i, k], axis=k)), name="y")
    assert [t.name for t in (double, positive, total)] == ["y.0", "y.1", "y.2"]
    s = te.schedule(double, positive, total)
    io, _ = s[double].split("i", 4)
    s[double].parallel(io)
    data = np.random.default_rng(0).standard_normal((size, 4)).astype(np.float32)
    check(s, [x, double, positive, total], [data], data[:, 0] * 2, data[:, 1] > 0,
          data.sum(1, dtype="d"))


def test_results_in_one_vector_loop(check: Any) -> None:
    x = te.placeholder((n,), name="x")
    s_, c = te.compute((n,), lambda i: [te.sin(x[i]), te.cos(x[i])], name="y")
    s = te.schedule(s_, c)
    s["y"].vectorize("i")
    data = np.linspace(-3, 3, 45, dtype=np.float32)
    check(s, [x, s_, c], [data], np.sin(data), np.cos(data))


def test_joint_stages_lie_together_whatever_is_asked_for(check: Any) -> None:
    x = te.placeholder((8,), name="x")
    z = te.compute((8,), lambda i: x[i] - 1.0, name="z")
    a, b = te.compute((8,), lambda i: (x[i] + 1.0, z[i] * 2.0), name="y")
    w = te.compute((8,), lambda i: a[i] + 3.0, name="w")
    s = te.schedule(w, z, b)
    data = np.arange(8, dtype=np.float32)
    check(s, [x, w, z, b], [data], data + 4, data - 1, (data - 1) * 2)


def test_mistakes() -> None:
    x, k = te.placeholder((8,), name="x"), te.reduce_axis(8, name="k")

    def using(combine: Any, identity: Any) -> Any:
        return te.comm_reducer(combine, identity, name="mine")((te.cast(k, "int32"), x[k]), axis=k)

    with pytest.raises(ArgumentError, match="identity of mine has 1 values, not 2"):
        using(lambda a, b: a, lambda t, u: 0)
    with pytest.raises(ArgumentError, match=r"identity of mine is .*, not a number"):
        using(lambda a, b: a, lambda t, u: (0, x[0]))
    with pytest.raises(ArgumentError, match="mine combines 2 values, but its function answers"):
        using(lambda a, b: a[0], lambda t, u: (0, 0))
    with pytest.raises(DTypeError, match=r"value 0 of mine is int32, but .* is float32"):
        using(lambda a, b: (a[1], b[1]), lambda t, u: (0, 0))
    with pytest.raises(IndexOutOfRange):
        te.compute((8,), lambda i: (x[i], x[i + 1]))
    with pytest.raises(ArgumentError, match="computes nothing"):
        te.compute((8,), lambda i: ())
    with pytest.raises(ArgumentError, match="cannot schedule"):
        te.schedule((x, x))  # type: ignore[arg-type]


def test_lanes_do_not_combine_pairs() -> None:
    _, at, top, k = make(8, 32)
    s = te.schedule(at, top)
    with pytest.raises(ScheduleError, match=r"argmax combines one after the other.*\n?.*rfactor"):
        s[at].vectorize(k)
    with pytest.raises(ScheduleError, match=r"cannot be parallel.*\n?.*rfactor"):
        s[at].parallel(k)
