"""Names for numbers, while loops, masked stores and atomics: code against the interpreter."""

from __future__ import annotations

import numpy as np
import pytest

from terrazzo.base.scalar import Const, cast
from terrazzo.chips.cpu.description import host
from terrazzo.chips.cpu.llvm.kernel import compile_function
from terrazzo.dtypes import float32, int32, int64, uint8
from terrazzo.index import Var
from terrazzo.loop.interpret import run
from terrazzo.loop.ir import (
    Atomic,
    Buffer,
    For,
    Function,
    Let,
    Pause,
    Stmt,
    Store,
    While,
    block,
)


def both(function: Function, *arrays: np.ndarray) -> list[list[np.ndarray]]:
    """What the interpreter and what machine code make of the same arrays."""
    results = []
    for compiled in (False, True):
        copies = [a.copy() for a in arrays]
        if compiled:
            compile_function(function, host())([a.ctypes.data for a in copies])
        else:
            run(function, copies, {})
        results.append(copies)
    return results


def same(body: Stmt, buffers: tuple[Buffer, ...], *arrays: np.ndarray) -> list[np.ndarray]:
    interpreted, compiled = both(Function("kernel", buffers, (), body), *arrays)
    for a, b in zip(interpreted, compiled, strict=True):
        np.testing.assert_array_equal(a, b)
    return compiled


@pytest.mark.parametrize("n", [1, 16, 37, 200])
def test_masked_stores(n: int) -> None:
    x, out, i = Buffer("x", float32, n), Buffer("out", float32, n), Var("i", 0, n - 1)
    body = For(i, 0, n, Store(out, i, x[i] * 2.0, mask=x[i] > 0.0), "vector")
    data = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    result = same(body, (x, out), data, np.full(n, 7, np.float32))[1]
    np.testing.assert_array_equal(result, np.where(data > 0, data * 2, np.float32(7)))


def test_masked_scatter() -> None:
    at, out, i = Buffer("at", int64, 50), Buffer("out", int32, 50), Var("i", 0, 49)
    body = For(i, 0, 50, Store(out, at[i], cast(at[i], int32), mask=at[i] < 20), "vector")
    order = np.random.default_rng(0).permutation(50)
    result = same(body, (at, out), order, np.full(50, -1, np.int32))[1]
    assert result.tolist() == [*range(20), *[-1] * 30]


@pytest.mark.parametrize("kind", ["serial", "vector"])
def test_indices_without_a_sign(kind: str) -> None:
    """Numbers from the middle of their type on count from the beginning all the same."""
    x, at, out, i = (Buffer("x", float32, 256), Buffer("at", uint8, 40), Buffer("out", float32, 40),
                     Var("i", 0, 39))
    there, data = np.arange(40, dtype=np.uint8) * 6, np.arange(256, dtype=np.float32)
    result = same(For(i, 0, 40, Store(out, i, x[at[i]]), kind), (x, at, out), data, there,
                  np.zeros(40, np.float32))[2]
    np.testing.assert_array_equal(result, data[there])
    back = same(For(i, 0, 40, Store(x, at[i], out[i]), kind), (x, at, out), data * 0, there,
                result)[0]
    np.testing.assert_array_equal(back[there], result)


def test_let_names_a_loaded_number() -> None:
    x, row, out, i = (Buffer("x", float32, 40), Buffer("row", int32, 1), Buffer("out", float32, 8),
                      Var("i", 0, 7))
    at = Var("at", 0, 4)
    body = Let(at, row[0], For(i, 0, 8, Store(out, i, x[at * 8 + i]), "vector"))
    data = np.arange(40, dtype=np.float32)
    result = same(body, (x, row, out), data, np.array([3], np.int32), np.zeros(8, np.float32))[2]
    assert result.tolist() == list(range(24, 32))


def test_while_counts() -> None:
    state = Buffer("state", int64, 1)
    body = While(state[0] < 100, Store(state, 0, state[0] * 3 + 1))
    assert same(body, (state,), np.array([1], np.int64))[0].tolist() == [121]


@pytest.mark.parametrize(("kind", "expected"), [
    ("add", 12), ("max", 7), ("min", 5), ("and", 5), ("or", 7), ("xor", 2), ("exchange", 7),
    ("load", 5)])
def test_atomics(kind: str, expected: int) -> None:
    x, old = Buffer("x", int32, 1), Buffer("old", int32, 1)
    body = Atomic(kind, x, 0, Const(int32, 7), old=(old, 0))
    start, before = np.array([5], np.int32), np.zeros(1, np.int32)
    result = same(body, (x, old), start, before)
    assert [r.item() for r in result] == [expected, 5]


def test_compare_and_exchange() -> None:
    x, i = Buffer("x", float32, 4), Var("i", 0, 3)
    body = For(i, 0, 4, Atomic("compare", x, i, Const(float32, 9.0), Const(float32, 1.0)))
    result = same(block(body), (x,), np.array([1, 2, 1, 0], np.float32))[0]
    assert result.tolist() == [9, 2, 9, 0]


def test_pauses_tell_the_time() -> None:
    clock, turns = Buffer("clock", int64, 2), Buffer("turns", int64, 1)
    long_enough = clock[1] - clock[0] < 2_000_000
    body = block(Pause(), Pause((clock, 0)), Store(clock, 1, clock[0]), While(long_enough, block(
        Pause((clock, 1)), Store(turns, 0, turns[0] + 1))))
    for before, turned in both(Function("kernel", (clock, turns), (), body),
                               np.zeros(2, np.int64), np.zeros(1, np.int64)):
        assert before[1] - before[0] >= 2_000_000 and turned[0] > 0
    assert "clock[0] = pause()" in str(body)
