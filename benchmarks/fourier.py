"""Times Fourier transforms beside torch.fft, alternating, the best of several rounds of each.

    python benchmarks/fourier.py                              # 1 thread, lengths 64 to 65536
    python benchmarks/fourier.py --threads 2 --lengths 1000,1024 --batches 1,16,64

Torch's threads may still spin while ours run: with several threads, trust an idle machine only.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

import terrazzo as tz

NAMES = ("fft", "ifft", "rfft", "irfft")
ROUNDS = 12


def best_times(functions: list[Callable[[], Any]], repeats: int) -> list[float]:
    """Seconds a call, the least over rounds in which the functions take turns."""
    best = [float("inf")] * len(functions)
    for function in functions:
        function()
    for _ in range(ROUNDS):
        for i, function in enumerate(functions):
            start = time.perf_counter()
            for _ in range(repeats):
                function()
            best[i] = min(best[i], (time.perf_counter() - start) / repeats)
    return best


def row(length: int, batch: int) -> str:
    """All transforms of so many lines: microseconds of ours, of torch, and the ratio."""
    real = torch.randn(batch, length)
    given = {"rfft": real, "irfft": torch.fft.rfft(real)}
    cells = []
    for name in NAMES:
        x = given.get(name, torch.complex(real, real.flip(-1)))
        own, other = getattr(tz, name), getattr(torch.fft, name)
        repeats = max(1, min(100, 300_000 // (length * batch)))
        ours, theirs = best_times([lambda f=f, x=x: f(x) for f in (own, other)], repeats)
        cells.append(f"{ours * 1e6:9.1f} {theirs * 1e6:9.1f} {theirs / ours:5.2f}")
    return f"{length:6} {batch:5}  " + "  ".join(cells)


def numbers(text: str) -> list[int]:
    """Whole numbers between commas."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Print one row a length and batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lengths", type=numbers,
                        default=[64, 100, 256, 1000, 1024, 4096, 16384, 65536])
    parser.add_argument("--batches", type=numbers, default=[1, 16, 64])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tz.knobs.threads = options.threads
    print("length batch  " + "  ".join(f"{name:>9} {'torch':>9} ratio" for name in NAMES))
    for length in options.lengths:
        for batch in options.batches:
            print(row(length, batch), flush=True)


if __name__ == "__main__":
    main()
