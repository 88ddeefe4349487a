"""What the tests of torch.compile share: functions by families, models, and how to compile them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

EXTERNAL = re.compile(r"(?:torch\.ops\.aten|extern_kernels|aten)\.(\w+)[\w.]*\(")


@dataclass
class Launches:
    """How many kernels were launched through our driver."""

    count: int = 0


@contextmanager
def inductor(backend: str) -> Iterator[None]:
    """Inductor set to write kernels with a backend, with nothing compiled before."""
    from torch._inductor import config

    settings = {"cpu_backend": backend, "compile_threads": 1, "triton.autotune_pointwise": False,
                "inductor_default_autotune_rep": 1, "inductor_default_autotune_warmup": 1,
                "cpp.vec_isa_ok": True}  # or C++ is compiled to try each instruction set
    torch._dynamo.reset()
    with config.patch(settings):
        yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], *args: Any) -> tuple[Any, set[str]]:
    """The results of a compiled function, and the operators that it left to torch."""
    from torch._inductor.utils import run_and_get_code

    results, code = run_and_get_code(torch.compile(function, fullgraph=True), *args)
    return results, {name for text in code for name in EXTERNAL.findall(text)}


# ---------------------------------------------------------------- single operators, by families
@dataclass(frozen=True)
class Case:
    """A function with its inputs; what it may leave to torch; a tolerance, where sums are long."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    external: frozenset[str] = frozenset()
    tolerance: float | None = None


def floats(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64, seed: int = 0
             ) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator).to(dtype)


def many(*functions: Callable[..., Any]) -> Callable[..., Any]:
    """Several functions of the same arguments as one."""
    return lambda *args: [f(*args) for f in functions]


def _spread(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 1.5, float("nan"), torch.where(x < -1.5, float("inf"), x))


CASES = {
    "pointwise": Case(many(
        lambda x, y, z: F.gelu(x) * y + F.silu(x) / (1 + z.exp()),
        lambda x, y, z: (x.sin() + x.cos() * x.tanh()).sigmoid().log1p().erf(),
        lambda x, y, z: torch.where(x > y, x, z.clamp(-1, 1)).pow(3).abs().sqrt()),
        (floats(5, 33, 17), floats(33, 1, seed=1), floats(17, seed=2))),
    "functions": Case(many(
        torch.asin, torch.atanh, torch.erfinv, lambda x: torch.lgamma(x.abs() + 0.1),
        lambda x: torch.atan2(x, x + 0.3), lambda x: torch.nextafter(x, -x), torch.signbit,
        torch.frexp, lambda x: torch.remainder(x, -0.3), lambda x: torch.special.i0(x * 9),
        torch.special.erfcx, lambda x: torch.round(x * 9, decimals=1)),
        (torch.linspace(-0.95, 0.95, 101),)),
    "activations": Case(many(
        F.hardswish, F.leaky_relu, F.elu, F.softplus, F.mish, F.logsigmoid, F.hardshrink,
        lambda x: F.glu(x, -1), lambda x: F.gelu(x, approximate="tanh")), (floats(9, 34) * 3,)),
    "doubles": Case(many(
        torch.exp, torch.sin, torch.tanh, F.gelu, lambda x: x.softmax(-1),
        lambda x: torch.var_mean(x, 0, correction=0)), (floats(9, 33, dtype=torch.float64),)),
    "not a number": Case(many(
        lambda x: _spread(x).amax(-1), lambda x: _spread(x).argmax(0),
        lambda x: _spread(x).nan_to_num(), lambda x: torch.minimum(_spread(x), x),
        lambda x: _spread(x).isfinite().all(-1)), (floats(9, 65),)),
    "integers": Case(many(
        lambda x, y: (x // y, x % y, torch.div(x, y, rounding_mode="trunc")),
        lambda x, y: ((x & y) | (x ^ ~y)) << 2, lambda x, y: x >> 3,
        lambda x, y: (x.to(torch.int8) * y.to(torch.int8), x.to(torch.uint8) // 3),
        lambda x, y: (x > 0) & ~(y > 4) ^ (x < y)), (integers(-99, 99, 77), integers(1, 9, 77))),
    "long integers": Case(many(
        lambda x: (x * x + 3, x // 7, x % 1000003, x << 5, x >> 11), lambda x: x.abs().sum(),
        lambda x: x.prod(), lambda x: (x.int(), x.float(), x.double()), lambda x: x.amax(),
        lambda x: x.clamp(-5, 2**35).sign()), (integers(-2**40, 2**40, 77),)),
    "casts": Case(many(*(
        lambda x, t=t: (x * 7).to(t) for t in (torch.bool, torch.int32, torch.uint8, torch.float64,
                                               torch.float16, torch.bfloat16)),
        lambda x: (x * 3).to(torch.float8_e4m3fn).float(), lambda x: x.view(torch.int32) + 1),
        (floats(99).abs(),)),
    "layouts": Case(many(
        lambda x, y: x.t() + y, lambda x, y: x[1:30:2, ::3] * 2, lambda x, y: x.flip(0).roll(3, 1),
        lambda x, y: torch.cat([x * 2, y.t()], 1), lambda x, y: F.pad(x, (1, 2, 3, 0), value=2.0),
        lambda x, y: x.tril() + torch.arange(17), lambda x, y: x[:0].exp()),
        (floats(33, 17), floats(17, 33, seed=1))),
    "sums": Case(many(
        lambda x: x.sum(-1), lambda x: x.mean(0), lambda x: x.sum(), lambda x: x.prod(1),
        lambda x: torch.logsumexp(x, 0), lambda x: (x > 0).sum(-1)), (1 + floats(37, 70) / 9,)),
    "variance": Case(many(
        lambda x: torch.var_mean(x, -1), lambda x: x.std(0), lambda x: x.var()),
        (3 + floats(21, 1300),)),
    "extrema": Case(many(
        lambda x: x.max(-1), lambda x: x.min(0), lambda x: x.argmax(), lambda x: x.amin((0, 1)),
        lambda x: (x > 2).any(-1), lambda x: (x > -9).all()), (floats(33, 70),)),
    "many rows": Case(many(
        lambda x: x.sum(0), lambda x: x.amax(0)), (floats(3000, 5),), tolerance=1e-4),
    "softmax": Case(many(
        lambda x: torch.softmax(x, -1), lambda x: torch.log_softmax(x, 0),
        lambda x: F.cross_entropy(x, torch.arange(33))), (floats(33, 300) * 5,)),
    "long softmax": Case(lambda x: torch.softmax(x, -1), (floats(3, 9000),)),
    "losses": Case(many(
        F.mse_loss, F.smooth_l1_loss, F.cosine_similarity,
        lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
        lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
        lambda x, y: F.cross_entropy(x, torch.arange(9), label_smoothing=0.1)),
        (floats(9, 33), floats(9, 33, seed=1))),
    "norms": Case(many(
        lambda x, w, b: F.layer_norm(x, (12,), w.repeat(2), b.repeat(2)),
        lambda x, w, b: F.group_norm(x, 3, w, b), lambda x, w, b: F.rms_norm(x, (12,)),
        lambda x, w, b: F.batch_norm(x, w * 0, b.abs() + 1, w, b, training=True)),
        (floats(4, 6, 9, 12), floats(6), floats(6, seed=1))),
    "gather": Case(many(
        lambda x, i: x[i, i.flip(0)], lambda x, i: x.gather(1, i[:20, None]),
        lambda x, i: x.index_select(1, i), lambda x, i: F.embedding(i, x)),
        (floats(20, 30), integers(0, 20, 50))),
    "search": Case(many(
        lambda x, b: torch.bucketize(x, b), lambda x, b: torch.bucketize(x, b, right=True),
        lambda x, b: torch.searchsorted(b.expand(9, -1).contiguous(), x, out_int32=True)),
        (floats(9, 33), floats(21).sort()[0])),
    # Sums in the order in which atomics happen to come.
    "scatter": Case(many(
        lambda x, i, s: x.index_add(0, i, s),
        lambda x, i, s: x.index_put((i,), s, accumulate=True),
        lambda x, i, s: x.scatter(1, i[:20, None], 5.0),
        lambda x, i, s: x.slice_scatter(s[:5], 0, 2, 7),
        lambda x, i, s: x.masked_fill(x > 0, -1.0)),
        (floats(20, 30), integers(0, 20, 50), floats(50, 30, seed=1)), tolerance=1e-5),
    "scatter of halves": Case(
        lambda x, i, s: x.index_put((i,), s, accumulate=True),
        (torch.zeros(20, 30).half(), integers(0, 20, 50), integers(-9, 9, 50, 30).half())),
    "scatter_add": Case(lambda x, i, s: x.scatter_add(0, i, s) * 2, (
        floats(20, 30), integers(0, 20, 50, 30), floats(50, 30, seed=1)),
        external=frozenset({"scatter_reduce_"}), tolerance=1e-5),
    "sort": Case(lambda x: x.sort(dim=-1, stable=True, descending=True),
                 (integers(0, 9, 4, 27).float(),)),
    "argsort": Case(many(
        lambda x: x.argsort(dim=0, stable=True), lambda x: x.argmin(-1)),
        (integers(-2**40, 2**40, 13, 3),)),
    "topk": Case(lambda x: torch.topk(x * 2, 5), (floats(10, 100),),
                 external=frozenset({"topk"})),
    "scans": Case(many(
        lambda x: x.cumsum(-1), lambda x: x.cumsum(0), lambda x: (x / 9 + 1).cumprod(-1),
        lambda x: x.cummax(-1), lambda x: x.logcumsumexp(-1)), (floats(10, 70),), tolerance=1e-5),
    "scans of integers": Case(many(
        lambda x: x.cumsum(-1), lambda x: (x > 0).cumsum(0), lambda x: x.int().cummin(-1)),
        (integers(-9, 9, 10, 70),)),
    # Torch adds in float64 where kernels add in float32.
    "long scan": Case(lambda x: x.cumsum(-1), (floats(20_000),), tolerance=1e-3),
    "windows": Case(many(
        lambda x: F.max_pool2d(x, 3, 2, 1), lambda x: F.avg_pool2d(x, 2),
        lambda x: F.interpolate(x, scale_factor=2)), (floats(2, 3, 9, 9),)),
    "products": Case(many(
        lambda x, w, c: F.gelu(F.linear(x, w)),
        lambda x, w, c: F.relu(F.conv2d(x.view(2, 3, 4, 8), c, padding=1))),
        (floats(6, 32), floats(11, 32), floats(5, 3, 3, 3)),
        external=frozenset({"mm", "convolution"}), tolerance=1e-5),
}


# ---------------------------------------------------------------- training
class Attention(nn.Module):
    """Causal attention over a few heads, then two dense layers, each after a norm."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dense = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(),
                                   nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        q, k, v = self.inward(self.norms[0](x)).unflatten(
            -1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(later, -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
        x = x + self.outward(mixed)
        return x + self.dense(self.norms[1](x))


def transformer() -> nn.Module:
    return nn.Sequential(nn.Embedding(40, 32), Attention(32, 4), nn.LayerNorm(32),
                         nn.Linear(32, 40))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(64, 10))


@dataclass(frozen=True)
class Training:
    """A model, the arguments of its loss, and the loss of both.

    Code of others may break graphs, as transformers does by logging; its update is not compiled.
    """

    make: Callable[[], nn.Module]
    arguments: dict[str, torch.Tensor]
    loss: Callable[..., torch.Tensor]
    of_others: bool = False


def classified(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


TRAININGS = {
    "transformer": Training(transformer, {"inputs": integers(0, 40, 3, 12),
                                          "targets": integers(0, 40, 3, 12, seed=1)}, classified),
    "convolutional": Training(convolutional, {"inputs": floats(4, 3, 16, 16),
                                              "targets": integers(0, 10, 4)}, classified),
}


def train(training: Training, backend: str | None) -> dict[str, torch.Tensor]:
    """Two steps, compiled or eager: losses, all gradients of both, parameters and statistics."""
    torch.manual_seed(0)
    model = training.make().train()
    # Not Adam: its first step is a sign, in which gradients that are zero but for rounding differ.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    loss_of, update = training.loss, optimizer.step
    if backend is not None:
        loss_of = torch.compile(loss_of, fullgraph=not training.of_others)
        update = update if training.of_others else torch.compile(update)
    state = {}
    with inductor(backend or "cpp"):
        for step in range(2):
            optimizer.zero_grad()
            loss = loss_of(model, **training.arguments)
            loss.backward()
            state[f"loss {step}"] = loss.detach()
            state |= {f"gradient {step} of {name}": parameter.grad.clone()
                      for name, parameter in model.named_parameters()
                      if parameter.grad is not None}
            update()
    return state | model.state_dict()
