"""sort, argsort and topk: the references against torch and numpy, the loops against both."""

from __future__ import annotations

import numpy as np
import pytest
from checking import check, check_gradient, draw, from_torch, op, to_torch

from terrazzo.dtypes import complex64, float32
from terrazzo.errors import DTypeError, ShapeError
from terrazzo.graph.ir import TensorType, Value

SHAPES: list[tuple[tuple[int, ...], int]] = [
    ((1,), 0), ((7,), -1), ((2, 5), 1), ((5, 3), 0), ((2, 8, 2), 1), ((3, 0), 1), ((0, 3), 1),
    ((17,), 0), ((4, 1), 1),
]


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_sort(shape: tuple[int, ...], axis: int, descending: bool,
              rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    x = np.round(draw(rng, shape))  # with many equal elements, so that stability shows
    values, indices = torch.sort(to_torch(x), dim=axis, descending=descending, stable=True)
    check(op("sort"), x, axis=axis, descending=descending, expected=values.numpy())
    check(op("argsort"), x, axis=axis, descending=descending, expected=indices.numpy())


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "int8", "int64", "uint8",
                                   "uint32", "uint64", "bool"])
@pytest.mark.parametrize("descending", [False, True])
def test_every_type(dtype: str, descending: bool, rng: np.random.Generator) -> None:
    x = draw(rng, (3, 6), dtype, -100, 100)
    if x.dtype.kind in "iu":
        x[0, :2] = np.iinfo(x.dtype).min, np.iinfo(x.dtype).max
    expected = np.sort(x, axis=-1, kind="stable")[:, ::-1 if descending else 1]
    check(op("sort"), x, descending=descending, expected=expected)
    # A size that is not known takes the way of long axes.
    check(op("sort"), x[0], descending=descending, expected=expected[0], symbolic=True)


SPECIAL = np.array([np.nan, 1.0, -np.inf, -0.0, 0.0, np.inf, -np.nan, -1e-45, 3e38, np.nan, -2.0])


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_nan_is_the_largest_and_zeros_are_equal(dtype: str) -> None:
    with np.errstate(over="ignore"):
        x = SPECIAL.astype(dtype)
    check(op("argsort"), x, expected=np.argsort(x, kind="stable"))
    torch = pytest.importorskip("torch")
    values, indices = torch.sort(to_torch(x), descending=True, stable=True)
    check(op("argsort"), x, descending=True, expected=indices.numpy())
    check(op("sort"), x, descending=True, expected=from_torch(values))
    check(op("argsort"), x, descending=True, expected=indices.numpy(), symbolic=True)
    check(op("topk"), x, k=4, expected=(from_torch(values)[:4], indices.numpy()[:4]))


def test_flattened_and_single(rng: np.random.Generator) -> None:
    x = draw(rng, (3, 4))
    check(op("sort"), x, axis=None, expected=np.sort(x, axis=None))
    check(op("sort"), np.float32(3), expected=np.float32(3))
    check(op("argsort"), np.float32(3), expected=np.int64(0))


@pytest.mark.parametrize("shape", [(5,), (3, 6)])
def test_symbolic_sizes(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    x = draw(rng, shape)
    check(op("sort"), x, expected=np.sort(x), symbolic=True)
    check(op("argsort"), x, axis=0, expected=np.argsort(x, 0, kind="stable"), symbolic=True)
    values = -np.sort(-x, -1)[..., :3]
    check(lambda x: op("topk")(x, k=3)[0], x, expected=values, symbolic=True)


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize(("shape", "axis", "k"), [
    ((9,), 0, 4), ((3, 7), 1, 7), ((7, 3), 0, 1), ((2, 6, 2), 1, 3), ((3, 4), 1, 0),
    ((0, 4), 1, 2), ((2, 80), -1, 70),
])  # fmt: skip
def test_topk(shape: tuple[int, ...], axis: int, k: int, largest: bool,
              rng: np.random.Generator) -> None:
    x = np.round(draw(rng, shape))
    order = np.argsort(-x if largest else x, axis, kind="stable").take(range(k), axis)
    check(op("topk"), x, k=k, axis=axis, largest=largest,
          expected=(np.take_along_axis(x, order, axis), order))


def test_topk_of_lowest_values() -> None:
    x = np.full((1, 5), np.iinfo(np.int32).min, np.int32)
    check(op("topk"), x, k=3, expected=(x[:, :3], np.array([[0, 1, 2]])))
    x = np.full((1, 5), np.iinfo(np.int64).max)
    check(op("topk"), x, k=3, largest=False, expected=(x[:, :3], np.array([[0, 1, 2]])))


def test_gradients(rng: np.random.Generator) -> None:
    x = draw(rng, (3, 5), "float64")
    check_gradient(op("sort"), x, axis=0, descending=True)
    check_gradient(lambda x: op("topk")(x, k=2)[0], x)


def test_errors() -> None:
    x = Value(TensorType((3, 4), float32))
    with pytest.raises(ShapeError, match="topk of 9"):
        op("topk")(x, k=9)
    with pytest.raises(DTypeError, match=r"no sort.* of complex numbers"):
        op("sort")(Value(TensorType((3,), complex64)))
