"""What half types decide is decided by what is stored, as eager mode has it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from terrazzo.torch import backend  # noqa: E402

pytestmark = pytest.mark.torch
EDGES = [0.0, -0.0, 1.0, -1.0, -3.0, 0.75, 1e-40, -1e-39, 3e38, float("inf"), float("nan")]


def compiled(function: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend=backend.terrazzo, fullgraph=True,
                         options={"fallback": "error"})


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", [float("inf"), -float("inf"), 1, -1])
def test_the_gradient_of_an_extremum_of_sums(kind: Any, order: float) -> None:
    """The backward pass asks which sum is the one that was kept: one of them always is."""
    torch.manual_seed(0)
    x = torch.randn(4, 33, 17).to(kind)
    found = []
    for function in (compiled(torch.linalg.matrix_norm), torch.linalg.matrix_norm):
        given = x.clone().requires_grad_()
        found.append(torch.autograd.grad(function(given, order).sum(), given)[0])
    assert bool((found[0] != 0).any())
    torch.testing.assert_close(*found)


def test_what_is_compared_was_rounded() -> None:
    x = torch.linspace(0.1, 3, 1000).bfloat16()

    def function(x: Any, y: Any) -> Any:
        z = x * 1.37
        return z == y, z > y, torch.floor(x * 64.3), (x * 100.7).long()

    given = x, x * 1.37
    assert bool((given[1] != x.float() * 1.37).any())  # or there is nothing to round
    for ours, theirs in zip(compiled(function)(*given), function(*given)):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_neighbours() -> None:
    x = torch.tensor([a for a in EDGES for _ in EDGES]).bfloat16()
    y = torch.tensor(EDGES * len(EDGES)).bfloat16()
    torch.testing.assert_close(compiled(torch.nextafter)(x, y), torch.nextafter(x, y), rtol=0,
                               atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_mantissa_and_exponent(kind: Any) -> None:
    x = torch.cat([torch.tensor(EDGES), torch.randn(100)]).to(kind)
    for found, true in zip(compiled(torch.frexp)(x), torch.frexp(x)):
        torch.testing.assert_close(found, true, rtol=0, atol=0, equal_nan=True)
