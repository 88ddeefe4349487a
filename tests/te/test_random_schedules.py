"""Random schedules of reductions: whatever is allowed gives what is wanted."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from terrazzo import te
from terrazzo.errors import ScheduleError

m, n = te.dim("m"), te.dim("n")
INFINITY = np.float32(np.inf)


def better(x: Any, y: Any) -> Any:
    left = te.any(x[1] > y[1], te.all(x[1] == y[1], x[0] <= y[0]))
    return te.if_then_else(left, x[0], y[0]), te.if_then_else(left, x[1], y[1])


argmax = te.comm_reducer(better, lambda at, v: (te.max_value(at), te.min_value(v)), name="argmax")
REDUCTIONS: dict[str, Callable[[np.ndarray], list[np.ndarray]]] = {
    "sum": lambda x: [x.sum(1)],
    "max": lambda x: [x.max(1, initial=-INFINITY)],
    "min": lambda x: [x.min(1, initial=INFINITY)],
    "argmax": lambda x: [x.argmax(1) if x.shape[1] else np.full(len(x), 2**31 - 1),
                         x.max(1, initial=-INFINITY)],
}


def algorithm(kind: str, rows: Any, columns: Any, stored: bool) -> tuple[Any, ...]:
    """Two reduction axes over an input, or over a stage before it, and a reader of neighbours."""
    x = te.placeholder((rows, columns, 4), name="x")
    k, q = te.reduce_axis(columns, name="k"), te.reduce_axis(4, name="q")
    a = te.compute((rows, columns, 4), lambda i, j, p: x[i, j, p] * 2.0 + te.cast(
        te.if_then_else(i > j, i, j), "float32"), name="a")
    read = a if stored else x
    if kind == "argmax":
        ys = te.compute((rows,), lambda i: argmax(
            (te.cast(k * 4 + q, "int32"), read[i, k, q]), axis=(k, q)), name="y")
    else:
        ys = (te.compute((rows,), lambda i: getattr(te, kind)(read[i, k, q], axis=(k, q)),
                         name="y"),)
    z = te.compute((rows,), lambda i: te.cast(ys[0][i], "float32") * 2.0 + te.if_then_else(
        i > 0, te.cast(ys[0][i - 1], "float32"), 0.0), name="z")
    return x, (z, *(ys if kind == "argmax" else ()))


class Scheduler:
    """Takes random steps; those that do not fit are left out."""

    def __init__(self, seed: int, s: te.ScheduleBuilder, args: list[Any]):
        self.random, self.s, self.args = random.Random(seed), s, args
        self.stages = [s[t] for t in ("y", "z", "a") if any(
            stage.goes_by(t) for stage in s.plan.stages)]

    def attempt(self, step: Callable[[], Any]) -> Any:
        before = self.s.schedule
        try:
            answer = step()
            te.lower(self.s, self.args)
            return answer
        except ScheduleError:
            self.s.set(before)
            return None

    def one_of(self, things: Any) -> Any:
        return self.random.choice(list(things))

    def cut(self, stage: te.StageHandle) -> None:
        how: dict[str, int] = self.one_of(
            [{"factor": f} for f in (1, 2, 3, 4, 8)] + [{"nparts": p} for p in (1, 2, 3, 5)])
        self.attempt(lambda: stage.split(self.one_of(stage.axes), **how))

    def loops(self, stage: te.StageHandle) -> None:
        for _ in range(self.random.randrange(3)):
            self.cut(stage)
        if self.random.random() < 0.3 and len(stage.axes) > 1:
            at = self.random.randrange(len(stage.axes) - 1)
            self.attempt(lambda: stage.fuse(*stage.axes[at:at + 2]))

    def run(self) -> None:
        reduction, *others = self.stages
        nest = self.s.plan.stage(reduction.name).nest
        for _ in range(self.random.randrange(3)):
            axis = self.one_of(a for a in reduction.axes if a not in nest.data)
            factor = self.one_of((1, 2, 3, 8))
            self.attempt(lambda f=factor, a=axis: reduction.split(a, **self.one_of(
                [{"factor": f}, {"nparts": f}])))
        factored = [reduction]
        for _ in range(self.random.randrange(3)):
            stage = self.one_of(factored)
            new = self.attempt(lambda stage=stage: self.s.rfactor(
                stage, self.one_of(stage.axes), self.one_of((0, 1, -1))))
            factored += [] if new is None else [new]
        everything = [*factored, *others]
        for stage in everything:
            self.loops(stage)
            axes = list(stage.axes)
            self.random.shuffle(axes)
            self.attempt(lambda stage=stage, axes=axes: stage.reorder(*axes))
        for stage in everything:
            for _ in range(self.random.randrange(4)):  # most places do not fit
                target = self.one_of(everything)
                self.attempt(lambda stage=stage, target=target: stage.compute_at(
                    target, self.one_of(target.axes)))
        for stage in everything:
            for mark in ("vectorize", "parallel", "unroll"):
                if self.random.random() < 0.4:
                    self.attempt(lambda stage=stage, mark=mark: getattr(stage, mark)(
                        self.one_of(stage.axes)))


@pytest.mark.parametrize("seed", [*range(40), 126])  # 126: no columns, and a stage inside
def test_random_schedules(seed: int, check: Any) -> None:
    choose = random.Random(seed)
    rows, columns = choose.choice((1, 2, 3, 5, 8, 13)), choose.choice((0, 1, 3, 7, 16, 21))
    kind = choose.choice(sorted(REDUCTIONS))
    stored = choose.random() < 0.5
    x, outputs = algorithm(kind, *((m, n) if choose.random() < 0.5 else (rows, columns)), stored)
    s = te.schedule(*outputs)
    Scheduler(seed, s, [x, *outputs]).run()
    data = np.random.default_rng(seed).integers(-9, 10, (rows, columns, 4)).astype(np.float32)
    added = np.maximum(np.arange(rows)[:, None], np.arange(columns))[:, :, None]
    ys = REDUCTIONS[kind]((data * 2 + added if stored else data).reshape(rows, -1))
    first = ys[0].astype(np.float32)
    want = [first * 2 + np.r_[0, first[:-1]], *(ys if kind == "argmax" else ())]
    check(s, [x, *outputs], [data], *want, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("size", [3, 7])
def test_pieces_of_fused_loops_that_may_be_empty(size: int, symbolic: bool, check: Any) -> None:
    """What is needed of a stage inside is known better for the piece than for its end."""
    x, (z,) = algorithm("min", *((m, n) if symbolic else (5, size)), stored=True)
    s = te.schedule(z)
    fused = s["y"].fuse("k", "q")
    outer, inner = s["y"].split(fused, 3)
    parts = s.rfactor("y", outer, -1)
    _, last = parts.split(inner, nparts=2)
    piece, _ = parts.split(last, nparts=5)
    s["a"].compute_at(parts, piece)
    s["a"].split("l", 4)
    data = np.random.default_rng(0).integers(-9, 10, (5, size, 4)).astype(np.float32)
    added = np.maximum(np.arange(5)[:, None], np.arange(size))[:, :, None]
    (first,) = REDUCTIONS["min"]((data * 2 + added).reshape(5, -1))
    check(s, [x, z], [data], first * 2 + np.r_[0, first[:-1]])
