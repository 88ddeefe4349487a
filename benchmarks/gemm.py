"""Matrix products against torch, interleaved: the least time of each, and how they compare.

    python benchmarks/gemm.py [--threads 1 2] [--rounds 15] [name ...]

A ratio above 1 means that terrazzo is faster. With one thread, times are those of the thread, not
of the clock: a busy machine then disturbs less.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from terrazzo.chips.cpu import pool
from terrazzo.chips.cpu.chip import Cpu
from terrazzo.chips.cpu.description import host
from terrazzo.chips.cpu.gemm import lower_contraction
from terrazzo.chips.cpu.llvm.kernel import compile_function
from terrazzo.dtypes import as_dtype
from terrazzo.graph import fusion
from terrazzo.graph.ir import TensorType
from terrazzo.graph.passes import canonicalize
from terrazzo.graph.trace import trace
from terrazzo.knobs import knobs
from terrazzo.ops.activation import gelu
from terrazzo.ops.contract import batch_matmul, linear, matmul


@dataclass(frozen=True)
class Case:
    """One product: what both sides compute, on inputs of these shapes."""

    name: str
    ours: Callable[..., Any]
    theirs: Callable[..., torch.Tensor]
    shapes: tuple[tuple[int, ...], ...]
    flops: int
    dtype: str = "float32"


def _cases() -> list[Case]:
    functional = torch.nn.functional
    cases = []
    for n in (256, 512, 1024, 2048):
        cases.append(Case(f"mm{n}", matmul, torch.mm, ((n, n), (n, n)), 2 * n**3))
    cases.append(Case("mm1024.nt", lambda x, y: batch_matmul(x, y, transpose_y=True),
                      lambda x, y: torch.mm(x, y.t()), ((1024, 1024), (1024, 1024)), 2 * 1024**3))
    cases.append(Case("mm1024.tn", lambda x, y: batch_matmul(x, y, transpose_x=True),
                      lambda x, y: torch.mm(x.t(), y), ((1024, 1024), (1024, 1024)), 2 * 1024**3))
    for dtype in ("bfloat16", "float16", "float64"):
        cases.append(Case(f"mm1024.{dtype}", matmul, torch.mm, ((1024, 1024), (1024, 1024)),
                          2 * 1024**3, dtype))
    k, n = 768, 3072
    for m in (1, 2, 4, 8, 12, 16, 32, 64, 128, 256):
        cases.append(Case(f"linear{m}", linear, functional.linear, ((m, k), (n, k), (n,)),
                          2 * m * k * n))
        cases.append(Case(f"mm{m}x{k}x{n}", matmul, torch.mm, ((m, k), (k, n)), 2 * m * k * n))
    cases.append(Case("linear128.gelu", lambda x, w, b: gelu(linear(x, w, b)),
                      lambda x, w, b: functional.gelu(functional.linear(x, w, b)),
                      ((128, k), (n, k), (n,)), 2 * 128 * k * n))
    cases.append(Case("bmm96x128x64", matmul, torch.bmm, ((96, 128, 64), (96, 64, 128)),
                      2 * 96 * 128 * 64 * 128))
    cases.append(Case("bmm1000x16", matmul, torch.bmm, ((1000, 16, 16), (1000, 16, 16)),
                      2 * 1000 * 16**3))
    return cases


def _kernel(case: Case) -> tuple[Callable[..., None], float]:
    dtype = as_dtype(case.dtype)
    graph, _ = trace(case.ours, [TensorType(s, dtype) for s in case.shapes])
    graph, _ = canonicalize(graph)
    (group,) = fusion.fuse(graph, Cpu.fusion_limits).groups
    before = time.perf_counter()
    function = lower_contraction(group.program, host())
    assert function is not None
    kernel = compile_function(function, host(), dict(pool.symbols()))
    return kernel, time.perf_counter() - before


def measure(case: Case, threads: int, rounds: int) -> str:
    """A line of the table."""
    knobs.threads = threads
    pool.sync()
    torch.set_num_threads(threads)
    kernel, compile_time = _kernel(case)
    inputs = [torch.randn(s).to(getattr(torch, case.dtype)) for s in case.shapes]
    expected = case.theirs(*inputs)
    out = torch.empty_like(expected)
    pointers = [t.data_ptr() for t in (*inputs, out)]
    clock = time.thread_time if threads == 1 else time.perf_counter
    repeat = max(1, int(3e7 / case.flops))
    ours = theirs = float("inf")
    for _ in range(rounds):
        for mine in (True, False):
            before = clock()
            for _ in range(repeat):
                kernel(pointers, (), threads) if mine else case.theirs(*inputs)
            taken = (clock() - before) / repeat
            ours, theirs = (min(ours, taken), theirs) if mine else (ours, min(theirs, taken))
    error = (out.double() - expected.double()).abs().max().item()
    return (f"{case.name:20} {threads:2} {case.flops / ours / 1e9:8.1f} "
            f"{case.flops / theirs / 1e9:8.1f} {theirs / ours:7.2f} {compile_time * 1e3:8.0f} "
            f"{error:10.1e}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", help="parts of names; all when none is given")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print(f"{'product':20} th  GFLOP/s    torch   ratio  compile ms  max diff")
    for case in _cases():
        if not options.names or any(part in case.name for part in options.names):
            for threads in options.threads:
                print(measure(case, threads, options.rounds), flush=True)


if __name__ == "__main__":
    main()
