"""Layer normalisation, forward and backward, as a `torch.autograd.Function`.

The gradients of weight and bias are sums over all rows. Each program adds up the rows of its own
stripe; a second kernel adds the stripes. So no two programs write to one place.

    python examples/triton/layer_norm.py
"""

import torch
import triton
import triton.language as tl


@triton.jit
def forward_kernel(x, weight, bias, out, means, scales, stride, columns, eps,
                   BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    values = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(values, axis=0) / columns
    centered = tl.where(inside, values - mean, 0.0)
    scale = 1 / tl.sqrt(tl.sum(centered * centered, axis=0) / columns + eps)
    tl.store(means + row, mean)
    tl.store(scales + row, scale)
    w = tl.load(weight + at, mask=inside).to(tl.float32)
    b = tl.load(bias + at, mask=inside).to(tl.float32)
    tl.store(out + row * stride + at, centered * scale * w + b, mask=inside)


@triton.jit
def backward_kernel(x, weight, grad, means, scales, grad_x, weight_parts, bias_parts,
                    stride, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    part = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    weight_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    bias_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(part * ROWS, min(part * ROWS + ROWS, rows)):
        values = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + row * stride + at, mask=inside, other=0.0).to(tl.float32)
        mean, scale = tl.load(means + row), tl.load(scales + row)
        normal = tl.where(inside, (values - mean) * scale, 0.0)
        weighted = g * w
        along = tl.sum(normal * weighted, axis=0) / columns
        level = tl.sum(weighted, axis=0) / columns
        dx = (weighted - (normal * along + level)) * scale
        tl.store(grad_x + row * stride + at, dx, mask=inside)
        weight_sum += g * normal
        bias_sum += g
    tl.store(weight_parts + part * columns + at, weight_sum, mask=inside)
    tl.store(bias_parts + part * columns + at, bias_sum, mask=inside)


@triton.jit
def add_parts_kernel(weight_parts, bias_parts, grad_weight, grad_bias, parts, columns,
                     PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.arange(0, PARTS)
    where = part[:, None] * columns + at[None, :]
    inside = (part[:, None] < parts) & (at[None, :] < columns)
    weight_sum = tl.sum(tl.load(weight_parts + where, mask=inside, other=0.0), axis=0)
    bias_sum = tl.sum(tl.load(bias_parts + where, mask=inside, other=0.0), axis=0)
    tl.store(grad_weight + at, weight_sum, mask=at < columns)
    tl.store(grad_bias + at, bias_sum, mask=at < columns)


def forward(flat: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
            ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalised rows, the means of the rows, and the inverses of their deviations."""
    rows, columns = flat.shape
    out = torch.empty_like(flat)
    means = torch.empty(rows, dtype=torch.float32, device=flat.device)
    scales = torch.empty_like(means)
    forward_kernel[(rows,)](flat, weight, bias, out, means, scales, columns, columns, eps,
                            BLOCK=triton.next_power_of_2(columns))
    return out, means, scales


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        flat = x.view(-1, x.shape[-1])
        out, means, scales = forward(flat, weight, bias, eps)
        ctx.save_for_backward(flat, weight, means, scales)
        return out.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        flat, weight, means, scales = ctx.saved_tensors
        rows, columns = flat.shape
        stripe = max(1, triton.cdiv(rows, 64))
        parts = triton.cdiv(rows, stripe)
        weight_parts = torch.empty((parts, columns), dtype=torch.float32, device=flat.device)
        bias_parts = torch.empty_like(weight_parts)
        grad_x, grad_weight = torch.empty_like(flat), torch.empty_like(weight)
        grad_bias = torch.empty_like(weight)
        backward_kernel[(parts,)](flat, weight, grad.contiguous().view_as(flat), means, scales,
                                  grad_x, weight_parts, bias_parts, columns, rows, columns,
                                  ROWS=stripe, BLOCK=triton.next_power_of_2(columns))
        add_parts_kernel[(triton.cdiv(columns, 128),)](
            weight_parts, bias_parts, grad_weight, grad_bias, parts, columns,
            PARTS=triton.next_power_of_2(parts), BLOCK=128)
        return grad_x.view_as(grad), grad_weight, grad_bias, None


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor,
               eps: float = 1e-5) -> torch.Tensor:
    """Each row less its mean, over its deviation, times weight plus bias."""
    x = x.contiguous()
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, weight, bias)):
        return LayerNorm.apply(x, weight, bias, eps)
    return forward(x.view(-1, x.shape[-1]), weight, bias, eps)[0].view_as(x)


def compare(rows: int, columns: int) -> None:
    x = torch.randn(rows, columns, requires_grad=True)
    weight, bias = (torch.rand(columns, requires_grad=True) for _ in range(2))
    grad = torch.randn(rows, columns)
    layer_norm(x, weight, bias).backward(grad)
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    wanted = torch.nn.functional.layer_norm(wide[0], (columns,), wide[1], wide[2])
    wanted.backward(grad.double())
    torch.testing.assert_close(layer_norm(x, weight, bias).double(), wanted, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip((x, weight, bias), wide, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-4)


def check() -> None:
    torch.manual_seed(0)
    for rows, columns in ((1000, 512), (151, 781), (3, 5)):
        compare(rows, columns)


def speed(rows: int, columns: int) -> None:
    x = torch.randn(rows, columns, requires_grad=True)
    weight, bias = (torch.rand(columns, requires_grad=True) for _ in range(2))
    grad = torch.randn(rows, columns)

    def times(function) -> list[float]:
        out = function()
        return [triton.testing.do_bench(function, return_mode="min"),
                triton.testing.do_bench(lambda: torch.autograd.grad(
                    out, (x, weight, bias), grad, retain_graph=True), return_mode="min")]

    ours = times(lambda: layer_norm(x, weight, bias))
    theirs = times(lambda: torch.nn.functional.layer_norm(x, (columns,), weight, bias))
    for what, our, other in zip(("forward", "backward"), ours, theirs, strict=True):
        print(f"{what:>9} {rows:6} {columns:8} {our:10.3f} {other:10.3f} {other / our:14.2f}")


def main() -> None:
    check()
    print(f"{'what':>9} {'rows':>6} {'columns':>8} {'triton ms':>10} {'torch ms':>10} "
          f"{'times as fast':>14}")
    for rows, columns in ((4096, 768), (1024, 4096)):
        speed(rows, columns)


if __name__ == "__main__":
    main()
