"""Lowering: whatever the schedule, the loops compute what the program says."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import chain, check, conv1d, layer_norm, matmul, run_loops, softmax, stencil

from terrazzo.base.scalar import Axis, Load, Reduce, as_scalar, call, reduce
from terrazzo.base.shapes import dim
from terrazzo.dtypes import bfloat16, float32, int32
from terrazzo.errors import ScheduleError
from terrazzo.expr import evaluate
from terrazzo.expr.ir import Program, Tensor, compute, placeholder, reduce_axis
from terrazzo.expr.lower import lower
from terrazzo.expr.plan import plan
from terrazzo.expr.schedule import Schedule
from terrazzo.expr.tensorize import INTRINSICS, Intrinsic, Pattern, register_intrinsic
from terrazzo.index import Var
from terrazzo.loop.ir import Alloc, For, If, Stmt, Store, Tile, TileIntrinsic, walk

S = Schedule
m, n, k = dim("m"), dim("n"), dim("k")


# ---------------------------------------------------------------- golden text
def test_plain_matmul_reads_well() -> None:
    assert str(lower(matmul(7, 13, 5), S())) == """\
kernel matmul(A: f32[35], B: f32[65], C: f32[91]):
    # matmul
    for i in 0..7:
        for j in 0..13:
            alloc C.acc: f32[1]
            C.acc[0] = 0
            for k in 0..5:
                C.acc[0] += A[i*5 + k] * B[j + k*13]
            C[i*13 + j] = C.acc[0]"""


def test_ragged_tiles_need_no_tests() -> None:
    schedule = (S().tile("C", "i", "j", 4, 8).reorder("C", "i.o", "j.o", "k", "i.i", "j.i")
                .vectorize("C", "j.i").unroll("C", "i.i").parallel("C", "i.o", grain=3))
    function = lower(matmul(m, n, 5), schedule, name="mm")
    assert str(function) == """\
kernel mm(A: f32[m*5], B: f32[n*5], C: f32[m*n], m: dim, n: dim):
    # matmul
    parallel for i.o in 0..(m + 3) // 4:
        for j.o in 0..(n + 7) // 8:
            alloc C.acc: f32[32]
            unrolled for i.i in 0..min(m - i.o*4, 4):
                vector for j.i in 0..min(n - j.o*8, 8):
                    C.acc[i.i*8 + j.i] = 0
            for k in 0..5:
                unrolled for i.i in 0..min(m - i.o*4, 4):
                    vector for j.i in 0..min(n - j.o*8, 8):
                        C.acc[i.i*8 + j.i] += A[i.i*5 + i.o*20 + k] * B[k*n + j.i + j.o*8]
            unrolled for i.i in 0..min(m - i.o*4, 4):
                vector for j.i in 0..min(n - j.o*8, 8):
                    C[i.i*n + i.o*n*4 + j.i + j.o*8] = C.acc[i.i*8 + j.i]"""
    outermost = function.body
    assert isinstance(outermost, For) and outermost.grain == 3


def test_softmax_rows_read_well() -> None:
    schedule = S().parallel("y", "i").vectorize("y", "j").vectorize("e", "j")
    for stage in ("m", "e", "s"):
        schedule = schedule.compute_at(stage, "y", "i")
    assert str(lower(softmax(m, n), schedule)) == """\
kernel softmax(x: f32[m*n], y: f32[m*n], m: dim, n: dim):
    # softmax
    parallel for i in 0..m:
        alloc m1: f32[1]
        alloc e: f32[n]
        alloc s: f32[1]
        m1[0] = -inf
        for k in 0..n:
            m1[0] max= x[i*n + k]
        vector for j1 in 0..n:
            e[j1] = exp(x[i*n + j1] - m1[0])
        s[0] = 0
        for k1 in 0..n:
            s[0] += e[k1]
        vector for j in 0..n:
            y[i*n + j] = e[j] / s[0]"""


# ---------------------------------------------------------------- every primitive
MATMUL_SCHEDULES = {
    "plain": S(),
    "split": S().split("C", "i", 3).split("C", "j", 4).split("C", "k", 2),
    "divisible split": S().split("C", "i", 7).split("C", "k", 5),
    "split twice": S().split("C", "j", 6).split("C", "j.i", 4).split("C", "j.o", 2),
    "fuse": S().fuse("C", "i", "j"),
    "fuse and split": S().fuse("C", "i", "j").split("C", "i_j", 4).parallel("C", "i_j.o"),
    "fuse after a ragged split": S().split("C", "i", 3).fuse("C", "i.i", "j"),
    "fuse a split again": S().split("C", "i", 3).fuse("C", "i.o", "i.i"),
    "fuse reductions": S().split("C", "k", 2).fuse("C", "k.o", "k.i"),
    "fuse pieces of ragged pieces": S().split("C", "j", 8).split("C", "j.i", 3)
    .fuse("C", "j.i.o", "j.i.i"),
    "reduction outside": S().reorder("C", "k", "i", "j"),
    "reduction between": S().tile("C", "i", "j", 3, 4)
    .reorder("C", "i.o", "j.o", "k", "i.i", "j.i").vectorize("C", "j.i").unroll("C", "i.i"),
    "split reduction around tiles": S().tile("C", "i", "j", 3, 4).split("C", "k", 2)
    .reorder("C", "i.o", "k.o", "j.o", "i.i", "k.i", "j.i"),
    "vector of the reduction": S().vectorize("C", "k"),
    "parallel": S().parallel("C", "i", grain=2),
    "program": S().bind("C", "i").bind("C", "j"),
    "unroll": S().unroll("C", "k"),
    "streaming": S().streaming("C"),
    "cache_write": S().cache_write("C").tile("C", "i", "j", 3, 4)
    .compute_at("C.local", "C", "j.o").reorder("C.local", "k", "i", "j"),
    "cache_read": S().cache_read("A", "local", ["C"]).split("C", "i", 3)
    .compute_at("A.local", "C", "i.o"),
    "cache_read at a reduction": S().cache_read("B", "local", ["C"]).tile("C", "i", "j", 4, 8)
    .split("C", "k", 2).reorder("C", "i.o", "j.o", "k.o", "k.i", "i.i", "j.i")
    .compute_at("B.local", "C", "k.o").vectorize("B.local", "j").vectorize("C", "j.i"),
    "packed panels": S().cache_read("B", "local", ["C"]).split("B.local", "j", 4)
    .pack("B.local", "j.o", "i", "j.i").split("C", "j", 4).reorder("C", "j.o", "i", "k", "j.i"),
    "packed transpose": S().cache_read("A", "local", ["C"]).pack("A.local", "j", "i")
    .split("C", "i", 4).compute_at("A.local", "C", "i.o"),
}


@pytest.mark.parametrize("name", MATMUL_SCHEDULES)
def test_matmul_is_unchanged(name: str) -> None:
    check(matmul(7, 13, 5), MATMUL_SCHEDULES[name])


@pytest.mark.parametrize("name", MATMUL_SCHEDULES)
@pytest.mark.parametrize("sizes", [(7, 13, 5), (4, 8, 2), (1, 1, 1), (0, 3, 2), (2, 3, 0)], ids=str)
def test_matmul_of_symbolic_sizes_is_unchanged(name: str, sizes: tuple[int, int, int]) -> None:
    check(matmul(m, n, k), MATMUL_SCHEDULES[name], dict(zip((m, n, k), sizes)))


CONV_SCHEDULES = {
    "plain": S(),
    "tiles": S().tile("y", "i", "j", 2, 4).reorder("y", "i.o", "j.o", "c", "k", "i.i", "j.i")
    .vectorize("y", "j.i"),
    "fused reductions": S().fuse("y", "c", "k").split("y", "c_k", 4),
    "cached window": S().cache_read("x", "local", ["y"]).split("y", "j", 4)
    .reorder("y", "j.o", "i", "j.i").compute_at("x.local", "y", "j.o"),
    "cached window of one channel": S().cache_read("x", "local", ["y"]).split("y", "j", 4)
    .reorder("y", "i", "j.o", "c", "k", "j.i").compute_at("x.local", "y", "c"),
}


@pytest.mark.parametrize("name", CONV_SCHEDULES)
def test_convolution_is_unchanged(name: str) -> None:
    check(conv1d(11, 3, 5, 3), CONV_SCHEDULES[name])


def test_window_of_a_convolution_is_as_small_as_it_can_be() -> None:
    function = lower(conv1d(11, 3, 5, 3), CONV_SCHEDULES["cached window of one channel"])
    sizes = {s.buffer.name: s.buffer.size for s in walk(function.body) if isinstance(s, Alloc)}
    assert sizes == {"x.local": 6, "y.acc": 4}


def rows_schedule(stages: str, consumer: str, axis: str = "i") -> Schedule:
    schedule = S()
    for stage in stages:
        schedule = schedule.compute_at(stage, consumer, axis)
    return schedule


CHAIN_SCHEDULES = {
    "plain": S(),
    "rows": rows_schedule("ab", "c").parallel("c", "i"),
    "rows in groups": S().split("c", "i", 2).compute_at("a", "c", "i.o")
    .compute_at("b", "c", "i.o"),
    "nested": S().compute_at("b", "c", "i").compute_at("a", "c", "i").split("a", "j", 4)
    .vectorize("a", "j.i"),
    "inline": S().compute_inline("a").compute_at("b", "c", "i"),
    "inline a reduction": S().compute_inline("b"),
    "inline everything": S().compute_inline("a").compute_inline("b"),
    "row of fused axes": S().fuse("c", "i", "j").compute_at("b", "c", "i_j")
    .compute_at("a", "c", "i_j"),
}


@pytest.mark.parametrize("name", CHAIN_SCHEDULES)
def test_chain_is_unchanged(name: str) -> None:
    check(chain(5, 7), CHAIN_SCHEDULES[name])
    check(chain(m, n), CHAIN_SCHEDULES[name], {m: 5, n: 7})


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 23])
def test_stencil_computes_tiles_with_a_rim(size: int) -> None:
    schedule = (S().split("b", "i", 8).compute_at("a", "b", "i.o").split("a", "i", 4)
                .vectorize("a", "i.i").parallel("b", "i.o"))
    check(stencil(size), schedule)
    function = check(stencil(n), schedule, {n: size})
    (rim,) = [s.buffer for s in walk(function.body) if isinstance(s, Alloc)]
    assert rim.size == 10


def test_second_output_is_stored_where_it_is_computed() -> None:
    schedule = S().parallel("y", "i").compute_at("mean", "y", "i").compute_at("var", "y", "i")
    check(layer_norm(m, 9), schedule, {m: 4})
    function = check(layer_norm(4, 9), schedule)
    assert [p.name for p in function.params] == ["x", "y", "mean"]
    stores = [s for s in walk(function.body) if isinstance(s, Store) and s.buffer.name == "mean"]
    assert str(stores[0]) == "mean[i] = mean.acc[0] / 9.0"


def test_unread_second_output_shares_the_loops() -> None:
    x = placeholder((m, n), name="x")
    a = compute((m, n), lambda i, j: x[i, j] + 1.0, name="a")
    b = compute((m, n), lambda i, j: x[i, j] * 2.0, name="b")
    function = check(Program("two", (x,), (a, b), (a, b)),
                     S().split("b", "j", 4).compute_at("a", "b", "j.o"), {m: 3, n: 6})
    assert sum(isinstance(s, For) for s in walk(function.body)) == 4


# ---------------------------------------------------------------- reductions
def test_body_may_be_made_of_several_reductions() -> None:
    x, r = placeholder((4, 9), name="x"), reduce_axis(9)
    y = compute((4,), lambda i: call("exp", reduce("max", x[i, r], [r])) / reduce(
        "add", x[i, r] * x[i, r], [r]), name="y")
    function = check(Program("p", (x,), (y,), (y,)), S().split("y", "k", 4).vectorize("y", "k.i"))
    loops = [s for s in walk(function.body) if isinstance(s, For) and s.var.name == "k.o"]
    assert len(loops) == 1  # both reductions share theirs


def test_reduction_inside_a_reduction() -> None:
    x, r, q = placeholder((3, 5), name="x"), reduce_axis(5), reduce_axis(5, "q")
    mean = reduce("add", x[0, q], [q])
    independent = compute((3,), lambda i: reduce(
        "add", x[i, r] * reduce("max", x[i, q], [q]), [r]), name="y")
    check(Program("p", (x,), (independent,), (independent,)), S())
    inner = Axis(Var("q", 0, 4), 0, r.var + 1)
    dependent = compute((3,), lambda i: reduce(
        "add", x[i, r] * reduce("max", x[i, inner], [inner]) + mean, [r]), name="y")
    program = Program("p", (x,), (dependent,), (dependent,))
    check(program, S())
    check(program, S().split("y", "k", 2).vectorize("y", "k.i").parallel("y", "i"))


def triangular(size: object) -> Program:
    x = placeholder((size, size), name="x")  # type: ignore[arg-type]

    def element(i: Var) -> Reduce:
        axis = Axis(Var("k", 0, None), 0, i + 1)
        return Reduce(float32, "add", (axis,), x[i, axis.var])

    y = compute((size,), element, name="y")  # type: ignore[arg-type]
    return Program("triangular", (x,), (y,), (y,))


@pytest.mark.parametrize("schedule", [
    S(), S().split("y", "k", 4).vectorize("y", "k.i"), S().split("y", "i", 3),
    S().split("y", "i", 3).reorder("y", "i.o", "k", "i.i"), S().reorder("y", "k", "i"),
    S().split("y", "i", 3).split("y", "k", 2).reorder("y", "i.o", "k.o", "i.i", "k.i"),
], ids=lambda s: str(s).replace("\n", "; "))
def test_range_of_a_reduction_may_depend_on_an_axis(schedule: Schedule) -> None:
    check(triangular(8), schedule)
    check(triangular(n), schedule, {n: 7})


def test_half_types_accumulate_in_single_precision() -> None:
    function = lower(matmul(3, 4, 5, "bfloat16"), S())
    (accumulator,) = [s.buffer for s in walk(function.body) if isinstance(s, Alloc)]
    assert accumulator.dtype is float32
    assert function.params[-1].dtype is bfloat16
    check(matmul(3, 4, 5, "bfloat16"), S().split("C", "j", 3).reorder("C", "k", "i", "j.o", "j.i"))


def test_integers_and_bools_reduce_from_their_identities() -> None:
    x, r = placeholder((3, 5), int32, name="x"), reduce_axis(5)
    y = compute((3,), lambda i: reduce("min", x[i, r], [r]), name="y")
    z = compute((3,), lambda i: reduce("and", call("gt", x[i, r], 2), [r]), name="z")
    program = Program("p", (x,), (y, z), (y, z))
    data = np.arange(15, dtype=np.int32).reshape(3, 5)
    want = evaluate.run(program, [data], {})
    got = run_loops(lower(program, S()), [data], want, {})
    assert [g.tolist() for g in got] == [[0, 5, 10], [False, True, True]]


def test_accumulators_that_would_not_fit_the_cache_are_the_output() -> None:
    outside = S().reorder("C", "k", "i", "j")
    small = lower(matmul(16, 16, 4), outside)
    large = lower(matmul(128, 128, 4), outside)
    assert any(isinstance(s, Alloc) for s in walk(small.body))
    assert not any(isinstance(s, Alloc) for s in walk(large.body))
    assert "C[i*128 + j] += " in str(large)


# ---------------------------------------------------------------- inputs, outputs, odd programs
def test_strides_of_inputs_are_honoured() -> None:
    x = Tensor("x", (3, 4), float32, strides=(1, 3))  # column major
    y = compute((3, 4), lambda i, j: x[i, j] + 1.0, name="y")
    function = lower(Program("p", (x,), (y,), (y,)), S())
    data = np.arange(12, dtype=np.float32).reshape(4, 3)
    (got,) = run_loops(function, [data], [np.empty((3, 4), np.float32)], {})
    np.testing.assert_array_equal(got, data.T + 1)


def test_computed_indices_gather_from_a_local_stage() -> None:
    x, at = placeholder((6,), name="x"), placeholder((4,), int32, name="at")
    a = compute((6,), lambda i: x[i] * 2.0, name="a")
    y = compute((4,), lambda i: Load(float32, a, (at[i],)), name="y")
    program = Program("gather", (x, at), (a, y), (y,))
    data = [np.arange(6, dtype=np.float32), np.array([5, 0, 3, 3], np.int32)]
    for schedule in (S(), S().compute_at("a", "y", "i"), S().compute_inline("a")):
        (got,) = run_loops(lower(program, schedule), data, [np.empty(4, np.float32)], {})
        assert got.tolist() == [10, 0, 6, 6]


def test_scalars_and_copies() -> None:
    x, r = placeholder((n,), name="x"), reduce_axis(n)
    total = compute((), lambda: reduce("add", x[r], [r]), name="total")
    function = check(Program("sum", (x,), (total,), (total, x, total)), S(), {n: 5})
    assert [p.name for p in function.params] == ["x", "total", "x_copy", "total_copy"]
    assert [p.constant for p in function.params] == [True, False, False, False]


def test_stages_that_nobody_reads_are_left_out() -> None:
    x = placeholder((4,), name="x")
    dead = compute((4,), lambda i: x[i] + 1.0, name="dead")
    y = compute((4,), lambda i: x[i] * 2.0, name="y")
    assert "dead" not in str(lower(Program("p", (x,), (dead, y), (y,)), S()))


def test_indices_are_values_too() -> None:
    y = compute((3, 4), lambda i, j: call("cast", as_scalar(i * 4 + j), dtype=float32), name="y")
    check(Program("iota", (), (y,), (y,)), S().fuse("y", "i", "j").split("y", "i_j", 5))


def test_work_and_traffic_are_counted() -> None:
    function = lower(matmul(m, n, k), S())
    assert function.flops == m * n * k * 2
    assert function.bytes == (m * k + k * n + m * n) * 4
    assert function.origin == "matmul"


def test_guards_only_where_a_fusion_needs_them() -> None:
    def guards(schedule: Schedule) -> int:
        return sum(isinstance(s, If) for s in walk(lower(matmul(7, 13, 5), schedule).body))

    assert guards(S().split("C", "i", 4).split("C", "k", 2)) == 0
    assert guards(S().fuse("C", "i", "j").split("C", "i_j", 4)) == 0
    assert guards(S().split("C", "i", 4).fuse("C", "i.i", "j")) == 1


# ---------------------------------------------------------------- tensorize
def _dot_meaning(places: tuple, sizes: tuple) -> Stmt:
    (out, at), (a, at_a), (b, at_b) = places
    count, _, step_a, step_b = sizes
    r = Var("r", 0, None)
    return For(r, 0, count, Store(out, at, a[at_a + r * step_a] * b[at_b + r * step_b], "add"))


def _wrong_meaning(places: tuple, sizes: tuple) -> Stmt:
    (out, at), (a, at_a), _ = places
    return Store(out, at, a[at_a], "add")


def _only_four(pattern: Pattern) -> tuple | None:
    if pattern.extents != (4,):
        return None
    return (4, *(s for row in pattern.strides for s in row)), {}


@pytest.fixture(autouse=True)
def intrinsics() -> object:
    register_intrinsic(Intrinsic(TileIntrinsic("dot", _dot_meaning)))
    register_intrinsic(Intrinsic(TileIntrinsic("dot4", _dot_meaning), _only_four))
    register_intrinsic(Intrinsic(TileIntrinsic("wrong", _wrong_meaning)))
    yield
    for name in ("dot", "dot4", "wrong"):
        del INTRINSICS[name]


def test_tensorize_replaces_the_loops() -> None:
    function = check(matmul(3, 4, 5), S().tensorize("C", "k", "dot"))
    (tile,) = [s for s in walk(function.body) if isinstance(s, Tile)]
    assert str(tile) == "dot(&C.acc[0], &A[i*5], &B[j], 5, 0, 1, 4)"
    check(matmul(m, n, k), S().tensorize("C", "k", "dot"), {m: 3, n: 4, k: 5})


def test_small_tiles_stay_loops_when_the_intrinsic_has_one_size() -> None:
    schedule = S().split("C", "k", 4).tensorize("C", "k.i", "dot4")
    function = check(matmul(3, 4, 10), schedule)
    (branch,) = [s for s in walk(function.body) if isinstance(s, If)]
    assert isinstance(branch.then, Tile) and isinstance(branch.orelse, For)
    plain = check(matmul(3, 4, 8), schedule)
    assert not any(isinstance(s, If) for s in walk(plain.body))


@pytest.mark.parametrize(("schedule", "message"), [
    (S().tensorize("C", "k", "wrong"), "wrong does not compute what the loops from 'k' of C do"),
    (S().tensorize("C", "k", "dot4"), "dot4 cannot do the loops.*\n.*extents are 5"),
    (S().tensorize("C", "k", "amx"), "no tile intrinsic 'amx'.*\n.*dot, dot4, fma_tile.*wrong"),
    (S().tensorize("C", "z", "dot"), "no axis 'z'"),
])
def test_tensorize_errors(schedule: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        lower(matmul(3, 4, 5), schedule)


# ---------------------------------------------------------------- random schedules
@st.composite
def random_steps(draw: st.DrawFn, program: Program, schedule: Schedule, stage: str) -> Schedule:
    """Some splits, fusions and reorderings more; what does not fit is left out."""

    def loops() -> tuple[str, ...]:
        return plan(program, schedule, complete=False).stage(stage).nest.order

    for _ in range(draw(st.integers(0, 4))):
        axis = draw(st.sampled_from(loops()))
        kind = draw(st.sampled_from(["split", "fuse", "reorder"]))
        if kind == "split":
            candidate = schedule.split(stage, axis, draw(st.integers(1, 6)))
        elif kind == "fuse":
            candidate = schedule.fuse(stage, axis, draw(st.sampled_from(loops())))
        else:
            candidate = schedule.reorder(stage, *draw(st.permutations(loops())))
        with contextlib.suppress(ScheduleError):
            plan(program, candidate, complete=False)
            schedule = candidate
    return schedule


@st.composite
def random_marks(draw: st.DrawFn, program: Program, schedule: Schedule, stage: str) -> Schedule:
    loops = plan(program, schedule, complete=False).stage(stage).nest.order
    kinds = draw(st.permutations(["vectorize", "unroll", "unroll", *[""] * len(loops)]))
    for axis, kind in zip(loops, kinds):
        if kind:
            schedule = getattr(schedule, kind)(stage, axis)
    return schedule


@st.composite
def matmul_schedules(draw: st.DrawFn) -> Schedule:
    program = matmul(7, 13, 5)
    return draw(random_marks(program, draw(random_steps(program, S(), "C")), "C"))


@settings(max_examples=60)
@given(matmul_schedules(), st.tuples(*[st.integers(0, 9)] * 3), st.booleans())
def test_random_schedules_of_matmul_change_nothing(
        schedule: Schedule, sizes: tuple[int, int, int], symbolic: bool) -> None:
    if symbolic:
        check(matmul(m, n, k), schedule, dict(zip((m, n, k), sizes)))
    else:
        check(matmul(*sizes), schedule)


@st.composite
def chain_schedules(draw: st.DrawFn) -> Schedule:
    program = chain(5, 7)
    schedule = draw(random_steps(program, S(), "c"))
    loops = plan(program, schedule).stage("c").nest.order
    b_at = draw(st.integers(-1, len(loops) - 1))  # -1 is outside of all loops
    a_at = draw(st.integers(-1, b_at))
    for stage, at in (("b", b_at), ("a", a_at)):
        if at >= 0:
            schedule = schedule.compute_at(stage, "c", loops[at])
    for stage in ("a", "b", "c"):
        if stage != "c":
            schedule = draw(random_steps(program, schedule, stage))
        schedule = draw(random_marks(program, schedule, stage))
    return schedule


@settings(max_examples=60)
@given(chain_schedules(), st.integers(0, 6), st.integers(0, 8), st.booleans())
def test_random_schedules_of_a_chain_change_nothing(
        schedule: Schedule, rows: int, columns: int, symbolic: bool) -> None:
    if symbolic:
        check(chain(m, n), schedule, {m: rows, n: columns})
    else:
        check(chain(rows, columns), schedule)
