"""What a function mentions without being given it: read at each call, whatever the size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.errors import ArgumentError

SCALE = 2.0


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


# ---------------------------------------------------------------- arrays
def test_captured_arrays_are_read_at_each_call_whatever_the_size() -> None:
    w = ones(3)

    @tz.op(name="test_captures_w")
    def operator(x: Any) -> Any:
        return x * w

    ways = {
        "function": tz.jit(lambda x: x * w), "operator": operator,
        "operator inside": tz.jit(lambda x: operator(x) + 0.0),
        "view": tz.jit(lambda x: x * w[::-1][::-1]),
        "control flow": tz.jit(lambda x: tz.cond(tz.sum(x) > 0, lambda: x * w, lambda: x)),
        "scan": tz.jit(lambda x: tz.scan(lambda c, row: (c, row * w), x[0], x)[1]),
        "gradient": tz.grad(lambda x: tz.sum(x * w)),
    }
    for run in ways.values():
        w[:] = 1
        run(ones(2, 3))
    for value in (5, 7):
        w[:] = value
        for name, run in ways.items():
            for n in (2, 4, 6, 2):
                np.testing.assert_array_equal(run(ones(n, 3)), np.full((n, 3), value), name)
    assert isinstance(ways["function"](ones(2, 3)), np.ndarray)


def test_what_is_made_inside_and_what_nobody_may_write_to_are_constants() -> None:
    fixed = ones(3)
    fixed.flags.writeable = False
    function = tz.jit(lambda x: x + np.arange(3, dtype=np.float32) + fixed)
    np.testing.assert_array_equal(function(ones(3)), [2, 3, 4])
    (family,) = function.table.families.values()
    assert not family.captured.objects


def test_arrays_of_one_branch_only_are_captured_when_they_are_met() -> None:
    small, large = ones(1), ones(1)
    function = tz.jit(lambda x: x * (small if x.shape[0] < 4 else large))
    function(ones(2)), function(ones(3)), function(ones(5))
    small[:], large[:] = 2, 3
    assert [float(function(ones(n))[0]) for n in (2, 3, 5, 6)] == [2, 2, 3, 3]


def test_an_executable_holds_what_its_function_mentions() -> None:
    w = ones(3)
    executable = tz.exp.compile(ones(3))
    assert executable is not None
    made = tz.op(lambda x: x * w, name="test_saved").compile(ones(3))
    w[:] = 9
    np.testing.assert_array_equal(made(ones(3)), 1)
    assert tz.verify(lambda x: x * w, ones(3), dtypes=["float32"], kinds=("random",)).rows


# ---------------------------------------------------------------- variables bound anew
def test_variables_that_a_function_names_may_be_bound_anew() -> None:
    global SCALE
    w = ones(3)
    function = tz.jit(lambda x: x * SCALE + w)
    assert function(ones(3))[0] == 3
    try:
        SCALE = 4.0
        assert [float(function(ones(n, 3))[0, 0]) for n in (1, 2, 5)] == [5, 5, 5]
        assert function(ones(3))[0] == 5
    finally:
        SCALE = 2.0
    w = w + 1
    assert [float(function(a).reshape(-1)[0]) for a in (ones(3), ones(2, 3))] == [4, 4]


class Scaled:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def loss(self, x: Any) -> Any:
        return tz.sum(x * x) * self.scale


def test_what_is_made_of_a_function_notices_as_well() -> None:
    """A gradient, a batch, a scan: the variables are those of the function that it is made of."""
    global SCALE
    w, k = ones(3), ones(3)
    defined = tz.op(lambda x: tz.sum(x * k), name="test_rebound")
    owner = Scaled(2.0)
    made: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "grad": (tz.grad(lambda x: tz.sum(w * x)), (ones(3),)),
        "value_and_grad": (tz.value_and_grad(lambda x: tz.sum(w * x)), (ones(3),)),
        "of an operator": (tz.grad(defined), (ones(3),)),
        "of a method": (tz.grad(owner.loss), (ones(3),)),
        "vjp": (tz.vjp(lambda x: x * w), (ones(3), ones(3))),
        "jvp": (tz.jvp, (lambda x: x * w, (ones(3),), (ones(3),))),
        "vmap": (tz.vmap(lambda x: x * SCALE), (ones(3),)),
        "twice": (tz.vmap(tz.grad(lambda x: x * SCALE)), (ones(3),)),
    }

    def results() -> dict[str, Any]:
        found = {name: f(*args) for name, (f, args) in made.items()}
        return {name: r[-1] if isinstance(r, tuple) else r for name, r in found.items()}

    before = results()
    w, k, owner.scale = w * 3, k * 3, owner.scale * 3
    try:
        SCALE = 6.0
        after = results()
    finally:
        SCALE = 2.0
    for name in made:
        np.testing.assert_array_equal(after[name], 3 * before[name], err_msg=name)


def test_a_scan_notices_too() -> None:
    global SCALE

    def combine(a: Any, b: Any) -> Any:
        return a + b * SCALE

    before = tz.associative_scan(combine, ones(2))
    try:
        SCALE = 5.0
        after = tz.associative_scan(combine, ones(2))
    finally:
        SCALE = 2.0
    assert [float(before[1]), float(after[1])] == [3, 6]


# ---------------------------------------------------------------- attributes
class Settings:
    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.deep = {"shift": [0.0]}


@dataclass
class Record:  # has __eq__, and therefore no hash
    scale: float


@pytest.mark.parametrize("make, change", [
    (lambda: {"scale": 2.0}, lambda a: a.update(scale=3.0)),
    (lambda: {2.0}, lambda a: (a.clear(), a.add(3.0))),
    (lambda: Settings(2.0), lambda a: setattr(a, "scale", 3.0)),
    (lambda: Settings(2.0), lambda a: a.deep["shift"].__setitem__(0, 1.0)),
    (lambda: Record(2.0), lambda a: setattr(a, "scale", 3.0)),
], ids=["dict", "set", "object", "inside an object", "dataclass"])
def test_attributes_are_keyed_by_what_they_hold(make: Any, change: Any) -> None:
    def scaled(x: Any, *, by: Any) -> Any:
        if isinstance(by, (dict, set)):
            return x * (by["scale"] if isinstance(by, dict) else max(by))
        return x * by.scale + (by.deep["shift"][0] if isinstance(by, Settings) else 0)

    operator, attribute = tz.op(scaled, name="test_scaled"), make()
    function = tz.jit(lambda x, by: scaled(x, by=by))

    def results() -> list[float]:
        return [float(run[0]) for n in (2, 4, 5) for run in (
            operator(ones(n), by=attribute), function(ones(n), attribute))]

    assert results() == [2] * 6
    change(attribute)
    assert results() == [3] * 6


def test_attributes_that_nothing_is_known_of_are_refused() -> None:
    operator = tz.op(lambda x, *, by: x, name="test_refuses")
    with pytest.raises(ArgumentError, match="nothing tells whether it changed"):
        operator(ones(2), by=bytearray(3))


# ---------------------------------------------------------------- torch
@pytest.mark.torch
def test_captured_parameters_learn() -> None:
    torch = pytest.importorskip("torch")
    layer = torch.nn.Linear(3, 2)

    @tz.op(name="test_linear_with_captured")
    def linear(x: Any) -> Any:
        return tz.matmul(x, layer.weight.T) + layer.bias

    x = torch.randn(5, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for n in (5, 4, 3, 5):
        results = []
        for run in (linear, tz.jit(lambda x: linear(x)), layer):
            optimizer.zero_grad()
            y = run(x[:n])
            (y * y).sum().backward()
            results.append([y.detach(), *(p.grad.clone() for p in layer.parameters())])
        for ours in results[:2]:
            for found, wanted in zip(ours, results[2], strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        optimizer.step()
    with torch.no_grad():
        torch.testing.assert_close(linear(x), layer(x), rtol=1e-5, atol=1e-5)
        assert linear(x).grad_fn is None


@pytest.mark.torch
def test_what_torch_computes_while_tracing_is_refused_where_it_needs_a_gradient() -> None:
    torch = pytest.importorskip("torch")
    w = torch.ones(3, requires_grad=True)
    function = tz.jit(lambda x: x * (w * 2))
    with pytest.raises(ArgumentError, match="computed by torch while tracing"):
        function(torch.ones(3))
    with torch.no_grad():
        assert function(torch.ones(3))[0] == 2
