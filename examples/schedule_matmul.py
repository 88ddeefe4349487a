"""One matrix product, six schedules: from the naive loop to near the machine's peak.

    python examples/schedule_matmul.py [--size 1024]

The algorithm is one line and never changes. Each step adds to the schedule, prints what it is for
and how fast it runs; the last one is compared with torch.mm when torch is installed.
"""

import argparse
import time

import numpy as np

from terrazzo import te
from terrazzo.chips.cpu.description import host

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--size", type=int, default=1024)
N = parser.parse_args().size

chip = host()
ROWS = 6  # rows of a tile times ...
COLUMNS = (4 if chip.vector_registers >= 32 else 2) * chip.lanes(32)  # ... vectors of columns
BLOCK = 96  # rows that go through one panel of B while it is in the cache


def algorithm():
    A, B = te.placeholder((N, N), name="A"), te.placeholder((N, N), name="B")
    k = te.reduce_axis(N, name="k")
    C = te.compute((N, N), lambda i, j: te.sum(A[i, k] * B[k, j], axis=k), name="C")
    return A, B, C, k


def naive(s, C, k):
    """three loops, one multiplication at a time"""


def tiled(s, C, k):
    """tiles of C in blocks of rows: the part of B that they need stays in the cache"""
    i, j = s[C].axis
    block, row = s[C].split(i, BLOCK)
    io, ii = s[C].split(row, ROWS)
    jo, ji = s[C].split(j, COLUMNS)
    s[C].reorder(block, jo, io, k, ii, ji)
    return block, ii, ji


def vectorized(s, C, k):
    """a row of the tile in the lanes of vectors"""
    block, ii, ji = tiled(s, C, k)
    s[C].vectorize(ji)
    return block, ii


def parallel(s, C, k):
    """blocks of rows spread over the cores"""
    block, ii = vectorized(s, C, k)
    s[C].parallel(block)
    return ii


def unrolled(s, C, k):
    """the rows of a tile written out: all sums of the tile stay in registers"""
    s[C].unroll(parallel(s, C, k))


def packed(s, C, k):
    """B copied once into the order in which it is read, tile by tile"""
    unrolled(s, C, k)
    panels = s.cache_read("B", "local", [C])
    row, column = panels.axis
    co, ci = panels.split(column, COLUMNS)
    panels.reorder(co, row, ci)
    panels.pack(co, row, ci)
    panels.vectorize(ci)
    panels.parallel(co)


def best(run, repeats):
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


rng = np.random.default_rng(0)
a, b = rng.standard_normal((2, N, N), dtype=np.float32)
c = np.empty_like(a)
expected = a.astype(np.float64) @ b.astype(np.float64)
flops = 2 * N**3
try:
    import torch

    torch.set_num_threads(chip.cores)
    ta, tb, tc = torch.from_numpy(a), torch.from_numpy(b), torch.empty(N, N)
except ImportError:
    torch = None

print(f"{N} x {N} x {N}, {chip}")
for step in (naive, tiled, vectorized, parallel, unrolled, packed):
    A, B, C, k = algorithm()
    s = te.schedule(C)
    step(s, C, k)
    matmul = te.build(s, [A, B, C])
    matmul(a, b, c)
    error = np.abs(c - expected).max()
    assert error < 1e-6 * N, f"{step.__name__} is wrong by {error}"
    repeats = 1 if step is naive else 3 if step is tiled else 20
    seconds = best(lambda f=matmul: f(a, b, c), repeats)
    line = f"{step.__name__:11} {flops / seconds / 1e9:8.1f} GFLOP/s   {step.__doc__}"
    if step is packed and torch is not None:
        ours, theirs = [], []
        for _ in range(12):  # turn by turn: a noisy moment hits both
            for times, run in ((ours, lambda f=matmul: f(a, b, c)),
                               (theirs, lambda: torch.mm(ta, tb, out=tc))):
                time.sleep(0.02)  # the other's threads may still be spinning
                run()
                times.append(best(run, 3))
        line += f"\n{'torch.mm':11} {flops / min(theirs) / 1e9:8.1f} GFLOP/s"
        line += f"   we reach {min(theirs) / min(ours):.0%} of it"
    print(line, flush=True)
