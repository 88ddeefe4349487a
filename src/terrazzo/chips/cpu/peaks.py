"""What this machine does at best, measured: the rate of a streaming copy, and of multiply-add."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np

from terrazzo.chips.cpu import pool
from terrazzo.chips.cpu.description import host
from terrazzo.chips.cpu.llvm import jit
from terrazzo.chips.cpu.llvm.kernel import compile_function
from terrazzo.chips.spec import Roofline
from terrazzo.expr import ir
from terrazzo.expr.lower import lower
from terrazzo.expr.schedule import Schedule

_COPIED = (64, 1 << 17)  # chunks and elements of each: more than any cache holds
_CHAINS = 16  # of dependent multiply-adds: enough to hide the latency of every CPU of today


@lru_cache(maxsize=8)
def measured(threads: int) -> Roofline:
    """The limits of this machine on so many threads, measured once."""
    return Roofline(_copy_rate(threads), _multiply_add_rate(threads))


def _best(run: Callable[[], Any], seconds: float = 0.15) -> float:
    """The shortest of several runs: what the machine can do when nothing disturbs it."""
    run()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def _copy_rate(threads: int) -> float:
    """Bytes read and written in a second by a copy of arrays that no cache holds."""
    a = ir.placeholder(_COPIED, name="a")
    b = ir.compute(_COPIED, lambda i, j: a[i, j], name="b")
    schedule = Schedule().parallel("b", "i").vectorize("b", "j").streaming("b")
    loops = lower(ir.Program("copy", (a,), (b,), (b,)), schedule)
    copy = compile_function(loops, host(), dict(pool.symbols()))
    source = np.ones(_COPIED, np.float32)
    target = np.zeros_like(source)
    pool.sync()
    return 2 * source.nbytes / _best(
        lambda: copy([source.ctypes.data, target.ctypes.data], (), threads))


def _multiply_add_rate(threads: int) -> float:
    """Operations in a second of independent chains of multiply-add that stay in registers."""
    chip = host()
    lanes = chip.lanes(32)
    library = jit.load_object(jit.compile_object(_peak_text(lanes), chip), {}, ["peak"])
    peak = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(library.address("peak"))
    turns = 200_000
    results = np.zeros((threads, _CHAINS * lanes), np.float32)

    def work(i: int) -> None:
        peak(results[i].ctypes.data, turns)

    with ThreadPoolExecutor(threads) as workers:
        seconds = _best(lambda: list(workers.map(work, range(threads))))
    return 2.0 * _CHAINS * lanes * turns * threads / seconds


def _peak_text(lanes: int) -> str:
    """A loop of `_CHAINS` multiply-adds, in LLVM IR."""
    vector = f"<{lanes} x float>"
    phis, steps, stores = [], [], []
    for i in range(_CHAINS):
        phis.append(f"  %a{i} = phi {vector} [ %start{i}, %entry ], [ %b{i}, %loop ]")
        steps.append(f"  %b{i} = call {vector} @llvm.fma.v{lanes}f32({vector} %a{i}, {vector} "
                     f"%scale, {vector} %shift)")
        stores.append(f"  store {vector} %b{i}, ptr %p{i}, align 4")
    starts = [line for i in range(_CHAINS) for line in (
        f"  %p{i} = getelementptr {vector}, ptr %out, i64 {i}",
        f"  %start{i} = load {vector}, ptr %p{i}, align 4")]
    return "\n".join([
        f"declare {vector} @llvm.fma.v{lanes}f32({vector}, {vector}, {vector})",
        "define void @peak(ptr %out, i64 %turns) {", "entry:", *starts,
        # Read from memory, so that nothing about the values is known beforehand.
        f"  %scale = load {vector}, ptr %out, align 4",
        f"  %shift = load {vector}, ptr %out, align 4",
        "  br label %loop", "loop:",
        "  %i = phi i64 [ 0, %entry ], [ %next, %loop ]", *phis, *steps,
        "  %next = add i64 %i, 1", "  %more = icmp slt i64 %next, %turns",
        "  br i1 %more, label %loop, label %exit", "exit:", *stores, "  ret void", "}"])
