"""`torch.compile` with CUDA graphs, on a simulated GPU whose recordings repeat launches."""

from __future__ import annotations

import copy
import ctypes
import threading
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
from terrazzo.torch import backend, entry  # noqa: E402
from terrazzo.torch.entry import Source  # noqa: E402
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
        assert sorted(kept.bytes[i] for i in kept.copied) == [8 * 32 * 4] * 2, "no weight is copied"


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
    held = torch.randn(8, 32)
    y = run(held)
    kept = kept_by(recorders[0])
    made: list[Any] = []
    xs, ys = ([torch.randn(8, 32) for _ in range(40)] for _ in range(2))
    # By addresses, as where torch puts a result is its allocator's affair.
    for results in ([y] * len(xs), ys):  # the result stays where it is, then it moves as well
        for _ in range(3):
            for x, result in zip(xs, results, strict=True):
                kept.run((x.data_ptr(), result.data_ptr()))
                torch.testing.assert_close(result, torch.exp(x) + 1, rtol=1e-5, atol=1e-6)
                made += [r for r in kept.recordings.values() if r not in made]
        assert len(kept.recordings) == graphs._MOST_IN_PLACE + (results is not ys)
    assert len(made) == graphs._MOST_IN_PLACE + 1, "and one on copies, while the result stays"


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
    assert len(recorders) == 2 and all(r._kept for r in recorders)


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


def test_what_comes_again_is_recorded_in_the_place_of_another(recorders: list[Recorded]) -> None:
    run = compiled(lambda x: torch.exp(x) + 1, dynamic=False, options=GRAPHS)
    y = run(torch.randn(8, 32))
    kept = kept_by(recorders[0])
    for x in [torch.randn(8, 32) for _ in range(graphs._MOST_IN_PLACE)]:
        for _ in range(2):
            kept.run((x.data_ptr(), y.data_ptr()))
    places = tuple(range(1 << 20, (1 << 20) + 32, 16))  # where nothing lies
    for _ in range(graphs._OFTEN):
        assert not kept._comes_again(places)
    assert kept._comes_again(places) and not kept._comes_again((*places[:-1], 24))


def test_copies_that_take_longer_than_kernels_are_not_made(recorders: list[Recorded]) -> None:
    def many(*xs: Any) -> Any:
        return tuple(torch.exp(x) for x in xs)

    run = compiled(many, dynamic=False, options=GRAPHS)
    held = []
    for _ in range(4):
        xs = [torch.randn(4, 4 + i) for i in range(6)]
        held.append((run(*xs), xs))
    assert not kept_by(recorders[0])._pays()
    for found, xs in held:
        for y, x in zip(found, xs, strict=True):
            torch.testing.assert_close(y, torch.exp(x))


def test_threads_share_what_is_kept(recorders: list[Recorded]) -> None:
    model = network().eval()
    run = compiled(model, dynamic=False, options=GRAPHS)
    wrong: list[Any] = []

    def call(seed: int) -> None:
        given = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _ in range(10):
                x = torch.randn(8, 32, generator=given)
                if not torch.allclose(run(x), model(x), rtol=1e-4, atol=1e-6):
                    wrong.append(seed)

    with torch.no_grad():
        run(torch.randn(8, 32))
    workers = [threading.Thread(target=call, args=(n,)) for n in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert recorders and not wrong


def test_numbers_of_the_host_begin_where_kernels_load() -> None:
    sources = [Source(0), *(Source(i, number=kind) for i, kind in (
        (1, torch.float32), (2, torch.int64), (3, torch.float32), (4, torch.bool)))]
    lines, places = entry._numbers(sources)
    given = {"x1": torch.tensor(1.5), "x2": torch.tensor(7), "x3": torch.tensor(2.5),
             "x4": torch.tensor(True), "stack": torch.stack, "device": "cpu"}
    exec("\n".join(line.strip() for line in lines), given)
    for i, text in places.items():
        want = given[f"x{i}"]
        at = eval(text, given)
        kind = {torch.float32: ctypes.c_float, torch.int64: ctypes.c_int64,
                torch.bool: ctypes.c_bool}[want.dtype]
        assert at % 16 == 0 and kind.from_address(at).value == want.item()


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
