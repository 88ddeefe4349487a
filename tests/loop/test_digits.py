"""A loop over a number and the loops over its digits do the same, for every piece of it."""

from __future__ import annotations

import numpy as np
import pytest

from terrazzo.base.scalar import as_scalar
from terrazzo.base.shapes import dim
from terrazzo.dtypes import int64
from terrazzo.index import Index, Mod, Var, ceildiv
from terrazzo.loop import interpret
from terrazzo.loop.digits import by_digits
from terrazzo.loop.ir import Buffer, For, Function, Stmt, Store, indices_of, walk

h, w = dim("h"), dim("w")
begin, end, task = Var("begin", 0), Var("end", 0), Var("task", 0)
out = Buffer("out", int64, h * w * 5)
EVEN = w // 2  # may be 0
SIZES = {h, w}


def runs(body: Stmt, height: int, width: int, lo: int, hi: int) -> np.ndarray:
    array = np.full(height * width * 5, -1)
    interpret.run(Function("f", (out,), (h, w, begin, end), body), [array],
                  {h: height, w: width, begin: lo, end: hi})
    return array


def numbered(value: Index) -> For:
    return For(task, begin, end, Store(out, task, as_scalar(value)))


@pytest.mark.parametrize("value", [
    task % w, task // w % h * 100 + task % w, task // (w * h) * 10000 + task // w % h * 100
    + task % w, task % w // 2 + task, task % (w * h) % w], ids=str)
def test_every_piece_of_a_loop(value: Index) -> None:
    loop = numbered(value)
    digits = by_digits(loop, SIZES)
    assert digits is not loop
    for height, width in ((1, 1), (1, 7), (4, 1), (3, 5)):
        count = height * width * 5
        for lo in range(0, count, 3):
            for hi in (lo, lo + 1, (lo + count) // 2, count):
                np.testing.assert_array_equal(runs(digits, height, width, lo, hi),
                                              runs(loop, height, width, lo, hi))


def test_the_digits_need_no_division() -> None:
    digits = by_digits(numbered(task // (w * h) * 9 + task // w % h * 3 + task % w), SIZES)
    stores = [s for s in walk(digits) if isinstance(s, Store)]
    assert len(stores) == 1
    assert not any(isinstance(i, Mod) for s in stores for i in indices_of(s))


def test_nothing_to_run_over() -> None:
    body = by_digits(numbered(task % EVEN), SIZES)
    assert (runs(body, 2, 1, 0, 0) == -1).all()  # a radix of 0 divides nothing
    assert runs(body, 2, 6, 0, 8)[:8].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


@pytest.mark.parametrize("value", [task % 7, task + w, task // w], ids=str)
def test_what_has_no_symbolic_digit_stays(value: Index) -> None:
    loop = numbered(value)
    assert by_digits(loop, SIZES) is loop


def test_a_radix_that_changes_inside_is_none() -> None:
    i = Var("i", 0)
    inner = For(i, 1, ceildiv(w, 2), Store(out, task, as_scalar(task % i)))
    loop = For(task, begin, end, inner)
    assert by_digits(loop, SIZES) is loop


def test_a_radix_that_is_no_size_is_none() -> None:
    loop = numbered(task % w)
    assert by_digits(loop, {h}) is loop
    assert by_digits(loop, frozenset()) is loop
