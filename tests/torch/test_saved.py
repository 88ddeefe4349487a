"""What a forward pass saves of convolutions lies channels last, and nobody else can tell."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from terrazzo.errors import ShapeError  # noqa: E402
from terrazzo.torch import backend  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


class Residual(nn.Module):
    """A stem with a pool, a block with a shortcut read in strides, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = nn.Conv2d(3, 8, 5, 2, 2, bias=False), nn.MaxPool2d(3, 2, 1)
        self.one, self.two = nn.Conv2d(8, 12, 3, 2, 1), nn.Conv2d(12, 12, 3, 1, 1, groups=2)
        self.shortcut = nn.Conv2d(8, 12, 1, 2)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (8, 12, 12, 12))
        self.head = nn.Linear(12, 5)

    def forward(self, x: Any) -> Any:
        x = self.pool(torch.relu(self.norms[0](self.stem(x))))
        y = torch.relu(self.norms[1](self.one(x)))
        y = torch.relu(self.norms[2](self.two(y)) + self.norms[3](self.shortcut(x)))
        return self.head(y.mean((2, 3)))


class Viewed(nn.Module):
    """Saved values with views of all kinds, and one that the user gets as well."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3)

    def forward(self, x: Any) -> Any:
        seen = torch.sigmoid(self.one(x))
        y = torch.tanh(self.two(seen))
        turned = y.permute(0, 2, 3, 1).exp()
        flat = y.flatten(1)
        half = y[:, ::2]
        return seen, (flat * flat).sum() + turned.square().sum() + (half * half.detach()).sum()


def gradients(run: Callable[[Any], Any], model: Any, x: Any) -> list[Any]:
    found = run(x)
    parts = found if isinstance(found, tuple) else (found,)
    sum(part.square().sum() for part in parts).backward()
    return [*(p.detach() for p in parts), x.grad, *(p.grad for p in model.parameters())]


def compare(model: Any, x: Any, run: Callable[[Any, Any], Any] | None = None,
            dynamic: bool = False) -> None:
    """Results and gradients are those in float64, and lie as eager mode lays them."""
    exact = copy.deepcopy(model).double()
    eager = copy.deepcopy(model)
    ours = torch.compile(model, backend=backend.terrazzo, dynamic=dynamic)
    wanted = gradients(exact, exact, x.detach().double().requires_grad_())
    theirs = gradients(eager, eager, x.detach().clone().requires_grad_())
    found = gradients(ours if run is None else lambda given: run(ours, given), model,
                      x.detach().clone().requires_grad_())
    for a, b, c in zip(found, wanted, theirs, strict=True):
        assert (a.double() - b).abs().max() <= 2e-5 * b.abs().max() + 1e-6
        assert a.stride() == c.stride()


def saved_images(run: Callable[[Any], Any], x: Any) -> list[Any]:
    """Images of several channels that a forward pass saves, but its inputs."""
    found: list[Any] = []

    def pack(tensor: Any) -> Any:
        found.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run(x)
    return [t for t in found if t.dim() == 4 and t.shape[0] == x.shape[0] and t.shape[1] > 3]


@pytest.mark.parametrize("size", [32, 37])
def test_gradients_of_a_residual_network(size: int) -> None:
    compare(Residual(), torch.randn(3, 3, size, size))


def test_what_is_saved_lies_channels_last() -> None:
    run = torch.compile(Residual(), backend=backend.terrazzo)
    images = saved_images(run, torch.randn(3, 3, 32, 32))
    large = [t for t in images if t.shape[2] > 1]
    assert len(large) >= 6
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in large)


def test_views_of_what_is_saved() -> None:
    compare(Viewed(), torch.randn(2, 3, 12, 11))


@pytest.mark.parametrize("lay", [
    lambda t: t.contiguous(), lambda t: t.clone()], ids=["row major", "alike"])
def test_hooks_that_hand_back_copies(lay: Callable[[Any], Any]) -> None:
    """As those do that keep saved tensors elsewhere."""
    def run(model: Any, x: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lay, lambda t: t):
            return model(x)

    compare(Residual(), torch.randn(3, 3, 32, 32), run)


def with_gaps(tensor: Any) -> Any:
    wide = torch.full((*tensor.shape, 2), float("nan")).to(tensor.dtype)[..., 0]
    return wide.copy_(tensor)


def turned(tensor: Any) -> Any:
    """Its axes in memory the other way around."""
    axes = tuple(reversed(range(tensor.dim())))
    return tensor.permute(axes).contiguous().permute(axes)


def far_in(tensor: Any) -> Any:
    """In the middle of more memory, each row by itself."""
    if not tensor.dim():
        return tensor
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 3), float("nan")).to(tensor.dtype)
    return wide[..., 2:-1].copy_(tensor)


class Layers(nn.Module):
    """Products, a norm, a sum over rows and what is spread out: saved in several layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(7, 12), nn.Linear(12, 12)
        self.norm = nn.LayerNorm(12)

    def forward(self, x: Any) -> Any:
        y = torch.tanh(self.one(x))
        z = self.norm(y + y.mean(1, keepdim=True).expand_as(y).sigmoid())
        return self.two(z).transpose(1, 2).exp() * torch.sin(z[..., ::2].sum())


@pytest.mark.parametrize("model, size, lay, dynamic", [
    (Layers, (3, 5, 7), with_gaps, False), (Layers, (3, 5, 7), turned, False),
    (Layers, (3, 5, 7), far_in, True), (Residual, (3, 3, 32, 32), with_gaps, False)])
def test_hooks_that_hand_back_another_layout(
        model: Callable[[], Any], size: tuple[int, ...], lay: Callable[[Any], Any], dynamic: bool
) -> None:
    """Nobody guards how a hook's tensors lie: the backward pass looks."""
    def run(compiled: Any, x: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lay):
            return compiled(x)

    compare(model(), torch.randn(size), run, dynamic)


def test_hooks_that_repeat_one_row() -> None:
    """A tensor whose rows are all alike may come back as one row, spread out."""
    def alike(tensor: Any) -> Any:
        return tensor[:1].expand_as(tensor) if tensor.dim() == 2 and len(tensor) == 4 else tensor

    def run(model: Any, x: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, alike):
            return model(x)

    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Sigmoid())
    compare(model, torch.randn(6).expand(4, 6).contiguous(), run)


def test_hooks_that_hand_back_another_size_are_told() -> None:
    """Reading on past what a hook answered would be reading somebody else's memory."""
    run = torch.compile(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5)),
                        backend=backend.terrazzo)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t[:1, :3].contiguous()):
        found = run(torch.randn(4, 6))
    loss = found.square().sum()
    with pytest.raises(ShapeError, match="saved"):
        loss.backward()


def test_images_that_lie_channels_last_already() -> None:
    model = Residual().to(memory_format=torch.channels_last)
    x = torch.randn(3, 3, 32, 32).to(memory_format=torch.channels_last)
    exact = copy.deepcopy(model).double()
    wanted = gradients(exact, exact, x.double().requires_grad_())
    found = gradients(torch.compile(model, backend=backend.terrazzo), model,
                      x.clone().requires_grad_())
    for a, b in zip(found, wanted, strict=True):
        assert (a.double() - b).abs().max() <= 2e-5 * b.abs().max() + 1e-6


def test_a_graph_that_is_kept_for_a_second_backward_pass() -> None:
    model = Residual()
    run = torch.compile(model, backend=backend.terrazzo)
    loss = run(torch.randn(3, 3, 32, 32)).square().sum()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    for p, first in zip(model.parameters(), once, strict=True):
        assert torch.allclose(p.grad, 2 * first, rtol=1e-5, atol=1e-6)


def test_sizes_that_vary() -> None:
    model = Residual()
    exact = copy.deepcopy(model).double()
    run = torch.compile(model, backend=backend.terrazzo, dynamic=True)
    for size in (32, 40, 35):
        model.zero_grad()
        exact.zero_grad()
        x = torch.randn(3, 3, size, size)
        wanted = gradients(exact, exact, x.double().requires_grad_())
        found = gradients(run, model, x.requires_grad_())
        for a, b in zip(found, wanted, strict=True):
            assert (a.double() - b).abs().max() <= 2e-5 * b.abs().max() + 1e-6


@pytest.mark.parametrize("size", [(4, 2), (4,), (3, 4, 2)])
def test_what_may_fail_while_it_runs_has_a_gradient(size: tuple[int, ...]) -> None:
    """Torch hands tokens of such calls from one to the next, in front of all results."""
    torch.manual_seed(0)
    batch = size[:-2] if len(size) > 2 else ()
    found = []
    a, b = torch.randn(*batch, 4, 4) + 4 * torch.eye(4), torch.randn(size)
    torch._dynamo.reset()
    for solve in (torch.compile(torch.linalg.solve, backend=backend.terrazzo),
                  torch.linalg.solve):
        matrix, right = a.clone().requires_grad_(), b.clone().requires_grad_()
        y = solve(matrix, right)
        y.square().sum().backward()
        found.append((y.detach(), matrix.grad, right.grad))
    torch.testing.assert_close(*found)
