"""Vector loops are cut where conditions on indices change, and mean the same afterwards."""

from __future__ import annotations

import numpy as np
import pytest

from terrazzo.base.scalar import Call, FromIndex, Scalar, as_scalar, call, where
from terrazzo.base.scalar import walk as walk_scalar
from terrazzo.dtypes import float32, int64
from terrazzo.index import Index, Var
from terrazzo.loop import interpret
from terrazzo.loop.conditions import cut_at_conditions
from terrazzo.loop.ir import Buffer, For, Function, If, Store, walk

X, Y, Z = (Buffer(name, float32, 440) for name in "xyz")
I, J = Var("i", 0, 9), Var("j", 0, 39)


def index(value: Index) -> Scalar:
    return FromIndex(int64, value)


def kernel(value: Scalar) -> Function:
    body = For(I, 0, 10, For(J, 0, 40, Store(Z, I * 40 + J, value), "vector"))
    return Function("k", (X, Y, Z), (), body)


CONDITIONS = {
    "below": call("lt", index(J), as_scalar(25)),
    "up to": call("le", index(J), as_scalar(25)),
    "above": call("gt", index(J), index(I)),
    "from": call("ge", index(J - 3), as_scalar(0)),
    "of the outer loop": call("lt", index(I), as_scalar(4)),
    "two": call("and", call("ge", index(J), index(I)), call("lt", index(J), index(I + 7))),
    "one column": call("and", call("ge", index(J), as_scalar(39)), call("ge", index(J), index(I))),
    "all but one": call("or", call("ge", index(J), as_scalar(1)), call("ge", index(J), index(I))),
    "not": call("not", call("lt", index(J), as_scalar(8))),
    "never": call("lt", index(J), as_scalar(-5)),
    "either": call("or", call("lt", index(J), as_scalar(8)), call("ge", index(I), as_scalar(5))),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_same_result_without_the_condition(name: str, rng: np.random.Generator) -> None:
    function = kernel(where(CONDITIONS[name], X[I * 40 + J], Y[I * 40 + J]))
    cut = Function("k", function.params, (), cut_at_conditions(function.body))
    assert not any(isinstance(n, Call) and n.op == "where" for s in walk(cut.body)
                   if isinstance(s, Store) for n in walk_scalar(s.value))
    x, y = (rng.standard_normal(440).astype(np.float32) for _ in range(2))
    results = []
    for each in (function, cut):
        results.append(np.zeros(440, np.float32))
        interpret.run(each, [x, y, results[-1]], {})
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("count", [3, 12, 39])
def test_joints_of_many_tensors(count: int, rng: np.random.Generator) -> None:
    value = Y[I * 40 + J]
    for end in range(count, 0, -1):  # column 0 is of one tensor, column 1 of the next, ...
        value = where(call("lt", index(J), as_scalar(end)), X[I * 40 + J + end] * end, value)
    function = kernel(value)
    cut = Function("k", function.params, (), cut_at_conditions(function.body))
    left = [sum(isinstance(n, Call) and n.op == "where" for n in walk_scalar(s.value))
            for s in walk(cut.body) if isinstance(s, Store)]
    assert len(left) <= 16 and max(left) <= count // 8  # the rest is spread over all pieces
    x, y = (rng.standard_normal(440).astype(np.float32) for _ in range(2))
    results = []
    for each in (function, cut):
        results.append(np.zeros(440, np.float32))
        interpret.run(each, [x, y, results[-1]], {})
    np.testing.assert_array_equal(*results)


def test_a_condition_of_outer_loops_becomes_a_branch() -> None:
    cut = cut_at_conditions(kernel(where(CONDITIONS["of the outer loop"], X[J], Y[J])).body)
    branches = [s for s in walk(cut) if isinstance(s, If)]
    assert len(branches) == 1 and isinstance(branches[0].then, For)


def test_arithmetic_alone_is_left_as_it_is() -> None:
    body = kernel(where(CONDITIONS["below"], as_scalar(1.0), as_scalar(0.0))).body
    assert str(cut_at_conditions(body)) == str(body)
