"""Training with `torch.compile(backend="terrazzo")` goes as in eager mode, step by step."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from terrazzo.torch import backend  # noqa: E402

pytestmark = pytest.mark.torch
functional = nn.functional


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def compiled(model: Any, **kwargs: Any) -> Any:
    return torch.compile(model, backend=backend.terrazzo, **kwargs)


def close(ours: Any, theirs: Any, part: float = 2e-4) -> None:
    """Equal but for rounding, as a part of the largest: several steps add up."""
    assert ours.shape == theirs.shape and ours.dtype is theirs.dtype
    scale = theirs.abs().max().item() + 1e-12
    assert torch.isfinite(ours).all()
    assert (ours.double() - theirs.double()).abs().max().item() <= part * scale


def same_state(ours: Any, theirs: Any, part: float = 2e-4) -> None:
    """Parameters, gradients and buffers of two modules."""
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        close(a.detach(), b.detach(), part)
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            assert a.grad.stride() == b.grad.stride()
            close(a.grad, b.grad, 5 * part)
    for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
        close(a, b, part)


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = 4, dropout
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(dropout),
                                 nn.Linear(2 * width, width))

    def forward(self, x: Any) -> Any:
        b, n, c = x.shape
        split = self.qkv(self.first(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = split.unbind(0)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + functional.dropout(self.out(y.transpose(1, 2).reshape(b, n, c)), self.dropout,
                                   self.training)
        return x + self.mlp(self.second(x))


class Transformer(nn.Module):
    def __init__(self, dropout: float = 0.1, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.checkpointed = checkpointed  # None: not at all; else whether reentrant
        self.words = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList(Block(16, dropout) for _ in range(2))
        self.head = nn.Linear(16, 20)

    def forward(self, ids: Any) -> Any:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x) if self.checkpointed is None else checkpoint(
                block, x, use_reentrant=self.checkpointed)
        return self.head(x).mean(1)


def mlp() -> Any:
    return nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 20))


def convnet() -> Any:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
                         nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, stride=2, bias=False),
                         nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(16, 20))


def rows() -> Any:
    return torch.randn(6, 12)


def images() -> Any:
    return torch.randn(4, 3, 12, 12)


def words() -> Any:
    return torch.randint(0, 20, (3, 7))


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-3)


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "mlp": (mlp, rows), "convnet": (convnet, images), "transformer": (Transformer, words)}


def train(step: Any, model: Any, batches: Any, optimizer: Any, **kwargs: Any) -> list[Any]:
    """The losses of some steps, with the same random numbers each time."""
    opt, losses = optimizer(model.parameters()), []
    torch.manual_seed(7)
    for x, target in batches:
        opt.zero_grad(**kwargs)
        loss = functional.cross_entropy(step(x), target)
        loss.backward()
        opt.step()
        losses.append(loss.detach())
    return losses


def batches_of(given: Callable[[], Any], count: int = 4) -> list[Any]:
    made = [given() for _ in range(count)]
    return [(x, torch.randint(0, 20, (len(x),))) for x in made]


@pytest.mark.parametrize("optimizer", [sgd, adamw], ids=["sgd", "adamw"])
@pytest.mark.parametrize("name", MODELS)
def test_steps(name: str, optimizer: Any) -> None:
    model = MODELS[name][0]()
    twin, batches = copy.deepcopy(model), batches_of(MODELS[name][1])
    ours = train(compiled(model), model, batches, optimizer)
    theirs = train(twin, twin, batches, optimizer)
    for a, b in zip(ours, theirs, strict=True):
        close(a, b)
    # Adam divides by the root of what may be rounding alone, so a parameter may go another way.
    same_state(model, twin, 2e-4 if optimizer is sgd else 5e-3)


def test_batches_of_varying_sizes() -> None:
    model = mlp()
    twin = copy.deepcopy(model)
    batches = [(torch.randn(n, 12), torch.randint(0, 20, (n,))) for n in (6, 4, 9, 1, 6)]
    ours, theirs = train(compiled(model), model, batches, sgd), train(twin, twin, batches, sgd)
    for a, b in zip(ours, theirs, strict=True):
        close(a, b)
    same_state(model, twin)


@pytest.mark.parametrize("name", MODELS)
def test_autocast(name: str) -> None:
    model = MODELS[name][0]()
    twin, exact = copy.deepcopy(model), copy.deepcopy(model)
    x, target = batches_of(MODELS[name][1], 1)[0]

    def run(step: Any, module: Any, enabled: bool = True) -> Any:
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y = step(x)
            loss = functional.cross_entropy(y, target)
        loss.backward()
        return y.detach()

    ours, theirs = run(compiled(model), model), run(twin, twin)
    best = run(exact, exact, False)
    assert ours.dtype is theirs.dtype is torch.bfloat16
    pairs = [(ours, theirs, best), *((a.grad, b.grad, c.grad) for a, b, c in zip(
        model.parameters(), twin.parameters(), exact.parameters(), strict=True))]
    for a, b, c in pairs:
        assert a.dtype is b.dtype
        scale = c.abs().max().item() + 1e-6
        error = (a.double() - c).abs().max().item()
        # Half as wrong again as eager mode, or two steps of bfloat16.
        assert error <= 1.5 * (b.double() - c).abs().max().item() + 2**-7 * scale


@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_checkpointing(reentrant: bool, dropout: float) -> None:
    model = Transformer(dropout, checkpointed=reentrant)
    twin = copy.deepcopy(model)
    twin.checkpointed = None
    batches = batches_of(words, 2)
    ours, theirs = train(compiled(model), model, batches, sgd), train(twin, twin, batches, sgd)
    for a, b in zip(ours, theirs, strict=True):
        close(a, b)
    same_state(model, twin)


def test_hooks_of_modules_and_tensors() -> None:
    model = mlp()
    twin, x = copy.deepcopy(model), rows()

    def told(module: Any, step: Callable[[Any], Any]) -> list[Any]:
        seen: list[Any] = []
        module[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        module[0].register_forward_hook(lambda m, args, y: y + 1)
        module[3].register_full_backward_hook(
            lambda m, gi, go: seen.append(go[0].detach().clone()))
        module[3].weight.register_hook(lambda g: g * 3)
        module[0].weight.register_post_accumulate_grad_hook(
            lambda p: seen.append(p.grad.clone()))
        leaf = x.clone().requires_grad_()
        leaf.register_hook(lambda g: seen.append(g.clone()))
        y = step(module)(leaf)
        y.register_hook(lambda g: g * 0.5)
        y.square().sum().backward()
        return [*seen, leaf.grad, *(p.grad for p in module.parameters())]

    ours, theirs = told(model, compiled), told(twin, lambda m: m)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        close(a, b)


def test_accumulation() -> None:
    model = convnet()
    twin, batches = copy.deepcopy(model), batches_of(images, 3)

    def run(step: Any, module: Any) -> None:
        for x, target in batches:
            (functional.cross_entropy(step(x), target) / 3).backward()

    run(compiled(model), model)
    run(twin, twin)
    same_state(model, twin)


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad(to_none: bool) -> None:
    model = mlp()
    twin, batches = copy.deepcopy(model), batches_of(rows)
    ours = train(compiled(model), model, batches, sgd, set_to_none=to_none)
    theirs = train(twin, twin, batches, sgd, set_to_none=to_none)
    for a, b in zip(ours, theirs, strict=True):
        close(a, b)
    same_state(model, twin)


def test_retained_graph() -> None:
    model = mlp()
    twin, x = copy.deepcopy(model), rows()
    for step in (compiled(model), twin):
        loss = step(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()
    same_state(model, twin)


def test_graph_retained_after_one_that_was_not() -> None:
    model = mlp()
    twin, x = copy.deepcopy(model), rows()
    for step in (compiled(model), twin):
        step(x).square().mean().backward()
        loss = step(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    same_state(model, twin)


def test_double_backward_is_refused_as_torch_does() -> None:
    x = rows().requires_grad_()
    y = compiled(mlp())(x).square().sum()
    grad, = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        grad.sum().backward()


def test_frozen_layers_get_no_gradient() -> None:
    model = convnet()
    for p in (*model[0].parameters(), *model[1].parameters()):
        p.requires_grad_(False)
    twin, batches = copy.deepcopy(model), batches_of(images, 3)
    ours, theirs = train(compiled(model), model, batches, sgd), train(twin, twin, batches, sgd)
    for a, b in zip(ours, theirs, strict=True):
        close(a, b)
    same_state(model, twin)
    assert model[0].weight.grad is None


@pytest.mark.parametrize("optimizer", [sgd, adamw], ids=["sgd", "adamw"])
def test_compiled_optimizer_updates_in_place(optimizer: Any) -> None:
    model = mlp()
    twin = copy.deepcopy(model)
    opt, other = optimizer(model.parameters()), optimizer(twin.parameters())
    step = compiled(opt.step)
    places = [p.data_ptr() for p in model.parameters()]
    for _ in range(3):
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        step()
        other.step()
        same_state(model, twin)
    assert [p.data_ptr() for p in model.parameters()] == places
    for ours, theirs in zip(opt.state.values(), other.state.values(), strict=True):
        for name, value in ours.items():
            if isinstance(value, torch.Tensor):
                close(value, theirs[name])


@pytest.mark.parametrize("freeze", [False, True])
def test_inference_between_steps(freeze: bool) -> None:
    model = convnet()
    step = compiled(model, options={"freeze": freeze})
    opt, batches = sgd(model.parameters()), batches_of(images, 3)
    for x, target in batches:
        model.train()
        opt.zero_grad()
        functional.cross_entropy(step(x), target).backward()
        opt.step()
        model.eval()
        with torch.no_grad():
            close(step(x), model(x))
            for p in model.parameters():  # by hand as well
                p.mul_(0.99)
            close(step(x), model(x))


_DISTRIBUTED = '''
import os, sys, torch
import torch.distributed as dist
from torch import nn
from terrazzo.torch import backend
rank, address, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + address, rank=rank, world_size=2)
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 4))
parallel = torch.compile(nn.parallel.DistributedDataParallel(model), backend=backend.terrazzo)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(3, 8, 12)
for batch in x:
    opt.zero_grad()
    parallel(batch[4 * rank: 4 * rank + 4]).square().mean().backward()
    opt.step()
torch.save(model.state_dict(), f"{out}{rank}")
dist.destroy_process_group()
'''


@pytest.mark.slow
def test_distributed_data_parallel(tmp_path: Any) -> None:
    """Two processes on halves of a batch train as one on the whole."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("torch has no gloo")
    script = tmp_path / "rank.py"
    script.write_text(_DISTRIBUTED)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [subprocess.Popen([sys.executable, str(script), str(rank), str(tmp_path / "meet"),
                               str(tmp_path / "state")], env=environment, stderr=subprocess.PIPE)
             for rank in range(2)]
    for process in ranks:
        errors = process.communicate(timeout=240)[1]
        assert process.returncode == 0, errors.decode()[-2000:]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 4))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in torch.randn(3, 8, 12):
        opt.zero_grad()
        model(batch).square().mean().backward()
        opt.step()
    for rank in range(2):
        found = torch.load(tmp_path / f"state{rank}")
        for name, value in model.state_dict().items():
            close(found[name], value)


def test_running_statistics_of_batches_that_vary() -> None:
    torch.manual_seed(0)
    eager = nn.BatchNorm1d(3)
    ours = copy.deepcopy(eager)
    torch._dynamo.reset()
    run = torch.compile(ours, backend=backend.terrazzo, dynamic=True)
    for n in (4, 7, 9):
        x = torch.randn(n, 3)
        torch.testing.assert_close(run(x), eager(x))
        torch.testing.assert_close(ours.running_var, eager.running_var)
        torch.testing.assert_close(ours.running_mean, eager.running_mean)
