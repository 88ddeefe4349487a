"""Schedules are data: they print, compare, travel as JSON, and say what does not fit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from programs import chain, layer_norm, matmul, softmax

from terrazzo.base.scalar import reduce
from terrazzo.errors import ScheduleError
from terrazzo.expr.ir import Program, compute, placeholder, reduce_axis
from terrazzo.expr.plan import plan
from terrazzo.expr.schedule import STEPS, Schedule, default_schedule

TILED = (
    Schedule()
    .cache_read("B", "local", ["C"])
    .tile("C", "i", "j", 4, 8)
    .split("C", "k", 4, "ko", "ki")
    .reorder("C", "i.o", "j.o", "ko", "ki", "i.i", "j.i")
    .unroll("C", "i.i")
    .vectorize("C", "j.i")
    .parallel("C", "i.o", grain=2)
    .compute_at("B.local", "C", "ko")
    .pack("B.local", "j", "i")
    .streaming("C")
)


def test_prints_one_step_a_line() -> None:
    assert str(TILED) == """\
B.cache_read(local, C -> B.local)
C.split(i, 4 -> i.o, i.i)
C.split(j, 8 -> j.o, j.i)
C.reorder(i.o, j.o, i.i, j.i)
C.split(k, 4 -> ko, ki)
C.reorder(i.o, j.o, ko, ki, i.i, j.i)
C.unroll(i.i)
C.vectorize(j.i)
C.parallel(i.o, grain 2)
B.local.compute_at(C, ko)
B.local.pack(j, i)
C.streaming()"""
    assert str(Schedule()) == "plain loops"


def test_equal_schedules_are_equal_and_hash_alike() -> None:
    one, two = (Schedule().split("C", "i", 4).fuse("C", "i.o", "i.i") for _ in range(2))
    assert one == two and hash(one) == hash(two)
    assert one != Schedule().split("C", "i", 8).fuse("C", "i.o", "i.i")


def test_every_step_survives_json() -> None:
    schedule = (TILED.cache_write("C").compute_inline("x").compute_root("x").rfactor("x", "k")
                .tensorize("C", "i.i", "fma").bind("C", "i.o").fuse("C", "a", "b"))
    assert {s.verb for s in schedule.steps} == set(STEPS)
    assert Schedule.from_json(schedule.to_json()) == schedule


def test_unknown_json_is_refused() -> None:
    with pytest.raises(ScheduleError, match="no schedule step looks like"):
        Schedule.from_json('[{"do": "skew", "stage": "C"}]')


def test_steps_of_one_stage() -> None:
    assert [s.verb for s in TILED.of("B.local")] == ["compute_at", "pack"]


def test_default_is_plain_loops() -> None:
    assert default_schedule(matmul(2, 3, 4)) == Schedule()


def test_plan_knows_the_loops() -> None:
    state = plan(matmul(7, 13, 5), TILED)
    assert state.stage("C").nest.order == ("i.o", "j.o", "ko", "ki", "i.i", "j.i")
    assert state.stage("C").nest.leaves_of("i") == {"i.o", "i.i"}
    assert state.stage("B.local").attach == ("C", "ko")


def test_reductions_of_one_name_get_names_of_their_own() -> None:
    x = placeholder((4, 6), name="x")
    k, other = reduce_axis(6), reduce_axis(4)
    y = compute((), lambda: reduce("add", x[0, k], [k]) * reduce("add", x[other, 0], [other]))
    (stage,) = plan(Program("two", (x,), (y,), (y,)), Schedule()).stages
    assert stage.nest.reduction == ("k", "k1")


S = Schedule
MATMUL_ERRORS: dict[str, tuple[Callable[[], Schedule], str]] = {
    "unknown axis": (lambda: S().split("C", "z", 4), "no axis 'z'.*\n.*its loops are: i, j, k"),
    "unknown stage": (lambda: S().split("D", "i", 4), "no stage 'D'.*\n.*its stages are: C"),
    "split away": (lambda: S().split("C", "i", 4).vectorize("C", "i"),
                   "split into 'i.o' and 'i.i'.*\n.*i.o, i.i, j, k"),
    "fused away": (lambda: S().fuse("C", "i", "j").unroll("C", "j"), "fused into 'i_j'"),
    "factor": (lambda: S().split("C", "i", 0), "split axis 'i' of C by 0"),
    "vectorised twice": (lambda: S().vectorize("C", "j").vectorize("C", "j"),
                         "'j' of C is already vectorised"),
    "marked, then split": (lambda: S().unroll("C", "j").split("C", "j", 2), "already unrolled"),
    "two vectors": (lambda: S().vectorize("C", "j").vectorize("C", "i"), "'j' already is"),
    "inner outside outer": (lambda: S().split("C", "i", 4).reorder("C", "i.i", "i.o"),
                            "puts 'i.i' outside 'i.o'"),
    "reorder twice": (lambda: S().reorder("C", "i", "i"), "names an axis twice"),
    "not neighbours": (lambda: S().fuse("C", "i", "k"), "not neighbours in i, j, k"),
    "fuse of two sorts": (lambda: S().fuse("C", "j", "k"), "cannot be fused"),
    "name in use": (lambda: S().split("C", "i", 4, "j", "x"), "already has an axis named 'j'"),
    "parallel reduction": (lambda: S().parallel("C", "k"), "is a reduction and cannot be parallel"),
    "parallel inside": (lambda: S().reorder("C", "k", "i").parallel("C", "i"),
                        "parallel inside the reduction 'k'"),
    "grain": (lambda: S().parallel("C", "i", 0), "grain 0"),
    "bind": (lambda: S().bind("C", "i", "thread"), "cannot bind axis 'i' to 'thread'"),
    "inline output": (lambda: S().compute_inline("C"), "C is an output"),
    "pack output": (lambda: S().pack("C", "j", "i"), "its layout is the caller's"),
    "scope": (lambda: S().cache_read("A", "shared", ["C"]), "no memory scope 'shared'"),
    "cache of nothing": (lambda: S().cache_read("Z", "local", ["C"]), "no tensor 'Z'"),
    "late cache_write": (lambda: S().split("C", "i", 2).cache_write("C"),
                         "already has scheduled loops"),
    "cached twice": (lambda: S().cache_read("A", "local", ["C"]).cache_read("A", "local", ["C"]),
                     "already is a tensor named 'A.local'|does not read"),
    "bad layout": (lambda: S().cache_read("A", "local", ["C"]).pack("A.local", "i"),
                   "name each of its data axes once: i, j"),
    "not a name": (lambda: S().split("C", 3, 4), "names neither a tensor nor an axis"),
}


@pytest.mark.parametrize("case", MATMUL_ERRORS)
def test_errors_say_what_does_not_fit(case: str) -> None:
    make, message = MATMUL_ERRORS[case]
    with pytest.raises(ScheduleError, match=message):
        plan(matmul(7, 13, 5), make())


def test_reader_outside_of_the_loop_is_an_error() -> None:
    schedule = Schedule().compute_at("m", "y", "i")
    with pytest.raises(ScheduleError, match="but e reads it outside of that loop"):
        plan(softmax(4, 8), schedule)
    plan(softmax(4, 8), schedule.compute_at("e", "y", "i").compute_at("s", "y", "i"))


def test_stage_cannot_be_computed_at_an_earlier_one() -> None:
    with pytest.raises(ScheduleError, match="c cannot be computed at a"):
        plan(chain(3, 4), Schedule().compute_at("c", "a", "i"))


def test_output_must_fit_where_it_is_computed() -> None:
    x = placeholder((6,), name="x")
    a = compute((6,), lambda i: x[i] + 1.0, name="a")
    b = compute((3,), lambda i: a[i] * 2.0, name="b")
    with pytest.raises(ScheduleError, match="output a cannot be computed at b"):
        plan(Program("p", (x,), (a, b), (a, b)), Schedule().compute_at("a", "b", "i"))


def test_output_is_not_computed_inside_a_reduction() -> None:
    x, k = placeholder((6, 4), name="x"), reduce_axis(4)
    a = compute((6,), lambda i: x[i, 0] + 1.0, name="a")
    b = compute((6,), lambda i: reduce("add", x[i, k] * a[i], [k]), name="b")
    with pytest.raises(ScheduleError, match="inside a reduction of b"):
        plan(Program("p", (x,), (a, b), (a, b)), Schedule().compute_at("a", "b", "k"))


def test_names_must_be_unique() -> None:
    x = placeholder((6,), name="x")
    y = compute((6,), lambda i: x[i] + 1.0, name="x")
    with pytest.raises(ScheduleError, match="two tensors named 'x'"):
        plan(Program("p", (x,), (y,), (y,)), Schedule())


def test_layer_norm_fits_its_row_schedule() -> None:
    schedule = Schedule().compute_at("mean", "y", "i").compute_at("var", "y", "i")
    assert [s.attach for s in plan(layer_norm(4, 8), schedule).stages] == [
        ("y", "i"), ("y", "i"), None]
