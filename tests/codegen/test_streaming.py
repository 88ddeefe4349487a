"""Stores that bypass the caches write what ordinary ones do, from any address on."""

from __future__ import annotations

import numpy as np
import pytest

from terrazzo.base.scalar import call
from terrazzo.chips.cpu import pool
from terrazzo.chips.cpu.description import host
from terrazzo.chips.cpu.llvm.kernel import compile_function, llvm_text
from terrazzo.dtypes import DType, bfloat16, float32
from terrazzo.index import Var
from terrazzo.loop.ir import Buffer, For, Function, Store


def copying(dtype: DType) -> Function:
    x, y, n = Buffer("x", dtype, 5000), Buffer("y", dtype, 5000), Var("n", 0)
    i = Var("i", 0)
    store = Store(y, i, call("add", x[i], x[i]), streaming=True)
    return Function("twice", (x, y), (n,), For(i, 0, n, store, "vector"))


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 700, 4099])
def test_any_alignment_and_length(count: int) -> None:
    kernel = compile_function(copying(float32), host(), dict(pool.symbols()))
    room = np.zeros(5000, np.float32)
    x = np.arange(5000, dtype=np.float32)
    for shift in (0, 1, 7, 16):
        room[:] = -1
        y = room[shift:]
        kernel([x.ctypes.data, y.ctypes.data], [count], 1)
        np.testing.assert_array_equal(y[:count], 2 * x[:count])
        assert (y[count:] == -1).all() and (room[:shift] == -1).all()


def test_whole_registers_stream_and_are_settled() -> None:
    if not host().llvm_triple.startswith("x86_64"):
        pytest.skip("only x86 has streaming stores that we use")
    text = llvm_text([copying(float32)], host())
    assert "!nontemporal" in text and "sfence" in text
    half = llvm_text([copying(bfloat16)], host())
    assert "!nontemporal" not in half and "sfence" not in half
