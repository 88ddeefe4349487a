"""Scans, scatters and sorting on a GPU, at sizes that the simulation is too slow for."""

from __future__ import annotations

from typing import Any

import pytest

import terrazzo as tz
import terrazzo.ops  # fills the table of operators
from terrazzo.chips.cuda import driver
from terrazzo.graph.ir import operator_named

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(driver.absence()), reason="needs a GPU")]
torch = pytest.importorskip("torch")

DEVICE = "cuda"
scatter_at = operator_named("scatter_at")


def random(*shape: int, dtype: str = "float32", seed: int = 0) -> Any:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(getattr(torch, dtype)).to(DEVICE)


def indices(n: int, *shape: int) -> Any:
    return torch.randint(0, n, shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def close(got: Any, want: Any, slack: float) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=slack, atol=slack * max(
        1.0, float(want.abs().max())))


# Rows of one tile, of many and few long ones, a single one, columns, short rows.
@pytest.mark.parametrize(("shape", "axis"), [
    ((4096, 4096), 1), ((2000, 20_001), 1), ((3, 1 << 20), 1), ((1 << 24,), 0), ((3000, 5000), 0),
    ((8, 4096, 512), 1), ((2, 100_001, 3), 1), ((100_000, 33), 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums(shape: tuple[int, ...], axis: int, dtype: str) -> None:
    x, slack = random(*shape, dtype=dtype), 1e-5 if dtype == "float32" else 8e-3
    want = x.double().cumsum(axis)
    close(tz.cumsum(x, axis=axis), want, slack)
    back = x.double().flip(axis).cumsum(axis).flip(axis)
    close(tz.cumsum(x, axis=axis, reverse=True), back, slack)
    close(tz.cumsum(x, axis=axis, exclusive=True), want - x.double(), slack)
    assert torch.equal(tz.cummax(x, axis=axis), x.cummax(axis).values)


@pytest.mark.parametrize("shape", [(4, 2048, 256), (1, 300_000, 1), (2, 70_001, 3)])
@pytest.mark.parametrize("reverse", [False, True])
def test_recurrences(shape: tuple[int, ...], reverse: bool) -> None:
    a, b = random(*shape).sigmoid(), random(*shape, seed=1)
    got = tz.linear_recurrence(a, b, axis=1, reverse=reverse)
    with tz.chip("cpu"):
        want = tz.linear_recurrence(a.cpu().double(), b.cpu().double(), axis=1, reverse=reverse)
    close(got.cpu(), want, 1e-5)


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_scatters(dtype: str) -> None:
    x, updates = random(5000, 128, dtype=dtype), random(200_000, 128, dtype=dtype, seed=1)
    index = indices(5000, 200_000)
    slack = {"float32": 1e-5, "bfloat16": 8e-3, "float64": 1e-12}[dtype]
    close(scatter_at(x, updates, index, axes=(0,), reduce="add"),
          x.double().index_add(0, index, updates.double()), slack)
    for how in ("max", "min"):
        want = x.index_reduce(0, index, updates, f"a{how}")
        assert torch.equal(scatter_at(x, updates, index, axes=(0,), reduce=how), want)
    last = torch.full((5000,), -1, device=DEVICE).index_reduce(
        0, index, torch.arange(200_000, device=DEVICE), "amax")
    want = torch.where((last < 0)[:, None], x, updates[last.clamp(0)])
    for _ in range(3):
        assert torch.equal(scatter_at(x, updates, index, axes=(0,), reduce="set"), want)


def test_gradient_of_an_embedding() -> None:
    table, index = random(32_000, 256).requires_grad_(), indices(32_000, 8, 2048)
    tz.take(table, index, axis=0).square().sum().backward()
    got, table.grad = table.grad.clone(), None
    torch.nn.functional.embedding(index, table).square().sum().backward()
    close(got, table.grad, 1e-5)


# Rows of one block, short rows, longer ones that are merged, one long row, columns.
@pytest.mark.parametrize(("shape", "axis"), [
    ((1000, 2048), 1), ((50_000, 30), 1), ((64, 30_001), 1), ((1 << 20,), 0), ((3000, 65), 0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_sorting(shape: tuple[int, ...], axis: int, dtype: str) -> None:
    x = (random(*shape) * 100).to(getattr(torch, dtype))
    for down in (False, True):
        want = x.sort(dim=axis, stable=True, descending=down)
        assert torch.equal(tz.sort(x, axis=axis, descending=down), want.values)
        assert torch.equal(tz.argsort(x, axis=axis, descending=down), want.indices)
        for k in (1, 50):
            k = min(k, shape[axis])
            values, found = tz.topk(x, k=k, axis=axis, largest=down)
            assert torch.equal(values, want.values.narrow(axis, 0, k))
            assert torch.equal(found, want.indices.narrow(axis, 0, k))
