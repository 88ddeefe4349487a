"""The chip cuda where there is no GPU: its description, levels, errors, and simulated runs."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.chips import registry
from terrazzo.chips.cuda import driver
from terrazzo.chips.cuda.simulate import Simulator
from terrazzo.chips.memory import aligned_bytes
from terrazzo.compiler.driver import compile_graph
from terrazzo.errors import ArgumentError, DeviceError, VerifyError
from terrazzo.graph.ir import TensorType
from terrazzo.graph.trace import trace
from terrazzo.knobs import knobs

pytest.importorskip("triton")
torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.triton, pytest.mark.torch]

sys.path[:0] = [str(Path(__file__).parent)]

from cuda_simulated import simulated  # noqa: E402


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    with simulated(monkeypatch) as names:
        yield names


@pytest.mark.skipif(not driver.absence(), reason="there is a GPU")
def test_an_absent_gpu_says_what_to_do() -> None:
    with pytest.raises(DeviceError, match=r"nothing can run on 'cuda'.*no NVIDIA GPU") as error:
        tz.exp.on("cuda")
    assert "TZ_CUDA_SIMULATE=1" in str(error.value)
    assert "absent" in repr(tz.chips())


@pytest.mark.skipif(not driver.absence(), reason="there is a GPU")
def test_what_was_simulated_is_absent_afterwards() -> None:
    registry._loaded.pop("cuda", None)  # so that it is loaded while simulated
    with knobs.override(cuda_simulate=True), tz.chip("cuda"):
        assert tz.exp(np.zeros(3, np.float32)).tolist() == [1, 1, 1]
    with pytest.raises(DeviceError, match="nothing can run on 'cuda'"):
        tz.exp.on("cuda")


def test_levels() -> None:
    x = np.ones((8, 64), np.float32)
    assert "@triton.jit" in tz.gelu.lower(x, "triton", chip="cuda")
    assert ".visible .entry" in tz.gelu.lower(x, "ptx", chip="cuda")
    assert "Function : k_" in tz.gelu.lower(x, "sass", chip="cuda")
    assert "runs on the CPU" in tz.det.lower(x[:4, :4], "triton", chip="cuda")
    with pytest.raises(ArgumentError, match="'cuda' has no level 'asm'"):
        tz.gelu.lower(x, "asm", chip="cuda")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("shape", [(), (1,), (3, 1025), (0, 4), (5, 70), (2, 20000), (300, 3)])
def test_rows_and_reductions(launched: list[str], dtype: str, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(getattr(torch, dtype))
    exact = x.double()
    slack = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3, "float64": 1e-12}[dtype]

    def close(got: Any, want: Any) -> None:
        torch.testing.assert_close(got.double(), want, rtol=slack, atol=slack * max(
            1.0, float(want.abs().max()) if want.numel() else 0))

    close(tz.gelu(x), torch.nn.functional.gelu(exact))
    close(tz.sum(x), exact.sum())
    if shape:
        close(tz.softmax(x), exact.softmax(-1))
        close(tz.sum(x, axis=0), exact.sum(0))
        close(tz.layer_norm(x), torch.nn.functional.layer_norm(exact, exact.shape[-1:]))
    assert launched


def test_nan_and_infinities_take_part(launched: list[str]) -> None:
    x = np.float32([[1, np.nan, 3], [np.inf, 1, 2], [-np.inf, -np.inf, -np.inf]])
    np.testing.assert_array_equal(tz.max(x, axis=1), [np.nan, np.inf, -np.inf])
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(tz.sum(x, axis=1), x.sum(1))
    assert len(launched) == 2


def test_gradients_go_through_autograd(launched: list[str]) -> None:
    x = torch.randn(6, 33, dtype=torch.float64, requires_grad=True)
    (tz.softmax(tz.gelu(x)) ** 2).sum().backward()
    got = x.grad.clone()
    x.grad = None
    (torch.nn.functional.gelu(x).softmax(-1) ** 2).sum().backward()
    torch.testing.assert_close(got, x.grad)
    assert len(launched) >= 3


def test_what_is_not_aligned_is_copied(launched: list[str]) -> None:
    graph, _ = trace(lambda x: tz.exp(x), [TensorType((1000,), tz.float32)], name="odd")
    executable = compile_graph(graph)
    memory = aligned_bytes(8192)
    x = memory[4:4004].view(np.float32)
    x[:] = np.linspace(-1, 1, 1000)
    out = memory[4100:8100].view(np.float32)
    before = x.copy()
    executable.run_into([x.ctypes.data, out.ctypes.data])
    np.testing.assert_allclose(out, np.exp(before), rtol=1e-6)
    np.testing.assert_array_equal(x, before)
    assert launched


def test_sizes_that_vary_are_one_kernel(launched: list[str]) -> None:
    function = tz.jit(lambda x: tz.softmax(x * 2))
    for n in (5, 7, 16, 300, 4096, 5000):
        x = np.random.default_rng(n).standard_normal((4, n)).astype(np.float32)
        wide = np.exp(2 * x.astype(np.float64))
        np.testing.assert_allclose(function(x), wide / wide.sum(1, keepdims=True), rtol=1e-5)
    assert len(set(launched)) <= 2


def test_control_flow_and_parts_on_the_cpu(launched: list[str]) -> None:
    def grows(x: Any) -> Any:
        return tz.while_loop(lambda y: tz.sum(y * y) < 100, lambda y: y * 1.5, tz.det(x) * x)

    x = np.array([[1, 2], [3, 5]], np.float32)
    want = -x
    while (want * want).sum() < 100:
        want = want * 1.5
    np.testing.assert_allclose(tz.jit(grows)(x), want, rtol=1e-6)
    assert launched


def test_verify_and_profile(launched: list[str]) -> None:
    report = tz.softmax.verify(kinds=("random", "odd"), dtypes=["float32"])
    assert "every level agrees" in str(report)
    with tz.profile() as recorded:
        tz.gelu(np.ones((4, 4), np.float32))
    assert recorded.runs[0].duration_ns > 0


@pytest.mark.parametrize("shape", [(1 << 19,), (400003,), (3, 150000), (4000, 70), (5, 60000)])
def test_few_rows_are_cut_into_parts(launched: list[str], shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    exact = x.double()

    def close(got: Any, want: Any, parts: bool = True) -> None:
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6 * float(
            want.abs().max()))
        assert any("parts" in name for name in launched) == parts
        launched.clear()

    few = shape[0] != 4000
    with knobs.override(dynamic="never"):
        close(tz.sum(x), exact.sum())
        close(tz.max(x), exact.max())
        close(tz.softmax(x), exact.softmax(-1), few)
        close(tz.layer_norm(x), torch.nn.functional.layer_norm(exact, exact.shape[-1:]), few)
        close(tz.logsumexp(x, axis=-1), exact.logsumexp(-1), few)
        close(tz.var(x, axis=-1), exact.var(-1, correction=0), few)
        if not few:
            close(tz.sum(x, axis=0), exact.sum(0))


def test_results_go_into_given_arrays(launched: list[str]) -> None:
    x = torch.randn(33, 70)
    out = torch.empty(70, 33).T
    assert tz.gelu(x, out=out) is out
    torch.testing.assert_close(out, torch.nn.functional.gelu(x), rtol=1e-5, atol=1e-6)
    assert launched


def test_a_kernel_in_several_launches_is_one_row_of_a_profile(launched: list[str]) -> None:
    graph, _ = trace(lambda x: tz.sum(x), [TensorType((1 << 20,), tz.float32)], name="total")
    executable = compile_graph(graph)
    x, out = np.ones(1 << 20, np.float32), np.zeros(16, np.float32)
    rows = len(executable.artifact.kernels)
    clock = np.full(rows + 8, -1, np.int64)
    executable.code.run([x.ctypes.data, out.ctypes.data], 0, 1, clock.ctypes.data)
    assert len(launched) > rows and out[0] == 1 << 20
    assert (clock[:rows + 1] > 0).all() and (clock[rows + 1:] == -1).all()


@pytest.mark.parametrize("function", [tz.softmax, tz.sum, tz.matmul, tz.gelu])
def test_verify_names_the_chip(launched: list[str], function: Any) -> None:
    with tz.chip("cpu"):
        report = function.verify(chip="cuda", kinds=("random", "odd"), dtypes=["float32"])
    assert "every level agrees" in str(report) and launched


@pytest.mark.skipif(not driver.absence(), reason="there is a GPU")
def test_verify_needs_the_chip() -> None:
    with pytest.raises(DeviceError, match="nothing can run on 'cuda'"):
        tz.exp.verify(chip="cuda")


def test_verify_finds_a_kernel_that_is_wrong(launched: list[str], monkeypatch: pytest.MonkeyPatch
                                             ) -> None:
    launch = Simulator.launch

    def wrong(self: Any, kernel: int, version: int, grid: int, pointers: Any, sizes: Any) -> None:
        launch(self, kernel, version, grid, pointers, sizes)
        ctypes.c_float.from_address(pointers[-1]).value += 1

    monkeypatch.setattr(Simulator, "launch", wrong)
    with pytest.raises(VerifyError) as error:
        tz.exp.verify(np.ones((4, 5), np.float32), chip="cuda", kinds=("random",))
    assert error.value.level == "code"
