"""Sorting and topk for GPUs: numbers through our Triton backend, and code for sm_90."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.chips.cuda import sorts
from terrazzo.graph.ir import TensorType
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

TYPES = ["bfloat16", "uint32", "int64", *map(slow, (
    "float16", "float32", "float64", "bool", "int8", "uint8", "int16", "int32", "uint64"))]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are small, so that short lines are merged."""
    monkeypatch.setattr(sorts, "MOST_PLACES", 16)
    monkeypatch.setattr(sorts, "MOST_PAIRS", 16)


def numbers(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """Numbers of which many are equal, with all that is special."""
    x = np.random.default_rng(seed).integers(-9, 9, shape).astype(np.float64)
    kind = tz.dtypes.as_dtype(dtype)
    if not kind.is_float:
        return x.astype(kind.np) if dtype != "bool" else x > 0
    special = [np.nan, np.inf, -np.inf, -0.0, 0.0, -np.nan]
    places = np.random.default_rng(seed).permutation(x.size)[:len(special)]
    x.flat[places] = special[:len(places)]
    return x.astype(kind.np)


def order(x: np.ndarray, axis: int, descending: bool) -> np.ndarray:
    """Where sorted elements come from, equal ones in order; nan is the largest."""
    wide = x.astype(np.float64) if x.dtype.kind not in "iub" else x
    if not descending:
        return np.argsort(wide, axis=axis, kind="stable")
    back = np.flip(np.argsort(np.flip(wide, axis), axis=axis, kind="stable"), axis)
    return x.shape[axis] - 1 - back


def check(x: np.ndarray, axis: int = -1, descending: bool = False, k: int | None = None) -> None:
    origins = order(x, axis, descending)
    # Compiled for this test, whatever another one set.
    if k is None:
        values = tz.jit(lambda x: tz.sort(x, axis=axis, descending=descending))(x)
        found = tz.jit(lambda x: tz.argsort(x, axis=axis, descending=descending))(x)
    else:
        values, found = tz.jit(lambda x: tz.topk(x, k=k, axis=axis, largest=descending))(x)
        origins = np.take(origins, range(k), axis=axis)
    np.testing.assert_array_equal(found, origins)
    want = np.take_along_axis(x, origins, axis)
    assert values.dtype == x.dtype
    bits = f"u{x.dtype.itemsize}"  # which tell -0.0 from 0.0
    np.testing.assert_array_equal(values.view(bits), want.view(bits))


# A single element, short lines side by side, one line, columns.
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(("shape", "axis"), [
    ((1,), 0), slow((1, 2), 1), ((70, 3), 1), slow((5, 13), 1), slow((2, 64), 1), slow((9, 40), 0),
    ((3, 7, 5), 1)])
def test_lines_that_fit(launched: list[str], shape: tuple[int, ...], axis: int,  # noqa: F811
                        descending: bool) -> None:
    check(numbers(shape), axis, descending)
    check(numbers(shape), axis, descending, k=1)
    check(numbers(shape), axis, descending, k=(shape[axis] + 1) // 2)
    assert set(launched) == {"k_sort_pairs", "k_top_pairs"}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("shape", "axis", "merges"), [
    slow((3, 17), 1, 0), slow((2, 64), 1, 1), ((2, 100), 1, 2), slow((1, 257), 1, 4),
    slow((90, 3), 0, 2)])
def test_lines_that_are_merged(launched: list[str], small: None, dtype: str,  # noqa: F811
                               shape: tuple[int, ...], axis: int, merges: int) -> None:
    check(numbers(shape, dtype), axis)
    kernels = ["k_sort_pairs_blocks", *(f"k_sort_pairs_merge{i + 1}" for i in range(merges)),
               "k_sort_pairs"]
    assert launched == 2 * kernels
    check(numbers(shape, dtype), axis, descending=True)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("shape", "axis", "k", "kernels"), [
    ((3, 17), 1, 1, 2), slow((2, 100), 1, 3, 3), slow((2, 100), 1, 8, 4), slow((90, 3), 0, 2, 2),
    ((2, 100), 1, 9, 4), slow((2, 100), 1, 100, 4), ((2, 100), 1, 0, 0)])
def test_first_elements(launched: list[str], small: None, dtype: str,  # noqa: F811
                        shape: tuple[int, ...], axis: int, k: int, kernels: int) -> None:
    check(numbers(shape, dtype), axis, descending=True, k=k)
    assert len(launched) == kernels
    check(numbers(shape, dtype), axis, descending=False, k=k)


@pytest.mark.parametrize("dtype", TYPES)
def test_types(launched: list[str], small: None, dtype: str) -> None:  # noqa: F811
    for descending in (False, True):
        check(numbers((2, 12), dtype), descending=descending)
        check(numbers((2, 40), dtype), descending=descending)
        check(numbers((2, 40), dtype), descending=descending, k=2)
    assert launched


@pytest.mark.slow
def test_extremes(launched: list[str], small: None) -> None:  # noqa: F811
    """Numbers whose keys are the largest there are, which places past the end have too."""
    for dtype in ("int32", "uint32", "int64", "uint64", "int8"):
        info = np.iinfo(dtype)
        x = np.array([[info.max, info.min, info.max, 0, info.min] * 5], dtype)
        for descending in (False, True):
            check(x[:, :5], descending=descending)
            check(x, descending=descending)
            check(x, descending=descending, k=5)
    nothing = np.full((2, 21), np.nan, np.float32)
    check(nothing, k=3)
    check(nothing, descending=True)
    assert launched


def test_empty(launched: list[str]) -> None:  # noqa: F811
    assert tz.sort(np.zeros((3, 0), np.float32)).shape == (3, 0)
    assert tz.sort(np.zeros((0, 3), np.float32)).shape == (0, 3)
    assert tz.sort(np.float32(3)) == 3 and "k_sort_pairs" in launched


def test_lines_whose_number_varies(launched: list[str], small: None) -> None:  # noqa: F811
    with tz.knobs.override(dynamic="always"):
        # Lengths are known, and the number of lines is not.
        function = tz.jit(lambda x: tz.argsort(tz.reshape(x, shape=(-1, 40)), axis=1))
        for rows in (3, 5, 16):
            x = numbers((rows, 2, 20))
            np.testing.assert_array_equal(function(x), order(x.reshape(-1, 40), 1, False))
    assert launched


def test_lengths_that_vary_run_on_the_cpu() -> None:
    program = whole_program(lambda x: tz.sort(x), TensorType((4, Var("n", 2)), tz.float32))
    assert "runs on the CPU: how often runs are merged" in chip().source("triton", program)


def test_the_longest_lines_run_on_the_cpu() -> None:
    program = whole_program(lambda x: tz.sort(x), TensorType((1 << 31,), tz.float32))
    assert "where an element comes from has 31 bits" in chip().source("triton", program)


def test_gradients_stay_on_the_gpu(launched: list[str], small: None) -> None:  # noqa: F811
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    weights = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    for mine, theirs, width in (
            (tz.jit(lambda x: tz.sort(x, axis=1)), lambda x: x.sort(1).values, 40),
            (tz.jit(lambda x: tz.topk(x, k=3)[0]), lambda x: x.topk(3).values, 3)):
        a, b = (x.clone().requires_grad_() for _ in range(2))
        mine(a).backward(weights[:, :width])
        theirs(b).backward(weights[:, :width])
        torch.testing.assert_close(a.grad, b.grad)
    assert "k_scatter_updates" in launched


@pytest.mark.parametrize("function", [
    lambda x: tz.sort(x), slow(lambda x: tz.topk(x, k=2)[0]), slow(lambda x: tz.topk(x, k=12)[0])])
def test_tritons_interpreter(interpreter: Any, small: None, function: Any) -> None:  # noqa: F811
    x = numbers((2, 37))
    program = whole_program(function, x)
    values, found = interpreted(interpreter, program, [x])
    down = program.attrs["node"].op.name == "top_pairs"
    origins = np.take(order(x, 1, down), range(values.shape[1]), axis=1)
    np.testing.assert_array_equal(found, origins)
    np.testing.assert_array_equal(values, np.take_along_axis(x, origins, 1))


@pytest.mark.parametrize("function", [lambda x: tz.sort(x), lambda x: tz.topk(x, k=5)[0]])
@pytest.mark.parametrize("dtype", ["bfloat16", slow("float64")])
def test_code_for_hopper(small: None, function: Any, dtype: str) -> None:
    program = whole_program(function, numbers((3, 100), dtype))
    assert ".target sm_90" in chip().source("ptx", program)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_blocks_as_large_as_they_come(launched: list[str], dtype: str) -> None:  # noqa: F811
    for n in (1000, 2048, 5000):
        check(numbers((2, n), dtype))
    check(numbers((2, 9000), dtype), descending=True, k=50)
    program = whole_program(lambda x: tz.sort(x), numbers((3, 5000), dtype))
    assert ".target sm_90" in chip().source("ptx", program)


def test_wide_addresses(launched: list[str], small: None, with_wide_addresses: None  # noqa: F811
                        ) -> None:
    check(numbers((5, 3)), 0)
    check(numbers((40, 3)), 0)
    check(numbers((3, 40), "int64"), k=3)
    assert launched


@pytest.mark.slow
@pytest.mark.parametrize("rows", [70_000, Var("n", 2)])
def test_code_for_large_and_varying_sizes(rows: Any) -> None:
    program = whole_program(lambda x: tz.sort(x, axis=1), TensorType((rows, 40_000), tz.float32))
    assert ".target sm_90" in chip().source("ptx", program)
