"""Where stages are computed, and loops cut into a number of pieces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from terrazzo import te
from terrazzo.errors import ScheduleError
from terrazzo.expr.schedule import Schedule

n = te.dim("n")


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 23])
@pytest.mark.parametrize("nparts", [1, 3, 4])
@pytest.mark.parametrize("symbolic", [False, True])
def test_nparts(size: int, nparts: int, symbolic: bool, check: Any) -> None:
    m = n if symbolic else size
    x = te.placeholder((m, 3), name="x")
    y = te.compute((m, 3), lambda i, j: x[i, j] * 2.0 + i, name="y")
    s = te.schedule(y)
    outer, _ = s[y].split("i", nparts=nparts)
    s[y].parallel(outer)
    data = np.arange(size * 3, dtype=np.float32).reshape(size, 3)
    check(s, [x, y], [data], data * 2 + np.arange(size, dtype="f")[:, None])


@pytest.mark.parametrize("size", [5, 8, 9, 17])
@pytest.mark.parametrize("symbolic", [False, True])
def test_nparts_of_reductions_and_of_parts(size: int, symbolic: bool, check: Any) -> None:
    m = n if symbolic else size
    x, k = te.placeholder((m, m), name="x"), te.reduce_axis(m, name="k")
    y = te.compute((m,), lambda i: te.sum(x[i, k], axis=k), name="y")
    s = te.schedule(y)
    ko, ki = s[y].split(k, nparts=4)
    io, ii = s[y].split("i", nparts=2)
    iio, iii = s[y].split(ii, 3)
    s[y].reorder(io, iio, ko, iii, ki)
    assert s[y].axes == ("i.o", "i.i.o", "k.o", "i.i.i", "k.i")
    data = np.random.default_rng(0).standard_normal((size, size), "f")
    check(s, [x, y], [data], data.sum(1, dtype="d"))


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("size", [3, 10, 12])
def test_nparts_with_stages_inside(size: int, symbolic: bool, check: Any) -> None:
    m = n if symbolic else size
    x = te.placeholder((m,), name="x")
    a = te.compute((m,), lambda i: x[i] * 2.0, name="a")
    y = te.compute((m,), lambda i: a[i] + a[m - 1 - i], name="y")
    z = te.compute((m,), lambda i: y[i] + te.if_then_else(i > 0, y[i - 1], 0.0), name="z")
    s = te.schedule(z)
    outer, _ = s[z].split("i", nparts=4)
    s[z].parallel(outer)
    s[y].compute_at(z, outer)
    s[y].split("i", nparts=2)
    packed = s.cache_read(a, "local", [y])
    packed.split("i", nparts=3)
    packed.pack("i.o", "i.i")
    data = np.random.default_rng(0).standard_normal(size).astype("f")
    pairs = data * 2 + data[::-1] * 2
    check(s, [x, z], [data], pairs + np.r_[0, pairs[:-1]])


def test_nparts_is_part_of_the_schedule() -> None:
    s = Schedule().split("y", "i", nparts=3).compute_root("y")
    assert str(s) == "y.split(i, nparts 3 -> i.o, i.i)\ny.compute_root()"
    assert Schedule.from_json(s.to_json()) == s
    old = '[{"do": "split", "stage": "y", "axis": "i", "factor": 2, "outer": "a", "inner": "b"}]'
    assert Schedule.from_json(old) == Schedule().split("y", "i", 2, "a", "b")


@pytest.mark.parametrize("wrong", [{}, {"factor": 2, "nparts": 2}, {"nparts": 0}, {"factor": 1.5},
                                   {"nparts": -1}])
def test_splits_that_say_too_little_or_too_much(wrong: dict[str, Any]) -> None:
    x = te.placeholder((8,), name="x")
    y = te.compute((8,), lambda i: x[i] + 1.0, name="y")
    with pytest.raises(ScheduleError, match="cannot split axis 'i' of y"):
        te.schedule(y)[y].split("i", **wrong)


def test_compute_root_takes_back(check: Any) -> None:
    x = te.placeholder((6, 5), name="x")
    a = te.compute((6, 5), lambda i, j: x[i, j] * 2.0, name="a")
    y = te.compute((6, 5), lambda i, j: a[i, j] + 1.0, name="y")
    s = te.schedule(y)
    plain = str(te.lower(s, [x, y]))
    s[a].compute_at(y, "i")
    inside = str(te.lower(s, [x, y]))
    s[a].compute_root()
    assert str(te.lower(s, [x, y])) == plain != inside
    data = np.arange(30, dtype="f").reshape(6, 5)
    check(s, [x, y], [data], data * 2 + 1)


def test_parallel_reductions_are_refused() -> None:
    x, k = te.placeholder((8,), name="x"), te.reduce_axis(8, name="k")
    y = te.compute((), lambda: te.sum(x[k], axis=k), name="y")
    s = te.schedule(y)
    with pytest.raises(ScheduleError, match=r"reduction and cannot be parallel.*\n?.*rfactor"):
        s[y].parallel(k)


def test_an_output_inside_tasks_is_never_seen_half_summed() -> None:
    """Two tasks compute the elements at their border, and both read them."""
    x, k = te.placeholder((n, 64), name="x"), te.reduce_axis(64, name="k")
    a = te.compute((n, 8192), lambda i, j: te.sum(x[i, k] * (j + 1), axis=k), name="a")
    y = te.compute((n, 8192), lambda i, j: a[i, j] + te.if_then_else(i > 0, a[i - 1, j], 0.0),
                   name="y")
    s = te.schedule(a, y)
    s[a].compute_at(y, "i")
    s[a].reorder("i", k, "j")
    s[y].parallel("i")
    text = str(te.lower(s, [x, a, y]))
    assert "a[" in text and not any(
        line.strip().startswith("a[") and "+=" in line for line in text.splitlines()), text
    s[a].compute_root()  # one after the other there is nobody to see it
    assert any(line.strip().startswith("a[") and "+=" in line
               for line in str(te.lower(s, [x, a, y])).splitlines())


# ---------------------------------------------------------------- outputs inside of loops
def refused(s: te.ScheduleBuilder, args: list[Any], message: str) -> None:
    """When it is built, as for any stage: where its readers are may change until then."""
    with pytest.raises(ScheduleError, match=message):
        te.build(s, args, "interpreter")


def test_an_output_that_another_stage_reads_before_its_loops() -> None:
    x = te.placeholder((4,), name="x")
    p = te.compute((4,), lambda i: x[i] + 1.0, name="p")
    q = te.compute((4,), lambda i: p[3 - i] * 2.0, name="q")
    r = te.compute((4,), lambda i: p[i] + q[i], name="r")
    s = te.schedule(p, r)
    s[p].compute_at(r, "i")
    refused(s, [x, p, r], "p is computed at loop 'i' of r, but q reads it outside of that loop")


@pytest.mark.parametrize("later", ["root", "inside"])
def test_an_output_that_another_stage_reads_after_its_loops(later: str, check: Any) -> None:
    x = te.placeholder((4,), name="x")
    p = te.compute((4,), lambda i: x[i] + 1.0, name="p")
    r = te.compute((4,), lambda i: p[i] * 3.0, name="r")
    q = te.compute((4,), lambda i: p[3 - i] * 2.0, name="q")
    y = te.compute((4,), lambda i: q[i] + r[i], name="y")
    s = te.schedule(p, r, y)
    s[p].compute_at(r, "i")
    if later == "inside":
        s[q].compute_at(y, "i")
    data = np.arange(4, dtype="f")
    check(s, [x, p, r, y], [data], data + 1, data * 3 + 3, data * 3 + 3 + (8 - data * 2))


@pytest.mark.parametrize("after", [False, True])
def test_one_output_of_a_tuple_inside_of_a_reader(after: bool, check: Any) -> None:
    """What is no output is memory of the loop's own."""
    x = te.placeholder((4,), name="x")
    a, b = te.compute((4,), lambda i: (x[i] + 1.0, x[i] + 2.0), name="p")
    r = te.compute((4,), lambda i: a[i] + b[i], name="r")
    q = te.compute((4,), lambda i: (b if after else a)[3 - i] + r[i], name="q")
    s = te.schedule(a, r, q)
    s[a].compute_at(r, "i")
    if after:
        refused(s, [x, a, r, q], "but q reads it outside of that loop")
    else:
        data = np.arange(4, dtype="f")
        check(s, [x, a, r, q], [data], data + 1, data * 2 + 3, data[::-1] + 1 + data * 2 + 3)


def test_an_output_inside_of_what_is_computed_in_part() -> None:
    x = te.placeholder((8,), name="x")
    p = te.compute((8,), lambda i: x[i] + 1.0, name="p")
    c = te.compute((8,), lambda i: p[i] * 2.0, name="c")
    y = te.compute((4,), lambda i: c[i] + 1.0, name="y")
    s = te.schedule(p, y)
    s[p].compute_at(c, "i")
    s[c].compute_at(y, "i")
    refused(s, [x, p, y], "p cannot be computed at c, of which only what y reads is computed")


@pytest.mark.parametrize("fused", [False, True])
def test_an_output_in_a_loop_that_may_not_run(fused: bool, check: Any) -> None:
    x, c = te.placeholder((3, n), name="x"), te.placeholder((3, 1), name="c")
    p = te.compute((3, 1), lambda i, j: c[i, j] + 1.0, name="p")
    y = te.compute((3, n), lambda i, j: x[i, j] + p[i, 0], name="y")
    s = te.schedule(p, y)
    loop = s[y].fuse("i", "j") if fused else "j"
    s[p].compute_at(y, loop)
    refused(s, [x, c, p, y], f"at loop '{loop}' of y, which does not run where n is 0")
    if not fused:
        s[p].compute_at(y, "i")  # which runs whatever n is
        for size in (0, 2):
            data, given = np.ones((3, size), "f"), np.arange(3, dtype="f")[:, None]
            check(s, [x, c, p, y], [data, given], given + 1, data + given + 1)


# ---------------------------------------------------------------- packed, then split
@pytest.mark.parametrize("how", ["split", "tile", "part", "again"])
@pytest.mark.parametrize("symbolic", [False, True])
def test_splits_of_what_is_packed(how: str, symbolic: bool, check: Any) -> None:
    """They cut its loops; its layout stays."""
    m = n if symbolic else 6
    x = te.placeholder((m, 4), name="x")
    y = te.compute((m, 4), lambda i, j: x[i, 3 - j] * 2.0, name="y")
    s = te.schedule(y)
    copy = s.cache_read(x, "local", [y])
    if how == "part":
        copy.split("i", 4)
        copy.pack("i.i", "j", "i.o")
        copy.split("i.i", 2)
    else:
        copy.pack("j", "i")
        copy.tile("i", "j", 4, 3)
        if how == "split":
            copy.split("i.i", 2)
        elif how == "again":
            copy.pack("i.i", "j.o", "i.o", "j.i")
    data = np.arange(24, dtype="f").reshape(6, 4)
    check(s, [x, y], [data], data[:, ::-1] * 2)
