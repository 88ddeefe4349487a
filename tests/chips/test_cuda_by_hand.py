"""Kernels by hand beside those that are generated for a GPU: Triton's, and CUDA C++."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.calls import kernels
from terrazzo.chips.cuda import by_hand as cuda_by_hand
from terrazzo.chips.cuda import driver
from terrazzo.errors import ArgumentError, CompileError, MissingDependency, VerifyError
from terrazzo.graph.ir import Operator

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = [pytest.mark.torch, pytest.mark.triton]
needs_gpu = pytest.mark.skipif(bool(driver.absence()), reason="needs a GPU")
HUNDRED = 100.0  # what kernels add here, to be told from the generated one
X = np.ones((5, 7), np.float32)

SOURCE = """
void kernel(const Tensor* in, Tensor* out) {
    const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i >= out[0].size()) return;
    const float x = in[0].as<float>()[i];
    const float positive = x > 0 ? x : (x == x ? 0.0f : x);
    out[0].as<float>()[i] = *in[1].as<float>() * positive * positive + OFFSET;
}
"""


@triton.jit
def squared_relu_kernel(x_ptr, alpha_ptr, y_ptr, count, OFFSET: tl.constexpr,
                        BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < count)
    positive = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(y_ptr + i, tl.load(alpha_ptr) * positive * positive + OFFSET, mask=i < count)


def squared_relu() -> Operator:
    @tz.op
    def squared_relu(x: Any, alpha: Any = 1.0) -> Any:
        positive = tz.maximum(x, 0.0)
        return alpha * positive * positive

    return squared_relu


def in_triton(offset: float) -> Operator:
    op = squared_relu()

    @op.kernel("cuda", language="triton")
    def _(x: Any, alpha: Any) -> Any:
        if x.dtype != tz.float32 or alpha.dtype != tz.float32 or alpha.shape:
            return None
        size = int(np.prod(x.shape))
        return tz.Launch(squared_relu_kernel, triton.cdiv(size, 256),
                         constants={"count": size, "OFFSET": offset, "BLOCK": 256})

    return op


def in_cuda(offset: str = "0.0f") -> Operator:
    op = squared_relu()

    @op.kernel("cuda", language="cuda")
    def _(x: Any, alpha: Any) -> str | None:
        return SOURCE.replace("OFFSET", offset) if x.dtype == tz.float32 else None

    return op


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the clock says, the kernel by hand is quicker."""
    monkeypatch.setattr(kernels, "_timed", lambda chip, entries, leaves: {
        name: float(name == "generated") for name in entries})


@pytest.fixture(params=["simulated", pytest.param("gpu", marks=[pytest.mark.gpu, needs_gpu])])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where tensors are that the chip cuda computes on."""
    if request.param == "gpu":
        yield "cuda"
        return
    with tz.knobs.override(cuda_simulate=True, chip="cuda"):
        yield "cpu"


@pytest.mark.usefixtures("by_hand")
def test_triton(device: str) -> None:
    op, x = in_triton(HUNDRED), torch.tensor([[-1.0, 2.0, 5.0], [3.0, -4.0, 0.0]], device=device)
    want = torch.relu(x) ** 2
    torch.testing.assert_close(op(x), want + HUNDRED)
    torch.testing.assert_close(op(x.T, 2.0), 2 * want.T + HUNDRED)
    torch.testing.assert_close(op(x.double()), want.double())  # not for these
    assert op(x[:0]).shape == (0, 3)
    many = torch.randn(70001, device=device)
    torch.testing.assert_close(op(many), torch.relu(many) ** 2 + HUNDRED)


@pytest.mark.usefixtures("by_hand")
def test_gradients_are_those_of_the_definition(device: str) -> None:
    op, x = in_triton(HUNDRED), torch.randn(5, 7, device=device, requires_grad=True)
    y = op(x)
    torch.testing.assert_close(y.detach(), torch.relu(x.detach()) ** 2 + HUNDRED)
    y.sum().backward()
    torch.testing.assert_close(x.grad, 2 * torch.relu(x.detach()))


def test_the_quicker_one_is_chosen_and_shown(device: str) -> None:
    op, x = in_triton(0.0), torch.randn(40, 50, device=device)
    torch.testing.assert_close(op(x), torch.relu(x) ** 2)
    shown = op.lower(x, "kernels")
    assert "triton kernel, line" in shown and "us" in shown


def test_verify(device: str) -> None:
    report = in_triton(0.0).verify(X, 2.0, dtypes=["float32"], kinds=["random", "odd"])
    assert report.elements("kernel") > 50
    with pytest.raises(VerifyError, match="triton kernel, line"):
        in_triton(HUNDRED).verify(X, 2.0, dtypes=["float32"], kinds=["random", "odd"])


def test_a_function_of_triton_needs_blocks() -> None:
    op = squared_relu()
    op.kernel("cuda", language="triton")(lambda x, alpha: tz.Launch(squared_relu_kernel))
    with tz.knobs.override(cuda_simulate=True, chip="cuda"), pytest.raises(
            ArgumentError, match="a number of blocks"):
        op(torch.ones(3))


def test_without_a_compiler_the_generated_one_runs() -> None:
    with tz.knobs.override(cuda_simulate=True, chip="cuda"), pytest.warns(
            UserWarning, match="CUDA C.. need a GPU: the generated kernel of squared_relu is used"):
        torch.testing.assert_close(in_cuda("1.0f")(torch.ones(3)), torch.ones(3))


def test_a_missing_nvrtc_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_by_hand, "_NAMES", ("libnvrtc-that-is-not-there.so",))
    monkeypatch.setattr(cuda_by_hand.importlib.util, "find_spec", lambda name: None)
    cuda_by_hand.nvrtc.cache_clear()
    with pytest.raises(MissingDependency, match="no compiler for CUDA"):
        cuda_by_hand.nvrtc()
    cuda_by_hand.nvrtc.cache_clear()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.usefixtures("by_hand")
def test_cuda() -> None:
    op, x = in_cuda("100.0f"), torch.randn(300, 7, device="cuda")
    torch.testing.assert_close(op(x), torch.relu(x) ** 2 + HUNDRED)
    torch.testing.assert_close(op(x.T, 2.0), 2 * torch.relu(x.T) ** 2 + HUNDRED)
    assert op(x[:0]).shape == (0, 7)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.testing.assert_close(op(x), torch.relu(x) ** 2 + HUNDRED)


@pytest.mark.gpu
@needs_gpu
def test_cuda_is_verified_and_its_errors_name_the_line() -> None:
    report = in_cuda().verify(X, 2.0, dtypes=["float32"], kinds=["random", "odd"])
    assert report.elements("kernel") > 50
    with pytest.raises(VerifyError, match="cuda kernel, line"):
        in_cuda("100.0f").verify(X, 2.0, dtypes=["float32"], kinds=["random", "odd"])
    with pytest.raises(CompileError, match=r"(?s)NVRTC does not compile.*nothing_of_the_kind"):
        in_cuda("nothing_of_the_kind")(torch.ones(3, device="cuda"))


def test_the_example() -> None:
    if "cpu" not in entry_points(group="triton.backends").names and not torch.cuda.is_available():
        pytest.skip("terrazzo is not installed, so Triton does not find its backend")
    example = Path(__file__).parents[2] / "examples" / "gelu_four_ways.py"
    ran = subprocess.run([sys.executable, str(example)], capture_output=True, text=True,
                         timeout=600)
    assert ran.returncode == 0, ran.stderr
    for said in ("torch.compile", "Triton by hand", "generated", "kernel, line"):
        assert said in ran.stdout
