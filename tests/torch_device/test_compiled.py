"""`torch.compile(backend="terrazzo")` for tensors of the device: our own compiler on it."""

from __future__ import annotations

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
