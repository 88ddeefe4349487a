"""GELU in both of its forms, forward and backward, with functions from libdevice.

    python examples/triton/gelu.py
"""

from functools import partial

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

BLOCK = 4096


@triton.jit
def inner_tanh(x):
    return libdevice.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))


@triton.jit
def gelu_kernel(inp, out, n, TANH: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(inp + at, mask=at < n).to(tl.float32)
    if TANH:
        part = inner_tanh(x)
    else:
        part = tl.erf(x * 0.7071067811865476)
    tl.store(out + at, 0.5 * x * (1 + part), mask=at < n)


@triton.jit
def gelu_backward_kernel(inp, grad, out, n, TANH: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(inp + at, mask=at < n).to(tl.float32)
    if TANH:
        part = inner_tanh(x)
        inner = 0.7978845608028654 * (1 + 3 * 0.044715 * x * x)
        slope = 0.5 * (1 + part) + 0.5 * x * (1 - part * part) * inner
    else:
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        slope = 0.5 * (1 + tl.erf(x * 0.7071067811865476)) + x * density
    g = tl.load(grad + at, mask=at < n).to(tl.float32)
    tl.store(out + at, slope * g, mask=at < n)


def forward(x: torch.Tensor, tanh: bool) -> torch.Tensor:
    out, n = torch.empty_like(x), x.numel()
    gelu_kernel[(triton.cdiv(n, BLOCK),)](x, out, n, TANH=tanh, BLOCK=BLOCK)
    return out


class Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tanh):
        ctx.save_for_backward(x)
        ctx.tanh = tanh
        return forward(x, tanh)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        out, n = torch.empty_like(x), x.numel()
        gelu_backward_kernel[(triton.cdiv(n, BLOCK),)](x, grad.contiguous(), out, n,
                                                       TANH=ctx.tanh, BLOCK=BLOCK)
        return out, None


def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """x times the probability that a normal variable is below x; `tanh` approximates it."""
    x, tanh = x.contiguous(), approximate == "tanh"
    if torch.is_grad_enabled() and x.requires_grad:
        return Gelu.apply(x, tanh)
    return forward(x, tanh)  # autograd's own bookkeeping takes longer than the launch


def formula(x: torch.Tensor) -> torch.Tensor:
    """The same as a row of torch's operators, each of which goes through memory."""
    return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))


def check() -> None:
    torch.manual_seed(0)
    theirs = torch.nn.functional.gelu
    for approximate in ("none", "tanh"):
        for n in (98432, 1000, 1):
            x = (3 * torch.randn(n)).requires_grad_()
            wide = x.detach().double().requires_grad_()
            grad = torch.randn(n)
            gelu(x, approximate).backward(grad)
            wanted = theirs(wide, approximate=approximate)
            wanted.backward(grad.double())
            torch.testing.assert_close(gelu(x, approximate).double(), wanted,
                                       rtol=1e-5, atol=1e-6)
            # 1 - tanh**2 loses digits where tanh is near one, as in float32 it must.
            torch.testing.assert_close(x.grad.double(), wide.grad, rtol=1e-5, atol=5e-6)


def main() -> None:
    check()
    theirs = torch.nn.functional.gelu
    x = torch.randn(2**21)
    print(f"{x.numel()} elements")
    print(f"{'form':>8} {'against':>12} {'triton ms':>10} {'torch ms':>10} {'times as fast':>14}")
    rows = (("none", "F.gelu", lambda: theirs(x)),
            ("tanh", "F.gelu", lambda: theirs(x, approximate="tanh")),
            ("tanh", "its formula", lambda: formula(x)))
    for form, name, other in rows:
        ours = triton.testing.do_bench(partial(gelu, x, form), return_mode="min")
        torchs = triton.testing.do_bench(other, return_mode="min")
        print(f"{form:>8} {name:>12} {ours:10.3f} {torchs:10.3f} {torchs / ours:14.2f}")


if __name__ == "__main__":
    main()
