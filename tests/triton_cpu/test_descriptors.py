"""Tensor descriptors, made in the kernel and on the host: bounds, padding, gathers, atomics."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

pytestmark = [pytest.mark.triton, pytest.mark.torch]


@triton.jit
def shift_on_host(source, target, M, N, B: tl.constexpr, C: tl.constexpr):
    m, n = tl.program_id(0) * B, tl.program_id(1) * C
    target.store([m, n], source.load([m - 2, n + 3]) + 1)


@triton.jit
def shift_in_kernel(source_ptr, target_ptr, M, N, B: tl.constexpr, C: tl.constexpr):
    source = tl.make_tensor_descriptor(source_ptr, [M, N], [N, 1], [B, C])
    target = tl.make_tensor_descriptor(target_ptr, [M, N], [N, 1], [B, C])
    m, n = tl.program_id(0) * B, tl.program_id(1) * C
    target.store([m, n], source.load([m - 2, n + 3]) + 1)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "int32"])
@pytest.mark.parametrize("on_host", [True, False])
def test_tiles_that_leave_the_tensor(dtype: str, on_host: bool) -> None:
    m, n, b, c = 21, 48, 8, 16
    x = torch.randint(-50, 50, (m, n)).to(getattr(torch, dtype))
    # Rows after the end must stay as they are.
    out = torch.full((m + 4, n), 7).to(x.dtype)
    grid = triton.cdiv(m, b), triton.cdiv(n, c)
    if on_host:
        shift_on_host[grid](TensorDescriptor.from_tensor(x, [b, c]),
                            TensorDescriptor(out, [m, n], [n, 1], [b, c]), m, n, b, c)
    else:
        shift_in_kernel[grid](x, out, m, n, b, c)
    expected = torch.zeros_like(x)
    expected[2:, :-3] = x[:-2, 3:]
    assert torch.equal(out[:m], expected + 1)
    assert (out[m:] == 7).all()


@triton.jit
def fill(desc, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, desc.load([4]))


@pytest.mark.parametrize(("padding", "outside"), [("zero", 0.0), ("nan", float("nan"))])
def test_padding(padding: str, outside: float) -> None:
    x, out = torch.arange(12.0), torch.empty(16)
    fill[(1,)](TensorDescriptor(x, [12], [1], [16], padding), out, N=16)
    assert torch.equal(out[:8], x[4:])
    torch.testing.assert_close(out[8:], torch.full((8,), outside), equal_nan=True)


def test_rounding_to_tf32() -> None:
    if "round_f32_to_tf32" not in TensorDescriptor.__dataclass_fields__:
        pytest.skip("this version of Triton does not round")
    x, out = torch.randn(20), torch.empty(16)
    fill[(1,)](TensorDescriptor(x, [20], [1], [16], "zero", True), out, N=16)
    kept = (x[4:].view(torch.int32) + 0x1000 - 1 + ((x[4:].view(torch.int32) >> 13) & 1)) & ~0x1FFF
    assert torch.equal(out, kept.view(torch.float32))


@triton.jit
def described(desc, out_ptr):
    tl.store(out_ptr, desc.shape[0])
    tl.store(out_ptr + 1, desc.shape[1])
    tl.store(out_ptr + 2, desc.strides[0])
    tl.store(out_ptr + 3, desc.strides[1])


def test_shape_and_strides_in_the_kernel() -> None:
    out = torch.empty(4, dtype=torch.int64)
    x = torch.zeros(6, 32)[:, :20]
    described[(1,)](TensorDescriptor.from_tensor(x, [2, 4]), out)
    assert out.tolist() == [6, 20, 32, 1]


@triton.jit
def gather_rows(x_ptr, rows_ptr, out_ptr, M, N, y, R: tl.constexpr, C: tl.constexpr):
    rows = tl.load(rows_ptr + tl.arange(0, R))
    x = tl.make_tensor_descriptor(x_ptr, [M, N], [N, 1], [1, C])
    tile = x.gather(rows, y)
    tl.store(out_ptr + tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :], tile)


@triton.jit
def scatter_rows(out_ptr, rows_ptr, x_ptr, M, N, y, R: tl.constexpr, C: tl.constexpr):
    rows = tl.load(rows_ptr + tl.arange(0, R))
    tile = tl.load(x_ptr + tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :])
    out = tl.make_tensor_descriptor(out_ptr, [M, N], [N, 1], [1, C])
    out.scatter(tile, rows, y)


@pytest.mark.parametrize("y", [0, 24])
def test_gather_and_scatter(y: int) -> None:
    m, n, r, c = 30, 32, 8, 16
    rows = torch.randperm(m, dtype=torch.int32)[:r]
    wide = torch.zeros(m, n + c)
    wide[:, :n] = torch.randn(m, n)
    x, out = wide[:, :n].contiguous(), torch.empty(r, c)
    gather_rows[(1,)](x, rows, out, m, n, y, R=r, C=c)
    assert torch.equal(out, wide[rows.long(), y:y + c])
    back = torch.zeros(m, n)
    scatter_rows[(1,)](back, rows, out, m, n, y, R=r, C=c)
    expected = torch.zeros(m, n + c)
    expected[rows.long(), y:y + c] = out
    assert torch.equal(back, expected[:, :n])


@triton.jit
def accumulate(desc, x_ptr, KIND: tl.constexpr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0) * N + tl.arange(0, N))
    if KIND == "add":
        desc.atomic_add([8], x)
    elif KIND == "max":
        desc.atomic_max([8], x)
    elif KIND == "min":
        desc.atomic_min([8], x)
    else:
        desc.atomic_xor([8], x)


@pytest.mark.parametrize("kind", ["add", "max", "min", "xor"])
def test_atomics_through_descriptors(kind: str) -> None:
    x = torch.randint(-1000, 1000, (5, 16), dtype=torch.int32)
    out = torch.zeros(24, dtype=torch.int32)
    accumulate[(5,)](TensorDescriptor(out, [20], [1], [16]), x, KIND=kind, N=16)
    expected: Any = torch.zeros(16, dtype=torch.int32)
    combine = {"add": torch.add, "max": torch.maximum, "min": torch.minimum,
               "xor": torch.bitwise_xor}[kind]
    for row in x:
        expected = combine(expected, row)
    assert torch.equal(out[8:20], expected[:12])
    assert not out[:8].any() and not out[20:].any()


@triton.jit
def product(a, b, c, K, M: tl.constexpr, N: tl.constexpr, B: tl.constexpr):
    m, n = tl.program_id(0) * M, tl.program_id(1) * N
    total = tl.zeros((M, N), tl.float32)
    for k in range(0, K, B):
        total = tl.dot(a.load([m, k]), b.load([n, k]).T, total)
    c.store([m, n], total)


def test_product() -> None:
    a, b = torch.randn(40, 100), torch.randn(56, 100)
    c = torch.full((40, 56), float("nan"))
    make = TensorDescriptor.from_tensor
    product[(2, 2)](make(a, [32, 16]), make(b, [32, 16]), make(c, [32, 32]), 100,
                    M=32, N=32, B=16)
    torch.testing.assert_close(c.double(), a.double() @ b.double().T, rtol=1e-5, atol=1e-4)


@triton.jit
def first_and_second(pair, out_ptr):
    tl.store(out_ptr, tl.load(pair[0]) + pair[1][0])
    tl.store(out_ptr + 1, pair[1][1])


def test_tuples_as_arguments() -> None:
    out = torch.empty(2)
    first_and_second[(1,)]((torch.tensor([3.0]), (1, 2.5)), out)
    assert out.tolist() == [4.0, 2.5]


@triton.jit
def from_tuple(pair, out_ptr, N: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, N), pair[0].load([4]) + pair[1])


def test_descriptors_in_tuples() -> None:
    x, out = torch.arange(32.0), torch.empty(16)
    from_tuple[(1,)]((TensorDescriptor.from_tensor(x, [16]), 3), out, N=16)
    assert torch.equal(out, x[4:20] + 3)
