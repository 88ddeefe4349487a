"""Programs to schedule, and the check that a schedule changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from terrazzo.base.scalar import as_scalar, call, reduce, where
from terrazzo.expr import evaluate
from terrazzo.expr.ir import Program, Tensor, compute, placeholder, reduce_axis
from terrazzo.expr.lower import lower
from terrazzo.expr.schedule import Schedule
from terrazzo.index import Index, Var
from terrazzo.index import evaluate as number
from terrazzo.loop import interpret
from terrazzo.loop.ir import Function
from terrazzo.loop.simplify import simplify

Sizes = Mapping[Var, int]


def matmul(m: Index, n: Index, k: Index, dtype: str = "float32") -> Program:
    a, b = placeholder((m, k), dtype, name="A"), placeholder((k, n), dtype, name="B")
    r = reduce_axis(k)
    c = compute((m, n), lambda i, j: reduce("add", a[i, r] * b[r, j], [r]), name="C",
                origin="matmul")
    return Program("matmul", (a, b), (c,), (c,))


def softmax(rows: Index, n: Index) -> Program:
    x, k = placeholder((rows, n), name="x"), reduce_axis(n)
    m = compute((rows,), lambda i: reduce("max", x[i, k], [k]), name="m", origin="softmax")
    e = compute((rows, n), lambda i, j: call("exp", x[i, j] - m[i]), name="e", origin="softmax")
    s = compute((rows,), lambda i: reduce("add", e[i, k], [k]), name="s", origin="softmax")
    y = compute((rows, n), lambda i, j: e[i, j] / s[i], name="y", origin="softmax")
    return Program("softmax", (x,), (m, e, s, y), (y,), kind="rows")


def layer_norm(rows: Index, n: int) -> Program:
    """The mean leaves the program too."""
    x, k = placeholder((rows, n), name="x"), reduce_axis(n)
    mean = compute((rows, 1), lambda i, j: reduce("add", x[i, k], [k]) / float(n), name="mean")
    var = compute((rows, 1), lambda i, j: reduce(
        "add", (x[i, k] - mean[i, 0]) * (x[i, k] - mean[i, 0]), [k]) / float(n), name="var")
    y = compute((rows, n), lambda i, j: (x[i, j] - mean[i, 0]) / call("sqrt", var[i, 0] + 1e-5),
                name="y")
    return Program("layer_norm", (x,), (mean, var, y), (y, mean), kind="rows")


def stencil(n: Index) -> Program:
    """Two sums over neighbours, zero outside: the second needs the first with a rim."""
    x = placeholder((n,), name="x")

    def at(t: Tensor, i: Any) -> Any:
        inside = call("and", call("ge", as_scalar(i), 0), call("lt", as_scalar(i), as_scalar(n)))
        return where(inside, t[i], 0.0)

    a = compute((n,), lambda i: at(x, i - 1) + x[i] * 2.0 + at(x, i + 1), name="a")
    b = compute((n,), lambda i: at(a, i - 1) + a[i] * 3.0 + at(a, i + 1), name="b")
    return Program("stencil", (x,), (a, b), (b,))


def conv1d(n: int, channels: int, filters: int, width: int) -> Program:
    x = placeholder((channels, n + width - 1), name="x")
    w = placeholder((filters, channels, width), name="w")
    c, k = reduce_axis(channels, "c"), reduce_axis(width, "k")
    y = compute((filters, n), lambda f, i: reduce(
        "add", x[c, i + k.var] * w[f, c, k], [c, k]), name="y")
    return Program("conv1d", (x, w), (y,), (y,))


def chain(rows: Index, n: Index) -> Program:
    """Three stages, each of which reads the one before in another way."""
    x, k = placeholder((rows, n), name="x"), reduce_axis(n)
    a = compute((rows, n), lambda i, j: call("tanh", x[i, j]), name="a")
    b = compute((rows,), lambda i: reduce("add", a[i, k] * a[i, k], [k]) + 1.0, name="b")
    c = compute((rows, n), lambda i, j: a[i, j] / b[i], name="c")
    return Program("chain", (x,), (a, b, c), (c,))


def run_loops(function: Function, inputs: list[np.ndarray], outputs: list[np.ndarray],
              sizes: Sizes) -> list[np.ndarray]:
    """The outputs of a kernel, into arrays that start out full of a wrong number."""
    flat = [np.full(w.size, 77, w.dtype) for w in outputs]
    interpret.run(function, [a.ravel() for a in inputs] + flat, sizes)
    return [o.reshape(w.shape) for o, w in zip(flat, outputs, strict=True)]


def check(program: Program, schedule: Schedule, sizes: Sizes | None = None) -> Function:
    """Compare a scheduled program, before and after the loop passes, with its definition."""
    sizes = sizes or {}
    random = np.random.default_rng(0)
    inputs = [random.standard_normal([int(number(n, sizes)) for n in t.shape]).astype(t.dtype.np)
              for t in program.inputs]
    want = evaluate.run(program, inputs, sizes)
    function = lower(program, schedule)
    for candidate in (function, simplify(function)):
        got = run_loops(candidate, inputs, want, sizes)
        for w, g in zip(want, got, strict=True):
            # The order of float32 sums differs between schedules.
            np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5)
    return function
