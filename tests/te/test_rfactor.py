"""Reductions in two steps: partial results of their own, then what combines them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from terrazzo import te
from terrazzo.errors import ScheduleError
from terrazzo.expr.schedule import Schedule

m, n = te.dim("m"), te.dim("n")
OPS = {"sum": (te.sum, np.sum), "prod": (te.prod, np.prod), "max": (te.max, np.max),
       "min": (te.min, np.min)}


def data_of(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(0.5, 1.5, shape).astype(np.float32)


def total(size: Any, op: str = "sum") -> tuple[Any, Any, Any]:
    x, k = te.placeholder((size,), name="x"), te.reduce_axis(size, name="k")
    return x, te.compute((), lambda: OPS[op][0](x[k], axis=k), name="y"), k


def want_of(op: str, x: np.ndarray) -> np.ndarray:
    identity = {"sum": 0.0, "prod": 1.0, "max": -np.inf, "min": np.inf}[op]
    return np.asarray(OPS[op][1](x.astype("d"), initial=identity))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("size", [0, 1, 5, 16, 37, 64])
@pytest.mark.parametrize("symbolic", [False, True])
def test_parallel_parts(op: str, size: int, symbolic: bool, check: Any) -> None:
    x, y, k = total(n if symbolic else size, op)
    s = te.schedule(y)
    ko, ki = s[y].split(k, nparts=4)
    parts = s.rfactor(y, ko)
    assert parts.axis == (ko,) and s[y].reduce_axis == (ko,)
    parts.parallel(ko)
    parts.vectorize(ki)
    data = data_of(size)
    check(s, [x, y], [data], want_of(op, data))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("size", [0, 1, 5, 16, 37, 64])
@pytest.mark.parametrize("symbolic", [False, True])
def test_lanes(op: str, size: int, symbolic: bool, check: Any) -> None:
    """The inner part as an axis of the result: what lies side by side in memory, in lanes."""
    x, y, k = total(n if symbolic else size, op)
    s = te.schedule(y)
    ko, ki = s[y].split(k, 16)
    lanes = s.rfactor(y, ki)
    lanes.reorder(ko, ki)
    lanes.vectorize(ki)
    data = data_of(size)
    check(s, [x, y], [data], want_of(op, data))


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (4, 32), (5, 33), (0, 7), (7, 0)])
@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("factor_axis", [0, 1, -1])
def test_rows(shape: tuple[int, int], symbolic: bool, factor_axis: int, check: Any) -> None:
    rows, columns = (m, n) if symbolic else shape
    x, k = te.placeholder((rows, columns), name="x"), te.reduce_axis(columns, name="k")
    y = te.compute((rows,), lambda i: te.sum(x[i, k] * 2.0, axis=k) + 1.0, name="y")
    s = te.schedule(y)
    ko, ki = s[y].split(k, 8)
    parts = s.rfactor(y, ki, factor_axis)
    assert parts.axis == ((ki, "i") if factor_axis == 0 else ("i", ki))
    parts.reorder("i", ko, ki)
    parts.vectorize(ki)
    parts.parallel("i")
    parts.compute_root()
    data = data_of(*shape)
    check(s, [x, y], [data], 2 * data.sum(1, dtype="d") + 1)


@pytest.mark.parametrize("size", [(3, 4), (5, 7), (1, 9)])
@pytest.mark.parametrize("symbolic", [False, True])
def test_two_axes_fused_and_cut(size: tuple[int, int], symbolic: bool, check: Any) -> None:
    rows, columns = (m, n) if symbolic else size
    x = te.placeholder((rows, columns), name="x")
    j, k = te.reduce_axis(rows, name="j"), te.reduce_axis(columns, name="k")
    y = te.compute((), lambda: te.sum(x[j, k], axis=(j, k)), name="y")
    s = te.schedule(y)
    jk = s[y].fuse(j, k)
    outer, inner = s[y].split(jk, 6)
    parts = s.rfactor(y, outer)
    more = s.rfactor(parts, inner)
    parts.parallel(outer)
    more.parallel(inner)
    assert more.axis == (inner, outer)
    data = data_of(*size)
    check(s, [x, y], [data], data.sum(dtype="d"))


@pytest.mark.parametrize("size", [6, 10])
@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("by", ["j", "k"])
def test_triangles(size: int, symbolic: bool, by: str, check: Any) -> None:
    """A range that depends on another axis, and one that does not begin at 0."""
    edge = n if symbolic else size
    x = te.placeholder((edge, edge), name="x")
    j = te.reduce_axis((1, edge), name="j")
    k = te.reduce_axis((0, j), name="k")  # type: ignore[arg-type]
    y = te.compute((), lambda: te.sum(x[j, k], axis=(j, k)), name="y")
    s = te.schedule(y)
    parts = s.rfactor(y, {"j": j, "k": k}[by])
    parts.parallel(by)
    data = data_of(size, size)
    check(s, [x, y], [data], np.tril(data, -1).sum(dtype="d"))


def test_a_reduction_of_one_part_only(check: Any) -> None:
    """The whole loop becomes an axis: nothing is left to reduce in the first stage."""
    x, y, k = total(24)
    s = te.schedule(y)
    each = s.rfactor(y, k)
    each.parallel(k)
    assert each.reduce_axis == ()
    data = data_of(24)
    check(s, [x, y], [data], data.sum(dtype="d"))


@pytest.mark.parametrize("size", [0, 1, 7, 40, 99])
@pytest.mark.parametrize("symbolic", [False, True])
def test_pairs(size: int, symbolic: bool, check: Any) -> None:
    def better(x: Any, y: Any) -> Any:
        left = te.any(x[1] > y[1], te.all(x[1] == y[1], x[0] <= y[0]))
        return te.if_then_else(left, x[0], y[0]), te.if_then_else(left, x[1], y[1])

    argmax = te.comm_reducer(better, lambda at, v: (te.max_value(at), te.min_value(v)),
                             name="argmax")
    length = n if symbolic else size
    x, k = te.placeholder((length,), name="x"), te.reduce_axis(length, name="k")
    at, top = te.compute((), lambda: argmax((te.cast(k, "int32"), x[k]), axis=k), name="y")
    s = te.schedule(at, top)
    ko, _ = s[at].split(k, nparts=3)
    parts = s.rfactor(at, ko)
    kio, kii = parts.split("k.i", 16)
    lanes = s.rfactor(parts, kii, factor_axis=1)
    parts.parallel(ko)
    lanes.compute_at(parts, ko)
    lanes.reorder(ko, kio, kii)
    lanes.vectorize(kii)
    data = np.random.default_rng(1).integers(-5, 6, size).astype(np.float32)
    want = (data.argmax(), data.max()) if size else (np.iinfo("int32").max, -np.inf)
    check(s, [x, at, top], [data], np.int32(want[0]), np.float32(want[1]))


def test_half_types_keep_float32_in_between(check: Any) -> None:
    x, k = te.placeholder((4096,), "float16", name="x"), te.reduce_axis(4096, name="k")
    y = te.compute((), lambda: te.sum(x[k], axis=k), name="y")
    s = te.schedule(y)
    ko, _ = s[y].split(k, nparts=2)
    parts = s.rfactor(y, ko)
    assert s.plan.stage(parts.name).tensor.dtype.name == "float32"
    check(s, [x, y], [np.full(4096, 0.3, np.float16)], np.float16(1229), rtol=1e-3)


def test_partial_results_inside_a_loop_of_the_reader(check: Any) -> None:
    x, k = te.placeholder((9, 50), name="x"), te.reduce_axis(50, name="k")
    y = te.compute((9,), lambda i: te.sum(x[i, k], axis=k), name="y")
    s = te.schedule(y)
    ko, ki = s[y].split(k, 16)
    lanes = s.rfactor(y, ki)
    lanes.reorder("i", ko, ki)
    lanes.vectorize(ki)
    lanes.compute_at(y, "i")
    s[y].parallel("i")
    data = data_of(9, 50)
    check(s, [x, y], [data], data.sum(1, dtype="d"))


def test_text_and_json() -> None:
    s = Schedule().split("y", "k", 4).rfactor("y", "k.i", factor_axis=1)
    assert str(s).splitlines()[1] == "y.rfactor(k.i at 1 -> y.rf)"
    assert Schedule.from_json(s.to_json()) == s


def test_what_does_not_fit() -> None:
    x, k = te.placeholder((8, 8), name="x"), te.reduce_axis(8, name="k")
    y = te.compute((8,), lambda i: te.sum(x[i, k], axis=k), name="y")
    two = te.compute((8,), lambda i: te.sum(x[i, k], axis=k) / te.max(x[i, k], axis=k), name="two")
    s = te.schedule(y, two)
    with pytest.raises(ScheduleError, match="axis 'i' of y is no reduction"):
        s.rfactor(y, "i")
    with pytest.raises(ScheduleError, match="y has no axis 'q'"):
        s.rfactor(y, "q")
    with pytest.raises(ScheduleError, match="two reduces 2 things"):
        s.rfactor(two, k)
    with pytest.raises(ScheduleError, match="no place 2 for its new axis"):
        s.rfactor(y, k, factor_axis=2)
    s[y].split("i", 4)
    with pytest.raises(ScheduleError, match="y already has scheduled loops"):
        s.rfactor(y, k)
