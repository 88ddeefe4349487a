"""Dropout that remembers a seed instead of a mask.

Random numbers are a function of seed and position (Philox), so the backward pass makes the mask
again. The numbers are the ones that Triton makes on a GPU.

    python examples/triton/dropout.py
"""

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def dropout_kernel(inp, out, n, p, seed, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(inp + at, mask=at < n)
    kept = tl.rand(seed, at) > p
    tl.store(out + at, tl.where(kept, x / (1 - p), 0.0), mask=at < n)


def run(x: torch.Tensor, p: float, seed: int) -> torch.Tensor:
    out, n = torch.empty_like(x), x.numel()
    dropout_kernel[(triton.cdiv(n, BLOCK),)](x, out, n, p, seed, BLOCK=BLOCK)
    return out


class Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p, seed):
        ctx.p, ctx.seed = p, seed
        return run(x, p, seed)

    @staticmethod
    def backward(ctx, grad):
        return run(grad.contiguous(), ctx.p, ctx.seed), None, None


def dropout(x: torch.Tensor, p: float, seed: int) -> torch.Tensor:
    """Zero with probability p, else x / (1 - p); equal seeds drop equal elements."""
    x = x.contiguous()
    if torch.is_grad_enabled() and x.requires_grad:
        return Dropout.apply(x, p, seed)
    return run(x, p, seed)


def check() -> None:
    torch.manual_seed(0)
    n, p = 100_003, 0.3
    x = torch.randn(n, requires_grad=True)
    once, again, other = dropout(x, p, 123), dropout(x, p, 123), dropout(x, p, 124)
    assert torch.equal(once, again) and not torch.equal(once, other)
    kept = once != 0
    # Five standard deviations of a binomial count.
    assert abs(int(kept.sum()) - n * (1 - p)) < 5 * (n * p * (1 - p)) ** 0.5
    wanted = torch.where(kept, x.double() / (1 - p), 0.0)
    torch.testing.assert_close(once.double(), wanted, rtol=1e-6, atol=0)
    once.sum().backward()
    torch.testing.assert_close(x.grad.double(), kept.double() / (1 - p), rtol=1e-6, atol=0)


def speed(n: int, p: float) -> None:
    x = torch.randn(n)
    ours = triton.testing.do_bench(lambda: dropout(x, p, 1), return_mode="min")
    theirs = triton.testing.do_bench(lambda: torch.nn.functional.dropout(x, p),
                                     return_mode="min")
    print(f"{n:12} {ours:10.3f} {theirs:10.3f} {theirs / ours:14.2f}")


def main() -> None:
    check()
    p, x = 0.3, torch.randn(100_003)
    shares = [float((dropout(x, q, 5) == 0).double().mean()) for q in (0.0, 0.5, 0.9)]
    print("asked to drop 0, 0.5, 0.9; dropped", ", ".join(f"{s:.3f}" for s in shares))

    print(f"{'elements':>12} {'triton ms':>10} {'torch ms':>10} {'times as fast':>14}")
    for n in (2**16, 2**20, 2**23):
        speed(n, p)


if __name__ == "__main__":
    main()
