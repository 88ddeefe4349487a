"""Loop IR that counts: against counting by doing, on kernels of ours and of Triton, and by hand."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.base.scalar import as_scalar, call, const
from terrazzo.chips.cpu import pool
from terrazzo.chips.cpu.description import host
from terrazzo.chips.cpu.llvm.kernel import compile_function
from terrazzo.chips.gcu import description
from terrazzo.chips.gcu.counting import counted
from terrazzo.chips.gcu.description import Description
from terrazzo.chips.gcu.tally import (
    LAUNCHES,
    LOAD,
    LOCAL,
    MATRIX,
    SCALAR,
    STORE,
    TRANSFERS,
    VECTOR,
)
from terrazzo.chips.registry import chip_named
from terrazzo.compiler.lowering import Lowering
from terrazzo.compiler.options import Options
from terrazzo.dtypes import bfloat16, float32, float64, int64
from terrazzo.index import Var, ceildiv, maximum, minimum
from terrazzo.loop.interpret import run
from terrazzo.loop.ir import (
    Alloc,
    Buffer,
    For,
    Function,
    If,
    Let,
    Stmt,
    Store,
    While,
    block,
    walk,
)
from terrazzo.loop.tiles import fma_tile

sys.path.insert(0, str(Path(__file__).parent))
from brute_force import Machine, row

GCU = description.read(description.BUILT_IN)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def functions(op: Any, arrays: Sequence[np.ndarray], attrs: dict[str, Any],
              chip: str = "gcu") -> list[Function]:
    graph, over = op.compiled.graph_over(list(arrays), attrs)
    return list(Lowering(graph, chip_named(chip), options=Options.now(), over=over).functions)


def native(function: Function) -> Any:
    return compile_function(function, host(), dict(pool.symbols()))


def counts(function: Function, arrays: Sequence[np.ndarray], rows: int, per: Any,
           dims: Sequence[int] = ()) -> tuple[list[np.ndarray], np.ndarray]:
    """Run a counted kernel natively: what its arrays are afterwards, and its counters."""
    made = counted(function, GCU, per)
    table = np.zeros((rows, 8), np.int64)
    given = [np.ascontiguousarray(a).reshape(-1).copy() for a in arrays]
    native(made)([a.ctypes.data for a in (*given, table)], dims)
    return given, table


KERNELS = {
    "softmax": (tz.softmax, [numbers(9, 70)], {}),
    "layer_norm": (tz.layer_norm, [numbers(5, 33), numbers(33), numbers(33)], {}),
    "matmul": (tz.matmul, [numbers(30, 20), numbers(20, 40)], {}),
    "matmul of one row": (tz.matmul, [numbers(1, 20), numbers(20, 40)], {}),
    "transpose": (tz.permute_dims, [numbers(70, 40)], {"axes": (1, 0)}),
    "sum of columns": (tz.sum, [numbers(60, 40)], {"axis": 0}),
    "broadcast add": (tz.add, [numbers(6, 50), numbers(50)], {}),
    "convolution": (tz.convolve, [numbers(1, 6, 7, 4), numbers(3, 3, 4, 8)],
                    {"strides": (1, 1), "padding": ((1, 1), (1, 1)), "dilation": (1, 1)}),
    "cumulative sum": (tz.cumsum, [numbers(4, 30)], {"axis": 1}),
}
# Kernels whose loops are cut where a compiler's view of the places is wider than they are.
WIDER = {"convolution"}


@pytest.mark.parametrize("chip", ["gcu", "cpu"])  # which loops are cut for
@pytest.mark.parametrize("name", KERNELS)
def test_counts_are_those_of_counting_by_doing(name: str, chip: str) -> None:
    op, arrays, attrs = KERNELS[name]
    (function,) = functions(op, arrays, attrs, chip)
    out = np.zeros(function.params[-1].size, np.float32)
    given = [*function.arranged(arrays), out]
    (machine_out, plain) = out.copy(), out.copy()
    machine = Machine(function, GCU, [*(a.reshape(-1) for a in given[:-1]), machine_out], {})
    native(function)([np.ascontiguousarray(a).ctypes.data for a in (*given[:-1], plain)])
    after, table = counts(function, given, max(len(machine.tasks), 1), "program")
    assert after[-1].tobytes() == plain.tobytes()  # what is computed stays bit for bit the same
    want = [task.row() for task in machine.tasks] or [[0] * 6]
    want[0] = [a + b for a, b in zip(want[0], machine.outside.row())]
    got = [row(counters) for counters in table]
    assert [r[:4] for r in got] == [r[:4] for r in want]
    if name in WIDER:
        for mine, least in zip(got, want):
            assert all(m >= w for m, w in zip(mine, least)), (mine, least)
            assert mine[4] <= 2 * least[4]
    else:
        assert [r[4:] for r in got] == [r[4:] for r in want]


# ---------------------------------------------------------------- by hand
n, i, j, k = Var("n"), Var("i"), Var("j"), Var("k")
x, y, z = (Buffer(name, float32, 4096, constant=name != "z") for name in "xyz")
rows = Buffer("rows", int64, 64, constant=True)


def kernel(body: Stmt, *dims: Var) -> Function:
    return Function("hand", (x, y, rows, z), dims, body)


def hand(body: Stmt, chip: Description = GCU, per: Any = "program", lines: int = 1,
         **sizes: int) -> np.ndarray:
    """The counters of a body, by the interpreter; of one row, that row."""
    dims = {Var(name): size for name, size in sizes.items()}
    function = counted(kernel(body, *dims), chip, per)
    table = np.zeros(lines * 8, np.int64)
    run(function, [numbers(4096), numbers(4096, seed=1), np.arange(64)[::-1].copy(),
                   np.zeros(4096, np.float32), table], dims)
    return table if lines == 1 else table.reshape(lines, 8)


def loop(var: Var, hi: Any, *body: Stmt, kind: str = "serial", lo: Any = 0) -> For:
    return For(var, lo, hi, block(*body), kind)


def vector(hi: Any, *body: Stmt, var: Var = j) -> For:
    return loop(var, hi, *body, kind="vector")


def test_a_vector_operation_takes_a_cycle_for_each_vector() -> None:
    got = hand(vector(1000, Store(z, j, x[j] * y[j])))
    assert got[VECTOR] == 16 and got[SCALAR] == 0  # 64 lanes of 32 bits
    assert (got[LOAD], got[STORE], got[LOCAL]) == (8000, 4000, 12_000)
    assert hand(vector(1000, Store(z, j, call("exp", x[j]))))[VECTOR] == 15 * 16
    assert hand(vector(1000, Store(z, j, x[j])))[VECTOR] == 0  # DMA copies by itself


def test_a_product_that_is_added_is_one_fma() -> None:
    assert hand(vector(64, Store(z, j, x[j] * y[j] + x[j])))[VECTOR] == 1
    assert hand(vector(64, Store(z, j, x[j] * y[j] - x[j] * x[j])))[VECTOR] == 2
    product = x[j] * y[j]
    assert hand(vector(64, Store(z, j, (product + x[j]) * product)))[VECTOR] == 3
    assert hand(vector(640, Store(z, 0, x[j] * y[j], "add")))[VECTOR] == 10 + 6  # and in the end


def test_what_stays_the_same_in_a_vector_loop_is_computed_once() -> None:
    got = hand(vector(640, Store(z, j, x[j] * (1.0 / y[0]))))
    assert got[VECTOR] == 10 and got[SCALAR] == 4
    assert got[LOCAL] == 2 * 2560 + 4
    twice = hand(vector(640, Store(z, j, call("exp", x[j])), Store(z, j + 1024, call("exp", x[j]))))
    assert twice[VECTOR] == 150


def test_wide_types_have_fewer_lanes() -> None:
    d = Buffer("d", float64, 512)
    function = counted(Function("wide", (d,), (), vector(512, Store(d, j, d[j] + 1.0))), GCU)
    table = np.zeros(8, np.int64)
    run(function, [np.zeros(512), table], {})
    assert table[VECTOR] == 16


def test_rows_of_a_tile_are_one_vector_loop() -> None:
    rows_of = loop(i, 32, vector(32, Store(z, i * 32 + j, x[i * 32 + j] + y[j])))
    assert hand(rows_of)[VECTOR] == 16 and hand(rows_of)[SCALAR] == 0
    sums = loop(i, 32, vector(32, Store(z, i, x[i * 32 + j], "add")))
    assert hand(sums)[VECTOR] == 32 * (1 + 6)  # each row by itself


def test_a_products_of_tiles_goes_to_the_matrix_unit() -> None:
    c = Buffer("c", float32, 4096)
    for dtype, depth in ((float32, 1), (bfloat16, 4)):
        a, b = Buffer("a", dtype, 4096), Buffer("b", dtype, 4096)
        tile = fma_tile(c, 0, a, 0, b, 0, 64, 64, 1, 64, 64, 64, 64, True)
        function = counted(Function("tile", (c, a, b), (), tile), GCU)
        table = np.zeros(8, np.int64)
        run(function, [*(np.zeros(4096, t) for t in ("f4", dtype.np, dtype.np)), table], {})
        assert table[MATRIX] == 64 * 64 * 64 // (256 * depth) and table[VECTOR] == 0
        assert table[LOAD] == 4096 * (4 + 2 * dtype.itemsize) and table[STORE] == 4096 * 4


def test_a_place_that_is_read_again_is_loaded_once() -> None:
    softmax_like = block(vector(500, Store(z, 0, x[j], "max")),
                         vector(500, Store(z, j, x[j] + 1.0)))
    assert hand(softmax_like)[LOAD] == 2000 + 4
    stencil = vector(500, Store(z, j, x[j] + x[j + 1] + x[j + 2]))
    assert hand(stencil)[LOAD] == 502 * 4
    window = loop(i, 10, vector(20, Store(z, i * 20 + j, x[i * 2 + j] + y[j])))
    assert hand(window)[LOAD] == (2 * 9 + 20) * 4 + 80
    written_first = block(vector(64, Store(z, j, x[j])), vector(64, Store(z, j, z[j] + 1.0)))
    assert hand(written_first)[LOAD] == 256 and hand(written_first)[STORE] == 256
    assert hand(vector(64, Store(z, j, x[j], "add")))[LOAD] == 512  # added to what was there


def test_what_does_not_fit_is_loaded_again() -> None:
    small = replace(GCU, scratchpad_bytes=4096, transfer_bytes=1024)
    again = block(vector(512, Store(z, 0, x[j], "max")), vector(512, Store(z, 1, x[j], "add")))
    assert hand(again, small)[LOAD] == 2048 + 8
    again = block(vector(1500, Store(z, 0, x[j], "max")), vector(1500, Store(z, 1, x[j], "add")))
    assert hand(again, small)[LOAD] == 2 * 6000 + 8
    # One iteration fits, so what stays the same is brought in once.
    rows_of = loop(i, 20, vector(100, Store(z, i * 100 + j, x[i * 100 + j] + y[j])))
    assert hand(rows_of, small)[LOAD] == 8000 + 400
    # Two of them do not fit together, and the first does not either.
    assert hand(loop(k, 3, rows_of), small)[LOAD] == 3 * 8400
    assert hand(loop(k, 3, rows_of), GCU)[LOAD] == 8400


@pytest.mark.parametrize("size", [0, 1, 100, 500, 511, 512, 513, 1000, 1020, 1021, 1500])
def test_whether_it_fits_may_be_known_only_when_it_runs(size: int) -> None:
    small = replace(GCU, scratchpad_bytes=4096, transfer_bytes=1024)
    again = block(vector(n, Store(z, 0, x[j], "max")), vector(n, Store(z, 1, x[j], "add")))
    got = hand(again, small, n=size)
    assert got[LOAD] == (size * 4 if size * 4 + 8 <= 4096 else size * 8) + 8
    assert got[VECTOR] == 2 * (-(-size // 64) + 6)


def test_addresses_that_data_enters_move_whole_granules() -> None:
    gather = loop(i, 20, vector(3, Store(z, i * 3 + j, x[rows[i] * 3 + as_scalar(j)])))
    got = hand(gather)
    assert got[LOAD] == 20 * 64 + 20 * 8
    assert got[STORE] == 240
    named = loop(i, 20, Let(k, rows[i], vector(3, Store(z, i * 3 + j, x[k * 3 + j]))))
    assert hand(named)[LOAD] == got[LOAD]
    single = vector(50, Store(z, j, x[rows[j]]))
    assert hand(single)[LOAD] == 50 * 64 + 50 * 8


def test_transfers_are_pieces_of_what_is_moved() -> None:
    assert hand(vector(4096, Store(z, j, x[j])))[TRANSFERS] == 2
    assert hand(vector(4096, Store(z, j, x[j])), replace(GCU, transfer_bytes=1000))[
        TRANSFERS] == 2 * 17


def inner_counts(function: Function) -> int:
    """How many additions to counters stand inside of loops, tasks not counted."""
    return sum(isinstance(s, Store) and s.buffer.name in ("counted", "counters")
               for outer in walk(function.body) if isinstance(outer, (For, While))
               and outer.kind != "parallel" for s in walk(outer))


@pytest.mark.parametrize("size", [0, 1, 7, 30])
def test_counts_of_nested_loops_are_closed_forms(size: int) -> None:
    work = Store(z, 0, x[j] + y[i], "add")
    triangle = loop(i, n, loop(k, i, vector(k + 1, work)))
    guarded = loop(i, n, If(call("lt", as_scalar(i * 3), as_scalar(n + 4)), vector(20, work),
                            vector(10, work)))
    either = loop(i, n, If(call("or", call("eq", as_scalar(i), as_scalar(3)), call(
        "ge", as_scalar(i), as_scalar(n - 2))), vector(20, work), Store(z, i, x[i] * 2.0)))
    for body in (guarded, either):
        assert inner_counts(counted(kernel(body, n), GCU)) == 0
    for body in (triangle, guarded, either):
        got = hand(body, n=size)
        machine = Machine(kernel(body, n), GCU, memory(), {n: size})
        assert row(got)[:4] == machine.outside.row()[:4]


@pytest.mark.parametrize("size", [1, 31, 32, 33, 100, 127, 128])
def test_a_row_in_blocks_is_as_long_as_the_row(size: int) -> None:
    copy = Store(z, i * 32 + j, x[i * 32 + j])
    left = minimum(n - i * 32, 32)
    cut = loop(i, 4, vector(maximum(left, 0), copy))
    either = loop(i, ceildiv(n, 32), If(call("eq", as_scalar(left), as_scalar(32)),
                                        vector(32, copy), vector(left, copy)))
    for body in (cut, either):
        got = hand(body, n=size)
        assert got[LOAD] == got[STORE] == 4 * size
    rows_of = loop(k, 5, loop(i, 4, vector(maximum(left, 0), Store(
        z, k * n + i * 32 + j, x[k * n + i * 32 + j]))))
    assert hand(rows_of, n=size)[LOAD] == 5 * 4 * size


@pytest.mark.parametrize("size", [0, 1, 5, 31, 40])
def test_both_sides_of_a_condition_count_what_they_touch(size: int) -> None:
    """Of all conditions on sizes, each place once: that of one side, or of the other."""
    at, limit = as_scalar(i), as_scalar(n)
    conditions = [call("lt", at, limit), call("eq", at, limit), call("ne", at, limit),
                  call("and", call("ge", at, as_scalar(3)), call("lt", at, limit)),
                  call("lt", as_scalar(minimum(i, n - 4)), as_scalar(7)),
                  call("gt", as_scalar(maximum(i, n - 4)), as_scalar(7))]
    for condition in conditions:
        body = loop(i, 40, If(condition, vector(1, Store(z, i, x[i])),
                              vector(1, Store(z, i, y[i]))))
        machine = Machine(kernel(body, n), GCU, memory(), {n: size})
        assert row(hand(body, n=size)) == machine.outside.row(), (condition, size)


def memory() -> list[np.ndarray]:
    return [numbers(4096), numbers(4096, seed=1), np.arange(64)[::-1].copy(),
            np.zeros(4096, np.float32)]


def test_what_data_decides_is_counted_where_it_runs() -> None:
    branch = loop(i, 40, If(call("lt", x[i], const(0.0)), vector(70, Store(z, j, y[j] + 1.0)),
                            vector(30, Store(z, j, y[j] + 1.0))))
    waiting = block(Store(z, 0, const(5.0)), While(
        call("gt", z[0], const(0.0)), block(vector(30, Store(z, j + 1, y[j] + z[0])),
                                            Store(z, 0, z[0] - 1.0))))
    for body in (branch, waiting):
        machine = Machine(kernel(body), GCU, memory(), {})
        assert row(hand(body))[:4] == machine.outside.row()[:4]
    negative = int((numbers(4096)[:40] < 0).sum())
    assert 0 < negative < 40
    # Each branch brings in what it reads; the 40 numbers that decide come once.
    assert hand(branch)[LOAD] == 160 + negative * 280 + (40 - negative) * 120


def test_tasks_are_those_of_units() -> None:
    body = loop(i, 100, vector(30, Store(z, i * 30 + j, x[i * 30 + j] + y[j])), kind="parallel")
    got = hand(body, per="task", lines=48)
    turns = np.array([len(range(u, 100, 48)) for u in range(48)])
    assert (got[:, VECTOR] == turns).all() and (got[:, STORE] == 120 * turns).all()
    assert (got[:, LOAD] == 120 * turns + 120).all()  # a unit keeps what all its tasks read
    assert got[:, LAUNCHES].sum() == got[0, LAUNCHES] == 1
    programs = hand(body, per="program", lines=100)
    assert (programs[:, LOAD] == 240).all() and (programs[:, LAUNCHES] == 0).all()


def test_memory_that_tasks_share_is_main_memory() -> None:
    shared = Buffer("shared", float32, 4096)
    own = Buffer("own", float32, 64)
    body = Alloc(shared, block(
        loop(i, 8, vector(64, Store(shared, i * 64 + j, x[i * 64 + j])), kind="parallel"),
        loop(i, 8, Alloc(own, block(vector(64, Store(own, j, shared[j * 8 + i])),
                                    vector(64, Store(z, i * 64 + j, own[j] + 1.0)))),
             kind="parallel")))
    got = hand(body, per="program", lines=8)
    assert (got[:, LOAD] == 512).all() and (got[:, STORE] == 512).all()


def test_counts_do_not_hang_on_the_machine() -> None:
    (function,) = functions(tz.softmax, [numbers(9, 70)], {})
    texts = {str(counted(function, GCU, per)) for per in ("task", "program") for _ in range(3)}
    assert len(texts) == 2
    source = "".join(Path(description.__file__).with_name(f"{name}.py").read_text() for name in (
        "counting", "footprint", "tally", "traffic", "work"))
    assert not re.search(r"chips\.cpu|host\(|cpu_count|platform|getenv|environ", source)
