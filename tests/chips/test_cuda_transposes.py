"""Pointwise groups that turn an operand, and rows that are only read, as kernels of a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.base.shapes import dims
from terrazzo.chips.cuda.binaries import compiled
from terrazzo.chips.cuda.description import h200
from terrazzo.chips.cuda.forms import Form, form_of, space_of
from terrazzo.compiler.lowering import Lowering
from terrazzo.compiler.options import Options
from terrazzo.expr.ir import Program
from terrazzo.graph.ir import TensorType
from terrazzo.graph.trace import trace
from terrazzo.knobs import knobs

pytest.importorskip("triton")
torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.triton, pytest.mark.torch]
SHAPES = (((40, 72), (1, 0)), ((1, 1), (1, 0)), ((0, 5), (1, 0)), ((3, 17, 40), (0, 2, 1)),
          ((5, 0, 6, 4), (3, 1, 0, 2)), ((2, 16, 5, 6), (0, 2, 3, 1)), ((7, 5, 6, 9), (3, 2, 1, 0)),
          ((2, 5, 6, 130), (0, 3, 1, 2)), ((4, 3, 200), (0, 2, 1)), ((130, 9, 5), (2, 0, 1)))


@pytest.fixture
def simulated() -> Iterator[None]:
    with knobs.override(cuda_simulate=True, chip="cuda"):
        yield


def program_for(function: Callable[..., Any], *shapes: Any, dtype: Any = tz.float32) -> Program:
    graph, _ = trace(function, [TensorType(s, dtype) for s in shapes], name="f")
    options = Options.now()
    (group,) = Lowering(graph, options.chip, options=options).fused.groups
    return group.program


def turned(form: Form) -> bool:
    return {"ROWS", "BLOCK"} <= form.kernels[0].written.constants.keys()


def permuted(axes: tuple[int, ...]) -> Callable[..., Any]:
    return lambda x: tz.permute_dims(x, axes=axes)


# ---------------------------------------------------------------- numbers
@pytest.mark.parametrize("dtype", ["int8", "bool", "float16", "float32", "float64"])
@pytest.mark.parametrize(("shape", "axes"), SHAPES)
def test_any_axes(simulated: None, shape: tuple[int, ...], axes: tuple[int, ...], dtype: str
                  ) -> None:
    x = (np.random.default_rng(0).standard_normal(shape) * 50).astype(dtype)
    if x.size and dtype.startswith("float"):
        x.flat[0] = np.nan
    np.testing.assert_array_equal(tz.jit(permuted(axes))(x), x.transpose(axes))


def test_beside_what_is_not_turned(simulated: None) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((70, 90), np.float32), rng.standard_normal((90, 70), np.float32)
    bias = rng.standard_normal(90, np.float32)
    f = tz.jit(lambda x, y, b: tz.maximum(x + tz.permute_dims(y, axes=(1, 0)) * b, x))
    np.testing.assert_allclose(f(x, y, bias), np.maximum(x + y.T * bias, x), rtol=1e-6, atol=1e-6)


def test_views_of_torch(simulated: None) -> None:
    x = torch.arange(24.0 * 35).reshape(24, 35)
    torch.testing.assert_close(tz.exp(x.T / 1000), torch.exp(x.T / 1000))


@pytest.mark.parametrize("sizes", [(1, 1), (3, 50), (40, 16), (0, 7), (5, 300)])
def test_sizes_that_vary(simulated: None, sizes: tuple[int, int]) -> None:
    with knobs.override(dynamic="always"):
        f = tz.jit(lambda x: tz.permute_dims(x, axes=(0, 2, 1)) + 1)
        x = np.random.default_rng(0).standard_normal((2, *sizes), np.float32)
        np.testing.assert_array_equal(f(x), x.transpose(0, 2, 1) + 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int32"])
@pytest.mark.parametrize("shape", [(9, 100), (300, 512), (7, 1000), (0, 512), (600, 2, 130),
                                   (5, 1025)])
def test_rows_that_are_only_read(simulated: None, shape: tuple[int, ...], dtype: str) -> None:
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 4).to(
        getattr(torch, dtype))
    slack = {"float32": 1e-5, "bfloat16": 2e-2, "float64": 1e-12, "int32": 0}[dtype]
    for axis in range(len(shape)):
        if shape[axis]:
            want = x.double().sum(axis)
            torch.testing.assert_close(
                tz.jit(lambda x: tz.sum(x, axis=axis))(x).double(), want, rtol=slack,  # noqa: B023
                atol=slack * 100)
            assert torch.equal(tz.jit(lambda x: tz.max(x, axis=axis))(x),  # noqa: B023
                               x.amax(axis))


def test_nan_in_rows_that_share_a_program(simulated: None) -> None:
    x = np.random.default_rng(0).standard_normal((40, 300), np.float32)
    x[3, 5], x[17, 0] = np.nan, np.inf
    np.testing.assert_array_equal(tz.max(x, axis=1), x.max(1))
    assert np.flatnonzero(np.isnan(tz.sum(x, axis=1))).tolist() == [3]


# ---------------------------------------------------------------- which programs
def test_only_what_is_read_along_another_axis(simulated: None) -> None:
    def is_turned(function: Callable[..., Any], *shapes: Any) -> bool:
        return turned(form_of(program_for(function, *shapes), h200()))

    assert is_turned(permuted((1, 0)), (64, 64))
    assert is_turned(permuted((0, 2, 3, 1)), (2, 16, 7, 7))
    assert is_turned(lambda x, y: x + tz.permute_dims(y, axes=(1, 0)), (64, 64), (64, 64))
    assert is_turned(permuted((0, 2, 1)), (*dims("n m"), 64))
    assert not is_turned(lambda x, y: x + y, (64, 64), (64, 64))
    assert not is_turned(lambda x, y: x + y, (64, 64), (64, 1))  # one line for all
    assert not is_turned(permuted((1, 0, 2)), (64, 64, 64))
    assert not is_turned(permuted((0, 2, 1)), (8, 1000, 3))


def test_tiles_are_smaller_where_there_would_be_few(simulated: None) -> None:
    def grid(*shape: int) -> Any:
        return form_of(program_for(permuted((1, 0)), shape), h200()).kernels[0].written.programs

    assert grid(8192, 8192) == 128 * 128
    assert grid(512, 512) >= 132


def test_choices_offer_tiles(simulated: None) -> None:
    program = program_for(permuted((1, 0)), (4096, 4096))
    form = form_of(program, h200())
    space = space_of(program, h200(), form)
    assert space is not None and space.rule.keys() == {"rows", "block", "warps"}
    choice = {"rows": 32, "block": 128, "warps": 4}
    assert space.holds(choice) and choice in space.changed(space.rule, space.axes[0])
    assert form_of(program, h200(), choice).kernels[0].written.constants == {
        "ROWS": 32, "BLOCK": 128}


# ---------------------------------------------------------------- code
@pytest.mark.parametrize("dtype", [tz.float32, tz.bfloat16])
@pytest.mark.parametrize(("shape", "axes"), [
    ((1024, 2048), (1, 0)), ((4, 256, 56, 56), (0, 2, 3, 1)), ((4, 56, 56, 256), (0, 3, 1, 2))])
def test_loads_and_stores_are_wide(simulated: None, shape: tuple[int, ...],
                                   axes: tuple[int, ...], dtype: Any) -> None:
    (kernel,) = form_of(program_for(permuted(axes), shape, dtype=dtype), h200()).kernels
    (version,) = kernel.versions
    made = compiled(version.written, [dtype, dtype], version.constants(), version.warps,
                    [True, True], version.sixteen, h200())
    memory = re.findall(r"(?:ld|st)\.global[.\w]*", made.ptx)
    assert any(m.startswith("ld") for m in memory) and any(m.startswith("st") for m in memory)
    assert all(m.endswith("v4.b32") for m in memory), memory
