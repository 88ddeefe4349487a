"""A matrix product with tiles chosen by `@triton.autotune`.

Programs take tiles of the result in groups of a few rows, so that what neighbours read is still
in the cache. The sums are float32 whatever the inputs are.

    python examples/triton/matmul.py
"""

import torch
import triton
import triton.language as tl

TILES = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8}, num_warps=4)
    for m, n, k in ((64, 64, 64), (128, 128, 64), (128, 256, 128))
]


@triton.autotune(TILES, key=["m", "n", "k"])
@triton.jit
def matmul_kernel(a, b, c, m, n, k, a_row, a_column, b_row, b_column, c_row, c_column,
                  BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                  GROUP_M: tl.constexpr):
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    first_m = tl.program_id(0) // (GROUP_M * tiles_n) * GROUP_M
    group = min(tiles_m - first_m, GROUP_M)
    place = tl.program_id(0) % (GROUP_M * tiles_n)
    rows = (first_m + place % group) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = place // group * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)

    # Rows and columns beyond the edge wrap around: they are read, and never stored.
    a_at = a + (rows % m)[:, None] * a_row + depth[None, :] * a_column
    b_at = b + depth[:, None] * b_row + (columns % n)[None, :] * b_column
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, k, BLOCK_K):
        left = tl.load(a_at, mask=depth[None, :] < k - start, other=0.0)
        right = tl.load(b_at, mask=depth[:, None] < k - start, other=0.0)
        total = tl.dot(left, right, total)
        a_at += BLOCK_K * a_column
        b_at += BLOCK_K * b_row

    c_at = c + rows[:, None] * c_row + columns[None, :] * c_column
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(c_at, total.to(c.dtype.element_ty), mask=inside)


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product of two matrices, with any strides."""
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), dtype=a.dtype, device=a.device)

    def grid(meta):
        return (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)

    matmul_kernel[grid](a, b, c, m, n, k, *a.stride(), *b.stride(), *c.stride())
    return c


def compare(m: int, n: int, k: int, dtype: torch.dtype, tolerance: float) -> None:
    a, b = torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype).T
    wanted = a.double() @ b.double()
    error = (matmul(a, b).double() - wanted).abs().max() / wanted.abs().max()
    assert error < tolerance, (dtype, m, n, k, error)


def check() -> None:
    torch.manual_seed(0)
    compare(1, 100, 33, torch.float32, 1e-5)
    # Half types: one rounding of the result; sums are float32.
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)):
        compare(300, 200, 150, dtype, tolerance)


def speed(size: int, dtype: torch.dtype) -> None:
    a, b = (torch.randn(size, size, dtype=dtype) for _ in range(2))
    ours = triton.testing.do_bench(lambda: matmul(a, b), return_mode="min")
    theirs = triton.testing.do_bench(lambda: a @ b, return_mode="min")
    name = str(dtype).removeprefix("torch.")
    print(f"{name:>10} {size:10} {ours:10.3f} {theirs:10.3f} {theirs / ours:14.2f}"
          f"   {matmul_kernel.best_config.kwargs}")


def main() -> None:
    check()
    print(f"{'type':>10} {'m = n = k':>10} {'triton ms':>10} {'torch ms':>10} {'times as fast':>14}"
          "   chosen")
    for size, dtype in ((256, torch.float32), (1024, torch.float32), (1024, torch.bfloat16)):
        speed(size, dtype)


if __name__ == "__main__":
    main()
