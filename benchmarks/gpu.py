"""Pointwise, row and reduction kernels on an NVIDIA GPU, beside torch, its copies and Inductor.

    python benchmarks/gpu.py [--inductor] [--only softmax] [--rows 8192x4096]

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
    options = parser.parse_args()
    wanted = set(filter(None, options.only.split(",")))
    # A second size would make a kernel for any; the table is about kernels for the sizes.
    tz.knobs.dynamic = "never"
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
