"""Scatters for GPUs: numbers through our Triton backend, and code for sm_90."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
import terrazzo.ops  # fills the table of operators
from terrazzo.graph.ir import TensorType, operator_named
from terrazzo.index import Var

pytest.importorskip("triton")
torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.triton, pytest.mark.torch]

sys.path[:0] = [str(Path(__file__).parent)]

from cuda_whole import (  # noqa: E402
    chip,
    interpreted,
    interpreter,  # noqa: F401
    launched,  # noqa: F401
    slow,
    whole_program,
    with_wide_addresses,  # noqa: F401
)

HOW = ["set", "add", "max", "min"]
TYPES = ["bfloat16", "float64", "int32", *map(slow, (
    "float16", "float32", "bool", "int8", "uint8", "int16", "uint32", "int64", "uint64"))]
scatter, scatter_at = map(operator_named, ("scatter", "scatter_at"))


def numbers(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> np.ndarray:
    wide = 9 * np.random.default_rng(seed).standard_normal(shape)
    if dtype == "bool":
        return wide > 0
    return wide.astype(tz.dtypes.as_dtype(dtype).np)


def indices(shape: tuple[int, ...], n: int, seed: int = 1) -> np.ndarray:
    """Indices of which several meet, some count from the end, and some are outside."""
    return np.random.default_rng(seed).integers(-n - 3, n + 3, shape)


def by_definition(function: Any, *arrays: np.ndarray, **attrs: Any) -> np.ndarray:
    """What numpy makes of it, in the wide type of the definition."""
    x = arrays[0]
    with np.errstate(invalid="ignore"):
        return np.asarray(function.reference(*arrays, **attrs, out=TensorType(
            x.shape, tz.dtypes.as_dtype(x.dtype))))


def check(function: Any, *arrays: np.ndarray, **attrs: Any) -> None:
    got = tz.jit(lambda *given: function(*given, **attrs))(*arrays)
    want = by_definition(function, *arrays, **attrs)
    assert got.dtype == want.dtype and got.shape == want.shape
    slack = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-5}.get(got.dtype.name, 1e-12)
    if attrs["reduce"] == "add" and got.dtype.kind not in "iub":  # in no fixed order
        np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=slack,
                                   atol=30 * slack)
    else:
        wide = got.dtype if got.dtype.kind in "iub" else np.float64
        np.testing.assert_array_equal(got.astype(wide), want.astype(wide))


@pytest.mark.parametrize("reduce", HOW)
@pytest.mark.parametrize(("shape", "axis", "where"), [
    ((10, 6), 0, (7, 5)), slow((3, 50, 4), 1, (3, 90, 4)), ((5, 40), 1, (2, 2000)),
    slow((1,), 0, (9,))])
def test_by_element(launched: list[str], reduce: str, shape: tuple[int, ...],  # noqa: F811
                    axis: int, where: tuple[int, ...]) -> None:
    check(scatter, numbers(shape), indices(where, shape[axis]), numbers(where, seed=2), axis=axis,
          reduce=reduce)
    assert launched


# The shape, the axes that are indexed, the shapes of the indices, and that of the updates.
PLACES = [((20, 6), (0,), [(50,)], (50, 6)), slow((3, 7, 5), (1,), [(4, 9)], (3, 4, 9, 5)),
          ((6, 7, 5), (0, 1), [(8, 1), (3,)], (8, 3, 5)),
          slow((6, 3, 7), (0, 2), [(11,), (11,)], (11, 3)), slow((4, 5), (1,), [()], (4,)),
          ((9,), (0,), [()], ())]


@pytest.mark.parametrize("reduce", HOW)
@pytest.mark.parametrize(("shape", "axes", "where", "updates"), PLACES)
def test_by_axes(launched: list[str], reduce: str, shape: tuple[int, ...],  # noqa: F811
                 axes: tuple[int, ...], where: list[tuple[int, ...]], updates: tuple[int, ...]
                 ) -> None:
    chosen = [indices(s, shape[a], seed=a) for s, a in zip(where, axes, strict=True)]
    check(scatter_at, numbers(shape), numbers(updates, seed=2), *chosen, axes=axes, reduce=reduce)
    assert launched


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("reduce", HOW)
def test_types(launched: list[str], dtype: str, reduce: str) -> None:  # noqa: F811
    index = indices((40,), 12).astype("int32")
    check(scatter_at, numbers((12, 3), dtype), numbers((40, 3), dtype, 2), index, axes=(0,),
          reduce=reduce)
    assert launched


@pytest.mark.parametrize("kind", ["int8", "uint8", "uint64"])
def test_types_of_indices(launched: list[str], kind: str) -> None:  # noqa: F811
    index = np.arange(8).astype(kind)
    index[3] = min(np.iinfo(kind).max, 1 << 40)
    check(scatter_at, numbers((5,)), numbers((8,), seed=2), index, axes=(0,), reduce="set")
    assert launched


def test_the_last_update_wins(launched: list[str]) -> None:  # noqa: F811
    steps = np.arange(20_000, dtype=np.float32)
    got = scatter_at(np.zeros(7, np.float32), steps, np.arange(20_000) % 7, axes=(0,),
                     reduce="set")
    np.testing.assert_array_equal(got, [19_999 - (19_999 - i) % 7 for i in range(7)])
    assert launched == ["k_scatter_at_last", "k_scatter_at_updates", "k_scatter_at"]


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("dtype", ["float32", slow("float64"), slow("bfloat16")])
def test_nan_and_infinities(launched: list[str], reduce: str, dtype: str) -> None:  # noqa: F811
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, 1.0, -1.0]).astype(
        tz.dtypes.as_dtype(dtype).np)
    x = np.zeros(7, special.dtype)
    check(scatter_at, x, special, np.arange(7), axes=(0,), reduce=reduce)
    check(scatter_at, special, x - special, np.arange(7), axes=(0,), reduce=reduce)
    check(scatter_at, -special, special, np.arange(7) % 3, axes=(0,), reduce=reduce)
    assert launched


@pytest.mark.parametrize("reduce", HOW)
def test_nothing_to_update(launched: list[str], reduce: str) -> None:  # noqa: F811
    x = numbers((4, 3))
    check(scatter_at, x, numbers((0, 3)), np.zeros(0, np.int64), axes=(0,), reduce=reduce)
    check(scatter, x, np.zeros((0, 3), np.int64), numbers((0, 3)), axis=0, reduce=reduce)
    empty = scatter_at(numbers((4, 0)), numbers((5, 0)), np.zeros(5, np.int64), axes=(0,),
                       reduce=reduce)
    assert empty.shape == (4, 0) and launched


def test_sizes_that_vary(launched: list[str]) -> None:  # noqa: F811
    with tz.knobs.override(dynamic="always"):
        functions = {how: tz.jit(lambda x, u, i, how=how: scatter_at(x, u, i, axes=(1,),
                                                                     reduce=how)) for how in HOW}
        for rows, n, steps, width in ((3, 5, 7, 2), (16, 32, 48, 16), (2, 300, 90, 33)):
            x, u = numbers((rows, n, width)), numbers((rows, steps, width), seed=2)
            index = indices((steps,), n)
            for how, function in functions.items():
                want = by_definition(scatter_at, x, u, index, axes=(1,), reduce=how)
                np.testing.assert_allclose(function(x, u, index), want, rtol=1e-4, atol=1e-4)
    assert launched


def test_products_run_on_the_cpu() -> None:
    program = whole_program(lambda x, i, u: scatter(x, i, u, axis=0, reduce="mul"), numbers((4,)),
                            indices((5,), 4), numbers((5,)))
    assert "no GPU multiplies in memory" in chip().source("triton", program)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradient_of_an_embedding(launched: list[str], dtype: str) -> None:  # noqa: F811
    index = torch.from_numpy(indices((4, 30), 9)).clamp(0, 8)
    table = torch.from_numpy(numbers((9, 16))).to(getattr(torch, dtype))
    weights = torch.from_numpy(numbers((4, 30, 16), seed=3)).to(table.dtype)
    mine, true = table.clone().requires_grad_(), table.double().requires_grad_()
    tz.take(mine, index, axis=0).backward(weights)
    torch.nn.functional.embedding(index, true).backward(weights.double())
    slack = 1e-5 if dtype == "float32" else 8e-3
    torch.testing.assert_close(mine.grad.double(), true.grad, rtol=slack, atol=30 * slack)
    assert "k_scatter_at_updates" in launched


def test_gradient_of_a_running_maximum(launched: list[str]) -> None:  # noqa: F811
    x = torch.from_numpy(numbers((5, 60)))
    mine, true = x.clone().requires_grad_(), x.double().requires_grad_()
    weights = torch.from_numpy(numbers((5, 60), seed=3))
    tz.cummax(mine, axis=1).backward(weights)
    torch.cummax(true, dim=1).values.backward(weights.double())
    torch.testing.assert_close(mine.grad.double(), true.grad, rtol=1e-5, atol=1e-4)
    assert any("scatter" in name for name in launched)


@pytest.mark.parametrize("reduce", ["set", "add", slow("max"), slow("min")])
def test_tritons_interpreter(interpreter: Any, reduce: str) -> None:  # noqa: F811
    x, u, index = numbers((12, 3)), numbers((40, 3), seed=2), indices((40,), 12)
    program = whole_program(lambda x, u, i: scatter_at(x, u, i, axes=(0,), reduce=reduce), x, u,
                            index)
    (got,) = interpreted(interpreter, program, [x, u, index])
    want = by_definition(scatter_at, x, u, index, axes=(0,), reduce=reduce)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("reduce", HOW)
@pytest.mark.parametrize("dtype", ["bfloat16", *map(slow, ("float32", "float64", "uint8",
                                                           "uint64"))])
def test_code_for_hopper(reduce: str, dtype: str) -> None:
    program = whole_program(lambda x, i, u: scatter(x, i, u, axis=1, reduce=reduce),
                            numbers((64, 50), dtype), indices((64, 30), 50),
                            numbers((64, 30), dtype))
    assert ".target sm_90" in chip().source("ptx", program)


def test_wide_addresses(launched: list[str], with_wide_addresses: None  # noqa: F811
                        ) -> None:
    x, u, index = numbers((12, 3)), numbers((40, 3), seed=2), indices((40,), 12)
    for reduce in HOW:
        check(scatter_at, x, u, index, axes=(0,), reduce=reduce)
        check(scatter, x, index[:36].reshape(12, 3), u[:12], axis=0, reduce=reduce)
    assert launched


@pytest.mark.slow
@pytest.mark.parametrize("reduce", HOW)
@pytest.mark.parametrize("rows", [3_000_000, Var("n", 2)])
def test_code_for_large_and_varying_sizes(reduce: str, rows: Any) -> None:
    program = whole_program(lambda x, u, i: scatter_at(x, u, i, axes=(0,), reduce=reduce),
                            TensorType((rows, 1000), tz.bfloat16),
                            TensorType((rows, 1000), tz.bfloat16), TensorType((rows,), tz.int64))
    assert ".target sm_90" in chip().source("ptx", program)
