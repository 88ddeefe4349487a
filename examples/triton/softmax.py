"""Softmax over rows, fused: each row is read once and written once.

    python examples/triton/softmax.py
"""

import torch
import triton
import triton.language as tl


@triton.jit
def softmax_kernel(inp, out, inp_stride, out_stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    x = tl.load(inp + row * inp_stride + at, mask=inside, other=-float("inf"))
    weights = tl.exp(x - tl.max(x, axis=0))
    tl.store(out + row * out_stride + at, weights / tl.sum(weights, axis=0), mask=inside)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """The softmax of each row of a matrix whose rows are contiguous."""
    out = torch.empty_like(x)
    rows, columns = x.shape
    softmax_kernel[(rows,)](x, out, x.stride(0), out.stride(0), columns,
                            BLOCK=triton.next_power_of_2(columns))
    return out


def check() -> None:
    torch.manual_seed(0)
    for rows, columns in ((1823, 1000), (7, 781), (1, 1)):
        x = 10 * torch.randn(rows, columns)
        torch.testing.assert_close(softmax(x).double(), torch.softmax(x.double(), 1),
                                   rtol=1e-5, atol=1e-7)


def speed(rows: int, columns: int) -> None:
    x = torch.randn(rows, columns)
    ours = triton.testing.do_bench(lambda: softmax(x), return_mode="min")
    theirs = triton.testing.do_bench(lambda: torch.softmax(x, 1), return_mode="min")
    print(f"{rows:6} {columns:8} {ours:10.3f} {theirs:10.3f} {theirs / ours:14.2f}")


def main() -> None:
    check()
    print(f"{'rows':>6} {'columns':>8} {'triton ms':>10} {'torch ms':>10} {'times as fast':>14}")
    for rows, columns in ((4096, 256), (4096, 1000), (1024, 8192)):
        speed(rows, columns)


if __name__ == "__main__":
    main()
