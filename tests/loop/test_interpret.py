"""The interpreter of Loop IR, against numpy: it is what code generators are checked with."""

from __future__ import annotations

import numpy as np
import pytest

from terrazzo.base.scalar import as_scalar, call, cast, const, where
from terrazzo.dtypes import bfloat16, float32, int32
from terrazzo.errors import IndexOutOfRange
from terrazzo.index import Index, Var, minimum
from terrazzo.loop.interpret import run
from terrazzo.loop.ir import (
    KINDS,
    Alloc,
    Buffer,
    For,
    Function,
    If,
    Stmt,
    Store,
    Tile,
    TileIntrinsic,
    block,
)

n = Var("n")
i, j = Var("i", 0, n - 1), Var("j", 0, None)
x, y = Buffer("x", float32, n, constant=True), Buffer("y", float32, n)


def call_loops(body: Stmt, *arrays: np.ndarray, buffers: tuple[Buffer, ...] = (x, y)) -> None:
    run(Function("f", buffers, (n,), body), arrays, {n: arrays[0].size})


def loop(value: object, kind: str = "serial", hi: Index = n, reduce: str | None = None,
         at: Index = i) -> For:
    return For(i, 0, hi, Store(y, at, as_scalar(value, float32), reduce), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_loop_runs_all_iterations(kind: str) -> None:
    data, out = np.arange(5, dtype=np.float32), np.zeros(5, np.float32)
    call_loops(loop(call("exp", x[i]) + 1.0, kind), data, out)
    np.testing.assert_allclose(out, np.exp(data) + 1, rtol=1e-6)


@pytest.mark.parametrize("kind", ["serial", "vector"])
@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize(("op", "want"), [("add", np.sum), ("max", np.max), ("mul", np.prod)])
def test_reducing_stores(kind: str, count: int, op: str, want: object) -> None:
    data, out = np.linspace(1, 2, 5, dtype=np.float32), np.full(5, 1.5, np.float32)
    call_loops(loop(x[i], kind, count, op, at=2), data, out)
    folded = np.float32(want([np.float32(1.5), *data[:count]]))  # type: ignore[operator]
    np.testing.assert_allclose(out[2], folded, rtol=1e-6)


def test_lanes_that_meet_at_one_place_all_count() -> None:
    data, out = np.arange(6, dtype=np.float32), np.zeros(6, np.float32)
    call_loops(loop(x[i], "vector", reduce="add", at=i // 2), data, out)
    assert out.tolist() == [1, 5, 9, 0, 0, 0]


@pytest.mark.parametrize("kind", ["serial", "vector"])
def test_last_iteration_stays_where_all_store_to_one_place(kind: str) -> None:
    data, out = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    call_loops(loop(x[i] * 2.0, kind, at=0), data, out)
    assert out.tolist() == [6, 0, 0, 0]


def test_ragged_bounds_and_branches() -> None:
    inner = Store(y, i * 4 + j, where(call("gt", x[i * 4 + j], 3.0), x[i * 4 + j], -1.0))
    body = For(i, 0, (n + 3) // 4, If(
        call("lt", as_scalar(i), 1), For(j, 0, minimum(4, n - i * 4), inner),
        For(j, 0, minimum(4, n - i * 4), Store(y, i * 4 + j, const(9.0)))))
    data, out = np.arange(6, dtype=np.float32) * 2, np.zeros(6, np.float32)
    call_loops(body, data, out)
    assert out.tolist() == [-1, -1, 4, 6, 9, 9]


def test_local_buffers_live_in_their_scope() -> None:
    local = Buffer("local", float32, 1)
    body = For(i, 0, n, Alloc(local, block(
        Store(local, 0, x[i] * 2.0), Store(y, i, local[0] + 1.0))))
    data, out = np.arange(3, dtype=np.float32), np.zeros(3, np.float32)
    call_loops(body, data, out)
    assert out.tolist() == [1, 3, 5]


def test_types_convert_on_the_way_to_memory() -> None:
    half, whole = Buffer("half", bfloat16, n), Buffer("whole", int32, n)
    body = For(i, 0, n, block(Store(half, i, x[i]), Store(whole, i, cast(x[i], int32))), "vector")
    data = np.array([1.00390625, 2.7, -3.9], np.float32)
    rounded, cut = np.zeros(3, bfloat16.np), np.zeros(3, np.int32)
    call_loops(body, data, rounded, cut, buffers=(x, half, whole))
    np.testing.assert_array_equal(rounded, data.astype(bfloat16.np))
    assert cut.tolist() == [1, 2, -3]


def test_computed_addresses_gather() -> None:
    index = Buffer("index", int32, n)
    body = For(i, 0, n, Store(y, i, x[index[i]]), "vector")
    data, out = np.arange(4, dtype=np.float32) * 10, np.zeros(4, np.float32)
    call_loops(body, data, np.array([3, 1, 1, 0], np.int32), out, buffers=(x, index, y))
    assert out.tolist() == [30, 10, 10, 0]


def test_guarded_loads_may_point_outside() -> None:
    data, out = np.arange(3, dtype=np.float32), np.zeros(3, np.float32)
    call_loops(loop(where(call("ge", as_scalar(i - 1), 0), x[i - 1], 7.0), "vector"), data, out)
    assert out.tolist() == [7, 0, 1]


def test_tiles_run_as_what_they_mean() -> None:
    def meaning(places: tuple, sizes: tuple, *, scale: float) -> Stmt:
        (to, at), (source, start) = places
        return For(j, 0, sizes[0], Store(to, at + j, source[start + j] * scale))

    tile = Tile(TileIntrinsic("scale", meaning), ((y, 1), (x, 0)), (2,), {"scale": 3.0})
    assert str(tile) == "scale(&y[1], &x[0], 2, scale=3.0)"
    data, out = np.arange(1, 5, dtype=np.float32), np.zeros(4, np.float32)
    call_loops(tile, data, out)
    assert out.tolist() == [0, 3, 6, 0]


@pytest.mark.parametrize("kind", ["serial", "vector"])
def test_store_outside_of_a_buffer_is_an_error(kind: str) -> None:
    data, out = np.zeros(4, np.float32), np.zeros(4, np.float32)
    with pytest.raises(IndexOutOfRange, match=r"y\[4\] is outside its 4 elements"):
        call_loops(loop(1.0, kind, n, at=i + 1), data, out)
