"""Running combinations for GPUs: numbers through our Triton backend, and code for sm_90."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.chips.cuda.description import h200
from terrazzo.chips.cuda.forms import form_of
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

NUMPY = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}
ROWS, COLUMNS = Var("n", 2), Var("m", 2)
IDENTITY = {"add": 0, "mul": 1, "max": -np.inf, "min": np.inf}


def expected(x: np.ndarray, op: str, axis: int, exclusive: bool = False, reverse: bool = False
             ) -> np.ndarray:
    """The definition, in float64 where numbers are floats."""
    wide = np.flip(x, axis) if reverse else x
    if x.dtype.kind not in "iu":
        wide = wide.astype(np.float64)
    y = NUMPY[op].accumulate(wide, axis=axis, dtype=wide.dtype)
    if exclusive:
        y = np.roll(y, 1, axis)
        y[(slice(None),) * axis + (0,)] = IDENTITY[op]
    return np.flip(y, axis) if reverse else y


def numbers(shape: tuple[int, ...], op: str = "add", seed: int = 0) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return np.exp(x / 100) if op == "mul" else x


def running(x: Any, op: str, axis: int, **options: Any) -> Any:
    return operator_named("cumulative")(x, op=op, axis=axis, **options)


# Short rows, one block, a loop, columns, columns of several outer axes, single elements; and how
# many kernels there are: long lines that are few are cut into parts.
SHAPES = [((33, 7), 1, 1), ((3, 1000), 1, 1), ((2, 5000), 1, 1), ((100, 70), 0, 1),
          ((3, 200, 5), 1, 1), ((2, 3, 4, 5), 0, 1), ((1, 1), 0, 1), ((1,), 0, 1),
          ((1, 40_000), 1, 3), ((2, 5_001, 3), 1, 3)]


@pytest.mark.parametrize(("exclusive", "reverse"), [(False, False), slow(True, False),
                                                    slow(False, True), (True, True)])
@pytest.mark.parametrize(("shape", "axis", "count"), SHAPES)
def test_sums(launched: list[str], shape: tuple[int, ...], axis: int, count: int,  # noqa: F811
              exclusive: bool, reverse: bool) -> None:
    x = numbers(shape)
    got = tz.cumsum(x, axis=axis, exclusive=exclusive, reverse=reverse)
    want = expected(x, "add", axis, exclusive, reverse)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max() + 1e-6)
    assert len(launched) == count


@pytest.mark.parametrize("op", ["mul", "max", "min"])
@pytest.mark.parametrize(("shape", "axis"), [((33, 7), 1), slow((2, 9000), 1),
                                             slow((100, 70), 0), ((1, 40_000), 1)])
def test_other_operations(launched: list[str], op: str, shape: tuple[int, ...],  # noqa: F811
                          axis: int) -> None:
    x = numbers(shape, op)
    for options in ({}, {"exclusive": True, "reverse": True}):
        np.testing.assert_allclose(running(x, op, axis, **options),
                                   expected(x, op, axis, **options), rtol=1e-5)
    assert launched


@pytest.mark.parametrize("dtype", ["bfloat16", "uint8", "int64", *map(slow, (
    "float16", "float64", "int8", "int16", "int32", "uint32", "uint64"))])
@pytest.mark.parametrize("op", ["add", "mul", "max", "min"])
def test_types(launched: list[str], dtype: str, op: str) -> None:  # noqa: F811
    x = np.asarray(tz.astype(np.exp(numbers((5, 300)) / 30) if op == "mul" else
                             numbers((5, 300)) * 9, dtype=dtype))
    want = expected(x, op, 1, reverse=True)
    launched.clear()
    got = running(x, op, 1, reverse=True)
    assert got.dtype == x.dtype and launched == ["k_cumulative"]
    if x.dtype.kind in "iu":  # which wrap around
        np.testing.assert_array_equal(got, want)
    else:
        slack = {"float16": 1e-3, "bfloat16": 8e-3, "float64": 1e-13}[dtype]
        np.testing.assert_allclose(got.astype(np.float64), want, rtol=slack,
                                   atol=slack * np.abs(want).max())


def test_nan_and_infinities(launched: list[str]) -> None:  # noqa: F811
    x = numbers((4, 3000))
    x[0, 100], x[1, 2000], x[2, 7], x[3, 50] = np.nan, np.inf, -np.inf, -0.0
    for op in ("add", "max", "min"):
        np.testing.assert_allclose(running(x, op, 1), expected(x, op, 1), rtol=1e-4, atol=1e-4)
    assert launched


def test_products_that_leave_float32_on_the_way(launched: list[str]) -> None:  # noqa: F811
    x = np.full((2, 40), 1e30, np.float32)
    x[0, 0], x[1] = 0, 1e-30
    x[1, 20:] = 1e30
    np.testing.assert_array_equal(running(x, "mul", 1)[0], 0)
    x = np.array([[1e-30, 1e30, 1e30, 1e-30]], np.float32)
    np.testing.assert_allclose(running(x, "mul", 1), [[1e-30, 1, 1e30, 1]], rtol=1e-5)
    assert launched


def recurrence(a: np.ndarray, b: np.ndarray, axis: int, reverse: bool) -> np.ndarray:
    factors, terms = (np.moveaxis(v.astype(np.float64), axis, 0) for v in (a, b))
    h, carry = np.zeros_like(terms), np.zeros(terms.shape[1:])
    for k in range(len(h))[::-1 if reverse else 1]:
        carry = h[k] = factors[k] * carry + terms[k]
    return np.moveaxis(h, 0, axis)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("shape", "axis", "count"), [
    ((33, 7), 1, 1), slow((2, 5000), 1, 1), ((3, 200, 5), 1, 1), ((1, 20_000), 1, 3),
    slow((2, 5_001, 3), 1, 3)])
def test_recurrences(launched: list[str], shape: tuple[int, ...], axis: int,  # noqa: F811
                     count: int, reverse: bool) -> None:
    a, b = numbers(shape) / 3, numbers(shape, seed=1)
    a.flat[3] = 0
    got = tz.linear_recurrence(a, b, axis=axis, reverse=reverse)
    np.testing.assert_allclose(got, recurrence(a, b, axis, reverse), rtol=1e-5, atol=1e-5)
    assert len(launched) == count
    halves = [torch.from_numpy(v).bfloat16() for v in (a, b)]
    got = tz.linear_recurrence(*halves, axis=axis, reverse=reverse)
    want = recurrence(*(v.float().numpy() for v in halves), axis, reverse)
    np.testing.assert_allclose(got.float().numpy(), want, rtol=8e-3, atol=1e-3)


def test_growing_recurrences(launched: list[str]) -> None:  # noqa: F811
    a, b = np.full((1, 8), 1e30, np.float32), np.zeros((1, 8), np.float32)
    b[0, -1] = 1
    np.testing.assert_array_equal(tz.linear_recurrence(a, b), b)
    assert launched


def test_sizes_that_vary(launched: list[str]) -> None:  # noqa: F811
    with tz.knobs.override(dynamic="always"):
        rows, columns = (tz.jit(lambda x, axis=axis: tz.cumsum(x, axis=axis, reverse=axis == 1,
                                                               exclusive=True)) for axis in (1, 0))
        for shape in ((3, 5), (4, 16), (7, 3000), (1100, 48)):
            x = numbers(shape)
            for function, axis in ((rows, 1), (columns, 0)):
                want = expected(x, "add", axis, True, axis == 1)
                np.testing.assert_allclose(function(x), want, rtol=1e-5, atol=1e-4)
    assert len(launched) == 8


def test_empty_and_scalars(launched: list[str]) -> None:  # noqa: F811
    assert tz.cumsum(np.zeros((0, 4), np.float32), axis=0).shape == (0, 4)
    assert tz.cumsum(np.zeros((4, 0), np.float32), axis=1).shape == (4, 0)
    np.testing.assert_array_equal(tz.cumsum(np.float32(3)), [3])


def test_gradients_stay_on_the_gpu(launched: list[str]) -> None:  # noqa: F811
    x = torch.from_numpy(numbers((4, 300), "mul"))
    weights = torch.from_numpy(numbers((4, 300), seed=1))
    for mine, theirs in ((tz.cumsum, torch.cumsum), (tz.cumprod, torch.cumprod)):
        a, b = (v.requires_grad_() for v in (x.clone(), x.double()))
        mine(a, axis=1).backward(weights)
        theirs(b, dim=1).backward(weights.double())
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-4, atol=1e-4)
    assert "k_linear_recurrence" in launched


CASES = [((3, 70), {"axis": 1}), slow((70, 3), {"axis": 0, "exclusive": True, "reverse": True}),
         slow((1, 40_000), {"axis": 1, "reverse": True})]


@pytest.mark.parametrize(("shape", "options"), CASES)
def test_tritons_interpreter(interpreter: Any, shape: tuple[int, ...],  # noqa: F811
                             options: dict[str, Any]) -> None:
    x = numbers(shape)
    program = whole_program(lambda x: tz.cumsum(x, **options), x)
    (got,) = interpreted(interpreter, program, [x])
    want = expected(x, "add", **options)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.slow
def test_a_recurrence_in_tritons_interpreter(interpreter: Any) -> None:  # noqa: F811
    a, b = numbers((3, 70)), numbers((3, 70), seed=1)
    program = whole_program(lambda a, b: tz.linear_recurrence(a, b, axis=1, reverse=True), a, b)
    (got,) = interpreted(interpreter, program, [a, b])
    np.testing.assert_allclose(got, recurrence(a, b, 1, True), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("function", [
    lambda x: tz.cumsum(x, axis=1), slow(lambda x: tz.cumprod(x, axis=0, exclusive=True)),
    lambda x: tz.linear_recurrence(x, x, axis=1, reverse=True)])
def test_code_for_hopper(function: Any) -> None:
    for shape in ((64, 500), (1, 300_000)):
        program = whole_program(function, np.zeros(shape, np.float32))
        assert ".target sm_90" in chip().source("ptx", program)


def test_many_long_lines_are_not_cut() -> None:
    for rows, kernels in ((1, 3), (64, 3), (600, 1)):
        program = whole_program(lambda x: tz.cumsum(x, axis=1), np.zeros((rows, 40_000), "f"))
        assert len(form_of(program, h200()).kernels) == kernels


def test_wide_addresses(launched: list[str], with_wide_addresses: None  # noqa: F811
                        ) -> None:
    for shape, axis, options in (((3, 70), 1, {}), ((1, 40_000), 1, {"reverse": True}), (
            (100, 7), 0, {"exclusive": True, "reverse": True})):
        x = numbers(shape)
        want = expected(x, "add", axis, **options)
        got = tz.jit(lambda x, axis=axis, options=options: tz.cumsum(x, axis=axis, **options))(x)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
    assert len(launched) == 5


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "shape"), [
    (1, (70_000, 40_000)), (0, (70_000, 40_000)), (0, (3_000_000_000,)), (1, (ROWS, COLUMNS)),
    (0, (ROWS, COLUMNS))])
def test_code_for_large_and_varying_sizes(axis: int, shape: tuple[Any, ...]) -> None:
    program = whole_program(lambda x: tz.cumprod(x, axis=axis, reverse=True),
                            TensorType(shape, tz.float32))
    assert all(k.written.wide for k in chip().form(program).kernels if k.tensors[0].shape == shape)
    assert ".target sm_90" in chip().source("ptx", program)
