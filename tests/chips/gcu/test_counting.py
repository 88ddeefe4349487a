"""Loop IR that counts: against counting by doing, on kernels of ours and of Triton, and by hand."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.chips.cpu import pool
from terrazzo.chips.cpu.description import host
from terrazzo.chips.cpu.llvm.kernel import compile_function
from terrazzo.chips.gcu import description
from terrazzo.chips.gcu.counting import counted
from terrazzo.compiler.lowering import Lowering
from terrazzo.compiler.options import Options
from terrazzo.loop.ir import (
    Function,
)

sys.path.insert(0, str(Path(__file__).parent))
from brute_force import Machine, row

GCU = description.read(description.BUILT_IN)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def functions(op: Any, arrays: Sequence[np.ndarray], attrs: dict[str, Any]) -> list[Function]:
    graph, over = op.compiled.graph_over(list(arrays), attrs)
    options = Options.now()
    return list(Lowering(graph, options.chip, options=options, over=over).functions)


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


@pytest.mark.parametrize("name", KERNELS)
def test_counts_are_those_of_counting_by_doing(name: str) -> None:
    op, arrays, attrs = KERNELS[name]
    (function,) = functions(op, arrays, attrs)
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
