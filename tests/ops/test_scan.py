"""Running sums and their kin: against numpy, the loops against the references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from checking import check, check_gradient, close, draw, evaluate, op

from terrazzo.dtypes import bool_, float32
from terrazzo.errors import ArgumentError, AxisError, DTypeError, ShapeError
from terrazzo.graph.ir import TensorType, Value

NUMPY: dict[str, Callable[..., np.ndarray]] = {
    "cumsum": np.cumsum, "cumprod": np.cumprod, "cummax": np.maximum.accumulate,
    "cummin": np.minimum.accumulate,
}
SHAPES = [((7,), 0), ((3, 5), 1), ((5, 3), 0), ((2, 4, 67), 1), ((3, 0), 1), ((0, 3), 1),
          ((2, 3, 1), -2)]


@pytest.mark.parametrize("name", list(NUMPY))
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_against_numpy(name: str, shape: tuple[int, ...], axis: int,
                       rng: np.random.Generator) -> None:
    x = draw(rng, shape)
    check(op(name), x, axis=axis, expected=NUMPY[name](x, axis=axis))


@pytest.mark.parametrize("name", list(NUMPY))
def test_symbolic_sizes(name: str, rng: np.random.Generator) -> None:
    x = draw(rng, (3, 5, 2))
    for axis in (0, 1, -1):
        check(op(name), x, axis=axis, expected=NUMPY[name](x, axis=axis), symbolic=True)


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("name", "identity"), [("cumsum", 0), ("cumprod", 1)])
def test_options(name: str, identity: int, exclusive: bool, reverse: bool,
                 rng: np.random.Generator) -> None:
    x = draw(rng, (2, 5))
    values = NUMPY[name](x[:, ::-1] if reverse else x, axis=1)
    if exclusive:
        values = np.concatenate([np.full((2, 1), identity), values[:, :-1]], 1)
    expected = (values[:, ::-1] if reverse else values).astype(np.float32)
    check(op(name), x, axis=1, exclusive=exclusive, reverse=reverse, expected=expected)


def test_types(rng: np.random.Generator) -> None:
    for dtype, result in [("int8", "int64"), ("bool", "int64"), ("uint8", "uint64"),
                          ("float64", "float64"), ("float16", "float16")]:
        x = draw(rng, (6,), dtype)
        got = evaluate(op("cumsum"), x)
        assert got.dtype == result
        check(op("cumsum"), x, expected=np.cumsum(x, dtype="f8" if dtype[0] == "f" else result
                                                  ).astype(result))
    check(op("cumsum"), draw(rng, (2, 3), "int32"), dtype="float32")
    x = draw(rng, (4,), "int32")
    check(op("cummax"), x, expected=np.maximum.accumulate(x))


def test_half_types_are_carried_in_float32() -> None:
    x = np.full(5000, 1.0, np.float16)
    check(op("cumsum"), x, expected=np.cumsum(x, dtype=np.float32).astype(np.float16))


def test_nan_stays() -> None:
    x = np.array([1, np.nan, 3], np.float32)
    close(evaluate(op("cummax"), x), np.array([1, np.nan, np.nan], np.float32))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_linear_recurrence(shape: tuple[int, ...], axis: int, reverse: bool,
                           rng: np.random.Generator) -> None:
    a, b = draw(rng, shape, low=-1, high=1), draw(rng, shape)
    expected = np.zeros(shape)
    rows, factors, terms = (np.moveaxis(v, axis, 0) for v in (expected, a, b))
    state: Any = 0.0
    for k in range(len(rows))[::-1 if reverse else 1]:
        state = rows[k] = factors[k].astype(float) * state + terms[k]
    check(op("linear_recurrence"), a, b, axis=axis, reverse=reverse,
          expected=expected.astype(np.float32), rtol=1e-5)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("exclusive", [False, True])
def test_gradients(exclusive: bool, reverse: bool, rng: np.random.Generator) -> None:
    x = draw(rng, (2, 5), "float64")
    x[0, 2] = x[1, 1] = x[1, 3] = 0.0  # a product's gradient is exact there as well
    options: dict[str, Any] = {"axis": 1, "reverse": reverse, "exclusive": exclusive}
    check_gradient(op("cumsum"), x, **options)
    check_gradient(op("cumprod"), x, **options, rtol=1e-6)
    y = draw(rng, (2, 5), "float64")
    for name in ("max", "min"):
        def away_from_infinity(x: Any, name: str = name) -> Any:
            running = op("cumulative")(x, op=name, **options)
            return op("where")(op("isfinite")(running), running, 0.0)

        check_gradient(away_from_infinity, y)
    check_gradient(op("linear_recurrence"), x, y, wrt=(0, 1), axis=1, reverse=reverse)


def test_errors() -> None:
    x, mask = Value(TensorType((3, 4), float32)), Value(TensorType((3, 4), bool_))
    with pytest.raises(ArgumentError, match="no operation"):
        op("cumulative")(x, op="xor")
    with pytest.raises(DTypeError, match="cast"):
        op("cummax")(mask, axis=0)
    with pytest.raises(AxisError, match="does not exist"):
        op("cumsum")(x, axis=2)
    with pytest.raises(ShapeError, match="one shape"):
        op("linear_recurrence")(x, x[:2])
    with pytest.raises(DTypeError, match="one float type"):
        op("linear_recurrence")(x, mask)
