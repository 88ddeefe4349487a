"""`torch.compile(backend="terrazzo")` for tensors of the device: our own compiler on it."""

from __future__ import annotations

import copy
import threading
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def losses(device: str, compiled: bool) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(12, 16), torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.Linear(16, 5)
    ).to(device)
    run = torch.compile(model, backend="terrazzo", fullgraph=True) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(step)).to(device)
        loss = torch.nn.functional.cross_entropy(run(x), (torch.arange(8) % 5).to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_training_is_that_of_the_cpu(device: ModuleType) -> None:
    assert losses("gcu", compiled=True) == pytest.approx(losses("cpu", compiled=False), abs=1e-5)


def test_the_compiler_has_the_name_of_the_device(device: ModuleType) -> None:
    x = torch.randn(5)
    torch.testing.assert_close(torch.compile(torch.exp, backend="gcu")(x.to("gcu")).cpu(), x.exp())


def test_the_graph_is_one_plan_of_the_chip(counted: ModuleType) -> None:
    import terrazzo as tz

    run = torch.compile(lambda x, y: torch.softmax(x @ y, -1) * 2, backend="terrazzo")
    x, y = torch.randn(6, 8), torch.randn(8, 9)
    here = x.to("gcu"), y.to("gcu")
    run(*here)
    counted.reset_fallbacks()
    with tz.gcu.trace() as trace:
        made = run(*here)
    assert made.device.type == "gcu" and not counted.fallbacks()
    assert [r.kind for r in trace.records] == [0] * len(trace.records) and trace.records
    torch.testing.assert_close(made.cpu(), torch.softmax(x @ y, -1) * 2)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_found_again(device: ModuleType, causal: bool) -> None:
    """Torch takes it apart into products and a softmax; scores never leave the scratchpads."""
    import terrazzo as tz

    attention = torch.nn.functional.scaled_dot_product_attention
    run = torch.compile(lambda q, k, v: attention(q, k, v, is_causal=causal), backend="terrazzo")
    given = [torch.randn(2, 3, 128, 32) for _ in range(3)]
    here = [x.to("gcu") for x in given]
    with torch.no_grad():
        run(*here)
        with tz.gcu.trace() as trace:
            made = run(*here)
    names = {r.name for r in trace.records}
    assert b"k_scaled_dot_product_attention" in names and not any(b"softmax" in n for n in names)
    torch.testing.assert_close(made.cpu(), attention(*given, is_causal=causal))


def test_a_trace_begins_where_it_stands(device: ModuleType) -> None:
    import terrazzo as tz

    x = torch.ones(300, 300, device="gcu")
    for _ in range(20):
        x = (x @ x) * (1 / 300)
    with tz.gcu.trace() as trace:
        x + 1
    assert len(trace.records) == 1


def test_sizes_that_vary_and_numbers_of_the_host(device: ModuleType) -> None:
    run = torch.compile(lambda x, n: (x * n).sum(0), backend="terrazzo", dynamic=True)
    for rows in (5, 7, 11):
        x, n = torch.randn(rows, 6), torch.tensor(3.0)
        torch.testing.assert_close(run(x.to("gcu"), n).cpu(), (x * 3).sum(0))


def test_frozen_parameters_and_calls_of_torch_in_between(device: ModuleType) -> None:
    model = torch.nn.Linear(6, 4).to("gcu")
    x = torch.randn(3, 6)

    def f(x: Any) -> Any:
        return torch.linalg.svdvals(model(x)) + 1

    with torch.no_grad():
        made = torch.compile(f, backend="terrazzo", options={"freeze": True})(x.to("gcu"))
        torch.testing.assert_close(made.cpu(), torch.linalg.svdvals(model.cpu()(x)) + 1)


def test_operators_between_graphs_are_compiled_untraced(device: ModuleType) -> None:
    """One that is called there for the first time has our compiler run: no business of dynamo's."""
    @torch.compile(backend="eager")
    def broken(x: Any) -> Any:
        for _ in range(2):  # dynamo gives this frame up, and traces what it calls
            with threading.Lock():
                torch._dynamo.graph_break()
                x = torch.softmax(x, 1) * 2
        return x

    x = torch.ones(3, 113, device="gcu")  # of a size that nothing else has
    frames = torch._dynamo.utils.counters["frames"]
    frames.clear()
    assert float(broken(x).sum()) == pytest.approx(6, abs=1e-5)
    assert frames["total"] == 1


# ---------------------------------------------------------------- optimizers, and arguments changed
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, lambda p: torch.optim.SGD(
    p, 0.1, momentum=0.9)], ids=["adam", "adamw", "sgd"])
def test_a_step_of_an_optimizer_is_one_launch(make: Any, counted: ModuleType) -> None:
    """Of parameters of all sizes: numbers come in one copy, and results go where they belong."""
    import terrazzo as tz

    def steps(device: str, compiled: bool) -> tuple[list[Any], list[str]]:
        drawn = torch.Generator().manual_seed(0)
        given = [torch.randn(shape, generator=drawn).to(device).requires_grad_()
                 for shape in ((3,), (700, 90), (64, 3), (1,))]
        optimizer = make(given)
        update = torch.compile(optimizer.step, backend="terrazzo") if compiled else optimizer.step
        for _ in range(3):
            for p in given:
                p.grad = torch.cos(p.detach())
            torch.gcu.reset_fallbacks()  # torch 2.11 prints tensors while it compiles
            with tz.gcu.trace() as trace:
                update()
        return [p.detach().cpu() for p in given], [r.name.decode() for r in trace.records]

    found, names = steps("gcu", True)
    kernels = [name for name in names if name != "copy"]
    assert len(kernels) == 1 and len(names) <= 2 and not counted.fallbacks()
    for a, b in zip(found, steps("cpu", False)[0]):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


CHANGES: dict[str, Any] = {
    "added to": lambda x, y: x.add_(y),
    "read by another result": lambda x, y: (x.add_(y), x * 2)[1],
    "read elsewhere first": lambda x, y: (torch.cumsum(x, 0), x.mul_(y))[0],
    "turned around": lambda x, y: x.copy_(x.flip(0) + y),
    "both changed": lambda x, y: (x.add_(y), y.add_(x))[1],
    "exchanged": lambda x, y: (y.clone(), y.copy_(x), x.copy_(y * 2))[2],
    "a part of it": lambda x, y: x[1:].add_(y[1:]),
    "from torch": lambda x, y: x.copy_(torch.linalg.svd(y)[0][:, :1].expand(6, 6) * 0 + y),
}


@pytest.mark.parametrize("name", CHANGES)
def test_arguments_that_are_changed(name: str, device: ModuleType) -> None:
    change = CHANGES[name]
    run = torch.compile(change, backend="terrazzo")
    for _ in range(2):
        ours = [torch.randn(6, 6) for _ in range(2)]
        theirs = [x.clone() for x in ours]
        here = [x.to("gcu") for x in ours]
        found, wanted = run(*here), change(*theirs)
        for a, b in zip((found, *here), (wanted, *theirs)):
            torch.testing.assert_close(a.cpu(), b)


def test_a_graph_without_calls_of_torch_may_change_its_arguments(device: ModuleType) -> None:
    x = torch.ones(5, device="gcu")
    torch.compile(lambda x: x.mul_(3), backend="terrazzo", options={"fallback": "error"})(x)
    assert x.tolist() == [3] * 5


def test_tools_compile_for_the_device_that_holds_the_data(device: ModuleType) -> None:
    """Timing the kernel of another chip on its memory would end the process."""
    import terrazzo as tz

    @tz.op
    def halved(x: Any) -> Any:
        return x * 0.5

    for chip, x in (("gcu", torch.ones(64, device="gcu")), ("cpu", torch.ones(64))):
        assert halved.compiled.executable((x,), {}).chip.name == chip


def test_another_device_than_the_current_one(device: ModuleType) -> None:
    F = torch.nn.functional
    layer = torch.nn.Linear(32, 16)
    x = torch.randn(8, 32)
    wanted = F.gelu(layer(x)).detach()
    for index in range(2):
        there = copy.deepcopy(layer).to(f"gcu:{index}")
        function = torch.compile(lambda x, m=there: F.gelu(m(x)), backend="terrazzo",
                                 fullgraph=True)
        y = function(x.to(f"gcu:{index}"))
        y.sum().backward()
        assert y.device.index == there.weight.grad.device.index == index
        torch.testing.assert_close(y.detach().cpu(), wanted)
        assert torch.gcu.current_device() == 0
