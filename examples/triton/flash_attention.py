"""Attention without the matrix of scores: online softmax over blocks of keys.

Each program holds some queries, walks over the keys, and keeps a running maximum and sum for each
row ("FlashAttention", Dao et al.).

    python examples/triton/flash_attention.py
"""

import math

import torch
import triton
import triton.language as tl


@triton.jit
def attention_kernel(q, k, v, out, length, heads, q_batch, q_head, q_row, k_batch, k_head, k_row,
                     v_batch, v_head, v_row, out_batch, out_head, out_row, scale,
                     CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
                     BLOCK_N: tl.constexpr):
    first = tl.program_id(0) * BLOCK_M
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    rows, keys, depth = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, D)
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    out += batch * out_batch + head * out_head

    query = tl.load(q + rows[:, None] * q_row + depth[None, :], mask=rows[:, None] < length,
                    other=0.0)
    highest = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    weight_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    total = tl.zeros((BLOCK_M, D), dtype=tl.float32)
    # exp(x) is exp2(x log2 e): the factor goes into the scale.
    scale *= 1.4426950408889634
    end = min(first + BLOCK_M, length) if CAUSAL else length
    for start in range(0, end, BLOCK_N):
        at = start + keys
        key = tl.load(k + at[None, :] * k_row + depth[:, None], mask=at[None, :] < length,
                      other=0.0)
        scores = tl.dot(query, key) * scale
        seen = at[None, :] < length
        if CAUSAL:
            seen &= rows[:, None] >= at[None, :]
        scores = tl.where(seen, scores, -float("inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_highest[:, None])
        fade = tl.exp2(highest - new_highest)
        weight_sum = weight_sum * fade + tl.sum(weights, axis=1)
        value = tl.load(v + at[:, None] * v_row + depth[None, :], mask=at[:, None] < length,
                        other=0.0)
        total = tl.dot(weights.to(value.dtype), value, total * fade[:, None])
        highest = new_highest
    total /= weight_sum[:, None]
    tl.store(out + rows[:, None] * out_row + depth[None, :], total.to(out.dtype.element_ty),
             mask=rows[:, None] < length)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False
              ) -> torch.Tensor:
    """Attention of tensors [batch, heads, length, depth]; the depth is a power of two."""
    out = torch.empty_like(q)
    batch, heads, length, depth = q.shape
    block = 64
    attention_kernel[(triton.cdiv(length, block), batch * heads)](
        q, k, v, out, length, heads, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        *out.stride()[:3], 1 / math.sqrt(depth), CAUSAL=causal, D=depth, BLOCK_M=block,
        BLOCK_N=block)
    return out


def check() -> None:
    torch.manual_seed(0)
    theirs = torch.nn.functional.scaled_dot_product_attention
    for length, causal in ((333, True), (200, False), (64, False)):
        q, k, v = (torch.randn(2, 3, length, 32) for _ in range(3))
        wanted = theirs(q.double(), k.double(), v.double(), is_causal=causal)
        torch.testing.assert_close(attention(q, k, v, causal).double(), wanted,
                                   rtol=1e-4, atol=1e-5)


def speed(length: int, causal: bool) -> None:
    q, k, v = (torch.randn(1, 8, length, 64) for _ in range(3))
    theirs = torch.nn.functional.scaled_dot_product_attention
    ours = triton.testing.do_bench(lambda: attention(q, k, v, causal), return_mode="min")
    other = triton.testing.do_bench(lambda: theirs(q, k, v, is_causal=causal), return_mode="min")
    print(f"{length:7} {causal!s:>7} {ours:10.3f} {other:10.3f} {other / ours:14.2f}")


def main() -> None:
    check()
    print(f"{'length':>7} {'causal':>7} {'triton ms':>10} {'torch ms':>10} {'times as fast':>14}")
    for length, causal in ((512, False), (512, True), (2048, True)):
        speed(length, causal)


if __name__ == "__main__":
    main()
