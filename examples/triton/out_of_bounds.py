"""Kernels that forget a mask, for the sanitizer to find.

Each touches memory outside a tensor at the line that says "no mask", and so runs with the
sanitizer only:

    TZ_SANITIZE=1 python examples/triton/out_of_bounds.py [NAME]
"""

import os
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside)
    tl.store(out + at, total)  # no mask


@triton.jit
def softmax_kernel(inp, out, stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    x = tl.load(inp + row * stride + at)  # no mask
    x = tl.where(at < columns, x, -float("inf"))
    weights = tl.exp(x - tl.max(x, axis=0))
    tl.store(out + row * stride + at, weights / tl.sum(weights, axis=0), mask=at < columns)


@triton.jit
def matmul_kernel(a, b, c, m, n, k, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, k, BLOCK):
        depth = start + tl.arange(0, BLOCK)
        left = tl.load(a + (rows % m)[:, None] * k + depth[None, :],
                       mask=depth[None, :] < k, other=0.0)
        right = tl.load(b + depth[:, None] * n + (columns % n)[None, :])  # no mask
        total = tl.dot(left, right, total)
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(c + rows[:, None] * n + columns[None, :], total, mask=inside)


@triton.jit
def layer_norm_kernel(x, weight, out, stride, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    values = tl.load(x + row * stride + at, mask=inside, other=0.0)
    mean = tl.sum(values, axis=0) / columns
    centered = tl.where(inside, values - mean, 0.0)
    scale = 1 / tl.sqrt(tl.sum(centered * centered, axis=0) / columns + eps)
    w = tl.load(weight + at)  # no mask
    tl.store(out + row * stride + at, centered * scale * w, mask=inside)


@triton.jit
def attention_kernel(q, k, v, out, length, D: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    depth = tl.arange(0, D)
    query = tl.load(q + rows[:, None] * D + depth[None, :], mask=rows[:, None] < length, other=0.0)
    weight_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    total = tl.zeros((BLOCK, D), dtype=tl.float32)
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        key = tl.load(k + at[None, :] * D + depth[:, None])  # no mask
        scores = tl.where(at[None, :] < length, tl.dot(query, key), -float("inf"))
        weights = tl.exp(scores)
        weight_sum += tl.sum(weights, axis=1)
        value = tl.load(v + at[:, None] * D + depth[None, :], mask=at[:, None] < length, other=0.0)
        total = tl.dot(weights, value, total)
    tl.store(out + rows[:, None] * D + depth[None, :], total / weight_sum[:, None],
             mask=rows[:, None] < length)


@triton.jit
def gelu_kernel(inp, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(inp + at)  # no mask
    tl.store(out + at, 0.5 * x * (1 + tl.erf(x * 0.7071067811865476)), mask=at < n)


@triton.jit
def dropout_kernel(inp, out, n, p, seed, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(inp + at, mask=at < n)
    kept = tl.rand(seed, at) > p
    tl.store(out + at, tl.where(kept, x / (1 - p), 0.0))  # no mask


def vector_add() -> None:
    x, y, out = (torch.zeros(1000) for _ in range(3))
    add_kernel[(4,)](x, y, out, 1000, BLOCK=256)


def softmax() -> None:
    x, out = torch.zeros(4, 781), torch.zeros(4, 781)
    softmax_kernel[(4,)](x, out, 781, 781, BLOCK=1024)


def matmul() -> None:
    a, b, c = torch.zeros(40, 50), torch.zeros(50, 60), torch.zeros(40, 60)
    matmul_kernel[(2, 2)](a, b, c, 40, 60, 50, BLOCK=32)


def layer_norm() -> None:
    x, weight, out = torch.zeros(3, 100), torch.zeros(100), torch.zeros(3, 100)
    layer_norm_kernel[(3,)](x, weight, out, 100, 100, 1e-5, BLOCK=128)


def flash_attention() -> None:
    q, k, v, out = (torch.zeros(100, 32) for _ in range(4))
    attention_kernel[(4,)](q, k, v, out, 100, D=32, BLOCK=32)


def gelu() -> None:
    x, out = torch.zeros(1000), torch.zeros(1000)
    gelu_kernel[(1,)](x, out, 1000, BLOCK=1024)


def dropout() -> None:
    x, out = torch.zeros(1000), torch.zeros(1000)
    dropout_kernel[(1,)](x, out, 1000, 0.5, 123, BLOCK=1024)


VARIANTS = {f.__name__: f for f in (vector_add, softmax, matmul, layer_norm, flash_attention,
                                    gelu, dropout)}


def main() -> None:
    if os.environ.get("TZ_SANITIZE", "0") in ("", "0"):
        sys.exit("these kernels write outside their tensors: run them with TZ_SANITIZE=1")
    for name in sys.argv[1:] or VARIANTS:
        try:
            VARIANTS[name]()
        except RuntimeError as error:
            print(f"{name}: {error}")
        else:
            sys.exit(f"{name}: nobody noticed")


if __name__ == "__main__":
    main()
