"""Launches from native code: tables, the arguments that kernels get, and what goes wrong."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.chips.cuda import driver, native
from terrazzo.chips.cuda.launch import Launched
from terrazzo.chips.cuda.native import Launch, Loaded, Table, line
from terrazzo.chips.cuda.simulate import _LAUNCHER, Simulator
from terrazzo.compiler.driver import compile_graph
from terrazzo.graph.ir import TensorType
from terrazzo.graph.trace import trace
from terrazzo.index import Var
from terrazzo.knobs import knobs

pytest.importorskip("triton")
pytest.importorskip("torch")
pytestmark = [pytest.mark.triton, pytest.mark.torch]


class Noting:
    """Stands in for cuLaunchKernel, and notes what it is given."""

    def __init__(self, arguments: dict[int, int], fails: int = -1):
        self.seen: list[tuple[Any, ...]] = []
        self.arguments, self.fails = arguments, fails
        self._entry = _LAUNCHER(self.launch)
        self.address = ctypes.cast(self._entry, ctypes.c_void_p).value or 0

    def launch(self, function: int, *rest: Any) -> int:
        *sizes, stream, pointers, extra = rest
        values = [ctypes.c_int64.from_address(pointers[i]).value
                  for i in range(self.arguments[function])]
        self.seen.append((function, tuple(sizes), stream or 0, values, extra))
        return 700 if function == self.fails else 0


def test_arguments_are_bases_and_what_is_added() -> None:
    noting = Noting({11: 4, 22: 1, 33: 0})
    table = Table(noting.address, 2, [
        Launch(11, 5, 128, 0, ((1, 0), (2, 16), (0, -7), (0, (1 << 64) - 2))),
        Launch(22, (1 << 31) - 1, 64, 99, ((3, 4),)), Launch(33, 1, 32, 0, ())])
    assert native.launch()(table.address, 160, 320, 1000, 77) == 0
    assert noting.seen == [
        (11, (5, 1, 1, 128, 1, 1, 0), 77, [160, 336, -7, -2], None),
        (22, ((1 << 31) - 1, 1, 1, 64, 1, 1, 99), 77, [1004], None),
        (33, (1, 1, 1, 32, 1, 1, 0), 77, [], None)]


def test_what_fails_is_answered_and_ends_it() -> None:
    noting = Noting(dict.fromkeys((1, 2, 3), 0), fails=2)
    table = Table(noting.address, 1, [Launch(i, 1, 32, 0, ()) for i in (1, 2, 3)])
    assert native.launch()(table.address, 16, 0) == 700
    assert [seen[0] for seen in noting.seen] == [1, 2]
    assert native.launch()(table.address, 24, 0) == native.MISALIGNED
    assert len(noting.seen) == 2
    with pytest.raises(TypeError):
        native.launch()(table.address, "16", 0)


def test_triton_gets_its_own_pointers_last() -> None:
    given = [(1, 0), (0, 5)]
    assert line(Loaded(1, 32, 0, 0, 2), 3, given, (9, 9)).arguments == (*given, (0, 0), (0, 0))
    assert line(Loaded(1, 32, 0, 64, 2), 3, given, (9, 9)).arguments == (*given, (9, 9), (0, 0))
    assert line(Loaded(1, 32, 0, 0, 0), 3, given, (9, 9)).arguments == tuple(given)


def test_threads_do_not_share_arguments() -> None:
    """Calls from several threads at once, each of which sees its own numbers only."""
    wrong: list[Any] = []
    noting = Noting({1: 2})
    table = Table(noting.address, 0, [Launch(1, 1, 32, 0, ((1, 0), (2, 0)))] * 20)

    def call(n: int) -> None:
        for _ in range(50):
            if native.launch()(table.address, n, -n, n):
                wrong.append(n)

    workers = [threading.Thread(target=call, args=(n,)) for n in range(1, 5)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert not wrong and len(noting.seen) == 4 * 50 * 20
    assert all(values == [stream, -stream] for _, _, stream, values, _ in noting.seen)


@pytest.fixture
def simulated() -> Any:
    with knobs.override(cuda_simulate=True), tz.chip("cuda"):
        yield


def compiled(function: Any, *shapes: Any) -> Any:
    graph, _ = trace(function, [TensorType(s, tz.float32) for s in shapes], name="f")
    return compile_graph(graph)


def test_a_run_is_one_call_of_native_code(simulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    executable = compiled(lambda x: tz.softmax(tz.matmul(tz.exp(x), x)), (64, 64))
    assert isinstance(executable.code, Launched) and executable.code.call_pointers is not None
    monkeypatch.setattr(Launched, "careful", None)  # step by step is for what goes wrong
    stepped: list[int] = []
    monkeypatch.setattr(Launched, "step", lambda *_: stepped.append(1))
    x = np.random.default_rng(0).standard_normal((64, 64), np.float32)
    want = np.exp(x.astype(np.float64)) @ x
    want = np.exp(want - want.max(1, keepdims=True))
    np.testing.assert_allclose(executable(x), want / want.sum(1, keepdims=True), rtol=1e-4,
                               atol=1e-6)
    assert not stepped and len(executable.code.steps) >= 2


def test_sizes_have_tables_of_their_own(simulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    prepared = Launched.prepared

    def noting(self: Launched, sizes: Any) -> Any:
        made.append(tuple(sizes))
        return prepared(self, sizes)

    executable = compiled(lambda x: tz.softmax(x), (Var("n"), 24))
    monkeypatch.setattr(Launched, "prepared", noting)
    for rows in (3, 16, 3, 16, 0, 5):
        x = np.random.default_rng(rows).standard_normal((rows, 24), np.float32)
        np.testing.assert_allclose(executable(x), tz.softmax.on("cpu")(x), rtol=1e-5)
    assert made == [(3,), (16,), (0,), (5,)]


def test_launches_between_what_the_host_does_are_one_call(
        simulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that the CPU runs, a loop whose turns differ, and a branch."""
    def program(x: Any) -> Any:
        y = tz.softmax(tz.exp(x) @ x)
        y = y + tz.det(y[:2, :2])
        y = tz.while_loop(lambda y: tz.sum(y * y) < 1e4, lambda y: tz.tanh(y @ x) + y * 2, y)
        return tz.cond(tz.sum(y) > 0, lambda y: tz.exp(-y @ x), lambda y: y * 2, y)

    executable = compiled(program, (32, 32))
    assert executable.code.call_pointers is None
    alone: list[int] = []
    step = Launched.step
    monkeypatch.setattr(Launched, "step", lambda self, kind, *rest: (
        alone.append(1) if kind[0] == "launch" else None, step(self, kind, *rest))[1])
    x = np.random.default_rng(0).standard_normal((32, 32), np.float32) / 8
    with tz.chip("cpu"):
        want = tz.jit(program)(x)
    for _ in range(3):
        np.testing.assert_allclose(executable(x), want, rtol=2e-4, atol=1e-5)
    # Turns of the loop read and write one of two places in turn.
    tables, segments = executable.code.tables, executable.code.segments
    assert not alone and 2 < len(segments) < len(tables) <= 2 * len(segments)


def test_an_error_in_a_launch_is_raised(simulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("this kernel is broken")

    executable = compiled(lambda x: tz.exp(x), (64,))
    monkeypatch.setattr(Simulator, "launch", fails)
    with pytest.raises(ValueError, match="this kernel is broken"):
        executable(np.ones(64, np.float32))


@pytest.mark.gpu
@pytest.mark.skipif(bool(driver.absence()), reason="needs a GPU")
def test_a_graph_on_a_gpu() -> None:
    import torch

    from terrazzo.chips.cuda.graphs import Recorded, recorded

    w = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32) / 16
    graph, _ = trace(lambda x: tz.softmax(tz.gelu(x @ w) @ w), [TensorType((64, 256), tz.float32)],
                     name="f")
    with tz.chip("cuda"):
        executable = compile_graph(graph)
    repeating = recorded(executable)
    assert isinstance(repeating, Recorded)
    weight = torch.from_numpy(w).cuda()
    side = torch.cuda.Stream()
    for turn in range(6):
        x = torch.randn(64, 256, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(side if turn % 2 else torch.cuda.current_stream()):
            (got,) = repeating.run([x])
        torch.cuda.synchronize()
        want = (torch.nn.functional.gelu(x.double() @ weight.double()) @ weight.double()).softmax(1)
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-6)
