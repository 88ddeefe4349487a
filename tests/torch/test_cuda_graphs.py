"""`torch.compile` with CUDA graphs, on a simulated GPU whose recordings repeat launches."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch import nn  # noqa: E402

from terrazzo.chips.cuda import driver, graphs  # noqa: E402
from terrazzo.chips.cuda.graphs import Kept, Recorded  # noqa: E402
from terrazzo.errors import ArgumentError  # noqa: E402
from terrazzo.knobs import knobs  # noqa: E402
from terrazzo.torch import backend  # noqa: E402
from terrazzo.torch.options import BackendOptions  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.triton]
GRAPHS = {"cuda_graphs": True}


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Recorded]]:
    """What records during a test on a simulated GPU."""
    torch._dynamo.reset()
    made: list[Recorded] = []
    recorded = graphs.recorded

    def noting(executable: Any) -> Any:
        found = recorded(executable)
        if isinstance(found, Recorded):
            made.append(found)
        return found

    monkeypatch.setattr(graphs, "recorded", noting)
    with knobs.override(cuda_simulate=True, chip="cuda"):
        yield made


def compiled(model: Any, **kwargs: Any) -> Any:
    return torch.compile(model, backend=backend.terrazzo, **kwargs)


def kept_by(recorder: Recorded) -> Kept:
    (kept,) = recorder._kept.values()
    return kept


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Softmax(-1))


@pytest.mark.parametrize("how", [{"options": GRAPHS}, {"mode": "reduce-overhead"}],
                         ids=["options", "mode"])
def test_runs_are_repeated_and_results_are_the_callers(recorders: list[Recorded],
                                                       how: dict[str, Any]) -> None:
    model = network().eval()
    run = compiled(model, dynamic=False, **how)
    results = []
    xs = [torch.randn(8, 32) for _ in range(6)]  # none lies where another did
    with torch.no_grad():
        for x in xs:
            y = run(x)
            results.append((y, y.clone(), model(x)))
        for y, then, want in results:
            assert torch.equal(y, then), "a later call wrote over a result"
            torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-6)
        (recorder,) = recorders
        kept = kept_by(recorder)
        assert len(kept.recordings) == 1, "one for all of them"
        assert [tuple(a.shape) for a in kept.inputs.values()] == [(8, 32)], "no weight is copied"


def test_a_parameter_that_changes_is_seen(recorders: list[Recorded]) -> None:
    model = network().eval()
    run = compiled(model, dynamic=False, options=GRAPHS)
    with torch.no_grad():
        for turn in range(5):
            x = torch.randn(8, 32)
            model[0].weight += 0.1  # in place
            if turn == 3:
                model[2].weight = nn.Parameter(torch.randn(32, 64))  # somewhere else
            torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-6)
    assert recorders


def test_many_addresses_are_not_recorded_each(recorders: list[Recorded]) -> None:
    run = compiled(lambda x: torch.exp(x) + 1, dynamic=False, options=GRAPHS)
    xs = [torch.randn(8, 32) for _ in range(40)]
    made: list[Any] = []
    for _ in range(3):
        for x in xs:
            torch.testing.assert_close(run(x), torch.exp(x) + 1, rtol=1e-5, atol=1e-6)
            made += [r for r in kept_by(recorders[0]).recordings.values() if r not in made]
    assert 1 < len(made) <= graphs._MOST_IN_PLACE + 1


def test_training(recorders: list[Recorded]) -> None:
    ours, theirs = network(), network()
    run = compiled(ours, dynamic=False, options=GRAPHS)
    steps = [torch.optim.SGD(m.parameters(), 0.1) for m in (ours, theirs)]
    for _ in range(5):
        x = torch.randn(8, 32)
        for model, step in ((run, steps[0]), (theirs, steps[1])):
            step.zero_grad()
            model(x).square().sum().backward()
            step.step()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5)
    assert len(recorders) == 2 and all(kept_by(r).recordings for r in recorders)


def test_arguments_that_are_written_to(recorders: list[Recorded]) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(4, 4))

        def forward(self, x: Any) -> Any:
            self.total.add_(x)
            return self.total * 2

    ours = Counting()
    theirs = copy.deepcopy(ours)
    run = compiled(ours, dynamic=False, options=GRAPHS)
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(4, 4)
            torch.testing.assert_close(run(x), theirs(x))
            torch.testing.assert_close(ours.total, theirs.total)


def test_odd_memory(recorders: list[Recorded]) -> None:
    """Views that begin elsewhere, are transposed, or lie in the memory of earlier calls."""
    def f(x: Any, y: Any) -> Any:
        return torch.tanh(x) + y.sum(0)

    run = compiled(f, dynamic=False, options=GRAPHS)
    room = torch.randn(4096)
    for turn in range(6):
        x = room[1 + turn:65 + turn].view(8, 8)
        y = torch.randn(8, 8).t() if turn % 2 else torch.randn(8, 8)
        torch.testing.assert_close(run(x, y), f(x, y), rtol=1e-5, atol=1e-6)
    x = torch.randn(8, 8)
    for _ in range(4):  # the same memory again and again, with other content
        x.mul_(0.5)
        torch.testing.assert_close(run(x, x), f(x, x), rtol=1e-5, atol=1e-6)


def test_sizes_that_vary_are_launched(recorders: list[Recorded]) -> None:
    run = compiled(lambda x: torch.softmax(x, 1), dynamic=True, options=GRAPHS)
    for rows in (3, 5, 7):
        x = torch.randn(rows, 40)
        torch.testing.assert_close(run(x), torch.softmax(x, 1), rtol=1e-5, atol=1e-6)
    assert not recorders


def test_without_a_gpu_it_changes_nothing(recorders: list[Recorded]) -> None:
    with knobs.override(chip=""):
        run = compiled(network().eval(), options=GRAPHS)
        x = torch.randn(8, 32)
        with torch.no_grad():
            torch.testing.assert_close(run(x), network()(x), rtol=1e-4, atol=1e-6)
    assert not recorders


def test_modes_and_options() -> None:
    assert BackendOptions.of(None, "reduce-overhead") == BackendOptions(cuda_graphs=True)
    assert BackendOptions.of({}, "max-autotune") == BackendOptions(cuda_graphs=True, tune=True)
    assert BackendOptions.of({"threads": 2}, "default") == BackendOptions(threads=2)
    with pytest.raises(ArgumentError, match="no mode 'fastest'"):
        BackendOptions.of(None, "fastest")
    with pytest.raises(ArgumentError, match="cuda_graphs=1"):
        BackendOptions.of({"cuda_graphs": 1})


@pytest.mark.gpu
@pytest.mark.skipif(bool(driver.absence()), reason="needs a GPU")
def test_on_a_gpu() -> None:
    torch._dynamo.reset()
    model = network().cuda()
    run = compiled(model, dynamic=False, options=GRAPHS)
    results = []
    with torch.no_grad():
        for turn in range(6):
            with torch.cuda.stream(torch.cuda.Stream() if turn % 2 else
                                   torch.cuda.current_stream()):
                x = torch.randn(8, 32, device="cuda")
                results.append((run(x), model(x)))
            torch.cuda.synchronize()
    for got, want in results:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    run(torch.randn(8, 32, device="cuda")).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_max_autotune_measures(recorders: list[Recorded], tmp_path: Any) -> None:
    path = tmp_path / "choices.json"
    with knobs.override(tune_db=str(path)):
        run = compiled(lambda x: torch.sigmoid(x) * x, dynamic=False,
                       mode="max-autotune-no-cudagraphs")
        x = torch.randn(16, 64)
        torch.testing.assert_close(run(x), torch.sigmoid(x) * x)
    assert "cuda h200, simulated" in path.read_text() and not recorders
