"""Micro-benchmarks of the virtual chip reach the roofline of its description, within 5 %."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from terrazzo.base.scalar import call, const
from terrazzo.chips.gcu import description
from terrazzo.chips.gcu.counting import counted
from terrazzo.chips.gcu.description import BUILT_IN, Description
from terrazzo.chips.gcu.tally import LOAD, STORE
from terrazzo.dtypes import DType, bfloat16, float32, int8, int32
from terrazzo.index import Var
from terrazzo.loop.interpret import run
from terrazzo.loop.ir import (
    Alloc,
    Block,
    Buffer,
    For,
    Function,
    Stmt,
    Store,
    Tile,
    block,
    rewrite,
)
from terrazzo.loop.tiles import fma_tile

sys.path.insert(0, str(Path(__file__).parent))
from model import Model, build

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

GCU = description.read(BUILT_IN)
program, turn, i, j = Var("program"), Var("turn"), Var("i"), Var("j")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return build(tmp_path_factory.mktemp("time"))


def counts_of(function: Function, programs: int, chip: Description = GCU) -> np.ndarray:
    """What a kernel counts, without what it computes: all of it is known from sizes."""
    made = counted(function, chip)

    def visit(stmt: Stmt) -> Stmt | None:
        is_count = isinstance(stmt, Store) and stmt.buffer.name in ("counters", "counted")
        return Block(()) if isinstance(stmt, (Store, Tile)) and not is_count else None

    table = np.zeros(programs * 8, np.int64)
    nothing = [np.zeros(0, p.dtype.np) for p in function.params]
    run(replace(made, body=rewrite(made.body, visit)), [*nothing, table], {})
    return table.reshape(programs, 8)


def grid(programs: int, *body: Stmt) -> For:
    return For(program, 0, programs, block(*body), "parallel")


def near(cycles: int, best: float) -> bool:
    """No faster than the chip can be, and within 5 % of it."""
    return best <= cycles <= 1.05 * best


@pytest.mark.parametrize("programs", [48, 480])
def test_copies_reach_the_bandwidth_of_the_memory(model: Model, programs: int) -> None:
    each = (60 << 20) // 4 // programs
    x, z = Buffer("x", float32, each * programs), Buffer("z", float32, each * programs)
    at = program * each + j
    copy = Function("copy", (x, z), (), grid(programs, For(j, 0, each, Store(z, at, x[at]),
                                                           "vector")))
    table = counts_of(copy, programs)
    moved = int(table[:, LOAD].sum() + table[:, STORE].sum())
    assert moved == 120 << 20
    seconds = moved / (GCU.spec().memory_gbps * 1e9)
    assert near(model(table, None, GCU), seconds * GCU.clock_khz * 1000)


def test_one_unit_reaches_its_own_bandwidth_as_far_as_latency_lets_it(model: Model) -> None:
    each = 1 << 20
    x, z = Buffer("x", float32, each), Buffer("z", float32, each)
    copy = Function("copy", (x, z), (), For(j, 0, each, Store(z, j, x[j]), "vector"))
    # 16 KiB at 64 bytes a cycle take 256 cycles, and two of them are under way for 400 more.
    best = 2 * each * 4 // 16384 * (256 + 400) / 2
    assert near(model(counts_of(copy, 1), None, GCU), best)
    deeper = replace(GCU, dma_in_flight=8)
    assert near(model(counts_of(copy, 1, deeper), None, deeper), 2 * each * 4 / 64)


def test_fmas_reach_the_rate_of_the_vector_unit(model: Model) -> None:
    size, turns = 4096, 4000
    x, y, z = (Buffer(name, float32, 48 * size) for name in "xyz")
    total = Buffer("total", float32, size)
    at = program * size + j
    fma = Store(total, j, total[j] * x[at] + y[at])
    body = Alloc(total, block(
        For(j, 0, size, Store(total, j, const(0.0)), "vector"),
        For(turn, 0, turns, For(j, 0, size, fma, "vector")),
        For(j, 0, size, Store(z, at, total[j]), "vector")))
    table = counts_of(Function("fma", (x, y, z), (), grid(48, body)), 48)
    flops = 2 * 48 * size * turns
    peak = 48 * GCU.lanes(32) * 2  # in a cycle
    assert near(model(table, None, GCU), flops / peak)


@pytest.mark.parametrize("dtype, tall, across, bound", [
    (float32, 256, 256, "matrix"), (bfloat16, 512, 384, "matrix"), (bfloat16, 256, 256, "memory"),
    (int8, 512, 384, "matrix"), (int8, 256, 256, "memory")], ids=str)
def test_products_reach_the_matrix_unit_or_the_memory(model: Model, dtype: DType, tall: int,
                                                      across: int, bound: str) -> None:
    rows, columns, depth, step = 8 * tall, 6 * across, 8192, 64
    wide = int32 if dtype is int8 else float32
    a, b, c = (Buffer(name, t, size) for name, t, size in (
        ("a", dtype, rows * depth), ("b", dtype, depth * columns), ("c", wide, rows * columns)))
    total = Buffer("total", wide, tall * across)
    top, left = program // 6 * tall, program % 6 * across
    body = Alloc(total, block(
        For(i, 0, tall * across, Store(total, i, const(0, wide)), "vector"),
        For(turn, 0, depth // step, fma_tile(
            total, 0, a, top * depth + turn * step, b, turn * step * columns + left, step, depth,
            1, columns, across, tall, across, True)),
        For(i, 0, tall, For(j, 0, across, Store(
            c, (top + i) * columns + left + j, total[i * across + j]), "vector"))))
    table = counts_of(Function("matmul", (a, b, c), (), grid(48, body)), 48)
    assert table[0, LOAD] == (tall + across) * depth * dtype.itemsize
    hertz = GCU.clock_khz * 1000
    in_matrix = 2.0 * rows * columns * depth / GCU.spec().peak(dtype.short) * hertz
    in_memory = int(table[:, [LOAD, STORE]].sum()) / GCU.memory_bytes_per_cycle
    assert (in_matrix > in_memory) == (bound == "matrix")
    assert near(model(table, None, GCU), max(in_matrix, in_memory))


def test_a_wave_that_is_not_full_costs_as_much_as_a_full_one(model: Model) -> None:
    x, z = Buffer("x", float32, 97 * 4096), Buffer("z", float32, 97 * 4096)
    at = program * 4096 + j

    def cycles(programs: int) -> int:
        work = Store(z, at, call("exp", x[at]))
        return model(counts_of(Function("waves", (x, z), (), grid(programs, For(
            j, 0, 4096, work, "vector"))), programs), None, GCU)

    assert cycles(47) <= cycles(48) < cycles(49) < cycles(96) < cycles(97)
    assert cycles(49) - cycles(48) > 960  # a whole program more, of 960 cycles of exponentials
