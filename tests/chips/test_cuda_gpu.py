"""What needs a GPU: the chip follows the data, streams, autograd, errors, and every operator."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.chips.cuda import driver
from terrazzo.errors import DeviceError, OutOfMemory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(driver.absence()), reason="needs a GPU")]
torch = pytest.importorskip("torch")

sys.path[:0] = [str(Path(__file__).parents[1])]

import test_every_operator as every  # noqa: E402

from terrazzo.calls.levels import lower  # noqa: E402
from terrazzo.graph.ir import operator_named  # noqa: E402

hopper = pytest.mark.skipif(not driver.absence() and torch.cuda.get_device_capability() != (9, 0),
                            reason="Gluon's kernels are for Hopper")


@pytest.mark.parametrize(("name", "row"), every.CASES)
def test_values(name: str, row: every.Case, rng: np.random.Generator) -> None:
    arrays = every.inputs_of(row, rng, "float32")
    with tz.chip("cuda"):
        every.check(every.graph_of(operator_named(name), arrays, row), every.present(arrays))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_chip_follows_the_data(dtype: str) -> None:
    x = torch.randn(511, 1030, device="cuda", dtype=getattr(torch, dtype))
    slack = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}[dtype]
    exact = x.double()
    pairs: list[tuple[Any, Any]] = [
        (tz.gelu(x), torch.nn.functional.gelu(exact)), (tz.softmax(x), exact.softmax(-1)),
        (tz.sum(x), exact.sum()), (tz.sum(x, axis=0), exact.sum(0)),
        (tz.layer_norm(x), torch.nn.functional.layer_norm(exact, exact.shape[-1:]))]
    for got, want in pairs:
        assert got.is_cuda and got.dtype is x.dtype
        torch.testing.assert_close(got.double(), want, rtol=slack, atol=slack * max(
            1.0, float(want.abs().max())))


def test_autograd() -> None:
    x = torch.randn(64, 300, device="cuda", requires_grad=True)
    tz.softmax(tz.gelu(x)).square().sum().backward()
    got, x.grad = x.grad.clone(), None
    torch.nn.functional.gelu(x).softmax(-1).square().sum().backward()
    torch.testing.assert_close(got, x.grad, rtol=1e-4, atol=1e-6)


def test_numbers_views_and_targets() -> None:
    x = torch.randn(100, 100, device="cuda")
    flat = torch.randn(1001, device="cuda")
    torch.testing.assert_close(tz.add(x, 2.0), x + 2.0)
    torch.testing.assert_close(tz.exp(flat[1:]), flat[1:].exp())
    torch.testing.assert_close(tz.exp(x.T), x.T.exp())
    for out in (torch.empty_like(x), torch.empty_like(x).T, torch.empty(10001, device="cuda")[1:]):
        out = out.reshape(100, 100) if out.dim() == 1 else out
        assert tz.exp(x, out=out) is out
        torch.testing.assert_close(out, x.exp())


def test_another_stream() -> None:
    x = torch.randn(1024, 1 << 14, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        y = tz.softmax(tz.gelu(x))
        torch.cuda.current_stream().synchronize()
    torch.testing.assert_close(y, torch.nn.functional.gelu(x).softmax(-1))


def test_sizes_that_vary() -> None:
    function = tz.jit(lambda x: tz.softmax(x * 2))
    for n in (5, 7, 16, 300, 512, 4096, 5000, 70000):
        x = torch.randn(33, n, device="cuda")
        torch.testing.assert_close(function(x), (x * 2).softmax(-1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("shape", [(5, 33, 70), (1, 64, 4096), (16, 64, 2048), (1000, 136, 72),
                                   (512, 512, 512), (4096, 4096, 256), (0, 8, 8)])
def test_products(dtype: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    x, w, b = (torch.randn(s, device="cuda").to(getattr(torch, dtype))
               for s in ((m, k), (k, n), (n,)))
    slack = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3, "float64": 1e-12}[dtype]
    want = torch.nn.functional.gelu(x.double() @ w.double() + b.double())
    with tz.knobs.override(dynamic="never"):
        got = tz.jit(lambda x, w, b: tz.gelu(x @ w + b))(x, w, b)
    torch.testing.assert_close(got.double(), want, rtol=slack, atol=slack * max(
        1.0, float(want.abs().max()) if want.numel() else 0))


def test_rows_of_products_vary() -> None:
    function = tz.jit(lambda x, w: x @ w)
    w = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    for m in (3, 5, 17, 64, 65, 130, 2048, 1, 0):
        x = torch.randn(m, 256, device="cuda", dtype=torch.bfloat16)
        torch.testing.assert_close(function(x, w), x @ w, rtol=2e-2, atol=2e-2 * 16)


def test_infinite_factors_stay_where_they_are() -> None:
    x, w = torch.randn(70, 64, device="cuda"), torch.randn(64, 72, device="cuda")
    x[3, 4], x[5, 6] = torch.inf, torch.nan
    got, want = tz.matmul(x, w), x @ w
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [
    ((2, 4, 130, 64), (2, 4, 130, 64)), ((2, 4, 1024, 128), (2, 2, 1024, 128)),
    ((2, 8, 1, 128), (2, 2, 3000, 128)), ((2, 8, 5, 64), (2, 2, 1100, 64)),
    ((4, 70, 24), (4, 150, 24)), ((1, 2, 300, 256), (1, 2, 300, 256))])
def test_attention(dtype: str, causal: bool, queries: tuple[int, ...], keys: tuple[int, ...]
                   ) -> None:
    q, k, v = (torch.randn(s, device="cuda").to(getattr(torch, dtype))
               for s in (queries, keys, keys))
    slack = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}[dtype]
    shared = len(keys) > 3 and keys[-3] != queries[-3]
    want = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=causal, enable_gqa=shared)
    with tz.knobs.override(dynamic="never"):
        got = tz.jit(lambda q, k, v: tz.scaled_dot_product_attention(q, k, v, causal=causal))(
            q, k, v)
    torch.testing.assert_close(got.double(), want, rtol=slack, atol=slack)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [
    ((2, 4, 130, 64), (2, 4, 130, 64)), ((2, 4, 1024, 128), (2, 2, 1024, 128)),
    ((4, 70, 24), (4, 150, 24)), ((1, 2, 300, 256), (1, 2, 300, 256))])
def test_attention_gradient(dtype: str, causal: bool, queries: tuple[int, ...],
                            keys: tuple[int, ...]) -> None:
    given = [torch.randn(s, device="cuda").to(getattr(torch, dtype)).requires_grad_()
             for s in (queries, keys, keys)]
    wide = [x.detach().double().requires_grad_() for x in given]
    g = torch.randn(queries, device="cuda").to(getattr(torch, dtype))
    shared = len(keys) > 3 and keys[-3] != queries[-3]
    want = torch.autograd.grad(torch.nn.functional.scaled_dot_product_attention(
        *wide, is_causal=causal, enable_gqa=shared), wide, g.double())
    with tz.knobs.override(dynamic="never"):
        function = tz.jit(lambda q, k, v: tz.scaled_dot_product_attention(q, k, v, causal=causal))
        found = torch.autograd.grad(function(*given), given, g)
    slack = {"float32": 3e-5, "bfloat16": 6e-2, "float16": 1e-2}[dtype]
    for got, true in zip(found, want, strict=True):
        torch.testing.assert_close(got.double(), true, rtol=slack,
                                   atol=slack * max(1.0, float(true.abs().max())))


# ---------------------------------------------------------------- kernels of many forms
def random(*shape: int, dtype: str = "float32") -> Any:
    return torch.randn(shape, device="cuda").to(getattr(torch, dtype))


def called(function: Any, *args: Any, holds: str) -> Any:
    """What a function answers by kernels whose text holds something."""
    with tz.knobs.override(dynamic="never"):
        jitted = tz.jit(function)
        graph, over = jitted.graph_over(args, {})
        assert holds in lower(graph, "triton", "cuda", over)
        return jitted(*args)


def close(got: Any, want: Any, slack: float) -> None:
    torch.testing.assert_close(got.double(), want, rtol=slack,
                               atol=slack * max(1.0, float(want.abs().max())))


def of_float8(x: Any, w: Any) -> Any:
    return tz.float8_matmul(x, w, transpose_y=True)


# More tiles than multiprocessors, whole ones and ragged ones.
@hopper
@pytest.mark.parametrize(("kind", "shape", "end"), [
    ("float8_e4m3fn", (2048, 2304, 1024), "gelu"), ("float8_e5m2", (2041, 2312, 1040), "gelu"),
    ("float8_e4m3fn", (2041, 2312, 1040), "residual"),
    ("float8_e4m3fn", (2041, 2312, 1040), "float32")])
def test_exact_sums_of_float8(kind: str, shape: tuple[int, int, int], end: str) -> None:
    m, n, k = shape
    x, w = random(m, k, dtype=kind), random(n, k, dtype=kind)
    b, r = random(n, dtype="bfloat16"), random(m, n, dtype="bfloat16")
    rows = torch.rand(m, 1, device="cuda") + 0.5
    exact, small = x.double() @ w.double().T, k ** -0.5
    if end == "gelu":
        got = called(lambda x, w, b: tz.astype(tz.gelu(of_float8(x, w) * small + b),
                                               dtype=tz.bfloat16), x, w, b, holds="warp_specialize")
        close(got, torch.nn.functional.gelu(exact * small + b.double()), 1e-2)
    elif end == "residual":
        got = called(lambda x, w, r: tz.astype(of_float8(x, w) * small, dtype=tz.bfloat16) + r,
                     x, w, r, holds="warp_specialize")
        close(got, exact * small + r.double(), 2e-2)
    else:
        got = called(lambda x, w, s: of_float8(x, w) * s, x, w, rows, holds="warp_specialize")
        assert got.dtype is torch.float32
        close(got, exact * rows.double(), 1e-3)  # 14 bits of the sum of each piece


@hopper
def test_float8_that_begins_anywhere() -> None:
    """Which no descriptor can read."""
    m, n, k = 2048, 2304, 1024
    x = random(m * k + 1, dtype="float8_e4m3fn")[1:].view(m, k)
    w = random(n, k, dtype="float8_e4m3fn")
    close(called(of_float8, x, w, holds="warp_specialize"), x.double() @ w.double().T, 1e-3)


@hopper
@pytest.mark.parametrize(("size", "causal", "dtype"), [
    (64, False, "bfloat16"), (64, True, "float16"), (128, False, "float16"),
    (128, True, "bfloat16")])
def test_attention_in_gluon(size: int, causal: bool, dtype: str) -> None:
    """Lengths that no tile divides, heads that share keys; and the log-sum-exp, by gradients."""
    queries, keys = (2, 4, 1000 if causal else 300, size), (2, 2, 1000, size)
    given = [random(*s, dtype=dtype).requires_grad_() for s in (queries, keys, keys)]
    wide = [x.detach().double().requires_grad_() for x in given]
    g = random(*queries, dtype=dtype)
    want = torch.nn.functional.scaled_dot_product_attention(
        *wide, is_causal=causal, enable_gqa=True)
    slack = {"bfloat16": 2e-2, "float16": 3e-3}[dtype]
    attend = lambda q, k, v: tz.scaled_dot_product_attention(q, k, v, causal=causal)  # noqa: E731
    close(called(attend, *(x.detach() for x in given), holds="@gluon.jit"), want.detach(), slack)
    with tz.knobs.override(dynamic="never"):
        found = torch.autograd.grad(tz.jit(attend)(*given), given, g)
    for got, true in zip(found, torch.autograd.grad(want, wide, g.double()), strict=True):
        close(got, true, 3 * slack)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1024, 2048), (1001, 777)])
def test_transposes_by_tiles(shape: tuple[int, int], dtype: str) -> None:
    x, y = random(*shape, dtype=dtype), random(*reversed(shape), dtype=dtype)
    assert torch.equal(called(lambda y: tz.permute_dims(y, axes=(1, 0)), y, holds="ROWS"), y.T)
    assert torch.equal(called(lambda x, y: x + y.T, x, y, holds="ROWS"), x + y.T)
    images = random(3, 33, 20, 21, dtype=dtype)
    assert torch.equal(called(lambda x: tz.permute_dims(x, axes=(0, 2, 3, 1)), images,
                              holds="ROWS"), images.permute(0, 2, 3, 1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_packed_before_a_convolution(dtype: str) -> None:
    x, w, b = random(2, 32, 32, 32, dtype=dtype), random(64, 32, 3, 3, dtype=dtype), random(
        64, dtype=dtype)
    got = called(lambda x, w, b: tz.relu(tz.conv(x, w, b, padding=1)), x, w, b, holds="_packed")
    want = torch.relu(torch.nn.functional.conv2d(x.double(), w.double(), b.double(), padding=1))
    close(got, want, {"float32": 1e-5, "bfloat16": 1e-2}[dtype])


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(DeviceError, match="cuda:0 and cpu"):
        tz.add(torch.ones(3, device="cuda"), torch.ones(3))
    with pytest.raises(DeviceError, match="cuda:0"):
        tz.exp.on("cpu")(torch.ones(3, device="cuda"))
    with pytest.raises(OutOfMemory):
        tz.exp(torch.zeros(1, device="cuda").expand(1 << 38))


@pytest.mark.parametrize("function", [tz.softmax, tz.sum, tz.matmul, tz.gelu, tz.layer_norm])
def test_verify(function: Any) -> None:
    report = function.verify(chip="cuda", kinds=("random", "odd"), dtypes=["float32"])
    assert "every level agrees" in str(report)
