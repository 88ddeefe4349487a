"""`torch.compile(backend="terrazzo")` gives what eager mode gives: results, gradients, strides."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import terrazzo as tz  # noqa: E402
from terrazzo.torch import backend  # noqa: E402
from terrazzo.torch.program import Program  # noqa: E402

pytestmark = pytest.mark.torch
functional = nn.functional


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    """What the backend makes during a test."""
    torch._dynamo.reset()
    made: list[Program] = []
    backend.WATCHERS.append(made.append)
    yield made
    backend.WATCHERS.remove(made.append)


def compiled(model: Any, **kwargs: Any) -> Any:
    return torch.compile(model, backend=backend.terrazzo, **kwargs)


def all_ours(made: Sequence[Program]) -> bool:
    """Whether anything was made, and none of it calls torch."""
    return bool(made) and not any(p.calls for p in made)


def close(ours: Any, theirs: Any, exact: Any) -> None:
    """Ours is as near to the result in float64 as eager mode is, give or take."""
    scale = exact.abs().max().item() + 1e-30
    error = (ours.double() - exact).abs().max().item() / scale
    allowed = 4 * (theirs.double() - exact).abs().max().item() / scale + 2e-6
    assert error <= allowed, f"off by {error:.2g} of the largest, allowed are {allowed:.2g}"


class Attention(nn.Module):
    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.qkv, self.out, self.causal = nn.Linear(32, 96), nn.Linear(32, 32), causal

    def forward(self, x: Any) -> Any:
        b, n, c = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(b, n, c))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.attention = nn.Embedding(40, 32), Attention()
        self.first, self.second = nn.LayerNorm(32), nn.LayerNorm(32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, ids: Any) -> Any:
        x = self.words(ids)
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


def images() -> Any:
    return (torch.randn(2, 3, 16, 16),)


def rows() -> Any:
    return (torch.randn(5, 16),)


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32),
                                  nn.Linear(32, 4)), rows),
    "softmax": (lambda: nn.Sequential(nn.Linear(16, 8), nn.LogSoftmax(-1)), rows),
    "conv": (lambda: nn.Conv2d(3, 8, 3, padding=1, stride=2), images),
    "conv chain": (lambda: nn.Sequential(nn.Conv2d(3, 8, 7, 2, 3), nn.ReLU(), nn.Conv2d(8, 8, 3),
                                         nn.ReLU(), nn.Conv2d(8, 6, 1, 2)), images),
    "conv, norm": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8),
                                         nn.ReLU()), images),
    "max pool": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(3, 2, 1)), images),
    "average pool": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.AvgPool2d(2), nn.Flatten(),
                                           nn.Linear(392, 3)), images),
    "grouped conv": (lambda: nn.Sequential(nn.Conv2d(3, 6, 3, groups=3), nn.Conv2d(
        6, 6, 3, groups=6, padding=1), nn.AdaptiveAvgPool2d(1)), images),
    "transposed conv": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1), images),
    "group norm": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU()),
                   images),
    "attention": (Attention, lambda: (torch.randn(2, 7, 32),)),
    "causal attention": (lambda: Attention(True), lambda: (torch.randn(2, 7, 32),)),
    "encoder": (Encoder, lambda: (torch.randint(0, 40, (2, 6)),)),
}


@pytest.mark.parametrize("name", MODELS)
def test_inference(name: str, programs: list[Program]) -> None:
    torch.manual_seed(0)
    model, given = MODELS[name][0]().eval(), MODELS[name][1]()
    exact = copy.deepcopy(model).double()
    wide = [g.double() if g.is_floating_point() else g for g in given]
    with torch.no_grad():
        ours, theirs = compiled(model)(*given), model(*given)
        close(ours, theirs, exact(*wide))
    assert ours.stride() == theirs.stride() and ours.dtype is theirs.dtype
    assert all_ours(programs)


@pytest.mark.parametrize("name", MODELS)
def test_training(name: str, programs: list[Program]) -> None:
    torch.manual_seed(0)
    model, given = MODELS[name][0](), MODELS[name][1]()
    exact = copy.deepcopy(model).double()
    wide = [g.double() if g.is_floating_point() else g for g in given]

    def gradients(function: Any, parameters: Any, inputs: Sequence[Any]) -> list[Any]:
        leaves = [i.clone().requires_grad_() if i.is_floating_point() else i for i in inputs]
        y = function(*leaves)
        weights = torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype)
        wanted = [*parameters, *(i for i in leaves if i.requires_grad)]
        return [y.detach(), *torch.autograd.grad((y * weights).sum(), wanted)]

    buffers = [b.clone() for b in model.buffers()]
    ours = gradients(compiled(model), list(model.parameters()), given)
    after = [b.clone() for b in model.buffers()]
    for buffer, before in zip(model.buffers(), buffers):
        buffer.copy_(before)
    theirs = gradients(model, list(model.parameters()), given)
    best = gradients(exact, list(exact.parameters()), wide)
    for a, b, c in zip(ours, theirs, best, strict=True):
        assert a.shape == b.shape and a.stride() == b.stride()
        close(a, b, c)
    for a, b in zip(after, model.buffers(), strict=True):
        torch.testing.assert_close(a, b)
    assert all_ours(programs)


def test_operators_that_are_registered_are_opened(programs: list[Program]) -> None:
    @tz.op
    def bent(x: Any, alpha: Any = 1.0) -> Any:
        return alpha * tz.maximum(x, 0) ** 2

    op = tz.torch.register(bent, "terrazzo_tests::bent")
    x, alpha = torch.randn(4, 5, requires_grad=True), torch.tensor(1.5, requires_grad=True)

    def function(x: Any, alpha: Any) -> Any:
        return op(x.sin(), alpha).exp()

    found = compiled(function, fullgraph=True)(x, alpha)
    gradients = torch.autograd.grad(found.sum(), (x, alpha))
    wanted = function(x, alpha)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(gradients, torch.autograd.grad(wanted.sum(), (x, alpha)))
    assert len(programs) == 2 and all_ours(programs)
