"""Kernels that several tests launch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)


@triton.jit
def softmax(x, out, columns, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    values = tl.load(x + row * columns + i, mask=i < columns, other=-float("inf"))
    e = tl.exp(values - tl.max(values, 0))
    tl.store(out + row * columns + i, e / tl.sum(e, 0), mask=i < columns)


@triton.jit
def matmul(a, b, c, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    across = tl.cdiv(n, BN)
    rows = tl.program_id(0) // across * BM + tl.arange(0, BM)
    columns = tl.program_id(0) % across * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        steps = start + tl.arange(0, BK)
        left = tl.load(a + rows[:, None] * k + steps[None, :],
                       mask=(rows[:, None] < m) & (steps[None, :] < k), other=0.0)
        right = tl.load(b + steps[:, None] * n + columns[None, :],
                        mask=(steps[:, None] < k) & (columns[None, :] < n), other=0.0)
        total = tl.dot(left, right, total)
    tl.store(c + rows[:, None] * n + columns[None, :], total,
             mask=(rows[:, None] < m) & (columns[None, :] < n))


@triton.jit
def visit(seen, who):
    """Counts how often each program ran, and notes its three numbers."""
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    number = x + tl.num_programs(0) * (y + tl.num_programs(1) * z)
    tl.atomic_add(seen + number, 1)
    tl.store(who + number * 3, x)
    tl.store(who + number * 3 + 1, y)
    tl.store(who + number * 3 + 2, z)


@triton.jit
def softmax_of_rows(x, out, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    r, i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (r < rows) & (i < columns)
    values = tl.load(x + r * columns + i, mask=inside, other=-float("inf"))
    e = tl.exp(values - tl.max(values, 1)[:, None])
    tl.store(out + r * columns + i, e / tl.sum(e, 1)[:, None], mask=inside)


@triton.jit
def layer_norm(x, weight, bias, out, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    r, i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (r < rows) & (i < columns)
    values = tl.load(x + r * columns + i, mask=inside, other=0.0)
    apart = tl.where(inside, values - tl.sum(values, 1)[:, None] / columns, 0.0)
    scale = tl.rsqrt(tl.sum(apart * apart, 1)[:, None] / columns + 1e-5)
    factor, addend = tl.load(weight + i, mask=i < columns), tl.load(bias + i, mask=i < columns)
    tl.store(out + r * columns + i, apart * scale * factor + addend, mask=inside)


@triton.jit
def attention(q, k, v, out, n, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    head, d = tl.program_id(1) * n * D, tl.arange(0, D)[None, :]
    rows = (tl.program_id(0) * BM + tl.arange(0, BM))[:, None]
    queries = tl.load(q + head + rows * D + d) * 0.125
    top = tl.full((BM,), -float("inf"), tl.float32)
    weight = tl.zeros((BM,), tl.float32)
    total = tl.zeros((BM, D), tl.float32)
    for start in range(0, n, BN):
        at = (start + tl.arange(0, BN))[:, None]
        scores = tl.dot(queries, tl.trans(tl.load(k + head + at * D + d)))
        higher = tl.maximum(top, tl.max(scores, 1))
        e, shrink = tl.exp(scores - higher[:, None]), tl.exp(top - higher)
        weight = weight * shrink + tl.sum(e, 1)
        total = tl.dot(e, tl.load(v + head + at * D + d), total * shrink[:, None])
        top = higher
    tl.store(out + head + rows * D + d, total / weight[:, None])
