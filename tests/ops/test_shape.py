"""Operators that move elements: against numpy, at every level, with known and symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from checking import check, check_gradient, draw, op

import terrazzo as tz
from terrazzo.base.shapes import dims
from terrazzo.dtypes import float32
from terrazzo.errors import (
    ArgumentError,
    AxisError,
    IndexOutOfRange,
    RankError,
    ShapeError,
)
from terrazzo.expr.ir import compute, placeholder
from terrazzo.graph.ir import TensorType, Value
from terrazzo.ops.shape import matching_groups

# operator, shape of x, attributes, numpy's answer
CASES: list[tuple[str, tuple[int, ...], dict[str, Any], Callable[[np.ndarray], Any]]] = [
    ("reshape", (2, 3, 4), {"shape": (4, -1)}, lambda x: x.reshape(4, 6)),
    ("reshape", (6, 1, 5), {"shape": (2, 3, 5)}, lambda x: x.reshape(2, 3, 5)),
    ("reshape", (3, 4), {"shape": -1}, lambda x: x.reshape(-1)),
    ("reshape", (), {"shape": (1, 1)}, lambda x: x.reshape(1, 1)),
    ("reshape", (1, 1), {"shape": ()}, lambda x: x.reshape(())),
    ("reshape", (0, 3), {"shape": (3, 0, 2)}, lambda x: x.reshape(3, 0, 2)),
    ("reshape", (5, 7), {"shape": (7, 5)}, lambda x: x.reshape(7, 5)),
    ("flatten", (2, 3, 4), {"start_axis": 1}, lambda x: x.reshape(2, 12)),
    ("flatten", (), {}, lambda x: x.reshape(1)),
    ("expand_dims", (3, 4), {"axis": (0, -1)}, lambda x: np.expand_dims(x, (0, -1))),
    ("squeeze", (1, 3, 1), {"axis": -1}, lambda x: np.squeeze(x, -1)),
    ("squeeze", (1, 3, 1), {}, np.squeeze),
    ("permute_dims", (2, 3, 4), {"axes": (2, 0, -2)}, lambda x: np.transpose(x, (2, 0, 1))),
    ("permute_dims", (), {"axes": ()}, lambda x: x),
    ("transpose", (2, 3, 4), {}, np.transpose),
    ("swapaxes", (2, 3, 4), {"axis1": 0, "axis2": -1}, lambda x: np.swapaxes(x, 0, -1)),
    ("moveaxis", (2, 3, 4, 5), {"source": (0, 2), "destination": (-1, 0)},
     lambda x: np.moveaxis(x, (0, 2), (-1, 0))),
    ("matrix_transpose", (2, 3, 5), {}, lambda x: np.swapaxes(x, -1, -2)),
    ("broadcast_to", (3, 1), {"shape": (2, 3, 5)}, lambda x: np.broadcast_to(x, (2, 3, 5))),
    ("broadcast_to", (), {"shape": (2, 0)}, lambda x: np.broadcast_to(x, (2, 0))),
    ("broadcast_to", (1, 3), {"shape": (0, 3)}, lambda x: np.broadcast_to(x, (0, 3))),
    ("slice", (7, 5), {"starts": (1, 4), "stops": (6, -1), "steps": (2, -3)},
     lambda x: x[1:6:2, 4::-3]),
    ("slice", (7,), {"starts": (3,), "stops": (3,), "steps": (1,)}, lambda x: x[3:3]),
    ("place", (2, 3), {"shape": (7, 5), "starts": (1, 4), "steps": (2, -2), "value": 9},
     lambda x: _placed(x, (7, 5), np.s_[1:5:2, 4::-2], 9)),
    ("place", (0, 3), {"shape": (2, 3), "starts": (0, 0), "steps": (1, 1)},
     lambda x: np.zeros((2, 3), x.dtype)),
    ("split", (6, 4), {"indices_or_sections": 3}, lambda x: np.split(x, 3)),
    ("split", (6, 5), {"indices_or_sections": (1, -1), "axis": 1},
     lambda x: np.split(x, (1, -1), 1)),
    ("split", (6, 5), {"indices_or_sections": 1, "axis": -1}, lambda x: [x]),
    ("unstack", (3, 4), {"axis": -1}, lambda x: list(np.moveaxis(x, -1, 0))),
    ("unstack", (1, 4), {}, lambda x: [x[0]]),
    ("pad", (3, 4), {"pad_width": ((1, 2), (0, 3)), "value": 7},
     lambda x: np.pad(x, ((1, 2), (0, 3)), constant_values=7)),
    ("pad", (5, 4), {"pad_width": ((-1, 2), (0, -3))},
     lambda x: np.pad(x[1:, :1], ((0, 2), (0, 0)))),
    ("pad", (0, 2), {"pad_width": 1}, lambda x: np.pad(x, 1)),
    ("pad", (3, 4), {"pad_width": (2, 1), "mode": "reflect"},
     lambda x: np.pad(x, (2, 1), mode="reflect")),
    ("pad", (3, 4), {"pad_width": ((3, 0), (1, 4)), "mode": "symmetric"},
     lambda x: np.pad(x, ((3, 0), (1, 4)), mode="symmetric")),
    ("pad", (3, 4), {"pad_width": 5, "mode": "edge"}, lambda x: np.pad(x, 5, mode="edge")),
    ("pad", (3, 4), {"pad_width": ((3, 1), (0, 2)), "mode": "wrap"},
     lambda x: np.pad(x, ((3, 1), (0, 2)), mode="wrap")),
    ("flip", (3, 4), {"axis": -1}, lambda x: np.flip(x, -1)),
    ("flip", (3, 0, 4), {}, np.flip),
    ("roll", (5, 3), {"shift": 2, "axis": 0}, lambda x: np.roll(x, 2, 0)),
    ("roll", (5, 3), {"shift": (-7, 1), "axis": (0, 1)}, lambda x: np.roll(x, (-7, 1), (0, 1))),
    ("roll", (5, 3), {"shift": 4}, lambda x: np.roll(x, 4)),
    ("tile", (2, 3), {"repetitions": (2, 1, 3)}, lambda x: np.tile(x, (2, 1, 3))),
    ("tile", (2, 3), {"repetitions": 2}, lambda x: np.tile(x, 2)),
    ("repeat", (2, 3), {"repeats": 3, "axis": 1}, lambda x: np.repeat(x, 3, 1)),
    ("repeat", (2, 3), {"repeats": 2}, lambda x: np.repeat(x, 2)),
    ("tril", (2, 4, 5), {"k": 1}, lambda x: np.tril(x, 1)),
    ("triu", (5, 4), {"k": -1}, lambda x: np.triu(x, -1)),
    ("sliding_window", (3, 2), {"size": 4}, lambda x: np.empty((3, 0, 4), x.dtype)),
    ("sliding_window", (3, 9), {"size": 4, "step": 2},
     lambda x: np.lib.stride_tricks.sliding_window_view(x, 4, -1)[:, ::2]),
]
KNOWN_ONLY = [  # lengths of diagonals and of lists of counts must be known
    ("repeat", (3, 2), {"repeats": (2, 0, 1), "axis": 0}, lambda x: np.repeat(x, (2, 0, 1), 0)),
    ("diagonal", (4, 5), {"offset": 2}, lambda x: np.diagonal(x, 2)),
    ("diagonal", (3, 4, 5), {"offset": -1, "axis1": 2, "axis2": 0},
     lambda x: np.diagonal(x, -1, 2, 0)),
    ("diagonal", (2, 3), {"offset": 5}, lambda x: np.diagonal(x, 5)),
    ("diag", (4, 5), {"k": -3}, lambda x: np.diag(x, -3)),
    ("diag", (3,), {"k": -2}, lambda x: np.diag(x, -2)),
    ("diag", (3,), {"k": 1}, lambda x: np.diag(x, 1)),
]
# The attributes of these are numbers that fit the known sizes above.
ANY_SIZE = [row for row in CASES if row[0] not in {
    "reshape", "broadcast_to", "slice", "place", "split", "unstack"}]


def _placed(x: np.ndarray, shape: tuple[int, ...], where: Any, value: Any) -> np.ndarray:
    result = np.full(shape, value, x.dtype)
    result[where] = x
    return result


def _ids(cases: list[Any]) -> list[str]:
    return [f"{name}-{shape}-{attrs}" for name, shape, attrs, _ in cases]


@pytest.mark.parametrize(("name", "shape", "attrs", "numpy"), CASES + KNOWN_ONLY,
                         ids=_ids(CASES + KNOWN_ONLY))
def test_against_numpy(name: str, shape: tuple[int, ...], attrs: dict[str, Any],
                       numpy: Callable[..., Any], rng: np.random.Generator) -> None:
    x = draw(rng, shape, "float32")
    check(op(name), x, expected=numpy(x), **attrs)


@pytest.mark.parametrize(("name", "shape", "attrs", "numpy"), ANY_SIZE, ids=_ids(ANY_SIZE))
def test_symbolic_sizes(name: str, shape: tuple[int, ...], attrs: dict[str, Any],
                        numpy: Callable[..., Any], rng: np.random.Generator) -> None:
    x = draw(rng, shape, "int32")
    check(op(name), x, expected=numpy(x), symbolic=True, **attrs)


n, m = dims("n3 n5")  # the names that symbolic_shapes gives to sizes 3 and 5
SYMBOLIC: list[tuple[str, tuple[int, ...], Callable[[Value], Any], Callable[..., Any]]] = [
    ("merge", (3, 5, 2), lambda x: op("reshape")(x, shape=(n, -1)), lambda x: x.reshape(3, 10)),
    ("merge all", (3, 5), lambda x: op("reshape")(x, shape=-1), lambda x: x.reshape(15)),
    ("swap", (3, 5), lambda x: op("reshape")(x, shape=(m, n)), lambda x: x.reshape(5, 3)),
    ("split heads", (3, 5), lambda x: op("reshape")(op("tile")(x, repetitions=(1, 4)),
                                                    shape=(n, 4, -1)),
     lambda x: np.tile(x, (1, 4)).reshape(3, 4, 5)),
    ("broadcast", (5,), lambda x: op("broadcast_to")(x, shape=(2, m)),
     lambda x: np.broadcast_to(x, (2, 5))),
    ("slice", (3, 5), lambda x: op("slice")(x, starts=(1, 0), stops=(n, 2), steps=(1, 1)),
     lambda x: x[1:, :2]),
    ("cut", (3, 5), lambda x: x[1:, -2:], lambda x: x[1:, -2:]),
    ("beyond the end", (3, 5), lambda x: x[:100, -100:3], lambda x: x[:100, -100:3]),
    ("backwards", (3, 5), lambda x: x[::-1, 3:0:-2], lambda x: x[::-1, 3:0:-2]),
    ("last", (3, 5), lambda x: x[-1, 0], lambda x: x[-1, 0]),
    ("concat", (3, 5), lambda x: op("concat")(x, x[:2], x[::-1], axis=0),
     lambda x: np.concatenate([x, x[:2], x[::-1]])),
    ("pad to even", (3, 5), lambda x: op("pad")(x, pad_width=((0, n), (m, 0))),
     lambda x: np.pad(x, ((0, 3), (5, 0)))),
    ("neighbours", (3, 5), lambda x: x[:, 1:] - x[:, :-1], lambda x: x[:, 1:] - x[:, :-1]),
]


@pytest.mark.parametrize(("name", "shape", "function", "numpy"), SYMBOLIC,
                         ids=[row[0] for row in SYMBOLIC])
def test_symbolic_shapes_as_attributes(name: str, shape: tuple[int, ...],
                                       function: Callable[[Value], Any],
                                       numpy: Callable[..., Any],
                                       rng: np.random.Generator) -> None:
    x = draw(rng, shape)
    check(function, x, expected=numpy(x), symbolic=True)


@pytest.mark.parametrize("shapes", [[(3, 2), (1, 2), (0, 2), (4, 2)], [(2, 2)], [(0, 2), (0, 2)]])
@pytest.mark.parametrize("symbolic", [False, True])
def test_concat(shapes: list[tuple[int, ...]], symbolic: bool, rng: np.random.Generator) -> None:
    xs = [draw(rng, s) for s in shapes]
    check(lambda *a: op("concat")(*a, axis=0), *xs, expected=np.concatenate(xs), symbolic=symbolic)
    ts = [np.ascontiguousarray(x.T) for x in xs]
    check(lambda *a: op("concat")(list(a), axis=-1), *ts, expected=np.concatenate(ts, -1),
          symbolic=symbolic)


def test_concat_promotes(rng: np.random.Generator) -> None:
    a, b = draw(rng, (2, 3), "int32"), draw(rng, (1, 3), "float16")
    check(op("concat"), a, b, expected=np.concatenate([a.astype(np.float16), b]))


def test_stack_meshgrid_eye(rng: np.random.Generator) -> None:
    a, b = draw(rng, (3, 4)), draw(rng, (3, 4))
    for axis in (0, 1, -1):
        check(lambda *xs, axis=axis: op("stack")(*xs, axis=axis), a, b,
              expected=np.stack([a, b], axis))
    u, v, w = draw(rng, (2,)), draw(rng, (3,)), draw(rng, (4,))
    for indexing in ("xy", "ij"):
        check(lambda *xs, i=indexing: op("meshgrid")(*xs, indexing=i), u, v, w,
              expected=np.meshgrid(u, v, w, indexing=indexing))
    check(lambda: op("eye")(3, 5, k=-1, dtype="int32"), expected=np.eye(3, 5, -1, np.int32))
    check(lambda: op("eye")(n_rows=2), expected=np.eye(2, dtype=np.float32))


def test_every_type(rng: np.random.Generator) -> None:
    for dtype in ("bool", "int8", "uint64", "float64", "float16", "bfloat16"):
        x = draw(rng, (3, 5), dtype)
        check(lambda x: op("pad")(op("flip")(x, axis=1), pad_width=1), x,
              expected=np.pad(x[:, ::-1], 1))


@pytest.mark.parametrize(("name", "shape", "attrs"), [
    ("reshape", (2, 6), {"shape": (3, 4)}), ("permute_dims", (2, 3, 2), {"axes": (1, 2, 0)}),
    ("broadcast_to", (2, 1), {"shape": (3, 2, 2)}), ("flip", (2, 3), {"axis": 1}),
    ("slice", (5, 4), {"starts": (0, 3), "stops": (5, -1), "steps": (2, -2)}),
    ("place", (2, 2), {"shape": (5, 4), "starts": (1, 3), "steps": (3, -2)}),
    ("pad", (3, 3), {"pad_width": (2, 1), "mode": "reflect"}),
    ("pad", (3, 3), {"pad_width": (-1, 2)}), ("roll", (4, 2), {"shift": 1, "axis": 0}),
    ("tril", (3, 3), {}), ("diagonal", (3, 4), {"offset": 1}), ("diag", (3,), {"k": 1}),
    ("tile", (2, 2), {"repetitions": 2}), ("repeat", (2, 2), {"repeats": 2, "axis": 0}),
    ("sliding_window", (6,), {"size": 3}),
])  # fmt: skip
def test_gradients(name: str, shape: tuple[int, ...], attrs: dict[str, Any],
                   rng: np.random.Generator) -> None:
    check_gradient(op(name), draw(rng, shape, "float64"), **attrs)


def test_gradient_of_concat_and_split(rng: np.random.Generator) -> None:
    a, b = draw(rng, (2, 3), "float64"), draw(rng, (2, 2), "float64")
    check_gradient(lambda x, y: op("concat")(x, y, x, axis=1), a, b, wrt=(0, 1))
    check_gradient(lambda x: op("split")(x, indices_or_sections=(1,), axis=1)[1] * 2.0, a)


def test_reshapes_that_undo_each_other_need_no_division() -> None:
    size, width = dims("size width")
    x = placeholder((size, width, 8), name="x")
    merged = TensorType((size, width * 8), float32)
    flat = op("reshape").expr(x, shape=merged.shape, out=merged)  # type: ignore[misc]
    assert str(flat.body) == "x[i, j // 8, j % 8]"
    assert matching_groups((size, 4, 8), (size, 32)) == [
        (range(0, 1), range(0, 1)), (range(1, 3), range(1, 2))]
    assert str(compute((2,), lambda i: x[0, 0, i]).body) == "x[0, 0, i]"


ERRORS: list[tuple[Callable[[Value], Any], type[Exception], str]] = [
    (lambda x: op("reshape")(x, shape=(5, -1)), ShapeError, "number of elements"),
    (lambda x: op("reshape")(x, shape=(-1, -1)), ShapeError, "at most one"),
    (lambda x: op("permute_dims")(x, axes=(0, 0)), AxisError, "not an order"),
    (lambda x: op("broadcast_to")(x, shape=(3,)), ShapeError, "broadcast"),
    (lambda x: op("concat")(x, x[:, :1], axis=0), ShapeError, "every other axis"),
    (lambda x: op("stack")(x, x[:1]), ShapeError, "must be equal"),
    (lambda x: op("squeeze")(x, axis=0), ShapeError, "not 1"),
    (lambda x: op("split")(x, indices_or_sections=2), ShapeError, "equal parts"),
    (lambda x: op("pad")(x, pad_width=9, mode="reflect"), ShapeError, "wider"),
    (lambda x: op("pad")(x, pad_width=1, mode="odd"), ArgumentError, "no mode"),
    (lambda x: op("pad")(x, pad_width=((1, 1),) * 3), ArgumentError, "does not fit"),
    (lambda x: op("slice")(x, starts=(0, 0), stops=(9, 1), steps=(1, 1)), IndexOutOfRange,
     "outside"),
    (lambda x: op("tril")(x[0]), RankError, "at least 2"),
    (lambda x: op("flip")(x, axis=2), AxisError, "does not exist"),
]


@pytest.mark.parametrize(("function", "error", "text"), ERRORS, ids=[row[2] for row in ERRORS])
def test_errors(function: Callable[[Value], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        function(Value(TensorType((3, 4), float32)))


@pytest.mark.parametrize("size", [0, 1, 3])
def test_as_many_slices_as_there_are(size: int) -> None:
    x = np.arange(2.0 * size, dtype=np.float32).reshape(2, size)
    slices = tz.unstack(x, axis=1)
    assert isinstance(slices, tuple) and len(slices) == size
    assert len(tz.jit(lambda x: tz.unstack(x, axis=1))(x)) == size
    assert tz.jit(lambda x: len(tz.unstack(x, axis=1)) * tz.ones_like(x))(x).shape == x.shape
    assert len(tz.split(x, (), axis=1)) == 1
