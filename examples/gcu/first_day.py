"""A chip that does not exist yet, from its C library to a trained network.

    pip install terrazzo[gcu]
    python examples/gcu/first_day.py

The first run builds two libraries with the system's compilers, once: a minute on two cores.
"""

from __future__ import annotations

import ctypes
import os

os.environ.setdefault("TRITON_DEFAULT_BACKEND", "gcu")  # which driver of Triton is the active one

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import nn

import terrazzo as tz


# ---------------------------------------------------------------- the C library
def ask_the_library() -> None:
    """What a vendor's library answers, by ctypes."""
    lib = ctypes.CDLL(tz.gcu.library_path())
    lib.gcuGetErrorString.restype = lib.gcuGetLastErrorMessage.restype = ctypes.c_char_p
    count, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    assert lib.gcuGetDeviceCount(ctypes.byref(count)) == 0
    assert lib.gcuGetDeviceCapability(ctypes.byref(major), ctypes.byref(minor), 0) == 0
    memory = ctypes.c_void_p()
    assert lib.gcuMalloc(ctypes.byref(memory), ctypes.c_size_t(1 << 20)) == 0
    assert lib.gcuFree(memory) == 0
    assert lib.gcuFree(memory) != 0  # an error, and no crash
    print(f"{count.value} devices of capability {major.value}.{minor.value}; freeing twice: "
          f"{lib.gcuGetLastErrorMessage().decode()}")


# ---------------------------------------------------------------- a Triton kernel
@triton.jit
def matmul_kernel(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    tiles = tl.cdiv(N, BN)
    row = tl.program_id(0) // tiles * BM + tl.arange(0, BM)
    column = tl.program_id(0) % tiles * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        left = tl.load(a + row[:, None] * K + k[None, :],
                       mask=(row[:, None] < M) & (k[None, :] < K), other=0)
        right = tl.load(b + k[:, None] * N + column[None, :],
                        mask=(k[:, None] < K) & (column[None, :] < N), other=0)
        total = tl.dot(left, right, total)
    tl.store(c + row[:, None] * N + column[None, :], total,
             mask=(row[:, None] < M) & (column[None, :] < N))


def multiply(device: str) -> None:
    """57 programs: more than 48 and no multiple of it, so the launcher folds them."""
    torch.manual_seed(0)
    M, N, K = 64 * 19, 64 * 3, 200
    a, b = torch.randn(M, K), torch.randn(K, N)
    c = torch.empty(M, N, device=device)
    grid = (triton.cdiv(M, 64) * triton.cdiv(N, 64),)
    with tz.gcu.trace() as trace:
        matmul_kernel[grid](a.to(device), b.to(device), c, M, N, K, BM=64, BN=64, BK=64,
                            num_warps=4)
        worst = float((c.cpu() - a @ b).abs().max())
    print(f"{grid[0]} programs, largest error {worst:.1e}")
    print(trace)
    assert worst < 1e-4


# ---------------------------------------------------------------- training
class ConvNet(nn.Module):
    """Two convolutions with batch norm and pools, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(16 * 7 * 7, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).flatten(1))


def train(device: str, epochs: int = 10) -> list[float]:
    """Losses of Adam on a few made-up pictures, whose class is where they are bright."""
    torch.manual_seed(0)
    x, y = torch.rand(32, 1, 28, 28), torch.arange(32) % 10
    for picture, kind in zip(x, y, strict=True):
        picture[0, int(kind) * 2:int(kind) * 2 + 3] += 1
    model = ConvNet().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(epochs):
        for part in range(0, 32, 16):
            loss = F.cross_entropy(model(x[part:part + 16].to(device)),
                                   y[part:part + 16].to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def main() -> None:
    ask_the_library()
    multiply("gcu")
    here, there = train("gcu"), train("cpu")
    apart = max(abs(a - b) for a, b in zip(here, there, strict=True))
    print(f"loss {here[0]:.3f} to {here[-1]:.3f}; from the CPU's by {apart:.1e} at most")
    fallbacks = torch.gcu.fallbacks()
    print(f"operators that ran on the CPU: {', '.join(sorted(fallbacks)) or 'none'}")
    assert apart < 1e-3 and here[-1] < here[0]


if __name__ == "__main__":
    main()
