"""torch.compile with `cpu_backend = "triton"`: inductor's own kernels, run by our backend.

Every test compares with eager torch and asserts two things more: that kernels of ours were
launched, and that nothing was left to torch's own operators but what the test names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from terrazzo.errors import KernelAssertion
from terrazzo.triton_cpu.launch import Launcher

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
nn, F = torch.nn, torch.nn.functional

pytestmark = [pytest.mark.triton, pytest.mark.torch,
              pytest.mark.filterwarnings("ignore::DeprecationWarning")]
EXTERNAL = re.compile(r"(?:torch\.ops\.aten|extern_kernels|aten)\.(\w+)[\w.]*\(")


@dataclass
class Launches:
    """How many kernels were launched through our driver."""

    count: int = 0


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Inductor set to Triton, with nothing remembered from elsewhere."""
    from torch._inductor import config
    from torch._inductor.utils import fresh_cache

    counted = Launches()
    run = Launcher.__call__

    def counting(self: Launcher, *args: Any) -> None:
        counted.count += 1
        run(self, *args)

    monkeypatch.setattr(Launcher, "__call__", counting)
    torch._dynamo.reset()
    torch.manual_seed(0)
    settings = {"cpu_backend": "triton", "compile_threads": 1, "triton.autotune_pointwise": False,
                "inductor_default_autotune_rep": 1, "inductor_default_autotune_warmup": 1}
    with config.patch(settings), fresh_cache():
        yield counted
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
    "not a number": Case(many(
        lambda x: _spread(x).amax(-1), lambda x: _spread(x).argmax(0),
        lambda x: _spread(x).nan_to_num(), lambda x: torch.minimum(_spread(x), x),
        lambda x: _spread(x).isfinite().all(-1)), (floats(9, 65),)),
    "integers": Case(many(
        lambda x, y: (x // y, x % y, torch.div(x, y, rounding_mode="trunc")),
        lambda x, y: ((x & y) | (x ^ ~y)) << 2, lambda x, y: x >> 3,
        lambda x, y: (x.to(torch.int8) * y.to(torch.int8), x.to(torch.uint8) // 3),
        lambda x, y: (x > 0) & ~(y > 4) ^ (x < y)), (integers(-99, 99, 77), integers(1, 9, 77))),
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
    "norms": Case(many(
        lambda x, w, b: F.layer_norm(x, (12,), w.repeat(2), b.repeat(2)),
        lambda x, w, b: F.group_norm(x, 3, w, b), lambda x, w, b: F.rms_norm(x, (12,)),
        lambda x, w, b: F.batch_norm(x, w * 0, b.abs() + 1, w, b, training=True)),
        (floats(4, 6, 9, 12), floats(6), floats(6, seed=1))),
    "gather": Case(many(
        lambda x, i: x[i, i.flip(0)], lambda x, i: x.gather(1, i[:20, None]),
        lambda x, i: x.index_select(1, i), lambda x, i: F.embedding(i, x)),
        (floats(20, 30), integers(0, 20, 50))),
    # Sums in the order in which atomics happen to come.
    "scatter": Case(many(
        lambda x, i, s: x.index_add(0, i, s),
        lambda x, i, s: x.index_put((i,), s, accumulate=True),
        lambda x, i, s: x.scatter(1, i[:20, None], 5.0),
        lambda x, i, s: x.slice_scatter(s[:5], 0, 2, 7),
        lambda x, i, s: x.masked_fill(x > 0, -1.0)),
        (floats(20, 30), integers(0, 20, 50), floats(50, 30, seed=1)), tolerance=1e-5),
    "scatter_add": Case(lambda x, i, s: x.scatter_add(0, i, s) * 2, (
        floats(20, 30), integers(0, 20, 50, 30), floats(50, 30, seed=1)),
        external=frozenset({"scatter_reduce_"}), tolerance=1e-5),
    "sort": Case(lambda x: x.sort(dim=-1, stable=True, descending=True),
                 (integers(0, 9, 4, 27).float(),)),
    "topk": Case(lambda x: torch.topk(x * 2, 5), (floats(10, 100),),
                 external=frozenset({"topk"})),
    "scans": Case(many(
        lambda x: x.cumsum(-1), lambda x: x.cumsum(0), lambda x: (x / 9 + 1).cumprod(-1),
        lambda x: x.cummax(-1), lambda x: x.logcumsumexp(-1)), (floats(10, 70),), tolerance=1e-5),
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


@pytest.mark.parametrize("name", CASES)
def test_operators(name: str, launches: Launches) -> None:
    case = CASES[name]
    results, external = compiled(case.function, *(a.clone() for a in case.args))
    assert launches.count > 0
    assert external == case.external
    expected = case.function(*case.args)
    if isinstance(expected, list):
        results, expected = list(results), list(expected)
    torch.testing.assert_close(results, expected, rtol=case.tolerance, atol=case.tolerance,
                               equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_rounded_once(dtype: torch.dtype, launches: Launches) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.gelu(x) * y + 1, torch.softmax(x, -1), F.layer_norm(x, (70,)), x.sum(0)

    x, y = floats(33, 70, dtype=dtype), floats(70, dtype=dtype, seed=1)
    results, external = compiled(function, x, y)
    assert launches.count > 0 and not external
    for result, exact in zip(results, function(x.double(), y.double()), strict=True):
        assert result.dtype is dtype
        # Intermediate values are f32: two units in the last place, not one for each operator.
        torch.testing.assert_close(result.double(), exact, rtol=2 * torch.finfo(dtype).eps,
                                   atol=1e-5)


# ---------------------------------------------------------------- random numbers
def test_random_numbers(launches: Launches) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.rand_like(x), torch.randn_like(x), F.dropout(x, 0.3), torch.randint(
            0, 7, x.shape)

    x = torch.ones(400, 100)
    run = torch.compile(function, fullgraph=True)
    streams = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        streams.append(run(x))
    assert launches.count > 0
    for first, same, other in zip(*streams, strict=True):
        assert torch.equal(first, same) and not torch.equal(first, other)
    uniform, normal, dropped, whole = streams[0]
    assert uniform.min() >= 0 and uniform.max() < 1
    # Five standard errors of 40 000 draws.
    assert abs(uniform.mean() - 0.5) < 5 * 0.2887 / 200
    assert abs(normal.mean()) < 5 / 200 and abs(normal.std() - 1) < 5 / 280
    assert abs((dropped > 0).float().mean() - 0.7) < 5 * 0.458 / 200
    torch.testing.assert_close(dropped[dropped > 0].unique(), torch.tensor([1 / 0.7]))
    assert whole.unique().tolist() == list(range(7))
    assert abs(whole.float().mean() - 3) < 5 * 2 / 200


# ---------------------------------------------------------------- sizes, gradients, errors
def test_dynamic_shapes_compile_once(launches: Launches) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1) + x.sum(0) * x.shape[0]

    run = torch.compile(function, fullgraph=True)
    for rows, columns in ((5, 7), (33, 70), (300, 3), (2, 1025)):
        x = floats(rows, columns)
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(x, 1)
        with torch.compiler.set_stance("default" if rows == 5 else "fail_on_recompile"):
            result = run(x)
        torch.testing.assert_close(result, function(x), rtol=1e-4, atol=1e-4)
    assert launches.count > 4


def test_gradient_of_embedding(launches: Launches) -> None:
    def loss(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.embedding(rows, weight, padding_idx=3) ** 2, 0.0).sum()

    rows, weight = integers(0, 20, 4, 50), floats(20, 16)
    mine, theirs = (weight.clone().requires_grad_() for _ in range(2))
    torch.compile(loss, fullgraph=True)(mine, rows).backward()
    loss(theirs, rows).backward()
    assert launches.count > 1
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-5)


def test_autotuning(launches: Launches) -> None:
    from torch._inductor import config

    x = floats(64, 40)
    with config.patch({"triton.autotune_pointwise": True}):
        results, _ = compiled(lambda x: x.t() * 2 + 1, x)
    assert launches.count > 2  # more than one configuration was tried
    torch.testing.assert_close(results, x.t() * 2 + 1)


def test_index_out_of_bounds_is_an_error() -> None:
    run = torch.compile(lambda x, i: x[i] * 2, fullgraph=True)
    with pytest.raises(KernelAssertion, match="index out of bounds"):
        run(floats(10), torch.tensor([1, 2, 50]))


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


def train(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, use_compile: bool
          ) -> dict[str, torch.Tensor]:
    """Two steps; losses, parameters, statistics and the last gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())

    update = optimizer.step
    if use_compile:
        loss_of, update = torch.compile(loss_of, fullgraph=True), torch.compile(update)
    state = {}
    for step in range(2):
        optimizer.zero_grad()
        loss = loss_of(inputs, targets)
        loss.backward()
        update()
        state[f"loss {step}"] = loss.detach()
    gradients = {f"gradient of {n}": p.grad for n, p in model.named_parameters()}
    return state | gradients | model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(("make", "inputs", "targets"), [
    pytest.param(transformer, integers(0, 40, 3, 12), integers(0, 40, 3, 12, seed=1),
                 id="transformer"),
    pytest.param(convolutional, floats(4, 3, 16, 16), integers(0, 10, 4), id="convolutional"),
])
def test_training(make: Callable[[], nn.Module], inputs: torch.Tensor, targets: torch.Tensor,
                  launches: Launches) -> None:
    mine, theirs = make(), make()
    theirs.load_state_dict(mine.state_dict())
    results = train(mine, inputs, targets, use_compile=True)
    assert launches.count > 20
    torch.testing.assert_close(results, train(theirs, inputs, targets, use_compile=False),
                               rtol=1e-4, atol=1e-5)
