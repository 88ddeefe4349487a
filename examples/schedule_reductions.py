"""One long sum and one argmax, each as one loop, in lanes, and in parts on all cores.

    python examples/schedule_reductions.py [--size 16777216]

A reduction's steps all change one number, so they can only run one after the other, or in the lanes
of a vector that are added up in the end. `rfactor` makes an axis of one of its loops: each step of
that loop has a partial result of its own, in a stage of its own, and steps may run side by side.
"""

import argparse
import time

import numpy as np

from terrazzo import te
from terrazzo.knobs import thread_count

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--size", type=int, default=1 << 24)
N = parser.parse_args().size
PARTS = 4 * thread_count()  # some for each core, so that none waits long for another
LANES = 256  # elements that are compared side by side

X, k = te.placeholder((N,), name="X"), te.reduce_axis(N, name="k")


# ---------------------------------------------------------------- the algorithms
def total():
    return (te.compute((), lambda: te.sum(X[k], axis=k), name="total"),)


def argmax():
    def better(x, y):
        left = te.any(x[1] > y[1], te.all(x[1] == y[1], x[0] <= y[0]))  # of equal ones the first
        return te.if_then_else(left, x[0], y[0]), te.if_then_else(left, x[1], y[1])

    reduction = te.comm_reducer(
        better, lambda at, value: (te.max_value(at), te.min_value(value)), name="argmax")
    return te.compute((), lambda: reduction((te.cast(k, "int32"), X[k]), axis=k), name="best")


# ---------------------------------------------------------------- the schedules
def one_loop(s, y):
    """one step after the other"""


def lanes_of_a_sum(s, y):
    """the lanes of a vector add up side by side: what the chip knows needs no rfactor"""
    s[y].vectorize(k)


def parts_of_a_sum(s, y):
    """rfactor: each part of the range has a sum of its own, and the parts run on all cores"""
    part, inside = s[y].split(k, nparts=PARTS)
    sums = s.rfactor(y, part)
    sums.parallel(part)
    sums.vectorize(inside)


def lanes_of_pairs(s, y):
    """rfactor: a pair for each of some lanes"""
    step, lane = s[y].split(k, LANES)
    pairs = s.rfactor(y, lane)
    pairs.reorder(step, lane)
    pairs.vectorize(lane)


def parts_of_pairs(s, y):
    """rfactor twice: lanes of parts, and the parts run on all cores"""
    part, inside = s[y].split(k, nparts=PARTS)
    best = s.rfactor(y, part)
    step, lane = best.split(inside, LANES)
    pairs = s.rfactor(best, lane)
    pairs.reorder(part, step, lane)
    pairs.vectorize(lane)
    pairs.compute_at(best, part)
    best.parallel(part)


# ---------------------------------------------------------------- how fast they are
def best_time(runs, repeats=9):
    """The least time of each, turn by turn: a noisy moment hits all."""
    times = [float("inf")] * len(runs)
    for _ in range(repeats):
        for number, run in enumerate(runs):
            start = time.perf_counter()
            run()
            times[number] = min(times[number], time.perf_counter() - start)
    return times


x = np.random.default_rng(0).standard_normal(N, dtype=np.float32)
print(f"{N} float32, {thread_count()} threads")
for algorithm, schedules, numpy in (
        (total, (one_loop, lanes_of_a_sum, parts_of_a_sum), lambda: x.sum()),
        (argmax, (one_loop, lanes_of_pairs, parts_of_pairs), lambda: x.argmax())):
    runs = []
    for schedule in schedules:
        results = algorithm()
        s = te.schedule(*results)
        schedule(s, results[0])
        kernel = te.build(s, [X, *results])
        arrays = [np.empty((), t.dtype.np) for t in results]
        kernel(x, *arrays)
        if algorithm is argmax:
            assert (arrays[0], arrays[1]) == (x.argmax(), x.max())
        else:
            error = abs(arrays[0] - x.sum(dtype=np.float64))
            assert error < 1e-7 * N, f"{schedule.__name__} is wrong by {error}"
        runs.append(lambda f=kernel, out=arrays: f(x, *out))
    times = best_time([*runs, numpy])
    print(f"\n{algorithm.__name__}")
    for schedule, seconds in zip(schedules, times):
        print(f"  {schedule.__name__:15} {seconds * 1e3:8.2f} ms  {times[0] / seconds:6.1f} x"
              f"   {schedule.__doc__}")
    print(f"  {'numpy':15} {times[-1] * 1e3:8.2f} ms  {times[0] / times[-1]:6.1f} x")
