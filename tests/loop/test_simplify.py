"""Each pass over Loop IR does what its name says and leaves the numbers alone."""

from __future__ import annotations

import numpy as np
import pytest
from programs import chain, layer_norm, matmul, run_loops, softmax, stencil

from terrazzo.base.scalar import call, const
from terrazzo.base.shapes import dim
from terrazzo.dtypes import float32
from terrazzo.expr import evaluate
from terrazzo.expr.ir import Program
from terrazzo.expr.lower import lower
from terrazzo.expr.schedule import Schedule
from terrazzo.index import Index, Var, minimum
from terrazzo.index import evaluate as number
from terrazzo.loop import interpret
from terrazzo.loop.bounds import Interval, interval_of, length
from terrazzo.loop.ir import Alloc, Buffer, For, Function, If, Stmt, Store, block, walk
from terrazzo.loop.simplify import (
    PASSES,
    drop_empty,
    hoist_allocs,
    merge_loops,
    partition_ragged,
    simplify,
    unit_loops,
)

S = Schedule
n, rows = dim("n"), dim("rows")
i, j, k = Var("i", 0, n - 1), Var("j", 0, n - 1), Var("k", 0, n - 1)
x, y, z = (Buffer(name, float32, n) for name in "xyz")


def copy(to: Buffer, value: object, var: Var = i, at: Index | None = None,
         reduce: str | None = None) -> For:
    return For(var, 0, n, Store(to, var if at is None else at, value, reduce))  # type: ignore[arg-type]


def same_effect(before: Stmt, after: Stmt, size: int = 7) -> None:
    """Run two statements on x, y and z and compare all three."""
    results = []
    for body in (before, after):
        random = np.random.default_rng(0)
        arrays = [random.standard_normal(size).astype(np.float32) for _ in range(3)]
        interpret.run(Function("f", (x, y, z), (n,), body), arrays, {n: size})
        results.append(arrays)
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


# ---------------------------------------------------------------- every pass on whole programs
def rows_of(*stages: str) -> Schedule:
    schedule = S().parallel("y", "i")
    for stage in stages:
        schedule = schedule.compute_at(stage, "y", "i")
    return schedule


CASES: dict[str, tuple[Program, Schedule, dict[Var, int]]] = {
    "matmul": (matmul(7, 13, 5), S().tile("C", "i", "j", 4, 8).reorder(
        "C", "i.o", "j.o", "k", "i.i", "j.i").vectorize("C", "j.i").unroll("C", "i.i"), {}),
    "symbolic matmul": (matmul(rows, n, 5), S().tile("C", "i", "j", 4, 8).reorder(
        "C", "i.o", "j.o", "k", "i.i", "j.i").vectorize("C", "j.i").parallel("C", "i.o"),
        {rows: 7, n: 13}),
    "two levels of tiles": (matmul(rows, n, 5), S().split("C", "j", 8).split("C", "j.i", 4)
                            .vectorize("C", "j.i.i"), {rows: 3, n: 21}),
    "fused tiles": (matmul(5, 21, 3), S().split("C", "j", 8).reorder("C", "i", "j.o", "k", "j.i")
                    .fuse("C", "i", "j.o").vectorize("C", "j.i"), {}),
    "softmax": (softmax(rows, n), rows_of("m", "e", "s"), {rows: 3, n: 9}),
    "plain softmax": (softmax(rows, n), S(), {rows: 3, n: 9}),
    "layer norm": (layer_norm(rows, 9), rows_of("mean", "var"), {rows: 3}),
    "stencil": (stencil(n), S().split("b", "i", 8).compute_at("a", "b", "i.o"), {n: 21}),
    "chain": (chain(4, 6), S().split("c", "i", 1), {}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [*PASSES, "all"])
def test_pass_changes_no_result(name: str, case: str) -> None:
    program, schedule, sizes = CASES[case]
    random = np.random.default_rng(0)
    inputs = [random.standard_normal([int(number(d, sizes)) for d in t.shape]).astype(np.float32)
              for t in program.inputs]
    want = evaluate.run(program, inputs, sizes)
    function = lower(program, schedule)
    if name == "all":
        function = simplify(function)
    else:
        function = Function(function.name, function.params, function.dims,
                            PASSES[name](function.body))
    for w, got in zip(want, run_loops(function, inputs, want, sizes), strict=True):
        np.testing.assert_allclose(got, w, rtol=2e-5, atol=2e-5)


# ---------------------------------------------------------------- one pass at a time
def test_loops_that_run_once_go_away() -> None:
    inner = For(j, i, i + 1, Store(y, i * 2 + j, x[j]))
    assert str(unit_loops(For(i, 3, 4, inner))) == "y[9] = x[3]"


def test_names_of_divisions_by_sizes_stay() -> None:
    """Put wherever their names stand, they made kernels of symbolic sizes ten times as long."""
    task = Var("task")
    for value in (task // n, task % n, (n + 3) // 4, minimum(n - task, 16)):
        named = For(i, value, value + 1, Store(y, i, x[i]))
        assert str(unit_loops(named)) == f"for i in {value}..{value + 1}:\n    y[i] = x[i]"
        assert "[i]" not in str(unit_loops(For(task, 4, 5, For(n, 3, 4, named))))
    short = Var("short", 0, 63)
    assert "for" not in str(unit_loops(For(i, short // 4, short // 4 + 1, Store(y, i, x[i]))))


def test_size_of_a_local_buffer_follows_the_loop_that_went_away() -> None:
    local = Buffer("local", float32, i + 1)
    stmt = unit_loops(For(i, 3, 4, Alloc(local, For(j, 0, i + 1, Store(local, j, local[j])))))
    assert str(stmt) == "alloc local: f32[4]\nfor j in 0..4:\n    local[j] = local[j]"


def test_what_does_nothing_goes_away() -> None:
    unused = Buffer("unused", float32, 4)
    never = For(i, 5, 5, Store(y, i, x[i]))
    empty = If(call("lt", x[0], 1.0), never)
    assert str(drop_empty(block(Alloc(unused, copy(y, x[i])), never, empty))) == str(copy(y, x[i]))


def test_allocations_move_to_the_start_of_their_loop() -> None:
    a, b = Buffer("a", float32, 1), Buffer("b", float32, 1)
    body = For(i, 0, n, block(
        Alloc(a, block(Store(a, 0, x[i]), Alloc(b, Store(b, 0, a[0])))), Store(y, i, x[i])))
    assert str(hoist_allocs(body)).splitlines()[:4] == [
        "for i in 0..n:", "    alloc a: f32[1]", "    alloc b: f32[1]", "    a[0] = x[i]"]


def loops(stmt: Stmt) -> int:
    return sum(isinstance(s, For) for s in walk(stmt))


def test_neighbours_merge_and_what_stands_between_moves() -> None:
    total = Store(z, 0, const(0.0))
    before = block(copy(y, call("exp", x[i])), total, copy(z, y[j], j, at=0, reduce="add"))
    after = merge_loops(before)
    assert str(after) == """\
z[0] = 0.0
for i in 0..n:
    y[i] = exp(x[i])
    z[0] += y[i]"""
    same_effect(before, after)


KEPT_APART = {
    "a finished sum": block(copy(y, x[i], at=0, reduce="add"), copy(z, x[j] * y[0], j)),
    "a neighbour": block(copy(y, x[i] * 2.0), copy(z, y[n - 1 - j], j)),
    "written after it is read": block(copy(y, x[n - 1 - i]), copy(x, y[j] * 2.0, j)),
    "one place written twice": block(copy(y, x[i], at=0), copy(y, z[j], j, at=0)),
    "a statement in between": block(copy(y, x[i], at=0, reduce="add"), Store(z, 0, y[0]),
                                    copy(x, z[0], j)),
    "other bounds": block(copy(y, x[i]), For(j, 0, n - 1, Store(z, j, x[j]))),
    "other kinds": block(copy(y, x[i]), For(j, 0, n, Store(z, j, x[j]), "vector")),
}


@pytest.mark.parametrize("case", KEPT_APART)
def test_loops_that_depend_on_each_other_stay_apart(case: str) -> None:
    before = KEPT_APART[case]
    after = merge_loops(before)
    assert loops(after) == loops(before) == 2
    same_effect(before, after)


def test_merging_does_not_confuse_loops_of_one_variable() -> None:
    inner = For(i, 0, n, Store(z, i, x[i] * y[k], "add"))
    before = block(copy(z, const(0.0)), For(k, 0, n, inner), copy(y, z[i]))
    after = merge_loops(before)
    same_effect(before, after)


def test_rows_merge_although_their_length_is_symbolic() -> None:
    schedule = S()
    function = simplify(lower(softmax(rows, n), schedule))
    assert [s.var.name for s in walk(function.body) if isinstance(s, For)] == ["i", "k", "j", "j1"]


def ragged(kind: str = "serial", count: Index = n, step: int = 4) -> Stmt:
    o, lane = Var("o", 0, None), Var("lane", 0, step - 1)
    inner = For(lane, 0, minimum(step, count - o * step),
                Store(y, o * step + lane, x[o * step + lane] * 2.0), "vector")
    return For(o, 0, (count + step - 1) // step, inner, kind)


@pytest.mark.parametrize("size", [0, 3, 4, 7, 8])
@pytest.mark.parametrize("kind", ["serial", "parallel", "program"])
def test_partition_changes_no_result(kind: str, size: int) -> None:
    before = ragged(kind)
    same_effect(before, partition_ragged(before), size)


def test_full_tiles_get_constant_bounds() -> None:
    assert str(partition_ragged(ragged())) == """\
for o in 0..n // 4:
    vector for lane in 0..4:
        y[lane + o*4] = x[lane + o*4] * 2.0
for o in n // 4..(n + 3) // 4:
    vector for lane in 0..n - o*4:
        y[lane + o*4] = x[lane + o*4] * 2.0"""
    assert str(partition_ragged(ragged(count=7))) == """\
for o in 0..1:
    vector for lane in 0..4:
        y[lane + o*4] = x[lane + o*4] * 2.0
vector for lane in 0..3:
    y[lane + 4] = x[lane + 4] * 2.0"""


def test_concurrent_loops_stay_one_loop_with_a_branch() -> None:
    assert str(partition_ragged(ragged("parallel"))) == """\
parallel for o in 0..(n + 3) // 4:
    if (n - o*4) >= 4:
        vector for lane in 0..4:
            y[lane + o*4] = x[lane + o*4] * 2.0
    else:
        vector for lane in 0..n - o*4:
            y[lane + o*4] = x[lane + o*4] * 2.0"""


def test_long_tiles_are_not_worth_two_copies() -> None:
    before = ragged(step=4096)
    assert str(partition_ragged(before)) == str(before)


def test_passes_can_be_skipped() -> None:
    function = lower(softmax(rows, n), S())
    assert loops(simplify(function, skip=("merge_loops",)).body) > loops(simplify(function).body)


# ---------------------------------------------------------------- intervals
@pytest.mark.parametrize(("index", "lo", "hi"), [
    (i * 3 - j + 1, -j + 1, n * 3 - j - 2),
    (-i, -n + 1, 0),
    (i // 2, 0, (n - 1) // 2),
    (i % 4, 0, 3),
    (minimum(i, 5), 0, minimum(n - 1, 5)),
    (j, j, j),
])
def test_symbolic_intervals(index: Index, lo: Index, hi: Index) -> None:
    assert interval_of(index, {i: Interval(0, n - 1)}) == (lo, hi)


def test_length_of_a_clipped_piece() -> None:
    assert str(length(i * 16, minimum(i * 16 + 16, n))) == "min(n - i*16, 16)"
