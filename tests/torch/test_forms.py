"""Forms of calls: sizes that vary, layouts, mutation, views, random numbers, what torch runs."""

from __future__ import annotations

import threading
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
    torch._dynamo.reset()
    made: list[Program] = []
    watch = made.append
    backend.WATCHERS.append(watch)
    yield made
    backend.WATCHERS.remove(watch)


def compiled(model: Any, **kwargs: Any) -> Any:
    return torch.compile(model, backend=backend.terrazzo, **kwargs)


def same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    assert ours.stride() == theirs.stride()


# ---------------------------------------------------------------- sizes
def test_sizes_that_vary_are_compiled_once(programs: list[Program]) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3)).eval()
    function = compiled(model, dynamic=True)
    with torch.no_grad():
        for rows in (5, 2, 33, 128):
            x = torch.randn(rows, 8)
            same(function(x), model(x))
    assert len(programs) == 1 and not programs[0].calls
    assert len(programs[0].segments[0].variants) == 1


def test_training_with_sizes_that_vary(programs: list[Program]) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    function = compiled(model, dynamic=True)
    for rows in (4, 9, 31):
        x = torch.randn(rows, 8)
        ours = torch.autograd.grad(function(x).square().sum(), list(model.parameters()))
        theirs = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)
    assert len(programs) == 2 and not any(p.calls for p in programs)


@pytest.mark.parametrize("name, function", {
    "joined": lambda x: torch.cat([x, x[:, :2]], 1).sum(0),
    "flat": lambda x: x.reshape(-1)[1:] * x.shape[0],
    "halved": lambda x: x[: x.shape[0] // 2].mean(),
    "number": lambda x: x / x.shape[0] + torch.arange(x.shape[0])[:, None],
    "square": lambda x: x @ x.t() + torch.eye(x.shape[0]),
}.items())
def test_arithmetic_of_sizes(name: str, function: Callable[..., Any], programs: list[Program]
                             ) -> None:
    ours = compiled(function, dynamic=True)
    for rows in (6, 7, 12):
        x = torch.randn(rows, 4)
        same(ours(x), function(x))
    assert programs and not any(p.calls for p in programs), programs[0].reasons


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (1, 4), (1, 1)])
def test_small_sizes(shape: tuple[int, ...], programs: list[Program]) -> None:
    def function(x: Any) -> Any:
        return functional.relu(x) * 2 + x.sum(1, keepdim=True)

    x = torch.randn(shape)
    same(compiled(function)(x), function(x))
    assert len(programs) == 1


def test_size_that_data_tells(programs: list[Program]) -> None:
    def function(x: Any) -> Any:
        return (x[torch.nonzero(x > 0).squeeze(1)] * 2).sum() + x.exp().sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        ours = compiled(function)
        for seed in range(3):
            torch.manual_seed(seed)
            x = torch.randn(9)
            same(ours(x), function(x))
    assert len(programs) == 1


# ---------------------------------------------------------------- layouts
LAYOUTS: dict[str, Callable[[], Any]] = {
    "row major": lambda: torch.randn(2, 6, 4, 5),
    "channels last": lambda: torch.randn(2, 6, 4, 5).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(5, 4, 6, 2).permute(3, 2, 1, 0),
    "with gaps": lambda: torch.randn(2, 6, 4, 10)[..., ::2],
    "cut out": lambda: torch.randn(3, 7, 5, 6)[1:, 1:, 1:, 1:],
    "repeated": lambda: torch.randn(2, 1, 4, 1).expand(2, 6, 4, 5),
    "turned round": lambda: torch.randn(2, 6, 4, 5).flip(3),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_layouts_of_inputs_and_results(name: str, dynamic: bool, programs: list[Program]) -> None:
    x = LAYOUTS[name]()

    def function(x: Any) -> Any:
        return x * 2 + 1, x.sum(1), x.transpose(1, 2).relu(), (x + 1).permute(0, 2, 3, 1)

    for a, b in zip(compiled(function, dynamic=dynamic)(x), function(x), strict=True):
        same(a, b)
    assert programs and not any(p.calls for p in programs)


def test_channels_last_convolution(programs: list[Program]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 12, 12).to(memory_format=torch.channels_last)
    with torch.no_grad():
        ours, theirs = compiled(model)(x), model(x)
    torch.testing.assert_close(ours, theirs)
    assert ours.is_contiguous(memory_format=torch.channels_last)
    assert not any(p.calls for p in programs)


# ---------------------------------------------------------------- mutation, views, aliases
def test_mutation_of_inputs(programs: list[Program]) -> None:
    def function(x: Any, y: Any) -> Any:
        x.add_(y)
        y[1:].mul_(3)
        return x * y

    ours, theirs = ([torch.arange(6.0), torch.ones(6)] for _ in range(2))
    a, b = compiled(function)(*ours), function(*theirs)
    same(a, b)
    for x, y in zip(ours, theirs, strict=True):
        same(x, y)
    assert not any(p.calls for p in programs)


def test_results_that_are_views(programs: list[Program]) -> None:
    def function(x: Any) -> Any:
        y = x + 1
        return x[1:], x.t(), y, y[0], y.t(), x

    x = torch.randn(4, 5)
    ours = compiled(function)(x)
    for a, b in zip(ours, function(x), strict=True):
        same(a, b)
    base = x.untyped_storage().data_ptr()
    assert [y.untyped_storage().data_ptr() == base for y in ours] == [
        True, True, False, False, False, True]
    ours[2].zero_()
    assert not ours[3].any() and not ours[4].any()  # views of it, as in eager mode


def test_graph_without_computation(programs: list[Program]) -> None:
    def function(x: Any) -> Any:
        return x.view(-1), torch.zeros(3), 1.5

    x = torch.randn(2, 3)
    a, b, c = compiled(function)(x)
    assert torch.equal(a, x.view(-1)) and torch.equal(b, torch.zeros(3)) and c == 1.5


# ---------------------------------------------------------------- numbers
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16", "int64", "int32", "uint8",
                                   "bool"])
def test_types_meet_as_in_torch(dtype: str, programs: list[Program]) -> None:
    kind = getattr(torch, dtype)
    x = torch.tensor([[0, 1, 2], [3, 4, 5]]).to(kind)
    y = torch.tensor([1.5, 2.0, -3.0])

    def function(x: Any, y: Any) -> Any:
        return x + y, x * 2, x + 1.5, x > y, x / 3, torch.where(x > 1, x, y), x + x.sum(), x.mean(
            dtype=torch.float32)

    for a, b in zip(compiled(function)(x, y), function(x, y), strict=True):
        assert a.dtype is b.dtype
        same(a, b)
    assert not any(p.calls for p in programs)


def test_nan_and_infinity(programs: list[Program]) -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0])

    def function(x: Any) -> Any:
        return (x.clamp(-1, 1), torch.maximum(x, -x), x.relu(), x.amax(), x.argmax(), x == x,
                functional.softmax(x[3:], 0), x.sort()[0], x.sign())

    for a, b in zip(compiled(function)(x), function(x), strict=True):
        same(a, b)


def test_random_numbers_are_those_of_eager_mode(programs: list[Program]) -> None:
    def function(x: Any) -> Any:
        y = functional.dropout(x.relu(), 0.3) + torch.rand_like(x)
        return functional.dropout(y.exp(), 0.5) * torch.randn(x.shape)

    x = torch.randn(40, 30)
    torch.manual_seed(1)
    ours, state = compiled(function)(x), torch.get_rng_state()
    torch.manual_seed(1)
    same(ours, function(x))
    assert torch.equal(state, torch.get_rng_state())
    assert [len(p.segments) for p in programs] == [1]  # all drawn before our code runs


def test_dropout_in_training_is_that_of_eager_mode(programs: list[Program]) -> None:
    layers = [layer for _ in range(3) for layer in (nn.Linear(24, 24), nn.Dropout(0.4), nn.GELU())]
    model = nn.Sequential(*layers)
    x = torch.randn(10, 24)

    def gradients(function: Any) -> Sequence[Any]:
        torch.manual_seed(5)
        return torch.autograd.grad(function(x).square().sum(), list(model.parameters()))

    for a, b in zip(gradients(compiled(model)), gradients(model), strict=True):
        torch.testing.assert_close(a, b)
    assert [p.calls for p in programs] == [3, 0]  # each drawn once, and kept for the gradient


# ---------------------------------------------------------------- what torch runs
def test_what_has_no_converter_runs_in_torch(programs: list[Program]) -> None:
    def function(x: Any) -> Any:
        return torch.linalg.qr(x.exp())[1].tanh() + 1

    x = torch.randn(4, 4)
    same(compiled(function)(x), function(x))
    (program,) = programs
    assert program.calls == 1 and len(program.segments) == 2
    (reason,) = program.reasons
    assert reason.operator == "aten.linalg_qr.default" and "test_forms.py" in reason.where


def test_fallback_may_be_an_error() -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"aten.linalg_qr.default cannot be compiled.*no converter"
                       ) as raised:
        compiled(lambda x: torch.linalg.qr(x)[0], options={"fallback": "error"})(torch.eye(3))
    assert "test_forms.py" in str(raised.value)


@pytest.mark.parametrize("options", [{"frieze": True}, {"threads": -1}, {"fallback": "maybe"}])
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match=next(iter(options))):
        compiled(lambda x: x + 1, options=options)(torch.ones(2))


def test_explain_tells_all() -> None:
    def function(x: Any) -> Any:
        y = x.exp()
        torch._dynamo.graph_break()
        return torch.linalg.qr(y)[1] + 1

    told = tz.torch.explain(function, torch.randn(3, 3))
    assert len(told.breaks) == 1 and len(told.programs) == 2 and told.kernels >= 2
    assert [r.operator for r, _ in told.fallbacks] == ["aten.linalg_qr.default"]
    assert "graph break" in str(told) and "in torch: 1 x aten.linalg_qr" in str(told)
    assert told.recording.runs


# ---------------------------------------------------------------- parameters, threads
def test_frozen_parameters_follow_their_changes(programs: list[Program]) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).eval()
    function = compiled(model, options={"freeze": True})
    x = torch.randn(5, 8)
    with torch.no_grad():
        same(function(x), model(x))
        inputs = programs[0].segments[0].variants[0].executable.input_types
        assert len(inputs) == 1  # what is left is x
        model[0].weight.mul_(2)
        same(function(x), model(x))
        model[3].bias = nn.Parameter(torch.randn(3))
        same(function(x), model(x))
        for _ in range(6):  # as often as somebody who trains would
            model[0].bias.add_(1)
            same(function(x), model(x))
    gradient = torch.autograd.grad(function(x).sum(), [model[0].weight])[0]
    torch.testing.assert_close(gradient, torch.autograd.grad(model(x).sum(), [model[0].weight])[0])


def test_calls_from_several_threads(programs: list[Program]) -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).eval()
    given = [torch.randn(7, 32) for _ in range(4)]
    with torch.no_grad():
        function = compiled(model)
        expected = [model(x) for x in given]
        function(given[0])
        found: dict[int, Any] = {}

        def work(i: int) -> None:
            with torch.no_grad():
                for _ in range(50):
                    found[i] = function(given[i])

        workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for w in workers:
            w.start()
        for w in workers:
            w.join()
    for i, y in enumerate(expected):
        torch.testing.assert_close(found[i], y)
    assert len(programs) == 1


def test_hooks_and_checkpointing(programs: list[Program]) -> None:
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    seen: list[Any] = []

    def function(x: Any) -> Any:
        return checkpoint(model, x, use_reentrant=False).square().sum()

    def gradients(f: Any) -> Sequence[Any]:
        x = torch.linspace(-1, 1, 24).reshape(3, 8).requires_grad_()
        x.register_hook(seen.append)
        f(x).backward()
        return [x.grad, *(p.grad.clone() for p in model.parameters())]

    theirs = gradients(function)
    model.zero_grad()
    for a, b in zip(gradients(compiled(function)), theirs, strict=True):
        torch.testing.assert_close(a, b)
    assert len(seen) == 2 and programs


# ---------------------------------------------------------------- numbers that vary
def test_whole_numbers_that_are_no_sizes_may_be_anything(programs: list[Program]) -> None:
    """Torch makes symbols of them as of sizes, and promises nothing."""
    for dynamic in (None, True):
        torch._dynamo.reset()
        function = compiled(lambda x, s: x * s + s, dynamic=dynamic)
        for s in (2, 5, -3, 0, 1, 2**40, -2**40, 7):
            same(function(torch.ones(3), s), torch.ones(3) * s + s)
    torch._dynamo.reset()
    divided, x = compiled(lambda x, s: x // s), torch.tensor([7, -7])
    for s in (2, 5, -3, -2, 3, 1):
        same(divided(x, s), x // s)


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_view_may_take_a_number_that_is_known_later(dynamic: bool | None) -> None:
    def function(x: Any) -> Any:
        return x.index_fill(0, torch.arange(0, x.shape[0], 2), 1.0)

    made = compiled(function, dynamic=dynamic)
    for rows in (4, 6, 9, 3):
        same(made(torch.zeros(rows, 2)), function(torch.zeros(rows, 2)))


# ---------------------------------------------------------------- random numbers
@pytest.mark.parametrize("given", [
    lambda: torch.randn(3, 4).t(), lambda: torch.randn(2, 3, 4, 5).permute(0, 3, 1, 2),
    lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    lambda: torch.randn(4, 6, 8)[:, :, ::2], lambda: torch.randn(4, 6, 8)[:, ::2].permute(2, 0, 1),
    lambda: torch.randn(4, 1).expand(4, 6)])
def test_dropout_draws_in_the_order_in_which_elements_lie(given: Callable[[], Any]) -> None:
    torch._dynamo.reset()
    x, made = given(), compiled(lambda x: functional.dropout(x, 0.4))
    for seed in (0, 1):
        torch.manual_seed(seed)
        ours = made(x)
        torch.manual_seed(seed)
        torch.testing.assert_close(ours, functional.dropout(x, 0.4))


# ---------------------------------------------------------------- half types beside others
@pytest.mark.parametrize("size", [(8, 3, 8, 8), (4, 3)])
def test_batch_norm_of_halves_keeps_its_statistics(size: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module = (nn.BatchNorm2d if len(size) == 4 else nn.BatchNorm1d)(3)
    x, g = (torch.randn(size) + 3).bfloat16(), torch.randn(size).bfloat16()
    found = []
    for run in (compiled(module), module):
        given = x.clone().requires_grad_()
        y = run(given)
        y.backward(g)
        found.append((y.detach(), given.grad, module.weight.grad, module.bias.grad))
        module.zero_grad()
        module.reset_running_stats()
    double = given.detach().double().requires_grad_()
    module.double()(double).backward(g.double())
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype is theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(found[0][2].double(), module.weight.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_keep_their_digits_in_rounded_quotients(dtype: Any) -> None:
    x = torch.tensor([-1.5, 0.5, 1.5, 2.5, 3.0], dtype=dtype)
    for mode in ("floor", "trunc", None):
        torch._dynamo.reset()
        made = compiled(lambda x, mode=mode: torch.div(x, 0.1, rounding_mode=mode))
        same(made(x), torch.div(x, 0.1, rounding_mode=mode))
