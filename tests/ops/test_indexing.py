"""Addresses that are data: take, gather, scatter, x[key], nonzero, at every level."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checking import check, check_gradient, close, draw, from_torch, op, to_torch

import terrazzo as tz
from terrazzo.base.shapes import dims
from terrazzo.dtypes import bool_, float16, float32, int64
from terrazzo.errors import (
    ArgumentError,
    DTypeError,
    IndexOutOfRange,
    RankError,
    ShapeError,
    TracedControlFlow,
)
from terrazzo.expr.evaluate import run as expr_run
from terrazzo.expr.ir import Program, placeholder
from terrazzo.graph.autodiff import grad_graph
from terrazzo.graph.evaluate import run
from terrazzo.graph.ir import TensorType, Value
from terrazzo.graph.trace import trace

FAR = np.array([[0, 99, -1], [-99, 2, -2]])  # wraps and clips


def clipped(index: np.ndarray, size: int) -> np.ndarray:
    return np.clip(np.where(index < 0, index + size, index), 0, size - 1)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(("shape", "axis"), [((5,), 0), ((3, 5), 1), ((5, 3), -2), ((2, 5, 3), 1)])
def test_take(shape: tuple[int, ...], axis: int, symbolic: bool, rng: np.random.Generator) -> None:
    x = draw(rng, shape)
    for index in (FAR, np.array(3), np.array([], np.int32), np.array([1, 2], np.uint8)):
        expected = np.take(x, clipped(index.astype(np.int64), x.shape[axis]), axis)
        check(op("take"), x, index, expected=expected, axis=axis, symbolic=symbolic)
    check(op("take"), x, FAR, expected=np.take(x, clipped(FAR, x.size)), symbolic=symbolic)


def test_an_axis_that_turns_out_to_be_empty_reads_zeros() -> None:
    (n,) = dims("n")
    x, index = TensorType((n, 3), float32), TensorType((2,), int64)
    inputs = [placeholder(t.shape, t.dtype) for t in (x, index)]
    rule = op("take_at")
    out = rule.infer(x, index, axes=(0,))  # type: ignore[misc]
    result = rule.expr(*inputs, out=out, axes=(0,))  # type: ignore[misc]
    program = Program("take", tuple(inputs), (result,), (result,))
    (got,) = expr_run(program, [np.zeros((0, 3), np.float32), np.array([0, 5])], {n: 0})
    np.testing.assert_array_equal(got, np.zeros((2, 3)))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "int8", "bool"])
def test_embedding(dtype: str, rng: np.random.Generator) -> None:
    table, index = draw(rng, (7, 4), dtype), rng.integers(0, 7, (2, 3))
    check(op("embedding"), table, index, expected=table[index])


@pytest.mark.parametrize("axes", [(0, 1), (1, 2), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("symbolic", [False, True])
def test_take_at_several_axes(axes: tuple[int, ...], symbolic: bool,
                              rng: np.random.Generator) -> None:
    x = draw(rng, (3, 4, 5))
    indices = [rng.integers(-3, 3, s) for s in [(2, 1), (6,), (2, 6)][:len(axes)]]
    together = np.moveaxis(x, axes, range(axes[0], axes[0] + len(axes)))
    expected = together[(slice(None),) * axes[0] + tuple(indices)]
    check(lambda x, *i: op("take_at")(x, *i, axes=axes), x, *indices, expected=expected,
          symbolic=symbolic)


@pytest.mark.parametrize("symbolic", [False, True])
def test_gather(symbolic: bool, rng: np.random.Generator) -> None:
    x, index = draw(rng, (3, 5)), rng.integers(-5, 5, (3, 7))
    check(op("gather"), x, index, axis=1, symbolic=symbolic,
          expected=np.take_along_axis(x, index, 1))
    check(op("take_along_axis"), x, index[:1, :2], axis=-1, symbolic=symbolic,
          expected=np.take_along_axis(x, index[:1, :2], 1))
    small = rng.integers(0, 3, (7, 3))
    torch = pytest.importorskip("torch")
    check(op("gather"), x, small, axis=0,
          expected=torch.gather(to_torch(x), 0, to_torch(small)).numpy())


REDUCE_NAMES = {"set": None, "add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@pytest.mark.parametrize("reduce", list(REDUCE_NAMES))
@pytest.mark.parametrize(("shape", "index_shape", "axis"), [
    ((5,), (8,), 0), ((4, 3), (2, 3), 0), ((3, 70), (2, 66), 0), ((2, 4), (2, 9), -1),
    ((2, 4, 3), (1, 2, 2), 1), ((2, 3), (0, 3), 0),
])  # fmt: skip
def test_scatter(reduce: str, shape: tuple[int, ...], index_shape: tuple[int, ...], axis: int,
                 rng: np.random.Generator) -> None:
    x, updates = draw(rng, shape), draw(rng, index_shape)
    index = rng.integers(0, shape[axis], index_shape)
    if reduce == "set":  # the order of equal places is ours to say, so compare distinct ones
        count = min(index_shape[axis], shape[axis])
        updates, index = (np.take(a, range(count), axis) for a in (updates, index))
        index = np.argsort(rng.random(index.shape), axis) % shape[axis]
        expected = x.copy()
        grid = list(np.indices(index.shape))
        grid[axis] = index
        expected[tuple(grid)] = updates
    else:
        torch = pytest.importorskip("torch")
        expected = torch.scatter_reduce(to_torch(x), axis, to_torch(index), to_torch(updates),
                                        REDUCE_NAMES[reduce]).numpy()
    check(op("scatter"), x, index, updates, axis=axis, reduce=reduce, expected=expected)


def test_the_last_of_equal_places_wins() -> None:
    x, index, updates = np.zeros(4, np.float32), np.array([1, 1, 3, -3, 9]), np.arange(5.0)
    expected = np.array([0, 3, 0, 4], np.float32)
    check(op("scatter"), x, index, updates.astype(np.float32), expected=expected)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("reduce", ["set", "add", "max"])
def test_scatter_at(reduce: str, symbolic: bool, rng: np.random.Generator) -> None:
    x = draw(rng, (3, 4, 5))
    for axes, rows, columns in [((0, 1), (2, 0, 1), (3, 1, 3)), ((0, 2), (2, 0), (4, 3)),
                                ((1, 2), (2, 0), (4, 3))]:
        updates = draw(rng, op("take_at").infer(  # type: ignore[misc]
            TensorType(x.shape, float32), *[TensorType((len(rows),), int64)] * 2, axes=axes).shape)
        together = np.moveaxis(x.copy(), axes, range(axes[0], axes[0] + 2))
        key = (slice(None),) * axes[0] + (np.array(rows), np.array(columns))
        if reduce == "set":
            together[key] = updates
        else:
            {"add": np.add, "max": np.maximum}[reduce].at(together, key, updates)
        expected = np.moveaxis(together, range(axes[0], axes[0] + 2), axes)
        check(lambda x, u, *i, axes=axes: op("scatter_at")(x, u, *i, axes=axes, reduce=reduce),
              x, updates, np.array(rows), np.array(columns), expected=expected, symbolic=symbolic)


def test_half_types_add_up(rng: np.random.Generator) -> None:
    for dtype in ("float16", "bfloat16"):
        x, updates = draw(rng, (4,), dtype), draw(rng, (6,), dtype)
        index = rng.integers(0, 4, 6)
        expected = x.astype(np.float32)
        np.add.at(expected, index, updates.astype(np.float32))
        # the loops round after every addition
        check(op("scatter"), x, index, updates, reduce="add", expected=expected.astype(x.dtype),
              rtol=4e-2 if dtype == "bfloat16" else 5e-3)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("reduce", ["add", "mul"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_are_rounded_once_for_each_place(dtype: str, reduce: str, symbolic: bool,
                                                    rng: np.random.Generator) -> None:
    for shape, axes, count in [((5, 3, 7), (0,), 40), ((2, 3, 300), (1,), 9), ((4,), (0,), 50),
                               ((3, 4, 2), (0, 2), 30), ((3, 5), (1,), 0)]:
        x = draw(rng, shape, dtype, 0.9, 1.1)
        indices = [rng.integers(-shape[a], shape[a] + 2, count) for a in axes]
        updates = draw(rng, op("take_at").infer(  # type: ignore[misc]
            TensorType(shape, float32), *[TensorType((count,), int64)] * len(axes), axes=axes
        ).shape, dtype, 0.9, 1.1)
        together = np.moveaxis(x.astype(np.float64), axes, range(axes[0], axes[0] + len(axes)))
        key = (slice(None),) * axes[0] + tuple(
            clipped(i, shape[a]) for i, a in zip(indices, axes))
        {"add": np.add, "mul": np.multiply}[reduce].at(together, key, updates.astype(np.float64))
        expected = np.moveaxis(together, range(axes[0], axes[0] + len(axes)), axes)
        check(lambda x, u, *i, axes=axes: op("scatter_at")(x, u, *i, axes=axes, reduce=reduce),
              x, updates, *indices, expected=expected.astype(x.dtype), symbolic=symbolic)


def test_scatter_nd_and_gather_nd(rng: np.random.Generator) -> None:
    x = draw(rng, (3, 4, 5))
    index = np.array([[[0, 1], [2, 3]], [[1, 1], [0, 0]]])
    check(op("gather_nd"), x, index, expected=x[index[..., 0], index[..., 1]])
    batched = rng.integers(0, 4, (3, 2, 1))
    check(op("gather_nd"), x, batched, batch_dims=1,
          expected=np.stack([x[b][batched[b, :, 0]] for b in range(3)]))
    updates = draw(rng, (2, 2, 5))
    expected = x.copy()
    expected[index[..., 0], index[..., 1]] = updates
    check(op("scatter_nd"), x, index, updates, expected=expected)


def test_index_update_and_bincount(rng: np.random.Generator) -> None:
    x, updates = draw(rng, (3, 5)), draw(rng, (3, 4))
    index = np.array([1, 3, 1, 0])
    expected = x.copy()
    np.add.at(expected, (slice(None), index), updates)
    check(op("index_update"), x, index, updates, axis=1, reduce="add", expected=expected)
    counted = np.array([0, 3, 3, 7, 1, -1])
    check(op("bincount"), counted, length=5, expected=np.array([1, 1, 0, 2, 0]))


def test_one_hot_and_masked_fill(rng: np.random.Generator) -> None:
    index = np.array([[0, 2], [-1, 5]], np.int32)
    expected = (index[..., None] == np.arange(4)).astype(np.float32)
    check(op("one_hot"), index, num_classes=4, expected=expected)
    check(op("one_hot"), index, num_classes=4, axis=0, dtype="bool",
          expected=np.moveaxis(expected, -1, 0).astype(bool))
    x, mask = draw(rng, (3, 4), "float16"), draw(rng, (3, 1), "bool")
    check(lambda x, mask: op("masked_fill")(x, mask, -1), x, mask,
          expected=np.where(mask, np.float16(-1), x))


@pytest.mark.parametrize("side", ["left", "right"])
def test_searchsorted(side: Any, rng: np.random.Generator) -> None:
    x = np.append(np.sort(draw(rng, (9,), "int32").astype(np.float32)), [np.nan, np.nan])
    values = np.append(x[::2], [-99, 99, 0.5, np.nan]).reshape(2, -1).astype(np.float32)
    x = x.astype(np.float32)
    check(op("searchsorted"), x, values, side=side, expected=np.searchsorted(x, values, side))


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 0)])
def test_nonzero(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    x = draw(rng, shape, "bool")
    found = np.nonzero(x)
    count = np.count_nonzero(x)
    for size in (0, 3, 20):
        kept = min(size, count)
        expected = [np.append(f[:kept], [-7] * (size - kept)).astype(np.int64) for f in found]
        check(op("nonzero"), x, size=size, fill_value=-7, expected=expected)


KEYS: list[Any] = [
    np.s_[1], np.s_[-1], np.s_[1, 2, 3], np.s_[...], np.s_[:, 1], np.s_[..., 0], np.s_[1:, ::2],
    np.s_[::-1], np.s_[5:1:-2, 1:1], np.s_[-2:, None, ..., None], np.s_[None], np.s_[100:, :-100],
    np.s_[np.int64(2)], np.s_[[0, 2, -1]], np.s_[np.array([[0, 1], [2, -1]])],
    np.s_[:, np.array([3, 0])], np.s_[np.array([0, 1]), np.array([2, 3])],
    np.s_[np.array([0, 1]), :, np.array([2, 3])], np.s_[0, :, np.array([2, 3])],
    np.s_[:, 0, np.array([2, 3])], np.s_[:, np.array([1, 2]), 0],
    np.s_[np.array([0]), None, np.array([1])], np.s_[np.array(1), 1:, np.array([[0], [1]])],
    np.s_[None, np.array([1, 2]), None, :, ::-2], np.s_[1, None, np.array([1, 2])],
    np.s_[..., np.array([], np.int64)],
]


@pytest.mark.parametrize("key", KEYS, ids=[str(k).replace("\n", "") for k in KEYS])
def test_getitem(key: Any, rng: np.random.Generator) -> None:
    x = draw(rng, (3, 4, 5))
    check(lambda x: x[key], x, expected=x[key])
    check(lambda x: x[key], x, expected=x[key], symbolic=True)


def test_getitem_with_traced_indices(rng: np.random.Generator) -> None:
    x, i, j = draw(rng, (3, 4, 5)), np.array([2, 0, 1]), np.array(3, np.int32)
    check(lambda x, i, j: x[i, 1:, j], x, i, j, expected=x[i, 1:, j])
    check(lambda x, j: x[:, j], x, j, expected=x[:, j])


@pytest.mark.parametrize("reduce", list(REDUCE_NAMES))
def test_gradient_of_scatter(reduce: str, rng: np.random.Generator) -> None:
    x, updates = draw(rng, (4, 3), "float64", 0.5, 3), draw(rng, (3, 3), "float64", 0.5, 3)
    index = np.array([[0, 1, 2], [3, 0, 1], [1, 2, 0]])  # distinct in each column
    if reduce != "set":
        index[2] = index[0]
    check_gradient(lambda x, u: op("scatter")(x, index, u, reduce=reduce), x, updates, wrt=(0, 1))
    rows = np.array([0, 2, 3]) if reduce == "set" else np.array([0, 2, 2])
    check_gradient(lambda x, u: op("index_update")(x, rows, u, reduce=reduce), x, updates,
                   wrt=(0, 1))


def test_gradients(rng: np.random.Generator) -> None:
    x = draw(rng, (3, 4), "float64")
    index = np.array([[0, 2, 2], [-1, 1, 9]])
    check_gradient(lambda x: op("take")(x, index, axis=1), x)
    check_gradient(lambda x: op("gather")(x, index, axis=0), x)
    check_gradient(lambda x: x[np.array([0, 0, 1]), 1:], x)
    check_gradient(lambda x: op("masked_fill")(x, x > 0, 2.0), x)


def test_gradient_of_a_half_table_adds_in_float32() -> None:
    index = np.zeros(4096, np.int64)
    graph, _ = trace(lambda t: op("sum")(op("embedding")(t, index).astype("float32")),
                     [TensorType((2, 1), float16)])
    (got,) = run(grad_graph(graph), [np.ones((2, 1), np.float16)])
    close(got, np.array([[4096], [0]], np.float16))


@pytest.mark.parametrize("count", [4096, 3])
def test_compiled_gradient_of_a_half_table_is_rounded_once(count: int, rng: np.random.Generator
                                                           ) -> None:
    table = draw(rng, (50, 40), "bfloat16")
    rows, weight = rng.integers(0, 9, count), draw(rng, (count, 40), "bfloat16", 0.5, 1)
    expected = np.zeros(table.shape)
    np.add.at(expected, rows, weight.astype(np.float64))

    @tz.op
    def weighted(table: Any, rows: Any, weight: Any) -> Any:
        return tz.sum(tz.astype(tz.take(table, rows, axis=0) * weight, dtype="float32"))

    got = tz.grad(weighted)(table, rows, weight)
    close(got, expected, rtol=2.0**-8, atol=0)


def test_index_put_as_torch(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    x, i, u = draw(rng, (4, 3)), np.array([0, 2, 0]), draw(rng, (3, 3))
    expected = from_torch(to_torch(x).index_put((torch.from_numpy(i),), to_torch(u), True))
    check(lambda x, u, i: op("scatter_at")(x, u, i, axes=(0,), reduce="add"), x, u, i,
          expected=expected)


X, I, MASK = (Value(TensorType((3, 4), t)) for t in (float32, int64, bool_))
ERRORS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: X[MASK], DTypeError, "tz.where"),
    (lambda: X[True], DTypeError, "no indices"),
    (lambda: X[5], IndexOutOfRange, "outside axis 0"),
    (lambda: X[0, 0, 0], RankError, "3 indices"),
    (lambda: X[..., 0, ...], RankError, "more than one"),
    (lambda: X["a"], DTypeError, "no index"),
    (lambda: X[::0], ArgumentError, "step"),
    (lambda: op("take")(X, X, axis=0), DTypeError, "integer indices"),
    (lambda: op("take")(X[:0], I, axis=0), IndexOutOfRange, "no element"),
    (lambda: op("gather")(X, I[0], axis=0), RankError, "as many axes"),
    (lambda: op("gather")(X[:, :2], I, axis=0), ShapeError, "longer"),
    (lambda: op("scatter")(X, I, X[:1]), ShapeError, "must be equal"),
    (lambda: op("scatter")(X, I, X, reduce="avg"), ArgumentError, "no reduce"),
    (lambda: op("scatter_at")(X, X, I[0], axes=(0,)), ShapeError, "needs updates"),
    (lambda: op("nonzero")(X), TracedControlFlow, "size="),
    (lambda: op("searchsorted")(X, X), ArgumentError, "vector"),
]


@pytest.mark.parametrize(("function", "error", "text"), ERRORS, ids=[row[2] for row in ERRORS])
def test_errors(function: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        function()


def test_scatter_into_nothing() -> None:
    x = np.ones((4, 0, 3), np.float32)
    gradient = tz.grad(lambda x: tz.sum(tz.cummin(x, axis=2)))
    assert gradient(x).shape == x.shape


EDGES = """
import sys
import numpy as np
import terrazzo as tz
sys.path.insert(0, {tests!r})
from page_edges import PageEdges

def shifted(x, i): return tz.take(tz.pad(x, ((3, 4),)), i)
def rows(x, i): return tz.take(tz.pad(x.reshape((-1, 4)), ((2, 1), (1, 2))), i, axis=0) * 2
def joined(x, i): return tz.take(tz.concat([x, tz.exp(x), x]), i)
def along(x, i): return tz.take_along_axis(tz.pad(x, ((2, 2),)), i, axis=0)

places, rng = PageEdges(), np.random.default_rng(0)
for function in (shifted, rows, joined, along):
    for n in (8, 12, 16):  # from the second on sizes vary
        x = rng.standard_normal(n).astype(np.float32)
        size = function.__name__ == "rows" and n // 4 + 3 or n + 4
        i = np.arange(-size, size)
        want = function(x, i)
        for begin in (False, True):
            got = tz.jit(function)(places.copy(0, x, begin=begin), i)
            np.testing.assert_allclose(got, want, rtol=1e-6)
print("all read within")
"""


def test_computed_indices_of_what_is_padded_or_joined_stay_within() -> None:
    """Where a condition decides whether an element is read, its index may be anywhere."""
    tests = str(Path(__file__).parents[1])
    ran = subprocess.run([sys.executable, "-c", EDGES.format(tests=tests)], capture_output=True,
                         text=True, timeout=300)
    assert ran.returncode == 0 and "all read within" in ran.stdout, ran.stderr


def test_subscripts_by_lists_of_lists() -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    for key in (([[0], [1]], [2, 3]), ([], slice(None)), ([0, -1],), ([[0, 1], [2, 0]],),
                (slice(None), [[1]]), (np.array([], np.int64),)):
        indexed = tz.op(lambda x, *, key: x[key], name="test_lists")
        np.testing.assert_array_equal(indexed(x, key=key), x[key])
    with pytest.raises(DTypeError, match="mask"):
        tz.op(lambda x: x[[True, False, True]], name="test_lists")(x)
