"""Adding two vectors: the smallest Triton kernel there is.

    python examples/triton/vector_add.py
"""

import torch
import triton
import triton.language as tl


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside)
    tl.store(out + at, total, mask=inside)


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The sum of two contiguous tensors of one shape."""
    out = torch.empty_like(x)
    n = out.numel()
    add_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, out, n, BLOCK=4096)
    return out


def check() -> None:
    torch.manual_seed(0)
    for n in (98432, 1000, 1, 0):
        x, y = torch.randn(n), torch.randn(n)
        assert torch.equal(add(x, y), x + y), n


def speed(n: int) -> None:
    x, y = torch.randn(n), torch.randn(n)
    ours = triton.testing.do_bench(lambda: add(x, y), return_mode="min")
    theirs = triton.testing.do_bench(lambda: x + y, return_mode="min")
    print(f"{n:12} {ours:10.3f} {theirs:10.3f} {theirs / ours:14.2f}")


def main() -> None:
    check()
    print(f"{'elements':>12} {'triton ms':>10} {'torch ms':>10} {'times as fast':>14}")
    for n in (2**16, 2**20, 2**24):
        speed(n)


if __name__ == "__main__":
    main()
