"""Gradients, autocast and training on the device equal those of the CPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("device")]
nn, F = torch.nn, torch.nn.functional


class ConvNet(nn.Module):
    """Two convolutions with batch norm, pools, linear.

    Without biases that the norm takes away again: their gradient is rounding, which Adam makes
    steps of.
    """

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16),
            nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(16 * 4 * 4, 10)

    def forward(self, x: Any) -> Any:
        return self.head(self.features(x).flatten(1))


def batches(count: int) -> list[tuple[Any, Any]]:
    made = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 1, 16, 16, generator=made),
             torch.randint(0, 10, (8,), generator=made)) for _ in range(count)]


def trained(where: str, optimizer: Any, steps: int = 3, autocast: Any = None) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = ConvNet().to(where)
    opt, losses = optimizer(model.parameters()), []
    for x, y in batches(steps):
        with torch.autocast(where, dtype=autocast, enabled=autocast is not None):
            loss = F.cross_entropy(model(x.to(where)), y.to(where))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses, {k: v.cpu() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("optimizer", [
    lambda p: torch.optim.Adam(p), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: torch.optim.AdamW(p, foreach=False)], ids=["adam", "sgd", "adamw"])
def test_the_conv_net_learns_as_on_the_cpu(optimizer: Any) -> None:
    losses, state = trained("gcu", optimizer)
    expected, wanted = trained("cpu", optimizer)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, wanted, rtol=1e-3, atol=2e-4)


def test_the_conv_net_with_autocast() -> None:
    losses, _ = trained("gcu", torch.optim.Adam, autocast=torch.bfloat16)
    expected, _ = trained("cpu", torch.optim.Adam)
    torch.testing.assert_close(losses, expected, rtol=3e-2, atol=3e-2)


def test_gradients_of_gradients() -> None:
    def second(where: str) -> Any:
        x = torch.linspace(-2, 2, 9, device=where, requires_grad=True)
        (first,) = torch.autograd.grad((x.tanh() * x).sum(), x, create_graph=True)
        (found,) = torch.autograd.grad(first.pow(2).sum(), x)
        return found.cpu()

    torch.testing.assert_close(second("gcu"), second("cpu"))


@pytest.mark.parametrize("make", [
    lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
    lambda: nn.LSTM(16, 8, batch_first=True), lambda: nn.GRU(16, 8, batch_first=True),
    lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Softmax(-1)),
    lambda: nn.MultiheadAttention(16, 4, batch_first=True),
    lambda: nn.ConvTranspose1d(5, 3, 3), lambda: nn.GroupNorm(5, 5)],
    ids=["transformer", "lstm", "gru", "mlp", "attention", "transposed", "groups"])
def test_layers(make: Any) -> None:
    def run(where: str) -> tuple[Any, Any]:
        torch.manual_seed(3)
        layer = make().to(where)
        x = torch.randn(2, 5, 16).to(where).requires_grad_()
        y = layer(x, x, x)[0] if isinstance(layer, nn.MultiheadAttention) else layer(x)
        y = y[0] if isinstance(y, tuple) else y
        (y * y).sum().backward()
        return y.detach().cpu(), [x.grad.cpu(), *(p.grad.cpu() for p in layer.parameters())]

    torch.testing.assert_close(run("gcu"), run("cpu"), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- autocast
def test_autocast_chooses_types() -> None:
    x = torch.randn(4, 4, device="gcu")
    with torch.autocast("gcu"):
        assert torch.get_autocast_dtype("gcu") is torch.float16  # as of CUDA
        assert (x @ x).dtype is torch.float16
        assert F.conv1d(x[None], x[:, :, None]).dtype is torch.float16
        assert F.softmax((x @ x), -1).dtype is torch.float32
        assert torch.cat([x, x.bfloat16()]).dtype is torch.float32
        assert torch.exp(x.bfloat16()).dtype is torch.float32
        with torch.autocast("gcu", enabled=False):
            assert (x @ x).dtype is torch.float32
    with torch.autocast("gcu", dtype=torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(x.sigmoid(), x.sigmoid())
    scaler = torch.amp.GradScaler("gcu")
    weight = torch.ones(3, device="gcu", requires_grad=True)
    opt = torch.optim.SGD([weight], lr=0.5)
    scaler.scale((weight * 2).sum()).backward()
    scaler.step(opt)
    scaler.update()
    assert weight.tolist() == [0.0, 0.0, 0.0]


# ---------------------------------------------------------------- compiled, or counted
def test_a_training_step_is_compiled(counted: ModuleType) -> None:
    model = ConvNet().to("gcu")
    opt = torch.optim.Adam(model.parameters())
    x, y = (t.to("gcu") for t in batches(1)[0])
    counted.reset_fallbacks()
    F.cross_entropy(model(x), y).backward()
    opt.step()
    assert counted.fallbacks() == {}


@pytest.mark.parametrize("call", [
    lambda x, y: x + y, lambda x, y: x.t() @ y, lambda x, y: x[:, ::2] * y[:, 1::2],
    lambda x, y: x.softmax(-1), lambda x, y: torch.cat([x, y.t().reshape(6, 8)]),
    lambda x, y: x.clone().add_(y, alpha=0.5), lambda x, y: x.double() - 1, lambda x, y: x.var(1),
    lambda x, y: torch.add(x, y, out=torch.empty_like(x)), lambda x, y: x.clone().t().mul_(y.t()),
    lambda x, y: (x > y).sum(0), lambda x, y: x.clone().clamp_(-0.5, 0.5), lambda x, y: -x[2:4],
    lambda x, y: x.cumsum(1), lambda x, y: x.argmax(1), lambda x, y: x.to(torch.int32),
    lambda x, y: x.clone().masked_fill_(y > 0, 7), lambda x, y: x[:1].expand(4, 8).contiguous(),
    lambda x, y: 3 / y, lambda x, y: x.bfloat16() * 0.1, lambda x, y: x.abs().logical_not(),
    lambda x, y: torch.arange(8, device=x.device) + x])
def test_operators_without_the_cpu(counted: ModuleType, call: Any) -> None:
    made = torch.Generator().manual_seed(2)
    x, y = torch.randn(6, 8, generator=made), torch.randn(6, 8, generator=made)
    here = x.to("gcu"), y.to("gcu")
    found, expected = call(*here), call(x, y)
    assert counted.fallbacks() == {}
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found.cpu(), expected)


def test_what_changes_itself_is_read_first(counted: ModuleType) -> None:
    def changed(where: str) -> Any:
        x = torch.arange(12.0).reshape(3, 4).to(where)
        x.add_(x)
        torch.mul(x, x, out=x)
        x[1:].sub_(x[0])
        x.t()[1:3].mul_(2)
        x.div_(x.sum())
        return x.cpu()

    torch.testing.assert_close(changed("gcu"), changed("cpu"))
    assert counted.fallbacks() == {}


def test_numbers_that_vary_need_no_new_code(counted: ModuleType) -> None:
    from terrazzo.torch_device import plans

    made: list[bool] = []
    before = plans._compiled

    def counting(*args: Any) -> Any:
        made.append(True)
        return before(*args)

    plans._compiled = counting
    try:
        x = torch.linspace(-1, 1, 7, dtype=torch.float64)
        here = x.to("gcu")
        for step in range(1, 9):
            for a, b in ((here.clone(), x.clone()),):
                a.addcdiv_(here, here + 2, value=-0.1 / step).mul_(1 - 0.01 * step)
                b.addcdiv_(x, x + 2, value=-0.1 / step).mul_(1 - 0.01 * step)
                torch.testing.assert_close(a.cpu(), b, rtol=1e-15, atol=0)
    finally:
        plans._compiled = before
    assert 0 < len(made) <= 8
    assert counted.fallbacks() == {}


def test_wrong_calls_are_torchs_own_errors() -> None:
    x = torch.ones(3, 4, device="gcu")
    with pytest.raises(RuntimeError, match=r"size of tensor a \(4\) must match"):
        x + torch.ones(3, 5, device="gcu")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        x @ x
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.ones(3, dtype=torch.int32, device="gcu").add_(0.5)
    with pytest.raises(IndexError, match="out of range"):
        x.sum(5)


def test_fallbacks_are_counted(counted: ModuleType) -> None:
    assert counted.fallbacks() == {}
    torch.linalg.svdvals(torch.eye(3, device="gcu"))
    torch.linalg.svdvals(torch.eye(3, device="gcu"))
    assert any(name.startswith("aten::") and "svd" in name and n >= 2
               for name, n in counted.fallbacks().items())
    counted.reset_fallbacks()
    assert counted.fallbacks() == {}


def test_deterministic_mode() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        x = torch.randn(20, device="gcu")
        index = torch.arange(20, device="gcu") % 3
        once, again = (torch.zeros(3, device="gcu").index_add(0, index, x) for _ in range(2))
        assert torch.equal(once.cpu(), again.cpu())
    finally:
        torch.use_deterministic_algorithms(False)
