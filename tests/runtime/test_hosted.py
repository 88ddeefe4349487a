"""Control flow, native and on the host: values, gradients, symbolic sizes, torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.base.shapes import dim
from terrazzo.compiler import control_flow
from terrazzo.compiler.driver import compile_graph
from terrazzo.dtypes import bool_, float32
from terrazzo.graph.autodiff import vjp_graph
from terrazzo.graph.evaluate import run
from terrazzo.graph.ir import Graph, TensorType
from terrazzo.graph.trace import trace
from terrazzo.runtime.executable import Executable
from terrazzo.runtime.hosted import HostedExecutable, needs_host, to_numpy


@pytest.fixture(params=["native", "host"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to run control flow; the host's is for graphs with operators of its own."""
    if request.param == "host":
        monkeypatch.setattr(control_flow, "is_native", lambda graph: False)
    return str(request.param)


def graph_of(function: Any, *types: TensorType) -> Graph:
    return trace(function, types, name="controlled")[0]


def floats(*shape: Any) -> TensorType:
    return TensorType(shape, float32)


def choose(flag: Any, x: Any) -> Any:
    scale = tz.sum(x)  # computed before, and captured by one branch
    return tz.cond(flag, lambda v: tz.exp(v) * scale, lambda v: v - 1.0, x) * 2.0


def halve(x: Any) -> Any:
    """Halve until the largest is below one; count the steps."""
    return tz.while_loop(lambda s: tz.max(tz.absolute(s[1])) >= 1.0,
                         lambda s: (s[0] + 1, s[1] * 0.5), (0, x))


def recurrence(h: Any, xs: Any, w: Any) -> Any:
    def step(h: Any, x: Any) -> Any:
        h = tz.tanh(h * w + x)
        return h, h * h

    return tz.scan(step, h, xs)


@pytest.mark.parametrize("flag", [True, False])
def test_only_one_branch_runs(flag: bool, way: str, rng: np.random.Generator) -> None:
    graph = graph_of(choose, TensorType((), bool_), floats(5))
    assert needs_host(graph)
    executable = compile_graph(graph)
    assert isinstance(executable, HostedExecutable if way == "host" else Executable)
    x = rng.normal(size=5).astype(np.float32)
    (got,) = executable.run([np.bool_(flag), x])
    expected = (np.exp(x) * x.sum() if flag else x - 1) * 2
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_while_loop_runs_until_its_condition_fails() -> None:
    steps, x = tz.jit(halve)(np.array([5.0, -20.0], np.float32))
    assert int(steps) == 5
    np.testing.assert_array_equal(x, np.array([5.0, -20.0], np.float32) / 32)


def test_while_loop_may_not_run_at_all() -> None:
    x = np.array([0.5], np.float32)
    steps, same = tz.jit(halve)(x)
    assert int(steps) == 0
    np.testing.assert_array_equal(same, x)


@pytest.mark.parametrize("steps", [0, 1, 7])
def test_scan(steps: int, rng: np.random.Generator) -> None:
    h, w = rng.normal(size=(2, 3)).astype(np.float32)
    xs = rng.normal(size=(steps, 3)).astype(np.float32)
    last, ys = tz.jit(recurrence)(h, xs, w)
    expected = []
    for x in xs:
        h = np.tanh(h * w + x)
        expected.append(h * h)
    np.testing.assert_allclose(last, h, rtol=1e-5)
    np.testing.assert_allclose(ys, np.reshape(expected, (steps, 3)), rtol=1e-5)


def test_gradient_of_scan_equals_the_reference(rng: np.random.Generator) -> None:
    graph = vjp_graph(graph_of(recurrence, floats(3), floats(6, 3), floats(3)))
    arrays = [rng.normal(size=v.shape).astype(np.float32) for v in graph.inputs]
    for got, want in zip(compile_graph(graph).run(arrays), run(graph, arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_sizes_that_no_operand_shows(rng: np.random.Generator) -> None:
    n, m = dim("n"), dim("m")
    graph = vjp_graph(graph_of(recurrence, floats(m), floats(n, m), floats(m)))
    executable = compile_graph(graph)
    for sizes in ((3, 4), (5, 2)):
        shapes = [(sizes[1],), sizes, (sizes[1],), (sizes[1],), sizes]
        arrays = [rng.normal(size=s).astype(np.float32) for s in shapes]
        for got, want in zip(executable.run(arrays), run(graph, arrays), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_control_flow_inside_an_operator_and_inside_control_flow(rng: np.random.Generator) -> None:
    @tz.op
    def clipped_power(x: Any) -> Any:
        def body(h: Any, _: Any) -> Any:
            return tz.cond(tz.max(h) > 10.0, lambda v: v * 0.1, lambda v: v * v, h), ()

        return tz.scan(body, x, None, length=4)[0]

    x = rng.uniform(1, 2, 4).astype(np.float32)
    expected = x
    for _ in range(4):
        expected = expected * np.float32(0.1) if expected.max() > 10 else expected * expected
    np.testing.assert_allclose(clipped_power(x), expected, rtol=1e-5)


def test_grad_by_the_public_function(rng: np.random.Generator) -> None:
    def loss(x: Any) -> Any:
        return tz.sum(tz.cond(tz.sum(x) > 0.0, lambda v: v * v, lambda v: -v, x))

    x = np.abs(rng.normal(size=4)).astype(np.float32)
    np.testing.assert_allclose(tz.grad(loss)(x), 2 * x, rtol=1e-6)
    np.testing.assert_allclose(tz.grad(loss)(-x), -np.ones(4), rtol=1e-6)


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_torch_tensors_in_and_out(kind: str) -> None:
    import torch

    x = torch.tensor([5.0, -20.0], dtype=getattr(torch, kind))
    steps, found = tz.jit(halve)(x)
    assert isinstance(found, torch.Tensor) and found.dtype == x.dtype
    assert int(steps) == 5
    assert torch.equal(found, x / 32)


@pytest.mark.torch
def test_gradients_in_torch() -> None:
    import torch

    @tz.op
    def powers(x: Any) -> Any:
        return tz.scan(lambda h, _: (h * x, h), x, None, length=3)[0]

    x = torch.tensor([1.5, -0.5], requires_grad=True)
    powers(x).sum().backward()
    torch.testing.assert_close(x.grad, 4 * x.detach() ** 3)


@pytest.mark.torch
def test_memory_is_shared_with_torch() -> None:
    import torch

    for kind in (torch.float32, torch.bfloat16, torch.float8_e5m2):
        x = torch.zeros(3).to(kind)
        assert to_numpy(x).ctypes.data == x.data_ptr()
