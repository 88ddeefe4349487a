"""Kernels on tensors of torch: what tutorials do, streams, devices, and the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from kernels import add, attention, layer_norm, matmul, softmax  # noqa: E402

from terrazzo.chips.gcu.library import GcuError  # noqa: E402
from terrazzo.errors import ArgumentError, KernelFault  # noqa: E402
from terrazzo.knobs import knobs  # noqa: E402

pytestmark = [pytest.mark.triton, pytest.mark.torch]
HERE = Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[ModuleType]:
    """`torch.gcu`."""
    from terrazzo.torch_device import register
    from terrazzo.torch_device.build import OLDEST

    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST:
        pytest.skip(f"the device is written for torch {OLDEST}, not yet for {torch.__version__}")
    made = register()
    made.init()
    yield made


def normal(*shape: int, dtype: Any = None) -> Any:
    return torch.randn(*shape).to(dtype or torch.float32).to("gcu")


def test_tutorials() -> None:
    x, y, out = normal(98432), normal(98432), torch.empty(98432, device="gcu")
    add[lambda meta: (triton.cdiv(98432, meta["BLOCK"]),)](x, y, out, 98432, BLOCK=1024)
    assert torch.equal(out.cpu(), x.cpu() + y.cpu())
    x = normal(183, 781)
    out = torch.empty_like(x)
    softmax[(183,)](x, out, 781, BLOCK=1024, num_warps=8)
    torch.testing.assert_close(out.cpu(), torch.softmax(x.cpu(), 1))
    weight, bias = normal(781), normal(781)
    layer_norm[(23,)](x, weight, bias, out, 183, 781, ROWS=8, BLOCK=1024)
    torch.testing.assert_close(out.cpu(), torch.nn.functional.layer_norm(
        x.cpu(), (781,), weight.cpu(), bias.cpu()), rtol=1e-5, atol=1e-5)
    q, k, v = (normal(3, 128, 64) for _ in range(3))
    out = torch.empty_like(q)
    attention[(2, 3)](q, k, v, out, 128, D=64, BM=64, BN=32)
    torch.testing.assert_close(out.cpu(), torch.nn.functional.scaled_dot_product_attention(
        q.cpu(), k.cpu(), v.cpu()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_products_tuned(dtype: Any) -> None:
    a, b, c = normal(130, 70, dtype=dtype), normal(70, 90, dtype=dtype), torch.zeros(130, 90)
    c = c.to("gcu")
    tuned = triton.autotune([triton.Config({"BM": m, "BN": n, "BK": 32}, num_warps=4)
                             for m, n in ((16, 16), (64, 64), (128, 32))], key=["m", "n", "k"])(
        matmul)
    chosen = set()
    for _ in range(3):
        tuned.cache.clear()
        tuned[lambda meta: (triton.cdiv(130, meta["BM"]) * triton.cdiv(90, meta["BN"]),)](
            a, b, c, 130, 90, 70)
        chosen.add(str(tuned.best_config))
    assert len(chosen) == 1
    exact = a.cpu().double() @ b.cpu().double()
    torch.testing.assert_close(c.cpu().double(), exact, rtol=1e-5, atol=1e-5)


def test_views_and_empty_tensors() -> None:
    x, out = normal(200), torch.zeros(200, device="gcu")
    add[(1,)](x[50:], x[100:], out[64:], 64, BLOCK=64)
    assert torch.equal(out.cpu()[64:128], x.cpu()[50:114] + x.cpu()[100:164])
    nothing = torch.empty(0, device="gcu")
    add[(1,)](nothing, nothing, nothing, 0, BLOCK=64)
    torch.gcu.synchronize()


def test_launches_go_to_the_current_stream_and_device() -> None:
    x, out = normal(64), torch.zeros(64, device="gcu")
    begin, end = (torch.gcu.Event(enable_timing=True) for _ in range(2))
    stream = torch.gcu.Stream()
    stream.wait_stream(torch.gcu.current_stream())  # zeros come first
    with torch.gcu.stream(stream):
        begin.record()
        add[(1,)](x, x, out, 64, BLOCK=64)
        end.record()
    end.synchronize()
    assert begin.elapsed_time(end) > 0
    assert torch.equal(out.cpu(), 2 * x.cpu())
    if torch.gcu.device_count() > 1:
        with torch.gcu.device(1):
            there = x.to("gcu:1")
            out = torch.zeros(64, device="gcu:1")
            add[(1,)](there, there, out, 64, BLOCK=64)
            with pytest.raises(GcuError, match="memory of device 0, not of device 1"):
                add[(1,)](x, there, out, 64, BLOCK=64)
        assert torch.equal(out.cpu(), 2 * x.cpu())
        assert triton.runtime.driver.active.get_active_torch_device() == torch.device("gcu", 0)


def test_tensors_of_another_device_are_refused() -> None:
    x, out = normal(64), torch.zeros(64, device="gcu")
    with pytest.raises(ArgumentError, match=r'device cpu(.|\n)*\.to\("gcu"\)'):
        add[(1,)](x, x.cpu(), out, 64, BLOCK=64)
    add[(1,)](x, x, out, 64, BLOCK=64)
    assert torch.equal(out.cpu(), 2 * x.cpu())


def test_benchmarks() -> None:
    x, out = normal(4096), torch.zeros(4096, device="gcu")
    times = {triton.testing.do_bench(lambda: add[(4,)](x, x, out, 4096, BLOCK=1024),
                                     warmup=0, rep=0.01) for _ in range(3)}
    assert len({round(t, 7) for t in times}) == 1 and min(times) > 0


@triton.jit
def _gather(x, at, out, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + i, tl.load(x + tl.load(at + i)))


def test_the_sanitizer_knows_tensors() -> None:
    x, at, out = normal(64), torch.arange(64), torch.zeros(64, device="gcu")
    at[37] = 64
    with knobs.override(sanitize=True):
        with pytest.raises(KernelFault, match=r"program \(4, 0, 0\), lane 5: reads `x`\[64\]"):
            _gather[(8,)](x, at.to("gcu"), out, N=8)
        _gather[(8,)](x, torch.arange(64).to("gcu"), out, N=8)
    assert torch.equal(out.cpu(), x.cpu())


INTERPRETED = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from terrazzo.torch_device import register
register()
from terrazzo.triton_gcu.activate import activate
activate()
from kernels import add, softmax
x, out = torch.randn(57 * 20).to("gcu"), torch.zeros(57 * 20, device="gcu")
add[(57,)](x, x, out, 57 * 20, BLOCK=32)
assert torch.equal(out.cpu(), 2 * x.cpu())
softmax[(57,)](x, out, 20, BLOCK=32)
torch.testing.assert_close(out.cpu().view(57, 20), torch.softmax(x.cpu().view(57, 20), 1))
print(type(add).__name__)
"""


def test_the_interpreter() -> None:
    done = subprocess.run([sys.executable, "-c", INTERPRETED, str(HERE)], capture_output=True,
                          text=True, timeout=300, env={**os.environ, "TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "InterpretedFunction"
