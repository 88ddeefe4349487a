"""The gradient of every operator against central differences, in float64.

Each differentiable operator has a row of cases below; one without fails the last test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from terrazzo.dtypes import as_dtype
from terrazzo.graph.autodiff import vjp_graph
from terrazzo.graph.evaluate import run
from terrazzo.graph.ir import OPERATORS, Graph, Operator, TensorType, operator_named
from terrazzo.graph.trace import trace

Maker = Callable[[np.random.Generator], np.ndarray]
STEP = 1e-6  # central differences err by STEP**2, and by 1e-16 / STEP from rounding
TOLERANCE = 2e-7


# ---------------------------------------------------------------- inputs
def spread(*shape: int, low: float = -2.0, high: float = 2.0) -> Maker:
    """Floats in a range, all different and apart from each other by more than STEP."""

    def make(rng: np.random.Generator) -> np.ndarray:
        count = int(np.prod(shape))
        places = (rng.permutation(count) + rng.uniform(0.3, 0.7, count)) / max(count, 1)
        return (low + (high - low) * places).reshape(shape)

    return make


def positive(*shape: int) -> Maker:
    return spread(*shape, low=0.2, high=3.0)


def inside(*shape: int) -> Maker:
    return spread(*shape, low=-0.9, high=0.9)


def integers(*shape: int, high: int) -> Maker:
    return lambda rng: rng.integers(0, high, shape)


def truths(*shape: int) -> Maker:
    return lambda rng: rng.integers(0, 2, shape).astype(bool)


def given(values: Any) -> Maker:
    return lambda rng: np.asarray(values)


@dataclass(frozen=True)
class Case:
    inputs: tuple[Maker | None, ...]
    attrs: dict[str, Any]


def case(*inputs: Maker | None, **attrs: Any) -> Case:
    return Case(inputs, attrs)


# ---------------------------------------------------------------- the rows
X = spread(3, 4)
ROWS: dict[str, list[Case]] = {
    # elementwise: both operands, one stretched in each of the two ways
    **{name: [case(X, spread(3, 4)), case(X, spread(4)), case(spread(3, 1), X), case(X, spread())]
       for name in ("add", "subtract", "multiply", "maximum", "minimum", "atan2", "hypot",
                    "copysign")},
    **{name: [case(X, positive(3, 4)), case(spread(3, 1), positive(4))]
       for name in ("divide", "remainder", "fmod")},
    "power": [case(positive(3, 4), X), case(positive(3, 1), spread(4)), case(X, given(3.0)),
              case(X, given(0.0))],
    **{name: [case(X)] for name in (
        "negative", "absolute", "sign", "floor", "ceil", "trunc", "round", "exp", "exp2", "expm1",
        "sin", "cos", "atan", "sinh", "cosh", "tanh", "asinh", "erf", "erfc", "sigmoid")},
    **{name: [case(positive(3, 4))] for name in (
        "sqrt", "rsqrt", "cbrt", "log", "log2", "log10", "log1p", "lgamma")},
    **{name: [case(inside(3, 4))] for name in ("tan", "asin", "acos", "atanh", "erfinv")},
    "acosh": [case(spread(3, 4, low=1.2, high=4.0))],
    "where": [case(truths(3, 4), X, spread(3, 4)), case(truths(4), X, spread(3, 1))],
    "astype": [case(X, dtype="float64")],
    # creation: the result does not depend on the values
    **{name: [case(X)] for name in ("zeros_like", "ones_like")},
    "full_like": [case(X, value=2.5)],
    # reductions
    **{name: [case(X), case(X, axis=0), case(X, axis=-1, keepdims=True), case(X, axis=(0, 1))]
       for name in ("sum", "prod", "max", "min", "mean", "logsumexp")},
    **{name: [case(X), case(X, axis=1, correction=1), case(X, axis=0, keepdims=True)]
       for name in ("var", "std")},
    "vector_norm": [case(X), *(case(X, axis=1, ord=p) for p in (1, 2, 3, float("inf")))],
    # contractions
    "batch_matmul": [
        case(spread(2, 3), spread(3, 4)), case(spread(3, 2), spread(3, 4), transpose_x=True),
        case(spread(2, 3), spread(4, 3), transpose_y=True),
        case(spread(3, 2), spread(4, 3), transpose_x=True, transpose_y=True),
        case(spread(2, 2, 3), spread(3, 2)), case(spread(2, 3), spread(2, 3, 2)),
        case(spread(2, 2, 3), spread(1, 2, 3), transpose_y=True),
        case(spread(2, 3, 2), spread(2, 3), transpose_x=True, transpose_y=True)],
    "matmul": [case(spread(3), spread(3)), case(spread(2, 3), spread(3)),
               case(spread(3), spread(3, 2)), case(spread(2, 2, 3), spread(3, 2))],
    "linear": [case(spread(2, 3), spread(4, 3)), case(spread(2, 3), spread(4, 3), spread(4)),
               case(spread(3), spread(4, 3), spread(4))],
    "vecdot": [case(X, spread(3, 4)), case(X, spread(4)), case(X, spread(3, 4), axis=0)],
    "outer": [case(spread(3), spread(4))],
    "dot": [case(spread(3), spread(3)), case(spread(2, 3), spread(3, 2)), case(X, spread())],
    "tensordot": [case(spread(2, 3, 2), spread(3, 2, 2)),
                  case(spread(2, 3), spread(3, 2), axes=((0,), (1,)))],
    "einsum": [case(spread(2, 3), spread(3, 2), equation="ij,jk->ik"),
               case(spread(2, 2, 3), spread(2, 3, 2), equation="bij,bjk->bik"),
               case(spread(3, 3), equation="ii->i"), case(spread(2, 3), equation="ij->j")],
    # normalisation and attention
    **{name: [case(X), case(X, axis=0)] for name in ("softmax", "safe_softmax", "log_softmax")},
    "layer_norm": [case(X), case(X, spread(4), spread(4)),
                   case(spread(2, 2, 3), spread(2, 3), axis=(-2, -1))],
    "rms_norm": [case(X), case(X, spread(4))],
    "group_norm": [case(spread(2, 4, 3), spread(4), spread(4), groups=2),
                   case(spread(2, 4), groups=2)],
    "instance_norm": [case(spread(2, 2, 3), spread(2), spread(2)), case(spread(2, 2, 3))],
    "batch_norm": [case(spread(2, 3), spread(3), positive(3), spread(3), spread(3)),
                   case(spread(2, 3, 2), spread(3), positive(3))],
    "batch_norm_train": [case(spread(4, 3), spread(3), spread(3)), case(spread(3, 2, 2))],
    "scaled_dot_product_attention": [
        case(spread(3, 2), spread(4, 2), spread(4, 2)),
        case(spread(1, 2, 3, 2), spread(1, 2, 3, 2), spread(1, 2, 3, 2), causal=True),
        case(spread(1, 4, 2, 2), spread(1, 2, 3, 2), spread(1, 2, 3, 2), scale=0.7),
        case(spread(3, 2), spread(4, 2), spread(4, 2), spread(3, 4)),
        case(spread(3, 2), spread(4, 2), spread(4, 2), given(np.tri(3, 4, 1, bool)))],
    # movement
    "reshape": [case(X, shape=(2, 6)), case(X, shape=(-1,))],
    "flatten": [case(X), case(spread(2, 2, 3), start_axis=1)],
    "expand_dims": [case(X, axis=1)],
    "squeeze": [case(spread(3, 1, 4)), case(spread(3, 1, 4), axis=1)],
    "permute_dims": [case(spread(2, 3, 4), axes=(2, 0, 1))],
    "transpose": [case(X)],
    "swapaxes": [case(X, axis1=0, axis2=1)],
    "moveaxis": [case(spread(2, 3, 4), source=0, destination=-1)],
    "matrix_transpose": [case(X)],
    "broadcast_to": [case(spread(3, 1), shape=(2, 3, 4)), case(spread(), shape=(2, 3))],
    "concat": [case(X, spread(2, 4)), case(X, X, spread(3, 1), axis=1)],
    "stack": [case(X, spread(3, 4)), case(X, spread(3, 4), axis=-1)],
    "slice": [case(X, starts=(0, 1), stops=(3, 4), steps=(2, 1)),
              case(X, starts=(2, 3), stops=(-1, 0), steps=(-1, -2))],
    "place": [case(X, shape=(5, 8), starts=(1, 0), steps=(1, 2)),
              case(spread(2), shape=(4,), starts=(3,), steps=(-2,), value=1)],
    "split": [case(X, indices_or_sections=2, axis=1), case(X, indices_or_sections=(1,))],
    "unstack": [case(X)],
    "pad": [case(X, pad_width=1), *(case(X, pad_width=((1, 0), (2, 1)), mode=mode)
                                    for mode in ("reflect", "symmetric", "edge", "wrap"))],
    "flip": [case(X), case(X, axis=1)],
    "roll": [case(X, shift=1), case(X, shift=2, axis=1)],
    "tile": [case(X, repetitions=(2, 1))],
    "repeat": [case(X, repeats=2, axis=1), case(spread(3), repeats=(1, 0, 2), axis=0)],
    "sliding_window": [case(spread(6), size=3, step=2)],
    "tril": [case(X)],
    "triu": [case(X, k=1)],
    "diagonal": [case(X), case(X, offset=-1)],
    "diag": [case(spread(3)), case(X, k=1)],
    "meshgrid": [case(spread(2), spread(3)), case(spread(2), spread(3), indexing="ij")],
}


def differentiable() -> list[Operator]:
    """Our own operators (a family says so) that take tensors and have a gradient."""
    return [op for op in OPERATORS.values()
            if op.family and op.differentiable and op.tensor_params]


# ---------------------------------------------------------------- the checks
def graph_of(op: Operator, arrays: list[np.ndarray | None], attrs: dict[str, Any]) -> Graph:
    types = [None if a is None else TensorType(a.shape, as_dtype(a.dtype)) for a in arrays]
    return trace(lambda *values: op(*values, **attrs), types, op.name)[0]


def check(graph: Graph, arrays: list[np.ndarray], rng: np.random.Generator) -> None:
    """Compare the gradients of all float inputs with central differences."""
    outputs = run(graph, arrays)
    weights = [rng.normal(size=o.shape) if o.dtype.kind == "f" else None for o in outputs]
    found = iter(run(vjp_graph(graph), arrays + [w for w in weights if w is not None]))

    def weighted(changed: list[np.ndarray]) -> float:
        return sum(float(np.sum(o * w)) for o, w in zip(run(graph, changed), weights)
                   if w is not None)

    for position, array in enumerate(arrays):
        if array.dtype.kind != "f":
            continue
        expected = np.zeros_like(array)
        for place in np.ndindex(array.shape):
            ends = []
            for sign in (1, -1):
                moved = array.copy()
                moved[place] += sign * STEP
                ends.append(weighted([moved if p == position else a
                                      for p, a in enumerate(arrays)]))
            expected[place] = (ends[0] - ends[1]) / (2 * STEP)
        gradient = next(found)
        assert gradient.dtype == array.dtype and gradient.shape == array.shape
        scale = max(1.0, float(np.max(np.abs(expected), initial=0.0)))
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=TOLERANCE * scale,
                                   err_msg=f"input {position}\n{graph}")


CASES = [pytest.param(name, c, id=f"{name}-{i}") for name, cases in ROWS.items()
         for i, c in enumerate(cases)]


@pytest.mark.parametrize(("name", "row"), CASES)
def test_gradient(name: str, row: Case, rng: np.random.Generator) -> None:
    arrays = [None if make is None else make(rng) for make in row.inputs]
    graph = graph_of(operator_named(name), arrays, row.attrs)
    check(graph, [a for a in arrays if a is not None], rng)


@pytest.mark.parametrize("name", [
    "multiply", "divide", "power", "tanh", "erf", "logsumexp", "std", "softmax", "layer_norm",
    "batch_matmul", "concat", "scaled_dot_product_attention"])
def test_second_order(name: str, rng: np.random.Generator) -> None:
    row = ROWS[name][0]
    arrays = [make(rng) for make in row.inputs if make is not None]
    first = vjp_graph(graph_of(operator_named(name), list(arrays), row.attrs))
    outputs = graph_of(operator_named(name), list(arrays), row.attrs).outputs
    weights = [rng.normal(size=o.shape) for o in outputs]
    check(first, arrays + weights, rng)


def test_every_differentiable_operator_has_a_row() -> None:
    missing = sorted({op.name for op in differentiable()} - ROWS.keys())
    assert not missing, f"add rows of cases for {', '.join(missing)}"
