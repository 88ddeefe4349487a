"""What a Python programmer expects of operators and of traced values."""

from __future__ import annotations

import copy
import functools
import inspect
import multiprocessing
import pickle
from collections import namedtuple
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.errors import ArgumentError, TracedControlFlow
from terrazzo.graph.ir import OPERATORS, Value
from terrazzo.ops.numpy_calls import _FUNCTIONS, _UFUNCS

X = np.array([[0.3, -1.2, 2.5], [4.0, 0.5, -0.7]], np.float32)
Pair = namedtuple("Pair", "first second")


# ---------------------------------------------------------------- what can be an operator
class Layer:
    kind = tz.relu  # a built-in operator in a class is no method

    def __init__(self, scale: float) -> None:
        self.weight = np.full(3, scale, np.float32)
        self.power = 1

    @tz.op
    def forward(self, x: Any, *, times: int = 1) -> Any:
        """x weighed"""
        return x ** self.power * self.weight * times

    @tz.jit
    def compiled(self, x: Any) -> Any:
        return x * self.weight

    @staticmethod
    @tz.op
    def plus_one(x: Any) -> Any:
        return x + 1

    @classmethod
    @tz.op
    def plus_two(cls, x: Any) -> Any:
        return x + 2


def test_methods_read_their_object_at_each_call() -> None:
    a, b = Layer(2), Layer(3)
    np.testing.assert_array_equal(a.forward(X), X * 2)
    np.testing.assert_array_equal(b.forward(X, times=2), X * 6)
    np.testing.assert_array_equal(a.compiled(X), X * 2)
    a.weight *= 2
    np.testing.assert_array_equal(a.forward(X), X * 4)
    np.testing.assert_array_equal(a.compiled(X), X * 4)
    a.weight = np.zeros(3, np.float32)
    np.testing.assert_array_equal(a.forward(X), X * 0)
    np.testing.assert_array_equal(a.compiled(X), X * 0)
    b.power = 2
    np.testing.assert_array_equal(b.forward(X), X * X * 3)
    np.testing.assert_array_equal(a.plus_one(X), X + 1)
    np.testing.assert_array_equal(Layer.plus_two(X), X + 2)
    np.testing.assert_array_equal(a.kind(X), np.maximum(X, 0))


def test_methods_compose_and_have_gradients() -> None:
    a, b = Layer(2), Layer(3)
    found = tz.jit(lambda x: a.forward(b.forward(x)))(X)
    np.testing.assert_array_equal(found, X * 6)
    slope = tz.grad(lambda x: tz.sum(a.forward(x) * x))(X)
    np.testing.assert_allclose(slope, 4 * X, rtol=1e-6)
    assert "forward(x0" in a.forward.lower(X, "graph")
    a.forward.verify(X)


def weighed(x: Any, w: Any, *, shift: float = 0.0) -> Any:
    """x times w"""
    return x * w + shift


def test_partial_functions() -> None:
    shifted = tz.op(functools.partial(weighed, shift=3.0))
    assert shifted.name == "weighed" and shifted.doc == "x times w"
    np.testing.assert_array_equal(shifted(X, X), X * X + 3)
    np.testing.assert_array_equal(shifted(X, X, shift=1.0), X * X + 1)
    held = np.ones(3, np.float32)
    first = tz.op(functools.partial(weighed, held))
    np.testing.assert_array_equal(first(X), X)
    held *= 5
    np.testing.assert_array_equal(first(X), X * 5)


class Scale:
    """scales"""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, x: Any) -> Any:
        return x * self.by


@pytest.mark.parametrize("make", [tz.op, tz.jit])
def test_objects_that_can_be_called(make: Any) -> None:
    scale = Scale(2.0)
    made = make(scale)
    np.testing.assert_array_equal(made(X), X * 2)
    scale.by = 3.0
    np.testing.assert_array_equal(made(X), X * 3)
    assert made.name == "Scale"


@pytest.mark.parametrize("make", [tz.op, tz.jit])
def test_bound_methods_follow_their_object(make: Any) -> None:
    scale = Scale(2.0)
    made = make(scale.__call__)
    np.testing.assert_array_equal(made(X), X * 2)
    scale.by = 3.0
    np.testing.assert_array_equal(made(X), X * 3)


@tz.op
def added(x: Any, **others: Any) -> Any:
    for name in sorted(others):
        x = x + others[name]
    return x


def test_keywords_are_tensors_or_attributes() -> None:
    np.testing.assert_array_equal(added(X), X)
    np.testing.assert_array_equal(added(X, b=X, a=1.0), X + 1 + X)
    np.testing.assert_array_equal(added(X, b=X, a=2.0), X + 2 + X)
    np.testing.assert_array_equal(added(X, a=2, b=X[0]), X + 2 + X[0])
    slopes = tz.grad(lambda x, y: tz.sum(added(x, c=2, y=y) * y), argnums=(0, 1))(X, X)
    np.testing.assert_allclose(slopes[1], 3 * X + 2, rtol=1e-6, atol=1e-6)
    with pytest.raises(ArgumentError, match="has no argument 'other'"):
        tz.relu(X, other=X)


def test_operators_look_like_functions() -> None:
    assert list(inspect.signature(tz.softmax).parameters) == ["x", "axis"]
    assert list(inspect.signature(Layer(1).forward).parameters) == ["x", "times"]
    assert Layer(1).forward.__doc__ == "x weighed" and Layer.forward.__name__ == "forward"
    assert (inspect.getdoc(tz.relu) or "").startswith(tz.relu.doc)


# ---------------------------------------------------------------- results
@tz.op
def many(x: Any) -> Any:
    return {"twice": x * 2, "rest": (x, [x + 1, None], Pair(x.sum(), None))}


def test_results_in_nests() -> None:
    found = many(X)
    np.testing.assert_array_equal(found["twice"], X * 2)
    np.testing.assert_array_equal(found["rest"][1][0], X + 1)
    assert found["rest"][1][1] is None and found["rest"][2].second is None
    np.testing.assert_allclose(found["rest"][2].first, X.sum(), rtol=1e-6, atol=1e-6)
    inside = tz.jit(lambda x: many(x)["rest"][1][0] + many(x)["twice"])(X)
    np.testing.assert_allclose(inside, 3 * X + 1, rtol=1e-6)
    slope = tz.grad(lambda x: (many(x)["twice"] * x).sum())(X)
    np.testing.assert_allclose(slope, 4 * X, rtol=1e-6)
    many.verify(X)


def test_results_without_tensors() -> None:
    assert tz.op(lambda x: (), name="test_empty")(X) == ()
    assert tz.jit(lambda x: {"nothing": None})(X) == {"nothing": None}
    assert [len(tz.op(lambda x: (x,), name="test_single")(X))] == [1]


# ---------------------------------------------------------------- pickles and copies
def test_operators_pickle() -> None:
    layer = Layer(2)
    for op in (added, many, tz.relu, tz.getitem, Layer.forward, tz.cond):
        assert pickle.loads(pickle.dumps(op)) is op
        assert copy.deepcopy(op) is op and copy.copy(op) is op
    again = pickle.loads(pickle.dumps(tz.op(functools.partial(weighed, shift=3.0))))
    np.testing.assert_array_equal(again(X, X), X * X + 3)
    again = pickle.loads(pickle.dumps(tz.jit(weighed)))
    np.testing.assert_array_equal(again(X, X), X * X)
    bound = pickle.loads(pickle.dumps(layer.forward))
    layer.weight *= 2
    np.testing.assert_array_equal(bound(X), X * 2)
    copied = copy.deepcopy(layer)
    layer.weight *= 2
    np.testing.assert_array_equal(copied.forward(X), X * 4)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(tz.op(lambda x: x, name="test_local"))


def test_operators_go_to_another_process() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        np.testing.assert_array_equal(pool.apply(tz.relu, (X,)), np.maximum(X, 0))
        np.testing.assert_array_equal(pool.apply(added, (X,), {"y": X}), X + X)


# ---------------------------------------------------------------- traced values behave as arrays
def both(function: Any, *arrays: np.ndarray) -> None:
    """A function gives on traced values what it gives on arrays."""
    found, wanted = tz.jit(function)(*arrays), function(*arrays)
    found, wanted = (r if isinstance(r, (tuple, list)) else [r] for r in (found, wanted))
    for got, want in zip(found, wanted, strict=True):
        want = np.asarray(want)
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6)


BITS = np.array([[1, 2, 3], [4, 5, 6]], np.int32)
UFUNC_INPUTS = {name: (BITS, BITS[0]) for name in (
    "bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift")} | {
    "invert": (BITS,), "matmul": (X, X.T), "arccosh": (np.abs(X) + 1,), "arcsin": (X / 5,),
    "arccos": (X / 5,), "arctanh": (X / 5,), "power": (np.abs(X), X[0])}


@pytest.mark.parametrize("name", _UFUNCS)
def test_ufuncs(name: str) -> None:
    function = getattr(np, name)
    positive = name in ("sqrt", "log", "log2", "log10", "log1p", "cbrt")
    given = UFUNC_INPUTS.get(name, (np.abs(X) if positive else X, X[0])[:function.nin])
    both(lambda *xs: function(*xs), *given)
    if function.nin == 2:  # an array of numpy on the left, which is a constant there
        both(lambda y: function(given[0], y), given[1])


FUNCTION_CALLS: dict[str, Any] = {
    "var": lambda x: np.var(x, 1, ddof=1), "std": lambda x: np.std(x, axis=0, keepdims=True),
    "clip": lambda x: (np.clip(x, 0, 1), np.clip(x, None, 1), np.clip(x, a_min=-1, a_max=1)),
    "where": lambda x: np.where(x > 0, x, 1), "concatenate": lambda x: np.concatenate([x, x], 1),
    "concat": lambda x: np.concat([x, x], axis=0), "stack": lambda x: np.stack([x, x], axis=1),
    "expand_dims": lambda x: np.expand_dims(x, 1), "reshape": lambda x: np.reshape(x, (3, 2)),
    "permute_dims": lambda x: np.permute_dims(x, (1, 0)), "swapaxes": lambda x: np.swapaxes(
        x, 0, 1), "moveaxis": lambda x: np.moveaxis(x, 0, 1),
    "broadcast_to": lambda x: np.broadcast_to(x, (4, 2, 3)), "tile": lambda x: np.tile(x, (2, 1)),
    "repeat": lambda x: np.repeat(x, 2, axis=1), "roll": lambda x: np.roll(x, 1, axis=1),
    "take": lambda x: np.take(x, np.array([0, 2]), axis=1), "dot": lambda x: np.dot(x, x[0]),
    "take_along_axis": lambda x: np.take_along_axis(x, np.array([[0, 2], [1, 1]]), 1),
    "outer": lambda x: np.outer(x[0], x[1]), "tensordot": lambda x: np.tensordot(x, x, axes=2),
    "full_like": lambda x: np.full_like(x, 3), "pad": lambda x: np.pad(
        x, ((1, 0), (0, 2)), constant_values=2), "split": lambda x: np.split(x, 3, axis=1),
    "unstack": lambda x: np.unstack(x, axis=1), "max": lambda x: np.max(x, axis=1),
    "sum": lambda x: (np.sum(x), np.sum(x, 0), np.sum(x, axis=(0, 1), keepdims=True)),
    "meshgrid": lambda x: np.meshgrid(x[0], x[1], indexing="ij"),
    "sort": lambda x: (np.sort(x), np.sort(x, axis=0)), "cumsum": lambda x: np.cumsum(x, axis=1),
    "cumprod": lambda x: np.cumprod(x, 1), "nan_to_num": lambda x: np.nan_to_num(x / 0, posinf=1.0),
}


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("name", [n for n in _FUNCTIONS if hasattr(np, n)])
def test_functions_of_numpy(name: str) -> None:
    both(FUNCTION_CALLS.get(name, getattr(np, name)), X)


def test_more_functions_of_numpy() -> None:
    both(lambda x: np.einsum("ij,kj->ik", x, x), X)
    both(lambda x: np.round(x, 1), X)
    both(lambda x: x * np.size(x) + np.ndim(x) + np.shape(x)[0], X)


@pytest.mark.parametrize(("function", "hint"), [
    (np.linalg.norm, "use tz.vector_norm"), (np.add.reduce, "use tz.sum"),
    (lambda x: np.exp(x, dtype=np.float64), "use tz.exp"), (np.linalg.svd, "use tz.svd"),
    (np.unwrap, "docs/operators.md"),
    (lambda x: np.exp(x, out=np.zeros_like(X)), "use tz.exp"), (np.vstack, "use tz.concat")])
def test_other_functions_say_what_to_use(function: Any, hint: str) -> None:
    with pytest.raises(TracedControlFlow) as info:
        tz.jit(lambda x: function(x))(X)
    assert hint in str(info.value)


def test_arguments_of_numpy_that_an_operator_lacks() -> None:
    with pytest.raises(ArgumentError, match="has no argument 'initial'"):
        tz.jit(lambda x: np.sum(x, initial=3))(X)


def test_python_operators() -> None:
    both(lambda x: (+x, -x, abs(x), 2 ** x, x // 2, x % 2), X)
    np.testing.assert_array_equal(tz.jit(lambda x: round(x))(X), np.round(X))
    np.testing.assert_allclose(tz.jit(lambda x: round(x, 1))(X), np.round(X, 1), rtol=1e-6)
    both(lambda x: (x.reshape(3, 2), x.reshape((6,)), x.reshape(-1), x.T, x.transpose(1, 0)), X)
    np.testing.assert_array_equal(tz.jit(lambda x: x.permute(1, 0).view(2, 3))(X),
                                  X.T.reshape(2, 3))


def test_methods_are_operators() -> None:
    methods = {n for n in vars(Value) if n in OPERATORS}
    assert {"exp", "softmax", "relu", "take", "sort", "mean", "clip", "matmul"} <= methods
    np.testing.assert_array_equal(tz.jit(lambda x: x.exp())(X), tz.exp(X))
    np.testing.assert_array_equal(tz.jit(lambda x: x.softmax(dim=0))(X), tz.softmax(X, axis=0))
    np.testing.assert_array_equal(tz.jit(lambda x: x.clip(0, 1))(X), np.clip(X, 0, 1))


def test_axes_as_torch_names_them() -> None:
    takes_axis = [op for op in OPERATORS.values() if "axis" in op.signature.parameters]
    assert len(takes_axis) > 30
    for op in takes_axis:
        assert op.spelled({"dim": 1}) == {"axis": 1}
    np.testing.assert_array_equal(tz.sum(X, dim=1, keepdim=True), tz.sum(X, axis=1, keepdims=True))
    np.testing.assert_array_equal(tz.concat([X, X], dim=1), np.concatenate([X, X], axis=1))
    with pytest.raises(ArgumentError, match="no argument 'dim'"):
        tz.exp(X, dim=1)
    with pytest.raises(ArgumentError, match="dim= and axis=, which mean the same"):
        tz.sum(X, dim=1, axis=0)


def test_the_number_of_elements_of_symbolic_sizes() -> None:
    made = tz.jit(lambda x: x.sum() / x.size)
    shape_made = tz.jit(lambda x: x * 2 if x.size > 12 else x)
    for n in (3, 5, 4, 9):
        x = np.arange(2.0 * n, dtype=np.float32).reshape(2, n)
        np.testing.assert_allclose(made(x), x.mean(), rtol=1e-6)
        np.testing.assert_array_equal(shape_made(x), x * 2 if x.size > 12 else x)
    assert max(len(f.executables) for t in made.tables.values() for f in t.families.values()) == 1


@pytest.mark.parametrize("spelled", ["f8", "<f4", "i8", "u1", "i4", "=f2", "double",
                                     np.float32, np.dtype("i2"), "?"])
def test_types_as_numpy_spells_them(spelled: Any) -> None:
    assert tz.astype(np.abs(X), dtype=spelled).dtype == np.dtype(spelled)
