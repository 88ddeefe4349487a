"""`bench` times what it says it times, and holds it against a measured roofline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.chips.memory import HostMemory
from terrazzo.chips.registry import chip_named
from terrazzo.dtypes import as_dtype
from terrazzo.errors import MissingDependency, UnsupportedOperator
from terrazzo.graph import evaluate as graph_evaluate
from terrazzo.graph.ir import TensorType
from terrazzo.graph.trace import trace
from terrazzo.tools import benchmark
from terrazzo.torch import eager as torch_eager


@pytest.fixture(scope="module")
def report() -> benchmark.BenchReport:
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    return tz.softmax.bench(x, rounds=3, torch=False)


def test_the_roofline_is_measured_once() -> None:
    limits = benchmark.roofline()
    assert limits is benchmark.roofline()
    assert 1e8 < limits.bytes_per_second < 1e13
    assert 1e9 < limits.flops_per_second < 1e14
    assert limits.seconds(0, limits.bytes_per_second) == pytest.approx(1)
    assert limits.seconds(3 * limits.flops_per_second, 0) == pytest.approx(3)


def test_report_counts_bytes_and_operations(report: benchmark.BenchReport) -> None:
    ours = report["terrazzo"]
    assert ours.bytes == 2 * 64 * 64 * 4
    assert ours.flops > 64 * 64 * 15  # an exponential counts as several additions
    assert ours.seconds > 0 and ours.roofline > 0
    text = str(report)
    assert "softmax(f32[64, 64])" in text and "GFLOP/s" in text and "roofline" in text
    assert "torch was not asked for" in text


def test_rounds_are_interleaved() -> None:
    order: list[str] = []
    ways = [benchmark.Timing(n, lambda n=n: order.append(n)) for n in "ab"]  # type: ignore[misc]
    for way in ways:
        way.run()
    order.clear()
    benchmark.ROUND_SECONDS, saved = 0.0, benchmark.ROUND_SECONDS
    try:
        benchmark.time_rounds(ways, rounds=3)
    finally:
        benchmark.ROUND_SECONDS = saved
    assert order[4:] == ["a", "b"] * 3
    assert all(len(w.seconds) == 3 for w in ways)


def test_without_torch_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise MissingDependency("comparing with torch needs the package torch")

    monkeypatch.setattr(torch_eager, "import_torch", missing)
    report = tz.exp.bench(np.ones(8, np.float32), rounds=1)
    assert [line.name for line in report.lines] == ["terrazzo", "numpy, one operator at a time"]
    assert "no rows for torch: comparing with torch needs the package torch" in str(report)


@pytest.mark.torch
def test_torch_is_timed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    # The compiler of torch takes half a minute; that it is asked is what matters here.
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    threads = torch.get_num_threads()
    with tz.knobs.override(threads=1):
        report = tz.gelu.bench(np.ones((8, 8), np.float32), rounds=2)
    assert torch.get_num_threads() == threads
    assert [line.name for line in report.lines][2:] == ["torch eager", "torch.compile"]
    assert not report.notes


# ---------------------------------------------------------------- graphs in torch
def mlp(x: Any, w: Any, b: Any) -> Any:
    return tz.softmax(tz.gelu(tz.linear(x, w, b)), axis=-1)


CASES: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "layers": (mlp, [(4, 8), (6, 8), (6,)]),
    "norm": (lambda x, w, b: tz.layer_norm(x, w, b), [(4, 8), (8,), (8,)]),
    "composite": (lambda x: tz.hardshrink(x) + tz.mish(x), [(4, 8)]),
    "reductions": (lambda x: tz.max(x, axis=0) + tz.mean(x) + tz.sum(x * x, axis=(0, 1)),
                   [(4, 8)]),
    "movement": (lambda x, y: tz.concat(tz.transpose(x)[1:3], y, axis=0), [(4, 8), (2, 4)]),
    "attention": (lambda q, k, v: tz.scaled_dot_product_attention(q, k, v, causal=True),
                  [(2, 3, 5, 4)] * 3),
    "numbers": (lambda x: tz.where(x > 0.5, x * 2.0, tz.exp(-x)), [(4, 8)]),
}


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch_computes_the_same_graph(case: str, dtype: str, rng: np.random.Generator) -> None:
    function, shapes = CASES[case]
    kind = as_dtype(dtype)
    arrays = [rng.standard_normal(s).astype(kind.np) for s in shapes]
    graph, _ = trace(function, [TensorType(s, kind) for s in shapes], name=case)
    got = torch_eager.run_in_torch(graph, arrays)
    for value, tensor, wide in zip(graph.outputs, got, graph_evaluate.run(graph, arrays, wide=True),
                                   strict=True):
        result = torch_eager.to_numpy(tensor, value.dtype)
        assert result.dtype == value.dtype.np and result.shape == wide.shape
        # torch rounds after every operator, and some of them are chains of a dozen.
        np.testing.assert_allclose(result.astype(np.float64), wide, rtol=16 * kind.eps,
                                   atol=16 * kind.eps)


@pytest.mark.torch
def test_operators_that_torch_lacks_are_named() -> None:
    graph, _ = trace(lambda x: tz.sort(x), [TensorType((4,), as_dtype("float32"))], name="sorted")
    with pytest.raises(UnsupportedOperator, match="'sort_pairs' has no counterpart in torch"):
        torch_eager.torch_function(graph)


def test_arrays_in_a_chips_own_memory_are_timed_by_the_chip(monkeypatch: pytest.MonkeyPatch
                                                             ) -> None:
    class Memory(HostMemory):
        device = "elsewhere"

    cpu = chip_named("cpu")
    monkeypatch.setattr(type(cpu), "memory", Memory())
    monkeypatch.setattr(type(cpu), "seconds", lambda chip, run: (run(), 1e-3)[1])
    report = tz.bench(tz.exp, np.ones((4, 4), np.float32), torch=False, rounds=3)
    assert [line.name for line in report.lines] == ["terrazzo"]
    assert report["terrazzo"].seconds == pytest.approx(1e-3 / (benchmark.ROUND_SECONDS / 1e-3))
    assert cpu.spec.name in str(report)
