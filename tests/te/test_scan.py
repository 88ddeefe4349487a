"""Recurrences along the first axis."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from terrazzo import te
from terrazzo.errors import (
    ArgumentError,
    DTypeError,
    IndexOutOfRange,
    ScheduleError,
    ShapeError,
)

t, n = te.dim("t"), te.dim("n")


def data_of(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def running_sum(steps: Any, width: Any) -> tuple[Any, ...]:
    x = te.placeholder((steps, width), name="x")
    s = te.state((steps, width), name="s")
    first = te.compute((1, width), lambda _, j: x[0, j], name="first")
    then = te.compute((steps, width), lambda i, j: s[i - 1, j] + x[i, j], name="then")
    return x, first, then, te.scan(first, then, s, name="sums")


@pytest.mark.parametrize("shape", [(1, 1), (2, 5), (7, 16), (9, 33), (3, 0)])
@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("how", ["plain", "vector", "parallel"])
def test_running_sums(shape: tuple[int, int], symbolic: bool, how: str, check: Any) -> None:
    x, first, then, sums = running_sum(*((t, n) if symbolic else shape))
    s = te.schedule(sums)
    if how == "vector":
        s[first].vectorize("j")
        s[then].vectorize("j")
    elif how == "parallel":
        jo, ji = s[then].split("j", 4)
        s[then].parallel(jo)
        s[then].vectorize(ji)
    data = data_of(*shape)
    check(s, [x, sums], [data], data.cumsum(0, dtype="d"), atol=1e-5)


def test_too_few_rows_for_the_init() -> None:
    x, _, _, sums = running_sum(t, 4)
    kernel = te.build(te.schedule(sums), [x, sums], "interpreter")
    with pytest.raises(IndexOutOfRange, match=r"t = 0"):
        kernel(np.zeros((0, 4), "f"), np.zeros((0, 4), "f"))


@pytest.mark.parametrize("steps", [2, 3, 12])
def test_two_rows_before(steps: int, check: Any) -> None:
    """Fibonacci: an init of two rows, and updates that read both."""
    seed = te.placeholder((2,), "int64", name="seed")
    f = te.state((t,), "int64", name="f")
    first = te.compute((2,), lambda i: seed[i], name="first")
    then = te.compute((t,), lambda i: f[i - 1] + f[i - 2], name="then")
    numbers = te.scan(first, then, f, name="numbers")
    shaped = te.placeholder((t,), "int64", name="shaped")  # says how many there are
    out = te.compute((t,), lambda i: numbers[i] + shaped[i], name="out")
    want = [1, 1]
    while len(want) < steps:
        want.append(want[-1] + want[-2])
    check(te.schedule(out), [seed, shaped, out], [np.ones(2, "int64"), np.zeros(steps, "int64")],
          np.array(want))


def lstm(steps: Any, batch: Any, size: int) -> tuple[Any, ...]:
    """All gates of a step, then cell and output: stages that exist for each step only."""
    x = te.placeholder((steps, batch, size), name="x")
    wx, wh = (te.placeholder((4, size, size), name=name) for name in ("wx", "wh"))
    cell = te.state((steps, batch, size), name="cell")
    out = te.state((steps, batch, size), name="out")
    k, q = te.reduce_axis(size, name="k"), te.reduce_axis(size, name="q")
    given = te.compute((steps, batch, 4, size), lambda i, b, g, j: te.sum(
        x[i, b, k] * wx[g, k, j], axis=k), name="given")
    gates = te.compute((steps, batch, 4, size), lambda i, b, g, j: given[i, b, g, j] + te.sum(
        out[i - 1, b, q] * wh[g, q, j], axis=q), name="gates")
    next_cell = te.compute((steps, batch, size), lambda i, b, j: (
        te.sigmoid(gates[i, b, 0, j]) * cell[i - 1, b, j]
        + te.sigmoid(gates[i, b, 1, j]) * te.tanh(gates[i, b, 2, j])), name="next_cell")
    next_out = te.compute((steps, batch, size), lambda i, b, j: (
        te.sigmoid(gates[i, b, 3, j]) * te.tanh(next_cell[i, b, j])), name="next_out")
    zeros = te.compute((1, batch, size), lambda i, b, j: te.const(0.0), name="zeros")
    cells, outs = te.scan([zeros, zeros], [next_cell, next_out], [cell, out], name="lstm")
    return x, wx, wh, cells, outs, gates, next_cell, next_out


def lstm_reference(x: np.ndarray, wx: np.ndarray, wh: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    def sigmoid(v: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-v))

    x, wx, wh = (a.astype("d") for a in (x, wx, wh))
    cells, outs = np.zeros(x.shape), np.zeros(x.shape)
    for i in range(1, len(x)):
        g = np.einsum("bk,gkj->bgj", x[i], wx) + np.einsum("bk,gkj->bgj", outs[i - 1], wh)
        cells[i] = sigmoid(g[:, 0]) * cells[i - 1] + sigmoid(g[:, 1]) * np.tanh(g[:, 2])
        outs[i] = sigmoid(g[:, 3]) * np.tanh(cells[i])
    return cells, outs


@pytest.mark.parametrize("shape", [(1, 2), (5, 3), (4, 1)])
@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("how", ["plain", "inside", "fast"])
def test_lstm(shape: tuple[int, int], symbolic: bool, how: str, check: Any) -> None:
    x, wx, wh, cells, outs, gates, next_cell, next_out = lstm(
        *((t, n) if symbolic else shape), size=5)
    s = te.schedule(cells, outs)
    if how == "inside":
        s[gates].compute_at(next_out, "j")  # the batch: its axes are i, j, l
        s[next_cell].compute_at(next_out, "j")
        s[next_out].parallel("j")
    elif how == "fast":
        s["given"].compute_at(gates, "i")
        s[gates].reorder("l", "q", "m")
        s[gates].vectorize("m")
        local = s.cache_write(next_cell)
        local.vectorize("l")
        s[next_out].parallel("j")
    data = data_of(*shape, 5), data_of(4, 5, 5), data_of(4, 5, 5)
    check(s, [x, wx, wh, cells, outs], list(data), *lstm_reference(*data), rtol=1e-4, atol=1e-5)


def test_one_of_two_states(check: Any) -> None:
    """The other one is memory of the kernel's own."""
    x, wx, wh, _, outs, *_ = lstm(4, 2, 3)
    data = data_of(4, 2, 3), data_of(4, 3, 3), data_of(4, 3, 3)
    check(te.schedule(outs), [x, wx, wh, outs], list(data), lstm_reference(*data)[1], rtol=1e-4,
          atol=1e-5)


@pytest.mark.parametrize("steps", [1, 2, 9])
def test_updates_of_one_compute(steps: int, check: Any) -> None:
    """A rotation: both new values need both old ones."""
    start = te.placeholder((2,), name="start")
    a, b = te.state((t, 1), name="a"), te.state((t, 1), name="b")
    angle = te.placeholder((t,), name="angle")
    inits = te.compute((1, 1), lambda i, j: (start[0], start[1]), name="begin")
    turned = te.compute((t, 1), lambda i, j: (
        a[i - 1, j] * te.cos(angle[i]) - b[i - 1, j] * te.sin(angle[i]),
        a[i - 1, j] * te.sin(angle[i]) + b[i - 1, j] * te.cos(angle[i])), name="turned")
    xs, ys = te.scan(inits, turned, (a, b), name="points")
    angles = data_of(steps)
    total = np.r_[0, angles[1:].astype("d")].cumsum()
    place = (2 + 1j) * np.exp(1j * total)
    check(te.schedule(xs, ys), [start, angle, xs, ys], [np.array([2, 1], "f"), angles],
          place.real[:, None], place.imag[:, None], rtol=1e-4, atol=1e-5)


def test_scan_of_a_scan_and_a_reader(check: Any) -> None:
    """Results are tensors as any other: also the init and the input of the next scan."""
    x, _, _, sums = running_sum(6, 3)
    p = te.state((6, 3), name="p")
    then = te.compute((6, 3), lambda i, j: te.maximum(p[i - 1, j], sums[i, j]), name="top")
    first = te.compute((1, 3), lambda i, j: sums[i, j], name="top_first")
    tops = te.scan(first, then, p, name="tops")
    k = te.reduce_axis(6, name="k")
    y = te.compute((3,), lambda j: te.sum(tops[k, j], axis=k), name="y")
    data = data_of(6, 3)
    want = np.maximum.accumulate(data.cumsum(0, dtype="d"), 0)
    check(te.schedule(y, tops), [x, y, tops], [data], want.sum(0), want, atol=1e-5)


def test_init_that_is_an_input(check: Any) -> None:
    begin, x = te.placeholder((1, 4), name="begin"), te.placeholder((5, 4), name="x")
    s = te.state((5, 4), name="s")
    then = te.compute((5, 4), lambda i, j: s[i - 1, j] * x[i, j], name="then")
    y = te.scan(begin, then, s, name="y")
    data, first = data_of(5, 4), data_of(1, 4)
    check(te.schedule(y), [begin, x, y], [first, data], np.r_[first, data[1:]].cumprod(0))


def test_rfactor_inside_of_a_step(check: Any) -> None:
    w, s = te.placeholder((8, 20, 20), name="w"), te.state((8, 20), name="s")
    k = te.reduce_axis(20, name="k")
    then = te.compute((8, 20), lambda i, j: te.sum(w[i, j, k] * s[i - 1, k], axis=k) * 0.2,
                      name="then")
    first = te.compute((1, 20), lambda i, j: te.const(1.0), name="first")
    y = te.scan(first, then, s, name="y")
    sch = te.schedule(y)
    ko, ki = sch[then].split(k, 8)
    with pytest.raises(ScheduleError, match=r"first axis of then\.rf is that of the scan y"):
        sch.rfactor(then, ki)
    lanes = sch.rfactor(then, ki, factor_axis=2)
    lanes.reorder("j", ko, ki)
    lanes.vectorize(ki)
    sch[then].parallel("j")
    data = data_of(8, 20, 20)
    want = [np.ones(20)]
    for i in range(1, 8):
        want.append(data[i].astype("d") @ want[-1] * 0.2)
    check(sch, [w, y], [data], np.array(want), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("source", ["input", "stage"])
@pytest.mark.parametrize("place", ["whole", "row"])
def test_copies_for_a_later_stage_of_a_step(source: str, place: str, check: Any) -> None:
    x, s = te.placeholder((5, 3), name="x"), te.state((5, 3), name="s")
    read = x if source == "input" else te.compute((5, 3), lambda i, j: x[i, j] + 1.0, name="more")
    first = te.compute((1, 3), lambda i, j: x[0, j], name="first")
    twice = te.compute((5, 3), lambda i, j: s[i - 1, j] * 2.0, name="twice")
    then = te.compute((5, 3), lambda i, j: twice[i, j] + read[i, j], name="then")
    y = te.scan(first, then, s, name="y")
    schedule = te.schedule(y)
    copy = schedule.cache_read(read, "local", [then])
    if place == "row":
        copy.compute_at(then, "i")
    data = data_of(5, 3)
    want = [data[0].astype("d")]
    for row in data[1:]:
        want.append(want[-1] * 2 + row + (source == "stage"))
    check(schedule, [x, y], [data], np.array(want), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- what does not fit
def step(read: Any, init: int = 1, steps: Any = 6) -> Any:
    s = te.state((steps,), name="s")
    x = te.placeholder((steps,), name="x")
    first = te.compute((init,), lambda i: te.const(0.0), name="first")
    return te.scan(first, te.compute((steps,), lambda i: read(s, x, i), name="then"), s)


@pytest.mark.parametrize(("read", "message"), [
    (lambda s, x, i: s[i], r"row i of s is not computed before row i"),
    (lambda s, x, i: s[i - 2], r"index i - 2 of dimension 0 of s"),
    (lambda s, x, i: s[5 - i], r"row 5 - i of s is not computed before row i"),
    (lambda s, x, i: s[i - 1] + x[i + 1], r"index i \+ 1 of dimension 0 of x"),
    (lambda s, x, i: s[te.cast(x[i], "int64")], r"then reads a computed row of s"),
])
def test_rows_that_are_not_there(read: Any, message: str) -> None:
    with pytest.raises(IndexOutOfRange, match=message):
        step(read)


def test_rows_that_are_there(check: Any) -> None:
    assert step(lambda s, x, i: s[i - 1] + x[i - 1]).shape == (6,)
    assert step(lambda s, x, i: s[i - 2] + s[0], init=2).shape == (6,)
    assert step(lambda s, x, i: te.where(i >= 2, s[i - 2], 0.0) + s[i // 2]).shape == (6,)
    checked = step(lambda s, x, i: s[i - 1] + x[2], steps=t)
    x = te.schedule(checked).program.inputs[0]
    kernel = te.build(te.schedule(checked), [x, checked], "interpreter")
    with pytest.raises(IndexOutOfRange, match=r"index 2 of dimension 0 of x.*t = 2"):
        kernel(np.zeros(2, "f"), np.zeros(2, "f"))


def test_other_rows_of_what_is_no_state() -> None:
    s = te.state((6,), name="s")
    twice = te.compute((6,), lambda i: s[i - 1] * 2.0, name="twice")
    then = te.compute((6,), lambda i: twice[i - 1] + 1.0, name="then")
    first = te.compute((1,), lambda i: te.const(0.0), name="first")
    with pytest.raises(IndexOutOfRange, match="then reads another row of twice than its own, i"):
        te.scan(first, then, s)


def test_mistakes() -> None:
    x, s = te.placeholder((6, 2), name="x"), te.state((6, 2), name="s")
    first = te.compute((1, 2), lambda i, j: x[i, j], name="first")
    then = te.compute((6, 2), lambda i, j: s[i - 1, j], name="then")
    with pytest.raises(ScheduleError, match="then depends on s, the state of a scan"):
        te.schedule(then)
    with pytest.raises(ArgumentError, match="x is no state"):
        te.scan(first, then, x)
    with pytest.raises(ArgumentError, match="1 states, 2 inits and 1 updates"):
        te.scan([first, first], then, s)
    with pytest.raises(ShapeError, match=r"state s has shape \[6, 2\], its init \[6\]"):
        te.scan(te.compute((6,), lambda i: x[i, 0]), then, s)
    with pytest.raises(DTypeError, match="state s is float32, its init int64"):
        te.scan(te.compute((1, 2), lambda i, j: i + j), then, s)
    with pytest.raises(ArgumentError, match="no scans inside of scans"):
        te.scan(te.compute((1, 2), lambda i, j: s[0, j], name="inner"), then, s)
    other = te.state((6, 2), name="other")
    with pytest.raises(ArgumentError, match="both reads other, which is no state"):
        te.scan(first, te.compute((6, 2), lambda i, j: s[i - 1, j] + other[i - 1, j], name="both"),
                s)
    with pytest.raises(ShapeError, match="no axis to walk along"):
        te.state(())
    with pytest.raises(ScheduleError, match="s is the state of two scans"):
        again = te.compute((6, 2), lambda i, j: s[i - 1, j] + 1.0, name="again")
        te.schedule(te.scan(first, then, s, name="one"), te.scan(first, again, s, name="two"))


def test_places_that_do_not_fit() -> None:
    _, first, then, sums = running_sum(6, 4)
    y = te.compute((6, 4), lambda i, j: sums[i, j] * 2.0, name="y")
    s = te.schedule(y)
    with pytest.raises(ScheduleError, match="then is computed for each row of sums, and y is not"):
        s[then].compute_at(y, "i")
    with pytest.raises(ScheduleError, match="then is an output and has to be stored"):
        s[then].compute_inline()
    with pytest.raises(ScheduleError, match="first is an output"):
        s[first].pack("j", "i")
    with pytest.raises(ScheduleError, match="no stage 'sums'"):
        s[sums].split("i", 2)


def test_an_init_is_whole_before_the_first_step() -> None:
    x, s = te.placeholder((5, n), name="x"), te.state((5, n), name="s")
    first = te.compute((1, n), lambda i, j: x[0, j], name="first")
    then = te.compute((5, n), lambda i, j: s[i - 1, j] + first[0, j], name="then")
    schedule = te.schedule(te.scan(first, then, s, name="y"))
    with pytest.raises(ScheduleError, match=r"first begins y and has to be whole before its first"):
        schedule[first].compute_at(then, "i")


def test_an_output_is_not_computed_in_the_steps_of_a_scan() -> None:
    """There is no step for the rows of the init."""
    x, s = te.placeholder((5, 3), name="x"), te.state((5, 3), name="s")
    p = te.compute((5, 3), lambda i, j: x[i, j] + 1.0, name="p")
    first = te.compute((1, 3), lambda i, j: x[0, j], name="first")
    then = te.compute((5, 3), lambda i, j: s[i - 1, j] + p[i, j], name="then")
    y = te.scan(first, then, s, name="y")
    schedule = te.schedule(p, y)
    schedule[p].compute_at(then, "j")
    with pytest.raises(ScheduleError, match="computed for the later rows of y only"):
        te.build(schedule, [x, p, y], "interpreter")
