"""Kernels on an NVIDIA GPU, beside torch's, its copies, cuBLAS, cuDNN and Inductor.

    python benchmarks/gpu.py [--inductor] [--only softmax] [--rows 8192x4096]
    python benchmarks/gpu.py --products --attention

Products with bias and GELU are compared with cuBLAS alone, attention with cuDNN's and
FlashAttention-2, both in turns: a GPU that gets warm is slower for both.

Rates are bytes read and written in TB/s, medians of `triton.testing.do_bench`; `copy_` of the same
bytes is the limit (of a sum, the rate at which torch reads: `x.sum()`). The time of the host is
that of a call of a small operator which nothing waits for.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from triton.testing import do_bench

import terrazzo as tz

SHAPES = [(8192, 4096), (4096, 16384), (65536, 1024), (2048, 32768), (262144, 64)]
SUMS = [(8192, 4096), (64, 1 << 20), (1 << 26,)]

# name: terrazzo's, torch's, and how often the bytes of x are moved
ROWS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "gelu": (tz.gelu, F.gelu),
    "sin": (tz.jit(lambda x: tz.sin((x + 1) * 2)), lambda x: torch.sin((x + 1) * 2)),
    "softmax": (tz.softmax, lambda x: F.softmax(x, -1)),
    "layer_norm": (tz.layer_norm, lambda x: F.layer_norm(x, x.shape[-1:])),
    "rms_norm": (tz.rms_norm, lambda x: F.rms_norm(x, x.shape[-1:])),
}
REDUCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sum": (tz.sum, torch.sum),
    "sum rows": (tz.jit(lambda x: tz.sum(x, axis=-1)), lambda x: x.sum(-1)),
    "sum columns": (tz.jit(lambda x: tz.sum(x, axis=0)), lambda x: x.sum(0)),
}


def rate(run: Callable[[], Any], size: float) -> float:
    """TB/s of something that moves so many bytes."""
    return size / do_bench(run, warmup=10, rep=40, return_mode="median") / 1e9


def host_time(function: Callable[..., Any], *args: Any) -> float:
    """Microseconds of the host for a call: the least of several hundred without waiting."""
    best = math.inf
    for _ in range(5):
        function(*args)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            function(*args)
        best = min(best, (time.perf_counter() - start) / 200)
        torch.cuda.synchronize()
    return best * 1e6


def compared(name: str, x: Any, pair: tuple[Callable[..., Any], Callable[..., Any]], size: float,
             limit: float, inductor: bool) -> tuple[float, ...]:
    """One line of the table: ours, eager and Inductor, each as a part of the limit."""
    ours, eager = pair
    torch.testing.assert_close(ours(x).double(), eager(x.double()), rtol=3e-2, atol=3e-2 * max(
        1.0, float(eager(x.double()).abs().max())))
    found = [rate(lambda: ours(x), size), rate(lambda: eager(x), size)]
    if inductor:
        torch._dynamo.reset()
        compiled = torch.compile(eager, dynamic=False)
        found.append(rate(lambda: compiled(x), size))
    kind = str(x.dtype).removeprefix("torch.")
    shape = "x".join(map(str, x.shape))
    parts = "  ".join(f"{r:5.2f} ({r / limit:4.0%})" for r in found)
    print(f"{name:12} {shape:>12} {kind:9} limit {limit:5.2f}  {parts}", flush=True)
    return tuple(found)


PRODUCTS = [(4096, 4096, 4096), (8192, 8192, 8192), (4096, 14336, 4096), (2048, 2048, 2048),
            (1024, 1024, 1024), (128, 14336, 4096), (64, 4096, 4096), (16, 4096, 4096),
            (1, 4096, 4096), (1, 14336, 4096)]
# batch, heads of q, heads of k and v, queries, keys, size: 2048 wide, and decoding
ATTENTION = [(4, 32, 32, 4096, 4096, 64), (1, 32, 32, 16384, 16384, 64),
             (4, 16, 16, 4096, 4096, 128), (1, 16, 16, 16384, 16384, 128),
             (8, 16, 16, 1, 16384, 128), (16, 32, 8, 1, 16384, 128)]


def in_turns(*runs: Callable[[], Any]) -> list[float]:
    """Median milliseconds of each, one after the other, with caches emptied in between."""
    for run in runs:
        run()
    torch.cuda.synchronize()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for run in runs:
        run()
    last.record()
    last.synchronize()
    turns = max(5, min(100, int(40 / max(first.elapsed_time(last), 0.01))))
    flushed = torch.empty(64 << 20, dtype=torch.int32, device="cuda")
    marks: list[list[tuple[Any, Any]]] = [[] for _ in runs]
    for _ in range(turns):
        for run, own in zip(runs, marks):
            flushed.zero_()
            pair = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
            pair[0].record()
            run()
            pair[1].record()
            own.append((pair[0], pair[1]))
    torch.cuda.synchronize()
    return [sorted(a.elapsed_time(b) for a, b in own)[turns // 2] for own in marks]


def products(kind: torch.dtype) -> None:
    """Products with bias and GELU fused, beside cuBLAS's product alone."""
    ours = {False: tz.jit(lambda x, w, b: tz.gelu(x @ w + b)),
            True: tz.jit(lambda x, w, b: tz.gelu(x @ w.T + b))}
    for m, n, k in PRODUCTS:
        for turned in (False, True):
            x = torch.randn(m, k, device="cuda", dtype=kind)
            w = torch.randn(*((n, k) if turned else (k, n)), device="cuda", dtype=kind) / k**0.5
            b = torch.randn(n, device="cuda", dtype=kind)
            matrix = w.T if turned else w
            want = F.gelu(x.double() @ matrix.double() + b.double())
            torch.testing.assert_close(ours[turned](x, w, b).double(), want, rtol=2e-2, atol=2e-2)
            mine, theirs = in_turns(lambda: ours[turned](x, w, b),  # noqa: B023
                                    lambda: x @ matrix)  # noqa: B023
            rates = "  ".join(f"{2 * m * n * k / t / 1e9:4.0f}" for t in (mine, theirs))
            name = "x @ w.T" if turned else "x @ w"
            print(f"{name:8} {m:5} x {n:5} x {k:5} {str(kind)[6:]:9} {mine * 1e3:7.1f} us  "
                  f"TFLOP/s ours, cuBLAS: {rates}  ({theirs / mine:.2f})", flush=True)


def attention(kind: torch.dtype) -> None:
    """Attention, beside cuDNN's and FlashAttention-2."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def theirs(backend: Any, *args: Any, **options: Any) -> Callable[[], Any]:
        def run() -> Any:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*args, **options)

        return run

    for batch, heads, shared, queries, keys, size in ATTENTION:
        for causal in (False, True)[:1 if queries == 1 else 2]:
            q = torch.randn(batch, heads, queries, size, device="cuda", dtype=kind)
            k, v = (torch.randn(batch, shared, keys, size, device="cuda", dtype=kind)
                    for _ in range(2))
            options = {"is_causal": causal, "enable_gqa": heads != shared}
            ours = tz.jit(lambda q, k, v: tz.scaled_dot_product_attention(
                q, k, v, causal=causal))  # noqa: B023
            torch.testing.assert_close(ours(q, k, v), F.scaled_dot_product_attention(
                q, k, v, **options), rtol=3e-2, atol=3e-2)
            times = in_turns(lambda: ours(q, k, v),  # noqa: B023
                             theirs(SDPBackend.CUDNN_ATTENTION, q, k, v, **options),
                             theirs(SDPBackend.FLASH_ATTENTION, q, k, v, **options))
            flops = 4 * batch * heads * queries * keys * size * (0.5 if causal else 1)
            amount = 2 * k.nbytes if queries == 1 else flops / 1e3
            unit = "TB/s" if queries == 1 else "TFLOP/s"
            rates = "  ".join(f"{amount / t / 1e9:6.2f}" if queries == 1 else
                              f"{flops / t / 1e9:4.0f}" for t in times)
            print(f"attention {batch}x{heads}/{shared}x{queries}x{keys} d{size} "
                  f"{'causal' if causal else 'full':6} {str(kind)[6:]:9} {unit} ours, cuDNN, "
                  f"FlashAttention-2: {rates}  ({times[1] / times[0]:.2f}, "
                  f"{times[2] / times[0]:.2f})", flush=True)


def means(lines: list[tuple[float, ...]]) -> None:
    """How much faster ours is than the others, over all lines."""
    for i, other in enumerate(("eager", "Inductor")[:len(lines[0]) - 1]):
        ratios = [math.log(line[0] / line[i + 1]) for line in lines]
        slowest = math.exp(min(ratios))
        print(f"against {other}: {math.exp(sum(ratios) / len(ratios)):.2f} times as fast "
              f"(geometric mean of {len(ratios)}; the least {slowest:.2f})")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inductor", action="store_true", help="compare with torch.compile too")
    parser.add_argument("--only", default="", help="names of operators, with commas")
    parser.add_argument("--rows", default="", help="one shape: 8192x4096")
    parser.add_argument("--products", action="store_true", help="matrix products instead")
    parser.add_argument("--attention", action="store_true", help="attention instead")
    options = parser.parse_args()
    wanted = set(filter(None, options.only.split(",")))
    # A second size would make a kernel for any; the table is about kernels for the sizes.
    tz.knobs.dynamic = "never"
    if options.products or options.attention:
        print(tz.chips()["cuda"], torch.__version__)
        if options.products:
            products(torch.bfloat16)
        if options.attention:
            attention(torch.bfloat16)
        return
    one = tuple(int(n) for n in options.rows.split("x")) if options.rows else None
    print(tz.chips()["cuda"], torch.__version__)
    print("operator     shape        type      limit        ours         eager        Inductor")
    lines = []
    for kind in (torch.float32, torch.bfloat16):
        for shape in [one] if one else SHAPES:
            x = torch.randn(shape, device="cuda", dtype=kind)
            y, size = torch.empty_like(x), 2.0 * x.nbytes
            limit = rate(lambda y=y, x=x: y.copy_(x), size)
            lines += [compared(n, x, pair, size, limit, options.inductor)
                      for n, pair in ROWS.items() if not wanted or n in wanted]
            del x, y
        for shape in [one] if one else SUMS:
            x = torch.randn(shape, device="cuda", dtype=kind)
            y = torch.empty_like(x)
            limit = rate(lambda y=y, x=x: y.copy_(x), 2.0 * x.nbytes)
            lines += [compared(n, x, pair, float(x.nbytes), limit, options.inductor)
                      for n, pair in REDUCTIONS.items()
                      if (not wanted or n in wanted) and (len(shape) > 1 or n == "sum")]
            del x, y
    means(lines)
    x = torch.randn(64, 64, device="cuda")
    for name in ("gelu", "softmax", "sum"):
        ours, eager = {**ROWS, **REDUCTIONS}[name]
        print(f"host time of {name} 64x64: {host_time(ours, x):.1f} us, "
              f"eager {host_time(eager, x):.1f} us")


if __name__ == "__main__":
    main()
