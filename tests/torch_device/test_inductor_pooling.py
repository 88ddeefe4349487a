"""Max pooling that Inductor compiled for the device: gradients without additions at random."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("whole", "fresh")]
F = torch.nn.functional

POOLS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "side by side": ((2, 3, 8, 10), {"kernel_size": 2}),
    "side by side, a row left over": ((2, 3, 9, 11), {"kernel_size": 2}),
    "overlapping": ((2, 3, 9, 8), {"kernel_size": 3, "stride": 2, "padding": 1}),
    "at every place": ((2, 2, 7, 6), {"kernel_size": 3, "stride": 1, "padding": 1}),
    "last windows cut off": ((2, 2, 8, 8), {"kernel_size": 3, "stride": 2, "ceil_mode": True}),
    "places between windows": ((2, 2, 9, 10), {"kernel_size": 2, "stride": 3}),
    "dilated": ((2, 2, 11, 12), {"kernel_size": 3, "stride": 2, "padding": 1, "dilation": 2}),
    "rows unlike columns": ((2, 2, 10, 9), {"kernel_size": (2, 3), "stride": (1, 2),
                                            "padding": (0, 1)}),
    "one image": ((3, 8, 8), {"kernel_size": 2}),
}


def gradient(x: Any, function: Any, **pool: Any) -> tuple[Any, Any]:
    """What a pool gives, and the gradient of it for weights that no type rounds."""
    x = x.detach().requires_grad_()
    found = function(x, **pool)
    weights = (torch.arange(found.numel()) % 7 - 3).reshape(found.shape).to(found)
    (gradient,) = torch.autograd.grad(found, x, weights)
    return found.detach(), gradient


def pooled(x: Any, **pool: Any) -> Any:
    return F.max_pool2d(x * 2, **pool)


QUICK = ("side by side", "overlapping")


@pytest.mark.parametrize("name", [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in POOLS])
def test_gradients_of_max_pools(name: str) -> None:
    """With many equal numbers: the first of them is the one that is chosen, as in eager mode."""
    from torch._inductor.utils import run_and_get_code

    shape, pool = POOLS[name]
    x = torch.randint(0, 4, shape).float()
    compiled = torch.compile(pooled, fullgraph=True)
    found, codes = run_and_get_code(lambda: gradient(x.to("gcu"), compiled, **pool))
    assert "max_pool_backward" in "".join(codes) and "atomic_add(" not in "".join(codes)
    torch.testing.assert_close([part.cpu() for part in found], list(gradient(x, pooled, **pool)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_last(dtype: Any) -> None:
    x = torch.randint(0, 4, (2, 3, 9, 8)).to(dtype).to(memory_format=torch.channels_last)
    pool = {"kernel_size": 3, "stride": 2, "padding": 1}
    found = gradient(x.to("gcu"), torch.compile(pooled, fullgraph=True), **pool)
    exact = gradient(x.double(), pooled, **pool)
    assert found[1].is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close([part.cpu() for part in found], [part.to(dtype) for part in exact])


@pytest.mark.slow
def test_sizes_that_vary() -> None:
    """Theirs are additions still."""
    compiled = torch.compile(pooled, dynamic=True, fullgraph=True)
    for shape in ((2, 3, 9, 8), (3, 2, 12, 20)):
        x = torch.randint(0, 4, shape).float()
        for pool in ({"kernel_size": 3, "stride": 2, "padding": 1}, {"kernel_size": 2}):
            found = gradient(x.to("gcu"), compiled, **pool)
            torch.testing.assert_close([part.cpu() for part in found],
                                       list(gradient(x, pooled, **pool)))
